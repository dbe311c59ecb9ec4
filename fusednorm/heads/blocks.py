"""Backwards for one block of tokens after another, whose sums are added up in order: `ordered_sums` of
settings/invariance.py.

A token is a row of the norms beside q and k, and has all their heads. The first dim of tokens is cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..operands import Operands, Role
from .call import outputs_of, with_tensors
from .problem import dim_of, heads_of, packing_of


def of(given: Operands, tokens: int) -> list[Operands]:
    """The call for each block of so many tokens; itself alone if that is all, or if no float32 sum is wanted. Raises
    RuntimeError if a block would end within what an index of the first dim has."""
    pairs = zip(given.outputs, outputs_of(given), strict=True)
    sums = [made[1] for output, made in pairs if made and output.role is Role.PARAMETER]
    if not sums or any(each.itemsize < torch.float32.itemsize for each in sums):
        return [given]
    shape, cut = heads_of(given).inputs[0].shape, _cut(given)
    of_index = math.prod(shape[at] for at in _of_tokens(given) if at != cut)
    if shape[cut] * of_index <= tokens:
        return [given]
    if tokens % of_index:
        rule = f"ordered_sums of batch_invariant must be a multiple of {of_index} tokens"
        raise RuntimeError(f"{given.op}: {rule}, those of an index of q's dim {cut}, got {tokens}")
    size = tokens // of_index
    return [_part(given, cut, start, min(size, shape[cut] - start)) for start in range(0, shape[cut], size)]


def _cut(given: Operands) -> int:
    """The first dim of tokens of more than one index."""
    shape = heads_of(given).inputs[0].shape
    return next((at for at in _of_tokens(given) if shape[at] != 1), 0)


def _of_tokens(given: Operands) -> list[int]:
    """The dims of q and k that are those of tokens. The dim of heads is the one in which q and k differ, or else of
    which cos has one index, or else the last before the columns."""
    if packing_of(given):
        return list(range(given.x.dim() - 1))
    q, k, cos = given.x, given.k, given.cos
    if heads_of(given).are_whole:
        return list(range(q.dim() - 2))
    batch = range(q.dim() - 1)
    differ = [at for at in batch if q.shape[at] != k.shape[at]]
    if not differ and cos is not None:
        lead = q.dim() - cos.dim()
        differ = [at for at in batch if at >= lead and cos.shape[at - lead] == 1 != q.shape[at]]
    heads = differ[-1] if differ else q.dim() - 2
    return [at for at in batch if at != heads]


def _part(given: Operands, dim: int, start: int, length: int) -> Operands:
    """The call for some indices of a dim of q."""
    ndim = heads_of(given).inputs[0].dim()

    def part(role: Role, tensor: Tensor) -> Tensor:
        at = dim_of(role, tensor.shape, dim, ndim)
        return tensor if at is None else tensor.narrow(at, start, length)

    pairs = zip([slot.role for slot in given.slots if slot.role.is_tensor], given.tensors, strict=True)
    return with_tensors(given, [each if each is None else part(role, each) for role, each in pairs])


def added_up(given: Operands, found: Sequence[Sequence[Tensor | None] | None]) -> list[Tensor | None] | None:
    """The outputs of the call, from those of its blocks. None if ATen must run one of them."""
    if any(each is None for each in found):
        return None
    made: list[Tensor | None] = []
    for output, *parts in zip(given.outputs, *found, strict=True):
        if parts[0] is None:
            made.append(None)
        else:
            is_sum = output.role is Role.PARAMETER
            made.append(functools.reduce(torch.add, parts) if is_sum else torch.cat(parts, _cut(given)))
    return made
