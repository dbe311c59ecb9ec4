"""Backwards of rings whose sum has a gradient of its own, which comes by the ring or to registers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BF16, FP32
from simulator.host import outputs_of
from simulator.problems import Problem

from fusednorm.operands import BackwardOperands
from fusednorm.planner import budget
from fusednorm.planner.device import H200
from fusednorm.planner.plan import from_text
from fusednorm.problem.calls import check_backward
from fusednorm.tools import oracle

PLANS = {
    "Pipelined(1,512,1,3,4,3,168,0,1,1,0,0,0,1)": (41, 512, BF16),
    "Pipelined(2,512,1,2,4,2,255,1,1,1,0,0,0,1)": (9, 400, BF16),  # rows that end within a chunk
    "Pipelined(4,128,5,2,4,2,255,0,1,8,0,0,0,1)": (31, 640, FP32),
    "Pipelined(2,256,3,2,4,2,255,0,1,2,0,1,0,1)": (7, 696, BF16),  # a tail
    "Pipelined(1,256,3,2,4,2,255,0,2,4,0,0,0,1)": (11, 1536, FP32),  # clusters
    "Pipelined(2,256,5,2,4,2,255,0,2,8,0,0,0,1)": (22, 2560, BF16),
}


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("text", PLANS)
def test_a_gradient_of_a_sum_comes_by_the_ring_or_not_to_the_same_right_bits(text, norm):
    (rows, cols, residual), plan = PLANS[text], from_text(text)
    problem = Problem("backward", None, norm, rows, cols, residual=residual)
    case, given = problem.case, problem.inputs()
    want, bias = oracle.exact(case, given), given.bias if norm == "layer" else None
    mean, rstd = (each if each is None else each.to(torch.float32) for each in (want.mean, want.rstd))
    mask, summand = (True, True, bias is not None), problem.residual_grad()
    operands = norm, given.grad_out, given.x, (cols,), mean, rstd, given.weight, bias, mask, summand
    call = check_backward(BackwardOperands(*operands))
    assert budget.fits_shared_memory(plan, call.problem, H200)
    both = plan, replace(plan, added_in_ring=False)
    found, others = (outputs_of(call, each, sms=2 * plan.cluster) for each in both)
    problem.check(oracle.Outputs(None, None, None, *found))
    assert all(one is same is None or torch.equal(one, same) for one, same in zip(found, others, strict=True))
