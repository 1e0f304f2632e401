"""TensorRT-LLM's metadata: results, one launch each, no host reads."""

from __future__ import annotations

import inspect
import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trtllm_in_torch as original
from launches import operators, operators_and_waits
from test_ring import LateEvent, Stream
from torch import Tensor

import specmeta
from specmeta import Status
from specmeta.graph import capture
from specmeta.integrations import trtllm
from specmeta.serving.ring import DownloadRing
from specmeta.testing import assert_equal, poisoned

DOC = Path(__file__).parent.parent / "docs/trtllm.md"


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def running_sum(counts: list[int]) -> list[int]:
    return [sum(counts[:b]) for b in range(len(counts) + 1)]


def layout(
    lens: list[int], queries: list[int], pages: list[list[int]], page_size: int
) -> dict[str, list[int]]:
    """What each buffer holds for these lengths, query tokens and allocated pages."""
    used = [-(-n // page_size) for n in lens]
    start = [n - q for n, q in zip(lens, queries, strict=True)]
    return {
        "input_pos": start,
        "seq_len": queries,
        "cu_seqlen": running_sum(queries),
        "position_ids": [c + j for c, q in zip(start, queries, strict=True) for j in range(q)],
        "seq_len_with_cache": lens,
        "last_page_len": [(n - 1) % page_size + 1 if n else 0 for n in lens],
        "pages_per_seq": used,
        "cu_num_pages": running_sum(used),
        "cache_loc": [page for own, n in zip(pages, used, strict=True) for page in own[:n]],
        "full_cache_loc": [page for own in pages for page in own],
        "cu_allocated_pages": running_sum([len(own) for own in pages]),
        "use_initial_states": [c > 0 for c in start],
    }


DTYPES = {"position_ids": torch.int64, "use_initial_states": torch.bool}
NOT_OF_INCREMENT = ("input_pos", "seq_len", "use_initial_states")


def named_args(values: dict[str, list[int]], device: str = "cpu", spare: int = 0) -> dict[str, Any]:
    """The buffers, `cache_loc` with `spare` poisoned entries behind it."""
    args = {
        name: torch.tensor(value, dtype=DTYPES.get(name, torch.int32), device=device)
        for name, value in values.items()
    }
    args["cache_loc"] = torch.cat([args["cache_loc"], poisoned(spare).to(device)])
    return args


def sequence_info(
    values: dict[str, list[int]], page_size: int, device: str = "cpu", spare: int = 0
) -> SimpleNamespace:
    args = named_args(values, device, spare)
    ids = torch.arange(len(values["position_ids"]), dtype=torch.int32, device=device) + 100
    return SimpleNamespace(**args, input_ids=ids, tokens_per_block=page_size, max_seq_len=10_000)


def check(got: dict[str, Tensor], want: dict[str, list[int]], *names: str) -> None:
    """Compare with what is wanted; behind it, everything is 0."""
    for name in names or want:
        row = got[name].cpu()
        tail = [0] * (len(row) - len(want[name]))
        assert_equal(name, row, torch.tensor([*want[name], *tail], dtype=row.dtype))


# --- build_cache_loc_from_full

LISTS: list[tuple[list[int], list[int], list[int], list[int]]] = [
    ([7, 8], [0, 2], [2], [7, 8]),
    ([7, 8], [0, 2], [1], [7]),
    ([7, 8, 3, 4, 5, 9], [0, 2, 5, 6], [1, 2, 1], [7, 3, 4, 9]),
    ([7, 8, 3], [0, 2, 3], [0, 1], [3]),
    ([], [0], [], []),
]


@pytest.mark.parametrize(("full", "cu", "used", "expected"), LISTS)
@pytest.mark.parametrize("make", [lambda x: x, lambda x: ints(*x), torch.LongTensor])
def test_the_list_has_its_own_length(
    make: Callable[[list[int]], Any], full: Any, cu: Any, used: Any, expected: list[int]
) -> None:
    got = trtllm.build_cache_loc_from_full(make(full), make(cu), make(used), len(used))
    assert_equal("cache_loc", got, ints(*expected))


@pytest.mark.parametrize(("full", "cu", "used", "expected"), LISTS)
def test_the_list_in_place(device: str, full: Any, cu: Any, used: Any, expected: list[int]) -> None:
    out = poisoned(8).to(device)
    tensors = [ints(*x).to(device) for x in (full, cu, used)]
    got = trtllm.build_cache_loc_from_full(*tensors, len(used), out=out)
    assert got is out
    assert out.tolist() == expected + [0] * (8 - len(expected))
    assert tensors[2].tolist() == used


def test_a_batch_smaller_than_the_buffers(device: str) -> None:
    got = trtllm.build_cache_loc_from_full([7, 8, 3, 4], [0, 2, 4, 99], [1, 2, 99], 2)
    assert got.tolist() == [7, 3, 4]
    full, cu, used = (ints(*x).to(device) for x in ([7, 8, 3, 4, 9], [0, 2, 4, 5], [1, 2, 1]))
    out = poisoned(5).to(device)
    trtllm.build_cache_loc_from_full(full, cu, used, 2, out=out)
    assert out.tolist() == [7, 3, 4, 0, 0]
    assert used.tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("full", "cu", "used", "fault"),
    [
        ([7, 8, 3], [0, 2, 3], [1, 2], "OVERFLOW"),
        ([7, 8, 3], [0, 2, 3], [1, 2**31 - 1], "OVERFLOW"),
        ([7, 8, 3], [0, 2, 3], [1, -2], "BAD_COUNT"),
        ([7, 8, -1], [0, 2, 3], [1, 1], "BAD_PAGE"),
        ([7, 8, 3], [0, 2, 4], [1, 1], "BAD_INDPTR"),
    ],
)
def test_a_fault_raises_without_out(
    full: list[int], cu: list[int], used: list[int], fault: str
) -> None:
    room = [end - begin for begin, end in itertools.pairwise(cu)]
    expected = f"pages_per_seq: expected 0 to the {room} allocated pages, "
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}") as error:
        trtllm.build_cache_loc_from_full(full, cu, used, 2)
    assert f"got {used}: <Status." in str(error.value)
    assert fault in str(error.value)
    assert str(error.value).endswith("> at sequence 1")


