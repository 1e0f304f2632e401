"""Sampling: the right distribution, and the same text whatever happens around it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specmeta import BatchMetadata
from specmeta.graph import capture
from specmeta.serving.request import SamplingParams
from specmeta.serving.sampling import (
    SamplingState,
    sample,
    sample_places,
    uniform,
    verified_places,
)

MASK = 2**64 - 1


def assert_distributed(counts: Sequence[float], probabilities: Sequence[float]) -> None:
    """Pearson's chi-square test; a right sampler fails one time in 30,000."""
    total = sum(counts)
    for count, p in zip(counts, probabilities, strict=True):
        assert p > 0 or count == 0, "what can't be was drawn"
    expected = [(count, total * p) for count, p in zip(counts, probabilities, strict=True) if p]
    assert min(mean for _, mean in expected) > 5, "too few draws for the test"
    statistic = sum((count - mean) ** 2 / mean for count, mean in expected)
    freedom = len(expected) - 1
    # Wilson and Hilferty: the cube root is nearly normal. Four standard deviations.
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 4 * math.sqrt(spread)) ** 3


def draw(logits: Tensor, **settings: Any) -> Tensor:
    n = len(logits)
    defaults = {"temperature": 1.0, "top_p": 1.0, "seed": 0, "position": 0}
    columns: dict[str, Any] = {}
    for name, value in (defaults | settings).items():
        dtype = torch.float32 if name in ("temperature", "top_p") else torch.int64
        columns[name] = torch.as_tensor(value, dtype=dtype, device=logits.device).expand(n)
    return sample(logits, **columns)


