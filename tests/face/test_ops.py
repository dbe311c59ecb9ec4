"""The registered ops on CPU and meta tensors: values, shapes, dtypes, masks, strides, and torch's own checks of ops."""

from __future__ import annotations

import itertools
from dataclasses import replace

import afresh
import pytest
import torch
from torch.testing import assert_close

from fusednorm import reference
from fusednorm.operands import BackwardOperands, ForwardOperands
from fusednorm.problem.calls import check_backward, check_forward
from fusednorm.tools.oracle import Case, Outputs, assert_outputs_close, fused, make_inputs

OPS = torch.ops.fusednorm
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

CASES = [
    *(Case("layer", (33, 40), 1, dtype, dtype, dtype) for dtype in (FP16, BF16, FP32, FP64)),
    *(Case("rms", (33, 40), 1, dtype, dtype, eps=None) for dtype in (FP16, BF16, FP32, FP64)),
    Case("layer", (33, 40), 1, BF16, FP32, FP32),
    Case("layer", (33, 40), 1, FP16, FP64, BF16, grad_dtype=FP32),
    Case("layer", (33, 40), 1, FP32, BF16, FP16, grad_dtype=BF16),
    Case("layer", (33, 40), 1, FP64, FP16, FP32, grad_dtype=FP16),
    Case("rms", (33, 40), 1, BF16, FP32, grad_dtype=FP64),
    Case("rms", (33, 40), 1, FP32, FP16, grad_dtype=FP16),
    Case("layer", (33, 40)),
    Case("layer", (33, 40), 1, BF16, None, FP32),
    Case("layer", (33, 40), 1, BF16, BF16, None),
    Case("rms", (33, 40), 1, BF16),
    Case("layer", (2, 3, 4, 5, 6), 2, FP32, FP32, FP32),
    Case("rms", (2, 3, 4, 5, 6), 3, BF16, FP32),
    Case("layer", (40,), 1, FP32, FP32, FP32),
    Case("rms", (4, 10), 2, FP32, FP32),
    Case("layer", (5, 1), 1, FP32, FP32, FP32),
    Case("rms", (1, 7), 1, FP32, FP32),
]


def case_inputs(norm, dtype=FP32):
    case = Case(norm, (4, 3, 8), 1, dtype, FP32, FP32 if norm == "layer" else None)
    return case, make_inputs(case)


def forward(norm, x, weight, bias, eps=1e-5):
    """(y, mean, rstd) of either forward op; mean is None for RMSNorm."""
    if norm == "layer":
        return OPS.layer_norm_fwd(x, x.shape[-1:], weight, bias, eps)
    y, rstd = OPS.rms_norm_fwd(x, x.shape[-1:], weight, eps)
    return y, None, rstd


def backward(norm, grad_out, x, mean, rstd, weight, bias, mask=(True, True, True)):
    """(dx, dweight, dbias) of layer_norm_bwd, (dx, dweight) of rms_norm_bwd."""
    if norm == "layer":
        return OPS.layer_norm_bwd(grad_out, x, x.shape[-1:], mean, rstd, weight, bias, mask)
    return OPS.rms_norm_bwd(grad_out, x, x.shape[-1:], rstd, weight, mask[:2])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ops_match_the_oracle(case):
    inputs = make_inputs(case)
    assert_outputs_close(fused(case, inputs), case, inputs)


@pytest.mark.parametrize(
    ("ours", "aten"),
    [
        (OPS.layer_norm_fwd, torch.ops.aten.native_layer_norm),
        (OPS.layer_norm_bwd, torch.ops.aten.native_layer_norm_backward),
        (OPS.rms_norm_fwd, torch.ops.aten._fused_rms_norm),
        (OPS.rms_norm_bwd, torch.ops.aten._fused_rms_norm_backward),
    ],
    ids=str,
)
def test_schema_has_atens_types_at_atens_positions(ours, aten):
    ours, aten = ours.default._schema, aten.default._schema
    assert [str(argument.type) for argument in ours.arguments] == [str(argument.type) for argument in aten.arguments]
    assert [str(output.type) for output in ours.returns] == [str(output.type) for output in aten.returns]


