"""The eager override on CUDA: unmodified code runs our kernels, and everything else works as before."""

from __future__ import annotations

import contextlib
import itertools

import opinfo
import pytest
import torch
import torch.nn.functional as F
from calls import assert_same_bits
from cases import BF16, FP16, FP32, FP64, NORMS, lay_out, make_case
from eager import watched_kernels
from torch import nn

import fusednorm
from fusednorm.testing import Inputs, Outputs, assert_outputs_close, fused, make_inputs

pytestmark = pytest.mark.gpu

STOCK = {"layer": F.layer_norm, "rms": F.rms_norm}
OPS = {
    "layer": ["native_layer_norm", "native_layer_norm_backward"],
    "rms": ["_fused_rms_norm", "_fused_rms_norm_backward"],
}
norms = pytest.mark.parametrize("norm", NORMS)


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    fusednorm.disable_eager()


@contextlib.contextmanager
def watched():
    with watched_kernels() as calls, fusednorm.enable_eager():
        yield calls


def stock_call(case, inputs: Inputs) -> Outputs:
    """Forward and backward by torch.nn.functional, which run our kernels while the override is on."""
    leaves = [t.detach().requires_grad_() for t in (inputs.x, inputs.weight, inputs.bias) if t is not None]
    y = STOCK[case.norm](leaves[0], case.normalized_shape, *leaves[1:], eps=case.eps)
    return Outputs(y.detach(), None, None, *torch.autograd.grad(y, leaves, inputs.grad_out))


EAGER = [
    make_case(norm, shape, (dtype, dtype, dtype))
    for (norm, dtype), shape in zip(
        itertools.product(NORMS, (BF16, FP16, FP32, FP64)),
        itertools.cycle([(4099, 1024), (6, 50, 768), (301, 5120), (257, 1987), (33, 65536)]),
    )
]


@pytest.mark.parametrize("case", EAGER, ids=str)
def test_functional_norms_run_our_kernels(case):
    inputs = make_inputs(case, "cuda")
    with watched() as calls:
        outputs = stock_call(case, inputs)
    assert calls.all == [(name, True) for name in OPS[case.norm]]
    assert_same_bits(outputs, fused(case, inputs), ("y", "dx", "dweight", "dbias"))
    assert_outputs_close(outputs, case, inputs)


@pytest.mark.parametrize("case", EAGER, ids=str)
def test_atens_bits_come_back(case):
    inputs = make_inputs(case, "cuda")
    before = stock_call(case, inputs)
    fusednorm.enable_eager()
    ours = stock_call(case, inputs)
    fusednorm.disable_eager()
    with watched_kernels() as calls:
        assert_same_bits(stock_call(case, inputs), before, ("y", "dx", "dweight", "dbias"))
    assert not calls.all
    assert_same_bits(ours, fused(case, inputs), ("y", "dx", "dweight", "dbias"))


def test_layer_norm_takes_parameters_of_another_dtype():
    case = make_case("layer", (128, 768), (BF16, FP32, BF16))
    inputs = make_inputs(case, "cuda")
    with watched():
        assert_outputs_close(stock_call(case, inputs), case, inputs)


@pytest.mark.parametrize("layout", ["row_strided", "packed_slice", "columns_first", "repeated_row", "repeated_element"])
@norms
def test_strided_operands_are_taken_as_they_are(norm, layout):
    case = make_case(norm, (2, 31, 4, 64))
    inputs = make_inputs(case, "cuda")
    inputs = lay_out(inputs, layout)
    with watched() as calls:
        outputs = stock_call(case, inputs)
    assert calls.taken == OPS[norm]
    assert_same_bits(outputs, fused(case, inputs), ("y", "dx", "dweight", "dbias"))
    assert_outputs_close(outputs, case, inputs)
    assert outputs.y.is_contiguous() and outputs.dx.is_contiguous()


