"""The plugin beside vLLM's own kernels: results, registration, launches.

pytest runs this in vLLM's environment, from `test_vllm.py`. The engine's kernels are those of its
CPU platform.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import operators
from torch import Tensor
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils as engine
from vllm.v1.spec_decode import utils
from vllm.v1.worker import block_table

from specmeta.integrations import vllm as plugin

DOCS = Path(__file__).parent.parent / "docs" / "vllm.md"
PLATFORM = type(current_platform)
current_platform.import_kernels()
POISON = 0x7B7B7B7B

KERNELS = {
    plugin.compute_slot_mapping_kernel: engine._compute_slot_mapping_kernel_impl,
    plugin.eagle_prepare_next_token_padded_kernel: (
        engine._eagle_prepare_next_token_padded_kernel_impl
    ),
    plugin.eagle_prepare_inputs_padded_kernel: engine._eagle_prepare_inputs_padded_kernel_impl,
    plugin.eagle_step_slot_mapping_metadata_kernel: (
        engine._eagle_step_slot_mapping_metadata_kernel_impl
    ),
}
OWNERS = (
    block_table._COMPUTE_SLOT_MAPPING_KERNEL,
    utils._eagle_prepare_next_token_padded,
    utils._eagle_prepare_inputs_padded,
    utils._eagle_step_slot_mapping_metadata,
)

Arguments = dict[str, Any]


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def i64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def out(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full(shape, POISON, dtype=dtype)


def copies(arguments: Arguments) -> Arguments:
    """Copy the tensors; what was one tensor stays one."""
    seen: dict[int, Tensor] = {}
    return {
        name: seen.setdefault(id(value), value.clone()) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def run(kernel: Callable[..., None], arguments: Arguments) -> Arguments:
    """Run a kernel, ours or the engine's, on copies, and return these."""
    given = copies(arguments)
    if kernel in KERNELS:
        kernel(**given)
    else:  # the engine's own have names of their own
        kernel(*given.values())
    return given


def differing(kernel: Callable[..., None], arguments: Arguments) -> dict[str, tuple[Any, Any]]:
    """Return the tensors in which the two end up differently: ours, the engine's."""
    ours, theirs = run(kernel, arguments), run(KERNELS[kernel], arguments)
    return {
        name: (ours[name].tolist(), theirs[name].tolist())
        for name in ours
        if isinstance(ours[name], Tensor) and not torch.equal(ours[name], theirs[name])
    }


# --- What the engine launches -------------------------------------------------------------------


def slots_arguments(
    query_lens: list[int],
    computed: list[int],
    table: Tensor,
    *,
    block_size: int,
    max_num_tokens: int,
    cp_world_size: int = 1,
) -> Arguments:
    cu = torch.tensor([0, *query_lens]).cumsum(0).int()
    positions = torch.cat(
        [torch.arange(c, c + q) for c, q in zip(computed, query_lens, strict=True)]
    )
    return {
        "num_tokens": len(positions),
        "max_num_tokens": max_num_tokens,
        "query_start_loc_ptr": cu,
        "positions_ptr": positions,
        "block_table_ptr": table,
        "block_table_stride": table.stride(0),
        "slot_mapping_ptr": out(max_num_tokens, dtype=torch.int64),
        "KV_CACHE_BLOCK_SIZE": block_size,
        "TOTAL_CP_WORLD_SIZE": cp_world_size,
        "TOTAL_CP_RANK": 0,
        "CP_KV_CACHE_INTERLEAVE_SIZE": 1,
        "PAD_ID": -1,
        "BLOCK_SIZE": 1024,
    }


def next_token_arguments(sampled: Tensor, discarded: list[bool], backup: list[int]) -> Arguments:
    rows, width = sampled.shape
    return {
        "sampled_token_ids_ptr": sampled,
        "discard_request_mask_ptr": torch.tensor(discarded),
        "backup_next_token_ids_ptr": i32(*backup),
        "next_token_ids_ptr": out(rows),
        "valid_sampled_tokens_count_ptr": out(rows),
        "vocab_size": 100,
        "num_sampled_tokens_per_req": width,
        "num_reqs": rows,
        "stride_sampled_token_ids": sampled.stride(0),
        "BLOCK_SIZE_TOKENS": utils.next_power_of_2(width),
    }


