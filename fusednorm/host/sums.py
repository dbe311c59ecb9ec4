"""How sums over rows are finished: a launch adds up the partials that the CTAs of a backward leave. And ordered sums:
the backward runs for one block of rows after another, and a last launch adds up the sums of the blocks in order."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton

from ..kernels import finalizer
from ..kernels.config import PartialsTile
from ..operands import OWN_OUTPUTS, Role
from ..planner import limits
from ..planner.plan import piece_of_partials
from ..problem.calls import Added, BackwardCall
from .key import Extent
from .launcher import Launch
from .program import Address, Blocks, Number, Output, Workspace
from .schedules import OF_ALL_SAMPLES, SampleSum, Written
from .tiles import norm_of


def sample_sum(call: BackwardCall, partial: Address, at: int) -> SampleSum:
    """The one of the form's gradient `at`."""
    output = call.added_outputs[at - 1]
    rows = output.sharing.rows
    address = Address(len(call.tensors) + OWN_OUTPUTS + at - 1, output.value)
    return SampleSum(partial, address, rows // call.sample_rows if rows else OF_ALL_SAMPLES)


def finalized(call: BackwardCall, out: Written) -> Launch:
    """The launch that sums the partials, with one CTA per piece of each sum: those of samples, or of dw and of db."""
    problem, cols = call.problem, call.problem.cols if call.problem.by_sample else call.problem.width
    tile = partials_tile(cols, problem.acc_dtype.itemsize, out.announces_end)
    options, pieces = {"launch_pdl": True} if tile.dependent else {}, triton.cdiv(cols, tile.cols)
    if problem.by_sample:
        of_parameters = [(out.dw_partial, out.dw), (out.db_partial, out.db)]
        sums = [SampleSum(*each, OF_ALL_SAMPLES) for each in of_parameters if all(each)] + list(out.sums)
        args = (*map(tuple, zip(*sums, strict=True)), Number.CTAS, cols)
        return Launch(finalizer.finalize_samples, (Number.SAMPLES, pieces, len(sums)), args, None, tile, options)
    norm = norm_of(problem)
    weight = None if norm.form.finish_dw is None else call.weight
    args = (*out[1:5], Number.PARTIALS, cols, weight)
    return Launch(finalizer.finalize, (pieces * problem.num_sums,), args, norm, tile, options)


@functools.cache
def partials_tile(cols: int, itemsize: int, dependent: bool) -> PartialsTile:
    """The tile that sums the partials of `cols` columns."""
    return PartialsTile(*piece_of_partials(cols, itemsize), dependent)


# --- Ordered sums ---


@functools.cache
def blocks_tile() -> PartialsTile:
    """The tile that adds up the sums of blocks."""
    return PartialsTile(*limits.piece_of_blocks)


def of_blocks(out: Written, first: int, dtype: torch.dtype) -> tuple[Written, dict[Address, Address]]:
    """What a block writes: its sums go to parts of the workspace, the `first` and those behind it. And these parts by
    the outputs that are sums over all blocks."""
    sums_out = [out.dw, out.db, *[each.out for each in out.sums if each.samples == OF_ALL_SAMPLES]]
    parts = {each: Address(at, dtype) for at, each in enumerate(filter(None, sums_out), first)}
    sums = tuple([each._replace(out=parts.get(each.out, each.out)) for each in out.sums])
    return out._replace(dw=parts.get(out.dw), db=parts.get(out.db), sums=sums), parts


def add_blocks(parts: dict[Address, Address], width: int) -> Launch:
    """The launch that adds up the sums of blocks, with one CTA per piece of each sum."""
    tile = blocks_tile()
    grid = triton.cdiv(width, tile.cols), len(parts)
    args = tuple(parts.values()), tuple(parts), Number.PARTIALS, width, padded(width)
    return Launch(finalizer.add_blocks, grid, args, None, tile)


def padded(width: int) -> int:
    """Elements from the sums of a block to those of the next one, at multiples of 16 bytes."""
    return -(-width // 4) * 4


def blocks(call: BackwardCall, outputs: Sequence[Output | None], workspace: Workspace) -> Blocks:
    """How tensors, outputs and parts of the workspace go on from block to block. All tensors that have rows are
    packed."""
    rows, width = call.block_rows, call.problem.width
    added = [each for each in call.added if each.role.is_tensor]
    is_of_rows = [True] * 4 + [False] * 2 + [True] + [_has_rows(each, call.sample_rows) for each in added]
    of_tensors = [
        each.numel() * rows // call.rows * each.itemsize if each is not None and has_rows else 0
        for each, has_rows in zip(call.tensors, is_of_rows, strict=True)
    ]
    elements = {Extent.X: rows * width, Extent.COLUMNS: rows * call.width}
    of_outputs = [each.dtype.itemsize * elements.get(each.extent, 0) if each else 0 for each in outputs]
    for at, each in enumerate(call.added_outputs, OWN_OUTPUTS):
        if each.value and each.role is Role.MODULATION and each.sharing.rows:
            of_outputs[at] = each.value.itemsize * width * (rows // each.sharing.rows)
    of_parts = [each.per_block * workspace.dtype.itemsize for each in workspace.parts]
    return Blocks(rows, int(any(of_parts)), (*of_tensors, *of_outputs, *of_parts))


def _has_rows(added: Added, sample_rows: int) -> bool:
    """Whether an operand has rows of its own for a block: not one for all rows of x, and no table."""
    is_whole = added.role in (Role.PARAMETER, Role.TABLE)
    return not is_whole and (not added.is_of_samples or bool(sample_rows))
