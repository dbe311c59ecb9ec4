"""Sums of rows by the number of each, compiled, on a simulated GPU."""

from __future__ import annotations

import pytest
from segments import CASES, Segments
from simulator.host import simulated


@pytest.mark.parametrize("device", ["A100", "H200", "B200", "RTX 5090"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_those_of_float64_on_gpus_of_each_kind(case: Segments, device):
    with simulated(device, 2):
        case.check(case.sums())
