"""Norms with a gate whose x and gate are columns of one tensor: their backwards run in the C++ host side."""

from __future__ import annotations

import fake_gpu
import pytest
import torch
from cases import BF16
from norms import EPS
from test_forms_in_cpp import frames_of

import fusednorm
from fusednorm import batch_invariant
from fusednorm.host import native

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


ENTERED = {"gate": (lambda: run("rms"), 30), "heads": (run_heads, 29)}


@pytest.mark.parametrize("step, most", ENTERED.values(), ids=ENTERED)
def test_a_known_forward_and_backward_enter_few_frames(step, most, gpu):
    step()
    with gpu.repeating(2):
        assert frames_of(step) <= most


@pytest.mark.parametrize("step", [lambda: run("layer"), run_heads], ids=ENTERED)
def test_calls_through_the_dispatcher_have_the_same_programs(step, gpu, monkeypatch):
    step()
    found = []
    for _ in range(2):
        gpu.launched.clear()
        with gpu.repeating(2):
            step()
        found.append([(each.build, each.config) for each in gpu.launched])
        monkeypatch.setattr(native, "outputs_of", lambda *_: None)
    assert found[0] == found[1]


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
