"""FlashInfer's adapter: its wrappers' buffers after every update, and attention that reads them.

Without a GPU or without FlashInfer, `PlainWrapper` stands for its wrappers: it has their attributes
and gives plain attention over the pages that its tensors list.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import operators
from plain_attention import attend
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import specmeta
from specmeta import BatchMetadata
from specmeta.graph import capture
from specmeta.integrations import flashinfer as adapter

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
DOCS = Path(__file__).parent.parent / "docs/flashinfer.md"


class PlainWrapper:
    """What a graph wrapper of FlashInfer does, in plain torch.

    `plan` takes host tensors, once, and copies them into the buffers, as FlashInfer does.
    """

    def __init__(self, rows: int, capacity: int, device: str, queries: bool = False) -> None:
        def buffer(size: int) -> Tensor:
            return torch.full((size,), 0x7B7B7B7B, dtype=torch.int32, device=device)

        self._paged_kv_indptr_buf = buffer(rows + 1)
        self._paged_kv_indices_buf = buffer(capacity)
        self._paged_kv_last_page_len_buf = buffer(rows)
        self._qo_indptr_buf = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.queries = queries
        self.plans = 0

    def plan(self, *bounds: Tensor) -> None:
        assert all(bound.device.type == "cpu" for bound in bounds)
        buffers = [
            self._paged_kv_indptr_buf,
            self._paged_kv_indices_buf,
            self._paged_kv_last_page_len_buf,
        ]
        if self.queries:
            buffers.insert(0, self._qo_indptr_buf)
        for buffer, bound in zip(buffers, bounds, strict=True):
            buffer[: len(bound)].copy_(bound)
        self.planned = bounds[0].tolist()
        self.plans += 1

    def run(self, query: Tensor, cache: Tensor) -> Tensor:
        """Attend from `query` [T, H, D] to `cache` [pages, 2, page_size, KV_H, D], causally."""
        indptr = self._paged_kv_indptr_buf.tolist()
        indices = self._paged_kv_indices_buf.tolist()
        last = self._paged_kv_last_page_len_buf.tolist()
        starts = self._qo_indptr_buf.tolist()
        output = torch.zeros_like(query)
        for row, last_len in enumerate(last):
            pages = indices[indptr[row] : indptr[row + 1]]
            length = (len(pages) - 1) * cache.shape[2] + last_len if pages else 0
            keys, values = cache[pages].transpose(0, 1).flatten(1, 2)[:, :length]
            tokens = slice(starts[row], starts[row + 1])
            if self.queries and tokens.start < tokens.stop:
                assert tokens.start == self.planned[row]  # FlashInfer writes its output there
            output[tokens] = attend(query[tokens], keys, values)
        return output


def make_batch(page_size: int, device: str, **changes: Any) -> BatchMetadata:
    sizes: dict[str, Any] = {
        "max_rows": 4,
        "max_slots": 6,
        "max_tokens": 12,
        "max_pages": 5,
        "max_seq_len": 5 * page_size,
        "max_draft_len": 2,
        "kv_capacity": 21,
    }
    return BatchMetadata(page_size=page_size, device=device, **(sizes | changes))


def expected_lists(batch: BatchMetadata, lens: list[int]) -> tuple[list[int], ...]:
    """Return indptr, indices and last_page_len for rows of these lengths."""
    size = batch.page_size
    slots, table = batch.row_to_slot.tolist(), batch.page_table.tolist()
    used = [
        table[slot][: -(-length // size)] if length else []
        for slot, length in zip(slots, lens, strict=True)
    ]
    pages = [page for row in used for page in row]
    ends = [0]
    for row in used:
        ends.append(ends[-1] + len(row))
    last = [(length - 1) % size + 1 if length else 0 for length in lens]
    return ends, pages + [0] * (len(batch.kv_indices) - len(pages)), last


def check_lists(batch: BatchMetadata, wrapper: Any) -> None:
    indptr, indices, last = expected_lists(batch, batch.seq_lens.tolist())
    assert wrapper._paged_kv_indptr_buf.tolist() == indptr
    assert wrapper._paged_kv_indices_buf.tolist() == indices
    assert wrapper._paged_kv_last_page_len_buf.tolist() == last


@pytest.mark.parametrize("page_size", [1, 2, 4, 5, 16])
def test_every_update_reaches_the_wrapper(page_size: int, device: str) -> None:
    """Random iterations; the plan is made once, before them, and sees no device tensor."""
    rng = random.Random(page_size)
    batch = make_batch(page_size, device)
    verify = PlainWrapper(4, 21, device, queries=True)
    verify.plan(*adapter.plan_bounds(batch, query_len=3))
    adapter.bind(batch, verify, with_qo_indptr=True)
    addresses = [tensor.data_ptr() for tensor in adapter.outputs(verify).values()]
    free = list(range(1, 1 + 6 * 5))
    rng.shuffle(free)
    for slot in range(6):
        pages = [free.pop() for _ in range(5)]
        batch.assign(slot, [slot] * rng.randint(1, 2 * page_size), pages)
    for _ in range(30):
        slots = rng.sample([0, 1, 2, 3, 4, 5, -1], rng.randint(0, 4))
        batch.set_rows(slots, [rng.randint(0, 3) for _ in slots])
        batch.stage()
        check_lists(batch, verify)
        assert verify._qo_indptr_buf is batch.cu_seqlens_q
        right = torch.roll(batch.input_ids, -1)
        wrong = torch.randint(0, 2, (12,), generator=torch.manual_seed(rng.random())) == 0
        batch.accept_greedy(torch.where(wrong.to(device), 7, right))
        for k in range(2):
            drafts = torch.full((4,), k, device=device)
            batch.draft_step(drafts, index=k, last=k == 1)
            check_lists(batch, verify)
        batch.stage()
        batch.advance(torch.tensor([rng.randint(-2, 2) for _ in range(6)], device=device))
        check_lists(batch, verify)
    assert verify.plans == 1
    assert [tensor.data_ptr() for tensor in adapter.outputs(verify).values()] == addresses


def test_replays_write_the_wrappers_buffers(device: str) -> None:
    batch = make_batch(4, device)
    wrapper = PlainWrapper(4, 21, device)
    adapter.bind(batch, wrapper)
    batch.assign(3, [1] * 7, [9, 8, 7, 6, 5])
    batch.set_rows([-1, 3], [0, 7])
    graph = capture(lambda: batch.stage(), num_rows=batch.num_rows)
    for committed in (0, 1, 6, 2):
        batch.committed_lens[3] = committed
        batch.query_lens[1] = 1
        graph.replay()
        assert batch.seq_lens.tolist() == [0, committed + 1, 0, 0]
        check_lists(batch, wrapper)


def test_fewer_rows_for_another_wrapper(device: str) -> None:
    batch = make_batch(4, device)
    wrapper = PlainWrapper(2, 9, device)
    adapter.bind(batch.first_rows(2), wrapper)
    batch.assign(5, [1] * 9, [1, 2, 3])
    batch.set_rows([5], [9])
    batch.first_rows(2).stage()
    assert wrapper._paged_kv_indptr_buf.tolist() == [0, 3, 3]
    assert wrapper._paged_kv_indices_buf.tolist() == [1, 2, 3, 0, 0, 0, 0, 0, 0]
    assert wrapper._paged_kv_last_page_len_buf.tolist() == [1, 0]


def test_views_from_before_follow(device: str) -> None:
    """Those of the batch that was bound; one that was bound itself keeps its own wrapper's."""
    batch = make_batch(4, device)
    one, two, three = (batch.first_rows(rows) for rows in (1, 2, 3))
    nested = three.first_rows(2)
    batch.assign(5, [1] * 9, [1, 2, 3])
    batch.set_rows([5], [9])
    small, wide = PlainWrapper(2, 9, device), PlainWrapper(4, 21, device, queries=True)
    adapter.bind(two, small)
    adapter.bind(batch, wide, with_qo_indptr=True)
    for view in (one, nested, three):
        for buffer in adapter.outputs(wide).values():
            buffer.fill_(-1)
        view.stage()
        ends = view.max_rows + 1
        assert wide._paged_kv_indptr_buf.tolist() == [0, *[3] * view.max_rows, *[-1] * (5 - ends)]
        assert wide._paged_kv_indices_buf.tolist() == [1, 2, 3, *[0] * 18]
        assert wide._qo_indptr_buf.tolist()[:ends] == [0, *[9] * view.max_rows]
        assert wide._paged_kv_last_page_len_buf[:2].tolist() == [1, 0 if view.max_rows > 1 else -1]
    assert batch.first_rows(1) is one
    for buffer in adapter.outputs(wide).values():
        buffer.fill_(-1)
    two.stage()
    assert small._paged_kv_indptr_buf.tolist() == [0, 3, 3]
    assert all((buffer == -1).all() for buffer in adapter.outputs(wide).values())
    assert wide._qo_indptr_buf.tolist()[:3] == [0, 9, 9]


