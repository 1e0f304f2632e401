"""Random schedules of the toy engine (see `toy_engine`): every text is the greedy one.

A failure names the seed and the kind of the schedule: `ToyEngine(seed, kind).run()` repeats it.
The default run takes the seeds from 0; `--deep` takes more of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from toy_engine import ToyEngine, using

import specmeta
from specmeta import reference

KINDS = ("one model", "two models")
BLOCKS = 10
SCHEDULES = 120  # a block and kind
OPERATIONS = ("advance", "stage", "accept_greedy", "accept_sampled", "draft_step")

EVENTS = (  # what the schedules are for: each must have happened, for both kinds
    "accepted",
    "rejected",
    "chunk",
    "chunk with drafts",  # they are dropped
    "drafts beside prompt",  # the end of a prompt, and drafts behind it, in one row
    "fewer verified",  # than there were
    "stage cut",  # rows at the end of their pages, of the ledger or of the token buffer
    "list cut",  # `kv_indices` too small
    "drafting stopped",
    "to the limit",
    "ledger full",
    "bad count",  # a sampler that failed
    "past the end",
)


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("kind", KINDS)
def test_every_text_is_greedy(kind: str, block: int, request: pytest.FixtureRequest) -> None:
    deep = request.config.getoption("--deep")
    schedules = SCHEDULES if deep is None else max(SCHEDULES, deep // 1000)
    for seed in range(block * schedules, (block + 1) * schedules):
        ToyEngine(seed, kind).run()


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_go_everywhere(kind: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(100):
        counts += ToyEngine(seed, kind).run()
    assert [event for event in EVENTS if counts[event] == 0] == []
    assert counts["tokens"] > 1_000
    if kind == "two models":
        assert counts["catching up"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_on_each_device(kind: str, device: str) -> None:
    for seed in range(20):
        ToyEngine(seed, kind, device).run()


@pytest.mark.parametrize("kind", KINDS)
def test_reference_step_by_step(kind: str) -> None:
    """Every buffer is the same after every operation."""
    for seed in range(20):
        engine = ToyEngine(seed, kind, trace=True)
        engine.run()
        by_reference = ToyEngine(seed, kind, trace=True)
        with using(reference):
            by_reference.run()
        assert engine.trace
        assert engine.trace == by_reference.trace


def test_good_drafts_are_accepted() -> None:
    """The drafters do read what the target reads: a perfect one is only stopped by limits."""
    for kind in KINDS:
        counts: Counter[str] = Counter()
        for seed in range(40):
            engine = ToyEngine(seed, kind)
            if engine.skill == 100:
                engine._look_up = lambda slot, request: None  # type: ignore[method-assign]
                engine.sampled = False
                counts += engine.run()
        assert counts["rejected"] == 0
        assert counts["accepted"] > 50


# --- Engines that must fail --------------------------------------------------------------------

Op = Callable[..., None]
MUTANTS: dict[str, tuple[tuple[str, ...], str, Callable[[Op], Op]]] = {}


def mutant(*ops: str, kinds: str = "both") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a broken operation: a function of the right one and of its arguments."""

    def register(broken: Callable[..., None]) -> Callable[..., None]:
        def wrap(op: Op) -> Op:
            return lambda *args, **kwargs: broken(op, *args, **kwargs)

        MUTANTS[broken.__name__] = (ops, kinds, wrap)
        return broken

    return register


@mutant("draft_step", kinds="one model")
def rejected_drafts_stay(op: Op, *args: Any, **kwargs: Any) -> None:
    op(*args, **{**kwargs, "num_rejected": None})


@mutant("stage")
def pages_one_too_far(op: Op, *args: Any, **kwargs: Any) -> None:
    op(*args, **kwargs)
    for name in ("kv_indices", "block_table"):
        if kwargs.get(name) is not None:
            kwargs[name].copy_(kwargs[name].roll(-1, -1))


@mutant("accept_greedy", "accept_sampled", kinds="one model")
def inputs_are_not_shifted(op: Op, *args: Any, **kwargs: Any) -> None:
    op(*args, **kwargs)
    kwargs["draft_input_ids"].copy_(args[1] if len(args) > 1 else kwargs["input_ids"])


@mutant("accept_greedy", "accept_sampled")
def one_too_many_is_committed(op: Op, *args: Any, **kwargs: Any) -> None:
    committed = kwargs["committed_lens"]
    before = committed.clone()
    op(*args, **kwargs)
    committed += (committed != before).int()