def test_ops_and_aten_take_each_others_arguments():
    _, inputs = case_inputs("layer")
    arguments = (inputs.x, [8], inputs.weight, inputs.bias, 1e-5)
    ours, aten = OPS.layer_norm_fwd(*arguments), torch.ops.aten.native_layer_norm(*arguments)
    assert_close(ours, aten)
    arguments = (inputs.grad_out, inputs.x, [8], *aten[1:], inputs.weight, inputs.bias, [True, True, True])
    assert_close(OPS.layer_norm_bwd(*arguments), torch.ops.aten.native_layer_norm_backward(*arguments))
    arguments = (inputs.x, [8], inputs.weight, None)
    assert_close(OPS.rms_norm_fwd(*arguments), torch.ops.aten._fused_rms_norm(*arguments))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(
    "layout", ["rows", "column", "strided rows", "strided batch", "float16", "bfloat16", "float64"]
)
def test_bwd_takes_statistics_in_any_layout_and_float_dtype(norm, layout):
    _, inputs = case_inputs(norm)
    _, *statistics = forward(norm, inputs.x, inputs.weight, inputs.bias)
    convert = {
        "rows": lambda t: t.flatten(),
        "column": lambda t: t.reshape(-1, 1),
        "strided rows": lambda t: t.flatten().repeat_interleave(3)[::3],
        "strided batch": lambda t: t.expand(4, 3, 5).contiguous()[..., :1],
    }.get(layout, lambda t: t.to(getattr(torch, layout)))
    given = [None if t is None else convert(t) for t in statistics]
    same = [None if t is None else t.float().reshape(4, 3, 1).contiguous() for t in given]
    got, want = (backward(norm, inputs.grad_out, inputs.x, *s, inputs.weight, inputs.bias) for s in (given, same))
    assert_close(got, want, rtol=0, atol=0)


def test_large_equal_numbers_are_normalized_to_zero_inside_a_transform():
    x = torch.tensor([123.456, 10000.123, 1e6 + 0.1])[:, None].expand(3, 1023)
    assert not torch.vmap(lambda row: OPS.layer_norm_fwd(row, [1023])[0])(x).any()


def test_recorded_parameter_gradients_are_contiguous_and_new():
    x, grad_out, weight = (torch.randn(5, 3).t() for _ in range(3))
    one = torch.ones(1)
    for bias in (torch.zeros(3, 5), grad_out):
        arguments = grad_out, x.requires_grad_(), [3, 5], one, one, weight, bias
        gradients = OPS.layer_norm_bwd(*arguments)
        assert all(each.is_contiguous() and each.data_ptr() != grad_out.data_ptr() for each in gradients)
        with torch.no_grad():
            assert_close(gradients, OPS.layer_norm_bwd(*arguments))


@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=3)))
def test_layer_norm_bwd_returns_none_for_masked_outputs(mask):
    _, inputs = case_inputs("layer")
    _, mean, rstd = forward("layer", inputs.x, inputs.weight, inputs.bias)
    full, masked = (
        backward("layer", inputs.grad_out, inputs.x, mean, rstd, inputs.weight, inputs.bias, m)
        for m in ((True, True, True), mask)
    )
    for wanted, want, got in zip(mask, full, masked, strict=True):
        assert torch.equal(got, want) if wanted else got is None


@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=2)))
def test_rms_norm_bwd_returns_none_for_masked_outputs(mask):
    _, inputs = case_inputs("rms")
    _, _, rstd = forward("rms", inputs.x, inputs.weight, None)
    full, masked = (
        backward("rms", inputs.grad_out, inputs.x, None, rstd, inputs.weight, None, m) for m in ((True, True), mask)
    )
    for wanted, want, got in zip(mask, full, masked, strict=True):
        assert torch.equal(got, want) if wanted else got is None


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_bwd_computes_nothing_where_nothing_is_wanted(norm, monkeypatch):
    _, inputs = case_inputs(norm)
    _, mean, rstd = forward(norm, inputs.x, inputs.weight, inputs.bias)
    monkeypatch.setattr(reference, "backward", None)
    for weight, mask in ((inputs.weight, (False, False, False)), (None, (False, True, False))):
        assert not any(backward(norm, inputs.grad_out, inputs.x, mean, rstd, weight, None, mask))