def test_views_of_a_batch_without_kv_indices(device: str) -> None:
    batch = make_batch(4, device, with_kv_indices=False, kv_capacity=None)
    view, wrapper = batch.first_rows(2), PlainWrapper(4, 21, device)
    adapter.bind(batch, wrapper)
    assert view.kv_indices is batch.kv_indices is wrapper._paged_kv_indices_buf


def test_one_buffer_too_small_for_a_row(device: str) -> None:
    batch = make_batch(4, device)
    wrapper = PlainWrapper(4, 2, device)
    adapter.bind(batch, wrapper)
    batch.assign(0, [1] * 9, [1, 2, 3])
    batch.set_rows([0], [9])
    batch.stage()
    assert wrapper._paged_kv_indptr_buf.tolist() == [0] * 5
    assert batch.status.tolist()[0] == specmeta.Status.OVERFLOW


def test_what_is_no_batch() -> None:
    message = r"^batch: expected a BatchMetadata, got None$"
    for call in (
        lambda: adapter.plan_bounds(None),
        lambda: adapter.decode_arguments(None),
        lambda: adapter.bind(None, PlainWrapper(4, 21, "cpu")),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("wrong", [1.5, "2", torch.tensor(2), 0])
def test_query_lens_that_are_no_numbers(wrong: Any) -> None:
    batch = make_batch(4, "cpu", pad_seq_len=1)
    with pytest.raises(ValueError, match=r"^query_len: expected an integer"):
        adapter.plan_bounds(batch, query_len=wrong)
    with pytest.raises(ValueError, match=r"^max_query_len: expected an integer"):
        adapter.decode_arguments(batch, max_query_len=wrong)


# --- Attention, end to end ---------------------------------------------------------------------


class Setting:
    """A batch, a cache with the same contents in pages and side by side, and queries."""

    def __init__(self, page_size: int, device: str, dtype: torch.dtype, **changes: Any) -> None:
        torch.manual_seed(page_size)
        batch = make_batch(page_size, device, **changes)
        self.batch, self.device = batch, device
        lens = [3 * page_size - 1, page_size, 1, 2 * page_size + 1]
        for row, length in enumerate(lens):
            batch.assign(5 - row, [1] * length, [row + 1 + 4 * i for i in range(5)])
            batch.committed_lens[5 - row] = length - 1
            batch.num_drafts[5 - row] = 2
        shape = (21, 2, page_size, KV_HEADS, HEAD_DIM)
        self.cache = torch.randn(shape, device=device).to(dtype)
        self.cache[0] = torch.nan  # the pad page must not matter to rows that have tokens
        self.rows = torch.randn(4, 2, 5 * page_size, KV_HEADS, HEAD_DIM, device=device).to(dtype)
        for row in range(4):
            for i in range(5 * page_size):
                page = row + 1 + 4 * (i // page_size)
                self.cache[page, :, i % page_size] = self.rows[row, :, i]

    def check(self, output: Tensor, query: Tensor, rows: list[int], starts: list[int]) -> None:
        """Compare with attention over each row's own contiguous keys and values."""
        tolerance = 1e-5 if query.dtype == torch.float32 else 4e-3
        lens = self.batch.seq_lens.tolist()
        checked = 0
        for place, row in enumerate(rows):
            tokens = slice(starts[place], starts[place + 1])
            if row < 0:
                assert lens[place] == 0
                continue
            keys, values = self.rows[row, :, : lens[place]].float()
            expected = attend(query[tokens].float(), keys, values)
            torch.testing.assert_close(
                output[tokens].float(), expected, rtol=tolerance, atol=tolerance
            )
            checked += tokens.stop - tokens.start
        assert checked > 0

    def draft(self) -> None:
        """Accept what is right by chance, and take a draft step: one query token a row."""
        self.batch.accept_greedy(torch.ones(12, dtype=torch.int64, device=self.device))
        self.batch.draft_step(torch.zeros(4, dtype=torch.int64, device=self.device), index=0)


def make_wrappers(setting: Setting, dtype: torch.dtype) -> tuple[Callable[..., Tensor], ...]:
    """Return what runs three queries a row, and one a row, over the same page lists."""
    batch, device = setting.batch, setting.device
    if device == "cpu" or importlib.util.find_spec("flashinfer") is None:
        plain = PlainWrapper(4, 21, device, queries=True)
        plain.plan(*adapter.plan_bounds(batch, query_len=3))
        adapter.bind(batch, plain, with_qo_indptr=True)
        one = PlainWrapper(4, 21, device)
        for name in (
            "_paged_kv_indptr_buf",
            "_paged_kv_indices_buf",
            "_paged_kv_last_page_len_buf",
        ):
            setattr(one, name, getattr(plain, name))
        return plain.run, one.run
    import flashinfer

    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
    verify = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=batch.cu_seqlens_q,
        paged_kv_indptr_buf=batch.kv_indptr,
        paged_kv_indices_buf=batch.kv_indices,
        paged_kv_last_page_len_buf=batch.last_page_len,
        backend="fa2",
    )
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros_like(workspace),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=batch.kv_indptr,
        paged_kv_indices_buffer=batch.kv_indices,
        paged_kv_last_page_len_buffer=batch.last_page_len,
        backend="fa2",
    )
    adapter.bind(batch, verify, with_qo_indptr=True)
    shape = (HEADS, KV_HEADS, HEAD_DIM, batch.page_size)
    verify.plan(
        *adapter.plan_bounds(batch, query_len=3),
        *shape,
        causal=True,
        q_data_type=dtype,
        disable_split_kv=True,
    )
    decode.plan(*adapter.plan_bounds(batch), *shape, q_data_type=dtype, disable_split_kv=True)
    return verify.run, decode.run


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_attention_over_the_wrappers_pages(page_size: int, device: str) -> None:
    """Three tokens a row, then a draft step; the row behind them is padding."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    setting = Setting(page_size, device, dtype)
    batch = setting.batch
    verify, decode = make_wrappers(setting, dtype)
    for rows in ([0, 1, 3], [2, 3, 0, 1], [1]):
        batch.set_rows([5 - row for row in rows], [3] * len(rows))
        batch.stage()
        assert batch.cu_seqlens_q.tolist()[: len(rows) + 1] == list(range(0, 3 * len(rows) + 1, 3))
        query = torch.randn(12, HEADS, HEAD_DIM, device=device).to(dtype)
        setting.check(verify(query, setting.cache), query, rows, batch.cu_seqlens_q.tolist())
        setting.draft()
        query = query[:4].contiguous()
        setting.check(decode(query, setting.cache), query, rows, list(range(5)))
        for row in rows:  # as it was
            slot = 5 - row
            batch.known_lens[slot] = int(batch.committed_lens[slot])
            batch.committed_lens[slot] -= 1
            batch.num_drafts[slot] = 2
    assert not batch.status.any()


def run_without_a_plan(query: Tensor, cache: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Do in plain torch what `trtllm_batch_decode_with_kv_cache` does with these arguments."""
    lens, page_size = arguments["seq_lens"].tolist(), cache.shape[2]
    starts = range(len(lens) + 1)  # without `cum_seq_lens_q` one query a row
    if "cum_seq_lens_q" in arguments:
        starts = arguments["cum_seq_lens_q"].tolist()
    output = torch.zeros_like(query)
    for row, length in enumerate(lens):
        pages = arguments["block_tables"][row, : -(-length // page_size)].tolist()
        keys, values = cache[pages].transpose(0, 1).flatten(1, 2)[:, :length]
        tokens = slice(starts[row], starts[row + 1])
        output[tokens] = attend(query[tokens], keys, values)
    return output


def flashinfers_plan_free(several_queries: bool) -> Callable[..., Tensor]:
    """Return FlashInfer's own, or skip the test where it can't run."""
    flashinfer = pytest.importorskip("flashinfer", reason="no FlashInfer")
    major, _ = torch.cuda.get_device_capability()
    if several_queries and major != 10:
        pytest.skip("FlashInfer takes cum_seq_lens_q on compute capability 10 only (trtllm-gen)")
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")

    def run(query: Tensor, cache: Tensor, arguments: dict[str, Any]) -> Tensor:
        scale = HEAD_DIM**-0.5
        output: Tensor = flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            query, cache, workspace, bmm1_scale=scale, kv_layout="NHD", **arguments
        )
        return output

    return run


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("several_queries", [True, False])
@pytest.mark.parametrize(
    ("device", "real"), [("cpu", False), ("cuda", False), ("cuda", True)], ids=str
)
def test_attention_without_a_plan(
    page_size: int, several_queries: bool, device: str, real: bool
) -> None:
    """Rows of any number of query tokens, or one each in a draft pass; an empty row among them."""
    run = flashinfers_plan_free(several_queries) if real else run_without_a_plan
    dtype = torch.float32 if device == "cpu" else torch.float16
    setting = Setting(page_size, device, dtype, pad_seq_len=1)
    batch = setting.batch
    rows = [3, -1, 0, 1]
    batch.set_rows([5 - row if row >= 0 else -1 for row in rows], [3, 0, 1, 2])
    batch.stage()
    if several_queries:
        arguments = adapter.decode_arguments(batch, max_query_len=3)
        assert arguments["max_q_len"] == 3
        starts, expected_starts = batch.cu_seqlens_q.tolist(), [0, 3, 3, 4, 6]
        assert arguments["cum_seq_lens_q"] is batch.cu_seqlens_q
    else:
        setting.draft()
        arguments = adapter.decode_arguments(batch)
        assert set(arguments) == {"block_tables", "seq_lens", "max_seq_len"}
        starts = expected_starts = list(range(5))
    assert starts == expected_starts
    assert arguments["max_seq_len"] == 5 * page_size
    assert arguments["seq_lens"].tolist() == [max(n, 1) for n in batch.seq_lens.tolist()]
    assert arguments["seq_lens"].tolist()[1] == 1
    assert arguments["block_tables"][1].tolist() == [0] * 5
    query = torch.randn(starts[-1], HEADS, HEAD_DIM, device=device).to(dtype)
    setting.check(run(query, setting.cache, arguments), query, rows, starts)


# --- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda w: setattr(w, "_paged_kv_indptr_buf", None), "use_cuda_graph=True"),
        (
            lambda w: setattr(w, "_paged_kv_indices_buf", torch.zeros(21)),
            r"int32 _paged_kv_indices_buf, got torch.float32",
        ),
        (
            lambda w: setattr(w, "_paged_kv_indptr_buf", torch.zeros(4, dtype=torch.int32)),
            r"^wrapper: kv_indptr: expected shape \[5\], got \[4\]$",
        ),
        (
            lambda w: setattr(w, "_qo_indptr_buf", torch.zeros(6, dtype=torch.int32)),
            r"cu_seqlens_q: expected shape \[5\], got \[6\]",
        ),
        (
            lambda w: setattr(
                w, "_paged_kv_last_page_len_buf", torch.zeros(4, dtype=torch.int32, device="meta")
            ),
            "last_page_len: expected device cpu, got meta",
        ),
        (
            lambda w: setattr(w, "_paged_kv_indices_buf", torch.zeros(42, dtype=torch.int32)[::2]),
            r"kv_indices: expected contiguous rows, got strides \(2,\)",
        ),
        (
            lambda w: setattr(w, "_paged_kv_last_page_len_buf", torch.zeros(4, 1).int()),
            r"last_page_len: expected shape \[4\], got \[4, 1\]",
        ),
    ],
)
def test_bind_raises_and_changes_nothing(break_it: Any, message: str) -> None:
    batch = make_batch(4, "cpu")
    wrapper = PlainWrapper(4, 21, "cpu")
    before = dict(vars(batch))
    break_it(wrapper)
    with pytest.raises(ValueError, match=message):
        adapter.bind(batch, wrapper, with_qo_indptr=True)
    assert all(vars(batch)[name] is value for name, value in before.items())


