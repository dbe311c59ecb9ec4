"""Backwards of modulated norms, by the portable kernels in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import guarded_buffers
from modulations import PORTABLE

from fusednorm.host import gpus
from fusednorm.planner.device import A100
from fusednorm.planner.plan import MultiWavePlan

pytest.importorskip("triton")
PLANS = {
    "one row": lambda cols: MultiWavePlan(1, 32, -(-cols // 32), 4, 1, 255),
    "two rows": lambda cols: MultiWavePlan(2, 128, 1, 4, 2, 255),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("modulated", PORTABLE, ids=str)
def test_modulated_backwards_give_the_gradients_of_autograd_in_float64(modulated, plan, monkeypatch):
    from fusednorm.host import launch

    monkeypatch.setattr(gpus, "spec_of", lambda device: replace(A100, sm_count=2))
    with guarded_buffers():
        prepared = launch.on_tensors(modulated.call, plan(modulated.cols))
        for each in prepared.launches:
            each.run()
    modulated.check(prepared.outputs)
