"""The planner's data: expressions whose names nobody knows would fail where a rare problem first needs them."""

from __future__ import annotations

import ast

import pytest
from planning import make_problem

from fusednorm.planner import legality, limits
from fusednorm.planner.budget import of_plan
from fusednorm.planner.candidates import Frame
from fusednorm.planner.device import H200
from fusednorm.planner.plan import MultiWavePlan, PipelinedPlan, WarpSpecializedPlan

RING = 1, 1024, 4, 2, 4, 1, 255, False
PLANS = MultiWavePlan(1, 1024, 4, 4, 1, 255), PipelinedPlan(*RING), WarpSpecializedPlan(*RING)
# What a rule knows beside problem, device and plan.
BESIDE = {"folds", "kind", "divisor", "limit", "padding", "rows", "ends_within_a_chunk", "whole"}
BESIDE |= {*limits.BUILTINS, *legality.CONSTANTS, *Frame._fields}


def of_limits() -> list[str]:
    values = [value for value, _ in limits.read("limits").values()]
    values += [each for value in values if isinstance(value, dict) for each in value.values()]
    return [value for value in values if isinstance(value, str)]


def of_registers() -> list[str]:
    bounds = list(limits.read("registers").values())
    terms = [term for bound in bounds for part in ("least", "terms") for term in bound.get(part, ())]
    return terms + [case for bound in bounds for cases in bound.get("caps", {}).values() for case in cases]


EXPRESSIONS = {
    "limits": of_limits(),
    "registers": of_registers(),
    "legality": [each["holds"] for each in limits.read("legality")],
    "frames": [each["for"] for each in limits.read("frames")],
}


@pytest.mark.parametrize("file", EXPRESSIONS)
def test_every_name_in_the_data_is_a_quantity(file):
    known = set(make_problem().quantities) | set(vars(H200)) | BESIDE
    known |= {name for plan in PLANS for name in of_plan(plan, 4096)}
    assert len(EXPRESSIONS[file]) > 5
    for text in EXPRESSIONS[file]:
        names = {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}
        assert names <= known, text


def test_every_limit_is_used_and_has_a_reason():
    sources = [path.read_text() for path in limits.DATA.parents[1].rglob("*.py")]
    for name, (_, reason) in limits.read("limits").items():
        assert reason and any(f"limits.{name}" in text or f'"{name}"' in text for text in sources), name
