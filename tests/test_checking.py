"""Check mode finds what is planted, names it and saves it, and is silent where all is right."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from full_calls import calls

import specmeta
from specmeta import checking, observe
from specmeta._history import MOST_RECENT
from specmeta.cases import arguments_of, load_case
from specmeta.checking import Checker, CheckError
from specmeta.graph import capture
from specmeta.testing import run_case

K = 2


class Loop:
    """Two requests that count upwards; drafts are right where the number is no multiple of 5."""

    def __init__(self, device: str = "cpu") -> None:
        self.batch = specmeta.BatchMetadata(
            max_rows=3, max_slots=4, max_tokens=12, max_pages=8, page_size=4, max_seq_len=32,
            max_draft_len=K, device=device,
        )  # fmt: skip
        self.batch.assign(2, [7, 8, 9], pages=[1, 2, 3, 4])
        self.batch.assign(0, [20], pages=[5, 6, 7, 8])
        self.batch.set_rows([2, 0], [K + 1] * 2)

    def verify(self) -> None:
        batch = self.batch
        batch.accept_greedy(batch.input_ids + 1)
        wrong = batch.next_tokens % 5 == 0
        for k in range(K):
            drafts = batch.next_tokens + 1 + k + wrong
            batch.draft_step(drafts, index=k, last=k == K - 1)

    def step(self) -> None:
        self.batch.stage()
        self.verify()


@contextmanager
def planted(operator: str, wrong: Callable[..., None]) -> Iterator[None]:
    """Have an operator do something else after its own kernel."""
    kernel = torch.library.get_kernel(f"specmeta::{operator}", "CPU")
    names = [a.name for a in specmeta._library.schema()[operator]]

    def call(keyset: Any, *args: Any) -> None:
        kernel.call_boxed(keyset, *args)
        wrong(**dict(zip(names, args, strict=False)))

    library = torch.library.Library("specmeta", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(operator, call, "CPU", with_keyset=True)
    try:
        yield
    finally:
        library._destroy()


def found(directory: Path, *steps: Callable[[], object], match: str | None = None) -> CheckError:
    """Run steps under check mode, which must find something."""

    def run() -> None:
        with specmeta.check(directory):
            for step in steps:
                step()

    with pytest.raises(CheckError, match=match) as error:
        run()
    return error.value


def test_nothing_is_found_and_nothing_changes(device: str, tmp_path: Path) -> None:
    plain, checked = Loop(device), Loop(device)
    for _ in range(4):
        plain.step()
    with specmeta.check(tmp_path) as checker:
        graph = capture(checked.step, num_rows=checked.batch.num_rows)
        warm_ups = checker.calls
        for _ in range(3):
            graph.replay()
        checked.step()
    assert checker.finding is None
    assert checker.calls - warm_ups >= 4 * (2 + K)
    for name, tensor in vars(plain.batch).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, getattr(checked.batch, name)), name
    assert not list(tmp_path.iterdir())


def test_a_difference_is_reported_once_with_a_case(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(slot_mapping: torch.Tensor, seq_lens: torch.Tensor, **_: Any) -> None:
        if seq_lens[1] > 3:
            slot_mapping[4] += 1

    loop = Loop()
    with planted("stage", wrong):
        error = found(tmp_path, *[loop.step] * 4)
        finding = error.finding
        case = load_case(finding.path)
        assert case.operator == "stage"
        with pytest.raises(AssertionError, match=r"slot_mapping\[4\] is 23, expected 22"):
            run_case(specmeta.stage, case)
    run_case(specmeta.stage, case)
    assert (finding.step, finding.operator) == (1, "stage")
    assert (finding.wrong.field, finding.wrong.row, finding.wrong.slot) == ("slot_mapping[4]", 1, 0)
    assert (finding.wrong.expected, finding.wrong.got) == ("22", "23")
    assert str(error).endswith("(2 more calls were wrong)")
    assert caplog.text.count("slot_mapping[4] (row 1, slot 0): expected 22, got 23") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["check_stage_step_1.json"]


def test_no_directory_fails_at_once() -> None:
    """Not when something has been found, and its case has no place."""
    with (
        pytest.raises(TypeError, match=r"expected str, bytes or os\.PathLike"),
        specmeta.check(None),
    ):
        pass


def test_an_error_of_the_loop_is_not_hidden(tmp_path: Path) -> None:
    def fail() -> None:
        with specmeta.check(tmp_path):
            Loop().step()
            raise KeyError

    with planted("stage", lambda seq_lens, **_: seq_lens.add_(1)), pytest.raises(KeyError):
        fail()


def change_a_length(loop: Loop) -> None:
    loop.batch.stage()
    loop.batch.seq_lens[1] += 1
    loop.verify()


def change_a_position(loop: Loop) -> None:
    loop.batch.stage()
    loop.batch.position_ids += 1
    loop.verify()


def skip(loop: Loop) -> None:
    loop.batch.committed_lens[2] += 1
    loop.batch.known_lens[2] += 1


def repeat(loop: Loop) -> None:
    loop.batch.committed_lens[2] -= 1


def same_slot(loop: Loop) -> None:
    loop.batch.row_to_slot[1] = 2


def share_a_page(loop: Loop) -> None:
    loop.batch.page_table[0, 0] = 2


def hand_out_a_page_twice(loop: Loop) -> None:
    loop.batch.assign(2, [7, 8, 9], pages=[1, 2])
    loop.batch.assign(0, [20], pages=[1, 6])


def write_while_another_pauses(loop: Loop) -> None:
    batch = loop.batch
    batch.set_rows([0], [K + 1])
    batch.page_table[0, 1] = 1
    loop.step()
    batch.page_table[0, 1] = 6
    batch.set_rows([2], [K + 1])


def give_back(loop: Loop) -> None:
    observe.pages_given_back(loop.batch.page_table, [1])


FAULTS = {
    change_a_length: (
        "accept_greedy",
        "seq_lens[1] (row 1, slot 0): expected 7, for which stage listed the pages, got 8",
    ),
    change_a_position: (
        "accept_greedy",
        "position_ids[0] (row 0, slot 2): expected 4, as stage left it, got 5",
    ),
    skip: ("stage", "committed_lens[2] (row 0, slot 2): expected 4, as accept_* left it, got 5"),
    repeat: ("stage", "committed_lens[2] (row 0, slot 2): expected 4, as accept_* left it, got 3"),
    same_slot: (
        "stage",
        "row_to_slot[1] (row 1, slot 2): expected a slot of its own, got 2, which is row 0's",
    ),
    share_a_page: (
        "stage",
        "page 2 (row 1, slot 0): expected one request's, got written by slot 2 in the same call",
    ),
    hand_out_a_page_twice: (
        "stage",
        "page 1 (row 0, slot 2): expected one request's, got written by slot 0 in the same call",
    ),
    write_while_another_pauses: (
        "stage",
        "page 1 (row 0, slot 2): expected what the request left there, got what slot 0 wrote in "
        "step 2",
    ),
    give_back: (
        "stage",
        "page 1 (row 0, slot 2): expected a page that the slot holds, got given back",
    ),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_must_hold_between_calls(fault: Callable[[Loop], None], tmp_path: Path) -> None:
    operator, message = FAULTS[fault]
    loop = Loop()
    steps = (loop.step, loop.step, lambda: fault(loop), loop.step)
    error = found(tmp_path, *steps, match=re.escape(message))
    assert error.finding.operator == operator
    # It replays: the call itself was right.
    case = load_case(error.finding.path)
    if fault is not same_slot:
        run_case(getattr(specmeta, operator), case)


def test_a_slot_and_its_pages_may_get_another_request(tmp_path: Path) -> None:
    loop = Loop()
    batch = loop.batch
    with specmeta.check(tmp_path) as checker:
        for _ in range(2):
            loop.step()
            loop.step()
            batch.release(2)
            batch.drop_pages(0, keep=2)
            batch.assign(2, [7, 8, 9], pages=[8, 2, 3])
            batch.add_pages(0, [1, 7])
            loop.step()
            batch.assign(0, [7, 8, 9], pages=[5, 6, 4])
            loop.step()
            batch.release(0)
            batch.release(2)
            batch.assign(2, [1], pages=[1, 2, 3, 4])
            batch.assign(0, [1], pages=[5, 6, 7, 8])
    assert checker.calls == 8 * (2 + K)


def test_pages_may_be_shared_to_read(tmp_path: Path) -> None:
    loop = Loop()
    batch = loop.batch
    batch.assign(1, [7, 8, 9, 10, 1], pages=[1, 9, 10])  # slot 2's first page, a prefix of four
    with specmeta.check(tmp_path):
        loop.step()
        loop.step()
        batch.committed_lens[1] = 4
        batch.set_rows([2, 0, 1], [K + 1] * 3)
        loop.step()
        loop.step()


def test_a_prefix_may_be_read_in_the_step_that_writes_it(tmp_path: Path) -> None:
    loop = Loop()
    batch = loop.batch
    batch.assign(2, [7, 8, 9, 10, 11], pages=[1, 2, 3])
    batch.assign(1, [7, 8, 9, 10, 1], pages=[1, 9, 10])
    batch.committed_lens[1] = 4
    batch.set_rows([1, 2], [5] * 2)
    with specmeta.check(tmp_path):
        loop.step()
        loop.step()


def test_pages_may_be_swapped_out_and_in(tmp_path: Path) -> None:
    loop = Loop()
    batch = loop.batch
    with specmeta.check(tmp_path):
        loop.step()
        loop.step()
        batch.set_rows([0], [K + 1])
        out = batch.drop_pages(2, keep=0)
        batch.drop_pages(0, keep=0)
        batch.assign(0, [1, 2, 3, 4, 5], pages=out)
        loop.step()
        batch.drop_pages(0, keep=0)
        batch.add_pages(2, out)  # and what stood there is copied back
        batch.set_rows([2], [K + 1])
        loop.step()


def test_an_engine_may_own_the_lengths_and_leave_the_draft_loop_to_us(tmp_path: Path) -> None:
    table = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
    lens, positions = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    with specmeta.check(tmp_path) as checker:
        for length in (5, 7, 8):
            lens.fill_(length)
            positions.fill_(length - 1)
            for k in range(K):
                specmeta.draft_step(
                    lens, position_ids=positions, page_table=table, page_size=4, draft_index=k
                )
    assert checker.calls == 3 * K


def test_tensors_that_are_made_anew_in_each_step_are_forgotten(tmp_path: Path) -> None:
    table = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
    checker = Checker(tmp_path)
    observe.add(checker)
    observe.assigned(table, 0)
    for _ in range(MOST_RECENT + 1):
        specmeta.stage(
            torch.tensor([3], dtype=torch.int32), page_size=4, page_table=table,
            query_lens=torch.tensor([1], dtype=torch.int32),
            seq_lens=torch.empty(1, dtype=torch.int32),
            cu_seqlens_q=torch.empty(2, dtype=torch.int32),
        )  # fmt: skip
        other = torch.tensor([[9]], dtype=torch.int32)
        specmeta.advance(None, torch.tensor([1]), page_size=4, page_table=other)
    specmeta.advance(None, torch.tensor([11]), page_size=4, page_table=table)
    observe.remove(checker)
    assert checker.finding is not None  # the table is not
    assert checker.finding.wrong.field == "cached_lens[0]"
    assert checker.finding.wrong.expected.startswith("at most 4")
    history = vars(checker._history).values()
    assert max(map(len, (checker._steps, *history))) == MOST_RECENT


def test_steps_are_counted_where_outputs_are_made_anew(tmp_path: Path) -> None:
    def wrong(seq_lens: torch.Tensor, cached_lens: torch.Tensor, **_: Any) -> None:
        cached_lens[0] += seq_lens[0] == 5

    engine = Advanced()

    def step() -> None:
        specmeta.advance(
            torch.tensor([1]), engine.seq_lens - 4, page_size=4, num_rows=int(engine.seq_lens),
            page_table=engine.page_table, cached_lens=torch.empty(1, dtype=torch.int32),
        )  # fmt: skip
        engine.seq_lens += 1

    with planted("advance", wrong):
        finding = found(tmp_path, *[step] * 3).finding
    assert (finding.step, finding.wrong.field) == (2, "cached_lens[0]")


@pytest.mark.parametrize("operator", calls())
def test_each_output_is_compared(operator: str, tmp_path: Path) -> None:
    outputs = [
        argument.name
        for argument in arguments_of(operator).values()
        if argument.written and argument.name in calls()[operator]
    ]
    assert outputs
    for name, value in itertools.product(outputs, (1, 0x7B7B7B7B, -(2**31))):

        def wrong(name: str = name, value: int = value, **tensors: Any) -> None:
            element = tensors[name].view(-1)[-1]
            element.copy_(~element if element.dtype == torch.bool else element + value)

        arguments = calls()[operator]
        run = partial(getattr(specmeta, operator), **arguments)
        with planted(operator, wrong):
            finding = found(tmp_path, run).finding
        place = [size - 1 for size in arguments[name].shape]
        assert finding.wrong.field == f"{name}{place}"
        assert int(arguments[name].view(-1)[-1]) == int(eval(finding.wrong.got))
        assert finding.path is not None
        case = load_case(finding.path)
        run_case(getattr(specmeta, operator), case)
        assert int(case.expect[name].view(-1)[-1]) == int(eval(finding.wrong.expected))


def test_the_case_has_the_gaps_of_the_call(tmp_path: Path) -> None:
    table = torch.arange(20, dtype=torch.int32).view(2, 10)[:, 1:4]
    lens = torch.tensor([3, 3])
    run = partial(specmeta.advance, None, lens, page_size=4, page_table=table)
    with planted("advance", lambda seq_lens, **_: seq_lens.add_(1)):
        finding = found(tmp_path, run).finding
    assert finding.path is not None
    assert load_case(finding.path).args["page_table"].stride() == (10, 1)


def test_a_finding_without_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "file"
    directory.touch()
    run = partial(specmeta.advance, None, torch.tensor([3]), page_size=4)
    with planted("advance", lambda seq_lens, **_: seq_lens.add_(1)):
        error = found(directory, run, run, match="expected 3, got 4")
    assert error.finding.path is None
    assert f"no case file in {directory}: " in caplog.text
    assert "(1 more calls were wrong)" in str(error)


def test_a_failure_of_its_own_is_not_taken_for_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise IndexError

    def run() -> None:
        with specmeta.check(tmp_path):
            for _ in range(2):
                specmeta.advance(None, torch.tensor([3]), page_size=4)

    monkeypatch.setattr(checking, "_difference", fail)
    with pytest.raises(RuntimeError, match="failed at call 1, and compared none"):
        run()


class Advanced:
    """An engine that keeps its own lengths: one row of two tokens a step."""

    def __init__(self) -> None:
        self.seq_lens = torch.tensor([6], dtype=torch.int32)
        self.position_ids = torch.tensor([4, 5])
        self.page_table = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)

    def step(self, count: int) -> None:
        specmeta.advance(
            torch.tensor([count]), self.seq_lens, page_size=4, position_ids=self.position_ids,
            page_table=self.page_table, cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32),
        )  # fmt: skip


def test_advance_past_the_end_of_what_is_written(tmp_path: Path) -> None:
    engine = Advanced()
    steps = [lambda: observe.assigned(engine.page_table, 0)]
    steps += [partial(engine.step, count) for count in (2, -1, 1, 3)]
    expected = re.escape("cached_lens[0] (row 0, slot 0): expected at most 8, where the request's")
    assert found(tmp_path, *steps, match=expected).finding.step == 3
    with specmeta.check(tmp_path):  # nobody tells: it may be another request
        for step in steps[1:]:
            step()


def test_advance_may_repeat_a_slot(tmp_path: Path) -> None:
    """A row of padding may name a slot that another one has."""
    table = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
    with specmeta.check(tmp_path) as checker:
        for lens in ([9, 6], [9, 13], [13, 2]):
            specmeta.advance(
                None, torch.tensor(lens), page_size=4, page_table=table,
                row_to_slot=torch.tensor([0, 0]),
            )  # fmt: skip
    assert checker.calls == 3


def test_a_page_that_the_slot_was_never_given(tmp_path: Path) -> None:
    loop = Loop()
    batch = loop.batch
    batch.release(2)
    batch.release(0)

    def assign() -> None:
        batch.assign(2, [7, 8, 9], pages=[1, 2, 3, 4])
        batch.assign(0, [20], pages=[5, 6, 7, 8])

    def fault() -> None:
        batch.page_table[2, 0] = 30

    expected = re.escape("page 30 (row 0, slot 2): expected a page that the slot holds")
    found(tmp_path, assign, loop.step, fault, loop.step, match=expected)


def test_stage_that_does_not_say_how_many_tokens(tmp_path: Path) -> None:
    table = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
    seq_lens = torch.empty(1, dtype=torch.int32)
    with specmeta.check(tmp_path) as checker:
        for committed in (0, 2, 4):
            specmeta.stage(
                torch.tensor([committed], dtype=torch.int32), page_size=4, page_table=table,
                query_lens=torch.tensor([2], dtype=torch.int32), seq_lens=seq_lens,
            )  # fmt: skip
    assert checker.calls == 3


def test_faults_are_said_once_and_are_no_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    status = torch.zeros(2, dtype=torch.int32)
    with specmeta.check(tmp_path) as checker:
        for count in (1, 9, -9):
            specmeta.advance(
                torch.tensor([1, count]), torch.tensor([5, 5]), page_size=4, max_accepted=4,
                status=status,
            )  # fmt: skip
    assert checker.faults == specmeta.Status.BAD_COUNT
    message = "specmeta check: step 1, advance: status[1] (row 1, slot 1): BAD_COUNT"
    assert [record.getMessage() for record in caplog.records] == [message]


@pytest.mark.parametrize("pair", [(-2, 1), (1, 0), (0, 2**31 - 1)])
def test_a_pair_that_cannot_be_right_is_a_fault(pair: tuple[int, int], tmp_path: Path) -> None:
    """Its tokens are nobody's: check mode doesn't look at them."""
    ids = torch.zeros(3, dtype=torch.int64)
    with specmeta.check(tmp_path) as checker:
        specmeta.accept_greedy(
            ids, ids, cu_seqlens_q=torch.tensor(pair, dtype=torch.int32), position_ids=ids + 2,
            seq_lens=torch.tensor([3]), status=torch.zeros(1, dtype=torch.int32),
        )  # fmt: skip
    assert checker.faults == specmeta.Status.BAD_INDPTR


def test_broken_positions(tmp_path: Path) -> None:
    engine = Advanced()
    engine.position_ids[1] = 4
    expected = re.escape(
        "position_ids[1] (row 0, slot 0): expected 6, behind position_ids[0], got 5"
    )
    found(tmp_path, partial(engine.step, 1), match=expected)


PROGRAM = """
import torch, specmeta
specmeta.advance(torch.tensor([2]), torch.tensor([33]), page_size=32)
"""


def run(value: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "SPECMETA_CHECK": value},
        cwd=directory, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_environment(tmp_path: Path) -> None:
    result = run("1", tmp_path)
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == "specmeta check: 1 calls, 0 wrong\n"
    assert run("0", tmp_path).stderr == ""
    wrong = run("yes", tmp_path)
    assert wrong.returncode == 1
    assert "SPECMETA_CHECK: expected 0 or 1, got 'yes'" in wrong.stderr


def test_text_is_generated_as_without(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specmeta", "generate", "--prompt", "It was", "--prompt"]
    command += ["She had", "--max-new-tokens", "12"]
    result = subprocess.run(
        command, env={**os.environ, "SPECMETA_CHECK": "1", "OMP_NUM_THREADS": "1"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert "identical to plain greedy decoding" in result.stdout
    assert result.stderr.rstrip().endswith(" calls, 0 wrong")
    assert json.dumps(os.listdir(tmp_path)) == "[]"
