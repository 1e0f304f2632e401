"""The check on a GPU, as far as it goes without one: orchestration, drivers, what outputs say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import bench_repack
from bench.gpu_check import __main__ as command
from bench.gpu_check import drive, outputs, summary, targets
from bench.gpu_check.run import Finding, Output, Part, run_part

ROOT = Path(__file__).parents[1]


def python(name: str, code: str, **more: Any) -> Part:
    return Part(name, name, (sys.executable, "-c", code), **{"limit": 30.0, **more})


def refuse(output: Output) -> Finding:
    return Finding(refused=output.stdout.strip())


BUILD = python("build", "print('built')")
PARTS = [
    [
        python(
            "good",
            "import os; print(os.environ['WORD']); print('loud', file=__import__('sys').stderr)",
            read=lambda output: Finding({"word": output.stdout.strip(), "half": 0.5}),
            environment={"WORD": "five"},
            is_test=True,
        ),
        python("failing", "raise SystemExit('a bad | thing')", is_test=True),
        python("hanging", "import time; print('begun'); time.sleep(60)", limit=1.0),
    ],
    [
        Part("no_tool", "a tool", ("no-such-tool", "--version"), 30.0, is_test=True),
        python("no_module", "", modules=("no_such_module",), is_test=True),
        python("no_import", "import no_such_module", is_test=True),
        python("refusing", "print('not here')", read=refuse, is_test=True),
        python("unreadable", "", read=outputs.read_bench),
        python("no_time", "", limit=10_000.0, is_test=True),
    ],
]


def run_check(
    tmp_path: Path, build: Part, stages: list[list[Part]]
) -> tuple[int, dict[str, Any], str]:
    out, folder = tmp_path / "out", tmp_path / "scratch"
    folder.mkdir()
    for name in (*outputs_of_parts(), "plot.png"):
        (folder / name).write_text("{}")
    status = command.check(build, stages, out, {"device": "none"}, folder, began=time.monotonic())
    assert {path.name for path in out.iterdir()} <= {
        "summary.json", "summary.md", "log.txt", *outputs_of_parts()
    }  # fmt: skip
    assert len(list(out.iterdir())) <= 8
    content = json.loads((out / "summary.json").read_text())
    return status, content, (out / "summary.md").read_text()


def outputs_of_parts() -> tuple[str, ...]:
    return ("matrix.json", "profile-cuda.json", "ncu.csv", "targets.json", "results-cuda.json")


def test_every_end_of_a_part(tmp_path: Path) -> None:
    began = time.monotonic()
    stages = [[part for part in stage if part.name != "unreadable"] for stage in PARTS]
    status, content, markdown = run_check(tmp_path, BUILD, stages)
    assert time.monotonic() - began < 55
    assert status == 1  # a test fails
    parts = {part["name"]: part for part in content["parts"]}
    assert {name: part["status"] for name, part in parts.items()} == {
        "build": "ok",
        "good": "ok",
        "failing": "failed",
        "hanging": "failed",
        "no_tool": "missing",
        "no_module": "missing",
        "no_import": "missing",
        "refusing": "missing",
        "no_time": "skipped",
    }
    assert {name: part["reason"] for name, part in parts.items() if part["reason"]} == {
        "failing": "exit status 1",
        "hanging": "past its limit of 1 s",
        "no_tool": "no-such-tool is missing",
        "no_module": "the package no_such_module is missing",
        "no_import": "the package no_such_module is missing",
        "refusing": f"{sys.executable} refuses: not here",
        "no_time": "no time",
    }
    assert parts["good"]["figures"] == {"word": "five", "half": 0.5}
    assert parts["failing"]["errors"] == ["a bad | thing"]
    assert content["device"] == "none"
    assert "| no_time | no_time | skipped | 0 | no time |" in markdown
    assert "- half: 0.5" in markdown
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "##### good.out\nfive\n" in log
    assert "##### good.err\nloud\n" in log
    assert "##### hanging.out\nbegun\n" in log


def test_no_test_fails(tmp_path: Path) -> None:
    stages = [[part] for part in (PARTS[0][0], *PARTS[1][:3])]
    stages.append([python("a measurement", "raise SystemExit(3)")])
    assert run_check(tmp_path, BUILD, stages)[0] == 0


def test_without_a_build_nothing_runs(tmp_path: Path) -> None:
    build = python("build", "raise SystemExit(2)")
    status, content, markdown = run_check(tmp_path, build, PARTS)
    assert status == 1
    assert [part["status"] for part in content["parts"]] == ["failed"]
    assert "| build | build | failed |" in markdown


def test_what_came_before_counts(tmp_path: Path) -> None:
    """To import torch and wake the GPU may take long: no part has that time any more."""
    (tmp_path / "scratch").mkdir()
    began = time.monotonic() - command.BUDGET + 5
    arguments = ([], tmp_path / "out", {"device": "none"}, tmp_path / "scratch")
    assert command.check(python("build", ""), *arguments, began=began) == 1
    (part,) = json.loads((tmp_path / "out" / "summary.json").read_text())["parts"]
    assert part["reason"] == "no time"


def test_an_output_that_cannot_be_read(tmp_path: Path) -> None:
    (part,) = (part for part in PARTS[1] if part.name == "unreadable")
    outcome = run_part(part, tmp_path, deadline=time.monotonic() + 60)
    assert outcome.status == "failed"
    assert outcome.errors[0].startswith("its output can't be read: FileNotFoundError")


def test_what_a_part_starts_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    outcome = run_part(python("parent", code, limit=5.0), tmp_path, deadline=time.monotonic() + 60)
    assert outcome.status == "failed"
    child = int((tmp_path / "parent.out").read_text())
    for _ in range(50):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        # A process that nobody waits for may stay as a name only.
        if "\nState:\tZ" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.1)
    raise AssertionError("the child still runs")


def test_the_plan(tmp_path: Path) -> None:
    stages = command.plan(tmp_path)
    parts = [part for stage in stages for part in stage]
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    for part in parts:
        for word in part.command:
            if word.startswith("tests/"):
                assert (ROOT / word).exists(), word
    # A file of more than 16 MiB may not be brought back; a character has up to three bytes here.
    assert (1 + len(parts)) * 2 * 3 * summary._LOG_LIMIT < 2**24
    timed = {"bench", "targets", "profile", "ncu"}
    assert all(len(stage) == 1 for stage in stages if timed & {part.name for part in stage})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "bench" / "gpu_check.sh", tmp_path / "out"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == f"no GPU: torch {torch.__version__} finds none\n"
    assert not (tmp_path / "out").exists()


def test_read_drive(tmp_path: Path) -> None:
    said = "stage, 3 rows, workspace: True\n"
    good = Output(said + "90 calls\n", "", tmp_path)
    assert outputs.read_drive(good).figures == {"calls": 90}
    hung = Output("stage, 1025 rows, workspace: True\n", "", tmp_path)
    assert outputs.read_drive(hung).errors == ["it ended with: stage, 1025 rows, workspace: True"]


def test_driver_of_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drive, "SIZES", drive.SIZES[:3])
    assert drive.main(["sizes", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith(f"{len(drive.OPERATIONS) * 3 * 3} calls\n")


def test_calls_hold_wrong_values_and_one_shape() -> None:
    for operation in drive.OPERATIONS:
        calls = [drive.make_call(operation, 300, 16, seed=seed) for seed in (0, 1)]
        shapes = [
            {name: value.shape for name, value in call.items() if isinstance(value, torch.Tensor)}
            for call in calls
        ]
        assert shapes[0] == shapes[1]
        wrong = calls[0].get("row_to_slot", calls[0].get("seq_lens"))
        assert wrong.min() < 0
        if "row_to_slot" in calls[0]:
            assert wrong.max() >= 300


def test_targets_are_measured() -> None:
    sizes = [work.name for work in bench_repack.SWEEPS["pages"]]
    assert "1,048,576" in sizes
    found = targets.measure(torch.device("cpu"), pages=4_096, large=2**20, seconds=0.01)
    assert found["large_copy_gb_s"] > 0
    for kind in ("warm", "cold"):
        assert found[kind]["ours_us"] > 0
        share = found[kind]["ours_gb_s"] / found["large_copy_gb_s"]
        assert found[kind]["share_of_large_copy"] == pytest.approx(share)


# Texts as the tools print them, made up.


def read(text: str, tmp_path: Path, reader: Any, stderr: str = "") -> Finding:
    finding: Finding = reader(Output(text, stderr, tmp_path))
    return finding


def test_pytest_output(tmp_path: Path) -> None:
    text = (
        "tests/test_a.py::test_x PASSED\n"
        "tests/test_a.py::test_y FAILED\n"
        "=== short test summary info ===\n"
        "FAILED tests/test_a.py::test_y - AssertionError: kv_indices[3] is 1, expected 2\n"
        "== 1 failed, 41 passed, 2 skipped, 9 deselected, 1 warning in 12.34s ==\n"
    )
    finding = read(text, tmp_path, outputs.read_pytest)
    assert finding.figures == {"failed": 1, "passed": 41, "skipped": 2, "warning": 1}
    assert finding.errors == [
        "FAILED tests/test_a.py::test_y - AssertionError: kv_indices[3] is 1, expected 2"
    ]
    # torch's profiler writes to the log, too; and pytest of what it wasn't given rightly.
    logged = "ERROR:2026-01-02 03:04:05 1:1 A.cpp:5] no\nERROR: file or directory not found: a\n"
    finding = read("== 1 passed in 1.00s ==\n", tmp_path, outputs.read_pytest, stderr=logged)
    assert finding.errors == ["ERROR: file or directory not found: a"]
    ended = "tests/test_a.py::test_x PASSED [ 1%]\ntests/test_a.py::test_y "
    finding = read(ended, tmp_path, outputs.read_pytest)
    assert finding.figures == {"passed": 1, "ended": "early"}
    assert finding.errors == ["the last line: tests/test_a.py::test_y "]
    finding = read("== 9 deselected in 0.10s ==\n", tmp_path, outputs.read_pytest)
    assert (finding.figures, finding.errors) == ({}, ["no test ran"])


def test_sanitizer_output(tmp_path: Path) -> None:
    head = "========= COMPUTE-SANITIZER\n"
    clean = f"{head}90 calls\n========= ERROR SUMMARY: 0 errors\n"
    finding = read(clean, tmp_path, outputs.read_sanitizer)
    assert finding == Finding({"errors": 0, "calls": 90})
    found = (
        f"{head}========= Invalid __global__ write of size 4 bytes\n"
        "=========     at advance_kernel(specmeta::AdvanceParams)+0x1b0\n"
        "========= \n========= ERROR SUMMARY: 1 error\n"
    )
    finding = read(found, tmp_path, outputs.read_sanitizer)
    assert finding.figures == {"errors": 1}
    assert finding.errors[0] == "Invalid __global__ write of size 4 bytes"
    races = (
        f"{head}========= Error: Race reported between Write access at a and Read access at b\n"
        "========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n"
    )
    assert read(races, tmp_path, outputs.read_sanitizer).figures == {"errors": 2}
    refused = f"{head}========= Error: Device not supported. Please refer to the documentation\n"
    finding = read(f"{refused}========= ERROR SUMMARY: 1 error\n", tmp_path, outputs.read_sanitizer)
    assert finding.refused.startswith("Error: Device not supported")
    assert read("", tmp_path, outputs.read_sanitizer).errors == ["no summary"]
    finding = read("", tmp_path, outputs.read_sanitizer, stderr="Traceback\n")
    assert finding.errors == ["Traceback"]


def test_ncu_output(tmp_path: Path) -> None:
    advance = ("0", "specmeta::cuda::advance_kernel(specmeta::AdvanceParams)", "(64, 1, 1)")
    stage = ("1", "specmeta::cuda::stage_kernel(specmeta::StageParams)", "(1, 1, 1)")
    rows = [
        ("ID", "Kernel Name", "Grid Size", "Metric Name", "Metric Unit", "Metric Value"),
        (*advance, "Duration", "us", "1.23"),
        (*advance, "Memory Throughput", "%", "12.5"),
        (*advance, "Memory Throughput", "Gbyte/second", "99"),
        (*stage, "Something Else", "", "7"),
    ]
    text = "\n".join(",".join(f'"{value}"' for value in row) for row in rows)
    (tmp_path / "ncu.csv").write_text(f"==PROF== Connected to process 7\n{text}\n")
    assert read("6 calls\n", tmp_path, outputs.read_ncu).figures == {
        "0 advance": {
            "Grid Size": "(64, 1, 1)",
            "Duration, us": "1.23",
            "Memory Throughput, %": "12.5",
            "Memory Throughput, Gbyte/second": "99",
        },
        "1 stage": {"Grid Size": "(1, 1, 1)"},
    }
    (tmp_path / "ncu.csv").write_text("==ERROR== ERR_NVGPUCTRPERM - no permission to access\n")
    assert "ERR_NVGPUCTRPERM" in read("", tmp_path, outputs.read_ncu).refused
    (tmp_path / "ncu.csv").unlink()
    assert read("6 calls\n", tmp_path, outputs.read_ncu).errors == ["no launch was profiled"]


def test_matrix_output(tmp_path: Path) -> None:
    combination = {"num_texts": 4, "differences": [{}]}
    text = json.dumps({"combinations": [combination, combination], "faults": ["a text differs"]})
    finding = read(text, tmp_path, outputs.read_matrix)
    assert finding.figures == {"combinations": 2, "texts": 8, "texts that differ": 2}
    assert finding.errors == ["a text differs"]
    assert (tmp_path / "matrix.json").read_text() == text


def test_profile_output(tmp_path: Path) -> None:
    step: dict[str, Any] = {"range": "serving step", "count": 9, "kernels": 70.5, "syncs": 0.0}
    step |= {"specmeta_kernels": 5.0, "launches": 2.0, "copies_to_host": 1.0, "idle_us": 3.0}
    content = {"tool": "nsys", "lines": [{"range": "another"}, step]}
    (tmp_path / "profile-cuda.json").write_text(json.dumps(content))
    figures = read("", tmp_path, outputs.read_profile).figures
    assert (figures["counted by"], figures["kernels"], figures["syncs"]) == ("nsys", 70.5, 0.0)


def write_bench(folder: Path) -> None:
    """Write what the benches write, of made-up operations."""
    times = {"median_us": 2.5, "p95_us": 3.0, "repetitions": 10}

    def line(operation: str, mode: str, warm: float, rows: int = 256) -> dict[str, Any]:
        return {
            "operation": operation,
            "implementation": "ours",
            "mode": mode,
            "work": {"name": f"{rows} rows", "rows": rows},
            "warm": times | {"median_us": warm},
            "cold": times,
        }

    results = [line("fast", "graph", 2.0), line("slow", "graph", 4.0)]
    results += [line("fast", "eager", 9.0), line("fast", "graph", 1.0, rows=1)]
    results += [line("repack", "graph", 9.0)]
    content = {"results": results, "skipped": [], "floor": times, "headline": {"ours_us": 9.0}}
    (folder / "results-cuda.json").write_text(json.dumps(content))


def test_bench_output(tmp_path: Path) -> None:
    write_bench(tmp_path)
    figures = read("", tmp_path, outputs.read_bench).figures
    assert (figures["measured"], figures["floor_us"], figures["ours_us"]) == (5, 2.5, 9.0)
    assert figures["operations in a graph"]["fast"] == {
        "256 rows": {"warm_us": 2.0, "cold_us": 2.5}
    }


def test_targets_output(tmp_path: Path) -> None:
    measured = {"ours_us": 5.0, "share_of_large_copy": 0.8, "share_of_same_copy": 0.9}
    content = {"large_copy_gb_s": 100.0, "warm": measured}
    content["cold"] = measured | {"share_of_large_copy": 0.6}
    (tmp_path / "targets.json").write_text(json.dumps(content))
    assert set(read("", tmp_path, outputs.read_targets).figures) == {
        "repack, warm", "repack, cold", "large copy, GB/s"
    }  # fmt: skip
    write_bench(tmp_path)
    finding = read("", tmp_path, outputs.read_targets)
    met = {k: v["met"] for k, v in finding.figures.items() if isinstance(v, dict)}
    assert met == {"fast": True, "slow": False, "repack, warm": True, "repack, cold": False}
    assert not finding.errors
