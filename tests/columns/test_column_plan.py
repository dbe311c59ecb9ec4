"""Plans of column_sum: the sizes of tiles, which sums can use TMA, and when rows are split. The kernels of the plans
compile without spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BF16, FP16, FP32, FP64
from column_sums import DEVICES, Sums, builds, complaints, plans_of, problem_of
from compiling import InParallel
from hypothesis import strategies as st
from planning import given

from fusednorm.columns import plan as column_plan
from fusednorm.columns.plan import (
    MAX_TENSORS,
    PortableSum,
    RingSum,
    choose,
    ring_fault,
    ring_plans,
    shared_bytes,
    shrink,
)
from fusednorm.columns.problem import in_place, is_tma_aligned
from fusednorm.planner import limits
from fusednorm.planner.budget import RESERVED_SMEM_BYTES
from fusednorm.planner.device import A100, B200, H200, RTX_4090, RTX_5090
from fusednorm.planner.legality import MAX_RING_ROWS
from fusednorm.planner.plan import ReferencePlan

SQUARE = Sums(16384, 16384, 1, BF16)


def fault(sums: Sums, device=H200, rows: int | None = None, **changes) -> str | None:
    return ring_fault(replace(problem_of(sums), **changes), rows or sums.rows, device)


@pytest.mark.parametrize(
    "budget, tile",
    [
        (64 * 1024, (128, 128)),
        (64 * 1024 - 1, (64, 128)),
        (8 * 1024, (16, 128)),
        (8 * 1024 - 1, (16, 64)),
        (4 * 1024, (16, 64)),
        (4 * 1024 - 1, None),
    ],
)
def test_rows_are_halved_to_16_and_then_columns_to_64(budget, tile):
    assert shrink(128, 4, budget) == tile


def test_a_tile_shrinks_by_one_halving_for_each_that_a_budget_lacks():
    for itemsize in (2, 4):
        tile, seen = (128, 256), []
        while tile is not None:
            rows, chunk = tile
            size = rows * chunk * itemsize
            assert shrink(256, itemsize, size) == tile
            seen, tile = [*seen, tile], shrink(256, itemsize, size - 1)
        assert seen == [(128, 256), (64, 256), (32, 256), (16, 256), (16, 128), (16, 64)]


@pytest.mark.parametrize(
    "dtype, largest",
    [
        (FP32, {1: 8192, 2: 4096, 3: 8192, 5: 4096, 7: 2048, 8: 2048, 14: 1024, 15: 1024, 29: 1024}),
        (FP16, {1: 16384, 2: 8192, 3: 16384, 5: 8192, 7: 4096, 8: 4096, 14: 2048, 15: 2048, 29: 1024, 57: 1024}),
    ],
)
def test_tiles_of_n_tensors_are_what_a_stage_of_each_leaves(dtype, largest):
    for count, elements in largest.items():  # three tiles in flight are enough: one stage of each of three tensors
        plans = list(ring_plans(problem_of(Sums(4096, 1024, count, dtype, total=True)), B200))
        assert max(plan.rows_per_tile * plan.chunk for plan in plans) == elements


SIDES = (256, 1024, 4096, 16384, 65536)


@pytest.mark.parametrize("device", [H200, B200, RTX_5090], ids=lambda device: device.name)
@pytest.mark.parametrize("rows", SIDES)
@pytest.mark.parametrize("cols", SIDES)
def test_every_pair_of_sides_has_a_ring_without_idle_splits_by_which_large_sums_go(device, rows, cols):
    for dtype in (FP16, FP32):
        problem = problem_of(Sums(rows, cols, 1, dtype))
        plan, splits, ring_us = choose(problem, rows, device, "ring")
        tiles = -(-rows // plan.rows_per_tile)
        assert isinstance(plan, RingSum) and (splits - 1) * -(-tiles // splits) < tiles
        best = choose(problem, rows, device)
        assert best.predicted_us <= ring_us
        assert isinstance(best.plan, RingSum) or rows * cols < 1 << 26, "of 128 MiB and more"


@given(
    st.sampled_from([H200, B200, RTX_5090]),
    st.integers(1, MAX_TENSORS),
    st.sampled_from([FP16, FP32]),
    st.booleans(),
    st.integers(64, 100_000),
)
def test_every_ring_leaves_the_reserved_shared_memory_and_fits_its_sm(device, count, dtype, total, cols):
    problem, reserved = problem_of(Sums(8, cols, count, dtype, total)), limits.column_sum_ring["reserved_bytes"]
    for plan in ring_plans(problem, device):
        size, tensors = shared_bytes(plan, problem), count if total else 1
        tiles = tensors * plan.num_stages * plan.rows_per_tile * plan.chunk * dtype.itemsize
        assert tiles + reserved <= device.smem_per_block_bytes
        assert size <= tiles + reserved
        assert plan.ctas_per_sm * (tiles + reserved + RESERVED_SMEM_BYTES) <= device.smem_per_sm_bytes
        assert plan.chunk >= 64 and plan.rows_per_tile >= 16
        assert tensors * plan.num_stages >= 3, "copies run while a tile is read"
        assert 1 <= plan.group <= tensors
        assert plan.rows_per_tile * plan.chunk * dtype.itemsize >= 32 * 16 * plan.num_warps, "16 bytes for each thread"


# A sum over n tensors (total=True) has a tile of every tensor in shared memory at once. `most` is the largest n that
# fits, up to MAX_TENSORS.
@pytest.mark.parametrize(
    "device, dtype, most", [(H200, FP32, 54), (H200, FP16, MAX_TENSORS), (RTX_5090, FP32, 22), (RTX_5090, FP16, 45)]
)
def test_so_many_tensors_can_be_added_up_by_tma_and_no_more(device, dtype, most):
    for count in (1, 7, 8, 14, 15, 29, 57, most, min(most + 1, MAX_TENSORS)):
        why = fault(Sums(4096, 1024, count, dtype, total=True), device)
        assert (why is None) == (count <= most)
        assert fault(Sums(4096, 1024, count, dtype), device) is None, "one at a time, there is always room"
    if most < MAX_TENSORS:
        assert why == f"has no room in shared memory for 16 x 64 elements of each of {most + 1} tensors at once"


def test_tma_is_not_for_everything():
    assert fault(SQUARE) is None
    assert "9.0 for TMA, RTX 4090 has 8.9" in fault(SQUARE, RTX_4090)
    assert "float64" in fault(SQUARE, dtype=FP64)
    assert "float64" in fault(SQUARE, out_dtype=FP64)
    assert "multiples of 16 bytes" in fault(SQUARE, tma_aligned=False)
    assert fault(SQUARE, cols=64) is None
    assert "at least 64 columns, got 63" in fault(SQUARE, cols=63)
    assert fault(SQUARE, rows=MAX_RING_ROWS) is None
    assert "rows and columns, got" in fault(SQUARE, rows=MAX_RING_ROWS + 1)
    assert "rows and columns, got" in fault(SQUARE, cols=MAX_RING_ROWS + 8)


def test_alignment_is_of_rows_starts_not_of_their_ends():
    storage = torch.empty(8, 64, dtype=BF16)
    aligned = {cols: is_tma_aligned(in_place(storage[:, 8 : 8 + cols]), cols) for cols in (3, 40)}
    assert aligned == {3: True, 40: True}
    assert not is_tma_aligned(in_place(storage[:, 4:12]), 8)
    assert not is_tma_aligned(in_place(torch.empty(8, 12, dtype=BF16)), 12)
    assert not is_tma_aligned(in_place(torch.empty(1, 16, dtype=BF16).expand(8, 16)), 16), "rows on top of each other"


def test_large_sums_go_by_tma_and_small_ones_by_one_launch():
    for dtype in (FP16, FP32):
        for side in (4096, 8192, 16384, 65536):
            assert isinstance(choose(problem_of(Sums(side, side, 1, dtype)), side, H200).plan, RingSum)
        for side in (256, 1024):
            choice = choose(problem_of(Sums(side, side, 1, dtype)), side, H200)
            assert isinstance(choice.plan, PortableSum) and choice.num_splits == 1


@pytest.mark.parametrize("device", [A100, H200, B200, RTX_5090], ids=lambda device: device.name)
def test_few_columns_of_many_rows_are_split_over_all_sms(device):
    problem = problem_of(Sums(1 << 20, 256, 1, BF16))
    choice = choose(problem, 1 << 20, device)
    ctas = choice.num_splits * column_plan.ctas_of_a_split(choice.plan, problem)
    assert device.sm_count <= ctas <= limits.column_sum_waves * 2 * device.sm_count


@given(
    st.sampled_from([A100, H200, B200, RTX_5090]),
    st.integers(1, 3_000_000),
    st.integers(1, 100_000),
    st.sampled_from([1, 2, 5, 29]),
    st.sampled_from([FP16, FP32, FP64]),
    st.booleans(),
)
def test_no_split_is_idle_and_partial_sums_are_few(device, rows, cols, count, dtype, total):
    problem = problem_of(Sums(8, cols, count, dtype, total))
    plan, splits, _ = choose(problem, rows, device)
    tiles = -(-rows // plan.rows_per_tile)
    assert 1 <= splits <= tiles
    assert (splits - 1) * -(-tiles // splits) < tiles, "the last split has a tile"
    outputs = problem.num_outputs
    at_once = limits.column_sum_waves * plan.ctas_per_sm * device.sm_count
    few = splits * outputs * cols <= at_once * min(plan.chunk, cols) + splits * outputs * plan.chunk
    if problem.wants_float32_sum:
        most = max(1, limits.most_tiles_of_column_sum // (count // outputs))
        assert -(-tiles // splits) <= most, "no sum has more terms than its bound allows"
        few = few or splits == 1 or -(-tiles // (splits - 1)) > most  # with one split fewer, a sum would have more
    assert splits == 1 or few


def test_a_kernel_that_is_asked_for_runs_where_it_can():
    problem = problem_of(SQUARE)
    assert isinstance(choose(problem, 16384, H200, "portable").plan, PortableSum)
    assert isinstance(choose(problem_of(Sums(256, 256)), 256, H200, "ring").plan, RingSum)
    assert isinstance(choose(problem, 16384, A100, "ring").plan, PortableSum)


def test_gpus_older_than_any_kernel_take_aten():
    plan = choose(problem_of(SQUARE), 16384, replace(A100, name="V100", arch=70)).plan
    assert plan == ReferencePlan("needs compute capability 8.0, V100 has 7.0")


def test_kernels_have_parameters_for_the_most_tensors():
    pytest.importorskip("triton")
    from fusednorm.columns import launch as launch_columns

    assert [len(launch_columns.ring_kernel(count)[1]) for count in (1, 8, 9, MAX_TENSORS)] == [8, 8, 64, 64]


# Each architecture compiles the first of these sums and every fourth of the others. `python tests/column_sums.py`
# compiles many more sums, on every architecture.
COMPILED = [
    Sums(4096, 4096, 1, BF16),
    Sums(4096, 4096, 3, FP32, out_dtype=BF16),
    Sums(4096, 1024, 5, FP16, total=True),
    Sums(4096, 1001, 2, FP16),
    Sums(4096, 96, 2, FP64, total=True),
    Sums(4096, 1024, 29, FP16, total=True),
    Sums(4096, 1000, 9, BF16),
    Sums(4096, 3, 1, BF16),
    Sums(4096, 1024, 14, FP32, total=True),
    Sums(4096, 1024, 57, FP16, total=True),
]
JOBS = [(sums, arch) for turn, arch in enumerate(DEVICES) for sums in COMPILED[:1] + COMPILED[1 + turn % 4 :: 4]]


@pytest.fixture(scope="module")
def compiled(workers):
    return InParallel(workers, complaints, JOBS)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[0]}-sm_{job[1]}")
def test_kernels_compile_within_their_plans_without_spills(compiled, job):
    assert plans_of(job[0], DEVICES[job[1]])
    assert compiled[job].result() == []


def test_row_counts_share_their_builds(workers):
    found = [workers.submit(builds, Sums(rows, 8192, 2, BF16), 90).result() for rows in (8192, 8193, 9000, 70_001)]
    assert len({tuple(hashes) for hashes in found}) == 1
