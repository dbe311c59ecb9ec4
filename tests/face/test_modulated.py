"""Modulated norms against what diffusion transformers write, rounding by rounding."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from norm_forms import BF16, FP32, FP64
from tracing import calls, trace

import fusednorm

COLS, EPS = 24, 1e-6


def draw(*shape: int, dtype=BF16, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


def parts(dtype=BF16, batch=3, rows=5) -> dict[str, torch.Tensor]:
    """x, a stream, and shift, scale and gate as slices of one [B, 6, C]."""
    modulation = draw(batch, 6, COLS, dtype=dtype, seed=3)
    of = {"x": draw(batch, rows, COLS, seed=1), "residual": draw(batch, rows, COLS, seed=2)}
    return of | {name: modulation[:, at] for at, name in enumerate(("shift", "scale", "gate"))}


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_steps_round_as_flux_and_sd3_do(dtype):
    x, residual, shift, scale, gate = parts(dtype).values()
    h = residual + gate.unsqueeze(1) * x
    want = F.layer_norm(h, (COLS,), eps=EPS) * (1 + scale[:, None]) + shift[:, None]
    given = {"residual": residual, "gate": gate, "eps": EPS, "rounding": "steps", "residual_dtype": h.dtype}
    y, stream = fusednorm.ada_layer_norm(x, scale, shift, **given)
    assert torch.equal(stream, h) and y.dtype == want.dtype
    torch.testing.assert_close(y, want, rtol=0, atol=1e-6 if dtype == FP32 else 0)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_steps_without_a_gated_branch_or_a_shift_have_the_bits_of_code_in_16_bits(norm, dtype):
    """The first and the last norm of FLUX, SD3 and Qwen-Image, and LTX-2's by RMSNorm; a plain sum, too."""
    x, residual, shift, scale, _ = (each.to(dtype) for each in parts().values())
    stock, ours = (
        (F.layer_norm, fusednorm.ada_layer_norm) if norm == "layer" else (F.rms_norm, fusednorm.ada_rms_norm)
    )

    def written(h, shift):
        y = stock(h, (COLS,), eps=EPS) * (1 + scale[:, None])
        return y if shift is None else y + shift[:, None]

    for offset in (shift, None):
        assert torch.equal(ours(x, scale, offset, eps=EPS, rounding="steps"), written(x, offset))
        y, stream = ours(x, scale, offset, residual=residual, eps=EPS, rounding="steps")
        assert torch.equal(stream, residual + x) and torch.equal(y, written(residual + x, offset))
    once = ours(x, scale, shift, eps=EPS)
    assert not torch.equal(once, written(x, shift))


def test_once_rounds_as_wan_does():
    x, residual, shift, scale, gate = parts(FP32).values()
    h = (residual.float() + x * gate[:, None]).type_as(residual)
    want = (F.layer_norm(h.float(), (COLS,), eps=EPS) * (1 + scale[:, None]) + shift[:, None]).type_as(h)
    y, stream = fusednorm.ada_layer_norm(x, scale, shift, residual=residual, gate=gate, eps=EPS)
    assert torch.equal(stream, h) and torch.equal(y, want)


