"""Registers of a plan: arithmetic only, checked against the compiler in tests/test_compile.py."""

from __future__ import annotations

from .plan import WarpSpecializedPlan
from .problem import NormProblem

MAX_REGISTERS_PER_THREAD = 255
FIXED_REGISTERS = 24  # addresses, loop state, statistics
FIXED_REGISTERS_FP64 = 48  # and the division and square root that fp64 has no instruction for


def registers_per_element(problem: NormProblem) -> float:
    """32-bit registers that one element of a row tile takes for the whole loop of the multi-wave schedule."""
    acc = problem.acc_dtype.itemsize / 4
    x = problem.x_dtype.itemsize / 4
    parameter = max(acc, 1.0)  # held converted: the compiler hoists the conversion out of the row loop
    if problem.direction == "forward":
        held = (problem.weight_dtype is not None) + (problem.bias_dtype is not None)
        return 2 * x + held * parameter + acc  # this tile and the next, parameters, and the row in the accumulation dtype
    grad = problem.grad_dtype.itemsize / 4
    accumulators = problem.wants_dw + problem.wants_db
    weight = parameter if problem.weight_dtype is not None else 0.0
    return (x + grad) + accumulators * acc + weight + 2 * acc + 0.5  # the next tile, dw and db, w, and x_hat and g of this one


def multiwave_registers(problem: NormProblem, rows_per_tile: int, elements_per_thread: float) -> int:
    """Registers a thread needs with so many elements of a row tile, in the hardware's steps of 8."""
    per_element = registers_per_element(problem)
    if not problem.tma_aligned:  # no vector loads: addresses and masks by element, shared along a row but not between rows
        per_element += 5 if rows_per_tile == 1 else 16
    fixed = FIXED_REGISTERS_FP64 if problem.acc_dtype.itemsize == 8 else FIXED_REGISTERS
    return -(-int(fixed + elements_per_thread * per_element) // 8) * 8


PRODUCER_REGISTERS = 24
PRODUCER_THREADS = 128  # one warp, but registers are handed over by warpgroups of four


def entry_registers(plan: WarpSpecializedPlan) -> int:
    """Registers a thread of a warp-specialized CTA starts with, so that the compute groups can be given max_registers each."""
    compute_threads = 32 * plan.num_warps * plan.num_groups
    total = compute_threads * plan.max_registers + PRODUCER_THREADS * PRODUCER_REGISTERS
    return -(-total // (compute_threads + PRODUCER_THREADS)) // 8 * 8
