"""``specmeta eval``: how often a model's texts hold the right answer, as a hypothesis test.

Speculation must not make a model worse. Accuracy on a file of prompts and answers varies by chance,
and the more the shorter the file; so the test says how far below the reference is too far.

Example
-------
>>> from specmeta.evaluate import HypothesisTest, is_right
>>> is_right("It's in Paris, of course.", ["paris"])
True
>>> test = HypothesisTest(num_lines=1319, reference=74.2)
>>> round(test.theta, 3), round(test.threshold, 3)
(4.841, 70.997)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json import JSONDecodeError
from math import ceil, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from specmeta._command import (
    Parser,
    add_drafter_options,
    add_engine_options,
    format_place,
    format_rate,
    load_model,
    make_engine,
    print_figures,
    progress_bar,
    set_up,
)
from specmeta._environment import os_reason

if TYPE_CHECKING:
    from specmeta.generate import Text
    from specmeta.models import Model
    from specmeta.serving.engine import Stats

__all__ = ["Example", "FileError", "HypothesisTest", "is_right", "main", "read_examples"]

ALPHA, BETA, SIGMA = 0.05, 0.20, 50.0
# A test that finds no smaller loss than this, in percent, says little.
LARGE_THETA = 10.0
MAX_ROWS = 16


class FileError(ValueError):
    """A file that can't be used; the message says where and why."""


@dataclass(frozen=True)
class Example:
    """A line of the file.

    Attributes
    ----------
    line : int
        Its number, from 1.
    prompt : str
        What the model gets.
    answers : tuple of str
        Those that are right.
    """

    line: int
    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class HypothesisTest:
    """A one-sided test of an accuracy against a reference, both measured on so many lines.

    Attributes
    ----------
    num_lines : int
        Lines, n.
    reference : float
        The reference's accuracy, in percent.
    alpha : float
        How likely an accuracy that is no worse fails by chance.
    beta : float
        How likely one that is worse by `theta` passes by chance.
    sigma : float
        Standard deviation of a line's result, in percent: 50 where half of them are right, which
        is the most.
    """

    num_lines: int
    reference: float
    alpha: float = ALPHA
    beta: float = BETA
    sigma: float = SIGMA

    @property
    def theta(self) -> float:
        """The smallest loss of accuracy that the test finds, in percent."""
        return (_z(1 - self.alpha) + _z(1 - self.beta)) * self._deviation

    @property
    def threshold(self) -> float:
        """The least accuracy that passes, in percent."""
        return self.reference - _z(1 - self.alpha) * self._deviation

    @property
    def _deviation(self) -> float:
        """Standard deviation of the difference between two accuracies."""
        return self.sigma * sqrt(2 / self.num_lines)

    def lines_for(self, theta: float) -> int:
        """Return how many lines it takes to find a loss of `theta` percent."""
        return ceil(self.num_lines * (self.theta / theta) ** 2)


def _z(probability: float) -> float:
    return NormalDist().inv_cdf(probability)


@dataclass(frozen=True)
class Evaluation:
    """What came of a file.

    Attributes
    ----------
    texts : list of str
        The texts, by line.
    right : list of bool
        Whether they hold an answer.
    test : HypothesisTest
        The test.
    stats : Stats
        The engine's counts.
    """

    texts: list[str]
    right: list[bool]
    test: HypothesisTest
    stats: Stats

    @property
    def accuracy(self) -> float:
        """Accuracy in percent."""
        return _percent(self.right)

    @property
    def passed(self) -> bool:
        """Whether the test is passed."""
        return self.accuracy >= self.test.threshold


