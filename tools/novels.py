"""The training text of ``austen``: six public-domain novels by Jane Austen.

The text comes from the data of the R package ``janeaustenr`` as Debian ships it
(``r-cran-janeaustenr``). That package keeps each novel as a character vector, one element a
printed line, in an R lazy-load database: ``data/Rdata.rdx`` is a compressed index of name to
(offset, length), and ``data/Rdata.rdb`` holds the records, each a 4-byte big-endian length
followed by a zlib stream of one serialised R object.
"""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path

import rdata
import torch
from transformers import PreTrainedTokenizerBase

NOVELS = (
    "sensesensibility",
    "prideprejudice",
    "mansfieldpark",
    "emma",
    "northangerabbey",
    "persuasion",
)
HELD_OUT_FRACTION = 0.05
# Where the package's folder is, below that to which Debian's package is unpacked as `deb`.
LIBRARY = Path("deb/usr/lib/R/site-library/janeaustenr")


def read_lines(library: Path, novel: str) -> list[str]:
    """Read one novel's printed lines.

    Parameters
    ----------
    library : Path
        The unpacked R package: the folder ``janeaustenr`` with ``data/Rdata.rdx`` in it.
    novel : str
        A name out of `NOVELS`.

    Returns
    -------
    list of str
        The lines, without line ends.
    """
    index_path, records_path = library / "data" / "Rdata.rdx", library / "data" / "Rdata.rdb"
    if not index_path.is_file():
        raise FileNotFoundError(
            f"{index_path} not found: unpack Debian's r-cran-janeaustenr there "
            "(apt-get download r-cran-janeaustenr; dpkg-deb -x r-cran-janeaustenr_*.deb FOLDER) "
            "or name its janeaustenr folder with --novels"
        )
    index = _parse(gzip.decompress(index_path.read_bytes()))["variables"]
    if novel not in index:
        raise KeyError(f"{index_path}: no variable {novel!r}; it has {sorted(map(str, index))}")
    offset, length = (int(value) for value in index[novel])
    with records_path.open("rb") as file:
        file.seek(offset)
        record = file.read(length)
    payload = zlib.decompress(record[4:])
    expected = int.from_bytes(record[:4], "big")
    if len(payload) != expected:
        raise ValueError(f"{records_path}: {novel}: expected {expected} bytes, got {len(payload)}")
    return [str(line) for line in _parse(payload)]


def paragraphs(lines: list[str]) -> list[str]:
    """Join printed lines into paragraphs of running prose.

    The joining removes line wraps, runs of spaces and the underscores that mark emphasis, none
    of which a model of 2.6 million parameters can predict.
    """
    blocks = re.split(r"\n\s*\n", "\n".join(lines).replace("_", ""))
    return [text for block in blocks if (text := " ".join(block.split()))]


def load_novel(library: Path, novel: str) -> tuple[str, str]:
    """Return a novel's training text and its held-out text (its end), cut between paragraphs."""
    parts = paragraphs(read_lines(library, novel))
    # The package appends a modern editor's note to this one novel; it isn't the author's text.
    if "A NOTE ON THE TEXT" in parts:
        parts = parts[: parts.index("A NOTE ON THE TEXT")]
    limit = (1 - HELD_OUT_FRACTION) * sum(map(len, parts))
    length = 0
    for count, part in enumerate(parts):
        length += len(part)
        if length > limit:
            return "\n\n".join(parts[:count]), "\n\n".join(parts[count:])
    raise ValueError(f"{novel} is empty")


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> torch.Tensor:
    """Encode `texts`, each preceded by the end-of-text token, into one int64 vector."""
    ids: list[int] = []
    for text in texts:
        ids.append(tokenizer.bos_token_id)
        # A whole novel is longer than what the model can read at once, and is meant to be.
        ids.extend(tokenizer.encode(text, verbose=False))
    return torch.tensor(ids)


def _parse(data: bytes) -> object:
    return rdata.conversion.convert(rdata.parser.parse_data(data, extension=".rds"))
