"""Shared memory and registers of a plan: arithmetic only, held against the compiler by tests/test_budget.py.

Shared memory of the ring kernels is exact, that of the portable kernels an upper bound. Where Triton's releases differ
a plan counts on the most, so that it is the same plan with all of them. Registers are upper bounds of what a thread
needs for the compiler not to spill.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .device import OLDEST_TRITON, DeviceSpec
from .norm_problem import NormProblem
from .plan import (
    ColumnRingPlan,
    ColumnTilePlan,
    MultiWavePlan,
    PipelinedPlan,
    Plan,
    RingPlan,
    WarpSpecializedPlan,
    columns_of_a_thread,
    is_whole,
    num_copies,
    rows_of_a_thread,
    threads_of_a_row,
    warps_of_a_row,
)

WARP_SIZE = 32
REGISTER_STEP = 8  # registers are given out by eight a thread
MAX_REGISTERS = 255  # of a thread
RESERVED_SMEM_BYTES = 1024  # of every CTA, for the driver

EACH_CTA_BY_ITSELF = (3, 8)  # from here on Triton counts no other CTA of the cluster

PRODUCER_REGISTERS = 24
PRODUCER_WARPS = 4  # of which one works: registers are handed over by warpgroups
MAX_GROUP_REGISTERS = 240


# --- Shared memory ---


class Buffer(NamedTuple):
    """A stretch of shared memory, and when it is needed: always, at the entry, in the row loop or after it."""

    size: int
    alignment: int
    life: str = "always"


def fits_shared_memory(plan: Plan, problem: NormProblem, device: DeviceSpec) -> bool:
    """Whether a CTA may have so much, and ctas_per_sm of them fit an SM."""
    size = shared_bytes(plan, problem)
    return (
        size <= device.smem_per_block_bytes
        and plan.ctas_per_sm * (size + RESERVED_SMEM_BYTES) <= device.smem_per_sm_bytes
    )


def shared_bytes(plan: Plan, problem: NormProblem) -> int:
    """Bytes of shared memory of a CTA, static and dynamic, with the release of Triton that takes most."""
    return max(shared_bytes_by(release, plan, problem) for release in (OLDEST_TRITON, EACH_CTA_BY_ITSELF))


def shared_bytes_by(release: tuple[int, int], plan: Plan, problem: NormProblem) -> int:
    """The same with one release of Triton, (major, minor)."""
    if isinstance(plan, RingPlan):
        counted = plan.cluster if release < EACH_CTA_BY_ITSELF else 1
        return static_bytes(plan) + _packed(_ring_buffers(plan, problem, counted))
    if isinstance(plan, ColumnRingPlan):
        return _packed(_column_ring_buffers(plan, problem))
    return _scratch_bytes(plan, problem)


def static_bytes(plan: RingPlan) -> int:
    """Of these, the static ones: where the CTAs of a cluster exchange row sums, twice two for each row and CTA, and
    the two barriers for that."""
    return _round_up(2 * 8 + 2 * 2 * 4 * plan.rows_per_tile * plan.cluster, 128) if plan.cluster > 1 else 0


def _partial_store_buffers(plan: RingPlan, problem: NormProblem) -> list[Buffer]:
    """For dw and db on their way out, where rows of a tile are in different warps. In all rows of a tile: all columns
    in a pipelined kernel; else what the adjacent ones of all threads take, as they are held or as they are stored."""
    wanted = problem.num_sums
    if not wanted or warps_of_a_row(plan) == plan.num_warps:
        return []
    if isinstance(plan, PipelinedPlan):
        return [Buffer(4 * plan.rows_per_tile * plan.num_chunks * plan.chunk, 16, "after")] * wanted
    threads, row_threads, stored = WARP_SIZE * plan.num_warps, threads_of_a_row(plan), 4
    held = min(16 // problem.x_dtype.itemsize, plan.chunk // row_threads)  # adjacent, in a thread
    return [Buffer(4 * plan.rows_per_tile * min(plan.chunk, max(held * row_threads, stored * threads)), 128, "loop")]


def _ring_buffers(plan: RingPlan, problem: NormProblem, counted: int) -> list[Buffer]:
    """`counted`: for how many CTAs the compiler counts what the threads of one exchange."""
    backward, num_warps = problem.direction == "backward", plan.num_warps
    tensors = [problem.x_dtype, problem.grad_dtype] if backward else [problem.x_dtype]
    parameters = [problem.weight_dtype] if backward else [problem.weight_dtype, problem.bias_dtype]
    copies = [plan.copy_chunks, 1] if plan.tail else [plan.copy_chunks] * num_copies(plan)
    chunk_elements = plan.num_stages * plan.rows_per_tile * plan.chunk
    life = "loop" if isinstance(plan, PipelinedPlan) else "always"
    rings = [chunks * chunk_elements * dtype.itemsize for chunks in copies for dtype in tensors]
    buffers = [Buffer(size, 128, life) for size in rings]
    if plan.weight_in_smem:
        held = [Buffer(plan.chunk * dtype.itemsize, 16, life) for dtype in parameters if dtype is not None]
        buffers += held * plan.num_chunks
    barriers = Buffer(8 * plan.num_stages, 16)
    # The warps of a row exchange a number, or two.
    warps = warps_of_a_row(plan)
    exchanged = 4 * _sums_per_row(plan, problem) * plan.rows_per_tile * warps * counted if warps > 1 else 0
    if isinstance(plan, PipelinedPlan):
        after = _partial_store_buffers(plan, problem)
        if plan.cluster > 1 and problem.num_sums:
            # Pieces of dw and db change layout, four elements a thread.
            after.append(Buffer(4 * 4 * WARP_SIZE * num_warps * counted, 128, "after"))
        return [*buffers, *[barriers] * len(rings), Buffer(exchanged, 128, "loop"), *after]
    captured = Buffer(_captured_bytes(plan, problem), 8, "entry")
    states = Buffer(num_warps * (plan.num_groups - 1) + PRODUCER_WARPS, 4)  # a byte for each warp but the first group's
    scratch = max([Buffer(exchanged, 128, "loop"), *_partial_store_buffers(plan, problem)])
    return [*buffers, barriers, barriers, *[scratch] * plan.num_groups, captured, states]


def _column_ring_buffers(plan: ColumnRingPlan, problem: NormProblem) -> list[Buffer]:
    """The last reduction over warps finds place where the tiles were."""
    dtypes = [problem.grad_dtype, problem.x_dtype] if problem.wants_dw else [problem.grad_dtype]
    elements = plan.num_stages * plan.rows_per_tile * plan.chunk
    barriers = [Buffer(8 * plan.num_stages, 16)] * len(dtypes)
    return [Buffer(elements * dtype.itemsize, 128) for dtype in dtypes] + barriers


def _sums_per_row(plan: RingPlan, problem: NormProblem) -> int:
    """That one reduction makes of a row."""
    both = problem.direction == "backward" or is_whole(plan, problem.cols)
    return 2 if problem.norm == "layer" and both else 1


def _captured_bytes(plan: WarpSpecializedPlan, problem: NormProblem) -> int:
    """What the first group hands to the other warps: for a piece of shared memory 8 bytes and 4 per dimension, for a
    pointer, a descriptor or a stride 8, for a size 4."""
    sides, layer = 5 if plan.copy_chunks > 1 else 4, problem.norm == "layer"
    tensors = 2 if problem.direction == "backward" else 1
    captured = tensors * (num_copies(plan) * (8 + 4 * sides) + 8) + 2 * (8 + 4 * 2) + 4  # the last are the rows
    if plan.num_groups > 1 and problem.direction == "forward":
        held = [dtype for dtype in (problem.weight_dtype, problem.bias_dtype) if dtype is not None]
        parameter = plan.num_chunks * (8 + 4 * 2) if plan.weight_in_smem else 8
        captured += len(held) * parameter + 8 * (2 + layer) + 4 + 8  # y and statistics; the columns; eps
    elif plan.num_groups > 1:
        has_residual = problem.residual_dtype is not None
        pointers = 2 + layer + problem.num_sums + has_residual  # rstd, dx; mean; dw, db; the residual gradient
        strides, cols = 8 * (1 + layer), 4
        weight = plan.num_chunks * (8 + 4 * 2) if plan.weight_in_smem else 8
        captured += 8 * pointers + strides + cols + (weight if problem.weight_dtype is not None else 0)
    return captured


def _packed(buffers: list[Buffer]) -> int:
    """Triton's packing: largest first, each at the lowest free place. What alignment leaves out below a buffer is lost
    to buffers that live as long as it."""
    placed: list[tuple[int, int, Buffer]] = []  # (first byte lost, first byte used, it), in order of the second
    for buffer in sorted(buffers, key=lambda buffer: -buffer.size):
        place = 0
        for lost, used, other in placed:
            if buffer.life == other.life or "always" in (buffer.life, other.life):
                if _round_up(place, buffer.alignment) + buffer.size <= (lost if buffer.life == other.life else used):
                    break
                place = max(place, used + other.size)
        placed.append((place, _round_up(place, buffer.alignment), buffer))
        placed.sort(key=lambda entry: entry[1])
    return max(used + buffer.size for _, used, buffer in placed)


def _scratch_bytes(plan: MultiWavePlan | ColumnTilePlan, problem: NormProblem) -> int:
    """An upper bound: Triton's reductions and changes of layout take up to 8 numbers a thread, of the widest type."""
    num_warps = plan.num_warps if isinstance(plan, MultiWavePlan) else max(plan.num_warps, plan.row_pass_warps)
    dtypes = (problem.acc_dtype, problem.weight_dtype, problem.bias_dtype, problem.grad_dtype)
    return 8 * max(dtype.itemsize for dtype in dtypes if dtype is not None) * WARP_SIZE * num_warps


