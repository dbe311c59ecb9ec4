"""The programs that are kept, by what a call looks like.

The first call of a kind is checked, planned and built the long way (ops.py, launch.py) and leaves a program. Later
calls of this kind are launched from it, without checks and planning, whatever their row counts are. The key of a kind
holds everything else that checks, plans and builds depend on. Programs are kept only of calls on a GPU whose tensors
are all read in place.

Here calls run in Python. native.py copies programs to C++, which runs them by the same rules (csrc/prepared.h).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .. import margin
from ..operands import BackwardOperands, ForwardOperands, Operands, Outputs
from ..planner.forcing import asked_variants
from ..planner.norm_problem import ALIGNMENT
from ..problem import BackwardCall, ForwardCall, row_view
from .program import Bound, Extent, Program

KEPT_KINDS = 4096  # if there would be more, all programs are dropped
KEPT_SHAPES = 64  # of x, for each kind; if there would be more, all shapes of the kind are forgotten
PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))


@dataclass(eq=False, slots=True)
class Kind:
    """The programs of one key."""

    normalized_shape: tuple[int, ...]
    programs: list[Program] = field(default_factory=list)  # for different row counts
    by_shape: dict[torch.Size, Bound] = field(default_factory=dict)  # shapes of x that were seen lately

    def bind(self, shape: torch.Size) -> Bound | None:
        """The program for x of this shape; None if the shape is wrong, or there is no program for as many rows."""
        sizes = tuple(shape)  # a slice of a torch.Size takes three times as long
        batch_ndim = len(sizes) - len(self.normalized_shape)
        if batch_ndim < 0 or sizes[batch_ndim:] != self.normalized_shape:
            return None
        rows = math.prod(sizes[:batch_ndim])
        program = self.find(rows)
        if program is None:
            return None
        bound = program.bind(sizes, rows)
        self.keep(shape, bound)
        return bound

    def keep(self, shape: torch.Size, bound: Bound) -> None:
        if len(self.by_shape) >= KEPT_SHAPES:
            self.by_shape.clear()
        self.by_shape[shape] = bound

    def find(self, rows: int) -> Program | None:
        for each in self.programs:
            if each.rows_above < rows <= each.most_rows:
                return each
        return None


class Miss(NamedTuple):
    """A call for which no program was found, by which the program that it leaves is kept."""

    key: tuple
    addresses: list[int]
    margin: margin.Sms  # in force before the key was made


First = Callable[[Operands, Miss | None], tuple[Outputs | None, Program | None]]

EXTENTS = {
    ForwardOperands: (Extent.X, Extent.STATISTIC, Extent.STATISTIC),
    BackwardOperands: (Extent.X, Extent.PARAMETER, Extent.PARAMETER),
}

_kinds: dict[tuple, Kind] = {}


class NotPrepared(RuntimeError):
    """No program is kept for such a call. Never reaches the user."""


def run(operands: Operands, first: First | None = None) -> tuple[Outputs | None, Program | None]:
    """(the outputs by a program, the program). If there is none for these operands, what `first` returns: it gets the
    operands, and a Miss if a program for such operands can be kept. The caller has made sure that no mode and no
    transform is active."""
    sms, key, bound = margin.sms, None, None
    try:
        key, addresses = _look(operands)
        kind = _kinds.get(key)
        if kind is not None:
            shape = operands.x.shape
            bound = kind.by_shape.get(shape) or kind.bind(shape)
            if bound is not None and len(addresses) != 3 and not _fit(operands, shape, bound.numbers[0]):
                bound = None
    except (RuntimeError, TypeError, AttributeError):  # arguments of other types, or tensors without shape or memory
        bound = None
    if bound is not None:
        outputs = bound.launch(addresses)
        if outputs is not None:
            return outputs, bound.program
    if first is None:
        return None, None
    return first(operands, None if key is None else Miss(key, addresses, sms))


def _fit(operands: BackwardOperands, shape: torch.Size, rows: int) -> bool:
    """Whether all tensors have as many rows as an x of this shape. The key does not say so."""
    _, grad_out, _, _, mean, rstd, _, _, _, residual_grad, _, _ = operands
    # The numel of a tensor would answer for a nested one, too; that of its shape raises.
    if grad_out.shape != shape or rstd.shape.numel() != rows or (mean is not None and mean.shape.numel() != rows):
        return False
    return residual_grad is None or residual_grad.shape == shape


def _look(operands: Operands) -> tuple[tuple, list[int]]:
    """(key, addresses of the tensors in the order of operands.tensors, 0 for an absent one). Raises NotPrepared, or
    RuntimeError for a tensor that has no memory, such as a transform's. Of one tensor after the other, and without a
    loop, because this is most of a call's own host time."""
    if type(operands) is BackwardOperands:
        norm, grad_out, x, normalized_shape, mean, rstd, weight, bias, mask, residual_grad, dx_dtype, _ = operands
        ndim = len(normalized_shape)
        key = (
            norm, tuple(normalized_shape), tuple(mask), dx_dtype, asked_variants(), margin.sms,
            _rows(grad_out, ndim), _rows(x, ndim), mean if mean is None else _statistic(mean), _statistic(rstd),
            weight if weight is None else _parameter(weight), bias if bias is None else _parameter(bias),
            residual_grad if residual_grad is None else _rows(residual_grad, residual_grad.ndim),
        )  # fmt: skip
        addresses = [
            grad_out.data_ptr(), x.data_ptr(), 0 if mean is None else mean.data_ptr(), rstd.data_ptr(),
            0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
            0 if residual_grad is None else residual_grad.data_ptr(),
        ]  # fmt: skip
        a, b, c, d, e, f, g = addresses
        bits = a | b | c | d | e | f | g
        has_memory = a and b and d and (c or mean is None) and (e or weight is None) and (g or residual_grad is None)
    else:
        norm, x, normalized_shape, weight, bias, eps, wants_statistics = operands
        if eps is not None and (type(eps) is not float or eps != eps):  # a NaN is equal to none
            raise NotPrepared
        key = (
            norm, tuple(normalized_shape), eps, wants_statistics, asked_variants(), margin.sms,
            _rows(x, len(normalized_shape)), weight if weight is None else _parameter(weight),
            bias if bias is None else _parameter(bias),
        )  # fmt: skip
        addresses = [
            x.data_ptr(), 0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        ]  # fmt: skip
        a, b, c = addresses
        bits, has_memory = a | b | c, a and (b or weight is None) and (c or bias is None)
    for size in normalized_shape:
        if type(size) is not int:  # 8.0 and True are equal to integers
            raise NotPrepared
    if not has_memory:
        raise NotPrepared
    if bits % ALIGNMENT:
        key += (*[address % ALIGNMENT == 0 for address in addresses],)
    return key, addresses


