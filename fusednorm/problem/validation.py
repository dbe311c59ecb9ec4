"""The checks of a norm's operands. They are made here and nowhere else; all code behind trusts the operands."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..dtypes import FLOAT_DTYPES
from ..forms import CHOICES, PLAIN
from ..operands import Operands, Role, op_mask
from .outputs import shape_of

FLOATS = "float16, bfloat16, float32 or float64"


CHECKS: dict[str, Callable[[Operands], torch.Size]] = {}  # in place of `validate`, of ops that are no norms of rows


def validate(operands: Operands, op: str | None = None) -> torch.Size:
    """Check operands and return x's shape without the normalized dims.

    Raises RuntimeError unless x's shape ends in normalized_shape, weight and bias have that shape, and all tensors are
    strided, float and on one device. In a backward, grad_out and residual_grad must have x's shape, and each statistic
    one element per row and group, in any shape. A modulation has x's shape, but batch dims may be 1, and the last of
    them absent; with an index, all have as many rows of normalized_shape. groups must divide the columns. Raises
    TypeError if an operand is no tensor or normalized_shape no tuple of integers. Messages name `op`, by default the
    operands' op. Only shapes, dtypes, layouts and devices are read, so meta and traced tensors are accepted.
    """
    own = CHECKS.get(operands.op)
    if own:
        return own(operands)
    op, x = op or operands.op, operands.x
    require_strided(op, "x", x)
    normalized_shape = _sizes(op, operands.normalized_shape)
    shape, device = x.shape, x.device
    batch_ndim = len(shape) - len(normalized_shape)
    if not normalized_shape:
        raise RuntimeError(f"{op}: normalized_shape must have at least one dimension, got ()")
    if batch_ndim < 0 or shape[batch_ndim:] != normalized_shape:
        raise RuntimeError(f"{op}: x must end in normalized_shape {normalized_shape}, got shape {tuple(shape)}")
    if x.dtype not in FLOAT_DTYPES:
        require_float(op, "x", x, device)
    batch_shape, table_rows = shape[:batch_ndim], ()
    for at, name, role, optional, is_tensor, needs in _checks(type(operands)):
        value = operands[at]
        if value is None and optional:
            continue
        if needs and getattr(operands, needs) is None:
            raise RuntimeError(f"{op}: {name} must come with {needs}, which is None")
        if role is Role.STATISTIC:
            _require_statistic(op, name, value, math.prod(batch_shape) * operands.groups, device)
        elif role is Role.COUNT:
            _require_place(op, operands, math.prod(normalized_shape))
        elif role is Role.INDEX:
            _require_index(op, value, batch_shape, device)
        elif role is Role.TABLE:
            require_strided(op, name, value)
            table_rows = table_rows or value.shape[:1]
            require(op, name, value, (*table_rows, *normalized_shape), device)
        elif role is Role.MODULATION:
            _require_modulation(op, name, value, batch_shape, normalized_shape, device)
        elif is_tensor:
            wanted = shape_of(role, shape, normalized_shape, width=operands.width - 2 * shape[-1])
            if not _is_as_wanted(value, wanted, device):
                require(op, name, value, wanted, device)
        elif role is Role.DTYPE and value not in FLOAT_DTYPES:
            raise RuntimeError(f"{op}: {name} must be {FLOATS}, got {value}")
        elif role is Role.FORM and type(value) is not type(getattr(PLAIN, name)):
            raise TypeError(f"{op}: {name} must be a {type(getattr(PLAIN, name)).__name__}, got {value!r}")
        elif role is Role.FORM and name in CHOICES and value not in filter(None, CHOICES[name]):
            raise RuntimeError(f"{op}: {name} must be one of {', '.join(filter(None, CHOICES[name]))}, got {value!r}")
        elif name == "groups" and (value < 1 or math.prod(normalized_shape) % value):
            raise RuntimeError(f"{op}: groups must divide the {math.prod(normalized_shape)} columns, got {value}")
        elif role is Role.MASK and len(value) != len(type(operands).outputs):
            raise RuntimeError(f"{op}: {name} must have one flag per output, got {list(op_mask(operands))}")
    return batch_shape


@cache
def _checks(operands_type: Any) -> list[tuple[int, str, Role, bool, bool, str | None]]:
    """(index, name, role, optional, is_tensor, needs) of the operands that are checked after x and normalized_shape, in
    this order."""
    order = list(Role)
    slots = [(at, slot) for at, slot in enumerate(operands_type.slots, 1) if slot.name not in ("x", "normalized_shape")]
    checks = [(at, slot.name, slot.role, slot.optional, slot.role.is_tensor, slot.needs) for at, slot in slots]
    return sorted(checks, key=lambda check: order.index(check[2]))


def _sizes(op: str, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    try:
        if not any(isinstance(size, bool) for size in normalized_shape):
            return tuple(size if isinstance(size, torch.SymInt) else operator.index(size) for size in normalized_shape)
    except TypeError:
        pass
    raise TypeError(f"{op}: normalized_shape must be a tuple of integers, got {normalized_shape!r}")


def require_strided(op: str, name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = f"{'nested, ' * tensor.is_nested}{tensor.layout}"
        raise RuntimeError(f"{op}: {name} must be a strided tensor, got one that is {layout}")


def require_memory(op: str, tensors: Iterable[Tensor | None]) -> None:
    """Raises RuntimeError if the storage of a tensor was freed."""
    for each in tensors:
        if each is not None and each.numel() and not (each.is_meta or each.untyped_storage().data_ptr()):
            raise RuntimeError(f"{op}: all tensors must have memory, got one of shape {tuple(each.shape)} without it")


def _is_as_wanted(tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether `require` would pass, in one step: these checks are much of this package's own host time."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return are_equal(tensor.shape, shape) and tensor.dtype in FLOAT_DTYPES and tensor.device == device


def require(
    op: str, name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device, first: str = "x"
) -> None:
    require_strided(op, name, tensor)
    if not are_equal(tensor.shape, shape):
        raise RuntimeError(f"{op}: {name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    require_float(op, name, tensor, device, first)


def _require_statistic(op: str, name: str, tensor: Tensor, rows: int, device: torch.device) -> None:
    require_strided(op, name, tensor)
    if tensor.numel() == rows and tensor.dtype in FLOAT_DTYPES and tensor.device == device:
        return
    if tensor.numel() != rows:
        raise RuntimeError(f"{op}: {name} must hold one element per row ({rows}), got shape {tuple(tensor.shape)}")
    require_float(op, name, tensor, device)


def _require_place(op: str, operands: Operands, cols: int) -> None:
    """Raises unless x and the gate, rows of one normalized dim, are apart from each other within the width."""
    width, *places = given = operands.width, operands.x_at, operands.gate_at
    if any(isinstance(each, bool) or not isinstance(each, (int, torch.SymInt)) for each in given):
        raise TypeError(f"{op}: width, x_at and gate_at must be integers, got {', '.join(map(repr, given))}")
    if len(operands.normalized_shape) != 1:
        raise RuntimeError(f"{op}: normalized_shape must be one dim, got {tuple(operands.normalized_shape)}")
    first, last = sorted(places)
    if not (0 <= first and first + cols <= last and last + cols <= width):
        rule = f"columns of x and gate, {cols} of each, must be apart and within {width}"
        raise RuntimeError(f"{op}: {rule}, got {places[0]} and {places[1]} as their first ones")


def _require_modulation(
    op: str, name: str, tensor: Tensor, batch_shape: torch.Size, normalized_shape: tuple[int, ...], device: torch.device
) -> None:
    require_strided(op, name, tensor)
    lead = tensor.dim() - len(normalized_shape)
    fits = 0 <= lead <= len(batch_shape) and are_equal(tensor.shape[lead:], normalized_shape)
    if not (fits and all(map(is_one_or, tensor.shape[:lead], batch_shape))):
        wanted = ", ".join([*(f"{size} or 1" for size in batch_shape), *map(str, normalized_shape)])
        got = tuple(tensor.shape)
        raise RuntimeError(f"{op}: {name} must have shape ({wanted}), or the first of its batch dims, got {got}")
    require_float(op, name, tensor, device)


def is_one_or(size: int, of_x: int) -> bool:
    """Whether a dim of this size broadcasts. One that is known only at run time is taken for x's, as torch does."""
    return (isinstance(size, int) and size == 1) or is_equal(size, of_x) or size == 1


