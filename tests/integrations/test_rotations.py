"""Norms of q and k and the rotation behind them, in the graphs of torch.compile: found as one op, with the same
results."""

from __future__ import annotations

import copy
import functools

import hf_models
import pytest
import torch
from cases import BF16, FP32
from test_forwards import gemma, llama
from test_inductor import nothing_is_left  # noqa: F401
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tracing import assert_alike, assert_as_exact, calls, cpu_as_cuda, results, trace  # noqa: F401

import fusednorm
from fusednorm.integrations import inductor

pytestmark = pytest.mark.usefixtures("cpu_as_cuda", "nothing_is_left")
D, EPS = 32, 1e-6


def layer(x, weight):
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (weight.float() * h).to(x.dtype)


def of_torch(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def layer_of_torch(x, weight):
    return F.layer_norm(x, (D,), weight, weight, EPS)


def layer_by_default(x, weight):
    return F.layer_norm(x / 1000, (D,), weight)


NORMS = [llama, gemma, layer, of_torch, layer_of_torch, layer_by_default]


def rotate_half(x):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def turn(x, cos, sin):
    return (x * cos) + (rotate_half(x) * sin)


def turn_chunks(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], -1) * sin


def turn_backward(x, cos, sin):
    """As NanoChat's."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((b, -a), -1) * sin


def turn_by_halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    cos, sin = (table[..., : D // 2] for table in (cos, sin))
    return torch.cat([a * cos - b * sin, sin * a + b * cos], -1)


def turn_halves_backward(x, cos, sin):
    a, b = x.to(FP32).chunk(2, -1)
    cos, sin = (table[..., : D // 2] for table in (cos, sin))
    return torch.cat([a * cos + b * sin, a * (-sin) + b * cos], -1).type_as(x)


def turn_pairs(x, cos, sin):
    """As diffusers' FLUX."""
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([-b, a], dim=-1).flatten(3)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def turn_unbound_halves(x, cos, sin):
    """As diffusers' CogView4."""
    a, b = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
    turned = torch.cat([-b, a], dim=-1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def turn_stored_pairs(x, cos, sin):
    """As diffusers' Wan."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    y = torch.empty_like(x)
    y[..., 0::2] = a * cos - b * sin
    y[..., 1::2] = a * sin + b * cos
    return y.type_as(x)


def turn_in_part(x, cos, sin):
    size = cos.shape[-1]
    return torch.cat([turn(x[..., :size], cos, sin), x[..., size:]], dim=-1)


def attention(q, k, of_q, of_k, cos, sin, norm=llama, turn=turn, swaps="behind", each=False):
    """Each is [B, S, H, D]. `swaps` says where that becomes [B, H, S, D], beside the norm or last."""
    before, behind, last = (
        lambda x, if_=swaps == place: x.transpose(1, 2) if if_ else x for place in ("before", "behind", "last")
    )
    dim = 2 if swaps in ("never", "last") else 1
    tables = [[table.unsqueeze(dim) for table in (cos, sin)] for _ in range(1 + each)]
    q = last(turn(behind(norm(before(q), of_q)), *tables[0]).to(q.dtype))
    return q, last(turn(behind(norm(before(k), of_k)), *tables[-1]).to(k.dtype))


def rotated_first(q, k, of_q, of_k, cos, sin, norm=llama, turn=turn, swaps="before"):
    """As Hunyuan's; `swaps` as above, beside the rotation."""
    before, behind, last = (
        lambda x, if_=swaps == place: x.transpose(1, 2) if if_ else x for place in ("before", "behind", "last")
    )
    cos, sin = (table.unsqueeze(1 if swaps == "before" else 2) for table in (cos, sin))
    q, k = (behind(turn(before(x), cos, sin).to(x.dtype)) for x in (q, k))
    return last(norm(q, of_q)), last(norm(k, of_k))


def of_all_heads(q, k, of_q, of_k, cos, sin, norm=llama, turn=turn, swaps="behind"):
    """As OLMo 2's, and with "never" as diffusers' Wan's: each is [B, S, H * D]."""
    behind, last = (lambda x, if_=swaps == place: x.transpose(1, 2) if if_ else x for place in ("behind", "last"))
    tables = [table.unsqueeze(1 if swaps == "behind" else 2) for table in (cos, sin)]
    q, k = (behind(norm(x, weight).unflatten(-1, (-1, D))) for x, weight in ((q, of_q), (k, of_k)))
    return [last(turn(x, *tables).to(x.dtype)) for x in (q, k)]


def operands(dtype=FP32, table_dtype=FP32, columns=D, batch=2, tokens=6, of_k=2):
    torch.manual_seed(0)
    q, k = (torch.randn(2, tokens, heads, D).to(dtype).requires_grad_() for heads in (4, of_k))
    weights = [torch.randn(D).to(dtype).requires_grad_() for _ in range(2)]
    angles = torch.randn(batch, tokens, columns)
    return [q, k, *weights, angles.cos().to(table_dtype), angles.sin().to(table_dtype)]


def operands_of_all_heads(*args, **named):
    q, k, *_, cos, sin = operands(*args, **named)
    both = [each.detach().flatten(-2).requires_grad_() for each in (q, k)]
    weights = [torch.randn(each.shape[-1]).to(each.dtype).requires_grad_() for each in both]
    return [*both, *weights, cos, sin]


def joined(traced):
    return len(calls(traced.forward, "fusednorm.head_norm_fwd")), len(calls(traced.backward, "fusednorm.head_norm_bwd"))


@pytest.mark.parametrize("swaps", ["behind", "before", "last", "never"])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_norms_and_rotations_are_one_op_in_both_directions(norm, swaps):
    model, given = functools.partial(attention, norm=norm, swaps=swaps, each=swaps == "before"), operands()
    traced = trace(model)
    got, want = assert_alike(traced, model, given)
    assert [each.stride() for each in got[:2]] == [each.stride() for each in want[:2]]
    assert joined(traced) == (1, 1)
    told = sorted((entry.direction, entry.form, entry.taken, count) for entry, count in inductor.report().items())
    assert told == [(way, "rotated", True, 1) for way in ("backward", "forward") for _ in "qk"], "each norm once"
    assert not any(calls(graph, name) for graph in (traced.forward, traced.backward) for name in LEFT_OVERS)


@pytest.mark.parametrize("swaps", ["behind", "before", "last", "never"])
@pytest.mark.parametrize("norm", [llama, layer, of_torch], ids=lambda norm: norm.__name__)
def test_a_rotation_may_come_before_the_norm(norm, swaps):
    model, given = functools.partial(rotated_first, norm=norm, swaps=swaps), operands()
    traced = trace(model)
    got, want = assert_alike(traced, model, given)
    assert [each.stride() for each in got[:2]] == [each.stride() for each in want[:2]]
    assert joined(traced) == (1, 1) and not calls(traced.forward, "aten.rsqrt")
    (op,) = calls(traced.forward, "fusednorm.head_norm_fwd")
    assert op.kwargs["norm_first"] is False


@pytest.mark.parametrize("of_k", [4, 2, 1])
@pytest.mark.parametrize(("norm", "swaps"), [(llama, "behind"), (of_torch, "last"), (of_torch, "never")])
@pytest.mark.parametrize("turn", [turn, turn_pairs, turn_stored_pairs], ids=lambda each: each.__name__)
def test_a_norm_may_be_one_over_all_heads(turn, norm, swaps, of_k):
    model = functools.partial(of_all_heads, norm=norm, turn=turn, swaps=swaps)
    given = operands_of_all_heads(BF16, of_k=of_k)
    traced = trace(model)
    got, stock = assert_as_exact(traced, model, given)
    assert of_k == 1 or [each.stride() for each in got] == [each.stride() for each in stock]
    assert joined(traced) == (1, 1)
    told = [(e.direction, e.form, e.taken) for e, count in inductor.report().items() for _ in range(count)]
    assert sorted(told) == [(way, "rotated", True) for way in ("backward", "forward") for _ in "qk"], "each norm once"
    assert not any(calls(graph, name) for graph in (traced.forward, traced.backward) for name in LEFT_OVERS)


def without_weights(q, k, of_q, of_k, cos, sin):
    return of_all_heads(q, k, None, None, cos, sin, norm=lambda x, _: F.rms_norm(x, x.shape[-1:], None, EPS))


def of_k_alone(q, k, of_q, of_k, cos, sin):
    q = llama(q.unflatten(-1, (-1, D)), of_q[:D]).transpose(1, 2)
    k = llama(k, of_k).unflatten(-1, (-1, D)).transpose(1, 2)
    return [turn(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k)]


def split_otherwise(q, k, of_q, of_k, cos, sin):
    """Tokens and columns make the rows."""
    q, k = (llama(x, weight).view(2, -1, 6, D) for x, weight in ((q, of_q), (k, of_k)))
    return [turn(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k)]


@pytest.mark.parametrize("model", [without_weights, of_k_alone, split_otherwise], ids=lambda model: model.__name__)
def test_other_norms_over_all_heads_stay_apart(model):
    traced, given = trace(model), operands_of_all_heads()
    for weight in given[2:4]:
        weight.requires_grad_(model is not without_weights)
    assert_alike(traced, model, given)
    assert joined(traced) == (0, 0)


@pytest.mark.parametrize("turn", [turn, turn_pairs], ids=lambda each: each.__name__)
@pytest.mark.parametrize("attention", [attention, rotated_first], ids=lambda each: each.__name__)
def test_any_dim_of_the_tables_may_vary(attention, turn):
    model, given = functools.partial(attention, turn=turn), operands()
    for table in given[4:]:
        torch._dynamo.maybe_mark_dynamic(table, [0, 1, 2])
    traced = trace(model)
    assert_alike(traced, model, given)


LEFT_OVERS = "aten.rsqrt", "aten.cat", "aten.mul.Tensor", "fusednorm.rms_norm_bwd", "fusednorm.layer_norm_bwd"


CASES = [{"table_dtype": BF16}, {"batch": 1}, {"columns": 16}, {"columns": 16, "batch": 1, "table_dtype": BF16}]


@pytest.mark.parametrize("attention", [attention, rotated_first], ids=lambda each: each.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16_is_as_exact_as_it_was(case, attention):
    model = functools.partial(attention, turn=turn_in_part if case.get("columns") else turn)
    given = operands(BF16, **case)
    traced = trace(model)
    assert_as_exact(traced, model, given, slack=0)
    assert joined(traced) == (1, 1)


@pytest.mark.parametrize("swaps", ["behind", "before", "last", "never"])
def test_k_may_have_one_head(swaps):
    model, given = functools.partial(attention, swaps=swaps), operands(of_k=1)
    traced = trace(model)
    assert_alike(traced, model, given)
    assert joined(traced) == (1, 1)


@pytest.mark.parametrize("swaps", ["behind", "before"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_tables_may_have_fewer_dims_than_what_they_rotate(dims, swaps):
    """All but those of columns have one size here, so that no dim can stand for another."""
    *others, cos, sin = operands(tokens=D)
    q, k = (torch.randn(2, D, D, D).requires_grad_() for _ in range(2))
    cos, sin = ({1: table[0, 0], 2: table[0], 3: table[:1]}[dims] for table in (cos, sin))

    def model(q, k, of_q, of_k, cos, sin):
        pairs = (q, of_q), (k, of_k)
        if swaps == "before":
            normalized = [llama(x.transpose(1, 2), of) for x, of in pairs]
        else:
            normalized = [llama(x, of).transpose(1, 2) for x, of in pairs]
        return tuple(turn(each, cos, sin) for each in normalized)

    traced, given = trace(model), [q, k, *others[2:], cos, sin]
    assert_alike(traced, model, given, atol=1e-4, rtol=1e-5)
    assert joined(traced) == (1, 1)


def test_results_go_to_the_device_that_the_model_moves_them_to():
    def moved(q, k, of_q, of_k, cos, sin):
        tables = cos.unsqueeze(2), sin.unsqueeze(2)
        return turn(llama(q, of_q), *tables).to("meta"), turn(llama(k, of_k), *tables).to("meta")

    q, k = trace(moved)(*operands())
    assert q.device.type == k.device.type == "meta"


def test_all_columns_may_be_rotated_in_part():
    traced, given = trace(functools.partial(attention, turn=turn_in_part)), operands()
    assert_alike(traced, attention, given)
    assert joined(traced) == (1, 1)


def test_one_graph_serves_any_number_of_tokens():
    traced = trace(attention)
    for tokens in (6, 9, 5):
        given = operands(tokens=tokens)
        for each, dim in zip(given, (1, 1, None, None, 1, 1), strict=True):
            if dim:
                torch._dynamo.mark_dynamic(each, dim)
        assert_alike(traced, attention, given)
    assert joined(traced) == (1, 1)


def test_a_transform_of_a_transform_computes_the_same():
    def grads(q, k, of_q, of_k, cos, sin):
        def loss(q, k):
            return sum(each.square().sum() for each in attention(q[None], k[None], of_q, of_k, cos[:1], sin[:1]))

        return torch.func.vmap(torch.func.grad(loss, (0, 1)))(q, k)

    given = operands()
    for got, want in zip(trace(grads)(*given), grads(*given), strict=True):
        torch.testing.assert_close(got, want)


def test_a_swapped_dim_that_is_an_argument_is_no_obstacle():
    def model(q, k, of_q, of_k, cos, sin, dim):
        q, k = (llama(x, weight).transpose(1, dim) for x, weight in ((q, of_q), (k, of_k)))
        return [turn(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k)]

    traced, given = trace(model, dynamic=True), operands()
    for each in given:
        torch._dynamo.mark_static(each)
    for got, want in zip(traced(*given, 2), model(*given, 2), strict=True):
        torch.testing.assert_close(got, want)


def test_a_norm_over_a_width_that_varies_stays_as_it_is():
    def model(q, k, of_q, of_k, cos, sin):
        q, k = (F.rms_norm(x, x.shape[-1:], weight, EPS) for x, weight in ((q, of_q), (k, of_k)))
        return [turn(x, cos.unsqueeze(2), sin.unsqueeze(2)) for x in (q, k)]

    traced, given = trace(model), operands()
    for each in given:
        torch._dynamo.mark_dynamic(each, each.dim() - 1)
    assert_alike(traced, model, given)
    assert joined(traced) == (0, 0)


def test_slices_of_one_projection_are_read_in_place():
    def of_slices(both, gated, *others):
        return attention(gated.unflatten(-1, (4, 2 * D))[..., :D], both.unflatten(-1, (6, D))[:, :, 4:], *others)

    _, _, *others = operands()
    given = [torch.randn(2, 6, size * D).requires_grad_() for size in (6, 8)] + others
    traced = trace(of_slices)
    assert_alike(traced, of_slices, given)
    assert joined(traced) == (1, 1) and not calls(traced.forward, "aten.clone")


def test_a_norm_of_what_was_rotated_is_found_too():
    def again(*given):
        q, k = attention(*given)
        return llama(q, given[2]), k

    traced, given = trace(again), operands()
    assert_alike(traced, again, given)
    assert joined(traced) == (1, 1)


def scaled_in_place(*given, swaps):
    q, k = attention(*given, swaps=swaps)
    q.mul_(2)
    k[:, :, 1:] = 0
    return q, k


def checkpointed(*given, swaps):
    return checkpoint(functools.partial(attention, swaps=swaps), *given, use_reentrant=False)


@pytest.mark.parametrize("swaps", ["behind", "before", "never"])
@pytest.mark.parametrize("model", [scaled_in_place, checkpointed], ids=lambda model: model.__name__)
def test_results_may_be_written_and_made_anew(model, swaps):
    model, given = functools.partial(model, swaps=swaps), operands(BF16)
    traced = trace(model)
    assert_as_exact(traced, model, given, slack=0)
    assert joined(traced) == (1, 1)


WAYS = [turn_chunks, turn_backward, turn_by_halves, turn_halves_backward]
UNBOUND = [turn_pairs, turn_unbound_halves, turn_stored_pairs]


@pytest.mark.parametrize("norm", [llama, layer, of_torch], ids=lambda norm: norm.__name__)
@pytest.mark.parametrize("swaps", ["behind", "before", "never"])
@pytest.mark.parametrize("way", UNBOUND, ids=lambda way: way.__name__)
def test_pairs_and_halves_that_a_view_has_are_found(way, swaps, norm):
    model, given = functools.partial(attention, turn=way, swaps=swaps, norm=norm), operands(BF16, table_dtype=FP32)
    traced = trace(model, join="rotary")
    assert_as_exact(traced, model, given, slack=1e-5, wide=FP32)
    assert joined(traced) == (1, 1)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("attention", [attention, rotated_first], ids=lambda each: each.__name__)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_to_write_it_is_found(way, attention, dtype):
    model, given = functools.partial(attention, turn=way, swaps="before"), operands(dtype, table_dtype=dtype)
    traced = trace(model)
    assert_as_exact(traced, model, given)
    assert joined(traced) == (1, 1)


def test_dims_may_be_named():
    def model(q, k, of_q, of_k, cos, sin):
        q, k = (llama(x, weight).transpose(dim0=1, dim1=2) for x, weight in ((q, of_q), (k, of_k)))
        return [turn(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k)]

    traced, given = trace(model), operands()
    assert_alike(traced, model, given)
    assert joined(traced) == (1, 1)


def wrong_pairs(x, cos, sin):
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return x * cos + torch.stack([-b, a], dim=-2).flatten(3) * sin


def pairs_of_other_dims(x, cos, sin):
    a, b = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
    return x * cos + torch.stack([-b, a], dim=-1).flatten(3) * sin


def positive_pairs(x, cos, sin):
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return x * cos + torch.stack([b, -a], dim=-1).flatten(3) * sin


def wrong_chunks(x, cos, sin):
    a, b = x.chunk(2, dim=-2)
    return x * cos + torch.cat([-b, a], -2) * sin


def three_chunks(x, cos, sin):
    a, b, c = x.chunk(3, dim=-1)
    return x * cos + torch.cat([-b, a, c], -1) * sin


def wrong_sign(x, cos, sin):
    return x * cos - rotate_half(x) * sin


def reflected(x, cos, sin):
    a, b = x.chunk(2, -1)
    cos, sin = (table[..., : D // 2] for table in (cos, sin))
    return torch.cat([a * cos + b * sin, a * sin + b * cos], -1)


def other_columns_stored(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    y = torch.empty_like(x)
    y[..., 1::2] = a * cos - b * sin
    y[..., 0::2] = a * sin + b * cos
    return y.type_as(x)


def stored_and_seen(x, cos, sin):
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    y = torch.empty_like(x)
    y[..., 0::2] = a * cos - b * sin
    y[..., 1::2] = a * sin + b * cos
    return y.type_as(x) + y.mean()


def minus_cos(x, cos, sin):
    a, b = x.chunk(2, -1)
    cos, sin = (table[..., : D // 2] for table in (cos, sin))
    return torch.cat([b * sin - a * cos, b * cos - a * sin], -1)


def two_sines(x, cos, sin):
    a, b = x.chunk(2, -1)
    cos, sin, other = cos[..., : D // 2], sin[..., : D // 2], sin[..., D // 2 :]
    return torch.cat([a * cos - b * sin, a * other + b * cos], -1)


def wrong_halves(x, cos, sin):
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return x * cos + torch.cat((a, -b), dim=-1) * sin


def scaled(x, cos, sin):
    return torch.add(x * cos, rotate_half(x) * sin, alpha=2)


def of_another(x, cos, sin):
    return x * cos + rotate_half(x.sin()) * sin


def used_elsewhere(x, cos, sin):
    return turn(x, cos, sin) + x.mean()


def unequal_parts(x, cos, sin):
    return torch.cat([turn(x[..., :16], cos[..., :16], sin[..., :16]), x[..., 15:-1]], dim=-1)


def half_written_over(x, cos, sin):
    a, b = x[..., : D // 2], x[..., D // 2 :]
    turned = torch.cat((-b, a), dim=-1) * sin
    a.mul_(2)
    return x * cos + turned


def trained(x, cos, sin):
    return turn(x, cos, sin)


def half_without_gradients(x, cos, sin):
    with torch.no_grad():
        turned = rotate_half(x)
    return (x * cos) + (turned * sin)


OTHERS = [wrong_chunks, three_chunks, wrong_sign, wrong_halves, scaled, reflected, minus_cos, two_sines]
OTHERS += [of_another, used_elsewhere, unequal_parts, half_written_over, half_without_gradients, trained]
OTHERS += [wrong_pairs, pairs_of_other_dims, positive_pairs, other_columns_stored, stored_and_seen]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_other_code_stays_as_it_is(other):
    model, given = functools.partial(attention, turn=other), operands()
    given[4].requires_grad_(other is trained)
    traced = trace(model, join="all")
    assert_alike(traced, model, given)
    assert joined(traced) == (0, 0)


def tables_of_k(q, k, of_q, of_k, cos, sin):
    tables = cos.unsqueeze(2), sin.unsqueeze(2)
    return turn(llama(q, of_q), *tables), turn(llama(k, of_k), *(each * 2 for each in tables))


def norm_of_k(q, k, of_q, of_k, cos, sin):
    tables = cos.unsqueeze(2), sin.unsqueeze(2)
    return turn(llama(q, of_q), *tables), turn(gemma(k, of_k), *tables)


def k_of_q(q, k, of_q, of_k, cos, sin):
    tables = cos.unsqueeze(2), sin.unsqueeze(2)
    q = turn(llama(q, of_q), *tables)
    return q, turn(llama(k * q.mean(), of_k), *tables)


def turned_is_a_result(q, k, of_q, of_k, cos, sin):
    q, k = (turn(x, cos.unsqueeze(2), sin.unsqueeze(2)) for x in (q, k))
    return llama(q, of_q) + q, llama(k, of_k) + k


APART = [tables_of_k, norm_of_k, k_of_q, turned_is_a_result]


@pytest.mark.parametrize("model", APART, ids=lambda model: model.__name__)
def test_unlike_ones_stay_apart(model):
    traced, given = trace(model), operands()
    assert_alike(traced, model, given)
    assert joined(traced) == (0, 0)


@pytest.mark.parametrize("is_patched", [False, True])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma3", "Olmo2"])
def test_models_of_transformers_train_as_before(name, is_patched):
    model, ids = hf_models.build(name, layers=2).to(BF16), hf_models.tokens()
    exact, stock = hf_models.in_float64(model, ids), hf_models.loss_and_grads(model, ids)
    if is_patched:
        fusednorm.patch_model(model)
    traced = trace(copy.copy(model))
    ours = hf_models.loss_and_grads(model, ids, traced)
    hf_models.assert_as_good_as_stock(ours, stock, exact, BF16)
    assert joined(traced) == (2, 2)
    found = [(entry.form, entry.direction, n) for entry, n in inductor.report().items() if "self_attn" in entry.place]
    assert sorted(found) == [("rotated", way, 2) for way in ("backward", "forward") for _ in "qk"]


@pytest.mark.parametrize("backend", ["inductor", "fusednorm"])
def test_it_can_be_left_off(backend, monkeypatch):
    """All of Inductor but its code generation."""
    seen = []

    def run_the_graph(graph, inputs, **settings):
        seen.append(len(calls(graph, "fusednorm.head_norm_fwd")) + len(calls(graph, "fusednorm.head_norm_bwd")))
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(inductor.inductor, "compile_fx_inner", run_the_graph)

    def run(**options):
        torch._dynamo.reset()
        if backend == "fusednorm":
            return results(torch.compile(attention, backend=backend, options=options), operands())
        with fusednorm.enable_inductor(), fusednorm.enable_inductor(**options):
            return results(torch.compile(attention), operands())

    for ours, theirs in zip(run(), run(join=()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert seen == [1, 1, 0, 0]


def test_the_end_of_a_block_restores_what_was_asked_for():
    def tag():
        with inductor._tagged(inductor._joins):
            return torch.compiler.config.cache_key_tag

    with fusednorm.enable_inductor():
        plain = tag()
        with fusednorm.enable_inductor(join=()):
            assert tag() != plain, "caches keep graphs of both apart"
        assert tag() == plain
