"""The rules of legality: each with a problem that it rejects, and what is said and done then.

A launch asserts the rules again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planning import make_gated, make_gated_sum, make_modulated, make_problem, meta_call

from fusednorm.forms import FormSpec
from fusednorm.host import gpus
from fusednorm.operands import operands_of
from fusednorm.planner import legality
from fusednorm.planner.choice import best_plan, choose
from fusednorm.planner.device import A100, B200, H100, H200
from fusednorm.planner.plan import MOST_CTAS, VARIANTS, grid_of
from fusednorm.problem.calls import check_forward
from fusednorm.tools.explanation import decide

MANY_ROWS = 16384
ADDED = {"rows_in": (torch.bfloat16,), "rows_out": (torch.bfloat16,)}
RULES = {  # rule: (variant, problem, rows, device) that it rejects
    "arch": ("multi_wave", make_problem(), MANY_ROWS, replace(A100, arch=75)),
    "tma": ("pipelined", make_problem(), MANY_ROWS, A100),
    "older": ("async_copy", make_problem(), MANY_ROWS, B200),
    "dx": ("warp_specialized", make_problem(wants_dx=False), MANY_ROWS, H200),
    "again": ("pipelined", make_problem(direction="forward", form=FormSpec(finish="add", again=True)), MANY_ROWS, H200),
    "again_in_float64": (
        "multi_wave",
        make_problem(direction="forward", form=FormSpec(finish="add", again=True), y_dtype=torch.float64),
        MANY_ROWS,
        H200,
    ),
    "sums": ("pipelined", make_gated(wants_dx=False, rows_out=(), stored=(0,)), MANY_ROWS, H200),
    "float64": ("pipelined", make_problem(dtype="fp64"), MANY_ROWS, H200),
    "alignment": ("warp_specialized", make_problem(cols=4100), MANY_ROWS, B200),
    "wide_modulation": ("multi_wave", make_modulated(modulation="fp64"), MANY_ROWS, H200),
    "scattered": ("multi_wave", replace(make_modulated(direction="backward"), scattered=True), MANY_ROWS, H200),
    "by_key": ("async_copy", replace(make_modulated(direction="backward"), by_key=True), MANY_ROWS, H200),
    "unmodulated": ("warp_specialized", make_modulated(), MANY_ROWS, H200),
    "modulations_by_row": ("pipelined", make_gated_sum(by_sample=False), MANY_ROWS, H200),
    "nested_rows": ("pipelined", make_problem(nested_rows=True), MANY_ROWS, H200),
    "rows": ("pipelined", make_problem(), 2**31, H200),
    "groups": ("warp_specialized", make_problem(form=FormSpec(groups=4)), MANY_ROWS, B200),
    "packed": ("warp_specialized", make_problem(packed=True), MANY_ROWS, B200),
    "row_tensors": (
        "warp_specialized",
        make_problem(direction="forward", form=FormSpec(combine="add"), **ADDED),
        MANY_ROWS,
        H200,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_met_by_what_it_is_about(rule):
    variant, *call = RULES[rule]
    found = legality.broken_rule(variant, *call)
    assert found.name == rule
    assert decide(*call).reasons[variant] == found.reason
    assert choose(*call, variant).variant != variant


def test_a_float64_residual_keeps_narrower_x_out_of_the_rings():
    problem = make_problem(
        direction="forward", form=FormSpec(combine="add"), rows_in=(torch.float64,), rows_out=(torch.float64,)
    )
    assert legality.broken_rule("pipelined", problem, MANY_ROWS, H200).name == "float64"


def test_every_rule_of_legality_is_among_them():
    assert {rule.name for variant in VARIANTS for rule in legality.rules(variant)} == set(RULES)


@pytest.mark.parametrize("rule", ["tma", "alignment", "nested_rows", "dx", "float64", "rows"])
def test_launch_asserts_what_the_planner_asks(rule, monkeypatch):
    from fusednorm.host import launch

    variant, problem, rows, device = RULES[rule]
    monkeypatch.setattr(gpus, "spec_of", lambda _: device)
    call = meta_call(replace(problem, nested_rows=False), min(rows, 4096))
    plan = best_plan("pipelined", make_problem(), H200)
    with pytest.raises(AssertionError):
        launch.on_tensors(call._replace(problem=problem, rows=rows), plan)


def test_sums_by_sample_without_room_in_registers_come_through_rings_or_are_left_to_aten_and_told():
    problem = make_modulated(cols=65536, direction="backward")
    assert {choose(problem, MANY_ROWS, H200, forced).variant for forced in (None, "multi_wave")} == {"pipelined"}
    assert choose(problem, 2**30 + 1, H200).variant == "reference"  # a ring counts rows in 32 bits
    decision = decide(problem, MANY_ROWS, A100)
    reason = "has no plan for 65536 columns within the registers and shared memory of A100"
    assert decision.plan.variant == "reference" and decision.reasons["multi_wave"] == reason
    assert decision.plan.reason == reason and choose(problem, MANY_ROWS, A100, "multi_wave").variant == "reference"


@pytest.mark.parametrize("problem", [make_modulated(direction="backward"), make_gated_sum("rms", 3072)])
def test_sums_by_sample_of_more_rows_than_a_ring_counts_have_rows_in_registers(problem):
    assert choose(problem, 2**30, H200, "pipelined").variant == "pipelined"
    assert choose(problem, 2**30 + 1, H200, "pipelined").kernel == "multi_wave"


def test_a_variant_without_registers_or_shared_memory_says_so_and_runs_by_force_where_it_fits():
    problem = make_problem("layer", 16384)
    assert best_plan("warp_specialized", problem, B200) is None
    reason = decide(problem, MANY_ROWS, B200).reasons["warp_specialized"]
    assert reason == "has no plan for 16384 columns within the registers and shared memory of B200"
    forced = decide(problem, MANY_ROWS, B200, "warp_specialized")
    assert forced.plan.variant == "warp_specialized" and forced.forced
    assert forced.reasons["warp_specialized"] == "forced, though it might spill; pipelined would be chosen"


@pytest.mark.parametrize("device", [A100, H200, B200], ids=lambda device: device.name)
def test_reasons_name_one_choice_and_agree_with_it(device):
    for cols in (64, 1001, 4096, 65536):
        problem = make_problem(cols=cols)
        decision = decide(problem, MANY_ROWS, device)
        assert decision.plan == choose(problem, MANY_ROWS, device) and not decision.forced
        assert decision.reasons[decision.plan.variant].startswith("chosen: ")
        assert sum(text.startswith("chosen") for text in decision.reasons.values()) == 1


@pytest.mark.parametrize("device", [A100, H100, B200], ids=lambda device: device.name)
@pytest.mark.parametrize("shape", [(2, 200000, 4096), (4, 150000, 512), (3, MOST_CTAS, 1152)], ids=str)
def test_a_sample_of_many_rows_has_no_more_ctas_than_a_grid_may_have(shape, device):
    shapes = shape, (shape[0], 1, shape[2])
    x, modulation = (torch.empty(each, device="meta", dtype=torch.bfloat16) for each in shapes)
    named = {"x": x, "normalized_shape": shape[2:], "scale": modulation, "shift": modulation}
    call = check_forward(operands_of("layer_norm_fwd_modulated", (), named))
    grid = grid_of(choose(call.problem, call.rows, device), call.problem, device, call.sample_rows)
    assert call.sample_rows and not shape[1] % call.sample_rows and grid.ctas(call.rows) <= MOST_CTAS


@pytest.mark.parametrize("problem", [make_modulated(direction="backward", cols=3072), make_gated_sum("layer", 8192)])
@pytest.mark.parametrize("rows", [1, 100, 264, 18432])
def test_ctas_that_count_for_keys_run_with_all_others_if_they_are_few(rows, problem):
    problem = replace(problem, by_key=True)
    grid = grid_of(choose(problem, 18432, H200), problem, H200)
    assert grid.by_key(8).ctas(rows) <= grid.at_once
    assert grid.by_key(1000).ctas(rows) == grid.ctas(rows) + 1002
