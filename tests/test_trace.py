"""Traces: what is recorded is what ran; files, sums, comparison and pictures of them."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
import traces
from hypothesis import HealthCheck, given, settings
from toy_engine import RawBatch, Request, ToyEngine
from traces import STEPS, step, write
from walks import Walk, play, walks

import specmeta
from specmeta import cli, trace
from specmeta.generate import generate
from specmeta.models import Model, load
from specmeta.serving.engine import Engine
from specmeta.serving.request import SamplingParams
from specmeta.trace import compare
from specmeta.trace.comparison import Divergence, Place
from specmeta.trace.page import make_page
from specmeta.trace.totals import summarize

PROMPTS = ["It is a truth universally acknowledged, that", "No", "Mr. Darcy looked"]


@pytest.fixture(scope="module")
def austen() -> Model:
    return load("austen")


class RecordedToy:
    """A schedule of the toy engine, recorded.

    Attributes
    ----------
    requests : list of Request
        In the order of assignment.
    held : list of dict
        By step that has rows: whose each page is.
    run : Trace or None
        None where the engine hides its page table: then it tells of slots of another.
    """

    def __init__(self, path: Path, seed: int, kind: str) -> None:
        engine = ToyEngine(seed, kind)
        self.requests: list[Request] = []
        self.held: list[dict[int, int]] = []
        self.run: trace.Trace | None = None
        batch = engine.target.batch
        if isinstance(batch, RawBatch) and batch.pages_by == "list":
            return
        look_up, run_target = engine._look_up, engine._run_target

        def admit(slot: int, request: Request) -> None:
            self.requests.append(request)
            look_up(slot, request)

        def stage() -> list[int]:
            if batch.num_rows > 0:
                order = {id(request): i for i, request in enumerate(self.requests)}
                owners = {slot: order[id(request)] for slot, request in engine.requests.items()}
                pages = engine.target.pages
                self.held.append({page: owners[slot] for slot in owners for page in pages[slot]})
            return run_target()

        engine._look_up, engine._run_target = admit, stage  # type: ignore[method-assign]
        with trace.record(path):
            engine.run()
        self.run = trace.read(path)


def holders(run: trace.Trace, step_: int) -> dict[int, int]:
    """Whose each page is at a step."""
    held = {}
    for page, at, request, *_ in zip(*(c.tolist() for c in run.page_events), strict=True):
        if at <= step_:
            held[page] = request
    return {page: request for page, request in held.items() if request >= 0}


def emitted(run: trace.Trace, request: int) -> list[int]:
    return [int(i) for row in run.rows_of(request) for i in run.emitted.of(row)]


# What is recorded.


def counting_loop(path: Path) -> trace.Trace:
    """Three steps of a model that counts upwards, but for 12 and 19."""
    batch = specmeta.BatchMetadata(
        max_rows=2, max_slots=4, max_tokens=8, max_pages=4, page_size=4, max_seq_len=10,
        max_draft_len=3,
    )  # fmt: skip
    with trace.record(path):
        batch.assign(2, [7, 8, 9], [1, 2, 3])
        batch.set_rows([-1, 2], [0, 4])
        for _ in range(3):
            batch.stage()
            batch.accept_greedy((batch.input_ids + 1) % 12)
            drafts = batch.draft_input_ids[batch.token_indices] + 1
            for k in range(3):
                batch.draft_step(drafts, index=k, last=k == 2)
                drafts = drafts + 1
    return trace.read(path)


def test_a_loop_is_recorded(tmp_path: Path) -> None:
    counting_loop(tmp_path / "run.jsonl")
    header, *steps = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    sizes = {"page_size": 4, "num_slots": 4}
    assert header == {"format": "specmeta trace", "version": 1, **sizes}
    assert steps == [
        {
            "step": 0, "slot": [-1, 2], "request": [-1, 0], "cached_len": [0, 0],
            "query_len": [0, 3], "prompt_len": [0, 3], "seq_len": [0, 3], "used_pages": [0, 1],
            "status": [0, 0], "drafts": [0, 0], "draft_tokens": [[], []], "accepted": [0, 0],
            "committed_len": [0, 3], "emitted": [[], [10]], "pages": [[2, 0, 0, [1, 2, 3]]],
        },
        {
            "step": 1, "slot": [-1, 2], "request": [-1, 0], "cached_len": [0, 3],
            "query_len": [0, 4], "prompt_len": [0, 0], "seq_len": [0, 7], "used_pages": [0, 2],
            "status": [0, 0], "drafts": [0, 3], "draft_tokens": [[], [11, 12, 13]],
            "accepted": [0, 1], "committed_len": [0, 5], "emitted": [[], [11, 0]],
        },
        {
            "step": 2, "slot": [-1, 2], "request": [-1, 0], "cached_len": [0, 5],
            "query_len": [0, 4], "prompt_len": [0, 0], "seq_len": [0, 9], "used_pages": [0, 3],
            # The last draft goes past max_seq_len.
            "status": [0, 1], "drafts": [0, 3], "draft_tokens": [[], [1, 2, 3]],
            "accepted": [0, 3], "committed_len": [0, 9], "emitted": [[], [1, 2, 3, 4]],
        },
    ]  # fmt: skip


@pytest.mark.parametrize("captured", [False, True])
def test_generate_is_recorded(austen: Model, tmp_path: Path, captured: bool) -> None:
    with trace.record(tmp_path / "run.jsonl.gz"):
        report = generate(
            austen, PROMPTS, max_new_tokens=24, page_size=8, prompt_chunk=8, captured=captured
        )
    run = trace.read(tmp_path / "run.jsonl.gz")
    summary = summarize(run)
    assert summary["steps"] == report.steps
    assert summary["target_passes"] == report.target_passes
    assert (summary["accepted"], summary["drafted"]) == (report.accepted, report.drafted)
    assert summary["rewound_tokens"] == sum(report.drafted) - sum(report.accepted)
    assert summary["faults"] == {}
    for request, text in enumerate(report.texts):
        assert emitted(run, request)[: len(text.token_ids)] == text.token_ids
        rows = run.rows_of(request)
        assert run["prompt_len"][rows].sum() == len(text.prompt_ids)
        assert (run["prompt_len"][rows] <= 8).all()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("two_model", [False, True])
def test_an_engine_is_recorded(
    austen: Model, tmp_path: Path, overlap: bool, two_model: bool
) -> None:
    """More requests than rows: slots and pages are used again. A drafter makes no steps."""
    engine = Engine(
        austen, max_rows=2, num_pages=24, page_size=8, overlap=overlap, two_model=two_model,
        captured=False,
    )  # fmt: skip
    with trace.record(tmp_path / "run.jsonl"):
        requests = [engine.submit(p, SamplingParams(max_new_tokens=12)) for p in PROMPTS]
        engine.run()
    run = trace.read(tmp_path / "run.jsonl")
    assert (run.num_steps, run.num_requests) == (engine.stats.steps, len(requests))
    assert run.page_size == 8
    for number, request in enumerate(requests):
        assert emitted(run, number)[: len(request.token_ids)] == request.token_ids
    assert summarize(run)["handovers"] > 0
    assert summarize(run)["shared_pages"] == 0
    lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    changes = [change for line in lines for change in line.get("pages", [])]
    # Of pages behind those that a slot has, only they are named.
    assert any(keep > 0 and pages for _, _, keep, pages in changes)


@pytest.mark.parametrize("kind", ["one model", "two models"])
def test_random_schedules_are_recorded(tmp_path: Path, kind: str) -> None:
    """Any outputs, any faults, requests in any order: each text is its request's."""
    texts = 0
    for seed in range(25):
        toy = RecordedToy(tmp_path / "run.jsonl", seed, kind)
        if toy.run is None:
            continue
        for number, request in enumerate(toy.requests):
            assert emitted(toy.run, number) == request.text, f"seed {seed}, request {number}"
            rows = toy.run.rows_of(number)
            # More where the prompt's last chunk was void, and made again.
            assert toy.run["prompt_len"][rows].sum() >= request.prompt_len or not request.text
            # A slot that nobody has any longer may still be carried, empty.
            assert toy.run["committed_len"][rows].max(initial=0) == request.committed
            texts += bool(request.text)
        for number, held in enumerate(toy.held):
            assert holders(toy.run, number) == held, f"seed {seed}, step {number}"
        assert toy.run.num_steps == len(toy.held)
    assert texts > 30


