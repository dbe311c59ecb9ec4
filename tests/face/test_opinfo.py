"""Our ops on PyTorch's own samples for the norms, including its unusual and wrong ones."""

from __future__ import annotations

import contextlib

import opinfo
import pytest
import torch

OPS = torch.ops.fusednorm
OURS = {
    "nn.functional.layer_norm": lambda *args, **kwargs: OPS.layer_norm_fwd(*args, **kwargs)[0],
    "native_layer_norm": OPS.layer_norm_fwd,
    "nn.functional.rms_norm": lambda *args, **kwargs: OPS.rms_norm_fwd(*args, **kwargs)[0],
}


class TestFunctionals(opinfo.OnTorchsSamples):
    device, ways = "cpu", {"functionals": contextlib.nullcontext}


class TestForms(opinfo.FormsOnTorchsSamples):
    device = "cpu"
    # These are tried in test_norm_forms.py on a CPU, and here on a GPU.
    test_derivatives_of_both_orders_are_those_of_the_function = None
    test_transforms_are_those_of_torchs_function = None


names = pytest.mark.parametrize("name", opinfo.NAMES)


@names
def test_real_samples_come_out_right(name):
    samples = opinfo.answered_samples(name, "cpu")
    assert samples
    for sample, stock, exact in samples:
        opinfo.assert_right(opinfo.run(OURS[name], sample), exact, stock, sample)


def test_complex_samples_are_refused():
    name = "nn.functional.rms_norm"
    samples = [sample for dtype, sample in opinfo.samples(name, "cpu") if dtype.is_complex]
    assert samples
    for sample in samples:
        with pytest.raises(RuntimeError, match="x must be float16, bfloat16, float32 or float64, got torch.complex"):
            OURS[name](sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("name", ["native_layer_norm", "nn.functional.rms_norm"])
def test_wrong_samples_are_refused(name):
    wrong = opinfo.wrong_samples(name, "cpu")
    assert wrong
    for each in wrong:
        sample = each.sample_input
        with pytest.raises(RuntimeError, match="normalized_shape|must have shape"):
            OURS[name](sample.input, *sample.args, **sample.kwargs)


@names
def test_a_wrong_result_is_noticed(name):
    op = opinfo.op_info(name)
    sample = next(sample for dtype, sample in opinfo.samples(name, "cpu") if dtype == torch.bfloat16)
    stock, exact = opinfo.run(op.op, sample), opinfo.run(op.op, opinfo.in_float64(sample))
    for key, value in stock.items():
        if value is not None:
            wrong = stock | {key: value + value.abs().max() / 8}
            with pytest.raises(AssertionError):
                opinfo.assert_right(wrong, exact, stock, sample)
