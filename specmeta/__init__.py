"""specmeta: sequence metadata of speculative decoding, updated on the device.

How many drafts were accepted is known only on the GPU, yet lengths, positions, page lists and
write slots of the next step depend on it. The operations here read the counts on the device and
update all of it in one launch, without a host synchronisation.
"""

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
