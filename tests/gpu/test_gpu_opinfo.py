"""PyTorch's own samples of OpInfo and ModuleInfo, and functorch's checks on them, on CUDA tensors."""

from __future__ import annotations

import contextlib

import opinfo
import pytest
from eager import watched_kernels

import fusednorm

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def override():
    with watched_kernels() as calls, fusednorm.enable_eager():
        yield
    fusednorm.disable_eager()
    assert calls.taken, "no call has reached our kernels"


class TestOnTorchsSamples(opinfo.OnTorchsSamples):
    device, ways = "cuda", {"functionals": contextlib.nullcontext, "override": override}


class TestForms(opinfo.FormsOnTorchsSamples):
    device = "cuda"


@pytest.mark.parametrize("name", opinfo.NAMES)
def test_functionals_on_samples_come_out_right(name):
    """The override's are in test_gpu_eager.py."""
    for dtype, sample in opinfo.samples(name, "cuda"):
        if not dtype.is_complex:
            stock = opinfo.run(opinfo.op_info(name).op, sample)
            exact = opinfo.run(opinfo.op_info(name).op, opinfo.in_float64(sample))
            opinfo.assert_right(opinfo.run(opinfo.FUNCTIONALS[name], sample), exact, stock, sample)
