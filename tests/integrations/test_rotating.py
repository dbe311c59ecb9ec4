"""Norms of q and k that patch_model runs together with the rotation, and what an attention may do with them else."""

from __future__ import annotations

import copy
import inspect
import pickle

import attention_classes
import hf_models
import pytest
import torch
from cases import BF16, FP32
from graphs import RecordingBackend
from op_log import OpLog
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusednorm
from fusednorm.integrations import rotating
from fusednorm.integrations.rotating import Rotation, rotation_of


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def halves(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def first_columns(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    turned = cos.shape[-1]
    both = halves(q[..., :turned], k[..., :turned], cos, sin, unsqueeze_dim)
    return tuple(torch.cat([a, x[..., turned:]], -1) for a, x in zip(both, (q, k), strict=True))


def rotate_pairs(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def pairs(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_pairs(q) * sin, k * cos + rotate_pairs(k) * sin


def halves_of_pairs(q, k, cos, sin, unsqueeze_dim=1):
    """As DeepSeek's: pairs are put into halves."""
    q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return halves(q, k, cos, sin, unsqueeze_dim)


def narrowed(q, k, cos, sin):
    """As OLMo 2's."""
    return tuple(turned.to(x.dtype) for turned, x in zip(halves(q, k, cos, sin), (q, k), strict=True))


def without_gradient(q, k, cos, sin):
    return halves(q, k.detach(), cos, sin)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (halves, Rotation(False, False, 1)),
        (first_columns, Rotation(False, True, 1)),
        (pairs, Rotation(True, False, None)),
        (narrowed, Rotation(False, False, None, narrows=True)),
        (halves_of_pairs, None),
        (without_gradient, None),
        (lambda q, k, cos, sin: halves(q, k, sin, cos), None),
        (lambda q, k, cos, sin: halves(q, k, cos, sin)[:1], None),
        (lambda q, k, cos, sin: 1 / 0, None),
    ],
)
def test_a_rotation_is_known_by_what_it_computes(function, found):
    assert rotation_of(function) == found


class RotatedFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = Norm(), Norm()

    def forward(self, q, k, cos, sin):
        q, k = halves(q, k, cos, sin)
        return self.q_norm(q), self.k_norm(k)


class RotatedSometimes(RotatedFirst):
    rotates = True

    def forward(self, q, k, cos, sin):
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q, k = halves(q, k, cos, sin)
        return q, k


class NotRotatedEarlier(RotatedFirst):
    """Where norms are called, the rotation is sure."""

    def forward(self, q, k, cos, sin):
        if q is None:
            return k
        if cos is not None:
            q, k = self.q_norm(q), self.k_norm(k)
            return halves(q, k, cos, sin)
        return q, k


@pytest.mark.parametrize(
    ("attention", "waits"), [(RotatedFirst, False), (RotatedSometimes, False), (NotRotatedEarlier, True)]
)
def test_norms_wait_only_where_the_forward_must_rotate(attention, waits):
    made = attention()
    with fusednorm.patch_model(made, rotary=True):
        assert [made.q_norm._fused_wait is not None, made.k_norm._fused_wait is not None] == [waits, waits]
    assert made.q_norm.__dict__.get("_fused_wait") is None


class Norm(nn.Module):
    def __init__(self, cols=16, dtype=FP32):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(cols, dtype=dtype) + 0.5)
        self.eps = 1e-3

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """What `steps` does with the norms of q and k, before it rotates them."""

    def __init__(self, steps=lambda q, k: (q.transpose(1, 2), k.transpose(1, 2)), dtype=FP32):
        super().__init__()
        self.q_norm, self.k_norm, self.steps, self.more = Norm(dtype=dtype), Norm(dtype=dtype), steps, {}

    def forward(self, q, k, cos, sin):
        q, k = self.steps(self.q_norm(q), self.k_norm(k))
        return halves(q, k, cos, sin, **self.more)


def inputs(dtype=FP32):
    torch.manual_seed(0)
    q, k = (torch.randn(2, 5, heads, 16, dtype=dtype, requires_grad=True) for heads in (4, 2))
    return q, k, *(torch.randn(2, 5, 16, dtype=dtype) for _ in range(2))


@pytest.fixture
def ran(monkeypatch):
    """The calls of qk_norm; norms of CPU tensors wait for a rotation, too."""
    calls, qk_norm = [], rotating.qk_norm
    monkeypatch.setattr(rotating, "runs_kernels", lambda x: True)
    monkeypatch.setattr(rotating, "qk_norm", lambda *given, **named: (calls.append(named), qk_norm(*given, **named))[1])
    return calls


def assert_same(ours: nn.Module, stock: nn.Module, given: tuple, tolerance: float = 1e-5) -> None:
    """Results with their shapes, strides and dtypes, and gradients."""
    results = []
    for module in (ours, stock):
        both, leaves = module(*given), [*given[:2], *module.parameters()]
        results.append((*both, *torch.autograd.grad(both, leaves, [torch.ones_like(each) for each in both])))
    for got, want in zip(*results, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_a_rotated_norm_is_one_launch_and_the_function_comes_back(ran):
    stock, given = Attention(), inputs()
    ours, function = copy.deepcopy(stock), halves
    with fusednorm.patch_model(ours, rotary=True) as patch:
        assert [each.note for each in patch.replaced] == ["RMSNorm, written by hand, with halves behind it"] * 2
        with fusednorm.patch_model(copy.deepcopy(stock), rotary=True):
            assert halves is not function
        first = ours(*given)
        assert ours.q_norm._fused_wait.has_rotated and all(map(torch.equal, first, ours(*given)))
        assert_same(ours, stock, given)
        assert len(ran) == 3 and ran[0] == ran[2] and ran[0]["heads_dim"] == -2 and not ran[0]["rotary_interleaved"]
        strides = [[each.stride() for each in module(*given)] for module in (ours, stock)]
        assert strides[0] == strides[1]
        for norm in (ours.q_norm, copy.deepcopy(ours.q_norm), pickle.loads(pickle.dumps(ours.q_norm))):
            assert type(norm(given[0])) is torch.Tensor, "another caller gets a tensor"
    assert halves is function
    assert all(map(torch.equal, ours(*given), stock(*given)))


def test_norms_that_an_earlier_call_has_replaced_wait_too_and_no_norm_waits_twice(ran):
    stock, given = Attention(), inputs()
    ours = copy.deepcopy(stock)
    with fusednorm.patch_model(ours):
        with fusednorm.patch_model(ours, rotary=True) as patch:
            assert [each.note.partition(",")[2] for each in patch.left] == [" with halves behind it"] * 2
            with fusednorm.patch_model(ours, rotary=True) as again:
                assert not again._functions
            copied = copy.deepcopy(ours)
            for _ in range(2):
                assert_same(ours, stock, given)
            assert len(ran) == 2
        assert_same(ours, stock, given)
        assert len(ran) == 2
    with fusednorm.patch_model(copied, rotary=True):  # whose norms wait for a function that has gone
        assert_same(copied, stock, given)
        assert len(ran) == 3


def test_another_function_may_take_the_place_of_the_rotation(ran, monkeypatch):
    stock, given = Attention(), inputs()
    ours, seen = copy.deepcopy(stock), []

    def other(q, k, cos, sin):
        seen.extend([type(q), type(k)])
        return q, k

    with fusednorm.patch_model(ours, rotary=True):
        for _ in range(2):
            ours(*given)
        assert len(ran) == 2
        monkeypatch.setitem(globals(), "halves", other)
        assert_same(ours, stock, given)
    assert halves is other and {*seen} == {torch.Tensor}


@pytest.mark.parametrize("steps", [Attention().steps, lambda q, k: (q.transpose(1, 2) * 2, k.transpose(1, 2))])
def test_a_checkpoint_makes_the_first_call_again(steps, ran):
    stock, (q, k, *tables) = Attention(steps), inputs()
    ours, grads = copy.deepcopy(stock), []
    with fusednorm.patch_model(ours, rotary=True):
        for module in (stock, ours, ours):
            both = checkpoint(module, q, k, *tables, use_reentrant=False)
            grads.append(torch.autograd.grad(both, [q, k, *module.parameters()], [torch.ones_like(x) for x in both]))
        for got in grads[1:]:
            torch.testing.assert_close(got, grads[0])


def test_the_first_call_may_be_inside_a_transform(ran):
    stock, (q, k, *tables) = Attention(), inputs()
    ours, x = copy.deepcopy(stock), (q.detach(), k.detach())

    def tangents(module):
        return torch.func.jvp(lambda *x: module(*x, *tables), x, x)

    with fusednorm.patch_model(ours, rotary=True):
        alive = ours.q_norm(q)
        torch.testing.assert_close(tangents(ours), tangents(stock))
        ours(q, k, *tables)
        torch.testing.assert_close(tangents(ours), tangents(stock))
    assert alive.requires_grad


@pytest.mark.parametrize("change", [lambda cos, sin: (cos[:1], sin), lambda cos, sin: (cos.int(), sin.int())])
def test_tables_that_qk_norm_does_not_take_are_the_functions(change, ran):
    stock, (q, k, *tables) = Attention(), inputs()
    ours = copy.deepcopy(stock)
    with fusednorm.patch_model(ours, rotary=True):
        ours(q, k, *tables)
        assert_same(ours, stock, (q, k, *change(*tables)))


class OfHub(nn.Module):
    """What Hugging Face's `kernels` makes of a function."""

    def forward(self, *args, **named):
        return halves(*args, **named)

    forward.__signature__ = inspect.Signature(
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
         *inspect.signature(halves).parameters.values()]
    )  # fmt: skip


of_hub = OfHub()


class AttentionOfHub(Attention):
    def forward(self, q, k, cos, sin):
        q, k = self.steps(self.q_norm(q), self.k_norm(k))
        return of_hub(q, k, cos, sin)


def test_a_module_may_stand_for_the_function(ran):
    stock, given, module = AttentionOfHub(), inputs(), of_hub
    both = nn.ModuleList([copy.deepcopy(stock), copy.deepcopy(stock)])
    with fusednorm.patch_model(both, rotary=True):
        for ours in both:
            ours(*given)
            assert_same(ours, stock, given)
    assert len(ran) == 4 and of_hub is module


def let_wait(attention: nn.Module) -> None:
    """As if an earlier call had rotated the results."""
    for norm in (attention.q_norm, attention.k_norm):
        norm._fused_wait.has_rotated = True


def untouched(q, k):
    return q, k


def moved_before(q, k):
    return q.transpose(-3, -2).transpose(1, 2), k


def scaled(q, k):
    return (2 * q - q / 4).transpose(1, 2), k.transpose(1, 2).contiguous()


def of_functions(q, k):
    assert q.shape == (2, 5, 4, 16) and len(k) == 2 and k.dtype == FP32 and bool((q == q).all())
    return torch.cat([q, q[:, :, :1]], 2)[:, :, :-1].transpose(1, 2), torch.stack([k, k])[0].permute(0, 2, 1, 3)


def used_twice(q, k):
    return (q + q.detach()).transpose(1, 2), k.transpose(1, 2)


def looked_at(q, k):
    assert q.mean().isfinite()
    return q.transpose(1, 2), k.transpose(1, 2)


def in_heads(q, k):
    return tuple(each.view(2, 5, -1, 16).transpose(1, 2) for each in (q, k))


def in_heads_of_columns(q, k):
    return tuple(each.view((2, 5, -1, 16)).contiguous() for each in (q, k))


def in_other_heads(q, k):
    return tuple(each.view(2, -1, 5, 16) for each in (q, k))


def as_bits(q, k):
    assert q.view(torch.int32).dtype == k.view(dtype=torch.int32).dtype == torch.int32
    return in_heads(q, k)


@pytest.mark.parametrize(
    ("steps", "more", "launches"),
    [(in_heads, {}, 1), (in_heads_of_columns, {"unsqueeze_dim": 2}, 0), (in_other_heads, {}, 0), (as_bits, {}, 0)],
)
def test_norms_of_all_heads_wait_until_these_are_rotated(steps, more, launches, ran):
    stock, given = Attention(steps), inputs()
    stock.q_norm, stock.k_norm, stock.more = Norm(4 * 16), Norm(2 * 16), more
    given = [*(each.detach().flatten(2).requires_grad_() for each in given[:2]), *given[2:]]
    ours = copy.deepcopy(stock)
    with fusednorm.patch_model(ours, rotary=True):
        assert_same(ours, stock, given)
        ran.clear()
        let_wait(ours)
        assert_same(ours, stock, given)
    assert len(ran) == launches


@pytest.mark.parametrize(
    ("steps", "more", "launches"),
    [
        (untouched, {"unsqueeze_dim": 2}, 1),
        (moved_before, {"unsqueeze_dim": 2}, 1),
        (scaled, {}, 0),
        (of_functions, {}, 0),
        (looked_at, {}, 0),
        (used_twice, {}, 0),
    ],
)
def test_an_attention_may_do_anything_with_the_results(steps, more, launches, ran):
    stock = Attention(steps)
    stock.more = more
    ours = copy.deepcopy(stock)
    with fusednorm.patch_model(ours, rotary=True):
        let_wait(ours)
        assert_same(ours, stock, inputs())
    assert len(ran) == launches


def hooked(attention, given):
    attention.q_norm.register_forward_hook(lambda module, inputs, output: output * 2)
    return given


def watched(attention, given):
    return given


def other_eps(attention, given):
    attention.k_norm.eps = 1e-2
    return given


def wide_tables(attention, given):
    attention.to(BF16)
    return *(each.detach().to(BF16).requires_grad_() for each in given[:2]), *given[2:]


def trained_tables(attention, given):
    return *given[:2], *(each.requires_grad_() for each in given[2:])


@pytest.mark.parametrize("change", [hooked, watched, other_eps, wide_tables, trained_tables])
def test_norms_that_cannot_be_joined_run_alone(change, ran):
    stock = Attention()
    given = change(stock, inputs())
    ours = copy.deepcopy(stock)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None) if change is watched else None
    with fusednorm.patch_model(ours, rotary=True):
        let_wait(ours)
        assert_same(ours, stock, given, 0.1 if change is wide_tables else 1e-5)
    if hook:
        hook.remove()
    assert not ran


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["Qwen3", "Olmo2"])
def test_models_train_as_the_stock_ones(name, dtype, ran):
    model, ids = hf_models.build(name).to(dtype), hf_models.tokens()
    exact, stock = hf_models.in_float64(model, ids), hf_models.loss_and_grads(model, ids)
    with fusednorm.patch_model(model, rotary=True):
        model(input_ids=ids)
        with OpLog() as log:
            ours = hf_models.loss_and_grads(model, ids)
    hf_models.assert_as_good_as_stock(ours, stock, exact, dtype)
    counts = [log.names.count(f"fusednorm.head_norm_{way}.default") for way in ("fwd", "bwd")]
    assert counts == [2, 2] and log.names.count("fusednorm.rms_norm_fwd_affine.default") == 5


def test_attentions_of_transformers_are_counted():
    pytest.importorskip("transformers", reason="needs the package transformers")
    found = attention_classes.found_in(["qwen3", "gemma3", "olmo2"])
    assert found == {"Qwen3Attention": True, "Gemma3Attention": True, "Olmo2Attention": True}


def test_without_rotary_every_norm_runs_by_itself(ran):
    stock, given = Attention(), inputs()
    ours = copy.deepcopy(stock)
    with fusednorm.patch_model(ours):
        for _ in range(2):
            assert_same(ours, stock, given)
    assert not ran


def test_compiled_code_has_the_norms_alone(ran):
    model, ids = hf_models.build("Qwen3", layers=1), hf_models.tokens()
    torch._dynamo.reset()
    backend = RecordingBackend()
    with fusednorm.patch_model(model, rotary=True):
        for _ in range(2):
            model(input_ids=ids)
        assert len(ran) == 2
        ran.clear()
        torch.compile(model, backend=backend, fullgraph=True)(input_ids=ids)
    assert backend.ops.count("fusednorm.rms_norm_fwd_affine.default") == 5 and not ran
