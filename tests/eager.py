"""The override of ATen's norm ops, with a record of its calls, and the tests of it that serve CPU and CUDA tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import formulas
import opinfo
import pytest
import torch
import torch.nn.functional as F
from cases import BF16, FP16, FP32, FP64, NORMS, make_case

import fusednorm
from fusednorm.host import native
from fusednorm.integrations import aten
from fusednorm.tools.oracle import Case, Inputs, Outputs, assert_outputs_close, make_inputs

STOCK = {"layer": F.layer_norm, "rms": F.rms_norm}
OPS = {
    "layer": ["native_layer_norm", "native_layer_norm_backward"],
    "rms": ["_fused_rms_norm", "_fused_rms_norm_backward"],
}
norms = pytest.mark.parametrize("norm", NORMS)


@contextlib.contextmanager
def aten_looks_like_cuda() -> Iterator[None]:
    """ATen has a fused RMSNorm for CUDA tensors only; inside, CPU tensors have one as well.

    Its forward is ATen's own, its backward this package's reference formula.
    """
    forward = torch.library.get_kernel("aten::_fused_rms_norm", "CPU")

    def backward(grad_out, x, normalized_shape, rstd, weight, output_mask):
        mask = (*output_mask, False)
        return formulas.norm_backward(grad_out, x, normalized_shape, None, rstd, weight, None, mask)[:2]

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", forward.call_boxed, "CPU", with_keyset=True)
    library.impl("_fused_rms_norm_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


class Calls:
    """The calls of ATen's norm ops while the override is on, as (op, whether our kernels took it)."""

    def __init__(self) -> None:
        self.all: list[tuple[str, bool]] = []

    @property
    def taken(self) -> list[str]:
        return [name for name, taken in self.all if taken]

    def watch(self, launched):
        def watched(operands):
            outputs, loaded = launched(operands)
            self.all.append((aten.ATENS_NAMES[operands.op], outputs is not None))
            return outputs, loaded

        return watched


@contextlib.contextmanager
def watched_kernels() -> Iterator[Calls]:
    """Overrides run all calls in Python inside, and record them."""
    calls = Calls()
    pause = native.extension.pause if native.extension else lambda by: None
    with mock.patch.object(aten, "_launched", calls.watch(aten._launched)):
        pause(1)
        try:
            yield calls
        finally:
            pause(-1)


@contextlib.contextmanager
def override(key: str = "CPU") -> Iterator[Calls]:
    """Inside, the override is on for the tensors of one dispatch key."""
    with watched_kernels() as calls:
        overrides = aten.Overrides(key)
        try:
            yield calls
        finally:
            overrides.remove()


def normalize(norm: str) -> Callable:
    """The stock norm over the last dim, as a function of x and the parameters."""
    return lambda x, *parameters: STOCK[norm](x, x.shape[-1:], *parameters, eps=1e-5)


def operands(norm: str, *shape: int, dtype=FP32, grad=True, device="cpu") -> list[torch.Tensor]:
    """x, weight and, for LayerNorm, bias."""
    torch.manual_seed(0)
    shapes = (shape, shape[-1:], shape[-1:])[: 3 if norm == "layer" else 2]
    return [torch.randn(s, device=device, dtype=dtype).requires_grad_(grad) for s in shapes]


def stock_call(case: Case, inputs: Inputs) -> Outputs:
    """Forward and backward by torch.nn.functional, which run our kernels while the override is on."""
    leaves = [t.detach().requires_grad_() for t in (inputs.x, inputs.weight, inputs.bias) if t is not None]
    y = STOCK[case.norm](leaves[0], case.normalized_shape, *leaves[1:], eps=case.eps)
    return Outputs(y.detach(), None, None, *torch.autograd.grad(y, leaves, inputs.grad_out))


