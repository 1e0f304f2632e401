"""The kernels' machine code, run without a GPU (see emulator/), against the reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import full_calls
import pytest
import strategies
import test_large
import torch
from conftest import OPERATIONS
from emulator import device as emulated
from emulator.machine import Schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cases import CASES
from torch import Tensor

import specmeta
from specmeta import _library, reference, testing
from specmeta.cases import load_case
from tools import kernel_table, kernel_work
from tools.kernel_table import ARCHITECTURES, find_cuobjdump

OPTIONAL = (
    *("num_pages", "num_rows", "cached_lens", "use_initial_states", "last_page_len"),
    *("kv_indptr", "kv_indices", "block_table", "status"),
)
GetDevice = Callable[[str], emulated.Device]


@pytest.fixture(scope="module")
def get_device(tmp_path_factory: pytest.TempPathFactory) -> GetDevice:
    """A device of an architecture."""
    if not _library.build_info().cuda:
        pytest.skip("the library was built without CUDA kernels")
    if emulated.find_nvcc() is None or find_cuobjdump() is None:
        pytest.skip("no nvcc, or no cuobjdump")
    if not emulated.BUILD.exists():
        pytest.skip("no build directory: make build")
    folder = tmp_path_factory.mktemp("emulator")
    library = emulated.build(folder)
    devices: dict[str, emulated.Device] = {}

    def get(architecture: str) -> emulated.Device:
        if architecture not in devices:
            devices[architecture] = emulated.Device(library, architecture, folder / architecture)
        return devices[architecture]

    return get


each_operation = pytest.mark.parametrize("operation", OPERATIONS)
each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


@each_architecture
@each_operation
def test_every_argument(operation: str, architecture: str, get_device: GetDevice) -> None:
    device = get_device(architecture)
    call = full_calls.calls()[operation]
    device.schedule = Schedule()
    testing.run_both(device.operation(operation), getattr(reference, operation), call)
    assert device.may_overlap == (architecture != "sm_80")


@each_architecture
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_cases(path: Path, architecture: str, get_device: GetDevice) -> None:
    device = get_device(architecture)
    case = load_case(path)
    device.schedule = Schedule(seed=len(path.stem))
    testing.run_case(device.operation(case.operator, shift=True), case)


@each_architecture
@each_operation
def test_random_calls(operation: str, architecture: str, get_device: GetDevice) -> None:
    """Small ones, by one block and by four."""
    device = get_device(architecture)

    @settings(max_examples=40 if architecture == "sm_90" else 10)
    @given(
        call=getattr(strategies, f"{operation}_calls")(),
        seed=st.integers(0, 2**16),
        blocks=st.sampled_from((1, 4)),
    )
    def run(call: dict[str, Any], seed: int, blocks: int) -> None:
        device.schedule, device.blocks = Schedule(seed), blocks
        function = device.operation(operation, shift=True)
        if operation != "keep_last":
            workspace = specmeta.workspace(32, num_steps=call.get("num_steps", 1))
            function = partial(function, workspace=workspace)
        testing.run_both(function, getattr(reference, operation), call)

    run()
    device.blocks = None


def _is_ready(workspace: Tensor, rows: int) -> bool:
    """All but the records must be zero behind a launch."""
    rest = workspace.clone()
    rest[8 : 8 + 4 * rows] = 0
    return not rest.any()


def _make_long(operation: str, call: dict[str, Any], draw: random.Random) -> None:
    """Give rows some ten times as many pages; without a ledger, which would not have them."""
    for name in {"stage": ("tokens", "input_ids", "num_drafts", "num_draft_tokens")}.get(
        operation, ("tokens", "known_lens", "num_drafts")
    ):
        call.pop(name, None)
    pages = call["page_table"]
    call["page_table"] = pages.repeat(1, 8)
    for name in ("num_pages", "seq_lens", "committed_lens", "known_lens"):
        if name in call:
            call[name] = call[name] * 8
    if operation == "map_slots":
        call["position_ids"] = call["position_ids"] * 8
    if "block_table" in call:
        call["block_table"] = call["block_table"].repeat(1, draw.choice((3, 10)))
    if "kv_indices" in call:
        size = call["kv_indices"].shape[-1] * draw.choice((5, 12))
        call["kv_indices"] = call["kv_indices"].new_zeros(*call["kv_indices"].shape[:-1], size)


def _large_call(operation: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Up to three tiles of rows; some arguments are absent, some values are wrong."""
    draw = random.Random(seed)
    rows = draw.choice((2_500, 2_048, 1_025, 1_024, 700, 257, 256))
    monkeypatch.setattr(test_large, "ROWS", rows)
    call = test_large._call(operation, page_size=draw.choice((1, 3, 16)))
    call = {k: v for k, v in call.items() if k not in OPTIONAL or draw.random() < 0.7}
    if "page_table" in call and draw.random() < 0.4:
        _make_long(operation, call, draw)
    noise = draw.choice((0.0, 0.001, 0.02))
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in call.items():
        if isinstance(tensor, Tensor) and tensor.dtype != torch.bool:
            wild = torch.tensor([-1, -(2**31), 2**31 - 1, -7], dtype=tensor.dtype)
            places = torch.rand(tensor.shape, generator=generator) < noise
            which = torch.randint(0, 4, tensor.shape, generator=generator)
            call[name] = torch.where(places, wild[which], tensor)
    if operation == "stage" and draw.random() < 0.3:
        for name in {"position_ids", "input_ids"} & call.keys():
            call[name] = call[name][: len(call[name]) // 2].clone()
    return call


def _check(
    device: emulated.Device, operation: str, call: dict[str, Any], workspace: Tensor | None
) -> None:
    got, want = (
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in call.items()} for _ in range(2)
    )
    getattr(reference, operation)(**want)
    extra = {} if workspace is None else {"workspace": workspace}
    device.operation(operation)(**got, **extra)
    for name, tensor in got.items():
        if isinstance(tensor, Tensor):
            testing.assert_equal(name, tensor, want[name])


