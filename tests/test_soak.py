"""Many requests that come, go and are cancelled, through pools that are too small.

The default run is short; `--deep` sends 2,000 requests, with a progress bar.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_serving import KINDS, VOCAB, check_no_trace, make_world
from tqdm import tqdm

from specmeta.serving.engine import Engine
from specmeta.serving.request import Request, SamplingParams
from specmeta.serving.scheduler import Plan, Seat

MAX_ROWS = 6
MAX_SEQ_LEN = 88
# A text's longest, so that no draft finds the end of the capacity: all status bits stay zero.
LONGEST = MAX_SEQ_LEN - 4 * 4
# The longest text takes most of the target's pool, or of the drafter's.
POOLS: dict[str, dict[str, int]] = {
    "plain": {"num_pages": 28},
    "one-model": {"num_pages": 32},
    "two-model eagle": {"num_pages": 140, "draft_num_pages": 42},
    "two-model llama": {"num_pages": 32, "draft_num_pages": 20},
}


def watch_status(engine: Engine) -> list[int]:
    """Return a list to which every status bit that a step reports is appended."""
    bits: list[int] = []
    finish_step = engine._scheduler.finish_step

    def finish(plan: Plan, outcome: Sequence[Sequence[int]]) -> None:
        bits.extend(row[0] for row in outcome if row[0])
        finish_step(plan, outcome)

    engine._scheduler.finish_step = finish  # type: ignore[method-assign]
    return bits


def count_objects() -> Counter[type]:
    gc.collect()
    kinds = (Request, Seat, Plan, torch.Tensor)
    return Counter(type(o) for o in gc.get_objects() if type(o) in kinds)


def resident_memory() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("kind", KINDS)
def test_soak(
    kind: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = request.config.getoption("--deep") is not None
    total = 2_000 // len(KINDS) if deep else 16
    world = make_world().with_ends(*random.Random(0).sample(range(VOCAB), 2))
    engine = world.engine(
        kind, max_rows=MAX_ROWS, max_tokens=30, max_seq_len=MAX_SEQ_LEN, **POOLS[kind]
    )
    bits = watch_status(engine)
    rng = random.Random(KINDS.index(kind))
    alive: list[Request] = []
    finishes: Counter[str] = Counter()
    sent = 0
    at_first: Any = None
    bar = tqdm(total=total, unit=" requests", desc=kind, disable=not deep)
    with capsys.disabled(), bar:
        busy = True
        while busy or sent < total:
            # Bursts, and times in which all runs dry.
            while sent < total and len(alive) < 3 * MAX_ROWS and rng.random() < 0.6:
                prompt = world.prompt(rng, 40)
                alive.append(engine.submit(prompt, random_params(rng, LONGEST - len(prompt), kind)))
                sent += 1
            if alive and rng.random() < 0.02:
                engine.cancel(rng.choice(alive))
            busy = engine.step()
            for done in [other for other in alive if other.finish]:
                world.check(done)
                finishes[done.finish] += 1
                alive.remove(done)
                bar.update()
                del done
            if at_first is None and sum(finishes.values()) >= total // 4:
                at_first = count_objects(), resident_memory()
    assert sum(finishes.values()) == total
    assert engine.stats.preemptions > total // 20
    assert bits == []
    check_no_trace(engine)
    objects, memory = at_first
    now = count_objects()
    assert now[Request] == now[Seat] == now[Plan] == 0
    if deep:
        assert now[torch.Tensor] <= objects[torch.Tensor]
        assert set(finishes) == {"length", "end", "stop", "cancelled"}
        assert resident_memory() < memory + 2**25


def random_params(rng: random.Random, most: int, kind: str) -> SamplingParams:
    k = 0 if kind == "plain" else 3
    stop = "".join(rng.choices("abcdefghij ", k=rng.randint(1, 2)))
    return SamplingParams(
        max_new_tokens=rng.randint(1, min(most, 40)),
        temperature=rng.choice((0.0, 0.0, 0.8)),
        top_p=rng.choice((1.0, 0.8)),
        seed=rng.randrange(2**63),
        stop=(stop,) if rng.random() < 0.3 else (),
        num_drafts=rng.choice((None, rng.randint(0, k))),
        ignore_end=rng.random() < 0.5,
    )
