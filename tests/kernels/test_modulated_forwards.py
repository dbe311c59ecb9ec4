"""Forwards of modulated norms, by the portable kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP16, FP32, outputs_of
from modulations import FORWARDS, forward_of

from fusednorm import reference
from fusednorm.operands import operands_of
from fusednorm.planner.plan import ColumnTilePlan, MultiWavePlan
from fusednorm.problem.calls import check_forward

pytest.importorskip("triton")
PLANS = {
    "registers": lambda cols: MultiWavePlan(2, 32, -(-cols // 32), 4, 1, 255),
    "column tiles": lambda cols: ColumnTilePlan(4, 32, 4, 1, 64, 4),
}
SAMPLES, ROWS = 3, 5
MANY = 33  # rows of a sample: enough for CTAs and modulations of its own


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("form", FORWARDS)
@pytest.mark.parametrize(
    "norm, rows, cols, dtype, modulation",
    [("layer", MANY, 40, BF16, FP32), ("rms", MANY, 77, FP16, BF16), ("layer", ROWS, 64, FP32, FP32),
     ("rms", ROWS, 40, BF16, FP32), ("layer", ROWS, 77, FP16, BF16)],
)  # fmt: skip
def test_modulated_forwards_give_the_numbers_of_float64(norm, rows, form, cols, dtype, modulation, plan):
    of_gated, of_sum = "_of_gated_sum_modulated", "_of_sum_modulated"
    more = {"shift": None} if form == of_sum else {"factor": "tanh"} if form.endswith("residual") else {}
    if form == of_gated or (norm == "layer" and form != of_sum):
        more |= {"parameters": FP32, "weight_offset": 1.0}
    modulated = forward_of(norm, form, SAMPLES, rows, cols, dtype=dtype, modulation=modulation, **more)
    modulated.check(outputs_of(modulated.call, plan(cols)))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("modulation", [BF16, FP32], ids=str)
@pytest.mark.parametrize("form", FORWARDS)
def test_steps_are_rounded_where_code_of_these_dtypes_rounds_them(form, modulation, plan):
    more = {"factor": "tanh"} if form.endswith("residual") else {}
    given = forward_of("layer", form, SAMPLES, ROWS, 40, modulation=modulation, **more).arguments()
    settings = {"rounds_sum": True} | ({"residual_dtype": BF16} if "sum" in form else {})
    outputs = []
    for rounds in (True, False):
        operands = operands_of(f"layer_norm_fwd{form}", (), given | settings | {"rounds_steps": rounds})
        outputs.append(outputs_of(check_forward(operands), plan(40)))
        pairs = zip(outputs[-1], reference.formula(operands), strict=True)
        close = [torch.isclose(got, want, rtol=1e-5, atol=1e-6) for got, want in pairs if got is not None]
        assert min(each.float().mean() for each in close) > 0.98
        if rounds and "gated" in form:
            assert torch.equal(outputs[-1][-1], reference.formula(operands)[-1])  # the sum
    steps, once = (each[0].float() for each in outputs)
    assert torch.isclose(steps, once, rtol=1e-5, atol=1e-6).float().mean() < 0.9
