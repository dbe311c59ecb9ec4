"""Forwards with steps before and after the norm, by the portable kernels in Triton's interpreter."""

from __future__ import annotations

import gated
import pytest
import wide_sums
from cases import outputs_of
from steps import FORMS, PORTABLE

from bench import written
from fusednorm import reference
from fusednorm.forms import ACTIVATIONS, COMBINE, FINISH, MODULATE
from fusednorm.operands import BACKWARD, FORM_OPS, OPS
from fusednorm.planner.plan import ColumnTilePlan, MultiWavePlan

pytest.importorskip("triton")
PLANS = {
    "tiles in turn": lambda cols: MultiWavePlan(2, 32, -(-cols // 32), 4, 1, 255),
    "one tile of a CTA": lambda cols: MultiWavePlan(2, 128, 1, 4, 1, 255, short_lived=True),
    "column tiles": lambda cols: ColumnTilePlan(4, 32, 4, 1, 64, 4),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("steps", PORTABLE, ids=str)
def test_steps_before_and_after_a_norm_give_the_oracles_numbers(steps, plan):
    steps.check_forward(outputs_of(steps.forward, plan(steps.cols)))


def test_kernels_tensor_code_and_what_they_are_compared_with_have_the_steps_that_forms_name():
    from fusednorm.kernels import rowmath

    for formulas in rowmath, reference, written:
        assert formulas.COMBINE.keys() == COMBINE.keys()
        assert formulas.FINISH.keys() == FINISH.keys()
        assert formulas.ACTIVATIONS.keys() == set(ACTIVATIONS)
        assert formulas.FACTORS.keys() == set(filter(None, MODULATE))
    combines = {name: steps.get("combine") for name, steps in rowmath.COMBINE.items()}
    assert rowmath.UNROUNDED.keys() == {combines[name] for name, step in COMBINE.items() if step.rows_out}
    assert reference.OF_ROW.keys() == {op.form.combine for op in OPS.values() if op.direction == BACKWARD}
    modulated = [op.form for op in FORM_OPS if op.form.modulate]  # test_modulated_forwards.py
    tried = {(form.combine, form.finish) for form in (*FORMS, *gated.FORMS, wide_sums.FORM, *modulated)}
    assert {each for pair in tried for each in pair} == COMBINE.keys() | FINISH.keys()
