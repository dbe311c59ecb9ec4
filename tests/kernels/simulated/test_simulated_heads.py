"""The compiled kernels of qk_norm on a simulated GPU, against float64 autograd."""

from __future__ import annotations

from dataclasses import replace

import head_norms
import pytest
import torch
from head_norms import BF16, FP16, FP32, HeadCase, assert_errs_no_more_than_plain_code, calls_of
from simulator.host import simulated

import fusednorm
from fusednorm.heads.plan import choose
from fusednorm.heads.problem import Packing
from fusednorm.planner.device import H200

CASES = [
    HeadCase(cols=64, rotary=64, tokens=9, dtype=BF16, table_dims="BS"),
    HeadCase(cols=48, rotary=16, norm="layer", interleaved=True, heads_first=True, norm_first=False, dtype=BF16),
    HeadCase(cols=64, rotary=64, heads=5, kv_heads=5, tokens=5, dtype=BF16, whole=True),
    HeadCase(cols=32, rotary=16, heads=6, kv_heads=6, tokens=3, norm="layer", interleaved=True, dtype=BF16, whole=True),
    HeadCase(cols=80, rotary=40, tokens=7, batch=1, half_table=True, dtype=FP32),
    HeadCase(cols=64, rotary=64, heads=6, tokens=21, norm="layer", dtype=BF16, table_dtype=BF16, table_dims="BS"),
    HeadCase(cols=128, rotary=128, tokens=9, norm="layer", interleaved=True, dtype=BF16, table_dtype=BF16),
    HeadCase(cols=128, rotary=64, norm="layer", interleaved=True, half_table=True, dtype=FP16, table_dtype=FP16),
    HeadCase(cols=48, rotary=48, tokens=9, interleaved=True, half_table=True, norm_first=False, dtype=FP16),
    HeadCase(cols=64, rotary=64, heads=5, kv_heads=1, tokens=21, norm="layer", dtype=BF16, table_dtype=BF16),
    HeadCase(cols=1024, heads=2, kv_heads=1, batch=1, tokens=9, dtype=BF16, norm="layer"),
]


