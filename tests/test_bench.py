"""The benches: alternatives leave what ours leaves, figures are labelled, profiles are counted."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch

from bench import __main__ as command
from bench import profile_steps, report
from bench.__main__ import OPERATIONS
from bench.common import HEADLINE, ONE_ROW, SMALL, Operation, Work
from bench.profile_steps import Event
from bench.runner import Result, Runner
from bench.timing import Timing, summarise
from specmeta import reference

WORKS = [SMALL, Work("pages of one token", 4, 3, 1, 20, 1), Work("more rows", 33, 5, 10, 90, 16)]


def runner(device: str) -> Runner:
    return Runner(torch.device(device), seconds=0.0, budget=60.0, with_compile=False)


def test_every_operation_has_a_bench() -> None:
    assert {bench.function for bench in OPERATIONS.values()} == set(conftest.OPERATIONS)


@pytest.mark.parametrize("edit", ["plain", "padding"])
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_alternatives_equal_ours(operation: Operation, work: Work, edit: str, device: str) -> None:
    case = operation.make_case(work, torch.device(device))
    if edit == "padding":  # the last row is none, and the second is empty, where it can be
        case.inputs["num_rows"].fill_(work.rows - 1)
        for tensors in (case.inputs, case.state):
            if "seq_lens" in tensors:
                tensors["seq_lens"][1] = 0
    ours = case.fresh()
    operation.ours(ours)()
    if device == "cpu":
        want = case.fresh()
        getattr(reference, operation.function)(**want)
        case.check(ours, want)
        assert not want["status"].any()
    for make in runner(device).implementations(operation).values():
        arguments = case.fresh()
        step = make(arguments)
        for _ in range(2):
            step()
            case.check(arguments, ours)
            case.reset(arguments)


def test_chunk_of_a_prompt() -> None:
    for name in ("accept_greedy", "accept_sampled"):
        operation = OPERATIONS[name]
        case = operation.make_case(SMALL, torch.device("cpu"))
        case.state["known_lens"] += 10
        want = case.fresh()
        operation.ours(want)()
        for make in (operation.host_loop, operation.vectorised):
            arguments = case.fresh()
            make(arguments)()
            case.check(arguments, want)


def test_a_difference_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = OPERATIONS["advance"]

    def wrong(arguments: dict[str, Any]) -> Any:
        step = operation.vectorised(arguments)

        def run() -> None:
            step()
            arguments["kv_indices"][3] += 1

        return run

    monkeypatch.setattr(Runner, "implementations", lambda self, op: {"wrong": wrong})
    with pytest.raises(AssertionError, match=r"advance rows small wrong: .*kv_indices\[3\]"):
        list(runner("cpu").run(operation, "rows", SMALL))


def test_budget_is_kept() -> None:
    late = Runner(torch.device("cpu"), seconds=0.0, budget=-1.0, with_compile=False)
    (result,) = late.run(OPERATIONS["stage"], "rows", SMALL)
    assert result.warm is None
    assert "time budget" in result.skipped


def test_run_writes_what_is_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SHORT_SECONDS", 0.001)
    arguments = ["draft_step", "--short", "--sweep", "headline", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "CPU figures, not a GPU's" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "headline-cpu.png",
        "results-cpu.json",
    ]
    content = json.loads((tmp_path / "results-cpu.json").read_text())
    assert content.keys() == {
        *("label", "device", "device_name", "threads", "torch", "specmeta", "commit", "date"),
        *("floor", "headline", "results", "skipped"),
    }
    assert content["label"].startswith("CPU figures")
    assert content["threads"] == 1
    lines = {(r["work"]["name"], r["implementation"], r["mode"]): r for r in content["results"]}
    assert lines.keys() == {
        (work, *line)
        for work in (HEADLINE.name, ONE_ROW.name)
        for line in (
            *(("ours", "eager"), ("ours", "graph"), ("host loop", "eager")),
            *(("torch", "eager"), ("torch", "graph")),
        )
    }
    for line in lines.values():
        assert line["cold"] is None
        assert line["warm"].keys() == {"median_us", "p95_us", "repetitions"}
        assert 0 < line["warm"]["median_us"] <= line["warm"]["p95_us"]
        ours = lines[line["work"]["name"], "ours", line["mode"]]["warm"]["median_us"]
        assert line["ratio"] == pytest.approx(line["warm"]["median_us"] / ours)
    docs = (Path(__file__).parent.parent / "docs/bench.md").read_text()
    assert not [key for key in (*content, *content["results"][0]) if f"`{key}`" not in docs]


def test_a_failure_leaves_the_other_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def time_nothing(self: Runner, operation: Operation, sweep: str, work: Work) -> Any:
        yield Result(operation.name, sweep, work, "ours", "eager", Timing(1.0, 1.0, 1))
        assert work != HEADLINE, "not what ours leaves"

    monkeypatch.setattr(Runner, "run", time_nothing)
    assert command.main(["advance", "--sweep", "headline", "--out", str(tmp_path)]) == 1
    message = "advance, headline, 256 rows: AssertionError: not what ours leaves"
    assert capsys.readouterr().err.startswith(message)
    content = json.loads((tmp_path / "results-cpu.json").read_text())
    assert [line["work"]["name"] for line in content["results"]] == ["256 rows", "1 row"]


def test_the_commit_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECMETA_COMMIT", "0123abc")
    assert report.describe(torch.device("cpu"))["commit"] == "0123abc"


def test_headline() -> None:
    def line(work: Work, implementation: str, median: float) -> Result:
        warm = Timing(median, median, 1)
        return Result("advance", "headline", work, implementation, "eager", warm)

    results = [
        line(HEADLINE, "ours", 10.0),
        line(HEADLINE, "host loop", 1_000.0),
        line(HEADLINE, "torch", 85.0),
        line(ONE_ROW, "ours", 8.0),
        line(ONE_ROW, "torch", 80.0),
    ]
    assert report.headline(results) == {
        "ours_us": 10.0,
        "host_loop_ratio": 100.0,
        "torch_ratio": 8.5,
        "one_row_call_us": 8.0,
    }


def test_summarise_times() -> None:
    assert summarise([float(n) for n in range(101, 0, -1)]) == Timing(51.0, 96.0, 101)


# Two steps. The first replays a graph of two kernels, one of them ours, and copies a result to the
# host; the second launches a kernel and waits for the device. Between them, outside, another wait.
EVENTS = [
    Event("range", "serving step", 0.0, 100.0),
    Event("call", "cudaGraphLaunch_v10000", 10.0, 20.0, 1),
    Event("kernel", "void specmeta::cuda::stage(StageParams)", 15.0, 18.0, 1),
    Event("kernel", "gemm", 20.0, 30.0, 1),
    Event("call", "cudaMemcpyAsync_v3020", 30.0, 31.0, 2),
    Event("to host", "copy", 34.0, 35.0, 2),
    Event("call", "cudaEventSynchronize_v3020", 40.0, 50.0, 3),
    Event("call", "cudaDeviceSynchronize_v3020", 110.0, 120.0, 4),
    Event("range", "serving step", 200.0, 300.0),
    Event("call", "cuLaunchKernelEx", 210.0, 220.0, 5),
    Event("kernel", "gemm", 400.0, 410.0, 5),
    Event("call", "cudaStreamSynchronize_v3020", 250.0, 260.0, 6),
    Event("call", "cudaStreamIsCapturing_v10000", 262.0, 263.0, 7),
]


def check_lines(lines: list[profile_steps.Line]) -> None:
    (line,) = lines
    assert (line.range, line.count) == ("serving step", 2)
    assert (line.kernels, line.specmeta_kernels, line.launches) == (1.5, 0.5, 1.0)
    assert (line.syncs, line.event_waits, line.copies_to_host) == (0.5, 0.5, 0.5)
    assert line.idle_us == pytest.approx((2.0 + 4.0 + 365.0) / 2)


def test_profile_of_events() -> None:
    check_lines(profile_steps.summarise(EVENTS))


def test_profile_of_nsys(tmp_path: Path) -> None:
    path = tmp_path / "steps.sqlite"
    names = {name: i for i, name in enumerate(sorted({event.name for event in EVENTS}))}
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        database.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", [(i, name) for name, i in names.items()]
        )
        database.execute("CREATE TABLE NVTX_EVENTS (start, end, text, textId)")
        database.execute("INSERT INTO NVTX_EVENTS VALUES (5, NULL, 'a mark, not a range', NULL)")
        for table, columns in (
            ("RUNTIME", "correlationId, nameId"),
            ("KERNEL", "correlationId, demangledName"),
            ("MEMCPY", "correlationId, copyKind"),
        ):
            database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_{table} (start, end, {columns})")
        for i, event in enumerate(EVENTS):
            span = (round(event.start * 1e3), round(event.end * 1e3))
            name = names[event.name]
            if event.kind == "range":  # nsys writes the text, or where it stands
                values: tuple[Any, ...] = (event.name, None) if i else (None, name)
                table = "NVTX_EVENTS"
            elif event.kind == "to host":
                values, table = (event.correlation, 2), "CUPTI_ACTIVITY_KIND_MEMCPY"
            else:
                kind = {"call": "RUNTIME", "kernel": "KERNEL"}[event.kind]
                values, table = (event.correlation, name), f"CUPTI_ACTIVITY_KIND_{kind}"
            database.execute(f"INSERT INTO {table} VALUES (?, ?, ?, ?)", (*span, *values))
    check_lines(profile_steps.summarise(profile_steps.read_sqlite(path)))


def test_profile_of_torch() -> None:
    categories = {
        "range": "user_annotation",
        "call": "cuda_runtime",
        "kernel": "kernel",
        "to host": "gpu_memcpy",
    }
    trace = [
        {
            "ph": "X",
            "cat": categories[event.kind],
            "name": "Memcpy DtoH (Device -> Pinned)" if event.kind == "to host" else event.name,
            "ts": event.start,
            "dur": event.end - event.start,
            "args": {"correlation": event.correlation},
        }
        for event in EVENTS
    ]
    trace += [
        {"ph": "M", "name": "process_name"},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 1.0},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "serving step", "ts": 15.0, "dur": 9.0},
    ]
    check_lines(profile_steps.summarise(profile_steps.read_trace(trace)))


def test_profile_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device, lines = torch.device("cpu"), profile_steps.summarise(EVENTS)
    assert profile_steps.write(device, "torch", lines, tmp_path) == 1  # a step waits
    steps = [event for event in EVENTS if "StreamSynchronize" not in event.name]
    assert profile_steps.write(device, "torch", profile_steps.summarise(steps), tmp_path) == 0
    assert profile_steps.write(device, "torch", [], tmp_path) == 1
    assert "A CPU run has no kernels" in capsys.readouterr().out
    content = json.loads((tmp_path / "profile-cpu.json").read_text())
    assert (content["tool"], content["lines"]) == ("torch", [])


def test_profile_of_this_machine(tmp_path: Path) -> None:
    """The whole of what bench/profile.sh does without nsys."""
    assert profile_steps.main(["torch", "--out", str(tmp_path)]) == 0
    lines = json.loads((tmp_path / "profile-cpu.json").read_text())["lines"]
    counts = {line["range"]: line["operators"] for line in lines}
    assert counts["serving step"] > 4
    assert all(counts[f"{operation} ours, eager"] == 1 for operation in OPERATIONS)
