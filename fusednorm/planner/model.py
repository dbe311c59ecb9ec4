"""predict_us(plan, problem, rows, device): the time of a call, from what its kernels move and wait for.

The memory moves all bytes, while each SM takes in its tiles, computes on them and waits for the sums of their rows. The
slowest of these sets the time; near a tie they add up in part (limits.sharpness). Starts and ends are added. `tune`
fits the coefficients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from . import limits
from .device import DeviceSpec
from .norm_problem import NormProblem
from .plan import Plan, RingPlan, clusters_at_once, grid_of, num_launches, num_passes


class Coefficients(NamedTuple):
    """What a GPU costs. Tables have the values (data/)."""

    bandwidth_share: float  # of the datasheet's bandwidth, for bytes of device memory
    launch_us: float  # start and end of a call
    second_launch_us: float  # of each kernel after the first
    ring_us: float  # of each warp of a ring, to set it up
    meeting_us: float  # at the start of a cluster, for each doubling of its CTAs
    sm_bytes_per_us: float  # that one SM takes in
    element_us: float  # of a tile, for 128 threads with one element each, and of each sum of columns
    row_us: float  # to reduce a row tile
    box_us: float  # for each piece of memory that TMA copies
    merge_us: float  # to add up what a warp has of a chunk's sums of columns
    partial_us: float  # of each row of partial sums


class Work(NamedTuple):
    """What a plan does for a number of rows. Numbers, or tensors of numbers of many plans (`tune`)."""

    memory_us: float  # at the full bandwidth
    launches: float
    ring_warps: float  # of a CTA; 0 without a ring
    doublings: float  # of a cluster
    parameter_bytes: float  # of a CTA
    sm_bytes: float  # of an SM, as the next two
    sm_elements: float  # for 128 threads
    sm_boxes: float
    tiles: float  # that follow one another in a place of an SM
    ahead: float  # tiles of an SM that are under way at once
    merged: float
    partials: float


def predict_us(plan: Plan, problem: NormProblem, rows: int, device: DeviceSpec, coefficients: Coefficients) -> float:
    return time_us(work_of(plan, problem, rows, device), coefficients)


def time_us(w: Work, c: Coefficients) -> float:
    busy = w.sm_bytes / c.sm_bytes_per_us + c.element_us * w.sm_elements
    loop = w.memory_us / c.bandwidth_share, busy, c.row_us * w.tiles + busy / w.ahead, c.box_us * w.sm_boxes
    start = c.launch_us + c.ring_us * w.ring_warps + c.meeting_us * w.doublings + w.parameter_bytes / c.sm_bytes_per_us
    end = c.merge_us * w.merged + c.partial_us * w.partials + c.second_launch_us * (w.launches - 1)
    return start + sum(each**limits.sharpness for each in loop) ** (1 / limits.sharpness) + end


def bytes_moved(plan: Plan, problem: NormProblem, rows: int, device: DeviceSpec) -> int:
    """Bytes of device memory that a call reads and writes. A forward's second read of x comes from the cache. A group's
    row is a row, here and below: each group has its own CTAs, and partials of its own columns."""
    (read, written), itemsize = problem.row_bytes, problem.acc_dtype.itemsize
    passes = 1 if problem.is_forward else num_passes(plan, problem)
    statistics = itemsize * (2 if problem.norm == "layer" else 1)
    rows_of_group = max(1, rows // problem.form.groups)
    partials = 2 * problem.num_sums * grid_of(plan, problem, device).partials(rows_of_group) * itemsize
    tensors = rows * (problem.cols * (passes * read + written) + statistics)
    return tensors + problem.width * (2 * problem.quantities["parameter_bytes"] + partials)


def work_of(plan: Plan, problem: NormProblem, rows: int, device: DeviceSpec) -> Work:
    (read, _), grid, is_ring = problem.row_bytes, grid_of(plan, problem, device), isinstance(plan, RingPlan)
    # Of two passes by columns the first is over whole rows.
    by_columns = plan.by_columns and num_passes(plan, problem) == 1
    columns = min(problem.cols, plan.chunk) if by_columns else problem.cols  # of a CTA, or of a cluster
    elements = columns if plan.by_columns else plan.chunk * plan.num_chunks
    of_group = grid.ctas(rows_of_group := max(1, rows // problem.form.groups))
    ctas = of_group * problem.form.groups * math.ceil(problem.cols / columns)
    waves = math.ceil(ctas / (clusters_at_once(plan.cluster, device) * plan.ctas_per_sm))
    on_an_sm = max(1, min(plan.ctas_per_sm, math.ceil(ctas * plan.cluster / device.sm_count)))
    tiles = math.ceil(math.ceil(rows_of_group / plan.rows_per_tile) / of_group) * waves
    of_sm = plan.rows_per_tile * tiles * on_an_sm  # parts of rows
    # A tile in registers is loaded while another is computed on, if the CTA has another.
    boxes, stages = 0.0, 1 if plan.short_lived else 2
    # Chunks, times the warps that have a part of each column's sum, or the rows that a thread adds up.
    owns = plan.by_columns or plan.rows_per_tile == 1 or problem.owns_columns(plan.chunk, plan.num_warps)
    merged = 0 if owns else plan.num_chunks * plan.num_warps
    if is_ring:
        box, stages = plan.box_columns(problem.cols), plan.num_stages + plan.by_threads  # refilled while computed on
        slower = limits.slower_if_many if plan.chunk > limits.many_boxes * box else 1
        boxes = 0 if plan.by_threads else problem.cols / box * (2 - problem.is_forward) * slower
        adds_up = 1 == plan.warps_per_row < plan.num_warps
        merged = adds_up * plan.num_chunks * plan.rows_per_tile / limits.rows_added_up
    return Work(
        memory_us=bytes_moved(plan, problem, rows, device) / (device.bandwidth_gb_s * 1e3),
        launches=num_launches(plan, problem),
        ring_warps=float(is_ring * plan.num_warps),
        doublings=math.log2(plan.cluster),
        parameter_bytes=problem.quantities["parameter_bytes"] * columns / plan.cluster,
        sm_bytes=of_sm * columns * read / plan.cluster,
        sm_elements=of_sm * elements * (1 + problem.num_sums) / 128,
        sm_boxes=of_sm * boxes / plan.cluster,
        tiles=math.ceil(tiles / plan.num_groups) * (not by_columns),  # these sum no row
        ahead=on_an_sm * stages,
        merged=problem.num_sums * merged,
        partials=grid.partials(rows_of_group) if problem.num_sums else 0,
    )