def test_a_page_that_is_none_and_not_in_use() -> None:
    assert trtllm.build_cache_loc_from_full([7, -1], [0, 2], [1], 1).tolist() == [7]


NAMES = ("full_cache_loc", "cu_allocated_pages", "pages_per_seq")
NO_INT32: list[tuple[Any, str]] = [
    ([1.0], "integers, got [1.0]"),
    (torch.tensor([1.5]), "integers, got [1.5]"),
    (["1"], "integers, got ['1']"),
    ([[1]], "integers, got [[1]]"),
    (torch.tensor(1), "integers, got 1"),
    ([2**31], f"integers in [{-(2**31)}, {2**31 - 1}], got {2**31}"),
    (torch.tensor([2**32 + 1]), f"integers in [{-(2**31)}, {2**31 - 1}], got {2**32 + 1}"),
    ([-(2**31) - 1], f"integers in [{-(2**31)}, {2**31 - 1}], got {-(2**31) - 1}"),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("values", "expected"), NO_INT32)
def test_what_is_no_int32(name: str, values: Any, expected: str) -> None:
    given = dict(zip(NAMES, ([7], [0, 1], [1]), strict=True)) | {name: values}
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: expected {expected}')}$"):
        trtllm.build_cache_loc_from_full(**given, batch_size=1)


@pytest.mark.parametrize("batch_size", [-1, 3])
def test_a_batch_larger_than_the_buffers(batch_size: int) -> None:
    used, out = ints(1, 1), poisoned(4)
    message = rf"^batch_size: expected an integer in \[0, 2\], got {batch_size}$"
    with pytest.raises(ValueError, match=message):
        trtllm.build_cache_loc_from_full([7, 8], [0, 1, 2], [1, 1], batch_size)
    with pytest.raises(ValueError, match=message):
        trtllm.build_cache_loc_from_full(ints(7, 8), ints(0, 1, 2), used, batch_size, out=out)
    assert_equal("out", out, poisoned(4))


@pytest.mark.parametrize("name", ["status", "workspace"])
def test_what_needs_out(name: str) -> None:
    given = {"status": ints(0), "workspace": specmeta.workspace(1)}
    with pytest.raises(ValueError, match=r"^status, workspace: expected out with them, got None$"):
        trtllm.build_cache_loc_from_full([7], [0, 1], [1], 1, **{name: given[name]})


def test_never_more_pages_than_allocated(device: str) -> None:
    used, out, status = (x.to(device) for x in (ints(3, 1), poisoned(3), ints(0, 0)))
    trtllm.build_cache_loc_from_full(
        ints(7, 8, 3).to(device), ints(0, 2, 3).to(device), used, 2, out=out, status=status
    )
    assert out.tolist() == [3, 0, 0]
    assert used.tolist() == [0, 1]
    assert status.tolist() == [Status.OVERFLOW, 0]


@pytest.mark.parametrize("device", ["cuda"])
def test_a_length_is_not_waited_for(device: str) -> None:
    with pytest.raises(ValueError, match="pages_per_seq: expected out, or a tensor on the CPU"):
        trtllm.build_cache_loc_from_full([7], [0, 1], ints(1).to(device), 1)


# --- increment_position_ids

PAGES = [[10, 11, 12], [20, 21, 22]]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("lens", "increment"),
    [
        ([3, 5], [1, 2]),  # inside the page
        ([4, 8], [1, 1]),  # over the boundary
        ([4, 5], [1, 1]),  # one of them
        ([2, 3], [8, 9]),  # by more than a page
        ([7, 6], [-2, 0]),  # back inside the page
        ([8, 5], [-4, -1]),  # back over the boundary
        ([12, 12], [-11, -8]),  # by more than a page
        ([12, 9], [0, 3]),  # to the last token of the allocation
    ],
)
def test_increment(device: str, in_place: bool, lens: list[int], increment: list[int]) -> None:
    args = named_args(layout(lens, [1, 1], PAGES, 4), device, spare=4)
    before = {name: value.clone() for name, value in args.items()}
    args["something"] = args["input_pos"]
    result = trtllm.increment_position_ids(args, ints(*increment).to(device), 4, in_place=in_place)
    after = [n + i for n, i in zip(lens, increment, strict=True)]
    want = layout(after, [1, 1], PAGES, 4)
    for name in NOT_OF_INCREMENT:  # the original leaves them alone
        want[name] = before[name].tolist()
    check(result, want)
    assert list(result) == list(args)
    assert result["something"] is args["something"]
    if in_place:
        assert all(result[name] is args[name] for name in args)
    else:
        for name, value in before.items():
            assert_equal(name, args[name], value)
        made = [n for n in args if result[n].data_ptr() != args[n].data_ptr()]
        assert made == [n for n in before if n not in (*NOT_OF_INCREMENT, "cu_seqlen")][:6]


def test_a_list_that_grows_gets_room() -> None:
    """A `cache_loc` without room to spare."""
    args = named_args(layout([4], [1], [[7, 8, 9]], 4))
    result = trtllm.increment_position_ids(args, ints(1), 4)
    assert result["cache_loc"].tolist() == [7, 8, 0]


