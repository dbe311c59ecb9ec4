"""predict_us(plan, problem, rows, device): the time of a call, from what its kernels move, wait for and compute.

An SM's CTAs work on their row tiles one after the other. A tile takes as long as the SM needs for the tiles of all its
CTAs, or as long as one CTA waits, whichever is longer; all tiles take as long as that or as the memory needs for all
bytes. Maxima are smooth (SHARPNESS). Starts, sums and partial sums are added. `tune` fits the coefficients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .device import DeviceSpec
from .norm_problem import NormProblem
from .plan import (
    BY_COLUMNS,
    Plan,
    RingPlan,
    box_columns,
    clusters_at_once,
    num_copies,
    num_ctas,
    num_launches,
    num_partials,
    num_passes,
    warps_of_a_row,
)

SHARPNESS = 3  # the exponent p in (a^p + b^p)^(1/p), in place of max(a, b)


class Coefficients(NamedTuple):
    """What a GPU costs. Tables have the values (data/)."""

    bandwidth_share: float  # of the datasheet's bandwidth, for bytes of device memory
    launch_us: float  # start and end of a call
    second_launch_us: float  # of each kernel after the first
    latency_us: float  # of a load
    sm_bytes_per_us: float  # that one SM takes in
    element_us: float  # of a tile, for 128 threads with one element each, without sums of columns
    scattered: float  # of that, more if elements are loaded one by one
    row_us: float  # to reduce a row tile
    warp_us: float  # of that, for each warp of a row
    exchange_us: float  # between the CTAs of a cluster, times the root of their number
    meeting_us: float  # at the start of a cluster, for each doubling of its CTAs
    copy_us: float  # to issue a copy and to wait for it
    box_us: float  # for each piece of memory that TMA copies
    start_us: float  # of a CTA that takes another's place
    merge_us: float  # of the sums of an element's column that several threads have
    partial_bytes_per_us: float  # of the partial sums, written and read


class Work(NamedTuple):
    """What a plan does for a number of rows. Numbers, or tensors of numbers of many plans (`tune`)."""

    memory_us: float  # at the full bandwidth
    launches: float
    tiles: float  # that follow one another in a place of an SM
    ctas: float  # that share an SM at a time
    tile_bytes: float  # of a CTA
    stages: float  # that tiles are loaded ahead, that of the computation included
    elements: float  # of a tile, for 128 threads
    scattered: float
    warps: float  # of a row
    exchange: float
    doublings: float  # of a cluster
    copies: float
    boxes: float
    restarts: float  # whether each tile has a CTA of its own
    merged: float  # elements of a thread, times sums
    sums: float
    parameter_bytes: float
    partial_bytes: float


def predict_us(plan: Plan, problem: NormProblem, rows: int, device: DeviceSpec, coefficients: Coefficients) -> float:
    return time_us(work_of(plan, problem, rows, device), coefficients)


def time_us(work: Work, c: Coefficients) -> float:
    p, w = SHARPNESS, work
    busy = w.tile_bytes / c.sm_bytes_per_us + c.box_us * w.boxes
    busy = busy + c.element_us * w.elements * (1 + c.scattered * w.scattered) * (1 + w.sums / 2)
    waits = c.row_us + c.warp_us * w.warps + c.exchange_us * w.exchange + c.copy_us * w.copies + c.start_us * w.restarts
    waits = waits + (c.latency_us + busy) / w.stages
    loop = w.tiles * ((busy * w.ctas) ** p + waits**p) ** (1 / p)
    start = c.launch_us + c.second_launch_us * (w.launches - 1) + c.latency_us + w.parameter_bytes / c.sm_bytes_per_us
    ends = c.meeting_us * w.doublings + c.merge_us * w.merged + w.partial_bytes / c.partial_bytes_per_us
    return start + ((w.memory_us / c.bandwidth_share) ** p + loop**p) ** (1 / p) + ends


def bytes_moved(plan: Plan, problem: NormProblem, rows: int, device: DeviceSpec) -> int:
    """Bytes of device memory that a call reads and writes. A forward's second read of x comes from the cache."""
    read, written = problem.row_bytes
    statistics = problem.form.groups * problem.acc_dtype.itemsize * (2 if problem.norm == "layer" else 1)
    passes = 2 if num_passes(plan, problem) == 2 and problem.direction == "backward" else 1
    tensors = rows * (problem.width * (passes * read + written) + statistics)
    return tensors + 2 * problem.width * problem.parameter_bytes + partial_bytes(plan, problem, rows, device)


