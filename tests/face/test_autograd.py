"""Derivatives of any order, through the ops and the autograd Functions, by every API that torch has for them."""

from __future__ import annotations

import contextlib

import alone
import pytest
import torch
import torch.nn.functional as F
from op_log import OpLog
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import _disable_current_modes

from fusednorm import LayerNormFunction, RMSNormFunction, autograd, force, reference
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.settings import forcing
from fusednorm.tools.oracle import Case, Outputs, assert_outputs_close, make_inputs

OPS = torch.ops.fusednorm

# By norm: the op, the Function and the stock function. Each takes (x, weight, bias) and returns a tuple that begins
# with y.
OP = {
    "layer": lambda x, w=None, b=None: OPS.layer_norm_fwd(x, [8], w, b, 1e-2),
    "rms": lambda x, w=None, b=None: OPS.rms_norm_fwd(x, [8], w, 1e-2),
}
FUNCTION = {
    "layer": lambda x, w=None, b=None: LayerNormFunction.apply(x, (8,), w, b, 1e-2),
    "rms": lambda x, w=None, b=None: RMSNormFunction.apply(x, (8,), w, 1e-2),
}
STOCK = {
    "layer": lambda x, w=None, b=None: (F.layer_norm(x, (8,), w, b, 1e-2),),
    "rms": lambda x, w=None, b=None: (F.rms_norm(x, (8,), w, 1e-2),),
}


def as_on_a_gpu(function):
    """The function with CPU tensors treated as CUDA tensors, which take the fast path with a recorded autograd node."""

    def run(*tensors):
        with kernels_on("cpu"), force("reference"):
            return (function(*tensors),)

    return run


RECORDED = {
    "layer": as_on_a_gpu(lambda x, w=None, b=None: alone.layer_norm(x, (8,), w, b, 1e-2)),
    "rms": as_on_a_gpu(lambda x, w=None: alone.rms_norm(x, (8,), w, 1e-2)),
}
norms = pytest.mark.parametrize("norm", ["layer", "rms"])
routes = pytest.mark.parametrize("route", [OP, FUNCTION, RECORDED], ids=["op", "Function", "recorded"])
traceable_routes = pytest.mark.parametrize("route", [OP, FUNCTION], ids=["op", "Function"])


def operands(norm, dtype=torch.float64, requires_grad=True, shape=(2, 3, 8)):
    """(x, weight, bias), or (x, weight) for RMSNorm."""
    generator = torch.Generator().manual_seed(0)
    shapes = (shape, (8,), (8,)) if norm == "layer" else (shape, (8,))
    return tuple(torch.randn(s, dtype=dtype, generator=generator).requires_grad_(requires_grad) for s in shapes)


def scalar(function):
    """A scalar function of y with derivatives of every order."""
    return lambda *tensors: function(*tensors)[0].sin().sum()


@norms
@routes
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_gradients_of_every_output_are_right_to_second_order(check, route, norm):
    assert check(route[norm], operands(norm))


@norms
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_gradients_without_parameters_are_right_to_second_order(check, norm):
    assert check(OP[norm], operands(norm)[:1])


@norms
def test_gradients_of_the_statistics_alone_are_right_to_second_order(norm):
    x = operands(norm)[:1]
    assert gradcheck(lambda x: OP[norm](x)[1:], x)
    assert gradgradcheck(lambda x: OP[norm](x)[1:], x)


def backward_operands():
    """(grad_out, x, rstd, weight, mean, bias) of a backward op. rstd and mean are independent numbers, not x's own."""
    x, weight, bias = operands("layer")
    grad_out, mean = torch.randn_like(x, requires_grad=True), torch.randn(6, dtype=x.dtype, requires_grad=True)
    rstd = torch.rand(6, 1, dtype=x.dtype).add(0.5).requires_grad_()
    return grad_out, x, rstd, weight, mean, bias


BACKWARD_OP = {
    "layer": lambda g, x, r, w, m, b=None: OPS.layer_norm_bwd(g, x, [8], m, r, w, b),
    "rms": lambda g, x, r, w: OPS.rms_norm_bwd(g, x, [8], r, w),
}


@norms
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_backward_op_differentiates_in_all_its_operands(check, norm):
    assert check(BACKWARD_OP[norm], backward_operands()[: 6 if norm == "layer" else 4])


