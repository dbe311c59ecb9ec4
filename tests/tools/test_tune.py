"""python -m fusednorm tune: from times to a table, without a GPU."""

from __future__ import annotations

import argparse
import math

import pytest
import torch
from planning import make_problem

from fusednorm.planner import table
from fusednorm.planner.candidates import Family
from fusednorm.planner.device import H200
from fusednorm.planner.model import Coefficients, predict_us
from fusednorm.planner.plan import text_of
from fusednorm.tools import tune

TASK = tune.Task("rms", "forward", 4096, "bf16")
PLANS = tune.plans_of(TASK.wanted.problem, H200)


def cell(rows_per_sm: int, fastest: int, cols=4096) -> tune.Cell:
    """All candidates take 10 us, and one takes 5."""
    task = TASK._replace(cols=cols)
    plans = tune.plans_of(task.wanted.problem, H200)
    times = {text_of(plan): 5.0 if at == fastest else 10.0 for at, plan in enumerate(plans)}
    return tune.Cell(task, 132 * rows_per_sm, times, text_of(plans[0]))


def test_a_table_changes_plans_between_the_row_counts_at_which_their_times_cross():
    cells = [cell(1, 0), cell(4, 0), cell(16, 1), cell(64, 1)]
    ((key, found),) = tune.widths_of(cells, H200, table.coefficients(H200)).items()
    assert key == table.Key.of(make_problem("rms", 4096, direction="forward"))
    (most, first), last = found[4096]
    assert 4 < most < 16 and (first, last) == (text_of(PLANS[0]), (math.inf, text_of(PLANS[1])))


def test_a_plan_that_is_much_slower_for_more_rows_is_left_soon_after_the_rows_at_which_it_is_fastest():
    """A former bug: half way between two row counts, the plan for fewer rows was kept up to its 9% loss."""
    at = dict.fromkeys(map(text_of, PLANS), 1000.0)
    few = tune.Cell(TASK, 2112, at | {text_of(PLANS[0]): 16.5, text_of(PLANS[1]): 16.9}, "")
    many = tune.Cell(TASK, 8184, at | {text_of(PLANS[0]): 58.0, text_of(PLANS[1]): 53.0}, "")
    (found,) = tune.widths_of([few, many], H200, table.coefficients(H200)).values()
    (most, first), (_, last) = found[4096]
    assert 132 * most < 4096 and (first, last) == (text_of(PLANS[0]), text_of(PLANS[1]))


def test_a_width_has_few_plans_however_many_row_counts_want_their_own():
    cells = [cell(1 << count, count % len(PLANS)) for count in range(12)]
    ((found,),) = (found.values() for found in tune.widths_of(cells, H200, table.coefficients(H200)).values())
    assert 1 <= len(found) <= tune.MOST_PLANS < len({at % len(PLANS) for at in range(12)})


@pytest.mark.parametrize(("own_us", "wanted"), [(5.4, 0), (9.0, 1)])
def test_neighbouring_widths_decide_where_a_width_has_no_clear_winner_and_nowhere_else(own_us, wanted):
    first, second = Family.of(PLANS[0]), Family.of(PLANS[1])
    cells = [tune.Cell(TASK, 528, {text_of(PLANS[0]): own_us, text_of(PLANS[1]): 5.0}, "")]
    for cols in (3968, 4032, 4160, 4224):
        task = TASK._replace(cols=cols)
        plans = {Family.of(plan): text_of(plan) for plan in tune.plans_of(task.wanted.problem, H200)}
        cells.append(tune.Cell(task, 528, {plans[first]: 5.0, plans[second]: 6.0}, ""))
    (found,) = tune.widths_of(cells, H200, table.coefficients(H200)).values()
    assert found[4096] == ((math.inf, text_of(PLANS[wanted])),)


def test_of_cells_with_about_as_many_rows_the_last_counts(tmp_path):
    first, last = cell(16, 0), cell(16, 1)._replace(rows=2048)
    tune.write_table([first, last], H200, tmp_path / "table.jsonl", {"triton": "3.6.0", "date": "2026-11-27"})
    found = table.read(tmp_path / "table.jsonl").lookup(make_problem("rms", 4096, direction="forward"))
    assert found == [(4096, ((math.inf, text_of(PLANS[1])),))]


def test_a_record_is_read_back_as_the_same_cell():
    assert tune.Cell.of(cell(4, 2).record()) == cell(4, 2)


def test_coefficients_are_fitted_to_the_times():
    first = table.coefficients(H200)
    slower = Coefficients(*first)._replace(launch_us=2 * first.launch_us)
    cells = []
    for cols in (1024, 4096, 8192):
        task = TASK._replace(cols=cols)
        problem = task.wanted.problem
        for rows in (132, 2112, 8184):
            times = {text_of(p): predict_us(p, problem, rows, H200, slower) for p in tune.plans_of(problem, H200)}
            cells.append(tune.Cell(task, rows, times, ""))
    assert tune.fit(cells, H200, first).launch_us == pytest.approx(slower.launch_us, rel=0.05)


def test_no_cell_is_begun_after_the_time_and_the_next_run_goes_on(monkeypatch, tmp_path):
    seconds = iter(range(0, 10_000, 20))
    monkeypatch.setattr(tune.table, "user_file", lambda gpu: tmp_path / "gpu.jsonl")
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune.gpus, "spec_of", lambda device: H200)
    monkeypatch.setattr(tune, "build_ahead", lambda *_: 0)
    monkeypatch.setattr(tune, "time_plans", lambda task, rows, plans, device: {text_of(plan): 1.0 for plan in plans})
    options = argparse.Namespace(cols=[1024], dtype=["bf16"], minutes=1, cells=None, out=None)
    assert tune.run_tune(options, lambda: next(seconds)) == 0
    begun = len((tmp_path / "gpu.cells").read_text().splitlines())
    assert 0 < begun < 4 * len(tune.ROWS_PER_SM)
    options.minutes = 100
    assert tune.run_tune(options, lambda: next(seconds)) == 0
    assert len((tmp_path / "gpu.cells").read_text().splitlines()) == 4 * len(tune.ROWS_PER_SM)
    assert table.read(tmp_path / "gpu.jsonl").gpu == H200.name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so the tool would run")
def test_without_a_gpu_it_says_so(capsys):
    assert tune.run_tune(argparse.Namespace(cells=None)) == 2
    assert capsys.readouterr().err == "tune: needs a CUDA GPU, got none\n"
