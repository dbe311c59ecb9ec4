"""Backwards of sums with a wider residual by the portable kernels, in Triton's interpreter."""

from __future__ import annotations

import pytest
from cases import outputs_of
from wide_sums import PORTABLE

from fusednorm.planner.plan import ColumnTilePlan, MultiWavePlan

pytest.importorskip("triton")
PLANS = {"in_registers": MultiWavePlan(2, 32, 3, 4, 1, 255), "by_column_tiles": ColumnTilePlan(4, 32, 4, 1, 64, 4)}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("case", PORTABLE, ids=str)
def test_one_backward_writes_the_gradient_in_both_dtypes(case, plan):
    case.check(outputs_of(case.call, plan))
