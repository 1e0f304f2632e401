"""The host's policy, with a device that accepts at random and tells a step late."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmeta.serving.pages import PagePool
from specmeta.serving.request import Request, RequestError, SamplingParams
from specmeta.serving.scheduler import Plan, Scheduler, Seat
from specmeta.status import Status

VOCAB = 7
# A walk takes as long as many examples of the other tests.
fewer = settings(max_examples=max(settings.default.max_examples // 5, 1))


def true_text(prompt: list[int], count: int) -> list[int]:
    """What a greedy model would say: each token depends on the one before and on its place."""
    tokens = list(prompt)
    for index in range(len(prompt), len(prompt) + count):
        tokens.append((3 * tokens[-1] + 5 * index + index // 3) % VOCAB)
    return tokens[len(prompt) :]


@dataclass
class Slot:
    """What the device knows of a slot."""

    tokens: list[int] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    committed: int = 0
    num_drafts: int = 0


class FakeDevice:
    """Obeys plans as the operations do, and checks what it's told.

    Results come at once here; the loop hands them on when it likes.
    """

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self.scheduler = scheduler
        self.rng = rng
        self.slots: dict[int, Slot] = {}

    def clear(self) -> None:
        """Clear the slots that the scheduler gave up."""
        while self.scheduler.vacated:
            self.slots.pop(self.scheduler.vacated.pop(), None)  # it may not know of it yet

    def tell(self, plan: Plan) -> None:
        """Take what comes before a step."""
        self.clear()
        for seat in plan.admitted:
            assert seat.slot not in self.slots
            pages = [list(held) for held in seat.pages]
            self.slots[seat.slot] = Slot(list(seat.tokens), pages)
        for seat, index, keep in plan.dropped:
            assert 0 < keep < len(self.slots[seat.slot].pages[index])
            del self.slots[seat.slot].pages[index][keep:]
        for seat, index, pages in plan.added:
            assert pages
            self.slots[seat.slot].pages[index] += pages
        for index, pool in enumerate(self.scheduler.pools):
            held = [page for slot in self.slots.values() for page in slot.pages[index]]
            assert len(set(held)) == len(held), "a page in two hands"
            assert all(0 < page < pool.num_pages for page in held)
            assert len(held) == pool.num_pages - 1 - pool.num_free
        for row in plan.rows:
            assert self.slots[row.seat.slot].pages == row.seat.pages

    def run(self, plan: Plan) -> list[list[int]]:
        """Run a step; return its outcome."""
        return [self.run_row(row.seat, row.query_len) for row in plan.rows]

    def run_row(self, seat: Seat, query_len: int) -> list[int]:
        slot = self.slots[seat.slot]
        most, k = self.scheduler.max_seq_len, self.scheduler.num_drafts
        known = len(slot.tokens)
        query_len = min(query_len, known - slot.committed + slot.num_drafts, most - slot.committed)
        if query_len == 0:  # the text ended in the step before, which the host doesn't know yet
            return [int(Status.OVERFLOW), slot.committed, 0, *[-1] * (k + 1)]
        drafts = max(query_len - (known - slot.committed), 0)
        # Whatever stands, and whatever is drafted behind it, has its page.
        need = min(slot.committed + query_len + max(k - 1, 0), most)
        for pool, pages in zip(self.scheduler.pools, slot.pages, strict=True):
            assert need <= len(pages) * pool.page_size
        slot.committed += query_len
        emitted = []
        if slot.committed >= known:
            stands = self.rng.randint(0, drafts)
            slot.committed -= drafts - stands
            prompt = seat.request.prompt_ids
            said = known - len(prompt)
            emitted = true_text(prompt, said + stands + 1)[said:]
            assert slot.tokens[len(prompt) :] == true_text(prompt, said)
            slot.tokens += emitted
            slot.num_drafts = self.rng.randint(0, k)
        return [0, slot.committed, drafts, *emitted, *[-1] * (k + 1 - len(emitted))]


class Loop:
    """The engine's loop over a fake device, which checks the rules at every turn."""

    def __init__(self, rng: random.Random, *, depth: int, **settings: Any) -> None:
        self.rng = rng
        self.scheduler = Scheduler(depth=depth, **settings)
        self.device = FakeDevice(self.scheduler, rng)
        self.launched: deque[tuple[Plan, list[list[int]], list[list[list[int]]]]] = deque()
        self.requests: list[Request] = []
        self.faults = 0.0
        self.failures = 0.0
        self.waited: tuple[Request | None, int] = None, 0
        self.steps = 0
        self.dropped = 0
        self.mixed = 0

    def submit(self, prompt: list[int], **params: Any) -> Request:
        drafts = params.pop("num_drafts", self.scheduler.num_drafts)
        end_ids = params.pop("end_ids", frozenset())
        request = Request(
            prompt,
            SamplingParams(**params),
            num_drafts=drafts,
            decode=lambda ids: "".join(map(str, ids)),
            end_ids=end_ids,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def oldest(self) -> Request | None:
        return next((request for request in self.requests if not request.finish), None)

    def turn(self) -> bool:
        """One step of the engine."""
        oldest = self.oldest()
        held = self._held_by_launched()
        plan = self.scheduler.plan()
        self._check_nothing_came_back(held)
        if plan is not None:
            self._check_plan(plan)
            fails = self.rng.random() < self.failures
            is_told = not fails or self.rng.random() < 0.5
            if is_told:
                self.device.tell(plan)
            else:
                self.device.clear()
            self.dropped += len(plan.dropped)
            self.mixed += len({row.in_prompt for row in plan.rows}) > 1
            if fails:
                for row in plan.rows[: self.rng.randint(0, is_told * len(plan.rows))]:
                    self.device.run_row(row.seat, row.query_len)
                self.scheduler.abandon_step(plan)
                self.device.clear()
            else:
                outcome = self.device.run(plan)
                for row in outcome:
                    if self.rng.random() < self.faults:
                        row[0] = int(Status.BAD_COUNT)
                pages = [[list(p) for p in row.seat.pages] for row in plan.rows]
                self.launched.append((plan, outcome, pages))
                self.steps += 1
        else:
            self.device.clear()
        if oldest is not self.waited[0]:
            self.waited = oldest, 0
        in_plan = plan is not None and any(row.seat.request is oldest for row in plan.rows)
        self.waited = oldest, 0 if in_plan or oldest is None else self.waited[1] + 1
        if self.failures == 0:  # all is drained, and the next turn has it
            assert self.waited[1] <= self.scheduler.depth
        if self.launched and (plan is None or len(self.launched) == self.scheduler.depth):
            done, outcome, _ = self.launched.popleft()
            held = self._held_by_launched()
            self.scheduler.finish_step(done, outcome)
            self._check_nothing_came_back(held)
            self.device.clear()
        elif plan is None and self.failures == 0:
            assert not self.scheduler.has_work
        return self.scheduler.has_work

    def _held_by_launched(self) -> list[tuple[int, list[list[int]]]]:
        """Slots and pages that launched steps may write to."""
        return [
            (row.seat.slot, held)
            for plan, _, pages in self.launched
            for row, held in zip(plan.rows, pages, strict=True)
        ]

    def _check_nothing_came_back(self, held: list[tuple[int, list[list[int]]]]) -> None:
        for slot, pages in held:
            assert slot not in self.scheduler._free_slots
            for pool, pool_pages in zip(self.scheduler.pools, pages, strict=True):
                assert not any(pool._is_free[page] for page in pool_pages)

    def _check_plan(self, plan: Plan) -> None:
        scheduler, k = self.scheduler, self.scheduler.num_drafts
        assert 1 <= len(plan.rows) <= scheduler.max_rows
        assert sum(row.query_len for row in plan.rows) <= scheduler.max_tokens
        assert len({row.seat.slot for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            request, seat = row.seat.request, row.seat
            assert not request.finish
            assert seat.tokens == request.prompt_ids + request.token_ids[: self._resumed(seat)]
            if row.in_prompt:
                assert 1 <= row.query_len <= scheduler.prompt_chunk
            else:
                assert row.query_len == 1 + request.num_drafts
            # The capacity contract, from what has been handled and what is in flight.
            committed = max(len(seat.tokens), len(request.prompt_ids) + len(request.token_ids) - 1)
            depth = 1 + sum(
                other.seat is seat for launched, _, _ in self.launched for other in launched.rows
            )
            tokens = min(committed + (depth + 1) * (k + 1), scheduler.max_seq_len)
            for pool, pages in zip(scheduler.pools, seat.pages, strict=True):
                assert len(pages) == -(-tokens // pool.page_size)

    @staticmethod
    def _resumed(seat: Seat) -> int:
        return len(seat.tokens) - len(seat.request.prompt_ids)

    def check_end(self) -> None:
        """Everything has ended, is right, and has given back what it had."""
        scheduler = self.scheduler
        assert not scheduler.has_work
        assert not self.device.slots
        assert all(pool.num_free == pool.num_pages - 1 for pool in scheduler.pools)
        for request in self.requests:
            expected = true_text(request.prompt_ids, request.params.max_new_tokens)
            if request.finish == "length":
                assert request.token_ids == expected
            elif request.finish == "end":
                ends = [i for i, token in enumerate(expected) if token in request._end_ids]
                assert request.token_ids == expected[: ends[0] + 1]
            elif request.finish == "stop":
                text = "".join(map(str, expected))
                assert request.text == text[: text.index(request.params.stop[0])]
            else:
                assert request.finish in ("cancelled", "error")
                assert request.token_ids == expected[: len(request.token_ids)]


@st.composite
def walks(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a scheduler, from too small to plenty."""
    k, depth = draw(st.integers(0, 4)), draw(st.integers(1, 2))
    max_seq_len = draw(st.integers(8, 40))
    pools = []
    for _ in range(draw(st.integers(1, 2))):
        size = draw(st.integers(1, 9))
        least = -(-max_seq_len // size)  # a request's own
        pools.append(PagePool(1 + draw(st.integers(least, 4 * least)), size))
    max_rows = draw(st.integers(1, 5))
    return {
        "num_drafts": k,
        "depth": depth,
        "max_seq_len": max_seq_len,
        "pools": pools,
        "max_rows": max_rows,
        "max_slots": draw(st.integers(1, depth * max_rows)),
        "max_tokens": draw(st.integers(k + 1, 40)),
        "prompt_chunk": draw(st.integers(1, 12)),
    }


def walk(rng: random.Random, loop: Loop, *, num_requests: int) -> None:
    """Submit and cancel at random until all requests have ended."""
    most, k = loop.scheduler.max_seq_len, loop.scheduler.num_drafts
    to_come = num_requests
    busy = True
    turns = 0
    while busy or to_come:
        while to_come and rng.random() < 0.4:
            to_come -= 1
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, most - 1))]
            loop.submit(
                prompt,
                max_new_tokens=rng.randint(1, most - len(prompt)),
                num_drafts=rng.choice((k, k, rng.randint(0, k))),
                end_ids=frozenset([rng.randrange(3 * VOCAB)]),
                stop=("65",) if rng.random() < 0.1 else (),
            )
        if loop.requests and rng.random() < 0.05:
            loop.scheduler.cancel(rng.choice(loop.requests))
        busy = loop.turn()
        turns += 1
        assert turns < 100_000
    loop.check_end()


@fewer
@given(sizes=walks(), seed=st.integers(0, 2**32))
def test_random_walks(sizes: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    loop = Loop(rng, **sizes)
    walk(rng, loop, num_requests=rng.randint(1, 12))
    assert all(request.finish != "error" for request in loop.requests)


@fewer
@given(sizes=walks(), seed=st.integers(0, 2**32))
def test_random_walks_with_faults(sizes: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    loop = Loop(rng, **sizes)
    loop.faults, loop.failures = rng.choice(((0.02, 0), (0, 0.1), (0.02, 0.1)))
    walk(rng, loop, num_requests=rng.randint(1, 8))
    for request in loop.requests:
        assert (request.finish == "error") == (request.num_faults == 2) or request.num_faults == 1


def make_loop(seed: int = 0, **changes: Any) -> Loop:
    sizes: dict[str, Any] = {
        "depth": 2,
        "num_drafts": 2,
        "max_rows": 4,
        "max_slots": 8,
        "max_tokens": 24,
        "prompt_chunk": 8,
        "pools": [PagePool(33, 4)],
        "max_seq_len": 64,
    }
    return Loop(random.Random(seed), **sizes | changes)


def finish(loop: Loop) -> None:
    while loop.turn():
        pass
    loop.check_end()


def test_prompts_stand_beside_decode_rows() -> None:
    loop = make_loop()
    for length in (1, 30, 20, 9, 5):
        loop.submit([1] * length, max_new_tokens=12)
    finish(loop)
    assert loop.mixed >= 3


def test_walks_reach_what_they_should() -> None:
    """Preemption, pages given back, steps of both kinds: else the walks show nothing."""
    preempted = dropped = mixed = 0
    for seed in range(60):
        rng = random.Random(seed)
        pools = [PagePool(16, 3), PagePool(10, 5)]
        loop = make_loop(seed, pools=pools, max_seq_len=40, max_tokens=rng.choice((3, 8, 24)))
        walk(rng, loop, num_requests=10)
        preempted += loop.scheduler.num_preemptions
        dropped += loop.dropped
        mixed += loop.mixed
    assert preempted > 50
    assert dropped > 20
    assert mixed > 100


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_drafts", range(5))
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5, 7, 16])
def test_the_capacity_contract_at_every_boundary(
    page_size: int, num_drafts: int, depth: int
) -> None:
    # Each prompt length puts the boundaries elsewhere; `Loop` compares the pages at each step.
    for length in range(1, 2 * page_size + 2):
        for seed in range(3):
            loop = make_loop(
                seed,
                depth=depth,
                num_drafts=num_drafts,
                pools=[PagePool(200, page_size), PagePool(200, 3)],
                max_seq_len=length + 3 * page_size + 2,
            )
            loop.submit([1] * length, max_new_tokens=3 * page_size + 2)
            finish(loop)


def test_what_came_last_gives_way() -> None:
    loop = make_loop(pools=[PagePool(13, 4)], max_seq_len=48)
    requests = [loop.submit([i] * 6, max_new_tokens=40) for i in range(3)]
    ends = []
    while loop.turn():
        ends += [r for r in requests if r.finish and r not in ends]
    loop.check_end()
    assert loop.scheduler.num_preemptions >= 2
    assert ends == requests[: len(ends)]


def test_the_oldest_keeps_its_pages() -> None:
    # Two that fit one by one only: the second can't take anything from the first.
    loop = make_loop(pools=[PagePool(13, 4)], max_seq_len=48)
    first, second = (loop.submit([i] * 20, max_new_tokens=28) for i in (1, 2))
    seat = None
    while not first.finish:
        loop.turn()
        if loop.scheduler.running and not first.finish:
            assert loop.scheduler.running[0].request is first
            assert seat in (None, loop.scheduler.running[0])
            seat = loop.scheduler.running[0]
    assert not second.finish
    finish(loop)


def test_a_prompt_that_never_fits() -> None:
    loop = make_loop(pools=[PagePool(5, 4), PagePool(100, 4)])
    with pytest.raises(RequestError, match="up to 5 pages: there are 4"):
        loop.submit([1] * 4, max_new_tokens=5)
    with pytest.raises(RequestError, match="60 tokens and 5 new ones: the limit is 64"):
        loop.submit([1] * 60, max_new_tokens=5)
    assert not loop.scheduler.has_work
    loop.submit([1] * 3, max_new_tokens=5)
    finish(loop)


@pytest.mark.parametrize("when", range(8))
def test_cancel(when: int) -> None:
    loop = make_loop(max_rows=2)
    requests = [loop.submit([i] * 12, max_new_tokens=30) for i in range(3)]
    for _ in range(when):
        loop.turn()
    for request in (requests[0], requests[2]):
        had = list(request.token_ids)
        loop.scheduler.cancel(request)
        loop.scheduler.cancel(request)
        assert request.finish == "cancelled"
        loop.turn()
        assert request.token_ids == had  # nothing of the steps in flight counts
    finish(loop)
    assert requests[1].finish == "length"


def test_a_fault_is_computed_anew_once() -> None:
    loop = make_loop()
    requests = [loop.submit([i] * 5, max_new_tokens=20) for i in range(3)]
    for _ in range(2):
        for _ in range(4):
            loop.turn()
        plan, outcome, _ = loop.launched[-1]
        row = next(i for i, row in enumerate(plan.rows) if row.seat.request is requests[1])
        outcome[row][0] = int(Status.BAD_PAGE)
    finish(loop)
    assert [request.finish for request in requests] == ["length", "error", "length"]
    assert "BAD_PAGE" in requests[1].error
    assert loop.scheduler.num_faults == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.__setitem__(slice(3, None), [-1] * 3), "expected at least one, got 0"),
        (lambda row: row.__setitem__(slice(2, None), [0, 1, 2, 3]), "3 tokens .* of 0 drafts"),
        (lambda row: row.__setitem__(2, 3), "of 3 drafts"),
        (lambda row: row.__setitem__(1, row[1] + 1), "committed tokens: expected 5, got 6"),
    ],
)
def test_results_that_cannot_be(change: Callable[[list[int]], None], message: str) -> None:
    loop = make_loop()
    request = loop.submit([1] * 5, max_new_tokens=20)
    for _ in range(10):
        loop.turn()
        if loop.launched and loop.launched[-1][0].rows[0].emits:
            change(loop.launched[-1][1][0])
    finish(loop)
    assert request.finish == "error"
    assert re.search(message, request.error)


def test_past_the_capacity_is_no_fault() -> None:
    loop = make_loop()
    request = loop.submit([1] * 5, max_new_tokens=20)
    busy = True
    while busy:
        busy = loop.turn()
        for _, outcome, _ in loop.launched:
            outcome[0][0] = int(Status.OVERFLOW)
    assert request.finish == "length"
    loop.check_end()


def test_a_failed_launch_loses_nothing() -> None:
    loop = make_loop()
    requests = [loop.submit([i] * 9, max_new_tokens=20) for i in range(4)]
    for turn in range(14):
        loop.failures = 1.0 if turn in (1, 5, 6, 12) else 0.0
        loop.waited = None, 0
        loop.turn()
    loop.failures = 1e-9
    finish(loop)
    assert all(request.finish == "length" for request in requests)
    assert not loop.scheduler.num_faults


def test_a_failed_launch_of_which_the_device_was_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seats get and lose pages in steps that don't carry them, too."""
    failed = 0
    for seed in range(150):
        loop = make_loop(seed, max_tokens=4, pools=[PagePool(200, 1)], prompt_chunk=2)
        for length in (3, 6, 9, 4):
            loop.submit([1] * length, max_new_tokens=20)
        plan_step = loop.scheduler.plan

        def plan(
            loop: Loop = loop, plan_step: Callable[[], Plan | None] = plan_step
        ) -> Plan | None:
            step = plan_step()
            carried = [row.seat for row in step.rows] if step else []
            changed = [seat for seat, *_ in step.dropped + step.added] if step else []
            loop.failures = float(any(seat not in carried for seat in changed))
            loop.waited = None, 0
            return step

        monkeypatch.setattr(loop.scheduler, "plan", plan)
        while not loop.failures and loop.turn():
            pass
        failed += loop.failures > 0
        monkeypatch.setattr(loop.scheduler, "plan", plan_step)
        loop.failures = 1e-9
        finish(loop)
    assert failed > 20


@pytest.mark.parametrize(
    "change",
    [
        {"max_rows": 0},
        {"max_slots": 0},
        {"max_tokens": 2},
        {"prompt_chunk": 0},
        {"depth": 0},
        {"num_drafts": -1},
        {"max_seq_len": 0},
    ],
)
def test_bad_settings(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        make_loop(**change)
