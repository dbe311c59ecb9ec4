"""Modulations in tables with an index for each row of x, by the portable kernels in Triton's interpreter."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from cases import FP32, FP64, outputs_of
from tables import BACKWARDS, BATCH, FORWARDS, Table
from torch.utils._python_dispatch import TorchDispatchMode

import fusednorm
from fusednorm import reference
from fusednorm.planner import limits
from fusednorm.planner.plan import ColumnTilePlan, MultiWavePlan
from fusednorm.problem.calls import check

pytest.importorskip("triton")
PLANS = {
    "one row": lambda cols: MultiWavePlan(1, 32, -(-cols // 32), 4, 1, 255),
    "two rows": lambda cols: MultiWavePlan(2, 128, 1, 4, 2, 255),
    "column tiles": lambda cols: ColumnTilePlan(4, 32, 4, 1, 64, 4),
}
TABLES = pytest.mark.parametrize(
    ("table", "plan"),
    [
        pytest.param(table, plan, id=f"{table}, {name}")
        for table in FORWARDS + BACKWARDS
        for name, plan in PLANS.items()
        if name != "column tiles" or not (table.backward and table.has_sums)  # these have no sums by number
    ],
)


@pytest.fixture(autouse=True)
def small_sorts(monkeypatch):
    # The interpreter runs one CTA after another. 20 numbers are many here: two passes sort them by eight digits each.
    monkeypatch.setattr(limits, "sort", [64, 4, 4, 3])
    monkeypatch.setattr(limits, "many_keys", [16, limits.many_keys[1]])


@TABLES
def test_rows_of_tables_give_what_gathered_rows_give_in_float64(table, plan):
    table.check(outputs_of(table.call, plan(table.cols)))


@TABLES
def test_a_number_that_is_no_row_of_the_tables_reads_nan(table, plan):
    numbers, unknown = table.given["row_index"].clone(), torch.zeros(BATCH, table.rows, dtype=torch.bool)
    for place, number in ((0, table.size), (1, -1), (2, torch.iinfo(numbers.dtype).max)):
        numbers[place, 2], unknown[place, 2] = number, True
    # of the forward y, of the backward dx
    want, got = (outputs_of(table.call_by(each), plan(table.cols))[0] for each in (table.given["row_index"], numbers))
    assert got[unknown].isnan().all() and torch.equal(got[~unknown], want[~unknown])


def test_tensor_code_adds_up_rows_by_an_index_with_the_same_bits_in_every_run():
    table, sizes = Table("rms", "_of_gated_sum", 1100, 8, size=6, dtype=FP32, modulation=FP64, backward=True), set()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is torch.ops.aten.embedding_dense_backward.default:
                sizes.add(args[1].numel())
            return op(*args, **kwargs or {})

    with Sizes():
        table.check(reference.run(table.operands))
    assert sizes == {3072, 3300 - 3072}  # of more rows, the bits change on a GPU
    sizes.clear()
    with Sizes():
        reference.run(replace(table, cols=0).operands)
    assert not sizes  # of no columns, a GPU has an illegal access


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_of_tables_without_rows_every_row_reads_nan(backward):
    from fusednorm.host import launch

    table = Table("layer", "_of_gated_sum", 5, 40, parameters=FP32, backward=backward)
    none = {name: table.given[name][:0] for name in ("scale", "shift", "gate")}
    operands = table.operands._replace(**none)
    plan = PLANS["two rows"](40)
    for order in (contextlib.nullcontext(), fusednorm.batch_invariant(ordered_sums=8)):
        with order:
            launches = launch.on_tensors(check(operands), plan).launches
        assert all(all(each.grid) for each in launches), "a GPU takes no empty grid"
    for outputs in (outputs_of(check(operands), plan), reference.run(operands)):
        assert outputs[0].isnan().all()
        shapes = [each.shape for each in outputs[3:] if each is not None]
        assert not backward or shapes == [(0, 40), (0, 40), table.given["x"].shape, (0, 40)]
