"""bench.survey: which cells and plans are timed."""

from __future__ import annotations

import pytest
from planning import make_problem

from bench import survey
from bench.cases import DIRECTIONS
from fusednorm.planner import budget
from fusednorm.planner.device import H200
from fusednorm.planner.plan import PipelinedPlan, num_copies
from fusednorm.planner.shortlist import MOST_CANDIDATES, Family


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cols", [128, 1001, 4096, 20480])
def test_a_shortlist_has_one_plan_of_each_family_and_each_fits(cols, direction):
    problem = make_problem("layer", cols, direction=direction)
    plans = survey.shortlist(problem, H200)
    assert len({Family.of(plan) for plan in plans}) == len(plans) and 0 < len(plans) <= MOST_CANDIDATES
    assert all(budget.fits_shared_memory(plan, problem, H200) for plan in plans)
    assert all(budget.registers(plan, problem, H200) <= budget.max_registers(plan) for plan in plans)


def test_the_plan_that_stands_for_a_family_has_the_fewest_copies():
    plans = survey.shortlist(make_problem("layer", 4096), H200)
    assert all(num_copies(plan) == 1 for plan in plans if isinstance(plan, PipelinedPlan))


def test_a_dense_survey_has_the_coarse_widths_first_and_then_every_width():
    widths = [problem.cols for problem in survey.dense() if problem.dtype == "bf16"]
    assert widths[: 4 * 8] == [cols for cols in range(2048, 16385, 2048) for _ in range(4)]
    assert {*range(128, 16385, 128)} <= {*widths}


def test_random_cells_are_the_same_for_the_same_seed():
    assert survey.drawn(60, 1) == survey.drawn(60, 1) != survey.drawn(60, 2)
