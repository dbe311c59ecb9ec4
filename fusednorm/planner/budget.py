"""Shared memory and registers of a plan: arithmetic only, held against the compiler by tests/kernels/test_budget.py.

Both are upper bounds, for every release of Triton: where releases differ, the largest value counts, so every release
gets the same plan. With as many registers per thread as `registers` says, the compiler does not spill.
data/registers.json has its coefficients, and bench/NOTES.md the builds behind them, "Evidence behind constants".
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable

import torch

from . import limits
from .device import OLDEST_TRITON, DeviceSpec
from .norm_problem import NormProblem
from .plan import BY_COLUMNS, MAX_REGISTERS, MultiWavePlan, PipelinedPlan, Plan, RingPlan, WarpSpecializedPlan

WARP_SIZE = 32
REGISTER_STEP = 8  # registers per thread are allocated in multiples of 8
RESERVED_SMEM_BYTES = 1024  # per CTA, for the driver

PRODUCER_REGISTERS = 24
PRODUCER_WARPS = 4  # only one works, but registers are handed over by whole warpgroups
MAX_GROUP_REGISTERS = 240


# --- Shared memory ---


def fits_shared_memory(plan: Plan, problem: NormProblem, device: DeviceSpec) -> bool:
    """Whether the plan's shared memory is within the limit of a CTA, and ctas_per_sm CTAs fit an SM."""
    most = device.smem_per_sm_bytes // plan.ctas_per_sm - RESERVED_SMEM_BYTES
    return shared_bytes(plan, problem) <= min(device.smem_per_block_bytes, most)


def is_within_budget(plan: Plan, problem: NormProblem, device: DeviceSpec) -> bool:
    """Whether the plan fits shared memory and does not spill. The tiles of a ring have rows of one sample each."""
    if problem.sample_divisor and isinstance(plan, PipelinedPlan) and problem.sample_divisor % plan.rows_per_tile:
        return False
    fits = registers(plan, problem, device) <= plan.max_registers
    if plan.kernel == "multi_wave":
        fits &= plan.ctas_per_sm * WARP_SIZE * plan.num_warps * plan.max_registers <= device.registers_per_sm
    return fits and fits_shared_memory(plan, problem, device)


def computed(plan: MultiWavePlan | RingPlan, problem: NormProblem) -> NormProblem:
    """What the plan's kernel computes for each element. A short-lived CTA would fold a scale for a row or two."""
    return problem if problem.is_forward and plan.short_lived else problem.inside


