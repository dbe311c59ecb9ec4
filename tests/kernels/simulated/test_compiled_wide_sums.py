"""Backwards of sums with a wider residual, by every compiled schedule."""

from __future__ import annotations

import pytest
from simulator.host import outputs_of
from wide_sums import PIPELINED, PORTABLE, SPECIALIZED

import fusednorm

BY_VARIANT = {"multi_wave": PORTABLE[:1], "pipelined": PIPELINED, "warp_specialized": SPECIALIZED}
CASES = [("H200", variant, case) for variant, cases in BY_VARIANT.items() for case in cases]
CASES += [("A100", "multi_wave", PORTABLE[0]), ("B200", "warp_specialized", SPECIALIZED[0])]
CASES += [("RTX 5090", "pipelined", PIPELINED[0])]


@pytest.mark.parametrize("device, variant, case", CASES, ids=str)
def test_one_backward_writes_the_gradient_in_both_dtypes(device, variant, case):
    with fusednorm.force(variant):
        case.check(outputs_of(case.call, device=device, sms=8 if case.cols > 8192 else 2))
