"""Norms with a gate whose columns are normalized by groups, against a norm of each group by itself."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from norm_forms import FP32, FP64
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fusednorm

COLS, GROUPS = 24, 3
SIZE = COLS // GROUPS
FUNCTIONS = {"layer": fusednorm.layer_norm_gated, "rms": fusednorm.rms_norm_gated}
MODULES = {"layer": fusednorm.LayerNormGated, "rms": fusednorm.RMSNormGated}
norms = pytest.mark.parametrize("norm", FUNCTIONS)
orders = pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
# The state dicts of mamba_ssm's LayerNorm and RMSNorm (2.3.2.post1, mamba_ssm/ops/triton/layernorm_gated.py). It only
# installs where CUDA's compiler is.
KEYS_OF_MAMBA_SSM = {"layer": ("weight", "bias"), "rms": ("weight",)}


def leaves(dtype=FP64, batch=(2, 3)) -> list[Tensor]:
    """x, gate, weight, bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = (*batch, COLS), (*batch, COLS), (COLS,), (COLS,)
    return [torch.randn(each, generator=generator, dtype=dtype).requires_grad_() for each in shapes]


def one_by_one(function, tensors, **settings) -> Tensor:
    groups = zip(*(each.chunk(GROUPS, -1) for each in tensors), strict=True)
    return torch.cat([function(*each, 1e-3, **settings) for each in groups], -1)


@norms
@orders
@pytest.mark.parametrize("rounding", ["once", "x_hat"])
def test_each_group_is_normalized_by_itself(norm, after, rounding):
    for dtype, activation in itertools.product((FP32, torch.bfloat16), ("silu", "sigmoid")):
        given = leaves(dtype)
        settings = {"norm_before_gate": after, "activation": activation, "rounding": rounding, "weight_offset": 0.5}
        want = one_by_one(FUNCTIONS[norm], given, **settings)
        got = FUNCTIONS[norm](*given, 1e-3, group_size=SIZE, **settings)
        torch.testing.assert_close(got, want)
        grad = torch.linspace(-1, 1, got.numel()).reshape(got.shape).to(dtype)
        for ours, right in zip(*(torch.autograd.grad(y, given, grad) for y in (got, want)), strict=True):
            torch.testing.assert_close(ours, right)


@norms
@orders
def test_derivatives_of_any_order_of_all_outputs(norm, after):
    op = getattr(torch.ops.fusednorm, f"{norm}_norm_fwd_{'times_gate' if after else 'of_gated'}")

    def outputs(x, gate, weight, bias):
        return op(x, [COLS], gate, weight, bias, 1e-3, groups=GROUPS)

    given = leaves(batch=(2,))
    assert gradcheck(outputs, given, fast_mode=True) and gradgradcheck(outputs, given, fast_mode=True)
    assert gradgradcheck(lambda *each: FUNCTIONS[norm](*each, 1e-3, group_size=SIZE), given, fast_mode=True)
    y, *statistics = outputs(*given)
    assert all(each.shape == (2, GROUPS) for each in statistics)
    tests = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(op.default, (given[0], [COLS], *given[1:], 1e-3), {"groups": GROUPS}, test_utils=tests)
    whole = given[0].unflatten(-1, (2, -1))  # rows of two dims
    parameters = [each.unflatten(-1, (2, -1)) for each in given[1:]]
    torch.testing.assert_close(op(whole, [2, COLS // 2], *parameters, 1e-3, groups=GROUPS)[0].flatten(1), y)


def test_a_transform_sees_each_group():
    x, gate, weight, bias = leaves(FP32)
    settings = {"group_size": SIZE, "norm_before_gate": False}
    mapped = torch.func.vmap(lambda x, gate: fusednorm.rms_norm_gated(x, gate, weight, bias, 1e-3, **settings))
    torch.testing.assert_close(mapped(x, gate), fusednorm.rms_norm_gated(x, gate, weight, bias, 1e-3, **settings))


@norms
def test_a_module_has_groups_and_says_so(norm):
    module = MODULES[norm](COLS, 1e-3, group_size=SIZE, norm_before_gate=False, dtype=FP64)
    x, gate, *_ = leaves()
    parameters = [each for each in (module.weight, module.bias) if each is not None]
    want = one_by_one(FUNCTIONS[norm], (x, gate, *parameters), norm_before_gate=False) if norm == "layer" else None
    got = module(x, gate)
    if want is not None:
        torch.testing.assert_close(got, want)
    assert torch.equal(got, FUNCTIONS[norm](x, gate, module.weight, module.bias, 1e-3, group_size=SIZE,
                                            norm_before_gate=False))  # fmt: skip
    assert f"group_size={SIZE}" in repr(module)


@norms
def test_a_state_dict_of_mamba_ssm_loads_and_is_as_ours(norm):
    module, state = MODULES[norm](COLS, group_size=SIZE), {name: torch.randn(COLS) for name in KEYS_OF_MAMBA_SSM[norm]}
    module.load_state_dict(state)
    found = module.state_dict()
    assert tuple(found) == tuple(state) and all(torch.equal(found[name], state[name]) for name in state)


def test_what_does_not_divide_the_columns_is_refused():
    x, gate, weight, _ = leaves(FP32)
    for size in (0, 7, 2 * COLS):
        with pytest.raises(RuntimeError, match=f"group_size must divide the {COLS} columns, got {size}$"):
            fusednorm.rms_norm_gated(x, gate, weight, group_size=size)
        with pytest.raises(RuntimeError, match=f"^RMSNormGated: group_size must divide the {COLS} columns, got {size}"):
            fusednorm.RMSNormGated(COLS, group_size=size)
    none = torch.ones(2, 0)
    assert torch.equal(fusednorm.rms_norm_gated(none, none, group_size=4), none)
    with pytest.raises(TypeError, match=re.escape("rms_norm_fwd_times_gate: group_size must be an integer, got 8.0")):
        fusednorm.rms_norm_gated(x, gate, weight, group_size=8.0)
    with pytest.raises(RuntimeError, match=f"^rms_norm_fwd_of_gated: groups must divide the {COLS} columns, got -3$"):
        torch.ops.fusednorm.rms_norm_fwd_of_gated(x, [COLS], gate, weight, groups=-3)
    wrong = torch.ones(6)
    with pytest.raises(RuntimeError, match=r"rstd must hold one element per row \(18\), got shape \(6,\)"):
        torch.ops.fusednorm.rms_norm_bwd_of_gated(x, x, [COLS], gate, wrong, weight, groups=GROUPS)
