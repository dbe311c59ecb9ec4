"""The compile-time arguments of kernels."""

from __future__ import annotations

import pytest
import torch
from planning import make_problem, make_sum

from fusednorm.host.tiles import ring_tile
from fusednorm.planner.plan import from_text

RING = from_text("Pipelined(1,4096,1,2,4,4,128,0,1,1,1,0,1)")


@pytest.mark.parametrize(
    ("problem", "widest"),
    [
        (make_problem(direction="forward"), torch.bfloat16),
        (make_sum(), torch.bfloat16),
        (make_sum(residual="fp32"), torch.float32),
        (make_problem(dtype="fp32", direction="forward"), torch.float32),
    ],
    ids=["plain", "sum", "wide sum", "float32"],
)
def test_adjacent_threads_of_a_forwards_ring_store_adjacent_16_bytes_of_the_widest_tensor(problem, widest):
    """A former loss: of a float32 stream, each store of a warp wrote half of its sectors, and rings took 1.15 times."""
    assert ring_tile(RING, problem).vector * widest.itemsize == 16
