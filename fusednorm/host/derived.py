"""What kernels are compiled with beside the fields of their plan, which it follows from."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ..planner import budget, limits
from ..planner.device import DeviceSpec
from ..planner.norm_problem import NormProblem
from ..planner.plan import ColumnTilePlan, Plan, RingPlan, WarpSpecializedPlan


def derived_of(plan: Plan, problem: NormProblem, device: DeviceSpec, many_samples: bool = False) -> dict[str, Any]:
    """What follows from a plan and its problem, by name."""
    found: dict[str, Any] = {}
    if isinstance(plan, RingPlan):
        found |= of_ring(plan, problem)
    elif plan.kernel == "column_tiles":
        of_forward = row_pass_registers(problem, math.gcd(problem.cols, 16))
        of_backward = column_pass_registers(plan, problem, device)
        found |= {"register_limit": of_forward if problem.is_forward else of_backward}
    if problem.num_sums and not (plan.kernel == "column_tiles" and problem.wants_dx):
        cols = problem.cols if problem.by_sample else problem.width
        piece, loads, warps = piece_of_partials(cols, problem.acc_dtype.itemsize, many_samples)
        found["sums"] = {"cols": piece, "num_loads": loads, "num_warps": warps, "dependent": device.places_dependents}
    return found


def of_ring(plan: RingPlan, problem: NormProblem) -> dict[str, bool]:
    """Whether a thread holds the next tile's statistics while it adds up the current one, whether bfloat16 values are
    widened two at a time (rowmath.widen), and whether threads hold what dx takes of a tile, or read it twice."""
    known = problem.quantities, budget.of_plan(plan, problem.cols)
    names = "prefetches_statistics", "widens_in_pairs", "reads_once"
    return {name: limits.value_of(getattr(limits, name), *known) for name in names}


def entry_registers(plan: WarpSpecializedPlan) -> int:
    """Registers per thread at the start of a kernel. Its compute groups reach max_registers once the producer has given
    up its surplus."""
    warps = plan.num_warps * plan.num_groups
    total = warps * plan.max_registers + budget.PRODUCER_WARPS * budget.PRODUCER_REGISTERS
    return budget.REGISTER_STEP * math.ceil(total / (warps + budget.PRODUCER_WARPS) / budget.REGISTER_STEP)


def row_pass_registers(problem: NormProblem, divisor: int) -> int | None:
    """Registers (maxnreg) of a forward by column tiles; None: as many as the compiler takes. `divisor` is the largest
    power of two, up to 16, that divides the columns and all row strides."""
    return limits.value_of(limits.row_pass_registers, problem.quantities, {"divisor": divisor})


def column_pass_registers(plan: ColumnTilePlan, problem: NormProblem, device: DeviceSpec) -> int | None:
    """Those of a backward, which let all CTAs of an SM be resident."""
    limit = budget.register_limit(plan.ctas_per_sm * budget.WARP_SIZE * plan.num_warps, device)
    return limits.value_of(limits.column_pass_registers, problem.quantities, vars(device) | {"limit": limit})


@functools.cache
def partial_registers(cols: int, *dtypes: torch.dtype | bool | None) -> int | None:
    """Registers (maxnreg) of a launch that adds up partials. The dtypes are those of partials and sums, false if not
    wanted."""
    widest = max(each.itemsize for each in dtypes if each)
    return limits.value_of(limits.partial_registers, {"cols": cols, "widest": widest})


def piece_of_partials(cols: int, itemsize: int, many_samples: bool = False) -> tuple[int, int, int]:
    """(columns that a CTA sums, loads of a thread at a time, warps) for partials of `cols` columns, of many samples or
    not. They and the number of partials determine the order of the additions, so the sums do not depend on the plan,
    the device or the caller in any other way."""
    piece, num_warps = next(of_it for most, *of_it in limits.partials_pieces if most is None or cols <= most)
    if many_samples:
        piece, num_warps = limits.piece_of_samples["cols"], limits.piece_of_samples["warps"]
    return piece, limits.partial_loads * 4 // itemsize, num_warps
