"""Norms of q and k that are parts of one tensor beside v, in the graphs of torch.compile: one gradient of the whole."""

from __future__ import annotations

import functools

import pytest
import torch
from cases import BF16, FP32
from test_forwards import gemma, llama
from test_inductor import nothing_is_left  # noqa: F401
from test_rotations import layer, layer_of_torch, of_torch, rotated_first, turn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tracing import assert_alike, assert_as_exact, calls, cpu_as_cuda, trace  # noqa: F401

from fusednorm.integrations import inductor

pytestmark = pytest.mark.usefixtures("cpu_as_cuda", "nothing_is_left")
D, HEADS, OF_KV, WIDTH = 32, 4, 2, 48
SIZES = [HEADS, OF_KV, OF_KV]
MANY = sum(SIZES)


def split(qkv, heads_first=False):
    q, k, v = qkv.unflatten(-1, (MANY, D)).split(SIZES, dim=2)
    return tuple(each.transpose(1, 2) for each in (q, k, v)) if heads_first else (q, k, v)


def split_columns(qkv, heads_first=False):
    q, k, v = qkv.split([size * D for size in SIZES], dim=-1)
    parts = [each.view(*each.shape[:2], -1, D) for each in (q, k, v)]
    return tuple(each.transpose(1, 2) for each in parts) if heads_first else tuple(parts)


def slices(qkv, heads_first=False):
    whole = qkv.unflatten(-1, (MANY, D))
    parts = whole[:, :, :HEADS], whole[:, :, HEADS : HEADS + OF_KV], whole[:, :, HEADS + OF_KV :]
    return tuple(each.transpose(1, 2) for each in parts) if heads_first else parts


def unbound(qkv, heads_first=True):
    """As timm's, whose k and v have as many heads as q."""
    parts = qkv.reshape(*qkv.shape[:2], 3, HEADS, D).permute(2, 0, 3, 1, 4).unbind(0)
    return parts if heads_first else tuple(each.transpose(1, 2) for each in parts)


def stacked(qkv, heads_first=False):
    """As transformers' ViTs of one projection."""
    whole = qkv.reshape(*qkv.shape[:2], 3, HEADS, D)
    parts = whole[:, :, 0], whole[:, :, 1], whole[:, :, 2]
    return tuple(each.transpose(1, 2) for each in parts) if heads_first else parts


NORMS = [of_torch, layer_of_torch, llama, gemma, layer]
WAYS = [split, split_columns, slices, unbound, stacked]


def width_of(way):
    return (MANY if way in (split, split_columns, slices) else 3 * HEADS) * D


