"""The operators under torch's tools: opcheck, torch.compile, torch.export, fake tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import full_calls
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import specmeta
from specmeta import _library

OPERATIONS = list(full_calls.calls())


def _tensors(call: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in call.items() if isinstance(value, Tensor)}


def _to(call: dict[str, Any], device: str) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in call.items()}


def _bind(operation: str, call: dict[str, Any]) -> Callable[[dict[str, Tensor]], None]:
    """Return the operation as a function of its tensors."""
    numbers = {name: value for name, value in call.items() if not isinstance(value, Tensor)}

    def run(tensors: dict[str, Tensor]) -> None:
        getattr(specmeta, operation)(**tensors, **numbers)

    return run


def _results(run: Callable[[dict[str, Tensor]], None], tensors: dict[str, Tensor]) -> Any:
    mine = {name: tensor.clone() for name, tensor in tensors.items()}
    run(mine)
    return mine


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_import_registers_the_operators() -> None:
    code = "import torch, specmeta; print(torch.ops.specmeta.stage.default)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "specmeta.stage.default"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_full_call_does_something(operation: str) -> None:
    call = full_calls.calls()[operation]
    before = _tensors(call)
    after = _results(_bind(operation, call), before)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    written = {a.name for a in _library.schema()[operation] if a.written}
    assert changed == (written & before.keys()) - {"status", "workspace"}
    assert not after["status"].any()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_opcheck(operation: str, device: str) -> None:
    call = _to(full_calls.calls()[operation], device)
    op = getattr(torch.ops.specmeta, operation).default
    torch.library.opcheck(op, (), call)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_compile_fullgraph(operation: str) -> None:
    call = full_calls.calls()[operation]
    run = _bind(operation, call)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    assert _same(_results(compiled, _tensors(call)), _results(run, _tensors(call)))


@pytest.mark.parametrize(("dynamic", "frames"), [(True, 1), (None, 2)])
def test_new_batch_sizes_do_not_recompile(dynamic: bool | None, frames: int) -> None:
    """By default torch compiles once for a fixed size, and once more for all others."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")

    def run(counts: Tensor, seq_lens: Tensor, table: Tensor, slots: Tensor, indptr: Tensor) -> None:
        specmeta.advance(
            counts, seq_lens, page_size=4, page_table=table, slot_mapping=slots, kv_indptr=indptr
        )

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=counter)
    for batch in (4, 3, 5, 8, 64):
        arguments = (
            torch.ones(batch, dtype=torch.int32),
            torch.full((batch,), 4, dtype=torch.int32),
            torch.arange(2 * batch, dtype=torch.int32).view(batch, 2),
            torch.zeros(batch, dtype=torch.int64),
            torch.zeros(batch + 1, dtype=torch.int32),
        )
        compiled(*arguments)
        assert arguments[1].tolist() == [5] * batch
        assert arguments[4][-1] == 2 * batch
    assert counter.frame_count == frames


@pytest.mark.parametrize("operation", OPERATIONS)
def test_export(operation: str) -> None:
    call = full_calls.calls()[operation]
    run = _bind(operation, call)

    class Module(torch.nn.Module):
        def forward(self, tensors: dict[str, Tensor]) -> None:
            run(tensors)

    program = torch.export.export(Module(), (_tensors(call),))
    assert any(f"specmeta.{operation}" in str(node.target) for node in program.graph.nodes)
    assert _same(_results(program.module(), _tensors(call)), _results(run, _tensors(call)))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_fake_tensors_trace_without_a_host_read(operation: str) -> None:
    """A fake tensor has no values: reading one raises."""
    call = full_calls.calls()[operation]
    run = _bind(operation, call)
    with FakeTensorMode() as mode:
        run({name: mode.from_tensor(tensor) for name, tensor in _tensors(call).items()})
    graph = make_fx(run, tracing_mode="fake")(_tensors(call))
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in calls] == [f"specmeta.{operation}.default"]