SEEDS = [(name, seed) for name in ARCHITECTURES for seed in range(6 if name == "sm_90" else 1)]


@pytest.mark.parametrize(("architecture", "seed"), SEEDS)
@each_operation
def test_large_calls(
    operation: str,
    architecture: str,
    seed: int,
    get_device: GetDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one block, and by several in any order, again and again on one workspace."""
    device = get_device(architecture)
    call = _large_call(operation, seed, monkeypatch)
    steps, rows = call.get("num_steps", 1), 2_500
    device.schedule = Schedule(seed)
    _check(device, operation, call, None)
    assert device.works[-1].blocks == steps
    if operation == "keep_last":
        return
    workspace = specmeta.workspace(rows, num_steps=steps)
    for schedule in (Schedule(resident=1), Schedule(seed, resident=2), Schedule(seed)):
        device.schedule = schedule
        _check(device, operation, call, workspace)
        for part in workspace.view(steps, -1):
            assert _is_ready(part, rows)


@pytest.mark.parametrize("rows", [1_025, 2_500])
@pytest.mark.parametrize("operation", ["advance", "stage", "draft_step"])
def test_shares_of_long_lists(
    operation: str, rows: int, get_device: GetDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without pages, with some, and one with more than a block's share; wrong ids in all."""
    device = get_device("sm_90")
    monkeypatch.setattr(test_large, "ROWS", rows)
    call = test_large._call(operation, page_size=3)
    ledger = ("tokens", "input_ids", "known_lens", "num_drafts", "num_draft_tokens")
    for name in (*ledger, "page_table", "num_pages", "block_table"):
        call.pop(name, None)
    generator = torch.Generator().manual_seed(rows)
    counts = torch.randint(0, 9, (rows,), generator=generator)
    counts[call["row_to_slot"][rows // 2]] = 9_000
    indptr = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)])
    ids = torch.randint(0, 10**6, (int(indptr[-1]),), dtype=torch.int32, generator=generator)
    ids[::97] = -1
    lens = (3 * counts - 9).clamp(min=0).int()  # no row outgrows its pages
    if operation == "stage":
        call["committed_lens"] = lens
    else:
        call["seq_lens"] = lens[call["row_to_slot"]]
    call |= {"alloc_indptr": indptr, "alloc_pages": ids, "kv_indices": torch.zeros_like(ids)}
    workspace = specmeta.workspace(rows)
    for schedule in (Schedule(resident=1), Schedule(rows)):
        device.schedule = schedule
        _check(device, operation, call, workspace)
        assert device.works[-1].blocks >= 4
        assert _is_ready(workspace, rows)


