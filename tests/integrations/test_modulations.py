"""Modulated norms of diffusion transformers in the graphs of torch.compile: found as one op, with the same results."""

from __future__ import annotations

import functools

import pytest
import torch
from cases import BF16, FP32, FP64
from test_forwards import llama
from test_inductor import nothing_is_left  # noqa: F401
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tracing import assert_alike, assert_as_exact, calls, cpu_as_cuda, results, trace  # noqa: F401

from fusednorm.integrations import inductor, joining
from fusednorm.operands import OPS
from fusednorm.planner.device import H200

pytestmark = [pytest.mark.usefixtures("cpu_as_cuda", "nothing_is_left"), pytest.mark.filterwarnings("error:erase_node")]
C, EPS = 32, 1e-6


def layer(x, weight):
    return F.layer_norm(x, (C,), eps=EPS)


def layer_with_weight(x, weight):
    weight = weight.to(x.dtype)
    return F.layer_norm(x, (C,), weight, weight, EPS)


def rms(x, weight):
    return F.rms_norm(x, (C,), weight, EPS)


def layer_by_hand(x, weight):
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


NORMS = {"layer": [layer, layer_with_weight, layer_by_hand], "rms": [rms, llama]}
EVERY = [norm for norms in NORMS.values() for norm in norms]


def dit(h, scale, shift, norm):
    return norm(h) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def sd3(h, scale, shift, norm):
    return shift[:, None] + norm(h) * (scale[:, None] + 1)


def wan(h, scale, shift, norm):
    return (norm(h.float()) * (1 + scale[:, None].float()) + shift[:, None].float()).type_as(h)


def z_image(h, scale, shift, norm):
    return norm(h) * (1 + scale.unsqueeze(1))


def continuous(h, scale, shift, norm):
    """As diffusers' AdaLayerNormContinuous."""
    return norm(h) * (1 + scale)[:, None, :] + shift[:, None, :]


def z_image_at_the_end(h, scale, shift, norm):
    return norm(h) * (1.0 + scale).unsqueeze(1)


def at_once(h, scale, shift, norm):
    return torch.addcmul(shift[:, None], norm(h), 1 + scale[:, None])


def at_once_by_method(h, scale, shift, norm):
    return shift[:, None].addcmul((scale + 1)[:, None], norm(h))


WRITTEN = [dit, sd3, wan, z_image]
MORE = [continuous, z_image_at_the_end, at_once, at_once_by_method]


def no_sum(x, residual, gate):
    return residual


def plain_sum(x, residual, gate):
    return residual + x


def gated_sum(x, residual, gate):
    return residual + gate.unsqueeze(1) * x


def gated_sum_of_wan(x, residual, gate):
    return (residual.float() + x * gate[:, None].float()).type_as(residual)


def gated_sum_at_once(x, residual, gate):
    return torch.addcmul(residual, gate.unsqueeze(1), x)


SUMS = {"": no_sum, "of_sum": plain_sum, "of_gated_sum": gated_sum, "of_gated_sum ": gated_sum_of_wan}


def block(x, residual, scale, shift, gate, weight, norm=layer, written=dit, summed=gated_sum):
    """(y, h): h is used again, as a residual stream is."""
    h = summed(x, residual, gate)
    return written(h, scale, shift, functools.partial(norm, weight=weight)), h * 2


def operands(dtype=FP32, of=FP32, tokens=6, samples=2):
    torch.manual_seed(0)
    rows = [torch.randn(samples, tokens, C).to(dtype) for _ in range(2)]
    modulations = [torch.randn(samples, C).to(of) for _ in range(3)]
    return [each.requires_grad_() for each in (*rows, *modulations, torch.randn(C).to(dtype))]


def assert_computes(traced, model, given):
    """The outputs and gradients of the model."""
    assert_alike(traced, model, given, atol=1e-4, rtol=1e-4)


def ops_in(graph):
    found = [str(node.target).removesuffix(".default") for node in graph.graph.nodes if node.op == "call_function"]
    return [name for name in found if name.startswith("fusednorm.")]


def assert_is_one_op(traced, norm, of):
    kind = next(kind for kind, norms in NORMS.items() if norm in norms)
    of = of.strip() and f"{of.strip()}_"
    assert ops_in(traced.forward) == [f"fusednorm.{kind}_norm_fwd_{of}modulated"]
    assert ops_in(traced.backward) == [f"fusednorm.{kind}_norm_bwd_modulated"]