def test_bwd_returns_none_for_the_gradient_of_an_absent_parameter():
    _, inputs = case_inputs("layer")
    _, mean, rstd = forward("layer", inputs.x, None, None)
    arguments = (inputs.grad_out, inputs.x, mean, rstd)
    assert [t is None for t in backward("layer", *arguments, None, None)] == [False, True, True]
    assert [t is None for t in backward("layer", *arguments, inputs.weight, None)] == [False, False, True]
    assert [t is None for t in backward("layer", *arguments, None, inputs.bias)] == [False, True, False]
    assert [t is None for t in backward("rms", *arguments, None, None)] == [False, True]


STRIDED = {
    "transposed batch": lambda: torch.randn(3, 4, 8).transpose(0, 1),
    "slice of packed qkv": lambda: torch.randn(4, 3 * 24).unflatten(1, (3, 24))[..., 8:16],
    "every other column": lambda: torch.randn(4, 3, 16)[..., ::2],
    "expanded rows": lambda: torch.randn(8).expand(4, 3, 8),
    "expanded scalar": lambda: torch.tensor(0.7).expand(4, 3, 8),
    "columns first": lambda: torch.randn(8, 3, 4).permute(2, 1, 0),
}


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("layout", STRIDED)
def test_strided_inputs_give_what_contiguous_ones_give(norm, layout):
    torch.manual_seed(0)
    x, grad_out, (_, inputs) = STRIDED[layout](), STRIDED[layout](), case_inputs(norm)
    assert not x.is_contiguous()

    def outputs(x, grad_out):
        y, *statistics = forward(norm, x, inputs.weight, inputs.bias)
        return y, *statistics, *backward(norm, grad_out, x, *statistics, inputs.weight, inputs.bias)

    got, want = outputs(x, grad_out), outputs(x.contiguous(), grad_out.contiguous())
    assert_close(got, want)
    assert all(t is None or t.is_contiguous() for t in got)


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
@pytest.mark.parametrize(
    ("shape", "normalized_ndim"), [((0, 4), 1), ((3, 0), 1), ((2, 0, 4), 1), ((2, 3, 0, 4), 2), ((0, 0), 1)]
)
def test_tensors_without_elements_give_what_stock_gives(dtype, shape, normalized_ndim):
    normalized_shape = shape[len(shape) - normalized_ndim :]
    x, weight, bias = (
        torch.randn(s, dtype=dtype, requires_grad=True) for s in (shape, normalized_shape, normalized_shape)
    )
    eps = 1e-5
    got = OPS.layer_norm_fwd(x, normalized_shape, weight, bias, eps)
    want = torch.nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)
    assert_close(got[0], want)
    statistics = torch.native_layer_norm(x.to(got[1].dtype), normalized_shape, None, None, eps)[1:]
    assert_close(got[1:], statistics, equal_nan=True)
    got, want = (torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y)) for y in (got[0], want))
    assert_close(got, want)
    got, rstd = OPS.rms_norm_fwd(x, normalized_shape, weight, eps)
    want = torch.nn.functional.rms_norm(x, normalized_shape, weight, eps)
    assert_close(got, want)
    assert rstd.shape == statistics[1].shape
    got, want = (torch.autograd.grad(y, (x, weight), torch.ones_like(y)) for y in (got, want))
    assert_close(got, want)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("eps", [-100.0, -1.0, 0, 0.0, 1e-40, 3, 1e30, float("inf"), float("nan")])
def test_every_eps_means_what_it_means_to_stock(norm, eps):
    _, inputs = case_inputs(norm, dtype=FP64)
    inputs.x[0, 0] = 0.0  # a row of zeros, where eps alone decides rstd
    weight, bias = inputs.weight.double(), inputs.bias.double() if norm == "layer" else None
    if norm == "layer":
        want = torch.nn.functional.layer_norm(inputs.x, [8], weight, bias, eps)
    else:
        want = torch.nn.functional.rms_norm(inputs.x, [8], weight, eps)
    assert_close(forward(norm, inputs.x, weight, bias, eps)[0], want, equal_nan=True)


