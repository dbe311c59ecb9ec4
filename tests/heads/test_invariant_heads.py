"""batch_invariant for norms of heads: a row's bits are its own, and ordered sums are those of micro-batches. Triton's
interpreter runs the kernels; tests/kernels/simulated/test_invariant_rows.py runs compiled ones."""

from __future__ import annotations

from dataclasses import replace

import head_norms
import pytest
import torch
from head_norms import BF16, FP32, HeadCase, calls_of
from torch import Tensor

import fusednorm
from fusednorm import batch_invariant
from fusednorm.heads import plan as head_plan
from fusednorm.heads.problem import Packing
from fusednorm.host import fallback, gpus
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.planner import limits
from fusednorm.planner.device import A100, H100, H200, DeviceSpec
from fusednorm.settings import invariance

pytest.importorskip("triton")
SMALL_GPU = replace(A100, sm_count=1)
CASES = [
    HeadCase(cols=16, heads=3, kv_heads=2, tokens=3, dtype=FP32, rotary=16),
    HeadCase(cols=40, heads=2, kv_heads=2, tokens=3, dtype=BF16, rotary=20, table_dims="BS", norm="layer"),
    HeadCase(cols=64, heads=4, kv_heads=1, tokens=3, dtype=BF16, heads_first=True, weight_dtype=FP32),
]
WHOLE = HeadCase(cols=16, heads=3, kv_heads=3, batch=4, tokens=4, dtype=FP32, rotary=16, whole=True)


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch):
    head_norms.without_formulas(monkeypatch)
    monkeypatch.setattr(gpus, "spec_of", lambda device: A100)
    monkeypatch.setattr(limits, "head_warps", {"forward": (1,), "backward": (1,)})
    monkeypatch.setattr(DeviceSpec, "of_architecture", lambda device: replace(SMALL_GPU, arch=device.arch))
    head_plan.choose.cache_clear()
    with kernels_on("cpu"):
        yield
    head_plan.choose.cache_clear()
    assert not invariance.switch.invariance()


