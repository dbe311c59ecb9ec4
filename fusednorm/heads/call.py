"""A call on alike tensors: described as a value that the planner can hash, and as rows that kernels read in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..planner.norm_problem import accumulation_dtype, is_float32_sum
from .problem import Heads, Settings

MOST_ROWS = 2**30 - 1  # twice as many and one are a number of 32 bits


@dataclass(frozen=True)
class HeadProblem:
    """Everything about a call that its kernels may depend on, except the row counts. The tensors are alike: of one
    dtype, with all weights or none, of one dtype, and likewise biases."""

    direction: str
    count: int
    cols: int
    dtype: torch.dtype
    other_dtype: torch.dtype  # of the outputs, or of the gradients of a backward
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    settings: Settings
    turned: int = 0  # columns
    per_pair: bool = False  # cos and sin have an entry for two of them
    table_dtypes: tuple[torch.dtype, ...] = ()
    levels: int = 1  # nested strides at which rows lie
    copies: bool = False  # of a backward: the rows of one more tensor are copied
    wants_dx: bool = False
    wants_dw: bool = False
    wants_db: bool = False

    @property
    def acc_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.dtype)

    @property
    def title(self) -> str:
        return f"head_norm {self.direction}"

    @property
    def turned_together(self) -> int:
        """Columns of a chunk, if a row's first chunk is turned with its second; else 0."""
        return 0 if self.settings.interleaved else self.turned // 2

    @property
    def num_sums(self) -> int:
        return self.wants_dw + self.wants_db

    @property
    def wants_float32_sum(self) -> bool:
        return is_float32_sum(self.acc_dtype, self.wants_dw and self.weight_dtype, self.wants_db and self.bias_dtype)


