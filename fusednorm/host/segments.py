"""Sums of rows by a number that each has, on the GPU: ATen sorts the numbers, and two launches add up."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..dtypes import accumulation_dtype
from ..kernels import segments
from ..kernels.config import SegmentTile
from ..planner import limits
from ..planner.norm_problem import ALIGNMENT
from ..planner.plan import Grid
from ..problem.rows import packed
from . import fallback, gpus, launcher, prepared
from .fallback import BuildFailed
from .key import Extent
from .launcher import Launch
from .program import MOST_ROWS, Address, Number, Output, Part, Program, Workspace
from .sums import partials_tile

KEYS = torch.int8, torch.int16, torch.int32, torch.int64  # fewer bytes are fewer passes of the sort


class SegmentSums(NamedTuple):
    """What the kernels depend on, beside the number of rows. Sums have one dtype."""

    size: int  # how many numbers there are
    cols: int
    dtypes: tuple[torch.dtype, ...]  # of the rows
    dtype: torch.dtype
    aligned: tuple[bool, ...]

    @property
    def title(self) -> str:
        return "lookup_backward"

    @property
    def acc_dtype(self) -> torch.dtype:
        return functools.reduce(torch.promote_types, map(accumulation_dtype, (*self.dtypes, self.dtype)))


def dtype_of_keys(size: int) -> torch.dtype:
    """The smallest dtype of numbers from -1 to `size`."""
    return next(each for each in KEYS if size <= torch.iinfo(each).max)


def sums(rows: Sequence[Tensor], index: Tensor, size: int, dtype: torch.dtype) -> list[Tensor] | None:
    """A sum `[size, cols]` of each tensor's rows by their numbers; None if the kernels cannot be built."""
    cols, device = rows[0].shape[-1], rows[0].device
    rows = [packed(each).view(-1, cols) for each in rows]
    keys, order = index.reshape(-1).clamp(-1, size).to(dtype_of_keys(size)).sort(stable=True)
    tensors, shape = [keys, order, *rows], rows[0].shape
    addresses = [each.data_ptr() for each in tensors]
    aligned = tuple([address % ALIGNMENT == 0 for address in addresses])
    problem = SegmentSums(size, cols, tuple([each.dtype for each in rows]), dtype, aligned)
    key = problem, rows[0].get_device()
    kind = prepared.kind_of(key)
    bound = kind and (kind.by_shape.get(shape) or kind.bind(shape))
    outputs = bound and bound.launch(addresses)
    if outputs is None:
        try:
            with gpus.current(device):
                outputs, bound = launcher.run(program_of(problem), tensors, shape, len(keys))
        except BuildFailed as failed:
            fallback.remember(tile_of(cols), problem, gpus.spec_of(device), str(failed))
            return None
        if bound:
            prepared.keep_by(key, shape, bound)
    return list(outputs)


def program_of(problem: SegmentSums) -> Program:
    size, cols, dtypes, dtype, aligned = problem
    count, tile = len(dtypes), tile_of(cols)
    given = [Address(at, each, aligned[at]) for at, each in enumerate((dtype_of_keys(size), torch.int64, *dtypes))]
    keys, order, *rows = given
    outs = tuple([Address(2 + count + at, dtype) for at in range(count)])
    partials = tuple([Address(2 + 2 * count + at, problem.acc_dtype) for at in range(count)])
    finisher = partials_tile(cols, problem.acc_dtype.itemsize, False)
    launches = (
        Launch(
            segments.sum_blocks, (Number.CTAS, triton.cdiv(cols, tile.chunk), count),
            (tuple(rows), partials, keys, order, Number.ROWS, cols, size), None, tile,
        ),
        Launch(
            segments.sum_segments, (size, triton.cdiv(cols, finisher.cols), count),
            (partials, outs, keys, Number.ROWS, cols), None, finisher, constants={"block": tile.block},
        ),
    )  # fmt: skip
    outputs = (Output(Extent.PARAMETER, dtype, shape=(size, cols)),) * count
    workspace = Workspace(problem.acc_dtype, (Part(per_partial=cols, beside=size * cols),) * count)
    blocks = Grid(tile.block, MOST_ROWS, MOST_ROWS, 0, 0, 0, 0, 1)  # a CTA of each, which leaves a row of partials
    return Program(launches, 2 + count, outputs, workspace, blocks, (cols,))


@functools.cache
def tile_of(cols: int) -> SegmentTile:
    elements, most, block, num_warps = limits.segment_tile
    chunk = min(most, triton.next_power_of_2(cols))
    return SegmentTile(min(block, elements // chunk), chunk, block, num_warps)
