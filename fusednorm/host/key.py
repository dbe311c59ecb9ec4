"""The key of a call, by the roles of its operands: everything that its checks, plans and builds depend on, except its
row count and its tensors' addresses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..operands import Operands, Role, Slot
from ..planner.norm_problem import ALIGNMENT
from ..problem.outputs import shape_of
from ..problem.rows import row_view, sharing, spread
from ..settings import margin
from ..settings.forcing import asked_variants

PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))


class NotPrepared(RuntimeError):
    """No program is kept for such a call. Never reaches the user."""


class Parts(NamedTuple):
    """Of what a key is made, for one type of operands. Operands are given by their indices."""

    plain: itemgetter  # picks the operands that are parts of the key as they are, and others that say which op it is
    settings: tuple[tuple[int, Callable], ...]  # other operands that are no tensors, and what makes parts of them
    pick: itemgetter  # picks the tensors
    slots: tuple[Slot, ...]  # of the tensors
    shaped: tuple[int, ...]  # tensors whose shapes are parts of the key
    constants: tuple[int, ...]
    spread: tuple[tuple[int, Callable], ...]  # modulations, and what makes parts of them
    fits: tuple[tuple[int, Role], ...]  # tensors of as many rows as x


@functools.cache
def parts_of(operands_type: Any) -> Parts:
    slots = list(enumerate(operands_type.slots, 1))
    tensors = [(at, slot) for at, slot in slots if slot.role.is_tensor]
    shaped = Role.PARAMETER, Role.STRIDED, Role.CONSTANT, Role.TABLE
    fixed = *shaped, *SPREAD  # the key says whether they fit
    plain = Role.DTYPE, Role.FORM, Role.FLAG, Role.INTEGER, Role.BOOL
    rows = [(at, slot) for at, slot in tensors if slot.role not in fixed and slot.name != "x"]
    return Parts(
        itemgetter(0, -1, *[at for at, slot in slots if slot.role in plain]),
        tuple((at, SETTINGS[slot.role]) for at, slot in slots if slot.role in SETTINGS),
        itemgetter(*[at for at, _ in tensors]),
        tuple(slot for _, slot in tensors),
        tuple(at for at, slot in tensors if slot.role in shaped),
        tuple(at for at, slot in tensors if slot.role is Role.CONSTANT),
        tuple((at, SPREAD[slot.role]) for at, slot in tensors if slot.role in SPREAD),
        tuple((at, slot.role) for at, slot in rows),
    )


def look(operands: Operands, invariance: int = 0) -> tuple[tuple, list[int]]:
    """(key, addresses of the tensors in the order of operands.tensors, 0 for an absent one). Raises NotPrepared, or
    RuntimeError for a tensor that has no memory, such as a transform's. What all tensors share is not in functions of
    its own, because this is most of a call's own host time."""
    kind = type(operands)
    plain, settings, pick, slots, shaped, constants, spread_over_rows, _ = parts_of(kind)
    shape = operands.normalized_shape
    for size in shape:
        if type(size) is not int:  # 8.0 and True are equal to integers
            raise NotPrepared
    key = [kind, tuple(shape), asked_variants(), margin.sms, invariance, *plain(operands)]
    for at, part in settings:
        key.append(part(operands[at]))
    addresses, bits = [], 0
    for tensor in pick(operands):
        if tensor is None:
            key.append(None)
            addresses.append(0)
            continue
        if type(tensor) not in PLAIN_TYPES or tensor.is_neg():
            raise NotPrepared
        address = tensor.data_ptr()
        if not address and slots[len(addresses)].is_read:
            raise NotPrepared
        key.append(tensor.dtype)
        key.append(tensor.get_device())
        if not tensor.is_contiguous():
            key.append(LAYOUTS[slots[len(addresses)].role](tensor, operands))
        addresses.append(address)
        bits |= address
    for at in shaped:
        if operands[at] is not None:
            key.append(operands[at].shape)
    for at in constants:
        if operands[at] is not None and operands[at].requires_grad:
            raise NotPrepared
    for at, part in spread_over_rows:
        if operands[at] is not None:
            key.append(part(operands[at], operands))
    if bits % ALIGNMENT:
        key += [address % ALIGNMENT == 0 for address in addresses]
    return tuple(key), addresses


def fit(operands: Operands, shape: torch.Size, statistics: int) -> bool:
    """Whether all tensors have as many rows as an x of this shape, or statistics. The key does not say so."""
    for at, role in parts_of(type(operands)).fits:
        tensor = operands[at]
        if tensor is None:
            continue
        if role is Role.STATISTIC:
            fits = tensor.shape.numel() == statistics  # that of a tensor would answer for a nested one, too
        elif role is Role.ROWS:
            fits = tensor.shape == shape
        else:
            width = operands.width - 2 * shape[-1]
            fits = tensor.shape == shape_of(role, shape, operands.normalized_shape, width=width)
        if not fits:
            return False
    return True


def _eps(eps: Any) -> float | None:
    if eps is not None and (type(eps) is not float or eps != eps):  # a NaN is equal to none
        raise NotPrepared
    return eps


def _count(number: Any) -> int:
    if type(number) is not int:
        raise NotPrepared
    return number


def _rows(tensor: Tensor, operands: Operands) -> tuple:
    batch_ndim = tensor.ndim - len(operands.normalized_shape)
    view = row_view(tensor, batch_ndim) if batch_ndim >= 0 else None
    if view is None:
        raise NotPrepared
    return view[1:]


def _statistic(tensor: Tensor, _: Operands) -> tuple:
    """Any shape, but one stride."""
    view = row_view(tensor, tensor.ndim)
    if view is None or view.inner_rows != 1:
        raise NotPrepared
    return view[1:]


def _modulation(tensor: Tensor, operands: Operands) -> tuple:
    """Which batch dims of x it has whole, how many rows of x share one of its rows, and how its rows lie as one for
    each row of x."""
    found = _modulation_of(tensor.shape, tensor.stride(), operands.x.shape, len(operands.normalized_shape))
    if found is None:
        raise NotPrepared
    return found


@functools.lru_cache
def _modulation_of(shape: torch.Size, strides: tuple[int, ...], of_x: torch.Size, ndim: int) -> tuple | None:
    tensor, batch_ndim = torch.empty_strided(shape, strides, device="meta"), len(of_x) - ndim
    view = row_view(spread(tensor, len(of_x), ndim).expand(of_x), batch_ndim)
    if view is None:
        return None
    shared = sharing(tensor, of_x[:batch_ndim], ndim)
    return shared.whole, shared.rows, view[1:]


def _copied(tensor: Tensor, _: Operands) -> tuple:
    raise NotPrepared


# What is read for each row of x, and has another shape: how it lies in memory.
SPREAD = {Role.MODULATION: _modulation}
# How tensors that are not contiguous lie in memory.
LAYOUTS = {
    Role.ROWS: _rows,
    Role.STATISTIC: _statistic,
    Role.PARAMETER: _copied,
    Role.PACKED_ROWS: _copied,
    **dict.fromkeys(SPREAD, lambda *_: None),  # which says it
    Role.COLUMNS: _copied,
    Role.INDEX: _copied,
    **dict.fromkeys((Role.STRIDED, Role.CONSTANT, Role.TABLE), lambda tensor, _: tensor.stride()),
}
SETTINGS = {Role.EPS: _eps, Role.MASK: tuple, Role.COUNT: _count}
