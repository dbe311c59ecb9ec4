"""bench.heads without a GPU: what it times computes the same, and its plans are other plans."""

from __future__ import annotations

import pytest
import torch

from bench import forms, heads
from fusednorm.heads import plan
from fusednorm.heads.call import HeadProblem
from fusednorm.heads.problem import Settings
from fusednorm.planner.device import H200

BF16 = torch.bfloat16


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("rotary", heads.ROTARY)
@pytest.mark.parametrize("packed", [False, True])
def test_ours_is_what_models_write(packed, rotary, norm):
    case = heads.HeadCase(6, 4, 2, 16, rotary, packed, norm, BF16)
    given = case.inputs("cpu")
    tables = case.tables(torch.empty(0, dtype=BF16))
    wide = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    grads = tuple(torch.randn(each.shape) for each in heads.written(case, given, tables))
    exact = forms.all_of(lambda each: heads.written(case, each, tables and [t.double() for t in tables]), wide, grads)
    runs = [heads.ours, heads.written, *([heads.norms] if rotary == "none" else [])]
    found = [forms.all_of(lambda each, run=run: run(case, each, tables), given, grads) for run in runs]
    errors, least, *_ = [forms.errors_of(each, exact) for each in found]
    assert all(error <= forms.FACTOR * max(most, 2**-9) for error, most in zip(errors, least, strict=True))


def test_a_sweep_has_other_plans():
    problem = HeadProblem("backward", 2, 128, BF16, BF16, BF16, None, Settings(), wants_dx=True, wants_dw=True)
    ours, seen = plan.choose(problem, H200), set()
    for how in heads.SWEEP.values():
        with heads.planned(*how):
            seen.add(plan.choose(problem, H200))
    assert ours in seen and len(seen) > 20 and plan.choose(problem, H200) == ours
