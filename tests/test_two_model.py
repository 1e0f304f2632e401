"""Steps of both kinds, driven directly: the drafter in the target's graph, and in its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny_models
import torch
from launches import operations
from tiny_serving import greedy, paged
from transformers import LlamaForCausalLM

from specmeta.graph import Captured
from specmeta.models.eagle3 import Eagle3Head
from specmeta.serving.one_model import OneModelStep
from specmeta.serving.request import SamplingParams
from specmeta.serving.step import Shape, Step
from specmeta.serving.two_model import TwoModelStep
from specmeta.status import Status

MAX_SEQ_LEN = 64
CHUNK = 5
NEW_TOKENS = 20
# One token, a chunk to the token, several chunks, and one token more.
LENGTHS = [1, CHUNK, 3 * CHUNK - 1, 2 * CHUNK + 1, 7]
# When they arrive, by step: prompts beside drafts, and steps with fewer rows than the largest.
ARRIVALS = [0, 0, 2, 5, 6]
PAGE_SIZE = 4


@dataclass(frozen=True)
class Models:
    """A target, a head that it taught, and two Llamas that draft for it; all float64."""

    target: LlamaForCausalLM
    head: Eagle3Head
    other: LlamaForCausalLM
    prompts: list[list[int]]
    expected: list[list[int]]  # the target's own texts, decoded greedily


@pytest.fixture(scope="module")
def models(device: str) -> Models:
    draw = random.Random(3)
    size = len(tiny_models.LETTERS)
    prompts = [[draw.randrange(size) for _ in range(length)] for length in LENGTHS]
    target = tiny_models.target().double()
    head = tiny_models.head(draft_vocab_size=size).double()
    other = tiny_models.target(seed=9, layers=1).double()
    expected = [greedy(target, prompt, NEW_TOKENS + 4) for prompt in prompts]
    texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    tiny_models.train(head, target, [text[:25] for text in texts])
    for model in (target, head, other):
        model.to(device)
        paged(model)
    return Models(target, head, other, prompts, expected)


def make_step(models: Models, kind: str, *, num_drafts: int, **changes: Any) -> Step:
    settings = {
        "max_rows": 4,
        "max_slots": 6,
        "max_tokens": 16,
        "max_seq_len": MAX_SEQ_LEN,
        "num_drafts": num_drafts,
        "page_size": PAGE_SIZE,
        "num_pages": 1 + 6 * -(-MAX_SEQ_LEN // PAGE_SIZE),
        "captured": False,
    } | changes
    if kind == "one-model":
        return OneModelStep(models.target, models.head, **settings)
    page_size = settings.pop("draft_page_size", 7)
    return TwoModelStep(
        models.target,
        {"eagle": models.head, "itself": models.target, "other": models.other}[kind],
        draft_page_size=page_size,
        draft_num_pages=1 + 6 * -(-MAX_SEQ_LEN // page_size),
        **settings,
    )


@dataclass
class Run:
    """What came of a run: by request, and by how many tokens it had, the drafts made then."""

    texts: list[list[int]]
    drafts: list[dict[int, list[int]]]
    drafted: list[int]
    accepted: list[int]
    shapes: set[Shape] = field(default_factory=set)


def drive(
    step: Step,
    prompts: list[list[int]],
    *,
    limit: Callable[[int, int], int] | None = None,
    sampled: tuple[int, ...] = (),
    shuffle: int = 0,
    ladder: tuple[int, ...] = (1, 2, 4),
) -> Run:
    """Serve `prompts`: a host loop without any policy.

    `limit` says how many drafts of a request are verified in a step.
    """
    draw = random.Random(shuffle)
    k, batch, draft_batch = step.num_drafts, step.batch, step.draft_batch
    slots = draw.sample(range(batch.max_slots), len(prompts))
    run = Run([[] for _ in prompts], [{} for _ in prompts], [0] * k, [0] * k)
    left = [len(prompt) for prompt in prompts]  # of the prompt
    count = 0
    while any(len(text) < NEW_TOKENS for text in run.texts):
        for i, arrival in enumerate(ARRIVALS[: len(prompts)]):
            if arrival != count:
                continue
            for b, prompt in ((batch, prompts[i]), (draft_batch, [])):
                if b is not None:
                    first = 1 + slots[i] * b.max_pages
                    pages = draw.sample(range(first, first + b.max_pages), b.max_pages)
                    b.assign(slots[i], prompt, pages)
            if i in sampled:
                params = SamplingParams(temperature=1.0, top_p=0.9, seed=40 + i)
                step.sampling.set(slots[i], params)
        live = [
            i
            for i, arrival in enumerate(ARRIVALS[: len(prompts)])
            if arrival <= count and len(run.texts[i]) < NEW_TOKENS
        ]
        draw.shuffle(live)
        live = live[: batch.max_rows]
        rows = next(n for n in ladder if n >= len(live))
        lens = [min(CHUNK, left[i]) or 1 + (k if limit is None else limit(i, count)) for i in live]
        if any(left[i] > 0 for i in live):
            shape = Shape(rows, batch.max_tokens, max(CHUNK, k + 1))
            while sum(lens) > shape.num_tokens:
                lens.pop()
            live = live[: len(lens)]
        else:
            shape = Shape(rows, rows * (k + 1), k + 1)
        run.shapes.add(shape)
        batch.set_rows([slots[i] for i in live], lens)
        for launch in step.launches(shape, sampling=bool(sampled)):
            launch()
        outcome = step.outcome.tolist()
        for row, i in enumerate(live):
            bits, committed, verified, *emitted = outcome[row]
            assert bits == 0, Status(bits)
            emitted = [token for token in emitted if token >= 0]
            if left[i] > 0:
                left[i] = max(left[i] - lens[row], 0)
                assert bool(emitted) == (left[i] == 0)
            else:
                assert verified == min(lens[row] - 1, k)
                assert 1 <= len(emitted) <= verified + 1
            for position in range(verified):
                run.drafted[position] += 1
                run.accepted[position] += position < len(emitted) - 1
            run.texts[i] += emitted
            slot = slots[i]
            assert committed == int(batch.committed_lens[slot])
            known = int(batch.known_lens[slot])
            made = int(batch.num_drafts[slot])
            assert made == (k if left[i] == 0 else 0) or left[i] == 1
            run.drafts[i][known] = batch.tokens[slot, known : known + made].tolist()
        for row in range(len(live), rows):
            assert outcome[row] == [0, 0, 0] + [-1] * (k + 1)
        count += 1
    assert not batch.status.any()
    return run


def assert_texts(run: Run, expected: list[list[int]]) -> None:
    for text, right in zip(run.texts, expected, strict=True):
        assert text[:NEW_TOKENS] == right[:NEW_TOKENS]


@pytest.mark.parametrize("num_drafts", range(4))
def test_both_kinds_of_eagle_are_one(models: Models, num_drafts: int) -> None:
    """The same texts, the same drafts at every place, and so the same acceptance."""
    runs = [
        drive(make_step(models, kind, num_drafts=num_drafts), models.prompts)
        for kind in ("one-model", "eagle")
    ]
    for run in runs:
        assert_texts(run, models.expected)
    one, two = runs
    assert one.drafts == two.drafts
    assert (one.drafted, one.accepted) == (two.drafted, two.accepted)
    if num_drafts:
        # Where drafts stand, what the head wrote for them is written anew; where they fall, left.
        assert 0.2 < sum(one.accepted) / sum(one.drafted) < 0.9
    assert len(two.shapes) > 3


@pytest.mark.parametrize("draft_page_size", [1, 3, 4, 16, MAX_SEQ_LEN])
def test_any_page_size_drafts_the_same(models: Models, draft_page_size: int) -> None:
    step = make_step(models, "eagle", num_drafts=3, draft_page_size=draft_page_size)
    expected = make_step(models, "one-model", num_drafts=3, page_size=5, num_pages=100)
    assert drive(step, models.prompts) == drive(expected, models.prompts)


@pytest.mark.parametrize("num_drafts", range(4))
def test_a_target_that_drafts_for_itself_is_always_right(models: Models, num_drafts: int) -> None:
    run = drive(make_step(models, "itself", num_drafts=num_drafts), models.prompts)
    assert_texts(run, models.expected)
    assert run.accepted == run.drafted
    assert all(run.drafted)


def drafts_of(model: LlamaForCausalLM, models: Models, run: Run) -> list[dict[int, list[int]]]:
    """Return what `model` drafts at the places of `run`, with no cache and no paging."""
    places = []
    for prompt, text, drafts in zip(models.prompts, run.texts, run.drafts, strict=True):
        tokens = prompt + text
        places.append({n: greedy(model, tokens[:n], len(made)) for n, made in drafts.items()})
    return places


@pytest.mark.parametrize("draft_page_size", [1, 3, 9])
def test_every_draft_is_the_other_models_own(models: Models, draft_page_size: int) -> None:
    step = make_step(models, "other", num_drafts=3, draft_page_size=draft_page_size)
    run = drive(step, models.prompts)
    assert_texts(run, models.expected)
    models.other.set_attn_implementation("sdpa")
    try:
        assert run.drafts == drafts_of(models.other, models, run)
    finally:
        paged(models.other)
    assert 0 < sum(run.accepted) < sum(run.drafted)


@pytest.mark.parametrize("kind", ["one-model", "eagle", "itself", "other"])
def test_draft_lengths_differ_by_row_and_step(models: Models, kind: str) -> None:
    free = drive(make_step(models, kind, num_drafts=3), models.prompts)
    run = drive(
        make_step(models, kind, num_drafts=3),
        models.prompts,
        limit=lambda request, count: (request + count // 2) % 4,
        shuffle=1,
    )
    assert_texts(run, models.expected)
    assert run.drafted[0] > run.drafted[1] > run.drafted[2] > 0
    # A draft that nobody verified leaves nothing behind: the next are those of any other run.
    compared = 0
    for made, expected in zip(run.drafts, free.drafts, strict=True):
        for known in made.keys() & expected.keys():
            assert made[known] == expected[known]
            compared += 1
    assert compared >= 15
    none = drive(make_step(models, kind, num_drafts=3), models.prompts, limit=lambda *_: 0)
    assert_texts(none, models.expected)
    assert none.drafted == [0] * 3


@pytest.mark.parametrize("kind", ["one-model", "eagle", "other"])
def test_a_step_full_of_prompts_still_drafts(models: Models, kind: str) -> None:
    """A draft model then reads one token more a row than the target, which fills the step."""
    step = make_step(models, kind, num_drafts=2)
    batches = [step.batch, *([step.draft_batch] if step.draft_batch else [])]
    for slot in range(2):
        for batch in batches:
            prompt = [5, 6, 7, 8, 9, 10, 11, 12] if batch is step.batch else []
            batch.assign(slot, prompt, [1 + 16 * slot + i for i in range(batch.max_pages)])
    step.batch.set_rows([0, 1], [8, 8])
    for launch in step.launches(Shape(2, 16, 8)):
        launch()
    assert step.batch.num_drafts.tolist()[:2] == [2, 2]
    assert not any(batch.status.any() for batch in batches)


@pytest.mark.parametrize("kind", ["one-model", "eagle", "itself", "other"])
def test_sampled_texts_do_not_depend_on_drafts(models: Models, kind: str) -> None:
    """Sampled beside greedy rows; other rows, chunks and drafts, the same texts."""
    sampled = (0, 2, 3)
    plain = make_step(models, "one-model", num_drafts=0)
    expected = drive(plain, models.prompts, sampled=sampled)
    for i, text in enumerate(expected.texts):
        assert (text[:NEW_TOKENS] == models.expected[i][:NEW_TOKENS]) == (i not in sampled)
    for num_drafts in (1, 3):
        step = make_step(models, kind, num_drafts=num_drafts)
        run = drive(step, models.prompts, sampled=sampled, shuffle=2)
        assert_texts(run, expected.texts)
        assert sum(run.accepted) > 0


def test_greedy_launches_ignore_settings(models: Models) -> None:
    step = make_step(models, "eagle", num_drafts=2)
    step.sampling.temperature.fill_(1.0)
    assert_texts(drive(step, models.prompts), models.expected)


@pytest.mark.parametrize("kind", ["one-model", "eagle", "other"])
def test_padding_touches_no_page(models: Models, kind: str) -> None:
    step = make_step(models, kind, num_drafts=2)
    drive(step, models.prompts[:2])
    caches = [step.target_cache, step.drafter.cache]  # type: ignore[attr-defined]
    batches = [step.batch, step.draft_batch or step.batch]
    state = [b.written_lens for b in batches] + [step.batch.tokens, step.batch.num_drafts]
    tensors = [
        tensor[cache.page_size :]  # page 0 alone takes what padding writes
        for cache in caches
        for tensor in (*cache.keys, *cache.values)
    ]
    before = [tensor.clone() for tensor in tensors + state]
    step.batch.set_rows([-1, -1], [3, 3])
    for shape in (Shape(4, 12, 3), Shape(2, 16, 5), Shape(1, 3, 3)):
        for launch in step.launches(shape):
            launch()
        assert step.outcome[: shape.rows].tolist() == [[0, 0, 0, -1, -1, -1]] * shape.rows
    for tensor, old in zip(tensors + state, before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("kind", ["one-model", "eagle", "other"])
def test_captured(models: Models, kind: str) -> None:
    """Traced or captured, a step does the same: nothing in it reads a value back to the host."""
    runs = [
        drive(
            make_step(models, kind, num_drafts=2, captured=captured),
            models.prompts,
            sampled=(1, 2),
            ladder=(4,),
        )
        for captured in (False, True)
    ]
    assert runs[0] == runs[1]


def test_faults_are_reported_by_row(models: Models) -> None:
    step = make_step(models, "eagle", num_drafts=2)
    batch, draft_batch = step.batch, step.draft_batch
    assert draft_batch is not None
    for slot in (1, 3, 4):
        batch.assign(slot, [5, 6, 7], [1 + 8 * slot + i for i in range(8)])
        draft_batch.assign(slot, [], [1 + 8 * slot + i for i in range(8)])
    shape = Shape(4, 12, 3)

    def bits() -> list[int]:
        batch.set_rows([3, -1, 1, 4], [3] * 4)
        for launch in step.launches(shape):
            launch()
        return step.outcome[:, 0].tolist()

    assert bits() == [0, 0, 0, 0]
    batch.num_drafts[3] = -5
    draft_batch.written_lens[1] = -1
    assert bits() == [Status.BAD_COUNT, 0, 0, 0]
    assert bits() == [Status.BAD_COUNT, 0, Status.BAD_COUNT, 0]  # the drafter's, a step late
    assert step.outcome[:, 3].tolist()[1:] == [-1, *step.outcome[2:, 3].tolist()]
    assert min(step.outcome[2:, 3].tolist()) >= 0  # its neighbours go on, and the row of bad drafts
    for b, prompt in ((batch, [5, 6, 7]), (draft_batch, [])):
        b.assign(3, prompt, [1 + 24 + i for i in range(8)])
        b.assign(1, prompt, [1 + 8 + i for i in range(8)])
    assert bits() == [0, 0, 0, 0]
    batch.row_to_slot[0] = 17
    for launch in step.launches(shape):
        launch()
    assert step.outcome[:, 0].tolist() == [Status.BAD_SLOT, 0, 0, 0]


@pytest.mark.parametrize("device", ["cpu"], scope="session")
@pytest.mark.parametrize("kind", ["eagle", "other"])
@pytest.mark.parametrize("num_drafts", range(4))
def test_two_graphs(models: Models, kind: str, num_drafts: int) -> None:
    step = make_step(models, kind, num_drafts=num_drafts)
    shape = Shape(2, 2 * (num_drafts + 1), num_drafts + 1)
    names = [operations(launch) for launch in step.launches(shape)]
    expected = [["stage", "accept_greedy"], ["stage"] + ["draft_step"] * num_drafts]
    assert names == expected[: 2 if num_drafts else 1]
    sampling = step.launches(shape, sampling=True)
    assert operations(sampling[0]) == ["stage", "accept_sampled"]


@pytest.mark.parametrize("device", ["cpu"], scope="session")
def test_graphs_are_made_once(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def count(part: Callable[[], None], num_rows: torch.Tensor, pool: object) -> Captured:
        made.append(part)
        return Captured(None, part)

    monkeypatch.setattr("specmeta.serving.step.capture", count)
    step = make_step(models, "eagle", num_drafts=1, captured=True)
    shape = Shape(1, 2, 2)
    first = step.launches(shape)
    assert step.launches(Shape(1, 2, 2)) is first
    assert len(made) == len(first) == 2
    assert step.launches(shape, sampling=True) is not first
    assert step.launches(Shape(2, 4, 2)) is not first
    assert len(made) == 6


@pytest.mark.parametrize("device", ["cpu"], scope="session")
def test_a_drafter_of_another_vocabulary(models: Models) -> None:
    other = tiny_models.target(vocab_size=31)
    with pytest.raises(ValueError, match="expected the target's vocabulary of 29, got 31"):
        make_step(Models(models.target, models.head, other, [], []), "other", num_drafts=1)
