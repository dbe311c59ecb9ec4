"""Modulations in tables with an index for each row of x, compiled, by the planner's plans."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP32
from simulator.host import outputs_of
from tables import BACKWARDS, FORWARDS, Table

from fusednorm.planner import limits
from fusednorm.planner.plan import PipelinedPlan
from fusednorm.problem.calls import check_backward, check_forward


@pytest.fixture(autouse=True)
def three_ctas_sort(monkeypatch):
    monkeypatch.setattr(limits, "sort", [*limits.sort[:3], 3])  # the simulation runs one after another


@pytest.mark.parametrize("device", ["A100", "H200", "B200", "RTX 5090"])
@pytest.mark.parametrize("table", (FORWARDS[3], BACKWARDS[2]), ids=str)
def test_gpus_of_each_kind_give_what_gathered_rows_give_in_float64(table, device):
    table.check(outputs_of(table.call, device=device))


@pytest.mark.parametrize(
    "table",
    [
        *FORWARDS[:2],
        Table("rms", "_of_sum", 9, 520, parameters=BF16),
        Table("layer", "", 2, 16384),  # by column tiles
        BACKWARDS[0],
        Table("rms", "", 11, 520, modulation=BF16, backward=True),
    ],
    ids=str,
)
def test_rows_of_tables_give_what_gathered_rows_give_in_float64(table):
    table.check(outputs_of(table.call))


RINGS = {  # a tile is one row
    Table("layer", "", 5, 520, backward=True): PipelinedPlan(1, 128, 5, 2, 4, 1, 255, False, copy_chunks=4, tail=True),
    Table("rms", "_of_gated_sum", 4, 512, size=6, modulation=BF16, parameters=FP32, backward=True): PipelinedPlan(
        1, 128, 2, 3, 4, 2, 255, True, cluster=2, rows_in_ring=True, added_in_ring=True
    ),
    Table("layer", "", 12, 256, size=10, modulation=BF16, parameters=BF16, backward=True): PipelinedPlan(
        1, 256, 1, 3, 2, 2, 255, False
    ),
}


@pytest.mark.parametrize("table", RINGS, ids=str)
def test_rings_take_rows_in_the_order_of_an_index(table):
    numbers = table.given["row_index"].clone()
    got = outputs_of(table.call, RINGS[table])
    table.check(got)
    numbers[0, 1], numbers[1, 1] = table.size, -1
    of_none, want = outputs_of(table.call_by(numbers), RINGS[table])[0], got[0]
    assert of_none[:2, 1].isnan().all() and torch.equal(of_none[2], want[2]) and torch.equal(of_none[:, 0], want[:, 0])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_rows_of_a_table_may_lie_2_to_the_31_elements_apart(backward):
    table, apart = Table("layer", "", 4, 256, size=3, modulation=BF16, backward=backward), 2**30
    memory = torch.empty(2 * apart + table.cols, dtype=BF16)  # pages that nobody touches take no memory
    far = memory.as_strided((3, table.cols), (apart, 1)).copy_(table.given["scale"])
    check = check_backward if backward else check_forward
    near, call = (check(table.operands._replace(scale=each)) for each in (far.clone(), far))
    for got, want in zip(outputs_of(call), outputs_of(near), strict=True):
        assert got is want is None or torch.equal(got, want)


@pytest.mark.parametrize("table", (FORWARDS[3], BACKWARDS[2], Table("layer", "", 2, 16384)), ids=str)
def test_a_number_that_is_no_row_of_the_tables_reads_nan(table):
    numbers = table.given["row_index"].clone()
    numbers[0, 1], numbers[1, 1] = table.size, -1
    want, got = (outputs_of(table.call_by(each))[0] for each in (table.given["row_index"], numbers))
    assert got[:2, 1].isnan().all() and torch.equal(got[2], want[2]) and torch.equal(got[:, 0], want[:, 0])