@mutant("accept_greedy")
def the_first_draft_always_stands(op: Op, targets: Any, inputs: Any, **kwargs: Any) -> None:
    op(inputs.roll(-1), inputs, **kwargs)


@mutant("accept_greedy", "accept_sampled")
def drafts_are_not_dropped(op: Op, *args: Any, **kwargs: Any) -> None:
    op(*args, **{**kwargs, "num_drafts": None})


@mutant("accept_greedy", "accept_sampled", kinds="one model")
def the_hidden_state_before(op: Op, *args: Any, **kwargs: Any) -> None:
    op(*args, **kwargs)
    kwargs["token_indices"].sub_(1).clamp_(min=0)


@mutant("stage")
def written_one_place_too_far(op: Op, *args: Any, **kwargs: Any) -> None:
    op(*args, **kwargs)
    kwargs["slot_mapping"] += (kwargs["slot_mapping"] != kwargs["pad_slot"]).int()


@mutant("stage")
def rows_are_slots(op: Op, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("row_to_slot") is not None:
        kwargs["row_to_slot"] = kwargs["row_to_slot"].flip(0)
    op(*args, **kwargs)


@mutant("stage", "draft_step")
def padding_rows_live(op: Op, *args: Any, **kwargs: Any) -> None:
    op(*args, **{**kwargs, "num_rows": None})


@mutant("draft_step")
def padding_is_written(op: Op, *args: Any, **kwargs: Any) -> None:
    op(*args, **{**kwargs, "pad_slot": 0})


@mutant("stage", kinds="two models")
def rejected_drafts_count(op: Op, *args: Any, **kwargs: Any) -> None:
    op(*args, **{**kwargs, "limit_lens": None})


@mutant("draft_step", kinds="two models")
def false_drafts_count(op: Op, *args: Any, **kwargs: Any) -> None:
    """Those of a row in the middle of its prompt."""
    ledger = ("draft_tokens", "tokens", "known_lens", "num_drafts", "input_ids")
    op(*args, **{**kwargs, **dict.fromkeys(ledger), "last": True})
    op(*args, **{**kwargs, "written_lens": None})


@mutant("draft_step", kinds="two models")
def shifted_for_a_draft_model(op: Op, *args: Any, **kwargs: Any) -> None:
    op(*args, **{**kwargs, "shift": 1})


@mutant("draft_step")
def drafts_one_too_far(op: Op, *args: Any, **kwargs: Any) -> None:
    op(*args, **{**kwargs, "draft_index": kwargs["draft_index"] + 1})


@mutant("draft_step")
def positions_do_not_move(op: Op, *args: Any, **kwargs: Any) -> None:
    positions = kwargs.get("position_ids")
    if positions is not None:
        kwargs = {**kwargs, "position_ids": positions.clone()}
    op(*args, **kwargs)


@mutant("draft_step")
def the_limit_is_one_page_further(op: Op, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("num_pages") is not None:
        kwargs["num_pages"] = (kwargs["num_pages"] + 1).clamp(max=kwargs["page_table"].shape[1])
    op(*args, **kwargs)


@mutant("advance")
def advance_stands_still(op: Op, *args: Any, **kwargs: Any) -> None:
    op(*args, **{**kwargs, "seq_len_bias": 0})


def _stale(name: str) -> None:
    """Lists that are not made anew for every length."""

    def stale(op: Op, *args: Any, **kwargs: Any) -> None:
        op(*args, **{**kwargs, name: None})

    stale.__name__ = f"stale_{name}"
    mutant("draft_step")(stale)


for _name in ("kv_indptr", "kv_indices", "last_page_len", "block_table", "padded_seq_lens"):
    _stale(_name)


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_wrong_is_noticed(name: str) -> None:
    ops, kinds, wrap = MUTANTS[name]
    broken = {op: getattr(specmeta, op) for op in OPERATIONS}
    broken.update({op: wrap(broken[op]) for op in ops})
    for kind in KINDS:
        if kinds in ("both", kind):
            assert _noticed(kind, SimpleNamespace(**broken)), f"{name} passes with {kind}"


def _noticed(kind: str, ops: Any) -> bool:
    with using(ops):
        for seed in range(60):
            try:
                ToyEngine(seed, kind).run()
            except AssertionError:
                return True
    return False