class _NoHostRead(TorchDispatchMode):
    """Fails at every operator that is not ours, so also at a copy to the host or an allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace == "specmeta", f"{func} beside the operation"
        self.launches.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_is_one_operator_and_nothing_else(operation: str, device: str) -> None:
    call = _to(full_calls.calls()[operation], device)
    with _NoHostRead() as seen:
        _bind(operation, call)(_tensors(call))
    assert seen.launches == [f"specmeta::{operation}"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_fake_kernels_check_what_the_real_ones_check(operation: str) -> None:
    """For a wrong dtype, rank or size the traced call and the real one say the same."""
    given = full_calls.calls()[operation].keys()
    specs = [a for a in _library.schema()[operation] if a.name in given]
    specs = [a for a in specs if a.kind == "tensor"]
    sizes = "".join(spec.shape for spec in specs)
    for spec in specs:
        call = full_calls.calls()[operation]
        tensor = call[spec.name]
        wrong = {
            "dtype": tensor.to(torch.int16),
            "rank": tensor.unsqueeze(0).unsqueeze(0),
            "size": torch.cat([tensor, tensor, tensor]),
        }
        if spec.shape.isalpha() and sizes.count(spec.shape) == 1:  # alone with its size
            del wrong["size"]
        for kind, value in wrong.items():
            call[spec.name] = value
            messages = []
            for mode in (None, FakeTensorMode()):
                arguments = {
                    k: mode.from_tensor(v) if mode and isinstance(v, Tensor) else v
                    for k, v in call.items()
                }
                with pytest.raises(RuntimeError, match="specmeta") as error:
                    getattr(specmeta, operation)(**arguments)
                messages.append(str(error.value).splitlines()[0])
            assert messages[0] == messages[1], (spec.name, kind)
            assert f"specmeta.{operation}: " in messages[0]


def test_fake_kernels_miss_the_end_of_no_rows() -> None:
    """`[B+1]` is never empty; B would be -1."""
    with FakeTensorMode():
        empty = torch.zeros(0, dtype=torch.int32)
        message = r"cu_seqlens_q: expected shape \[B\+1\]: at least one element, got \[0\]$"
        with pytest.raises(RuntimeError, match=message):
            specmeta.keep_last(empty, empty)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_fake_kernels_check_devices_and_integers(operation: str) -> None:
    call = full_calls.calls()[operation]
    names = list(_tensors(call))
    with pytest.raises(RuntimeError, match=r"expected a tensor on .* as .*, got "):
        getattr(specmeta, operation)(**call | {names[-1]: call[names[-1]].to("meta")})
    getattr(specmeta, operation)(**_to(call, "meta"))  # all on meta: nothing to do
    for argument in _library.schema()[operation]:
        if argument.kind == "int" and argument.low > -(2**63):
            wrong = _to(call, "meta") | {argument.name: argument.low - 1}
            with pytest.raises(RuntimeError, match=f"{argument.name}: expected an integer in"):
                getattr(specmeta, operation)(**wrong)


def test_buffers_are_static_for_reduce_overhead() -> None:
    batch = specmeta.BatchMetadata(
        max_rows=2,
        max_slots=2,
        max_tokens=4,
        max_pages=2,
        page_size=4,
        max_seq_len=8,
        max_draft_len=1,
    )
    buffers = [value for value in vars(batch).values() if isinstance(value, Tensor)]
    assert len(buffers) > 30
    assert all(buffer._dynamo_static_input_type == "unguarded" for buffer in buffers)


def test_compiled_batch_step_writes_the_batch_itself(device: str) -> None:
    torch._dynamo.reset()
    batch = specmeta.BatchMetadata(
        max_rows=2, max_slots=2, max_tokens=4, max_pages=2, page_size=4, max_seq_len=8,
        max_draft_len=1, device=device,
    )  # fmt: skip
    batch.assign(0, [5, 6, 7], [1, 2])
    batch.set_rows([0], [4])
    address = batch.seq_lens.data_ptr()
    step = torch.compile(batch.stage, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        batch.seq_lens.zero_()
        step()
        assert batch.seq_lens.tolist() == [3, 0]
    assert batch.seq_lens.data_ptr() == address


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("device", ["cuda"])
def test_a_call_is_one_kernel(operation: str, device: str) -> None:
    call = _to(full_calls.calls()[operation], device)
    run = _bind(operation, call)
    run(_tensors(call))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run(_tensors(call))
        torch.cuda.synchronize()
    on_device = [
        e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert len(on_device) == 1, on_device
    assert f"{operation.split('_')[0]}" in on_device[0]
