"""``specmeta matrix``: the same prompts through every way to run a model, in one table.

Whatever drafts, whether steps overlap or are captured, and whoever else is in the batch: a text is
the one that ``transformers`` decodes greedily, and overlap costs no acceptance.

Example
-------
>>> from specmeta import matrix, models
>>> model = models.load("austen")
>>> results = list(matrix.run(model, max_new_tokens=4, captured=[False], batches=[4]))
>>> len(results), matrix.find_faults(results)
(8, [])
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specmeta._command import Parser, add_device_options, format_place, progress_bar, set_up
from specmeta.serving.request import PassCounts

if TYPE_CHECKING:
    from specmeta.generate import Text
    from specmeta.models import Model
    from specmeta.serving.engine import Engine
    from specmeta.serving.request import Request

__all__ = ["PROMPTS", "Result", "WrongText", "find_faults", "first_layers", "main", "run"]

# A batch of 16 takes all of them, smaller ones the first four.
PROMPTS = (
    "It was a fine morning in May, and",
    "She had not been long in the room when",
    "Mr. Darcy looked at her with",
    "The letter which Emma received from her sister",
    "No",
    "Who is the happiest man in the world?",
    "The rain",
    "He bowed, smiled, and walked away from them all without a word, for",
    "What is the capital of France?",
    "There were five of them, and",
    "A good dinner is",
    "My dear Miss Woodhouse, you must know that I have",
    "Why did nobody dance?",
    "Elizabeth laughed:",
    "In the year 1811 the family of Dashwood",
    "Two and two are",
)
NUM_PROMPTS = 4
BATCHES = (1, 4, 16)
NEW_TOKENS = 24
# With --full; smollm2 is a thousand times austen's size.
FULL_NEW_TOKENS, SMOLLM2_NEW_TOKENS = 128, 32
NUM_DRAFTS = 4
PAGE_SIZE, DRAFT_PAGE_SIZE = 16, 8
# Short, so that prompts take several steps, beside rows that decode already.
PROMPT_CHUNK = 8
NUM_COMBINATIONS = 4 * 2 * 2 * len(BATCHES)


@dataclass(frozen=True)
class WrongText:
    """A text that isn't the reference's.

    Attributes
    ----------
    prompt : str
        Its prompt.
    expected, got : str
        What ``transformers`` generates, and what came out; or the error that ended it.
    """

    prompt: str
    expected: str
    got: str


@dataclass
class Result(PassCounts):
    """What came of one combination.

    Attributes
    ----------
    model, drafter : str
        Names.
    overlap, captured : bool
        How steps were run.
    batch : int
        Requests at once.
    num_texts : int
        Texts.
    drafted, accepted, target_passes
        As in `PassCounts`, all texts together.
    seconds : float
        Wall time from the first prompt to the last token, capture included.
    differences : list of WrongText
        Texts that aren't the reference's.
    """

    model: str
    drafter: str
    overlap: bool
    captured: bool
    batch: int
    num_texts: int = 0
    seconds: float = 0.0
    differences: list[WrongText] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The combination in words."""
        overlap = "overlap" if self.overlap else "no overlap"
        captured = "captured" if self.captured else "eager"
        return f"{self.model}: {self.drafter}, {overlap}, {captured}, batch {self.batch}"

    @property
    def acceptance(self) -> float | None:
        """Part of the drafts that stood; None without drafts."""
        drafted = sum(self.drafted)
        return sum(self.accepted) / drafted if drafted else None


