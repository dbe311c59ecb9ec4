"""The eager override on CPU tensors: the functions are those for CUDA tensors, under the dispatch key of CPUs."""

from __future__ import annotations

import threading
from dataclasses import replace

import afresh
import pytest
import torch
import torch.nn.functional as F
from cases import BF16, FP16, FP32, FP64, make_case
from eager import (
    OPS,
    OnEveryDevice,
    aten_looks_like_cuda,
    normalize,
    norms,
    operands,
    override,
    stock_call,
    watched_kernels,
)
from op_log import OpLog
from torch.utils.checkpoint import checkpoint

import fusednorm
from fusednorm.host import gpus
from fusednorm.integrations import aten
from fusednorm.planner.device import A100
from fusednorm.tools.oracle import assert_outputs_close, make_inputs


@pytest.fixture(autouse=True)
def atens_ops():
    with aten_looks_like_cuda():
        yield


class TestOverride(OnEveryDevice):
    device, override = "cpu", staticmethod(override)


@norms
@pytest.mark.parametrize("dtype", [FP64, FP32, FP16, BF16], ids=str)
def test_functional_norms_run_our_kernels_and_are_right(norm, dtype):
    case = make_case(norm, (3, 5, 48), (dtype, dtype, dtype))
    inputs = make_inputs(case)
    with override() as calls:
        outputs = stock_call(case, inputs)
    assert calls.taken == OPS[norm]
    assert_outputs_close(outputs, case, inputs)


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
def test_raw_ops_return_what_atens_cuda_kernels_do(dtype):
    x, weight, bias = operands("layer", 2, 3, 16, dtype=dtype, grad=False)
    kind = FP64 if dtype == FP64 else FP32
    transposed = x.transpose(0, 1)
    with override() as calls:
        for source, batch in ((x, (2, 3)), (transposed, (3, 2))):
            y, mean, rstd = torch.native_layer_norm(source, [16], weight, bias, 1e-5)
            rms_y, rms_rstd = torch.ops.aten._fused_rms_norm(source, [16], weight, None)
            for statistic in (mean, rstd, rms_rstd):
                assert (statistic.shape, statistic.dtype) == ((*batch, 1), kind) and statistic.is_contiguous()
            for output in (y, rms_y):
                assert (output.shape, output.dtype) == (source.shape, dtype) and output.is_contiguous()
            grad = y.mT.contiguous().mT
            mask = [True, True, True]
            grads = torch.ops.aten.native_layer_norm_backward(grad, source, [16], mean, rstd, weight, bias, mask)
            assert all(grad.dtype == dtype and grad.is_contiguous() for grad in grads)
    assert len(calls.taken) == 6


@pytest.mark.parametrize("mask", [[a, b, c] for a in (True, False) for b in (True, False) for c in (True, False)])
def test_backward_returns_what_the_mask_asks_for(mask):
    x, weight, bias = operands("layer", 4, 8, grad=False)
    y, mean, rstd = torch.native_layer_norm(x, [8], weight, bias, 1e-5)
    with override() as calls:
        grads = torch.ops.aten.native_layer_norm_backward(y, x, [8], mean, rstd, weight, bias, mask)
        rms_grads = torch.ops.aten._fused_rms_norm_backward(y, x, [8], rstd, weight, mask[:2])
    assert [grad is not None for grad in grads] == mask
    assert [grad is not None for grad in rms_grads] == mask[:2]
    assert calls.all == [(OPS["layer"][1], any(mask)), (OPS["rms"][1], any(mask[:2]))]


@norms
def test_frozen_parameters_get_no_gradient(norm):
    leaves = operands(norm, 4, 8)
    for parameter in leaves[1:]:
        parameter.requires_grad_(False)
    with override(), OpLog() as log:
        normalize(norm)(*leaves).sum().backward()
    masks = [args[-1] for name, args in log.calls if "norm_backward" in name]
    assert masks == [[True] + [False] * (len(leaves) - 1)]
    assert [leaf.grad is not None for leaf in leaves] == [True] + [False] * (len(leaves) - 1)


