"""specmeta: sequence metadata of speculative decoding, updated on the device.

How many drafts were accepted is known only on the GPU, yet lengths, positions, page lists and write
slots of the next step depend on it. The operations here read the counts on the device and update
all of it in one launch, without a host synchronisation.
"""

from pathlib import Path as _Path

from specmeta.status import Status

__all__ = [
    "BatchMetadata",
    "Status",
    "accept_greedy",
    "accept_sampled",
    "advance",
    "check",
    "count_sampled",
    "draft_lists",
    "draft_step",
    "get_include",
    "get_library",
    "inspect",
    "keep_last",
    "locate_sampled",
    "map_slots",
    "stage",
    "workspace",
]

__version__ = "0.1.0"

try:
    from specmeta import checking
    from specmeta.batch import BatchMetadata
    from specmeta.checking import check
    from specmeta.display import inspect
    from specmeta.ops import (
        accept_greedy,
        accept_sampled,
        advance,
        count_sampled,
        draft_lists,
        draft_step,
        keep_last,
        locate_sampled,
        map_slots,
        stage,
        workspace,
    )
except ImportError as error:
    # Where torch is missing there is still specmeta.cupy, and where the library is, `python -m
    # specmeta doctor` must be able to say so; every other use raises the error.
    _error = error
    if error.name == "torch":
        text = "torch is missing: pip install torch (specmeta.cupy works without)"
        _error = ImportError(f"specmeta: {text}", name="torch")

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise _error
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
else:
    checking.check_process()


def get_include() -> str:
    """Return the directory of ``specmeta.h``."""
    return str(_Path(__file__).with_name("include"))


def get_library() -> str:
    """Return the path of ``libspecmeta_c.so``, the operations without torch and Python."""
    return str(_Path(__file__).with_name("libspecmeta_c.so"))
