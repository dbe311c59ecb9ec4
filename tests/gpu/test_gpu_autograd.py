"""Autograd, autocast and the modules on CUDA."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from calls import assert_same_bits
from cases import BF16, FP16, FP32, FP64, NORMS, make_case

import fusednorm
from fusednorm import ops
from fusednorm.host import native
from fusednorm.tools.oracle import Case, Outputs, assert_outputs_close, fused, make_inputs

pytestmark = pytest.mark.gpu

MODULES = {"layer": (torch.nn.LayerNorm, fusednorm.LayerNorm), "rms": (torch.nn.RMSNorm, fusednorm.RMSNorm)}
OPS = torch.ops.fusednorm


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


TRAINED = [
    make_case(norm, (6, 50, 768), mix)
    for norm, mix in itertools.product(NORMS, [(BF16, BF16, BF16), (BF16, FP32, BF16), (FP32, FP32, FP32)])
]


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_modules_train_as_the_oracle_says(case):
    inputs = make_inputs(case, "cuda")
    module = MODULES[case.norm][1](768, eps=case.eps, device="cuda", dtype=case.weight_dtype)
    with torch.no_grad():
        module.weight.copy_(inputs.weight)
        if case.norm == "layer":
            module.bias.copy_(inputs.bias)
    x = leaf(inputs.x)
    y = module(x)
    y.backward(inputs.grad_out)
    dbias = module.bias.grad if case.norm == "layer" else None
    assert_outputs_close(Outputs(y.detach(), None, None, x.grad, module.weight.grad, dbias), case, inputs)


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_functional_and_functions_are_the_ops(case):
    inputs, shape = make_inputs(case, "cuda"), case.normalized_shape
    want = fused(case, inputs)
    parameters = [p for p in (inputs.weight, inputs.bias) if p is not None]
    functional = getattr(fusednorm.functional, f"{case.norm}_norm")
    function = fusednorm.LayerNormFunction if case.norm == "layer" else fusednorm.RMSNormFunction
    for apply in (functional, lambda *args: function.apply(*args)[0]):
        leaves = [leaf(t) for t in (inputs.x, *parameters)]
        y = apply(leaves[0], shape, *leaves[1:], case.eps)
        grads = torch.autograd.grad(y, leaves, inputs.grad_out)
        assert_same_bits(Outputs(y.detach(), None, None, *grads), want, ("y", "dx", "dweight", "dbias"))


def modules_and_inputs(norm, shape=(64, 768), dtype=BF16):
    """The stock module and ours with the same parameters, and an input."""
    torch.manual_seed(0)
    stock, ours = (module(shape[-1], eps=1e-5, device="cuda", dtype=dtype) for module in MODULES[norm])
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.normal_()
    ours.load_state_dict(stock.state_dict())
    return stock, ours, torch.randn(*shape, device="cuda", dtype=dtype)


def trained(module, x, gradient) -> list:
    """[y, gradients of x and the parameters]; `gradient(y)` makes the gradient of y."""
    x = leaf(x)
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], gradient(y))]


# Kinds of gradients of y. Two calls with equal forwards may still differ in this.
GRADIENTS = {
    "of a sum": lambda y: torch.ones((), device=y.device, dtype=y.dtype).expand_as(y),
    "contiguous": torch.ones_like,
    "strided": lambda y: torch.ones(y.shape[0], 2 * y.shape[1], device=y.device, dtype=y.dtype)[:, : y.shape[1]],
    "unaligned": lambda y: torch.ones(y.numel() + 1, device=y.device, dtype=y.dtype)[1:].view_as(y),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_module_called_again_gives_the_same_whatever_its_gradient_looks_like(norm):
    _, module, x = modules_and_inputs(norm)
    first = trained(module, x, torch.ones_like)
    for gradient in [*GRADIENTS.values()] * 3:
        for got, want in zip(trained(module, x, gradient), first, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("norm", NORMS)
def test_a_module_called_again_with_another_input_is_right(norm):
    stock, module, x = modules_and_inputs(norm, (6, 64, 768))
    inputs = [x, x.float(), x[:3], x.transpose(0, 1), x[..., :768:1].clone(), x.flatten()[768:].view(-1, 768)]
    for each in inputs * 3:
        stock, module = stock.to(each.dtype), module.to(each.dtype)
        for got, want in zip(
            trained(module, each, torch.ones_like), trained(stock, each, torch.ones_like), strict=True
        ):
            torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("norm", NORMS)
def test_a_repeated_module_call_records_one_node_and_its_backward_asks_nobody(norm, monkeypatch):
    if native.extension:
        pytest.skip("the host side in C++ records a node of its own")
    _, module, x = modules_and_inputs(norm)
    first = [trained(module, x, torch.ones_like) for _ in range(2)][-1]
    y = module(leaf(x))
    assert y.grad_fn.name() == "NormFunctionBackward"
    monkeypatch.setattr(ops, "first", None)  # what plans a call for which there is no program
    for got, want in zip(trained(module, x, torch.ones_like), first, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("norm", NORMS)
def test_parameters_frozen_after_a_call_get_no_gradient(norm):
    _, module, x = modules_and_inputs(norm)
    for frozen in (False, True, False):
        module.weight.requires_grad_(not frozen)
        for _ in range(3):
            x_leaf = leaf(x)
            module.weight.grad = None
            module(x_leaf).sum().backward()
            assert x_leaf.grad is not None and (module.weight.grad is None) == frozen


@pytest.mark.parametrize("norm", NORMS)
def test_autocast_holds_for_a_call_that_looks_like_one_without(norm):
    stock, module, x = modules_and_inputs(norm)
    for _ in range(3):
        for enabled in (False, True):
            with torch.autocast("cuda", BF16, enabled=enabled):
                assert module(leaf(x)).dtype == stock(leaf(x)).dtype
                assert OPS.rms_norm_fwd(x, [768], module.weight)[0].dtype == BF16


@pytest.mark.parametrize("norm", NORMS)
def test_a_tensor_that_has_outlived_its_transform_is_taken(norm):
    _, module, x = modules_and_inputs(norm)
    kept = []
    torch.func.grad(lambda t: (kept.append(t), t.sum())[1])(x)
    want = module(x)
    for _ in range(3):
        assert torch.equal(module(kept[0]), want)
        with torch.no_grad():
            assert torch.equal(module(kept[0]), want)


@pytest.mark.parametrize("norm", NORMS)
def test_transforms_and_forward_mode_look_into_a_call_that_has_been_repeated(norm):
    stock, module, x = modules_and_inputs(norm, dtype=FP32)
    trained(module, x, torch.ones_like), trained(module, x, torch.ones_like)
    tangent = torch.randn_like(x)
    for transform in (
        lambda f: torch.func.grad(lambda t: f(t).sin().sum())(x),
        lambda f: torch.func.vmap(f)(torch.stack([x, tangent])),
        lambda f: torch.func.jvp(f, (x,), (tangent,))[1],
    ):
        torch.testing.assert_close(transform(module), transform(stock), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_checkpointing_saves_the_same_in_a_first_call_and_in_a_repeated_one(norm):
    _, module, x = modules_and_inputs(norm, (72, 768))  # a shape that no other test uses
    want = None
    for _ in range(3):
        x_leaf = leaf(x)
        torch.utils.checkpoint.checkpoint(module, x_leaf, use_reentrant=False).sum().backward()
        want = x_leaf.grad if want is None else want
        assert torch.equal(x_leaf.grad, want)


@pytest.mark.parametrize("norm", NORMS)
def test_a_repeated_module_call_is_captured_in_a_graph(norm):
    _, module, x = modules_and_inputs(norm)
    want = trained(module, x, torch.ones_like)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            trained(module, x, torch.ones_like)
    torch.cuda.current_stream().wait_stream(stream)
    graph, fresh = torch.cuda.CUDAGraph(), x.clone().normal_()
    with torch.cuda.graph(graph):
        outputs = trained(module, x, torch.ones_like)
    wanted_of_fresh = trained(module, fresh, torch.ones_like)
    for values, wanted in ((fresh, wanted_of_fresh), (x.clone(), want), (fresh, wanted_of_fresh)):
        x.copy_(values)
        graph.replay()
        for got, each in zip(outputs, wanted, strict=True):
            assert torch.equal(got, each)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("requires", [(True, False, False), (False, True, False), (True, True, False)], ids=str)
def test_only_what_requires_grad_gets_one(norm, requires):
    case = make_case(norm, (64, 512), (BF16, FP32, BF16))
    inputs = make_inputs(case, "cuda")
    operands = [operand for operand in (inputs.x, inputs.weight, inputs.bias) if operand is not None]
    leaves = [operand.clone().requires_grad_(needs) for operand, needs in zip(operands, requires, strict=False)]
    x, *parameters = leaves
    getattr(fusednorm.functional, f"{norm}_norm")(x, (512,), *parameters, case.eps).backward(inputs.grad_out)
    assert [tensor.grad is not None for tensor in leaves] == [tensor.requires_grad for tensor in leaves]
    assert_outputs_close(Outputs(None, None, None, *(tensor.grad for tensor in leaves)), case, inputs)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("autocast", [BF16, FP16], ids=str)
@pytest.mark.parametrize("x_dtype, parameter_dtype", [(FP32, FP32), (BF16, FP32), (FP16, FP32), (BF16, BF16)], ids=str)
def test_autocast_gives_the_dtypes_of_the_stock_module(norm, autocast, x_dtype, parameter_dtype):
    stock_class, our_class = MODULES[norm]
    stock = stock_class(256, eps=1e-5, device="cuda", dtype=parameter_dtype)
    ours = our_class(256, eps=1e-5, device="cuda", dtype=parameter_dtype)
    ours.load_state_dict(stock.state_dict())
    dtypes = []
    for module in (stock, ours):
        x = torch.randn(32, 256, device="cuda", dtype=x_dtype, requires_grad=True)
        try:
            with torch.autocast("cuda", autocast):
                y = module(x)
        except RuntimeError as error:
            assert module is stock, error
            pytest.skip(f"the stock module does not take these dtypes: {str(error).splitlines()[0]}")
        y.sum().backward()
        dtypes.append((y.dtype, x.grad.dtype, module.weight.grad.dtype))
    assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_traced_module_follows_its_input(norm, requires_grad):
    module = MODULES[norm][1](64, eps=1e-5, device="cuda").requires_grad_(requires_grad)
    traced = torch.jit.trace(module, torch.randn(8, 64, device="cuda"), check_trace=False)
    x = torch.randn(8, 64, device="cuda")
    assert torch.equal(traced(x), module(x))


def test_autocast_leaves_the_raw_ops_alone():
    x = torch.randn(8, 64, device="cuda", dtype=BF16)
    with torch.autocast("cuda", FP16):
        assert OPS.layer_norm_fwd(x, [64])[0].dtype == BF16
        assert OPS.rms_norm_fwd(x, [64])[0].dtype == BF16


@pytest.mark.parametrize("norm", NORMS)
def test_second_derivatives_are_right(norm):
    torch.manual_seed(0)
    operands = [torch.randn(*s, device="cuda", dtype=FP64, requires_grad=True) for s in ((4, 5), (5,), (5,))]
    operands = operands[: 3 if norm == "layer" else 2]
    function = getattr(fusednorm.functional, f"{norm}_norm")

    def normalized(x, *parameters):
        return function(x, (5,), *parameters, 1e-5)

    assert torch.autograd.gradcheck(normalized, operands)
    assert torch.autograd.gradgradcheck(normalized, operands)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_ops_are_registered_as_torch_demands(dtype, requires_grad):
    def normal(*shape, dtype=dtype, grad=requires_grad):
        return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)

    x, dy, weight, bias = normal(6, 4, 32), normal(6, 4, 32), normal(32), normal(32)
    mean, rstd = normal(6, 4, 1, dtype=FP32, grad=False), normal(6, 4, 1, dtype=FP32, grad=False).abs()
    samples = [
        (OPS.layer_norm_fwd.default, (x, [32], weight, bias, 1e-5)),
        (OPS.layer_norm_fwd.default, (x.transpose(0, 1), [32], None, None, 1e-5)),
        (OPS.rms_norm_fwd.default, (x, [32], weight, None)),
        (OPS.layer_norm_bwd.default, (dy, x, [32], mean, rstd, weight, bias, [True, True, True])),
        (OPS.layer_norm_bwd.default, (dy, x, [32], mean, rstd, weight, bias, [True, False, True])),
        (OPS.rms_norm_bwd.default, (dy, x, [32], rstd, weight, [True, True])),
    ]
    for op, args in samples:
        torch.library.opcheck(op, args)


@pytest.mark.parametrize("norm", NORMS)
def test_modules_copy_and_move_between_devices(norm):
    module = MODULES[norm][1](64)
    x = torch.randn(4, 64)
    on_cpu = module(x)
    moved = copy.deepcopy(module).to("cuda")
    torch.testing.assert_close(moved(x.to("cuda")).cpu(), on_cpu)


@pytest.mark.parametrize("shape, normalized_shape", [((0, 64), (64,)), ((4, 0), (0,)), ((0, 3, 64), (3, 64))], ids=str)
def test_tensors_without_elements_give_what_stock_gives(shape, normalized_shape):
    x = torch.randn(*shape, device="cuda", requires_grad=True)
    weight = torch.ones(normalized_shape, device="cuda", requires_grad=True)
    results = []
    for function in (F.layer_norm, fusednorm.functional.layer_norm):
        y = function(x, normalized_shape, weight)
        results.append((y, *torch.autograd.grad(y.sum(), (x, weight))))
    for stock, ours in zip(*results, strict=True):
        assert stock.shape == ours.shape and torch.equal(stock, ours)


def test_operands_on_several_devices_are_refused():
    x = torch.randn(4, 64, device="cuda")
    with pytest.raises(RuntimeError, match="weight"):
        OPS.rms_norm_fwd(x, [64], torch.ones(64))


def test_statistics_are_those_of_aten():
    case = Case("layer", (5, 7, 96), x_dtype=BF16, weight_dtype=BF16, bias_dtype=BF16)
    inputs = make_inputs(case, "cuda")
    aten = torch.ops.aten.native_layer_norm(inputs.x, [96], inputs.weight, inputs.bias, 1e-5)
    for ours, theirs in zip(OPS.layer_norm_fwd(inputs.x, [96], inputs.weight, inputs.bias, 1e-5), aten, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
