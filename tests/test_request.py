"""A request's text: where it ends, what is shown of it and when."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers import models as tokenizer_models

from specmeta import models
from specmeta.serving.request import Request, RequestError, SamplingParams

LETTERS = "abc"
# An example takes as long as many of the other tests.
fewer = settings(max_examples=max(settings.default.max_examples // 5, 1))


def letters(ids: list[int]) -> str:
    return "".join(LETTERS[i] for i in ids)


def make(
    decode: Callable[[list[int]], str] = letters,
    *,
    end_ids: frozenset[int] = frozenset(),
    on_text: Callable[[str], None] | None = None,
    **params: Any,
) -> Request:
    return Request(
        [0],
        SamplingParams(**{"max_new_tokens": 100} | params),
        num_drafts=2,
        decode=decode,
        end_ids=end_ids,
        on_text=on_text,
    )


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
    ({"max_new_tokens": 1.5}, "max_new_tokens: expected an integer, got 1.5"),
    ({"max_new_tokens": None}, "max_new_tokens: expected an integer, got None"),
    ({"max_new_tokens": True}, "max_new_tokens: expected an integer, got True"),
    ({"temperature": -0.1}, "temperature: expected a finite number of at least 0, got -0.1"),
    ({"temperature": "0.5"}, "temperature: expected a finite number of at least 0, got '0.5'"),
    ({"temperature": None}, "temperature: .* got None"),
    ({"temperature": True}, "temperature: .* got True"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0.0}, "top_p: expected a number, more than 0 and at most 1, got 0.0"),
    ({"top_p": "0.9"}, "top_p: .* got '0.9'"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"seed": 2**63}, f"seed: expected {-(2**63)} .. {2**63 - 1}, got {2**63}"),
    ({"seed": None}, "seed: expected an integer, got None"),
    ({"seed": 1.0}, "seed: expected an integer, got 1.0"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"stop": ("a", "")}, r"stop: expected a string or a sequence of them.*, got \('a', ''\)"),
    ({"stop": ""}, "stop: .* got ''"),
    ({"stop": (1,)}, r"stop: .* got \(1,\)"),
    ({"stop": None}, "stop: .* got None"),
    ({"num_drafts": -1}, "num_drafts: expected at least 0, got -1"),
    ({"num_drafts": 1.5}, "num_drafts: expected an integer, got 1.5"),
    ({"ignore_end": 1}, "ignore_end: expected True or False, got 1"),
]


@pytest.mark.parametrize(("params", "message"), BAD_PARAMS)
def test_bad_params(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        SamplingParams(**params)


def test_what_stop_may_be() -> None:
    for stop in (".", ["."], (".",)):
        assert SamplingParams(stop=stop).stop == (".",)


def test_numbers_of_other_types() -> None:
    params = SamplingParams(
        max_new_tokens=np.int64(3), seed=np.int32(1), temperature=np.float32(0.5), top_p=1
    )
    assert (type(params.max_new_tokens), type(params.seed)) == (int, int)
    assert params == SamplingParams(max_new_tokens=3, seed=1, temperature=0.5)


def test_the_length_ends_a_text() -> None:
    request = make(max_new_tokens=3)
    request.take([0, 1])
    assert request.finish == ""
    request.take([2, 0, 1])
    assert (request.token_ids, request.text, request.finish) == ([0, 1, 2], "abc", "length")


def test_an_end_token_ends_a_text_and_is_part_of_it() -> None:
    request = make(end_ids=frozenset([1]))
    request.take([0, 1, 2])
    assert (request.token_ids, request.text, request.finish) == ([0, 1], "ab", "end")
    request = make(end_ids=frozenset([1]), ignore_end=True)
    request.take([0, 1, 2])
    assert (request.text, request.finish) == ("abc", "")


def test_a_stop_string_is_not_part_of_the_text() -> None:
    request = make(stop=("bb", "ca"))
    request.take([0, 1])
    assert request.text == "a"  # the b may begin "bb"
    request.take([2])
    assert request.text == "ab"
    request.take([1, 2, 0, 0])
    assert (request.text, request.finish) == ("abcb", "stop")
    assert request.token_ids == [0, 1, 2, 1, 2, 0]  # up to the one that completes it


def test_what_was_held_back_is_shown_at_the_end() -> None:
    for end in ("length", "end", "cancelled"):
        request = make(
            stop=("abc",),
            max_new_tokens=3 if end == "length" else 9,
            end_ids=frozenset([1] if end == "end" else []),
        )
        request.take([2, 0])
        assert request.text == "c"
        if end == "cancelled":
            request.end("cancelled")
        else:
            request.take([1])
        assert request.finish == end
        assert request.text == ("ca" if end == "cancelled" else "cab")


def test_the_last_token_may_complete_a_stop_string() -> None:
    request = make(stop=("ab",), max_new_tokens=2, end_ids=frozenset([1]))
    request.take([0, 1])
    assert (request.text, request.finish) == ("", "stop")


@fewer
@given(
    tokens=st.lists(st.integers(0, 2), max_size=30),
    stop=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_pieces_are_never_taken_back(tokens: list[int], stop: list[str], seed: int) -> None:
    rng, pieces = random.Random(seed), []
    request = make(stop=tuple(stop), on_text=pieces.append)
    left = list(tokens)
    while left and not request.finish:
        count = rng.randint(1, 5)
        request.take(left[:count])
        del left[:count]
        request.tell()
    if not request.finish:
        request.end("cancelled")
    request.tell()
    request.tell()
    whole = letters(tokens)
    # The stop string that is complete first; of several that end there, the longest.
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stop if s in whole]
    expected = whole[: min(ends)[1]] if ends else whole
    assert request.text == expected
    assert request.finish == ("stop" if ends else "cancelled")
    assert pieces == [piece for piece in pieces[:-1] if piece] + [""]
    assert "".join(pieces) == expected


def test_what_on_text_raises_goes_to_the_caller() -> None:
    def on_text(piece: str) -> None:
        told.append(piece)
        raise OSError("gone")

    told: list[str] = []
    request = make(on_text=on_text, max_new_tokens=1)
    request.take([0])
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            request.tell()
    request.tell()
    assert told == ["a", ""]


def test_passes_are_counted_by_position() -> None:
    request = make()
    request.count_pass(2, 1)
    request.count_pass(2, 3)
    request.count_pass(1, 2)
    assert (request.drafted, request.accepted, request.target_passes) == ([3, 2], [2, 1], 3)


# Characters of several tokens.


def bytes_as_replaced(ids: list[int]) -> str:
    """As byte-level tokenizers decode: what is no character becomes U+FFFD."""
    return bytes(ids).decode(errors="replace")


def byte_fallback() -> Callable[[list[int]], str]:
    """As sentencepiece's tokenizers decode, with their rule for bytes in a row."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁word": 256, "s": 257}
    model = tokenizer_models.WordLevel(vocab, unk_token="s")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return lambda ids: str(tokenizer.decode(ids))


