"""Generate text with speculative decoding, and check it against plain greedy decoding.

Example
-------
>>> from specmeta import generate, models
>>> model = models.load("austen")
>>> result = generate.generate(model, ["It is a truth"], max_new_tokens=16)
>>> expected = generate.plain_greedy(model, result.texts, max_new_tokens=16)
>>> expected == [text.token_ids for text in result.texts]
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from specmeta.models import Model, check_model
from specmeta.serving.attention import ATTENTION_NAME
from specmeta.serving.engine import Engine, encode
from specmeta.serving.memory import refuse_lack_of_memory
from specmeta.serving.request import PassCounts, RequestError, SamplingParams, check_integer

__all__ = [
    "Generation",
    "RequestError",
    "Text",
    "check_settings",
    "generate",
    "plain_greedy",
    "read_prompt",
    "size_cache",
]

# Each draft is a pass of the head inside the captured step.
MAX_DRAFTS = 64
# Prompt tokens a row that one step takes.
PROMPT_CHUNK = 64


@dataclass
class Text:
    """What came of one prompt.

    Attributes
    ----------
    prompt : str
        The prompt.
    prompt_ids : list of int
        Its tokens.
    token_ids : list of int
        The new tokens, an end token included.
    text : str
        The new text.
    finish : str
        ``"end"``: an end token. ``"length"``: ``max_new_tokens``. Empty while it goes on.
    """

    prompt: str
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""


@dataclass
class Generation(PassCounts):
    """What came of a batch of prompts.

    Attributes
    ----------
    texts : list of Text
        One a prompt.
    num_drafts : int
        Drafts a pass, K.
    steps : int
        Launches of the captured step.
    drafted, accepted, target_passes
        As in `PassCounts`, all texts together.
    seconds : float
        Wall time of all steps, without loading, capture and showing the text.
    """

    texts: list[Text]
    num_drafts: int
    steps: int = 0
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, all texts together."""
        return sum(len(text.token_ids) for text in self.texts)

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, all texts together."""
        return self.num_tokens / self.seconds


@refuse_lack_of_memory()
def generate(
    model: Model,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    num_drafts: int = 4,
    page_size: int = 16,
    prompt_chunk: int = PROMPT_CHUNK,
    captured: bool = True,
    raw: bool = False,
    on_text: Callable[[int, str], None] | None = None,
) -> Generation:
    """Decode greedily, all prompts in one batch.

    The cache is this batch's own: its pages are allocated before the first step, as many as the
    texts can need, and given back at the end.

    Parameters
    ----------
    model : Model
        From `specmeta.models.load`.
    prompts : sequence of str
        At least one, none empty.
    max_new_tokens : int
        Most new tokens a prompt; an end token ends a text before.
    num_drafts : int
        Drafts a step, K up to 64 and less than the model's positions; 0 decodes without the head.
    page_size : int
        Tokens a page of the cache, no more than the model's positions.
    prompt_chunk : int
        Most prompt tokens a row and step.
    captured : bool
        Whether the step is captured and replayed, or run as it stands.
    raw : bool
        Whether prompts are continued as they stand. Otherwise a model whose tokenizer has a chat
        template answers them, as a user's messages.
    on_text : callable, optional
        Called with a prompt's index and a piece of its text as soon as the piece is known.

    Returns
    -------
    Generation

    Raises
    ------
    RequestError
        Prompts or settings that can't be served, or need more memory than there is.
    """
    check_settings(model, max_new_tokens=max_new_tokens, num_drafts=num_drafts, page_size=page_size)
    check_integer("prompt_chunk", prompt_chunk, 1)
    if num_drafts > 0 and model.head is None:
        raise RequestError(f"{model.name} has no draft head: name one, or use 0 drafts")
    if isinstance(prompts, str):  # a sequence of str, too: of its characters
        raise RequestError(f"prompts: expected a list of them, got the text {prompts!r}")
    if not prompts:
        raise RequestError("no prompts")
    texts = [
        read_prompt(model, prompt, max_new_tokens=max_new_tokens, raw=raw) for prompt in prompts
    ]

    # All of them have their places and pages from the first step to the last.
    lens = [len(t.prompt_ids) + max_new_tokens + 2 * (num_drafts + 1) for t in texts]
    limit = model.target.config.max_position_embeddings
    lens = [min(length, limit) for length in lens]
    longest = max(len(t.prompt_ids) for t in texts)
    chunk = min(prompt_chunk, longest)
    try:
        engine = Engine(
            model,
            num_drafts=num_drafts,
            max_rows=len(texts),
            max_tokens=len(texts) * max(chunk, num_drafts + 1),
            prompt_chunk=chunk,
            page_size=page_size,
            num_pages=1 + sum(-(-length // page_size) for length in lens),
            max_seq_len=max(lens),
            # One batch, whose texts mostly end together: a step more would be wasted on each.
            overlap=False,
            captured=captured,
        )
    except ValueError as error:
        raise RequestError(f"more than the operations can count: {error}") from error
    params = SamplingParams(max_new_tokens=max_new_tokens)
    requests = [
        engine.submit(text.prompt_ids, params, on_text=_on_piece(on_text, index))
        for index, text in enumerate(texts)
    ]
    engine.run()
    for text, request in zip(texts, requests, strict=True):
        if request.finish == "error":
            raise RuntimeError(request.error)
        text.token_ids, text.text = request.token_ids, request.text
        text.finish = request.finish
    stats = engine.stats
    return Generation(
        texts,
        num_drafts,
        steps=stats.steps,
        target_passes=stats.target_passes,
        drafted=stats.drafted,
        accepted=stats.accepted,
        seconds=stats.seconds,
    )


def check_settings(model: Model, *, max_new_tokens: int, num_drafts: int, page_size: int) -> None:
    """Check settings against a model's positions.

    Parameters
    ----------
    model : Model
    max_new_tokens, num_drafts, page_size : int
        As in `generate`.

    Raises
    ------
    ModelError
        It isn't what `specmeta.models.load` returns.
    RequestError
        A setting isn't an integer, or is out of range.
    """
    check_model("model", model)
    limit = model.target.config.max_position_embeddings
    check_integer("max_new_tokens", max_new_tokens, 1, limit)
    check_integer("num_drafts", num_drafts, 0, min(limit - 1, MAX_DRAFTS))
    check_integer("page_size", page_size, 1, limit)


def read_prompt(model: Model, prompt: str, *, max_new_tokens: int, raw: bool = False) -> Text:
    """Return a prompt with its tokens.

    Parameters
    ----------
    model : Model
    prompt : str
    max_new_tokens : int
        Most new tokens.
    raw : bool
        As in `generate`.

    Returns
    -------
    Text
        Without new tokens.

    Raises
    ------
    RequestError
        It's empty, isn't valid Unicode, or is too long.
    """
    limit = model.target.config.max_position_embeddings
    text = Text(prompt, encode(model, prompt, raw=raw))
    if len(text.prompt_ids) + max_new_tokens > limit:
        raise RequestError(
            f"a prompt of {len(text.prompt_ids)} tokens and {max_new_tokens} new ones: "
            f"the model has {limit} positions"
        )
    return text


def size_cache(
    texts: Sequence[Text], *, max_rows: int, max_new_tokens: int, num_drafts: int, page_size: int
) -> dict[str, int]:
    """Return the settings of an engine in which no text ever waits for pages.

    Parameters
    ----------
    texts : sequence of Text
        What it's to serve.
    max_rows : int
        Requests that run at once.
    max_new_tokens, num_drafts, page_size : int
        As in `generate`.

    Returns
    -------
    dict of str to int
        Parameters of `Engine`: ``max_rows``, ``max_seq_len`` and ``num_pages``.
    """
    longest = max(len(text.prompt_ids) for text in texts)
    # Behind the longest text there is room for the drafts of every step in flight.
    max_seq_len = longest + max_new_tokens + 3 * (num_drafts + 1)
    num_pages = 1 + max_rows * -(-max_seq_len // page_size)
    return {"max_rows": max_rows, "max_seq_len": max_seq_len, "num_pages": num_pages}


@refuse_lack_of_memory()
def plain_greedy(model: Model, texts: Sequence[Text], *, max_new_tokens: int) -> list[list[int]]:
    """Return what ``transformers`` decodes greedily from each prompt, one prompt at a time.

    Parameters
    ----------
    model : Model
        The same model: its own weights, under the attention of ``transformers``.
    texts : sequence of Text
        Whose prompts to decode.
    max_new_tokens : int
        Most new tokens a prompt.

    Returns
    -------
    list of list of int
        The new tokens, an end token included.

    Raises
    ------
    RequestError
        Not enough memory.
    """
    model.target.set_attn_implementation("sdpa")
    try:
        outputs = []
        for text in texts:
            ids = torch.tensor([text.prompt_ids], device=model.target.device)
            output = model.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
            outputs.append(output[0, len(text.prompt_ids) :].tolist())
        return outputs
    finally:
        model.target.set_attn_implementation(ATTENTION_NAME)


def _on_piece(
    on_text: Callable[[int, str], None] | None, index: int
) -> Callable[[str], None] | None:
    if on_text is None:
        return None

    def tell(piece: str) -> None:
        if piece:  # the end of the text says nothing
            on_text(index, piece)

    return tell
