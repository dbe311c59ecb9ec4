"""Norms of parts of one tensor, gated or of heads: their nodes and backwards run in the C++ host side."""

from __future__ import annotations

import fake_gpu
import pytest
import torch
from cases import BF16, FP64
from norms import EPS
from op_log import OpLog
from test_derivatives import FunctionLog
from test_forms_in_cpp import frames_of
from torch.autograd import gradgradcheck
from torch.testing import assert_close

import fusednorm
from fusednorm import batch_invariant
from fusednorm.heads.problem import Packing
from fusednorm.host import native, prepared

WIDTH, COLS = 40, 12
FUNCTIONS = {"layer": fusednorm.layer_norm_gated_packed, "rms": fusednorm.rms_norm_gated_packed}
PLACES = (0, 12), (28, 40)


@pytest.fixture(autouse=True)
def gpu_that_only_launches(gpu, monkeypatch):
    monkeypatch.setattr(fake_gpu, "compute", lambda launched: None)


def run(norm, places=PLACES, shape=(2, 3, WIDTH), grads=None, **settings):
    """(outputs, packed, its gradient)"""
    packed = torch.randn(shape, dtype=BF16, requires_grad=True)
    weight = torch.ones(COLS, dtype=BF16, requires_grad=True)
    outputs = FUNCTIONS[norm](packed, *places, weight, None, EPS, **settings)
    grads = [torch.randn_like(each) for each in outputs] if grads is None else grads(outputs)
    grad, _ = torch.autograd.grad(outputs, (packed, weight), grads)
    return outputs, packed, grad


@pytest.mark.parametrize("norm", FUNCTIONS)
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
def test_known_calls_run_without_python_and_write_gradients_where_they_lie(norm, after, gpu):
    run(norm, norm_before_gate=after)
    before = len(gpu.launched)
    with gpu.repeating(2):
        _, packed, grad = run(norm, shape=(5, 7, WIDTH), norm_before_gate=after)
    assert grad.shape == packed.shape and grad.is_contiguous()
    forward, backward, *_, copy = (each.parameters for each in gpu.launched[before:])
    start, itemsize = packed.data_ptr(), packed.element_size()
    for given in (forward, backward):
        assert (given["x_ptr"], given["rows_in.0"]) == (start, start + 28 * itemsize), given
    assert backward["dx_ptr"] == copy["dx_ptr"] == grad.data_ptr()


@pytest.mark.parametrize(
    "change",
    [{"places": ((28, 40), (12, 24))}, {"shape": (2, 3, WIDTH + 8)}, {"group_size": 4}],
    ids=str,
)
def test_a_call_with_other_columns_goes_to_python_first(change, gpu):
    run("rms")
    before = len(gpu.python_calls)
    run("rms", **change)
    assert "backward" in gpu.directions()[before:]
    with gpu.repeating(2):
        run("rms", **change)


def test_gradients_of_other_columns_that_are_not_contiguous_are_copied(gpu):
    run("rms")
    with gpu.repeating(2):
        run("rms", grads=lambda outputs: [torch.randn_like(each.mT).mT for each in outputs])


def run_heads():
    packed = torch.randn(2, 5, 8 * 16, dtype=BF16, requires_grad=True)
    outputs = fusednorm.qk_norm_packed(packed, 4, 2, eps=1e-3)
    return torch.autograd.grad(outputs, packed, [torch.randn_like(each) for each in outputs])


ENTERED = {"gate": (lambda: run("rms"), 10), "heads": (run_heads, 11)}


@pytest.mark.parametrize("step, most", ENTERED.values(), ids=ENTERED)
def test_a_known_forward_and_backward_enter_few_frames(step, most, gpu):
    step()
    with gpu.repeating(2):
        assert frames_of(step) <= most


@pytest.mark.parametrize("step", [lambda: run("layer"), run_heads], ids=ENTERED)
def test_the_function_has_the_same_programs_by_the_dispatcher(step, gpu, monkeypatch):
    """It runs calls that a mode sees, such as that of torch.set_default_device. The Python host is not asked."""
    step()
    found = []
    monkeypatch.setattr(prepared, "run", None)
    for _ in range(2):
        gpu.launched.clear()
        with gpu.repeating(2):
            step()
        found.append([(each.build, each.config) for each in gpu.launched])
        monkeypatch.setattr(native, "y_of_parts", lambda *_: None)
    assert found[0] == found[1]


GATED = (4, 16), (20, 32)  # between, before and behind other columns


def gated_packed(packed, *weights, **settings):
    return FUNCTIONS["layer"](packed, *GATED, *weights, EPS, **settings)


def gated_slices(packed, *weights, **settings):
    gated = fusednorm.layer_norm_gated(*[packed[..., start:stop] for start, stop in GATED], *weights, EPS, **settings)
    return gated, packed[..., :4], packed[..., 16:20], packed[..., 32:]


def heads_packed(packed, *weights, **settings):
    return fusednorm.qk_norm_packed(packed, 4, 2, *weights, 1e-3, **settings)


def heads_slices(packed, *weights, **settings):
    q, k, v = Packing(4, 2, **settings).split(packed)
    both = [each.flatten(-3, -2) if settings else each for each in (q, k, v)]
    return *fusednorm.qk_norm(*both[:2], *weights, 1e-3), both[2]


