"""Backwards of sums with a wider residual, by every compiled schedule."""

from __future__ import annotations

import pytest
from simulator.host import simulated
from wide_sums import PIPELINED, PORTABLE, SPECIALIZED

import fusednorm

BY_VARIANT = {"multi_wave": PORTABLE[:1], "pipelined": PIPELINED, "warp_specialized": SPECIALIZED}
CASES = [(variant, case) for variant, cases in BY_VARIANT.items() for case in cases]


@pytest.mark.parametrize("variant, case", CASES, ids=str)
def test_one_backward_writes_the_gradient_in_both_dtypes(variant, case):
    from fusednorm.host import launch

    with fusednorm.force(variant), simulated("H200", 8 if case.cols > 8192 else 2) as simulation:
        prepared = launch.on_tensors(case.call)
        simulation.hand_over(prepared.launches)
    case.check(prepared.outputs)
