"""bench.survey: which plans stand for their families."""

from __future__ import annotations

import pytest
from planning import make_problem

from bench.survey import family, survey_plans
from fusednorm.planner import budget, heuristics
from fusednorm.planner.device import H200
from fusednorm.planner.plan import PipelinedPlan, num_copies


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("cols", [128, 1001, 4096, 20480])
def test_a_survey_times_the_planners_own_plans_and_one_of_each_family_that_fits(cols, direction):
    problem = make_problem("layer", cols, direction=direction)
    plans, own = survey_plans(problem, H200), [plan for _, plan in heuristics.choices(problem, H200)]
    others = [plan for plan in plans if plan not in own]
    assert set(own) <= set(plans) and len(plans) < 100
    assert len({family(plan) for plan in others}) == len(others)
    assert all(budget.fits_shared_memory(plan, problem, H200) for plan in plans)


def test_the_plan_that_stands_for_a_family_has_the_fewest_copies():
    plans = survey_plans(make_problem("layer", 4096), H200)
    assert all(num_copies(plan) == 1 for plan in plans if isinstance(plan, PipelinedPlan) and plan.cluster == 1)
