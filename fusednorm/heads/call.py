"""A call on alike tensors: described as a value that the planner can hash, and as rows that kernels read in place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import accumulation_dtype, is_float32_sum
from ..host.program import Address
from ..operands import WAYS, Operands, operands_of, wanted_outputs
from ..planner.norm_problem import ALIGNMENT
from ..problem.outputs import output_dtype
from ..problem.rows import levels_of
from ..settings import invariance
from .operands import BACKWARD, GRADS, PACKED, Settings
from .problem import Heads, Packing, grads_of, heads_of, packing_of

CONTIGUOUS = torch.contiguous_format
VECTOR = 16  # elements: Triton compiles other kernels for strides that are multiples of it
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
    together: int = 1  # rows that are normalized as one
    turned: int = 0  # columns
    per_pair: bool = False  # cos and sin have an entry for two of them
    table_dtypes: tuple[torch.dtype, ...] = ()
    levels: int = 1  # nested strides at which rows lie
    copies: bool = False  # of a backward: the rows of one more tensor are copied
    at_vectors: bool = False  # what is read begins at 16 bytes, and has 16 bits an element, or 32 of cos and sin
    shares_tables: bool = False  # of a forward: each even row and the next one have the same cos and sin
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
    def columns(self) -> int:
        """Elements of a weight."""
        return self.together * self.cols

    @property
    def num_sums(self) -> int:
        return self.wants_dw + self.wants_db

    @property
    def wants_float32_sum(self) -> bool:
        return is_float32_sum(self.acc_dtype, self.wants_dw and self.weight_dtype, self.wants_db and self.bias_dtype)


def problems_of(heads: Heads) -> Iterator[HeadProblem]:
    """Forwards and backwards with all gradients, of each number of rows that are normalized as one."""
    dtype, tables = heads.inputs[0].dtype, [each for each in (heads.cos, heads.sin) if each is not None]
    parameters = [each[0] if each[0] is None else each[0].dtype for each in (heads.weights, heads.biases)]
    turned, together = heads.rotary_dim, {heads.together(at) for at in range(len(heads.inputs))}
    per_pair, dtypes = any(each.shape[-1] < turned for each in tables), tuple(each.dtype for each in tables)
    for direction, rows in itertools.product(WAYS, together):
        is_backward = direction == "backward"
        of_weight, of_bias = (is_backward and each is not None for each in parameters)
        of = dtype, dtype, *parameters, heads.settings, rows, turned, per_pair, dtypes
        wanted = {"wants_dx": is_backward, "wants_dw": of_weight, "wants_db": of_bias}
        yield HeadProblem(direction, len(heads.inputs), heads.cols, *of, **wanted)


class Rows(NamedTuple):
    """How rows of tensors of one shape lie in memory: at nested strides, the outermost first, of at most MOST_LEVELS
    levels. sizes are the numbers of rows of each level but the outermost."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]  # of each tensor


MOST_LEVELS = 4  # such as those of B, S, groups and the heads of one, where cos and sin depend on S alone


def rows_of(shape: Sequence[int], *tensors: Tensor) -> Rows | None:
    """The levels of rows in the dims of `shape`, the first of each tensor. None if there are more than MOST_LEVELS."""
    strides = [each.stride()[: len(shape)] for each in tensors]
    levels = levels_of(shape, *strides)
    if len(levels) > MOST_LEVELS:
        return None
    levels = levels[::-1] or [(1, tuple(each[-1] if each else 0 for each in strides))]
    return Rows(tuple(size for size, _ in levels[1:]), tuple(zip(*[of for _, of in levels], strict=True)))


def with_levels(rows: Rows, levels: int) -> Rows:
    """The same rows, with innermost levels of one row."""
    more = levels - 1 - len(rows.sizes)
    return Rows(rows.sizes + (1,) * more, tuple(each + (0,) * more for each in rows.strides))


