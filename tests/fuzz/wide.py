"""Tensors that claim a dtype but hold float64, for formulas that are written in the dtypes of their operands.

A formula on them gives exact outputs, because only what it stores in 16 bits and reads again is rounded. Inside
`noise`, every operation also errs by a random sign times what an operation of the claimed dtype may err by. The
outputs then scatter about the exact ones as far as a sound computation may miss them, cancellation included.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

FP32, FP64 = torch.float32, torch.float64
# Errors of one operation, in ulps of the claimed dtype: of one by element (kernels divide and take roots
# approximately), and of a sum, relative to the sum of the magnitudes (the order of its additions is free).
ELEMENT_ULPS, SUM_ULPS = 2, 8

_generators: list[torch.Generator] = []  # of the open `noise` block


@contextlib.contextmanager
def noise(seed: int, device: str) -> Iterator[None]:
    _generators.append(torch.Generator(device).manual_seed(seed))
    try:
        yield
    finally:
        _generators.pop()


class Wide(Tensor):
    """inner is the value in float64. A result in 16 bits is rounded when an operation reads it, not when it is made:
    outputs stay exact."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, dtype: torch.dtype):
        made = Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        wide = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Wide)]
        dtype = kwargs.get("dtype") or functools.reduce(torch.promote_types, [each.dtype for each in wide])
        if kwargs.get("dtype"):
            kwargs["dtype"] = FP64
        moves = func.is_view or func is torch.ops.aten.clone.default
        args, kwargs = tree_map(_inner if moves else _rounded, (args, kwargs))
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or result.dtype != FP64:
            return result
        if _generators and not moves and func is not torch.ops.aten._to_copy.default:
            result = _with_errors(func, args, kwargs, result, dtype)
        return Wide(result, dtype)


def _inner(each):
    return each.inner if isinstance(each, Wide) else each


def _rounded(each):
    if not isinstance(each, Wide):
        return each
    return each.inner if each.dtype in (FP32, FP64) else each.inner.to(each.dtype).double()


def _with_errors(func, args, kwargs, result: Tensor, dtype: torch.dtype) -> Tensor:
    """As the dtype that 16-bit operands are computed in, or the claimed one, may give it: its range too."""
    kind = FP64 if dtype == FP64 else FP32
    info = torch.finfo(kind)
    signs = torch.rand(result.shape, generator=_generators[-1], device=result.device) < 0.5
    if func.overloadpacket in (torch.ops.aten.sum, torch.ops.aten.mean):
        error = func(args[0].abs(), *args[1:], **kwargs) * (SUM_ULPS * info.eps)
    else:
        error = result.abs() * (ELEMENT_ULPS * info.eps)
    error = error + info.smallest_normal  # kernels may flush smaller numbers to zero
    return torch.where(signs, result + error, result - error).to(kind).double()


def to_wide(tensor: Tensor) -> Wide:
    return Wide(tensor.double(), tensor.dtype)
