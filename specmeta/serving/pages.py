"""The host's part of paging: which pages of a cache are free."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["OutOfPagesError", "PagePool"]


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free."""


class PagePool:
    """A free list of the pages of a cache. Page 0 is reserved for padding, and never handed out.

    It hands out *allocated* pages. Which of them are used, and by which tokens, the device alone
    knows (see ``stage``).

    Parameters
    ----------
    num_pages : int
        Number of pages, page 0 included; at least 1.
    page_size : int
        Tokens a page, at least 1.

    Examples
    --------
    >>> pages = PagePool(4, page_size=16)
    >>> pages.allocate(2)
    [1, 2]
    >>> pages.free([1])
    >>> pages.num_free
    2
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages: expected at least 1, got {num_pages}")
        if page_size < 1:
            raise ValueError(f"page_size: expected at least 1, got {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack with the lowest page on top.
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_free = [False] + [True] * (num_pages - 1)

    @property
    def num_free(self) -> int:
        """Number of pages that `allocate` can hand out."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` pages.

        Raises
        ------
        OutOfPagesError
            Fewer are free; none is handed out then.
        """
        if count < 0:
            raise ValueError(f"count: expected at least 0, got {count}")
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} pages asked for, {len(self._free)} of {self.num_pages - 1} are free"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back.

        Raises
        ------
        ValueError
            A page isn't one that is handed out: page 0, one out of range, one that is free
            already, or one given twice. None is taken back then.
        """
        pages = list(pages)
        for page in pages:
            if not 0 < page < self.num_pages:
                raise ValueError(f"page {page}: expected 1 .. {self.num_pages - 1}")
            if self._is_free[page]:
                raise ValueError(f"page {page} is free already")
        if len(set(pages)) < len(pages):
            raise ValueError(f"a page is given twice: {pages}")
        for page in pages:
            self._is_free[page] = True
        self._free.extend(reversed(pages))

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)
