"""The command line: ``specmeta COMMAND ...``, also ``python -m specmeta COMMAND ...``.

Exit codes: 0, 1 where a check fails, 2 for bad input, 130 for an interrupt.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from specmeta import __version__
from specmeta._command import Parser

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
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(prog="specmeta", description="Metadata of speculative decoding, on the device.")
    parser.add_argument("--version", action="version", version=f"specmeta {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    command = parser.parse_args(arguments[:1]).command
    try:
        try:
            module = importlib.import_module(f"specmeta.{COMMANDS[command][0]}")
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            parser.error("torch is missing: pip install torch (specmeta.cupy works without)")
        code: int = module.main(arguments[1:])
        return code
    except KeyboardInterrupt:
        return 130
