"""Forwards that round x_hat, by compiled kernels."""

from __future__ import annotations

import re

import pytest
import torch
from cases import BF16, FP16
from compiling import DEVICES
from planning import make_problem, meta_call
from simulator.host import outputs_of
from ties import check_that_y_is_rounded_once, operands_with_ties

import fusednorm
from fusednorm.forms import FormSpec
from fusednorm.operands import operands_of
from fusednorm.problem.calls import check_forward
from fusednorm.tools import compilation

ROWS, COLS = 5, 512


@pytest.mark.parametrize("variant", ["multi_wave", "pipelined"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_x_hat_is_rounded_to_the_bits_of_torch_s_cast(norm, variant):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, COLS, generator=generator, dtype=BF16) for shape in ((ROWS,), (), ()))
    x[1, 7], x[2, :9] = float("inf"), 2.0**-130
    bias = bias if norm == "layer" else None
    given = {"x": x, "normalized_shape": (COLS,), "weight": weight, "bias": bias, "eps": 1e-6}
    operands = operands_of(f"{norm}_norm_fwd_affine", (), given | {"weight_offset": 1.0, "rounds_x_hat": True})
    with fusednorm.force(variant):
        y, mean, rstd = outputs_of(check_forward(operands))
    x_hat = ((x.float() - mean) if norm == "layer" else x.float()) * rstd
    u = x_hat.to(BF16).double() * (1 + weight.float()).double() + (0 if bias is None else bias.double())
    torch.testing.assert_close(y, u.float().to(BF16), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("variant", ["multi_wave", "pipelined"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_weight_and_a_bias_of_16_bits_take_one_rounding(dtype, variant):
    operands = operands_with_ties(ROWS, COLS, dtype)
    with fusednorm.force(variant):
        check_that_y_is_rounded_once(operands, outputs_of(check_forward(operands)))


@pytest.mark.parametrize("variant", ["multi_wave", "pipelined"])
@pytest.mark.parametrize("norm, offset", [("layer", 0.0), ("layer", 1.0), ("rms", 1.0)])
def test_no_number_is_rounded_to_bfloat16_alone(norm, offset, variant):
    """The instruction for one number, unlike that for two, is of a slow unit."""
    from fusednorm.host import fallback, launch

    form, device = FormSpec(weight_offset=offset, rounds_x_hat=True), DEVICES[90]
    call = meta_call(make_problem(norm, 4096, direction="forward"))
    call = call._replace(problem=make_problem(norm, 4096, direction="forward", form=form))
    with fusednorm.force(variant):
        program = launch.program_of(call, fallback.choose(call.problem, call.rows, device), device)
    code = compilation.compile_for(program.launches[0], device.arch).asm["ptx"]
    assert not re.findall(r"cvt\.rn\.bf16\.f32", code)
