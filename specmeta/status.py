"""The bits of ``status``."""

from __future__ import annotations

from enum import IntFlag


class Status(IntFlag):
    """Faults that an operation found in values (contract, rule 5).

    They are OR-ed into ``status`` and stay there until the caller clears it.
    """

    OVERFLOW = 1
    """Past the capacity, the token buffer, ``kv_indices`` or the ledger."""
    UNDERFLOW = 2
    """A length below the row's own query tokens."""
    BAD_COUNT = 4
    """A count or length that cannot be."""
    BAD_SLOT = 8
    """A slot or index outside its table."""
    BAD_PAGE = 16
    """A negative id among the used pages."""
    BAD_INDPTR = 32
    """A decreasing or out-of-range pair of offsets."""

    @classmethod
    def words(cls, word: int) -> str:
        """Return the names of a status word's bits, and what no name stands for as a number.

        Examples
        --------
        >>> Status.words(5), Status.words(0), Status.words(64 + 8)
        ('OVERFLOW, BAD_COUNT', '-', 'BAD_SLOT, 64')
        """
        bits = list(cls)
        rest = word & ~sum(bits)
        names = [bit.name or "" for bit in bits if word & bit]
        return ", ".join([*names, str(rest)] if rest else names) or "-"