def main(argv: Sequence[str]) -> int:
    """Print the table, and what is wrong.

    Return 1 where a text differs or overlap changes the acceptance, 2 for bad input.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    device = set_up(parser, args)
    # Imported here: transformers takes seconds, which bad arguments needn't wait for.
    from specmeta.models import ModelError, load
    from specmeta.serving.request import RequestError

    lengths = {args.model: NEW_TOKENS}
    if args.full:
        lengths = {args.model: FULL_NEW_TOKENS, "smollm2": SMOLLM2_NEW_TOKENS}
    results: list[Result] = []
    try:
        models = [load(name, device=device) for name in lengths]
        with progress_bar() as progress:
            task = progress.add_task("combinations", total=len(models) * NUM_COMBINATIONS)
            for model, max_new_tokens in zip(models, lengths.values(), strict=True):
                for result in run(model, max_new_tokens=max_new_tokens):
                    results.append(result)
                    progress.advance(task)
    except (ModelError, RequestError) as error:
        parser.error(str(error))
    faults = find_faults(results)
    if args.json:
        print(json.dumps(_report(args, results, faults, lengths)))
    else:
        for name, max_new_tokens in lengths.items():
            of_model = [result for result in results if result.model == name]
            _print_table(args, name, of_model, max_new_tokens)
        print("\n".join(faults) or "every text is that of plain greedy decoding")
    return 1 if faults else 0


def run(
    model: Model,
    *,
    max_new_tokens: int = NEW_TOKENS,
    captured: Sequence[bool] = (True, False),
    batches: Sequence[int] = BATCHES,
) -> Iterator[Result]:
    """Run the combinations one by one.

    Parameters
    ----------
    model : Model
        With a head, in float32.
    max_new_tokens : int
        Most new tokens a prompt.
    captured : sequence of bool
        Whether steps are captured, or run as they stand; or both in turn.
    batches : sequence of int
        Requests at once, up to 16.

    Yields
    ------
    Result
        What came of a combination, in the order of the table.

    Raises
    ------
    ModelError
        The model has no head.
    RequestError
        It has too few positions, or there isn't enough memory.
    """
    from specmeta.generate import plain_greedy, read_prompt, size_cache
    from specmeta.models import ModelError
    from specmeta.serving.engine import Engine
    from specmeta.serving.memory import refuse_lack_of_memory

    if model.head is None:
        raise ModelError(f"{model.name} has no draft head")
    texts = [read_prompt(model, prompt, max_new_tokens=max_new_tokens) for prompt in PROMPTS]
    expected = plain_greedy(model, texts, max_new_tokens=max_new_tokens)

    max_rows = max(batches)
    cache = size_cache(
        texts,
        max_rows=max_rows,
        max_new_tokens=max_new_tokens,
        num_drafts=NUM_DRAFTS,
        page_size=PAGE_SIZE,
    )
    settings: dict[str, Any] = {
        **cache,
        "max_tokens": max_rows * PROMPT_CHUNK,
        "prompt_chunk": PROMPT_CHUNK,
        "page_size": PAGE_SIZE,
        "draft_page_size": DRAFT_PAGE_SIZE,
    }
    drafters: dict[str, dict[str, Any]] = {
        "none": {"num_drafts": 0},
        "one-model Eagle": {"num_drafts": NUM_DRAFTS},
        "two-model Eagle": {"num_drafts": NUM_DRAFTS, "two_model": True},
        "two-model Llama": {"num_drafts": NUM_DRAFTS, "draft": first_layers(model)},
    }
    with refuse_lack_of_memory():
        for drafter, is_captured, overlap in itertools.product(drafters, captured, (True, False)):
            # One engine for all batches: a large one becomes small when its texts end one by one,
            # and then runs in the graphs of the small ones.
            engine = Engine(
                model, **settings, **drafters[drafter], overlap=overlap, captured=is_captured
            )
            for batch in batches:
                count = max(NUM_PROMPTS, batch)
                yield _serve(
                    engine,
                    texts[:count],
                    expected[:count],
                    Result(model.name, drafter, overlap, is_captured, batch),
                    max_new_tokens=max_new_tokens,
                )


def _serve(
    engine: Engine,
    texts: Sequence[Text],
    expected: Sequence[list[int]],
    result: Result,
    *,
    max_new_tokens: int,
) -> Result:
    """Serve the prompts, a batch at a time; write into `result` what came of them."""
    from specmeta.serving.request import SamplingParams

    params = SamplingParams(max_new_tokens=max_new_tokens)
    requests: list[Request] = []
    started = time.perf_counter()
    for start in range(0, len(texts), result.batch):
        batch = texts[start : start + result.batch]
        requests += [engine.submit(text.prompt_ids, params) for text in batch]
        engine.run()
    result.seconds = time.perf_counter() - started
    result.num_texts = len(requests)
    result.target_passes = sum(request.target_passes for request in requests)
    result.accepted = [sum(counts) for counts in zip(*(r.accepted for r in requests), strict=True)]
    result.drafted = [sum(counts) for counts in zip(*(r.drafted for r in requests), strict=True)]
    decode = engine.model.tokenizer.decode
    for text, ids, request in zip(texts, expected, requests, strict=True):
        if request.token_ids != ids:
            got = request.error or decode(request.token_ids)
            result.differences.append(WrongText(text.prompt, str(decode(ids)), str(got)))
    return result


def first_layers(model: Model) -> Model:
    """Return a small Llama with the same tokenizer: the first half of a model's layers, no head.

    Embedding, norm and output matrix are the model's own, so that what it drafts is better than
    nothing. No weights are copied.
    """
    from transformers import LlamaForCausalLM

    from specmeta.models import Model
    from specmeta.serving.attention import ATTENTION_NAME

    config = copy.deepcopy(model.target.config)
    config.num_hidden_layers = max(1, config.num_hidden_layers // 2)
    llama: Any = LlamaForCausalLM(config)
    llama.to(model.target.device).eval()
    missing = llama.load_state_dict(model.target.state_dict(), strict=False, assign=True)[0]
    assert not missing, missing
    llama.set_attn_implementation(ATTENTION_NAME)
    return Model(f"half of {model.name}", llama, None, model.tokenizer, model.end_ids)


def find_faults(results: Sequence[Result]) -> list[str]:
    """Return what is wrong with results with and without overlap, a line each.

    That is combinations with texts that aren't the reference's, and those whose counts of verified
    and accepted drafts depend on overlap.
    """
    faults = []
    for result in results:
        if result.differences:
            first = result.differences[0]
            faults.append(
                f"{result.name}: {len(result.differences)} of {result.num_texts} texts differ; "
                f"{first.prompt!r}: expected {first.expected!r}, got {first.got!r}"
            )
    with_overlap = {replace(r, overlap=False).name: r for r in results if r.overlap}
    for result in results:
        if not result.overlap:
            counts, expected = (
                f"{r.accepted} of {r.drafted}" for r in (with_overlap[result.name], result)
            )
            if counts != expected:
                faults.append(
                    f"{with_overlap[result.name].name}: accepted drafts by position: expected "
                    f"{expected} as without overlap, got {counts}"
                )
    return faults


def _parser() -> Parser:
    parser = Parser(
        prog="specmeta matrix",
        description="Decode the same prompts in every way: with each kind of drafter, with and "
        "without overlap, captured and eager, in small and large batches. Every text must be that "
        "of plain greedy decoding, and overlap must not cost acceptance.",
    )
    add = parser.add_argument
    default = "(default: %(default)s)"
    add(
        "--model",
        default="austen",
        help=f"a Llama's directory with a head, or one built in: austen, smollm2 {default}",
    )
    full = f"{FULL_NEW_TOKENS} tokens a prompt; smollm2, too, with {SMOLLM2_NEW_TOKENS}"
    add("--full", action="store_true", help=full)
    add_device_options(parser)
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _report(
    args: argparse.Namespace, results: list[Result], faults: list[str], lengths: dict[str, int]
) -> dict[str, Any]:
    return {
        "device": args.device,
        "dtype": "fp32",
        "threads": args.threads,
        "max_new_tokens": lengths,
        "num_drafts": NUM_DRAFTS,
        "page_size": PAGE_SIZE,
        "draft_page_size": DRAFT_PAGE_SIZE,
        "combinations": [
            asdict(result)
            | {"tokens_per_pass": result.tokens_per_pass, "acceptance": result.acceptance}
            for result in results
        ],
        "faults": faults,
    }


def _print_table(
    args: argparse.Namespace, name: str, results: list[Result], max_new_tokens: int
) -> None:
    from rich.console import Console
    from rich.table import Table

    place = format_place(args.device, "fp32", args.threads)
    table = Table(title=f"{name}, {max_new_tokens} tokens a prompt; {place}")
    for column in ("drafter", "overlap", "captured"):
        table.add_column(column, no_wrap=True)
    # Narrow enough for 80 columns.
    for column in ("batch", "tokens\na pass", "acceptance", "texts\nequal"):
        table.add_column(column, no_wrap=True, justify="right")
    for _, rows in itertools.groupby(results, lambda result: result.drafter):
        table.add_section()
        for r in rows:
            table.add_row(
                r.drafter,
                "on" if r.overlap else "off",
                "yes" if r.captured else "no",
                str(r.batch),
                f"{r.tokens_per_pass:.2f}",
                "-" if r.acceptance is None else f"{r.acceptance:.2%}",
                f"{r.num_texts - len(r.differences)}/{r.num_texts}",
                style="red" if r.differences else None,
            )
    Console().print(table)
