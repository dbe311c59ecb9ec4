"""Rows in the order of the numbers that an index gives them: the launches that sort them, and those that add up the
partials of each number."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton

from ..kernels import segments
from ..kernels.config import SortTile
from ..operands import Role
from ..planner import limits
from ..planner.device import DeviceSpec
from ..planner.plan import Plan
from ..problem.calls import BackwardCall
from .launcher import Launch
from .program import Address, Number, Operand, Part
from .schedules import SampleSum
from .sums import partials_tile


class Sort(NamedTuple):
    """Sorts the rows of a call. Each pass reads what the one before has written."""

    launches: tuple[Launch, ...]
    parts: tuple[Part, ...]  # of the workspace
    named: dict[str, Operand]  # what a backward takes of it


def sort_of(call: BackwardCall, first: int) -> Sort:
    """`first` is the index of the first part."""
    size, (index,) = call.rows_of_sum, [each.value for each in call.added if each.role is Role.INDEX]
    elements, most_bits, num_warps, ctas = limits.sort
    bits = (size + 1).bit_length()
    passes = -(-bits // most_bits)
    of_pass = -(-bits // passes)
    digits = 1 << of_pass
    pair = Part(per_row=1, dtype=torch.int32), Part(per_row=1, dtype=torch.int32)
    parts = (Part(beside=ctas * digits, dtype=torch.int32), *pair * min(passes, 2))
    counts, *sides = [Address(at, torch.int32) for at in range(first, first + len(parts))]
    launches, keys, order = [], index, None
    for nth in range(passes):
        tile = SortTile(elements // digits, digits, nth * of_pass, num_warps)
        written = sides[nth % 2 * 2 : nth % 2 * 2 + 2]
        last = Number.ROWS, size
        launches += (
            Launch(segments.count_digits, (ctas,), (keys, counts, *last), None, tile),
            Launch(segments.sort_by_digit, (ctas,), (keys, order, counts, *written, *last), None, tile),
        )
        keys, order = written
    return Sort(tuple(launches), parts, {"key_ptr": keys, "order_ptr": order})


def summed(call: BackwardCall, plan: Plan, sums: tuple[SampleSum, ...], sort: Sort, spec: DeviceSpec) -> Launch:
    """The launch that adds up the partials of tables' gradients, with one CTA per piece of each row of each sum."""
    cols, size, (many, columns) = call.problem.width, call.rows_of_sum, limits.many_keys
    tile = partials_tile(cols, call.problem.acc_dtype.itemsize, spec.places_dependents)
    tile = replace(tile, cols=columns) if size >= many else tile
    partials, outs, _ = zip(*sums, strict=True)
    args = partials, outs, sort.named["key_ptr"], Number.ROWS, Number.PARTIALS, cols
    options, constants = {"launch_pdl": True} if tile.dependent else {}, {"tile_rows": plan.rows_per_tile}
    grid = size, triton.cdiv(cols, tile.cols), len(sums)
    return Launch(segments.sum_keys, grid, args, None, tile, options, constants)
