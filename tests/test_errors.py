"""What raises: every tensor that cannot be right; nothing is written then."""

from __future__ import annotations

import inspect
import re
from typing import Any

import full_calls
import numpy as np
import pytest
import torch
from torch import Tensor

import specmeta
from specmeta import _library, ops

OPERATIONS = list(full_calls.calls())
SCHEMA = _library.schema()
DTYPES = {
    "int32": {torch.int32},
    "int64": {torch.int64},
    "either": {torch.int32, torch.int64},
    "bool": {torch.bool},
}


def _refused(operation: str, call: dict[str, Any], argument: str, message: str) -> None:
    """Check that the call raises about the argument, and that no tensor has changed."""
    before = {k: v.clone() for k, v in call.items() if isinstance(v, Tensor)}
    pattern = rf"^specmeta\.{operation}: {argument}: expected {message}"
    with pytest.raises(RuntimeError, match=pattern):
        getattr(specmeta, operation)(**call)
    for name, tensor in before.items():
        assert torch.equal(call[name], tensor), name


def _missing(operation: str, call: dict[str, Any], given: str, argument: str) -> None:
    """Check that the call raises about the argument that `given` needs."""
    _refused(operation, call, argument, f"a tensor, since {given} is given, got None$")


def _given(operation: str) -> list[_library.Argument]:
    call = full_calls.calls()[operation]
    return [a for a in SCHEMA[operation] if a.kind == "tensor" and a.name in call]


def _is_by_slot(operation: str) -> bool:
    """Does something beside `status` tell how many slots there are?"""
    return any(a.shape.startswith("S") for a in _given(operation))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_dtypes(operation: str) -> None:
    for argument in _given(operation):
        some = {torch.float32, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool}
        for dtype in some - DTYPES[argument.dtype]:
            call = full_calls.calls()[operation]
            call[argument.name] = call[argument.name].to(dtype)
            name = str(dtype).removeprefix("torch.")
            _refused(operation, call, argument.name, rf"dtype .*, got {name}$")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_shapes(operation: str) -> None:
    for argument in _given(operation):
        call = full_calls.calls()[operation]
        tensor = call[argument.name]
        call[argument.name] = tensor[0]
        _refused(operation, call, argument.name, rf"shape \[{re.escape(argument.shape)}\], got \[")
        alone = ["A", "C", "N", "U", "X"] if _is_by_slot(operation) else ["X", "Z"]
        if argument.shape not in alone:
            call[argument.name] = torch.cat([tensor, tensor, tensor])
            # Where this argument comes first, the next one that disagrees is named.
            with pytest.raises(RuntimeError, match=rf"^specmeta\.{operation}: .*: expected "):
                getattr(specmeta, operation)(**call)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_layouts(operation: str) -> None:
    for argument in _given(operation):
        call = full_calls.calls()[operation]
        tensor = call[argument.name]
        if tensor.shape[-1] < 2:
            continue
        spread = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]
        call[argument.name] = spread.copy_(tensor)
        expected = "a contiguous tensor" if tensor.dim() == 1 else "rows that are contiguous"
        _refused(operation, call, argument.name, rf"{expected}.*, got strides \[")
        if tensor.dim() == 2 and argument.written:
            call[argument.name] = tensor[:1].expand(tensor.shape[0], -1)
            _refused(operation, call, argument.name, "rows that are contiguous and do not overlap")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_tables_may_be_slices(operation: str) -> None:
    call, sliced = full_calls.calls()[operation], full_calls.calls()[operation]
    for name, tensor in list(sliced.items()):
        if isinstance(tensor, Tensor) and tensor.dim() == 2:
            wide = torch.full((tensor.shape[0], tensor.shape[1] + 3), 77, dtype=tensor.dtype)
            sliced[name] = wide[:, 1:-2].copy_(tensor)
    getattr(specmeta, operation)(**call)
    getattr(specmeta, operation)(**sliced)
    for name, tensor in call.items():
        if isinstance(tensor, Tensor):
            assert torch.equal(sliced[name], tensor), name


