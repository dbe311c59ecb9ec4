"""Forwards with steps before and after the norm, by every compiled schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from simulator.host import outputs_of, simulated
from steps import PIPELINED, PORTABLE, SPECIALIZED

import fusednorm
from fusednorm.planner import choice

SOME_PORTABLE = [PORTABLE[4], PORTABLE[6]]
BY_VARIANT = {"multi_wave": SOME_PORTABLE, "pipelined": PIPELINED, "warp_specialized": SPECIALIZED}
CASES = [("H200", variant, steps) for variant, cases in BY_VARIANT.items() for steps in cases]
CASES += [
    ("A100", "multi_wave", PORTABLE[4]),
    ("A100", "async_copy", PIPELINED[0]),
    ("B200", "pipelined", PIPELINED[1]),
    ("RTX 5090", "pipelined", PIPELINED[0]),
]


@pytest.mark.parametrize("device, variant, steps", CASES, ids=str)
def test_steps_before_and_after_a_norm_give_the_oracles_numbers(device, variant, steps):
    with fusednorm.force(variant):
        steps.check_forward(outputs_of(steps.forward, device=device, sms=8 if steps.cols > 8192 else 2))


@pytest.mark.parametrize("steps", [PIPELINED[1], PIPELINED[2], PIPELINED[8]], ids=str)
def test_row_tensors_come_by_the_ring_or_not_to_the_same_bits(steps):
    from fusednorm.host import gpus, launch

    with simulated("H200", 8 if steps.cols > 8192 else 2) as simulation:
        plan = choice.choose(steps.forward.problem, 1, gpus.spec_of(None), "pipelined")
        other = replace(plan, rows_in_ring=not plan.rows_in_ring)
        both = [launch.on_tensors(steps.forward, each) for each in (plan, other)]
        for each in both:
            simulation.hand_over(each.launches)
    for one, same in zip(*[each.outputs for each in both], strict=True):
        assert one is same is None or torch.equal(one, same)
    steps.check_forward(both[1].outputs)