@each_architecture
def test_sums_beyond_32_bits(architecture: str, get_device: GetDevice) -> None:
    """Rows of billions of pages, in a batch of one tile, in one of more, and by blocks."""
    device = get_device(architecture)
    device.schedule = Schedule()
    for rows, workspace in ((40, None), (2_100, None), (300, specmeta.workspace(300))):
        draw = random.Random(rows)
        lens = [draw.choice((1, 7, 2**21 + 1, 2**30, 2**31 - 1)) for _ in range(rows)]
        lens[:30] = [1, 2**21, 3] * 10  # as many as begin where 32 bits still hold the sum
        call = {
            "num_accepted": torch.zeros(rows, dtype=torch.int32),
            "seq_lens": torch.tensor(lens),
            "page_size": 1,
            "kv_indptr": testing.poisoned(rows + 1),
            "pages_per_seq": testing.poisoned(rows),
        }
        device.blocks = 4 if workspace is not None else None
        _check(device, "advance", call, workspace)
    device.blocks = None


def _sectors(elements: int, size: int) -> int:
    return -(-elements * size // 32)


@pytest.mark.parametrize("load", [kernel_work.LOADS[0], kernel_work.LOADS[3]])
def test_counts(load: kernel_work.Load, get_device: GetDevice) -> None:
    """A launch reads each sector that it needs, and writes each, once or a little more often."""
    device = get_device("sm_90")
    device.schedule = Schedule()
    call = kernel_work.calls(load)["stage"]
    pages, rows, tokens = call["num_pages"].tolist(), load.rows, 5 * load.rows
    work = kernel_work.run(device, "stage", load).work
    by_row = dict.fromkeys(("committed_lens", "query_lens", "num_pages"), _sectors(rows, 4))
    assert work.read == by_row | {"page_table": sum(_sectors(n, 4) for n in pages)}
    assert work.written == {
        **dict.fromkeys(("seq_lens", "last_page_len"), _sectors(rows, 4)),
        **dict.fromkeys(("cu_seqlens_q", "kv_indptr"), _sectors(rows + 1, 4)),
        **dict.fromkeys(("position_ids", "slot_mapping"), _sectors(tokens, 8)),
        "kv_indices": _sectors(sum(pages), 4),
    }
    for issued, distinct in ((work.read_issued, work.read), (work.written_issued, work.written)):
        assert sum(distinct.values()) <= sum(issued.values()) <= 2 * sum(distinct.values())
    assert work.dependent_loads >= 2  # a length, then a page
    total = sum(work.instructions.values())
    assert total / work.blocks <= work.most_instructions < total


@pytest.mark.parametrize("operation", ["advance", "stage", "draft_step", "map_slots"])
def test_without_a_list_contexts_cost_nothing(operation: str, get_device: GetDevice) -> None:
    device = get_device("sm_90")
    device.schedule = Schedule()
    works = []
    for context in (1_000, 128_040):  # their last tokens stand alike in the last page
        call = kernel_work.calls(kernel_work.Load("", 32, context, context, 64))[operation]
        call.pop("kv_indices", None)
        device.operation(operation)(**call)
        works.append(device.works[-1])
    short, long = works
    assert (short.blocks, short.instructions) == (long.blocks, long.instructions)
    assert short.read_issued == long.read_issued


@pytest.fixture(scope="module")
def results(get_device: GetDevice) -> list[kernel_work.Result]:
    device = get_device(kernel_work.ARCHITECTURE)
    device.schedule, device.blocks = Schedule(), None
    return kernel_work.measure(device)


@pytest.mark.parametrize("operation", kernel_work.OPERATIONS)
def test_chains_are_short(operation: str, results: list[kernel_work.Result]) -> None:
    chains = {r.load: r.work.dependent_loads for r in results if r.operation == operation}
    assert len(chains) == len(kernel_work.LOADS)
    assert max(chains.values()) <= 8, chains


def test_docs_have_the_table(results: list[kernel_work.Result]) -> None:
    made = kernel_work.table(results, kernel_table.nvcc_version(_library.PATH)).splitlines()
    documented = kernel_table.documented("work table")[1].splitlines()
    if documented and documented[0] != made[0]:
        pytest.skip(f"docs/kernels.md: {documented[0]} Here: {made[0]}")
    assert documented == made, "run tools/kernel_work.py --write"
