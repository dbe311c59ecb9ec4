"""Shared memory and registers of a plan: arithmetic only, held against the compiler by tests/kernels/test_budget.py.

Both are upper bounds. With as many registers per thread as `registers` says, the compiler does not spill, whatever its
release; data/registers.json has the coefficients, and bench/NOTES.md the builds behind them.
"""

from __future__ import annotations

import functools
from typing import Any

from ..dtypes import bytes_of
from . import limits
from .device import DeviceSpec
from .norm_problem import NormProblem
from .plan import MAX_REGISTERS, MultiWavePlan, PipelinedPlan, Plan, RingPlan

WARP_SIZE = 32
VECTOR_BYTES = 16  # of one load or store of a thread
REGISTER_STEP = 8  # registers per thread are allocated in multiples of 8
RESERVED_SMEM_BYTES = 1024  # per CTA, for the driver
PRODUCER_REGISTERS = 24
PRODUCER_WARPS = 4  # only one works, but registers are handed over by whole warpgroups
MAX_GROUP_REGISTERS = 240


def fits_shared_memory(plan: Plan, problem: NormProblem, device: DeviceSpec) -> bool:
    """Whether the plan's shared memory is within the limit of a CTA, and ctas_per_sm CTAs fit an SM."""
    most = device.smem_per_sm_bytes // plan.ctas_per_sm - RESERVED_SMEM_BYTES
    return shared_bytes(plan, problem) <= min(device.smem_per_block_bytes, most)


def is_within_budget(plan: Plan, problem: NormProblem, device: DeviceSpec) -> bool:
    """Whether the plan fits shared memory and does not spill. The tiles of a ring have rows of one sample each."""
    if isinstance(plan, PipelinedPlan) and problem.ring_divisor % plan.rows_per_tile:
        return False
    return registers(plan, problem, device) <= plan.max_registers and fits_shared_memory(plan, problem, device)


def computed(plan: MultiWavePlan | RingPlan, problem: NormProblem) -> NormProblem:
    """What the plan's kernel computes for each element. A short-lived CTA would fold a scale for a row or two."""
    return problem if problem.is_forward and plan.short_lived else problem.inside


def shared_bytes(plan: Plan, problem: NormProblem) -> int:
    """Upper bound of the bytes of shared memory per CTA, static and dynamic; for rings a close one."""
    if isinstance(plan, RingPlan):
        return static_bytes(plan) + _ring_bytes(plan, problem)
    if plan.kernel == "column_ring":  # the final reduction over warps reuses the tiles' memory
        itemsizes = bytes_of(problem.grad_dtype), problem.wants_dw * problem.x_dtype.itemsize
        elements = plan.num_stages * plan.rows_per_tile * plan.chunk
        return elements * sum(itemsizes) + (1 + problem.wants_dw) * _round_up(8 * plan.num_stages, 16)
    # Triton's reductions and layout changes take up to 8 numbers per thread, of the widest type of the problem.
    num_warps = plan.num_warps if plan.kernel == "multi_wave" else max(plan.num_warps, plan.row_pass_warps)
    dtypes = problem.acc_dtype, problem.weight_dtype, problem.bias_dtype, problem.grad_dtype
    return 8 * max(map(bytes_of, dtypes)) * WARP_SIZE * num_warps


def static_bytes(plan: RingPlan) -> int:
    """Bytes of static shared memory, in which the CTAs of a cluster exchange row sums: two buffers of two float32 per
    row and CTA, and two mbarriers. 0 without a cluster."""
    return _round_up(2 * 8 + 2 * 2 * 4 * plan.rows_per_tile * plan.cluster, 128) if plan.cluster > 1 else 0


def _ring_bytes(plan: RingPlan, problem: NormProblem) -> int:
    """Of a ring, its parameters and barriers, and of what a kernel uses while it reads its rows, or after them in place
    of the ring (pipelined kernels)."""
    added = problem.residual_dtype if plan.added_in_ring else None
    tensors = [*filter(None, (problem.x_dtype, problem.grad_dtype, added)), *problem.rows_in * plan.rows_in_ring]
    held, is_pipelined = computed(plan, problem), isinstance(plan, PipelinedPlan)
    parameters = [*filter(None, (held.weight_dtype, held.bias_dtype if held.reads_bias else None)), *held.shared]
    room = plan.copy_chunks + 1 if plan.tail else plan.copy_chunks * plan.num_copies
    ring = plan.num_stages * plan.rows_per_tile * plan.chunk * room * sum(map(bytes_of, tensors))
    ring += plan.weight_in_smem * plan.chunk * plan.num_chunks * sum(map(bytes_of, parameters))
    rows, warps, threads = _round_up(ring, 128), plan.warps_per_row, WARP_SIZE * plan.num_warps
    # The warps of a row exchange up to three float32 per row (moments whose means are in two parts:
    # passes.row_moments), in buffers that some releases size for all CTAs.
    may_be_float32 = problem.x_dtype.itemsize == 4 or problem.form.rows_before
    merges = problem.is_forward and may_be_float32 and plan.is_whole(problem.cols)
    sums = 1 if problem.norm == "rms" else 3 if merges else 2
    exchanged = 4 * sums * plan.rows_per_tile * warps * plan.cluster if warps > 1 else 0
    barriers = 0 if plan.by_threads else _round_up(8 * plan.num_stages, 16)
    if is_pipelined:
        staged = problem.num_sums * _staged_bytes(plan, problem)
        if plan.cluster > 1 and problem.num_sums:  # dw and db change their layout, four elements per thread at once
            staged = _round_up(staged, 128) + 4 * 4 * threads * plan.cluster
        return plan.num_copies * len(tensors) * barriers + _round_up(max(rows + exchanged, staged), 128)
    # The first group hands to the other warps what the kernel was called with, and their states.
    pieces = len(tensors) * plan.num_copies + 2 + plan.weight_in_smem * plan.num_chunks * len(parameters)
    captured, states = 28 * pieces + 8 * 32, plan.num_warps * (plan.num_groups - 1) + PRODUCER_WARPS
    scratch = plan.num_groups * _round_up(max(exchanged, _staged_bytes(plan, problem)), 128)
    return rows + 2 * barriers + _round_up(max(scratch, captured), 128) + _round_up(states, 128)