def test_only_what_is_there_is_written() -> None:
    args = named_args(layout([4, 5], [1, 1], PAGES, 4))
    needed = ("position_ids", "cu_seqlen", "seq_len_with_cache")
    result = trtllm.increment_position_ids({name: args[name] for name in needed}, ints(1, 1), 4)
    assert sorted(result) == sorted(needed)
    # A list of pages without the allocation passes through.
    some = {name: args[name] for name in (*needed, "cache_loc", "cu_num_pages")}
    result = trtllm.increment_position_ids(some, ints(1, 1), 4)
    assert result["cache_loc"] is args["cache_loc"]
    assert result["cu_num_pages"].tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match=r"named_args: expected cu_seqlen, got \['position_ids'\]"):
        trtllm.increment_position_ids({"position_ids": args["position_ids"]}, ints(1, 1), 4)


def test_host_twins_of_what_moved_are_left_out() -> None:
    args = named_args(layout([4, 5], [1, 1], PAGES, 4))
    args |= {name + "_host": args[name] for name in ("seq_len_with_cache", "cu_seqlen")}
    result = trtllm.increment_position_ids(args, ints(1, 1), 4)
    assert "seq_len_with_cache_host" not in result
    assert result["cu_seqlen_host"] is args["cu_seqlen_host"]


MOVES = [
    "position_ids",
    "seq_len_with_cache",
    "last_page_len",
    "pages_per_seq",
    "cu_num_pages",
    "cache_loc",
]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", MOVES)
def test_host_twins_without_a_device_tensor_are_left_out(name: str, in_place: bool) -> None:
    args = named_args(layout([4, 5], [1, 1], PAGES, 4), spare=4)
    args[name + "_host"] = args[name]
    if name not in MOVES[:2]:  # these must be there
        del args[name]
    result = trtllm.increment_position_ids(args, ints(1, 1), 4, in_place=in_place)
    assert sorted(result) == sorted(args.keys() - {name + "_host"})


def test_a_list_that_stays_keeps_its_host_twin() -> None:
    """Without the allocation no list is made."""
    args = named_args(layout([4, 5], [1, 1], PAGES, 4))
    args["cache_loc_host"] = args["cache_loc"]
    del args["cu_allocated_pages"]
    result = trtllm.increment_position_ids(args, ints(1, 1), 4)
    assert result["cache_loc_host"] is args["cache_loc"]


def test_the_hosts_lengths_are_no_substitute() -> None:
    args = named_args(layout([4, 5], [1, 1], PAGES, 4))
    for name in ("cu_seqlen", "seq_len_with_cache"):
        given = {key: value for key, value in args.items() if key != name}
        given[name + "_host"] = args[name]
        with pytest.raises(ValueError, match=f"^named_args: expected {name}, got"):
            trtllm.increment_position_ids(given, ints(1, 1), 4)


def test_what_is_no_tensor_where_one_is_needed() -> None:
    """None would be taken for something that was left out, and mean something else."""
    values = layout([4, 5], [1, 1], PAGES, 4)
    args = named_args(values)
    for name in ("position_ids", "cu_seqlen", "seq_len_with_cache"):
        with pytest.raises(ValueError, match=f"^{name}: expected a tensor, got NoneType$"):
            trtllm.increment_position_ids(args | {name: None}, ints(1, 1), 4)
        info = sequence_info(values, 4)
        setattr(info, name, None)
        message = f"^info: expected a tensor {name}, got NoneType$"
        with pytest.raises(AttributeError, match=message):
            trtllm.offset_pos_and_cache_(info, ints(1, 1))
        if name != "position_ids":  # may be left out there
            with pytest.raises(AttributeError, match=message):
                trtllm.switch_to_generate_(info)
    info = sequence_info(values, 4)
    for wrong, got in (
        (None, "a tensor, got NoneType"),
        (torch.tensor(1), "one dimension, got .*"),
    ):
        with pytest.raises(ValueError, match=f"^increment: expected {got}$"):
            trtllm.increment_position_ids(args, wrong, 4)
        with pytest.raises(ValueError, match=f"^offset: expected {got}$"):
            trtllm.offset_pos_and_cache_(info, wrong)
    with pytest.raises(ValueError, match=r"^gather_slot_idx: expected a tensor, got NoneType$"):
        trtllm.offset_with_new_lens_(info, ints(1, 1), None)
    with pytest.raises(ValueError, match=r"^full_cache_loc: expected a tensor, got list$"):
        trtllm.increment_position_ids(args | {"full_cache_loc": [1]}, ints(1, 1), 4)
    with pytest.raises(ValueError, match=r"^named_args: expected a mapping, got None$"):
        trtllm.increment_position_ids(None, ints(1, 1), 4)
    with pytest.raises(ValueError, match=r"^pages_per_seq: expected a tensor, got list$"):
        trtllm.build_cache_loc_from_full(ints(7), ints(0, 1), [1], 1, out=ints(0))
    check(args, values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_ids": None}, "position_ids: expected a tensor, got NoneType"),
        ({"previous_batch_indices": None}, "previous_batch_indices: expected a tensor, got NoneT"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q: expected a tensor, got NoneType"),
        ({"tokens_per_gen_step": None}, "tokens_per_gen_step: expected an integer, got None"),
        ({"tokens_per_gen_step": 0}, "tokens_per_gen_step: expected an integer in .*, got 0"),
    ],
)
def test_what_the_overlap_scheduler_must_give(changes: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "position_ids": ints(10),
        "kv_lens_cuda": ints(16),
        "new_tokens_lens": ints(2),
        "previous_batch_indices": ints(0),
        "cu_seqlens_q": ints(0, 1),
        "tokens_per_gen_step": 3,
    }
    with pytest.raises(ValueError, match=f"^{message}"):
        trtllm.offset_from_previous_(**call | changes)
    assert call["kv_lens_cuda"].tolist() == [16]


