"""The eager override on CUDA: unmodified code runs our kernels, and everything else works as before."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from calls import assert_same_bits, captured, no_waiting, overwrite
from cases import BF16, FP16, FP32, FP64, NORMS, lay_out, make_case
from eager import OPS, STOCK, OnEveryDevice, norms, stock_call, watched_kernels
from torch import nn

import fusednorm
from fusednorm.host import native
from fusednorm.tools.oracle import assert_outputs_close, fused, make_inputs

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    fusednorm.disable_eager()


@contextlib.contextmanager
def watched():
    with watched_kernels() as calls, fusednorm.enable_eager():
        yield calls


class TestOverride(OnEveryDevice):
    device, override = "cuda", staticmethod(watched)


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


@pytest.mark.skipif(native.extension is None, reason="the host side in C++ is not built")
@pytest.mark.parametrize("case", EAGER, ids=str)
def test_known_calls_run_in_cpp(case):
    inputs = make_inputs(case, "cuda", seed=1)
    with fusednorm.enable_eager():
        stock_call(case, make_inputs(case, "cuda"))
        before = native.repeats()
        outputs = stock_call(case, inputs)
    assert native.repeats() - before == 2
    assert_same_bits(outputs, fused(case, inputs), ("y", "dx", "dweight", "dbias"))
    assert_outputs_close(outputs, case, inputs)


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


@pytest.mark.parametrize("case", [make_case("layer", (1031, 1024)), make_case("rms", (4099, 4096))], ids=str)
def test_cuda_graphs_capture_ours_and_replay_on_new_inputs(case):
    inputs, fresh = make_inputs(case, "cuda"), make_inputs(case, "cuda", seed=1)
    with watched() as calls:
        graph, outputs = captured(lambda: stock_call(case, inputs))
    assert calls.taken == 2 * OPS[case.norm]
    overwrite(inputs, fresh)
    graph.replay()
    assert_outputs_close(outputs, case, fresh)


@pytest.mark.parametrize("case", EAGER[:2], ids=str)
def test_calls_do_not_wait_for_the_gpu(case):
    inputs = make_inputs(case, "cuda")
    with watched() as calls:
        stock_call(case, inputs)
        torch.cuda.synchronize()
        with no_waiting():
            stock_call(case, inputs)
    assert len(calls.taken) == 4


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


def test_a_tensor_on_another_than_the_current_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = make_case("layer", (512, 1024))
    inputs = make_inputs(case, "cuda:1")
    assert torch.cuda.current_device() == 0
    with watched() as calls:
        outputs = stock_call(case, inputs)
    assert calls.taken == OPS["layer"]
    assert_outputs_close(outputs, case, inputs)