def inputs_arguments(num_drafts: list[int], valid: list[int], query_lens: list[int]) -> Arguments:
    return {
        "cu_num_draft_tokens_ptr": torch.tensor(num_drafts).cumsum(0).int(),
        "valid_sampled_tokens_count_ptr": i32(*valid),
        "query_start_loc_gpu_ptr": torch.tensor([0, *query_lens]).cumsum(0).int(),
        "token_indices_to_sample_ptr": out(len(valid)),
        "num_rejected_tokens_gpu_ptr": out(len(valid)),
        "num_reqs": len(valid),
    }


def step_arguments(
    positions: Tensor,
    seq_lens: list[int],
    table: Tensor,
    *,
    block_size: int,
    max_model_len: int,
    padded: int = 0,
    in_place: bool = False,
) -> Arguments:
    rows, width = table.shape
    return {
        "positions_ptr": positions,
        "block_table_ptr": table,
        "block_table_stride": table.stride(0),
        "seq_lens_ptr": i32(*seq_lens),
        "out_clamped_positions_ptr": positions if in_place else out(rows, dtype=torch.int64),
        "out_slot_mapping_ptr": out(rows + padded, dtype=torch.int64),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "n_blocks_per_req": width,
        "PAD_ID": -1,
        "batch_size": rows,
    }


def tables(draw: random.Random, rows: int, width: int) -> Tensor:
    """Make a table whose rows end with the null block or with blocks of earlier requests."""
    return torch.tensor(
        [[draw.choice((0, draw.randrange(1, 5000))) for _ in range(width)] for _ in range(rows)],
        dtype=torch.int32,
    )


# --- The same results ---------------------------------------------------------------------------


@pytest.fixture(params=range(300))
def draw(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.param)


def test_slots(draw: random.Random) -> None:
    rows, width, block_size = draw.randint(1, 6), draw.randint(1, 6), draw.choice((16, 48, 128))
    query_lens, computed = [], []
    for _ in range(rows):
        length = draw.randint(1, width * block_size)
        query_lens.append(draw.randint(1, min(length, 40)))
        computed.append(length - query_lens[-1])
    num_tokens = sum(query_lens)
    arguments = slots_arguments(
        query_lens,
        computed,
        tables(draw, rows + draw.randint(0, 3), width),
        block_size=block_size,
        max_num_tokens=num_tokens + draw.randint(0, 5),
    )
    # The CPU platform's leaves the buffer's tail as it is; the CUDA kernel pads it.
    arguments["slot_mapping_ptr"][num_tokens:] = -1
    assert differing(plugin.compute_slot_mapping_kernel, arguments) == {}


def test_next_token(draw: random.Random) -> None:
    rows, width = draw.randint(1, 6), draw.randint(1, 5)
    sampled = out(rows, width).fill_(-1)
    for row in sampled:
        num_valid = draw.randint(0, width)
        row[:num_valid] = i32(*(draw.randrange(100) for _ in range(num_valid)))
        if num_valid < width and draw.random() < 0.2:  # the sampler's token is none
            row[num_valid] = draw.choice((100, 150))
    longest = rows + draw.randint(0, 3)
    arguments = next_token_arguments(
        sampled,
        [draw.random() < 0.3 for _ in range(longest)],
        [draw.randrange(100) for _ in range(longest)],
    )
    assert differing(plugin.eagle_prepare_next_token_padded_kernel, arguments) == {}


def test_inputs(draw: random.Random) -> None:
    num_drafts, valid, query_lens = [], [], []
    for _ in range(draw.randint(1, 6)):
        num_drafts.append(draw.choice((0, draw.randint(1, 4))))
        if num_drafts[-1]:
            valid.append(draw.randint(1, num_drafts[-1] + 1))
            query_lens.append(num_drafts[-1] + 1)
        else:  # a prompt, or a chunk of one, or a row that has not drafted
            valid.append(draw.randint(0, 1))
            query_lens.append(draw.randint(1, 20))
    arguments = inputs_arguments(num_drafts, valid, query_lens)
    assert differing(plugin.eagle_prepare_inputs_padded_kernel, arguments) == {}