def test_more_counts_than_rows_raise() -> None:
    message = "expected at most the 2 sequences of seq_len_with_cache, got 3$"
    values = layout([4, 5], [1, 1], PAGES, 4)
    args, info = named_args(values), sequence_info(values, 4)
    with pytest.raises(ValueError, match=f"^increment: {message}"):
        trtllm.increment_position_ids(args, ints(1, 1, 1), 4, in_place=True)
    with pytest.raises(ValueError, match=f"^offset: {message}"):
        trtllm.offset_pos_and_cache_(info, ints(1, 1, 1))
    check(args, values)
    check(vars(info), values)


@pytest.mark.parametrize(
    "missing",
    [["full_cache_loc"], ["cu_allocated_pages"], ["full_cache_loc", "cu_allocated_pages"]],
)
def test_a_list_of_pages_needs_the_allocation(missing: list[str]) -> None:
    values = layout([4, 5], [1, 1], PAGES, 4)
    info = sequence_info(values, 4)
    for name in missing:
        delattr(info, name)
    message = (
        r"^info: expected full_cache_loc and cu_allocated_pages, from which cache_loc is made$"
    )
    with pytest.raises(AttributeError, match=message):
        trtllm.offset_pos_and_cache_(info, ints(1, 1))
    with pytest.raises(AttributeError, match=message):
        trtllm.offset_with_new_lens_(info, ints(2, 2), ints(0, 1))
    assert info.seq_len_with_cache.tolist() == [4, 5]


def test_lengths_alone_need_no_allocation() -> None:
    info = sequence_info(layout([4, 5], [1, 1], PAGES, 4), 4)
    del info.full_cache_loc, info.cu_allocated_pages, info.cache_loc
    trtllm.offset_pos_and_cache_(info, ints(1, 1))
    assert info.cu_num_pages.tolist() == [0, 2, 4]


@pytest.mark.parametrize("in_place", [False, True])
def test_sequences_past_the_batch_are_zeroed(device: str, in_place: bool) -> None:
    """What a larger batch left behind the two of this one."""
    larger = layout([4, 5, 3, 2], [1, 1, 1, 1], [*PAGES, [30], [40]], 4)
    args = named_args(larger, device, spare=3)
    result = trtllm.increment_position_ids(args, ints(1, 1).to(device), 4, in_place=in_place)
    want = layout([5, 6], [1, 1], PAGES, 4)
    check(result, want, "position_ids", "seq_len_with_cache", "last_page_len", "pages_per_seq")
    check(result, want, "cache_loc")
    assert result["cu_num_pages"].tolist() == [0, 2, 4, 4, 4]
    assert result["cu_seqlen"].tolist() == larger["cu_seqlen"]


@pytest.mark.parametrize("shape", [(1, -1), (-1, 1)])
def test_positions_of_two_dimensions(shape: tuple[int, int]) -> None:
    args = named_args(layout([4, 5], [1, 1], PAGES, 4))
    args["position_ids"] = args["position_ids"].view(shape)
    result = trtllm.increment_position_ids(args, ints(1, 2), 4)
    assert result["position_ids"].shape == args["position_ids"].shape
    assert result["position_ids"].flatten().tolist() == [4, 6]


def test_a_sequence_past_its_allocation_is_emptied(device: str) -> None:
    """Used pages are never more than allocated; the original stops with an assertion."""
    args = named_args(layout([12, 5], [1, 1], PAGES, 4), device)
    status = ints(0, 0).to(device)
    result = trtllm.increment_position_ids(args, ints(1, 1).to(device), 4, status=status)
    want = layout([0, 6], [0, 1], PAGES, 4) | {"position_ids": [0, 5]}
    check(result, want, "position_ids", "seq_len_with_cache", "pages_per_seq", "cache_loc")
    assert status.tolist() == [Status.OVERFLOW, 0]


def test_a_spare_page_that_is_none(device: str) -> None:
    """A spare-page scheme has -1 where there is none: never handed on as a page."""
    values = layout([4, 4], [1, 1], [[10, 99], [20, 21]], 4)
    values["full_cache_loc"][1] = -1
    info = sequence_info(values, 4, device, spare=4)
    status = ints(0, 0).to(device)
    trtllm.offset_pos_and_cache_(info, ints(0, 0).to(device), status=status)
    assert status.tolist() == [0, 0]  # it isn't used yet
    trtllm.offset_pos_and_cache_(info, ints(1, 1).to(device), status=status)
    assert info.cache_loc.tolist()[:4] == [10, 0, 20, 21]
    assert status.tolist() == [Status.BAD_PAGE, 0]


def test_an_index_outside_the_table_is_reported(device: str) -> None:
    """Beside what `status` holds from before; the row stays where it is."""
    info = sequence_info(layout([4, 5], [1, 1], PAGES, 4), 4, device, spare=2)
    new_lens, slots = ints(3).to(device), ints(1, 0).to(device)
    status = ints(Status.BAD_PAGE, Status.BAD_PAGE).to(device)
    trtllm.offset_with_new_lens_(info, new_lens, slots, status=status)
    check(vars(info), layout([4, 7], [1, 1], PAGES, 4))
    assert status.tolist() == [Status.BAD_PAGE | Status.BAD_SLOT, Status.BAD_PAGE]


