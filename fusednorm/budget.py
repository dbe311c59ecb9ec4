"""Shared memory and registers of a plan: arithmetic only, checked against the compiler in tests/test_budget.py.

Shared memory of the ring kernels is exact for Triton 3.6, that of the portable kernels an upper bound; registers are
upper bounds of what the compiler needs in order not to spill.
"""

from __future__ import annotations

from typing import NamedTuple

from .device import DeviceSpec
from .plan import ColumnTilePlan, MultiWavePlan, PipelinedPlan, Plan, WarpSpecializedPlan
from .problem import NormProblem

WARP_SIZE = 32
REGISTER_STEP = 8  # registers of a thread are given out by eight
MAX_REGISTERS = 255  # of a thread
RESERVED_SMEM_BYTES = 1024  # per CTA, by the driver, from sm_80 on

PRODUCER_REGISTERS = 24
PRODUCER_THREADS = 128  # one warp, but registers are handed over by warpgroups of four
MAX_GROUP_REGISTERS = 240  # beyond which no step is left of what a CTA of 384 threads can start with


# --- Shared memory ---


class Buffer(NamedTuple):
    """A stretch of shared memory. entry ends before the row loop begins, loop begins after entry has ended."""

    size: int
    alignment: int
    life: str = "always"


def shared_bytes(plan: Plan, problem: NormProblem) -> int:
    """Bytes of shared memory of one CTA of the plan's main kernel."""
    if isinstance(plan, PipelinedPlan):
        return _packed(_pipelined_buffers(plan, problem))
    if isinstance(plan, WarpSpecializedPlan):
        return _packed(_warp_specialized_buffers(plan, problem))
    return 0


def _pipelined_buffers(plan: PipelinedPlan, problem: NormProblem) -> list[Buffer]:
    barriers = [Buffer(8 * plan.num_stages, 16)] * (2 * plan.num_chunks)  # per chunk of x and of dy
    return [*_ring_buffers(plan, problem), *barriers, _reduction_buffer(plan, problem)]