class OnEveryDevice:
    """Tests for the files that inherit them. Each file names its device, and how the override is put on."""

    device: str
    override: Callable[[], AbstractContextManager[Calls]]

    @pytest.mark.filterwarnings("ignore:invalid value encountered in sqrt")  # some samples have a negative eps
    @pytest.mark.parametrize("name", opinfo.NAMES)
    def test_torchs_own_samples_come_out_right(self, name):
        op = opinfo.op_info(name)
        for dtype, sample in opinfo.samples(name, self.device):
            stock = opinfo.run(op.op, sample)
            with self.override() as calls:
                got = opinfo.run(op.op, sample)
            taken = sample.input.numel() > 0 and not dtype.is_complex
            assert len(calls.taken) == (2 if taken else 0)
            if taken:
                opinfo.assert_right(got, opinfo.run(op.op, opinfo.in_float64(sample)), stock, sample)
            else:
                torch.testing.assert_close(got, stock, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("name", ["native_layer_norm", "nn.functional.rms_norm"])
    def test_wrong_samples_get_atens_own_errors(self, name):
        op, wrong = opinfo.op_info(name), opinfo.wrong_samples(name, self.device)
        assert wrong
        for each in wrong:
            sample = each.sample_input
            with self.override(), pytest.raises(each.error_type, match=each.error_regex):
                op.op(sample.input, *sample.args, **sample.kwargs)

    @norms
    def test_atens_bits_come_back(self, norm):
        case = make_case(norm, (4, 33), (FP32, FP32, FP32))
        inputs = make_inputs(case, self.device)
        before = stock_call(case, inputs)
        with self.override() as calls:
            stock_call(case, inputs)
        after = stock_call(case, inputs)
        assert calls.all == [(name, True) for name in OPS[norm]]
        for name, want in vars(before).items():
            assert want is None or torch.equal(getattr(after, name), want), name

    @norms
    def test_force_reaches_the_forward_and_reference_is_atens_kernel(self, norm):
        leaves = operands(norm, 4, 33, grad=False, device=self.device)
        want = normalize(norm)(*leaves)
        with self.override() as calls:
            with fusednorm.force("reference"):
                assert torch.equal(normalize(norm)(*leaves), want)
            with fusednorm.force("multi_wave"):
                normalize(norm)(*leaves)
        assert calls.all == [(OPS[norm][0], False), (OPS[norm][0], True)]

    def test_layer_norm_takes_parameters_of_another_dtype(self):
        case = make_case("layer", (6, 40), (BF16, FP32, BF16))
        inputs = make_inputs(case, self.device)
        with self.override() as calls:
            outputs = stock_call(case, inputs)
        assert calls.taken == OPS["layer"]
        assert_outputs_close(outputs, case, inputs)

    @norms
    def test_derivatives_of_both_orders_are_right(self, norm):
        leaves = operands(norm, 2, 4, dtype=FP64, device=self.device)
        with self.override() as calls:
            assert torch.autograd.gradcheck(normalize(norm), leaves)
            assert torch.autograd.gradgradcheck(normalize(norm), leaves)
        assert set(OPS[norm]) <= set(calls.taken)

    @norms
    def test_transforms_and_forward_mode_see_atens_derivatives(self, norm):
        x, *parameters = operands(norm, 4, 6, dtype=FP64, grad=False, device=self.device)

        def loss(x):
            return normalize(norm)(x, *parameters).sin().sum()

        def all_of_them():
            return (
                torch.func.grad(loss)(x),
                torch.func.vmap(torch.func.grad(loss))(x),
                torch.func.jvp(loss, (x,), (x.cos(),))[1],
                torch.func.jacrev(torch.func.grad(loss))(x[0]),
            )

        want = all_of_them()
        with self.override() as calls:
            got = all_of_them()
        assert calls.taken
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)

    @norms
    @pytest.mark.parametrize("autocast", [BF16, FP16], ids=str)
    @pytest.mark.parametrize("x_dtype", [FP32, FP16, BF16], ids=str)
    def test_autocast_gives_the_dtypes_it_gave(self, norm, autocast, x_dtype):
        def dtypes():
            leaves = operands(norm, 4, 16, dtype=x_dtype, device=self.device)
            with torch.autocast(self.device, autocast):
                y = normalize(norm)(*leaves)
            y.float().sum().backward()
            return [y.dtype, *(leaf.grad.dtype for leaf in leaves)]

        want = dtypes()
        with self.override() as calls:
            assert dtypes() == want
        assert calls.taken == OPS[norm]