def test_bind_tells_devices_of_one_type_apart() -> None:
    batch = make_batch(4, "cpu")
    with FakeTensorMode():  # needs no GPU
        batch.device, batch.seq_lens = torch.device("cuda"), torch.zeros(4, device="cuda:0")
        same, other = PlainWrapper(4, 21, "cuda:0"), PlainWrapper(4, 21, "cuda:1")
        with pytest.raises(ValueError, match="kv_indptr: expected device cuda:0, got cuda:1"):
            adapter.bind(batch, other)
        adapter.bind(batch, same)
    assert batch.kv_indptr is same._paged_kv_indptr_buf


def test_bind_wants_room_for_the_pad_pages() -> None:
    batch = make_batch(4, "cpu", pad_seq_len=1)
    before = batch.kv_indptr
    with pytest.raises(ValueError, match="a kv_indices of at least 4, got 3"):
        adapter.bind(batch, PlainWrapper(4, 3, "cpu"))
    assert batch.kv_indptr is before
    adapter.bind(batch, PlainWrapper(4, 4, "cpu"))
    batch.stage()
    assert batch.kv_indptr.tolist() == [0, 1, 2, 3, 4]


def test_other_errors() -> None:
    with pytest.raises(ValueError, match=r"query_len: expected an integer in .*, got 0"):
        adapter.plan_bounds(make_batch(4, "cpu"), query_len=0)
    with pytest.raises(ValueError, match="expected sums up to 2147483647, got 4294967296"):
        adapter.plan_bounds(make_batch(4, "cpu"), query_len=2**30)
    with pytest.raises(ValueError, match="pad_seq_len=1"):
        adapter.decode_arguments(make_batch(4, "cpu"))
    with pytest.raises(ValueError, match="with_block_table=False"):
        adapter.decode_arguments(make_batch(4, "cpu", with_block_table=False, pad_seq_len=1))


