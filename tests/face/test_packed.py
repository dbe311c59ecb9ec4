"""Norms with a gate whose x and gate are columns of one tensor, against the norm of slices."""

from __future__ import annotations

import itertools

import pytest
import torch
from norm_forms import FP32, FP64
from op_log import OpLog
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import fusednorm

WIDTH, COLS = 40, 12
FUNCTIONS = {
    "layer": (fusednorm.layer_norm_gated_packed, fusednorm.layer_norm_gated),
    "rms": (fusednorm.rms_norm_gated_packed, fusednorm.rms_norm_gated),
}
PLACES = {"ends": ((0, 12), (28, 40)), "gate first": ((16, 28), (4, 16)), "apart": ((3, 15), (20, 32))}
norms = pytest.mark.parametrize("norm", FUNCTIONS)
orders = pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
places = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


def leaves(dtype=FP64, batch=(2, 3)) -> list[Tensor]:
    """The packed tensor, weight, bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = (*batch, WIDTH), (COLS,), (COLS,)
    return [torch.randn(each, generator=generator, dtype=dtype).requires_grad_() for each in shapes]


def by_slices(norm, packed, place, weight, bias, **settings):
    runs, at = [], 0
    for start, stop in sorted(place):
        runs, at = [*runs, (at, start)], stop
    x, gate = (packed[..., start:stop] for start, stop in place)
    y = FUNCTIONS[norm][1](x, gate, weight, bias, 1e-3, **settings)
    return y, *(packed[..., start:stop] for start, stop in (*runs, (at, WIDTH)) if stop > start)


def gradients(outputs, given, used):
    picked = [each for each, use in zip(outputs, used, strict=False) if use]
    grads = [torch.linspace(-1, 1, each.numel(), dtype=each.dtype).reshape(each.shape) for each in picked]
    return torch.autograd.grad(picked, given, grads, allow_unused=True)


@norms
@orders
@places
def test_outputs_and_gradients_are_those_of_slices(norm, after, place):
    for dtype, size in itertools.product((FP32, torch.bfloat16), (None, 4)):
        given = packed, weight, bias = leaves(dtype)
        settings = {"norm_before_gate": after, "activation": "sigmoid", "group_size": size, "weight_offset": 0.5}
        got = FUNCTIONS[norm][0](packed, *place, weight, bias, 1e-3, **settings)
        want = by_slices(norm, packed, place, weight, bias, **settings)
        assert len(got) == len(want) and all(map(torch.equal, got, want))
        assert all(each.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr() for each in got[1:])
        for used in ((True,) * 4, (True, False, False, False), (True, False, True, False), (False, True, True, True)):
            pairs = zip(gradients(got_again(norm, given, place, settings), given, used),
                        gradients(by_slices(norm, packed, place, weight, bias, **settings), given, used), strict=True)
            for ours, right in pairs:
                torch.testing.assert_close(ours, torch.zeros_like(ours) if right is None else right)


def got_again(norm, given, place, settings):
    packed, weight, bias = given
    return FUNCTIONS[norm][0](packed, *place, weight, bias, 1e-3, **settings)


@norms
@orders
def test_the_backward_is_one_op_without_concatenation(norm, after):
    packed, weight, bias = leaves(FP32)
    place = PLACES["gate first"]
    y, before, behind = FUNCTIONS[norm][0](packed, *place, weight, bias, norm_before_gate=after)
    with OpLog() as log:
        y.sum().backward(retain_graph=True)
    name = f"fusednorm.{norm}_norm_bwd_{'times_gate' if after else 'of_gated'}_packed.default"
    assert log.names.count(name) == 1 and not any("cat" in each or "slice_backward" in each for each in log.names)
    assert packed.grad.is_contiguous()


@norms
@orders
def test_derivatives_of_any_order(norm, after):
    given = leaves(batch=(2,))

    def outputs(packed, weight, bias):
        return FUNCTIONS[norm][0](packed, *PLACES["apart"], weight, bias, 1e-3, norm_before_gate=after, group_size=6)

    assert gradcheck(outputs, given, fast_mode=True) and gradgradcheck(outputs, given, fast_mode=True)
    packed, *others = given
    mapped = torch.func.vmap(lambda row: outputs(row, *others))(packed)
    assert all(torch.allclose(ours, want) for ours, want in zip(mapped, outputs(*given), strict=True))


@norms
@orders
def test_the_op_has_a_fake_and_compiles_without_a_break(norm, after):
    packed, weight, bias = leaves(FP32)
    place = PLACES["gate first"]
    suffix = "times_gate" if after else "of_gated"
    op = getattr(torch.ops.fusednorm, f"{norm}_norm_bwd_{suffix}_packed").default
    dy, stat = torch.randn(2, 3, COLS), torch.ones(6)
    x, gate = (packed.detach()[..., start:stop] for start, stop in place)
    statistics = (stat, stat) if norm == "layer" else (stat,)
    rest = torch.randn(2, 3, WIDTH - 2 * COLS)
    arguments = dy, x, [COLS], gate.double(), *statistics, weight.detach(), bias.detach(), rest
    named = {"width": WIDTH, "x_at": place[0][0], "gate_at": place[1][0]}
    tests = "test_schema", "test_faketensor", "test_autograd_registration"
    torch.library.opcheck(op, arguments, named, test_utils=tests)

    def step(packed, weight, bias):
        y, *others = FUNCTIONS[norm][0](packed, *place, weight, bias, norm_before_gate=after)
        return y, *others

    used = (True,) * 4
    for dynamic in (False, True):  # what a graph of any width needs is no stride of a gradient
        torch._dynamo.reset()
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for batch in ((2, 3), (3, 5)) if dynamic else ((2, 3),):
            given = leaves(FP32, batch)
            got, want = (gradients(run(*given), given, used) for run in (compiled, step))
            torch.testing.assert_close(got, want)


def test_ranges_that_overlap_or_leave_the_tensor_are_refused():
    packed, weight, _ = leaves(FP32)
    wrong = ((0, 12), (11, 23)), ((0, 12), (30, 42)), ((0, 12), (20, 31)), ((-12, 0), (0, 12)), ((5, 5), (6, 6))
    rule = "^rms_norm_fwd_times_gate: x and gate must be ranges of equally many of the 40 columns"
    for place in wrong:
        with pytest.raises(RuntimeError, match=rule):
            fusednorm.rms_norm_gated_packed(packed, *place, weight)
    for wrong, text in ((0, "0"), ((0.0, 12.0), r"\(0.0, 12.0\)"), ("ab", "'ab'")):
        with pytest.raises(TypeError, match=rf"x must be \(start, stop\), the range of its columns, got {text}$"):
            fusednorm.rms_norm_gated_packed(packed, wrong, (12, 24), weight)
    with pytest.raises(TypeError, match=r"^rms_norm_fwd_times_gate: weight must be a tensor, got list$"):
        fusednorm.rms_norm_gated_packed(packed, (0, 12), (12, 24), [1.0] * 12)
    op, x = torch.ops.fusednorm.rms_norm_bwd_of_gated_packed, torch.ones(3, 8)
    with pytest.raises(RuntimeError, match="columns of x and gate, 8 of each, must be apart and within 16, got 0 and"):
        op(x, x, [8], x, torch.ones(3), width=16, x_at=0, gate_at=4)
    with pytest.raises(RuntimeError, match=r"rest must have shape \(3, 4\), got \(3, 5\)"):
        op(x, x, [8], x, torch.ones(3), None, None, torch.ones(3, 5), width=20, x_at=0, gate_at=8)