def reads_once(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether the plan's threads hold what dx takes of a tile instead of reading the tile twice: in a backward with
    an activation, which they would compute twice, where 16-bit rows leave that many instructions for each byte."""
    if problem.is_forward or not isinstance(plan, PipelinedPlan):
        return False
    elements = plan.rows_per_tile * plan.chunk * plan.num_chunks / (WARP_SIZE * plan.num_warps)
    most = next(number for registers, number in limits.elements_read_once if plan.max_registers <= (registers or 255))
    itemsizes = map(_bytes, (problem.x_dtype, problem.grad_dtype, *problem.rows_in))
    return problem.form.activates and elements <= most and max(itemsizes) == 2


def shared_bytes(plan: Plan, problem: NormProblem) -> int:
    """Upper bound of the bytes of shared memory per CTA, static and dynamic; for rings a close one."""
    if isinstance(plan, RingPlan):
        return static_bytes(plan) + _ring_bytes(plan, problem)
    if plan.kernel == "column_ring":  # the final reduction over warps reuses the tiles' memory
        itemsizes = _bytes(problem.grad_dtype), problem.wants_dw * problem.x_dtype.itemsize
        elements = plan.num_stages * plan.rows_per_tile * plan.chunk
        return elements * sum(itemsizes) + (1 + problem.wants_dw) * _round_up(8 * plan.num_stages, 16)
    # Triton's reductions and layout changes take up to 8 numbers per thread, of the widest type of the problem.
    num_warps = plan.num_warps if plan.kernel == "multi_wave" else max(plan.num_warps, plan.row_pass_warps)
    dtypes = problem.acc_dtype, problem.weight_dtype, problem.bias_dtype, problem.grad_dtype
    return 8 * max(map(_bytes, dtypes)) * WARP_SIZE * num_warps


def static_bytes(plan: RingPlan) -> int:
    """Bytes of static shared memory, in which the CTAs of a cluster exchange row sums: two buffers of two float32 per
    row and CTA, and two mbarriers. 0 without a cluster."""
    return _round_up(2 * 8 + 2 * 2 * 4 * plan.rows_per_tile * plan.cluster, 128) if plan.cluster > 1 else 0


def _ring_bytes(plan: RingPlan, problem: NormProblem) -> int:
    """A ring and the parameters; barriers; what is used while or after a kernel reads its rows. Pipelined kernels use
    the ring's memory again after their rows."""
    backward, is_pipelined = not problem.is_forward, isinstance(plan, PipelinedPlan)
    tensors = [problem.x_dtype, *([problem.grad_dtype] if backward else [])]
    tensors += problem.rows_in if plan.rows_in_ring else ()
    held = computed(plan, problem)
    parameters = [held.weight_dtype, held.bias_dtype if held.reads_bias else None, *held.shared]
    room = plan.copy_chunks + 1 if plan.tail else plan.copy_chunks * plan.num_copies
    ring = plan.num_stages * plan.rows_per_tile * plan.chunk * room * sum(map(_bytes, tensors))
    ring += plan.weight_in_smem * plan.chunk * plan.num_chunks * sum(map(_bytes, parameters))
    rows, warps, threads = _round_up(ring, 128), plan.warps_per_row, WARP_SIZE * plan.num_warps
    # The warps of a row exchange up to three float32 per row (moments whose means have what they lack beside them:
    # passes.row_moments), in buffers that some releases size for all CTAs.
    may_be_float32 = problem.x_dtype.itemsize == 4 or problem.form.combine
    merges = problem.is_forward and may_be_float32 and plan.is_whole(problem.cols)
    sums = 1 if problem.norm == "rms" else 3 if merges else 2
    exchanged = 4 * sums * plan.rows_per_tile * warps * plan.cluster if warps > 1 else 0
    barriers = _round_up(8 * plan.num_stages, 16)
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


# --- Registers ---


def register_limit(threads_per_sm: int, device: DeviceSpec) -> int:
    """Registers that each thread can have if `threads_per_sm` threads share an SM."""
    return min(MAX_REGISTERS, _round_down(device.registers_per_sm / threads_per_sm, REGISTER_STEP))


def group_register_limit(num_groups: int, num_warps: int, device: DeviceSpec) -> int:
    """Registers that a thread of a compute group can have, with one CTA per SM and a producer that keeps
    PRODUCER_REGISTERS per thread."""
    compute, producer = WARP_SIZE * num_warps * num_groups, WARP_SIZE * PRODUCER_WARPS
    entry = register_limit(compute + producer, device)
    left = _round_down(entry, REGISTER_STEP) * (compute + producer) - PRODUCER_REGISTERS * producer
    return min(MAX_GROUP_REGISTERS, _round_down(left / compute, REGISTER_STEP))


def entry_registers(plan: WarpSpecializedPlan) -> int:
    """Registers per thread at the start of a kernel. Its compute groups reach max_registers once the producer has given
    up its surplus."""
    compute, producer = WARP_SIZE * plan.num_warps * plan.num_groups, WARP_SIZE * PRODUCER_WARPS
    total = compute * plan.max_registers + producer * PRODUCER_REGISTERS
    return _round_up(total / (compute + producer), REGISTER_STEP)


def registers(plan: Plan, problem: NormProblem, device: DeviceSpec) -> int:
    """Upper bound of the registers that a thread needs: a sum of coefficients times quantities of plan and problem. A
    cap replaces a larger sum where the compiler was seen to recompute values instead of holding them."""
    if plan.kernel in BY_COLUMNS:
        return plan.max_registers
    kind = ""
    if plan.kernel == "multi_wave":
        kind = " short_lived" if plan.short_lived else " late" * (not problem.is_forward and bool(problem.form.late))
    elif reads_once(plan, problem):
        kind = " once"
    held, known = computed(plan, problem), _of_plan(plan, problem.cols)
    least, added, caps = _bounds_of(f"{plan.kernel} {problem.direction}{kind}", held, device, held is not problem)
    need = max(_sum(least, known), _sum(added, known))
    capped = [cap for cap, case in caps if cap < need and _sum(case, known)]
    return _round_up(round(min([need, *capped]), 6), REGISTER_STEP)


# A factor of a term is a quantity, or whether it is above (>) or below (<) a number, or what it has above one (-).
SIGNS = {"": lambda x, _: x, ">": operator.gt, "<": operator.lt, "-": lambda x, number: max(0, x - number)}


Factor = tuple[str, Callable[[float, float], float], float]  # quantity, sign, number
Terms = list[tuple[float, list[Factor]]]


def _sum(terms: Terms, known: dict[str, float]) -> float:
    total = 0.0
    for value, factors in terms:
        for quantity, sign, number in factors:
            value *= sign(known[quantity], number)
            if not value:
                break
        total += value
    return total


def first_of(cases: Terms, known: dict[str, float]) -> float:
    """The number of the first case that holds; an empty one does."""
    return next(number for number, factors in cases if _sum([(1, factors)], known))


@functools.cache
def _bounds() -> dict[str, list[Terms]]:
    """Of each kernel, from data/registers.json: the least registers, terms, and caps."""
    parts = "least", "terms", "caps"
    return {name: [terms(bound.get(each, {})) for each in parts] for name, bound in limits.read("registers").items()}


@functools.lru_cache(maxsize=4096)
def _bounds_of(name: str, held: NormProblem, device: DeviceSpec, folds: bool) -> tuple[Terms, Terms, list[tuple]]:
    """Those of a kernel whose quantities are a plan's alone: a plan is one of many for a problem."""
    known = quantities(held, device) | {"folds": folds}

    def of_plans(terms: Terms) -> Terms:
        values = [(_sum([(value, [each for each in of if each[0] in known])], known), of) for value, of in terms]
        return [(value, [each for each in of if each[0] not in known]) for value, of in values if value]

    least, added, caps = _bounds()[name]
    return of_plans(least), of_plans(added), [(cap, of_plans([(1, case)])) for cap, case in caps]


def terms(known: dict[str, float]) -> Terms:
    """From a data file."""

    def read(text: str) -> Factor:
        quantity, sign, number = re.fullmatch(r"(\w+)(\W?)(\d*)", text).groups()
        return quantity, SIGNS[sign], float(number or 0)

    return [(number, [*map(read, text.split())]) for text, number in known.items()]


@functools.lru_cache(maxsize=4096)
def quantities(problem: NormProblem, device: DeviceSpec) -> dict[str, float]:
    """The names by which terms and cases ask for what a problem has: those of its fields, and others."""
    x, grad, residual = map(_bytes, (problem.x_dtype, problem.grad_dtype, problem.residual_dtype))
    weight, bias = map(_bytes, (problem.weight_dtype, problem.bias_dtype))
    parameters = [each for each in (weight, bias) if each]
    rows = dict(zip(problem.names_in, problem.rows_in, strict=True)) if problem.names_in else {}
    # Each element of scattered rows has an address and a predicate of its own. The compiler tests one column in 16 for
    # the end of a row that is not odd.
    return vars(problem) | dict(
        forward=problem.is_forward, arch=device.arch, later=device.triton > OLDEST_TRITON,
        layer=problem.norm == "layer", odd=problem.cols % 16 != 0, accumulators=problem.acc_dtype.itemsize // 4,
        x_bytes=x, grad_bytes=grad, mixed=x != grad, residual_bytes=residual, held_bytes=problem.held_bytes,
        narrow=max(x, grad, *parameters, 2) == 2 and not (problem.rows_in or problem.shared),
        weight_bytes=weight, parameters=len(parameters), wide_parameters=parameters.count(8),
        parameter_bytes=problem.parameter_bytes, reads_bias=problem.reads_bias,
        rows_in=len(problem.rows_in), bytes_in=sum(map(_bytes, problem.rows_in)),
        late_bytes=sum(rows[name].itemsize for name in problem.form.late if name in rows),
        moved=len(problem.rows_in + problem.rows_out), rows_or_shared=len(problem.rows_in + problem.shared) > 0,
        shared_rows=len(problem.shared), shared_bytes=sum(map(_bytes, problem.shared)),
        sums=problem.num_sums, summed=len(problem.summed) > 0,
    )  # fmt: skip


def _of_plan(plan: MultiWavePlan | RingPlan, cols: int) -> dict[str, float]:
    rows, threads = plan.rows_per_tile, WARP_SIZE * plan.num_warps
    known = vars(plan) | {"elements": (elements := rows * plan.chunk * plan.num_chunks / threads)}  # of a thread
    if not isinstance(plan, RingPlan):
        return known | dict(rows=rows, columns=elements / rows, chunk_elements=elements / plan.num_chunks)
    threads = plan.threads_per_row
    return known | dict(
        rows=plan.rows_per_thread, columns=plan.columns_per_thread, chunk_columns=plan.chunk / threads,
        threads=threads, copies=plan.num_copies, whole=plan.is_whole(cols),
    )  # fmt: skip


def _bytes(dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else dtype.itemsize


def _round_up(value: float, step: int) -> int:
    return -int(-value // step) * step


def _round_down(value: float, step: int) -> int:
    return int(value // step) * step
