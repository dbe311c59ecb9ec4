"""Norms that are joined with what surrounds them, in all that models do with graphs: two of them in a process, breaks,
checkpoints, Inductor's modes, a table that several norms share."""

from __future__ import annotations

import pytest
import torch
from test_gates_in_graphs import mamba2, qwen3_next
from test_inductor import nothing_is_left  # noqa: F401
from test_modulations import C, dit, gated_sum, ops_in
from test_rotations import attention
from test_rotations import operands as heads
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tracing import Traced, backend_of, cpu_as_cuda, results, trace  # noqa: F401

import fusednorm
from fusednorm.integrations import gathering, inductor

pytestmark = pytest.mark.usefixtures("cpu_as_cuda", "nothing_is_left")


def layer(h):
    return F.layer_norm(h, (C,), eps=1e-6)


def modulated(x, residual, scale, shift, gate, weight):
    """A norm of a gated sum."""
    h = gated_sum(x, residual, gate)
    return dit(h, scale, shift, layer), h


def gated(x, residual, scale, shift, gate, weight):
    """A gate behind a norm, and one before the next."""
    return mamba2(qwen3_next(x, residual, weight) @ scale.T @ scale, residual, weight), residual


MODELS = {
    modulated: ["fusednorm.layer_norm_fwd_of_gated_sum_modulated", "fusednorm.layer_norm_bwd_modulated"],
    gated: ["fusednorm.rms_norm_fwd_times_gate", "fusednorm.rms_norm_fwd_of_gated", "fusednorm.rms_norm_bwd_of_gated",
            "fusednorm.rms_norm_bwd_times_gate"],
}  # fmt: skip
models = pytest.mark.parametrize("model", MODELS, ids=lambda each: each.__name__)


def operands():
    torch.manual_seed(0)
    shapes = [(2, 6, C)] * 2 + [(2, C)] * 3 + [(C,)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def check(got, want):
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def ran(traced):
    return [name for graph in (*traced.forwards, *traced.backwards) for name in ops_in(graph)]


@models
def test_each_of_two_graphs_has_its_own(model):
    def other(*given):
        return [each.cos() for each in model(*reversed(given[:2]), *given[2:])]

    traced, given = [trace(each, join="all") for each in (model, other)], operands()
    outputs = [each(*given) for each in traced]  # both, before a backward
    grads = [torch.autograd.grad(sum(each.sum() for each in of), given, allow_unused=True) for of in reversed(outputs)]
    for ours, each in zip(grads, (other, model), strict=True):
        check(ours, torch.autograd.grad(sum(y.sum() for y in each(*given)), given, allow_unused=True))
    assert [ran(each) for each in traced] == [MODELS[model]] * 2


@models
def test_a_graph_may_break_between_them(model):
    def twice(x, *given):
        y, h = model(x, *given)
        torch._dynamo.graph_break()
        return model(y, h, *given[1:])

    traced, given = trace(twice, join="all", fullgraph=False), operands()
    check(results(traced, given), results(twice, given))
    assert len(traced.forwards) == 2 and sorted(ran(traced)) == sorted(2 * MODELS[model])


@models
def test_checkpoints_recompute_them(model):
    traced = trace(lambda *given: checkpoint(model, *given, use_reentrant=False), join="all")
    given = operands()
    check(results(traced, given), results(model, given))
    forwards = [name for name in MODELS[model] if "fwd" in name]
    assert ops_in(traced.forward) == forwards
    assert [name for name in ops_in(traced.backward) if "bwd" in name] == MODELS[model][len(forwards) :]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@models
def test_they_are_found_in_modes_of_inductor(model, mode, monkeypatch):
    """All of Inductor but its code generation."""
    seen = []

    def run_the_graph(graph, inputs, **_):
        seen.extend(ops_in(graph))
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(inductor.inductor, "compile_fx_inner", run_the_graph)
    given = operands()
    with fusednorm.enable_inductor(join="all"):
        got = results(torch.compile(model, mode=mode), given)
    check(got, results(model, given))
    assert seen == MODELS[model]


def gate_between(x, residual, scale, shift, gate, weight):
    """A gate behind a norm and before the next."""
    return [layer(layer(x) * F.silu(residual)).sin()]


def residual_between(x, residual, scale, shift, gate, weight):
    """A modulated norm with a residual behind it, which the next one normalizes."""
    h = x + layer(x) * (1 + scale[:, None])
    return dit(h, scale, shift, layer), h


@pytest.mark.parametrize("model", [gate_between, residual_between], ids=lambda each: each.__name__)
def test_a_norm_may_read_what_another_one_replaces(model):
    traced, given = trace(model), operands()
    check(results(traced, given), results(model, given))
    assert ran(traced)


def beside_rotations(q, k, of_q, of_k, cos, sin, x, scale):
    """Its norm is traced behind those of q and k."""
    y = [layer(x) * (1 + scale)]
    return [*attention(q, k, of_q, of_k, cos, sin, swaps="never"), *y]


def test_a_norm_of_heads_may_be_beside_a_joined_one():
    """AOTAutograd may say of a backward that it is that of the op behind its own."""
    given = [*heads(), *(torch.randn(shape, requires_grad=True) for shape in ((2, 6, C), (2, 1, C)))]
    traced = trace(beside_rotations)
    check(results(traced, given), results(beside_rotations, given))
    assert {*ran(traced)[:2]} == {"fusednorm.head_norm_fwd", "fusednorm.layer_norm_fwd_modulated"}
    assert {*ran(traced)[2:]} == {"fusednorm.head_norm_bwd", "fusednorm.layer_norm_bwd_modulated"}
    assert {entry.form: entry.taken for entry in inductor.report()} == {"rotated": True, "modulated": True}


def of_a_table(x, table):
    """As diffusers' Wan: norms that are joined, and one of another form, take slices of one table."""
    scale, shift, gate, other = table.chunk(4, dim=1)
    x = x + gate * (layer(x) * (1 + scale) + shift).sin()
    return [layer(x).sin() * (1 + other) + shift]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_norms_that_share_a_table_give_it_the_whole_gradient(is_wrong, monkeypatch):
    """Where torch is wrong, an addition replaces the concatenation of sums."""
    monkeypatch.setattr(gathering, "IS_WRONG", is_wrong)
    monkeypatch.setattr(gathering, "MANY_ROWS", 1)
    given = [torch.randn(shape, requires_grad=True) for shape in ((2, 6, C), (2, 4, C))]
    traced = trace(of_a_table, join="modulated")
    check(results(traced, given), results(of_a_table, given))
    assert len([name for name in ran(traced) if name.endswith("_modulated")]) == 2
    assert any("aten.cat" in str(node.target) for node in traced.backward.graph.nodes) != is_wrong