@pytest.mark.parametrize(("norm", "operand"), [*(("layer", i) for i in range(5)), *(("rms", i) for i in range(4))])
def test_backward_op_differentiates_in_one_operand_alone(norm, operand):
    tensors = backward_operands()[: 5 if norm == "layer" else 4]
    alone = [t.detach().requires_grad_(i == operand) for i, t in enumerate(tensors)]
    got, want = (torch.autograd.grad(BACKWARD_OP[norm](*t)[0].sin().sum(), t[operand]) for t in (alone, tensors))
    assert_close(got, want)


@norms
def test_forward_mode_and_batched_gradients_pass_gradcheck(norm):
    assert gradcheck(OP[norm], operands(norm), check_forward_ad=True, check_batched_grad=True)


@norms
@routes
def test_gradients_are_right_to_third_order(route, norm):
    # Compared with finite differences, as the third derivative of F.layer_norm is wrong in torch 2.11 to 2.15.
    def gradient(x):
        return torch.autograd.grad(scalar(route[norm])(x), x, create_graph=True)[0]

    x = operands(norm, shape=(2, 8))[:1]
    assert gradgradcheck(gradient, x)


CASES = [
    Case("layer", (33, 40), 1, torch.bfloat16, torch.float32, torch.float32),
    Case("layer", (33, 40), 1, torch.float16, torch.float16, torch.float16),
    Case("rms", (33, 40), 1, torch.bfloat16, torch.float32),
    Case("rms", (5, 6, 40), 2, torch.float32, torch.float16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_functions_match_the_oracle_in_every_mix_of_dtypes(case):
    inputs = make_inputs(case)
    leaves = [t.requires_grad_() for t in (inputs.x, inputs.weight, inputs.bias) if t is not None]
    function = LayerNormFunction if case.norm == "layer" else RMSNormFunction
    arguments = (inputs.weight, inputs.bias, case.eps) if case.norm == "layer" else (inputs.weight, case.eps)
    y, *statistics = function.apply(inputs.x, case.normalized_shape, *arguments)
    dx, dweight, *dbias = torch.autograd.grad(y, leaves, inputs.grad_out)
    mean, rstd = (None, *statistics)[-2:]
    assert_outputs_close(Outputs(y, mean, rstd, dx, dweight, *dbias), case, inputs)


@norms
def test_function_has_the_defaults_of_the_op(norm):
    x, *_ = operands(norm)
    function, op = (LayerNormFunction, OPS.layer_norm_fwd) if norm == "layer" else (RMSNormFunction, OPS.rms_norm_fwd)
    outputs = function.apply(x, (8,))
    assert_close(outputs, op(x, [8]))
    outputs[0].sum().backward()
    assert x.grad is not None


@norms
@routes
def test_plain_backward_is_one_backward_op(norm, route):
    leaves = operands(norm)
    y = route[norm](*leaves)[0]
    grad_out = torch.ones_like(y)
    with OpLog() as log:
        torch.autograd.grad(y, leaves, grad_out)
    assert log.names == [f"fusednorm.{norm}_norm_bwd.default"]


@norms
@routes
@pytest.mark.parametrize("frozen", [0, 1, -1])
def test_backward_leaves_out_what_is_frozen(norm, route, frozen):
    leaves = operands(norm)
    leaves[frozen].requires_grad_(False)
    y = route[norm](*leaves)[0]
    with OpLog() as log:
        y.sum().backward()
    ((_, arguments),) = (call for call in log.calls if call[0].startswith("fusednorm"))
    assert list(arguments[-1]) == [t.requires_grad for t in leaves]
    assert [t.grad is not None for t in leaves] == [t.requires_grad for t in leaves]


@norms
def test_nothing_is_recorded_where_no_input_requires_grad(norm):
    outputs = OP[norm](*operands(norm, requires_grad=False))
    assert not any(t.requires_grad for t in outputs)


@norms
@routes
def test_expanded_gradient_of_a_sum_is_read_in_place(norm, route):
    leaves = operands(norm)
    got = torch.autograd.grad(route[norm](*leaves)[0].sum(), leaves)
    assert_close(got, torch.autograd.grad(STOCK[norm](*leaves)[0].sum(), leaves))


@norms
def test_func_grad_and_vmap_match_stock(norm):
    tensors = operands(norm, requires_grad=False)
    arguments = tuple(range(len(tensors)))
    ours, stock = (torch.func.grad(scalar(route[norm]), arguments) for route in (OP, STOCK))
    assert_close(ours(*tensors), stock(*tensors))
    in_dims = (0, *(None for _ in tensors[1:]))
    assert_close(torch.func.vmap(ours, in_dims)(*tensors), torch.func.vmap(stock, in_dims)(*tensors))
    assert_close(
        torch.func.vmap(lambda *t: OP[norm](*t)[0], in_dims)(*tensors),
        torch.func.vmap(lambda *t: STOCK[norm](*t)[0], in_dims)(*tensors),
    )


@pytest.fixture
def no_vmap_loop():
    """Inside, vmap fails instead of looping over the samples when an op has no batching rule."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


@norms
def test_vmap_batches_every_operand(norm, no_vmap_loop):
    tensors = [torch.stack([t, 2 * t, t - 1]) for t in operands(norm, requires_grad=False)]
    batched = torch.func.vmap(OP[norm])(*tensors)
    looped = zip(*(OP[norm](*sample) for sample in zip(*tensors, strict=True)), strict=True)
    assert_close(batched, tuple(torch.stack(outputs) for outputs in looped))


def test_vmap_batches_the_backward_op(no_vmap_loop):
    x, weight, bias = operands("layer", requires_grad=False)
    _, mean, rstd = OP["layer"](x, weight, bias)
    backward = lambda g: OPS.layer_norm_bwd(g, x, [8], mean, rstd, weight, bias, [True, True, False])[:2]  # noqa: E731
    grads = torch.randn(4, *x.shape, dtype=x.dtype)
    looped = zip(*(backward(g) for g in grads), strict=True)
    assert_close(torch.func.vmap(backward)(grads), tuple(torch.stack(outputs) for outputs in looped))


@norms
def test_jacobians_match_stock(norm):
    tensors = operands(norm, requires_grad=False)
    arguments = tuple(range(len(tensors)))
    want = torch.autograd.functional.jacobian(lambda *t: STOCK[norm](*t)[0], tensors)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        assert_close(transform(lambda *t: OP[norm](*t)[0], arguments)(*tensors), want)


@norms
def test_second_order_transforms_match_stock_autograd(norm):
    # Not compared with the stock function: jacrev of jacrev of F.layer_norm is wrong in torch 2.11 to 2.15.
    tensors = operands(norm, requires_grad=False)
    arguments = tuple(range(len(tensors)))
    want = torch.autograd.functional.hessian(scalar(STOCK[norm]), tensors)
    for outer in (torch.func.jacrev, torch.func.jacfwd):
        for inner in (torch.func.jacrev, torch.func.jacfwd):
            assert_close(outer(inner(scalar(OP[norm]), arguments), arguments)(*tensors), want)


@norms
def test_jvp_matches_stock(norm):
    tensors = operands(norm, requires_grad=False)
    tangents = tuple(torch.randn_like(t) for t in tensors)
    ours, stock = (torch.func.jvp(lambda *t, f=route[norm]: f(*t)[0], tensors, tangents) for route in (OP, STOCK))
    assert_close(ours, stock)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, tangent) for t, tangent in zip(tensors, tangents, strict=True)]
        assert_close(forward_ad.unpack_dual(OP[norm](*duals)[0]).tangent, stock[1])


@norms
def test_functions_refuse_forward_mode_and_torch_func_instead_of_dropping_them(norm):
    x, *_ = operands(norm, requires_grad=False)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        FUNCTION[norm](forward_ad.make_dual(x, x))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(scalar(FUNCTION[norm]))(x)


@norms
@traceable_routes
def test_compiles_without_a_graph_break(norm, route):
    leaves = operands(norm)
    compiled = torch.compile(route[norm], fullgraph=True, backend="aot_eager", dynamic=True)
    got, want = compiled(*leaves), route[norm](*leaves)
    assert_close(got, want)
    got, want = (torch.autograd.grad(sum(t.sin().sum() for t in outputs), leaves) for outputs in (got, want))
    assert_close(got, want)


@norms
@pytest.mark.parametrize("route", [FUNCTION, RECORDED], ids=["Function", "recorded"])
def test_compiled_autograd_traces_the_backward(norm, route):
    leaves = operands(norm)
    want = torch.autograd.grad(scalar(route[norm])(*leaves), leaves)
    loss, counters = scalar(route[norm])(*leaves), torch._dynamo.utils.counters["compiled_autograd"]
    captures = counters["captures"]
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss.backward(), backend="eager")()
    assert counters["captures"] > captures
    assert_close(tuple(each.grad for each in leaves), want)


@norms
@routes
def test_checkpointing_recomputes_to_the_same_gradients(norm, route):
    leaves = operands(norm)
    y = torch.utils.checkpoint.checkpoint(lambda *t: route[norm](*t)[0], *leaves, use_reentrant=False)
    got = torch.autograd.grad(y.sin().sum(), leaves)
    assert_close(got, torch.autograd.grad(scalar(STOCK[norm])(*leaves), leaves))


@norms
def test_a_recorded_forward_has_one_node_with_one_output(norm):
    leaves = operands(norm)
    (y,) = RECORDED[norm](*leaves)
    assert y.grad_fn.name() == "NormFunctionBackward" and y.output_nr == 0
    assert_close(y, OP[norm](*leaves)[0])


@norms
def test_a_recorded_forward_that_needs_no_gradient_leaves_no_node(norm):
    (y,) = RECORDED[norm](*operands(norm, requires_grad=False))
    assert y.grad_fn is None


@norms
def test_a_recorded_forward_is_batched_where_its_gradients_are(norm):
    leaves = operands(norm)
    (y,) = RECORDED[norm](*leaves)
    grads = torch.randn(4, *y.shape, dtype=y.dtype)
    got = torch.autograd.grad(y, leaves, grads, is_grads_batched=True, retain_graph=True)
    looped = zip(*(torch.autograd.grad(y, leaves, each, retain_graph=True) for each in grads), strict=True)
    assert_close(got, tuple(torch.stack(each) for each in looped))


@norms
def test_a_recorded_backward_passes_tangents_on(norm):
    leaves = operands(norm)
    (y,) = RECORDED[norm](*leaves)
    grad_out, tangent = torch.randn_like(y), torch.randn_like(y)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grad_out, tangent)
        (dx,) = torch.autograd.grad(y, leaves[0], dual, retain_graph=True)
        got = forward_ad.unpack_dual(dx).tangent
    assert_close(got, torch.autograd.grad(y, leaves[0], tangent)[0])  # linear in grad_out


@norms
@pytest.mark.parametrize("run", ["op", "module"])
def test_a_zero_tensor_gives_what_stock_gives(norm, run):
    """Forward-mode AD makes tensors of zeros without memory."""
    zeros, (_, *parameters) = torch._efficientzerotensor((3, 8), dtype=torch.float64), operands(norm)
    with kernels_on("cpu"), torch.no_grad():
        if run == "op":
            y = OP[norm](zeros, *parameters)[0]
        else:
            y = getattr(alone, f"{norm}_norm")(zeros, (8,), *parameters, 1e-2)
    assert_close(y, STOCK[norm](torch.zeros(3, 8, dtype=torch.float64), *parameters)[0])


@norms
def test_a_tensor_whose_memory_was_freed_is_refused(norm):
    x, *parameters = (each.detach() for each in operands(norm))
    x.untyped_storage().resize_(0)
    with kernels_on("cpu"), pytest.raises(RuntimeError, match=f"{norm}_norm: all tensors must have memory, got one of"):
        OP[norm](x, *parameters)


@norms
def test_a_recorded_backward_runs_a_prepared_call_and_asks_nobody_else(norm, monkeypatch):
    leaves = operands(norm)
    with kernels_on("cpu"):
        y = getattr(alone, f"{norm}_norm")(leaves[0], (8,), *leaves[1:])
    grad_y = torch.ones_like(y)
    want, asked = torch.autograd.grad(y, leaves, grad_y, retain_graph=True), []

    def run(call):  # in place of prepared.run: as if the call were known
        asked.append(call)
        return (*want, None)[:3], None

    monkeypatch.setattr(autograd.prepared, "run", run)
    monkeypatch.setattr(autograd, "_backward", None)
    assert_close(torch.autograd.grad(y, leaves, grad_y, retain_graph=True), want)
    (call,) = asked
    assert call.op == f"{norm}_norm_bwd" and call.grad_out is grad_y
    assert call.output_mask == (True, True, norm == "layer")


@norms
@pytest.mark.parametrize("outer", [None, "pipelined"])
def test_a_recorded_backward_looks_for_its_call_as_backwards_before_it_did(norm, outer, monkeypatch):
    """A block of `force`, even of None, would be part of what the call looks like."""
    seen = []

    def run(call, first=None):
        seen.append(forcing.asked_variants())
        return (None, None) if first is None else first(call, None)

    monkeypatch.setattr(autograd.prepared, "run", run)
    leaves, run_norm = operands(norm), getattr(alone, f"{norm}_norm")
    with kernels_on("cpu"), contextlib.nullcontext() if outer is None else force(outer):
        y = run_norm(leaves[0], (8,), *leaves[1:])
        seen.clear()
        y.sum().backward()
    assert len(seen) >= 1 and set(seen) == {() if outer is None else (outer,)}


@norms
def test_a_recorded_backward_is_forced_as_its_forward_was(norm, monkeypatch):
    asked, backward = [], autograd._backward
    monkeypatch.setattr(autograd, "_backward", lambda call: asked.append(forcing.forced_variant()) or backward(call))
    run = getattr(alone, f"{norm}_norm")
    x, *parameters = operands(norm)
    with kernels_on("cpu"):
        with force("multi_wave"):
            y = run(x, (8,), *parameters)
        y.sum().backward()
        y = run(x, (8,), *parameters)
        with force("pipelined"):
            y.sum().backward()
    assert asked == ["multi_wave", None]


OVER_TWO_DIMS = {
    "layer": (lambda x: OPS.layer_norm_fwd(x, [3, 8], eps=1e-2), lambda x: alone.layer_norm(x, (3, 8), eps=1e-2)),
    "rms": (lambda x: OPS.rms_norm_fwd(x, [3, 8], eps=1e-2), lambda x: alone.rms_norm(x, (3, 8), eps=1e-2)),
}


@norms
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_gradients_of_rows_of_two_dims_are_right_to_second_order(check, norm):
    op, recorded = OVER_TWO_DIMS[norm]
    assert check(op, operands(norm)[0]) and check(as_on_a_gpu(recorded), operands(norm)[0])


@norms
@routes
@pytest.mark.parametrize("trained", [0, 1, -1])
def test_one_operand_alone_gets_its_gradient(norm, route, trained):
    leaves = operands(norm, requires_grad=False)
    leaves[trained].requires_grad_()
    got, want = (torch.autograd.grad(scalar(of[norm])(*leaves), leaves[trained]) for of in (route, STOCK))
    assert_close(got, want)


@norms
@pytest.mark.parametrize("alone", [True, False])
def test_a_recorded_backward_adds_the_residual_and_passes_its_gradient_on(norm, alone):
    g, x, rstd, weight, mean, bias = (t.detach().requires_grad_(not alone) for t in backward_operands())
    residual, upstream = torch.randn_like(x, requires_grad=True), torch.randn_like(x)
    operands = (mean, rstd, weight, bias) if norm == "layer" else (rstd, weight, bias)
    with_none, with_one = (
        getattr(OPS, f"{norm}_norm_bwd_residual")(g, x, [8], *operands, each)[0] for each in (None, residual)
    )
    assert_close(with_one, with_none + residual)
    assert_close(torch.autograd.grad(with_one, residual, upstream)[0], upstream)


@norms
def test_a_negated_view_gives_what_stock_gives(norm):
    x, *parameters = operands(norm, requires_grad=False)
    with kernels_on("cpu"):
        y = OP[norm](torch._neg_view(x), *parameters)[0]
    assert_close(y, STOCK[norm](-x, *parameters)[0])


@pytest.fixture
def known_calls(monkeypatch):
    """Every call is answered as a prepared one is, as on a GPU from the second step on."""

    def run(call, first=None):
        with torch.no_grad(), _disable_current_modes():
            return reference.formula(call), None

    monkeypatch.setattr(autograd.prepared, "run", run)


@norms
@routes
def test_modes_see_both_ops_of_known_calls(norm, route, known_calls):
    with OpLog() as log:
        route[norm](*operands(norm))[0].sum().backward()
    assert [name for name in log.names if "fusednorm" in name] == [
        f"fusednorm.{norm}_norm_fwd.default", f"fusednorm.{norm}_norm_bwd.default"
    ]  # fmt: skip


@norms
@routes
def test_profilers_see_the_backwards_of_known_calls(norm, route, known_calls):
    y = route[norm](*operands(norm))[0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y.sum().backward()
    shown = {event.key: event.count for event in profile.key_averages() if event.key.startswith("fusednorm::")}
    assert shown == {f"fusednorm::{norm}_norm_bwd": 1}


@norms
@routes
def test_known_calls_have_second_derivatives(norm, route, known_calls):
    def second(run):
        leaves = operands(norm)
        (dx,) = torch.autograd.grad(scalar(run)(*leaves), leaves[:1], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), leaves[:2])

    assert_close(second(route[norm]), second(STOCK[norm]))
