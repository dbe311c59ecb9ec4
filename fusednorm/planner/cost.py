"""Predicted time of a plan: bytes moved, fixed costs and imbalance. For people to read; no plan is chosen by it.

The constants are fitted to the times of chosen plans on an H200; other GPUs are assumed to behave alike. Eight in ten
predictions were between 11% too short and 7% too long (bench/NOTES.md, "Evidence behind constants").
"""

from __future__ import annotations

from typing import NamedTuple

from .device import DeviceSpec
from .norm_problem import NormProblem
from .plan import Plan, num_ctas, num_partials, num_passes

STREAM_SHARE = 0.925  # share of the datasheet's bandwidth, fixed costs aside
KERNEL_US = 4.7  # launch, filling and draining the memory system
# The launch that sums the partials, which come from L2, and its second sum if both dw and db are wanted.
FINALIZE_US, SECOND_SUM_US = 2.1, 0.5
# By kernel.
EFFICIENCY = dict(
    multi_wave=0.92, column_tiles=0.80, pipelined=1.0, column_ring=1.0, warp_specialized=0.92, reference=0.40
)
# Share of the busiest CTA's extra work that costs time: CTAs that end early leave it their bandwidth, which hides the
# rest.
IMBALANCE_SHARE = 0.24


class Cost(NamedTuple):
    """bytes_moved counts reads and writes of device memory. share_of_light is the time to move the tensors once at the
    full `bandwidth`, divided by predicted_us."""

    bytes_moved: int
    predicted_us: float
    share_of_light: float


def cost(plan: Plan, problem: NormProblem, rows: int, device: DeviceSpec) -> Cost:
    light = tensor_bytes(problem, rows) / bandwidth(device)
    tensors = tensor_bytes(problem, rows, passes=2 if _reads_twice(plan, problem) else 1)
    partials = 2 * partial_bytes(plan, problem, rows, device)  # written and read
    moved = tensors + partials + small_bytes(problem, rows)
    two_kernels = plan.kernel == "column_tiles" and _reads_twice(plan, problem)
    fixed = KERNEL_US * (1 + two_kernels)
    if problem.num_sums:
        fixed += FINALIZE_US + SECOND_SUM_US * (problem.num_sums - 1)
    waiting = 1 + IMBALANCE_SHARE * (imbalance(plan, problem, rows, device) - 1)
    time = fixed + moved / bandwidth(device) * waiting / EFFICIENCY[plan.kernel]
    return Cost(moved, time, light / time)


def bandwidth(device: DeviceSpec) -> float:
    """Bytes per us that a streaming kernel moves."""
    return STREAM_SHARE * device.bandwidth_gb_s * 1e3


def tensor_bytes(problem: NormProblem, rows: int, passes: int = 1) -> int:
    """Bytes of x, dy, dx and the gradient added to dx (x and y in the forward), with x and dy read `passes` times; and
    of the form's other row tensors."""
    if problem.direction == "forward":
        per_element = (passes + 1) * problem.x_dtype.itemsize
    else:
        read = problem.x_dtype.itemsize + problem.grad_dtype.itemsize
        per_element = passes * read + problem.wants_dx * problem.x_dtype.itemsize
        if problem.residual_dtype is not None:
            per_element += problem.residual_dtype.itemsize
    per_element += sum(dtype.itemsize for dtype in problem.rows_in + problem.rows_out)
    return rows * problem.width * per_element


def partial_bytes(plan: Plan, problem: NormProblem, rows: int, device: DeviceSpec) -> int:
    """Bytes of the dw and db partials."""
    if plan.kernel == "reference":
        return 0
    wants = True, problem.wants_float32_sum, problem.form.groups
    partials = num_partials(plan, num_ctas(plan, rows, problem.cols, device, *wants))
    return problem.num_sums * partials * problem.width * problem.acc_dtype.itemsize


def small_bytes(problem: NormProblem, rows: int) -> int:
    """Bytes of the statistics, the parameters and their gradients."""
    statistics = rows * problem.form.groups * problem.acc_dtype.itemsize * (2 if problem.norm == "layer" else 1)
    parameters = sum(dtype.itemsize for dtype in (problem.weight_dtype, problem.bias_dtype) if dtype is not None)
    return statistics + 2 * problem.width * parameters


def imbalance(plan: Plan, problem: NormProblem, rows: int, device: DeviceSpec) -> float:
    """Row tiles of the busiest CTA divided by the mean over all CTAs; larger if there are too few CTAs for all SMs."""
    if plan.kernel in ("column_tiles", "reference"):
        return 1.0
    tiles = -(-rows // plan.rows_per_tile)
    groups = problem.form.groups
    ctas = num_ctas(plan, rows, problem.cols, device, problem.num_sums > 0, problem.wants_float32_sum, groups)
    # Idle SMs leave their share of bandwidth unused.
    busy = min(1.0, ctas * groups / max(1, device.sm_count // plan.cluster))
    return -(-tiles // ctas) * ctas / tiles / max(busy, 0.25)


def _reads_twice(plan: Plan, problem: NormProblem) -> bool:
    """Whether the inputs come from memory a second time. A forward by column tiles finds its row in the cache."""
    return num_passes(plan, problem) != 1 and problem.wants_dx
