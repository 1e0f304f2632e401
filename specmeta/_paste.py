"""Calls as people paste them: a case file, its arguments alone, or printed tensors."""

from __future__ import annotations

import ast
import re
from typing import Any

from specmeta.cases import FIELDS, Case, CaseError, parse, read_json

__all__ = ["read_call"]

_LINE = re.compile(r"\s*([A-Za-z_]\w*)\s*[=:]\s*(.*)", re.DOTALL)
# A scalar that prints its type: np.int64(3), tensor(3, device='cuda:0'), np.True_.
_SCALAR = re.compile(
    r"(?:np\.)?(?:u?int\d+|bool_|tensor)\(\s*(-?\d+|True|False)\s*(?:,[^()]*)?\)"
    r"|np\.(True|False)_"
)


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
        data = read_json(text, source)
        if not isinstance(data, dict):
            return parse(data, source=source)  # says what it should be
        if "args" not in data:
            data["args"] = {name: data.pop(name) for name in [*data] if name not in FIELDS}
    else:
        data = _read_lines(text, source)
    if operator is not None and data.setdefault("op", operator) != operator:
        raise CaseError(f"{source}: op: expected {operator} (--op), got {data['op']!r}")
    if "op" not in data:
        raise CaseError(f"{source}: op: missing: write `op = advance`, or say --op advance")
    return parse(data, source=source)


def _read_lines(text: str, source: str) -> dict[str, Any]:
    fields: dict[str, list[str]] = {}
    name, depth = "", 0  # brackets of the last value that are open
    for number, whole in enumerate(text.splitlines(), 1):
        line = whole.partition("#")[0]
        if depth > 0:
            fields[name].append(line)
        elif not line.strip() or line.lstrip().startswith("```"):
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
            fields[name] = [match[2]]
        last = fields[name][-1]
        depth += sum(map(last.count, "([{")) - sum(map(last.count, ")]}"))
    data: dict[str, Any] = {"args": {}, "dtypes": {}}
    if "op" in fields:
        data["op"] = "".join(fields.pop("op")).strip("\"', ")
    for name, lines in fields.items():
        data["args"][name], dtype = _read_value("\n".join(lines), f"{source}: {name}")
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
        plain = _SCALAR.sub(lambda match: match[1] or match[2], text.strip().rstrip(","))
        node: ast.expr = ast.parse(plain, mode="eval").body
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
