"""Shared memory and registers of a plan: arithmetic only, held against the compiler by tests/kernels/test_budget.py.

Shared memory is exact for the ring kernels and an upper bound for the portable kernels. Where Triton's releases differ,
the largest value counts, so every release gets the same plan. Registers are upper bounds: with that many registers per
thread the compiler does not spill. The builds behind the coefficients are in bench/NOTES.md, "Evidence behind
constants".
"""

from __future__ import annotations

import bisect
import math
import operator
from typing import NamedTuple

import torch

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
    columns_per_thread,
    is_whole,
    num_copies,
    padded_columns,
    rows_per_thread,
    threads_per_row,
    warps_of_a_row,
)

WARP_SIZE = 32
REGISTER_STEP = 8  # registers per thread are allocated in multiples of 8
MAX_REGISTERS = 255  # per thread
RESERVED_SMEM_BYTES = 1024  # per CTA, for the driver

EACH_CTA_BY_ITSELF = (3, 8)  # first Triton release whose exchange buffers count one CTA, not the whole cluster

PRODUCER_REGISTERS = 24
PRODUCER_WARPS = 4  # only one works, but registers are handed over by whole warpgroups
MAX_GROUP_REGISTERS = 240


# --- Shared memory ---


class Buffer(NamedTuple):
    """A piece of shared memory. size and alignment are in bytes; life is the part of the kernel that needs the piece:
    "always", "entry", "loop" (the row loop) or "after" (after the row loop)."""

    size: int
    alignment: int
    life: str = "always"


def fits_shared_memory(plan: Plan, problem: NormProblem, device: DeviceSpec) -> bool:
    """Whether the plan's shared memory is within the limit of a CTA, and ctas_per_sm CTAs fit an SM."""
    most = device.smem_per_sm_bytes // plan.ctas_per_sm - RESERVED_SMEM_BYTES
    most = min(device.smem_per_block_bytes, most)
    if isinstance(plan, RingPlan):
        elements = plan.num_stages * plan.rows_per_tile * plan.chunk * plan.num_chunks
        dtypes = (problem.x_dtype, problem.grad_dtype)
        if elements * sum(dtype.itemsize for dtype in dtypes if dtype) > most:  # most plans that do not fit
            return False
    return shared_bytes(plan, problem) <= most


def is_within_budget(plan: Plan, problem: NormProblem, device: DeviceSpec) -> bool:
    """Whether the plan fits shared memory and does not spill."""
    fits = registers(plan, problem, device) <= max_registers(plan)
    if plan.kernel == "multi_wave":
        fits &= plan.ctas_per_sm * WARP_SIZE * plan.num_warps * plan.max_registers <= device.registers_per_sm
    return fits and fits_shared_memory(plan, problem, device)


def shared_bytes(plan: Plan, problem: NormProblem) -> int:
    """Bytes of shared memory per CTA, static and dynamic, with the Triton release that takes most."""
    releases = (OLDEST_TRITON, EACH_CTA_BY_ITSELF) if plan.cluster > 1 else (OLDEST_TRITON,)  # alike without clusters
    return max(shared_bytes_by(release, plan, problem) for release in releases)


def shared_bytes_by(release: tuple[int, int], plan: Plan, problem: NormProblem) -> int:
    """Bytes of shared memory per CTA, static and dynamic, with one Triton release, (major, minor)."""
    if isinstance(plan, RingPlan):
        counted = plan.cluster if release < EACH_CTA_BY_ITSELF else 1
        return static_bytes(plan) + _packed(_ring_buffers(plan, problem, counted))
    if plan.kernel == "column_ring":
        return _packed(_column_ring_buffers(plan, problem))
    return _scratch_bytes(plan, problem)


def static_bytes(plan: RingPlan) -> int:
    """Bytes of static shared memory, in which the CTAs of a cluster exchange row sums: two buffers of two float32 per
    row and CTA, and two mbarriers. 0 without a cluster."""
    return _round_up(2 * 8 + 2 * 2 * 4 * plan.rows_per_tile * plan.cluster, 128) if plan.cluster > 1 else 0


