"""A norm behind a layer and the next one, against two calls."""

from __future__ import annotations

import itertools

import pytest
import torch
from norm_forms import FP32, FP64
from op_log import OpLog
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fusednorm

BF16 = torch.bfloat16
FUNCTIONS = {
    "layer": (fusednorm.layer_norm_add_layer_norm, fusednorm.layer_norm_add, fusednorm.affine_layer_norm),
    "rms": (fusednorm.rms_norm_add_rms_norm, fusednorm.rms_norm_add, fusednorm.affine_rms_norm),
}
norms = pytest.mark.parametrize("norm", FUNCTIONS)


def leaves(x=FP64, residual=None, parameters=4) -> list[Tensor | None]:
    """x, residual, weight, next_weight, bias, next_bias; the last ones None if there are fewer parameters."""
    generator = torch.Generator().manual_seed(0)
    dtypes = x, residual or x, *(x,) * parameters
    shapes = (2, 3, 12), (2, 3, 12), *((12,),) * parameters
    made = [torch.randn(s, generator=generator, dtype=FP64).to(d) for s, d in zip(shapes, dtypes, strict=True)]
    return [each.requires_grad_() for each in made] + [None] * (4 - parameters)


def by_two_calls(norm, x, residual, weight, next_weight, bias, next_bias, eps=1e-3, **settings):
    _, add, affine = FUNCTIONS[norm]
    h = add(x, residual, weight, bias, eps, **settings)
    return affine(h, next_weight, next_bias, eps, **settings), h


def gradients(outputs, given, used=(True, True), **settings):
    picked = [each for each, use in zip(outputs, used, strict=True) if use]
    grads = [torch.linspace(-1, 1, each.numel(), dtype=each.dtype).reshape(each.shape) for each in picked]
    leaves = [each for each in given if each is not None]
    return torch.autograd.grad(picked, leaves, grads, allow_unused=True, **settings)


@norms
@pytest.mark.parametrize("parameters", [0, 2, 4])
def test_outputs_and_gradients_are_those_of_two_calls(norm, parameters):
    for (x, residual), rounding in itertools.product(((FP32, FP32), (BF16, BF16), (BF16, FP32)), ("once", "x_hat")):
        given = leaves(x, residual, parameters)
        settings = {"weight_offset": 0.5, "rounding": rounding}
        outputs = FUNCTIONS[norm][0](*given, 1e-3, **settings)
        want = by_two_calls(norm, *given, **settings)
        assert all(map(torch.equal, outputs, want))
        wide = [None if each is None else each.detach().double().requires_grad_() for each in given]
        exact = by_two_calls(norm, *wide, weight_offset=0.5)
        for used in ((True, True), (True, False), (False, True)):
            found = [gradients(*each, used, retain_graph=True) for each in ((outputs, given), (exact, wide))]
            for ours, right, of in zip(*found, [each for each in given if each is not None], strict=True):
                assert (ours is None) == (right is None)
                if ours is not None:  # two roundings on the way
                    assert ours.dtype is of.dtype
                    close = {"rtol": 4 * torch.finfo(x).eps, "atol": 8 * torch.finfo(x).eps}
                    torch.testing.assert_close(ours.double(), right, **close)


@norms
def test_the_backward_is_two_ops_and_no_addition(norm):
    given = leaves(FP32)
    only_next_weight = [each.detach() for each in given]
    only_next_weight[3].requires_grad_()
    for tensors, count in ((given, 2), (only_next_weight, 1)):
        y, h = FUNCTIONS[norm][0](*tensors)
        with OpLog() as log:
            torch.autograd.backward((y, h), (y, h))
        assert log.names.count(f"fusednorm.{norm}_norm_bwd_residual.default") == count
        assert not any("add" in each for each in log.names)
    assert only_next_weight[3].grad is not None


@norms
def test_an_exported_call_is_trained_by_ops(norm):
    given = leaves(FP32)
    module = TwoNorms(norm, *[torch.nn.Parameter(each.detach().clone()) for each in given[2:]])
    exported = torch.export.export(module, tuple(each.detach() for each in given[:2])).module()
    names = [str(node.target) for node in exported.graph.nodes]
    assert names.count(f"fusednorm.{norm}_norm_fwd_plus_residual_norm.default") == 1
    with OpLog() as log:
        outputs = exported(*given[:2])
        found = gradients(outputs, [*given[:2], *exported.parameters()])
    assert all(each.startswith(f"fusednorm.{norm}_norm") for each in log.names if "norm" in each)
    assert sum(f"{norm}_norm_bwd" in each for each in log.names) == 2
    torch.testing.assert_close(found, gradients(FUNCTIONS[norm][0](*given), given))