def _warp_specialized_buffers(plan: WarpSpecializedPlan, problem: NormProblem) -> list[Buffer]:
    barriers = [Buffer(8 * plan.num_stages, 16)] * 2  # full and empty
    reductions = [_reduction_buffer(plan, problem)] * plan.num_groups
    captured = Buffer(_captured_bytes(plan, problem), 8, "entry")
    state = Buffer(plan.num_warps * (plan.num_groups - 1) + PRODUCER_THREADS // WARP_SIZE, 4)  # a byte per further warp
    return [*_ring_buffers(plan, problem), *barriers, *reductions, captured, state]


def _ring_buffers(plan: PipelinedPlan | WarpSpecializedPlan, problem: NormProblem) -> list[Buffer]:
    """The stages of each chunk of x and of dy, and the weight where it lies in shared memory."""
    tensors = [problem.x_dtype] + ([problem.grad_dtype] if problem.direction == "backward" else [])
    elements = plan.num_stages * plan.rows_per_tile * plan.chunk
    buffers = [Buffer(elements * dtype.itemsize, 128) for dtype in tensors]
    if plan.weight_in_smem:
        parameters = [problem.weight_dtype] + ([problem.bias_dtype] if problem.direction == "forward" else [])
        buffers += [Buffer(plan.chunk * dtype.itemsize, 16) for dtype in parameters if dtype is not None]
    return buffers * plan.num_chunks


def _reduction_buffer(plan: PipelinedPlan | WarpSpecializedPlan, problem: NormProblem) -> Buffer:
    """Where the warps of a group exchange their row sums: two numbers per row for LayerNorm, one for RMSNorm."""
    numbers = 2 if problem.norm == "layer" else 1
    return Buffer(plan.rows_per_tile * plan.num_warps * numbers * problem.acc_dtype.itemsize, 128, "loop")


def _captured_bytes(plan: WarpSpecializedPlan, problem: NormProblem) -> int:
    """What the first group hands to the other warps: 8 bytes and 4 per dimension for a piece of shared memory, 8 for a
    pointer, a descriptor or a stride, 4 for a row count."""
    rings, barriers, descriptors, rows = 2 * plan.num_chunks * (8 + 4 * 4), 2 * (8 + 4 * 2), 2 * 8, 4
    captured = rings + barriers + descriptors + rows
    if plan.num_groups > 1:  # what a further compute group needs; only what it uses
        layer = problem.norm == "layer"
        weight = problem.weight_dtype is not None
        weight_bytes = plan.num_chunks * (8 + 4) if plan.weight_in_smem else 8
        pointers = 2 + layer + problem.wants_dw + problem.wants_db  # rstd, dx; mean, dw, db
        captured += 8 * pointers + weight * weight_bytes + 4 + 8 * (1 + layer)  # cols, strides of the statistics
    return captured


def _packed(buffers: list[Buffer]) -> int:
    """Triton's packing: largest first, each at the lowest free place. What alignment leaves out below a buffer is lost
    to what is alive as long as that, and only to it."""
    placed: list[tuple[int, int, Buffer]] = []  # lowest byte it keeps from others, its first byte, it
    for buffer in sorted(buffers, key=lambda buffer: -buffer.size):
        place = 0
        for low, start, other in sorted(placed, key=lambda entry: entry[1]):
            both_stay = buffer.life == other.life == "always"
            if both_stay or buffer.life == other.life or "always" in (buffer.life, other.life):
                if _round_up(place, buffer.alignment) + buffer.size <= (low if both_stay else start):
                    break
                place = max(place, start + other.size)
        placed.append((place, _round_up(place, buffer.alignment), buffer))
    return max(start + buffer.size for _, start, buffer in placed)


def _round_up(value: float, step: int) -> int:
    return -int(-value // step) * step


# --- Registers ---

MAX_REGISTERS_PER_THREAD = MAX_REGISTERS
FIXED_REGISTERS = 24  # addresses, loop state, statistics
FIXED_REGISTERS_FP64 = 48  # and the division and square root that fp64 has no instruction for


def registers_per_element(problem: NormProblem) -> float:
    """32-bit registers that one element of a row tile takes for the whole loop of the multi-wave schedule."""
    acc = problem.acc_dtype.itemsize / 4
    x = problem.x_dtype.itemsize / 4
    parameter = max(acc, 1.0)  # held converted: the compiler hoists the conversion out of the row loop
    if problem.direction == "forward":
        held = (problem.weight_dtype is not None) + (problem.bias_dtype is not None)
        return 2 * x + held * parameter + acc
    grad = problem.grad_dtype.itemsize / 4
    accumulators = problem.wants_dw + problem.wants_db
    weight = parameter if problem.weight_dtype is not None else 0.0
    return (x + grad) + accumulators * acc + weight + 2 * acc + 0.5


def multiwave_registers(problem: NormProblem, rows_per_tile: int, elements_per_thread: float) -> int:
    """Registers a thread needs with so many elements of a row tile, in the hardware's steps of 8."""
    per_element = registers_per_element(problem)
    if not problem.tma_aligned:  # no vector loads: addresses and masks by element
        per_element += 5 if rows_per_tile == 1 else 16
    fixed = FIXED_REGISTERS_FP64 if problem.acc_dtype.itemsize == 8 else FIXED_REGISTERS
    return _round_up(int(fixed + elements_per_thread * per_element), REGISTER_STEP)


def entry_registers(plan: WarpSpecializedPlan) -> int:
    """Registers a thread of a warp-specialized CTA starts with, so that the compute groups can be given max_registers each."""
    compute_threads = WARP_SIZE * plan.num_warps * plan.num_groups
    total = compute_threads * plan.max_registers + PRODUCER_THREADS * PRODUCER_REGISTERS
    return _round_up(total / (compute_threads + PRODUCER_THREADS), REGISTER_STEP)