def every_way() -> list:
    """(norm, modulation, the op's sum, the sum): each with each, but what is seldom with one norm."""
    ways = [(norm, written, *of) for norm in EVERY for written in WRITTEN for of in SUMS.items()]
    ways += [(layer_by_hand, written, "of_gated_sum", gated_sum_at_once) for written in MORE]
    return [pytest.param(*each, id="-".join(getattr(of, "__name__", of) for of in each)) for each in ways]


@pytest.mark.parametrize("norm, written, of, summed", every_way())
def test_norm_modulation_and_sum_are_one_op_in_both_directions(norm, written, of, summed):
    model, given = functools.partial(block, norm=norm, written=written, summed=summed), operands()
    traced = trace(model, join="modulated")
    got, want = assert_alike(traced, model, given, atol=1e-4, rtol=1e-4)
    assert [each.stride() for each in got] == [each.stride() for each in want]
    assert_is_one_op(traced, norm, of)
    form = f"{of.strip()} modulated".strip().replace("_", " ")
    told = sorted((entry.direction, entry.form, entry.taken, count) for entry, count in inductor.report().items())
    assert told == [("backward", form, True, 1), ("forward", form, True, 1)], "once"


@pytest.mark.parametrize("of", [FP32, BF16], ids=str)
@pytest.mark.parametrize("summed", SUMS.values(), ids=lambda each: each.__name__)
@pytest.mark.parametrize("norm", EVERY, ids=lambda each: each.__name__)
def test_bfloat16_is_as_exact_as_it_was(norm, summed, of):
    written = wan if of == FP32 else dit
    summed = gated_sum_of_wan if summed is gated_sum and of == FP32 else summed
    model, given = functools.partial(block, norm=norm, written=written, summed=summed), operands(BF16, of, tokens=64)
    traced = trace(model, join="modulated")
    assert_as_exact(traced, model, given)
    assert len(ops_in(traced.forward)) == 1


@pytest.mark.parametrize("written", [*WRITTEN, *MORE], ids=lambda each: each.__name__)
def test_a_sum_may_be_of_use_to_the_norm_alone(written):
    def model(x, residual, scale, shift, gate, weight):
        return [written(gated_sum(x, residual, gate), scale, shift, functools.partial(layer, weight=None))]

    traced, given = trace(model, join="modulated"), operands()
    assert_computes(traced, model, given)
    assert_is_one_op(traced, layer, "of_gated_sum")


def test_a_number_may_be_added_before_the_norm():
    def model(x, residual, scale, shift, gate, weight):
        return [dit(x + 1, scale, shift, functools.partial(layer, weight=None))]

    traced, given = trace(model, join="modulated"), operands()
    assert_computes(traced, model, given)
    assert_is_one_op(traced, layer, "")


def test_a_cast_to_the_dtype_of_another_tensor_reads_none_of_it():
    """A former loss, in diffusers' Wan in float32: what was written in place to compute that tensor counted as read."""

    def model(x, residual, scale, shift, gate, weight):
        written = torch.empty_like(x)
        written[:] = residual.tanh()
        h = residual + x.sin().type_as(written)
        return dit(h, scale, shift, functools.partial(layer, weight=None)), h * written

    traced, given = trace(model, join="modulated"), operands()
    assert_computes(traced, model, given)
    assert_is_one_op(traced, layer, "of_sum")


def test_modulations_may_be_of_tokens_and_of_all_samples():
    def model(x, residual, scale, shift, gate, weight):
        h = residual + x * gate
        return layer(h, None) * (1 + scale) + shift, h

    for shape in ((2, 6, C), (2, 1, C), (1, 1, C)):
        given = operands()
        given[2:5] = [torch.randn(shape).requires_grad_() for _ in range(3)]
        traced = trace(model, join="modulated")
        assert_computes(traced, model, given)
        assert_is_one_op(traced, layer, "of_gated_sum")


def stream(x, residual, scale, shift, gate, weight):
    """Two blocks, whose modulations are slices of one table, made after the first sum."""
    for _ in range(2):
        table = torch.stack([scale, shift, gate], 1) * residual.mean((1, 2))[:, None, None]
        scales, shifts, gates = table.chunk(3, 1)
        x = layer(residual, None) * (1 + scales) + shifts
        residual = residual + gates * x.tanh()
        table = table.sin()
        x = layer(residual, None) * (1 + table[:, 0, None]) + table[:, 1, None]
        residual = residual + table[:, 2, None] * x.sin()
    return residual, x


@pytest.mark.parametrize("around", [stream, lambda *given: checkpoint(stream, *given, use_reentrant=False)])
def test_a_stream_of_blocks_trains_as_before(around):
    traced, given = trace(around, join="modulated"), operands(FP64)
    got, want = assert_alike(traced, stream, given)
    assert len([name for name in ops_in(traced.backward) if "bwd" in name]) == 4


