"""The programs that are kept, by what a call looks like.

The first call of a kind is checked, planned and built the long way (ops.py, launch.py) and leaves a program. Later
calls of this kind are launched from it, without checks and planning, whatever their row counts are. The key of a kind
holds everything else that checks, plans and builds depend on. Programs are kept only of calls on a GPU whose tensors
are all read in place.

Here calls run in Python. native.py copies programs to C++, which runs them by the same rules (csrc/program.h).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..operands import Operands, Outputs
from ..problem.calls import BackwardCall, ForwardCall
from ..settings import invariance, margin
from .key import fit, look
from .program import Bound, Program

KEPT_KINDS = 4096  # if there would be more, all programs are dropped
KEPT_SHAPES = 64  # of x, for each kind; if there would be more, all shapes of the kind are forgotten


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
    invariance: int  # in force then, likewise


class InTwo:
    """In place of the program of a call that normalizes twice and is made as two, which have programs."""


IN_TWO = InTwo()
Kept = Program | InTwo | None
First = Callable[[Operands, Miss | None], tuple[Outputs | None, Kept]]

_kinds: dict[tuple, Kind] = {}
_in_two: set[tuple] = set()  # keys of calls that are made as two, because no kernel computes them


def run(operands: Operands, first: First | None = None) -> tuple[Outputs | None, Kept]:
    """(the outputs by a program, the program). If there is none for these operands, what `first` returns: it gets the
    operands, and a Miss if a program for such operands can be kept. The caller has made sure that no mode and no
    transform is active."""
    sms, in_force, key, bound = margin.sms, invariance.switch.invariance(), None, None
    try:
        key, addresses = look(operands, in_force)
        kind = _kinds.get(key)
        if kind is not None:
            shape = operands.x.shape
            bound = kind.by_shape.get(shape) or kind.bind(shape)
            if bound is not None and not fit(operands, shape, bound.rows * bound.program.groups):
                bound = None
    except (RuntimeError, TypeError, AttributeError):  # arguments of other types, or tensors without shape or memory
        bound = None
    if bound is not None:
        outputs = bound.launch(addresses)
        if outputs is not None:
            return outputs, bound.program
    if first is None:
        return None, None
    return first(operands, None if key is None else Miss(key, addresses, sms, in_force))


def keep(miss: Miss, call: ForwardCall | BackwardCall, bound: Bound) -> Program | None:
    """Keep the program of a call for later calls with the same key, if all tensors were read in place and no thread has
    changed what plans depend on meanwhile. Returns the program that is kept."""
    program = bound.program
    if not program.rows_above < call.rows <= program.most_rows:
        return None
    for tensor, address in zip(call.tensors, miss.addresses, strict=True):
        if tensor is not None and tensor.data_ptr() != address:
            return None  # a copy was made for the call
    return keep_of(miss, call.shape, bound)


def keep_of(miss: Miss, shape: torch.Size, bound: Bound) -> Program | None:
    """`keep`, of a call whose tensors were all read in place."""
    if miss.margin is not margin.sms or miss.invariance != bound.program.invariance:
        return None
    return keep_by(miss.key, shape, bound)


def keep_by(key: tuple, shape: torch.Size, bound: Bound) -> Program:
    """Keep a program under a key, unless there is one for as many rows. Returns the program that is kept."""
    kind = _kinds.get(key)
    if kind is None:
        if len(_kinds) >= KEPT_KINDS:
            _kinds.clear()
        kind = _kinds[key] = Kind(bound.program.normalized_shape)
    known = kind.find(bound.rows)
    if known is None:
        kind.programs.append(bound.program)
        kind.keep(shape, bound)
    return known or bound.program


def kind_of(key: tuple) -> Kind | None:
    """The programs that are kept under a key."""
    return _kinds.get(key)


def keep_in_two(miss: Miss | None) -> InTwo:
    """Keep that such a call is made as two."""
    if miss:
        if len(_in_two) >= KEPT_KINDS:
            _in_two.clear()
        _in_two.add(miss.key)
    return IN_TWO


def are_in_two(miss: Miss | None) -> bool:
    """Whether calls of this key are made as two."""
    return miss is not None and miss.key in _in_two


def forget() -> None:
    """Drop all programs."""
    _kinds.clear()
    _in_two.clear()
