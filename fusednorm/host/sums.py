"""How sums over rows are finished: a launch adds up the partials that the CTAs of a backward leave. And ordered sums:
the backward runs for one block of rows after another, and a last launch adds up the sums of the blocks in order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from ..kernels import finalizer
from ..kernels.config import PartialsTile
from ..operands import OWN_OUTPUTS, Role
from ..planner import limits
from ..problem.calls import Added, BackwardCall
from .derived import partial_registers, piece_of_partials
from .launcher import Launch
from .program import Address, Blocks, Number, Output, Workspace
from .schedules import OF_ALL_SAMPLES, SampleSum, Written
from .tiles import log2_divisor_of, norm_of


def sample_sum(call: BackwardCall, partial: Address, at: int) -> SampleSum:
    """The one of the form's gradient `at`."""
    output = call.added_outputs[at - 1]
    rows = output.sharing.rows
    address = Address(len(call.tensors) + OWN_OUTPUTS + at - 1, output.value)
    return SampleSum(partial, address, rows // call.sample_rows if rows else OF_ALL_SAMPLES)


def finalized(call: BackwardCall, out: Written) -> Launch:
    """The launch that sums the partials, with one CTA per piece of each sum: those of samples, or of dw and of db."""
    problem = call.problem
    by_sample = problem.by_sample and not problem.by_key
    cols = problem.cols if by_sample else problem.width
    tile = partials_tile(cols, problem.acc_dtype.itemsize, out.announces_end, call.many_samples)
    written = problem.wants_dw and problem.weight_dtype, problem.wants_db and problem.bias_dtype, *problem.sums_out
    options, pieces = options_of(tile, cols, problem.acc_dtype, *written), triton.cdiv(cols, tile.cols)
    if by_sample:
        of_parameters = [(out.dw_partial, out.dw), (out.db_partial, out.db)]
        sums = [SampleSum(*each, OF_ALL_SAMPLES) for each in of_parameters if all(each)] + list(out.sums)
        args = (*map(tuple, zip(*sums, strict=True)), Number.CTAS, cols)
        return Launch(finalizer.finalize_samples, (Number.SAMPLES, pieces, len(sums)), args, None, tile, options)
    norm = norm_of(problem)
    weight = None if norm.form.finish_dw is None else call.weight
    args = (*out[1:5], Number.PARTIALS, cols, weight)
    return Launch(finalizer.finalize, (pieces * (problem.wants_dw + problem.wants_db),), args, norm, tile, options)


def options_of(tile: PartialsTile, cols: int, *dtypes: torch.dtype | bool | None) -> dict[str, Any]:
    """The compiler's."""
    registers = partial_registers(cols, *dtypes)
    return ({"launch_pdl": True} if tile.dependent else {}) | ({"maxnreg": registers} if registers else {})


@functools.cache
def partials_tile(cols: int, itemsize: int, dependent: bool, many_samples: bool = False) -> PartialsTile:
    """The tile that sums the partials of `cols` columns."""
    return PartialsTile(*piece_of_partials(cols, itemsize, many_samples), dependent, log2_divisor_of(cols))


# --- Ordered sums ---


@functools.cache
def blocks_tile() -> PartialsTile:
    """The tile that adds up the sums of blocks."""
    return PartialsTile(*limits.piece_of_blocks)


class OverBlocks(NamedTuple):
    """A sum over all blocks."""

    out: Address
    part: Address  # of the workspace, with a sum for each block
    size: int


def of_blocks(call: BackwardCall, out: Written, first: int, dtype: torch.dtype) -> tuple[Written, list[OverBlocks]]:
    """What a block writes: its sums go to parts of the workspace, the `first` and those behind it."""
    width, of_all = call.problem.width, [each.out for each in out.sums if each.samples == OF_ALL_SAMPLES]
    sizes = {each: width for each in (out.dw, out.db) if each} | dict.fromkeys(of_all, width * call.rows_of_sum)
    over_blocks = [OverBlocks(each, Address(at, dtype), sizes[each]) for at, each in enumerate(sizes, first)]
    parts = {each.out: each.part for each in over_blocks}
    sums = tuple([each._replace(out=parts.get(each.out, each.out)) for each in out.sums])
    return out._replace(dw=parts.get(out.dw), db=parts.get(out.db), sums=sums), over_blocks


def add_blocks(over_blocks: list[OverBlocks]) -> list[Launch]:
    """The launches that add up the sums of blocks, one for each size of a sum, with one CTA per piece of each sum."""
    tile, launches = blocks_tile(), []
    for size in dict.fromkeys([each.size for each in over_blocks if each.size]):  # a table may have no rows
        outs, parts = zip(*[each[:2] for each in over_blocks if each.size == size], strict=True)
        args = parts, outs, Number.PARTIALS, size, padded(size)
        launches.append(Launch(finalizer.add_blocks, (triton.cdiv(size, tile.cols), len(outs)), args, None, tile))
    return launches


def padded(size: int) -> int:
    """Elements from the sum of a block to that of the next one, at multiples of 16 bytes."""
    return -(-size // 4) * 4


def blocks(
    call: BackwardCall, launches: Sequence[Launch], outputs: Sequence[Output | None], workspace: Workspace
) -> Blocks:
    """How tensors, outputs and parts of the workspace go on from block to block. All tensors that have rows are
    packed."""
    rows, width = call.block_rows, call.problem.width
    added = [each for each in call.added if each.role.is_tensor]
    is_of_rows = [True] * 4 + [False] * 2 + [True] + [_has_rows(each, call.sample_rows) for each in added]
    of_tensors = [
        each.numel() * rows // call.rows * each.itemsize if each is not None and has_rows else 0
        for each, has_rows in zip(call.tensors, is_of_rows, strict=True)
    ]
    elements = {Role.ROWS: rows * width, Role.COLUMNS: rows * call.width}
    of_outputs = [each.dtype.itemsize * elements.get(each.role, 0) if each else 0 for each in outputs]
    for at, each in enumerate(call.added_outputs, OWN_OUTPUTS):
        if each.value and each.role is Role.MODULATION and each.sharing.rows:
            of_outputs[at] = each.value.itemsize * width * (rows // each.sharing.rows)
    of_parts = [each.per_block * workspace.dtype.itemsize for each in workspace.parts]
    once = sum([each.kernel is finalizer.add_blocks for each in launches])
    return Blocks(rows, once, (*of_tensors, *of_outputs, *of_parts))


def _has_rows(added: Added, sample_rows: int) -> bool:
    """Whether an operand has rows of its own for a block: not one for all rows of x, and no table."""
    is_whole = added.role in (Role.PARAMETER, Role.TABLE)
    return not is_whole and (not added.is_of_samples or bool(sample_rows))
