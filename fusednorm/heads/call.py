"""A call on alike tensors: described as a value that the planner can hash, and as rows that kernels read in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..host.program import Address
from ..operands import Operands, operands_of, wanted_outputs
from ..planner.norm_problem import ALIGNMENT, accumulation_dtype, is_float32_sum
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


class HeadCall(NamedTuple):
    """What one launch computes: a call on alike tensors, which are read in place."""

    problem: HeadProblem
    which: list[int]  # of the inputs
    heads: Heads
    grads: Sequence[Tensor]
    outs: Sequence[Tensor | None]  # the outputs, or the gradients of the inputs
    sums: Sequence[Tensor]  # the gradients of the weights, then those of the biases
    rows: tuple[int, ...]
    places: tuple[Rows, ...]  # for each: x, the gradients of y and of x, cos and sin, of these what is there
    copy: Sequence[Tensor]  # a tensor, and the one of its shape that it is copied to by the way
    copy_place: Rows | None


def _alike(heads: Heads, *more: Sequence[Tensor | None]) -> list[list[int]]:
    """The inputs that one launch takes together, by their indices: those of one dtype whose parameters, and what `more`
    has of each, are of one dtype or absent. Inputs without elements are left out."""
    groups: dict[tuple, list[int]] = {}
    for at, x in enumerate(heads.inputs):
        if x.numel():
            of_it = x, heads.weights[at], heads.biases[at], *[each[at] for each in more]
            groups.setdefault(tuple([each if each is None else each.dtype for each in of_it]), []).append(at)
    return list(groups.values())


def _described(heads: Heads, grads: Sequence[Tensor], outs: Sequence, sums: Sequence) -> Iterator[HeadCall | None]:
    """The launches for tensors that are readable in place. None if there are too many rows, or if they lie at too many
    nested strides.

    outs are the outputs or, with grads, the gradients of the inputs; sums those of the weights and then of the biases.
    A gradient that is not wanted is None; an input that has no wanted one is in no launch. With one more in grads and
    outs, the last of grads is copied to the last of outs.
    """
    count = len(heads.inputs)
    copy = (grads[count], outs[count]) if len(grads) > count and outs[count] is not None else ()
    lists = outs[:count], grads[:count], sums[:count], sums[count:]
    for which in _alike(heads, *(each for each in lists if each)):
        some, (ys, dy, dw, db) = heads.some(which), ([each[at] for at in which] if each else [] for each in lists)
        if any(each is not None for each in (*ys, *dw, *db)):
            yield _launch_of(which, some, dy, ys, [*dw, *db], copy)
            copy = ()


def _launch_of(which: list[int], heads: Heads, grads, outs, sums, copy) -> HeadCall | None:
    rows, backward = tuple(math.prod(x.shape[:-1]) for x in heads.inputs), bool(grads)
    if sum(rows) > MOST_ROWS:
        return None
    places = []
    for at, x in enumerate(heads.inputs):
        others = [*grads[at : at + 1], *(each for each in outs[at : at + 1] if backward and each is not None)]
        places.append(_place(x, *others, table=heads.cos))
    copy_place = rows_of(copy[1].shape[:-1], *copy) if copy else None
    if None in places or (copy and copy_place is None):
        return None
    levels = max(len(each.sizes) for each in places) + 1
    tables = [] if heads.cos is None else [heads.cos, heads.sin]
    weight, bias = heads.weights[0], heads.biases[0]
    problem = HeadProblem(
        "backward" if backward else "forward",
        len(which),
        heads.cols,
        heads.inputs[0].dtype,
        (grads or outs)[0].dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        heads.settings._replace(rotary_dim=None),
        heads.rotary_dim,
        bool(tables) and tables[0].shape[-1] < heads.rotary_dim,
        tuple(each.dtype for each in tables),
        levels,
        bool(copy),
        *[wanted is not None for wanted in (outs[0], *sums[:: len(which)]) if backward],
    )
    sums = [each for each in sums if each is not None]
    by_level = tuple(with_levels(each, levels) for each in places)
    return HeadCall(problem, which, heads, grads, outs, sums, rows, by_level, copy, copy_place)


def _place(x: Tensor, *others: Tensor, table: Tensor | None) -> Rows | None:
    batch = x.shape[:-1]
    return rows_of(batch, x, *others, *([] if table is None else [table.expand(*batch, -1)]))


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
    and which these are; itself if there are none."""
    given = with_zeros(operands)
    heads, grads, copied = _in_place(heads_of(given), grads_of(given))
    first = heads.inputs
    if packing_of(given):
        of_packed = [name for name in copied if name.startswith("inputs")]
        first = [_packed_in_place(given.x) if of_packed else given.x]
        if first[0] is given.x:
            copied = [name for name in copied if name not in of_packed]
    if not copied:
        return given, copied
    return with_tensors(given, [*grads, *first, *heads.weights, *heads.biases, heads.cos, heads.sin]), copied


def apart(operands: Operands) -> Operands:
    """The backward for q and k alone, in place of that for a packed tensor."""
    given = with_zeros(operands)
    heads, mask = heads_of(given), [operands.output_mask[0], *operands.output_mask]
    return operands_of(BACKWARD, (grads_of(given)[:2], *heads[:-1], mask), heads.settings._asdict())


