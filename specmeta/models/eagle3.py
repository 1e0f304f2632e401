"""The EAGLE-3 draft head, used by training and by inference alike.

The head is one Llama decoder layer whose attention reads a token's embedding next to a hidden
state. Over a prefix, the hidden states are the target's auxiliary ones, combined by `fc`; in the
draft steps after that, they are the head's own outputs. Checkpoints follow the layout that
``speculators`` and vLLM read; they are read from and written to safetensors alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

__all__ = ["Eagle3Config", "Eagle3Head"]

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
# Variants of EAGLE-3 that place the norms elsewhere; running such weights here would go wrong
# silently.
UNSUPPORTED_FLAGS = ("norm_before_fc", "fc_norm", "norm_output")


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(item) is kind for item in value)


# Kinds of JSON values: their name, and whether a value is one.
_Kind = tuple[str, Callable[[Any], bool]]
_OBJECT: _Kind = ("an object", lambda value: isinstance(value, dict))
_STRING: _Kind = ("a string", lambda value: isinstance(value, str))
_COUNT: _Kind = ("a positive integer", lambda value: type(value) is int and value > 0)
_INTEGERS: _Kind = ("a list of integers", _list_of(int))
_OBJECTS: _Kind = ("a list of objects", _list_of(dict))
_STRINGS: _Kind = ("a list of strings", _list_of(str))


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """What an EAGLE-3 head's ``config.json`` says.

    Parameters
    ----------
    layer : LlamaConfig
        The decoder layer. Its `vocab_size` is the target's, its `num_hidden_layers` is 1.
    draft_vocab_size : int
        Number of tokens that the head can draft.
    target_hidden_size : int
        Width of one of the target's hidden states.
    aux_layer_ids : tuple of int, optional
        Which of the target's hidden states feed `fc`: i is the input of layer i, that is
        transformers' ``hidden_states[i]``. None where the checkpoint leaves it to the target.
    norm_before_residual : bool
        Whether the residual is the hidden state after `hidden_norm` instead of before.
    speculative_tokens : int
        Number of draft tokens a pass that the checkpoint recommends.
    verifier : str, optional
        Name or path of the target.
    verifier_architectures : tuple of str
        The target's architectures.
    """

    layer: LlamaConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    speculative_tokens: int = 4
    verifier: str | None = None
    verifier_architectures: tuple[str, ...] = ("LlamaForCausalLM",)

    @classmethod
    def from_file(cls, path: str | Path) -> Eagle3Config:
        """Read a ``config.json`` in the ``speculators`` layout or a plain Llama-like one.

        Parameters
        ----------
        path : str or Path
            The file.

        Returns
        -------
        Eagle3Config

        Raises
        ------
        OSError, ValueError
            The file can't be read, or a value in it can't be used; the message says which.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: expected JSON: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"{path}: expected an object, got {data!r}")

        def get(source: dict[str, Any], key: str, kind: _Kind, *default: Any) -> Any:
            value = source.get(key)
            if value is None and default:
                return default[0]
            expected, is_valid = kind
            if not is_valid(value):
                raise ValueError(f"{path}: {key}: expected {expected}, got {value!r}")
            return value

        if "speculators_model_type" in data:
            _expect(path, "speculators_model_type", "eagle3", data["speculators_model_type"])
            layer = get(data, "transformer_layer_config", _OBJECT)
            speculators = get(data, "speculators_config", _OBJECT, {})
        else:
            layer, speculators = data, {}
        _expect(path, "model_type", "llama", layer.get("model_type"))
        _expect(path, "num_hidden_layers", 1, layer.get("num_hidden_layers"))
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
            get(layer, key, _COUNT)
        for key in UNSUPPORTED_FLAGS:
            _expect(path, key, False, bool(data.get(key, False)))
        eagle = get(data, "eagle_config", _OBJECT, {})
        aux_key = "eagle_aux_hidden_state_layer_ids"
        # vLLM reads the first and SGLang the second, where i means what comes out of layer i.
        aux = get(data, aux_key, _INTEGERS, None) or [
            index + 1 for index in get(eagle, aux_key, _INTEGERS, [])
        ]
        methods = get(speculators, "proposal_methods", _OBJECTS, None) or [{}]
        verifier = get(speculators, "verifier", _OBJECT, {})
        # The architectures of a plain config name the head's class, not a class of transformers.
        names = {key: value for key, value in layer.items() if key != "architectures"}
        return cls(
            layer=LlamaConfig(**names),
            draft_vocab_size=get(data, "draft_vocab_size", _COUNT, layer["vocab_size"]),
            target_hidden_size=get(data, "target_hidden_size", _COUNT, layer["hidden_size"]),
            aux_layer_ids=tuple(aux) if aux else None,
            norm_before_residual=bool(data.get("norm_before_residual", False)),
            speculative_tokens=get(
                methods[0], "speculative_tokens", _COUNT, cls.speculative_tokens
            ),
            verifier=get(verifier, "name_or_path", _STRING, None),
            verifier_architectures=tuple(
                get(verifier, "architectures", _STRINGS, cls.verifier_architectures)
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of ``config.json`` in the ``speculators`` layout."""
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "norm_before_residual": self.norm_before_residual,
            "eagle_aux_hidden_state_layer_ids": (
                None if self.aux_layer_ids is None else list(self.aux_layer_ids)
            ),
            "transformer_layer_config": self.layer.to_diff_dict(),
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": self.speculative_tokens}
                ],
                "verifier": {
                    "name_or_path": self.verifier,
                    "architectures": list(self.verifier_architectures),
                },
            },
        }

    def resolve_aux_layer_ids(self, target_layers: int) -> tuple[int, ...]:
        """Return the auxiliary layer ids for a target of `target_layers` layers.

        Where the checkpoint names none, they are an early, a middle and a late layer: 2, half
        of the layers, and the third from the end, as vLLM takes them.

        Raises
        ------
        ValueError
            The target has too few layers.
        """
        ids = self.aux_layer_ids or (2, target_layers // 2, target_layers - 3)
        if min(ids) < 0 or max(ids) > target_layers:
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids: expected ids in 0..{target_layers} "
                f"for a target of {target_layers} layers, got {list(ids)}"
            )
        return ids


class Eagle3DecoderLayer(LlamaDecoderLayer):
    """A Llama decoder layer whose attention reads an embedding next to a hidden state."""

    def __init__(self, config: LlamaConfig, *, norm_before_residual: bool) -> None:
        super().__init__(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(
                2 * config.hidden_size, narrow.out_features, bias=narrow.bias is not None
            )
            setattr(self.self_attn, name, wide)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def forward(
        self,
        inputs_embeds: Tensor,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the layer; all tensors are [batch, T, hidden]."""
        normed = self.hidden_norm(hidden_states)
        residual = normed if self.norm_before_residual else hidden_states
        attended, _ = self.self_attn(
            hidden_states=torch.cat([self.input_layernorm(inputs_embeds), normed], dim=-1),
            attention_mask=attention_mask,
            **kwargs,
        )
        hidden_states = residual + attended
        output: Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return output


class Eagle3Head(nn.Module):
    """An EAGLE-3 draft head.

    At position p the head reads the embedding of token p + 1 and a hidden state of position p,
    and predicts token p + 2.

    Parameters
    ----------
    config : Eagle3Config
        What to build.
    attn_implementation : str
        Name of the attention function in transformers' attention interface. It can be changed
        later by setting ``head.config.layer._attn_implementation``.

    Attributes
    ----------
    embed_tokens : nn.Embedding
        Embedding of the target's vocabulary, [vocab, hidden].
    d2t : Tensor
        int64 [draft_vocab]: draft id d stands for the target's id ``d + d2t[d]``.
    t2d : Tensor
        bool [vocab]: whether the head can draft a token of the target.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, *, attn_implementation: str = "sdpa") -> None:
        super().__init__()
        layer = config.layer
        layer._attn_implementation = attn_implementation
        self.config = config
        aux_count = 3 if config.aux_layer_ids is None else len(config.aux_layer_ids)
        self.embed_tokens = nn.Embedding(layer.vocab_size, layer.hidden_size)
        self.fc = nn.Linear(aux_count * config.target_hidden_size, layer.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            [Eagle3DecoderLayer(layer, norm_before_residual=config.norm_before_residual)]
        )
        self.norm = LlamaRMSNorm(layer.hidden_size, eps=layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(layer)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        drafted = torch.arange(layer.vocab_size) < config.draft_vocab_size
        self.register_buffer("t2d", drafted)

    def combine_aux(self, aux: Tensor) -> Tensor:
        """Combine the target's auxiliary hidden states into the head's.

        Parameters
        ----------
        aux : Tensor
            [..., T, aux_count * target_hidden]: the hidden states of one position side by side,
            in the order of `aux_layer_ids`.

        Returns
        -------
        Tensor
            [..., T, hidden], of the same dtype.
        """
        combined: Tensor = self.fc(aux)
        return combined

    def forward(
        self,
        inputs_embeds: Tensor,
        hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the decoder layer.

        Parameters
        ----------
        inputs_embeds : Tensor
            [batch, T, hidden]: embeddings of the tokens that follow the positions.
        hidden_states : Tensor
            [batch, T, hidden]: out of `combine_aux`, or the output of an earlier draft step.
        position_ids : Tensor
            int64 [batch, T] or [1, T].
        attention_mask : Tensor, optional
            As the attention function takes it. Without one, "sdpa" attends causally; "eager"
            masks nothing: each token then attends to those behind it, too.
        **kwargs
            Handed on to the attention function.

        Returns
        -------
        Tensor
            [batch, T, hidden], before the final norm: what `logits` reads, and what the next
            draft step takes as its hidden states.
        """
        output: Tensor = self.layers[0](
            inputs_embeds,
            hidden_states,
            attention_mask,
            position_ids=position_ids,
            position_embeddings=self.rotary_emb(hidden_states, position_ids),
            **kwargs,
        )
        return output

    def logits(self, hidden_prenorm: Tensor) -> Tensor:
        """Return logits over the draft vocabulary.

        Parameters
        ----------
        hidden_prenorm : Tensor
            [..., hidden]: an output of `forward`.

        Returns
        -------
        Tensor
            [..., draft_vocab], of the same dtype.
        """
        logits: Tensor = self.lm_head(self.norm(hidden_prenorm))
        return logits

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Translate draft ids, int64 of any shape, into the target's ids."""
        return draft_ids + self.d2t[draft_ids]

    @torch.no_grad()
    def set_draft_vocab(self, target_ids: Tensor) -> None:
        """Choose the tokens that the head can draft.

        Parameters
        ----------
        target_ids : Tensor
            int64 [draft_vocab]: distinct ids of the target, in the order of the draft ids.

        Raises
        ------
        ValueError
            They are too few or too many, or not distinct.
        """
        size = self.config.draft_vocab_size
        if target_ids.unique().shape != (size,) or target_ids.shape != (size,):
            raise ValueError(f"target_ids: expected {size} distinct ids, got {target_ids}")
        self.d2t.copy_(target_ids.to(self.d2t.device) - torch.arange(size, device=self.d2t.device))
        self.t2d.fill_(False)
        self.t2d[target_ids] = True

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        embed_tokens: Tensor | None = None,
        attn_implementation: str = "sdpa",
    ) -> Eagle3Head:
        """Load a head from a folder with ``config.json`` and ``model.safetensors``.

        Parameters
        ----------
        directory : str or Path
            The folder.
        dtype : torch.dtype, optional
            Floating-point type of the weights; without it, they keep the stored one.
        device : torch.device or str
            Where the weights go.
        embed_tokens : Tensor, optional
            [vocab, hidden]: the target's embedding, for a checkpoint that leaves out its own.
        attn_implementation : str
            As for the constructor.

        Returns
        -------
        Eagle3Head
            In evaluation mode.

        Raises
        ------
        OSError, ValueError, SafetensorError
            A file can't be read, or doesn't fit the other; the message says which, and what.
        """
        directory = Path(directory)
        config = Eagle3Config.from_file(directory / CONFIG_NAME)
        path = directory / WEIGHTS_NAME
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; weights are read from safetensors only")
        # Nothing is computed on the meta device: no weight is initialised just to be replaced.
        with torch.device("meta"):
            head = cls(config, attn_implementation=attn_implementation)
        # Its frequencies aren't stored, and stay 32-bit whatever the type of the weights.
        head.rotary_emb = LlamaRotaryEmbedding(config.layer).to(device)
        tensors = _rename(load_file(path))
        if embed_tokens is not None and "embed_tokens.weight" not in tensors:
            sizes = [config.layer.vocab_size, config.layer.hidden_size]
            if list(embed_tokens.shape) != sizes:
                raise ValueError(
                    f"{path}: no embed_tokens.weight, and the target's doesn't fit: "
                    f"expected {sizes}, got {list(embed_tokens.shape)}"
                )
            tensors["embed_tokens.weight"] = embed_tokens.detach()
        if config.draft_vocab_size == config.layer.vocab_size:
            tensors.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        if "d2t" in tensors and "t2d" not in tensors:
            drafted = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
            tensors["t2d"] = torch.isin(torch.arange(config.layer.vocab_size), drafted)
        expected = head.state_dict()
        for name in sorted(expected.keys() | tensors.keys()):
            shapes = [
                "no tensor" if name not in source else str(list(source[name].shape))
                for source in (expected, tensors)
            ]
            if shapes[0] != shapes[1]:
                raise ValueError(f"{path}: {name}: expected {shapes[0]}, got {shapes[1]}")
        for name, tensor in tensors.items():
            kind = expected[name].dtype
            if kind.is_floating_point:
                kind = dtype or tensor.dtype
            tensors[name] = tensor.to(device=device, dtype=kind)
        head.load_state_dict(tensors, assign=True)
        return head.eval()

    def save_pretrained(self, directory: str | Path, *, embed_tokens: bool = True) -> None:
        """Write ``config.json`` and ``model.safetensors`` into a folder, made if need be.

        Parameters
        ----------
        directory : str or Path
            The folder.
        embed_tokens : bool
            Whether to write the embedding; False where it's the target's.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.config.to_dict(), indent=2) + "\n"
        (directory / CONFIG_NAME).write_text(text, encoding="utf-8")
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        if not embed_tokens:
            del tensors["embed_tokens.weight"]
        save_file(tensors, directory / WEIGHTS_NAME, metadata={"format": "pt"})


def _rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Bring the names of public EAGLE-3 checkpoints to those of this module."""
    return {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
        if not name.endswith("rotary_emb.inv_freq")
    }


def _expect(path: Path, key: str, expected: object, got: object) -> None:
    if got != expected:
        raise ValueError(f"{path}: {key}: expected {expected!r}, got {got!r}")
