"""Case files: one call of an operation, with every result, as JSON.

A case is an object of

- ``op``: the operation;
- ``args``: its arguments by name. A list is a tensor, a number a number (``num_rows`` is a tensor
  of one). What is updated in place stands here as it was before;
- ``expect``: what each output holds afterwards. An output that ``args`` doesn't have held nothing
  that matters before, and ``status`` was clear;
- ``name`` and ``why``: for the reader.

Tensors whose dtype the operation leaves open are int64, unless ``dtypes`` (by argument) says
int32. ``gaps`` (by argument) says how many elements of other memory stand between the rows of a
two-dimensional tensor, 0 where it says nothing. ``args`` may also name sizes, which are checked:
``num_tokens``, ``kv_capacity``, ``max_pages``, ``max_draft_len``.

Examples
--------
>>> from specmeta import cases
>>> case = cases.parse(
...     {"op": "advance", "args": {"num_accepted": [1], "seq_lens": [32], "page_size": 32},
...      "expect": {"seq_lens": [33]}},
... )
>>> case.operator, case.args["seq_lens"], case.expect["seq_lens"].tolist()
('advance', tensor([32]), [33])
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from specmeta import _library, reference
from specmeta.testing import POISON, gap_of, poisoned, poisoned_like

__all__ = [
    "Case",
    "CaseError",
    "arguments_of",
    "load_case",
    "parse",
    "read_json",
    "run_reference",
    "save_case",
]

_MOST_GAPS = 2**26  # elements between the rows of a tensor, in all
FIELDS = ("name", "why", "op", "args", "expect", "dtypes", "gaps")
_DTYPES = {"int32": torch.int32, "int64": torch.int64}
# The sizes that a case may name: the outputs that have them, and how many entries more.
_SIZES = {
    "num_tokens": (("position_ids", "slot_mapping", "input_ids"), 0),
    "kv_capacity": (("kv_indices",), 0),
    "max_pages": (("block_table",), 0),
    "max_draft_len": (("accepted_tokens",), 1),
}


class CaseError(ValueError):
    """A case that can't be read; the message names the file and the field."""


@dataclass(frozen=True)
class Case:
    """One call of an operation.

    Attributes
    ----------
    operator : str
    args : dict
        Its arguments by name: tensors on the CPU, and Python numbers.
    expect : dict
        What its outputs hold afterwards, by name.
    name, why : str
    """

    operator: str
    args: dict[str, Any]
    expect: dict[str, Tensor]
    name: str = ""
    why: str = ""

    @property
    def numbers(self) -> dict[str, Any]:
        """The arguments that are no tensors, by name."""
        return {name: value for name, value in self.args.items() if not isinstance(value, Tensor)}

    def tensors(self) -> dict[str, Tensor]:
        """Return those that are, and poison for each other output; `status` is clear, it adds."""
        made = {name: value for name, value in self.args.items() if isinstance(value, Tensor)}
        for name, wanted in self.expect.items():
            if name not in made:
                made[name] = torch.zeros_like(wanted) if name == "status" else poisoned_like(wanted)
        return made


@cache
def arguments_of(operator: str) -> dict[str, _library.Argument]:
    """Return an operation's arguments by name, as the library's own table has them.

    There is no ``workspace``, whose contents are nobody's business, and ``num_rows`` stands for
    the operator's ``num_rows_int`` too. Empty where there is no such operation.
    """
    return {
        argument.name: argument
        for argument in _library.schema().get(operator, [])
        if argument.name not in ("workspace", "num_rows_int")
    }


def load_case(path: str | Path, *, index_dtype: torch.dtype = torch.int64) -> Case:
    """Read a case file.

    Parameters
    ----------
    path
    index_dtype
        The dtype of tensors that may be int32 or int64 and for which the file says nothing.

    Raises
    ------
    CaseError
        There is no such file, it is no JSON, or a field of it is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CaseError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CaseError(f"{path}: expected JSON: {error}") from error
    return parse(read_json(text, str(path)), source=str(path), index_dtype=index_dtype)


def read_json(text: str, source: str) -> Any:
    """Read JSON in which no object has a name twice.

    Parameters
    ----------
    text
    source
        What a message calls it.

    Raises
    ------
    CaseError
        It is none.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in pairs:
            if name in made:
                raise CaseError(f"{source}: {name}: given a second time")
            made[name] = value
        return made

    try:
        return json.loads(text, object_pairs_hook=unique)
    except CaseError:
        raise
    except (ValueError, RecursionError) as error:
        raise CaseError(f"{source}: expected JSON: {error}") from error