def test_a_length_below_the_tokens_is_reported(device: str) -> None:
    """Beside what `status` holds from before; the row is emptied before the draft loop."""
    info = sequence_info(layout([2, 5], [3, 2], PAGES, 4), 4, device)
    status = ints(Status.BAD_PAGE, Status.BAD_PAGE).to(device)
    trtllm.switch_to_generate_(info, status=status)
    assert info.seq_len_with_cache.tolist() == [0, 5]
    assert info.position_ids.tolist() == [0, 4, 0, 0, 0]
    assert info.input_ids.tolist() == [0, 104, 0, 0, 0]
    assert status.tolist() == [Status.BAD_PAGE | Status.UNDERFLOW, Status.BAD_PAGE]


def test_a_wrong_tensor_is_refused() -> None:
    args = named_args(layout([4, 5], [1, 1], PAGES, 4))
    args["last_page_len"] = args["last_page_len"].long()
    before = args["seq_len_with_cache"].clone()
    with pytest.raises(RuntimeError, match="last_page_len: expected dtype int32, got int64"):
        trtllm.increment_position_ids(args, ints(1, 1), 4, in_place=True)
    assert_equal("seq_len_with_cache", args["seq_len_with_cache"], before)


# --- All of them against a plain model: prompts, verified drafts and decode rows in one batch


