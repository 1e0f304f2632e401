"""Search for walks that the operators and the reference make differently: `make fuzz`.

The time is shared by rounds of two kinds: the library built with AddressSanitizer and UBSan, with
every tensor an allocation of its own, and the ordinary library, with guards around every tensor,
on a GPU where there is one. Each round is a process. Where it crashes on the CPU, the search that
it was in is made again with a fork for each walk, so that a crash is a finding like any other:
shrunk, and its last call saved as a case.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "fuzz"
PACKAGE = BUILD / "package"
FINDINGS = BUILD / "findings"
WALKS_A_SEARCH = 50
ROUND_SECONDS = 60.0
WALK_SECONDS = 60  # one that takes longer hangs
KINDS = ("sanitized", "plain")


# --- The library with sanitizers


def sanitizer_libraries() -> list[str]:
    """What a process preloads; empty where the compiler has no AddressSanitizer.

    The C++ library too: AddressSanitizer looks for what throws exceptions when it starts, and
    Python has not loaded it then.
    """
    libraries = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if not (os.path.isabs(found) and os.path.exists(found)):
            return []
        libraries.append(found)
    return libraries


def build_sanitized() -> None:
    """Build the operator library with sanitizers into a package directory of its own.

    Everything else in it is a link to the package of the working tree. Put in front of
    PYTHONPATH, it is the specmeta that a process imports.
    """
    import torch

    target = PACKAGE / "specmeta"
    target.mkdir(parents=True, exist_ok=True)
    for path in (ROOT / "specmeta").iterdir():
        link = target / path.name
        if path.suffix != ".so" and path.name != "__pycache__" and not link.exists():
            link.unlink(missing_ok=True)  # what it pointed to has gone
            link.symlink_to(path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    for command in (
        [
            *("cmake", "-S", str(ROOT), "-B", str(BUILD / "cmake"), "-G", "Ninja"),
            *("-DSPECMETA_SANITIZE=ON", "-DSPECMETA_CUDA=0"),
            f"-DSPECMETA_TORCH={Path(torch.__file__).parent}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
        ],
        ["cmake", "--build", str(BUILD / "cmake"), "--target", "specmeta_torch"],
    ):
        done = subprocess.run(
            command,
            env=os.environ | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{shlex.join(command)}\n{done.stdout}")


def sanitized_environment() -> dict[str, str]:
    """What a process needs to run with the library that `build_sanitized` made."""
    return {
        "LD_PRELOAD": ":".join(sanitizer_libraries()),
        "PYTHONPATH": str(PACKAGE),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


# --- Searching


@dataclass
class Finding:
    """A walk that went wrong, as short as it could be made."""

    walk: str
    kind: str
    message: str
    case: str | None = None
    alone: bool | None = None

    def __str__(self) -> str:
        lines = [self.message]
        if self.case is not None:
            when = "fails" if self.alone else "does not fail"
            lines.append(f"  {self.case} (replayed alone, it {when})")
        return "\n".join([*lines, f"  {self.walk}"])


@dataclass
class Search:
    """Makes walks, and keeps what is found.

    Attributes
    ----------
    directory
        For the findings.
    operators
        By name, in place of specmeta's.
    device, guarded
        See :func:`walks.play`.
    fork
        Whether each walk is made in a fork of this process.
    large
        See :func:`walks.walks`.
    tick
        Called before every walk.
    known
        Kinds of faults that are not looked for any more.
    """

    directory: Path
    operators: Mapping[str, Callable[..., None]] | None = None
    device: str = "cpu"
    guarded: bool = True
    fork: bool = False
    large: bool = False
    tick: Callable[[], None] = lambda: None
    known: list[str] = field(default_factory=list)
    walks: int = 0
    calls: int = 0
    repeats: int = 0
    shrinking: str = ""

    def run(self, seed: int, walks: int = WALKS_A_SEARCH) -> Finding | None:
        """Make so many walks, the same ones for the same seed, until one goes wrong."""
        import hypothesis
        from hypothesis import HealthCheck, Phase, given, settings
        from walks import Failure, Walk
        from walks import walks as draw_walks

        last: list[tuple[Walk, Failure]] = []

        @hypothesis.seed(seed)
        @settings(
            max_examples=walks,
            derandomize=False,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(draw_walks(large=self.large))
        def make(walk: Walk) -> None:
            self.tick()
            self.walks += 1
            try:
                self.calls += self._make(walk)
            except Failure as failure:
                if failure.kind in self.known:
                    self.repeats += 1
                    return
                if last and last[0][1].kind != failure.kind:
                    return  # another fault than the one that is being shrunk
                self.shrinking = str(failure)
                last[:] = [(walk, failure)]
                raise

        try:
            make()
        except Exception:
            # A Failure, or hypothesis saying that it does not fail every time.
            if not last:
                raise
            walk, failure = last[0]
            finding = self._keep(walk, failure)
            self.shrinking = ""
            return finding
        return None

    def _make(self, walk: Any) -> int:
        from walks import play

        def make(report: Callable[[int, str], None]) -> int:
            return play(
                walk,
                self.operators,
                device=self.device,
                guarded=self.guarded,
                report=report,
            )

        return make_in_fork(make) if self.fork else make(lambda number, operator: None)

    def _keep(self, walk: Any, failure: Any) -> Finding:
        """Save a finding: its call as a case file, and beside it a text with the whole walk."""
        from walks import call_at, play_call

        from specmeta import cases

        finding = Finding(str(walk), failure.kind, str(failure))
        call = call_at(walk, failure.number)
        if not call.refused:
            try:
                path = cases.save_case(
                    self.directory,
                    call.operator,
                    call.want,
                    name=re.sub(r"\W+", "_", f"fuzz_{failure.kind}")[:60].strip("_"),
                    why=f"Found by make fuzz: {failure.message.splitlines()[0]}",
                )
            except Exception as error:  # the reference may be what raises
                finding.message += f"\n  not saved as a case: {error!r}"
            else:
                finding.case = str(path)

                def replay() -> int:
                    play_call(
                        call.operator,
                        call.want,
                        self.operators,
                        device=self.device,
                        guarded=self.guarded,
                    )
                    return 1

                finding.alone = _fails(replay, self.fork)
        self.directory.mkdir(parents=True, exist_ok=True)
        stem = f"walk_{zlib.crc32(finding.walk.encode()):x}"
        if finding.case:
            stem = Path(finding.case).stem
        (self.directory / f"{stem}.txt").write_text(f"{finding}\n")
        self.known.append(finding.kind)
        return finding


def _fails(fn: Callable[[], int], fork: bool) -> bool:
    try:
        make_in_fork(lambda report: fn()) if fork else fn()
    except Exception:
        return True
    return False


def make_in_fork(make: Callable[[Callable[[int, str], None]], int]) -> int:
    """Make a walk in a fork of this process; a crash there is a Failure here."""
    from walks import Failure

    with tempfile.TemporaryFile() as errors:
        read_end, write_end = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(read_end)
            os.dup2(errors.fileno(), 2)
            signal.alarm(WALK_SECONDS)

            def send(**event: Any) -> None:
                os.write(write_end, json.dumps(event).encode() + b"\n")

            try:
                send(calls=make(lambda number, operator: send(number=number, operator=operator)))
            except Failure as failure:
                kind = failure.kind.removeprefix(f"{failure.operator}: ")
                send(number=failure.number, operator=failure.operator)
                send(kind=kind, message=failure.message)
            except BaseException as error:
                send(kind=type(error).__name__, message=repr(error))
            os._exit(0)
        os.close(write_end)
        last: dict[str, Any] = {"number": 0, "operator": "walk"}
        with os.fdopen(read_end) as events:
            for line in events:
                last |= json.loads(line)
        _, status = os.waitpid(process, 0)
        if status == 0 and "message" not in last:
            return int(last["calls"])
        if status:
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip()
            code = os.waitstatus_to_exitcode(status)
            how = f"hangs ({WALK_SECONDS} s)" if code == -signal.SIGALRM else f"crashed ({code})"
            said = re.search(r"AddressSanitizer: ([\w-]+)|runtime error: (.*)", text)
            last["kind"] = (said[1] or said[2]) if said else how
            last["message"] = f"{how}: {last['kind']}\n{text[:4000]}"
    raise Failure(last["number"], last["operator"], last["kind"], last["message"])


def work(args: argparse.Namespace) -> None:
    """Be one round: search until the time is over, and tell the parent in lines of JSON."""
    import torch

    from specmeta import _library

    if (_library.PATH.parent.parent == PACKAGE) != (args.worker == "sanitized"):
        raise SystemExit(f"a {args.worker} round loads {_library.PATH}")
    torch.set_num_threads(1)
    start = time.monotonic()
    device = args.device if args.worker == "plain" else "cpu"
    told = [0.0]

    def tell(**event: Any) -> None:
        for name in ("walks", "calls", "repeats", "shrinking"):
            event[name] = getattr(search, name)
        print(json.dumps(event), flush=True)

    def tick() -> None:
        if not args.fork:
            signal.alarm(WALK_SECONDS)
        if time.monotonic() > told[0] + 0.5:
            told[0] = time.monotonic()
            tell()

    search = Search(
        args.findings,
        device=device,
        guarded=args.worker == "plain",
        fork=args.fork,
        large=device != "cpu",
        tick=tick,
        known=json.loads(args.known),
    )
    number = args.first
    while True:
        finding = search.run(args.seed * 1_000_000 + number)
        number += 1
        tell(next=number, **({"finding": asdict(finding)} if finding else {}))
        # After an error of CUDA nothing works on the GPU, until another process asks it.
        broken = finding and "CUDA error" in finding.message
        if args.fork or broken or time.monotonic() > start + args.seconds:
            return


# --- The command


def main(argv: Sequence[str] | None = None) -> int:
    """Run rounds and show how far they are; return 1 where something was found."""
    args = parse(argv)
    if args.worker:
        work(args)
        return 0
    from tqdm import tqdm

    kinds = list(KINDS)
    if "sanitized" in kinds and not sanitizer_libraries():
        print("no libasan (the compiler's, as g++ brings it): without sanitizers", file=sys.stderr)
        kinds.remove("sanitized")
    if "sanitized" in kinds:
        print("== building the library with sanitizers (build/fuzz)", file=sys.stderr)
        build_sanitized()
    print(f"seed {args.seed}, {args.minutes:g} minutes, plain rounds on {args.device}", flush=True)
    seconds = args.minutes * 60
    start = time.monotonic()
    bar = tqdm(
        total=math.ceil(seconds),
        bar_format="{percentage:3.0f}%|{bar}| {elapsed}{postfix}",
        mininterval=0.5 if sys.stderr.isatty() else 30,
    )
    progress = Progress(bar, {kind: Total() for kind in kinds})
    with bar:
        try:
            turn, fork = 0, False
            while (left := start + seconds - time.monotonic()) > 0 or fork:
                kind = kinds[turn % len(kinds)]
                share = min(ROUND_SECONDS, left, seconds / len(kinds))
                fork = run_round(args, progress, kind, share, fork=fork)
                turn += not fork
        except KeyboardInterrupt:
            if progress.shrinking:
                finding = Finding("not shrunk: interrupted", "", progress.shrinking)
                progress.add(kind, finding)
    for kind, total in progress.totals.items():
        print(f"{kind}: {total.walks:,} walks, {total.calls:,} calls")
    findings = progress.findings
    print(f"{len(findings)} findings{f' in {args.findings}' if findings else ''}")
    return 1 if findings else 0


@dataclass
class Total:
    """What the rounds of a kind have made, and the number of the search that comes next."""

    walks: int = 0
    calls: int = 0
    next: int = 0


@dataclass
class Progress:
    """What all rounds have made and found, shown as a bar."""

    bar: Any
    totals: dict[str, Total]
    findings: list[Finding] = field(default_factory=list)
    shrinking: str = ""  # what is being shrunk now

    def add(self, kind: str, finding: Finding) -> None:
        self.findings.append(finding)
        self.bar.write(f"\n{kind}: {finding}\n", file=sys.stdout)

    def show(self, kind: str) -> None:
        walks = sum(total.walks for total in self.totals.values())
        calls = sum(total.calls for total in self.totals.values())
        self.bar.set_postfix_str(
            f"{walks:,} walks, {calls:,} calls, "
            f"{len(self.findings)} findings; {kind}{', shrinking' * bool(self.shrinking)}",
            refresh=False,
        )
        elapsed = round(self.bar.format_dict["elapsed"])
        self.bar.update(min(elapsed, self.bar.total) - self.bar.n)


def run_round(
    args: argparse.Namespace, progress: Progress, kind: str, seconds: float, *, fork: bool
) -> bool:
    """Run a round; say whether it has to be run again, with a fork for each walk."""
    total = progress.totals[kind]
    walks, calls, findings = total.walks, total.calls, len(progress.findings)
    repeats = 0
    known = [finding.kind for finding in progress.findings]
    worker = start_worker(args, kind, total.next, seconds, known, fork)
    assert worker.stdout
    try:
        for line in worker.stdout:
            event = json.loads(line)
            total.walks, total.calls = walks + event["walks"], calls + event["calls"]
            total.next = event.get("next", total.next)
            repeats, progress.shrinking = event["repeats"], event["shrinking"]
            if "finding" in event:
                progress.add(kind, Finding(**event["finding"]))
            progress.show(kind)
        crashed = worker.wait() != 0
    finally:
        if worker.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()

    can_fork = kind == "sanitized" or args.device == "cpu"  # a process with CUDA cannot
    if crashed and not fork and can_fork:
        return True
    explained = repeats > 0 or len(progress.findings) > findings
    if (crashed or fork) and not explained:  # with forks, the crash did not come again
        search = total.next if crashed else total.next - 1
        message = f"search {search} of this seed crashed: {log_of(kind, args.findings)}"
        progress.add(kind, Finding("not known", f"{kind}: crash", message))
        total.next = search + 1
    return False


def start_worker(
    args: argparse.Namespace, kind: str, first: int, seconds: float, known: list[str], fork: bool
) -> subprocess.Popen[str]:
    """Start a round, in a session of its own: Ctrl-C is the parent's alone."""
    environment = os.environ | (sanitized_environment() if kind == "sanitized" else {})
    command = [
        *(sys.executable, str(Path(__file__).resolve()), "--worker", kind),
        *("--seed", str(args.seed), "--first", str(first), "--seconds", str(seconds)),
        *("--known", json.dumps(known), "--device", args.device),
        *("--findings", str(args.findings)),
        *(["--fork"] if fork else []),
    ]
    args.findings.mkdir(parents=True, exist_ok=True)
    # Where a crash is searched for again, what was said at first stays.
    with log_of(kind, args.findings).open("a" if fork else "w") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )


def log_of(kind: str, directory: Path) -> Path:
    """Return where the last round of a kind wrote what it had to say."""
    return directory / f"{kind}.log"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="(default: %(default)g)")
    add("--seed", type=int, help="the same walks again (default: a new one)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the plain rounds")
    add("--findings", type=Path, default=FINDINGS, help="directory (default: build/fuzz/findings)")
    for name in ("--worker", "--known"):
        add(name, help=argparse.SUPPRESS)
    add("--fork", action="store_true", help=argparse.SUPPRESS)
    add("--first", type=int, help=argparse.SUPPRESS)
    add("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.minutes > 0:
        parser.error(f"--minutes: expected more than 0, got {args.minutes:g}")
    if args.seed is None:
        args.seed = int.from_bytes(os.urandom(3), "big")
    if args.device != "cpu" and not args.worker:
        import torch

        if args.device == "cuda" and not torch.cuda.is_available():
            parser.error("--device cuda: torch finds no GPU")
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


if __name__ == "__main__":
    sys.exit(main())
