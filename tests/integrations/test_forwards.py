"""Forwards in the graphs of torch.compile: our op where nothing else would be fused, with what it can include."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP32
from test_inductor import nothing_is_left  # noqa: F401
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tracing import assert_alike, assert_as_exact, calls, cpu_as_cuda, trace  # noqa: F401

from bench.models import make_stack
from fusednorm.integrations import forwards, inductor

pytestmark = pytest.mark.usefixtures("cpu_as_cuda", "nothing_is_left", "narrow")
C, EPS = 64, 1e-6


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(forwards, "READ_ONCE", C // 2)


def rms(x, weight):
    return F.rms_norm(x, (C,), weight, EPS)


def layer(x, weight):
    return F.layer_norm(x, (C,), weight, weight, EPS)


def llama(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * h.to(x.dtype)


def gemma(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (h * (1.0 + weight.float())).type_as(x)


NORMS = [rms, layer, llama, gemma]


def operands(dtype=FP32, rows=6, residual_dtype=None):
    torch.manual_seed(0)
    shapes = (2, rows, C), (2, rows, C), (C,), (C, C)
    dtypes = dtype, residual_dtype or dtype, dtype, dtype
    made = [torch.randn(shape).to(each) for shape, each in zip(shapes, dtypes, strict=True)]
    return [(each / C**0.5 if each.shape == (C, C) else each).requires_grad_() for each in made]


def assert_as_stock(traced, model, given):
    got, stock = assert_as_exact(traced, model, given)
    assert [each.stride() for each in got] == [each.stride() for each in stock]


def ops_of(traced):
    return [str(node.target).split(".")[1] for node in traced.forward.graph.nodes if "fusednorm" in str(node.target)]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=lambda each: each.__name__)
def test_a_sum_and_its_norm_are_one_op(norm, dtype):
    def model(x, residual, weight, of_linear):
        h = residual + F.linear(x, of_linear)
        return F.linear(norm(h, weight), of_linear), h

    traced, given = trace(model, join="forwards"), operands(dtype)
    assert_as_stock(traced, model, given)
    (op,) = ops_of(traced)
    assert op.endswith("_norm_fwd_of_sum") and not calls(traced.forward, "aten.add.Tensor")
    told = [(each.direction, each.taken) for each, count in inductor.report().items() for _ in range(count)]
    assert sorted(told) == [("backward", True), ("forward", True)], "the norm once"


@pytest.mark.parametrize("norm", NORMS, ids=lambda each: each.__name__)
def test_a_norm_of_what_is_in_memory_is_an_op(norm):
    def model(x, residual, weight, of_linear):
        return (norm(x, 1 + weight) @ of_linear,)

    traced, given = trace(model, join="forwards"), operands()
    assert_as_stock(traced, model, given)
    (op,) = ops_of(traced)
    (node,) = calls(traced.forward, f"fusednorm.{op}")
    assert norm in (llama, gemma) or node.kwargs["weight_offset"] == 1.0


def test_sums_may_be_of_two_dtypes():
    """As under autocast: a residual in float32, products in bfloat16."""

    def model(x, residual, weight, of_linear):
        h = residual + F.linear(x, of_linear)
        return F.layer_norm(h, (C,), weight.to(h.dtype), None, EPS).to(x.dtype) @ of_linear, h

    traced, given = trace(model, join="forwards"), operands(BF16, residual_dtype=FP32)
    assert_as_stock(traced, model, given)
    assert ops_of(traced) == ["layer_norm_fwd_of_sum"]
    assert not calls(traced.forward, "prims.convert_element_type"), "the op narrows y, and reads the weight as it is"


def test_autocast_is_part_of_the_op():
    def model(x, residual, weight, of_linear):
        with torch.autocast("cpu", BF16):
            return (F.linear(F.layer_norm(x, (C,), weight, weight, EPS), of_linear),)

    traced, given = trace(model, join="forwards"), operands()
    assert_alike(traced, model, given, atol=0.05, rtol=0.05)
    (op,) = calls(traced.forward, "fusednorm.layer_norm_fwd_affine")
    assert op.meta["val"][0].dtype == BF16


@pytest.mark.parametrize("name, count", [("gpt2", 5), ("llama", 5)])
def test_all_norms_of_a_stack_are_ops_and_no_more_is_saved_for_the_backward(name, count):
    model, x = make_stack(name, depth=2, width=C, heads=4), torch.randn(2, 8, C)

    def run(call):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])]

    traced, before, want = trace(model, join="forwards"), trace(model), run(model)
    for call in (traced, before):
        torch._dynamo.reset()
        for got, of_stock in zip(run(call), want, strict=True):
            torch.testing.assert_close(got, of_stock, atol=1e-4, rtol=1e-3)
    assert len(ops_of(traced)) == count and sum("of_sum" in each for each in ops_of(traced)) == count - 1
    assert saved(traced) <= saved(before)


def saved(traced):
    """Bytes from forward to backward."""
    values = [node.meta["val"] for node in traced.backward.graph.find_nodes(op="placeholder")]
    return sum(each.nbytes for each in values if isinstance(each, torch.Tensor))


def test_one_graph_serves_any_number_of_rows():
    def model(x, residual, weight, of_linear):
        h = residual + x
        return rms(h, weight) @ of_linear, h

    traced = trace(model, join="forwards")
    for rows in (6, 9, 5):
        given = operands(rows=rows)
        for each in given[:2]:
            torch._dynamo.mark_dynamic(each, 1)
        assert_as_stock(traced, model, given)
    assert ops_of(traced) == ["rms_norm_fwd_of_sum"]


def test_the_columns_of_what_x_is_made_of_may_vary():
    def model(x, residual, weight, of_linear):
        y = F.rms_norm(F.silu(x.chunk(2, -1)[0]) * residual, (C,), weight, EPS)
        h = F.linear(y, of_linear).unflatten(-1, (3, C)).split([1, 1, 1], dim=2)[0]
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS),)

    weight, of_linear = (torch.randn(shape, requires_grad=True) for shape in ((C,), (3 * C, C)))
    given = [torch.randn(2, 1, 2 * C), torch.randn(2, 1, C), weight, of_linear]
    trace(model, dynamic=True)(*given)


def gated(x, residual, weight, of_linear):
    return (rms(x, weight) * F.silu(residual),)


def narrowed_and_activated(x, residual, weight, of_linear):
    return (F.silu(rms(x, weight).to(BF16)),)


def of_product(x, residual, weight, of_linear):
    return (rms(x * residual, weight) @ of_linear,)


def of_three(x, residual, weight, of_linear):
    return (rms(x + residual + x.sin(), weight) @ of_linear,)


def of_scaled(x, residual, weight, of_linear):
    return (rms(torch.add(x, residual, alpha=2), weight) @ of_linear,)


def of_row(x, residual, weight, of_linear):
    return (rms(x + residual[:, :1], weight) @ of_linear,)


def with_a_maximum(x, residual, weight, of_linear):
    y = rms(x, weight)
    return y @ of_linear, y.amax(-1)


def with_two_norms(x, residual, weight, of_linear):
    h = x + residual
    return rms(h, weight) @ of_linear, layer(h, weight) @ of_linear


def with_another_use_of_the_sum(x, residual, weight, of_linear):
    h = x + residual
    return rms(h, weight) @ of_linear, h.cos()


def norm_of_a_norm(x, residual, weight, of_linear):
    return (layer(rms(x, weight), weight) @ of_linear,)


def of_embedding(x, residual, weight, of_linear):
    return (rms(F.embedding(torch.arange(4), of_linear), weight) @ of_linear,)


def transposed(x, residual, weight, of_linear):
    return (rms(x.transpose(0, 1), weight) @ of_linear,)


OTHERS = [gated, narrowed_and_activated, of_product, of_three, of_scaled, of_row, with_a_maximum, with_two_norms,
          with_another_use_of_the_sum, norm_of_a_norm, of_embedding, transposed]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS, ids=lambda each: each.__name__)
def test_a_forward_stays_with_inductor_where_something_else_would_be_fused(other):
    traced, given = trace(other, join="forwards"), operands()
    assert_as_exact(traced, other, given)
    assert not ops_of(traced)
    assert not any(each.taken for each in inductor.report() if each.direction == "forward")


def test_a_sum_that_later_kernels_read_may_be_the_ops():
    """h is in memory when the second sum reads it."""

    def model(x, residual, weight, of_linear):
        h = x + residual
        second = h + rms(h, weight) @ of_linear
        return rms(second, weight) @ of_linear, second

    traced, given = trace(model, join="forwards"), operands()
    assert_as_stock(traced, model, given)
    assert ops_of(traced) == ["rms_norm_fwd_of_sum"] * 2


def test_checkpointing_makes_the_op_again():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(C, EPS), nn.Linear(C, C)

        def forward(self, x, residual):
            h = x + residual
            return self.linear(self.norm(h).mm(self.linear.weight) if h.dim() == 2 else self.norm(h)), h

    blocks = nn.ModuleList([Block(), Block()])

    def model(x, residual):
        for block in blocks:
            x, residual = checkpoint(block, x, residual, use_reentrant=False)
        return x, residual

    traced, given = trace(model, join="forwards"), operands()[:2]
    assert_alike(traced, model, given, atol=1e-5, rtol=1e-4)
    assert ops_of(traced) == ["rms_norm_fwd_of_sum"] * 2
    assert len(calls(traced.backward, "fusednorm.rms_norm_fwd_of_sum")) >= 1


def test_a_norm_by_hand_is_ours_in_both_directions_or_in_none():
    """Two products read y, whose gradients Inductor adds in the backward."""

    def model(x, residual, weight, of_linear):
        y = llama(x, weight)
        return y @ of_linear, y @ of_linear.T

    traced, given = trace(model, join="forwards"), operands()
    assert_as_stock(traced, model, given)
    assert not ops_of(traced) and {each.taken for each in inductor.report()} == {False}


def test_no_gradient_is_needed():
    def model(x, residual, weight, of_linear):
        h = x + residual
        return rms(h, weight) @ of_linear, h

    traced, given = trace(model, join="forwards"), [each.detach() for each in operands()]
    with torch.no_grad():
        for got, want in zip(traced(*given), model(*given), strict=True):
            torch.testing.assert_close(got, want)


def test_narrow_rows_stay_with_inductor(monkeypatch):
    monkeypatch.setattr(forwards, "READ_ONCE", C)

    def model(x, residual, weight, of_linear):
        return (rms(x, weight) @ of_linear,)

    traced, given = trace(model, join="forwards"), operands()
    assert_as_stock(traced, model, given)
    assert not ops_of(traced)
    (entry,) = (each for each in inductor.report() if each.direction == "forward")
    assert "rows of at most 64 columns" in entry.reason