class Batch:
    """A random batch: rows of a prompt, then rows that verify drafts, then decode rows."""

    def __init__(self, seed: int, drafts: int = 3) -> None:
        draw = random.Random(seed)
        kinds = [draw.randint(0, 3) for _ in range(3)]
        self.num_prefill = kinds[0]
        self.queries = [draw.randint(1, 9) for _ in range(kinds[0])]
        self.queries += [drafts + 1] * kinds[1] + [1] * kinds[2]
        self.page_size = draw.choice([1, 2, 3, 4, 16])
        self.lens = [q + draw.choice([0, draw.randint(0, 40)]) for q in self.queries]
        pages = iter(draw.sample(range(1, 2000), 1000))
        room = [-(-(n + 12) // self.page_size) for n in self.lens]
        self.pages = [[next(pages) for _ in range(count)] for count in room]
        self.draw = draw
        self.values = layout(self.lens, self.queries, self.pages, self.page_size)
        self.spare = sum(room) - len(self.values["cache_loc"])

    def moved(self, by: list[int]) -> dict[str, list[int]]:
        lens = [n + i for n, i in zip(self.lens, by, strict=True)]
        return layout(lens, self.queries, self.pages, self.page_size)


@pytest.mark.parametrize("seed", range(60))
def test_random_batches(device: str, seed: int) -> None:
    batch = Batch(seed)
    draw = batch.draw
    by = [
        0 if b < batch.num_prefill else draw.randint(max(q - n, -9), 9)
        for b, (n, q) in enumerate(zip(batch.lens, batch.queries, strict=True))
    ]
    want = batch.moved(by)
    info = sequence_info(batch.values, batch.page_size, device, batch.spare)
    trtllm.offset_pos_and_cache_(info, ints(*by).to(device))
    check(vars(info), want)
    # And back, over whatever boundary.
    trtllm.offset_pos_and_cache_(info, ints(*[-i for i in by]).to(device))
    check(vars(info), batch.values)

    for in_place in (False, True):
        args = named_args(batch.values, device, batch.spare)
        result = trtllm.increment_position_ids(
            args, ints(*by).to(device), batch.page_size, in_place=in_place
        )
        check(result, {n: want[n] for n in want if n not in NOT_OF_INCREMENT})
        out = poisoned(len(batch.values["full_cache_loc"])).to(device)
        trtllm.build_cache_loc_from_full(
            result["full_cache_loc"],
            result["cu_allocated_pages"],
            result["pages_per_seq"],
            len(by),
            out=out,
        )
        assert_equal("cache_loc", out, result["cache_loc"])


@pytest.mark.parametrize("seed", range(30))
def test_random_overlapped_batches(device: str, seed: int) -> None:
    """Rows staged as if one token had come out, then the numbers of the step before.

    AutoDeploy's `_gather_slot_idx` is int64, and lists the rows behind the prompts.
    """
    batch = Batch(seed)
    rows = len(batch.queries)
    new_lens = [batch.draw.randint(1, 4) for _ in range(rows + 2)]
    slots = batch.draw.sample(range(rows + 2), rows)
    slot_gather_indices = slots[batch.num_prefill :]
    slots = [-1] * batch.num_prefill + slot_gather_indices
    info = sequence_info(batch.values, batch.page_size, device, batch.spare)
    gather_slot_idx = torch.tensor(slots, dtype=torch.int64, device=device)
    trtllm.offset_with_new_lens_(info, ints(*new_lens).to(device), gather_slot_idx)
    check(vars(info), batch.moved([0 if s < 0 else new_lens[s] - 1 for s in slots]))


@pytest.mark.parametrize("seed", range(30))
def test_random_draft_loops(device: str, seed: int) -> None:
    """One token a row, at the last accepted one; then from position to position."""
    batch = Batch(seed)
    info = sequence_info(batch.values, batch.page_size, device, batch.spare)
    last_ids = [info.input_ids[e - 1].item() for e in batch.values["cu_seqlen"][1:]]
    ones = [1] * len(batch.queries)

    trtllm.switch_to_generate_(info)
    want = layout(batch.lens, ones, batch.pages, batch.page_size)
    # Behind the batch: 0, where AutoDeploy leaves what stood there (`check` knows of the others).
    tokens = sum(batch.queries)
    assert info.input_ids.tolist() == last_ids + [0] * (tokens - len(last_ids))
    check(vars(info), {name: want[name] for name in want if name != "cache_loc"})

    # Rejected drafts leave the length, prompts go on: from -2 to 1, for 3 drafts.
    first = [
        1 if b < batch.num_prefill or q == 1 else batch.draw.randint(-2, 1)
        for b, q in enumerate(batch.queries)
    ]
    for by in (first, ones, ones):
        lens = [n + i for n, i in zip(want["seq_len_with_cache"], by, strict=True)]
        want = layout(lens, ones, batch.pages, batch.page_size)
        trtllm.switch_to_generate_(info)  # changes nothing but the first time
        trtllm.offset_pos_and_cache_(info, ints(*by).to(device))
        check(vars(info), want)


@pytest.mark.parametrize("seed", range(30))
def test_random_steps_of_pyexecutor(device: str, seed: int) -> None:
    """Positions staged as if none had been accepted, KV lengths as if all had."""
    draw = random.Random(seed)
    k1 = draw.randint(1, 5)  # tokens of a generation request
    before = [draw.randint(1, 50) for _ in range(6)]  # tokens with KV before the step in flight
    contexts, first_steps, dummies = (draw.randint(0, 2) for _ in range(3))
    queries = [draw.randint(1, 7) for _ in range(contexts)] + [k1] * (6 - contexts)
    # Only the requests of the step before are in PyExecutor's list.
    before_them = contexts + first_steps
    previous_batch_indices = draw.sample(range(8), max(6 - before_them - dummies, 0))
    slots = [-1] * before_them + previous_batch_indices
    slots += [-1] * (6 - len(slots))
    new_lens = [draw.randint(1, k1) for _ in range(8)]
    came = [0 if s < 0 else new_lens[s] for s in slots]
    positions = [n + j for n, q in zip(before, queries, strict=True) for j in range(q)]
    kv = [n + q + (0 if s < 0 else k1) for n, q, s in zip(before, queries, slots, strict=True)]

    position_ids = torch.tensor([[*positions, 55, 55]], dtype=torch.int32, device=device)
    all_lens = ints(*kv, 66).to(device)
    kv_lens = all_lens[:6]
    status = ints(*[0] * 6).to(device)
    address = kv_lens.data_ptr()
    trtllm.offset_from_previous_(
        position_ids,
        kv_lens,
        ints(*new_lens).to(device),
        ints(*slots).to(device),
        cu_seqlens_q=ints(*running_sum(queries)).to(device),
        tokens_per_gen_step=k1,
        status=status,
    )
    starts = [n + c for n, c in zip(before, came, strict=True)]
    want = [n + j for n, q in zip(starts, queries, strict=True) for j in range(q)]
    assert position_ids.tolist() == [[*want, 0, 0]]
    # The buffer's own memory, seen through any view of it.
    assert kv_lens.data_ptr() == address
    assert all_lens.tolist() == [*(n + q for n, q in zip(starts, queries, strict=True)), 66]
    assert status.tolist() == [0] * 6


def test_a_count_that_cannot_be() -> None:
    """More tokens than the step had is clamped: K + 1 of them is the most."""
    positions, kv_lens, status = ints(10, 11), ints(14), ints(0)
    trtllm.offset_from_previous_(
        positions,
        kv_lens,
        ints(9),
        ints(0),
        cu_seqlens_q=ints(0, 2),
        tokens_per_gen_step=2,
        status=status,
    )
    assert positions.tolist() == [12, 13]
    assert kv_lens.tolist() == [14]
    assert status.tolist() == [Status.BAD_COUNT]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_requests_past_the_live_ones_are_zeroed(device: str, as_tensor: bool) -> None:
    """Nor is anything of theirs looked at: the last one's index is in no table."""
    positions, kv_lens, status = (
        x.to(device) for x in (ints(10, 11, 20, 21, 30, 31), ints(14, 24, 34), ints(0, 0, 0))
    )
    live = ints(2).to(device)
    trtllm.offset_from_previous_(
        positions,
        kv_lens,
        ints(1, 2).to(device),
        ints(1, 0, 9).to(device),
        cu_seqlens_q=ints(0, 2, 4, 6).to(device),
        tokens_per_gen_step=2,
        num_rows=live if as_tensor else 2,
        status=status,
    )
    assert positions.tolist() == [12, 13, 21, 22, 0, 0]
    assert kv_lens.tolist() == [14, 23, 0]
    assert status.tolist() == [0, 0, 0]


# --- Beside the originals in plain torch


def of_the_batch() -> tuple[dict[str, list[int]], Tensor]:
    """Two prompts and six rows that verify three drafts, some of which cross a boundary."""
    queries = [5, 9, 4, 4, 4, 4, 4, 4]
    lens = [5, 20, 14, 16, 17, 30, 31, 32]
    pages = [[100 * b + j for j in range(1, 5)] for b in range(8)]
    return layout(lens, queries, pages, 16), ints(0, 0, 0, 1, 2, 3, 3, 1)


def with_spares(info: SimpleNamespace) -> SimpleNamespace:
    """Give each sequence its next page as a spare one."""
    used = info.pages_per_seq.tolist()
    starts = info.cu_allocated_pages.tolist()
    spares = [info.full_cache_loc[starts[b] + n].item() for b, n in enumerate(used)]
    info.extra_page_per_seq = ints(*spares)
    info.total = len(info.position_ids)
    return info


def test_increment_beside_the_original() -> None:
    values, increment = of_the_batch()
    args = named_args(values, spare=9)
    theirs = original.increment_position_ids(args, increment, 16)
    ours = trtllm.increment_position_ids(args, increment, 16)
    for name, value in theirs.items():
        size = len(value)
        assert_equal(name, ours[name][:size], value)


def test_sequence_info_beside_the_original() -> None:
    values, increment = of_the_batch()
    theirs, ours = (with_spares(sequence_info(values, 16, spare=9)) for _ in range(2))
    original.offset_pos_and_cache_(theirs, increment)
    trtllm.offset_pos_and_cache_(ours, increment)
    original.switch_to_generate_(theirs)
    trtllm.switch_to_generate_(ours)
    rows = len(increment)
    pages = int(ours.cu_num_pages[-1])
    assert_equal("cache_loc", ours.cache_loc[:pages], theirs.cache_loc[:pages])
    for name in ("input_pos", "cu_seqlen", "seq_len", "seq_len_with_cache", "last_page_len"):
        assert_equal(name, getattr(ours, name), getattr(theirs, name))
    assert_equal("use_initial_states", ours.use_initial_states, theirs.use_initial_states)
    for name in ("input_ids", "position_ids"):
        assert_equal(name, getattr(ours, name)[:rows], getattr(theirs, name)[:rows])


def test_a_page_given_back_is_not_lost() -> None:
    """Back over a boundary and forward by two pages: a list that is patched has no page left."""
    values = layout([16], [1], [[1, 2]], 16)
    theirs, ours = (with_spares(sequence_info(values, 16, spare=2)) for _ in range(2))
    for by in (1, -1, 1, 3, -5, 2):
        trtllm.offset_pos_and_cache_(ours, ints(by))
        want = layout([int(ours.seq_len_with_cache)], [1], [[1, 2]], 16)
        check(vars(ours), want)
    theirs.extra_page_per_seq[0] = 2
    original.offset_pos_and_cache_(theirs, ints(1))
    original.offset_pos_and_cache_(theirs, ints(16))  # no second spare: page 2 once more
    assert theirs.cache_loc.tolist() == [1, 2, 2]


# --- One launch, no host


def test_what_the_host_waits_for() -> None:
    x, mask = torch.arange(3), torch.tensor([True, False, True])
    assert operators_and_waits(lambda: x[mask]) == (["aten::index"], 1)
    assert operators_and_waits(lambda: x[x].add_(0)) == (["aten::index", "aten::add_"], 0)
    assert operators_and_waits(lambda: x[0].item()) == (["aten::item"], 1)


def steps() -> dict[str, tuple[Callable[[], object], Callable[..., object]]]:
    """The original's way and ours, which takes options, of the same batch."""
    values, increment = of_the_batch()
    contexts, new_lens = 2, ints(1, 1, 1, 2, 3, 4, 4, 2)
    rows = torch.arange(8)

    def info() -> SimpleNamespace:
        return with_spares(sequence_info(values, 16, spare=9))

    theirs, ours = [info() for _ in range(3)], [info() for _ in range(3)]
    args = named_args(values, spare=9)
    new_args = named_args(values, spare=9)
    out, used = poisoned(32), args["pages_per_seq"].clone()
    by_token = torch.repeat_interleave(rows[contexts:], 4)
    buffers = SimpleNamespace(
        slots_by_token=by_token, pos_offsets=torch.zeros(24).int(), kv_offsets=torch.zeros(6).int()
    )
    positions, kv_lens = torch.zeros(24).int(), torch.full((6,), 60).int()
    one_batch = ints(-1, -1, *range(2, 8))
    gather_slot_idx = one_batch.long()
    all_positions, all_lens = torch.zeros(38).int(), torch.full((8,), 60).int()
    full, cu = args["full_cache_loc"], args["cu_allocated_pages"]
    return {
        "increment_position_ids": (
            lambda: original.increment_position_ids(args, increment, 16),
            lambda **how: trtllm.increment_position_ids(new_args, increment, 16, **how),
        ),
        "build_cache_loc_from_full": (
            lambda: original.build_cache_loc(full, cu, used, 8),
            lambda **how: trtllm.build_cache_loc_from_full(full, cu, used, 8, out=out, **how),
        ),
        "offset_pos_and_cache_": (
            lambda: original.offset_pos_and_cache_(theirs[0], increment),
            lambda **how: trtllm.offset_pos_and_cache_(ours[0], increment, **how),
        ),
        "offset_with_new_lens_": (
            lambda: original.offset_with_new_lens_(theirs[1], new_lens, rows[2:], contexts),
            lambda **how: trtllm.offset_with_new_lens_(ours[1], new_lens, gather_slot_idx, **how),
        ),
        "switch_to_generate_": (
            lambda: original.switch_to_generate_(theirs[2]),
            lambda **how: trtllm.switch_to_generate_(ours[2], **how),
        ),
        "offset_from_previous_": (
            lambda: original.offset_from_previous_(
                positions, kv_lens, new_lens, rows[contexts:], 4, buffers
            ),
            lambda **how: trtllm.offset_from_previous_(
                all_positions,
                all_lens,
                new_lens,
                one_batch,
                cu_seqlens_q=new_args["cu_seqlen"],
                tokens_per_gen_step=4,
                **how,
            ),
        ),
    }


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in trtllm.__all__
        if "workspace" in inspect.signature(getattr(trtllm, name)).parameters
    ],
)
def test_a_workspace_reaches_the_operator(name: str) -> None:
    call, workspace = steps()[name][1], specmeta.workspace(8)
    call(workspace=workspace)
    assert not workspace.any()
    message = f"workspace: expected at least {len(workspace)} entries for B = 8, got "
    with pytest.raises(RuntimeError, match=message):
        call(workspace=specmeta.workspace(7))