def parse(data: Any, *, source: str = "case", index_dtype: torch.dtype = torch.int64) -> Case:
    """Make a case of what a file holds.

    Parameters
    ----------
    data
        See above. ``expect`` may be missing: nothing is then known of the results.
    source
        What a message calls it.
    index_dtype
        See :func:`load_case`.

    Raises
    ------
    CaseError
        A field is wrong.
    """
    return _Parser(data, source, index_dtype).case()


class _Parser:
    """Reads the fields of a case, one after the other."""

    def __init__(self, data: Any, source: str, index_dtype: torch.dtype) -> None:
        self._source = source
        self._index_dtype = index_dtype
        if not isinstance(data, dict):
            self._fail("the file", "an object", data)
        for field in data:
            if field not in FIELDS:
                self._fail("a field", f"one of {', '.join(FIELDS)}", field)
        for field in ("args", "expect", "dtypes", "gaps"):
            if not isinstance(data.get(field, {}), dict):
                self._fail(field, "an object", data[field])
        for field in ("name", "why"):
            if not isinstance(data.get(field, ""), str):
                self._fail(field, "a text", data[field])
        self._data = data
        operator = data.get("op")
        if operator not in reference.__all__:
            self._fail("op", f"one of {', '.join(reference.__all__)}", operator, reference.__all__)
        self._operator: str = operator
        self._known = arguments_of(self._operator)

    def case(self) -> Case:
        data, known = self._data, self._known
        for field in ("dtypes", "gaps"):
            for name in data.get(field, {}):
                if name not in known:
                    self._fail(field, f"arguments of {self._operator}", name, known)
        expect = {}
        for name, value in data.get("expect", {}).items():
            if name not in known or not known[name].written:
                outputs = [key for key, argument in known.items() if argument.written]
                self._fail("expect", f"outputs of {self._operator}", name, outputs)
            expect[name] = self._tensor(f"expect.{name}", name, value)
        args: dict[str, Any] = {}
        for name, value in data.get("args", {}).items():
            if name in _SIZES:
                self._check_size(name, value, expect)
            elif name not in known:
                self._fail("args", f"arguments of {self._operator}", name, known)
            elif value is not None or known[name].required:
                args[name] = self._argument(name, value)
        for name, argument in known.items():
            if argument.required and name not in args and name not in expect:
                self._fail("args", f"{name}, which {self._operator} needs", "none")
            if name in args and name in expect and args[name].shape != expect[name].shape:
                shape = list(args[name].shape)
                got = list(expect[name].shape)
                self._fail(f"expect.{name}", f"the shape of args.{name}, {shape}", got)
        return Case(
            self._operator,
            _with_counts(self._operator, args),
            expect,
            data.get("name", ""),
            data.get("why", ""),
        )

    def _fail(self, field: str, expected: str, got: object, names: Iterable[str] = ()) -> NoReturn:
        text = repr(got)
        near = get_close_matches(str(got), names, 1)
        raise CaseError(
            f"{self._source}: {field}: expected {expected}, got "
            f"{text[:80]}{'...' * (len(text) > 80)}"
            + "".join(f"; did you mean {name}?" for name in near)
        )

    def _check_size(self, name: str, value: Any, expect: dict[str, Tensor]) -> None:
        size = self._integer(f"args.{name}", value)
        outputs, more = _SIZES[name]
        for output in outputs:
            if output in expect and expect[output].shape[-1] != size + more:
                got = f"{expect[output].shape[-1]}"
                self._fail(f"expect.{output}", f"{name} {size}", got)

    def _argument(self, name: str, value: Any) -> Any:
        kind = self._known[name].kind
        if name == "num_rows" and not isinstance(value, list):
            return self._tensor(f"args.{name}", name, [value])
        if kind == "tensor":
            return self._tensor(f"args.{name}", name, value)
        if kind == "int":
            return self._integer(f"args.{name}", value)
        if not isinstance(value, bool):
            self._fail(f"args.{name}", "true or false", value)
        return value

    def _integer(self, field: str, value: Any, dtype: torch.dtype = torch.int64) -> int:
        if type(value) is not int:
            self._fail(field, "an integer", value)
        if not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max:
            self._fail(field, f"an {str(dtype).removeprefix('torch.')}", value)
        return value

    def _dtype(self, name: str) -> torch.dtype:
        named = self._data.get("dtypes", {}).get(name)
        if named is not None and named not in list(_DTYPES):
            self._fail(f"dtypes.{name}", "int32 or int64", named)
        free = _DTYPES.get(named, self._index_dtype)
        return {**_DTYPES, "either": free, "bool": torch.bool}[self._known[name].dtype]

    def _tensor(self, field: str, name: str, value: Any) -> Tensor:
        shape, dtype = self._known[name].shape, self._dtype(name)
        if not isinstance(value, list):
            self._fail(field, f"a list [{shape}]", value)
        is_table = "," in shape
        for row in value if is_table else [value]:
            if not isinstance(row, list):
                self._fail(field, f"a list of lists [{shape}]", value)
            if is_table and len(row) != len(value[0]):
                self._fail(field, f"lists of the same length, {len(value[0])}", row)
            for element in row:
                if dtype != torch.bool:
                    self._integer(field, element, dtype)
                elif not isinstance(element, bool):
                    self._fail(field, "true or false", element)
        gap = self._data.get("gaps", {}).get(name, 0)
        if type(gap) is not int or not 0 <= gap * len(value) <= _MOST_GAPS:
            self._fail(f"gaps.{name}", f"0 to {_MOST_GAPS} elements in all", gap)
        made = torch.tensor(value, dtype=dtype)
        if not is_table:
            return made
        width = len(value[0]) if value else 0
        spaced = poisoned(len(value), width, dtype=dtype, gap=gap)
        return spaced.copy_(made.reshape(spaced.shape))