def test_draft_loop(draw: random.Random) -> None:
    rows, width, block_size = draw.randint(1, 6), draw.randint(1, 6), draw.choice((16, 48, 128))
    steps = draw.randint(1, 4)
    max_model_len = width * block_size - draw.randint(0, 15 - steps)
    lens = [draw.randint(1, max_model_len - steps) for _ in range(rows)]
    if draw.random() < 0.5:
        lens[0] = max_model_len - steps  # it comes to stand on the last position
    table, padded = tables(draw, rows, width), draw.randint(0, 3)
    positions = i64(*(length - 1 for length in lens))
    for step in range(steps):
        arguments = step_arguments(
            positions,
            lens,
            table,
            block_size=block_size,
            max_model_len=max_model_len,
            padded=padded,
            in_place=step > 0,
        )
        assert differing(plugin.eagle_step_slot_mapping_metadata_kernel, arguments) == {}
        left = run(plugin.eagle_step_slot_mapping_metadata_kernel, arguments)
        positions, lens = left["out_clamped_positions_ptr"], left["seq_lens_ptr"].tolist()


# --- Where results differ, as docs/vllm.md lists: ours, the engine's -----------------------------


def test_tail_of_the_slots() -> None:
    arguments = slots_arguments([2], [3], i32(7).view(1, 1), block_size=16, max_num_tokens=4)
    assert differing(plugin.compute_slot_mapping_kernel, arguments) == {
        "slot_mapping_ptr": ([115, 116, -1, -1], [115, 116, POISON, POISON])
    }


def test_void_row_with_drafts() -> None:
    arguments = inputs_arguments([2, 3], [0, 0], [3, 4])
    assert differing(plugin.eagle_prepare_inputs_padded_kernel, arguments) == {
        "token_indices_to_sample_ptr": ([0, 3], [-1, 2]),
        "num_rejected_tokens_gpu_ptr": ([2, 3], [3, 4]),
    }


def test_backup_that_is_no_token() -> None:
    sampled = out(2, 1).fill_(-1)
    arguments = next_token_arguments(sampled, [True, False], [-1, -1])
    assert differing(plugin.eagle_prepare_next_token_padded_kernel, arguments) == {
        "next_token_ids_ptr": ([0, 0], [-1, -1])
    }


def test_id_behind_a_gap() -> None:
    arguments = next_token_arguments(i32(5, -1, 6).view(1, 3), [False], [9])
    assert differing(plugin.eagle_prepare_next_token_padded_kernel, arguments) == {
        "next_token_ids_ptr": ([5], [6]),
        "valid_sampled_tokens_count_ptr": ([1], [2]),
    }


def test_past_the_limit() -> None:
    kernel, table = plugin.eagle_step_slot_mapping_metadata_kernel, i32(3, 4).view(1, 2)
    numbers = {"block_size": 16, "max_model_len": 20}
    once = step_arguments(i64(19), [20], table, **numbers)
    assert differing(kernel, once) == {"seq_lens_ptr": ([0], [1])}
    assert run(kernel, once)["out_slot_mapping_ptr"].tolist() == [-1]
    twice = []
    for each in (kernel, KERNELS[kernel]):
        left = run(each, once)
        left = run(each, left | {"positions_ptr": left["out_clamped_positions_ptr"]})
        twice.append((left["seq_lens_ptr"].item(), left["out_slot_mapping_ptr"].item()))
    # The engine's is about to write where the row's second token has its KV.
    assert twice == [(0, -1), (2, 3 * 16 + 1)]


def test_empty_row() -> None:
    table = i32(3, 4, 5, 6).view(2, 2)
    arguments = step_arguments(i64(0, 8), [0, 9], table, block_size=16, max_model_len=32)
    assert differing(plugin.eagle_step_slot_mapping_metadata_kernel, arguments) == {
        "seq_lens_ptr": ([0, 10], [1, 10]),
        "out_clamped_positions_ptr": ([0, 9], [1, 9]),
        "out_slot_mapping_ptr": ([-1, 89], [49, 89]),
    }


def test_position_that_is_not_the_place_in_the_cache() -> None:
    # An image moves the first of the three positions of M-RoPE by less than its tokens.
    table = i32(3, 4).view(1, 2)
    arguments = step_arguments(i64(9), [18], table, block_size=16, max_model_len=32)
    assert differing(plugin.eagle_step_slot_mapping_metadata_kernel, arguments) == {
        "out_slot_mapping_ptr": ([4 * 16 + 2], [3 * 16 + 10])
    }