@pytest.mark.parametrize("name", opinfo.NAMES)
def test_torchs_own_samples_come_out_right(name):
    op = opinfo.op_info(name)
    for dtype, sample in opinfo.samples(name, "cuda"):
        stock = opinfo.run(op.op, sample)
        with watched() as calls:
            got = opinfo.run(op.op, sample)
        taken = sample.input.numel() > 0 and not dtype.is_complex
        assert len(calls.taken) == (2 if taken else 0)
        if taken:
            opinfo.assert_right(got, opinfo.run(op.op, opinfo.in_float64(sample)), stock, sample)
        else:
            torch.testing.assert_close(got, stock, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["native_layer_norm", "nn.functional.rms_norm"])
def test_wrong_samples_get_atens_own_errors(name):
    op, wrong = opinfo.op_info(name), opinfo.wrong_samples(name, "cuda")
    assert wrong
    for each in wrong:
        sample = each.sample_input
        with watched(), pytest.raises(each.error_type, match=each.error_regex):
            op.op(sample.input, *sample.args, **sample.kwargs)


@norms
def test_complex_numbers_keep_atens_results(norm):
    x = torch.randn(8, 64, device="cuda", dtype=torch.complex64)

    def result():
        try:
            return STOCK[norm](x, (64,))
        except (RuntimeError, NotImplementedError) as error:
            return str(error)

    want = result()
    with watched() as calls:
        got = result()
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    assert not calls.taken


@pytest.mark.parametrize("shape, normalized_shape", [((0, 64), (64,)), ((4, 0), (0,)), ((0, 3, 64), (3, 64))], ids=str)
@norms
def test_tensors_without_elements_keep_atens_results(norm, shape, normalized_shape):
    x = torch.randn(*shape, device="cuda", requires_grad=True)
    weight = torch.ones(normalized_shape, device="cuda", requires_grad=True)

    def results():
        y = STOCK[norm](x, normalized_shape, weight)
        return (y, *torch.autograd.grad(y.sum(), (x, weight)))

    want = results()
    with watched() as calls:
        got = results()
    assert not calls.taken
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()) and torch.equal(a, b)


LAYER_MASKS = [list(mask) for mask in itertools.product((True, False), repeat=3)]


