"""Backwards of modulated norms, by the portable kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
from cases import outputs_of
from modulations import PORTABLE, Modulated
from planning import make_gated_sum, make_modulated

from fusednorm.host import launch
from fusednorm.host.fallback import Choice
from fusednorm.host.tiles import norm_of
from fusednorm.planner.device import H200
from fusednorm.planner.plan import MultiWavePlan

pytest.importorskip("triton")
PLANS = {
    "one row": lambda cols: MultiWavePlan(1, 32, -(-cols // 32), 4, 1, 255),
    "two rows": lambda cols: MultiWavePlan(2, 128, 1, 4, 2, 255),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("modulated", PORTABLE, ids=str)
def test_modulated_backwards_give_the_gradients_of_autograd_in_float64(modulated, plan):
    modulated.check(outputs_of(modulated.call, plan(modulated.cols)))


@pytest.mark.parametrize(
    ("problem", "sums"),
    [
        (make_modulated(direction="backward"), 2),
        (make_gated_sum(), 3),
        (make_gated_sum(weight="bf16"), 3),
        (make_gated_sum("rms", weight="fp32", summed=(1, 4)), 2),
        (make_gated_sum(by_sample=False), 0),
    ],
)
def test_rows_that_share_a_scale_have_few_sums_of_which_the_planner_knows(problem, sums):
    """Of dweight, dbias, dscale and dshift two sums, and one of the gate's gradient."""
    norm, inside = norm_of(problem, problem.inside is not problem).inside, problem.inside
    assert inside.num_sums == sums
    assert norm.has_weight == (inside.weight_dtype is not None)
    assert norm.has_bias == inside.reads_bias
    assert (norm.shared, norm.summed) == (inside.names_shared, inside.summed)


@pytest.mark.parametrize("cols", [64, 1536])
def test_many_samples_have_programs_whose_second_launch_has_few_ctas(cols):
    plan = PLANS["one row"](64)
    calls = [Modulated("layer", samples, 32, cols).call for samples in (7, 8, 20)]
    few, many, more = [launch.program_of(call, Choice(plan), H200) for call in calls]
    assert few.rows_above == 0 and few.most_rows == many.rows_above == 255
    sums = [each.launches[-1] for each in (few, many, more)]
    warps = [each.grid[1] * each.tile.num_warps for each in sums]
    assert sums[1].grid == sums[2].grid and sums[1].tile == sums[2].tile and warps[1] < warps[0]
