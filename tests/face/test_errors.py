"""Bad input raises one RuntimeError that names the op, the rule and the value it got, on every route into the op."""

from __future__ import annotations

import re

import pytest
import torch

import fusednorm
from fusednorm.operands import ForwardOperands
from fusednorm.problem.calls import check_forward

X = torch.ones(2, 3, 8)
FORWARD = {"x": X, "normalized_shape": [8], "weight": torch.ones(8)}
BACKWARD = FORWARD | {"grad_out": X, "rstd": torch.ones(6)}
RIGHT_CALLS = {
    "layer_norm_fwd": FORWARD | {"bias": torch.ones(8)},
    "layer_norm_bwd": BACKWARD | {"bias": torch.ones(8), "mean": torch.ones(6)},
    "rms_norm_fwd": FORWARD,
    "rms_norm_bwd": BACKWARD,
}
FORWARDS, BACKWARDS = ("layer_norm_fwd", "rms_norm_fwd"), ("layer_norm_bwd", "rms_norm_bwd")
WRONG_OPERANDS = [
    ({"normalized_shape": []}, "normalized_shape must have at least one dimension, got ()"),
    ({"normalized_shape": [7]}, "x must end in normalized_shape (7,), got shape (2, 3, 8)"),
    ({"normalized_shape": [1, 2, 3, 8]}, "x must end in normalized_shape (1, 2, 3, 8), got shape (2, 3, 8)"),
    ({"x": torch.tensor(1.0)}, "x must end in normalized_shape (8,), got shape ()"),
    ({"x": torch.ones(2, 3, 8, dtype=torch.int32)}, "x must be float16, bfloat16, float32 or float64, got torch.int32"),
    (
        {"x": torch.ones(2, 3, 8, dtype=torch.complex64)},
        "x must be float16, bfloat16, float32 or float64, got torch.compl",
    ),
    ({"weight": torch.ones(3, 8)}, "weight must have shape (8,), got (3, 8)"),
    (
        {"weight": torch.ones(8, dtype=torch.bool)},
        "weight must be float16, bfloat16, float32 or float64, got torch.bool",
    ),
    ({"weight": torch.ones(8, device="meta")}, "weight must be on cpu as x is, got meta"),
]
WRONG_BIASES = [
    ({"bias": torch.ones(1)}, "bias must have shape (8,), got (1,)"),
    ({"bias": torch.ones(8, dtype=torch.int64)}, "bias must be float16, bfloat16, float32 or float64, got torch.int64"),
    ({"bias": torch.ones(8, device="meta")}, "bias must be on cpu as x is, got meta"),
]
WRONG_GRADIENTS = [
    ({"grad_out": torch.ones(6, 8)}, "grad_out must have shape (2, 3, 8), got (6, 8)"),
    (
        {"grad_out": torch.ones(2, 3, 8).int()},
        "grad_out must be float16, bfloat16, float32 or float64, got torch.int32",
    ),
    ({"grad_out": torch.ones(2, 3, 8, device="meta")}, "grad_out must be on cpu as x is, got meta"),
    ({"rstd": torch.ones(7)}, "rstd must hold one element per row (6), got shape (7,)"),
    ({"rstd": torch.ones(1)}, "rstd must hold one element per row (6), got shape (1,)"),
    ({"rstd": torch.ones(6).long()}, "rstd must be float16, bfloat16, float32 or float64, got torch.int64"),
    ({"rstd": torch.ones(6, device="meta")}, "rstd must be on cpu as x is, got meta"),
]
WRONG_MEANS = [
    ({"mean": torch.ones(2, 3, 8)}, "mean must hold one element per row (6), got shape (2, 3, 8)"),
    ({"mean": torch.ones(6).bool()}, "mean must be float16, bfloat16, float32 or float64, got torch.bool"),
    ({"output_mask": [True, True]}, "output_mask must have one flag per output, got [True, True]"),
]
WRONG_CALLS = [
    *((op, *wrong) for op in RIGHT_CALLS for wrong in WRONG_OPERANDS),
    *((op, *wrong) for op in ("layer_norm_fwd", "layer_norm_bwd") for wrong in WRONG_BIASES),
    *((op, *wrong) for op in BACKWARDS for wrong in WRONG_GRADIENTS),
    *(("layer_norm_bwd", *wrong) for wrong in WRONG_MEANS),
]