class TwoNorms(torch.nn.Module):
    def __init__(self, norm, *parameters):
        super().__init__()
        self.norm, self.parameters_of_norms = norm, torch.nn.ParameterList(parameters)

    def forward(self, x, residual):
        return FUNCTIONS[self.norm][0](x, residual, *self.parameters_of_norms)


@norms
def test_derivatives_of_any_order(norm):
    given = [each[:1] if each.dim() > 1 else each for each in leaves()]

    def outputs(*tensors):
        return FUNCTIONS[norm][0](*tensors, 1e-3, weight_offset=1.0)

    assert gradcheck(outputs, given, fast_mode=True) and gradgradcheck(outputs, given, fast_mode=True)
    x, residual, *others = given
    mapped = torch.func.vmap(lambda *rows: outputs(*rows, *others))(x, residual)
    assert all(torch.allclose(ours, want) for ours, want in zip(mapped, outputs(*given), strict=True))


@norms
def test_it_compiles_without_a_break(norm):
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(FUNCTIONS[norm][0], backend="aot_eager", fullgraph=True, dynamic=dynamic)
        given = leaves(FP32)
        got, want = (gradients(run(*given), given) for run in (compiled, FUNCTIONS[norm][0]))
        torch.testing.assert_close(got, want)


@norms
def test_torch_jit_traces_a_call_without_parameters(norm):
    x, residual, *_ = leaves(FP32, parameters=0)
    traced = torch.jit.trace(FUNCTIONS[norm][0], (x, residual), check_trace=False)
    torch.testing.assert_close(traced(x + 1, residual), FUNCTIONS[norm][0](x + 1, residual))


def test_wrong_operands_are_refused_in_a_sentence():
    x, residual, weight, *_ = leaves(FP32)
    op = "^rms_norm_fwd_plus_residual"
    with pytest.raises(ValueError, match=f"{op}: rounding must be one of once, x_hat, got 'twice'$"):
        fusednorm.rms_norm_add_rms_norm(x, residual, weight, rounding="twice")
    with pytest.raises(RuntimeError, match=rf"{op}_norm: residual must have shape \(2, 3, 12\), got \(1, 3, 12\)$"):
        fusednorm.rms_norm_add_rms_norm(x, residual[:1], weight)
    with pytest.raises(RuntimeError, match="^rms_norm_fwd_affine: "):
        fusednorm.rms_norm_add_rms_norm(x, residual, weight, weight[:3])
    with pytest.raises(TypeError, match=f"{op}_norm: weight must be a tensor, got list$"):
        fusednorm.rms_norm_add_rms_norm(x, residual, [1.0] * 12)


@norms
@pytest.mark.parametrize("parameters", [0, 4])
def test_torch_fx_records_the_ops(norm, parameters):
    """A former bug: it could not compare the shapes of both norms."""
    given = [each for each in leaves(FP32, parameters=parameters) if each is not None]

    class Model(torch.nn.Module):
        def forward(self, x, residual):
            return FUNCTIONS[norm][0](x, residual, *given[2:], eps=1e-3)

    model = Model()
    traced = torch.fx.symbolic_trace(model)
    assert all(map(torch.equal, traced(*given[:2]), model(*given[:2])))


def test_second_derivatives_beside_float64_have_its_machine_epsilon():
    """A former bug: they had that of x, which was all that a backward knew."""
    x, residual, weight, next_weight, *_ = leaves(FP32, FP64, 2)
    given = [(1e-4 * x).detach().requires_grad_(), residual, weight, next_weight]
    eps = torch.finfo(FP64).eps
    wide = [each.detach().double().requires_grad_() for each in given]
    found = gradients(fusednorm.rms_norm_add_rms_norm(*given), given, create_graph=True)
    exact = gradients(by_two_calls("rms", *wide, None, None, eps), wide, create_graph=True)
    assert all(torch.allclose(ours.double(), right, rtol=1e-4) for ours, right in zip(found, exact, strict=True))


@norms
def test_statistics_of_h_have_the_dtype_that_h_has_by_y_dtype(norm):
    """A former bug: fake tensors and kernels had float64, two calls had float32."""
    x, residual = (each.detach() for each in leaves(parameters=0)[:2])
    op = getattr(torch.ops.fusednorm, f"{norm}_norm_fwd_plus_residual_norm")
    found, fakes = (op(x.to(on), [12], residual.to(on), eps=1e-3, y_dtype=FP32) for on in ("cpu", "meta"))
    assert [each.dtype for each in found] == [each.dtype for each in fakes]
