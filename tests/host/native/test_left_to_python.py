"""The C++ host side leaves calls to Python under forced plans, dispatch modes, transforms and hooks."""

from __future__ import annotations

import contextvars
import threading

import alone
import pytest
import torch
import torch.nn.functional as F
import triton
from norms import EPS, OPS, SHAPE, Wrapped, layer_norm, norms, operands, ours, right_y, y_alone
from op_log import OpLog
from torch.autograd import forward_ad
from torch.testing import assert_close

from fusednorm import force


@pytest.mark.parametrize("variant", ["multi_wave", None])
def test_forced_calls_go_to_python_with_their_backwards(variant, known_norm, gpu):
    x = known_norm.x.requires_grad_()
    with gpu.going_to_python("forward", "backward"):
        with force(variant):
            y = layer_norm(known_norm)
            y.sum().backward()
    assert_close(y, right_y(known_norm))
    x.requires_grad_(False)
    with gpu.repeating():
        layer_norm(known_norm)


def test_a_block_of_force_that_raises_ends_as_any_other(known_norm, gpu):
    with pytest.raises(RuntimeError, match="x must end in"), force("multi_wave"):
        OPS.layer_norm_fwd(known_norm.x, [7])
    with gpu.repeating():
        layer_norm(known_norm)


def test_a_task_that_outlives_its_block_leaves_nothing_to_others(gpu):
    tensors = operands("rms", requires_grad="", shape=(64, 4096))
    with force("multi_wave"):
        task = contextvars.copy_context()
    task.run(ours, "rms", *tensors)
    with gpu.going_to_python("forward"):
        ours("rms", *tensors)
    with gpu.repeating():
        ours("rms", *tensors)


def test_nested_tensors_get_pythons_sentence():
    nested = torch.nested.nested_tensor([torch.randn(3, 40), torch.randn(2, 40)])
    with pytest.raises(RuntimeError, match="layer_norm_fwd: all tensors must be strided, got a nested one"):
        alone.layer_norm(nested, (40,))


def test_force_keeps_all_threads_in_python_as_long_as_it_lasts(known_norm, gpu):
    inside, done = threading.Event(), threading.Event()

    def hold():
        with force("multi_wave"):
            inside.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait()
    with gpu.going_to_python("forward"):
        layer_norm(known_norm)
    done.set()
    holder.join()
    with gpu.repeating():
        layer_norm(known_norm)


def test_dispatch_modes_see_the_ops(known_norm):
    x = known_norm.x.requires_grad_()
    with OpLog() as log:
        y = layer_norm(known_norm)
        y.sum().backward()
    assert [name for name in log.names if "fusednorm" in name] == [
        "fusednorm.layer_norm_fwd.default",
        "fusednorm.layer_norm_bwd.default",
    ]
    assert_close(y, right_y(known_norm))
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@norms
def test_traced_graphs_hold_the_op(norm, gpu):
    x, *parameters = operands(norm, requires_grad="")
    function = alone.layer_norm if norm == "layer" else alone.rms_norm

    def y_of(x):
        return function(x, SHAPE[-1:], *parameters)

    y_of(x)
    with gpu.repeating():
        want = y_of(x)
    traced = torch.jit.trace(y_of, x, check_trace=False)
    assert f"fusednorm::{norm}_norm_fwd" in str(traced.graph)
    assert_close(traced(x), want)


def test_tensor_subclasses_see_the_ops(known_norm):
    Wrapped.ops.clear()
    y = layer_norm(known_norm, x=Wrapped(known_norm.x))
    assert Wrapped.ops == ["fusednorm.layer_norm_fwd.default"]
    assert_close(y.inner, right_y(known_norm))


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "jacrev", "vmap of parameters"])
def test_transforms_of_torch_func_look_inside(transform, known_norm, gpu):
    x, weight = known_norm.x, known_norm.weight

    def ours(x, weight=weight):
        return layer_norm(known_norm, x=x, weight=weight)

    def stock(x, weight=weight):
        return F.layer_norm(x, (40,), weight, known_norm.bias, EPS)

    transformed = {
        "grad": lambda f: torch.func.grad(lambda x: f(x).sin().sum())(x),
        "vmap": lambda f: torch.func.vmap(f)(torch.stack([x, x + 1])),
        "jvp": lambda f: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
        "jacrev": lambda f: torch.func.jacrev(f)(x[:2]),
        "vmap of parameters": lambda f: torch.func.vmap(lambda weight: f(x, weight))(torch.stack([weight, weight + 1])),
    }[transform]
    with gpu.going_to_python():
        got = transformed(ours)
    assert_close(got, transformed(stock), atol=1e-5, rtol=1e-4)


