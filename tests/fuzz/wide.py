"""Tensors that claim a dtype but hold float64, for formulas that are written in the dtypes of their operands.

`passes` computes a formula on them again and again. The first pass is exact, but for what the formula stores in fewer
digits and reads again. In each other pass one operation errs, by a random sign for each element times what such an
operation of the claimed dtype may err by. A sound computation misses the exact outputs by the sum of what the passes
miss them by, cancellation included; no errors cancel each other by chance. A stored number near the middle of two of
its dtype may be rounded to either: two more passes read all of them from the ends of what they may be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

FP32, FP64 = torch.float32, torch.float64
# Errors of one operation, in ulps of the claimed dtype: of one by element (kernels divide and take roots
# approximately), and of a sum, relative to the sum of the magnitudes (the order of its additions is free): equal
# numbers may all be rounded the same way, and 64 of them in a row lose 64 * 2^-25.
ELEMENT_ULPS, SUM_ULPS = 2, 16
Said = tuple[Tensor | None, ...]


@dataclass
class Stored:
    """A number that is rounded when it is read. wide: in the exact pass; band: how far it may be from there."""

    wide: Tensor
    rounded: Tensor
    band: Tensor


@dataclass
class Pass:
    """What goes wrong in a pass. erring: the operation that does; end: -1 or 1, the end of the bands that is read."""

    generator: torch.Generator | None = None
    erring: int | None = None
    end: int = 0
    exact: Pass | None = None
    operations: int = 0  # so far
    reads: int = 0
    stored: list[Stored] = field(default_factory=list)  # of the exact pass, in the order of their reads

    def read(self, wide: Tensor, dtype: torch.dtype) -> Tensor:
        def rounded(numbers: Tensor) -> Tensor:
            return numbers.to(dtype).double()

        if self.exact is None:
            self.stored.append(Stored(wide, rounded(wide), torch.zeros_like(wide)))
            return self.stored[-1].rounded
        known, self.reads = self.exact.stored[self.reads], self.reads + 1
        if self.end:
            return rounded(known.wide + self.end * known.band)
        error = wide - known.wide
        known.band += error.abs().nan_to_num(nan=0.0, posinf=0.0)
        return torch.where(error.isfinite(), known.rounded + error, rounded(wide))  # rounds as the exact pass does


_pass = Pass()


def passes(formula: Callable[[], Said], seed: int, device: str) -> Iterator[Said]:
    """The outputs of a formula of Wide tensors, as float64: of the exact pass, then of all others."""
    exact, generator = Pass(), torch.Generator(device).manual_seed(seed)
    yield _compute(formula, exact)
    for number in range(exact.operations):
        yield _compute(formula, Pass(generator, erring=number, exact=exact))
    for end in (-1, 1) if exact.stored else ():
        yield _compute(formula, Pass(generator, end=end, exact=exact))


def _compute(formula: Callable[[], Said], how: Pass) -> Said:
    global _pass
    _pass = how
    return formula()


class Wide(Tensor):
    """inner is the value in float64. Results with fewer digits than they were computed in are `stored`: rounded when an
    operation reads them, not when they are made, so that outputs stay exact."""

    inner: Tensor
    stored: bool

    @staticmethod
    def __new__(cls, inner: Tensor, dtype: torch.dtype, stored: bool = False):
        made = Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=dtype, device=inner.device)
        made.inner, made.stored = inner, stored
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        wide = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Wide)]
        dtype = kwargs.get("dtype") or functools.reduce(torch.promote_types, [each.dtype for each in wide])
        if kwargs.get("dtype"):
            kwargs["dtype"] = FP64
        moves = func.is_view or func is torch.ops.aten.clone.default
        args, kwargs = tree_map(_inner if moves else _read, (args, kwargs))
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or result.dtype != FP64:
            return result
        if moves:
            return Wide(result, dtype, wide[0].stored)
        if func is torch.ops.aten._to_copy.default:
            return Wide(result, dtype, dtype.itemsize < wide[0].dtype.itemsize)
        return Wide(_computed(func, args, kwargs, result, FP64 if dtype == FP64 else FP32), dtype, dtype.itemsize < 4)


def _inner(each):
    return each.inner if isinstance(each, Wide) else each


def _read(each):
    return _pass.read(each.inner, each.dtype) if isinstance(each, Wide) and each.stored else _inner(each)


def _computed(func, args, kwargs, result: Tensor, kind: torch.dtype) -> Tensor:
    """A result as the operation may give it, in the range of the dtype that it is computed in."""
    number, _pass.operations = _pass.operations, _pass.operations + 1
    if _pass.exact is None:
        return result
    info = torch.finfo(kind)
    if number == _pass.erring:
        signs = torch.rand(result.shape, generator=_pass.generator, device=result.device) < 0.5
        if func.overloadpacket in (torch.ops.aten.sum, torch.ops.aten.mean):
            error = func(args[0].abs(), *args[1:], **kwargs) * (SUM_ULPS * info.eps)
        else:
            error = result.abs() * (ELEMENT_ULPS * info.eps)
        error = error + result.abs().clamp(max=info.smallest_normal)  # kernels may flush smaller numbers to zero
        result = torch.where(signs, result + error, result - error)
    in_range = (result.abs() >= info.smallest_normal) & (result.abs() <= info.max)
    return torch.where(in_range, result, result.to(kind).double())


def to_wide(tensor: Tensor) -> Wide:
    return Wide(tensor.double(), tensor.dtype)
