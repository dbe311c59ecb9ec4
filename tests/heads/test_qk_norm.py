"""qk_norm, qk_norm_packed and QKNorm on CPU tensors, by their formulas: values, derivatives, errors and graphs."""

from __future__ import annotations

from dataclasses import replace

import head_norms
import pytest
import torch
from head_norms import BF16, CASES, EPS, FP16, FP32, FP64, HeadCase, assert_errs_no_more_than_plain_code, gradients
from op_log import OpLog
from torch.testing import assert_close

import fusednorm
from fusednorm.heads.problem import Packing

OPS = torch.ops.fusednorm
LAST = CASES[-3:]


@pytest.mark.parametrize("dtypes", [(FP64, FP64), (FP32, BF16), (BF16, BF16), (FP16, FP32)], ids=str)
@pytest.mark.parametrize("case", CASES + head_norms.WHOLE, ids=str)
def test_outputs_and_gradients_err_no_more_than_those_of_the_plain_code(case, dtypes):
    case = replace(case, dtype=dtypes[0], weight_dtype=dtypes[1])
    given = case.tensors()
    assert_errs_no_more_than_plain_code(case, given, case.run(given))


@pytest.mark.parametrize("case", LAST, ids=str)
def test_derivatives_of_first_and_second_order_are_right(case):
    case = replace(case, batch=1, tokens=2, heads=2, kv_heads=1, cols=12 if case.cols == 18 else 8, rotary=6)
    given = case.tensors()

    def run(*tensors):
        return case.run(dict(zip(given, tensors, strict=True)))

    assert torch.autograd.gradcheck(run, tuple(given.values()), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, tuple(given.values()), fast_mode=True)
    tangents = [torch.randn_like(each) for each in given.values()]
    _, forward = torch.func.jvp(run, tuple(each.detach() for each in given.values()), tuple(tangents))
    assert all(each.isfinite().all() for each in forward)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    "case", [HeadCase(rotary=8), HeadCase(norm="layer", cols=12, table_dims="BS", rotary=12)], ids=str
)
def test_packed_tensor_gives_what_its_slices_give_and_one_gradient(case, grouped):
    given = case.tensors()
    packing = Packing(case.heads, case.kv_heads, grouped)
    parameters = {name: each for name, each in given.items() if name not in ("q", "k")}
    width = (case.heads + 2 * case.kv_heads) * case.cols
    qkv = torch.randn(case.batch, case.tokens, width, dtype=FP64, requires_grad=True)
    got = fusednorm.qk_norm_packed(
        qkv, case.heads, case.kv_heads, rotary=case.tables(), grouped=grouped, **parameters, **case.settings
    )
    q, k, v = (each.flatten(-3, -2) if grouped else each for each in packing.split(qkv))
    want = *case.run({"q": q, "k": k, **parameters}), v
    assert got[2].data_ptr() == v.data_ptr() and all(map(torch.equal, got, want))
    leaves = {"qkv": qkv, **parameters}
    assert_close(gradients(got, leaves), gradients(want, leaves))


def test_second_derivatives_of_a_packed_tensor_are_right():
    case = HeadCase(cols=8, rotary=4, tokens=2, batch=1)
    given, tables = case.tensors(), case.tables()

    def run(qkv, q_weight, k_weight):
        return fusednorm.qk_norm_packed(qkv, 4, 2, q_weight, k_weight, EPS, rotary=tables, grouped=True)

    qkv = torch.randn(1, 2, 8 * 8, dtype=FP64, requires_grad=True)
    assert torch.autograd.gradgradcheck(run, (qkv, given["q_weight"], given["k_weight"]), fast_mode=True)


