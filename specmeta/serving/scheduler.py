"""What runs next: the host's policy, without a device.

The scheduler lays out a step (`Scheduler.plan`) before it knows what came of the last one, and
learns that later (`Scheduler.finish_step`). In between, a launched step may write to the pages of
each request that it carries.

**The capacity contract.** Before a step, each request that it carries holds, in every pool, pages
for ``min(committed + (depth + 1) * (K + 1), max_seq_len)`` tokens, no fewer and no more.
``committed`` is what the results handled so far say, and no less than the prompt. ``depth`` is the
number of steps that carry the request and whose results aren't handled, this one included: each may
commit ``K + 1`` tokens, and the drafts behind the last one need up to ``K + 1`` places more.

**Who comes first.** Whoever came first. Where pages run out, the request that came last gives its
own back and is recomputed later, from its prompt and everything that it had emitted. So the oldest
request always gets on, and two can't take pages from each other for ever.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from specmeta.serving.pages import PagePool
from specmeta.serving.request import PassCounts, Request, RequestError, check_integer
from specmeta.status import Status

__all__ = ["Plan", "Row", "Scheduler", "Seat"]

_MAX_FAULTS = 2


@dataclass(eq=False)
class Seat:
    """A request's stay in the batch, from its admission until its slot is free again.

    Attributes
    ----------
    request : Request
        Whose it is.
    slot : int
        Its slot.
    tokens : list of int
        What it's computed from: the prompt, and what an earlier stay has emitted.
    pages : list of list of int
        By pool: its pages, in order.
    num_sent : int
        Tokens of `tokens` that launched steps take.
    committed : int
        Tokens whose keys and values are final, as far as the handled results say.
    in_flight : int
        Launched steps that carry it and aren't handled.
    trusted : bool
        Whether results still count.
    """

    request: Request
    slot: int
    tokens: list[int]
    pages: list[list[int]]
    num_sent: int = 0
    committed: int = 0
    in_flight: int = 0
    trusted: bool = True

    @property
    def in_prompt(self) -> bool:
        """Whether the next step takes tokens of the prompt."""
        return self.num_sent < len(self.tokens)


@dataclass(frozen=True)
class Row:
    """A seat's part in a step.

    Attributes
    ----------
    seat : Seat
        Whose.
    query_len : int
        Most tokens that it takes.
    in_prompt : bool
        Whether they are a part of the prompt; otherwise one token and its drafts.
    emits : bool
        Whether something has to come out: not in the middle of a prompt.
    """

    seat: Seat
    query_len: int
    in_prompt: bool
    emits: bool


@dataclass
class Plan:
    """A step, and what the device has to be told before it, in this order.

    Attributes
    ----------
    admitted : list of Seat
        Slots that get tokens and pages.
    dropped : list of (Seat, int, int)
        Pages taken away: seat, pool, how many pages are left.
    added : list of (Seat, int, list of int)
        Pages put behind those that are there: seat, pool, pages.
    rows : list of Row
        The step's rows, at least one.
    """

    admitted: list[Seat] = field(default_factory=list)
    dropped: list[tuple[Seat, int, int]] = field(default_factory=list)
    added: list[tuple[Seat, int, list[int]]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


class Scheduler:
    """Decides which requests have slots, pages and rows.

    Parameters
    ----------
    max_rows : int
        Requests that run at once.
    max_slots : int
        Slots; ``depth * max_rows`` are always enough.
    max_tokens : int
        Tokens a step; at least ``num_drafts + 1``.
    prompt_chunk : int
        Tokens that a step takes of a prompt at most.
    num_drafts : int
        Drafts a row at most, K.
    depth : int
        Most steps whose results aren't handled when the next one has been launched.
    pools : list of PagePool
        A request has pages of each.
    max_seq_len : int
        No text is longer, its prompt included.

    Attributes
    ----------
    running : list of Seat
        Seats that go on, in the order of arrival.
    leaving : list of Seat
        Seats that launched steps still carry, but no other one will.
    waiting : list of Request
        Requests that have no seat to go on with, in the order of arrival.
    vacated : list of int
        Slots that have become free. Whoever tells the device takes them off the list.
    counts : PassCounts
        What came of the drafts of all requests.
    num_tokens : int
        New tokens of all requests.
    num_preemptions : int
        How often a request had to give its pages back.
    num_faults : int
        How often a request's results were wrong.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_slots: int,
        max_tokens: int,
        prompt_chunk: int,
        num_drafts: int,
        depth: int,
        pools: list[PagePool],
        max_seq_len: int,
    ) -> None:
        for name, value, least in (
            ("max_rows", max_rows, 1),
            ("max_slots", max_slots, 1),
            ("num_drafts", num_drafts, 0),
            ("max_tokens", max_tokens, num_drafts + 1),
            ("prompt_chunk", prompt_chunk, 1),
            ("depth", depth, 1),
            ("max_seq_len", max_seq_len, 1),
        ):
            check_integer(name, value, least)
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.prompt_chunk = prompt_chunk
        self.num_drafts = num_drafts
        self.depth = depth
        self.pools = pools
        self.max_seq_len = max_seq_len
        self.running: list[Seat] = []
        self.leaving: list[Seat] = []
        self.waiting: list[Request] = []
        self.vacated: list[int] = []
        self.counts = PassCounts(drafted=[0] * num_drafts, accepted=[0] * num_drafts)
        self.num_tokens = 0
        self.num_preemptions = 0
        self.num_faults = 0
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether a request isn't finished, or a finished one still has a slot."""
        return bool(self.running or self.leaving or self.waiting)

    def capacity(self, num_committed: int, depth: int) -> int:
        """Return the tokens for which a request must hold pages: the capacity contract."""
        return min(num_committed + (depth + 1) * (self.num_drafts + 1), self.max_seq_len)

    def add(self, request: Request) -> None:
        """Take a request into the queue.

        Raises
        ------
        RequestError
            It's too long: for the model, or for the pools even if it had them to itself.
        """
        prompt, new = len(request.prompt_ids), request.params.max_new_tokens
        if prompt + new > self.max_seq_len:
            raise RequestError(
                f"a prompt of {prompt} tokens and {new} new ones: the limit is {self.max_seq_len}"
            )
        # The last token is never computed: its text has ended.
        most = self.capacity(prompt + new - 1, self.depth)
        for pool in self.pools:
            if pool.pages_for(most) > pool.num_pages - 1:
                raise RequestError(
                    f"a prompt of {prompt} tokens and {new} new ones takes up to "
                    f"{pool.pages_for(most)} pages: there are {pool.num_pages - 1}"
                )
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a request, unless it has ended. Nothing of the steps in flight counts.

        Raises
        ------
        RequestError
            It isn't one of this scheduler's.
        """
        if not request.finish:
            if request not in self.waiting and all(s.request is not request for s in self.running):
                raise RequestError(f"request: expected one of this engine's, got {request!r}")
            request.end("cancelled")
            self._settle(request)

    # Laying out.

    def plan(self) -> Plan | None:
        """Lay out the next step; it counts as launched. None: no row can run now."""
        plan = Plan()
        ready = self._seat_requests(plan)
        budget = self.max_tokens
        # The oldest one always gets on. Then those that wait for one token; prompts fill the rest.
        for seat in sorted(ready, key=lambda seat: (seat is not ready[0], seat.in_prompt)):
            length = self._query_len(seat)
            if seat.in_prompt:
                length = min(length, budget)
            if not 0 < length <= budget:
                continue
            budget -= length
            in_prompt = seat.in_prompt
            seat.num_sent += length if in_prompt else 0
            seat.in_flight += 1
            plan.rows.append(Row(seat, length, in_prompt, emits=not seat.in_prompt))
        return plan if plan.rows else None

    def _query_len(self, seat: Seat) -> int:
        if seat.in_prompt:
            return min(self.prompt_chunk, len(seat.tokens) - seat.num_sent)
        return 1 + seat.request.num_drafts

    def _seat_requests(self, plan: Plan) -> list[Seat]:
        """Give seats and pages, in the order of arrival; return the seats that may run."""
        seats = {seat.request: seat for seat in self.running}
        ready: list[Seat] = []
        wanted = 0  # tokens
        short = False  # somebody waits for pages: nobody who came later is let in
        for request in sorted(
            [*seats, *self.waiting[: self.max_rows]], key=lambda request: request.arrival
        ):
            seat = seats.get(request)
            if seat is not None and seat not in self.running:  # it has just been preempted
                continue
            if seat is None:
                if wanted >= self.max_tokens:
                    break
                seat = None if short else self._admit(request, plan)
                short = seat is None
            elif not self._fit_pages(seat, plan):
                short, seat = True, None
            if seat is not None:
                ready.append(seat)
                wanted += self._query_len(seat)
        return ready

    def _admit(self, request: Request, plan: Plan) -> Seat | None:
        """Give a request a seat, if there is one and all that it needs."""
        if any(seat.request is request for seat in self.leaving):
            return None
        tokens = request.prompt_ids + request.token_ids
        need = self._num_pages(len(tokens), 1)
        while len(self.running) >= self.max_rows:
            if not self._preempt_behind(request):
                return None
        if not self._make_room(request, need) or not self._free_slots:
            return None
        pages = [pool.allocate(count) for pool, count in zip(self.pools, need, strict=True)]
        seat = Seat(request, self._free_slots.pop(), tokens, pages)
        self.waiting.remove(request)
        insort(self.running, seat, key=lambda seat: seat.request.arrival)
        plan.admitted.append(seat)
        return seat

    def _fit_pages(self, seat: Seat, plan: Plan) -> bool:
        """Give a seat the pages that its next step needs, and take the others back."""
        need = self._num_pages(max(seat.committed, len(seat.tokens)), seat.in_flight + 1)
        more = [max(n - len(held), 0) for n, held in zip(need, seat.pages, strict=True)]
        if any(more) and not self._make_room(seat.request, more):
            return False
        for index, (pool, held) in enumerate(zip(self.pools, seat.pages, strict=True)):
            if more[index]:
                new = pool.allocate(more[index])
                plan.added.append((seat, index, new))
                held += new
            elif len(held) > need[index]:
                pool.free(held[need[index] :])
                del held[need[index] :]
                plan.dropped.append((seat, index, len(held)))
        return True

    def _num_pages(self, num_committed: int, depth: int) -> list[int]:
        capacity = self.capacity(num_committed, depth)
        return [pool.pages_for(capacity) for pool in self.pools]

    def _make_room(self, request: Request, need: Sequence[int]) -> bool:
        """Preempt who came later until `need` pages are free or will be; tell whether they are."""
        while True:
            coming = [
                sum(len(seat.pages[index]) for seat in self.leaving)
                for index in range(len(self.pools))
            ]
            free = [pool.num_free for pool in self.pools]
            if all(n <= f + c for n, f, c in zip(need, free, coming, strict=True)):
                return all(n <= f for n, f in zip(need, free, strict=True))
            if not self._preempt_behind(request):
                return False

    def _preempt_behind(self, request: Request) -> bool:
        """Preempt the request that came last, if it came after this one."""
        if not self.running or self.running[-1].request.arrival <= request.arrival:
            return False
        self.num_preemptions += 1
        self._leave(self.running[-1])
        return True

    # Results.

    def finish_step(self, plan: Plan, outcome: Sequence[Sequence[int]]) -> None:
        """Handle the results of the oldest launched step.

        Parameters
        ----------
        plan : Plan
            The step.
        outcome : sequence of sequence of int
            By row: the slot's status bits and committed length, the number of drafts verified, the
            tokens emitted, then -1.
        """
        for row, (status, committed, num_drafted, *tokens) in zip(plan.rows, outcome, strict=True):
            row.seat.in_flight -= 1
            if row.seat.trusted and not row.seat.request.finish:
                emitted = [token for token in tokens if token >= 0]
                self._take(row, status, committed, num_drafted, emitted)
        self._vacate()

    def abandon_step(self, plan: Plan) -> None:
        """Take a step back whose launch failed: all that it was to change is computed anew.

        That includes seats whose pages it changed and which it doesn't carry: whether the device
        was told, nobody knows. The steps that were launched before still count.
        """
        for row in plan.rows:
            row.seat.in_flight -= 1
        changed = [*plan.admitted, *(seat for seat, *_ in plan.dropped + plan.added)]
        for seat in [*(row.seat for row in plan.rows), *changed]:
            if seat in self.running:
                self._leave(seat)
        self._vacate()

    def _take(
        self, row: Row, status: int, committed: int, num_drafted: int, emitted: list[int]
    ) -> None:
        seat, request = row.seat, row.seat.request
        seat.committed += row.query_len if row.in_prompt else len(emitted)
        if fault := _find_fault(row, status, committed, num_drafted, len(emitted)):
            seat.trusted = False
            request.num_faults += 1
            self.num_faults += 1
            if request.num_faults == _MAX_FAULTS:
                request.end("error", fault)
                self._settle(request)
            elif seat in self.running:
                self._leave(seat)
            return
        if not row.emits:
            return
        if not row.in_prompt:
            for counts in (request, self.counts):
                counts.count_pass(num_drafted, len(emitted))
        had = len(request.token_ids)
        request.take(emitted)
        self.num_tokens += len(request.token_ids) - had
        if request.finish:
            self._settle(request)

    # Leaving.

    def _settle(self, request: Request) -> None:
        """Let go what a finished request has."""
        if request in self.waiting:
            self.waiting.remove(request)
        for seat in self.running:
            if seat.request is request:
                self._leave(seat)
                break

    def _leave(self, seat: Seat) -> None:
        """Take a seat out of the batch; its request waits for another, unless it's finished."""
        self.running.remove(seat)
        self.leaving.append(seat)
        if not seat.request.finish:
            insort(self.waiting, seat.request, key=lambda request: request.arrival)
        self._vacate()

    def _vacate(self) -> None:
        """Take back slots and pages that no launched step can write to."""
        for seat in [seat for seat in self.leaving if seat.in_flight == 0]:
            self.leaving.remove(seat)
            for pool, pages in zip(self.pools, seat.pages, strict=True):
                pool.free(pages)
            self._free_slots.append(seat.slot)
            self.vacated.append(seat.slot)


def _find_fault(row: Row, status: int, committed: int, num_drafted: int, num_emitted: int) -> str:
    """Return what is wrong with a row's results, if something is.

    The seat has counted them already.

    Past a capacity (OVERFLOW) a row only has fewer drafts. But a row that should have emitted and
    hasn't, or the reverse, isn't where the host thinks it is.
    """
    if bits := status & ~Status.OVERFLOW:
        return f"the operations report {Status(bits)!r}"
    if (num_emitted > 0) != row.emits:
        expected = "at least one" if row.emits else "none in the middle of a prompt"
        return f"tokens that came out: expected {expected}, got {num_emitted}"
    if not max(num_emitted - 1, 0) <= num_drafted < row.query_len:
        return f"{num_emitted} tokens came out of {num_drafted} drafts"
    if committed != row.seat.committed:
        return f"committed tokens: expected {row.seat.committed}, got {committed}"
    return ""
