"""The engine: every text is what the request alone would have got, whatever happens beside it."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import broken_metadata
import pytest
import torch
from tiny_serving import KINDS, MAX_SEQ_LEN, NUM_DRAFTS, VOCAB, World, check_no_trace, make_world

from specmeta import BatchMetadata, models
from specmeta.generate import Text, plain_greedy
from specmeta.serving import one_model, scheduler, step, two_model
from specmeta.serving.attention import KVCache, PagedPass
from specmeta.serving.engine import Engine
from specmeta.serving.request import Request, RequestError, SamplingParams
from specmeta.serving.step import Shape

# For what no device can change.
cpu_only = pytest.mark.parametrize("device", ["cpu"], scope="session")
overlaps = pytest.mark.parametrize("overlap", [False, True])
kinds = pytest.mark.parametrize("kind", KINDS)
SPECULATIVE = KINDS[1:]
# Too few for the requests that run at once, enough for the longest.
FEW_PAGES: dict[str, dict[str, int]] = {
    "plain": {"num_pages": 19},
    "one-model": {"num_pages": 21},
    "two-model eagle": {"num_pages": 40, "draft_num_pages": 26},
    "two-model llama": {"num_pages": 21, "draft_num_pages": 20},
}


@pytest.fixture(scope="module")
def world(device: str) -> World:
    return make_world(device)


@pytest.fixture(scope="module")
def ending(world: World) -> World:
    """The same model with an end token, one that its texts have."""
    return world.with_ends(world.texts[0][30])


def random_params(rng: random.Random, world: World, prompt: list[int], k: int) -> SamplingParams:
    stops = []
    if rng.random() < 0.3:
        text = world.decode(rng.choice(world.texts))
        begin = rng.randrange(20, 40)
        stops.append(text[begin : begin + rng.choice((1, 1, 2, 3))])
    return SamplingParams(
        max_new_tokens=rng.randint(1, min(30, MAX_SEQ_LEN - len(prompt))),
        temperature=rng.choice((0.0, 0.0, 0.0, 0.7)),
        top_p=rng.choice((1.0, 0.9)),
        seed=rng.randrange(2**40),
        stop=tuple(stops),
        num_drafts=rng.choice((None, rng.randint(0, k))),
        ignore_end=rng.random() < 0.2,
    )


def serve(
    world: World,
    engine: Engine,
    *,
    count: int,
    seed: int = 0,
    cancel: float = 0.0,
    disturb: Callable[[int, list[Request]], None] = lambda step, requests: None,
) -> list[Request]:
    """Send requests at random times, cancel some, and run to the end."""
    rng, requests, busy, turn = random.Random(seed), [], True, 0
    while busy or len(requests) < count:
        while len(requests) < count and rng.random() < 0.5:
            prompt = world.prompt(rng)
            params = random_params(rng, world, prompt, engine._num_drafts)
            requests.append(engine.submit(prompt, params))
        if requests and rng.random() < cancel:
            engine.cancel(rng.choice(requests))
        disturb(turn, requests)
        busy = engine.step()
        turn += 1
        assert turn < 10_000
    return requests


def submit_greedy(engine: Engine, prompts: list[list[int]], count: int) -> list[Request]:
    return [engine.submit(prompt, SamplingParams(max_new_tokens=count)) for prompt in prompts]


# Texts.


@overlaps
@kinds
def test_every_text_is_its_own(ending: World, kind: str, overlap: bool) -> None:
    engine = ending.engine(kind, overlap=overlap, **FEW_PAGES[kind])
    requests = serve(ending, engine, count=16, cancel=0.05)
    for request in requests:
        ending.check(request)
    assert engine.stats.faults == engine.stats.failures == 0
    assert engine.stats.preemptions > 0
    assert {"length", "end", "cancelled", "stop"} == {request.finish for request in requests}
    check_no_trace(engine)


@overlaps
@kinds
def test_equals_transformers(world: World, kind: str, overlap: bool) -> None:
    engine = world.engine(kind, overlap=overlap)
    rng = random.Random(1)
    requests = submit_greedy(engine, [world.prompt(rng) for _ in range(5)], 24)
    engine.run()
    texts = [Text("", request.prompt_ids) for request in requests]
    expected = plain_greedy(world.model, texts, max_new_tokens=24)
    assert [request.token_ids for request in requests] == expected
    if kind != "plain":
        assert 0.1 < sum(engine.stats.accepted) / sum(engine.stats.drafted) < 1


@overlaps
@kinds
def test_captured_equals_eager(world: World, kind: str, overlap: bool) -> None:
    # Every shape takes seconds to trace: two rows, few drafts.
    runs = []
    for captured in (False, True):
        k = 0 if kind == "plain" else 2
        engine = world.engine(kind, overlap=overlap, captured=captured, num_drafts=k, max_rows=2)
        rng = random.Random(2)
        requests = submit_greedy(engine, [world.prompt(rng) for _ in range(3)], 12)
        engine.run()
        for request in requests:
            world.check(request)
        check_no_trace(engine)
        runs.append((engine.stats.steps, engine.stats.accepted))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("kind", SPECULATIVE)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_acceptance_with_overlap_is_acceptance_without(
    world: World, kind: str, temperature: float
) -> None:
    rng = random.Random(5)
    submitted = [
        (
            world.prompt(rng),
            SamplingParams(
                max_new_tokens=rng.randint(1, 40),
                temperature=temperature,
                seed=seed,
                num_drafts=rng.choice((None, 1, 2)),
            ),
        )
        for seed in range(12)
    ]
    counts = []
    for overlap in (False, True):
        engine = world.engine(kind, overlap=overlap)
        requests = []
        for prompt, params in submitted:
            requests.append(engine.submit(prompt, params))
            engine.step()
        engine.run()
        assert engine.stats.preemptions == 0
        counts.append([(r.drafted, r.accepted, r.target_passes, r.token_ids) for r in requests])
    assert counts[0] == counts[1]
    assert sum(sum(accepted) for _, accepted, _, _ in counts[0]) > 20


@pytest.mark.parametrize("kind", SPECULATIVE)
def test_end_tokens_inside_accepted_drafts(world: World, kind: str) -> None:
    """Tokens take turns as the end, so that it falls on each place of a draft."""
    cut = 0
    prompts = [text[:length] for text in world.texts for length in (15, 22)]
    for end in sorted({token for text in world.texts for token in text[22:34]})[::2]:
        ending = world.with_ends(end)
        engine = ending.engine(kind, max_rows=8, max_tokens=40, num_pages=160)
        requests = submit_greedy(engine, prompts, 12)
        engine.run()
        for request in requests:
            ending.check(request)
            came = request.target_passes + sum(request.accepted) + 1
            cut += came > len(request.token_ids) and request.finish == "end"
        check_no_trace(engine)
    assert cut > 1


def test_at_the_last_position(world: World) -> None:
    for kind in KINDS:
        for overlap in (False, True):
            engine = world.engine(kind, overlap=overlap)
            prompts = [world.texts[0][:40], world.texts[1][:1]]
            requests = [
                engine.submit(prompt, SamplingParams(max_new_tokens=MAX_SEQ_LEN - len(prompt)))
                for prompt in prompts
            ]
            engine.run()
            for request in requests:
                world.check(request)
                assert request.finish == "length"
            check_no_trace(engine)


@cpu_only
def test_rows_are_chosen_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of: dict[int, set[int]] = {}
    set_rows = BatchMetadata.set_rows

    def note(batch: BatchMetadata, slots: list[int], query_lens: list[int]) -> None:
        for row, slot in enumerate(slots):
            rows_of.setdefault(slot, set()).add(row)
        set_rows(batch, slots, query_lens)

    monkeypatch.setattr(BatchMetadata, "set_rows", note)
    engine = world.engine("one-model")
    for request in serve(world, engine, count=12):
        world.check(request)
    assert sum(len(rows) for rows in rows_of.values()) > 2 * len(rows_of)


@cpu_only
def test_graphs_for_a_ladder_of_batch_sizes(world: World) -> None:
    engine = world.engine("one-model", max_rows=6, max_tokens=26)
    shapes: set[Shape] = set()
    launches = engine._step.launches

    def note(shape: Shape, **settings: Any) -> list[Callable[[], None]]:
        shapes.add(shape)
        return launches(shape, **settings)

    engine._step.launches = note  # type: ignore[method-assign]
    serve(world, engine, count=20)
    assert {shape for shape in shapes if shape.query_len == 4} == {
        Shape(rows, 4 * rows, 4) for rows in (1, 2, 4, 6)
    }
    assert {shape for shape in shapes if shape.query_len != 4} <= {
        Shape(rows, min(5 * rows, 26), 5) for rows in (1, 2, 4, 6)
    }


@cpu_only
def test_warmed_up_nothing_is_left_to_capture(world: World) -> None:
    engine = world.engine("two-model eagle", captured=True, num_drafts=1, max_rows=2)
    calls: list[tuple[int, int]] = []
    engine.warm_up(lambda done, total: calls.append((done, total)))
    assert calls == [(i, 8) for i in range(1, 9)]
    prepared = dict(engine._step._launches)
    for request in serve(world, engine, count=4):
        world.check(request)
    assert engine._step._launches == prepared


# What the seed got wrong. Each switch changes one thing, and the text or the acceptance shows it.


def run_greedy(world: World, kind: str = "one-model") -> tuple[bool, float]:
    """Return whether the texts are right, and how many of the drafts stood."""
    engine = world.engine(kind)
    prompts = [text[:12] for text in world.texts[:4]]
    requests = submit_greedy(engine, prompts, 24)
    engine.run()
    right = [text[12:36] for text in world.texts[:4]]
    accepted = sum(engine.stats.accepted) / sum(engine.stats.drafted)
    return [request.token_ids for request in requests] == right, accepted


@cpu_only
@pytest.mark.parametrize("kind", SPECULATIVE)
def test_without_the_count_text_and_acceptance_collapse(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, accepted = run_greedy(world, kind)
    assert right
    monkeypatch.setattr(BatchMetadata, "accept_greedy", broken_metadata.without_commit)
    engine = world.engine(kind)
    (request,) = submit_greedy(engine, [world.texts[0][:12]], 24)
    engine.run()
    assert "committed tokens: expected" in request.error  # the host sees it
    monkeypatch.setattr(scheduler, "_find_fault", lambda *_: "")
    right, broken = run_greedy(world, kind)
    assert not right
    # A Llama goes along with the garbage: it reads the same.
    assert kind == "two-model llama" or broken < 0.75 * accepted


@cpu_only
def test_without_the_rewind_acceptance_drops(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _, accepted = run_greedy(world)
    monkeypatch.setattr(BatchMetadata, "accept_greedy", broken_metadata.without_rewind)
    right, broken = run_greedy(world)
    assert right
    assert broken < accepted


@cpu_only
def test_allocated_pages_are_not_used_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_pages(batch: BatchMetadata, cache: KVCache, shape: Shape) -> PagedPass:
        """As kernels over pages do: they find lengths by the page lists."""
        pages = batch.pages_per_seq
        return PagedPass(
            cache,
            slot_mapping=batch.slot_mapping[: shape.num_tokens],
            block_table=batch.block_table,
            seq_lens=((pages - 1) * batch.page_size + batch.last_page_len).where(pages > 0, 0),
            cu_seqlens_q=batch.cu_seqlens_q,
            max_query_len=shape.query_len,
        )

    for module in (step, one_model, two_model):
        monkeypatch.setattr(module, "verify_pass", by_pages)
    assert run_greedy(world)[0]
    monkeypatch.setattr(BatchMetadata, "stage", broken_metadata.all_pages_are_used)
    assert not run_greedy(world)[0]


@cpu_only
def test_pages_are_read_again_for_every_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_greedy(world)[0]
    monkeypatch.setattr(BatchMetadata, "stage", broken_metadata.pages_are_read_once())
    assert not run_greedy(world)[0]


# Faults.


@cpu_only
@overlaps
@pytest.mark.parametrize("kind", SPECULATIVE)
def test_an_exception_in_a_step(world: World, kind: str, overlap: bool) -> None:
    # In the first step and later ones, in the target's part or in the drafter's.
    for failing, behind in ((0, True), (3, False), (6, True), (9, False)):
        engine = world.engine(kind, overlap=overlap)
        fail_at(engine, {failing}, behind=behind)
        requests = submit_greedy(engine, [text[:9] for text in world.texts[:4]], 12)
        engine.run()
        for request in requests:
            world.check(request)
            assert request.finish == "length"
        assert engine.stats.failures == 1
        assert engine.stats.faults == 0
        check_no_trace(engine)


def fail_at(engine: Engine, failing: set[int], *, behind: bool = False) -> None:
    """Make an engine's launches fail, counted from 0, before they do anything or behind it."""
    launches, count = engine._step.launches, 0

    def wrap(launch: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            nonlocal count
            count += 1
            if behind or count - 1 not in failing:
                launch()
            if count - 1 in failing:
                raise RuntimeError(f"launch {count - 1} fails")

        return run

    def wrapped(shape: Shape, **settings: Any) -> list[Callable[[], None]]:
        return [wrap(launch) for launch in launches(shape, **settings)]

    engine._step.launches = wrapped  # type: ignore[method-assign]


@cpu_only
@overlaps
def test_the_second_exception_in_a_row_is_raised(world: World, overlap: bool) -> None:
    engine = world.engine("one-model", overlap=overlap)
    fail_at(engine, {3, 4, 9})
    rng = random.Random(0)
    requests = submit_greedy(engine, [world.prompt(rng) for _ in range(4)], 12)
    with pytest.raises(RuntimeError, match="launch 4 fails"):
        engine.run()
    engine.run()  # nothing is lost: whoever likes may go on
    for request in requests:
        world.check(request)
    assert engine.stats.failures == 3
    check_no_trace(engine)


Corrupt = Callable[[BatchMetadata, int], None]


def put(name: str, value: int) -> Corrupt:
    def corrupt(batch: BatchMetadata, slot: int) -> None:
        getattr(batch, name)[slot] = value

    return corrupt


def add(name: str, value: int) -> Corrupt:
    def corrupt(batch: BatchMetadata, slot: int) -> None:
        getattr(batch, name)[slot] += value

    return corrupt


def drop_a_page(batch: BatchMetadata, slot: int) -> None:
    batch.page_table[slot, 0] = -7


CORRUPTIONS: dict[str, Corrupt] = {
    "known_lens negative": put("known_lens", -3),
    "known_lens huge": put("known_lens", 2**31 - 1),
    "known_lens one more": add("known_lens", 1),
    "known_lens one less": add("known_lens", -1),
    "committed_lens negative": put("committed_lens", -1),
    "committed_lens huge": put("committed_lens", 2**31 - 1),
    "committed_lens more": add("committed_lens", 2),
    "committed_lens less": add("committed_lens", -2),
    "num_drafts negative": put("num_drafts", -1),
    "num_drafts huge": put("num_drafts", 2**31 - 1),
    "num_pages negative": put("num_pages", -1),
    "num_pages huge": put("num_pages", 2**31 - 1),
    "num_pages none": put("num_pages", 0),
    "a page negative": drop_a_page,
    "num_accepted": lambda batch, slot: batch.num_accepted.fill_(1000),
    "written_lens negative": put("written_lens", -5),
    "written_lens huge": put("written_lens", 2**31 - 1),
    "status": put("status", 4),
}


@cpu_only
@pytest.mark.parametrize("kind", SPECULATIVE)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupted_count(world: World, kind: str, name: str) -> None:
    for overlap in (True, False) if kind == "one-model" else (True,):
        engine = world.engine(kind, overlap=overlap)
        requests = submit_greedy(engine, [text[:9] for text in world.texts[:3]], 20)
        for _ in range(5):
            engine.step()
        seat = engine._scheduler.running[1]
        for batch in engine._batches:
            CORRUPTIONS[name](batch, seat.slot)
        engine.run()
        for request in requests:
            world.check(request)
        check_no_trace(engine)


@cpu_only
def test_a_request_that_fails_twice_ends_with_an_error(world: World) -> None:
    for kind in SPECULATIVE:
        engine = world.engine(kind)
        requests = submit_greedy(engine, [text[:9] for text in world.texts[:3]], 20)
        while engine.step():
            for seat in engine._scheduler.running:
                if seat.request is requests[1] and requests[1].token_ids:
                    engine._step.batch.num_pages[seat.slot] = -1
        assert [request.finish for request in requests] == ["length", "error", "length"]
        assert "BAD_COUNT" in requests[1].error
        assert engine.stats.faults == 2
        for request in (requests[0], requests[2]):
            world.check(request)
        check_no_trace(engine)


@cpu_only
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_no_numbers(world: World, temperature: float) -> None:
    poison = VOCAB - 1
    prompts = [[t for t in text if t != poison][:9] for text in world.texts[:3]]
    prompts[1] = [*prompts[1], poison]
    embedding = world.model.target.model.embed_tokens.weight
    kept = embedding[poison].clone()
    for kind in KINDS:
        engine = world.engine(kind)
        params = SamplingParams(max_new_tokens=4, temperature=temperature, seed=3)
        requests = [engine.submit(prompt, params) for prompt in prompts]
        with torch.no_grad():
            embedding[poison] = torch.nan
            engine.run()
            embedding[poison] = kept
        assert requests[1].finish == "error"
        assert "tokens that came out: expected at least one, got 0" in requests[1].error
        for request in (requests[0], requests[2]):
            if poison not in request.token_ids:
                world.check(request)
        check_no_trace(engine)


# Requests that come and go.


@cpu_only
@overlaps
def test_cancel_at_any_time(world: World, overlap: bool) -> None:
    for when in range(0, 10, 3):
        engine = world.engine("two-model llama", overlap=overlap)
        requests = submit_greedy(engine, [text[:9] for text in world.texts[:5]], 16)
        for _ in range(when):
            engine.step()
        for request in requests[1::2]:
            engine.cancel(request)
            engine.cancel(request)
        engine.run()
        for request in requests:
            world.check(request)
        check_no_trace(engine)


@cpu_only
def test_a_finished_request_leaves_no_trace(world: World) -> None:
    engine = world.engine("one-model")
    request = engine.submit(world.texts[0][:5], SamplingParams(max_new_tokens=5))
    watch = weakref.ref(request)
    engine.run()
    del request
    gc.collect()
    assert watch() is None
    check_no_trace(engine)
    assert not engine.step()


@cpu_only
def test_text_comes_in_pieces(world: World) -> None:
    engine = world.engine("one-model")
    pieces: list[list[str]] = [[] for _ in range(4)]
    requests = [
        engine.submit(text[:8], SamplingParams(max_new_tokens=15), on_text=pieces[i].append)
        for i, text in enumerate(world.texts[:4])
    ]
    engine.cancel(requests[3])
    engine.run()
    for request, got in zip(requests, pieces, strict=True):
        assert "".join(got) == request.text
        assert got.count("") == 1
        assert got[-1] == ""
    assert pieces[3] == [""]
    assert all(len(got) > 5 for got in pieces[:3])  # as soon as they come


@cpu_only
def test_what_on_text_raises_harms_nobody(world: World) -> None:
    def gone(piece: str) -> None:
        raise OSError("gone")

    engine = world.engine("one-model")
    prompts = [text[:8] for text in world.texts[:3]]
    told: list[str] = []
    callbacks = [told.append, gone, told.append]
    requests = [
        engine.submit(prompt, SamplingParams(max_new_tokens=12), on_text=on_text)
        for prompt, on_text in zip(prompts, callbacks, strict=True)
    ]
    raised = 0
    busy = True
    while busy or engine._to_tell:
        try:
            busy = engine.step()
        except OSError:
            raised += 1
    assert raised > 3
    for request in requests:
        world.check(request)
    assert len("".join(told)) == 24
    assert told.count("") == 2
    check_no_trace(engine)


@cpu_only
def test_bad_requests(world: World) -> None:
    engine = world.engine("one-model")
    for prompt, params, message in (
        ([], {}, "a prompt is empty"),
        ("", {}, "a prompt is empty"),
        ("a\udcff", {}, "isn't valid Unicode"),
        ([VOCAB], {}, f"a prompt: expected ids below {VOCAB}, got {VOCAB}"),
        ([-1], {}, "a prompt: expected ids of at least 0, got -1"),
        ([0] * 60, {"max_new_tokens": 5}, "60 tokens and 5 new ones: the limit is 64"),
        ([0], {"num_drafts": 4}, r"num_drafts: expected 0 \.\. 3, got 4"),
        ([1.5, 2], {}, "prompt: expected a string or token ids, got 1.5 among them"),
        ([1, True], {}, "prompt: expected a string or token ids, got True among them"),
        (["a", "b"], {}, "prompt: expected a string or token ids, got 'a' among them"),
        (None, {}, "prompt: expected a string or token ids, got None"),
        (3, {}, "prompt: expected a string or token ids, got 3"),
        (torch.tensor(3), {}, r"prompt: expected a string or token ids, got tensor\(3\)"),
        ([torch.tensor(3)], {}, r"prompt: expected .*, got tensor\(3\) among them"),
        (b"ab", {}, "prompt: expected a string or token ids, got b'ab'"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.submit(prompt, SamplingParams(**params))
    for params, on_text, message in (
        ({"temperature": 0.5}, None, "params: expected SamplingParams, got {'temperature': 0.5}"),
        (None, "print", "on_text: expected a function, got 'print'"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.submit([0], params, on_text=on_text)
    assert not engine.step()
    # A pool that can't ever hold it: told at once, not waited for.
    engine = world.engine("two-model eagle", draft_num_pages=7)
    assert engine.max_seq_len == 18
    with pytest.raises(RequestError, match="the limit is 18"):
        engine.submit([0] * 10, SamplingParams(max_new_tokens=9))
    request = engine.submit(world.texts[0][:10], SamplingParams(max_new_tokens=8))
    engine.run()
    world.check(request)
    check_no_trace(engine)


@cpu_only
def test_extreme_parameters_stop_nobody(world: World) -> None:
    # float32 can't hold them: they must neither raise in a step nor lose the most likely token.
    engine = world.engine("one-model")
    extremes = ({"temperature": 1e300}, {"temperature": 10**400}, {"temperature": 1e-300})
    params = [SamplingParams(max_new_tokens=4, **extreme) for extreme in extremes]
    params += [SamplingParams(max_new_tokens=4, temperature=0.7, top_p=1e-300)]
    params += [SamplingParams(max_new_tokens=4)]
    requests = [engine.submit(world.texts[0][:5], p) for p in params]
    engine.run()
    assert [len(request.token_ids) for request in requests] == [4] * 5
    assert requests[0].token_ids == requests[1].token_ids
    greedy = requests[4]
    assert requests[2].token_ids == requests[3].token_ids == greedy.token_ids


@cpu_only
def test_prompts_of_other_types(world: World) -> None:
    prompt = world.texts[0][:5]
    engine = world.engine("plain")
    requests = [
        engine.submit(p, SamplingParams(max_new_tokens=2))
        for p in (prompt, tuple(prompt), torch.tensor(prompt), torch.tensor(prompt).numpy())
    ]
    engine.run()
    assert all(request.prompt_ids == prompt for request in requests)
    assert {type(token) for request in requests for token in request.prompt_ids} == {int}


@cpu_only
def test_cancelling_what_is_another_engines(world: World) -> None:
    engine, other = (world.engine("one-model") for _ in range(2))
    request = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=9))
    engine.step()
    with pytest.raises(RequestError, match="request: expected one of this engine's, got <Request"):
        other.cancel(request)
    with pytest.raises(RequestError, match="request: expected what submit returned, got None"):
        engine.cancel(None)  # type: ignore[arg-type]
    engine.cancel(request)
    engine.run()
    assert request.finish == "cancelled"


@cpu_only
def test_bad_settings(world: World) -> None:
    for changes, message in (
        ({"max_rows": 0}, "max_rows"),
        ({"max_tokens": NUM_DRAFTS}, "max_tokens: expected at least 4, got 3"),
        ({"prompt_chunk": 0}, "prompt_chunk"),
        ({"page_size": 0}, "page_size"),
        ({"num_pages": 0}, "num_pages"),
        ({"num_drafts": -1}, "num_drafts"),
        ({"num_pages": 1}, "num_pages: expected at least 2, got 1"),
        ({"num_pages": 2.5}, "num_pages: expected an integer, got 2.5"),
        ({"max_rows": "4"}, "max_rows: expected an integer, got '4'"),
        ({"max_tokens": 8.0}, "max_tokens: expected an integer, got 8.0"),
        ({"prompt_chunk": None}, "prompt_chunk: expected an integer, got None"),
        ({"max_rows": None}, "max_rows: expected an integer, got None"),
        ({"num_drafts": None}, "num_drafts: expected an integer, got None"),
        ({"max_seq_len": 0}, "max_seq_len: expected at least 1, got 0"),
        ({"draft_page_size": 0}, "draft_page_size: expected at least 1, got 0"),
        ({"draft_num_pages": 1}, "draft_num_pages: expected at least 2, got 1"),
        ({"draft": world.draft.target}, "draft: expected what .* returns, got LlamaForCausalLM"),
        ({"draft": world.draft, "two_model": True}, "two_model: expected False beside a draft"),
    ):
        with pytest.raises(ValueError, match=message):
            world.engine("one-model", **changes)
    with pytest.raises(ValueError, match=r"model: expected what .*load returns, got str"):
        Engine("austen", num_pages=9)  # type: ignore[arg-type]
    model = models.Model("plain", world.model.target, None, world.model.tokenizer, frozenset())
    for settings in ({}, {"two_model": True}):
        with pytest.raises(ValueError, match="head"):
            Engine(model, num_pages=9, **settings)


@cpu_only
def test_counts(world: World) -> None:
    engine = world.engine("two-model llama")
    requests = submit_greedy(engine, [text[:9] for text in world.texts[:4]], 16)
    engine.step()
    stats = engine.stats
    assert (stats.steps, stats.launches, stats.running, stats.waiting) == (1, 2, 3, 1)
    assert stats.pages_total == [79, len(range(79 * 4 // 7 + 1)) + 3]
    assert all(
        0 < used < total for used, total in zip(stats.pages_in_use, stats.pages_total, strict=True)
    )
    engine.run()
    assert (stats.steps, stats.tokens) == (1, 0)  # a copy
    stats = engine.stats
    assert stats.tokens == 4 * 16
    assert stats.target_passes == sum(request.target_passes for request in requests)
    for position in range(NUM_DRAFTS):
        assert stats.drafted[position] == sum(r.drafted[position] for r in requests)
        assert stats.accepted[position] == sum(r.accepted[position] for r in requests)
    assert stats.launches == 2 * stats.steps
    assert stats.seconds > 0


@cpu_only
def test_results_come_a_step_late_with_overlap(world: World) -> None:
    for overlap in (False, True):
        engine = world.engine("plain", overlap=overlap)
        request = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=4))
        lens = []
        for _ in range(4):
            engine.step()
            lens.append(len(request.token_ids))
        assert lens == ([0, 1, 2, 3] if overlap else [1, 2, 3, 4])
        assert torch.is_grad_enabled()