def test_transforms_leave_alone_what_is_not_theirs(known_norm):
    got = torch.func.vmap(lambda scale: scale * layer_norm(known_norm))(torch.ones(3))
    assert_close(got, right_y(known_norm).expand(3, *SHAPE))


@pytest.mark.parametrize("operand", ["x", "weight", "bias"])
def test_forward_mode_looks_inside(operand, known_norm, gpu):
    primal = getattr(known_norm, operand)
    tangent = torch.randn_like(primal)
    with forward_ad.dual_level(), gpu.going_to_python():
        dual = forward_ad.make_dual(primal, tangent)
        got = forward_ad.unpack_dual(layer_norm(known_norm, **{operand: dual})).tangent
    stock = {"x": known_norm.x, "weight": known_norm.weight, "bias": known_norm.bias}
    _, want = torch.func.jvp(
        lambda p: F.layer_norm(**{"input" if k == "x" else k: v for k, v in (stock | {operand: p}).items()},
                               normalized_shape=(40,), eps=EPS), (primal,), (tangent,)
    )  # fmt: skip
    assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_negative_views_are_resolved(requires_grad, known_norm):
    plain = torch.randn(*SHAPE, 2)
    x = torch.view_as_complex(plain).conj().imag
    assert x.is_neg()
    weight = known_norm.weight.requires_grad_(requires_grad)
    for _ in range(2):
        got, want = OPS.rms_norm_fwd(x, [40], weight, EPS)[0], F.rms_norm(-plain[..., 1], (40,), weight, EPS)
        assert_close(got, want)
        if requires_grad:
            assert_close(torch.autograd.grad(got, weight, x), torch.autograd.grad(want, weight, x))


def test_fake_tensors_are_described_by_the_fake(known_norm, gpu):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    x, weight, bias = (mode.from_tensor(each) for each in (known_norm.x, known_norm.weight, known_norm.bias))
    with gpu.going_to_python():
        assert layer_norm(known_norm, x=x, weight=weight, bias=bias).shape == SHAPE


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_that_hook_tritons_launches_see_all(hook, known_norm, gpu):
    chain = getattr(triton.knobs.runtime, hook)

    def look(metadata): ...

    chain.add(look)
    try:
        with gpu.going_to_python("forward"):
            layer_norm(known_norm)
    finally:
        chain.remove(look)
    with gpu.repeating():
        layer_norm(known_norm)


@norms
@pytest.mark.parametrize("requires_grad", ["", "xwb"])
def test_the_profiler_shows_each_op_of_a_repeated_module_once(norm, requires_grad, gpu):
    tensors, gradient = operands(norm, requires_grad=requires_grad), torch.randn(SHAPE)

    def step():
        y = y_alone(norm, *tensors)
        if requires_grad:
            y.backward(gradient)

    step()
    with (
        gpu.repeating(2 * (1 + bool(requires_grad))),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile,
    ):
        step()
        step()
    shown = [event for event in profile.key_averages() if event.key.startswith("fusednorm::")]
    wanted = ["fwd", "bwd"] if requires_grad else ["fwd"]
    assert {event.key: event.count for event in shown} == {f"fusednorm::{norm}_norm_{each}": 2 for each in wanted}
    events = [event for event in profile.events() if event.name.startswith("fusednorm::")]
    assert all(event.input_shapes[0] == list(SHAPE) for event in events)


@norms
def test_batched_gradients_are_those_one_by_one(norm):
    tensors = operands(norm)
    inputs = [each for each in tensors if each is not None]
    for y in (y_alone(norm, *tensors), ours(norm, *tensors)[0]):
        many = torch.randn(3, *y.shape)
        got = torch.autograd.grad(y, inputs, many, is_grads_batched=True, retain_graph=True)
        want = [torch.autograd.grad(y, inputs, each, retain_graph=True) for each in many]
        assert_close(got, tuple(torch.stack(each) for each in zip(*want, strict=True)))