def test_one_launch_each_and_what_the_page_says() -> None:
    table = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|$", DOC.read_text(), re.MULTILINE)
    measured = []
    for name, (theirs, ours) in steps().items():
        called, waits = operators_and_waits(theirs)
        launched = operators(ours)
        assert len(launched) == 1, name
        assert launched[0].startswith("specmeta::")
        measured.append((name, str(len(called)), str(waits), "1"))
    assert measured == table


def test_captured_once_replayed_with_other_values(device: str) -> None:
    values, increment = of_the_batch()
    lens = values["seq_len_with_cache"]
    pages = [values["full_cache_loc"][4 * b : 4 * b + 4] for b in range(8)]
    info = sequence_info(values, 16, device, spare=9)
    args = named_args(values, device, spare=9)
    start = {name: value.clone() for name, value in vars(info).items() if isinstance(value, Tensor)}
    start_args = {name: value.clone() for name, value in args.items()}
    offset, first = torch.zeros_like(increment).to(device), torch.zeros(8).int().to(device)

    def step() -> None:
        trtllm.offset_pos_and_cache_(info, offset)
        trtllm.switch_to_generate_(info)
        trtllm.offset_pos_and_cache_(info, first)
        trtllm.increment_position_ids(args, offset, 16, in_place=True)

    graph = capture(step, num_rows=torch.ones(1, dtype=torch.int32, device=device))
    for by, then in ((increment, 1), (increment * 0, -2), (increment.flip(0), 0)):
        for name, value in start.items():  # what the engine's copy to the device does
            getattr(info, name).copy_(value)
        for name, value in start_args.items():
            args[name].copy_(value)
        offset.copy_(by)
        first.fill_(then)
        graph.replay()
        moved = [n + i for n, i in zip(lens, by.tolist(), strict=True)]
        check(vars(info), layout([n + then for n in moved], [1] * 8, pages, 16))
        want = layout(moved, values["seq_len"], pages, 16)
        check(args, {n: want[n] for n in want if n not in NOT_OF_INCREMENT})


