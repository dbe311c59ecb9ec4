"""What kernels are compiled and launched with beside the fields of their plan. It follows from plan, problem and device
by rules that choose nothing. `explain` shows it. The measurements are in bench/NOTES.md, "Evidence behind constants".
"""

from __future__ import annotations

from typing import NamedTuple

from . import limits
from .budget import WARP_SIZE, of_plan, register_limit
from .device import DeviceSpec
from .norm_problem import NormProblem
from .plan import ColumnTilePlan, RingPlan

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


def of_ring(plan: RingPlan, problem: NormProblem) -> dict[str, bool]:
    """Whether a thread holds the next tile's statistics while it adds up the current tile; whether bfloat16 values
    become float32 two at a time (rowmath.widen); and whether threads hold what dx takes of a tile instead of reading
    the tile twice: in a backward with an activation, which they would compute twice, where 16-bit rows leave that many
    instructions for each byte."""
    known = problem.quantities, of_plan(plan, problem.cols)
    names = "prefetches_statistics", "widens_in_pairs", "reads_once"
    return {name: limits.value_of(getattr(limits, name), *known) for name in names}


def row_pass_registers(problem: NormProblem, divisor: int) -> int | None:
    """Registers (maxnreg) of a forward by column tiles; None: as many as the compiler takes. `divisor` is the largest
    power of two, up to 16, that divides the columns and all row strides."""
    return limits.value_of(limits.row_pass_registers, problem.quantities, {"divisor": divisor})


def column_pass_registers(plan: ColumnTilePlan, problem: NormProblem, device: DeviceSpec) -> int | None:
    """Those of a backward. The oldest Triton keeps to the registers that let all CTAs of an SM be resident; later
    releases may take more."""
    limit = register_limit(plan.ctas_per_sm * WARP_SIZE * plan.num_warps, device)
    return limits.value_of(limits.column_pass_registers, problem.quantities, vars(device) | {"limit": limit})


def copied_tile(cols: int) -> tuple[int, int]:
    """Rows and columns of the tile by which a CTA copies `cols` columns of a tensor. Both are powers of two."""
    chunk = min(limits.copied_columns, 1 << (cols - 1).bit_length())
    return limits.copied_elements // chunk, chunk
