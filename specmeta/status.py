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
