"""Forwards with steps before and after the norm, by every compiled schedule."""

from __future__ import annotations

import pytest
from simulator.host import simulated
from steps import PIPELINED, PORTABLE, SPECIALIZED

import fusednorm

SOME_PORTABLE = [PORTABLE[4], PORTABLE[6]]
BY_VARIANT = {"multi_wave": SOME_PORTABLE, "pipelined": PIPELINED, "warp_specialized": SPECIALIZED}
CASES = [(variant, steps) for variant, cases in BY_VARIANT.items() for steps in cases]


@pytest.mark.parametrize("variant, steps", CASES, ids=str)
def test_steps_before_and_after_a_norm_give_the_oracles_numbers(variant, steps):
    from fusednorm.host import launch

    with fusednorm.force(variant), simulated("H200", 8 if steps.cols > 8192 else 2) as simulation:
        prepared = launch.prepare(steps.call)
        simulation.hand_over(prepared.launches)
    steps.check(prepared.outputs)
