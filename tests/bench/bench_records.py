"""Records in the format of the bench tools, for tests of the tools that read them."""

from __future__ import annotations

import torch

from bench.cases import BenchCase
from bench.records import make_record
from bench.timing import Times

CASE = BenchCase("layer", (16, 64), weight_dtype=torch.float32, bias_dtype=torch.float32)
MACHINE = {"date": "2031-05-06T07:08:09+00:00", "gpu": "NVIDIA H200 NVL", "torch": "2", "triton": "3"}
TIMES = Times.of([12.0, 10.0, 11.0])
TEN = Times.of([10.0])


def record_of(candidate: str, microseconds: float, case: BenchCase = CASE, direction="backward", **more) -> dict:
    """A record with a floor of 10 us, and with times that differ from the median by at most 1%."""
    times = Times.of([microseconds * factor for factor in (0.99, 1.0, 1.01)])
    return make_record(case, direction, candidate, times, TEN, MACHINE) | more


def cells(shares: dict[int, float], rows=2048, norm="layer") -> list[dict]:
    same = {"direction": "backward", "norm": norm, "rows": rows, "x_dtype": "bfloat16", "plan": "P"}
    return [same | {"cols": cols, "median_us": 10 / share, "floor_us": 10} for cols, share in shares.items()]
