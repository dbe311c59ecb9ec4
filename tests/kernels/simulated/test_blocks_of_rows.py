"""Under batch_invariant(ordered_sums=n), compiled kernels of every schedule give a batch its micro-batches' sums."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from cases import BF16, FP16, FP32
from devices import named
from simulator.host import simulated

from fusednorm import batch_invariant, explain

OPS = torch.ops.fusednorm
BLOCK = 8


class Rows(NamedTuple):
    norm: str
    cols: int
    dtype: torch.dtype
    plan: str
    device: str = "H200"
    rows: int = 19
    mask: tuple[bool, bool, bool] = (True, True, True)


# One kernel adds blocks up. Where there are three of them, another order of adding has other bits.
CASES = [
    Rows("layer", 256, FP32, "pipelined"),
    Rows("rms", 1040, FP32, "pipelined"),  # the last chunk of a row is a tail
    Rows("rms", 1987, FP16, "multi_wave", rows=9),
    Rows("rms", 6400, FP32, "cluster", rows=9),
    Rows("layer", 5121, BF16, "column_tiles", rows=9),
    Rows("layer", 768, FP32, "multi_wave", "A100", rows=9),
    Rows("layer", 256, FP32, "warp_specialized", "B200"),
    Rows("layer", 256, BF16, "dw_and_db", mask=(False, True, True)),
]


def numbers(shape, dtype, seed) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_batch_has_the_sums_of_its_micro_batches(case):
    shape = case.rows, case.cols
    x, grad = numbers(shape, case.dtype, 1), numbers(shape, case.dtype, 2)
    weight, bias = numbers(shape[1:], FP32, 3), numbers(shape[1:], FP32, 4)
    launched: set[str] = set()
    statistics = [x.float().mean(1), x.float().square().mean(1).rsqrt()][case.norm == "rms" :]

    def differentiate(start, end, sms):
        rows = (each[start:end].clone() for each in (grad, x, *statistics))
        dy, of_x, *of_rows = rows
        with batch_invariant(ordered_sums=BLOCK), simulated(case.device, sms) as simulation:
            if case.norm == "layer":
                grads = OPS.layer_norm_bwd(dy, of_x, shape[1:], *of_rows, weight, bias, case.mask)
            else:
                grads = OPS.rms_norm_bwd(dy, of_x, shape[1:], *of_rows, weight, case.mask[:2])
        launched.update(each.name for each in simulation.launched)
        return grads

    with batch_invariant(ordered_sums=BLOCK):
        plan = explain(x, shape[1:], weight, bias, norm=case.norm, device=named(case.device)).plan
    dx, *whole = differentiate(0, case.rows, 32)
    pieces = [differentiate(start, min(start + BLOCK, case.rows), 16) for start in range(0, case.rows, BLOCK)]
    schedule = "cluster" if plan.cluster > 1 else plan.kernel
    assert case.plan in ({schedule} if case.mask[0] else launched) and "add_blocks" in launched
    if case.mask[0]:
        assert torch.equal(dx, torch.cat([each[0] for each in pieces]))
    for at, each in enumerate(whole, 1):
        accumulated = pieces[0][at].clone()
        for piece in pieces[1:]:
            accumulated += piece[at]
        assert torch.equal(each, accumulated)