@pytest.mark.parametrize("device", ["H200", "A100"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_kernels_give_the_numbers_of_float64_autograd(case, device, monkeypatch):
    head_norms.without_formulas(monkeypatch)
    given = case.tensors()
    with simulated(device, 1) as simulation:
        assert_errs_no_more_than_plain_code(case, given, case.run(given))
    names = [each.name for each in simulation.launched]
    assert names[:2] == ["forward", "backward"] and set(names[2:]) == {"finalize_several"}


OF_16_BITS = [
    HeadCase(cols=128, rotary=128, tokens=45, dtype=BF16, table_dtype=BF16, table_dims="BS"),
    HeadCase(cols=128, rotary=128, tokens=9, heads=5, norm="layer", dtype=FP16, table_dtype=BF16, heads_first=True),
    HeadCase(cols=128, rotary=128, tokens=9, norm="layer", dtype=BF16, table_dtype=FP16, half_table=True),
    HeadCase(cols=128, rotary=128, tokens=21, dtype=BF16, table_dtype=BF16, interleaved=True, weight_dtype=FP32),
    HeadCase(cols=64, rotary=64, tokens=70, dtype=BF16, table_dtype=BF16, norm_first=False, interleaved=True),
    HeadCase(cols=128, rotary=128, tokens=21, dtype=BF16, table_dtype=BF16, norm_first=False, table_dims="BS"),
    HeadCase(cols=128, rotary=128, tokens=21, dtype=BF16, table_dtype=BF16, norm_first=False, norm="layer"),
    HeadCase(cols=64, rotary=64, tokens=70, dtype=BF16, table_dtype=FP16, norm_first=False, norm="layer",
             interleaved=True, heads_first=True, table_dims="BSH1"),
    HeadCase(cols=256, rotary=256, tokens=7, dtype=FP16, table_dtype=FP16, norm_first=False, norm="layer",
             half_table=True, weight_dtype=FP32),
    HeadCase(cols=128, rotary=32, tokens=21, dtype=BF16, table_dtype=BF16, norm_first=False, norm="layer"),
    HeadCase(cols=128, rotary=64, tokens=21, dtype=BF16, table_dtype=BF16, half_table=True, packed=True),
    HeadCase(cols=128, rotary=72, tokens=21, dtype=BF16, table_dtype=BF16, norm_first=False, interleaved=True),
    HeadCase(cols=64, rotary=16, tokens=70, dtype=FP16, table_dtype=FP16, interleaved=True, norm="layer"),
    HeadCase(cols=64, rotary=48, tokens=70, dtype=BF16, table_dtype=BF16, norm="layer"),
    HeadCase(cols=128, rotary=128, tokens=21, dtype=BF16, table_dtype=FP32, table_dims="BS"),
    HeadCase(cols=64, rotary=32, tokens=70, dtype=BF16, table_dtype=FP32, norm_first=False, norm="layer", packed=True),
    HeadCase(cols=64, rotary=64, tokens=70, dtype=FP16, table_dtype=FP32, interleaved=True, norm="layer"),
    HeadCase(cols=64, tokens=70, dtype=BF16, norm="layer"),
    HeadCase(cols=96, tokens=40, dtype=BF16, norm="layer"),
    HeadCase(cols=256, tokens=7, norm="layer", dtype=FP16, weight_dtype=FP32, weight_offset=1.0),
    HeadCase(cols=512, tokens=3, norm="layer", dtype=BF16, weights=False),
]


@pytest.mark.parametrize("device", ["H200", "A100"])
@pytest.mark.parametrize("case", OF_16_BITS, ids=str)
def test_backwards_with_asynchronous_copies_give_the_numbers_of_float64_autograd(case, device, monkeypatch):
    head_norms.without_formulas(monkeypatch)
    given = case.tensors()
    with simulated(device, 1) as simulation:
        assert_errs_no_more_than_plain_code(case, given, case.run(given))
    assert all(each.kernel.shared_bytes for each in simulation.launched if each.name == "backward"), "slots"


@pytest.mark.parametrize("interleaved", [False, True])
def test_equal_elements_that_are_rotated_first_are_normalized_exactly(interleaved, monkeypatch):
    """They are equal behind the rotation, too, and no numbers of 16 bits, whose sums would all be exact."""
    head_norms.without_formulas(monkeypatch)
    case = HeadCase(cols=128, rotary=128, tokens=9, norm="layer", norm_first=False, interleaved=interleaved, dtype=BF16)
    given = {name: each.detach() for name, each in case.tensors().items()}
    given |= {of: given[of][..., :1].expand_as(given[of]).contiguous() for of in "qk"}
    given = {name: each.requires_grad_() for name, each in given.items()}
    sin = torch.full((9, 2, 64), 1.3 / 1024, dtype=BF16)
    sin[:, 1] *= -1
    sin = (sin.mT if interleaved else sin).reshape(9, 128)
    with simulated("H200", 1) as simulation:
        got = case.run(given, rotary=(torch.ones_like(sin), sin))
        _, _, dw, dk_weight, *_ = head_norms.gradients(got, given)
    assert all(each.kernel.shared_bytes for each in simulation.launched if each.name == "backward"), "slots"
    assert not dw.any() and not dk_weight.any()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("tokens", [3, 70])
def test_such_a_backward_of_a_packed_tensor_gives_the_bits_of_its_slices(grouped, tokens, monkeypatch):
    head_norms.without_formulas(monkeypatch)
    case = HeadCase(cols=128, norm="layer", rotary=128, dtype=BF16, table_dtype=BF16, tokens=tokens)
    parameters = {name: each for name, each in case.tensors().items() if len(name) > 1}
    packed = torch.randn(2, tokens, 8 * 128, dtype=BF16, requires_grad=True)
    packing, tables = Packing(4, 2, grouped), case.tables()
    with simulated("H200", 1) as simulation:
        got = fusednorm.qk_norm_packed(packed, 4, 2, rotary=tables, grouped=grouped, **parameters, **case.settings)
        grads = [torch.randn_like(each) for each in got]
        found = torch.autograd.grad(got, [packed, *parameters.values()], grads)
        q, k, v = (each.detach().requires_grad_() for each in packing.split(packed))
        of_groups = tuple(each.unsqueeze(-2) for each in tables) if grouped else tables
        made = case.run({"q": q, "k": k} | parameters, rotary=of_groups)
        shaped = [each.view(x.shape) for each, x in zip(grads, (q, k, v), strict=True)]
        dq, dk, *sums = torch.autograd.grad(made, [q, k, *parameters.values()], shaped[:2])
    whole = torch.cat([dq, dk, shaped[2]], -2).reshape(packed.shape)
    assert torch.equal(found[0], whole) and all(map(torch.equal, found[1:], sums))
    assert all(each.kernel.shared_bytes for each in simulation.launched if each.name == "backward"), "slots"


@pytest.mark.parametrize("interleaved", [False, True])
def test_two_heads_of_a_thread_have_the_bits_of_one(interleaved, monkeypatch):
    head_norms.without_formulas(monkeypatch)
    case = HeadCase(cols=64, rotary=64, norm="layer", dtype=FP32, weight_dtype=BF16, interleaved=interleaved)
    given, apart = case.tensors(), replace(case, heads_first=True)
    assert [choose(each.problem, H200).adjacent for of in (case, apart) for each in calls_of(of)[:1]] == [2, 1]
    with simulated("H200", 1), torch.no_grad():
        pairs = case.run(given)
        alone = apart.run(given | {name: given[name].transpose(1, 2) for name in "qk"})
    assert all(torch.equal(one.transpose(1, 2), two) for one, two in zip(alone, pairs, strict=True))


@pytest.mark.parametrize("grouped", [False, True])
def test_the_gradient_of_v_is_copied_by_the_same_launch(grouped, monkeypatch):
    head_norms.without_formulas(monkeypatch)
    packed = torch.randn(2, 9, 8 * 48, dtype=BF16, requires_grad=True)
    with simulated("H200", 1) as simulation:
        got = fusednorm.qk_norm_packed(packed, 4, 2, eps=1e-3, grouped=grouped)
        grads = [torch.randn_like(each) for each in got]
        (grad,) = torch.autograd.grad(got, packed, grads)
    *_, v = Packing(4, 2, grouped).split(grad)
    assert torch.equal(v.reshape(grads[2].shape), grads[2])
    assert [each.name for each in simulation.launched] == ["forward", "backward"]