def call(op, device="cpu", **overrides):
    arguments = RIGHT_CALLS[op] | overrides
    if device != "cpu":
        arguments = {name: a.to(device) if isinstance(a, torch.Tensor) else a for name, a in arguments.items()}
    return getattr(torch.ops.fusednorm, op)(**arguments)


def raises(op, message):
    return pytest.raises(RuntimeError, match=re.escape(f"{op}: {message}"))


@pytest.mark.parametrize(("op", "overrides", "message"), WRONG_CALLS)
def test_op_says_rule_and_what_it_got(op, overrides, message):
    call(op)
    with raises(op, message):
        call(op, **overrides)


@pytest.mark.parametrize("op", FORWARDS)
def test_forward_says_the_same_on_every_route(op):
    wrong, message = {"weight": torch.ones(3)}, "weight must have shape (8,), got (3,)"
    with raises(op, message):  # through the autograd Function
        call(op, x=X.clone().requires_grad_(), **wrong)
    with raises(op, message):  # through the formula
        torch.func.vmap(lambda x: call(op, x=x, **wrong))(torch.ones(4, 2, 3, 8))
    with raises(op, message):  # through the fake
        call(op, "meta", **wrong)


@pytest.mark.parametrize("op", BACKWARDS)
def test_backward_says_the_same_on_every_route(op):
    wrong, message = {"rstd": torch.ones(5)}, "rstd must hold one element per row (6), got shape (5,)"
    with raises(op, message):  # through the formula, to be differentiated
        call(op, x=X.clone().requires_grad_(), **wrong)
    with raises(op, message):  # through the formula, batched
        torch.func.vmap(lambda x: call(op, x=x, **wrong))(torch.ones(4, 2, 3, 8))
    with raises(op, message):  # through the fake
        call(op, "meta", **wrong)


def test_rms_norm_bwd_rejects_a_mask_of_another_length():
    with raises("rms_norm_bwd", "output_mask must have one flag per output, got [True]"):
        call("rms_norm_bwd", output_mask=[True])


def test_layer_norm_refuses_eps_none_as_aten_does():
    for op in (torch.ops.fusednorm.layer_norm_fwd, torch.ops.aten.native_layer_norm):
        with pytest.raises(RuntimeError, match="eps"):
            op(X, [8], None, None, None)
    with raises("layer_norm_fwd", "eps must be a number, got None"):
        check_forward(ForwardOperands("layer", X, (8,), None, None, None))


@pytest.mark.parametrize("function", [fusednorm.LayerNormFunction, fusednorm.RMSNormFunction])
def test_functions_raise_as_the_ops_do(function):
    with pytest.raises(RuntimeError, match=r"norm_fwd: x must end in normalized_shape \(7,\), got shape \(2, 3, 8\)"):
        function.apply(X.clone().requires_grad_(), (7,))