def test_one_graph_serves_any_number_of_rows_and_samples():
    traced = trace(block, join="modulated")
    for tokens, samples in ((6, 2), (9, 3), (5, 4)):
        given = operands(tokens=tokens, samples=samples)
        for each in given[:5]:
            torch._dynamo.mark_dynamic(each, 0)
        for each in given[:2]:
            torch._dynamo.mark_dynamic(each, 1)
        assert_computes(traced, block, given)
    assert_is_one_op(traced, layer, "of_gated_sum")


def used_twice(h, scale, shift, norm):
    y = norm(h)
    return y * (1 + scale[:, None]) + shift[:, None] + y.mean()


def two_plus(h, scale, shift, norm):
    return norm(h) * (2 + scale[:, None]) + shift[:, None]


def scaled_by_two(h, scale, shift, norm):
    return torch.addcmul(shift[:, None], norm(h), 1 + scale[:, None], value=2)


def a_part_of_the_scale(h, scale, shift, norm):
    return norm(h) * (1 + scale)[:1, None] + shift[:1, None]


def no_plus_behind_a_view(h, scale, shift, norm):
    plus = 1 + scale
    plus.mul_(2)
    return norm(h) * plus[:, None] + shift[:, None]


def shift_of_all_rows(h, scale, shift, norm):
    return torch.addcmul(h, norm(h), 1 + scale[:, None]) + shift[:, None]


def no_plus(h, scale, shift, norm):
    return norm(h) * scale[:, None] + shift[:, None]


def by_column(h, scale, shift, norm):
    return norm(h) * (1 + scale[0]) + shift[0]


def by_place(h, scale, shift, norm):
    """Rows of all samples share a row: its sum is over rows that are not next to each other."""
    return norm(h) * (1 + scale.mean(0) * h.detach().mean((0, 2))[None, :, None]) + shift[:, None]


def written_over(h, scale, shift, norm):
    y = norm(h)
    y.mul_(2)
    return y * (1 + scale[:, None]) + shift[:, None]


def narrowed(h, scale, shift, norm):
    return (norm(h) * (1 + scale[:, None]) + shift[:, None]).half()


def scale_without_gradients(h, scale, shift, norm):
    with torch.no_grad():
        scale = 1 + scale
    return norm(h) * scale[:, None] + shift[:, None]


def result_without_gradients(h, scale, shift, norm):
    y = norm(h)
    with torch.no_grad():
        y = y * (1 + scale[:, None]) + shift[:, None]
    return y * h


OTHERS = [used_twice, two_plus, no_plus, by_column, by_place, written_over, scaled_by_two, a_part_of_the_scale,
          no_plus_behind_a_view, shift_of_all_rows, scale_without_gradients, result_without_gradients]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS, ids=lambda each: each.__name__)
def test_other_code_stays_as_it_is(other):
    model, given = functools.partial(block, written=other), operands()
    traced = trace(model, join="modulated")
    assert_computes(traced, model, given)
    assert not any("modulated" in name for name in ops_in(traced.forward) + ops_in(traced.backward))


def test_a_result_may_be_narrower():
    model, given = functools.partial(block, written=narrowed), operands()
    traced = trace(model, join="modulated")
    assert_alike(traced, model, given, atol=2e-2, rtol=2e-3)


def watched(x, residual, scale, shift, gate, weight):
    h = residual + gate[:, None] * x
    y = dit(h, scale, shift, functools.partial(layer, weight=None))
    with torch.no_grad():
        norms = h.norm() + y.norm()
    return y, h * norms


def made_without_gradients(x, residual, scale, shift, gate, weight):
    h = residual + gate[:, None] * x
    with torch.no_grad():
        table = torch.stack([scale, shift], 1)
    return dit(h, table[:, 0], table[:, 1], functools.partial(layer, weight=None)), h * 2


@pytest.mark.parametrize("model", [watched, made_without_gradients], ids=lambda each: each.__name__)
def test_gradients_may_be_off_for_what_is_before_and_behind(model):
    traced, given = trace(model, join="modulated"), operands()
    assert_computes(traced, model, given)


def h_is_written_over(x, residual, scale, shift, gate, weight):
    h = residual + gate[:, None] * x
    h.mul_(2)
    return dit(h, scale, shift, functools.partial(layer, weight=None)), h


