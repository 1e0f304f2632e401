"""The fuzzer: short runs of it, and that it finds, shrinks and saves what is planted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fuzz
import pytest
import torch
from torch import Tensor
from walks import ALL_GIVEN, OPERATORS, STYLES, Buffer, Failure, Walk, World, play

import specmeta
from specmeta.cases import load_case
from specmeta.testing import run_case

COMMAND = [sys.executable, str(Path(fuzz.__file__))]
needs_sanitizers = pytest.mark.skipif(
    not fuzz.sanitizer_libraries(), reason="the compiler has no libasan"
)


def search(directory: Path, operators: dict[str, Callable[..., None]]) -> tuple[fuzz.Finding, Walk]:
    finding = fuzz.Search(directory, operators).run(0, 1000)
    assert finding
    walk = eval(finding.walk, {"Walk": Walk})
    with pytest.raises(Failure):
        play(walk, operators)
    play(walk)  # specmeta itself makes it well
    return finding, walk


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_walks(tmp_path: Path, device: str) -> None:
    run = fuzz.Search(tmp_path, device=device, large=device == "cuda")
    finding = run.run(0, 100)
    assert finding is None, str(finding)
    assert run.calls > 3 * run.walks
    assert list(tmp_path.iterdir()) == []


def test_walks_reach_every_operation_with_live_rows() -> None:
    """A walk that stages nothing would find nothing."""
    steps = tuple((name, ALL_GIVEN, seed) for seed in range(6) for name in STYLES["wild"])
    made: Counter[str] = Counter()
    lengths: Counter[str] = Counter()
    for call in World(Walk("wild", rows=4, slots=5, more_tokens=9, ledger=24, steps=steps)).calls():
        made[call.operator] += 1
        if call.refused:
            continue
        getattr(specmeta, call.operator)(**call.got)
        if "seq_lens" in call.got:
            lengths[call.operator] += int((call.got["seq_lens"] > 0).sum())
    assert set(made) == set(OPERATORS)
    assert all(lengths[name] for name in ("stage", "accept_greedy", "draft_step", "keep_last"))


def test_a_planted_fault_is_found_shrunk_and_saved(tmp_path: Path) -> None:
    def advance(num_accepted: Tensor | None, seq_lens: Tensor, **others: Any) -> None:
        """Count pages by patching: a row that goes back over the end of a page keeps it."""
        size, pages = others["page_size"], others.get("pages_per_seq")
        before = seq_lens.clone()
        specmeta.advance(num_accepted, seq_lens, **others)
        after = others.get("seq_lens_out", seq_lens)
        if pages is not None:
            pages += ((before - 1) // size > (after - 1) // size).int() * (after > 0)

    finding, walk = search(tmp_path, {"advance": advance})
    assert finding.kind == "advance: pages_per_seq"
    assert len(walk.steps) <= 3
    assert finding.case
    assert finding.alone
    case = load_case(finding.case)
    run_case(specmeta.advance, case)
    with pytest.raises(AssertionError, match="pages_per_seq"):
        run_case(advance, case)
    assert Path(finding.case).with_suffix(".txt").read_text() == f"{finding}\n"


def test_a_fault_that_needs_the_call_before(tmp_path: Path) -> None:
    seen: list[int] = []

    def stage(committed_lens: Tensor, **others: Any) -> None:
        """Remember, as no operation may."""
        specmeta.stage(committed_lens, **others)
        status = others.get("status")
        if status is not None and status.numel() and status.data_ptr() in seen:
            status[0] |= 64
        seen[:] = [status.data_ptr()] if status is not None else []

    finding, walk = search(tmp_path, {"stage": stage})
    assert finding.kind == "stage: status"
    assert sum(name in ("stage", "iterate") for name, _, _ in walk.steps) == 2
    assert finding.alone is False


@pytest.mark.parametrize("place", [-1, 3, 7])
def test_a_store_outside_is_found(place: int) -> None:
    """In front of a tensor, between its rows, behind it."""
    buffer = Buffer(torch.zeros(2, 3, dtype=torch.int32), gap=1, guard=2, device="cpu")
    buffer.check("a")
    start = buffer.got.storage_offset()
    buffer.got.as_strided((1,), (1,), start + place).fill_(1)
    with pytest.raises(AssertionError, match=f"written outside: a .* element {place} from"):
        buffer.check("a")


def test_a_call_that_is_not_refused_is_found() -> None:
    def accept_greedy(*tensors: Tensor, **others: Any) -> None:
        with suppress(RuntimeError):
            specmeta.accept_greedy(*tensors, **others)

    steps = tuple(("accept_greedy", ALL_GIVEN, seed) for seed in range(200))
    walk = Walk("wild", rows=2, slots=2, steps=steps)
    play(walk)
    with pytest.raises(Failure, match="accept_greedy: did not raise"):
        play(walk, {"accept_greedy": accept_greedy})


def test_a_crash_is_shrunk_and_saved(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
import fuzz, specmeta

def draft_step(seq_lens, **others):
    specmeta.draft_step(seq_lens, **others)
    if others.get("draft_index") == 1:
        os.abort()

finding = fuzz.Search(Path(sys.argv[1]), {"draft_step": draft_step}, fork=True).run(0, 300)
print(finding.case, finding.kind, finding.alone, sep="\\n")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    case, kind, alone = done.stdout.splitlines()
    assert kind == "draft_step: crashed (-6)"
    assert alone == "True"
    assert load_case(case).args["draft_index"] == 1
    run_case(specmeta.draft_step, load_case(case))


@needs_sanitizers
def test_walks_under_sanitizers(tmp_path: Path) -> None:
    """A short `make fuzz`; the round under sanitizers comes first."""
    done = subprocess.run(
        [*COMMAND, "--minutes", "0.1", "--seed", "1", "--device", "cpu", "--findings", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings" in done.stdout
    assert int(re.findall(r"sanitized: ([\d,]+) walks", done.stdout)[0].replace(",", "")) >= 50


@needs_sanitizers
def test_the_sanitized_library_is_the_one_that_runs() -> None:
    """A read behind a tensor, which no comparison could see, ends the process."""
    fuzz.build_sanitized()
    script = """
