"""Derivatives through the autograd nodes of the C++ host side."""

from __future__ import annotations

import contextlib
import threading

import alone
import pytest
import test_errors
import torch
import torch.nn.functional as F
from cases import FP64
from norms import (
    EPS,
    SHAPE,
    Wrapped,
    assert_grads_close,
    exact_grads,
    layer_norm,
    norms,
    operands,
    ours,
    right_y,
    stock,
    y_alone,
)
from op_log import OpLog
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fusednorm import force
from fusednorm.host import native

LEAVES = [  # norm, parameters that are present, tensors that require grad
    ("layer", "wb", "xwb"),
    ("layer", "wb", "x"),
    ("layer", "wb", "w"),
    ("layer", "wb", "b"),
    ("layer", "wb", "xb"),
    ("layer", "w", "xw"),
    ("layer", "b", "xb"),
    ("layer", "b", "b"),
    ("layer", "", "x"),
    ("rms", "w", "xw"),
    ("rms", "w", "x"),
    ("rms", "w", "w"),
    ("rms", "", "x"),
]


# There are two autograd nodes: the ops' node outputs y and the statistics, the modules' node y alone.
y_ways = pytest.mark.parametrize("y_of", [lambda *operands: ours(*operands)[0], y_alone], ids=["op", "y alone"])


@pytest.mark.parametrize("norm, present, requires_grad", LEAVES)
def test_gradients_are_right_by_python_and_when_repeated(norm, present, requires_grad, gpu):
    for seed in range(3):
        tensors = operands(norm, present, requires_grad, seed=seed)
        leaves = [each for each in tensors if each is not None and each.requires_grad]
        grad_out = torch.randn(SHAPE)
        with contextlib.nullcontext() if seed == 0 else gpu.repeating(2):
            got = torch.autograd.grad(ours(norm, *tensors)[0], leaves, grad_out)
        dy = grad_out.double()
        want = exact_grads(norm, tensors, lambda out, leaves, dy=dy: torch.autograd.grad(out[0], leaves, dy))
        assert_grads_close(got, want)
    asked = tuple(name in requires_grad for name in "xwb")
    assert gpu.python_calls == [("forward", norm), ("backward", norm, asked)]


@y_ways
def test_gradients_that_nobody_asks_for_are_not_computed(y_of, gpu):
    x, weight, bias = operands("layer")
    y = y_of("layer", x, weight, bias)
    torch.autograd.grad(y.sum(), [weight], retain_graph=True)
    torch.autograd.grad(y.sum(), [bias], retain_graph=True)
    torch.autograd.grad(y.sum(), [x, bias])
    assert [mask for _, _, mask in gpu.python_calls[1:]] == [
        (False, True, False),
        (False, False, True),
        (True, False, True),
    ]


@norms
@pytest.mark.parametrize("of", [(1,), (0, 1), (-1,), (0, -1), (0, 1, -1)], ids=str)
def test_gradients_of_the_statistics_are_right(of, norm, gpu):
    for seed in range(2):
        tensors = operands(norm, requires_grad="x", seed=seed)

        def gradient(outputs, leaves):
            return torch.autograd.grad(sum(outputs[at].sin().sum() for at in sorted(set(of))), leaves)

        assert_grads_close(gradient(ours(norm, *tensors), tensors[:1]), exact_grads(norm, tensors, gradient))
    assert gpu.directions() == ["forward"] + ["backward"] * (0 in of)


@norms
@pytest.mark.parametrize("present", ["wb", "w", ""])
def test_derivatives_of_both_orders_pass_the_checks(norm, present, gpu):
    tensors = operands(norm, present, dtype=FP64, shape=(2, 3, 8))
    leaves = [each for each in tensors if each is not None]

    def outputs(*leaves):
        given = iter(leaves)
        return ours(norm, *(None if each is None else next(given) for each in tensors))

    before = native.repeats()
    # The first call goes to Python and later calls to C++: the results may differ by rounding.
    assert gradcheck(outputs, leaves, nondet_tol=1e-12)
    assert gradgradcheck(outputs, leaves, nondet_tol=1e-12)
    assert native.repeats() > before


@y_ways
@norms
def test_a_gradient_that_is_differentiated_itself_is_the_formula(y_of, norm, gpu):
    tensors = [each for each in operands(norm) if each is not None]
    y = y_of(norm, *tensors)
    with gpu.going_to_python():
        first = torch.autograd.grad(y.sin().sum(), tensors, create_graph=True)
    assert all(each.requires_grad for each in first)