class Rows(NamedTuple):
    """How rows of tensors of one shape lie in memory: at nested strides, the outermost first, of at most MOST_LEVELS
    levels. sizes are the numbers of rows of each level but the outermost."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]  # of each tensor


MOST_LEVELS = 4  # such as those of B, S, groups and the heads of one, where cos and sin depend on S alone


def rows_of(shape: Sequence[int], *tensors: Tensor) -> Rows | None:
    """The levels of rows in the dims of `shape`, the first of each tensor. Dims that one stride covers in each tensor
    are one level. None if there are more than MOST_LEVELS."""
    strides = [each.stride()[: len(shape)] for each in tensors]
    levels: list[tuple[int, tuple[int, ...]]] = []  # innermost first
    for size, *by_tensor in zip(reversed(shape), *map(reversed, strides), strict=True):
        if size == 1:
            continue
        if levels and all(
            outer == levels[-1][0] * inner for outer, inner in zip(by_tensor, levels[-1][1], strict=True)
        ):
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        else:
            levels.append((size, tuple(by_tensor)))
    if len(levels) > MOST_LEVELS:
        return None
    levels = levels[::-1] or [(1, (0,) * len(strides))]
    return Rows(tuple(size for size, _ in levels[1:]), tuple(zip(*[of for _, of in levels], strict=True)))


def with_levels(rows: Rows, levels: int) -> Rows:
    """The same rows, with innermost levels of one row."""
    more = levels - 1 - len(rows.sizes)
    return Rows(rows.sizes + (1,) * more, tuple(each + (0,) * more for each in rows.strides))


class HeadCall(NamedTuple):
    """A checked call on alike tensors, which are read in place."""

    problem: HeadProblem
    heads: Heads
    grads: Sequence[Tensor | None]
    outs: Sequence[Tensor | None]  # the outputs, or the gradients of the inputs
    sums: Sequence[Tensor]  # the gradients of the weights, then those of the biases
    rows: tuple[int, ...]
    places: tuple[Rows, ...]  # for each: x, the gradients of y and of x, cos and sin, of these what is there
    copied: tuple[str, ...] = ()  # what could not be read in place
    copy: tuple[Tensor, ...] = ()  # a tensor, and the one of its shape that it is copied to by the way
    copy_place: Rows | None = None

    @property
    def tensors(self) -> list[Tensor | None]:
        heads = self.heads
        tables = heads.cos, heads.sin
        return [
            *heads.inputs, *self.grads, *heads.weights, *heads.biases, *tables, *self.outs, *self.sums, *self.copy
        ]  # fmt: skip


def alike(heads: Heads, *more: Sequence[Tensor | None]) -> list[list[int]]:
    """The inputs that one launch takes together, by their indices: those of one dtype whose parameters, and what `more`
    has of each, are of one dtype or absent. Inputs without elements are left out."""
    groups: dict[tuple, list[int]] = {}
    for at, x in enumerate(heads.inputs):
        if x.numel():
            of_it = x, heads.weights[at], heads.biases[at], *[each[at] for each in more]
            groups.setdefault(tuple([each if each is None else each.dtype for each in of_it]), []).append(at)
    return list(groups.values())


def describe(
    heads: Heads, grads: Sequence[Tensor], outs: Sequence[Tensor | None], sums: Sequence, copy: Sequence[Tensor] = ()
) -> HeadCall | None:
    """The call on alike tensors, copied where their rows cannot be read in place. None if there are too many rows.

    outs are the outputs or, with grads, the gradients of the inputs; sums those of the weights and then of the biases.
    A gradient that is not wanted is None. A backward may copy a tensor to another one of D columns.
    """
    rows, backward = tuple(math.prod(x.shape[:-1]) for x in heads.inputs), bool(grads)
    if sum(rows) > MOST_ROWS:
        return None
    tables = [] if heads.cos is None else [_with_adjacent_columns(each) for each in (heads.cos, heads.sin)]
    if tables and tables[0].stride() != tables[1].stride():
        tables = [each.contiguous() for each in tables]
    places, read = [], []
    for at, given in enumerate(zip(heads.inputs, *([grads] if backward else []), strict=True)):
        batch = given[0].shape[:-1]
        more = [outs[at]] if backward and outs[at] is not None else []
        more += [each.expand(*batch, -1) for each in tables[:1]]
        own = [_with_adjacent_columns(each) for each in given]
        place = rows_of(batch, *own, *more)
        if place is None:
            own = [each.contiguous() for each in own]
            place = rows_of(batch, *own, *more)
        if place is None:
            return None
        read.append(own)
        places.append(place)
    copy_place = None
    if copy:
        copy = _with_adjacent_columns(copy[0]), copy[1]
        copy_place = rows_of(copy[1].shape[:-1], *copy)
        if copy_place is None:
            return None
    inputs, *others = zip(*read, strict=True)
    copied = [
        f"{name}[{at}]"
        for name, were, are in zip(("inputs", "grads"), (heads.inputs, grads), (inputs, *others), strict=False)
        for at, pair in enumerate(zip(were, are, strict=True))
        if pair[0] is not pair[1]
    ]
    levels = max(len(each.sizes) for each in places) + 1
    weight, bias = heads.weights[0], heads.biases[0]
    problem = HeadProblem(
        "backward" if backward else "forward",
        len(inputs),
        heads.cols,
        inputs[0].dtype,
        others[0][0].dtype if backward else outs[0].dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        heads.settings._replace(rotary_dim=None),
        heads.rotary_dim,
        bool(tables) and tables[0].shape[-1] < heads.rotary_dim,
        tuple(each.dtype for each in tables),
        levels,
        bool(copy),
        *[wanted is not None for wanted in (outs[0], *sums[:: len(inputs)]) if backward],
    )
    parameters = ([each if each is None else each.contiguous() for each in of] for of in heads[1:3])
    heads = Heads(inputs, *parameters, *(tables or (None, None)), heads.eps, heads.settings)
    sums = [each for each in sums if each is not None]
    by_level = tuple(with_levels(each, levels) for each in places)
    grads = others[0] if backward else ()
    return HeadCall(problem, heads, grads, outs, sums, rows, by_level, tuple(copied), tuple(copy), copy_place)


def calls_like(heads: Heads, packed: bool = False) -> Iterator[tuple[list[int], str, HeadCall | None]]:
    """(inputs, direction, call) of each launch for tensors like these, by tensors without memory, if all gradients are
    wanted, the outputs' are contiguous and, with `packed`, inputs are parts of one tensor with v."""

    def like(tensor: Tensor | None, strides: Sequence[int] | None = None, dtype: torch.dtype | None = None):
        if tensor is None:
            return None
        return torch.empty_strided(
            tensor.shape, tensor.stride() if strides is None else strides, dtype=dtype or tensor.dtype, device="meta"
        )

    lists = ([like(each) for each in some] for some in heads[:3])
    heads = Heads(*lists, like(heads.cos), like(heads.sin), heads.eps, heads.settings)
    count, contiguous = len(heads.inputs), [torch.empty(x.shape, device="meta").stride() for x in heads.inputs]
    outs = [like(x, contiguous[at], heads.output_dtype(at)) for at, x in enumerate(heads.inputs)]
    dx = [like(x, None if packed else contiguous[at]) for at, x in enumerate(heads.inputs)]
    copy = (outs[-1], dx[-1]) if packed else ()
    for which in alike(heads):
        some, ys, grads = heads.some(which), [outs[at] for at in which], [dx[at] for at in which]
        sums = [heads.tensors[kind * count + at] for kind in (1, 2) for at in which]
        yield which, "forward", describe(some, [], ys, [])
        yield which, "backward", describe(some, ys, grads, sums, copy)
        copy = ()


def _with_adjacent_columns(tensor: Tensor) -> Tensor:
    return tensor if tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()