class Side(NamedTuple):
    """What a launch has of q, or of k. None for what is absent or not wanted."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    grad: Tensor | None  # of y; None in a forward
    out: Tensor | None  # y or dx
    dweight: Tensor | None
    dbias: Tensor | None
    name: str


class HeadCall(NamedTuple):
    """What one launch computes: a call on alike tensors, which are read in place."""

    problem: HeadProblem
    heads: Heads  # of q and k both
    sides: list[Side]
    rows: tuple[int, ...]
    places: tuple[Rows, ...]  # for each: x, the gradients of y and of x, cos and sin, of these what is there
    copy: Sequence[Tensor]  # a tensor, and the one of its shape that it is copied to by the way
    copy_place: Rows | None


def _call_of(heads: Heads, sides: list[Side], copy: Sequence[Tensor]) -> HeadCall | None:
    """The launch. None if there are too many rows, or if they lie at too many nested strides."""
    rows, first = tuple(math.prod(side.x.shape[:-1]) for side in sides), sides[0]
    backward = first.grad is not None
    if sum(rows) > MOST_ROWS:
        return None
    places = [_place(side.x, side.grad, side.out if backward else None, table=heads.cos) for side in sides]
    copy_place = rows_of(copy[1].shape[:-1], *copy) if copy else None
    if None in places or (copy and copy_place is None):
        return None
    levels = max(len(each.sizes) for each in places) + 1
    tables = [] if heads.cos is None else [heads.cos, heads.sin]
    read = [each for side in sides for each in (side.x, side.grad) if each is not None]
    by_level = tuple(with_levels(each, levels) for each in places)
    problem = HeadProblem(
        "backward" if backward else "forward",
        len(sides),
        heads.cols,
        first.x.dtype,
        (first.grad if backward else first.out).dtype,
        None if first.weight is None else first.weight.dtype,
        None if first.bias is None else first.bias.dtype,
        heads.settings._replace(rotary_dim=None),
        heads.together("qk".index(first.name)),
        heads.rotary_dim,
        bool(tables) and tables[0].shape[-1] < heads.rotary_dim,
        tuple(each.dtype for each in tables),
        levels,
        bool(copy),
        _are_at_vectors(read, tables, places),
        bool(tables) and not backward and all(map(_share_tables, by_level)),
        *[wanted is not None for wanted in (first.out, first.dweight, first.dbias) if backward],
    )
    return HeadCall(problem, heads, sides, rows, by_level, copy, copy_place)


def _are_at_vectors(read: Sequence[Tensor], tables: Sequence[Tensor], places: Sequence[Rows]) -> bool:
    """Whether the rows of these symbols, which lie at these places, are as HeadProblem.at_vectors says."""
    steps = [step for place in places for of_tensor in place.strides for step in of_tensor]
    at_multiples = not any(step % (ALIGNMENT // 2) for step in steps)
    narrow = all(each.itemsize == 2 for each in read) and all(each.itemsize in (2, 4) for each in tables)
    return at_multiples and narrow and all(each.address.aligned for each in (*read, *tables))


def _share_tables(place: Rows) -> bool:
    """Whether each even row and the next one have the same entries of cos and sin, which come last."""
    return bool(place.sizes) and place.sizes[-1] % 2 == 0 and place.strides[-1][-1] == 0


def _place(x: Tensor, *others: Tensor | None, table: Tensor | None) -> Rows | None:
    batch = x.shape[:-1]
    tensors = x, *others, None if table is None else table.expand(*batch, -1)
    return rows_of(batch, *[each for each in tensors if each is not None])


def with_tensors(operands: Operands, tensors: Sequence[Tensor | None]) -> Operands:
    """With other tensors, in the order of the operands."""
    return operands._replace(**dict(zip(operands.tensor_names, tensors, strict=True)))


def with_zeros(operands: Operands) -> Operands:
    """With zeros for absent gradients of outputs."""
    heads, given = heads_of(operands), {}
    likes = (*[(x, heads.output_dtype(at)) for at, x in enumerate(heads.inputs)], (heads.inputs[1], operands.x.dtype))
    for slot, (like, dtype) in zip(GRADS, likes, strict=True):
        if getattr(operands, slot.name, like) is None:
            given[slot.name] = like.new_zeros(like.shape, dtype=dtype)
    return operands._replace(**given) if given else operands


def in_place(operands: Operands) -> tuple[Operands, list[str]]:
    """The operands with zeros for absent gradients, with copies of the tensors whose rows kernels cannot read in place,
    and the names of these; itself if there are none. If rows are batch-invariant, every row of a tensor begins at a
    vector."""
    given, invariant = with_zeros(operands), bool(invariance.switch.invariance())
    heads, packing, copies = heads_of(given), packing_of(given), {}

    def read(name: str, tensor: Tensor | None, has_place: bool = True) -> Tensor | None:
        if tensor is None:
            return None
        if invariant and not begins_at_vectors(tensor):
            copies[name] = _at_vectors(tensor)
        elif not (has_place and _has_adjacent_columns(tensor)) and not tensor.is_contiguous():
            copies[name] = tensor.contiguous()
        return copies.get(name, tensor)

    cos, sin = read("cos", given.cos), read("sin", given.sin)
    if cos is not None and _steps(cos) != _steps(sin):
        of_both = (_at_vectors(each) if invariant else each.clone(memory_format=CONTIGUOUS) for each in (cos, sin))
        copies["cos"], copies["sin"] = cos, _ = of_both
    for name, of_grad, x in zip(("x", "k"), ("grad_out", "grad_k"), heads.inputs, strict=True):
        grad = getattr(given, of_grad, None)
        x = read(name, x, _place(x, grad, table=cos) is not None)
        read(of_grad, grad, _place(x, grad, table=cos) is not None)
    read("grad_v", getattr(given, "grad_v", None))
    for name in ("weight", "k_weight", "bias", "k_bias"):  # one row, of all heads as well
        parameter = getattr(given, name)
        if parameter is not None and not (parameter.is_contiguous() and (not invariant or is_aligned(parameter))):
            copies[name] = parameter.clone(memory_format=CONTIGUOUS)
    if packing and [copies.pop(name) for name in ("x", "k") if name in copies]:
        whole = _at_vectors(given.x) if invariant else given.x.contiguous()
        copies |= {} if whole is given.x else {"x": whole}
    return given._replace(**copies) if copies else given, list(copies)


def apart(operands: Operands) -> Operands:
    """The backward for q and k alone, in place of that for a packed tensor."""
    given = with_zeros(operands)
    heads, mask = heads_of(given), [operands.output_mask[0], *operands.output_mask]
    return operands_of(BACKWARD, (grads_of(given)[:2], *heads[:-1], mask), heads.settings._asdict())


def joined(operands: Operands, outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The outputs, from those of `apart`."""
    dq, dk, *sums = outputs
    if not operands.output_mask[0]:
        return [None, *sums]
    return [torch.cat([dq, dk, with_zeros(operands).grad_v.to(dq.dtype)], -2).reshape(operands.x.shape), *sums]