# --- Launches, and the page in docs/ --------------------------------------------------------------


def lists_in_torch(batch: BatchMetadata, wrapper: PlainWrapper) -> Callable[[], None]:
    """Make the page lists of a step with torch's operators, and plan: what engines do."""
    size, columns = batch.page_size, torch.arange(batch.max_pages)
    live = batch.row_to_slot >= 0

    def work() -> None:
        lens = batch.seq_lens + batch.num_accepted
        num_pages = (lens + (size - 1)) // size
        indptr = torch.nn.functional.pad(num_pages.cumsum(0, dtype=torch.int32), (1, 0))
        table = batch.page_table[batch.row_to_slot.clamp(min=0)]
        indices = table[columns < num_pages[:, None]]  # the host waits for its size
        last = torch.where(live, (lens - 1) % size + 1, 0)
        wrapper._paged_kv_indptr_buf.copy_(indptr)  # plan(): into the wrapper ...
        wrapper._paged_kv_indices_buf[: len(indices)].copy_(indices)
        wrapper._paged_kv_last_page_len_buf.copy_(last)
        indptr.to("cpu", copy=True)  # ... and to the host, which waits
        last.to("cpu", copy=True)

    return work


def test_launches() -> None:
    batch, wrapper = make_batch(4, "cpu"), PlainWrapper(4, 21, "cpu")
    for slot in range(4):
        batch.assign(slot, [1] * 6, [5 * slot + 1, 5 * slot + 2, 5 * slot + 3])
        batch.committed_lens[slot] = 3
    batch.set_rows([2, 0, 3, 1], [3] * 4)
    batch.stage()
    batch.num_accepted.copy_(torch.tensor([0, 1, 2, 3]))
    count_index = torch.arange(4, dtype=torch.int32)
    lens = (batch.seq_lens + batch.num_accepted).tolist()
    in_torch = operators(lists_in_torch(batch, wrapper))
    in_torch_lists = [buffer.clone() for buffer in adapter.outputs(wrapper).values()]

    adapter.bind(batch, wrapper)
    lens_before = batch.seq_lens.clone()
    ours = operators(
        lambda: specmeta.advance(
            batch.num_accepted,
            lens_before,
            count_index=count_index,
            seq_lens_out=batch.seq_lens,
            row_to_slot=batch.row_to_slot,
            page_size=4,
            page_table=batch.page_table,
            num_pages=batch.num_pages,
            **adapter.outputs(wrapper),
        )
    )
    assert batch.seq_lens.tolist() == lens
    check_lists(batch, wrapper)
    for theirs, buffer in zip(in_torch_lists, adapter.outputs(wrapper).values(), strict=True):
        same = len(buffer) if len(buffer) != 21 else sum(-(-n // 4) for n in lens)
        assert torch.equal(theirs[:same], buffer[:same])
    assert ours == ["specmeta::advance"]
    assert f"{len(in_torch)} operators" in DOCS.read_text(), in_torch


def test_each_method_is_one_operator() -> None:
    batch, wrapper = make_batch(4, "cpu"), PlainWrapper(4, 21, "cpu")
    adapter.bind(batch, wrapper)
    tokens = torch.zeros(12, dtype=torch.int64)
    assert operators(batch.stage) == ["specmeta::stage"]
    assert operators(lambda: batch.draft_step(tokens[:4], index=0)) == ["specmeta::draft_step"]
    assert operators(lambda: batch.advance(tokens[:6])) == ["specmeta::advance"]


def test_docstrings() -> None:
    import doctest

    names = {"specmeta": specmeta, "torch": torch}
    result = doctest.testmod(adapter, extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0
