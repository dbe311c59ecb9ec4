"""Which backwards of a graph stay with Inductor, because an op would cut a fusion: as timed on an H200."""

from __future__ import annotations

import pytest
import torch
from test_inductor import nothing_is_left  # noqa: F401
from torch.nn import functional as F
from tracing import cpu_as_cuda, trace  # noqa: F401

from bench import graphs
from fusednorm.integrations import inductor

FASTER = {  # microseconds of a step in which Inductor has the backward, and in which it is our op
    "one_plus_weight": (215, 176),
    "residual_rms": (304, 270),
    "residual_layer": (175, 143),
    "rms_then_gate": (328, 368),
    "gate_then_rms": (547, None),
    "packed_heads": (431, 448),
    "modulated_layer": (389, 409),
    "modulated_rms": (362, 336),
}


@pytest.mark.parametrize("name", FASTER)
def test_the_faster_one_is_chosen_and_computes_the_same(name, cpu_as_cuda):  # noqa: F811
    made = graphs.make(name, "cpu", tiny=True)
    traced = trace(made.run, join=())
    grads = [torch.randn_like(each) for each in made.run(*made.inputs)]
    got = graphs.gradients(traced, made, grads)
    wide = [each.detach().double().requires_grad_() for each in made.inputs]
    exact = graphs.gradients(made.run, graphs.Made(made.run, wide, wide), [each.double() for each in grads])
    assert [each.dtype for each in got] == [each.dtype for each in made.leaves]
    least = graphs.errors(graphs.gradients(made.run, made, grads), exact)
    for error, most in zip(graphs.errors(got, exact), least, strict=True):
        assert error <= graphs.FACTOR * max(most, 2**-10)
    stock, ours = FASTER[name]
    backwards = [entry for entry in inductor.report() if entry.direction == "backward"]
    assert backwards and {entry.taken for entry in backwards} == {ours is not None and ours < stock}, inductor.report()


def gated(x, gate, weight):
    return graphs.rms(x, weight) * F.silu(gate)


def test_a_backward_left_to_inductor_serves_every_row_count_and_width(cpu_as_cuda):  # noqa: F811
    traced = trace(gated, join=(), dynamic=True)
    for rows, cols in ((6, 32), (9, 48), (5, 80)):
        x, gate = (torch.randn(2, rows, cols, requires_grad=True) for _ in range(2))
        operands = x, gate, torch.randn(cols, requires_grad=True)
        got, want = (torch.autograd.grad(run(*operands).square().sum(), operands) for run in (traced, gated))
        torch.testing.assert_close(got, want)
    assert len(traced.backwards) == 1 and not ops_of_ours(traced.backward)


def ops_of_ours(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if "fusednorm" in str(node.target)]


def test_the_reason_names_what_would_be_cut(cpu_as_cuda):  # noqa: F811
    operands = [torch.randn(*shape, requires_grad=True) for shape in ((6, 32), (6, 32), (32,))]
    trace(gated, join=())(*operands).square().sum().backward()
    (entry,) = (entry for entry in inductor.report() if entry.direction == "backward")
    assert "element-wise code at grad_out: our op would move 2 tensors of x's size more there" in entry.reason
    assert "graphs.py" in entry.place and "in rms" in entry.place, "outside of modules the line of code"


USES = {  # of y, and whether the op pays
    "one product": (lambda y, a, b: y @ a, True),
    "two products": (lambda y, a, b: (y @ a, y @ b), False),
    "element-wise behind a product": (lambda y, a, b: (y @ a).tanh() @ b, True),
    "views alone": (lambda y, a, b: y.reshape(2, -1, 8, 4).unsqueeze(0), True),
}


@pytest.mark.parametrize(("use", "pays"), USES.values(), ids=USES)
def test_products_alone_are_in_memory_and_their_sums_are_not(use, pays, cpu_as_cuda):  # noqa: F811
    def model(x, weight, a, b):
        outputs = use(graphs.rms(x, weight), a, b)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    operands = [torch.randn(*shape, requires_grad=True) for shape in ((2, 6, 32), (32,), (32, 32), (32, 32))]
    traced = trace(model)
    grads = [torch.randn_like(each) for each in model(*operands)]
    got, want = (torch.autograd.grad(run(*operands), operands[:2], grads) for run in (traced, model))
    torch.testing.assert_close(got, want)
    assert bool(ops_of_ours(traced.backward)) == pays


def made_by_element_wise_code(a, b, bias):
    """Of two products whose biases' gradients are sums over rows."""
    return torch.tanh(F.linear(a, b, bias) + F.linear(a.sin(), b, bias))


BETWEEN = {  # what is before and behind the norm, and whether what surrounds it is joined: behind it, before it
    "products": (F.linear, lambda y: y, (True, True)),
    "element-wise code before it": (made_by_element_wise_code, lambda y: y, (False, True)),
    "element-wise code behind it": (F.linear, torch.sin, (False, True)),
    "both": (made_by_element_wise_code, torch.sin, (False, True)),
}


@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize(("before", "behind", "joins"), BETWEEN.values(), ids=BETWEEN)
def test_a_gate_is_joined_if_that_saves_more_than_it_cuts(before, behind, joins, is_before, cpu_as_cuda):  # noqa: F811
    def model(a, b, gate, weight):
        x, gate = before(a, b, weight), F.silu(gate)
        return [behind(graphs.rms(x * gate, weight) if is_before else graphs.rms(x, weight) * gate) @ b]

    operands = [torch.randn(*shape, requires_grad=True) for shape in ((2, 6, 32), (32, 32), (2, 6, 32), (32,))]
    traced = trace(model)
    dy = [torch.randn(2, 6, 32)]
    got, want = (torch.autograd.grad(run(*operands), operands, dy) for run in (traced, model))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    is_joined = joins[is_before]
    form = "of gated" if is_before else "times gate"
    found = {(entry.direction, entry.taken): entry.reason for entry in inductor.report() if entry.form == form}
    assert {*found} == {(way, is_joined) for way in ("forward", "backward")}
    assert any("gate" in name for name in ops_of_ours(traced.forward)) == is_joined
    if not is_joined:
        assert "tensors of x's size more there, and 2.3 less itself" in found["forward", False]
        (alone,) = (each for each in inductor.report() if each.direction == "backward" and each.form != form)
        assert alone.norm == "rms", "the norm alone is in the report, too"
