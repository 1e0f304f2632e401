"""The engine against ``transformers``: the same tokens, whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import broken_metadata
import pytest
import tiny_models
import torch
from launches import operations
from transformers import ContinuousBatchingConfig, GenerationConfig

from specmeta import BatchMetadata, models
from specmeta.generate import Generation, RequestError, generate, plain_greedy
from specmeta.graph import capture
from specmeta.serving import scheduler
from specmeta.serving import step as step_module
from specmeta.serving.attention import ATTENTION_NAME
from specmeta.serving.one_model import OneModelStep
from specmeta.serving.step import Shape

# One token, one more than a chunk of 4, several chunks, a chunk to the token.
PROMPTS = ["q", "hello", "the quick brown fox jumps", "twelve chars"]
NEW_TOKENS = 24
# For what no device can change.
cpu_only = pytest.mark.parametrize("device", ["cpu"], scope="session")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, device: str) -> models.Model:
    folder = tiny_models.save(tmp_path_factory.mktemp("tiny"))
    return models.load(str(folder), device=device)


@pytest.fixture(scope="module")
def expected(tiny: models.Model) -> list[list[int]]:
    """What ``transformers`` generates from `PROMPTS`."""
    plain = generate(tiny, PROMPTS, max_new_tokens=NEW_TOKENS, num_drafts=0)
    return plain_greedy(tiny, plain.texts, max_new_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def lucky(tiny: models.Model, expected: list[list[int]]) -> models.Model:
    """The tiny model with a head of which many drafts stand."""
    head: Any = tiny_models.BigramHead(expected).to(tiny.target.device)
    return models.Model(tiny.name, tiny.target, head, tiny.tokenizer, tiny.end_ids)


@pytest.fixture(scope="module")
def austen(device: str) -> models.Model:
    return models.load("austen", device=device)


def ids(generation: Generation) -> list[list[int]]:
    return [text.token_ids for text in generation.texts]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_drafts", range(6))
def test_equals_transformers(
    tiny: models.Model,
    lucky: models.Model,
    expected: list[list[int]],
    num_drafts: int,
    page_size: int,
) -> None:
    for model in (tiny, lucky):
        result = generate(
            model,
            PROMPTS,
            max_new_tokens=NEW_TOKENS,
            num_drafts=num_drafts,
            page_size=page_size,
            prompt_chunk=4,
            captured=False,
        )
        assert ids(result) == expected
        assert [text.finish for text in result.texts] == ["length"] * len(PROMPTS)
        assert len(result.drafted) == len(result.accepted) == num_drafts
    if num_drafts:
        assert 0.2 < sum(result.accepted) / sum(result.drafted) < 1
        assert result.tokens_per_pass > 1.2


@cpu_only
def test_equals_generate_batch(tiny: models.Model, lucky: models.Model) -> None:
    result = generate(lucky, PROMPTS, max_new_tokens=NEW_TOKENS, num_drafts=3, prompt_chunk=4)
    tiny.target.set_attn_implementation("sdpa")
    try:
        outputs = tiny.target.generate_batch(
            [text.prompt_ids for text in result.texts],
            generation_config=GenerationConfig(
                max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=32, max_batch_tokens=64, max_memory_percent=0.1
            ),
            warmup=False,
        )
    finally:
        tiny.target.set_attn_implementation(ATTENTION_NAME)
    assert [outputs[f"req_{i}"].generated_tokens for i in range(len(PROMPTS))] == ids(result)


@pytest.mark.parametrize("prompt_chunk", [1, 2, 3, 7, 64])
def test_prompts_in_chunks(
    lucky: models.Model, expected: list[list[int]], prompt_chunk: int
) -> None:
    result = generate(
        lucky,
        PROMPTS,
        max_new_tokens=NEW_TOKENS,
        num_drafts=3,
        prompt_chunk=prompt_chunk,
        captured=False,
    )
    assert ids(result) == expected


@pytest.mark.parametrize("num_drafts", range(5))
def test_captured_equals_eager(
    lucky: models.Model, tiny: models.Model, expected: list[list[int]], num_drafts: int
) -> None:
    for model in (tiny, lucky):
        settings: dict[str, Any] = {
            "max_new_tokens": NEW_TOKENS,
            "num_drafts": num_drafts,
            "prompt_chunk": 5,
        }
        eager = generate(model, PROMPTS, captured=False, **settings)
        replayed = generate(model, PROMPTS, captured=True, **settings)
        assert ids(eager) == ids(replayed) == expected
        assert eager.accepted == replayed.accepted
        assert eager.steps == replayed.steps


@pytest.mark.parametrize("device", ["cuda"], scope="session")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("num_drafts", range(5))
def test_on_a_stream_of_its_own(
    lucky: models.Model, expected: list[list[int]], num_drafts: int, captured: bool
) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = generate(
            lucky,
            PROMPTS,
            max_new_tokens=NEW_TOKENS,
            num_drafts=num_drafts,
            prompt_chunk=5,
            captured=captured,
        )
    assert ids(result) == expected


@cpu_only
def test_end_tokens(lucky: models.Model, expected: list[list[int]]) -> None:
    # Every token that occurs takes its turn as the end token, so that it falls on each place of
    # a draft; where it does, the device has committed tokens behind it.
    accepted_with_end = 0
    for end in sorted({token for tokens in expected for token in tokens}):
        model = models.Model("", lucky.target, lucky.head, lucky.tokenizer, frozenset([end]))
        result = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS, num_drafts=4, captured=False)
        for text, tokens in zip(result.texts, expected, strict=True):
            if end in tokens:
                assert text.token_ids == tokens[: tokens.index(end) + 1]
                assert text.finish == "end"
            else:
                assert text.token_ids == tokens
                assert text.finish == "length"
        decoded = sum(len(text.token_ids) - 1 for text in result.texts)
        accepted_with_end += result.target_passes + sum(result.accepted) > decoded
    assert accepted_with_end > 3


@cpu_only
def test_transformers_ends_there_too(tmp_path: Path, expected: list[list[int]]) -> None:
    end = expected[2][7]
    model = models.load(str(tiny_models.save(tmp_path, end=end)))
    assert model.end_ids == {end}
    result = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS, num_drafts=2, captured=False)
    assert ids(result) == plain_greedy(model, result.texts, max_new_tokens=NEW_TOKENS)
    assert len(result.texts[2].token_ids) <= 8


def test_at_the_models_last_position(lucky: models.Model, tiny: models.Model) -> None:
    limit = tiny.target.config.max_position_embeddings
    prompts = ["x" * (limit - 9), "y" * 20]
    for model in (tiny, lucky):
        result = generate(model, prompts, max_new_tokens=9, num_drafts=4, captured=False)
        assert ids(result) == plain_greedy(model, result.texts, max_new_tokens=9)


@cpu_only
def test_text_comes_in_pieces(lucky: models.Model) -> None:
    pieces = [""] * len(PROMPTS)

    def on_text(index: int, piece: str) -> None:
        assert piece
        pieces[index] += piece

    result = generate(
        lucky, PROMPTS, max_new_tokens=NEW_TOKENS, num_drafts=2, captured=False, on_text=on_text
    )
    assert pieces == [text.text for text in result.texts]
    assert [len(piece) for piece in pieces] == [NEW_TOKENS] * len(PROMPTS)  # one a character


@cpu_only
def test_counts(lucky: models.Model) -> None:
    result = generate(lucky, PROMPTS, max_new_tokens=NEW_TOKENS, num_drafts=3, captured=False)
    assert result.num_tokens == NEW_TOKENS * len(PROMPTS)
    assert result.drafted[0] >= result.drafted[1] >= result.drafted[2] > 0
    assert result.accepted[0] >= result.accepted[1] >= result.accepted[2]
    assert result.drafted[0] <= result.target_passes
    # What a text's last pass gives beyond its end isn't part of the text.
    beyond = result.target_passes + sum(result.accepted) + len(PROMPTS) - result.num_tokens
    assert 0 <= beyond <= 3 * len(PROMPTS)
    assert result.tokens_per_second > 0


def make_step(model: models.Model, *, num_drafts: int) -> OneModelStep:
    step = OneModelStep(
        model.target,
        model.head,
        max_rows=2,
        max_slots=2,
        max_tokens=16,
        max_seq_len=64,
        num_drafts=num_drafts,
        page_size=4,
        num_pages=33,
    )
    for slot in range(2):
        prompt = model.tokenizer(PROMPTS[slot + 1])["input_ids"]
        step.batch.assign(slot, prompt, range(1 + 16 * slot, 17 + 16 * slot))
    return step


@cpu_only
@pytest.mark.parametrize("num_drafts", range(6))
def test_k_plus_2_launches_a_step(tiny: models.Model, num_drafts: int) -> None:
    step = make_step(tiny, num_drafts=num_drafts)
    step.batch.set_rows([0, 1], [8, 8])
    expected = ["stage", "accept_greedy"] + ["draft_step"] * num_drafts
    with torch.no_grad():
        assert operations(lambda: step.run(Shape(2, 16, 8))) == expected
    trace = capture(
        lambda: step.run(Shape(2, 2 * (num_drafts + 1), num_drafts + 1)),
        num_rows=step.batch.num_rows,
    ).trace
    assert trace is not None
    targets = [str(node.target) for node in trace.graph.nodes]
    assert [t.split(".")[1] for t in targets if t.startswith("specmeta.")] == expected


@pytest.mark.parametrize("num_drafts", [2, 4])
def test_without_rows_nothing_changes(tiny: models.Model, num_drafts: int) -> None:
    step = make_step(tiny, num_drafts=num_drafts)
    assert step.drafter is not None
    batch = step.batch
    by_slot = [
        batch.tokens,
        batch.known_lens,
        batch.committed_lens,
        batch.num_drafts,
        batch.written_lens,
        batch.page_table,
        batch.num_pages,
        batch.status,
    ]
    caches = [
        tensor
        for cache in (step.target_cache, step.drafter.cache)
        for tensor in (*cache.keys, *cache.values)
    ]
    batch.set_rows([0, 1], [8, 8])
    with torch.no_grad():
        step.run(Shape(2, 16, 8))
        batch.num_rows.zero_()
        before = [tensor.clone() for tensor in by_slot + caches]
        step.run(Shape(2, 2 * (num_drafts + 1), num_drafts + 1))
    for tensor, old in zip(by_slot, before, strict=False):
        assert torch.equal(tensor, old)
    for tensor, old in zip(caches, before[len(by_slot) :], strict=True):
        assert torch.equal(tensor[4:], old[4:])  # page 0 alone takes what padding writes
    assert all(tensor.isfinite().all() for tensor in caches)


def draft_without_pages(model: models.Model, tokens: list[int], count: int) -> list[int]:
    """Draft after `tokens` as the EAGLE-3 paper says, with no cache and no paging."""
    head, target = model.head, model.target
    assert head is not None
    ids = torch.tensor([tokens], device=target.device)
    aux_ids = head.config.aux_layer_ids
    assert aux_ids is not None
    states = target.model(ids[:, :-1], use_cache=False, output_hidden_states=True).hidden_states
    hidden = head.combine_aux(torch.cat([states[i] for i in aux_ids], dim=-1))
    drafts: list[int] = []
    inputs = ids[:, 1:]
    for _ in range(count):
        positions = torch.arange(inputs.shape[1], device=target.device)[None]
        output = head(head.embed_tokens(inputs), hidden, positions)
        draft = head.to_target_ids(head.logits(output[:, -1]).argmax(-1))
        drafts.append(int(draft))
        inputs = torch.cat([inputs, draft[None]], dim=1)
        hidden = torch.cat([hidden, output[:, -1:]], dim=1)
    return drafts


@pytest.fixture
def plain_attention(tiny: models.Model) -> Iterator[Callable[[bool], None]]:
    """Switch the tiny model between its own attention and the paged one."""
    assert tiny.head is not None
    layer = tiny.head.config.layer

    def switch(plain: bool) -> None:
        name = "sdpa" if plain else ATTENTION_NAME
        tiny.target.set_attn_implementation(name)
        layer._attn_implementation = name

    yield switch
    switch(False)


def test_every_draft_is_the_heads_own(
    tiny: models.Model, plain_attention: Callable[[bool], None]
) -> None:
    # Acceptance can't tell a wrong draft pass from a bad head; this can.
    step = make_step(tiny, num_drafts=3)
    compared = 0
    with torch.no_grad():
        for index in range(12):
            query_len = 8 if index < 4 else 4
            step.batch.set_rows([0, 1], [query_len] * 2)
            step.run(Shape(2, 2 * query_len, query_len))
            for slot in range(2):
                count, known = int(step.batch.num_drafts[slot]), int(step.batch.known_lens[slot])
                if count == 0:  # in the middle of a prompt
                    continue
                tokens = step.batch.tokens[slot].tolist()
                plain_attention(True)
                expected = draft_without_pages(tiny, tokens[:known], count)
                plain_attention(False)
                assert tokens[known : known + count] == expected
                compared += count
    assert compared >= 60
    assert step.batch.status.tolist() == [0, 0, 0]


BAD_REQUESTS: dict[str, tuple[list[str] | str, dict[str, Any], str]] = {
    "a text": ("text", {}, "prompts: expected a list of them, got the text 'text'"),
    "nothing": ([], {}, "no prompts"),
    "empty": (["a", ""], {}, "a prompt is empty"),
    "long": (["a" * 150], {}, "150 tokens and 24 new ones: the model has 160 positions"),
    "not Unicode": (["a\udcff"], {}, "a prompt isn't valid Unicode: .* position 1: surrogates"),
    "no tokens": (["a"], {"max_new_tokens": 0}, r"max_new_tokens: expected 1 \.\. 160, got 0"),
    "tokens": (["a"], {"max_new_tokens": 161}, r"max_new_tokens: expected 1 \.\. 160, got 161"),
    "half": (["a"], {"max_new_tokens": 1.5}, "max_new_tokens: expected an integer, got 1.5"),
    "less than no drafts": (["a"], {"num_drafts": -1}, r"num_drafts: expected 0 \.\. 64, got -1"),
    "drafts": (["a"], {"num_drafts": 160}, r"num_drafts: expected 0 \.\. 64, got 160"),
    "no page": (["a"], {"page_size": 0}, r"page_size: expected 1 \.\. 160, got 0"),
    "page": (["a"], {"page_size": 161}, r"page_size: expected 1 \.\. 160, got 161"),
    "chunk": (["a"], {"prompt_chunk": 0}, "prompt_chunk: expected at least 1, got 0"),
}


@cpu_only
@pytest.mark.parametrize(
    ("prompts", "settings", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys()
)
def test_bad_requests(
    tiny: models.Model, prompts: list[str] | str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        generate(tiny, prompts, **{"max_new_tokens": NEW_TOKENS} | settings)


@cpu_only
def test_the_most_drafts(tiny: models.Model) -> None:
    result = generate(tiny, ["a"], max_new_tokens=3, num_drafts=64, captured=False)
    assert ids(result) == plain_greedy(tiny, result.texts, max_new_tokens=3)


@cpu_only
def test_a_tokenizer_of_another_model(tiny: models.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.target.config, "vocab_size", 20)
    assert generate(tiny, ["abc"], max_new_tokens=1, num_drafts=0).num_tokens == 1
    with pytest.raises(RequestError, match="doesn't fit the model: expected ids below 20, got 25"):
        generate(tiny, ["abcz"], num_drafts=0)


@pytest.mark.parametrize("shape", [(2**51,), (2**61, 8)])  # no machine has an address for it
def test_lack_of_memory(
    tiny: models.Model, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    def allocate(*_: object, device: torch.device, **__: object) -> torch.Tensor:
        return torch.zeros(shape, device=device)

    monkeypatch.setattr(step_module, "KVCache", allocate)
    with pytest.raises(RequestError, match="not enough memory: "):
        generate(tiny, ["a"])


@cpu_only
@pytest.mark.parametrize(
    ("positions", "page_size", "message"),
    [
        (2**50, 1, "not enough memory: MemoryError"),
        (2**70, 1, "not enough memory: Python int too large"),
        (2**50, 2**49, "more than the operations can count: page_size: .* got 562949953421312"),
    ],
)
def test_models_without_end(
    tiny: models.Model,
    monkeypatch: pytest.MonkeyPatch,
    positions: int,
    page_size: int,
    message: str,
) -> None:
    monkeypatch.setattr(tiny.target.config, "max_position_embeddings", positions)
    with pytest.raises(RequestError, match=message):
        generate(tiny, ["a"], max_new_tokens=positions - 1, page_size=page_size)


@cpu_only
def test_other_errors_stay_what_they_are(
    tiny: models.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(BatchMetadata, "accept_greedy", fail)
    with pytest.raises(RuntimeError, match=r"^a fault$"):
        generate(tiny, ["a"], captured=False)


@cpu_only
def test_no_head(tiny: models.Model) -> None:
    model = models.Model("tiny", tiny.target, None, tiny.tokenizer, tiny.end_ids)
    with pytest.raises(RequestError, match="tiny has no draft head: name one, or use 0 drafts"):
        generate(model, ["a"], num_drafts=1)
    assert generate(model, ["a"], num_drafts=0, max_new_tokens=2).num_tokens == 2


# The real model.

AUSTEN_PROMPTS = [
    "It is a truth universally acknowledged, that",
    "Emma Woodhouse, handsome, clever, and rich,",
    "She had been forced into prudence",
    "Oh!",
]


@pytest.fixture
def chat(tiny: models.Model) -> Iterator[models.Model]:
    """The tiny model with a chat template."""
    tiny.tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}. {{ message.content }}.{% endfor %}"
        "{% if add_generation_prompt %} bot, {% endif %}"
    )
    yield tiny
    tiny.tokenizer.chat_template = None


@cpu_only
def test_chat_models_answer(chat: models.Model) -> None:
    assert chat.is_chat
    result = generate(chat, ["hello", "you"], max_new_tokens=4, num_drafts=2)
    rendered = ["user. hello. bot, ", "user. you. bot, "]
    assert [text.prompt for text in result.texts] == ["hello", "you"]
    assert [chat.tokenizer.decode(text.prompt_ids) for text in result.texts] == rendered
    assert ids(result) == plain_greedy(chat, result.texts, max_new_tokens=4)
    raw = generate(chat, rendered, max_new_tokens=4, num_drafts=2, raw=True)
    assert [text.prompt_ids for text in raw.texts] == [text.prompt_ids for text in result.texts]
    assert ids(raw) == ids(result)
    with pytest.raises(RequestError, match="a prompt is empty"):
        generate(chat, [""])


@cpu_only
@pytest.mark.parametrize(
    "template", ["{{ nothing.at_all }}", "{% for %}", "{{ raise_exception('no') }}"]
)
def test_a_broken_chat_template(chat: models.Model, template: str) -> None:
    chat.tokenizer.chat_template = template
    with pytest.raises(RequestError, match=r"the model's chat template: .*; --raw does without"):
        generate(chat, ["hello"])


def test_austen(austen: models.Model) -> None:
    result = generate(austen, AUSTEN_PROMPTS, max_new_tokens=32, num_drafts=4)
    assert ids(result) == plain_greedy(austen, result.texts, max_new_tokens=32)
    assert result.tokens_per_pass >= 2.0


@cpu_only
@pytest.mark.parametrize("captured", [False, True])
def test_without_the_update_text_and_acceptance_collapse(
    austen: models.Model, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    right = generate(austen, AUSTEN_PROMPTS, max_new_tokens=32, num_drafts=4)
    monkeypatch.setattr(BatchMetadata, "accept_greedy", broken_metadata.without_commit)
    with pytest.raises(RuntimeError, match="committed tokens: expected"):  # the host sees it
        generate(austen, AUSTEN_PROMPTS, max_new_tokens=32, num_drafts=4, captured=captured)
    monkeypatch.setattr(scheduler, "_find_fault", lambda *_: "")
    wrong = generate(austen, AUSTEN_PROMPTS, max_new_tokens=32, num_drafts=4, captured=captured)
    expected = plain_greedy(austen, wrong.texts, max_new_tokens=32)
    assert all(a != b for a, b in zip(ids(wrong), expected, strict=True))
    assert wrong.tokens_per_pass < 0.75 * right.tokens_per_pass


@cpu_only
def test_without_the_rewind_acceptance_drops_and_the_text_stands(
    austen: models.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = generate(austen, AUSTEN_PROMPTS, max_new_tokens=32, num_drafts=4, captured=False)
    monkeypatch.setattr(BatchMetadata, "accept_greedy", broken_metadata.without_rewind)
    wrong = generate(austen, AUSTEN_PROMPTS, max_new_tokens=32, num_drafts=4, captured=False)
    assert ids(wrong) == ids(right)
    assert wrong.tokens_per_pass < 0.75 * right.tokens_per_pass