def attention(x, of_qkv, of_q, of_k, way=split, norm=of_torch, heads_first=True):
    q, k, v = way(F.linear(x, of_qkv), heads_first)
    q, k = norm(q, of_q), norm(k, of_k)
    q, k, v = (q, k, v) if heads_first else (each.transpose(1, 2) for each in (q, k, v))
    k, v = (each.repeat_interleave(HEADS // each.shape[1], dim=1) if each.shape[1] < HEADS else each for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def operands(way=split, dtype=FP32, tokens=6, batch=2):
    torch.manual_seed(0)
    shapes = (batch, tokens, WIDTH), (width_of(way), WIDTH), (D,), (D,)
    made = [torch.randn(shape).to(dtype) for shape in shapes]
    made[1] /= WIDTH**0.5
    return [each.requires_grad_() for each in made]


def parts_of(x, of_qkv, of_q, of_k, way=split, norm=of_torch, heads_first=False):
    q, k, v = way(F.linear(x, of_qkv), heads_first)
    return norm(q, of_q), norm(k, of_k), v


LEFT_OVERS = "aten.cat", "aten.slice_scatter", "aten.select_scatter", "aten.clone", "aten.rsqrt"


def joined(traced):
    ways = (traced.forward, "fusednorm.head_norm_fwd"), (traced.backward, "fusednorm.head_norm_bwd_packed")
    return tuple(len(calls(*way)) for way in ways)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda each: each.__name__)
def test_the_gradient_of_a_projection_is_written_once(way, heads_first):
    model, given = functools.partial(parts_of, way=way, heads_first=heads_first), operands(way)
    traced = trace(model, join="packed")
    assert_alike(traced, model, given)
    assert joined(traced) == (1, 1)
    assert not any(calls(traced.backward, name) for name in LEFT_OVERS)
    report = [each for each, count in inductor.report().items() for _ in range(count)]
    told = sorted((each.direction, each.form, each.taken) for each in report)
    assert told == [(way, "of heads", True) for way in ("backward", "forward") for _ in "qk"], "each norm once"


def test_v_may_have_no_heads():
    def model(x, of_qkv, of_q, of_k):
        *both, v = F.linear(x, of_qkv).split([size * D for size in SIZES], dim=-1)
        q, k = (each.view(*each.shape[:2], -1, D) for each in both)
        return of_torch(q, of_q), of_torch(k, of_k), v.sin()

    traced, given = trace(model, join="packed"), operands()
    assert_alike(traced, model, given)
    assert joined(traced) == (1, 1)


@pytest.mark.parametrize("norm", NORMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_torchs_norms_and_those_by_hand_are_as_exact_as_they_were(norm, dtype):
    model, given = functools.partial(parts_of, norm=norm), operands(dtype=dtype)
    traced = trace(model, join="packed")
    assert_as_exact(traced, model, given)
    assert joined(traced) == (1, 1)


@pytest.mark.parametrize("way", [unbound, stacked], ids=lambda each: each.__name__)
def test_attention_may_follow(way):
    model, given = functools.partial(attention, way=way), operands(way)
    traced = trace(model, join="packed")
    assert_alike(traced, model, given)
    assert joined(traced) == (1, 1)
    assert not any(calls(traced.backward, name) for name in LEFT_OVERS)


@pytest.mark.parametrize("way", [split, unbound], ids=lambda each: each.__name__)
def test_one_graph_serves_any_number_of_tokens_and_samples(way):
    model = functools.partial(parts_of, way=way, heads_first=True)
    traced = trace(model, join="packed")
    for tokens, batch in ((6, 2), (9, 3), (5, 4)):
        given = operands(way, tokens=tokens, batch=batch)
        for dim in range(2):
            torch._dynamo.mark_dynamic(given[0], dim)
        assert_alike(traced, model, given)
    assert joined(traced) == (1, 1)


def rotated(x, of_qkv, of_q, of_k, cos, sin, way=split, first=False):
    q, k, v = way(F.linear(x, of_qkv), False)
    if first:
        return *rotated_first(q, k, of_q, of_k, cos, sin), v
    tables = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = (turn(of_torch(each, weight).transpose(1, 2), *tables) for each, weight in ((q, of_q), (k, of_k)))
    return q, k, v


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda each: each.__name__)
def test_so_it_is_where_a_rotation_is_joined(way, first):
    model, angles = functools.partial(rotated, way=way, first=first), torch.randn(2, 6, D)
    given = [*operands(way), angles.cos(), angles.sin()]
    traced = trace(model, join=("rotary", "packed"))
    assert_alike(traced, model, given)
    assert joined(traced) == (1, 1)
    assert not any(calls(traced.backward, name) for name in LEFT_OVERS)


def frozen(x, of_qkv, of_q, of_k):
    return parts_of(x, of_qkv, of_q.detach(), of_k.detach())


def checkpointed(*given):
    return checkpoint(parts_of, *given, use_reentrant=False)


def without_v(x, of_qkv, of_q, of_k):
    q, k, v = split(F.linear(x, of_qkv))
    return of_torch(q, of_q), of_torch(k, of_k)


def in_another_order(x, of_qkv, of_q, of_k):
    q, k, v = split(F.linear(x, of_qkv))
    k = of_torch(k, of_k)
    return of_torch(q, of_q), k, v


@pytest.mark.parametrize("model", [frozen, checkpointed, in_another_order, without_v], ids=lambda each: each.__name__)
def test_weights_may_be_frozen_and_results_made_anew(model):
    traced, given = trace(model, join="packed"), operands()
    given = [each.detach() if model is frozen and each.dim() == 1 else each for each in given]
    assert_alike(traced, model, given)
    assert joined(traced) == (1, 1)


def used_twice(x, of_qkv, of_q, of_k):
    """k is used without its norm, too, so that its gradient is a sum."""
    q, k, v = split(F.linear(x, of_qkv))
    return of_torch(q, of_q), of_torch(k, of_k), v, k


def exchanged(x, of_qkv, of_q, of_k):
    """v lies before k."""
    q, v, k = split(F.linear(x, of_qkv))
    return of_torch(q, of_q), of_torch(k, of_k), v


def with_a_gate(x, of_qkv, of_q, of_k):
    q, k, v, gate = F.linear(x, of_qkv).unflatten(-1, (MANY, D)).split([2, 2, 2, 2], dim=2)
    return of_torch(q, of_q), of_torch(k, of_k), v, gate


def of_two_norms(x, of_qkv, of_q, of_k):
    q, k, v = split(F.linear(x, of_qkv))
    return of_torch(q, of_q), layer_of_torch(k, of_k), v


def of_two_eps(x, of_qkv, of_q, of_k):
    q, k, v = split(F.linear(x, of_qkv))
    return of_torch(q, of_q), F.rms_norm(k, (D,), of_k, 1e-3), v


def reversed_heads(x, of_qkv, of_q, of_k):
    q, k, v = split(F.linear(x, of_qkv))
    return of_torch(q, of_q), of_torch(k.flip(2), of_k), v


def multiplied(x, of_qkv, of_q, of_k):
    """All gradients are made by element-wise code, and what uses that of the whole is such."""
    q, k, v = split(F.linear(x, of_qkv).sin())
    return of_torch(q, of_q).cos(), of_torch(k, of_k).cos(), v.cos()


OTHERS = [used_twice, exchanged, with_a_gate, of_two_norms, of_two_eps, reversed_heads, multiplied]


@pytest.mark.parametrize("other", OTHERS, ids=lambda each: each.__name__)
def test_other_code_stays_as_it_is(other):
    traced, given = trace(other, join="packed"), operands()
    assert_alike(traced, other, given)
    assert joined(traced) == (0, 0)
    assert not any("packed" in entry.form for entry in inductor.report())


def written_in_place(x, of_qkv, of_q, of_k):
    q, k, v = parts_of(x, of_qkv, of_q, of_k)
    k.mul_(2)
    return q, k, v


def with_more_keys(x, of_qkv, of_q, of_k):
    q, k, v = parts_of(x, of_qkv, of_q, of_k)
    return q, torch.cat([k, k], 1), v


@pytest.mark.parametrize("model", [written_in_place, with_more_keys], ids=lambda each: each.__name__)
def test_a_forward_stays_with_inductor_where_that_fuses_more(model):
    traced, given = trace(model, join="packed"), operands()
    assert_alike(traced, model, given)
    assert joined(traced) == (0, 1)


def test_without_the_name_nothing_is_joined():
    traced, given = trace(parts_of, join=("rotary", "forwards")), operands()
    assert_alike(traced, parts_of, given)
    assert joined(traced) == (0, 0)
