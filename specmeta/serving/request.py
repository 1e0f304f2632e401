"""A request: what it asks for, and what the host knows of its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from specmeta._integers import to_integer

__all__ = ["PassCounts", "Request", "RequestError", "SamplingParams", "check_integer"]

_REPLACEMENT = "\ufffd"
# A character is four bytes at most: three of them may be there before it is.
_MAX_INCOMPLETE = 3
# Tokens that are decoded together at most. What has come to no end by then isn't UTF-8.
_MAX_WINDOW = 64


class RequestError(ValueError):
    """A prompt or setting that can't be served; the message says why."""


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a value as an int; raise RequestError where it's none, or out of range."""
    integer = to_integer(value)
    if integer is None:
        raise RequestError(f"{name}: expected an integer, got {value!r}")
    if integer < least or (most is not None and integer > most):
        expected = f"at least {least}" if most is None else f"{least} .. {most}"
        raise RequestError(f"{name}: expected {expected}, got {integer}")
    return integer


@dataclass(frozen=True)
class SamplingParams:
    """How a text is chosen, and where it ends.

    Parameters
    ----------
    max_new_tokens : int
        Most new tokens, at least 1.
    temperature : float
        What logits are divided by; 0 = greedy.
    top_p : float
        In (0, 1]: tokens are drawn from the most likely ones that together reach it.
    seed : int
        A 64-bit integer. Prompt, parameters and seed determine the text.
    stop : str or sequence of str
        Strings that end the text. They aren't part of it. Kept as a tuple.
    num_drafts : int, optional
        Most drafts a step; default: the engine's.
    ignore_end : bool
        Whether the text goes on behind an end token.

    Raises
    ------
    RequestError
        A value is of another type, or out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()
    num_drafts: int | None = None
    ignore_end: bool = False

    def __post_init__(self) -> None:
        """Check the values."""

        def expect(name: str, expected: str, *, met: bool) -> None:
            if not met:
                raise RequestError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

        def keep(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        keep("max_new_tokens", check_integer("max_new_tokens", self.max_new_tokens, 1))
        keep("seed", check_integer("seed", self.seed, -(2**63), 2**63 - 1))
        if self.num_drafts is not None:
            keep("num_drafts", check_integer("num_drafts", self.num_drafts, 0))
        temperature, top_p, stop = self.temperature, self.top_p, self.stop
        finite = _is_number(temperature) and 0 <= temperature < float("inf")
        expect("temperature", "a finite number of at least 0", met=finite)
        in_range = _is_number(top_p) and 0 < top_p <= 1
        expect("top_p", "a number, more than 0 and at most 1", met=in_range)
        stops = (stop,) if isinstance(stop, str) else stop
        are_strings = isinstance(stops, Sequence) and all(isinstance(s, str) and s for s in stops)
        expect("stop", "a string or a sequence of them, none empty", met=are_strings)
        keep("stop", tuple(stops))
        expect("ignore_end", "True or False", met=isinstance(self.ignore_end, bool))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class _TextStream:
    """Decodes tokens one by one, at a cost that doesn't depend on how many have come.

    A token may decode to part of a character, and differently at the beginning of a text than
    behind another token. So each is decoded behind those of the last piece, and what may be part
    of a character is held back.

    Parameters
    ----------
    decode : callable
        Turns tokens into text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._num_old = 0  # tokens of the last piece, which stand first in `_ids`
        self._num_shown = 0  # characters of what `_ids` decode to
        self._tail = ""  # what is held back

    def push(self, token: int) -> str:
        """Take a token; return the text that has become certain."""
        self._ids.append(token)
        text = self._decode(self._ids)
        end = len(text)
        if text.endswith(_REPLACEMENT):
            if len(self._ids) <= _MAX_WINDOW:
                self._tail = text[self._num_shown :]
                return ""
            while end > len(text) - _MAX_INCOMPLETE and text[end - 1] == _REPLACEMENT:
                end -= 1
        piece, self._tail = text[self._num_shown : end], text[max(end, self._num_shown) :]
        self._num_shown = max(end, self._num_shown)
        if piece or len(self._ids) > _MAX_WINDOW:
            self._ids = self._ids[self._num_old :][-_MAX_WINDOW // 2 :]
            self._num_old = len(self._ids)
            self._num_shown = len(self._decode(self._ids)) - len(self._tail)
        return piece

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        tail, self._tail = self._tail, ""
        return tail


@dataclass(eq=False, kw_only=True)
class PassCounts:
    """How many drafts stood.

    A *target pass* is a row's part in a step behind its prompt: it verifies the row's drafts and
    gives one token more than it accepts. The first token of a text comes out of the prompt's pass,
    which isn't counted.

    Attributes
    ----------
    drafted, accepted : list of int
        By position in the draft: how many tokens were verified, and how many stood.
    target_passes : int
        Passes.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    target_passes: int = 0

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens that come out of a target pass; 1 before there was one."""
        return 1 + sum(self.accepted) / self.target_passes if self.target_passes else 1.0

    def count_pass(self, num_drafted: int, num_emitted: int) -> None:
        """Count a pass that verified so many drafts and gave so many tokens."""
        self.target_passes += 1
        for position in range(num_drafted):
            self.drafted[position] += 1
            self.accepted[position] += position < num_emitted - 1


class Request(PassCounts):
    """A text from its prompt to its end. `Engine.submit` makes one.

    Parameters
    ----------
    prompt_ids : sequence of int
        The prompt's tokens.
    params : SamplingParams
        What is asked for.
    num_drafts : int
        Most drafts a step.
    decode : callable
        Turns tokens into text.
    end_ids : frozenset of int
        Tokens that end the text.
    on_text : callable, optional
        Called by `tell`: with each new piece of text, and with ``""`` at the end.

    Attributes
    ----------
    prompt_ids, params, num_drafts
        As given.
    token_ids : list of int
        The new tokens; an end token is one of them.
    text : str
        The new text, as far as it's certain: nothing of it is taken back.
    finish : str
        Empty while it goes on, then ``"end"`` (an end token), ``"stop"`` (a stop string),
        ``"length"``, ``"cancelled"`` or ``"error"``.
    error : str
        Why, where `finish` is ``"error"``.
    drafted, accepted, target_passes
        As in `PassCounts`.
    num_faults : int
        How often it had to be computed anew because the device reported something wrong.
    arrival : int
        Its place in the order of arrival; the scheduler's.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        num_drafts: int,
        decode: Callable[[list[int]], str],
        end_ids: frozenset[int] = frozenset(),
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(drafted=[0] * num_drafts, accepted=[0] * num_drafts)
        self.prompt_ids = list(prompt_ids)
        self.params = params
        self.num_drafts = num_drafts
        self.token_ids: list[int] = []
        self.text = ""
        self.finish = ""
        self.error = ""
        self.num_faults = 0
        self.arrival = -1
        self._end_ids = frozenset() if params.ignore_end else end_ids
        self._on_text = on_text
        self._stream = _TextStream(decode)
        self._held = ""  # what may be the beginning of a stop string
        self._untold = ""
        self._end_told = False

    def __repr__(self) -> str:
        """Say which one it is, and how far it has come."""
        lens = f"{len(self.prompt_ids)} + {len(self.token_ids)} tokens"
        return f"<Request {self.arrival}: {lens}, {self.finish or 'unfinished'}>"

    def take(self, tokens: Sequence[int]) -> None:
        """Append what a step emitted, up to where the text ends.

        The device knows nothing of ends: it commits what comes behind, here it's cut.
        """
        for token in tokens:
            self.token_ids.append(token)
            self._take_text(self._stream.push(token))
            if token in self._end_ids:
                self.end("end")
            elif len(self.token_ids) == self.params.max_new_tokens:
                self.end("length")
            if self.finish:
                return

    def end(self, finish: str, error: str = "") -> None:
        """End the text, unless a stop string has. What was held back belongs to it."""
        if not self.finish:
            self._take_text(self._stream.flush())
        if not self.finish:
            self._show(self._held)
            self.finish, self.error = finish, error
        self._held = ""

    def tell(self) -> None:
        """Hand new text to `on_text`. What that raises goes to the caller."""
        if self._on_text is None:
            return
        if piece := self._untold:
            self._untold = ""
            self._on_text(piece)
        if self.finish and not self._end_told:
            self._end_told = True
            self._on_text("")

    def _take_text(self, piece: str) -> None:
        """Show text as far as it can't be the beginning of a stop string."""
        text, stops = self._held + piece, self.params.stop
        found = [place for place in (text.find(stop) for stop in stops) if place >= 0]
        if found:
            self._show(text[: min(found)])
            self._held, self.finish = "", "stop"
            return
        held = max((_overlap(text, stop) for stop in stops), default=0)
        self._show(text[: len(text) - held])
        self._held = text[len(text) - held :]

    def _show(self, piece: str) -> None:
        self.text += piece
        if self._on_text is not None:
            self._untold += piece


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` begin `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
