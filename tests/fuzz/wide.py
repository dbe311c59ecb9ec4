"""Tensors that claim a dtype but hold float64, for formulas that are written in the dtypes of their operands.

`passes` computes a formula on them again and again. The first pass is exact, but for what the formula stores in fewer
digits and reads again. In each other pass one operation errs, by a random sign for each element times what such an
operation of the claimed dtype may err by. A sound computation misses the exact outputs by the sum of what the passes
miss them by, cancellation included; no errors cancel each other by chance. A stored number near the middle of two of
its dtype may be rounded to either: further passes read all of them from the ends of what they may be, and round in
turn what is computed from them. The last pass rounds the result of every operation, as code in the claimed dtypes does.

The exact pass records what it does. The others repeat what their error reaches, several passes at once, in a dim before
the others: a formula of few elements takes as long as its operations take to start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

FP32, FP64 = torch.float32, torch.float64
# Errors of one operation, in ulps of the claimed dtype: of one by element (kernels divide and take roots
# approximately), and of a sum, relative to the sum of the magnitudes (the order of its additions is free): equal
# numbers may all be rounded the same way, and 64 of them in a row lose 64 * 2^-25.
ELEMENT_ULPS, SUM_ULPS = 2, 16
AT_ONCE = 2**22  # elements of a tensor of several passes
NARROW = 8  # columns at most: errors of one sign may leave no trace in a difference, so other signs are tried, too
FAR = 2.0**20  # from the ends of a dtype's range: no error leads from there beyond them
Said = tuple[Tensor | None, ...]


@dataclass
class Operand:
    """One that is a Wide tensor. dtype: what it is rounded to when it is read, if it is; band: how far it may be from
    its exact value, then."""

    leaf: int  # of the step's arguments
    value: int  # its place in Record.values
    dtype: torch.dtype | None
    band: Tensor | None
    moved: Tensor | float = 0.0  # how far others that were read from an end have moved it
    is_settled: bool = False  # whether the band says so, too

    def rounded(self, wide: Tensor) -> Tensor:
        return wide if self.dtype is None else wide.to(self.dtype).double()


@dataclass
class Step:
    """One operation. kind: the dtype in whose range it is computed; None for one that computes nothing."""

    func: Any
    leaves: list[Any]  # of its arguments, as it read them
    spec: Any
    operands: list[Operand]
    result: int  # of the first result
    kind: torch.dtype | None
    may_leave: Tensor | bool = False  # whether an error may lead results out of that range

    def run(self, given: dict[int, Tensor] | None = None) -> Tensor:
        """The result; of several passes for the leaves that differ between them."""

        def of(*some: Tensor) -> Tensor:
            leaves = list(self.leaves)
            for at, each in zip(given or (), some, strict=True):
                leaves[at] = each
            args, kwargs = tree_unflatten(leaves, self.spec)
            return self.func(*args, **kwargs)

        return torch.vmap(of)(*given.values()) if given else of()

    def erred(self, result: Tensor, signs: Tensor) -> Tensor:
        """The exact result with an error of these signs."""
        info, op = torch.finfo(self.kind), self.func.overloadpacket
        if op in (torch.ops.aten.sum, torch.ops.aten.mean):
            error = self.run_on_magnitudes() * (SUM_ULPS * info.eps)
        elif op is torch.ops.aten.sigmoid:
            of_argument = self.leaves[0].abs() if _has_16_bits(self.leaves[0]) else 0.0  # kernels/rowmath.py: logistic
            error = result.abs() * ((ELEMENT_ULPS + of_argument) * info.eps)
            signs = self._signs_of_an_approximation(signs)
        else:
            error = result.abs() * (ELEMENT_ULPS * info.eps)
        error = error + result.abs().clamp(max=info.smallest_normal)  # kernels may flush smaller numbers to zero
        return torch.where(signs, result + error, result - error)

    def _signs_of_an_approximation(self, signs: Tensor) -> Tensor:
        """Equal arguments err alike, and an approximation errs by one sign over a stretch of arguments: all of them,
        or those beyond one of them."""
        arguments, chance = self.leaves[0], signs.sum()
        if not arguments.numel():
            return signs
        beyond = arguments > arguments.flatten()[chance % arguments.numel()]
        return (beyond & (chance % 4 > 1)) ^ (chance % 2 > 0)

    def run_on_magnitudes(self) -> Tensor:
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        return self.func(args[0].abs(), *args[1:], **kwargs)

    def in_range(self, result: Tensor) -> Tensor:
        if not self.may_leave:
            return result
        info = torch.finfo(self.kind)
        in_range = (result.abs() >= info.smallest_normal) & (result.abs() <= info.max)
        return torch.where(in_range, result, result.to(self.kind).double())


@dataclass
class Record:
    """The exact pass."""

    values: list[Tensor] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def add(self, value: Tensor) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def rounded(self) -> dict[int, Tensor]:
        """The values of the pass in which every operation rounds its exact result, and the next ones read that."""
        spread: dict[int, Tensor] = {}
        for step in self.steps:
            read = [each for each in step.operands if each.value in spread]
            given = {each.leaf: each.rounded(spread[each.value]) for each in read}
            result = step.run(given) if given else self.values[step.result][None]
            if isinstance(result, Tensor):
                spread[step.result] = result.to(step.kind).double() if step.kind else result
            else:
                spread |= dict(enumerate(result, step.result))
        return spread

    def settle(self) -> bool:
        """Widens bands to twice what has moved operands that are read from their ends: a few passes do not show all
        that the other ends of many numbers would do to a row's statistics. Whether there are any."""
        moved = [each for step in self.steps for each in step.operands if isinstance(each.moved, Tensor)]
        for each in moved:
            each.band, each.is_settled = torch.maximum(each.band, 2 * each.moved), True
        return bool(moved)

    def again(self, erring: Sequence[int] = (), generator: Any = None, ends: Tensor | None = None) -> dict[int, Tensor]:
        """The values that differ between passes, in each of which another one of the steps `erring` errs, or all
        operands are read from other `ends` of their bands: -1, 1, 2 or -2 for that away from 0 or next to it, or 0 for
        either one, by chance."""
        spread: dict[int, Tensor] = {}
        for number, step in enumerate(self.steps):
            given = {}
            for each in step.operands:
                exact, wide = self.values[each.value], spread.get(each.value)
                if each.dtype is None:
                    if wide is not None:
                        given[each.leaf] = wide
                elif ends is not None:
                    end = ends.view(-1, *[1] * exact.dim())
                    chance = torch.rand((len(ends), *exact.shape), generator=generator, device=exact.device)
                    end = torch.where(end == 0, torch.where(chance < 0.5, -1.0, 1.0), end)
                    end = torch.where(end.abs() > 1, end.sign() * exact.sign(), end)
                    if wide is not None and not each.is_settled:
                        moved = (wide - exact).abs().nan_to_num(nan=0.0, posinf=0.0).amax(0)
                        each.moved = moved if isinstance(each.moved, float) else torch.maximum(each.moved, moved)
                        exact = wide
                    given[each.leaf] = each.rounded(exact + end * each.band)
                elif wide is not None:  # rounds as the exact pass does
                    error = wide - exact
                    each.band += error.abs().nan_to_num(nan=0.0, posinf=0.0).sum(0)
                    rounded = step.leaves[each.leaf] + error
                    given[each.leaf] = torch.where(error.isfinite(), rounded, each.rounded(wide))
            if given:
                result = step.run(given)
            elif number in erring:
                exact = self.values[step.result]
                result = exact.expand(len(erring), *exact.shape)
            else:
                continue
            if number in erring:
                exact, result = self.values[step.result], result.clone()
                signs = torch.rand(exact.shape, generator=generator, device=exact.device) < 0.5
                result[(at := erring.index(number))] = step.erred(exact, signs)
                if number in erring[at + 1 :]:  # with every second sign turned
                    turned = torch.arange(exact.numel(), device=exact.device).view(exact.shape) % 2 > 0
                    result[at + 1] = step.erred(exact, signs ^ turned)
            results = [step.in_range(result)] if isinstance(result, Tensor) else result
            spread |= dict(enumerate(results, step.result))
        return spread


