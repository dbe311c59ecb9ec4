"""Forwards of modulated norms, by the portable kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, EPS, FP16, FP32, outputs_of
from exact import assert_near, forward
from modulations import FORWARDS

from fusednorm import reference
from fusednorm.operands import OPS, operands_of
from fusednorm.planner.plan import ColumnTilePlan, MultiWavePlan
from fusednorm.problem.calls import check_forward

pytest.importorskip("triton")
PLANS = {
    "registers": lambda cols: MultiWavePlan(2, 32, -(-cols // 32), 4, 1, 255),
    "column tiles": lambda cols: ColumnTilePlan(4, 32, 4, 1, 64, 4),
}
SAMPLES, ROWS = 3, 5
MANY = 33  # rows of a sample: enough for CTAs and modulations of its own


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def given(form: str, cols: int, dtype: torch.dtype, of_modulation: torch.dtype, of_sample: int = ROWS) -> dict:
    """A scale for each sample in a slice of [B, 3, cols], a shift for each row, and a gate for all rows."""
    packed, rows = draw(SAMPLES, 3, cols, dtype=of_modulation, seed=1), (SAMPLES, of_sample, cols)
    tensors = {
        "scale": packed[:, 1:2],
        "shift": draw(*rows, dtype=of_modulation, seed=2),
        "gate": draw(cols, dtype=of_modulation, seed=3),
        "residual": draw(*rows, dtype=FP32, seed=4),
    }
    names = {slot.name for slot in OPS[f"rms_norm_fwd_{form}"].inputs}
    if form == "of_sum_modulated":
        names.remove("shift")  # which may be absent
    return {"x": draw(*rows, dtype=dtype, seed=5)} | {name: tensors[name] for name in tensors if name in names}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("form", FORWARDS)
@pytest.mark.parametrize(
    "norm, rows, cols, dtype, of_modulation",
    [("layer", MANY, 40, BF16, FP32), ("rms", MANY, 77, FP16, BF16), ("layer", ROWS, 64, FP32, FP32),
     ("rms", ROWS, 40, BF16, FP32), ("layer", ROWS, 77, FP16, BF16)],
)  # fmt: skip
def test_modulated_forwards_give_the_numbers_of_float64(
    norm, rows, form, cols, dtype, of_modulation, plan
):
    tensors = given(form, cols, dtype, of_modulation, rows)
    settings = {"normalized_shape": (cols,), "eps": EPS} | ({"modulate": "tanh"} if form.endswith("residual") else {})
    gated = form == "of_gated_sum_modulated"
    if gated or (norm == "layer" and form != "of_sum_modulated"):  # with parameters
        more = {"weight": draw(cols, dtype=FP32, seed=6), "bias": draw(cols, dtype=dtype, seed=7)}
        tensors, settings = tensors | more, settings | {"weight_offset": 1.0}
    settings |= {"rounds_sum": False} if gated else {}  # the sum as it is before it is rounded
    operands = operands_of(f"{norm}_norm_fwd_{form}", (), tensors | settings)
    assert_near(operands, outputs_of(check_forward(operands), plan(cols)), forward(operands))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("of_modulation", [BF16, FP32], ids=str)
@pytest.mark.parametrize("form", FORWARDS)
def test_steps_are_rounded_where_code_of_these_dtypes_rounds_them(form, of_modulation, plan):
    tensors = given(form, 40, BF16, of_modulation)
    settings = {"normalized_shape": (40,), "eps": EPS, "rounds_steps": True}
    settings |= {"modulate": "tanh"} if form.endswith("residual") else {"residual_dtype": BF16} if "sum" in form else {}
    outputs = []
    for rounds in (True, False):
        operands = operands_of(f"layer_norm_fwd_{form}", (), tensors | settings | {"rounds_steps": rounds})
        outputs.append(outputs_of(check_forward(operands), plan(40)))
        pairs = zip(outputs[-1], reference.formula(operands), strict=True)
        close = [torch.isclose(got, want, rtol=1e-5, atol=1e-6) for got, want in pairs if got is not None]
        assert min(each.float().mean() for each in close) > 0.98
        if rounds and "gated" in form:
            assert torch.equal(outputs[-1][-1], reference.formula(operands)[-1])  # the sum
    steps, once = (each[0].float() for each in outputs)
    assert torch.isclose(steps, once, rtol=1e-5, atol=1e-6).float().mean() < 0.9