def test_packed_gradient_where_only_v_or_nothing_of_the_weights_is_used():
    qkv = torch.randn(3, 8 * 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    _, _, v = fusednorm.qk_norm_packed(qkv, 4, 2, weight, weight)
    (grad,) = torch.autograd.grad(v.sum(), qkv)
    assert torch.equal(grad, torch.tensor([0.0] * 48 + [1.0] * 16).expand(3, 64))


def test_an_output_without_a_gradient_adds_nothing():
    given = CASES[1].tensors()
    q, _ = CASES[1].run(given)
    grads = torch.autograd.grad(q.sum(), list(given.values()))
    assert [bool(grad.any()) for grad in grads] == [name.startswith("q") for name in given]


@pytest.mark.parametrize("rotary", [{}, {"rotary": 16}, {"rotary": 8, "interleaved": True}], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_may_be_batched(packed, rotary):
    case = HeadCase(**rotary)
    given = case.tensors()
    made = case.run(given)
    if packed:
        given["qkv"] = torch.randn(2, 5, 8 * case.cols, dtype=FP64, requires_grad=True)
        weights = given["q_weight"], given["k_weight"]
        made = fusednorm.qk_norm_packed(given["qkv"], 4, 2, *weights, rotary=case.tables(), **case.settings)
    leaves = [each for name, each in given.items() if name not in "qk" or not packed]
    grads = torch.randn(3, *made[0].shape, dtype=FP64)
    got = torch.autograd.grad(made[0], leaves, grads, is_grads_batched=True, retain_graph=True)
    for at, grad in enumerate(grads):
        assert_close([each[at] for each in got], [*torch.autograd.grad(made[0], leaves, grad, retain_graph=True)])


def test_a_backward_runs_one_op_for_q_and_k():
    given = CASES[1].tensors()
    with OpLog() as log:
        gradients(CASES[1].run(given), given)
    assert [name for name in log.names if "fusednorm" in name] == [
        "fusednorm.head_norm_fwd.default",
        "fusednorm.head_norm_bwd.default",
    ]


def test_a_rotated_norm_of_all_heads_runs_one_op_each_way():
    given = head_norms.WHOLE[0].tensors()
    with OpLog() as log:
        gradients(head_norms.WHOLE[0].run(given), given)
    assert [name.split(".")[1] for name in log.names if "fusednorm" in name] == ["head_norm_fwd", "head_norm_bwd"]


def test_packed_norms_take_no_weights_of_all_heads():
    with pytest.raises(RuntimeError, match=r"q_weight must have shape \(16,\), got \(64,\)"):
        fusednorm.qk_norm_packed(torch.randn(5, 8 * 16), 4, 2, torch.randn(64), torch.randn(32))


def test_weights_of_all_heads_may_have_their_shape():
    case = head_norms.WHOLE[0]
    given = case.tensors()
    shaped = given | {name: given[name].unflatten(0, (-1, case.cols)) for name in ("q_weight", "k_weight")}
    assert all(map(torch.equal, case.run(shaped), case.run(given)))


def test_rounding_of_x_hat_gives_the_bits_of_transformers_norm():
    x, weight = torch.randn(2, 3, 4, 64, dtype=BF16), torch.randn(64, dtype=FP32)
    wide = x.float()
    want = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(BF16)
    got, _ = fusednorm.qk_norm(x, x, weight, weight, EPS, rounding="x_hat")
    assert got.dtype == FP32 and torch.equal(got, want)


ROTARY = torch.randn(5, 16, dtype=FP64)
Q, K, W = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16), torch.randn(16)
ERRORS = [
    ((Q, K[..., :8], W), {}, RuntimeError, r"inputs\[1\] must end in 16 columns as inputs\[0\] does, got"),
    ((Q, K.int(), W), {}, RuntimeError, r"inputs\[1\] must be float16, bfloat16, float32 or float64, got torch.int32"),
    ((Q, K.to("meta"), W), {}, RuntimeError, r"inputs\[1\] must be on cpu as inputs\[0\] is, got meta"),
    ((Q, 3, W), {}, TypeError, "k must be a tensor, got int"),
    ((Q, K, W, [1.0]), {}, TypeError, "k_weight must be a tensor, got list"),
    ((Q, K.to_sparse(), W), {}, RuntimeError, "k must be a strided tensor, got one that is torch.sparse_coo"),
    ((Q, K, W), {"norm": "batch"}, ValueError, "norm must be one of rms, layer, got 'batch'"),
    ((Q, K, W), {"rounding": "up"}, ValueError, "rounding must be one of once, x_hat, got 'up'"),
    ((Q, K, W), {"heads_dim": 1}, ValueError, "heads_dim must be -2 or -3, got 1"),
    ((Q, K, W, W, "small"), {}, TypeError, "eps must be a number, got 'small'"),
    ((Q, K, W), {"rotary": ROTARY}, TypeError, "rotary must be a pair of tensors, cos and sin, got Tensor"),
    (
        (Q, K, W),
        {"rotary": (ROTARY, ROTARY[:, :8])},
        RuntimeError,
        r"sin must have the shape of cos, \(5, 1, 16\), got",
    ),
    ((Q, K, W), {"rotary": (ROTARY[:4],) * 2}, RuntimeError, r"cos must broadcast against the rows of inputs\[0\], "),
    ((Q, K, W), {"rotary": (ROTARY,) * 2, "rotary_dim": 12}, RuntimeError, "cos must have 12 columns or half as many"),
    ((Q, K, W), {"rotary": (ROTARY[:, :5],) * 2}, RuntimeError, "rotary_dim must be even and from 2 to 16, got 5"),
    ((Q, K, W), {"rotary": (ROTARY,) * 2, "rotary_dim": "8"}, TypeError, "rotary_dim must be an integer, got '8'"),
    ((Q, K, W), {"rotary_interleaved": "no"}, TypeError, "interleaved must be a bool, got 'no'"),
    ((Q, K, W), {"norm_first": "no"}, TypeError, "norm_first must be a bool, got 'no'"),
    ((Q[0, 0], K, W[:1]), {"heads_dim": -3}, RuntimeError, r"q must have heads in dim -3, got shape \(4, 16\)"),
    ((Q, K, W), {"rotary_dim": 8}, RuntimeError, "rotary_dim needs cos and sin, got 8 without them"),
    ((Q, K, torch.randn(7)), {}, RuntimeError, r"weights\[0\] must have shape \(64,\), got \(7,\)"),
    ((Q, K, W, torch.randn(7)), {}, RuntimeError, r"weights\[1\] must have shape \(16,\), got \(7,\)"),
    ((Q, K, W), {"k_bias": torch.randn(2, 7)}, RuntimeError, r"biases\[1\] must have shape \(16,\), got \(2, 7\)"),
    (
        (Q, K, W),
        {"rotary": (ROTARY.clone().requires_grad_(), ROTARY)},
        RuntimeError,
        "cos must not require grad, because",
    ),
]


@pytest.mark.parametrize("arguments, named, kind, message", ERRORS, ids=range(len(ERRORS)))
def test_bad_arguments_are_refused_in_one_sentence(arguments, named, kind, message):
    for grad in (False, True):
        q = arguments[0].detach().requires_grad_(grad)
        with pytest.raises(kind, match=f"^(qk_norm|head_norm_fwd|fusednorm::head_norm_fwd.*): {message}") as found:
            fusednorm.qk_norm(q, *arguments[1:], **named)
        assert "\n" not in str(found.value) or kind is not RuntimeError


def test_packed_tensors_of_wrong_sizes_are_refused():
    with pytest.raises(
        RuntimeError, match="^qk_norm_packed: qkv must end in a multiple of 8 columns, got \\(3, 63\\)$"
    ):
        fusednorm.qk_norm_packed(torch.randn(3, 63), 4, 2)
    with pytest.raises(RuntimeError, match="heads a multiple of kv_heads if grouped, got 3 and 2$"):
        fusednorm.qk_norm_packed(torch.randn(3, 70), 3, 2, grouped=True)
    with pytest.raises(RuntimeError, match="^qk_norm_packed: heads and kv_heads must be positive, .*, got 0 and 2$"):
        fusednorm.qk_norm_packed(torch.randn(3, 64), 0, 2)
    with pytest.raises(RuntimeError, match=r"^qk_norm_packed: qkv must end in a multiple of 8 columns, got \(\)$"):
        fusednorm.qk_norm_packed(torch.tensor(1.0), 4, 2)
    with pytest.raises(TypeError, match="^qk_norm_packed: grouped must be a bool, got 'no'$"):
        fusednorm.qk_norm_packed(torch.randn(3, 64), 4, 2, grouped="no")


@pytest.mark.parametrize("heads", [4.0, "4", None])
def test_numbers_of_heads_that_are_no_integers_are_refused(heads):
    with pytest.raises(TypeError, match="^qk_norm_packed: heads and kv_heads must be integers, got .* and 2$"):
        fusednorm.qk_norm_packed(torch.randn(3, 64), heads, 2)


def test_tables_without_dims_are_refused():
    with pytest.raises(RuntimeError, match="^head_norm_fwd: rotary_dim must be even and from 2 to 16, got 0$"):
        OPS.head_norm_fwd([Q, K], [None] * 2, [None] * 2, torch.tensor(1.0), torch.tensor(1.0), None)


def test_what_the_ops_alone_may_be_given_is_refused():
    none = [None] * 2
    with pytest.raises(RuntimeError, match="^head_norm_fwd: cos and sin must be given together, got cos alone$"):
        OPS.head_norm_fwd([Q, K], none, none, ROTARY, None, None)
    with pytest.raises(RuntimeError, match=r"^head_norm_fwd: inputs\[0\] must have at least one dimension, got shape"):
        OPS.head_norm_fwd([torch.tensor(1.0), K], none, none, None, None, None)
    with pytest.raises(RuntimeError, match=r"^head_norm_fwd: inputs\[1\] must end in 16 columns .* got \(\)$"):
        OPS.head_norm_fwd([Q, torch.tensor(1.0)], none, none, None, None, None)
    with pytest.raises(RuntimeError, match=r"cos must broadcast against the rows of inputs\[1\], \(4, 16\), got"):
        OPS.head_norm_fwd([Q, Q[0, 0]], none, none, *[torch.ones(1, 4, 16)] * 2, None)
    with pytest.raises(RuntimeError, match=r"^head_norm_fwd: weights\[0\] must have shape \(16,\), got \(7,\)$"):
        OPS.head_norm_fwd([Q[0, 0, 0], K], [W[:7], None], none, None, None, None)
    with pytest.raises(RuntimeError, match="^head_norm_bwd: output_mask must have one flag per gradient, got .True.$"):
        OPS.head_norm_bwd([Q, K], [Q, K], none, none, None, None, None, [True])


def test_opcheck():
    case = replace(CASES[4], dtype=FP32)
    given, (cos, sin) = case.tensors(), case.tables()
    inputs, weights = [given["q"], given["k"]], [given["q_weight"], None]
    cos, sin = (each if each.dim() == 4 else each.unsqueeze(-2) for each in (cos, sin))
    named = {"layer": True, "interleaved": case.interleaved, "rotary_dim": case.rotary}
    operands = weights, [None, None], cos, sin, EPS
    torch.library.opcheck(OPS.head_norm_fwd.default, (inputs, *operands), named)
    mask = [True, False, True, True, True, True]
    torch.library.opcheck(OPS.head_norm_bwd.default, (inputs[::1], inputs, *operands, mask), named)
    qkv = torch.randn(3, 8 * case.cols, requires_grad=True)
    grads = [torch.randn(3, heads, case.cols) for heads in (4, 2, 2)]
    operands = [None, given["k_weight"]], [None, None], None, None, None
    torch.library.opcheck(OPS.head_norm_bwd_packed.default, (grads, qkv, *operands, [True] * 5, 4, 2, False), {})


@pytest.mark.parametrize("packed", [False, True])
def test_torch_jit_traces_a_call(packed):
    def run(qkv):
        if packed:
            return fusednorm.qk_norm_packed(qkv, 2, 1, W, rotary=(ROTARY, ROTARY))
        return fusednorm.qk_norm(*qkv.unflatten(-1, (4, 16)).split((2, 2), -2), W, rotary=(ROTARY, ROTARY))

    qkv = torch.randn(2, 5, 64, requires_grad=True)
    traced, more = torch.jit.trace(run, qkv, check_trace=False), torch.randn(3, 5, 64, requires_grad=True)
    assert_close(traced(more), run(more))
    assert_close(*(torch.autograd.grad(made(more)[0].sin().sum(), more) for made in (traced, run)))


def test_module_has_the_parameters_of_its_state_dict_and_runs_the_function():
    module = fusednorm.QKNorm(16, EPS, bias=True, norm="layer", dtype=FP64, weight_offset=1.0)
    assert list(module.state_dict()) == ["q_weight", "q_bias", "k_weight", "k_bias"]
    case = HeadCase(norm="layer", rotary=16, weight_offset=1.0)
    given = case.tensors() | dict(module.named_parameters())
    assert all(map(torch.equal, module(given["q"], given["k"], case.tables()), case.run(given)))
    assert torch.equal(module.q_weight, torch.zeros(16, dtype=FP64)) and "norm='layer'" in repr(module)
    assert fusednorm.QKNorm([(64,), (32,)])(Q, K)[1].shape == K.shape
    with pytest.raises(ValueError, match="QKNorm: rounding must be one of once, x_hat, got 'up'"):
        fusednorm.QKNorm(16, rounding="up")
    with pytest.raises(ValueError, match=r"QKNorm: a list of shapes must have one for q and one for k, got \[16\]"):
        fusednorm.QKNorm([16])


def test_numbers_of_tokens_known_only_at_run_time_compile():
    def norms_of_positive(qkv, table):
        qkv, *rotary = (each[qkv[:, 0] > 0] for each in (qkv, table, table))
        return fusednorm.qk_norm_packed(qkv, 2, 1, W, rotary=rotary)

    given = torch.randn(9, 64), torch.randn(9, 16)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(norms_of_positive, backend="aot_eager", fullgraph=True)
        assert_close(compiled(*given), norms_of_positive(*given))


def test_compiled_code_has_one_graph_and_the_same_values():
    torch._dynamo.reset()
    case = HeadCase(dtype=FP32, rotary=8)
    given = case.tensors()
    qkv = torch.randn(2, 5, 8 * 16, requires_grad=True)

    def both(given, qkv):
        q, k = case.run(given, rotary=tables)
        one_weight = given["q_weight"], given["q_weight"]
        return q, k, *fusednorm.qk_norm_packed(qkv, 4, 2, *one_weight, EPS, rotary=tables)

    tables = case.tables()
    leaves = given | {"qkv": qkv}
    want, got = both(given, qkv), torch.compile(both, fullgraph=True, backend="aot_eager")(given, qkv)
    assert_close(got, want)
    assert_close(gradients(got, leaves), gradients(want, leaves))
    torch._dynamo.reset()