import ctypes, torch, specmeta
from specmeta import _library
print(_library.PATH, flush=True)
lengths = torch.zeros(3, dtype=torch.int32)
specmeta.advance(None, lengths, page_size=4)
memmove = ctypes.CDLL(None).memmove
memmove(ctypes.create_string_buffer(16), ctypes.c_void_p(lengths.data_ptr()), 16)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,  # `python -c` looks where it runs first
        env={"PATH": "/usr/bin:/bin", **fuzz.sanitized_environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == str(fuzz.PACKAGE / "specmeta" / "libspecmeta.so")
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


@needs_sanitizers
def test_the_distance_of_empty_rows_is_not_used() -> None:
    """It may be anything, also what overflows where it is multiplied."""
    fuzz.build_sanitized()
    script = """
import torch, specmeta
empty = torch.empty(0, dtype=torch.int32).as_strided((3, 0), (2**63 - 1, 1))
lens = torch.tensor([3, 0, 5], dtype=torch.int32)
specmeta.advance(None, lens, page_size=4, page_table=empty)
specmeta.count_sampled(empty, vocab_size=9, num_sampled=lens)
print(lens.tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        env={"PATH": "/usr/bin:/bin", **fuzz.sanitized_environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == "[0, 0, 0]\n"


def test_an_interrupt_ends_with_a_summary(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--minutes", "5", "--device", "cpu", "--findings", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline().startswith("seed ")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert output.endswith("0 findings\n")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--minutes", "0"], "--minutes: expected more than 0, got 0"), (["--device", "x"], "cpu")],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        fuzz.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_round_that_crashes_is_searched_again(tmp_path: Path) -> None:
    """Where a process dies, and what it died of is found by another one."""
    (tmp_path / "sitecustomize.py").write_text("""
import os, specmeta
draft_step = specmeta.draft_step

def crash(seq_lens, **others):
    draft_step(seq_lens, **others)
    if others.get("draft_index") == 1:
        os.abort()

specmeta.draft_step = crash
""")
    findings = tmp_path / "findings"
    script = "import sys, fuzz; fuzz.KINDS = ('plain',); sys.exit(fuzz.main())"
    arguments = ["--minutes", "0.05", "--seed", "1", "--device", "cpu", "--findings", findings]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 findings" in done.stdout
    assert "draft_step: crashed (-6)" in done.stdout
    assert load_case(next(findings.glob("*.json"))).args["draft_index"] == 1
