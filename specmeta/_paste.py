"""Calls as people paste them: a case file, its arguments alone, or printed tensors."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from specmeta.cases import Case, CaseError, parse

__all__ = ["read_call"]

_LINE = re.compile(r"\s*([A-Za-z_]\w*)\s*[=:]\s*(.*)", re.DOTALL)
# What a case has beside its arguments.
_ASIDE = ("name", "why", "op", "expect", "dtypes", "gaps")


def read_call(text: str, *, source: str, operator: str | None = None) -> Case:
    """Make a case of a text.

    Parameters
    ----------
    text
        A JSON object: a case (:mod:`specmeta.cases`), or one whose arguments stand at the top
        level. Or lines ``name = value``, ``name: value``, where a value is a number, a list,
        ``tensor(...)`` or ``array(...)``, as Python prints them, on as many lines as it needs.
    source
        What a message calls it.
    operator
        The operation, where the text has no ``op``.

    Raises
    ------
    CaseError
        It can't be read; the message names the field.
    """
    if text.lstrip().startswith(("{", "[")):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CaseError(f"{source}: expected JSON: {error}") from error
        if not isinstance(data, dict):
            return parse(data, source=source)  # says what it should be
        if "args" not in data:
            data["args"] = {name: data.pop(name) for name in [*data] if name not in _ASIDE}
    else:
        data = _read_lines(text, source)
    if operator is not None and data.setdefault("op", operator) != operator:
        raise CaseError(f"{source}: op: expected {operator} (--op), got {data['op']!r}")
    if "op" not in data:
        raise CaseError(f"{source}: op: missing: write `op = advance`, or say --op advance")
    return parse(data, source=source)


def _read_lines(text: str, source: str) -> dict[str, Any]:
    fields: dict[str, str] = {}
    name, depth = "", 0  # brackets of the last value that are open
    for number, line in enumerate(text.splitlines(), 1):
        if depth > 0:
            fields[name] += f"\n{line}"
        elif not line.strip() or line.lstrip().startswith(("#", "```")):
            continue
        else:
            match = _LINE.fullmatch(line)
            if match is None:
                raise CaseError(
                    f"{source}: line {number}: expected `name = value`, got {line.strip()[:60]!r}"
                )
            name = match[1]
            if name in fields:
                raise CaseError(f"{source}: {name}: given a second time in line {number}")
            fields[name] = match[2]
        depth = sum((c in "([{") - (c in ")]}") for c in fields[name])
    data: dict[str, Any] = {"args": {}, "dtypes": {}}
    if "op" in fields:
        data["op"] = fields.pop("op").strip("\"', ")
    for name, value in fields.items():
        data["args"][name], dtype = _read_value(value, f"{source}: {name}")
        if dtype in ("int32", "int64"):
            data["dtypes"][name] = dtype
    return data


def _read_value(text: str, place: str) -> tuple[Any, str | None]:
    """Return a value and the dtype that it names."""
    if "..." in text:
        raise CaseError(
            f"{place}: shortened (...) when it was printed: print .tolist(), or call "
            "torch.set_printoptions(threshold=10**9) first"
        )
    dtype = None
    try:
        node: ast.expr = ast.parse(text.strip().rstrip(","), mode="eval").body
        if isinstance(node, ast.Call) and _last_name(node.func) in ("tensor", "array"):
            dtypes = (_last_name(word.value) for word in node.keywords if word.arg == "dtype")
            dtype = next(dtypes, None)
            (node,) = node.args
        return ast.literal_eval(node), dtype
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        shown = " ".join(text.split())
        raise CaseError(
            f"{place}: expected a number, a list, tensor(...) or array(...), got "
            f"{shown[:60]!r}{'...' * (len(shown) > 60)}"
        ) from error


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]
