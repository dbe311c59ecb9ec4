"""A norm behind a layer and the next one run in the C++ host side, one launch forward."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fusednorm
from fusednorm import force

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


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("norm", FUNCTIONS)
def test_rows_that_no_kernel_normalizes_twice_are_two_calls_of_cpp(norm, recorded, gpu):
    function = FUNCTIONS[norm][0]
    given = [torch.randn(shape).requires_grad_(recorded) for shape in ((3, 32768), (3, 32768), *((32768,),) * 4)]
    with gpu.going_to_python("forward"):
        first = function(*given, EPS)
    with gpu.going_to_python("forward", "forward"):  # the function makes the two calls from here on
        function(*given, EPS)
    with gpu.repeating(2):
        again = function(*given, EPS)
    assert all(torch.equal(*each) for each in zip(first, again, strict=True))
    narrow = [each.detach()[..., :64].clone() for each in given]
    with gpu.going_to_python("forward"), force("reference"):
        function(*narrow, EPS)
    with gpu.going_to_python("forward"):  # what `force` has left to two calls is one
        function(*narrow, EPS)


def test_a_graph_of_symbolic_sizes_is_traced_after_calls_that_were_made_in_two(gpu):
    wide = [torch.randn(shape) for shape in ((3, 32768), (3, 32768), (32768,), (32768,))]
    function = FUNCTIONS["rms"][0]
    function(*wide, eps=EPS)
    traced = make_fx(lambda *given: function(*given, eps=EPS), tracing_mode="symbolic")(*wide)
    assert all(map(torch.equal, traced(*wide), function(*wide, eps=EPS)))