@y_ways
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients_are_right(y_of, use_reentrant, gpu):
    for seed in range(2):
        tensors = operands("layer", seed=seed)
        with gpu.repeating(3) if seed else contextlib.nullcontext():
            y = checkpoint(lambda *t: y_of("layer", *t), *tensors, use_reentrant=use_reentrant)
            y.sin().sum().backward()
        want = exact_grads("layer", tensors, lambda out, leaves: torch.autograd.grad(out[0].sin().sum(), leaves))
        assert_grads_close(tuple(each.grad for each in tensors), want)


@y_ways
def test_hooks_of_saved_tensors_see_them_once(y_of, gpu):
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    def unpack(tensor):
        unpacked.append(tensor.shape)
        return tensor

    for seed in range(2):
        tensors = operands("layer", seed=seed)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = y_of("layer", *tensors)
        got = torch.autograd.grad(y.sum(), tensors)
        want = exact_grads("layer", tensors, lambda out, leaves: torch.autograd.grad(out[0].sum(), leaves))
        assert_grads_close(got, want)
    assert packed == unpacked == 2 * [SHAPE, (40,), (40,), (6, 1), (6, 1)]


@y_ways
def test_a_graph_is_used_once_unless_it_is_kept(y_of, gpu):
    x, weight, bias = operands("layer")
    y = y_of("layer", x, weight, bias)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert_close(torch.autograd.grad(y.sum(), x), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)


@y_ways
def test_saved_tensors_that_were_changed_are_noticed(y_of, gpu):
    x, weight, bias = operands("layer")
    y = y_of("layer", x, weight, bias)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@y_ways
def test_the_node_keeps_no_memory_after_its_graph(y_of, gpu):
    import gc
    import weakref

    x, weight, bias = operands("layer")
    kept = weakref.ref(x)
    y = y_of("layer", x, weight, bias)
    del x, y
    gc.collect()
    assert kept() is None


def test_a_deep_graph_is_freed_without_recursion(gpu):
    """A recursion would overflow the small stack of this thread."""
    x, *_ = operands("layer", "", shape=(1, 40))

    def grow_and_free():
        y = x
        for _ in range(4000):
            y = y_alone("layer", y, None, None)

    before = threading.stack_size(256 * 1024)
    thread = threading.Thread(target=grow_and_free)
    thread.start()
    threading.stack_size(before)
    thread.join()
    assert not gpu.failure and len(gpu.launched) == 3999


@y_ways
def test_backward_on_a_thread_without_a_context_gets_one(y_of, gpu):
    for seed in range(2):
        tensors = operands("layer", seed=seed)
        y = y_of("layer", *tensors)
        before, failures = gpu.contexts(), []

        def run(y=y, failures=failures):
            try:
                y.sin().sum().backward()
            except Exception as failure:
                failures.append(failure)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert not failures
        want = exact_grads("layer", tensors, lambda out, leaves: torch.autograd.grad(out[0].sin().sum(), leaves))
        assert_grads_close(tuple(each.grad for each in tensors), want)
    assert gpu.contexts() == before + 1  # only the second backward launched from C++; the first went to Python


def test_no_grad_records_nothing(known_norm, gpu):
    known_norm.x.requires_grad_()
    with torch.no_grad(), gpu.repeating():
        assert not layer_norm(known_norm).requires_grad


@norms
def test_y_alone_is_repeated_without_statistics(norm, gpu):
    for seed in range(2):
        tensors = operands(norm, requires_grad="", seed=seed)
        with gpu.repeating() if seed else gpu.going_to_python("forward"):
            y = y_alone(norm, *tensors)
        assert_close(y, stock(norm, *tensors)[0], atol=1e-5, rtol=1e-5)
    assert not {"mean_ptr", "rstd_ptr"} & set(gpu.launched[0].parameters)
    with gpu.going_to_python("forward"):
        assert all(statistic is not None for statistic in ours(norm, *tensors)[1:])


@pytest.mark.parametrize("norm, present, requires_grad", LEAVES)
def test_gradients_of_y_alone_are_right(norm, present, requires_grad, gpu):
    for seed in range(2):
        tensors = operands(norm, present, requires_grad, seed=seed)
        leaves = [each for each in tensors if each is not None and each.requires_grad]
        with gpu.repeating(2) if seed else contextlib.nullcontext():
            got = torch.autograd.grad(y_alone(norm, *tensors).sin().sum(), leaves)
        want = exact_grads(norm, tensors, lambda out, leaves: torch.autograd.grad(out[0].sin().sum(), leaves))
        assert_grads_close(got, want)