@pytest.mark.parametrize("operation", ["advance", "draft_step"])
@pytest.mark.parametrize("name", ["seq_lens", "position_ids"])
def test_an_output_is_left_out_where_its_input_is_updated(operation: str, name: str) -> None:
    call = full_calls.calls()[operation]
    call[f"{name}_out"] = call[name]
    expected = f"memory of its own, or to be left out: {name} is updated in place then"
    _refused(operation, call, f"{name}_out", f"{expected}, got bytes shared with {name}$")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_shared_memory(operation: str) -> None:
    """Every pair of a written tensor and another one: one element shared is too much."""
    given = _given(operation)
    pairs = 0
    for a in given:
        for b in given:
            if a.name == b.name or not a.written:
                continue
            call = full_calls.calls()[operation]
            memory = torch.zeros(4096, dtype=torch.uint8)
            first, second = call[a.name], call[b.name]
            size = first.numel() * first.element_size()
            shared = memory[:size].view(first.dtype).view(first.shape).copy_(first)
            align = second.element_size()
            start = (size - 1) // align * align
            end = start + second.numel() * second.element_size()
            call[b.name] = memory[start:end].view(second.dtype).view(second.shape).copy_(second)
            call[a.name] = shared
            names = f"({a.name}|{b.name})"
            _refused(
                operation, call, names, rf"memory of its own, .*got bytes shared with {names}$"
            )
            pairs += 1
    assert pairs > 20


@pytest.mark.parametrize("operation", OPERATIONS)
def test_integers(operation: str) -> None:
    for argument in SCHEMA[operation]:
        if argument.kind != "int" or argument.name == "num_rows_int":
            continue
        for value in (argument.low - 1, argument.high + 1):
            if not -(2**63) <= value < 2**63:
                continue
            call = full_calls.calls()[operation] | {argument.name: value}
            limits = re.escape(f"[{argument.low}, {argument.high}]")
            _refused(operation, call, argument.name, rf"an integer in {limits}, got {value}$")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_no_tensor(operation: str) -> None:
    """Torch's own error is the whole schema."""
    for argument in _given(operation):
        expected = "a tensor or an integer" if argument.name == "num_rows" else "a tensor"
        hint = "" if argument.name == "num_rows" else r" \(specmeta\.cupy takes arrays\)"
        call = full_calls.calls()[operation]
        array = call[argument.name].numpy()
        for wrong, got in (([1], "list"), (1.5, "float"), (array, f"ndarray{hint}")):
            call[argument.name] = wrong
            _refused(operation, call, argument.name, f"{expected}, got {got}$")
        if argument.required and argument.name != "num_accepted":
            call[argument.name] = None
            _refused(operation, call, argument.name, f"{expected}, got NoneType$")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_no_integer(operation: str) -> None:
    for argument in SCHEMA[operation]:
        if argument.kind == "tensor":
            continue
        call = full_calls.calls()[operation]
        name, expected = argument.name, "a bool" if argument.kind == "bool" else "an integer"
        if name == "num_rows_int":
            name, expected = "num_rows", "a tensor or an integer"
        wrongs: list[tuple[Any, str]] = [([1], "list"), ("1", "str")]
        if name != "num_rows":
            # One element is one too many: it would be read back, and a capture would keep it.
            wrongs += [(torch.zeros(shape).int(), "Tensor") for shape in ((2,), (1,), ())]
            wrongs += [(torch.ones(()), "Tensor"), (np.array(1), "ndarray")]
        if argument.kind == "int":  # a number is taken for a bool
            wrongs += [(1.5, "float"), (np.float32(1), "float32"), (True, "bool")]
            if argument.default != "None":
                wrongs.append((None, "NoneType"))
        for wrong, got in wrongs:
            _refused(operation, call | {name: wrong}, name, f"{expected}, got {got}$")
        if argument.kind == "int":
            limits = re.escape(f"[{argument.low}, {argument.high}]")
            message = rf"an integer in {limits}, got {2**63}$"
            _refused(operation, call | {name: 2**63}, name, message)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_several_numbers(operation: str) -> None:
    """Alone, so that they are compared with the default, which NumPy's arrays can't be."""
    needed = {a.name for a in SCHEMA[operation] if a.required} | {"num_accepted"}
    call = {k: v for k, v in full_calls.calls()[operation].items() if k in needed}
    for argument in SCHEMA[operation]:
        if argument.kind == "tensor" or argument.name == "num_rows_int":
            continue
        expected = "a bool" if argument.kind == "bool" else "an integer"
        for several, got in ((np.zeros(2, int), "ndarray"), (torch.zeros(2).int(), "Tensor")):
            wrong = call | {argument.name: several}
            _refused(operation, wrong, argument.name, f"{expected}, got {got}$")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_torch_takes_for_a_number_is_not_blamed(operation: str) -> None:
    """Where another argument is wrong."""
    for argument in SCHEMA[operation]:
        if argument.kind == "tensor":
            continue
        name = argument.name.removesuffix("_int")
        value = np.bool_(True) if argument.kind == "bool" else np.int64(1)
        call = full_calls.calls()[operation] | {name: value}
        _refused(operation, call | {"status": torch.zeros(9)}, "status", "dtype int32, got float32")


