"""The command line: ``specmeta COMMAND ...``, also ``python -m specmeta COMMAND ...``.

Exit codes: 0, 1 where a check fails, 2 for bad input or an output that has no room, 130 for an
interrupt, 141 where nobody reads the output any more.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from specmeta import __version__
from specmeta._command import Parser
from specmeta._environment import os_reason

__all__ = ["main"]

# By command: the module whose `main` runs it, and what it does.
COMMANDS = {
    "generate": ("_generate", "generate text, speculating with a draft head"),
    "serve": ("_serve", "answer HTTP requests in the form of OpenAI's"),
    "matrix": ("matrix", "decode the same prompts in every way, and compare the texts"),
    "eval": ("evaluate", "test how often a model's answers are right"),
    "trace": ("trace.command", "sum up, draw or compare what --trace recorded"),
    "explain": ("explain", "say why a call's results are what they are, rule by rule"),
    "doctor": ("doctor", "say what was built, and what is missing"),
}
# A device, a quota or a file that is full.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    argv : sequence of str, optional
        The command and its arguments. Default: those of the process.

    Returns
    -------
    int
        The exit code.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:  # None where it was closed from the start
                sys.stdout.flush()  # here, since at the process's end it's too late for errors
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return _nobody_reads()
    except SystemExit as end:
        # What rich makes of it, which would look like a check that failed.
        if end.code == 1 and isinstance(end.__context__, BrokenPipeError):
            return _nobody_reads()
        raise
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        with suppress(OSError):
            print(f"specmeta: {os_reason(error)}", file=sys.stderr)
        _drop_output()
        return 2


def _run(arguments: list[str]) -> int:
    parser = Parser(prog="specmeta", description="Metadata of speculative decoding, on the device.")
    parser.add_argument("--version", action="version", version=f"specmeta {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    command = parser.parse_args(arguments[:1]).command
    try:
        module = importlib.import_module(f"specmeta.{COMMANDS[command][0]}")
        code: int = module.main(arguments[1:])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        parser.error("torch is missing: pip install torch (specmeta.cupy works without)")
    return code


def _nobody_reads() -> int:
    """Say nothing; return the exit code."""
    _drop_output()
    return 128 + signal.SIGPIPE


def _drop_output() -> None:
    """Drop what is still buffered: Python writes it at its end, and complains if it can't."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            os.dup2(nowhere, stream.fileno())
