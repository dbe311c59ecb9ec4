"""Forwards with steps before and after the norm, by every compiled schedule."""

from __future__ import annotations

import pytest
from simulator.host import simulated
from steps import ADD, PIPELINED, PORTABLE, SPECIALIZED, Steps

import fusednorm
from fusednorm.planner.device import H200
from fusednorm.planner.legality import broken_rule

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


def test_compute_groups_of_a_forward_take_x_alone():
    assert broken_rule("warp_specialized", Steps("rms", ADD, 8, 64).call.problem, 8, H200).rule == "row_tensors"
    assert broken_rule("pipelined", Steps("rms", ADD, 8, 64).call.problem, 8, H200) is None