@pytest.mark.parametrize("dtype", [FP64, FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("shape, normalized_ndim", [((5, 7, 96), 1), ((96,), 1), ((5, 7, 96), 2), ((5, 7, 96), 3)])
def test_raw_ops_return_shapes_strides_and_dtypes_of_atens_kernels(dtype, shape, normalized_ndim):
    aten, rows = torch.ops.aten, shape[len(shape) - normalized_ndim :]
    x, dy = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    weight, bias = (torch.randn(rows, device="cuda").to(dtype) for _ in range(2))

    def everything():
        y, mean, rstd = torch.native_layer_norm(x, rows, weight, bias, 1e-5)
        rms_y, rms_rstd = aten._fused_rms_norm(x, rows, weight, None)
        outputs = [y, mean, rstd, rms_y, rms_rstd]
        for mask in LAYER_MASKS:
            outputs += aten.native_layer_norm_backward(dy, x, rows, mean, rstd, weight, bias, mask)
        for mask in LAYER_MASKS[::2]:
            outputs += aten._fused_rms_norm_backward(dy, x, rows, rms_rstd, weight, mask[:2])
        return [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in outputs]

    want = everything()
    with watched() as calls:
        assert everything() == want
    assert len(calls.taken) == len(calls.all) - 2  # all but the two backwards with nothing to compute


@norms
def test_derivatives_of_both_orders_are_right(norm):
    torch.manual_seed(0)
    operands = [torch.randn(*s, device="cuda", dtype=FP64, requires_grad=True) for s in ((4, 5), (5,), (5,))]

    def normalized(x, *parameters):
        return STOCK[norm](x, (5,), *parameters, eps=1e-5)

    with watched() as calls:
        assert torch.autograd.gradcheck(normalized, operands[: 3 if norm == "layer" else 2])
        assert torch.autograd.gradgradcheck(normalized, operands[: 3 if norm == "layer" else 2])
    assert set(OPS[norm]) <= set(calls.taken)


@norms
@pytest.mark.parametrize("autocast", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_autocast_gives_the_dtypes_it_gave(norm, autocast, dtype):
    case = make_case(norm, (32, 256), (dtype, dtype, dtype))
    inputs = make_inputs(case, "cuda")

    def dtypes():
        leaves = [t.clone().requires_grad_() for t in (inputs.x, inputs.weight, inputs.bias) if t is not None]
        with torch.autocast("cuda", autocast):
            y = STOCK[norm](leaves[0], (256,), *leaves[1:], eps=case.eps)
        y.float().sum().backward()
        return [y.dtype, *(leaf.grad.dtype for leaf in leaves)]

    want = dtypes()
    with watched() as calls:
        assert dtypes() == want
    assert calls.taken == OPS[norm]


@pytest.mark.parametrize("case", [make_case("layer", (1031, 1024)), make_case("rms", (4099, 4096))], ids=str)
def test_cuda_graphs_capture_ours_and_replay_on_new_inputs(case):
    inputs, fresh = make_inputs(case, "cuda"), make_inputs(case, "cuda", seed=1)
    stream = torch.cuda.Stream()
    with watched() as calls:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            stock_call(case, inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = stock_call(case, inputs)
    assert calls.taken == 2 * OPS[case.norm]
    for name in ("x", "grad_out", "weight", "bias"):
        if getattr(inputs, name) is not None:
            getattr(inputs, name).copy_(getattr(fresh, name))
    graph.replay()
    assert_outputs_close(outputs, case, fresh)


@pytest.mark.parametrize("case", EAGER[:2], ids=str)
def test_calls_do_not_wait_for_the_gpu(case):
    inputs = make_inputs(case, "cuda")
    with watched() as calls:
        stock_call(case, inputs)
        torch.cuda.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            stock_call(case, inputs)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    assert len(calls.taken) == 4


def test_force_reaches_the_forward_and_reference_is_atens_kernel():
    case = make_case("layer", (512, 1024))
    inputs = make_inputs(case, "cuda")
    want = F.layer_norm(inputs.x, (1024,), inputs.weight, inputs.bias, case.eps)
    with watched() as calls:
        with fusednorm.force("reference"):
            assert torch.equal(F.layer_norm(inputs.x, (1024,), inputs.weight, inputs.bias, case.eps), want)
        with fusednorm.force("multi_wave"):
            F.layer_norm(inputs.x, (1024,), inputs.weight, inputs.bias, case.eps)
    assert calls.all == [(OPS["layer"][0], False), (OPS["layer"][0], True)]


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_of_torchs_own_modules_runs_ours(training):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True, device="cuda").train(training)
    x, grad = torch.randn(2, 8, 64, 256, device="cuda")

    def outputs():
        if not training:
            with torch.inference_mode():
                return [layer(x)]
        layer.zero_grad(set_to_none=True)
        y = layer(x)
        y.backward(grad)
        return [y.detach(), *(p.grad.clone() for p in layer.parameters())]

    want = outputs()
    with watched() as calls:
        got = outputs()
    assert calls.taken.count(OPS["layer"][0]) == 2
    assert calls.taken.count(OPS["layer"][1]) == (2 if training else 0)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@norms
def test_transforms_see_atens_derivatives(norm):
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64, device="cuda", dtype=FP64), torch.randn(64, device="cuda", dtype=FP64)

    def loss(x):
        return STOCK[norm](x, (64,), weight, eps=1e-5).sin().sum()

    def all_of_them():
        grad = torch.func.grad(loss)
        return grad(x), torch.func.vmap(grad)(x), torch.func.jvp(loss, (x,), (x.cos(),))[1]

    want = all_of_them()
    with watched() as calls:
        got = all_of_them()
    assert calls.taken
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_tensor_on_another_than_the_current_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = make_case("layer", (512, 1024))
    inputs = make_inputs(case, "cuda:1")
    assert torch.cuda.current_device() == 0
    with watched() as calls:
        assert_outputs_close(stock_call(case, inputs), case, inputs)
    assert calls.taken == OPS["layer"]
