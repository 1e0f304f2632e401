"""``specmeta generate``: decode, print the text, check it, print a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmeta._command import (
    Parser,
    add_engine_options,
    add_trace_option,
    format_place,
    format_rate,
    load_model,
    print_figures,
    recording,
    set_up,
)
from specmeta._environment import os_reason

if TYPE_CHECKING:
    from specmeta.generate import Generation
    from specmeta.models import Model

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Decode, print the text, check it, print a table.

    Return 1 where a text differs from plain greedy decoding in fp32, 2 for bad input.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        prompts = _read_prompts(args)
    except ValueError as error:
        parser.error(str(error))
    device = set_up(parser, args)
    # Imported here: transformers takes seconds, which bad arguments needn't wait for.
    from specmeta.generate import RequestError, generate, plain_greedy
    from specmeta.models import ModelError

    settings = {
        "max_new_tokens": args.max_new_tokens,
        "page_size": args.page_size,
        "raw": args.raw,
    }
    try:
        model = load_model(args, device)
        # A chat model's text is an answer, any other's goes on where the prompt ends.
        end = "\n" if model.is_chat and not args.raw else ""
        shown = [prompt + end for prompt in prompts]
        with _display(shown, silent=args.json) as on_text, recording(parser, args):
            speculative = generate(
                model, prompts, num_drafts=args.num_drafts, on_text=on_text, **settings
            )
        plain = speculative
        if args.num_drafts:
            plain = generate(model, prompts, num_drafts=0, **settings)
        expected = plain_greedy(model, speculative.texts, max_new_tokens=args.max_new_tokens)
    except (ModelError, RequestError) as error:
        parser.error(str(error))
    report = _report(args, model, speculative, plain, expected)
    if args.json:
        print(json.dumps(report))
    else:
        _print_table(report)
    return 1 if args.dtype == "fp32" and not report["identical"] else 0


def _parser() -> Parser:
    parser = Parser(
        prog="specmeta generate",
        description="Generate text greedily, all prompts in one batch, with drafts of an EAGLE-3 "
        "head verified by the model; then check the text against plain greedy decoding.",
    )
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    add("--prompts", type=Path, metavar="FILE", help="a file of prompts, one a line")
    add("--raw", action="store_true", help="continue prompts, without the model's chat template")
    add("--max-new-tokens", type=int, default=64, metavar="N", help=f"a prompt {default}")
    add_engine_options(parser)
    add_trace_option(parser)
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _read_prompts(args: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(args.prompt)
    if args.prompts is not None:
        try:
            text = args.prompts.read_bytes().decode("utf-8-sig")
        except OSError as error:
            raise ValueError(f"prompts: {os_reason(error)}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"prompts: {args.prompts}: {error}") from error
        # Not splitlines: form feeds and line separators are part of a prompt.
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        lines = [line for line in lines if line.strip()]
        if not lines:
            raise ValueError(f"prompts: {args.prompts}: no prompts in it")
        prompts += lines
    if not prompts:
        raise ValueError("no prompts: give --prompt TEXT or --prompts FILE")
    return prompts


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
    pairs = list(zip(report["accepted"], report["drafted"], strict=True))
    rates = " ".join(f"{a / d:.1%}" if d else "-" for a, d in pairs)
    speeds = [
        ("tokens/s without speculation", f"{report['tokens_per_second_without_speculation']:.1f}")
    ]
    if report["num_drafts"]:
        speeds.insert(0, ("tokens/s with speculation", f"{report['tokens_per_second']:.1f}"))
    print_figures(
        [
            ("model", report["model"]),
            ("run on", format_place(report["device"], report["dtype"], report["threads"])),
            ("drafts a pass", str(report["num_drafts"])),
            ("tokens", str(report["tokens"])),
            ("target passes", str(report["target_passes"])),
            ("tokens a pass", f"{report['tokens_per_pass']:.2f}"),
            ("acceptance", format_rate(sum(a for a, _ in pairs), sum(d for _, d in pairs))),
            ("acceptance by position", rates or "-"),
            *speeds,
            ("identical to plain greedy decoding", "yes" if report["identical"] else "no"),
        ]
    )
