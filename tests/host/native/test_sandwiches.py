"""A norm behind a layer and the next one run in the C++ host side, one launch forward."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.fx.experimental.proxy_tensor import make_fx

import fusednorm
from fusednorm import force
from fusednorm.host import native

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


def by_python(function, *given):
    """What a function returns without C++: its node is Python's."""
    with mock.patch.object(native, "y_of", return_value=None):
        return function(*given)


def gradients_of(outputs, grads, leaves):
    outputs = [output for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    grads = [each for each in grads if each is not None]
    return torch.autograd.grad(outputs, [each for each in leaves if each.requires_grad], grads, allow_unused=True)


@pytest.mark.parametrize("cols", [64, 32768])  # by one launch, and by two
@pytest.mark.parametrize("norm", FUNCTIONS)
def test_nodes_of_cpp_give_the_gradients_of_the_node_of_python(norm, cols, gpu):
    function = FUNCTIONS[norm][0]
    tensors = [torch.randn(shape) for shape in ((3, cols), (3, cols), *((cols,),) * 4)]
    dy, dh = torch.randn(3, cols), torch.randn(3, cols)
    for wanted in ("111111", "100000", "010000", "001000", "000100", "000001", "101010"):
        given = [each.clone().requires_grad_(want == "1") for each, want in zip(tensors, wanted, strict=True)]
        for grads in ((dy, dh), (dy, None), (None, dh)):
            ours, pythons = function(*given, EPS), by_python(function, *given, EPS)
            assert all(map(torch.equal, ours, pythons)) and [each.requires_grad for each in ours] == [True, True]
            assert {each.grad_fn.name() for each in ours} == {"NormBackward"} != {pythons[0].grad_fn.name()}
            found, expected = (gradients_of(outputs, grads, given) for outputs in (ours, pythons))
            for got, want in zip(found, expected, strict=True):
                assert (got is want is None) or torch.equal(got, want), wanted


@pytest.mark.parametrize("norm", FUNCTIONS)
def test_second_derivatives_flow_through_both_nodes(norm, gpu):
    function, add, affine = FUNCTIONS[norm]

    def gradients(outputs, given):
        first = torch.autograd.grad([(each**3).sum() for each in outputs], given, create_graph=True)
        return torch.autograd.grad(sum((each**2).sum() for each in first), given)

    given = leaves(4, True)
    doubles = [each.detach().double().requires_grad_() for each in given]
    x, residual, weight, next_weight, bias, next_bias = doubles
    h = add(x, residual, weight, bias, EPS)
    exact = gradients((affine(h, next_weight, next_bias, EPS), h), doubles)
    for ours, right in zip(gradients(function(*given, EPS), given), exact, strict=True):
        torch.testing.assert_close(ours.double(), right, atol=1e-2, rtol=1e-3)


def test_compiled_autograd_calls_both_nodes(gpu):
    given = leaves(7, True)
    y, h = fusednorm.layer_norm_add_layer_norm(*given, EPS)
    expected = torch.autograd.grad((2 * y + 3 * h).sum(), given, retain_graph=True)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        (2 * y + 3 * h).sum().backward()
    for each, want in zip(given, expected, strict=True):
        torch.testing.assert_close(each.grad, want)


def test_a_change_of_h_in_place_is_noticed(gpu):
    y, h = fusednorm.rms_norm_add_rms_norm(*leaves(5, True), EPS)
    h.mul_(2)
    for output in (y, h):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward(retain_graph=True)


def test_the_op_itself_is_recorded_with_its_statistics(gpu):
    given = leaves(6, True)
    x, residual, weight, next_weight, bias, next_bias = given
    last = next_weight, next_bias, weight, bias, EPS
    for _ in range(2):
        outputs = torch.ops.fusednorm.layer_norm_fwd_plus_residual_norm(x, [64], residual, *last)
    exact = [each.detach().double().requires_grad_() for each in given]
    h, mean, rstd = torch.ops.fusednorm.layer_norm_fwd_plus_residual(exact[0], [64], exact[1], exact[2], exact[4], EPS)
    y, *of_h = torch.ops.fusednorm.layer_norm_fwd_affine(h, [64], exact[3], exact[5], EPS)
    for ours, right in zip(outputs, (h, mean, rstd, y, *of_h), strict=True):
        some = torch.randn(right.shape, dtype=torch.float64)
        found = torch.autograd.grad(ours, given, some.float(), retain_graph=True, allow_unused=True)
        expected = torch.autograd.grad(right, exact, some, retain_graph=True, allow_unused=True)
        for got, want in zip(found, expected, strict=True):
            got, want = (torch.zeros(()) if each is None else each for each in (got, want))
            torch.testing.assert_close(got.double(), want.double().expand(got.shape), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("norm", FUNCTIONS)
def test_rows_that_no_kernel_normalizes_twice_are_two_calls_of_cpp(norm, recorded, gpu):
    function = FUNCTIONS[norm][0]
    given = [torch.randn(shape).requires_grad_(recorded) for shape in ((3, 32768), (3, 32768), *((32768,),) * 4)]
    with gpu.going_to_python("forward"):
        first = function(*given, EPS)
    with gpu.going_to_python("forward", "forward"):  # C++ makes the two calls from here on
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
