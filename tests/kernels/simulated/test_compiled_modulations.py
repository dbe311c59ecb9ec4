"""Backwards of modulated norms, compiled, by the plans of an H200."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP32
from modulations import PORTABLE, SAMPLE, TOKEN, Modulated
from simulator.host import simulated

# More row tiles than CTAs of a sample; rows that end within a tile and within a sample; one sample, and many.
COMPILED = [
    PORTABLE[0],
    PORTABLE[6],
    Modulated("layer", 2, 40, 200, gate=SAMPLE, added=BF16),
    Modulated("rms", 3, 17, 1032, gate=SAMPLE, modulation=BF16, parameters=FP32),
    Modulated("layer", 1, 33, 520, shift=TOKEN, added=FP32),
    Modulated("rms", 9, 3, 256, factor="tanh", shift=None, parameters=BF16),
]


def outputs_of(modulated, **how):
    from fusednorm.host import launch

    with simulated("H200", 2, **how) as simulation:
        prepared = launch.on_tensors(modulated.call)
        simulation.hand_over(prepared.launches)
    return prepared.outputs


@pytest.mark.parametrize("modulated", COMPILED, ids=str)
def test_modulated_backwards_give_the_gradients_of_autograd_in_float64(modulated):
    modulated.check(outputs_of(modulated))


def test_sums_of_samples_are_the_same_in_every_order_of_events():
    one, other = (outputs_of(COMPILED[2], seed=seed, resident=at_once) for seed, at_once in ((1, None), (2, 1)))
    assert all(torch.equal(each, same) for each, same in zip(one, other, strict=True) if each is not None)