def _without(operation: str, *names: str) -> dict[str, Any]:
    return {k: v for k, v in full_calls.calls()[operation].items() if k not in names}


PAGED = ["advance", "stage", "map_slots", "draft_step"]
ACCEPT = ["accept_greedy", "accept_sampled"]


@pytest.mark.parametrize("operation", PAGED)
def test_page_tables(operation: str) -> None:
    ragged = {
        "alloc_pages": torch.arange(8, dtype=torch.int32),
        "alloc_indptr": torch.tensor([0, 2, 4, 6, 8], dtype=torch.int32),
    }
    call = full_calls.calls()[operation]
    _refused(operation, call | ragged, "alloc_pages", "None, since page_table is given")
    bare = _without(operation, "page_table", "num_pages")
    getattr(specmeta, operation)(**bare, **ragged)
    for name in ragged:
        other = next(n for n in ragged if n != name)
        _refused(operation, bare | {name: ragged[name]}, other, f"a tensor, since {name} is given")
    _refused(
        operation,
        bare | ragged | {"num_pages": call["num_pages"]},
        "page_table",
        "a tensor, since num_pages is given, got None",
    )
    paged = {"kv_indices", "block_table", "slot_mapping"} & call.keys()
    for name in paged:
        alone = {k: v for k, v in bare.items() if k not in paged - {name}}
        expected = rf"a tensor \(or alloc_pages\), since {name} is given, got None"
        _refused(operation, alone, "page_table", expected)
    if "kv_indices" in paged:
        short = call | {"pad_seq_len": 1, "kv_indices": torch.zeros(2, dtype=torch.int32)}
        _refused(operation, short, "kv_indices", "at least B = 3 entries with pad_seq_len 1, got 2")


@pytest.mark.parametrize("operation", PAGED)
def test_slot_mapping_is_no_shorter_than_the_tokens(operation: str) -> None:
    call = full_calls.calls()[operation]
    tokens = len(call["position_ids"])
    for size in (tokens - 1, tokens, tokens + 5):
        call["slot_mapping"] = torch.zeros(size, dtype=torch.int64)
        if size < tokens:
            message = f"at least T = {tokens} entries, as position_ids has, got {size}$"
            _refused(operation, call, "slot_mapping", message)
        else:
            getattr(specmeta, operation)(**call)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_and_slots(operation: str) -> None:
    call = full_calls.calls()[operation]
    if _is_by_slot(operation):
        _refused(
            operation,
            _without(operation, "row_to_slot", "status"),
            r"\w+",
            r"4 rows, as many as \w+ has slots, unless row_to_slot is given, got 3",
        )
        _refused(
            operation,
            call | {"status": torch.zeros(3, dtype=torch.int32)},
            "status",
            r"shape \[S\+1\] = \[5\], got \[3\]",
        )
    else:
        wrong = _without(operation, "row_to_slot") | {"status": torch.zeros(5, dtype=torch.int32)}
        _refused(operation, wrong, "status", r"shape \[B\] .*3.*, got \[5\]$")
    op = getattr(torch.ops.specmeta, operation)
    arguments = dict(call, num_rows_int=2)
    with pytest.raises(RuntimeError, match="num_rows: expected a tensor or an integer, got both"):
        op(**arguments)


