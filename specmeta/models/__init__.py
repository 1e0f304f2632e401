"""Find and load a model and its draft head, and refuse what doesn't fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from specmeta._environment import find_device, os_reason
from specmeta.models import fetch
from specmeta.models.eagle3 import Eagle3Head
from specmeta.serving.attention import ATTENTION_NAME

__all__ = ["BUILT_IN", "Model", "ModelError", "check_model", "load", "resolve"]

BUILT_IN = ("austen", "smollm2")
BUILT_IN_FOLDER = Path(__file__).parent
# A model folder may bring its draft head along, in this subfolder.
DRAFT_FOLDER = "draft"
# The frequencies of the other kinds depend on how long the text has become, which the host would
# have to read in every step.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class ModelError(ValueError):
    """A model or head that can't be used; the message says why."""


@dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes
    ----------
    name : str
        What `load` was asked for.
    target : LlamaForCausalLM
        The model, with paged attention.
    head : Eagle3Head or None
        Its draft head, likewise.
    tokenizer : PreTrainedTokenizerBase
        Its tokenizer.
    end_ids : frozenset of int
        Token ids that end a text.
    """

    name: str
    target: LlamaForCausalLM
    head: Eagle3Head | None
    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]

    @property
    def is_chat(self) -> bool:
        """Whether the tokenizer has a chat template, so that the model answers."""
        return bool(self.tokenizer.chat_template)


def resolve(name: str, *, dtype: torch.dtype = torch.float32) -> Path:
    """Return the folder of the model `name`: a built-in one, or a directory.

    Parameters
    ----------
    name : str
        ``"austen"``, ``"smollm2"``, which is downloaded and converted the first time, or a
        directory.
    dtype : torch.dtype
        What the model is going to be loaded as.

    Raises
    ------
    ModelError
        It's neither, or can't be downloaded.
    """
    with _reading(name):
        if name == "smollm2":
            return fetch.smollm2(dtype)
        if name in BUILT_IN:
            return BUILT_IN_FOLDER / name
        if Path(name).is_dir():
            return Path(name)
    raise ModelError(f"no model {name!r}: expected a directory or one of: {', '.join(BUILT_IN)}")


def load(
    name: str,
    draft: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Model:
    """Load a Llama, its tokenizer and its EAGLE-3 head from folders in the Hugging Face layout.

    Weights are read from safetensors alone: nothing is unpickled, no code in a folder is run, and
    nothing is downloaded but ``"smollm2"``, once.

    Parameters
    ----------
    name : str
        As in `resolve`.
    draft : str, optional
        Directory of the head. Default: that of a built-in model, or the model folder's ``draft``,
        where there is one.
    dtype : torch.dtype
        Type of weights, activations and caches: a floating one.
    device : torch.device or str
        Where to run: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.

    Returns
    -------
    Model

    Raises
    ------
    ModelError
        Something is missing, can't be used here, or model and head don't fit each other.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(f"dtype: expected a torch.dtype of floating point, got {dtype!r}")
    try:
        find_device(str(device))
    except ValueError as error:
        raise ModelError(str(error)) from error
    folder = resolve(name, dtype=dtype)
    target = _load_target(folder, dtype=dtype, device=device)
    vocab_size = target.config.vocab_size
    with _reading(f"{folder}: no tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise ModelError(
            f"{folder}: the tokenizer doesn't fit the model: expected ids below {vocab_size}, "
            f"got {largest}"
        )
    # The weights of a built-in model may come from elsewhere; its head comes with the package.
    own = (BUILT_IN_FOLDER / name if name in BUILT_IN else folder) / DRAFT_FOLDER
    head_folder = own if draft is None else Path(draft)
    head = None
    if draft is not None or own.is_dir():
        with _reading(f"draft head: {head_folder}"):
            head = Eagle3Head.from_pretrained(
                head_folder,
                dtype=dtype,
                device=device,
                embed_tokens=target.model.embed_tokens.weight,
                attn_implementation=ATTENTION_NAME,
            )
        _check_fit(target.config, head)
    end_ids = _read_end_ids(folder, target)
    # Whatever else the folder suggests (sampling, penalties) isn't greedy decoding.
    target.generation_config = GenerationConfig(
        eos_token_id=end_ids or None, pad_token_id=min(end_ids, default=0)
    )
    return Model(name, target, head, tokenizer, frozenset(end_ids))