_record = Record()


def passes(formula: Callable[[], Said], seed: int, device: str, elements: int = AT_ONCE) -> Iterator[Said]:
    """The outputs of a formula of Wide tensors, as float64: of the exact pass, then of all others, so many at a time,
    in a first dim, that no tensor has more elements."""
    global _record
    record = _record = Record()
    outputs, generator = formula(), torch.Generator(device).manual_seed(seed)
    yield tuple(each if each is None else each.inner for each in outputs)
    at_once = max(1, elements // max([1, *[each.numel() for each in record.values]]))
    unknown = [each for each in record.steps if isinstance(each.may_leave, Tensor)]
    if unknown:
        for step, may_leave in zip(unknown, torch.stack([each.may_leave for each in unknown]).tolist(), strict=True):
            step.may_leave = may_leave
    is_narrow = any(0 < each.dim() and each.shape[-1] <= NARROW for each in record.values[:1])
    may_err = [at for at, step in enumerate(record.steps) if step.kind for _ in range(1 + is_narrow)]
    ways = [{"erring": may_err[at : at + at_once], "generator": generator} for at in range(0, len(may_err), at_once)]
    ends = torch.tensor([-1.0, 1.0, -2.0, 2.0, 0.0, 0.0], dtype=FP64, device=device)
    from_ends = [{"ends": each, "generator": generator} for each in ends.split(min(at_once, 6))]

    def said(values: dict[int, Tensor]) -> Said:
        return tuple(each if each is None else values.get(each.value, each.inner[None]) for each in outputs)

    for way in ways:
        yield said(record.again(**way))
    if any(each.dtype for step in record.steps for each in step.operands):
        for way in from_ends:
            yield said(record.again(**way))
        if record.settle():
            for way in from_ends:
                yield said(record.again(**way))
    yield said(record.rounded())


class Wide(Tensor):
    """inner is the value in float64, and `value` its place in the record. Results with fewer digits than they were
    computed in are `stored`: rounded when an operation reads them, not when they are made, so that outputs stay
    exact."""

    inner: Tensor
    value: int
    stored: torch.dtype | None  # what it was computed in

    @staticmethod
    def __new__(cls, inner: Tensor, dtype: torch.dtype, value: int, stored: torch.dtype | None = None):
        made = Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=dtype, device=inner.device)
        made.inner, made.value, made.stored = inner, value, stored
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        asked = kwargs.get("dtype")
        if asked:
            kwargs["dtype"] = FP64
        leaves, spec = tree_flatten((args, kwargs))
        wide = {at: each for at, each in enumerate(leaves) if isinstance(each, Wide)}
        dtype = asked or functools.reduce(torch.promote_types, [each.dtype for each in wide.values()])
        first = next(iter(wide.values()))
        moves = func.is_view or func is torch.ops.aten.clone.default
        operands = []
        for at, each in wide.items():
            of = each.dtype if each.stored and not moves else None
            # From float64 to 16 bits some kernels and ATen round by way of float32.
            twice = torch.finfo(FP32).eps / 2 if of and of.itemsize == 2 and each.stored == FP64 else 0.0
            operands.append(Operand(at, each.value, of, None if of is None else each.inner.abs() * twice))
            leaves[at] = operands[-1].rounded(each.inner)
        step = Step(func, leaves, spec, operands, len(_record.values), None)
        result = step.run()
        _record.steps.append(step)
        if not isinstance(result, Tensor):  # views of parts
            return [Wide(each, dtype, _record.add(each), first.stored) for each in result]
        _record.add(result)
        if moves:
            return Wide(result, dtype, step.result, first.stored)
        if result.dtype != FP64:
            return Wide(result, result.dtype, step.result)
        if func is torch.ops.aten._to_copy.default:
            return Wide(result, dtype, step.result, first.dtype if dtype.itemsize < first.dtype.itemsize else None)
        step.kind = FP64 if dtype == FP64 else FP32
        step.may_leave = _may_leave(result, step.kind)
        return Wide(result, dtype, step.result, FP32 if dtype.itemsize < 4 else None)


def _has_16_bits(values: Tensor) -> bool:
    """Whether all of them have, so that a gate of 16 bits may have been read."""
    return any(bool((values == values.to(dtype)).all()) for dtype in (torch.bfloat16, torch.float16))


def _may_leave(result: Tensor, kind: torch.dtype) -> Tensor | bool:
    if kind == FP64 or not result.numel():
        return False
    least, most = result.abs().aminmax()
    info = torch.finfo(kind)
    return ~((least > info.smallest_normal * FAR) & (most < info.max / FAR))  # also if one of them is NaN


def to_wide(tensor: Tensor) -> Wide:
    wide = tensor.double()
    return Wide(wide, tensor.dtype, _record.add(wide))
