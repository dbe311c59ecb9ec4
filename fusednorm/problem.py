"""Checks a call, flattens it to rows x cols and describes it as a value that the planner can hash.

The operands of a norm are checked here and nowhere else; all code behind this module trusts them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from .operands import BackwardOperands, ForwardOperands, Operands
from .planner.norm_problem import ALIGNMENT, FLOAT_DTYPES, NormProblem, accumulation_dtype


class RowView(NamedTuple):
    """A tensor as rows x cols, read in place. Row r starts at element

        (r // inner_rows) * outer_stride + (r % inner_rows) * inner_stride

    and its cols elements are adjacent. Strides are in elements. inner_rows is 1 if one stride is enough.
    """

    tensor: Tensor
    inner_rows: int
    outer_stride: int
    inner_stride: int


def row_view(tensor: Tensor, batch_ndim: int) -> RowView | None:
    """View `tensor` as rows (its first `batch_ndim` dims) x cols (the others). None if only a copy would do."""
    shape, strides = tensor.shape, tensor.stride()
    cols = math.prod(shape[batch_ndim:])
    if tensor.is_contiguous():
        return RowView(tensor, 1, cols, 0)
    expected = 1
    for size, stride in zip(reversed(shape[batch_ndim:]), reversed(strides[batch_ndim:]), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    levels: list[tuple[int, int]] = []  # (size, stride), innermost first; dims that one stride covers are merged
    for size, stride in zip(reversed(shape[:batch_ndim]), reversed(strides[:batch_ndim]), strict=True):
        if size == 1:
            continue
        if levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        else:
            levels.append((size, stride))
    if len(levels) > 2:
        return None
    if len(levels) == 2:
        return RowView(tensor, levels[0][0], levels[1][1], levels[0][1])
    return RowView(tensor, 1, levels[0][1] if levels else cols, 0)


def is_tma_aligned(view: RowView, cols: int) -> bool:
    """Whether each row starts and ends at a multiple of 16 bytes, as a TMA descriptor demands."""
    row_units = cols | view.outer_stride | view.inner_stride
    return (view.tensor.data_ptr() | row_units * view.tensor.element_size()) % ALIGNMENT == 0


# Calls are NamedTuples because one is built per op call, and a frozen dataclass takes over three times as long.
class ForwardCall(NamedTuple):
    """A checked forward call. weight and bias are contiguous. x is read in place if its strides allow it."""

    problem: NormProblem
    rows: int
    x: RowView
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    shape: torch.Size  # of y
    stats_shape: tuple[int, ...]  # of mean and rstd: [*batch, 1, ...], as ATen shapes them
    normalized_shape: tuple[int, ...]  # of weight and bias
    wants_statistics: bool = True  # whether to write mean and rstd, for a backward

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of ForwardOperands.tensors."""
        return self.x.tensor, self.weight, self.bias


class BackwardCall(NamedTuple):
    """A checked backward call. mean (None for RMSNorm) and rstd are 1-D of length rows, any stride, any float dtype."""

    problem: NormProblem
    rows: int
    grad_out: RowView
    x: RowView
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor | None
    residual_grad: Tensor | None  # contiguous
    dx_dtype: torch.dtype
    shape: torch.Size  # of dx
    normalized_shape: tuple[int, ...]  # of dw and db

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of BackwardOperands.tensors. The bias is not read."""
        return self.grad_out.tensor, self.x.tensor, self.mean, self.rstd, self.weight, None, self.residual_grad


def resolve_eps(eps: float | None, x_dtype: torch.dtype) -> float:
    """eps as ATen reads it: None means the machine epsilon of the accumulation dtype."""
    return torch.finfo(accumulation_dtype(x_dtype)).eps if eps is None else eps


def check_forward(operands: ForwardOperands) -> ForwardCall:
    """Check the operands of a forward and flatten them to rows x cols.

    Raises as `validate` does; RuntimeError if a LayerNorm's eps is None, TypeError if eps is no number. Copies x only
    if two strides do not describe its rows.
    """
    batch_shape = validate(operands)
    norm, x, _, weight, bias, eps, wants_statistics = operands
    if norm == "layer" and eps is None:
        raise RuntimeError("layer_norm_fwd: eps must be a number, got None")
    if eps is not None and not isinstance(eps, (Real, Tensor)):
        raise TypeError(f"{norm}_norm_fwd: eps must be a number, got {eps!r}")
    normalized_shape = x.shape[len(batch_shape) :]  # the same sizes as torch's own integers
    cols = math.prod(normalized_shape)
    view = _row_view_or_copy(x, len(batch_shape), cols)
    problem = _problem(
        norm,
        "forward",
        cols,
        x.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        nested_rows=view.inner_rows != 1,
        tma_aligned=is_tma_aligned(view, cols),
    )
    return ForwardCall(
        problem,
        math.prod(batch_shape),
        view,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        float(resolve_eps(eps, x.dtype)),
        x.shape,
        stats_shape(batch_shape, normalized_shape),
        tuple(normalized_shape),
        wants_statistics,
    )


def check_backward(operands: BackwardOperands) -> BackwardCall:
    """Check the operands of a backward and flatten them to rows x cols.

    The gradient of a parameter that is None is not wanted, whatever the mask says. Raises RuntimeError as `validate`
    does. Copies grad_out and x only if two strides do not describe their rows, residual_grad only if it is not
    contiguous.
    """
    batch_shape = validate(operands)
    norm, grad_out, x, _, mean, rstd, weight, bias, output_mask, residual_grad, dx_dtype, _ = operands
    normalized_shape = x.shape[len(batch_shape) :]  # the same sizes as torch's own integers
    batch_ndim, cols = len(batch_shape), math.prod(normalized_shape)
    grad_view, view = _row_view_or_copy(grad_out, batch_ndim, cols), _row_view_or_copy(x, batch_ndim, cols)
    wants_dx, wants_dw, wants_db = output_mask
    residual = residual_grad.contiguous() if wants_dx and residual_grad is not None else None
    problem = _problem(
        norm,
        "backward",
        cols,
        x.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        grad_out.dtype,
        None if residual is None else residual.dtype,
        wants_dx,
        wants_dw and weight is not None,
        wants_db and bias is not None,
        nested_rows=view.inner_rows != 1 or grad_view.inner_rows != 1,
        tma_aligned=is_tma_aligned(view, cols) and is_tma_aligned(grad_view, cols),
    )
    return BackwardCall(
        problem,
        rstd.numel(),
        grad_view,
        view,
        None if mean is None else mean.reshape(-1),
        rstd.reshape(-1),
        None if weight is None else weight.contiguous(),
        residual,
        dx_dtype or x.dtype,
        x.shape,
        tuple(normalized_shape),
    )


def validate(operands: Operands, op: str | None = None) -> torch.Size:
    """Check operands and return x's shape without the normalized dims.

    Raises RuntimeError unless x's shape ends in normalized_shape, weight and bias have that shape, and all tensors are
    strided, float and on one device. In a backward, grad_out and residual_grad must have x's shape, and each statistic
    one element per row, in any shape. Raises TypeError if an operand is no tensor or normalized_shape no tuple of
    integers. Messages name `op`, by default the operands' op. Only shapes, dtypes, layouts and devices are read, so
    meta and traced tensors are accepted.
    """
    op = op or operands.op
    batch_shape = _validate_operands(op, operands.x, operands.normalized_shape, operands.weight, operands.bias)
    if isinstance(operands, BackwardOperands):
        _validate_gradients(op, operands, math.prod(batch_shape))
    return batch_shape


def _validate_gradients(op: str, operands: BackwardOperands, rows: int) -> None:
    shape, device = operands.x.shape, operands.x.device
    if not _is_as_wanted(operands.grad_out, shape, device):
        _require(op, "grad_out", operands.grad_out, shape, device)
    if operands.mean is not None:
        _require_statistic(op, "mean", operands.mean, rows, device)
    _require_statistic(op, "rstd", operands.rstd, rows, device)
    if operands.residual_grad is not None:
        _require(op, "residual_grad", operands.residual_grad, shape, device)
    if operands.dx_dtype not in (None, *FLOAT_DTYPES):
        raise RuntimeError(f"{op}: dx_dtype must be float16, bfloat16, float32 or float64, got {operands.dx_dtype}")
    mask = operands.output_mask
    if len(mask) != 3:
        flags = list(mask) if operands.norm == "layer" else list(mask[:-1])  # without that of dbias
        raise RuntimeError(f"{op}: output_mask must have one flag per output, got {flags}")


def stats_shape(batch_shape: Sequence[int], normalized_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of mean and rstd, [*batch, 1, ...], as ATen shapes them."""
    return (*batch_shape, *(1 for _ in normalized_shape))


def _validate_operands(
    op: str, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> torch.Size:
    require_strided(op, "x", x)
    normalized_shape = _sizes(op, normalized_shape)
    shape, device = x.shape, x.device
    batch_ndim = len(shape) - len(normalized_shape)
    if not normalized_shape:
        raise RuntimeError(f"{op}: normalized_shape must have at least one dimension, got ()")
    if batch_ndim < 0 or shape[batch_ndim:] != normalized_shape:
        raise RuntimeError(f"{op}: x must end in normalized_shape {normalized_shape}, got shape {tuple(shape)}")
    if x.dtype not in FLOAT_DTYPES:
        _require_float(op, "x", x, device)
    if weight is not None and not _is_as_wanted(weight, normalized_shape, device):
        _require(op, "weight", weight, normalized_shape, device)
    if bias is not None and not _is_as_wanted(bias, normalized_shape, device):
        _require(op, "bias", bias, normalized_shape, device)
    return shape[:batch_ndim]


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
    """Whether `_require` would pass, in one step: these checks are much of this package's own host time."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return tensor.shape == shape and tensor.dtype in FLOAT_DTYPES and tensor.device == device


def _require(op: str, name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    require_strided(op, name, tensor)
    if tensor.shape != shape:
        raise RuntimeError(f"{op}: {name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    _require_float(op, name, tensor, device)


def _require_statistic(op: str, name: str, tensor: Tensor, rows: int, device: torch.device) -> None:
    require_strided(op, name, tensor)
    if tensor.numel() == rows and tensor.dtype in FLOAT_DTYPES and tensor.device == device:
        return
    if tensor.numel() != rows:
        raise RuntimeError(f"{op}: {name} must hold one element per row ({rows}), got shape {tuple(tensor.shape)}")
    _require_float(op, name, tensor, device)


def _require_float(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.dtype not in FLOAT_DTYPES:
        raise RuntimeError(f"{op}: {name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
    if tensor.device != device:
        raise RuntimeError(f"{op}: {name} must be on {device} as x is, got {tensor.device}")


def _row_view_or_copy(tensor: Tensor, batch_ndim: int, cols: int) -> RowView:
    if tensor.is_contiguous():
        return RowView(tensor, 1, cols, 0)
    return row_view(tensor, batch_ndim) or RowView(tensor.contiguous(), 1, cols, 0)


# NormProblem(...) from a cache: a lookup is cheaper than building the value again.
_problem = lru_cache(maxsize=4096)(NormProblem)