def check_model(name: str, model: object) -> None:
    """Raise ModelError where an argument isn't a `Model`."""
    if not isinstance(model, Model):
        raise ModelError(
            f"{name}: expected what specmeta.models.load returns, got {type(model).__name__}"
        )


def _check_fit(config: LlamaConfig, head: Eagle3Head) -> None:
    """Raise ModelError where a head doesn't draft for a model of this configuration."""

    def expect(what: str, expected: object, got: object) -> None:
        if got != expected:
            raise ModelError(
                f"the draft head doesn't fit the model: {what}: expected {expected}, got {got}"
            )

    layer = head.config.layer
    expect("hidden size of the target", config.hidden_size, head.config.target_hidden_size)
    expect("vocabulary size", config.vocab_size, layer.vocab_size)
    try:
        aux_ids = head.config.resolve_aux_layer_ids(config.num_hidden_layers)
    except ValueError as error:
        raise ModelError(f"the draft head doesn't fit the model: {error}") from error
    # The state behind the last layer has been through the final norm in some engines only.
    if max(aux_ids) >= config.num_hidden_layers:
        raise ModelError(
            "the draft head doesn't fit the model: eagle_aux_hidden_state_layer_ids: expected "
            f"inputs of the model's layers 0..{config.num_hidden_layers - 1}, got {list(aux_ids)}"
        )
    drafted = torch.arange(len(head.d2t), device=head.d2t.device) + head.d2t
    if len(drafted) and not 0 <= int(drafted.min()) <= int(drafted.max()) < config.vocab_size:
        raise ModelError(
            "the draft head doesn't fit the model: d2t: expected ids of a vocabulary of "
            f"{config.vocab_size}, got {int(drafted.min())} .. {int(drafted.max())}"
        )
    _check_rope("the draft head", layer)


def _load_target(
    folder: Path, *, dtype: torch.dtype, device: torch.device | str
) -> LlamaForCausalLM:
    with _reading(f"{folder}: no config.json that can be read"):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "llama":
        raise ModelError(f"{folder}: model_type: expected 'llama', got {kind!r}")
    if not any(folder.glob("*.safetensors")):
        found = sorted(path.name for path in folder.glob("*.bin"))
        reason = f"; {found[0]} is pickled and isn't read" if found else ""
        raise ModelError(f"{folder}: no weights in safetensors{reason}")
    loaded: Any
    with _reading(folder), _no_progress_bar():
        loaded = LlamaForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        target: LlamaForCausalLM = loaded[0].to(device).eval()
    report = loaded[1]
    # transformers would go on with random weights in their place.
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            raise ModelError(f"{folder}: the weights don't fit config.json: {report[problem]}")
    _check_rope(str(folder), target.config)
    return target


def _read_end_ids(folder: Path, target: LlamaForCausalLM) -> list[int]:
    """Return the ids that end a text, of ``generation_config.json`` or else ``config.json``."""
    end = target.generation_config.eos_token_id
    # Read again: where it's broken, the model has gone on with config.json silently.
    if (folder / "generation_config.json").exists():
        with _reading(folder):
            end = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    ids = [] if end is None else end if isinstance(end, list) else [end]
    if any(type(token) is not int for token in ids):
        raise ModelError(f"{folder}: eos_token_id: expected an id or a list of ids, got {end!r}")
    return ids


def _check_rope(what: str, config: LlamaConfig) -> None:
    kind = (config.rope_parameters or {}).get("rope_type")
    if kind not in STATIC_ROPE_TYPES:
        raise ModelError(f"{what}: rope_type: expected one of {STATIC_ROPE_TYPES}, got {kind!r}")


@contextmanager
def _reading(what: object) -> Iterator[None]:
    """Turn whatever goes wrong into a `ModelError`: bad files raise errors of every type."""
    try:
        yield
    except Exception as error:
        text = os_reason(error) if isinstance(error, OSError) else str(error)
        reason = (text.strip().splitlines() or [""])[0]
        # Other messages say little without the type: that of a KeyError is the key alone.
        if not isinstance(error, OSError | ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise ModelError(f"{what}: {reason}") from error


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers' progress bars away, and leave the setting as it was."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
