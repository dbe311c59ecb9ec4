"""Modulated norms, compiled, by the plans of an H200."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, EPS, FP32
from modulations import FORWARDS, PORTABLE, SAMPLE, TOKEN, Modulated, forward_of
from simulator.host import outputs_of

from fusednorm import reference
from fusednorm.operands import operands_of
from fusednorm.planner.candidates import candidates
from fusednorm.planner.device import H200
from fusednorm.planner.plan import Plan, from_text
from fusednorm.problem import calls
from fusednorm.problem.calls import check_backward, check_forward

# More row tiles than CTAs of a sample; rows that end within a tile and within a sample; one sample, and many.
COMPILED = [
    PORTABLE[0],
    PORTABLE[6],
    Modulated("layer", 2, 40, 200, gate=SAMPLE, added=BF16),
    Modulated("rms", 3, 17, 520, gate=SAMPLE, modulation=BF16, parameters=FP32),
    Modulated("layer", 1, 33, 520, shift=TOKEN, added=FP32),
    Modulated("rms", 9, 3, 256, factor="tanh", shift=None, parameters=BF16),
]
# Tiles of several rows and of one; rows that end within a chunk; a branch in the ring, and in registers.
RINGS = [
    Modulated("layer", 2, 24, 512, modulation=BF16),
    Modulated("layer", 3, 40, 224, gate=SAMPLE, added=BF16),
    Modulated("rms", 2, 16, 1040, gate=SAMPLE, modulation=BF16, parameters=FP32),
    Modulated("layer", 1, 33, 528, shift=TOKEN, added=FP32),
    Modulated("rms", 4, 8, 256, factor="tanh", shift=None, parameters=BF16),
    Modulated("layer", 2, 24, 512, gate=SAMPLE, modulation=BF16, parameters=BF16, weight_offset=1.0),
]
# The planner's for rows of 8192 columns, with a fourth of the columns.
CLUSTERS = {
    "Pipelined(1,1024,1,3,4,2,255,1,2,1,0,0)": Modulated("layer", 2, 4, 2048, modulation=BF16),
    "Pipelined(2,512,1,2,4,2,255,0,4,1,0,0)": Modulated("layer", 2, 4, 2048, modulation=BF16),
    "Pipelined(1,1024,1,3,4,2,255,0,2,1,0,0)": Modulated("layer", 2, 4, 2048, parameters=FP32),
}


def rings(call) -> list[Plan]:
    """The first ring, the first with modulations in shared memory or registers, which the first has not, and the first
    that threads fill."""
    found, copied = (candidates(variant, call.problem, H200) for variant in ("pipelined", "async_copy"))
    return [found[0], *[each for each in found if each.weight_in_smem != found[0].weight_in_smem][:1], *copied[:1]]


@pytest.mark.parametrize("modulated", COMPILED, ids=str)
def test_modulated_backwards_give_the_gradients_of_autograd_in_float64(modulated):
    modulated.check(outputs_of(modulated.call))


@pytest.mark.parametrize("modulated", RINGS, ids=str)
def test_modulated_backwards_by_rings_give_the_gradients_of_autograd_in_float64(modulated):
    for plan in rings(modulated.call):
        modulated.check(outputs_of(modulated.call, plan))


@pytest.mark.parametrize("plan, modulated", CLUSTERS.items(), ids=str)
def test_modulated_backwards_by_clusters_give_the_gradients_of_autograd_in_float64(plan, modulated):
    modulated.check(outputs_of(modulated.call, from_text(plan)))


@pytest.mark.parametrize(
    "norm, form, samples, rows, cols, parameters, modulations",
    [
        ("layer", "_modulated", 2, 40, 512, None, BF16),  # tiles of several rows
        ("rms", "_modulated_plus_residual", 2, 34, 2064, None, BF16),  # of one or two, and rows that end within a chunk
        ("layer", "_modulated", 1, 35, 528, None, BF16),  # one sample, that ends within a tile
        ("layer", "_modulated_plus_residual", 2, 32, 8192, None, BF16),  # clusters
        ("layer", "_modulated", 2, 40, 512, BF16, BF16),
        ("rms", "_modulated_plus_residual", 2, 34, 2064, FP32, BF16),
        ("layer", "_modulated_plus_residual", 2, 33, 3072, BF16, BF16),
        ("layer", "_modulated", 2, 68, 2304, None, FP32),  # CTAs that live long, with more tiles than stages
        ("rms", "_modulated", 3, 40, 1536, None, FP32),
        ("layer", "_modulated", 1, 9, 8192, None, FP32),
    ],
)
def test_modulated_forwards_by_rings_give_the_numbers_of_float64(
    norm, form, samples, rows, cols, parameters, modulations
):
    more = {"shift": SAMPLE, "added": BF16, "parameters": parameters, "modulation": modulations}
    modulated = forward_of(norm, form, samples, rows, cols, **more)
    for plan in rings(modulated.call):
        modulated.check(outputs_of(modulated.call, plan))


@pytest.mark.parametrize("modulation", [BF16, FP32], ids=str)
@pytest.mark.parametrize("form", FORWARDS)
def test_steps_of_a_forward_are_rounded_where_code_of_these_dtypes_rounds_them(form, modulation):
    """The compiler would make one multiply-add of a product and a sum. The sums are exact, and all but those results
    whose x_hat has another last bit."""
    modulated = forward_of("layer", form, 2, 40, 512, shift=SAMPLE, gate=SAMPLE, added=BF16, modulation=modulation)
    settings = {"rounds_sum": True, "rounds_steps": True} | ({"residual_dtype": modulation} if "gated" in form else {})
    operands = operands_of(modulated.op, (), modulated.arguments() | settings)
    call, want = check_forward(operands), reference.formula(operands)
    for variant in ("multi_wave", "async_copy", "pipelined"):
        for plan in candidates(variant, call.problem, H200)[:1]:
            got = outputs_of(call, plan)
            assert got[0].dtype == want[0].dtype
            assert torch.isclose(got[0], want[0], rtol=1e-5, atol=1e-5).float().mean() > 0.998
            assert all(torch.equal(one, same) for one, same in zip(got[3:], want[3:], strict=True))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("variant", ["multi_wave", "pipelined"])
def test_modulations_of_samples_may_lie_2_to_the_31_elements_apart(variant, direction):
    modulated, apart = Modulated("layer", 3, 32, 256, modulation=BF16), 2**30
    given = modulated.arguments()
    memory = torch.empty(2 * apart + modulated.cols, dtype=BF16)  # pages that nobody touches take no memory
    far = memory.as_strided((3, 1, modulated.cols), (apart, apart, 1)).copy_(given["scale"])
    if direction == "forward":
        given = {name: given[name] for name in ("x", "shift", "normalized_shape")} | {"eps": EPS}
        op, check = "layer_norm_fwd_modulated", check_forward
    else:
        op, check = modulated.op, check_backward
    near, call = (check(operands_of(op, (), given | {"scale": each})) for each in (far.clone(), far))
    plan = candidates(variant, call.problem, H200)[0]
    assert call.sample_rows == 32 and call.problem.shared
    for got, want in zip(outputs_of(call, plan), outputs_of(near, plan), strict=True):
        assert got is want is None or torch.equal(got, want)


@pytest.mark.parametrize("variant", ["multi_wave", "pipelined"])
def test_a_sample_of_more_rows_than_a_grid_has_ctas_is_several_in_a_forward(variant, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(2, 3, 1, 512, generator=generator)
    named = {"x": torch.randn(2, 96, 512, generator=generator).to(BF16), "scale": packed[:, 0], "shift": packed[:, 1]}
    operands = operands_of("layer_norm_fwd_modulated", (), named | {"normalized_shape": (512,), "eps": EPS})
    whole = check_forward(operands)
    monkeypatch.setattr(calls, "MOST_CTAS", 40)
    call = check_forward(operands)
    plan = candidates(variant, call.problem, H200)[0]
    assert (whole.sample_rows, call.sample_rows) == (96, 32)
    for got, want in zip(outputs_of(call, plan), outputs_of(whole, plan), strict=True):
        assert got is want is None or torch.equal(got, want)


def test_sums_of_samples_are_the_same_in_every_order_of_events():
    one, other = (outputs_of(COMPILED[2].call, seed=seed, resident=at_once) for seed, at_once in ((1, None), (2, 1)))
    assert all(torch.equal(each, same) for each, same in zip(one, other, strict=True) if each is not None)