@fewer
@given(text=st.text(max_size=60))
def test_characters_of_several_tokens(text: str) -> None:
    for decode in (bytes_as_replaced, byte_fallback()):
        tokens = list(text.encode())
        request = make(decode, max_new_tokens=len(tokens) + 1)
        shown = ""
        for token in tokens:
            request.take([token])
            assert request.text.startswith(shown)
            assert decode(tokens).startswith(request.text)
            shown = request.text
        request.end("cancelled")
        assert request.text == decode(tokens)


@fewer
@given(tokens=st.lists(st.integers(0, 255), max_size=300))
def test_what_is_not_utf8_is_shown_too(tokens: list[int]) -> None:
    request = make(bytes_as_replaced, max_new_tokens=len(tokens) + 1)
    for token in tokens:
        request.take([token])
    request.end("cancelled")
    if len(tokens) <= 60:
        assert request.text == bytes_as_replaced(tokens)
    assert request.text.replace("\ufffd", "") == bytes_as_replaced(tokens).replace("\ufffd", "")


def test_a_space_in_front_of_a_word_stays() -> None:
    decode = byte_fallback()
    request = make(decode)
    tokens = [256, 256, 257, *"é".encode(), 256]
    for token in tokens:
        request.take([token])
    assert request.text == decode(tokens) == "word wordsé word"


def test_decoding_costs_the_same_however_long_the_text() -> None:
    lens: list[int] = []

    def decode(ids: list[int]) -> str:
        lens.append(len(ids))
        return bytes_as_replaced(ids)

    request = make(decode, max_new_tokens=10_000)
    request.take(list("añ€😀 ".encode()) * 200 + [0xFF] * 1000)
    assert max(lens) <= 65
    assert sum(lens) < 60 * len(request.token_ids)
    request.end("cancelled")
    assert request.text == "añ€😀 " * 200 + "\ufffd" * 1000


def test_the_tokenizers_of_the_models() -> None:
    rng = random.Random(0)
    austen = models.load("austen").tokenizer
    for tokenizer in (austen, tiny_models.tokenizer()):

        def decode(ids: list[int], tokenizer: Any = tokenizer) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        for _ in range(20):
            tokens = [rng.randrange(len(tokenizer)) for _ in range(40)]
            request = make(decode)
            request.take(tokens)
            request.end("cancelled")
            assert request.text == decode(tokens)


def test_nothing_is_shown_behind_a_stop_string() -> None:
    """The last token may bring a stop string, and behind it what could be half a character."""
    replacement = "\ufffd"
    request = Request(
        [0],
        SamplingParams(max_new_tokens=65, stop=("X",)),
        num_drafts=0,
        decode=lambda ids: "".join(f"X{replacement}" if i else replacement for i in ids),
    )
    request.take([0] * 64 + [1])
    assert request.finish == "stop"
    assert request.text == 64 * replacement