def test_slots_are_64_bit() -> None:
    block = 2**25
    arguments = step_arguments(
        i64(4), [5], i32(block).view(1, 1), block_size=128, max_model_len=128
    )
    left = run(plugin.eagle_step_slot_mapping_metadata_kernel, arguments)
    assert left["out_slot_mapping_ptr"].tolist() == [block * 128 + 5]  # Triton: 32 bits
    arguments = slots_arguments([1], [5], i32(block).view(1, 1), block_size=128, max_num_tokens=1)
    left = run(plugin.compute_slot_mapping_kernel, arguments)
    assert left["slot_mapping_ptr"].tolist() == [block * 128 + 5]


# --- Registration -------------------------------------------------------------------------------


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The platform as it was before any plugin, and the name of what it runs in each worker."""
    name = "register_triton_kernel_overrides"
    own = inspect.getattr_static(PLATFORM, name)
    monkeypatch.setattr(PLATFORM, name, own)  # put back afterwards
    monkeypatch.setattr(plugin, "_told", set())
    yield name
    monkeypatch.undo()
    current_platform.register_triton_kernel_overrides()


def implementations() -> list[Callable[..., None]]:
    return [owner.kernel.func for owner in OWNERS]


@pytest.mark.parametrize("times", [1, 2])
def test_register(hook: str, times: int) -> None:
    for _ in range(times):
        plugin.register()
    told = getattr(PLATFORM, hook)
    plugin.register()
    assert getattr(PLATFORM, hook) == told
    for _ in range(times):  # engines in one process
        current_platform.register_triton_kernel_overrides()
    assert implementations() == list(KERNELS)
    for owner in OWNERS:
        assert owner.kernel._forward_by_name
        assert owner.register_warmup("anything") is None
        assert "register_warmup" in vars(owner)
    expand = utils.copy_and_expand_eagle_inputs_kernel  # not replaced
    assert expand.func is engine._copy_and_expand_eagle_inputs_kernel_impl


def test_switched_off(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = getattr(PLATFORM, hook)
    monkeypatch.setenv("SPECMETA_VLLM", "0")
    plugin.register()
    assert getattr(PLATFORM, hook) == before


@pytest.mark.parametrize("value", ["", "2", "yes"])
def test_other_values_raise(hook: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECMETA_VLLM", value)
    with pytest.raises(ValueError, match=f"^SPECMETA_VLLM: expected 0 or 1, got '{value}'$"):
        plugin.register()


@pytest.mark.parametrize("times", [1, 2])
def test_context_parallel_is_the_engines(hook: str, times: int) -> None:
    current_platform.register_triton_kernel_overrides()
    for _ in range(times):  # on CUDA the platform has nothing to put back in between
        plugin._override()
    arguments = slots_arguments(
        [1], [5], i32(1).view(1, 1), block_size=16, max_num_tokens=1, cp_world_size=2
    )
    with pytest.raises(AssertionError, match="Context Parallelism is not supported on CPU"):
        plugin.compute_slot_mapping_kernel(**arguments)


# --- Launches -----------------------------------------------------------------------------------

TABLE = i32(3, 4, 5, 6).view(2, 2)
LAUNCHES = {
    "ComputeSlotMappingKernel": (
        plugin.compute_slot_mapping_kernel,
        "map_slots",
        slots_arguments([2, 1], [3, 9], TABLE, block_size=16, max_num_tokens=4),
    ),
    "eagle_prepare_next_token_padded_kernel": (
        plugin.eagle_prepare_next_token_padded_kernel,
        "count_sampled",
        next_token_arguments(i32(5, 6, 7, -1).view(2, 2), [False] * 3, [8, 9, 0]),
    ),
    "eagle_prepare_inputs_padded_kernel": (
        plugin.eagle_prepare_inputs_padded_kernel,
        "locate_sampled",
        inputs_arguments([1, 1], [2, 1], [2, 2]),
    ),
    "eagle_step_slot_mapping_metadata_kernel": (
        plugin.eagle_step_slot_mapping_metadata_kernel,
        "draft_step",
        step_arguments(i64(4, 8), [5, 9], TABLE, block_size=16, max_model_len=32),
    ),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches(name: str) -> None:
    kernel, operator, arguments = LAUNCHES[name]
    assert operators(lambda: kernel(**arguments)) == [f"specmeta::{operator}"]
    theirs = operators(lambda: KERNELS[kernel](*arguments.values()))
    row = rf"^\| `{name}` \| `{operator}` \|.*\| {len(theirs)} \| 1 \|$"
    assert re.search(row, DOCS.read_text(), re.MULTILINE), theirs
