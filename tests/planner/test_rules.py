"""The rules that reject plans: each with a problem that it rejects, and some with their exact limits.

A launch asserts the rules of legality again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planning import make_gated, make_modulated, make_problem, meta_call

from fusednorm.forms import FormSpec
from fusednorm.host import gpus
from fusednorm.planner import legality
from fusednorm.planner.device import A100, B200, H200
from fusednorm.planner.heuristics import best_plan, choose, decide, find_fault, outcome
from fusednorm.planner.plan import MultiWavePlan, PipelinedPlan

MANY_ROWS = 16384
ADD, BY_GROUP = FormSpec(combine="add"), FormSpec(finish="gate", groups=2)
SMALL = replace(B200, smem_per_block_bytes=48 * 1024)
RULES = {  # rule: (variant, problem, rows, device) that it rejects
    "arch": ("multi_wave", make_problem(), MANY_ROWS, replace(A100, arch=75)),
    "tma": ("pipelined", make_problem(), MANY_ROWS, A100),
    "dx": ("warp_specialized", make_problem(wants_dx=False), MANY_ROWS, H200),
    "row_tensors": ("warp_specialized", make_problem(direction="forward", form=ADD), MANY_ROWS, B200),
    "sums": ("pipelined", make_gated(wants_dx=False, rows_out=(), stored=(0,)), MANY_ROWS, H200),
    "groups": ("warp_specialized", make_gated(cols=1024, form=BY_GROUP), MANY_ROWS, B200),
    "packed": ("warp_specialized", make_gated(cols=1024, packed=True), MANY_ROWS, B200),
    "float64": ("pipelined", make_problem(dtype="fp64"), MANY_ROWS, H200),
    "alignment": ("warp_specialized", make_problem(cols=4100), MANY_ROWS, B200),
    "wide_modulation": ("multi_wave", make_modulated(modulation="fp64"), MANY_ROWS, H200),
    "scattered": ("multi_wave", replace(make_modulated(direction="backward"), scattered=True), MANY_ROWS, H200),
    "registers": ("multi_wave", make_modulated(cols=65536, direction="backward"), MANY_ROWS, H200),
    "unmodulated": ("pipelined", make_modulated(), MANY_ROWS, H200),
    "nested_rows": ("pipelined", make_problem(nested_rows=True), MANY_ROWS, H200),
    "rows": ("pipelined", make_problem(), 2**31, H200),
    "shared_memory": ("warp_specialized", make_problem("layer", 65536), MANY_ROWS, B200),
    "unmeasured": ("pipelined", make_problem(wants_dx=False), MANY_ROWS, replace(B200, arch=130)),
    "untried": ("warp_specialized", make_problem(), MANY_ROWS, H200),
    "one_stage": ("warp_specialized", make_problem("rms", 8192), MANY_ROWS, SMALL),
    "spills": ("warp_specialized", make_problem("layer", 16384), MANY_ROWS, B200),
    "few_rows": ("pipelined", make_problem(), 1024, B200),
    "narrow_rows": ("pipelined", make_problem(cols=64), MANY_ROWS, H200),
    "slower_columns": ("pipelined", make_problem(cols=960, direction="forward"), MANY_ROWS, H200),
    "short_pieces": ("pipelined", make_problem(cols=1000), MANY_ROWS, H200),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_met_by_what_it_is_about(rule):
    found = outcome(*RULES[rule]).fault
    assert found.rule == rule
    assert decide(*RULES[rule][1:]).reasons[RULES[rule][0]] == found.reason


def test_a_float64_residual_keeps_narrower_x_out_of_the_rings():
    problem = make_problem(direction="forward", form=ADD, rows_in=(torch.float64,), rows_out=(torch.float64,))
    assert outcome("pipelined", problem, MANY_ROWS, H200).fault.rule == "float64"


def test_every_rule_of_legality_is_among_them():
    assert {rule.name for rules in legality.RULES.values() for rule in rules} <= set(RULES)


@pytest.mark.parametrize("rule", ["tma", "alignment", "nested_rows", "dx", "float64", "rows"])
def test_launch_asserts_what_the_planner_asks(rule, monkeypatch):
    from fusednorm.host import launch

    variant, problem, rows, device = RULES[rule]
    monkeypatch.setattr(gpus, "spec_of", lambda _: device)
    call = meta_call(replace(problem, nested_rows=False), min(rows, 4096))
    plan = best_plan("pipelined", make_problem(), H200)
    with pytest.raises(AssertionError):
        launch.prepare(call._replace(problem=problem, rows=rows), plan)


def test_fault_of_a_plan_that_is_no_ring_is_none():
    problem = make_problem("layer", 32768)
    assert find_fault(best_plan("multi_wave", problem, H200), problem, 1, H200) is None


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_rows_that_tma_copies_16_bytes_at_a_time_go_through_a_ring_where_multi_wave_cannot_hold_them(norm):
    for cols, dtype, kind in (
        (2056, "bf16", MultiWavePlan),
        (8184, "bf16", MultiWavePlan),
        (8200, "bf16", PipelinedPlan),
        (6148, "fp32", MultiWavePlan),
        (8196, "fp32", PipelinedPlan),
    ):
        assert isinstance(choose(make_problem(norm, cols, dtype), MANY_ROWS, H200), kind)
        assert not isinstance(choose(make_problem(norm, cols, dtype, direction="forward"), 8192, H200), PipelinedPlan)


@pytest.mark.parametrize("direction", ["backward", "forward"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_float32_rows_go_through_a_ring_from_pieces_of_64_bytes_on(norm, direction):
    for cols, kind in ((2056, MultiWavePlan), (2064, PipelinedPlan), (2080, PipelinedPlan)):
        assert isinstance(choose(make_problem(norm, cols, "fp32", direction=direction), MANY_ROWS, H200), kind)