def main(argv: Sequence[str]) -> int:
    """Print the accuracy and the test; 0 where it is passed, 1 where not, 2 for bad input."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.reference is not None and not 0 <= args.reference <= 100:
        parser.error(f"reference: expected percent, 0 .. 100, got {args.reference}")
    try:
        examples = read_examples(args.file)
    except OSError as error:
        parser.error(os_reason(error))
    except FileError as error:
        parser.error(str(error))
    device = set_up(parser, args)
    # Imported here: transformers takes seconds, which bad arguments needn't wait for.
    from specmeta.models import ModelError
    from specmeta.serving.request import RequestError

    try:
        model = load_model(args, device)
        texts = _encode(args, model, examples)
        evaluation = _evaluate(args, model, examples, texts)
    except (FileError, ModelError, RequestError) as error:
        parser.error(str(error))
    test = evaluation.test
    if test.theta > LARGE_THETA:
        print(
            f"{parser.prog}: warning: lines: {test.num_lines}, which find no loss below "
            f"{test.theta:.1f} percent: {test.lines_for(LARGE_THETA)} find one of "
            f"{LARGE_THETA:.0f}",
            file=sys.stderr,
        )
    if args.json:
        print(json.dumps(_report(args, examples, evaluation)))
    else:
        _print_table(args, evaluation)
    return 0 if evaluation.passed else 1


def read_examples(path: Path) -> list[Example]:
    """Read a file of JSON lines with ``"prompt"`` and ``"answer"``.

    An answer is a string, or a list of strings of which each is right. Other fields aren't looked
    at; blank lines are left out.

    Parameters
    ----------
    path : Path
        The file, in UTF-8.

    Returns
    -------
    list of Example
        At least one.

    Raises
    ------
    OSError
        It can't be read.
    FileError
        A line isn't as it should be; the message says which, and which field.
    """
    examples = []
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            try:
                examples.append(_read_line(number, line))
            except ValueError as error:
                raise FileError(f"{path}, line {number}: {error}") from error
    if not examples:
        raise FileError(f"{path}: no lines")
    return examples


def _read_line(number: int, line: bytes) -> Example:
    try:
        fields = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg}, column {error.colno}" if isinstance(error, JSONDecodeError) else error
        )
        raise ValueError(f"no JSON: {reason}") from error
    if not isinstance(fields, dict):
        raise ValueError("expected an object with prompt and answer")
    for name in ("prompt", "answer"):
        if name not in fields:
            raise ValueError(f"{name}: missing")
    prompt, answer = fields["prompt"], fields["answer"]
    if not isinstance(prompt, str):
        raise ValueError(f"prompt: expected a string, got {_shorten(prompt)}")
    answers = answer if isinstance(answer, list) else [answer]
    if not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise ValueError(
            f"answer: expected a string that isn't blank, or a list of them, got {_shorten(answer)}"
        )
    return Example(number, prompt, tuple(answers))


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_right(text: str, answers: Sequence[str]) -> bool:
    """Return whether a text contains one of the answers as whole words, ignoring case.

    A number with its decimals, or in groups of digits, is one word: ``42`` isn't in ``42.5``.

    Parameters
    ----------
    text : str
        The text.
    answers : sequence of str
        Those that are right; any white space in them stands for any other.

    Returns
    -------
    bool
    """
    text = text.casefold()
    return any(
        re.search(
            r"(?<!\w)(?<!\d[.,])"
            + r"\s+".join(re.escape(word) for word in answer.casefold().split())
            + r"(?!\w)(?![.,]\d)",
            text,
        )
        for answer in answers
    )


def _encode(args: argparse.Namespace, model: Model, examples: list[Example]) -> list[Text]:
    """Return the texts to come; raise ValueError where one can't be served, before any is."""
    from specmeta.generate import check_settings, read_prompt
    from specmeta.serving.request import RequestError

    check_settings(
        model,
        max_new_tokens=args.max_new_tokens,
        num_drafts=args.num_drafts,
        page_size=args.page_size,
    )
    texts = []
    for example in examples:
        try:
            text = read_prompt(
                model, example.prompt, max_new_tokens=args.max_new_tokens, raw=args.raw
            )
        except RequestError as error:
            raise FileError(f"{args.file}, line {example.line}: {error}") from error
        texts.append(text)
    return texts


def _evaluate(
    args: argparse.Namespace, model: Model, examples: list[Example], texts: list[Text]
) -> Evaluation:
    from specmeta.generate import plain_greedy

    def judge(outputs: list[list[int]]) -> tuple[list[str], list[bool]]:
        decode = model.tokenizer.decode
        new = [str(decode(ids, skip_special_tokens=True)) for ids in outputs]
        return new, [is_right(t, e.answers) for t, e in zip(new, examples, strict=True)]

    with progress_bar() as progress:
        task = progress.add_task("speculative", total=len(texts))
        outputs, stats = _speculate(args, model, examples, texts, lambda: progress.advance(task))
        new, right = judge(outputs)
        reference = args.reference
        if reference is None:
            task = progress.add_task("plain greedy", total=len(texts))
            plain = []
            for text in texts:
                plain += plain_greedy(model, [text], max_new_tokens=args.max_new_tokens)
                progress.advance(task)
            reference = _percent(judge(plain)[1])
    return Evaluation(new, right, HypothesisTest(len(texts), reference), stats)


