"""The planner for few rows: which plan replaces the plan for many rows, up to how many rows, and how many CTAs run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from planning import make_problem, meta_call

from fusednorm.host import gpus
from fusednorm.planner.device import H200
from fusednorm.planner.few_rows import one_tile, one_tile_of_any_width
from fusednorm.planner.heuristics import best_plan, choices, choose, decide
from fusednorm.planner.legality import broken_rule
from fusednorm.planner.plan import (
    ColumnTilePlan,
    MultiWavePlan,
    PipelinedPlan,
    columns_per_thread,
    is_whole,
    num_ctas,
    num_partials,
    rows_at_once,
)

MANY_ROWS = 16384


@pytest.mark.parametrize(
    "norm, cols, dtype, rows_of_sm",
    [("layer", 2056, "bf16", 6), ("layer", 2055, "bf16", 4), ("rms", 2056, "bf16", 4), ("layer", 1001, "fp32", 16)],
)
def test_a_multi_wave_cta_that_is_alone_on_its_sm_has_all_registers(norm, cols, dtype, rows_of_sm):
    problem = make_problem(norm, cols, dtype)
    last = rows_of_sm * H200.sm_count
    few, many = choose(problem, last, H200), choose(problem, last + 1, H200)
    assert (few.ctas_per_sm, few.max_registers) == (1, 255) and many.ctas_per_sm > 1
    assert replace(few, ctas_per_sm=many.ctas_per_sm, max_registers=many.max_registers) == many
    assert num_ctas(few, last, cols, H200) == H200.sm_count
    alone = replace(problem, wants_dw=False, wants_db=False)  # dx alone has no partial sums to save
    assert choose(alone, last, H200) == choose(alone, last + 1, H200)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_rows_of_eight_tiles_or_fewer_go_to_one_large_cta_on_each_sm(norm):
    problem = make_problem(norm, 4096)
    last = 8 * 2 * H200.sm_count  # tiles of two rows
    few, many = choose(problem, last, H200), choose(problem, last + 1, H200)
    assert (few.ctas_per_sm, few.num_warps, few.rows_per_tile, few.num_stages) == (1, 8, 2, 2)
    assert (many.ctas_per_sm, many.num_warps, many.rows_per_tile) == (2, 4, 1)
    assert num_partials(few, num_ctas(few, last, 4096, H200)) <= H200.sm_count
    assert choose(problem, last, H200, "pipelined") == choose(problem, last + 1, H200, "pipelined") == many


@pytest.mark.parametrize("norm, cols", [("rms", 128), ("rms", 4096), ("rms", 16384), ("layer", 512), ("layer", 4096)])
def test_a_forward_whose_tiles_all_run_at_once_has_a_cta_for_each(norm, cols):
    problem = make_problem(norm, cols, direction="forward")
    few = choose(problem, 1, H200)
    last = rows_at_once(few, H200)
    many = choose(problem, last + 1, H200)
    assert isinstance(few, MultiWavePlan) and few.short_lived and few == choose(problem, last, H200) != many
    assert num_ctas(few, last, cols, H200) == last // few.rows_per_tile
    bytes_of_sm = few.ctas_per_sm * few.rows_per_tile * cols * 2
    assert bytes_of_sm <= (64 if norm == "rms" else 32) * 1024
    if isinstance(many, PipelinedPlan):
        reasons = decide(problem, last, H200).reasons
        assert reasons["multi_wave"] == (
            f"chosen: up to {last} rows are done sooner without a ring, by one row tile for each CTA"
        )
        assert reasons["pipelined"] == f"is for more than {last} rows, got {last}"
        assert reasons["reference"] == "could run, but multi_wave comes first"


@pytest.mark.parametrize(
    "norm, cols, rows_of_sm",
    [("layer", 760, 16), ("layer", 1376, 50), ("layer", 2040, 12), ("layer", 2048, 12)],
)
def test_a_forward_by_one_tile_each_serves_more_rows_than_run_at_once(norm, cols, rows_of_sm):
    problem, last = make_problem(norm, cols, direction="forward"), rows_of_sm * H200.sm_count
    few, many = choose(problem, last, H200), choose(problem, last + 1, H200)
    assert few.short_lived and few == choose(problem, 1, H200) != many and many == choose(problem, 1 << 20, H200)
    assert last > rows_at_once(few, H200)


@pytest.mark.parametrize("norm, widths", [("layer", [504, 960, 1000, 1784]), ("rms", [504, 632, 1000, 1600, 2040])])
def test_a_forward_of_some_columns_is_by_one_tile_each_however_many_rows_there_are(norm, widths):
    for cols in widths:
        problem = make_problem(norm, cols, direction="forward")
        plan = choose(problem, MANY_ROWS, H200)
        assert plan.short_lived and plan == choose(problem, 1, H200) == choose(problem, 1 << 30, H200)
        assert num_ctas(plan, MANY_ROWS, cols, H200, leaves_partials=False) == MANY_ROWS // plan.rows_per_tile


@pytest.mark.parametrize("cols, dtype, rows_of_sm", [(2184, "bf16", 24), (2816, "bf16", 24), (4088, "fp32", 12)])
def test_many_rows_of_rmsnorm_forward_are_by_one_tile_each_at_some_widths(cols, dtype, rows_of_sm):
    problem, last = make_problem("rms", cols, dtype, direction="forward"), rows_of_sm * H200.sm_count
    few, many = choose(problem, last, H200), choose(problem, last + 1, H200)
    assert few == choose(problem, 1, H200) == best_plan("multi_wave", problem, H200) and not few.short_lived
    assert many == choose(problem, 1 << 30, H200) == one_tile(problem, H200) and many.short_lived


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_forward_of_narrow_rows_walks_over_them_until_there_are_enough_for_a_ring(norm):
    for cols in (264, 400):  # no ring takes these widths
        problem = make_problem(norm, cols, direction="forward")
        assert choose(problem, 1, H200) == choose(problem, MANY_ROWS, H200) == best_plan("multi_wave", problem, H200)
    for cols in (288, 384, 448):
        problem, last = make_problem(norm, cols, direction="forward"), 100 * H200.sm_count
        few, many = choose(problem, last, H200), choose(problem, last + 1, H200)
        assert few == choose(problem, 1, H200) == best_plan("multi_wave", problem, H200)
        assert isinstance(many, PipelinedPlan)


def test_rows_wider_than_multi_wave_holds_are_by_one_tile_each_where_there_are_few_or_they_are_the_widest():
    for norm, cols in [("layer", 14600), ("layer", 24568), ("rms", 17416)]:
        problem, last = make_problem(norm, cols, direction="forward"), 2 * H200.sm_count
        few, many = choose(problem, last, H200), choose(problem, last + 1, H200)
        assert few.short_lived and isinstance(few, MultiWavePlan) and few.num_warps == 16
        assert isinstance(many, ColumnTilePlan) and few == choose(problem, 1, H200)
    widest = make_problem("rms", 32760, direction="forward")
    assert choose(widest, 1, H200) == choose(widest, MANY_ROWS, H200) == one_tile_of_any_width(widest, H200)
    # LayerNorm has two parameters, which leave too few registers for such a row.
    assert isinstance(choose(make_problem("layer", 32760, direction="forward"), 1, H200), ColumnTilePlan)


@pytest.mark.parametrize("norm, cols", [("rms", 32768), ("layer", 65536)])
def test_wide_rows_have_a_ring_of_one_stage_then(norm, cols):
    problem = make_problem(norm, cols, direction="forward")
    least = choose(problem, 1, H200)
    last = rows_at_once(least, H200)
    few, many = choose(problem, last, H200), choose(problem, last + 1, H200)
    assert (few.num_stages, many.num_stages) == (1, 2) and few == replace(many, num_stages=1)
    assert num_ctas(few, last, cols, H200) == last // few.rows_per_tile


@pytest.mark.parametrize("cols", [2304, 3072, 3328, 3584, 3840, 4352, 5632, 6656])
def test_few_rows_of_layernorm_forward_need_no_ring_at_some_widths(cols):
    problem = make_problem("layer", cols, direction="forward")
    few, many = choose(problem, 1, H200), choose(problem, MANY_ROWS, H200)
    assert isinstance(few, MultiWavePlan) and not few.short_lived and isinstance(many, PipelinedPlan)
    last = (8 if is_whole(many, cols) else 12) * rows_at_once(few, H200)
    assert choose(problem, last + 1, H200) == many
    assert few == choose(problem, last, H200) == best_plan("multi_wave", problem, H200)
    at_once = rows_at_once(few, H200)
    assert num_ctas(few, at_once, cols, H200, leaves_partials=False) == at_once // few.rows_per_tile


@pytest.mark.parametrize("cols", [8464, 9216, 11264])
def test_few_wide_rows_of_layernorm_forward_need_no_ring_where_its_chunks_are_no_row(cols):
    problem, last = make_problem("layer", cols, direction="forward"), 8 * H200.sm_count
    few, many = choose(problem, last, H200), choose(problem, last + 1, H200)
    assert isinstance(few, MultiWavePlan) and not few.short_lived and isinstance(many, PipelinedPlan)
    reasons = decide(problem, last, H200).reasons
    assert reasons["multi_wave"] == "chosen: up to 1056 rows are done sooner without a ring, by multi-wave CTAs"
    assert reasons["pipelined"] == "is for more than 1056 rows, got 1056"
    assert isinstance(choose(make_problem("layer", 10240, direction="forward"), last, H200), PipelinedPlan)


@pytest.mark.parametrize("cols", [7680, 8192, 16384])
def test_few_rows_of_layernorm_forward_are_one_row_over_half_as_many_ctas(cols):
    problem = make_problem("layer", cols, direction="forward")
    few, many = choose(problem, 8 * 128, H200), choose(problem, MANY_ROWS, H200)
    assert (many.rows_per_tile, many.weight_in_smem) == (2, True)
    assert (few.rows_per_tile, few.weight_in_smem, few.ctas_per_sm) == (1, False, 2)
    assert few.cluster == many.cluster // 2
    last = (24 if few.cluster > 1 else 12) * rows_at_once(few, H200)
    assert choose(problem, last, H200) == few and choose(problem, last + 1, H200) == many


def test_rows_of_a_large_cta_are_shared_by_two_only_where_each_gets_more_than_eight():
    problem, last = make_problem("rms", 7168), 8 * H200.sm_count
    few, many = choose(problem, last, H200), choose(problem, last + 1, H200)
    assert (few.cluster, few.num_warps, few.num_stages) == (1, 8, 2)
    assert (many.cluster, many.num_warps) == (2, 4)


@pytest.mark.parametrize("norm, cols", [("layer", 7168), ("rms", 6656), ("layer", 12288), ("rms", 65536)])
def test_of_eight_rows_of_a_cluster_a_ring_of_two_stages_makes_enough(norm, cols):
    problem = make_problem(norm, cols)
    many = choose(problem, MANY_ROWS, H200)
    few = replace(many, num_stages=2)
    last = 8 * rows_at_once(few, H200)
    assert many.num_stages == 3 and many.cluster > 1
    assert choose(problem, 1, H200) == choose(problem, last, H200) == few and choose(problem, last + 1, H200) == many


@pytest.mark.parametrize(
    "norm, cols, chunk, num_warps, rows_of_sm",
    [("layer", 200, 256, 1, 6), ("layer", 312, 512, 2, 64), ("layer", 632, 1024, 4, 64), ("layer", 1040, 2048, 8, 9)]
    + [("layer", 320, 512, 2, 3), ("layer", 640, 1024, 4, 8), ("layer", 1024, 1024, 4, 5), ("layer", 1408, 2048, 8, 13)]
    + [("layer", 2048, 2048, 8, 11), ("layer", 1032, 2048, 8, 26), ("layer", 1832, 2048, 8, 13)]
    + [("rms", 200, 256, 1, 2), ("rms", 440, 512, 2, 2), ("rms", 640, 1024, 4, 4), ("rms", 1000, 1024, 4, 2)]
    + [("rms", 2048, 2048, 8, 6), ("rms", 1096, 2048, 8, 18), ("rms", 1832, 2048, 8, 12)],
)
def test_few_rows_of_a_backward_are_tiles_of_two_by_one_chunk(norm, cols, chunk, num_warps, rows_of_sm):
    problem, last = make_problem(norm, cols), rows_of_sm * H200.sm_count
    few, many = choose(problem, last, H200), choose(problem, last + 1, H200)
    assert few == MultiWavePlan(2, chunk, 1, num_warps, 8 // num_warps, 255) == choose(problem, 1, H200) != many
    assert chunk == 8 * 32 * num_warps  # a thread loads 16 bytes of both rows, and alone sums their columns
    alone = replace(problem, wants_dw=False, wants_db=False)  # dx alone has no sums over columns
    assert choose(alone, 1, H200) != few


@pytest.mark.parametrize(
    "cols, rows_per_tile, most_rows", [(9472, 2, 660), (10240, 2, 660), (11264, 2, 1320), (12800, 1, 1188)]
)
def test_few_rows_of_layernorm_with_many_columns_per_thread_are_shared_by_four_ctas(cols, rows_per_tile, most_rows):
    problem = make_problem("layer", cols)
    few, many = choose(problem, most_rows, H200), choose(problem, most_rows + 1, H200)
    assert few == choose(problem, 1, H200) and (few.rows_per_tile, few.cluster, few.num_stages) == (rows_per_tile, 4, 2)
    assert many.cluster < 4 and columns_per_thread(many) > 36
    alone = replace(problem, wants_dw=False, wants_db=False)  # dx alone has no partial sums to save
    assert choose(alone, 1, H200) != few


@pytest.mark.parametrize("norm, cols", [*itertools.product(("layer", "rms"), (128, 5120, 8192)), ("rms", 10240)])
def test_few_rows_have_the_plan_of_many_where_one_large_cta_would_be_slower(norm, cols):
    problem = make_problem(norm, cols)
    assert choose(problem, 1, H200) == choose(problem, 132, H200) == choose(problem, MANY_ROWS, H200)


@pytest.mark.parametrize(
    "cols, rows, ctas",
    [(2048, 2 * 132, 132), (2048, 4 * 263, 132), (2048, 4 * 264, 264), (16384, 2 * 59, 30), (16384, 2 * 60, 60)]
    + [(1000, 16 * 132 - 1, 132), (2055, 4 * 132, 264)],
)
def test_an_sm_gets_a_second_cta_once_it_has_two_tiles_for_it_or_two_rows_in_a_cluster(cols, rows, ctas):
    plan = choose(make_problem("layer", cols), rows, H200, "multi_wave" if cols in (1000, 2055) else "pipelined")
    assert num_ctas(plan, rows, cols, H200) == ctas


def test_all_ctas_that_run_at_once_get_tiles_even_if_some_get_one_less():
    problem = make_problem("layer", 2048)
    assert num_ctas(choose(problem, 16384, H200), 16384, 2048, H200) == 264  # 31 or 32 tiles of two rows


@pytest.mark.parametrize("wanted", [{}, {"wants_dw": False, "wants_db": False}], ids=["dx, dw, db", "dx"])
def test_no_more_ctas_are_launched_than_have_rows(wanted, monkeypatch):
    from fusednorm.host import launch

    monkeypatch.setattr(gpus, "spec_of", lambda device: H200)
    problem = make_problem("layer", 4096, **wanted)
    plan = choose(problem, 16, H200)
    assert launch.prepare(meta_call(problem, 16)).launches[0].grid == (-(-16 // plan.rows_per_tile),)


@pytest.mark.parametrize("cols, rows_of_sm", [(2176, 8), (4480, 12)])
def test_few_rows_of_rmsnorm_backward_need_no_ring_at_some_widths(cols, rows_of_sm):
    problem, last = make_problem("rms", cols), rows_of_sm * H200.sm_count
    few, many = choose(problem, last, H200), choose(problem, last + 1, H200)
    assert few == choose(problem, 1, H200) == best_plan("multi_wave", problem, H200)
    assert isinstance(many, PipelinedPlan)
    assert isinstance(choose(make_problem("layer", cols), 1, H200), PipelinedPlan)


@pytest.mark.parametrize("norm, cols", [("layer", 8008), ("layer", 5320), ("rms", 7664)])
def test_a_row_for_each_sm_of_a_multi_wave_backward_of_16_warps_is_by_a_ring_over_two_ctas(norm, cols):
    problem = make_problem(norm, cols)
    few, many = choose(problem, H200.sm_count, H200), choose(problem, H200.sm_count + 1, H200)
    assert isinstance(few, PipelinedPlan) and few.cluster == 2 and few == choose(problem, 1, H200)
    assert isinstance(many, MultiWavePlan) and many.num_warps == 16
    reasons = decide(problem, 132, H200).reasons
    assert reasons["pipelined"] == "chosen: up to 132 rows are done sooner by a ring over two CTAs"
    assert reasons["multi_wave"] == "is for more than 132 rows, got 132"
    nested = replace(problem, nested_rows=True)  # rings cannot read nested rows
    assert choose(nested, 1, H200) == choose(nested, MANY_ROWS, H200) == many
    for other in (make_problem("rms", 7384), make_problem(norm, cols, "fp32"), make_problem(norm, 8191)):
        assert not getattr(choose(other, 1, H200), "cluster", 1) == 2


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_what_takes_the_place_of_a_plan_is_as_legal(norm, direction):
    """This holds for nested rows, which rings cannot read, and for backwards with only some gradients, too."""
    kinds = [{}, {"nested_rows": True}]
    if direction == "backward":
        kinds += [{"residual_dtype": torch.bfloat16}, {"wants_dx": False}, {"wants_dw": False, "wants_db": False}]
    for cols in (*range(8, 9000, 504), 9744, 14600, 16384, 17416, 32760):
        for kind in kinds:
            problem = replace(make_problem(norm, cols, direction=direction), **kind)
            for most_rows, plan in choices(problem, H200):
                rows = int(min(most_rows, 1 << 40))
                assert broken_rule(plan.variant, problem, rows, H200) is None, (problem, rows, plan)