def test_tanh_gates_behind_a_norm_round_as_z_image_does():
    x, residual, _, _, gate = parts().values()
    weight = draw(COLS, seed=4)
    want = residual + gate[:, None].tanh() * F.rms_norm(x, (COLS,), weight, EPS)
    given = {"gate": gate, "gate_activation": "tanh", "eps": EPS, "rounding": "steps"}
    assert torch.equal(fusednorm.rms_norm_add(x, residual, weight, **given), want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_a_table_are_those_that_the_index_names(dtype):
    x, residual = draw(2, 5, COLS, dtype=FP64, seed=1), draw(2, 5, COLS, dtype=FP64, seed=2)
    table = draw(4, 3, COLS, dtype=FP64, seed=3).requires_grad_()
    index = torch.tensor([[3, 0, 0, 1, 3], [1, 1, 3, 0, 0]], dtype=dtype)  # row 2 is not used
    of = [table[:, at] for at in range(3)]
    got = fusednorm.ada_rms_norm(x, of[0], of[1], residual=residual, gate=of[2], index=index)
    scale, shift, gate = (table[index.long()][..., at, :] for at in range(3))
    want = fusednorm.ada_rms_norm(x, scale, shift, residual=residual, gate=gate)
    torch.testing.assert_close(got, want)
    ours, theirs = (torch.autograd.grad(sum(each.sin().sum() for each in pair), table)[0] for pair in (got, want))
    torch.testing.assert_close(ours, theirs)
    assert not ours[2].any()


def test_a_number_that_is_no_row_of_the_tables_reads_nan_and_is_left_out_of_their_gradients_as_tensor_code_too():
    x, table = draw(2, 5, COLS, dtype=FP64, seed=1), draw(4, 2, COLS, dtype=FP64, seed=3).requires_grad_()
    index = torch.tensor([[3, 0, 4, 1, 3], [1, -1, 3, 0, 2**40]])
    unknown = (index < 0) | (index > 3)
    y, known = (fusednorm.ada_layer_norm(x, *table.unbind(1), index=each) for each in (index, index.where(~unknown, 0)))
    assert y[unknown].isnan().all() and torch.equal(y[~unknown], known[~unknown])
    dy = draw(2, 5, COLS, dtype=FP64, seed=4) * ~unknown[..., None]
    got, want = (torch.autograd.grad(each, table, dy)[0] for each in (y, known))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_compiled_gradients_of_a_table_are_added_up_in_a_fixed_order(is_sorted):
    """Inductor would make atomic additions of the gradient of torch's embedding."""
    x, table = draw(2, 40, COLS, seed=1), draw(4, 3, COLS, seed=2).requires_grad_()
    index = torch.arange(80).view(2, 40) % 3 + 1
    index = index.flatten().sort().values.view(2, 40) if is_sorted else index
    given = [*table.unbind(1), x, index]

    def modulated(scale, shift, gate, x, index):
        return fusednorm.ada_layer_norm(x, scale, shift, residual=x, gate=gate, index=index)

    traced = trace(modulated, stock=True)
    want, got = (
        torch.autograd.grad(sum(each.float().sin().sum() for each in model(*given)), table)[0]
        for model in (modulated, traced.model)
    )
    (backward,) = traced.backwards
    assert len(calls(backward, "fusednorm.layer_norm_bwd_modulated_by_index")) == 1
    assert not [node for node in backward.graph.nodes if re.search("index_put|scatter|index_add", str(node.target))]
    assert torch.equal(got, want) and not got[0].any()


def test_modulations_of_any_batch_dims_are_those_of_broadcasting():
    x = draw(2, 3, 5, COLS, dtype=FP64)
    for shape in ((COLS,), (2, COLS), (2, 1, 1, COLS), (2, 3, COLS), (1, 3, COLS), (1, 1, 5, COLS), (2, 1, 5, COLS)):
        scale = draw(*shape, dtype=FP64, seed=1).requires_grad_()
        spread = scale.reshape(*shape[:-1], *(1,) * (4 - len(shape)), COLS)
        got, want = fusednorm.ada_layer_norm(x, scale), F.layer_norm(x, (COLS,)) * (1 + spread)
        torch.testing.assert_close(got, want)
        ours, theirs = (torch.autograd.grad(each.sin().sum(), scale)[0] for each in (got, want))
        assert ours.shape == scale.shape
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["x", "residual", "shift", "scale", "gate"])
@pytest.mark.parametrize("which", [0, 1])
def test_each_tensor_alone_has_the_gradient_of_each_output(name, which):
    given = {each: tensor.double() for each, tensor in parts().items()}
    given[name] = given[name].detach().clone().requires_grad_()
    h = given["residual"] + given["gate"][:, None] * given["x"]
    y = F.layer_norm(h, (COLS,)) * (1 + given["scale"][:, None]) + given["shift"][:, None]
    of = (y, h)[which]
    outputs = fusednorm.ada_layer_norm(**given)
    if not of.requires_grad:
        assert not torch.autograd.grad(outputs[which].sum(), given[name], materialize_grads=True)[0].any()
        return
    ours, theirs = (torch.autograd.grad(each.sin().sum(), given[name]) for each in (outputs[which], of))
    torch.testing.assert_close(ours, theirs)


def test_gradients_of_statistics_reach_the_branch_and_the_gate():
    given = {name: each.double().requires_grad_() for name, each in parts().items()}
    x, residual, _, scale, gate = given.values()
    op = torch.ops.fusednorm.layer_norm_fwd_of_gated_sum_modulated
    outputs = op(x, [COLS], residual, gate, scale)
    h = residual + gate[:, None] * x
    want = h.mean(-1, keepdim=True), torch.rsqrt(h.var(-1, correction=0, keepdim=True) + 1e-5)
    leaves = [x, residual, gate]
    ours = torch.autograd.grad(sum(each.sin().sum() for each in outputs[1:3]), leaves)
    torch.testing.assert_close(ours, torch.autograd.grad(sum(each.sin().sum() for each in want), leaves))


