"""The share of a tile that each thread of a ring holds: how many columns of how many rows, in which chunks, and whether
the parameters are in registers or in shared memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import make_problem

from fusednorm.planner.device import H200
from fusednorm.planner.heuristics import best_plan, choose
from fusednorm.planner.plan import PipelinedPlan, columns_per_thread, is_whole, num_copies, num_ctas, threads_per_row
from fusednorm.planner.tile_share import widens_in_pairs

MANY_ROWS = 16384

# --- Columns ---


@pytest.mark.parametrize(
    "cols, dtype, cluster",
    [(5120, "bf16", 1), (5632, "bf16", 1), (10240, "bf16", 2), (12288, "bf16", 2), (24576, "bf16", 4)]
    + [(3072, "fp32", 1), (8192, "fp32", 2)],
)
def test_layernorm_forward_holds_the_parameters_of_one_row_in_registers(cols, dtype, cluster):
    plan = choose(make_problem("layer", cols, dtype, direction="forward"), MANY_ROWS, H200)
    assert (plan.rows_per_tile, plan.cluster, plan.ctas_per_sm, plan.weight_in_smem) == (1, cluster, 3, False)


@pytest.mark.parametrize(
    "norm, cols, num_warps, cluster",
    [("layer", 5376, 4, 1), ("layer", 6784, 4, 1), ("layer", 10240, 4, 2), ("layer", 11264, 4, 2)]
    + [("layer", 22528, 4, 4), ("layer", 26624, 4, 4), ("layer", 40960, 4, 8), ("layer", 57344, 4, 8)]
    + [("layer", 98304, 8, 8), ("layer", 106496, 8, 8), ("layer", 131072, 8, 8), ("layer", 163840, 8, 16)]
    + [("layer", 196608, 8, 16), ("layer", 229376, 8, 16), ("layer", 262144, 8, 16)]
    + [("rms", 40960, 4, 8), ("rms", 45056, 4, 8), ("rms", 98304, 8, 8), ("rms", 131072, 8, 8)]
    + [("rms", 262144, 8, 16)],
)
def test_wide_rows_of_a_backward_have_many_columns_per_thread_rather_than_more_ctas_or_warps(
    norm, cols, num_warps, cluster
):
    plan = choose(make_problem(norm, cols), MANY_ROWS, H200)
    assert (plan.rows_per_tile, plan.num_warps, plan.cluster) == (1, num_warps, cluster)
    assert 38 < columns_per_thread(plan) <= 64


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("cols", [43008, 90112, 102400, 122880, 172032, 204800, 245760])
def test_many_columns_per_thread_come_in_more_than_ten_chunks_of_four(norm, cols):
    plan = choose(make_problem(norm, cols), MANY_ROWS, H200)
    assert 10 < plan.num_chunks <= 16 and plan.chunk == 4 * threads_per_row(plan) and num_copies(plan) <= 2


@pytest.mark.parametrize("cols", [3328, 3840, 15360])
def test_or_of_two_where_these_are_exactly_a_row(cols):
    problem = make_problem("layer", cols)
    plan = choose(problem, MANY_ROWS, H200)
    assert plan.num_chunks > 10 and plan.chunk == 2 * threads_per_row(plan) and is_whole(plan, cols)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_forward_and_rows_of_float32_have_ten_chunks_at_most(dtype, direction):
    if (dtype, direction) == ("bf16", "backward"):
        return
    for cols in range(4096, 131073, 3072):
        plan = choose(make_problem("layer", cols, dtype, direction=direction), MANY_ROWS, H200)
        assert not isinstance(plan, PipelinedPlan) or plan.num_chunks <= 10


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("cols", range(65536 + 4096, 262144 + 1, 4096))
def test_rows_of_up_to_262144_columns_are_rings_and_never_by_column_tiles(norm, cols):
    for direction in ("backward", "forward"):
        assert isinstance(choose(make_problem(norm, cols, direction=direction), MANY_ROWS, H200), PipelinedPlan)


@pytest.mark.parametrize(
    "norm, cols, rows, num_warps, cluster",
    [("layer", 73728, 2, 8, 8), ("layer", 106496, 2, 8, 8), ("layer", 131072, 2, 8, 8), ("layer", 147456, 1, 16, 8)]
    + [("layer", 196608, 1, 16, 8), ("layer", 212992, 2, 8, 16), ("layer", 262144, 2, 8, 16)]
    + [("rms", 98304, 2, 8, 8), ("rms", 163840, 2, 8, 16), ("rms", 229376, 2, 8, 16)],
)
def test_wide_rows_of_a_forward_have_more_warps_rather_than_more_ctas(norm, cols, rows, num_warps, cluster):
    plan = choose(make_problem(norm, cols, direction="forward"), MANY_ROWS, H200)
    assert (plan.rows_per_tile, plan.num_warps, plan.cluster, plan.ctas_per_sm) == (rows, num_warps, cluster, 1)


@pytest.mark.parametrize(
    "norm, cols, cluster",
    [("layer", 4736, 2), ("layer", 5120, 2), ("rms", 4736, 2), ("rms", 5120, 2), ("rms", 6016, 2)]
    + [("rms", 10240, 4), ("rms", 11264, 4), ("rms", 20480, 8)],
)
def test_a_cluster_has_two_rows_of_a_backward_where_a_thread_has_19_to_23_columns(norm, cols, cluster):
    problem = make_problem(norm, cols)
    plan = choose(problem, MANY_ROWS, H200)
    assert (plan.rows_per_tile, plan.cluster, plan.ctas_per_sm, plan.num_stages) == (2, cluster, 2, 2)
    assert plan == choose(problem, 1, H200)
    assert choose(make_problem(norm, 24 * 128 * cluster), MANY_ROWS, H200).rows_per_tile == 1


def test_a_cluster_has_one_row_of_float32():
    assert choose(make_problem("layer", 5120, "fp32"), MANY_ROWS, H200).rows_per_tile == 1


@pytest.mark.parametrize("cols, cluster", [(1024, 1), (4096, 1), (8192, 1), (8448, 2), (16384, 2)])
def test_rmsnorm_forward_is_by_ctas_of_one_tile_and_one_stage(cols, cluster):
    problem = make_problem("rms", cols, direction="forward")
    plan = choose(problem, MANY_ROWS, H200)
    assert (plan.num_stages, plan.cluster, plan.short_lived) == (1, cluster, True)
    assert num_ctas(plan, MANY_ROWS, cols, H200) == MANY_ROWS // plan.rows_per_tile


@pytest.mark.parametrize("cols, whole", [(1376, 2), (2752, 2), (4352, 8), (8448, 8), (33024, 8)])
def test_a_row_that_ends_within_a_chunk_comes_in_two_copies(cols, whole):
    plan = choose(make_problem("layer", cols), MANY_ROWS, H200)
    assert plan.tail and num_copies(plan) == 2 and plan.num_chunks == whole + 1 and plan.copy_chunks >= whole
    assert 0 < cols - whole * plan.cluster * plan.chunk < plan.cluster * plan.chunk


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(
    "cols, chunk, cluster",
    [(160, 256, 1), (352, 512, 1), (832, 1024, 1), (1664, 2048, 1), (3200, 4096, 1), (7424, 4096, 2), (14848, 4096, 4)],
)
def test_a_row_of_a_backward_is_one_padded_chunk_rather_than_many(norm, cols, chunk, cluster):
    plan = choose(make_problem(norm, cols), MANY_ROWS, H200)
    assert (plan.chunk, plan.num_chunks, plan.cluster, plan.weight_in_smem) == (chunk, 1, cluster, False)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("cols", [576, 1152, 1408, 2304, 2688, 6144])
def test_but_not_where_that_is_too_much(norm, cols):
    assert choose(make_problem(norm, cols), MANY_ROWS, H200).num_chunks > 1


@pytest.mark.parametrize("cols, rows_per_tile", [(1408, 2), (1536, 2), (2688, 1), (3072, 1)])
def test_three_backwards_run_on_an_sm_where_registers_allow(cols, rows_per_tile):
    plan = choose(make_problem("layer", cols), MANY_ROWS, H200)
    assert (plan.rows_per_tile, plan.ctas_per_sm, plan.num_stages) == (rows_per_tile, 3, 2)
    dx_only = make_problem("layer", cols, weight="none")
    few, many = choose(dx_only, 4096, H200), choose(dx_only, MANY_ROWS, H200)
    assert few == (replace(many, ctas_per_sm=2, max_registers=255) if rows_per_tile == 2 else many)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("cols, rows_per_tile", [(608, 8), (640, 8), (1280, 4), (2560, 2)])
def test_a_thread_of_a_backward_has_forty_columns_of_five_chunks(norm, cols, rows_per_tile):
    plan = choose(make_problem(norm, cols), MANY_ROWS, H200)
    assert (plan.rows_per_tile, plan.num_chunks, columns_per_thread(plan)) == (rows_per_tile, 5, 40)
    assert plan.weight_in_smem and (plan.ctas_per_sm, plan.num_stages) == (2, 2)
    assert columns_per_thread(choose(make_problem(norm, cols, "fp32"), MANY_ROWS, H200)) <= 20


@pytest.mark.parametrize("norm, cols, cluster", [("layer", 7216, 2), ("rms", 12432, 4), ("rms", 24752, 8)])
def test_a_backward_of_few_warps_over_more_ctas_is_worth_some_padding_but_not_larger_chunks(norm, cols, cluster):
    plan = choose(make_problem(norm, cols), MANY_ROWS, H200)
    assert (plan.cluster, plan.num_warps, plan.chunk) == (cluster, 4, 512)


# --- Parameters, and how values become float32 ---


@pytest.mark.parametrize(
    "norm, cols, in_smem",
    [("layer", 41984, False), ("layer", 45056, False), ("layer", 46080, True), ("layer", 53248, True)]
    + [("layer", 57344, False), ("layer", 61440, False), ("layer", 131072, True)]
    + [("rms", 41984, False), ("rms", 102400, False), ("rms", 122880, False), ("rms", 131072, True)],
)
def test_the_parameter_of_one_row_of_a_backward_is_in_registers_where_these_suffice(norm, cols, in_smem):
    assert choose(make_problem(norm, cols), MANY_ROWS, H200).weight_in_smem == in_smem


@pytest.mark.parametrize(
    "norm, cols, dtype, direction, in_pairs",
    [("layer", 32768, "bf16", "backward", False), ("layer", 36864, "bf16", "backward", True)]
    + [("layer", 139264, "bf16", "backward", True), ("layer", 139264, "fp16", "backward", False)]
    + [("rms", 139264, "bf16", "backward", False), ("layer", 139264, "bf16", "forward", False)],
)
def test_bfloat16_of_many_columns_of_layernorms_backward_becomes_float32_in_pairs(
    norm, cols, dtype, direction, in_pairs
):
    problem = make_problem(norm, cols, dtype, direction=direction)
    assert widens_in_pairs(choose(problem, MANY_ROWS, H200), problem) == in_pairs


def test_values_of_a_warp_specialized_ring_become_float32_one_by_one():
    problem = make_problem("layer", 8192)
    assert not widens_in_pairs(best_plan("warp_specialized", problem, H200), problem)


# --- Boxes of TMA ---


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("cols", [65552, 98320, 131104, 163856, 239136])
def test_wide_rows_of_any_multiple_of_16_columns_are_rings(norm, cols, direction):
    assert isinstance(choose(make_problem(norm, cols, direction=direction), 2048, H200), PipelinedPlan)


@pytest.mark.parametrize("cols, is_ring", [(49160, True), (65544, False), (131080, False)])
def test_wide_rows_in_boxes_of_16_bytes_are_column_tiles(cols, is_ring):
    assert isinstance(choose(make_problem("layer", cols), 2048, H200), PipelinedPlan) == is_ring
