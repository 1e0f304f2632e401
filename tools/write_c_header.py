"""Writes the operations into specmeta/include/specmeta.h: python -m tools.write_c_header"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from specmeta import _library

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "specmeta/include/specmeta.h"
MARK = (
    "/* From here on written by tools/write_c_header.py from the library's table: do not edit. */\n"
)
TAIL = "\n#ifdef __cplusplus\n}\n#endif\n\n#endif\n"


def summaries() -> dict[str, str]:
    """The first line of each operation's docstring."""
    tree = ast.parse((ROOT / "specmeta/ops.py").read_text())
    functions = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    return {node.name: (ast.get_docstring(node) or "").splitlines()[0] for node in functions}


def _member(argument: _library.Argument) -> str:
    required = ", required" if argument.required else ""
    if argument.kind == "tensor":
        dtype = "int32 or int64" if argument.dtype == "either" else argument.dtype
        shape = "S+1, or B without row_to_slot" if argument.shape == "Z" else argument.shape
        written = ", written" if argument.written else ""
        return f"  specmeta_tensor {argument.name}; /* {dtype} [{shape}]{required}{written} */"
    if argument.kind == "bool":
        return f"  int64_t {argument.name}; /* 0 or 1 */"
    limits = f"{argument.low} to {argument.high}"
    if argument.low == -(2**63):
        limits = "any"
    elif argument.high == 2**63 - 1:
        limits = f"from {argument.low}"
    none = ", or SPECMETA_NONE" if argument.default == "None" else ""
    return f"  int64_t {argument.name}; /* {limits}{none}{required} */"


def operation(name: str, arguments: list[_library.Argument], summary: str) -> str:
    """The struct, the initialiser and the function of one operation."""
    defaults = {"None": "SPECMETA_NONE", "False": "0", "": "0"}
    numbers = [
        (a.name, defaults.get(a.default, a.default)) for a in arguments if a.kind != "tensor"
    ]
    begin = f"SPECMETA_API int specmeta_{name}("
    return "\n".join(
        [
            f"\n/* {re.sub(':func:|`', '', summary)} */",
            f"typedef struct specmeta_{name}_args {{",
            "  uint32_t struct_size;",
            "  uint32_t abi_version;",
            *map(_member, arguments),
            f"}} specmeta_{name}_args;",
            "",
            f"static inline specmeta_{name}_args specmeta_{name}_init(void) {{",
            f"  specmeta_{name}_args args;",
            "  memset(&args, 0, sizeof args);",
            "  args.struct_size = (uint32_t)sizeof args;",
            "  args.abi_version = SPECMETA_ABI_VERSION;",
            *(f"  args.{member} = {value};" for member, value in numbers if value != "0"),
            "  return args;",
            "}",
            "",
            f"{begin}const specmeta_{name}_args* args, int32_t device, void* stream,",
            f"{' ' * len(begin)}char* error, size_t error_size) SPECMETA_NOEXCEPT;",
            "",
        ]
    )


def text() -> str:
    """The header with its operations as the library has them."""
    head, mark, _ = HEADER.read_text().partition(MARK)
    lines = summaries()
    written = (operation(name, args, lines[name]) for name, args in _library.schema().items())
    return head + mark + "".join(written) + TAIL


if __name__ == "__main__":
    HEADER.write_text(text())
