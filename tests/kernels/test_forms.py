"""A norm's Form can come from outside the package: here y = x_hat * w^2 + b, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import guarded_buffers

from fusednorm.host import gpus
from fusednorm.operands import BackwardOperands, ForwardOperands
from fusednorm.planner.device import A100
from fusednorm.planner.plan import ColumnTilePlan, MultiWavePlan
from fusednorm.problem import check_backward, check_forward

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

SMALL_GPU = replace(A100, sm_count=3)
IN_REGISTERS, BY_COLUMN_TILES = MultiWavePlan(2, 32, 3, 4, 1, 255), ColumnTilePlan(4, 32, 4, 1, 64, 4)
ROWS, COLS, EPS = 13, 77, 1e-5


@triton.jit
def times_square(x, weight, norm: tl.constexpr):
    return x * (weight * weight)


@triton.jit
def times_twice_the_weight(total, weight, norm: tl.constexpr):
    """The derivative of w^2."""
    return total * (2.0 * weight)


def squared():
    from fusednorm.kernels.rowmath import AFFINE

    return replace(AFFINE, scale=times_square, upstream=times_square, finish_dw=times_twice_the_weight)


def outputs_of(prepare, call, plan):
    """The outputs of a call whose kernels compute `squared`."""
    with guarded_buffers():
        launches, outputs = prepare(call, plan)[:2]
        for each in launches:
            operands = each.operands
            if each.kernel.__name__ == "finalize":
                operands = (*operands[:-1], call.weight)
            replace(each, norm=replace(each.norm, form=squared()), operands=operands).run()
    return outputs


@pytest.fixture(autouse=True)
def plans_for_a_small_gpu(monkeypatch):
    monkeypatch.setattr(gpus, "spec_of", lambda device: SMALL_GPU)


@pytest.mark.parametrize("plan, wants_dx", [(IN_REGISTERS, True), (BY_COLUMN_TILES, True), (BY_COLUMN_TILES, False)])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_form_from_outside_runs_forward_and_backward(norm, plan, wants_dx):
    from fusednorm.host import launch

    torch.manual_seed(0)
    x, dy = torch.randn(2, ROWS, COLS, dtype=torch.float64)
    weight, bias = torch.randn(2, COLS, dtype=torch.float64)
    inputs = [each.clone().requires_grad_() for each in (x, weight, bias)]
    if norm == "layer":
        want = F.layer_norm(inputs[0], (COLS,), inputs[1] ** 2, inputs[2], EPS)
    else:
        inputs, bias = inputs[:2], None
        want = F.rms_norm(inputs[0], (COLS,), inputs[1] ** 2, EPS)
    wanted = torch.autograd.grad(want, inputs, dy)
    mask = wants_dx, True, bias is not None

    forward = check_forward(ForwardOperands(norm, x, (COLS,), weight, bias, EPS))
    y, mean, rstd = outputs_of(launch.prepare_forward, forward, plan)
    backward = check_backward(BackwardOperands(norm, dy, x, (COLS,), mean, rstd, weight, bias, mask))
    gradients = outputs_of(launch.prepare_backward, backward, plan)

    torch.testing.assert_close(y, want.detach(), rtol=1e-10, atol=1e-10)
    for got, want, is_wanted in zip(gradients, wanted, mask, strict=False):
        assert (got is not None) == is_wanted
        if is_wanted:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
