"""``python -m bench``: check and measure every operation beside its alternatives."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from bench import (
    bench_accept_greedy,
    bench_accept_sampled,
    bench_advance,
    bench_count_sampled,
    bench_draft_lists,
    bench_draft_step,
    bench_keep_last,
    bench_locate_sampled,
    bench_map_slots,
    bench_repack,
    bench_stage,
    report,
)
from bench.common import WHAT_VARIES
from bench.runner import Result, Runner

OPERATIONS = {
    module.OPERATION.name: module.OPERATION
    for module in (
        bench_advance,
        bench_stage,
        bench_accept_greedy,
        bench_accept_sampled,
        bench_count_sampled,
        bench_locate_sampled,
        bench_keep_last,
        bench_map_slots,
        bench_draft_step,
        bench_draft_lists,
        bench_repack,
    )
}
SHORT_SWEEPS = ("headline", "works", "pages")
SECONDS, SHORT_SECONDS = 0.1, 0.05  # a measurement
BUDGET, SHORT_BUDGET = 900.0, 75.0  # seconds, for all


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benches, print tables, write JSON and plots.

    A result that differs raises AssertionError, before anything of it is measured.
    """
    args = _parser().parse_args(argv)
    device = torch.device(args.device)
    torch.set_num_threads(1)
    chosen = [OPERATIONS[name] for name in args.operations or OPERATIONS]
    sweeps = args.sweep or (SHORT_SWEEPS if args.short else WHAT_VARIES)
    runner = Runner(
        device,
        seconds=SHORT_SECONDS if args.short else SECONDS,
        budget=SHORT_BUDGET if args.short else BUDGET,
        with_compile=not args.short,  # it takes longer than all the rest
    )
    planned = [
        (operation, sweep, work)
        for sweep in sweeps
        for operation in chosen
        for work in operation.sweeps.get(sweep, [])
    ]
    where, floor = report.describe(device), runner.floor()
    print(report.label(where))
    results: list[Result] = []
    failures: list[str] = []
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"results-{device.type}.json"
    with torch.no_grad(), tqdm(planned, unit="size", disable=None) as bar:
        for operation in chosen:
            runner.check(operation)
        for operation, sweep, work in bar:
            label = f"{operation.name}, {sweep}, {work.name}"
            bar.set_description(label)
            try:
                results.extend(runner.run(operation, sweep, work))
            except Exception as error:  # the other sizes are worth having
                failures.append(f"{label}: {type(error).__name__}: {error}")
            # Each time, so that a run that is cut short leaves what it has.
            path.write_text(json.dumps(report.to_json(where, floor, results), indent=1) + "\n")
    report.print_results(where, floor, results)
    for written in [path, *report.plot(where, results, args.out)]:
        print(written)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    add = parser.add_argument
    add("operations", nargs="*", metavar="OPERATION", help=f"{', '.join(OPERATIONS)} (all)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--sweep", action="append", choices=WHAT_VARIES, help="may be given again (all)")
    add(
        "--short",
        action="store_true",
        help="a minute and a half: headline, works and pages, without torch.compile",
    )
    add("--out", type=Path, default=Path("build/bench"), help="folder (build/bench)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
