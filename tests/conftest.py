"""What all tests share: the device, how many random examples are run, and the progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from tqdm import tqdm

import specmeta
from specmeta import cases, reference, testing

OPERATIONS = reference.__all__
DEFAULT_EXAMPLES = 2_000  # of each operation
DEEP_EXAMPLES = 1_000_000  # of all together


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deep",
        type=int,
        nargs="?",
        const=DEEP_EXAMPLES,
        default=None,
        metavar="EXAMPLES",
        help="random examples of all operations together, newly drawn, with a progress bar "
        f"(without a number {DEEP_EXAMPLES:,}); best with -m random",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: runs on a GPU (given to every such test)")
    config.addinivalue_line("markers", "random: random arguments against the reference")
    torch.set_num_threads(1)

    deep = config.getoption("--deep")
    settings.register_profile(
        "specmeta",
        max_examples=DEFAULT_EXAMPLES if deep is None else max(deep // len(OPERATIONS), 1),
        derandomize=deep is None,
        print_blob=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("specmeta")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _device(item) == "cuda":
            item.add_marker(pytest.mark.cuda)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _lacks_gpu(item):
        if os.environ.get("SPECMETA_REQUIRE_CUDA") == "1":
            pytest.fail("SPECMETA_REQUIRE_CUDA=1, but torch finds no GPU", pytrace=False)
        pytest.skip("no GPU")


def _device(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("device")


def _lacks_gpu(item: pytest.Item) -> bool:
    return _device(item) == "cuda" and not torch.cuda.is_available()


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Run the test on the CPU and on the GPU; `parametrize("device", ...)` overrides it."""
    name: str = request.param
    return name


@pytest.fixture
def check(device: str) -> Callable[..., None]:
    """Check an operation and its reference on a case: `check(op, args, expect)`."""

    def run(op: str, args: dict[str, Any], expect: dict[str, Any]) -> None:
        case = cases.parse({"op": op, "args": args, "expect": expect})
        testing.run_case(getattr(reference, op), case)
        testing.run_case(getattr(specmeta, op), case, device)

    return run


@pytest.fixture(scope="session")
def count_example(request: pytest.FixtureRequest) -> Iterator[Callable[[], object]]:
    """Give what a random test calls once for each example; it moves the bar of a deep run."""
    deep = request.config.getoption("--deep")
    if deep is None:
        yield lambda: None
        return
    tests = sum(
        item.get_closest_marker("random") is not None and not _lacks_gpu(item)
        for item in request.session.items
    )
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # the bar goes where pytest's own output goes
        terminal = os.fdopen(os.dup(2), "w")
    with (
        terminal,
        tqdm(
            total=tests * settings.default.max_examples,
            file=terminal,
            unit=" examples",
            mininterval=0.5,
        ) as bar,
    ):
        yield bar.update
