"""Runs parts, each in a process of its own and within a limit of time."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
# A part that would get less than this share of its limit isn't begun.
_LEAST_SHARE = 1 / 3
_MISSING = re.compile(r"(?:No module named |needs the package )'?([\w.]+)")
_SHOWN = 8  # lines of an error


@dataclass
class Finding:
    """What a part's output says.

    Attributes
    ----------
    figures : dict
        By name; numbers, strings, or more of these by name. Empty: the part came to nothing.
    errors : list of str
        What went wrong, a line each. Any makes the part a failed one, whatever its exit status.
    refused : str
        Why the tool refused to work here, if it did.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    refused: str = ""


@dataclass(frozen=True)
class Output:
    """What a part left: its standard output and error, and the folder that it wrote to."""

    stdout: str
    stderr: str
    folder: Path

    @property
    def text(self) -> str:
        """Both streams."""
        return self.stdout + self.stderr


def read_nothing(output: Output) -> Finding:
    """Read an output that has no figures."""
    return Finding()


@dataclass(frozen=True)
class Part:
    """One thing to run.

    Attributes
    ----------
    name : str
        In lower case, without spaces.
    what : str
        A few words for the summary.
    command : tuple of str
        Run in the repository's root.
    limit : float
        Seconds.
    read : callable
        Makes a `Finding` of its `Output`, whether it succeeded or not.
    is_test : bool
        Whether its failure is the whole check's.
    modules : tuple of str
        Python packages that it needs.
    environment : Mapping of str to str
        Added to that of this process.
    """

    name: str
    what: str
    command: tuple[str, ...]
    limit: float
    read: Callable[[Output], Finding] = read_nothing
    is_test: bool = False
    modules: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Attributes
    ----------
    name, what, is_test
        The part's.
    status : str
        ``"ok"``, ``"failed"``, ``"missing"`` (a package or a tool, or it refused) or ``"skipped"``.
    seconds : float
        How long it ran.
    reason : str
        Why it isn't ok, in a few words.
    figures, errors
        Those of the `Finding`; errors are the first lines.
    """

    name: str
    what: str
    is_test: bool
    status: str
    seconds: float = 0.0
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def run_stages(
    stages: Sequence[Sequence[Part]], folder: Path, *, deadline: float
) -> Iterator[Outcome]:
    """Run the parts of a stage at the same time, one stage after the other.

    Parameters
    ----------
    stages : sequence of sequence of Part
        The most valuable first.
    folder : Path
        Where the outputs go: ``NAME.out`` and ``NAME.err``.
    deadline : float
        On the clock of `time.monotonic`: a part that has too little time until then is skipped,
        and none runs past it.

    Yields
    ------
    Outcome
        In the order in which they end.
    """
    for stage in stages:
        with ThreadPoolExecutor(max_workers=max(len(stage), 1)) as pool:
            waiting = [pool.submit(run_part, part, folder, deadline=deadline) for part in stage]
            for done in as_completed(waiting):
                yield done.result()


def run_part(part: Part, folder: Path, *, deadline: float) -> Outcome:
    """Run one part; see `run_stages`."""

    def outcome(status: str, **more: Any) -> Outcome:
        return Outcome(part.name, part.what, part.is_test, status, **more)

    for module in part.modules:
        if importlib.util.find_spec(module) is None:
            return outcome("missing", reason=f"the package {module} is missing")
    program = shutil.which(part.command[0])
    if program is None:
        return outcome("missing", reason=f"{part.command[0]} is missing")
    began = time.monotonic()
    if deadline - began < part.limit * _LEAST_SHARE:
        return outcome("skipped", reason="no time")
    limit = min(part.limit, deadline - began)
    output, status = _execute(part, folder, limit)
    seconds = time.monotonic() - began
    try:
        finding = part.read(output)
    except (OSError, ValueError, LookupError, TypeError) as error:
        finding = Finding()  # a part that fails may leave anything
        if status == 0:
            finding.errors = [f"its output can't be read: {type(error).__name__}: {error}"]
    if finding.refused:
        reason = f"{part.command[0]} refuses: {finding.refused}"
        return outcome("missing", reason=reason, seconds=seconds)
    if status == 0 and not finding.errors:
        return outcome("ok", seconds=seconds, figures=finding.figures)
    missing = _MISSING.search(output.text)
    if missing and not finding.figures:
        reason = f"the package {missing[1]} is missing"
        return outcome("missing", reason=reason, seconds=seconds)
    return outcome(
        "failed",
        seconds=seconds,
        reason=f"past its limit of {limit:.0f} s" if status is None else f"exit status {status}",
        figures=finding.figures,
        errors=(finding.errors or _last_lines(output))[:_SHOWN],
    )


def _execute(part: Part, folder: Path, limit: float) -> tuple[Output, int | None]:
    """Run the command; the status is None where it had to be ended."""
    paths = folder / f"{part.name}.out", folder / f"{part.name}.err"
    with paths[0].open("wb") as out, paths[1].open("wb") as err:
        process = subprocess.Popen(
            part.command,
            cwd=_ROOT,
            # What a part that is ended has printed must not stay in its buffer.
            env={**os.environ, "PYTHONUNBUFFERED": "1", **part.environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # so that it can be ended with all that it started
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)  # a process whose kernel hangs may take long to end
    stdout, stderr = (path.read_text(errors="replace") for path in paths)
    return Output(stdout, stderr, folder), status


def _last_lines(output: Output) -> list[str]:
    text = output.stderr if output.stderr.strip() else output.stdout
    return [line for line in text.splitlines() if line.strip()][-3:]