def outputs_of(operands: Operands) -> list[tuple[torch.Size, torch.dtype] | None]:
    """Shape and dtype of each output of the op; None for one that is not wanted."""
    pairs = zip(operands.outputs, wanted_outputs(operands), strict=True)
    return [(getattr(operands, of.like).shape, output_dtype(operands, of)) if wanted else None for of, wanted in pairs]


def both_ways(
    forward: Operands, packed: Tensor | None = None, packing: Packing | None = None
) -> tuple[Operands, Operands]:
    """A forward and a backward that wants all gradients, for contiguous gradients of the outputs. The inputs may be
    parts of a packed tensor."""
    op, v, more = BACKWARD, [], ([True] * 6,)
    if packed is not None:
        q, k, *v = packing.split(packed)
        op, forward, more = PACKED, forward._replace(x=q, k=k), ([True] * 5, *packing)
    made = [*outputs_of(forward), *[(each.shape, each.dtype) for each in v]]
    grads = [forward.x.new_empty(shape, dtype=dtype, device="meta") for shape, dtype in made]
    heads = heads_of(forward)
    first = heads.inputs if packed is None else packed
    return forward, operands_of(op, (grads, first, *heads[1:-1], *more), heads.settings._asdict())


def calls_of(operands: Operands) -> list[HeadCall | None]:
    """What kernels compute for a call of readable tensors, by tensors without memory: a launch for those of q and k
    that are alike, of one dtype, with parameters and gradients of one dtype or absent, and with equally many rows that
    are normalized as one. None for what no kernel takes.

    Each tensor has an Address among those of the program: the op's tensors, then its outputs. q or k without elements,
    or without a wanted gradient, is in no launch. The first launch copies the gradient of v to where it belongs."""
    tensors, packing = operands.tensors, packing_of(operands)
    given = with_tensors(operands, [each if each is None else _symbol(each, at) for at, each in enumerate(tensors)])
    made = [
        each and _symbol(operands.x.new_empty(each[0], dtype=each[1], device="meta"), len(tensors) + at)
        for at, each in enumerate(outputs_of(operands))
    ]
    heads, grads, none = heads_of(given), grads_of(given), [None] * 2
    outs, sums = made[:2], made[2:] or none * 2
    if packing:
        outs, sums = [None] * 3, made[1:]
        _parts_of(given.x, heads.inputs)
        if made[0] is not None:
            outs = _parts_of(made[0], packing.split(made[0]))
    copy = (grads[2], outs[2]) if packing and outs[2] is not None else ()
    alike: dict[tuple, list[Side]] = {}
    for side in map(Side, *heads[:3], grads[:2] or none, outs[:2], sums[:2], sums[2:], "qk"):
        *tensors, _ = side
        if side.x.numel() and any(each is not None for each in tensors[4:]):
            dtypes = [each if each is None else each.dtype for each in tensors]
            alike.setdefault((*dtypes, heads.together("qk".index(side.name))), []).append(side)
    return [_call_of(heads, sides, () if at else copy) for at, sides in enumerate(alike.values())]