def are_equal(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    try:
        return shape == wanted
    except RuntimeError:
        return len(shape) == len(wanted) and all(map(is_equal, shape, wanted))


def is_equal(size: int, wanted: int) -> bool:
    """Whether a size is the wanted one. Where that is known only at run time, it is checked then."""
    try:
        return bool(size == wanted)
    except RuntimeError:
        torch._check(size == wanted)
        return True


def _require_index(op: str, tensor: Tensor, batch_shape: torch.Size, device: torch.device) -> None:
    require_strided(op, "index", tensor)
    if not are_equal(tensor.shape, batch_shape) or tensor.dtype not in (torch.int32, torch.int64):
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise RuntimeError(f"{op}: index must have int32 or int64 of x's batch shape {tuple(batch_shape)}, got {got}")
    if tensor.device != device:
        raise RuntimeError(f"{op}: index must be on {device} as x is, got {tensor.device}")


def require_float(op: str, name: str, tensor: Tensor, device: torch.device, first: str = "x") -> None:
    if tensor.dtype not in FLOAT_DTYPES:
        raise RuntimeError(f"{op}: {name} must be {FLOATS}, got {tensor.dtype}")
    if tensor.device != device:
        raise RuntimeError(f"{op}: {name} must be on {device} as {first} is, got {tensor.device}")
