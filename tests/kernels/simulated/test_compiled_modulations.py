"""Backwards of modulated norms, compiled, by the plans of an H200."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP32
from modulations import PORTABLE, SAMPLE, TOKEN, Modulated
from simulator.host import simulated

from fusednorm.operands import operands_of
from fusednorm.planner.plan import MultiWavePlan
from fusednorm.problem import check_forward

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
        prepared = launch.prepare(modulated.call)
        simulation.hand_over(prepared.launches)
    return prepared.outputs


@pytest.mark.parametrize("modulated", COMPILED, ids=str)
def test_modulated_backwards_give_the_gradients_of_autograd_in_float64(modulated):
    modulated.check(outputs_of(modulated))


def test_sums_of_samples_are_the_same_in_every_order_of_events():
    one, other = (outputs_of(COMPILED[2], seed=seed, resident=at_once) for seed, at_once in ((1, None), (2, 1)))
    assert all(torch.equal(each, same) for each, same in zip(one, other, strict=True) if each is not None)


@pytest.mark.parametrize("modulation", [BF16, FP32], ids=str)
def test_steps_of_a_forward_have_the_bits_of_tensor_code(modulation, monkeypatch):
    """The compiler would make one fma of gate * x + residual."""
    from fusednorm.host import launch

    monkeypatch.setattr(launch, "_is_legal", lambda *_: True)  # the planner does not choose these kernels yet
    generator, shape = torch.Generator().manual_seed(1), (2, 6, 512)
    x, residual = (torch.randn(shape, generator=generator).to(BF16) for _ in range(2))
    scale, shift, gate = (torch.randn(2, 1, 512, generator=generator).to(modulation) for _ in range(3))
    h = residual + gate * x
    given = {"residual": residual, "gate": gate, "scale": scale, "shift": shift, "residual_dtype": h.dtype, "eps": 1e-6}
    given |= {"x": x, "normalized_shape": (512,), "rounds_steps": True}
    call = check_forward(operands_of("layer_norm_fwd_of_gated_sum_modulated", (), given))
    with simulated("H200", 2) as simulation:
        prepared = launch.prepare(call, MultiWavePlan(1, 512, 1, 4, 1, 255, short_lived=True))
        simulation.hand_over(prepared.launches)
    y, _, _, stream = prepared.outputs
    want = torch.nn.functional.layer_norm(h, (512,), eps=1e-6) * (1 + scale) + shift
    assert torch.equal(stream, h)
    assert torch.isclose(y, want, rtol=1e-5, atol=1e-5).float().mean() > 0.998
