"""One table of what the device does in a serving step, and in one call of each implementation.

``bench/profile.sh`` runs this. Work is marked by ranges; a kernel belongs to the range in which the
host launched it, whenever it runs. A step is one ``Engine.step()``: it launches a step and handles
the results of the one before.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench import report
from bench.__main__ import OPERATIONS
from bench.common import SWEEPS, Step
from bench.runner import Runner
from specmeta import matrix
from specmeta.graph import capture

if TYPE_CHECKING:
    from specmeta.serving.engine import Engine

STEP = "serving step"
PROMPTS = matrix.PROMPTS[:4]
NEW_TOKENS = 48
_LAUNCH = re.compile(r"cu(da)?(Launch(Cooperative)?Kernel|GraphLaunch)")
# Where the host waits for all that is queued. A wait for an event is counted apart.
_SYNC = re.compile(
    r"(cudaDevice|cudaStream|cuCtx|cuStream)Synchronize|cudaMemcpy(?!\w*Async)|cuMemcpy(?!\w*Async)"
    r"|cudaFree$|cuMemFree"
)
_EVENT_WAIT = re.compile(r"(cuda|cu)EventSynchronize")
_VERSION = re.compile(r"(_v\d+|_ptsz|_ptds)+$")  # behind the names of CUDA's calls
_DEVICE_TO_HOST = 2  # CUpti_ActivityMemcpyKind

Marker = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Event:
    """Something that took place.

    Attributes
    ----------
    kind : str
        ``"range"``, ``"call"`` of the CUDA API, ``"kernel"``, ``"to host"`` (a copy), ``"other"``
        work of the device, or ``"operator"`` of torch on the CPU.
    name : str
    start, end : float
        Microseconds.
    correlation : int
        The same for a call and what it started.
    """

    kind: str
    name: str
    start: float
    end: float
    correlation: int = 0


@dataclass(frozen=True)
class Line:
    """What one range contains, on average; see ``docs/bench.md``."""

    range: str
    count: int
    kernels: float
    specmeta_kernels: float
    launches: float
    syncs: float
    event_waits: float
    copies_to_host: float
    idle_us: float
    operators: float


def read_sqlite(path: Path) -> list[Event]:
    """Read what ``nsys export --type sqlite`` wrote. It leaves out tables without a row."""
    with closing(sqlite3.connect(path)) as database:
        found = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}

        def rows(table: str, columns: str, joined: str = "") -> Iterable[tuple[Any, ...]]:
            if table not in found:
                return ()
            return database.execute(f"SELECT start, end, {columns} FROM {table} {joined}")

        events = [
            Event("range", name, start / 1e3, end / 1e3)
            for start, end, name in rows(
                "NVTX_EVENTS",
                "COALESCE(text, value)",
                "LEFT JOIN StringIds ON textId = StringIds.id WHERE end IS NOT NULL",
            )
            if name
        ]
        events += [
            Event("call", name, start / 1e3, end / 1e3, correlation)
            for start, end, correlation, name in rows(
                "CUPTI_ACTIVITY_KIND_RUNTIME",
                "correlationId, value",
                "JOIN StringIds ON nameId = StringIds.id",
            )
        ]
        events += [
            Event("kernel", name, start / 1e3, end / 1e3, correlation)
            for start, end, correlation, name in rows(
                "CUPTI_ACTIVITY_KIND_KERNEL",
                "correlationId, value",
                "JOIN StringIds ON demangledName = StringIds.id",
            )
        ]
        events += [
            Event(
                "to host" if kind == _DEVICE_TO_HOST else "other",
                "copy",
                start / 1e3,
                end / 1e3,
                correlation,
            )
            for start, end, correlation, kind in rows(
                "CUPTI_ACTIVITY_KIND_MEMCPY", "correlationId, copyKind"
            )
        ]
        events += [
            Event("other", "memset", start / 1e3, end / 1e3, correlation)
            for start, end, correlation in rows("CUPTI_ACTIVITY_KIND_MEMSET", "correlationId")
        ]
    return events


def read_trace(events: Iterable[dict[str, Any]]) -> list[Event]:
    """Read the ``traceEvents`` of torch's profiler."""
    kinds = {
        "user_annotation": "range",
        "cuda_runtime": "call",
        "cuda_driver": "call",
        "kernel": "kernel",
        "gpu_memcpy": "other",
        "gpu_memset": "other",
        "cpu_op": "operator",
    }
    read = []
    for event in events:
        kind = kinds.get(event.get("cat", ""))
        if kind is None or event.get("ph") != "X":
            continue
        name = str(event["name"])
        if event["cat"] == "gpu_memcpy" and "DtoH" in name:
            kind = "to host"
        start = float(event["ts"])
        correlation = int(event.get("args", {}).get("correlation", 0))
        read.append(Event(kind, name, start, start + float(event["dur"]), correlation))
    return read