def test_old_gpus_keep_atens_kernels(monkeypatch):
    x, weight, bias = operands("layer", 4, 33, grad=False)
    want = F.layer_norm(x, (33,), weight, bias)
    monkeypatch.setattr(gpus, "spec_of", lambda device: replace(A100, arch=75))
    with override() as calls:
        assert torch.equal(F.layer_norm(x, (33,), weight, bias), want)
    assert calls.all == [(OPS["layer"][0], False)]


@norms
def test_modes_and_checkpointing_work_as_before(norm):
    def names():
        leaves = operands(norm, 4, 16)
        with OpLog() as log:
            checkpoint(normalize(norm), *leaves, use_reentrant=False).sum().backward()
        return log.names

    want = names()
    with override() as calls:
        assert names() == want
    assert calls.taken == [OPS[norm][0], *OPS[norm]]


def test_backwards_on_autograds_threads_run_our_kernels():
    leaves = operands("layer", 4, 16)
    with override() as calls:
        y = normalize("layer")(*leaves).sum()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    assert calls.taken == OPS["layer"]
    assert leaves[0].grad is not None


class TestSwitch:
    """The public switch. In these tests it installs the override for CPU tensors."""

    @pytest.fixture(autouse=True)
    def for_cpu_tensors(self, monkeypatch):
        overrides = aten.Overrides
        monkeypatch.setattr(aten, "Overrides", lambda key: overrides("CPU"))
        with watched_kernels() as self.calls:
            yield
            fusednorm.disable_eager()

    @property
    def on(self) -> bool:
        before = len(self.calls.all)
        F.layer_norm(torch.ones(1, 4), (4,))
        return len(self.calls.all) > before

    def test_enable_and_disable(self):
        assert not self.on
        fusednorm.enable_eager()
        fusednorm.enable_eager()
        assert self.on
        fusednorm.disable_eager()
        assert not self.on
        fusednorm.disable_eager()
        assert not self.on

    def test_blocks_nest(self):
        with fusednorm.enable_eager():
            with fusednorm.enable_eager():
                assert self.on
            assert self.on
        assert not self.on

    def test_a_block_inside_leaves_it_enabled(self):
        fusednorm.enable_eager()
        with fusednorm.enable_eager():
            assert self.on
        assert self.on

    def test_enabling_inside_a_block_outlasts_it(self):
        with fusednorm.enable_eager():
            fusednorm.enable_eager()
        assert self.on

    def test_disabling_ends_blocks(self):
        with fusednorm.enable_eager():
            fusednorm.disable_eager()
            assert not self.on
            with fusednorm.enable_eager():
                assert self.on
            assert not self.on
        assert not self.on

    def test_an_error_ends_the_block(self):
        with pytest.raises(ZeroDivisionError), fusednorm.enable_eager():
            _ = 1 // 0
        assert not self.on

    def test_blocks_of_several_threads_overlap(self):
        entered, leave = threading.Event(), threading.Event()

        def hold():
            with fusednorm.enable_eager():
                entered.set()
                leave.wait(30)

        with fusednorm.enable_eager():
            thread = threading.Thread(target=hold)
            thread.start()
            assert entered.wait(30)
        assert self.on  # the other thread's block is still open
        leave.set()
        thread.join()
        assert not self.on


def test_a_machine_without_a_gpu_may_enable_it():
    code = """
import sys, torch, warnings
warnings.simplefilter("error")
import fusednorm
x = torch.randn(2, 8)
want = torch.nn.functional.layer_norm(x, (8,))
with fusednorm.enable_eager():
    print(torch.equal(torch.nn.functional.layer_norm(x, (8,)), want))
print("triton" in sys.modules, torch.cuda.is_initialized())
"""
    asked = afresh.run(code)
    assert asked.stdout.split() == ["True", "False", "False"], asked.stderr