STRANGE = {
    "nested": lambda t: torch.nested.nested_tensor([t.reshape(-1), t.reshape(-1)[:1]]),
    "jagged": lambda t: torch.nested.nested_tensor([t.reshape(-1), t.reshape(-1)[:1]], layout=torch.jagged),
    "sparse": torch.Tensor.to_sparse,
    "compressed": lambda t: t.reshape(-1, t.shape[-1]).to_sparse_csr(),
    "mkldnn": torch.Tensor.to_mkldnn,
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("op", [*RIGHT_CALLS, "layer_norm_bwd_residual", "rms_norm_bwd_residual"])
@pytest.mark.filterwarnings("ignore")
def test_ops_say_that_they_take_strided_tensors_alone(op, kind):
    arguments = RIGHT_CALLS[op.removesuffix("_residual")]
    tensors = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    for name in tensors:
        for grad in (False, True):
            strange = STRANGE[kind](arguments[name]).requires_grad_(grad)
            with pytest.raises(RuntimeError, match=rf"^{op}: ({name} must be a strided|all tensors must be strided,)"):
                getattr(torch.ops.fusednorm, op)(**arguments | {name: strange})


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.filterwarnings("ignore")
def test_column_sums_and_explanations_say_so_too(kind):
    strange = STRANGE[kind](torch.ones(6, 8))
    for grad in (False, True):
        with pytest.raises(RuntimeError, match=r"^column_sum: inputs\[1\] must be a strided tensor, got"):
            fusednorm.column_sum([torch.ones(6, 8), strange.detach().requires_grad_(grad)])
    with pytest.raises(RuntimeError, match="^explain: x must be a strided tensor, got"):
        fusednorm.explain(strange, (8,))
    with pytest.raises(RuntimeError, match="^explain: weight must be a strided tensor, got"):
        fusednorm.explain(torch.ones(6, 8), (8,), strange)


@pytest.mark.parametrize("op", [*RIGHT_CALLS, "layer_norm_bwd_residual", "rms_norm_bwd_residual"])
def test_ops_of_no_tensor_say_so(op):
    right = RIGHT_CALLS[op.removesuffix("_residual")]
    arguments = {name: None if isinstance(value, torch.Tensor) else value for name, value in right.items()}
    with pytest.raises(TypeError, match=f"^{op}: x must be a tensor, got NoneType"):
        getattr(torch.ops.fusednorm, op)(**arguments)


@pytest.mark.parametrize("op", BACKWARDS)
def test_residual_backwards_name_themselves_on_every_route(op):
    op, wrong, message = f"{op}_residual", {"rstd": torch.ones(5)}, "rstd must hold one element per row (6), got shape"
    arguments = RIGHT_CALLS[op.removesuffix("_residual")] | wrong
    run = getattr(torch.ops.fusednorm, op)
    with raises(op, message):
        run(**arguments)
    with raises(op, message):  # through the formula, to be differentiated
        run(**arguments | {"x": X.clone().requires_grad_()})
    with raises(op, message):  # through the formula, batched
        torch.func.vmap(lambda x: run(**arguments | {"x": x}))(torch.ones(4, 2, 3, 8))
    with raises(op, message):  # through the fake
        run(**{n: a.to("meta") if isinstance(a, torch.Tensor) else a for n, a in arguments.items()})


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda: fusednorm.explain(None, (8,)), TypeError, "explain: x must be a tensor, got NoneType"),
        (lambda: fusednorm.explain(X, 8), TypeError, "explain: normalized_shape must be a tuple of integers, got 8"),
        (lambda: fusednorm.explain(X, (8,), [1]), TypeError, "explain: weight must be a tensor, got list"),
        (lambda: fusednorm.explain(X, (7,)), RuntimeError, "explain: x must end in normalized_shape (7,), got shape"),
        (lambda: fusednorm.explain_column_sum(3), TypeError, "explain_column_sum: inputs must be a sequence of"),
        (lambda: fusednorm.explain_column_sum([3]), TypeError, "explain_column_sum: inputs[0] must be a tensor, got"),
        (lambda: fusednorm.explain_column_sum([]), RuntimeError, "explain_column_sum: inputs must hold at least one"),
        (lambda: fusednorm.patch_model(None), TypeError, "patch_model: model must be a torch.nn.Module, got NoneType"),
        (lambda: fusednorm.warmup("layer", "8", torch.float32), TypeError, "warmup: cols must be an integer or"),
        (lambda: fusednorm.warmup("layer", None, torch.half), TypeError, "warmup: cols must be an integer or several"),
        (lambda: fusednorm.warmup("layer", True, torch.half), TypeError, "warmup: cols must be an integer or several"),
        (lambda: fusednorm.warmup("layer", 0, torch.float32), RuntimeError, "warmup: cols must be 1 or more, got 0"),
        (lambda: fusednorm.warmup("layer", 8, None), TypeError, "warmup: dtype must be a torch.dtype, got None"),
        (lambda: fusednorm.warmup("layer", 8, torch.int8), RuntimeError, "warmup: dtypes must be float16, bfloat16"),
        (lambda: fusednorm.warmup("rms", 8, torch.half, device="mps"), RuntimeError, "warmup: device must be a CUDA"),
    ],
)
def test_functions_name_themselves_in_their_errors(run, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        run()


def test_warmup_says_that_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="^warmup: device must be a GPU that is there, got cuda, where torch finds"):
        fusednorm.warmup("layer", 4096, torch.bfloat16, device="cuda")