def test_large_means_do_not_cost_layer_norm_its_accuracy():
    case = Case("layer", (16, 256), 1, FP32, FP32, FP32)
    inputs = make_inputs(case)
    inputs.x.add_(1e4)
    assert_outputs_close(fused(case, inputs), case, inputs)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_outputs_carry_no_graph_where_autograd_does_not_record(norm):
    _, inputs = case_inputs(norm)
    x = inputs.x.requires_grad_()
    with torch.no_grad():
        outputs = forward(norm, x, inputs.weight, inputs.bias)
    with torch.inference_mode():
        outputs += forward(norm, x, inputs.weight, inputs.bias)
    call = check_forward(ForwardOperands(norm, x, (8,), inputs.weight, inputs.bias, 1e-5))
    outputs += reference.forward(call)
    _, mean, rstd = reference.forward(call)
    outputs += reference.backward(
        check_backward(
            BackwardOperands(
                norm, inputs.grad_out, x, (8,), mean, rstd, inputs.weight, inputs.bias, (True, True, norm == "layer")
            )
        )
    )
    assert not any(t.requires_grad for t in outputs if t is not None)


def test_autocast_leaves_the_ops_alone():
    case, inputs = case_inputs("layer")
    with torch.autocast("cpu", dtype=BF16):
        outputs = fused(case, inputs)
    assert_outputs_close(outputs, case, inputs)


OPCHECKS = {
    "layer_norm_fwd": [
        lambda t: (t.x, [8], t.weight, t.bias, 1e-5),
        lambda t: (t.x, [8]),
        lambda t: (t.x, [3, 8], None, None, 1e-3),
    ],
    "layer_norm_bwd": [
        lambda t: (t.grad_out, t.x, [8], t.mean, t.rstd, t.weight, t.bias),
        lambda t: (t.grad_out, t.x, [8], t.mean.flatten(), t.rstd.flatten(), None, t.bias),
        lambda t: (t.grad_out, t.x, [8], t.mean, t.rstd, t.weight, t.bias, [False, True, False]),
        lambda t: (t.grad_out, t.x, [8], t.mean, t.rstd, t.weight, t.bias, [True, False, False]),
    ],
    "rms_norm_fwd": [lambda t: (t.x, [8], t.weight, 1e-5), lambda t: (t.x, [8])],
    "rms_norm_bwd": [
        lambda t: (t.grad_out, t.x, [8], t.rstd, t.weight),
        lambda t: (t.grad_out, t.x, [8], t.rstd.flatten(), None),
        lambda t: (t.grad_out, t.x, [8], t.rstd, t.weight, [False, True]),
        lambda t: (t.grad_out, t.x, [8], t.rstd, t.weight, [True, False]),
    ],
}


class Operands:
    """A strided x, parameters of another dtype, and statistics; either all require grad or none."""

    def __init__(self, dtype, weight_dtype, requires_grad):
        torch.manual_seed(0)
        x = torch.randn(3, 4, 8, dtype=dtype).transpose(0, 1)
        _, mean, rstd = OPS.layer_norm_fwd(x, [8])
        tensors = {"x": x, "grad_out": torch.randn(4, 3, 8, dtype=dtype), "mean": mean, "rstd": rstd}
        tensors |= {name: torch.randn(8, dtype=weight_dtype) for name in ("weight", "bias")}
        for name, tensor in tensors.items():
            setattr(self, name, tensor.requires_grad_(requires_grad))


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "requires_grad"), [(FP32, FP32, True), (BF16, FP32, True), (BF16, FP32, False)]
)
@pytest.mark.parametrize(("name", "arguments"), [(name, a) for name, many in OPCHECKS.items() for a in many])
def test_opcheck(name, arguments, dtype, weight_dtype, requires_grad):
    torch.library.opcheck(getattr(OPS, name), arguments(Operands(dtype, weight_dtype, requires_grad)))