def test_advance_alone_is_recorded(tmp_path: Path) -> None:
    """An engine that stages rows as if all three drafts would stand, and takes off the others.

    The second row has too few pages, the third is in its prompt.
    """
    i32 = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    seq_lens, cu = i32(9, 16, 5), i32(0, 4, 8, 13)
    used, status = torch.empty(3, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    pages = i32(1, 2, 3, 4, 5, 6, -1, -1, 7, -1, -1, -1, -1, -1, -1, -1).view(4, 4)
    with trace.record(tmp_path / "run.jsonl"):
        specmeta.advance(
            i32(3, 1), seq_lens, seq_len_bias=-3, page_size=4, cu_seqlens_q=cu, page_table=pages,
            row_to_slot=i32(0, 2, 1), count_index=i32(0, 1, -1), pages_per_seq=used, status=status,
        )  # fmt: skip
    run = trace.read(tmp_path / "run.jsonl")
    expected = {
        "slot": [0, 2, 1],
        "request": [0, 1, 2],
        "staged_len": [9, 16, 5],
        "seq_len": [9, 0, 5],
        "query_len": [4, 0, 5],
        "cached_len": [5, 0, 0],
        "prompt_len": [0, 0, 5],
        "used_pages": [3, 0, 2],
        "accepted": [3, 1, 0],
        "drafts": [-1, -1, -1],
        "committed_len": [-1, -1, -1],
        "status": [0, 1, 0],
    }
    assert {name: run[name].tolist() for name in expected} == expected
    assert summarize(run)["drafted"] == []  # nobody says how many there were


def test_advance_rewinds(tmp_path: Path) -> None:
    seq_lens = torch.tensor([10, 12])
    table = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    with trace.record(tmp_path / "run.jsonl"):
        for counts in ([-2, 0], [-1, 3]):
            specmeta.advance(torch.tensor(counts), seq_lens, page_size=4, page_table=table)
    run = trace.read(tmp_path / "run.jsonl")
    assert run["seq_len"].tolist() == [8, 12, 7, 15]
    assert run["accepted"].tolist() == [0, 0, 0, 3]
    tokens, pages = run.rewinds
    assert (tokens.tolist(), pages.tolist()) == ([2, 0, 1, 0], [1, 0, 0, 0])


def test_a_slot_that_begins_anew_has_another_request(tmp_path: Path) -> None:
    """Where nobody tells of assignments."""
    lens, known = torch.zeros(1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    cu, seq_lens = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    with trace.record(tmp_path / "run.jsonl"):
        for new in (True, False, True):
            if new:
                lens.zero_()
                known.fill_(2)
            specmeta.stage(lens, known_lens=known, page_size=4, seq_lens=seq_lens, cu_seqlens_q=cu)
            length = int(cu[1])
            specmeta.accept_greedy(
                torch.full((length,), 5), torch.zeros(length, dtype=torch.int64),
                cu_seqlens_q=cu, num_draft_tokens=torch.zeros(1, dtype=torch.int32),
                committed_lens=lens, known_lens=known, tokens=tokens, seq_lens=seq_lens,
                num_accepted=torch.zeros(1, dtype=torch.int32),
            )  # fmt: skip
    run = trace.read(tmp_path / "run.jsonl")
    assert run["request"].tolist() == [0, 0, 1]
    assert [emitted(run, 0), emitted(run, 1)] == [[5, 5], [5]]
    assert run["committed_len"].tolist() == [2, 3, 2]


def test_only_a_start_at_0_is_another_request(tmp_path: Path) -> None:
    """Where nobody tells: not a row that has too few pages, but a prompt's beginning, each time."""
    table = torch.tensor([[1, 2, 3, -1]], dtype=torch.int32)
    with trace.record(tmp_path / "run.jsonl"):
        for length, count, index in ((9, 1, 0), (10, 5, 0), (10, 1, 0), (1, 0, -1), (1, 0, -1)):
            specmeta.advance(
                torch.tensor([count]), torch.tensor([length]), page_size=4, page_table=table,
                count_index=torch.tensor([index]),
            )  # fmt: skip
    run = trace.read(tmp_path / "run.jsonl")
    assert run["seq_len"].tolist() == [10, 0, 11, 1, 1]
    assert run["request"].tolist() == [0, 0, 0, 1, 2]


def test_another_batch_is_left_out(tmp_path: Path) -> None:
    batches = [
        specmeta.BatchMetadata(
            max_rows=1, max_slots=1, max_tokens=2, max_pages=1, page_size=4, max_seq_len=4,
            max_draft_len=1,
        )
        for _ in range(2)
    ]  # fmt: skip
    drafter = specmeta.BatchMetadata(
        max_rows=1, max_slots=1, max_tokens=2, max_pages=1, page_size=4, max_seq_len=4,
        max_draft_len=1, ledger=batches[0],
    )  # fmt: skip
    with trace.record(tmp_path / "run.jsonl"):
        batches[0].set_rows([0], [2])
        drafter.stage()
        for slot_tokens, batch in zip(([1], [2, 3]), batches, strict=True):
            batch.assign(0, slot_tokens, [1])
            batch.set_rows([0], [2])
            batch.stage()
        for batch in reversed(batches):
            batch.accept_greedy(batch.input_ids)
    run = trace.read(tmp_path / "run.jsonl")
    assert (run.num_steps, emitted(run, 0), run["query_len"].tolist()) == (1, [1], [1])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(walk=walks())
def test_anything_can_be_recorded(tmp_path: Path, walk: Walk) -> None:
    """Any calls with any values, corrupted ones too: what is written can be read and drawn."""
    path = tmp_path / "run.jsonl"
    unrecorded = "ValueError: stage: a trace needs seq_lens and cu_seqlens_q"
    try:
        with trace.record(path):
            play(walk)
    except trace.RecordingError as error:
        if unrecorded not in str(error):
            raise
    if path.stat().st_size > 0:
        run = trace.read(path)
        summarize(run)
        make_page(run)
        assert compare(run, run) == []


def test_an_id_that_is_no_page(tmp_path: Path) -> None:
    outputs = {name: torch.zeros(2, dtype=torch.int32) for name in ("seq_lens", "cu_seqlens_q")}
    outputs["seq_lens"] = outputs["seq_lens"][:1].clone()
    i32 = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    with trace.record(tmp_path / "run.jsonl"):
        specmeta.stage(
            i32(4), query_lens=i32(2), page_size=4, page_table=i32(3, -7).view(1, 2),
            num_pages=i32(2), kv_indices=torch.zeros(2, dtype=torch.int32),
            status=torch.zeros(1, dtype=torch.int32), **outputs,
        )  # fmt: skip
    run = trace.read(tmp_path / "run.jsonl")
    assert summarize(run)["faults"] == {"BAD_PAGE": 1}
    assert (tmp_path / "run.jsonl").read_text().count('"pages":[[0,0,0,[3,-1]]]') == 1
    assert run.page_events.page.tolist() == [3]


def test_nothing_is_recorded_outside(tmp_path: Path) -> None:
    counting_loop(tmp_path / "run.jsonl")
    size = (tmp_path / "run.jsonl").stat().st_size
    counting_loop(tmp_path / "other.jsonl")
    assert (tmp_path / "run.jsonl").stat().st_size == size
    assert not specmeta.observe.active()


def test_a_recorder_that_fails_says_so(tmp_path: Path) -> None:
    """What it wrote before stays."""
    path = tmp_path / "run.jsonl.gz"
    lens, query_lens, seq_lens = (torch.tensor([n], dtype=torch.int32) for n in (3, 2, 0))
    cu = torch.zeros(2, dtype=torch.int32)
    message = f"^{re.escape(str(path))}: not all was recorded: ValueError: stage: a trace needs seq"
    with pytest.raises(trace.RecordingError, match=message) as caught, trace.record(path):  # noqa: PT012
        for outputs in ({"cu_seqlens_q": cu}, {}):
            specmeta.stage(lens, query_lens=query_lens, page_size=4, seq_lens=seq_lens, **outputs)
    assert isinstance(caught.value.__cause__, ValueError)
    assert trace.read(path)["seq_len"].tolist() == [5]


def test_a_step_that_was_not_understood_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = trace.recorder._Step._find_emitted
    monkeypatch.setattr(
        "specmeta.trace.recorder._Step._find_emitted",
        lambda step_, call: find(step_, call) if step_.columns["cached_len"] == [0, 0] else 1 // 0,
    )
    with pytest.raises(trace.RecordingError, match="not all was recorded: ZeroDivisionError"):
        counting_loop(tmp_path / "run.jsonl")
    assert trace.read(tmp_path / "run.jsonl").num_steps == 1


@pytest.mark.parametrize("name", ["full.jsonl", "full.jsonl.gz"])
def test_a_full_disk(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")

    def record_a_step() -> None:
        with trace.record(tmp_path / name):
            specmeta.advance(torch.tensor([2]), torch.tensor([33]), page_size=32)

    with pytest.raises(trace.RecordingError, match="No space left on device"):
        record_a_step()


def test_an_error_inside_goes_on(tmp_path: Path) -> None:
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    with pytest.raises(KeyError), trace.record(tmp_path / "full.jsonl"):  # noqa: PT012
        specmeta.advance(torch.tensor([2]), torch.tensor([33]), page_size=32)
        raise KeyError


def test_recording_needs_torch_alone(tmp_path: Path) -> None:
    code = f"""
import sys
for name in ("numpy", "rich", "matplotlib"):
    sys.modules[name] = None
import torch, specmeta, specmeta.trace
with specmeta.trace.record({str(tmp_path / "run.jsonl.gz")!r}):
    specmeta.advance(torch.tensor([2]), torch.tensor([33]), page_size=32)
for name in ("read", "Trace", "compare"):
    try:
        getattr(specmeta.trace, name)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    install = "pip install 'specmeta[debug]'"
    lines = [f"specmeta.trace.{n} needs numpy: {install}" for n in ("read", "Trace", "compare")]
    assert done.stdout.splitlines() == lines, done.stderr
    assert trace.read(tmp_path / "run.jsonl.gz")["seq_len"].tolist() == [35]


# Files.


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    run = trace.read(write(tmp_path / name, STEPS))
    assert (run.num_steps, run.num_rows, run.num_requests) == (3, 6, 3)
    assert (run.page_size, run.num_slots, run.note) == (4, 3, "")
    assert run.first.tolist() == [0, 2, 4, 6]
    for column in (*trace.file.REQUIRED, "drafts", "accepted", "committed_len"):
        assert run[column].tolist() == [v for record in STEPS for v in record[column]]
    lists = [values for record in STEPS for values in record["emitted"]]
    assert [run.emitted.of(row).tolist() for row in range(6)] == lists
    assert run.draft_tokens.of(2).tolist() == [11, 12, 13]
    assert run["staged_len"].tolist() == [-1] * 6


def test_a_step_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    writer = traces.Writer(path)
    for count, record in enumerate((traces.HEADER, *STEPS)):
        writer.write(record)
        if count:
            run = trace.read(path)
            assert run.num_steps == count
            assert run.note == f"the file ends early: line {count + 2} and what followed is missing"
    writer.close()
    assert trace.read(path).note == ""


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_file_that_was_cut_off(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    whole = write(path, STEPS).read_bytes()
    counts = set()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        run = read_or_error(path)
        if isinstance(run, str):
            assert re.fullmatch(r".*(, line \d: (format|step): expected|Not a gzip).*", run)
        else:
            counts.add(run.num_steps)
            # Between two lines nothing is missing, but for the end of a compressed file.
            assert run.note or whole[:size].endswith(b"\n")
    assert counts >= {1, 2}


def read_or_error(path: Path) -> trace.Trace | str:
    try:
        return trace.read(path)
    except trace.TraceError as error:
        return str(error)


def edited(change: Callable[[list[Any]], None]) -> list[Any]:
    lines = json.loads(json.dumps([traces.HEADER, *STEPS]))
    change(lines)
    return lines  # type: ignore[no-any-return]


BAD_FILES: dict[str, tuple[Callable[[list[Any]], None], str]] = {
    "empty": (lambda f: f.clear(), "line 1: format: expected 'specmeta trace', got nothing"),
    "no steps": (lambda f: f.__delitem__(slice(1, None)), "line 2: step: expected at least one"),
    "another format": (lambda f: f[0].update(format="x"), "line 1: format: expected .*, got 'x'"),
    "a list": (lambda f: f.__setitem__(2, []), "line 3: expected a JSON object"),
    "version": (lambda f: f[0].update(version=2), "line 1: version: expected 1, got 2"),
    "page size": (lambda f: f[0].update(page_size=0), "line 1: page_size: expected .*, got 0"),
    "slots": (lambda f: f[0].pop("num_slots"), "line 1: num_slots: expected .*, got None"),
    "a step left out": (lambda f: f.pop(2), "line 3: step: expected 1, got 2"),
    "a field left out": (lambda f: f[2].pop("seq_len"), "line 3: seq_len: expected .*, got None"),
    "a short column": (
        lambda f: f[2]["status"].pop(),
        "line 3: status: expected a list of 2 integers, got 1",
    ),
    "a fraction": (
        lambda f: f[3]["accepted"].__setitem__(0, 1.5),
        r"line 4: accepted: expected a list of 2 integers, got \[1.5, 0\]",
    ),
    "a bool": (lambda f: f[3]["slot"].__setitem__(0, True), "line 4: slot: expected"),
    "negative": (lambda f: f[1]["seq_len"].__setitem__(0, -1), "line 2: seq_len: .* from 0 to"),
    "large": (lambda f: f[1]["slot"].__setitem__(0, 3), "line 2: slot: .* from -1 to 2"),
    "ids": (lambda f: f[1].update(emitted=[[1], 2]), "line 2: emitted: expected a list of 2 lists"),
    "long ids": (lambda f: f[1].update(emitted=[[2**63], []]), "line 2: emitted: expected"),
    "pages": (lambda f: f[1].update(pages={}), "line 2: pages: expected a list of changes"),
    "a change": (lambda f: f[1].update(pages=[[0, 0, [1]]]), r"line 2: pages: .* \[0, 0, \[1\]\]"),
    "a slot's pages": (
        lambda f: f[1].update(pages=[[0, 0, 1, [1]]]),
        "line 2: pages: keep: expected 0 to the slot's 0, got 1",
    ),
    "another's pages": (
        lambda f: f[3]["pages"].append([0, 9, 1, [8]]),
        "line 4: pages: keep: expected 0 for another request, got 1",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_files(tmp_path: Path, change: Callable[[list[Any]], None], message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in edited(change)))
    with pytest.raises(trace.TraceError, match=f"^{re.escape(str(path))}, {message}"):
        trace.read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.jsonl", None, "No such file or directory"),
        ("run.jsonl.gz", b"{}\n", "Not a gzipped file"),
        ("run.jsonl", b'{"\xff"}\n', "line 1: expected a JSON object: 'utf-8' codec"),
        ("run.jsonl", b"[" * 100_000 + b"\n", "line 1: expected a JSON object: "),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(trace.TraceError, match=f"^{re.escape(str(path))}[:,] .*{message}"):
        trace.read(path)


def test_a_damaged_compressed_file(tmp_path: Path) -> None:
    """Never another error than TraceError."""
    path = tmp_path / "run.jsonl.gz"
    whole = write(path, STEPS).read_bytes()
    rng = random.Random(0)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        run = read_or_error(path)
        assert not isinstance(run, str) or run.startswith(str(path))


# What follows from them.


def test_pages_rewinds_and_faults(tmp_path: Path) -> None:
    run = trace.read(write(tmp_path / "run.jsonl", STEPS))
    assert list(zip(*(column.tolist() for column in run.page_events), strict=True)) == [
        # page, step, request, place, holders, previous
        (1, 0, 0, 0, 1, -1),
        (2, 0, 0, 1, 1, -1),
        (3, 0, 1, 0, 1, -1),
        (5, 0, 0, 2, 1, -1),
        (5, 2, 1, 1, 1, 0),
        (7, 2, 2, 0, 1, -1),
    ]
    tokens, pages = run.rewinds
    assert (tokens.tolist(), pages.tolist()) == ([0, 0, 2, 0, 0, 0], [0, 0, 1, 0, 0, 0])
    assert run.new_faults.tolist() == [0, 0, 0, 0, 0, 1]
    assert summarize(run) == {
        "steps": 3,
        "rows": 6,
        "requests": 3,
        "tokens": 5,
        "target_passes": 2,
        "drafted": [1, 1, 1],
        "accepted": [1, 0, 0],
        "rewound_tokens": 2,
        "rewinds": 1,
        "handovers": 1,
        "shared_pages": 0,
        "faults": {"OVERFLOW": 1},
    }


def test_a_fault_without_a_name(tmp_path: Path) -> None:
    run = trace.read(write(tmp_path / "run.jsonl", [step(0, {"status": 64 + 1})]))
    assert summarize(run)["faults"] == {"OVERFLOW": 1, "64": 1}


def test_a_page_that_two_hold(tmp_path: Path) -> None:
    row = {"emitted": [1]}
    steps = [
        step(0, row, pages=[[0, 0, 0, [4]], [1, 1, 0, [6, 4]]]),
        step(1, row, pages=[[1, 1, 1, []]]),
        step(2, row, pages=[[0, 0, 0, []], [2, 2, 0, [4]]]),
    ]
    run = trace.read(write(tmp_path / "run.jsonl", steps))
    of_page = run.page_events.page == 4
    events = [column[of_page].tolist() for column in run.page_events][1:]
    assert events == [[0, 1, 2], [1, 0, 2], [1, 0, 0], [2, 1, 1], [-1, 1, 0]]
    assert summarize(run)["shared_pages"] == 1


def test_what_the_host_takes_back_is_a_rewind(tmp_path: Path) -> None:
    rows = [{"cached_len": 0, "query_len": 9, "emitted": [1]}, {"cached_len": 7}]
    run = trace.read(write(tmp_path / "run.jsonl", [step(i, row) for i, row in enumerate(rows)]))
    tokens, pages = run.rewinds
    assert (tokens.tolist(), pages.tolist()) == ([0, 2], [0, 1])


# Where two runs part.


def test_runs_with_other_schedules_are_the_same(austen: Model, tmp_path: Path) -> None:
    runs = []
    for index, options in enumerate(
        ({"num_drafts": 4}, {"num_drafts": 2, "prompt_chunk": 4}, {"num_drafts": 0})
    ):
        with trace.record(tmp_path / f"{index}.jsonl"):
            generate(austen, PROMPTS, max_new_tokens=16, page_size=4, captured=False, **options)
        runs.append(trace.read(tmp_path / f"{index}.jsonl"))
    assert len({run.num_steps for run in runs}) == 3
    assert compare(runs[0], runs[1]) == compare(runs[0], runs[2]) == []


def differing(tmp_path: Path, step_: int, field: str, value: Any) -> list[Divergence]:
    a = write(tmp_path / "a.jsonl", STEPS)
    changed = json.loads(json.dumps(STEPS))
    changed[step_][field][0] = value
    return compare(trace.read(a), trace.read(write(tmp_path / "b.jsonl", changed)))


@pytest.mark.parametrize(
    ("step_", "field", "value", "expected"),
    [
        (1, "emitted", [11, 21], (0, 2, Place(1, 0, "20"), Place(1, 0, "21"))),
        (1, "emitted", [11], None),  # one ends earlier
        (1, "committed_len", 7, (0, 3, Place(1, 0, "8"), Place(1, 0, "7"))),
        (1, "used_pages", 2, (0, 3, Place(1, 0, "3"), Place(1, 0, "2"))),
        (2, "status", 5, (1, 2, Place(2, 0, "-"), Place(2, 0, "OVERFLOW, BAD_COUNT"))),
        (2, "status", 64, (1, 2, Place(2, 0, "-"), Place(2, 0, "64"))),
        (1, "draft_tokens", [1, 2, 3], None),
        (1, "accepted", 2, None),
    ],
)
def test_compare(
    tmp_path: Path, step_: int, field: str, value: Any, expected: tuple[Any, ...] | None
) -> None:
    differences = [Divergence(field, *expected)] if expected else []
    assert differing(tmp_path, step_, field, value) == differences


# The command.


def run_command(*arguments: str | Path) -> int:
    return cli.main(["trace", *map(str, arguments)])


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "run.jsonl", STEPS)
    path.write_bytes(path.read_bytes()[:-5])
    assert run_command(path) == 0
    out = capsys.readouterr().out
    for name, value in (
        ("steps", "2"),
        ("tokens", "4"),
        ("acceptance", r"33\.33% \(1/3 tokens\)"),
        ("rewinds over a page", "1"),
        ("pages handed over", "0"),
        ("faults", "none"),
    ):
        assert re.search(rf"│ {name} +│ +{value} │", out), name
    assert "Note: line 4 is incomplete and was left out." in out


def test_diff_without_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, third: int) -> str:
        seq_lens = torch.tensor([33, 5])
        with trace.record(tmp_path / name):
            for count in (2, 2, third):
                specmeta.advance(torch.tensor([2, count]), seq_lens, page_size=32)
        return str(tmp_path / name)

    a, b, same = run("a.jsonl", 2), run("b.jsonl", 3), run("same.jsonl", 2)
    assert cli.main(["trace", "--diff", a, b]) == 1
    assert "seq_len" in (out := capsys.readouterr().out)
    assert "11 (step 2, row 1)" in out
    assert "12 (step 2, row 1)" in out
    assert cli.main(["trace", "--diff", a, same]) == 0
    with_tokens = write(tmp_path / "tokens.jsonl", STEPS)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["trace", "--diff", a, str(with_tokens)])
    assert "a.jsonl: emitted: expected tokens" in capsys.readouterr().err


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.jsonl", STEPS)
    assert run_command("--diff", a, a) == 0
    assert "The runs are the same" in capsys.readouterr().out
    changed = json.loads(json.dumps(STEPS))
    changed[1]["emitted"][0][1] = 99
    b = write(tmp_path / "b.jsonl.gz", changed)
    assert run_command("--diff", a, b) == 1
    out = capsys.readouterr().out
    assert re.search(r"emitted +│ 0 +│ 2 +│ 20 \(step 1, row 0\) │ 99 \(step 1, row 0\)", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["good.jsonl", "good.jsonl"], "FILE: expected 1, got 2"),
        (["--diff", "good.jsonl"], "FILE: expected 2, got 1"),
        (["--diff", "good.jsonl", "missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["good.jsonl", "-o", "page.pdf"], "--output: expected a name that ends with .html"),
        (["good.jsonl", "-o", "no/page.html"], "no/page.html: No such file or directory"),
        (["good.jsonl", "-o", "no/picture.png"], "no/picture.png: No such file or directory"),
        (["good.jsonl", "-o", "full.html"], "full.html: No space left on device"),
        (["good.jsonl", "-o", "full.png"], "full.png: No space left on device"),
        (["--diff", "good.jsonl", "good.jsonl", "-o", "a.png"], "--output: not beside --diff"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good.jsonl", STEPS)
    for name in ("full.html", "full.png"):
        Path(name).symlink_to("/dev/full")
    with pytest.raises(SystemExit) as exit_:
        run_command(*arguments)
    assert exit_.value.code == 2
    assert re.fullmatch(rf"specmeta trace: {re.escape(message)}.*\n", capsys.readouterr().err)


def test_generate_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl.gz"
    arguments = ["generate", "--prompt", "No", "--max-new-tokens", "8", "--json", "--trace"]
    assert cli.main([*arguments, str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    summary = summarize(trace.read(path))
    for name in ("steps", "target_passes", "accepted", "drafted"):
        assert summary[name] == report[name], name
    with pytest.raises(SystemExit) as exit_:
        cli.main([*arguments, str(tmp_path / "no" / "run.jsonl")])
    assert exit_.value.code == 2
    assert re.search("trace: .*: No such file or directory\n$", capsys.readouterr().err)


def test_serve_writes_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(engine: Engine, *_: Any, **__: Any) -> None:
        engine.submit("No", SamplingParams(max_new_tokens=4))
        engine.run()

    monkeypatch.setattr("specmeta.serving.server.serve", serve)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert cli.main(["serve", "--port", "0", "--trace", str(tmp_path / "run.jsonl")]) == 0
    assert trace.read(tmp_path / "run.jsonl").num_requests == 1


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit])
def test_a_command_says_that_recording_failed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ends: type[BaseException],
) -> None:
    (tmp_path / "full.jsonl").symlink_to("/dev/full")

    def serve(engine: Engine, *_: Any, **__: Any) -> None:
        engine.submit("No", SamplingParams(max_new_tokens=4))
        engine.run()
        raise ends

    monkeypatch.setattr("specmeta.serving.server.serve", serve)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve", "--port", "0", "--trace", str(tmp_path / "full.jsonl")])
    assert exit_.value.code == 1
    message = "^specmeta serve: trace: .*/full.jsonl: not all was recorded: OSError: .*No space"
    assert re.search(message, capsys.readouterr().err, re.MULTILINE)


def test_the_documentations_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parent.parent / "docs/examples/austen.jsonl.gz"
    assert run_command(path) == 0
    assert re.search(r"acceptance +│ +79\.08% \(291/368 tokens\)", capsys.readouterr().out)
    assert run_command(path, "-o", tmp_path / "page.html") == 0
    assert (tmp_path / "page.html").stat().st_size < 100_000


def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    assert run_command(write(tmp_path / "run.jsonl", STEPS), "-o", path) == 0
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    height, width, _ = pixels.shape
    left = pixels[: height * 3 // 8, : width * 3 // 4].reshape(-1, 3)  # without the legend
    assert width > 1000
    for colour in ("7d8ba0", "3c4a5e", "c8102e"):  # prompt, no drafts, fault
        share = (left == np.array(list(bytes.fromhex(colour)))).all(1).mean()
        assert share > 0.02, colour


def test_the_picture_of_a_large_trace(tmp_path: Path) -> None:
    from specmeta.trace.picture import save_picture

    save_picture(traces.large(3000, 8), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_page_holds_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    source = write(tmp_path / "a<b>&c.jsonl", STEPS)
    assert run_command(source, "-o", path) == 0
    page = path.read_text()
    assert "<h1>Trace of a&lt;b&gt;&amp;c.jsonl</h1>" in page
    assert "://" not in page
    contents = re.search(r'<script id="data" type="text/plain">(.*?)</script>', page)
    meta = re.search(r'<script id="meta" type="application/json">(.*?)</script>', page)
    assert contents
    assert meta
    blob = gzip.decompress(base64.b64decode(contents[1]))
    arrays = {
        array["name"]: np.frombuffer(blob, array["type"], array["length"], array["at"]).tolist()
        for array in json.loads(meta[1])["arrays"]
    }
    run = trace.read(source)
    for name in (*trace.file.REQUIRED, *trace.file.OPTIONAL):
        assert arrays[name] == run[name].tolist()
    assert arrays["first"] == run.first.tolist()
    assert arrays["emitted"] == run.emitted.values.tolist()
    assert arrays["emitted_count"] == [1, 0, 2, 1, 1, 0]
    assert arrays["event_previous"] == run.page_events.previous.tolist()


def test_large_numbers_fit_the_page() -> None:
    run = traces.large(120, 3)
    run._columns["slot"][0] = 70_000
    run._columns["request"][5] = 2**31 - 1
    assert '"name": "slot", "type": "uint32"' in make_page(run)