# --- Host twins


def test_twins_keep_each_step(device: str) -> None:
    info = {"input_pos": ints(7, 8).to(device), "use_initial_states": torch.ones(2).bool()}
    info["use_initial_states"] = info["use_initial_states"].to(device)
    twins = trtllm.HostTwins(info)
    assert not twins.is_ready
    for _ in range(2):
        twins.fetch(info)
        info["input_pos"] += 1
    with pytest.raises(RuntimeError, match="all 2 sets are unread"):
        twins.fetch(info)
    for n in (7, 8):
        got = twins.read()
        assert sorted(got) == ["input_pos_host", "use_initial_states_host"]
        assert got["input_pos_host"].tolist() == [n, n + 1]
        assert got["use_initial_states_host"].tolist() == [True, True]
    with pytest.raises(RuntimeError, match="no set is under way"):
        twins.read()
    with pytest.raises(ValueError, match="input_pos: expected at most 8 bytes, got 12"):
        twins.fetch(info | {"input_pos": ints(1, 2, 3).to(device)})
    twins.fetch(info)
    assert twins.read()["input_pos_host"].tolist() == [9, 10]
    for wrong, message in (
        ({"tensors": {}}, r"^tensors: expected names and tensors, got {}$"),
        ({"tensors": None}, "^tensors: expected names and tensors, got None$"),
        ({"tensors": {"input_pos": None}}, "^input_pos: expected a tensor, got NoneType$"),
        ({"tensors": info, "depth": 0}, r"^depth: expected an integer in .*, got 0$"),
        ({"tensors": info, "depth": 1.5}, "^depth: expected an integer, got 1.5$"),
    ):
        with pytest.raises(ValueError, match=message):
            trtllm.HostTwins(**wrong)
    with pytest.raises(ValueError, match=r"^input_pos: expected a tensor, got NoneType$"):
        twins.fetch({})


def test_twins_never_wait_and_never_race() -> None:
    """Queueing waits for nothing; a set that is unread keeps its memory."""
    stream = Stream()
    info = {"input_pos": ints(1), "seq_len_with_cache": ints(2)}
    twins = trtllm.HostTwins(info)
    twins._ring = DownloadRing(
        4, 8, device=torch.device("cpu"), make_event=lambda: LateEvent(stream)
    )
    used = []
    for _ in range(10):
        for _ in range(2):
            twins.fetch(info)
            used.append(
                {c._view.data_ptr() for c in twins._sets[-1].values() if c._view is not None}
            )
        assert not used[-1] & used[-2]
        assert not twins.is_ready
        assert stream.waits == 0
        stream.run()
        assert twins.is_ready
        twins.read()
        twins.read()
        assert stream.waits == 0


def test_twins_outlive_a_refused_set() -> None:
    """Nothing of it is queued, so the ring has no buffer that nobody will read."""
    tensors = {"a": torch.tensor([1]), "b": torch.tensor([2])}
    twins = trtllm.HostTwins(tensors, depth=1)
    for wrong, message in (
        (torch.tensor([2], device="meta"), "b: expected cpu, got meta"),
        (torch.zeros(2, dtype=torch.int64), "b: expected at most 8 bytes, got 16"),
    ):
        with pytest.raises(ValueError, match=message):
            twins.fetch(tensors | {"b": wrong})
    twins.fetch(tensors)
    assert {name: twin.tolist() for name, twin in twins.read().items()} == {
        "a_host": [1],
        "b_host": [2],
    }


# --- The page


def test_docstrings() -> None:
    import doctest

    result = doctest.testmod(trtllm, extraglobs={"specmeta": specmeta, "torch": torch})
    assert result.attempted > 0
    assert result.failed == 0


def test_every_name_is_on_the_page() -> None:
    text = DOC.read_text()
    assert [name for name in trtllm.__all__ if f"`{name}" not in text] == []
