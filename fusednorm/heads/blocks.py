"""Backwards for one block of tokens after another, whose sums are added up in order: `ordered_sums` of
settings/invariance.py.

A token is a row of the norms beside q and k, and has all their heads. The first dim of tokens is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .ops import Call


def of(given: Call, tokens: int) -> list[Call]:
    """The call for each block of so many tokens; itself alone if that is all, or if no float32 sum is wanted. Raises
    RuntimeError if a block would end within what an index of the first dim has."""
    sums = [each[1] for each in given.outputs[_inputs(given) :] if each]
    if not given.grads or not sums or any(each.itemsize < torch.float32.itemsize for each in sums):
        return [given]
    shape, cut = given.heads.inputs[0].shape, _cut(given)
    of_index = math.prod(shape[at] for at in _of_tokens(given) if at != cut)
    if shape[cut] * of_index <= tokens:
        return [given]
    if tokens % of_index:
        rule = f"ordered_sums of batch_invariant must be a multiple of {of_index} tokens"
        raise RuntimeError(f"{given.op}: {rule}, those of an index of q's dim {cut}, got {tokens}")
    size = tokens // of_index
    return [_part(given, cut, start, min(size, shape[cut] - start)) for start in range(0, shape[cut], size)]


def _inputs(given: Call) -> int:
    """How many of the outputs are gradients of inputs."""
    return 1 if given.packed is not None else len(given.heads.inputs)


def _cut(given: Call) -> int:
    """The first dim of tokens of more than one index."""
    shape = given.heads.inputs[0].shape
    return next((at for at in _of_tokens(given) if shape[at] != 1), 0)


def _of_tokens(given: Call) -> list[int]:
    """The dims of q and k that are those of tokens. The dim of heads is the one in which q and k differ, or else of
    which cos has one index, or else the last before the columns."""
    if given.packed is not None:
        return list(range(given.packed.dim() - 1))
    q, k, cos = *given.heads.inputs, given.heads.cos
    batch = range(q.dim() - 1)
    differ = [at for at in batch if q.shape[at] != k.shape[at]]
    if not differ and cos is not None:
        lead = q.dim() - cos.dim()
        differ = [at for at in batch if at >= lead and cos.shape[at - lead] == 1 != q.shape[at]]
    heads = differ[-1] if differ else q.dim() - 2
    return [at for at in batch if at != heads]


def _part(given: Call, dim: int, start: int, length: int) -> Call:
    """The call for some indices of a dim of q."""
    ndim, first = given.heads.inputs[0].dim(), len(given.grads) + _inputs(given)

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.narrow(dim, start, length)

    def part_of_table(table: Tensor | None) -> Tensor | None:
        at = dim - (ndim - table.dim()) if table is not None else -1
        return table if at < 0 or table.shape[at] == 1 else table.narrow(at, start, length)

    *others, cos, sin = given.tensors
    rows, parameters = others[:first], others[first:]
    return given.with_tensors([*map(part, rows), *parameters, part_of_table(cos), part_of_table(sin)])


def added_up(given: Call, found: Sequence[Sequence[Tensor | None] | None]) -> list[Tensor | None] | None:
    """The outputs of the call, from those of its blocks. None if ATen must run one of them."""
    if any(each is None for each in found):
        return None
    cut, made = _cut(given), []
    for at, (first, *rest) in enumerate(zip(*found, strict=True)):
        if first is not None and at < _inputs(given):
            first = torch.cat([first, *rest], cut)
        elif first is not None:
            for each in rest:
                first = first + each
        made.append(first)
    return made
