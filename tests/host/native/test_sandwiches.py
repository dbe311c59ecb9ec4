"""A norm behind a layer and the next one run in the C++ host side, one launch forward."""

from __future__ import annotations

import pytest
import torch

import fusednorm

FUNCTIONS = {
    "layer": (fusednorm.layer_norm_add_layer_norm, fusednorm.layer_norm_add, fusednorm.affine_layer_norm),
    "rms": (fusednorm.rms_norm_add_rms_norm, fusednorm.rms_norm_add, fusednorm.affine_rms_norm),
}
EPS = 2.0**-16


def leaves(seed, recorded):
    generator = torch.Generator().manual_seed(seed)
    shapes = (6, 64), (6, 64), *((64,),) * 4
    return [torch.randn(shape, generator=generator).requires_grad_(recorded) for shape in shapes]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("norm", FUNCTIONS)
def test_calls_are_repeated_in_cpp(norm, recorded, gpu):
    function, add, affine = FUNCTIONS[norm]
    directions = ("forward", "backward", "backward")[: 3 if recorded else 1]
    for seed in range(3):
        given = leaves(seed, recorded)
        with gpu.repeating(len(directions)) if seed else gpu.going_to_python(*directions):
            y, h = function(*given, EPS)
            grads = torch.autograd.grad((y, h), given, (y.detach(), h.detach())) if recorded else ()
        x, residual, weight, next_weight, bias, next_bias = [each.detach().double().requires_grad_() for each in given]
        exact_h = add(x, residual, weight, bias, EPS)
        exact = affine(exact_h, next_weight, next_bias, EPS), exact_h
        of = x, residual, weight, next_weight, bias, next_bias
        exact_grads = torch.autograd.grad(exact, of, [each.detach().double() for each in (y, h)]) if recorded else ()
        for ours, right in zip((y, h, *grads), (*exact, *exact_grads), strict=True):
            torch.testing.assert_close(ours, right.float(), atol=1e-4, rtol=1e-4)