def joined(operands: Operands, outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The outputs, from those of `apart`."""
    dq, dk, *sums = outputs
    v = with_zeros(operands).grad_v
    return [packing_of(operands).join(dq, dk, v.to(dq.dtype)) if operands.output_mask[0] else None, *sums]


def outputs_of(operands: Operands) -> list[tuple[torch.Size, torch.dtype] | None]:
    """Shape and dtype of each output of the op; None for one that is not wanted."""
    pairs = zip(operands.outputs, wanted_outputs(operands), strict=True)
    return [(getattr(operands, of.like).shape, output_dtype(operands, of)) if wanted else None for of, wanted in pairs]


def both_ways(
    forward: Operands, packed: Tensor | None = None, packing: Packing | None = None
) -> tuple[Operands, Operands]:
    """A forward and a backward that wants all gradients, for contiguous gradients of the outputs. The inputs may be
    parts of a packed tensor."""
    v: list[Tensor] = []
    if packing:
        q, k, *v = packing.split(packed)
        forward = forward._replace(x=q, k=k)
    made = [*outputs_of(forward), *[(each.shape, each.dtype) for each in v]]
    grads = [forward.x.new_empty(shape, dtype=dtype, device="meta") for shape, dtype in made]
    heads = heads_of(forward)
    op, first, more = (PACKED, packed, ([True] * 5, *packing)) if packing else (BACKWARD, heads.inputs, ([True] * 6,))
    return forward, operands_of(op, (grads, first, *heads[1:-1], *more), heads.settings._asdict())


def calls_of(operands: Operands) -> list[HeadCall | None]:
    """What kernels compute for a call of readable tensors, by tensors without memory. Each of these has an Address
    among those of the program: the op's tensors, then its outputs."""
    tensors, packing = operands.tensors, packing_of(operands)
    given = with_tensors(operands, [each if each is None else _symbol(each, at) for at, each in enumerate(tensors)])
    made = [
        each and _symbol(operands.x.new_empty(each[0], dtype=each[1], device="meta"), len(tensors) + at)
        for at, each in enumerate(outputs_of(operands))
    ]
    heads, outs, sums = heads_of(given), made[:2], made[2:]
    if packing:
        outs, sums = [None] * 3, made[1:]
        _parts_of(given.x, heads.inputs)
        if made[0] is not None:
            outs = _parts_of(made[0], packing.split(made[0]))
    return list(_described(heads, grads_of(given), outs, sums))


def _in_place(heads: Heads, grads: Sequence[Tensor]) -> tuple[Heads, list[Tensor], list[str]]:
    """The operands, with copies in place of those whose rows kernels cannot read in place, and what these are. If rows
    are batch-invariant, every row of a tensor begins at a vector."""
    copied, invariant = [], bool(invariance.switch.invariance())

    def checked(name: str, tensor: Tensor, can_be_read: bool) -> Tensor:
        if invariant and not begins_at_vectors(tensor):
            copied.append(name)
            tensor = _at_vectors(tensor)
        elif not (can_be_read or tensor.is_contiguous()):
            copied.append(name)
            tensor = tensor.contiguous()
        return tensor

    cos, sin = (each if each is None else checked("tables", each, _has_adjacent_columns(each)) for each in heads[3:5])
    if cos is not None and _steps(cos) != _steps(sin):
        copied.append("tables")
        cos, sin = (_at_vectors(each) if invariant else each.clone(memory_format=CONTIGUOUS) for each in (cos, sin))
    inputs, grads = list(heads.inputs), list(grads)
    for at, x in enumerate(inputs):
        can_be_read = _place(x, *grads[at : at + 1], table=cos) is not None
        inputs[at] = checked(f"inputs[{at}]", x, can_be_read and _has_adjacent_columns(x))
    for at, grad in enumerate(grads):
        can_be_read = at >= len(inputs) or _place(inputs[at], grad, table=cos) is not None
        grads[at] = checked(f"grads[{at}]", grad, can_be_read and _has_adjacent_columns(grad))
    parameters = (
        [each if each is None else checked(name, each, each.is_contiguous()) for each in some]
        for name, some in (("weights", heads.weights), ("biases", heads.biases))
    )
    return Heads(inputs, *parameters, cos, sin, heads.eps, heads.settings), grads, copied


def _packed_in_place(packed: Tensor) -> Tensor:
    """The tensor, or a copy of it if kernels cannot read rows of it in place. If rows are batch-invariant, these have a
    multiple of VECTOR columns."""
    return _at_vectors(packed) if invariance.switch.invariance() else packed.contiguous()


def begins_at_vectors(tensor: Tensor) -> bool:
    """Whether it is aligned, and each of its rows begins at a multiple of VECTOR elements. Kernels for other rows load
    them by other threads, and may add up a row in another order."""
    steps = _steps(tensor) or tensor.stride()[-2:-1]
    return not (tensor.data_ptr() % ALIGNMENT or any(each % VECTOR for each in steps))


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
    made.address = Address(at, tensor.dtype, tensor.data_ptr() % ALIGNMENT == 0)
    return made


def _parts_of(whole: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of a symbol, as symbols."""
    for each in parts:
        offset = each.storage_offset() * each.dtype.itemsize
        aligned = whole.address.aligned and offset % ALIGNMENT == 0
        each.address = replace(whole.address, aligned=aligned, offset=offset)
    return parts
