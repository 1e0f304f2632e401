"""The command line: ``specmeta COMMAND ...``, also ``python -m specmeta COMMAND ...``.

Exit codes: 0, 1 where a check fails, 2 for bad input, 130 for an interrupt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from specmeta import __version__

if TYPE_CHECKING:
    import torch

    from specmeta.generate import Generation
    from specmeta.models import Model

__all__ = ["generate", "main"]

COMMANDS = {
    "generate": "generate text, speculating with a draft head",
    "doctor": "say what was built, and what is missing",
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


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
    parser = _Parser(
        prog="specmeta", description="Metadata of speculative decoding, on the device."
    )
    parser.add_argument("--version", action="version", version=f"specmeta {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    if parser.parse_args(arguments[:1]).command == "generate":
        try:
            return generate(arguments[1:])
        except KeyboardInterrupt:
            return 130
    # Imported here: torch takes seconds, which bad arguments needn't wait for.
    from specmeta import doctor

    return doctor.main(arguments[1:])


def generate(argv: Sequence[str]) -> int:
    """Run ``specmeta generate``: decode, print the text, check it, print a table.

    Parameters
    ----------
    argv : sequence of str
        The arguments behind the command.

    Returns
    -------
    int
        0; 1 where a text differs from plain greedy decoding in fp32; 2 for bad input.
    """
    parser = _generate_parser()
    args = parser.parse_args(argv)
    try:
        prompts = _read_prompts(args)
        _check_threads(args.threads)
        device = _device(args.device)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    try:
        import rich  # noqa: F401
        import safetensors  # noqa: F401
        import transformers
    except ImportError as error:
        parser.error(f"{error.name} is missing: pip install 'specmeta[generate]'")
    import torch

    from specmeta.generate import RequestError, plain_greedy
    from specmeta.generate import generate as decode
    from specmeta.models import ModelError, load

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    settings = {
        "max_new_tokens": args.max_new_tokens,
        "page_size": args.page_size,
        "raw": args.raw,
    }
    try:
        model = load(
            args.model, args.draft, dtype=getattr(torch, DTYPES[args.dtype]), device=device
        )
        # A chat model's text is an answer, any other's goes on where the prompt ends.
        end = "\n" if model.is_chat and not args.raw else ""
        shown = [prompt + end for prompt in prompts]
        with _display(shown, silent=args.json) as on_text:
            speculative = decode(
                model, prompts, num_drafts=args.num_drafts, on_text=on_text, **settings
            )
        plain = decode(model, prompts, num_drafts=0, **settings)
        expected = plain_greedy(model, speculative, max_new_tokens=args.max_new_tokens)
    except (ModelError, RequestError) as error:
        parser.error(str(error))
    report = _report(args, model, speculative, plain, expected)
    if args.json:
        print(json.dumps(report))
    else:
        _print_table(report)
    return 1 if args.dtype == "fp32" and not report["identical"] else 0


def _generate_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="specmeta generate",
        description="Generate text greedily, all prompts in one batch, with drafts of an EAGLE-3 "
        "head verified by the model; then check the text against plain greedy decoding.",
    )
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    add("--prompts", type=Path, metavar="FILE", help="a file of prompts, one a line")
    add(
        "--model",
        default="austen",
        help=f"a Llama's directory, or one built in: austen, smollm2 (downloaded once) {default}",
    )
    add("--draft", metavar="DIR", help="the EAGLE-3 head (default: the model's own)")
    add("--raw", action="store_true", help="continue prompts, without the model's chat template")
    add("--max-new-tokens", type=int, default=64, metavar="N", help=f"a prompt {default}")
    add(
        "-k",
        "--num-drafts",
        type=int,
        default=4,
        metavar="K",
        help=f"drafts a step, 0 = none {default}",
    )
    add("--dtype", choices=DTYPES, default="fp32", help=f"of weights and cache {default}")
    add("--device", default="cpu", help=f"cpu, cuda or cuda:N {default}")
    add("--page-size", type=int, default=16, metavar="N", help=f"tokens a page {default}")
    # Where another program runs, two threads wait for each other at every small operation.
    add("--threads", type=int, default=1, metavar="N", help=f"threads on the CPU {default}")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _read_prompts(args: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(args.prompt)
    if args.prompts is not None:
        try:
            text = args.prompts.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{args.prompts}: {error}") from error
        # Not splitlines: form feeds and line separators are part of a prompt.
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError("no prompts: give --prompt TEXT or --prompts FILE")
    return prompts


def _device(name: str) -> torch.device:
    """Return the device `name`; raise ValueError where it can't be used, and say why."""
    match = re.fullmatch(r"cpu|cuda(?::([0-9]+))?", name)
    if match is None:
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {name!r}")

    import torch

    from specmeta import _library

    if name == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise ValueError(f"device: {name}: this torch has no CUDA: install a CUDA build of torch")
    index, count = int(match[1] or 0), torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"device: {name}: GPUs that torch can use: {count}")
    if not _library.build_info().cuda:
        raise ValueError(
            f"device: {name}: the library has no CUDA kernels: SPECMETA_CUDA=1 make build"
        )
    return torch.device("cuda", index)