@norms
def test_y_alone_has_a_node_with_one_output(norm, gpu):
    y = y_alone(norm, *operands(norm))
    assert y.grad_fn.name() == "NormBackward" and len(y.grad_fn.next_functions) == (3 if norm == "layer" else 2)


@norms
@pytest.mark.parametrize("present", ["wb", ""])
def test_compiled_autograd_traces_the_backward_of_y_alone(norm, present, gpu):
    tensors = operands(norm, present)
    leaves = [each for each in tensors if each is not None]
    want = exact_grads(norm, tensors, lambda out, leaves: torch.autograd.grad(out[0].sin().sum(), leaves))
    loss, counters = y_alone(norm, *tensors).sin().sum(), torch._dynamo.utils.counters["compiled_autograd"]
    captures = counters["captures"]
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss.backward(), backend="eager")()
    assert counters["captures"] > captures
    assert_grads_close(tuple(each.grad for each in leaves), want)


@norms
def test_derivatives_of_y_alone_pass_the_checks(norm):
    tensors = [each for each in operands(norm, dtype=FP64, shape=(2, 3, 8)) if each is not None]
    assert gradcheck(lambda *t: y_alone(norm, *t), tensors, nondet_tol=1e-12)
    assert gradgradcheck(lambda *t: y_alone(norm, *t), tensors, nondet_tol=1e-12)


def test_y_alone_of_parameters_is_repeated(gpu):
    x, weight, bias = (torch.nn.Parameter(each) for each in operands("layer", requires_grad=""))
    y_alone("layer", x, weight, bias)
    with gpu.repeating():
        y_alone("layer", x, weight, bias)


class FunctionLog(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def autocast_of_cuda():
    torch.set_autocast_enabled("cuda", True)  # torch.autocast("cuda") does this only on a machine with a GPU
    yield
    torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize(
    "look", [FunctionLog, OpLog, lambda: force("multi_wave"), torch.inference_mode, autocast_of_cuda]
)
def test_y_alone_is_left_to_python_where_somebody_looks_on(look, known_norm):
    tensors = known_norm.x, (40,), known_norm.weight, known_norm.bias, EPS
    assert native.y_of("layer_norm_fwd", tensors) is not None
    with look():
        assert native.y_of("layer_norm_fwd", tensors) is None
        y = alone.layer_norm(*tensors)
    assert_close(y, right_y(known_norm))


@pytest.mark.parametrize(
    "changes",
    [
        *({"shape": shape} for shape in ([40], (torch.tensor(40),), (-1,), (-(2**62) - 1,), (-(2**63),))),
        *({"eps": 1}, {"x": None}, {"x": "x"}, {"x": torch._efficientzerotensor(SHAPE)}),
    ],
    ids=str,
)
def test_y_alone_of_anything_unusual_is_left_to_python(changes, known_norm):
    given = {"x": known_norm.x, "shape": (40,), "weight": known_norm.weight, "bias": known_norm.bias, "eps": EPS}
    assert native.y_of("layer_norm_fwd", tuple((given | changes).values())) is None


def test_y_alone_of_a_tensor_subclass_is_left_to_python(known_norm):
    x = Wrapped(known_norm.x)
    assert native.y_of("rms_norm_fwd", (x, (40,), None, EPS)) is None
    assert_close(alone.rms_norm(x, (40,), None, EPS).inner, F.rms_norm(known_norm.x, (40,), None, EPS))


def test_transforms_look_inside_y_alone(known_norm):
    x = known_norm.x
    got = torch.func.vmap(torch.func.grad(lambda x: alone.rms_norm(x, (40,), None, EPS).sin().sum()))(x)
    want = torch.func.vmap(torch.func.grad(lambda x: F.rms_norm(x, (40,), None, EPS).sin().sum()))(x)
    assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("requires_grad", ["", "x"])
def test_wrong_calls_for_y_alone_get_pythons_sentence(requires_grad):
    x, weight, bias = operands("layer", requires_grad=requires_grad)
    with test_errors.raises("layer_norm_fwd", "x must end in normalized_shape (7,), got shape (6, 40)"):
        alone.layer_norm(x, (7,))
    with test_errors.raises("rms_norm_fwd", "weight must have shape (40,), got (6, 40)"):
        alone.rms_norm(x, (40,), x)
    with pytest.raises(RuntimeError, match="int"):
        alone.rms_norm(x, (2**70,))
    with pytest.raises(RuntimeError, match="eps"):
        alone.layer_norm(x, (40,), weight, bias, None)
