"""Modulations in tables with an index for each row of x, by the portable kernels in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import guarded_buffers
from tables import BACKWARDS, FORWARDS

from fusednorm.host import gpus
from fusednorm.planner.device import A100
from fusednorm.planner.plan import ColumnTilePlan, MultiWavePlan

pytest.importorskip("triton")
PLANS = {
    "one row": lambda cols: MultiWavePlan(1, 32, -(-cols // 32), 4, 1, 255),
    "two rows": lambda cols: MultiWavePlan(2, 128, 1, 4, 2, 255),
    "column tiles": lambda cols: ColumnTilePlan(4, 32, 4, 1, 64, 4),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("table", FORWARDS + BACKWARDS, ids=str)
def test_rows_of_tables_give_what_gathered_rows_give_in_float64(table, plan, monkeypatch):
    from fusednorm.host import launch

    monkeypatch.setattr(gpus, "spec_of", lambda device: replace(A100, sm_count=2))
    with guarded_buffers():
        prepared = launch.on_tensors(table.call, plan(table.cols))
        for each in prepared.launches:
            each.run()
    table.check(prepared.outputs)