# --- Registers ---


def max_registers(plan: Plan) -> int:
    """What a thread of the plan's kernel may use."""
    return MAX_REGISTERS if isinstance(plan, ColumnTilePlan) else plan.max_registers


def register_limit(threads_per_sm: int, device: DeviceSpec) -> int:
    """Registers that each of so many threads on an SM can have."""
    return min(MAX_REGISTERS, _round_down(device.registers_per_sm / threads_per_sm, REGISTER_STEP))


def group_register_limit(num_groups: int, num_warps: int, device: DeviceSpec) -> int:
    """Registers that a thread of a compute group can have, with one CTA on each SM, when the producer has given away
    what it does not need."""
    compute, producer = WARP_SIZE * num_warps * num_groups, WARP_SIZE * PRODUCER_WARPS
    entry = register_limit(compute + producer, device)
    left = _round_down(entry, REGISTER_STEP) * (compute + producer) - PRODUCER_REGISTERS * producer
    return min(MAX_GROUP_REGISTERS, _round_down(left / compute, REGISTER_STEP))


def entry_registers(plan: WarpSpecializedPlan) -> int:
    """Registers that a thread starts with, so that each of a compute group comes to max_registers."""
    compute, producer = WARP_SIZE * plan.num_warps * plan.num_groups, WARP_SIZE * PRODUCER_WARPS
    total = compute * plan.max_registers + producer * PRODUCER_REGISTERS
    return _round_up(total / (compute + producer), REGISTER_STEP)