def _rows(tensor: Tensor, normalized_ndim: int) -> tuple:
    """The key's part for a tensor that is read by rows. Its shape is none: `_fit` and `Kind.bind` check it."""
    if type(tensor) not in PLAIN_TYPES or tensor.is_neg():
        raise NotPrepared
    if tensor.is_contiguous():
        return tensor.dtype, tensor.get_device()
    batch_ndim = tensor.ndim - normalized_ndim
    view = row_view(tensor, batch_ndim) if batch_ndim >= 0 else None
    if view is None:
        raise NotPrepared
    return tensor.dtype, tensor.get_device(), *view[1:]


def _statistic(tensor: Tensor) -> tuple:
    """The key's part for a tensor of one element per row, in any shape but at one stride."""
    if type(tensor) not in PLAIN_TYPES or tensor.is_neg():
        raise NotPrepared
    if tensor.is_contiguous():
        return tensor.dtype, tensor.get_device()
    view = row_view(tensor, tensor.ndim)
    if view is None or view.inner_rows != 1:
        raise NotPrepared
    return tensor.dtype, tensor.get_device(), view.outer_stride


def _parameter(tensor: Tensor) -> tuple:
    """The key's part for a contiguous tensor of one shape."""
    if type(tensor) not in PLAIN_TYPES or tensor.is_neg() or not tensor.is_contiguous():
        raise NotPrepared
    return tensor.dtype, tensor.get_device(), tensor.shape


def keep(miss: Miss, call: ForwardCall | BackwardCall, bound: Bound) -> Program | None:
    """Keep the program of a call for later calls with the same key, if all tensors were read in place and no thread has
    changed the margin meanwhile. Returns the program that is kept."""
    program = bound.program
    if miss.margin is not margin.sms or not program.rows_above < call.rows <= program.most_rows:
        return None
    for tensor, address in zip(call.tensors, miss.addresses, strict=True):
        if tensor is not None and tensor.data_ptr() != address:
            return None  # a copy was made for the call
    return keep_by(miss.key, call.shape, bound)


def keep_by(key: tuple, shape: torch.Size, bound: Bound) -> Program:
    """Keep a program under a key, unless there is one for as many rows. Returns the program that is kept."""
    kind = _kinds.get(key)
    if kind is None:
        if len(_kinds) >= KEPT_KINDS:
            _kinds.clear()
        kind = _kinds[key] = Kind(bound.program.normalized_shape)
    known = kind.find(bound.numbers[0])
    if known is None:
        kind.programs.append(bound.program)
        kind.keep(shape, bound)
    return known or bound.program


def kind_of(key: tuple) -> Kind | None:
    """The programs that are kept under a key."""
    return _kinds.get(key)


def forget() -> None:
    """Drop all programs."""
    _kinds.clear()
