"""Norms of heads in C++: forwards, autograd's node and backwards of known calls run without Python."""

from __future__ import annotations

from contextlib import nullcontext

import fake_gpu
import pytest
import torch
from cases import BF16, FP32, FP64
from fake_gpu import at_address
from head_norms import HeadCase
from torch.testing import assert_close

import fusednorm
from fusednorm import ops
from fusednorm.heads.operands import OPS

POINTED_TO = fake_gpu.POINTED_TO


def compute(launched) -> None:
    """What the kernels would write, for contiguous rows that are not rotated. Partial sums are in the first row."""
    given, signature = launched.parameters, launched.build.compiled.src.signature
    cols = given.get("cols", CASE.cols)

    def rows(name: str, at: int, count: int):
        return at_address(given[f"{name}.{at}"], POINTED_TO[signature[name][at][1:]], (count, cols))

    if launched.build.name == "finalize_several":
        for at in range(len(signature["out_ptrs"])):
            rows("out_ptrs", at, 1).copy_(rows("partial_ptrs", at, 1))
        return
    for at in range(2):
        count = given[f"rows.{at}"] >> 1
        x, weight = (rows(name, at, size).double() for name, size in (("x_ptrs", count), ("weight_ptrs", 1)))
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + given["eps"])
        if launched.build.name == "forward":
            rows("y_ptrs", at, count).copy_(x * rstd * weight)
            continue
        du, x_hat = rows("dy_ptrs", at, count).double(), x * rstd
        g = du * weight
        rows("dx_ptrs", at, count).copy_(rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True)))
        rows("dw_ptrs", at, 1).copy_((du * x_hat).sum(0, keepdim=True))


@pytest.fixture(autouse=True)
def kernels(gpu, monkeypatch):
    monkeypatch.setattr(fake_gpu, "compute", compute)


CASE = HeadCase(dtype=FP32)


def results(case: HeadCase, given, **more):
    outputs = case.run(given, **more)
    grads = [torch.randn(each.shape, generator=torch.Generator().manual_seed(2)).to(each) for each in outputs]
    return *outputs, *torch.autograd.grad(outputs, list(given.values()), grads)


def test_known_calls_run_without_python_and_are_right(gpu):
    for seed in range(2):
        given = CASE.tensors(seed=seed)
        if seed:
            with gpu.repeating(2):
                got = results(CASE, given)
        else:
            got = results(CASE, given)
        exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
        outputs = CASE.composite(exact)
        grads = [torch.randn(each.shape, generator=torch.Generator().manual_seed(2)).double() for each in outputs]
        want = *outputs, *torch.autograd.grad(outputs, list(exact.values()), grads)
        for ours, right in zip(got, want, strict=True):
            assert_close(ours, right.float(), atol=1e-5, rtol=1e-5)
    assert CASE.run(given)[0].grad_fn.name() == "NormBackward"


OTHERS = {
    "rows": lambda given, more: given.update(q=given["q"][:, :4]),
    "strides": lambda given, more: given.update(k=given["k"].transpose(1, 2).contiguous().transpose(1, 2)),
    "a dtype": lambda given, more: given.update(q_weight=given["q_weight"].double()),
    "no weight": lambda given, more: given.update(k_weight=None),
    "eps": lambda given, more: more.update(eps=0.5),
    "a setting": lambda given, more: more.update(weight_offset=1.0),
    "a rotation": lambda given, more: more.update(rotary=(torch.zeros(5, 16),) * 2),
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_call_that_looks_different_in_anything_goes_to_python_first(change, gpu, monkeypatch):
    gpu.computes = False
    monkeypatch.setattr(fake_gpu, "compute", lambda launched: None)
    given, more = {name: each.detach() for name, each in CASE.tensors().items()}, {}
    CASE.run(given)
    OTHERS[change](given, more)
    with gpu.repeating(0):
        CASE.run(given, **more)
    with gpu.repeating():
        CASE.run(given, **more)


@pytest.mark.parametrize("setting", [lambda: fusednorm.sm_margin(8), fusednorm.batch_invariant])
def test_calls_under_a_setting_are_repeated_under_it_alone(setting, gpu, monkeypatch):
    gpu.computes = False
    monkeypatch.setattr(fake_gpu, "compute", lambda launched: None)
    given = CASE.tensors()
    CASE.run(given)
    with setting():
        with gpu.repeating(0):
            CASE.run(given)
        with gpu.repeating():
            CASE.run(given)


def test_tables_with_gradients_are_refused_also_by_known_calls(gpu, monkeypatch):
    gpu.computes = False
    monkeypatch.setattr(fake_gpu, "compute", lambda launched: None)
    case = HeadCase(dtype=FP32, rotary=16)
    given, (cos, sin) = case.tensors(), case.tables()
    for _ in range(2):
        case.run(given, rotary=(cos, sin))
    for tables in ((cos.clone().requires_grad_(), sin), (cos, sin.clone().requires_grad_())):
        with pytest.raises(RuntimeError, match="must not require grad"):
            case.run(given, rotary=tables)


def test_the_parts_of_a_packed_gradient_are_written_where_they_lie(gpu, monkeypatch):
    gpu.computes = False
    monkeypatch.setattr(fake_gpu, "compute", lambda launched: None)
    row = 16 * BF16.itemsize
    for repeats in (0, 2):
        packed = torch.randn(2, 5, 8 * 16, dtype=BF16, requires_grad=True)
        with gpu.repeating(repeats):
            outputs = fusednorm.qk_norm_packed(packed, 4, 2, eps=1e-3)
            grads = [torch.randn_like(each) for each in outputs]
            (grad,) = torch.autograd.grad(outputs, packed, grads)
        forward, backward = (each.parameters for each in gpu.launched[-2:]) if repeats else ({}, {})
    start, made = packed.data_ptr(), grad.data_ptr()
    assert [forward[f"x_ptrs.{at}"] for at in range(2)] == [start, start + 4 * row]
    assert [forward[f"y_ptrs.{at}"] for at in range(2)] == [each.data_ptr() for each in outputs[:2]]
    assert [backward[f"dx_ptrs.{at}"] for at in range(2)] == [made, made + 4 * row]
    assert [backward[f"copy_ptrs.{at}"] for at in range(2)] == [grads[2].data_ptr(), made + 6 * row]


def test_an_output_without_a_gradient_has_zeros_in_every_call():
    """Also where Python records the node, as it does under `force`."""
    for block in (nullcontext(), nullcontext(), fusednorm.force("reference")):
        given = CASE.tensors()
        with block:
            q, _ = CASE.run(given)
        found = torch.autograd.grad(q, list(given.values()), torch.ones_like(q))
        assert all(bool(each.any()) == name.startswith("q") for name, each in zip(given, found, strict=True))


def test_second_derivatives_are_those_of_the_formula(monkeypatch):
    for name in OPS:
        monkeypatch.setitem(ops.LAUNCHES, name, lambda *_: (None, None))
    case = HeadCase(cols=8, rotary=6, tokens=2, heads=2, kv_heads=1, batch=1, dtype=FP64)
    given = case.tensors()

    def run(*tensors):
        return case.run(dict(zip(given, tensors, strict=True)))

    assert torch.autograd.gradgradcheck(run, tuple(given.values()), fast_mode=True)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lists_of_other_lengths_are_refused(device):
    q = torch.empty(2, 16, device=device)
    with pytest.raises(RuntimeError, match="head_norm_fwd: .* must .* tensors.*, got 1"):
        torch.ops.fusednorm.head_norm_fwd([q], [None], [None], None, None, None)