def registers(plan: Plan, problem: NormProblem, device: DeviceSpec) -> int:
    """Registers that a thread needs, as an upper bound."""
    if isinstance(plan, RingPlan):
        return ring_registers(plan, problem, device)
    if isinstance(plan, MultiWavePlan):
        if plan.short_lived:
            elements = plan.rows_per_tile * plan.chunk * plan.num_chunks / (WARP_SIZE * plan.num_warps)
            return one_tile_registers(elements, problem)
        return multiwave_registers(plan.rows_per_tile, plan.chunk, plan.num_chunks, plan.num_warps, problem, device)
    return plan.max_registers if isinstance(plan, ColumnRingPlan) else MAX_REGISTERS


# The coefficients below bound what some thousand builds needed, Triton 3.6, sm_80 to sm_120, random tiles, dtypes and
# masks (2026-11-20). A register is a float32 or two 16-bit values; what the compiler recomputes instead of holding it
# is why they are fractions.


def ring_registers(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> int:
    """For the ring kernels: by the columns of a thread, with their sums and parameters, and its elements of a tile."""
    sm120, held = device.arch >= 120, not plan.weight_in_smem
    columns, rows = columns_of_a_thread(plan), rows_of_a_thread(plan.rows_per_tile, plan.cluster)
    elements = columns * rows
    if problem.direction == "backward":
        need = 30.0 if isinstance(plan, WarpSpecializedPlan) else 20.0
        if sm120:
            need += 108 if isinstance(plan, WarpSpecializedPlan) else 30
        if isinstance(plan, WarpSpecializedPlan) and plan.num_groups > 1:
            need += REGISTER_STEP * (problem.cols % 16 != 0)  # whether each column of the last chunk is in the row
            need += 4 * REGISTER_STEP * (not problem.wants_dw and problem.x_dtype.itemsize == 4 and device.arch >= 100)
        later = device.triton > OLDEST_TRITON
        blackwell_groups = device.arch >= 100 and isinstance(plan, WarpSpecializedPlan)
        if later and (plan.rows_per_tile >= 8 or blackwell_groups):
            need += 3 * REGISTER_STEP  # eight rows of 576 columns spilled 16 to 48 bytes with 3.7
        need += columns * (2.0 + 0.7 * problem.num_sums)
        need += columns * (0.8 if held else 0.2) * (problem.weight_dtype is not None)
        need += 24 * (problem.weight_dtype is not None and problem.weight_dtype.itemsize == 8)
        if rows > 1 and elements > 40 and problem.residual_dtype is not None:  # else 8 to 88 bytes of spills
            large = problem.weight_dtype is not None and problem.weight_dtype.itemsize == 4
            need += 24 * (large or device.arch >= 100)
        need += (1.25 + 1.25 * _residual_registers(problem)) * elements + 2.5 * rows + 3.5 * plan.num_chunks
        need += plan.cluster * (plan.cluster > 1)  # shares of the row sums
        if isinstance(plan, WarpSpecializedPlan) and plan.cached:
            need += elements * (problem.x_dtype.itemsize + problem.grad_dtype.itemsize) / 8
            need += 2 * REGISTER_STEP * (not is_whole(plan, problem.cols))
    else:
        parameters = [dtype.itemsize for dtype in (problem.weight_dtype, problem.bias_dtype) if dtype is not None]
        need = 30 + (1 + problem.x_dtype.itemsize / 4) * elements
        need += columns * held * len(parameters) + 0.01 * elements * sum(itemsize - 2 for itemsize in parameters)
        need += 2.5 * columns * parameters.count(8) + 3 * num_copies(plan) * (num_copies(plan) > 1)
        if problem.norm == "layer" and plan.cluster > 1:
            need += 0.5 * rows * plan.cluster  # means and variances of the other CTAs
        threads = threads_of_a_row(plan)
        in_lanes = WARP_SIZE if problem.cols % 16 == 0 else 2 * WARP_SIZE  # of 16 columns the compiler asks for one
        if problem.norm == "layer" and threads <= in_lanes and not is_whole(plan, problem.cols):
            need += 2 * plan.chunk / threads  # whether each column of the last chunk is in the row
    return _round_up(min(need, _manages_with(plan, problem, device)), REGISTER_STEP)


def _manages_with(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> float:
    """Registers with which the compiler, capped there, recomputes what it would hold otherwise and still spills
    nothing, as seen of every such build (sm_90, 100 and 103, 2026-11-21 and 22)."""
    columns, one_row = columns_of_a_thread(plan), plan.rows_per_tile == 1
    dtypes = (problem.x_dtype, problem.grad_dtype, problem.weight_dtype, problem.bias_dtype)
    halves = all(dtype is None or dtype.itemsize == 2 for dtype in dtypes)
    if not halves or not one_row or device.arch >= 120:
        return math.inf
    if problem.direction == "backward":
        return _backward_of_one_row_manages_with(plan, problem, device) if isinstance(plan, PipelinedPlan) else math.inf
    if plan.weight_in_smem or problem.norm == "rms":
        return math.inf
    whole, large = is_whole(plan, problem.cols), plan.cluster > 4
    ends_well = whole or (problem.cols % 16 == 0 and device.arch < 100)
    too_many = columns > (48 if large else 64) or (large and whole and columns > 40)
    return math.inf if too_many or not ends_well else 168 if columns <= 48 else 248


def _backward_of_one_row_manages_with(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> float:
    """For a second CTA on an SM, or one of 16 warps; or for many columns. Of copies there are one or two."""
    columns, whole, hopper = columns_of_a_thread(plan), is_whole(plan, problem.cols), device.arch < 100
    few_copies = num_copies(plan) <= 2
    if problem.norm == "rms":
        few, many = (36 if few_copies else 32), (64 if plan.weight_in_smem else 60)
    else:
        in_fours = plan.chunk == 4 * threads_of_a_row(plan) and not whole and problem.residual_dtype is None
        in_eights = plan.num_chunks <= 4 and whole
        one_chunk = plan.num_chunks == 1 and (hopper or whole)
        most = one_chunk or (hopper and (in_eights or (in_fours and few_copies)))
        few, many = (32 if most else 28 if few_copies and hopper else 24), (64 if hopper else 56)
        if device.triton > OLDEST_TRITON:  # 3.7 and 3.9 spill 16 to 104 bytes of 64 columns, and of 32 by 16 warps
            few, many = min(few, 28 if plan.num_warps == 16 else 32), 56
    if plan.weight_in_smem and plan.cluster > 1 and columns <= few:
        return 128
    if hopper:
        most_held = 60
    else:
        most_held = 48 if device.triton == OLDEST_TRITON else 36  # 3.8 spilled 24 bytes of 40 columns
    held_well = plan.weight_in_smem or problem.norm == "rms" or columns <= most_held
    return 248 if columns <= many and few_copies and held_well else math.inf


def has_registers_to_work_ahead(plan: RingPlan, problem: NormProblem) -> bool:
    """For the statistics of the next tile as long as the sums of one are made, say: the last two registers, for
    LayerNorm where a thread has 128 and many columns."""
    return problem.norm == "rms" or plan.max_registers > 128 or columns_of_a_thread(plan) <= 24


def has_registers_for_pairs(plan: RingPlan, problem: NormProblem) -> bool:
    """For two values at a time to become float32 (rowmath.widen): 32 columns of a row that ends within a chunk would
    spill 8 bytes with 128 registers."""
    return plan.max_registers > 128 or columns_of_a_thread(plan) <= 28 or is_whole(plan, problem.cols)


def multiwave_registers(
    rows_per_tile: int, chunk: int, num_chunks: int, num_warps: int, problem: NormProblem, device: DeviceSpec
) -> int:
    """For the multi-wave kernels."""
    fp64, sm120 = problem.acc_dtype.itemsize == 8, device.arch >= 120
    elements = rows_per_tile * chunk * num_chunks / (WARP_SIZE * num_warps)
    accumulator = 1 + fp64
    # Loads of single elements take an address and a predicate each, which rows of one thread do not share.
    scattered, many_rows = not problem.tma_aligned, rows_per_tile > 2
    if problem.direction == "backward":
        scattered *= 1.0 if device.triton == OLDEST_TRITON else 1.5  # 8 rows of 77 columns spilled 56 to 128 bytes
        loaded = (problem.x_dtype.itemsize + problem.grad_dtype.itemsize) / 4
        per_element = 1.25 * loaded + 3.9 * accumulator + 1.3 * sm120 + scattered * (9.0 if many_rows else 4.5)
        per_element += 1.25 * _residual_registers(problem)
        if device.triton > OLDEST_TRITON and 100 <= device.arch < 120:
            # 3.9 spilled 112 bytes of two rows of 1600 columns, and 40 of 16 rows of 128.
            per_element += 2.0 if many_rows else 1.0
        if device.triton > OLDEST_TRITON and 80 < device.arch < 90 and many_rows:
            per_element += 0.4  # 3.9 spilled 8 bytes of 16 rows of 256 columns
        per_element += problem.x_dtype.itemsize != problem.grad_dtype.itemsize  # one of them changes its layout
        if problem.weight_dtype is not None and not problem.wants_dw:
            per_element += 0.8 * accumulator  # dw's product would hold x_hat anyway
        least, need = (112, 84) if fp64 else (80, 44)  # float64 divides and takes roots in software
        need += 8 * (many_rows and 100 <= device.arch < 120)
        need += (min(rows_per_tile, 16) - 1) * num_chunks + per_element * elements + 0.2 * max(0, elements - 16)
        need += 0.8 * max(0, rows_per_tile - 32)
        if problem.wants_db:  # dw and db of one chunk come together with all of a thread's elements at once
            need += 2 * max(0, elements / num_chunks - 16)
    else:
        held = [dtype for dtype in (problem.weight_dtype, problem.bias_dtype) if dtype is not None]
        parameters = sum(max(1, dtype.itemsize / problem.acc_dtype.itemsize) for dtype in held)
        per_element = 1.5 * problem.x_dtype.itemsize / 4 + accumulator * (1.3 + 0.7 * parameters)
        two_long_rows = rows_per_tile == 2 and elements > 20
        per_element += scattered * (7.5 if many_rows else 3.0 if two_long_rows else 0.8)
        least, need = (96, 50) if fp64 else (80, 12)
        need += 16 * (scattered and device.arch < 90)
        need += (8 + 0.3 * elements) * sm120 + 0.3 * (rows_per_tile - 1) + 4 * (num_chunks - 1) + per_element * elements
        need += 0.15 * parameters * elements / rows_per_tile  # what rows of one thread share
    return _round_up(max(least, need), REGISTER_STEP)


# Of 16 bits, for which the compiler manages with 128: it loads parameters when their columns are due.
ELEMENTS_OF_128_REGISTERS = {"layer": 56, "rms": 64}


def one_tile_registers(elements: float, problem: NormProblem) -> int:
    """For a multi-wave forward whose CTAs have one row tile each, of so many elements a thread, 8 or more of them at
    once (sm_90, 2026-11-22)."""
    held = [dtype.itemsize for dtype in (problem.weight_dtype, problem.bias_dtype) if dtype is not None]
    need = 16 + elements * (1.5 if problem.norm == "layer" else 1.2)
    need += elements * sum(max(0.75, 0.24 * itemsize) for itemsize in held)
    if problem.norm == "rms" and elements <= 32 and max(problem.x_dtype.itemsize, *held, 2) == 2:
        need = min(need, 64)  # with which the compiler manages
    if elements <= ELEMENTS_OF_128_REGISTERS[problem.norm] and max(problem.x_dtype.itemsize, *held, 2) == 2:
        need = min(need, 128)
    return _round_up(need, REGISTER_STEP)


def _residual_registers(problem: NormProblem) -> float:
    """Of an element of the gradient that is added to dx."""
    return 0 if problem.residual_dtype is None else problem.residual_dtype.itemsize / 4


def _round_up(value: float, step: int) -> int:
    return -int(-value // step) * step


def _round_down(value: float, step: int) -> int:
    return int(value // step) * step
