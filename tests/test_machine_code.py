"""The kernels' machine code, run without a GPU (see emulator/), against the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import full_calls
import pytest
import strategies
import test_large
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
from tools.kernel_table import ARCHITECTURES, find_cuobjdump

GetDevice = Callable[[str], emulated.Device]


@pytest.fixture(scope="module")
def get_device(tmp_path_factory: pytest.TempPathFactory) -> GetDevice:
    """A device of an architecture."""
    if not _library.build_info().cuda:
        pytest.skip("the library was built without CUDA kernels")
    if emulated.find_nvcc() is None or find_cuobjdump() is None:
        pytest.skip("no nvcc, or no cuobjdump")
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


@each_architecture
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_cases(path: Path, architecture: str, get_device: GetDevice) -> None:
    device = get_device(architecture)
    case = load_case(path)
    device.schedule = Schedule(seed=len(path.stem))
    testing.run_case(device.operation(case.operator, shift=True), case)


@each_architecture
@each_operation
@settings(max_examples=20)
@given(data=st.data())
def test_random_calls(
    operation: str, architecture: str, get_device: GetDevice, data: st.DataObject
) -> None:
    device = get_device(architecture)
    call = data.draw(getattr(strategies, f"{operation}_calls")())
    device.schedule = Schedule(seed=data.draw(st.integers(0, 2**16)))
    testing.run_both(device.operation(operation, shift=True), getattr(reference, operation), call)


def _is_ready(workspace: Tensor, rows: int) -> bool:
    """All but the records must be zero behind a launch."""
    rest = workspace.clone()
    rest[8 : 8 + 4 * rows] = 0
    return not rest.any()


ROWS = 2_500  # three tiles


@each_architecture
@each_operation
def test_many_blocks(
    operation: str, architecture: str, get_device: GetDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tiles, by several blocks in any order, again and again on one workspace."""
    monkeypatch.setattr(test_large, "ROWS", ROWS)
    device = get_device(architecture)
    run = device.operation(operation)
    call = test_large._call(operation, page_size=3)
    want = {k: v.clone() if isinstance(v, Tensor) else v for k, v in call.items()}
    getattr(reference, operation)(**want)
    workspace = specmeta.workspace(ROWS, num_steps=call.get("num_steps", 1))
    extra = {} if operation == "keep_last" else {"workspace": workspace}
    for schedule in (Schedule(resident=1), Schedule(seed=1, resident=2), Schedule(seed=2)):
        device.schedule = schedule
        got = {k: v.clone() if isinstance(v, Tensor) else v for k, v in call.items()}
        run(**got, **extra)
        assert (device.works[-1].blocks > 1) == bool(extra)
        assert _is_ready(workspace, ROWS) or operation == "draft_lists"
        for name, tensor in got.items():
            if isinstance(tensor, Tensor):
                testing.assert_equal(name, tensor, want[name])