def _speculate(
    args: argparse.Namespace,
    model: Model,
    examples: list[Example],
    texts: list[Text],
    on_end: Callable[[], None],
) -> tuple[list[list[int]], Stats]:
    """Return the new tokens of each text; call `on_end` when one has ended."""
    from specmeta.generate import size_cache
    from specmeta.serving.memory import refuse_lack_of_memory
    from specmeta.serving.request import RequestError, SamplingParams

    cache = size_cache(
        texts,
        max_rows=min(MAX_ROWS, len(texts)),
        max_new_tokens=args.max_new_tokens,
        num_drafts=args.num_drafts,
        page_size=args.page_size,
    )
    engine = make_engine(args, model, **cache)

    def on_text(piece: str) -> None:
        if not piece:
            on_end()

    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    requests = []
    for example, text in zip(examples, texts, strict=True):
        try:
            requests.append(engine.submit(text.prompt_ids, params, on_text=on_text))
        except RequestError as error:  # a separate drafter may have fewer positions
            raise FileError(f"{args.file}, line {example.line}: {error}") from error
    with refuse_lack_of_memory():
        engine.run()
    for request in requests:
        if request.finish == "error":
            raise RuntimeError(request.error)
    return [request.token_ids for request in requests], engine.stats


def _percent(right: list[bool]) -> float:
    return 100 * sum(right) / len(right)


def _parser() -> Parser:
    parser = Parser(
        prog="specmeta eval",
        description="Let a model, with speculation, answer a file of prompts; test whether it's "
        "right as often as the reference. A text is right if it contains the answer as whole "
        "words, ignoring case.",
    )
    add = parser.add_argument
    default = "(default: %(default)s)"
    add(
        "file",
        type=Path,
        metavar="FILE",
        help='JSON lines with "prompt" and "answer"; an answer is a string, or a list of those '
        "that are right",
    )
    add("--raw", action="store_true", help="continue prompts, without the model's chat template")
    add("--max-new-tokens", type=int, default=64, metavar="N", help=f"a prompt {default}")
    add_engine_options(parser)
    add_drafter_options(parser)
    add(
        "--reference",
        type=float,
        metavar="ACCURACY",
        help="in percent (default: that of plain greedy decoding of the same file)",
    )
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _report(
    args: argparse.Namespace, examples: list[Example], evaluation: Evaluation
) -> dict[str, Any]:
    test, stats = evaluation.test, evaluation.stats
    return {
        "model": args.model,
        "device": args.device,
        "dtype": args.dtype,
        "threads": args.threads,
        "num_drafts": args.num_drafts,
        "two_model": args.two_model,
        "draft_model": args.draft_model,
        "page_size": args.page_size,
        "max_new_tokens": args.max_new_tokens,
        "lines": [
            {"line": example.line, "text": text, "right": right}
            for example, text, right in zip(
                examples, evaluation.texts, evaluation.right, strict=True
            )
        ],
        "accuracy": evaluation.accuracy,
        "reference": test.reference,
        "reference_is_plain_greedy": args.reference is None,
        "alpha": test.alpha,
        "beta": test.beta,
        "sigma": test.sigma,
        "theta": test.theta,
        "threshold": test.threshold,
        "passed": evaluation.passed,
        "accepted": stats.accepted,
        "drafted": stats.drafted,
        "target_passes": stats.target_passes,
        "tokens_per_pass": stats.tokens_per_pass,
    }


def _drafter(args: argparse.Namespace) -> str:
    if args.num_drafts == 0:
        return "none"
    if args.draft_model:
        return f"two-model Llama: {args.draft_model}"
    return "two-model Eagle" if args.two_model else "one-model Eagle"


def _print_table(args: argparse.Namespace, evaluation: Evaluation) -> None:
    test, stats = evaluation.test, evaluation.stats
    source = "plain greedy decoding" if args.reference is None else "given"
    print_figures(
        [
            ("model", args.model),
            ("run on", format_place(args.device, args.dtype, args.threads)),
            ("lines", str(test.num_lines)),
            ("drafter", _drafter(args)),
            ("drafts a pass", str(args.num_drafts)),
            ("tokens a pass", f"{stats.tokens_per_pass:.2f}"),
            ("acceptance", format_rate(sum(stats.accepted), sum(stats.drafted))),
            ("alpha, beta, sigma", f"{test.alpha:.2f}, {test.beta:.2f}, {test.sigma:.0f}"),
            (f"reference ({source})", f"{test.reference:.3f}"),
            ("theta", f"{test.theta:.3f}"),
            ("threshold", f"{test.threshold:.3f}"),
            ("accuracy", f"{evaluation.accuracy:.3f}"),
            ("passed", "yes" if evaluation.passed else "no"),
        ]
    )
