"""What kernels are compiled and launched with beside the fields of their plan. It follows from plan, problem and device
by rules that choose nothing. `explain` shows it. The measurements are in bench/NOTES.md, "Evidence behind constants".
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from . import limits
from .budget import WARP_SIZE, reads_once, register_limit
from .device import OLDEST_TRITON, DeviceSpec
from .norm_problem import NormProblem
from .plan import ColumnTilePlan, PipelinedPlan, Plan, RingPlan

OLDEST_DEPENDENT_ARCH = 90  # oldest arch on which a dependent launch may be placed before its predecessor has ended


class Piece(NamedTuple):
    """How a CTA adds up sums: `cols` columns, by num_loads loads of a thread at a time."""

    cols: int
    num_loads: int
    num_warps: int


def piece_of_partials(cols: int, itemsize: int) -> Piece:
    """The piece of partials of `cols` columns. It and the number of partials determine the order of the additions, so
    the sums do not depend on the plan, the device or the caller in any other way."""
    piece, num_warps = next(of_it for most, *of_it in limits.partials_pieces if most is None or cols <= most)
    return Piece(piece, limits.partial_loads * 4 // itemsize, num_warps)


def may_be_dependent(device: DeviceSpec) -> bool:
    """Whether the launch that sums partials may be placed before the one that writes them has ended."""
    return device.arch >= OLDEST_DEPENDENT_ARCH


def prefetches_statistics(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether a thread can hold the next tile's statistics while it adds up the current tile. LayerNorm with 128
    registers and many columns lacks the two registers for them."""
    return problem.norm == "rms" or plan.max_registers > 128 or plan.columns_per_thread <= limits.columns_to_prefetch


def widens_in_pairs(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether bfloat16 values become float32 two at a time (rowmath.widen): in LayerNorm's backward with many columns
    for a thread, or in a cluster of CTAs with more than four warps. An SM then has no other work to fill its waits, so
    the number of instructions sets the time. With 128 registers, 32 columns would spill if the row ends within a
    chunk."""
    if problem.norm == "rms" or problem.is_forward or problem.x_dtype != torch.bfloat16:
        return False
    columns, shared = plan.columns_per_thread, plan.cluster > 1 and plan.num_warps > limits.warps_in_pairs
    pays = isinstance(plan, PipelinedPlan) and (shared or columns > limits.columns_in_pairs)
    fits = plan.max_registers > 128 or columns <= limits.columns_in_pairs_of_128_registers
    return pays and (fits or plan.is_whole(problem.cols))


def row_pass_registers(problem: NormProblem, divisor: int) -> int | None:
    """Registers (maxnreg) of a forward by column tiles; None: as many as the compiler takes. It takes too few, and
    spills, for elements of 4 bytes or more at some widths that are no multiples of 16. `divisor` is the largest power
    of two, up to 16, that divides the columns and all row strides."""
    return limits.row_pass_registers if 1 < divisor < 16 and problem.x_dtype.itemsize >= 4 else None


def column_pass_registers(plan: ColumnTilePlan, problem: NormProblem, device: DeviceSpec) -> int | None:
    """Those of a backward. The compiler spills with 16-bit x and a float64 weight. The oldest Triton keeps to the
    registers that let all CTAs of an SM be resident; later releases may take more."""
    if problem.x_dtype.itemsize == 2 and problem.weight_dtype == torch.float64:
        return limits.column_pass_registers
    if device.triton == OLDEST_TRITON:
        return None
    return register_limit(plan.ctas_per_sm * WARP_SIZE * plan.num_warps, device)


def copied_tile(cols: int) -> tuple[int, int]:
    """Rows and columns of the tile by which a CTA copies `cols` columns of a tensor. Both are powers of two."""
    chunk = min(limits.copied_columns, 1 << (cols - 1).bit_length())
    return limits.copied_elements // chunk, chunk


def derived(plan: Plan, problem: NormProblem, device: DeviceSpec) -> dict[str, Any]:
    """All of this that a call has, by name."""
    found: dict[str, Any] = {}
    if isinstance(plan, RingPlan):
        found |= {"prefetches_statistics": prefetches_statistics(plan, problem)}
        found |= {"widens_in_pairs": widens_in_pairs(plan, problem), "reads_once": reads_once(plan, problem)}
    elif plan.kernel == "column_tiles":
        of_forward = row_pass_registers(problem, math.gcd(problem.cols, 16))
        of_backward = column_pass_registers(plan, problem, device)
        found |= {"register_limit": of_forward if problem.is_forward else of_backward}
    if problem.num_sums and not (plan.kernel == "column_tiles" and problem.wants_dx):
        cols = problem.cols if problem.by_sample else problem.width
        found |= {"sums": piece_of_partials(cols, problem.acc_dtype.itemsize)._asdict()}
        found["sums"] |= {"dependent": may_be_dependent(device)}
    return found