def begins_at_vectors(tensor: Tensor) -> bool:
    """Whether it is aligned, and each of its rows begins at a multiple of VECTOR elements. Kernels for other rows load
    them by other threads, and may add up a row in another order."""
    steps = _steps(tensor) or tensor.stride()[-2:-1]
    return is_aligned(tensor) and not any(each % VECTOR for each in steps)


def is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % ALIGNMENT == 0


def _steps(tensor: Tensor) -> list[int]:
    """The strides between rows, those of dims of one element left out."""
    return [stride for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size != 1]


def _at_vectors(tensor: Tensor) -> Tensor:
    cols = tensor.shape[-1]
    made = tensor.new_empty(*tensor.shape[:-1], -(-cols // VECTOR) * VECTOR)[..., :cols]
    return made.copy_(tensor)


def _has_adjacent_columns(tensor: Tensor) -> bool:
    return tensor.shape[-1] == 1 or tensor.stride(-1) == 1


def _symbol(tensor: Tensor, at: int) -> Tensor:
    """The tensor without memory, with the Address that stands for it as an attribute."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made.address = Address(at, tensor.dtype, is_aligned(tensor))
    return made


def _parts_of(whole: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of a symbol, as symbols."""
    for each in parts:
        offset = each.storage_offset() * each.dtype.itemsize
        aligned = whole.address.aligned and offset % ALIGNMENT == 0
        each.address = replace(whole.address, aligned=aligned, offset=offset)
    return parts
