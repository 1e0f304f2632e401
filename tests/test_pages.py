"""The host's page allocator."""

from __future__ import annotations

import random

import pytest

from specmeta.serving.pages import OutOfPagesError, PagePool


def test_page_0_is_never_handed_out() -> None:
    pages = PagePool(5, page_size=4)
    assert sorted(pages.allocate(4)) == [1, 2, 3, 4]
    assert pages.num_free == 0
    assert pages.allocate(0) == []


def test_too_few_pages_takes_none() -> None:
    pages = PagePool(4, page_size=4)
    with pytest.raises(OutOfPagesError, match="4 pages asked for, 3 of 3 are free"):
        pages.allocate(4)
    assert pages.num_free == 3


@pytest.mark.parametrize(
    ("freed", "message"),
    [
        ([0], "page 0: expected 1 .. 4"),
        ([5], "page 5: expected 1 .. 4"),
        ([-1], "page -1"),
        ([4], "page 4 is free already"),
        ([1, 1], "given twice"),
    ],
)
def test_wrong_pages_are_not_taken_back(freed: list[int], message: str) -> None:
    pages = PagePool(5, page_size=4)
    pages.allocate(3)
    with pytest.raises(ValueError, match=message):
        pages.free([2, *freed])
    assert pages.num_free == 1
    pages.free([1, 2, 3])
    assert pages.num_free == 4


def test_double_free() -> None:
    pages = PagePool(5, page_size=4)
    owned = pages.allocate(2)
    pages.free(owned)
    with pytest.raises(ValueError, match="free already"):
        pages.free(owned)


@pytest.mark.parametrize("num_pages", [0, -1])
def test_no_pages(num_pages: int) -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(num_pages, page_size=4)
    with pytest.raises(ValueError, match="page_size"):
        PagePool(1, page_size=num_pages)
    with pytest.raises(ValueError, match="count"):
        PagePool(1, page_size=4).allocate(-1)


def test_random_use_never_hands_a_page_out_twice() -> None:
    rng = random.Random(0)
    pages, owned = PagePool(20, page_size=4), []
    for _ in range(2000):
        if owned and rng.random() < 0.5:
            pages.free(owned.pop(rng.randrange(len(owned))))
        elif (count := rng.randint(0, 5)) <= pages.num_free:
            owned.append(pages.allocate(count))
        taken = [page for group in owned for page in group]
        assert len(set(taken)) == len(taken) == 19 - pages.num_free
        assert 0 not in taken
