"""bench.heads without a GPU: what it times computes the same, and its plans are other plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import forms, heads
from fusednorm.heads import plan
from fusednorm.planner.device import H200
from fusednorm.tools.oracle import stock

BF16 = torch.bfloat16


KINDS = [(norm, packed, "norm", False) for norm in ("rms", "layer") for packed in (False, True)]
KINDS += [("rms", True, "rotary", False), ("layer", False, "norm", True), ("rms", False, "rotary", True)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rotary", heads.ROTARY)
def test_ours_is_what_models_write(rotary, kind, monkeypatch):
    def stocks(case, like):
        has_bias = None if like.bias is None else BF16
        case = replace(case, x_dtype=BF16, weight_dtype=BF16, bias_dtype=has_bias)
        return lambda given: stock(case, given), lambda given, _: stock(case, given)

    monkeypatch.setattr(heads.cudnn, "graphs", stocks)
    torch.manual_seed(0)
    norm, packed, first, whole = kind
    case = heads.HeadCase(6, 4, 2, 16, rotary, packed, norm, BF16, first, whole)
    given = case.inputs("cpu")
    tables = case.tables(torch.empty(0, dtype=BF16))
    wide = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    grads = tuple(torch.randn(each.shape) for each in heads.written(case, given, tables))
    exact = forms.all_of(lambda each: heads.written(case, each, tables and [t.double() for t in tables]), wide, grads)
    runs = [heads.ours, heads.written, *([heads.norms, heads.by_cudnn()] if rotary == "none" else [])]
    found = [forms.all_of(lambda each, run=run: run(case, each, tables), given, grads) for run in runs]
    of_ours, least, *others = [forms.errors_of(each, exact) for each in found]
    for errors in (of_ours, *others):
        assert all(error <= forms.FACTOR * max(most, 2**-9) for error, most in zip(errors, least, strict=True))


@pytest.mark.parametrize("rotary", heads.ROTARY)
@pytest.mark.parametrize("packed", [False, True])
def test_a_sweep_has_other_plans(packed, rotary):
    case = heads.HeadCase(4096, 32, 8, 128, rotary, packed, "rms", BF16)
    calls = {call.problem.direction: call for call in heads.calls_of_kernels(case)}
    ours = {direction: plan.choose(call.problem, H200) for direction, call in calls.items()}
    others = heads.swept(case, H200)
    assert len(others) >= 8
    for direction, shape in others.values():
        with heads.planned(direction, shape):
            found = {way: plan.choose(call.problem, H200) for way, call in calls.items()}
        assert [way for way in found if found[way] != ours[way]] == [direction]
    assert calls["backward"].problem.copies == packed
