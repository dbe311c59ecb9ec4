"""The compiled kernels of qk_norm on a simulated GPU, against float64 autograd."""

from __future__ import annotations

import pytest
from head_norms import BF16, FP32, HeadCase, assert_errs_no_more_than_plain_code
from simulator.host import simulated

from fusednorm.heads import ops

CASES = [
    HeadCase(cols=64, rotary=64, tokens=9, dtype=BF16, table_dims="BS"),
    HeadCase(cols=48, rotary=16, norm="layer", interleaved=True, heads_first=True, norm_first=False, dtype=BF16),
    HeadCase(cols=80, rotary=40, tokens=7, batch=1, half_table=True, dtype=FP32),
]


@pytest.mark.parametrize("device", ["H200", "A100"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_kernels_give_the_numbers_of_float64_autograd(case, device, monkeypatch):
    monkeypatch.setattr(ops.Call, "formula", None)
    given = case.tensors()
    with simulated(device, 1) as simulation:
        assert_errs_no_more_than_plain_code(case, given, case.run(given))
    names = [each.name for each in simulation.launched]
    assert names[:2] == ["forward", "backward"] and set(names[2:]) == {"finalize_several"}