def save_case(
    directory: str | Path, operator: str, args: Mapping[str, Any], *, name: str, why: str
) -> Path:
    """Write the case file of a call, with what the reference makes of it as ``expect``.

    Parameters
    ----------
    directory
        Made where it is missing.
    operator
    args
        The call's arguments by name, as they were before: tensors on the CPU (they keep their
        values) and Python numbers; None where absent.
    name
        Also the file's name. Another file of that name stays: the new one gets a number behind it.
    why
        What the case shows.

    Returns
    -------
    Path
    """
    known = arguments_of(operator)
    args = {key: value for key, value in args.items() if value is not None and key in known}
    written = [key for key, value in args.items() if known[key].written]
    expect = _results(operator, args, written)
    # What an output held before is said only where it matters.
    stale: dict[str, Tensor] = {}
    for key in written:
        fill = 0 if key == "status" else POISON
        tried = {**stale, key: torch.full_like(args[key], fill)}
        results = _results(operator, {**args, **tried}, written)
        if all(torch.equal(results[k], expect[k]) for k in written):
            stale = tried
    tensors = {key: value for key, value in args.items() if isinstance(value, Tensor)}
    plain = {key: value.tolist() if key in tensors else value for key, value in args.items()}
    fields: dict[str, dict[str, Any]] = {
        "args": {key: value for key, value in plain.items() if key not in stale},
        "expect": {key: expect[key].tolist() for key in written},
        "dtypes": {
            key: "int32"
            for key, value in tensors.items()
            if known[key].dtype == "either" and value.dtype == torch.int32
        },
        "gaps": {key: gap for key, value in tensors.items() if (gap := gap_of(value))},
    }
    head = {"name": name, "why": why, "op": operator}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for field, entries in fields.items():
        if entries:
            inner = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
            lines.append(f" {json.dumps(field)}: {{\n" + ",\n".join(inner) + "\n }")
    Path(directory).mkdir(parents=True, exist_ok=True)
    return _write_new(Path(directory), name, "{\n" + ",\n".join(lines) + "\n}\n")


def run_reference(operator: str, args: Mapping[str, Any]) -> None:
    """Run an operation's reference on arguments by name, which it updates."""
    getattr(reference, operator)(**_with_counts(operator, args))


def _with_counts(operator: str, args: Mapping[str, Any]) -> dict[str, Any]:
    # advance has to be told that there are none.
    return {**({"num_accepted": None} if operator == "advance" else {}), **args}


def _results(operator: str, args: Mapping[str, Any], written: list[str]) -> dict[str, Tensor]:
    copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in args.items()}
    run_reference(operator, copies)
    return {key: copies[key] for key in written}


def _write_new(directory: Path, name: str, text: str) -> Path:
    number = 1
    while True:
        path = directory / (f"{name}.json" if number == 1 else f"{name}_{number}.json")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return path
        except FileExistsError:
            number += 1