def _check_threads(threads: int) -> None:
    cores = os.cpu_count() or 1
    if not 1 <= threads <= cores:
        raise ValueError(f"threads: expected 1 .. {cores}, got {threads}")


@contextmanager
def _display(prompts: list[str], *, silent: bool) -> Iterator[Callable[[int, str], None]]:
    """Show texts as they come; yield the function that takes the pieces.

    One text is written as it is. Several grow side by side on a terminal; anything else than a
    terminal gets them when they're done.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(quiet=silent)
    if len(prompts) == 1:
        prompt = iter(prompts)
        yield lambda _, piece: console.out(next(prompt, "") + piece, end="", highlight=False)
        console.out("")
        return
    texts = [Text(f"[{index}] {prompt}") for index, prompt in enumerate(prompts, 1)]
    live = Live(console=console)

    def show(index: int, piece: str) -> None:
        texts[index].append(piece)
        live.start()
        live.update(Text("\n").join(texts))

    try:
        yield show
    finally:
        live.stop()
    if not console.is_terminal:  # Live ends the last line on a terminal only
        console.out("")


def _report(
    args: argparse.Namespace,
    model: Model,
    speculative: Generation,
    plain: Generation,
    expected: list[list[int]],
) -> dict[str, Any]:
    texts = [
        {
            "prompt": text.prompt,
            "text": text.text,
            "token_ids": text.token_ids,
            "finish": text.finish,
            "identical": text.token_ids == ids,
        }
        for text, ids in zip(speculative.texts, expected, strict=True)
    ]
    return {
        "model": model.name,
        "device": args.device,
        "dtype": args.dtype,
        "threads": args.threads,
        "num_drafts": speculative.num_drafts,
        "page_size": args.page_size,
        "texts": texts,
        "tokens": speculative.num_tokens,
        "steps": speculative.steps,
        "target_passes": speculative.target_passes,
        "tokens_per_pass": speculative.tokens_per_pass,
        "accepted": speculative.accepted,
        "drafted": speculative.drafted,
        "tokens_per_second": speculative.tokens_per_second,
        "tokens_per_second_without_speculation": plain.tokens_per_second,
        "identical": all(text["identical"] for text in texts),
    }


def _print_table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    where = f"{report['device']}, {report['dtype']}"
    if report["device"] == "cpu":
        where += f", threads: {report['threads']}"
    pairs = list(zip(report["accepted"], report["drafted"], strict=True))
    rates = " ".join(f"{a / d:.1%}" if d else "-" for a, d in pairs)
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in (
        ("model", report["model"]),
        ("run on", where),
        ("drafts a pass", str(report["num_drafts"])),
        ("tokens", str(report["tokens"])),
        ("target passes", str(report["target_passes"])),
        ("tokens a pass", f"{report['tokens_per_pass']:.2f}"),
        ("acceptance", _rate(sum(a for a, _ in pairs), sum(d for _, d in pairs))),
        ("acceptance by position", rates or "-"),
        ("tokens/s with speculation", f"{report['tokens_per_second']:.1f}"),
        ("tokens/s without", f"{report['tokens_per_second_without_speculation']:.1f}"),
        ("identical to plain greedy decoding", "yes" if report["identical"] else "no"),
    ):
        table.add_row(name, value)
    Console().print(table)


def _rate(accepted: int, drafted: int) -> str:
    return f"{accepted / drafted:.2%} ({accepted}/{drafted} tokens)" if drafted else "-"