WAYS = {  # (packed, of slices, columns, those of a weight, settings)
    "gate": (gated_packed, gated_slices, WIDTH, COLS, {}),
    "gate before, groups": (gated_packed, gated_slices, WIDTH, COLS, {"norm_before_gate": False, "group_size": 4}),
    "heads": (heads_packed, heads_slices, 8 * 6, 6, {}),
    "groups of heads": (heads_packed, heads_slices, 8 * 6, 6, {"grouped": True}),
}
ways = pytest.mark.parametrize("ours, of_slices, width, cols, settings", WAYS.values(), ids=WAYS)


def leaves(width, cols, dtype=FP64):
    shapes = (2, 3, width), (cols,), (cols,)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


@ways
def test_derivatives_are_those_of_slices(ours, of_slices, width, cols, settings, gpu):
    """Of gradients that are themselves differentiated, which are computed by formulas. Also of some outputs alone."""
    given = leaves(width, cols)
    outputs, wanted = ours(*given, **settings), of_slices(*given, **settings)
    assert settings.get("grouped") or outputs[0].grad_fn.name() == "NormBackward"
    for alone in (slice(None), slice(1), slice(len(outputs) - 1, None), slice(0, None, 2)):
        grads = [torch.randn_like(each) for each in outputs[alone]]
        more = {"create_graph": True, "materialize_grads": True}
        got, want = (torch.autograd.grad(each[alone], given, grads, **more) for each in (outputs, wanted))
        assert_close(got, want)
    assert gradgradcheck(lambda *tensors: ours(*tensors, **settings), given, fast_mode=True, nondet_tol=1e-12)


@ways
def test_other_columns_are_views_that_are_not_changed_in_place(ours, of_slices, width, cols, settings, gpu):
    packed, *weights = leaves(width, cols)
    other = ours(packed, *weights, **settings)[-1]
    assert other.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    with pytest.raises(RuntimeError, match="output of a function that returns multiple views"):
        other.mul_(2)
    for given in (packed.detach(), packed):
        with torch.no_grad():
            other = ours(given, *weights, **settings)[-1]
            other.mul_(2)
            assert torch.equal(other, of_slices(given, *weights, **settings)[-1])


@ways
def test_parts_that_autograd_does_not_know_as_views_end_no_process(ours, of_slices, width, cols, settings, gpu):
    """As in a kernel of an op that is not autograd's, and of a tensor that no autograd may keep."""
    packed, *weights = leaves(width, cols)
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._ExcludeDispatchKeyGuard(below):
        outputs = ours(packed, *weights, **settings)
    assert torch.autograd.grad(outputs, packed, outputs)[0].shape == packed.shape
    with torch.inference_mode():
        packed = packed.clone()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        ours(packed, *weights, **settings)


@ways
def test_compiled_autograd_traces_the_backward(ours, of_slices, width, cols, settings, gpu):
    ours(*leaves(width, cols, BF16), **settings)
    given = leaves(width, cols, BF16)
    loss = sum(each.sin().sum() for each in ours(*given, **settings))
    counters = torch._dynamo.utils.counters["compiled_autograd"]
    captures = counters["captures"]
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss.backward(), backend="eager")()
    assert counters["captures"] > captures and all(each.grad.shape == each.shape for each in given)


@ways
def test_calls_that_somebody_sees_go_through_the_function(ours, of_slices, width, cols, settings, gpu, monkeypatch):
    ask, answers = native.y_of_parts, []
    monkeypatch.setattr(native, "y_of_parts", lambda *arguments: answers.append(ask(*arguments)))
    for look in (OpLog, FunctionLog, lambda: fusednorm.force("reference")):
        with look():
            given = leaves(width, cols)
            sum(each.sum() for each in ours(*given, **settings)).backward()
    assert answers == [None] * 3 and all(each.grad is not None for each in given)


def test_a_gradient_that_is_itself_differentiated_is_recorded(gpu):
    run("rms")
    packed, weight = torch.randn(2, 3, WIDTH, dtype=BF16, requires_grad=True), torch.ones(COLS, dtype=BF16)
    with gpu.repeating():  # the forward
        y, *_ = FUNCTIONS["rms"](packed, *PLACES, weight, None, EPS)
        (grad,) = torch.autograd.grad(y, packed, torch.ones_like(y), create_graph=True)
    assert grad.requires_grad and torch.autograd.grad(grad.sum(), packed)[0].shape == packed.shape


def test_a_backward_after_a_block_of_batch_invariant_does_as_its_forward_did(gpu):
    def train(of_forward: bool, of_backward: bool):
        packed = torch.randn(2, 3, WIDTH, dtype=BF16, requires_grad=True)
        with batch_invariant(of_forward):
            y, *_ = FUNCTIONS["rms"](packed, *PLACES, None, None, EPS)
        gpu.launched.clear()
        with batch_invariant(of_backward):
            torch.autograd.grad(y, packed, torch.ones_like(y))
        return [each.build for each in gpu.launched] or ["in Python"]

    free, own = (train(on, on) and train(on, on) for on in (False, True))
    assert free != own
    assert train(True, False) == own and train(False, True) == free