@pytest.mark.parametrize("name", OPCHECKS)
def test_meta_tensors_give_the_shapes_dtypes_and_strides_of_real_ones(name):
    for arguments in OPCHECKS[name]:
        real = arguments(Operands(BF16, FP32, False))
        meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in real]
        for got, want in zip(getattr(OPS, name)(*meta), getattr(OPS, name)(*real), strict=True):
            if want is None:
                assert got is None
            else:
                assert got.is_meta and (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


def test_one_compiled_graph_serves_every_row_count():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def both(x, weight, grad_out):
        y, mean, rstd = OPS.layer_norm_fwd(x, x.shape[-1:], weight)
        return y, *OPS.layer_norm_bwd(grad_out, x, x.shape[-1:], mean, rstd, weight, None, [True, True, False])

    for rows in (2, 3, 17, 100):
        x, grad_out = torch.randn(rows, 8), torch.randn(rows, 8)
        dx = both(x, torch.ones(8), grad_out)[1]
        assert dx.shape == (rows, 8)
    assert len(graphs) == 1


def test_row_counts_known_only_at_run_time_compile():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def norm_of_positive(x):
        rows = x[x[:, 0] > 0]
        y, mean, rstd = OPS.layer_norm_fwd(rows, [8])
        return OPS.layer_norm_bwd(y, rows, [8], mean, rstd)[0]

    x = torch.randn(20, 8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert norm_of_positive(x).shape == x[x[:, 0] > 0].shape


def test_import_leaves_triton_and_cuda_alone():
    code = (
        "import sys, torch, fusednorm; x = torch.ones(2, 8, requires_grad=True);"
        "fusednorm.LayerNormFunction.apply(x, (8,))[0].sum().backward();"
        "assert 'triton' not in sys.modules and 'fusednorm.host.launch' not in sys.modules;"
        "assert not torch.cuda.is_initialized()"
    )
    asked = afresh.run(code)
    assert asked.returncode == 0, asked.stderr


# --- The residual gradient ---


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dx_dtype", [None, torch.float32])
def test_residual_gradient_is_added_before_the_one_rounding(norm, dx_dtype):
    torch.manual_seed(0)
    x, dy = (torch.randn(5, 64, dtype=torch.bfloat16) for _ in range(2))
    residual, weight = torch.randn(5, 64), torch.randn(64)
    if norm == "layer":
        _, mean, rstd = OPS.layer_norm_fwd(x, [64], weight, weight)
        operands, op, tail = (dy, x, [64], mean, rstd, weight, weight), OPS.layer_norm_bwd_residual, weight
    else:
        _, rstd = OPS.rms_norm_fwd(x, [64], weight)
        operands, op, tail = (dy, x, [64], rstd, weight, weight), OPS.rms_norm_bwd_residual, weight
    exact, *rest = op(*operands, None, dx_dtype=torch.float32)
    dx, *gradients = op(*operands, residual, dx_dtype=dx_dtype)
    assert torch.equal(dx, (exact + residual).to(dx_dtype or x.dtype))
    assert all(map(torch.equal, gradients, rest)) and gradients[0].dtype == tail.dtype


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_residual_ops_are_registered_as_torch_demands(norm):
    x, dy, residual = (torch.randn(3, 8, requires_grad=True) for _ in range(3))
    weight, rstd = torch.randn(8, requires_grad=True), torch.rand(3, 1) + 0.5
    if norm == "layer":
        arguments, op = (dy, x, [8], rstd, rstd, weight, weight, residual), OPS.layer_norm_bwd_residual
    else:
        arguments, op = (dy, x, [8], rstd, weight, weight, residual), OPS.rms_norm_bwd_residual
    torch.library.opcheck(op.default, arguments, {"dx_dtype": torch.float64})


def test_residual_gradient_of_another_shape_is_refused():
    x, weight = torch.randn(3, 8), torch.randn(8)
    with pytest.raises(RuntimeError, match=r"residual_grad must have shape \(3, 8\), got \(3, 7\)"):
        OPS.rms_norm_bwd_residual(x, x, [8], torch.ones(3), weight, None, torch.randn(3, 7))
    with pytest.raises(RuntimeError, match="dx_dtype must be float16, bfloat16, float32 or float64, got torch.int32"):
        OPS.rms_norm_bwd_residual(x, x, [8], torch.ones(3), weight, dx_dtype=torch.int32)


@pytest.mark.parametrize("case", [*CASES, Case("layer", (2, 3, 4, 5), 2, BF16, FP16, FP32)], ids=str)
def test_formulas_match_the_oracle_too(case):
    inputs = make_inputs(case)
    if inputs.x.dim() > 1:
        inputs = replace(inputs, x=inputs.x.mT.contiguous().mT)  # the outputs are contiguous all the same
    norm, shape, weight, bias = case.norm, case.normalized_shape, inputs.weight, inputs.bias
    y, mean, rstd = reference.formula(ForwardOperands(norm, inputs.x, shape, weight, bias, case.eps))
    operands = inputs.grad_out, inputs.x, shape, mean, rstd, weight, bias, (True, True, True)
    grads = reference.formula(BackwardOperands(norm, *operands))
    assert [grad is None for grad in grads] == [False, weight is None, bias is None]
    assert_outputs_close(Outputs(y, mean, rstd, *grads), case, inputs)