def summarise(events: Sequence[Event]) -> list[Line]:
    """Make a line for each name of a range, in the order in which they first began.

    The device is idle where nothing runs between the first and the last of a name's work.
    """
    ranges: dict[str, list[Event]] = {}
    host: list[Event] = []
    device: dict[int, list[Event]] = {}
    for event in sorted(events, key=lambda e: e.start):
        if event.kind == "range":
            ranges.setdefault(event.name, []).append(event)
        elif event.kind in ("call", "operator"):
            host.append(event)
        else:
            device.setdefault(event.correlation, []).append(event)
    starts = [event.start for event in host]
    lines = []
    for name, spans in ranges.items():
        inside = [
            event
            for span in spans
            for event in host[
                bisect.bisect_left(starts, span.start) : bisect.bisect_left(starts, span.end)
            ]
        ]
        calls = [(e, _VERSION.sub("", e.name)) for e in inside if e.kind == "call"]
        # A call of the runtime may stand beside the driver's call that it makes.
        started = [e for c in {c.correlation for c, _ in calls} for e in device.get(c, ())]
        kernels = [e for e in started if e.kind == "kernel"]
        operators = [e for e in inside if e.kind == "operator"]

        def each(items: Iterable[Any], count: int = len(spans)) -> float:
            return len(list(items)) / count

        lines.append(
            Line(
                range=name,
                count=len(spans),
                kernels=each(kernels),
                specmeta_kernels=each(e for e in kernels if "specmeta" in e.name),
                launches=each({c.correlation for c, call in calls if _LAUNCH.match(call)}),
                syncs=each(c for c, call in calls if _SYNC.match(call)),
                event_waits=each(c for c, call in calls if _EVENT_WAIT.match(call)),
                copies_to_host=each(e for e in started if e.kind == "to host"),
                idle_us=_idle(started) / len(spans),
                operators=each(e for e in operators if e.name.startswith("specmeta::")),
            )
        )
    return lines


def _idle(work: Sequence[Event]) -> float:
    idle, busy_until = 0.0, None
    for event in sorted(work, key=lambda e: e.start):
        if busy_until is not None:
            idle += max(event.start - busy_until, 0.0)
        busy_until = max(event.end, busy_until or event.end)
    return idle


def prepare(device: torch.device) -> Callable[[Marker], None]:
    """Compile and capture everything; return what runs it, each call and step in a range."""
    from specmeta.models import load
    from specmeta.serving.engine import Engine

    calls = list(_calls(device))
    model = load("austen", device=device)
    engine = Engine(model, max_rows=len(PROMPTS), max_tokens=128, num_pages=64)
    _serve(engine, lambda name: contextlib.nullcontext())

    def run(mark: Marker) -> None:
        for name, call in calls:
            if device.type == "cuda":
                torch.cuda.synchronize()
            with mark(name):
                call()
        _serve(engine, mark)

    return run


def _calls(device: torch.device) -> Iterator[tuple[str, Step]]:
    runner = Runner(device, seconds=0, budget=0, with_compile=False)
    (work, *_) = SWEEPS["works"]
    for operation in OPERATIONS.values():
        sweeps = operation.sweeps
        size = work if work in sweeps.get("works", []) else next(iter(sweeps.values()))[0]
        case = operation.make_case(size, device)
        for name, make in runner.implementations(operation).items():
            arguments = case.fresh()
            step = make(arguments)
            step()
            yield f"{operation.name} {name}, eager", step
            if device.type == "cuda" and name != "host loop":
                replay = capture(step, num_rows=arguments["num_rows"]).replay
                case.reset(arguments)
                yield f"{operation.name} {name}, graph", replay


def _serve(engine: Engine, mark: Marker) -> None:
    from specmeta.serving.request import SamplingParams

    for prompt in PROMPTS:
        engine.submit(prompt, SamplingParams(max_new_tokens=NEW_TOKENS))
    is_busy = True
    while is_busy:
        with mark(STEP):
            is_busy = engine.step()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the work under a profiler, or report what one has written.

    Return 1 where a serving step synchronises, or has no kernel on a GPU.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.profile_steps", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="run the work on the GPU, for nsys to watch")
    of_nsys = commands.add_parser("nsys", help="report what nsys exported")
    of_nsys.add_argument("sqlite", type=Path)
    of_torch = commands.add_parser("torch", help="run the work under torch's profiler, and report")
    of_torch.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for command in (of_nsys, of_torch):
        command.add_argument("--out", type=Path, required=True, help="folder")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.command == "run":
        run = prepare(torch.device("cuda"))
        torch.cuda.profiler.start()
        run(torch.cuda.nvtx.range)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return 0
    if args.command == "nsys":
        device, events = torch.device("cuda"), read_sqlite(args.sqlite)
    else:
        device = torch.device(args.device)
        events = _profile(device)
    return write(device, args.command, summarise(events), args.out)


def _profile(device: torch.device) -> list[Event]:
    run = prepare(device)
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if device.type == "cuda" else [kinds.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        run(torch.profiler.record_function)
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text())["traceEvents"])


def write(device: torch.device, tool: str, lines: Sequence[Line], out: Path) -> int:
    """Print the table and write it as JSON; return 1 where a serving step isn't as it must be."""
    where = report.describe(device)
    title = f"by range, on average; counted by {tool}. {report.label(where)}"
    headings = [f.name.replace("_", " ") for f in fields(Line)]
    cells = [
        [str(v) if isinstance(v, str | int) else f"{v:.1f}" for v in astuple(x)] for x in lines
    ]
    report.print_table(title, headings, cells)
    if device.type == "cpu":
        print("A CPU run has no kernels: operators are what it counts.")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"profile-{device.type}.json"
    content = {"label": report.label(where), **where, "tool": tool}
    content["lines"] = [asdict(line) for line in lines]
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)
    steps = [line for line in lines if line.range == STEP]
    is_right = all(line.syncs == 0 for line in steps) and bool(steps)
    if device.type == "cuda":
        is_right = is_right and all(line.kernels > 0 for line in steps)
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
