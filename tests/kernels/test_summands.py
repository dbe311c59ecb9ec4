"""Backwards of sums with a wider residual by the portable kernels, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import guarded_buffers
from wide_sums import PORTABLE

from fusednorm.host import gpus
from fusednorm.planner.device import A100
from fusednorm.planner.plan import ColumnTilePlan, MultiWavePlan

pytest.importorskip("triton")
PLANS = {"in_registers": MultiWavePlan(2, 32, 3, 4, 1, 255), "by_column_tiles": ColumnTilePlan(4, 32, 4, 1, 64, 4)}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("case", PORTABLE, ids=str)
def test_one_backward_writes_the_gradient_in_both_dtypes(case, plan, monkeypatch):
    from fusednorm.host import launch

    monkeypatch.setattr(gpus, "spec_of", lambda device: replace(A100, sm_count=2))
    with guarded_buffers():
        prepared = launch.on_tensors(case.call, plan)
        for each in prepared.launches:
            each.run()
    case.check(prepared.outputs)