def splitmix(seed: int, position: int) -> float:
    """The same number, in Python's integers."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    step = 0x9E3779B97F4A7C15
    state = (mix((seed + step) & MASK) + (position + 1) * step) & MASK
    return (mix(state) >> 11) / 2**53


def test_the_hash_is_splitmix(device: str) -> None:
    # The first number of SplitMix64 seeded with 0 (Java's SplittableRandom, xoshiro's seeder).
    assert splitmix(-0x9E3779B97F4A7C15, 0) == (0xE220A8397B1DCDAF >> 11) / 2**53
    seeds = [0, 1, -1, 12345, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    positions = [0, 1, 2, 1000, 2**31 - 2]
    pairs = list(itertools.product(seeds, positions))
    columns = [torch.tensor(column, device=device) for column in zip(*pairs, strict=True)]
    assert uniform(*columns).tolist() == [splitmix(*pair) for pair in pairs]


def test_numbers_are_uniform_and_independent() -> None:
    seeds, positions = torch.arange(200)[:, None], torch.arange(500)
    numbers = uniform(seeds, positions)
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    assert len(numbers.unique()) == numbers.numel()
    # Each number beside that of the next position, and beside that of the next seed.
    for pairs in (
        torch.stack([numbers[:, :-1], numbers[:, 1:]]),
        torch.stack([numbers[:-1], numbers[1:]]),
    ):
        cells = (pairs[0] * 16).long() * 16 + (pairs[1] * 16).long()
        counts = torch.bincount(cells.flatten(), minlength=256)
        assert_distributed(counts.tolist(), [1 / 256] * 256)
    # The low bits are as good as the high ones: 24 of them at least.
    low = (numbers * 2**20) % 1
    assert_distributed(torch.bincount((low * 16).long().flatten()).tolist(), [1 / 16] * 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("along", ["seed", "position"])
def test_single_draws(device: str, dtype: torch.dtype, temperature: float, along: str) -> None:
    logits = torch.tensor([0.0, 1.5, -1.0, 0.3, 1.5, 0.9], dtype=dtype, device=device)
    rows = logits.expand(20_000, -1)
    tokens = draw(rows, temperature=temperature, **{along: torch.arange(20_000)})
    p = (logits.double() / temperature).softmax(-1)
    assert_distributed(torch.bincount(tokens, minlength=6).tolist(), p.tolist())


@pytest.mark.parametrize(
    ("top_p", "nucleus"),
    [
        (0.01, [2]),
        (0.39, [2]),
        (0.41, [2, 5]),
        (0.69, [2, 5]),
        (0.75, [2, 5, 1]),
        (0.95, [2, 5, 1, 0]),
        (1.0, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_nucleus(device: str, top_p: float, nucleus: list[int]) -> None:
    p = torch.tensor([0.075, 0.2, 0.4, 0.0125, 0.0125, 0.3], dtype=torch.float64, device=device)
    tokens = draw(p.log().expand(20_000, -1), top_p=top_p, seed=torch.arange(20_000))
    counts = torch.bincount(tokens, minlength=6).tolist()
    if len(nucleus) == 1:
        assert counts[nucleus[0]] == 20_000
        return
    kept = torch.zeros_like(p)
    kept[nucleus] = p[nucleus]
    assert_distributed(counts, (kept / kept.sum()).tolist())


def test_a_large_vocabulary(device: str) -> None:
    """Of 49,152 tokens each has its place, the last one too."""
    size, count = 49_152, 300
    logits = torch.full((count, size), 3.0, device=device)
    numbers = uniform(torch.arange(count, device=device), torch.tensor(7, device=device))
    expected = (numbers * size).long()
    assert torch.equal(draw(logits, seed=torch.arange(count), position=7), expected)
    # Of equals, the nucleus takes the first.
    top_p = (size // 2 - 0.5) / size
    halves = draw(logits[:50], seed=torch.arange(50), position=7, top_p=top_p)
    assert torch.equal(halves, (numbers[:50] * (size // 2)).long())


def test_rows_do_not_see_each_other(device: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, 40, device=device)
    settings = {
        "temperature": torch.tensor([0.0, 0.7, 1.0, 0.0, 1.3, 2.0] * 2),
        "top_p": torch.tensor([1.0, 0.9, 0.5] * 4),
        "seed": torch.arange(12) % 5,
        "position": torch.arange(12) % 7,
    }
    together = draw(logits, **settings)
    order = torch.randperm(12)
    shuffled = draw(logits[order], **{name: value[order] for name, value in settings.items()})
    assert torch.equal(shuffled, together[order])
    for i in range(12):
        alone = draw(logits[i : i + 1], **{name: v[i : i + 1] for name, v in settings.items()})
        assert alone.tolist() == [together[i]]
    greedy = settings["temperature"] == 0
    assert torch.equal(together[greedy], logits.argmax(-1)[greedy])
    assert not torch.equal(together, logits.argmax(-1))


VOCABULARY = 3
LENGTH = 3  # tokens that are compared
# The next token's logits after each token.
CHAIN = torch.tensor([[0.2, 1.0, -0.5], [0.0, 0.0, 1.2], [1.0, -0.7, 0.1]], dtype=torch.float64)


def chain_texts(count: int, *, num_drafts: int, used: int, device: str) -> list[tuple[int, ...]]:
    """Sample `count` texts of the chain from seeds of their own, all rows of one batch.

    Of the `num_drafts` drafts, which follow some rule, `used` are verified.
    """
    batch = BatchMetadata(
        max_rows=count,
        max_slots=count,
        max_tokens=count * (num_drafts + 1),
        max_pages=4,
        page_size=4,
        max_seq_len=16,
        max_draft_len=num_drafts,
        device=device,
    )
    state = SamplingState(count, device=device)
    state.temperature.fill_(1.0)
    state.seed.copy_(torch.arange(count))
    table = CHAIN.to(device)
    for slot in range(count):
        batch.assign(slot, [0], [1 + 4 * slot + i for i in range(4)])
    # Rows aren't slots.
    batch.set_rows(list(range(count))[::-1], [used + 1] * count)
    n = count * (num_drafts + 1)
    places: list[Tensor] = []

    def step() -> None:
        batch.stage()
        places.append(verified_places(batch, n))
        logits = table[batch.input_ids][places[-1].flatten()]
        samples = sample_places(batch, logits, places[-1], state)
        batch.accept_sampled(samples, vocab_size=VOCABULARY)
        for index in range(num_drafts):
            drafts = (batch.next_tokens + 1 + index) % VOCABULARY
            batch.draft_step(drafts, index=index, last=index == num_drafts - 1)

    replay = capture(step, num_rows=batch.num_rows).replay
    for _ in range(LENGTH):  # a step gives one token at least
        replay()
    assert not batch.status.any()
    if used:
        assert int(batch.committed_lens.max()) > LENGTH  # drafts stood
        assert int(batch.committed_lens.min()) < LENGTH + used  # and fell
    return [tuple(row[1 : 1 + LENGTH]) for row in batch.tokens.tolist()]


@pytest.fixture(scope="module")
def plain_texts(device: str) -> list[tuple[int, ...]]:
    return chain_texts(4000, num_drafts=0, used=0, device=device)


@pytest.mark.parametrize(("num_drafts", "used"), [(1, 1), (2, 2), (3, 2), (2, 0)])
def test_drafts_do_not_change_a_text(
    plain_texts: list[tuple[int, ...]], num_drafts: int, used: int, device: str
) -> None:
    assert chain_texts(4000, num_drafts=num_drafts, used=used, device=device) == plain_texts


def test_texts_are_distributed_as_the_targets(plain_texts: list[tuple[int, ...]]) -> None:
    # They're the same texts with drafts.
    p = CHAIN.softmax(-1)
    texts = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    expected = [
        math.prod(float(p[a, b]) for a, b in itertools.pairwise((0, *text))) for text in texts
    ]
    counts = Counter(plain_texts)
    assert_distributed([counts[text] for text in texts], expected)


def test_settings_go_to_their_slot(device: str) -> None:
    state = SamplingState(3, device=device)
    state.set(1, SamplingParams(temperature=0.5, top_p=0.25, seed=-(2**63)))
    state.set(2, SamplingParams(temperature=2.0, seed=2**63 - 1))
    assert state.temperature.tolist() == [0.0, 0.5, 2.0]
    assert state.top_p.tolist() == [1.0, 0.25, 1.0]
    assert state.seed.tolist() == [0, -(2**63), 2**63 - 1]


def test_settings_that_float32_cannot_hold(device: str) -> None:
    state = SamplingState(2, device=device)
    logits = torch.tensor([0.0, 1.0, 2.0], device=device).repeat(2, 1)
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    for slot, (temperature, top_p) in enumerate([(1e300, 1.0), (1.0, 1e-300)]):
        state.set(slot, SamplingParams(temperature=temperature, top_p=top_p))
    assert state.temperature.isfinite().all()
    ids = sample(
        logits, temperature=state.temperature, top_p=state.top_p, seed=zeros, position=zeros
    )
    assert ids[1] == 2  # the most probable one


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (3, r"slot: expected 0 \.\. 2, got 3"),
        (-1, r"slot: expected 0 \.\. 2, got -1"),
        (0.5, r"slot: expected an integer, got 0\.5"),
    ],
)
def test_a_bad_slot_changes_nothing(slot: Any, message: str) -> None:
    state = SamplingState(3)
    with pytest.raises(ValueError, match=message):
        state.set(slot, SamplingParams(temperature=0.5, top_p=0.5, seed=5))
    assert state.temperature.tolist() == [0.0] * 3
    assert state.top_p.tolist() == [1.0] * 3
    assert state.seed.tolist() == [0] * 3
