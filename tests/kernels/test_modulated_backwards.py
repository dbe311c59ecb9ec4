"""Backwards of modulated norms, by the portable kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
from cases import outputs_of
from modulations import PORTABLE
from planning import make_gated_sum, make_modulated

from fusednorm.host.tiles import norm_of
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