def halves(case: HeadCase, given: dict[str, Tensor]) -> list[tuple[HeadCase, dict[str, Tensor]]]:
    """The batch in two parts, each with copies of the parameters."""
    parts = []
    for at in range(2):
        of = {name: (each.chunk(2)[at] if name in "qk" else each).detach().clone() for name, each in given.items()}
        parts.append((replace(case, batch=case.batch // 2), {name: each.requires_grad_() for name, each in of.items()}))
    return parts


def both_ways(case: HeadCase, given: dict[str, Tensor], grads, rotary=None) -> tuple[list[Tensor], dict[str, Tensor]]:
    got = case.run(given, **({} if rotary is None else {"rotary": rotary}))
    return got, dict(zip(given, torch.autograd.grad(got, list(given.values()), grads), strict=True))


def tables_of(case: HeadCase, at: int):
    tables = case.tables()
    return tuple(each.chunk(2)[at] for each in tables) if case.table_dims == "BS" and tables else tables


@pytest.mark.parametrize("case", [*CASES, WHOLE], ids=str)
def test_a_part_of_a_batch_gives_the_bits_of_the_whole_in_any_layout(case):
    given = case.tensors()
    grads = [torch.randn_like(given[name]) for name in "qk"]
    parts = halves(case, given)
    for _, part in parts:  # columns of wider rows, one element off
        for name in "qk":
            wide = torch.cat([part[name].detach()] * 2, -1)
            part[name] = torch.cat([wide[..., :1], wide], -1)[..., 1 : 1 + case.cols].requires_grad_()
    with batch_invariant():
        whole, of_whole = both_ways(case, given, grads)
        found = [
            both_ways(each, part, [grad.chunk(2)[at] for grad in grads], tables_of(case, at))
            for at, (each, part) in enumerate(parts)
        ]
    for at, name in enumerate("qk"):
        assert torch.equal(torch.cat([outputs[at] for outputs, _ in found]), whole[at])
        assert torch.equal(torch.cat([of_part[name] for _, of_part in found]), of_whole[name])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_single_row_has_the_bits_that_it_has_among_others(case):
    given = case.tensors()
    one = replace(case, batch=1, tokens=1, heads=1, kv_heads=1)
    few = {name: (each[:1, :1, :1] if name in "qk" else each) for name, each in given.items()}
    tables = case.tables()
    if tables:
        tables = tuple(each[:1] if each.dim() == 2 else each[:1, :1] for each in tables)
    with batch_invariant():
        whole, alone = case.run(given), one.run(few, rotary=tables)
    assert all(torch.equal(a, b[:1, :1, :1]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("cols", [16, 24])
def test_a_packed_tensor_gives_the_bits_of_q_and_k_apart(cols, grouped):
    packing, qkv = Packing(4, 2, grouped), torch.randn(2, 3, 8 * cols, requires_grad=True)
    weights = [torch.randn(cols, requires_grad=True) for _ in range(2)]
    with batch_invariant():
        got = fusednorm.qk_norm_packed(qkv, 4, 2, *weights, grouped=grouped)
        grads = [torch.randn_like(each) for each in got]
        dqkv, *of_weights = torch.autograd.grad(got, [qkv, *weights], grads)
        q, k, v = (each.detach().flatten(-3, -2) if grouped else each.detach() for each in packing.split(qkv))
        leaves = [q.contiguous().requires_grad_(), k.contiguous().requires_grad_()]
        want = fusednorm.qk_norm(*leaves, *weights)
        dq, dk, *wanted = torch.autograd.grad(want, [*leaves, *weights], grads[:2])
    assert all(map(torch.equal, (*got, *of_weights), (*want, v, *wanted)))
    parts = [each.flatten(-3, -2) if grouped else each for each in packing.split(dqkv)]
    assert all(map(torch.equal, parts, (dq, dk, grads[2])))


ORDERED = [
    HeadCase(cols=16, heads=3, kv_heads=2, batch=4, tokens=4, dtype=FP32, rotary=16),
    HeadCase(cols=8, heads=2, kv_heads=2, batch=3, tokens=4, weight_dtype=FP32, dtype=BF16, heads_first=True, rotary=8),
]


@pytest.mark.parametrize("case", [*ORDERED, WHOLE], ids=str)
def test_ordered_sums_are_those_of_micro_batches_added_up(case):
    """Of two samples each; the last may have one."""
    given = case.tensors()
    grads = [torch.randn_like(given[name]) for name in "qk"]
    with batch_invariant(ordered_sums=2 * case.tokens):
        whole = both_ways(case, given, grads)[1]
        added = None
        for start in range(0, case.batch, 2):
            some = slice(start, start + 2)
            part = {name: (each[some] if name in "qk" else each).detach().clone() for name, each in given.items()}
            part = {name: each.requires_grad_() for name, each in part.items()}
            found = both_ways(replace(case, batch=len(part["q"])), part, [each[some] for each in grads])[1]
            added = found if added is None else {
                name: torch.cat([added[name], each]) if name in "qk" else added[name] + each
                for name, each in found.items()
            }  # fmt: skip
    assert all(torch.equal(added[name], whole[name]) for name in given)


def test_a_packed_gradient_by_blocks_is_that_of_q_and_k_apart():
    packing, qkv = Packing(4, 2, True), torch.randn(4, 8, 8 * 16, requires_grad=True)
    weights = [torch.randn(16, requires_grad=True) for _ in range(2)]
    with batch_invariant(ordered_sums=16):
        got = fusednorm.qk_norm_packed(qkv, 4, 2, *weights, grouped=True)
        grads = [torch.randn_like(each) for each in got]
        dqkv, *of_weights = torch.autograd.grad(got, [qkv, *weights], grads)
        leaves = [each.detach().flatten(-3, -2).clone().requires_grad_() for each in packing.split(qkv)[:2]]
        dq, dk, *wanted = torch.autograd.grad(fusednorm.qk_norm(*leaves, *weights), [*leaves, *weights], grads[:2])
    parts = [each.flatten(-3, -2) for each in packing.split(dqkv)]
    assert all(map(torch.equal, (*parts, *of_weights), (dq, dk, grads[2], *wanted)))


def test_a_block_that_ends_within_a_sample_is_refused():
    case = replace(ORDERED[0], tokens=6)
    given = case.tensors()
    with batch_invariant(ordered_sums=8), pytest.raises(RuntimeError, match="multiple of 6 tokens, .* got 8"):
        case.run(given)[0].sum().backward()


def test_a_backward_does_as_its_forward_did(monkeypatch):
    given, seen = ORDERED[0].tensors(), []
    asked = head_plan.asked

    def watched(*given):
        seen.append(invariance.switch.invariance())
        return asked(*given)

    monkeypatch.setattr(head_plan, "asked", watched)
    with batch_invariant():
        got = ORDERED[0].run(given)
    got[0].sum().backward()
    assert seen == [invariance.OF_ROWS] * 2


def test_a_plan_follows_from_columns_dtypes_form_and_architecture_alone():
    case = HeadCase(cols=128, heads=8, kv_heads=2, dtype=BF16, rotary=128, tokens=9)
    alike = [case, replace(case, tokens=1, batch=1), replace(case, heads_first=True, table_dims="BS")]
    plans = set()
    with batch_invariant():
        for each in alike:
            forward, backward = calls_of(each)
            for device in (H100, replace(H200, name="another", sm_count=7)):
                without_dw = head_plan.asked(replace(backward.problem, wants_dw=False), device)
                found = [plan for _, plan in head_plan.plans_of([forward, backward], device)]
                plans.add((*found, head_plan.choose(*without_dw)))
    assert len(plans) == 1
    ((_, backward, without_dw),) = plans
    assert backward == without_dw


def test_a_kernel_that_fails_is_left_for_all_layouts():
    case = HeadCase(cols=128, heads=8, kv_heads=2, dtype=BF16, rotary=128, tokens=9)
    first, other = (calls_of(each)[0] for each in (case, replace(case, heads_first=True, table_dims="BS")))
    with batch_invariant(), pytest.warns(RuntimeWarning, match="another kernel"):
        ((_, plan),) = head_plan.plans_of([first], H200)
        fallback.remember(plan, *head_plan.asked(first.problem, H200), "for this test")
        ((_, instead),) = head_plan.plans_of([other], H200)
    fallback.forget()
    assert instead.variant == "reference"
