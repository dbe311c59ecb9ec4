"""Norms with a gate, by the portable kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
from cases import outputs_of
from gated import PORTABLE

from fusednorm.planner.plan import ColumnTilePlan, MultiWavePlan

pytest.importorskip("triton")
PLANS = {
    "registers": lambda cols: MultiWavePlan(2, 32, -(-cols // 32), 4, 1, 255),
    "column tiles": lambda cols: ColumnTilePlan(4, 32, 4, 1, 64, 4),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("gated", PORTABLE, ids=str)
def test_gated_forwards_give_the_oracles_numbers(gated, plan):
    gated.check_forward(outputs_of(gated.forward, plan(gated.cols // gated.form.groups)))


# Without a gradient of rows there are column tiles only.
BACKWARD = [(gated, name) for gated in PORTABLE for name in PLANS if any(gated.mask[::3]) or name == "column tiles"]


@pytest.mark.parametrize("gated, plan", BACKWARD, ids=str)
def test_gated_backwards_give_the_gradients_of_autograd_in_float64(gated, plan):
    gated.check_backward(outputs_of(gated.backward, PLANS[plan](gated.cols // gated.form.groups)))


def test_activations_keep_their_digits_near_zero_and_far_from_it():
    from activations import assert_activations_keep_their_digits

    assert_activations_keep_their_digits("cpu")
