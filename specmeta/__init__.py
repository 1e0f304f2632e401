"""specmeta: sequence metadata of speculative decoding, updated on the device.

How many drafts were accepted is known only on the GPU, yet lengths, positions, page lists and write
slots of the next step depend on it. The operations here read the counts on the device and update
all of it in one launch, without a host synchronisation.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specmeta.batch import BatchMetadata
    from specmeta.ops import accept_greedy, accept_sampled, advance, draft_step, stage
    from specmeta.status import Status

__all__ = [
    "BatchMetadata",
    "Status",
    "accept_greedy",
    "accept_sampled",
    "advance",
    "draft_step",
    "stage",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The library is loaded with the first name that needs it, so that `python -m specmeta doctor`
    # can say what is wrong where it cannot be loaded.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"BatchMetadata": "batch", "Status": "status"}.get(name, "ops")
    return getattr(import_module(f"{__name__}.{module}"), name)