def _partial_store_buffers(plan: RingPlan, problem: NormProblem) -> list[Buffer]:
    """Staging of dw and db before their stores; none where each row of a tile is in all warps.

    The staging has all rows of a tile. A pipelined kernel stages all columns, for each sum. A warp-specialized kernel
    stages the adjacent columns of all threads, as they are held or as they are stored, whichever takes more.
    """
    wanted = problem.num_sums
    if not wanted or warps_of_a_row(plan) == plan.num_warps:
        return []
    if isinstance(plan, PipelinedPlan):
        return [Buffer(4 * plan.rows_per_tile * plan.num_chunks * plan.chunk, 16, "after")] * wanted
    threads, row_threads, stored = WARP_SIZE * plan.num_warps, threads_per_row(plan), 4
    held = min(16 // problem.x_dtype.itemsize, plan.chunk // row_threads)  # adjacent columns of a thread
    return [Buffer(4 * plan.rows_per_tile * min(plan.chunk, max(held * row_threads, stored * threads)), 128, "loop")]


def _ring_buffers(plan: RingPlan, problem: NormProblem, counted: int) -> list[Buffer]:
    """All buffers of a ring kernel. The compiler sizes the buffers that threads exchange through for `counted` CTAs."""
    backward, num_warps = problem.direction == "backward", plan.num_warps
    tensors = [problem.x_dtype, problem.grad_dtype] if backward else [problem.x_dtype]
    tensors += problem.rows_in if isinstance(plan, PipelinedPlan) and plan.rows_in_ring else ()
    parameters = [problem.weight_dtype, problem.bias_dtype if problem.reads_bias else None]
    copies = [plan.copy_chunks, 1] if plan.tail else [plan.copy_chunks] * num_copies(plan)
    chunk_elements = plan.num_stages * plan.rows_per_tile * plan.chunk
    life = "loop" if isinstance(plan, PipelinedPlan) else "always"
    rings = [chunks * chunk_elements * dtype.itemsize for chunks in copies for dtype in tensors]
    buffers = [Buffer(size, 128, life) for size in rings]
    if plan.weight_in_smem:
        held = [Buffer(plan.chunk * dtype.itemsize, 16, life) for dtype in parameters if dtype is not None]
        buffers += held * plan.num_chunks
    barriers = Buffer(8 * plan.num_stages, 16)
    # The warps of a row exchange one or two float32 per row.
    warps = warps_of_a_row(plan)
    exchanged = 4 * _sums_per_row(plan, problem) * plan.rows_per_tile * warps * counted if warps > 1 else 0
    if isinstance(plan, PipelinedPlan):
        after = _partial_store_buffers(plan, problem)
        if plan.cluster > 1 and problem.num_sums:
            # Pieces of dw and db change their layout, four elements per thread at once.
            after.append(Buffer(4 * 4 * WARP_SIZE * num_warps * counted, 128, "after"))
        return [*buffers, *[barriers] * len(rings), Buffer(exchanged, 128, "loop"), *after]
    captured = Buffer(_captured_bytes(plan, problem), 8, "entry")
    states = Buffer(num_warps * (plan.num_groups - 1) + PRODUCER_WARPS, 4)  # a byte per warp, except the first group's
    scratch = max([Buffer(exchanged, 128, "loop"), *_partial_store_buffers(plan, problem)])
    return [*buffers, barriers, barriers, *[scratch] * plan.num_groups, captured, states]


def _column_ring_buffers(plan: ColumnRingPlan, problem: NormProblem) -> list[Buffer]:
    """Buffers of a column ring kernel. The final reduction over warps reuses the tiles' memory and adds none."""
    dtypes = [problem.grad_dtype, problem.x_dtype] if problem.wants_dw else [problem.grad_dtype]
    elements = plan.num_stages * plan.rows_per_tile * plan.chunk
    barriers = [Buffer(8 * plan.num_stages, 16)] * len(dtypes)
    return [Buffer(elements * dtype.itemsize, 128) for dtype in dtypes] + barriers


def _sums_per_row(plan: RingPlan, problem: NormProblem) -> int:
    """Number of sums that one reduction takes of each row, at most. A forward corrects the mean if a sum of equal
    elements may be inexact in float32 (passes.mean_and_squares)."""
    corrects = padded_columns(plan) > 2**23 * torch.finfo(problem.row_dtype).eps
    both = problem.direction == "backward" or is_whole(plan, problem.cols) or corrects
    return 2 if problem.norm == "layer" and both else 1


def _captured_bytes(plan: WarpSpecializedPlan, problem: NormProblem) -> int:
    """Bytes of the values that the first group hands to the other warps: 8 plus 4 per dimension for a piece of shared
    memory, 8 for a pointer, descriptor or stride, 4 for a size."""
    dims, layer = 5 if plan.copy_chunks > 1 else 4, problem.norm == "layer"
    tensors = 2 if problem.direction == "backward" else 1
    captured = tensors * (num_copies(plan) * (8 + 4 * dims) + 8) + 2 * (8 + 4 * 2) + 4  # barriers; rows
    if plan.num_groups > 1 and problem.direction == "forward":
        held = [dtype for dtype in (problem.weight_dtype, problem.bias_dtype) if dtype is not None]
        parameter = plan.num_chunks * (8 + 4 * 2) if plan.weight_in_smem else 8
        captured += len(held) * parameter + 8 * (2 + layer) + 4 + 8  # y and statistics; the columns; eps
    elif plan.num_groups > 1:
        has_residual = problem.residual_dtype is not None
        pointers = 2 + layer + problem.num_sums + has_residual  # rstd, dx; mean; dw, db; the residual gradient
        strides, cols = 8 * (1 + layer), 4
        held = (problem.weight_dtype is not None) + problem.reads_bias
        parameter = plan.num_chunks * (8 + 4 * 2) if plan.weight_in_smem else 8
        captured += 8 * pointers + strides + cols + held * parameter
        captured += (8 + 4) * len(problem.rows_in) + 8 * len(problem.rows_out)  # pointers, and the strides of rows
    return captured


_first_used = operator.itemgetter(1)


def _packed(buffers: list[Buffer]) -> int:
    """Bytes of the buffers in Triton's packing: largest first, each at the lowest free place. Buffers of the same
    life cannot use the padding below an aligned buffer."""
    placed: list[tuple[int, int, Buffer]] = []  # (first byte lost, first byte used, buffer), by first byte used
    for buffer in sorted(buffers, key=lambda buffer: -buffer.size):
        place = 0
        for lost, used, other in placed:
            if buffer.life == other.life or "always" in (buffer.life, other.life):
                if _round_up(place, buffer.alignment) + buffer.size <= (lost if buffer.life == other.life else used):
                    break
                place = max(place, used + other.size)
        bisect.insort(placed, (place, _round_up(place, buffer.alignment), buffer), key=_first_used)
    return max(used + buffer.size for _, used, buffer in placed)


def _scratch_bytes(plan: MultiWavePlan | ColumnTilePlan, problem: NormProblem) -> int:
    """Upper bound in bytes: Triton's reductions and layout changes take up to 8 numbers per thread, of the widest type
    of the problem."""
    num_warps = plan.num_warps if plan.kernel == "multi_wave" else max(plan.num_warps, plan.row_pass_warps)
    dtypes = (problem.acc_dtype, problem.weight_dtype, problem.bias_dtype, problem.grad_dtype)
    return 8 * max(dtype.itemsize for dtype in dtypes if dtype is not None) * WARP_SIZE * num_warps


# --- Registers ---


def max_registers(plan: Plan) -> int:
    """Registers that a thread of the plan's kernel may use."""
    return MAX_REGISTERS if plan.kernel == "column_tiles" else plan.max_registers


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
    """Upper bound of the registers that a thread needs."""
    if isinstance(plan, RingPlan):
        return ring_registers(plan, problem, device)
    if plan.kernel == "multi_wave":
        if plan.short_lived:
            elements = plan.rows_per_tile * plan.chunk * plan.num_chunks / (WARP_SIZE * plan.num_warps)
            return one_tile_registers(elements, problem)
        return multiwave_registers(plan.rows_per_tile, plan.chunk, plan.num_chunks, plan.num_warps, problem, device)
    return plan.max_registers if plan.kernel == "column_ring" else MAX_REGISTERS


# The coefficients below bound the registers of all measured builds. A register holds a float32 or two 16-bit values.
# The coefficients are fractions because the compiler recomputes some values instead of holding them.


def ring_registers(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> int:
    """Registers per thread of a ring kernel: a term for the columns of a thread, with their sums and parameters, and a
    term for its elements of a tile."""
    bound = _ring_backward_registers if problem.direction == "backward" else _ring_forward_registers
    return _round_up(min(bound(plan, problem, device), _registers_when_capped(plan, problem, device)), REGISTER_STEP)


def _ring_backward_registers(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> float:
    columns, rows = columns_per_thread(plan), rows_per_thread(plan)
    elements, specialized = columns * rows, isinstance(plan, WarpSpecializedPlan)
    need = 30.0 if specialized else 20.0
    if device.arch >= 120:
        need += 108 if specialized else 30
    if specialized and plan.num_groups > 1:
        need += REGISTER_STEP * (problem.cols % 16 != 0)  # the mask of the last chunk's columns
        need += 4 * REGISTER_STEP * (not problem.wants_dw and problem.x_dtype.itemsize == 4 and device.arch >= 100)
    if device.triton > OLDEST_TRITON and (plan.rows_per_tile >= 8 or (device.arch >= 100 and specialized)):
        need += 3 * REGISTER_STEP  # a later release spilled without these
    need += columns * (2.0 + 0.7 * problem.num_sums)
    need += columns * (0.2 if plan.weight_in_smem else 0.8) * (problem.weight_dtype is not None)
    need += 24 * (problem.weight_dtype is not None and problem.weight_dtype.itemsize == 8)
    if rows > 1 and elements > 40 and problem.residual_dtype is not None:  # some builds spill without these
        large = problem.weight_dtype is not None and problem.weight_dtype.itemsize == 4
        need += 24 * (large or device.arch >= 100)
    need += (1.25 + 1.25 * _residual_registers(problem)) * elements + 2.5 * rows + 3.5 * plan.num_chunks
    need += plan.cluster * (plan.cluster > 1)  # shares of the row sums
    in_ring = not specialized and plan.rows_in_ring
    need += sum(3.0 + (not in_ring) * 0.4 * dtype.itemsize for dtype in problem.rows_in) * elements
    need += problem.reads_bias * (0.75 * elements + columns * (not plan.weight_in_smem))
    if specialized and plan.cached:
        need += elements * (problem.x_dtype.itemsize + problem.grad_dtype.itemsize) / 8
        need += 2 * REGISTER_STEP * (not is_whole(plan, problem.cols))
    return need


def _ring_forward_registers(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> float:
    columns, rows = columns_per_thread(plan), rows_per_thread(plan)
    elements, held, whole = columns * rows, not plan.weight_in_smem, is_whole(plan, problem.cols)
    parameters = [dtype.itemsize for dtype in (problem.weight_dtype, problem.bias_dtype) if dtype is not None]
    need = 30 + (1 + problem.held_bytes / 4) * elements
    need += columns * held * len(parameters) + 0.01 * elements * sum(itemsize - 2 for itemsize in parameters)
    need += 2.5 * columns * parameters.count(8) + 3 * num_copies(plan) * (num_copies(plan) > 1)
    if device.arch >= 120 and held and isinstance(plan, WarpSpecializedPlan) and not whole:
        need += 5 * REGISTER_STEP  # for sm_120 a build spilled without these
    if problem.norm == "layer" and plan.cluster > 1:
        need += 0.5 * rows * plan.cluster  # means and variances that come from the other CTAs
    threads = threads_per_row(plan)
    most_threads = WARP_SIZE if problem.cols % 16 == 0 else 2 * WARP_SIZE  # the compiler tests one column in 16
    if problem.norm == "layer" and threads <= most_threads and not whole:
        need += 2 * plan.chunk / threads  # the mask of the last chunk's columns
    return need


def _registers_when_capped(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> float:
    """Register cap at which such plans were seen to compile without spills, because the compiler recomputes values
    instead of holding them; infinity where no cap is known."""
    columns = columns_per_thread(plan)
    dtypes = (problem.x_dtype, problem.grad_dtype, problem.weight_dtype, problem.bias_dtype)
    has_16_bits = all(dtype is None or dtype.itemsize == 2 for dtype in dtypes)
    if problem.rows_in or not has_16_bits or plan.rows_per_tile > 1 or device.arch >= 120:
        return math.inf
    if problem.direction == "backward":
        return _one_row_registers_when_capped(plan, problem, device) if isinstance(plan, PipelinedPlan) else math.inf
    if plan.weight_in_smem or problem.norm == "rms":
        return math.inf
    whole, large = is_whole(plan, problem.cols), plan.cluster > 4
    needs_no_mask = whole or (problem.cols % 16 == 0 and device.arch < 100)
    too_many = columns > (48 if large else 64) or (large and whole and columns > 40)
    return math.inf if too_many or not needs_no_mask else 168 if columns <= 48 else 248


def _one_row_registers_when_capped(plan: RingPlan, problem: NormProblem, device: DeviceSpec) -> float:
    """The cap for pipelined backwards with one row per tile and 16-bit dtypes: 128 makes room for a second CTA on an SM
    or for 16 warps, 248 serves many columns with one or two copies per tile."""
    columns, whole, hopper = columns_per_thread(plan), is_whole(plan, problem.cols), device.arch < 100
    few_copies = num_copies(plan) <= 2
    if problem.norm == "rms":
        most_at_128, most_at_248 = (36 if few_copies else 32), (64 if plan.weight_in_smem else 60)
    else:
        in_fours = plan.chunk == 4 * threads_per_row(plan) and not whole and problem.residual_dtype is None
        one_chunk = plan.num_chunks == 1 and (hopper or whole)
        easy = one_chunk or (hopper and ((whole and plan.num_chunks <= 4) or (in_fours and few_copies)))
        most_at_128, most_at_248 = (32 if easy else 28 if few_copies and hopper else 24), (64 if hopper else 56)
        if device.triton > OLDEST_TRITON:  # later releases spilled at 64 columns, and at 32 with 16 warps
            most_at_128, most_at_248 = min(most_at_128, 28 if plan.num_warps == 16 else 32), 56
    if plan.weight_in_smem and plan.cluster > 1 and columns <= most_at_128:
        return 128
    if not plan.weight_in_smem and problem.norm == "layer":  # a later release spilled at 40 columns
        most_at_248 = min(most_at_248, 60 if hopper else 48 if device.triton == OLDEST_TRITON else 36)
    return 248 if columns <= most_at_248 and few_copies else math.inf


def has_registers_to_prefetch(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether a thread can hold the next tile's statistics while it adds up the current tile. LayerNorm with 128
    registers and many columns lacks the two registers for them."""
    return problem.norm == "rms" or plan.max_registers > 128 or columns_per_thread(plan) <= 24


# LayerNorm's backward converts pairs of bfloat16 if a thread has more columns than this, or in a cluster of CTAs with
# more than four warps. An SM then has no other work to fill its waits, so the number of instructions sets the time.
LEAST_COLUMNS_IN_PAIRS = 32


def widens_in_pairs(plan: RingPlan, problem: NormProblem) -> bool:
    """Whether bfloat16 values become float32 two at a time (rowmath.widen), because instructions limit the speed. With
    128 registers, 32 columns would spill if the row ends within a chunk."""
    if problem.norm == "rms" or problem.direction == "forward" or problem.x_dtype != torch.bfloat16:
        return False
    columns, shared = columns_per_thread(plan), plan.cluster > 1 and plan.num_warps > 4
    if not isinstance(plan, PipelinedPlan) or not (shared or columns > LEAST_COLUMNS_IN_PAIRS):
        return False
    return plan.max_registers > 128 or columns <= 28 or is_whole(plan, problem.cols)


def multiwave_registers(
    rows_per_tile: int, chunk: int, num_chunks: int, num_warps: int, problem: NormProblem, device: DeviceSpec
) -> int:
    """Registers per thread of a multi-wave kernel."""
    fp64, sm120 = problem.acc_dtype.itemsize == 8, device.arch >= 120
    elements = rows_per_tile * chunk * num_chunks / (WARP_SIZE * num_warps)
    accumulator = 1 + fp64
    # Unaligned rows are loaded element by element. Each load takes an address and a predicate of its own.
    scattered, many_rows = not problem.tma_aligned, rows_per_tile > 2
    if problem.direction == "backward":
        scattered *= 1.0 if device.triton == OLDEST_TRITON else 1.5  # a later release spilled with 1.0
        per_element = 1.3 * sm120 + scattered * (9.0 if many_rows else 4.5) + 1.25 * _residual_registers(problem)
        if problem.form.late:
            per_element += scattered * len(problem.rows_in + problem.rows_out)
            per_element += _registers_of_late_rows(rows_per_tile, problem)
            # Ampere makes 16-bit values again one by one. On Blackwell some builds with float32 rows spilled without.
            per_element += 1.4 * (device.arch < 90 and problem.x_dtype.itemsize == 2 and bool(problem.summed))
            per_element += 0.7 * (device.arch >= 100 and problem.x_dtype.itemsize == 4)
        else:
            loaded = (problem.x_dtype.itemsize + problem.grad_dtype.itemsize) / 4
            per_element += 1.25 * loaded + 3.9 * accumulator
            per_element += sum(1.25 * dtype.itemsize / 4 + 1.5 * accumulator for dtype in problem.rows_in)
        per_element += accumulator * (problem.reads_bias and bool(problem.rows_in + problem.shared))
        if device.triton > OLDEST_TRITON and 100 <= device.arch < 120:
            # A later release spilled on Blackwell without these.
            per_element += 2.0 if many_rows else 1.0
        if device.triton > OLDEST_TRITON and 80 < device.arch < 90 and many_rows:
            per_element += 0.4  # a later release spilled without it
        per_element += problem.x_dtype.itemsize != problem.grad_dtype.itemsize  # x or the gradient changes its layout
        if problem.weight_dtype is not None and not problem.wants_dw:
            per_element += 0.8 * accumulator  # x_hat: where dw is wanted, the terms above include it
        least, need = (112, 84) if fp64 else (80, 44)  # float64 division and square root run in software
        if problem.form.late:
            # For architectures other than Hopper some builds spilled without the last term.
            least, need = least - 16, need - 20 + max(0, elements - 16) + REGISTER_STEP * (device.arch != 90)
        need += 8 * (many_rows and 100 <= device.arch < 120)
        need += (min(rows_per_tile, 16) - 1) * num_chunks + per_element * elements + 0.2 * max(0, elements - 16)
        need += 0.8 * max(0, rows_per_tile - 32)
        if device.triton > OLDEST_TRITON and problem.norm == "layer" and elements >= 32:
            need += REGISTER_STEP  # a later release spilled without it
        if problem.wants_db:  # dw and db of a chunk are held at the same time as all elements of the thread
            need += 2 * max(0, elements / num_chunks - 16)
    else:
        held = [dtype for dtype in (problem.weight_dtype, problem.bias_dtype) if dtype is not None]
        parameters = sum(max(1, dtype.itemsize / problem.acc_dtype.itemsize) for dtype in held)
        scattered *= 1 + 1.5 * len(problem.rows_in + problem.rows_out)
        loaded = 1.5 * problem.x_dtype.itemsize + 2.25 * sum(dtype.itemsize for dtype in problem.rows_in)
        per_element = loaded / 4 + accumulator * (1.3 + 0.7 * parameters)
        two_long_rows = rows_per_tile == 2 and elements > 20
        per_element += scattered * (7.5 if many_rows else 3.0 if two_long_rows else 0.8)
        least, need = (96, 50) if fp64 else (80, 12)
        need += (16 + 8 * (problem.norm == "layer")) * (scattered and device.arch < 90)
        need += (8 + 0.3 * elements) * sm120 + 0.3 * (rows_per_tile - 1) + 4 * (num_chunks - 1) + per_element * elements
        need += REGISTER_STEP * len(problem.rows_in)
        need += 0.15 * parameters * elements / rows_per_tile  # parameters, which the rows of a thread share
    return _round_up(max(least, need), REGISTER_STEP)


def _registers_of_late_rows(rows_per_tile: int, problem: NormProblem) -> float:
    """Registers per element of a backward that sums gradients of rows, or reads rows for gradients alone. If it sums,
    no values of the first pass over a tile wait for the second."""
    accumulator, late = problem.acc_dtype.itemsize / 4, set(problem.form.late)
    rows = zip(problem.names_in, problem.rows_in, strict=True)
    need = 1.85 * (problem.x_dtype.itemsize + problem.grad_dtype.itemsize) / 4
    need += sum((1.25 if name in late else 2.0) * dtype.itemsize / 4 for name, dtype in rows)
    need += accumulator * (0.95 * problem.num_sums + 0.9 * len(problem.shared) + 0.9 * bool(problem.rows_in))
    of_weight = (0.8 + 2.0 * bool(problem.rows_in)) * (problem.weight_dtype is not None)
    need += accumulator * (of_weight + 1.1 * (not problem.summed))
    return need + 1.3 * (rows_per_tile > 1)


# Most 16-bit elements per thread for which 128 registers suffice, because the compiler loads parameters late.
ELEMENTS_OF_128_REGISTERS = {"layer": 56, "rms": 64}


def one_tile_registers(elements: float, problem: NormProblem) -> int:
    """Registers per thread of a multi-wave forward whose CTAs have one row tile each, with `elements` per thread, 8 or
    more of them loaded at once."""
    held = [dtype.itemsize for dtype in (problem.weight_dtype, problem.bias_dtype) if dtype is not None]
    need = 16 + elements * (1.5 if problem.norm == "layer" else 1.2)
    need += elements * sum(max(0.75, 0.24 * itemsize) for itemsize in held)
    need += elements * (problem.held_bytes - problem.x_dtype.itemsize) / 4
    if problem.rows_in:
        return _round_up(need, REGISTER_STEP)
    if problem.norm == "rms" and elements <= 32 and max(problem.x_dtype.itemsize, *held, 2) == 2:
        need = min(need, 64)  # a cap at which the compiler does not spill
    if elements <= ELEMENTS_OF_128_REGISTERS[problem.norm] and max(problem.x_dtype.itemsize, *held, 2) == 2:
        need = min(need, 128)
    return _round_up(need, REGISTER_STEP)


def _residual_registers(problem: NormProblem) -> float:
    """Registers per element of the gradient that is added to dx."""
    return 0 if problem.residual_dtype is None else problem.residual_dtype.itemsize / 4


def _round_up(value: float, step: int) -> int:
    return -int(-value // step) * step


def _round_down(value: float, step: int) -> int:
    return int(value // step) * step