@pytest.mark.parametrize("operation", [op for op in OPERATIONS if op != "keep_last"])
def test_workspaces(operation: str) -> None:
    call = full_calls.calls()[operation]
    steps = call.get("num_steps", 1)
    needed = specmeta.workspace(3, num_steps=steps).numel()
    _refused(
        operation,
        call | {"workspace": specmeta.workspace(2)},
        "workspace",
        f"at least {needed} entries for B = 3, got {specmeta.workspace(2).numel()}",
    )
    part = torch.zeros(needed + 1, dtype=torch.int64)[1:]
    _refused(operation, call | {"workspace": part}, "workspace", "memory on a boundary of 32 bytes")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"rows": None}, "rows: expected an integer, got None"),
        ({"rows": "a"}, "rows: expected an integer, got 'a'"),
        ({"rows": torch.tensor(3)}, r"rows: expected an integer, got tensor\(3\)"),
        ({"rows": -1}, r"rows: expected an integer in \[0, 2147483646\], got -1"),
        ({"rows": 3, "num_steps": None}, "num_steps: expected an integer, got None"),
        ({"rows": 3, "device": None}, "device: expected a torch.device or its name, got None"),
    ],
)
def test_workspaces_that_cannot_be(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        specmeta.workspace(**call)


@pytest.mark.parametrize("operation", ["advance", *ACCEPT, "map_slots", "draft_step"])
def test_fewer_tokens_than_rows(operation: str) -> None:
    call = _without(operation, "cu_seqlens_q")
    by_token = [a.name for a in SCHEMA[operation] if a.shape == "T" and a.name in call]
    for name in by_token:
        call[name] = call[name][:2]
    expected = "at least B = 3 entries, one a row without cu_seqlens_q, got 2"
    _refused(operation, call, by_token[0], expected)


@pytest.mark.parametrize("operation", ACCEPT)
def test_companions_of_accept(operation: str) -> None:
    state = {"committed_lens", "known_lens", "tokens"}
    for name in state:
        _refused(
            operation, _without(operation, name), name, "a tensor, since .* is given, got None"
        )
    _missing(operation, _without(operation, "seq_lens"), "committed_lens", "seq_lens")
    bare = _without(operation, "seq_lens", "num_drafts", *state)
    _missing(operation, bare, "seq_lens_out", "seq_lens")
    _missing(operation, _without(operation, *state), "num_drafts", "committed_lens")
    _missing(operation, _without(operation, "position_ids"), "last_position_ids", "position_ids")
    empty = torch.zeros(3, 0, dtype=torch.int64)
    call = full_calls.calls()[operation] | {"accepted_tokens": empty}
    if operation == "accept_sampled":
        _missing(operation, _without(operation, "input_ids"), "draft_input_ids", "input_ids")
        call["sampled_tokens"] = empty
    _refused(operation, call, "accepted_tokens", "a width of at least 1, got 0")


def test_companions_of_advance() -> None:
    for name, value in (("max_accepted", 2), ("count_index", torch.zeros(3).int())):
        call = _without("advance", "max_accepted", "count_index") | {"num_accepted": None}
        _missing("advance", call | {name: value}, name, "num_accepted")


def test_companions_of_stage() -> None:
    lens = ("query_lens", "known_lens", "num_drafts", "num_draft_tokens")
    _refused(
        "stage", _without("stage", *lens), "query_lens", "a tensor, unless known_lens is given"
    )
    for name in ("num_drafts", "num_draft_tokens"):
        other = next(n for n in lens[2:] if n != name)
        _missing("stage", _without("stage", "known_lens", other), name, "known_lens")
    _missing("stage", _without("stage", "tokens"), "input_ids", "tokens")


def test_companions_of_draft_step() -> None:
    for name in ("tokens", "known_lens", "num_drafts"):
        _refused("draft_step", _without("draft_step", name), name, "a tensor, since .* is given")
    _missing("draft_step", _without("draft_step", "draft_tokens"), "tokens", "draft_tokens")
    state = ("draft_tokens", "tokens", "known_lens", "num_drafts")
    _missing("draft_step", _without("draft_step", *state), "input_ids", "draft_tokens")
    call = _without("draft_step", "position_ids")
    call["position_ids_out"] = torch.zeros(3, dtype=torch.int64)
    _missing("draft_step", call, "position_ids_out", "position_ids")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("device", ["cuda"])
def test_devices(operation: str, device: str) -> None:
    for argument in _given(operation):
        call = {
            k: v.to(device) if isinstance(v, Tensor) else v
            for k, v in full_calls.calls()[operation].items()
        }
        call[argument.name] = call[argument.name].cpu()
        with pytest.raises(
            RuntimeError, match=rf"^specmeta\.{operation}: .*: expected a tensor on "
        ):
            getattr(specmeta, operation)(**call)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_table_is_the_wrapper(operation: str) -> None:
    """Every argument of the operator is one of the Python function, and is documented there."""
    function = getattr(specmeta, operation)
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    assert sorted(names) == sorted(a.name for a in SCHEMA[operation] if a.name != "num_rows_int")
    for argument in SCHEMA[operation]:
        if argument.kind != "tensor" or argument.shape in ("1", "Z"):
            continue
        dtype = "int32 or int64" if argument.dtype == "either" else argument.dtype
        shape = argument.shape.replace(",", ", ")
        if operation in ACCEPT:
            shape = shape.replace("B, W", "B, K+1")
        if operation == "draft_lists":
            shape = shape.replace("T", "B*K")
        line = re.search(rf"^ *{argument.name} : (.*)$", function.__doc__, re.MULTILINE)
        assert line, argument.name
        assert line[1].startswith(f"{dtype} [{shape}]"), line[0]
        assert (", written" in line[1] or ", updated" in line[1]) == argument.written, line[0]


def _numbers(operation: str) -> list[_library.Argument]:
    return [a for a in SCHEMA[operation] if a.kind != "tensor" and a.name != "num_rows_int"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_call_is_in_the_order_of_the_table(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ops, f"_{operation}", lambda *arguments: calls.append(arguments))
    names = [a.name for a in SCHEMA[operation]]
    given: dict[str, Any] = {name: name for name in names if name != "num_rows_int"}
    given |= {
        a.name: 100 + i if a.kind == "int" else True for i, a in enumerate(_numbers(operation))
    }
    for num_rows in (7, torch.zeros(1), None):
        getattr(specmeta, operation)(**given | {"num_rows": num_rows})
        is_int = isinstance(num_rows, int)
        by_type = {
            "num_rows": None if is_int else num_rows,
            "num_rows_int": num_rows if is_int else None,
        }
        want = [(given | by_type)[name] for name in names]
        assert all(a is b for a, b in zip(calls.pop(), want, strict=True))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_leaves_out_defaults_only(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's last arguments aren't passed where none is given, and are where one is."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ops, f"_{operation}", lambda *arguments: calls.append(arguments))
    schema = getattr(torch.ops.specmeta, operation).default._schema
    required: dict[str, Any] = {a.name: a.name for a in SCHEMA[operation] if a.required}
    required |= {a.name: 7 for a in _numbers(operation) if a.required}
    needed = required | {"num_accepted": None} if operation == "advance" else required
    getattr(specmeta, operation)(**needed)
    short = len(calls.pop())
    rest = schema.arguments[short:]
    parameters = inspect.signature(getattr(specmeta, operation)).parameters
    for argument in rest:
        if argument.name == "num_rows_int":
            name, value = "num_rows", 1
        else:
            name, value = argument.name, 7
            assert parameters[name].default == argument.default_value
        getattr(specmeta, operation)(**needed, **{name: value})
        passed = dict(zip((a.name for a in schema.arguments), calls.pop(), strict=True))
        assert passed[argument.name] == value


@pytest.mark.parametrize("operation", OPERATIONS)
def test_tensors_are_let_go(operation: str) -> None:
    """Also where the call raises."""
    call = full_calls.calls()[operation]
    tensors: list[Any] = [value for value in call.values() if isinstance(value, Tensor)]
    before = [tensor._use_count() for tensor in tensors]
    getattr(specmeta, operation)(**call)
    wrongs: list[dict[str, Tensor]] = [{"status": torch.zeros(9)}]
    if "workspace" in call:
        wrongs.append({"workspace": specmeta.workspace(0)})
    for wrong in wrongs:
        with pytest.raises(RuntimeError, match="expected"):
            getattr(specmeta, operation)(**call | wrong)
    assert [tensor._use_count() for tensor in tensors] == before


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_freed_storage_is_not_an_absent_tensor(operation: str) -> None:
    for argument in _given(operation):
        for size in (0, 4):
            call = full_calls.calls()[operation]
            tensor = call[argument.name] = call[argument.name].clone()
            needed = tensor.numel() * tensor.element_size()
            if needed <= size:
                continue
            tensor.untyped_storage().resize_(size)
            pattern = (
                rf"{argument.name}: expected a storage of at least {needed} bytes, got {size}$"
            )
            with pytest.raises(RuntimeError, match=pattern):
                getattr(specmeta, operation)(**call)
