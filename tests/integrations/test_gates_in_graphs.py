"""Norms with a gate, as models with linear attention write them, in the graphs of torch.compile: found as one op, with
the same results."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from cases import BF16, FP32
from test_inductor import nothing_is_left  # noqa: F401
from test_modulations import ops_in
from torch.nn import functional as F
from tracing import assert_alike, assert_as_exact, cpu_as_cuda, results, trace  # noqa: F401

import fusednorm
from fusednorm.forms import ACTIVATIONS
from fusednorm.integrations import gates, inductor, joining
from fusednorm.operands import OPS
from fusednorm.planner.device import H200

pytestmark = pytest.mark.usefixtures("cpu_as_cuda", "nothing_is_left")
C, EPS = 32, 1e-6


def mean_square(h):
    return h.pow(2).mean(-1, keepdim=True)


def qwen3_next(x, gate, weight):
    h = x.to(FP32)
    h = h * torch.rsqrt(mean_square(h) + EPS)
    h = weight * h.to(x.dtype)
    return (h * F.silu(gate.to(FP32))).to(x.dtype)


def fla(x, gate, weight):
    h = x.float()
    h = h * torch.rsqrt(mean_square(h) + EPS) * weight.float()
    return (h * gate.float().sigmoid()).to(x.dtype)


def of_torch(x, gate, weight):
    return torch.sigmoid(gate) * F.rms_norm(x, (C,), weight, EPS)


def layer_of_torch(x, gate, weight):
    return F.layer_norm(x, (C,), weight, weight, EPS) * F.silu(gate)


def mamba2(x, gate, weight, groups=1):
    """As transformers' MambaRMSNormGated."""
    h = x.to(FP32)
    h = h * F.silu(gate.to(FP32))
    of_groups = h.view(*h.shape[:-1], groups, C // groups)
    of_groups = of_groups * torch.rsqrt(mean_square(of_groups) + EPS)
    return weight * of_groups.view(*h.shape[:-1], C).to(x.dtype)


def bamba(x, gate, weight):
    h = x.to(FP32) * F.silu(gate.to(FP32))
    h = h * torch.rsqrt(mean_square(h) + EPS)
    return weight * h.to(x.dtype)


def behind_by_torch(x, gate, weight):
    return F.rms_norm(x * F.silu(gate), (C,), weight, EPS)


def layer_behind(x, gate, weight):
    return F.layer_norm(gate.sigmoid() * x, (C,), weight, weight, EPS)


TIMES_GATE = [qwen3_next, fla, of_torch, layer_of_torch]
OF_GATED = [mamba2, functools.partial(mamba2, groups=4), bamba, behind_by_torch, layer_behind]
EVERY = [(each, "times_gate") for each in TIMES_GATE] + [(each, "of_gated") for each in OF_GATED]


def operands(dtype=FP32, tokens=6, samples=2):
    """x, and a gate that is a slice of a projection's output."""
    torch.manual_seed(0)
    both = torch.randn(samples, tokens, 3 * C).to(dtype)
    weight = torch.randn(C).to(dtype)
    return [each.requires_grad_() for each in (both[..., :C].clone(), both, weight)]


def of_slice(norm):
    return lambda x, both, weight: [norm(x, both[..., C : 2 * C], weight)]


def assert_is_one_op(traced, form):
    (forward,), (backward,) = ops_in(traced.forward), ops_in(traced.backward)
    assert forward.endswith(f"_norm_fwd_{form}") and backward.endswith(f"_norm_bwd_{form}")


@pytest.mark.parametrize("norm, form", EVERY)
def test_norm_and_gate_are_one_op_in_both_directions(norm, form):
    model, given = of_slice(norm), operands()
    traced = trace(model, join="gated")
    got, want = assert_alike(traced, model, given, atol=1e-5, rtol=1e-4)
    assert [each.stride() for each in got] == [each.stride() for each in want]
    assert_is_one_op(traced, form)
    told = sorted((each.direction, each.form, each.taken, count) for each, count in inductor.report().items())
    assert told == [(way, form.replace("_", " "), True, 1) for way in ("backward", "forward")]


@pytest.mark.parametrize("norm, form", EVERY)
def test_bfloat16_is_as_exact_as_it_was(norm, form):
    model, given = of_slice(norm), operands(BF16, tokens=1024)
    traced = trace(model, join="gated")
    assert_as_exact(traced, model, given)
    assert_is_one_op(traced, form)


def test_a_scan_may_be_wider_than_its_gate():
    """As Mamba2's."""
    model, (_, both, weight) = of_slice(functools.partial(mamba2, groups=2)), operands(BF16)
    given = [operands(FP32)[0], both, weight]
    traced = trace(model, join="gated")
    for ours, theirs in zip(results(traced, given), results(model, given), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    assert_is_one_op(traced, "of_gated")


def test_graphs_spell_every_activation():
    assert {*gates.ACTIVATIONS.values()} == {*ACTIVATIONS}


def test_one_graph_serves_any_number_of_rows_and_samples():
    model = of_slice(functools.partial(mamba2, groups=4))
    traced = trace(model, join="gated")
    for tokens, samples in ((6, 2), (9, 3), (5, 4)):
        given = operands(tokens=tokens, samples=samples)
        for each in given[:2]:
            for dim in range(2):
                torch._dynamo.mark_dynamic(each, dim)
        assert_alike(traced, model, given, atol=1e-5, rtol=1e-4)
    assert_is_one_op(traced, "of_gated")


def both(x, y, weight):
    """A gated norm and a modulated one."""
    return qwen3_next(x, y, weight), F.layer_norm(y, (C,)) * (1 + weight.expand(len(y), 1, C))


@pytest.mark.parametrize("join, gated, modulated", [
    ("gated", True, False), (["rotary", "modulated"], False, True), ("all", True, True), ((), False, False),
])
def test_one_names_what_is_joined(join, gated, modulated):
    given = [torch.randn(2, 6, C, requires_grad=True), torch.randn(2, 6, C, requires_grad=True), torch.randn(C)]
    traced = trace(both, join=join)
    traced(*given)
    forms = [name for name in ops_in(traced.forward) if name.endswith(("_times_gate", "_modulated"))]
    assert forms == ["fusednorm.rms_norm_fwd_times_gate"] * gated + ["fusednorm.layer_norm_fwd_modulated"] * modulated


@pytest.mark.parametrize("join", ["gates", ["gated", 1], None, True])
def test_other_names_are_refused(join):
    names = "'rotary', 'modulated', 'gated', 'packed', 'forwards'"
    with pytest.raises(ValueError, match=re.escape(f"join must be 'all' or names among {names}, got {join!r}")):
        fusednorm.enable_inductor(join=join)


def other_activation(x, gate, weight):
    return F.rms_norm(x, (C,), weight, EPS) * F.gelu(gate)


def by_row(x, gate, weight):
    return F.rms_norm(x, (C,), weight, EPS) * gate[..., :1].sigmoid()


def no_groups(x, gate, weight):
    """Rows in place of columns are in a group."""
    h = (x * F.silu(gate)).view(-1, 2, C)
    return F.rms_norm(h, (C,), weight, EPS).view(x.shape)


def used_twice(x, gate, weight):
    y = F.rms_norm(x, (C,), weight, EPS)
    return y * F.silu(gate) + y.mean()


def written_over(x, gate, weight):
    y = F.rms_norm(x, (C,), weight, EPS)
    y.mul_(2)
    return y * F.silu(gate)


def gate_without_gradients(x, gate, weight):
    with torch.no_grad():
        gate = F.silu(gate)
    return F.rms_norm(x, (C,), weight, EPS) * gate


OTHERS = [other_activation, by_row, used_twice, written_over, no_groups, gate_without_gradients]


@pytest.mark.parametrize("other", OTHERS, ids=lambda each: each.__name__)
def test_other_code_stays_as_it_is(other):
    model, given = of_slice(other), operands()
    traced = trace(model, join="gated")
    assert_alike(traced, model, given, atol=1e-5, rtol=1e-4)
    assert not any("gate" in name for name in ops_in(traced.forward) + ops_in(traced.backward))


@pytest.mark.parametrize("op", [name for name in OPS if name.endswith(("fwd_of_gated", "fwd_times_gate"))])
@pytest.mark.parametrize("of_x, cols, groups", [(BF16, 128, 1), (BF16, 8192, 1), (BF16, 4096, 4), (FP32, 5120, 1)])
def test_there_are_kernels_in_both_directions(op, of_x, cols, groups):
    rows = {name: torch.empty(4, 512, cols, dtype=of, device="meta") for name, of in (("x", of_x), ("gate", BF16))}
    settings = {"normalized_shape": [cols], "eps": EPS, "groups": groups}
    assert joining.has_kernels(OPS[op], rows | settings, H200)