def _staged_bytes(plan: RingPlan, problem: NormProblem) -> int:
    """For dw or db before the store of its partials; none where each row of a tile is in all warps. The staging has all
    rows of a tile: of a pipelined kernel all columns, of a warp-specialized kernel the adjacent columns of all threads,
    as they are held or as they are stored, whichever takes more."""
    if not problem.num_sums or plan.warps_per_row == plan.num_warps:
        return 0
    if isinstance(plan, PipelinedPlan):
        return 4 * plan.rows_per_tile * plan.num_chunks * plan.chunk
    held = min(16 // problem.x_dtype.itemsize * plan.threads_per_row, plan.chunk)
    return 4 * plan.rows_per_tile * min(plan.chunk, max(held, 4 * WARP_SIZE * plan.num_warps))


def register_limit(threads_per_sm: int, device: DeviceSpec) -> int:
    """Registers that each thread can have if `threads_per_sm` threads share an SM."""
    return min(MAX_REGISTERS, device.registers_per_sm // threads_per_sm // REGISTER_STEP * REGISTER_STEP)


def group_register_limit(num_groups: int, num_warps: int, device: DeviceSpec) -> int:
    """Registers that a thread of a compute group can have, with one CTA per SM and a producer that keeps
    PRODUCER_REGISTERS per thread."""
    warps = num_warps * num_groups
    entry = register_limit(WARP_SIZE * (warps + PRODUCER_WARPS), device) // REGISTER_STEP * REGISTER_STEP
    left = entry * (warps + PRODUCER_WARPS) - PRODUCER_REGISTERS * PRODUCER_WARPS
    return min(MAX_GROUP_REGISTERS, left // warps // REGISTER_STEP * REGISTER_STEP)


def registers(plan: Plan, problem: NormProblem, device: DeviceSpec) -> int:
    """Upper bound of the registers that a thread needs: a sum of coefficients times quantities of plan and problem. A
    cap replaces a larger sum where the compiler was seen to recompute values instead of holding them."""
    if plan.by_columns:
        return plan.max_registers
    held, kind = computed(plan, problem), ""
    known = held.quantities, vars(device) | of_plan(plan, problem.cols) | {"folds": held is not problem}
    if plan.kernel == "multi_wave":
        kind = " short_lived" if plan.short_lived else " late" * (not problem.is_forward and problem.form.modulates)
    elif limits.value_of(limits.reads_once, *known):
        kind = " once"
    needed = limits.value_of(_bound(f"{plan.kernel} {problem.direction}{kind}"), *known)
    return _round_up(round(needed, 6), REGISTER_STEP)


@functools.cache
def _bound(name: str) -> str:
    """The larger one of two sums of data/registers.json, and no more than a cap where one of its cases holds, as one
    expression."""
    bound = limits.read("registers")[name]
    least, most = (bound.get(part, {"1": 0}).items() for part in ("least", "terms"))
    sums = (" + ".join(f"{number} * {product}" for product, number in each) for each in (least, most))
    need = f"max({', '.join(sums)})"
    for cap, cases in bound.get("caps", {}).items():
        need = f"min({need}, {cap} if {' or '.join(cases)} else 1e9)"
    return need


def of_plan(plan: MultiWavePlan | RingPlan, cols: int) -> dict[str, Any]:
    """The names by which data files ask for what a plan has, beside those of its fields. `rows` are those that a thread
    has elements of: in a ring of one CTA, each row has its own threads."""
    is_ring = isinstance(plan, RingPlan)
    rows = 1 if is_ring and plan.cluster == 1 else plan.rows_per_tile
    elements = plan.rows_per_tile * plan.chunk * plan.num_chunks / (WARP_SIZE * plan.num_warps)  # of a thread
    known = vars(plan) | {"kernel": plan.kernel, "rows": rows, "elements": elements, "columns": elements / rows}
    if not is_ring:
        return known | {"chunk_elements": elements / plan.num_chunks}
    more = {"threads": plan.threads_per_row, "copies": plan.num_copies, "whole": plan.is_whole(cols)}
    return known | more | {"chunk_columns": plan.chunk / plan.threads_per_row}


def _round_up(value: float, step: int) -> int:
    return -int(-value // step) * step
