"""The C++ host side runs ATen's own ops while the eager override is on."""

from __future__ import annotations

import gc
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from eager import aten_looks_like_cuda
from norms import EPS, SHAPE, assert_grads_close, exact_grads, norms, operands
from op_log import OpLog
from torch.testing import assert_close

import fusednorm
from fusednorm.host import gpus, native
from fusednorm.integrations import aten
from fusednorm.operands import ForwardOperands
from fusednorm.planner.device import A100

STOCK = {"layer": F.layer_norm, "rms": F.rms_norm}


@pytest.fixture
def override(gpu, monkeypatch):
    """ATen's ops on CPU tensors are ours until the end of the test."""

    launched = aten._launched

    def asked(operands):
        gpu.python_calls.append(("forward" if isinstance(operands, ForwardOperands) else "backward", operands.norm))
        return launched(operands)

    monkeypatch.setattr(aten, "_launched", asked)
    with aten_looks_like_cuda(), warnings.catch_warnings():
        warnings.simplefilter("error")
        overrides = aten.Overrides("CPU")
        yield overrides
        overrides.remove()


def normalize(norm, x, *parameters):
    return STOCK[norm](x, x.shape[-1:], *(each for each in parameters if each is not None), eps=EPS)


def sine_grads(outputs, leaves):
    return torch.autograd.grad(outputs[0].sin().sum(), leaves)


@norms
def test_a_known_forward_and_backward_run_in_cpp(norm, override, gpu):
    turns = [operands(norm, seed=seed) for seed in (0, 1)]
    leaves = [[each for each in tensors if each is not None] for tensors in turns]
    sine_grads([normalize(norm, *turns[0])], leaves[0])
    with gpu.repeating(2):
        got = sine_grads([normalize(norm, *turns[1])], leaves[1])
    override.remove()
    assert_grads_close(got, exact_grads(norm, turns[1], sine_grads))


@norms
def test_what_our_ops_know_atens_ops_know_too(norm, override, gpu):
    tensors = operands(norm, requires_grad="")
    fusednorm_op = getattr(torch.ops.fusednorm, f"{norm}_norm_fwd")
    parameters = tensors[1:] if norm == "layer" else tensors[1:2]
    want = fusednorm_op(tensors[0], [40], *parameters, EPS)[0]
    with gpu.repeating():
        got = normalize(norm, *tensors)
    assert torch.equal(got, want)


@norms
@pytest.mark.parametrize("mask", [[True, False, True], [False, True, False], [False, False, False]], ids=str)
def test_an_unwanted_gradient_is_none(norm, mask, override, gpu):
    x, weight, bias = operands("layer", requires_grad="")
    dy, statistics = torch.randn(SHAPE), [torch.rand(6, 1) for _ in range(2)]
    for _ in range(2):
        if norm == "layer":
            got = torch.ops.aten.native_layer_norm_backward(dy, x, [40], *statistics, weight, bias, mask)
        else:
            got = torch.ops.aten._fused_rms_norm_backward(dy, x, [40], statistics[1], weight, mask[:2])
        assert [each is not None for each in got] == mask[: len(got)]


@norms
def test_what_ours_do_not_take_goes_to_atens_kernel(norm, override, gpu, monkeypatch):
    monkeypatch.setattr(gpus, "spec_of", lambda device: replace(A100, arch=75))
    tensors = operands(norm, requires_grad="")
    for _ in range(2):
        with gpu.going_to_python("forward"):
            got = normalize(norm, *tensors)
    override.remove()
    assert torch.equal(got, normalize(norm, *tensors))


def test_wrong_calls_get_atens_own_errors(override):
    with pytest.raises(RuntimeError, match="Given normalized_shape=.7., expected input with shape"):
        F.layer_norm(torch.ones(SHAPE), (7,))


def test_sizes_that_are_no_sizes_reach_atens_kernel(override, gpu):
    """Traced graphs pass the bits of symbolic sizes to ops whose sizes are integers."""
    x = torch.randn(SHAPE)
    with gpu.going_to_python("forward"):
        got = torch.ops.aten._fused_rms_norm(x, [-(2**62) - 7], None, EPS)[0]
    override.remove()
    assert torch.equal(got, torch.ops.aten._fused_rms_norm(x, [-(2**62) - 7], None, EPS)[0])


def test_there_is_one_at_a_time(override):
    with pytest.raises(RuntimeError, match="ATen's norms must be replaced once at a time, got CUDA as well"):
        aten.Overrides("CUDA")
    override.remove()
    with pytest.raises(RuntimeError, match="NoSuchKey"):
        native.overrides("NoSuchKey", lambda operands: None)
    aten.Overrides("CPU").remove()


def test_after_it_nothing_of_pythons_is_kept():
    def run(operands): ...

    kept = weakref.ref(run)
    overrides = native.overrides("CPU", run)
    overrides.remove()
    del run
    gc.collect()
    assert kept() is None


@norms
def test_after_it_atens_kernels_run(norm, override, gpu):
    tensors = operands(norm, requires_grad="")
    for _ in range(2):
        normalize(norm, *tensors)
    override.remove()
    with gpu.going_to_python():
        got = normalize(norm, *tensors)
    assert_close(got, normalize(norm, *(None if each is None else each.double() for each in tensors)).float())


def test_forced_calls_go_to_python(override, gpu):
    tensors = operands("layer", requires_grad="")
    normalize("layer", *tensors)
    with gpu.going_to_python("forward"), fusednorm.force("multi_wave"):
        normalize("layer", *tensors)
    with gpu.repeating():
        normalize("layer", *tensors)


def test_modes_see_atens_names(override):
    tensors = operands("layer")
    with OpLog() as log:
        normalize("layer", *tensors).sum().backward()
    names = [name for name in log.names if "norm" in name]
    assert names == ["aten.native_layer_norm.default", "aten.native_layer_norm_backward.default"]