def partial_bytes(plan: Plan, problem: NormProblem, rows: int, device: DeviceSpec) -> int:
    """Bytes of the partial sums of dw and db, written and read."""
    if plan.kernel == "reference" or not problem.num_sums:
        return 0
    wants = True, problem.wants_float32_sum, problem.form.groups
    partials = num_partials(plan, num_ctas(plan, rows, problem.cols, device, *wants))
    return 2 * problem.num_sums * partials * problem.width * problem.acc_dtype.itemsize


def work_of(plan: Plan, problem: NormProblem, rows: int, device: DeviceSpec) -> Work:
    read, _ = problem.row_bytes
    is_ring, threads = isinstance(plan, RingPlan), 32 * plan.num_warps
    groups, wants = problem.form.groups, (problem.num_sums > 0, problem.wants_float32_sum)
    ctas = num_ctas(plan, rows, problem.cols, device, *wants, groups)
    tiles, ctas = math.ceil(math.ceil(rows / plan.rows_per_tile) / ctas), ctas * groups
    waves = math.ceil(ctas / (clusters_at_once(plan.cluster, device) * plan.ctas_per_sm))
    on_an_sm = min(plan.ctas_per_sm, math.ceil(ctas * plan.cluster / device.sm_count))
    num_groups = getattr(plan, "num_groups", 1)
    if plan.kernel in BY_COLUMNS:
        elements = plan.rows_per_tile * problem.cols / threads
    else:
        elements = plan.rows_per_tile * plan.chunk * plan.num_chunks / threads
    restarts = getattr(plan, "short_lived", False) and getattr(plan, "num_stages", 1) == 1
    owns = plan.rows_per_tile == 1 or plan.cluster > 1
    owns = owns or (plan.kernel == "multi_wave" and plan.chunk * problem.x_dtype.itemsize >= 16 * threads)
    copies = boxes = 0.0
    warps = plan.num_warps / min(plan.num_warps, 1 if owns else plan.rows_per_tile)
    if is_ring:
        tensors = 1 + (problem.direction == "backward")
        copies, warps = tensors * num_copies(plan), warps_of_a_row(plan)
        boxes = tensors * plan.rows_per_tile * problem.cols / plan.cluster / box_columns(plan, problem.cols)
    return Work(
        memory_us=bytes_moved(plan, problem, rows, device) / (device.bandwidth_gb_s * 1e3),
        launches=num_launches(plan, problem) or 1,
        tiles=math.ceil(tiles * waves / num_groups),
        ctas=max(1, on_an_sm) * num_groups,
        tile_bytes=plan.rows_per_tile * problem.cols * read / plan.cluster,
        stages=plan.num_stages / num_groups if is_ring else 1 if restarts else 1.5,  # registers load ahead in part
        elements=elements * threads / 128,
        scattered=float(not problem.tma_aligned),
        warps=warps,
        exchange=math.sqrt(plan.cluster) * (plan.cluster > 1),
        doublings=math.log2(plan.cluster),
        copies=copies,
        boxes=boxes,
        restarts=float(restarts),
        merged=elements * problem.num_sums * (not owns),
        sums=problem.num_sums,
        parameter_bytes=problem.parameter_bytes * problem.cols / plan.cluster,
        partial_bytes=partial_bytes(plan, problem, rows, device),
    )