def a_scale_of_h(x, residual, scale, shift, gate, weight):
    h = residual + gate[:, None] * x
    y = layer(h, None) * (1 + h.mean(1, keepdim=True)) + shift[:, None]
    return y, h


def a_shift_of_h(x, residual, scale, shift, gate, weight):
    h = residual + gate[:, None] * x
    return layer(h, None) * (1 + scale[:, None]) + h[:, :1], h


def h_as_shift(x, residual, scale, shift, gate, weight):
    scale, gate = (each[:, None].expand_as(x) for each in (scale, gate))
    h = residual + gate * x
    return layer(h, None) * (1 + scale) + h, h


OF_H = [h_is_written_over, a_scale_of_h, a_shift_of_h, h_as_shift]


@pytest.mark.parametrize("model", OF_H, ids=lambda each: each.__name__)
def test_what_cannot_wait_for_the_modulation_is_no_part_of_the_op(model):
    traced, given = trace(model, join="modulated"), operands()
    assert_computes(traced, model, given)
    assert not any("sum" in name for name in ops_in(traced.forward))


KERNELS = [(BF16, (4, 1), 3072, True), (FP32, (4, 1), 3072, True), (BF16, (4, 512), 3072, True)]


@pytest.mark.parametrize("op", [name for name in OPS if "fwd" in name and name.endswith("_modulated")])
@pytest.mark.parametrize("of, batch, cols, has", [*KERNELS, (BF16, (4, 1), 2**18, False)])
def test_there_must_be_kernels_in_both_directions(op, of, batch, cols, has):
    rows = {name: torch.empty(4, 512, cols, dtype=BF16, device="meta") for name in ("x", "residual")}
    modulations_ = {name: torch.empty(*batch, cols, dtype=of, device="meta") for name in ("scale", "shift", "gate")}
    given = {name: each for name, each in (rows | modulations_).items() if OPS[op].slot(name)}
    assert joining.has_kernels(OPS[op], given | {"normalized_shape": [cols], "eps": EPS}, H200) == has


def test_norms_can_be_left_apart():
    traced = trace(block, join=())
    results(traced, operands())
    assert not calls(traced.forward, "fusednorm.layer_norm_fwd_of_gated_sum_modulated")


def lumina(x, residual, gate, norm):
    return residual + gate.unsqueeze(1).tanh() * norm(x)


def mochi(x, residual, gate, norm):
    return norm(x) * torch.tanh(gate).unsqueeze(1) + residual


def tanh_by_name(x, residual, gate, norm):
    return norm(x) * torch.tanh(input=gate).unsqueeze(1) + residual


def without_tanh(x, residual, gate, norm):
    return residual + norm(x) * gate[:, None]


def behind_at_once(x, residual, gate, norm):
    return torch.addcmul(residual, gate[:, None], norm(x))


BEHIND = [lumina, mochi, tanh_by_name, without_tanh, behind_at_once]


def stream_behind(x, residual, scale, shift, gate, weight, written=lumina, norm=llama):
    """As diffusers' Z-Image: a gated residual behind a norm, and a modulated norm of the sum."""
    h = written(x, residual, gate, functools.partial(norm, weight=weight))
    return dit(h, scale, shift, functools.partial(layer, weight=None)), h


@pytest.mark.parametrize("norm", [llama, layer_with_weight], ids=lambda each: each.__name__)
@pytest.mark.parametrize("written", BEHIND, ids=lambda each: each.__name__)
def test_a_gated_residual_behind_a_norm_is_joined_too(written, norm):
    model, given = functools.partial(stream_behind, written=written, norm=norm), operands()
    traced = trace(model, join="modulated")
    got, want = assert_alike(traced, model, given, atol=1e-4, rtol=1e-4)
    assert [each.stride() for each in got] == [each.stride() for each in want]
    kind = "rms" if norm is llama else "layer"
    behind, before = f"fusednorm.{kind}_norm_fwd_modulated_plus_residual", "fusednorm.layer_norm_fwd_modulated"
    assert ops_in(traced.forward) == [behind, before]
    assert ops_in(traced.backward) == ["fusednorm.layer_norm_bwd_modulated", f"fusednorm.{kind}_norm_bwd_modulated"]
    assert {entry.form for entry in inductor.report()} == {"modulated plus residual", "modulated"}


@pytest.mark.parametrize("written", [lumina, without_tanh], ids=lambda each: each.__name__)
def test_bfloat16_behind_a_norm_is_as_exact_as_it_was(written):
    model, given = functools.partial(stream_behind, written=written), operands(BF16, BF16, tokens=64)
    assert_as_exact(trace(model, join="modulated"), model, given)
