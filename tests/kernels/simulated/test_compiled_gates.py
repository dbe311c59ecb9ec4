"""Norms with a gate, by every compiled schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gated import AFTER, BEFORE, PIPELINED, PORTABLE, SPECIALIZED
from simulator.host import outputs_of, simulated
from steps import Steps

import fusednorm
from fusednorm.host.derived import of_ring
from fusednorm.planner.choice import choose
from fusednorm.planner.plan import from_text

IN_BOTH_WAYS = PIPELINED[:3]
BACKWARD = {"multi_wave": [PORTABLE[0], PORTABLE[6]], "pipelined": PIPELINED[3:], "warp_specialized": SPECIALIZED}
BACKWARD["async_copy"] = [PIPELINED[1], PIPELINED[6], PIPELINED[7]]
FORWARD = {"multi_wave": [PORTABLE[5]], "pipelined": [PIPELINED[0], PIPELINED[3], PIPELINED[5]]}
FORWARD["async_copy"] = [PIPELINED[3], PIPELINED[5]]
OTHERS = {"A100": "async_copy", "B200": "warp_specialized", "RTX 5090": "pipelined"}


def cases(by_variant: dict, elsewhere: Steps) -> list:
    found = [("H200", variant, gated) for variant, each in by_variant.items() for gated in each]
    return found + [(device, variant, elsewhere) for device, variant in OTHERS.items()]


@pytest.mark.parametrize("device, variant, gated", cases(BACKWARD, SPECIALIZED[0]), ids=str)
def test_gated_backwards_give_the_gradients_of_autograd_in_float64(device, variant, gated):
    with fusednorm.force(variant):
        gated.check_backward(outputs_of(gated.backward, device=device, sms=8 if gated.cols > 8192 else 2))


@pytest.mark.parametrize("device, variant, gated", cases(FORWARD, PIPELINED[0]), ids=str)
def test_gated_forwards_give_the_oracles_numbers(device, variant, gated):
    with fusednorm.force(variant):
        gated.check_forward(outputs_of(gated.forward, device=device))


@pytest.mark.parametrize("gated", IN_BOTH_WAYS, ids=str)
def test_gates_come_by_the_ring_or_not_to_the_same_right_bits(gated):
    from fusednorm.host import gpus

    call = gated.backward
    with simulated("H200", 2):
        plan = choose(call.problem, 1, gpus.spec_of(None), "pipelined")
    other = replace(plan, rows_in_ring=not plan.rows_in_ring)
    first, second = (outputs_of(call, each) for each in (plan, other))
    gated.check_backward(first)
    for one, same in zip(first, second, strict=True):
        assert one is same is None or torch.equal(one, same)


@pytest.mark.parametrize("form", [BEFORE, AFTER], ids=["before", "after"])
def test_a_cluster_that_reads_its_tiles_once_gives_the_gradients(form):
    gated, plan = Steps("layer", form, 11, 1024), from_text("Pipelined(1,512,1,2,4,2,255,0,2,1,0,0,1)")
    assert of_ring(plan, gated.backward.problem)["reads_once"]
    gated.check_backward(outputs_of(gated.backward, plan, sms=4))


@pytest.mark.parametrize("form", [BEFORE, AFTER], ids=["before", "after"])
def test_ctas_that_live_long_refill_their_rings_of_rows_and_gates(form):
    """Seven tiles of a CTA by three stages, with weight and bias in registers."""
    gated, plan = Steps("layer", form, 41, 512), from_text("Pipelined(2,512,1,3,4,3,168,0,1,1,0,0,1)")
    gated.check_forward(outputs_of(gated.forward, plan, sms=1))