def test_wrong_arguments_get_one_sentence():
    x, residual, shift, scale, gate = parts().values()
    ada, index = fusednorm.ada_rms_norm, torch.zeros(3, 5, dtype=torch.int64)
    table = scale[:1]
    for call, kind, text in (
        (lambda: ada(x, scale, gate=gate), RuntimeError, "a gate must have a residual, got none"),
        (lambda: ada(x, scale[:2]), RuntimeError, r"scale must have shape \(3 or 1, 5 or 1, 24\), or the first"),
        (
            lambda: ada(x, table, index=index[:2]),
            RuntimeError,
            r"index must have int32 or int64 of x's batch shape \(3, 5",
        ),
        (
            lambda: ada(x, table, index=index.float()),
            RuntimeError,
            "index must have int32 or int64 .*, got torch.float32",
        ),
        (
            lambda: ada(x, scale, rounding="thrice"),
            ValueError,
            "rounding must be one of once, x_hat, steps, got 'thrice'",
        ),
        (lambda: fusednorm.rms_norm_add(x, residual, gate=gate, gate_activation="silu"), ValueError, "None, or 'tanh'"),
        (
            lambda: fusednorm.rms_norm_add(x, residual, gate_activation="tanh"),
            ValueError,
            "'tanh' of a gate, got 'tanh'",
        ),
        (lambda: fusednorm.rms_norm_add(x, residual, rounding="steps"), ValueError, "must be one of once, x_hat, got"),
        (
            lambda: torch.ops.fusednorm.rms_norm_fwd_modulated_plus_residual(x, [COLS], x, scale, modulate="cos"),
            RuntimeError,
            "modulate must be one of one_plus, identity, tanh, got 'cos'",
        ),
    ):
        with pytest.raises(kind, match=text):
            call()


@pytest.mark.parametrize("given, other", [("branch", "gate"), ("gate", "branch")])
def test_a_backward_takes_a_branch_and_its_gate_together(given, other):
    x, scale, rstd = draw(2, 5, COLS), draw(2, COLS), torch.ones(2, 5)
    alone = {"branch": x, "gate": scale}[given]
    with pytest.raises(RuntimeError, match=f"rms_norm_bwd_modulated: {given} must come with {other}"):
        torch.ops.fusednorm.rms_norm_bwd_modulated(x, x, (COLS,), rstd, scale, **{given: alone})


def test_gradients_of_a_table_have_derivatives():
    x, index = draw(2, 3, COLS, dtype=FP64, seed=1), torch.tensor([[2, 0, 0], [1, 2, 2]])
    table = draw(4, 3, COLS, dtype=FP64, seed=2).requires_grad_()

    def modulated(table, index):
        shift, scale, gate = table.unbind(-2)
        y, h = fusednorm.ada_layer_norm(x, scale, shift, residual=x, gate=gate, index=index)
        return (y.sin() * h.cos()).sum()

    ours, theirs = (
        torch.autograd.grad(
            torch.autograd.grad(modulated(*given), table, create_graph=True)[0].square().sum(), table
        )[0]
        for given in ((table, index), (table[index], None))
    )
    torch.testing.assert_close(ours, theirs)
    jacobian = torch.func.grad(lambda table: modulated(table, index))(table)
    torch.testing.assert_close(jacobian, torch.autograd.grad(modulated(table, index), table)[0])


@pytest.mark.parametrize("rows", [(0,), (2, 0)])
def test_tables_that_no_row_reads_have_gradients_of_zeros(rows):
    x, tables = draw(*rows, COLS), [draw(4, COLS, seed=at).requires_grad_() for at in (1, 2)]
    y = fusednorm.ada_layer_norm(x, *tables, index=torch.zeros(rows, dtype=torch.int64))
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), tables), map(torch.zeros_like, tables)))


def test_numbers_of_rows_known_only_at_run_time_compile():
    def norms_of_positive(*tensors):
        x, residual, scale = (each[tensors[0][:, 0] > 0] for each in tensors)  # torch gives each a number of its own
        y, h = fusednorm.ada_layer_norm(x, scale, scale[0], residual=residual, gate=scale)
        return fusednorm.rms_norm_add(y, h, gate=scale[:1])

    given = [draw(9, COLS, dtype=FP32, seed=seed).requires_grad_() for seed in (1, 2, 3)]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(norms_of_positive, backend="aot_eager", fullgraph=True)
        outputs = [norms(*given) for norms in (compiled, norms_of_positive)]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), given) for y in outputs))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_gradient_of_a_shift_for_each_row_shares_no_memory_with_that_of_y(norm):
    dy, x, scale, shift = (draw(3, COLS, dtype=FP32, seed=seed) for seed in range(4))
    statistics = (torch.ones(3),) * (2 if norm == "layer" else 1)
    backward = getattr(torch.ops.fusednorm, f"{norm}_norm_bwd_modulated")
    gradients = backward(dy, x, [COLS], *statistics, scale, None, None, shift)
    assert torch.equal(gradients[4], dy) and gradients[4].data_ptr() != dy.data_ptr()


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_norm_with_a_table_keeps_its_rows_and_no_row_of_x_for_its_backward(norm):
    x, index = draw(2, 30, COLS, seed=1).requires_grad_(), torch.zeros(2, 30, dtype=torch.int64)
    table, kept = draw(4, 3, COLS, seed=2).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        getattr(fusednorm, f"ada_{norm}_norm")(x, table[:, 0], table[:, 1], index=index)
    assert [each for each in kept if each.shape == x.shape] == [x]
