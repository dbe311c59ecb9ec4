"""The planner: which plan it chooses, by which rule, and within which limits. It needs no GPU and no compiler."""

from __future__ import annotations

import csv
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fusednorm.planner.heuristics import TUNINGS, best_plan, choose, decide, outcome
from hypothesis import strategies as st
from planning import ARCHITECTURES, given, make_problem, sweep

from fusednorm.planner import budget, legality
from fusednorm.planner.device import A100, B200, H200, KNOWN, RTX_5090
from fusednorm.planner.plan import (
    VARIANTS,
    ColumnRingPlan,
    ColumnTilePlan,
    MultiWavePlan,
    PipelinedPlan,
    ReferencePlan,
    RingPlan,
    WarpSpecializedPlan,
    num_ctas,
    num_partials,
    num_passes,
    threads_per_row,
)

DATA = Path(__file__).parents[1] / "data"
MANY_ROWS = 16384
BLACKWELL = [spec for spec in KNOWN if spec.arch >= 100]

# (device, problem, rows, plan): one entry for each regime, so that a change of a rule shows all the plans it changes.
GOLDEN = [
    (H200, make_problem("layer", 4096), MANY_ROWS, PipelinedPlan(1, 512, 8, 2, 4, 2, 255, False, copy_chunks=8)),
    (H200, make_problem("rms", 4096), MANY_ROWS, PipelinedPlan(1, 1024, 4, 2, 4, 2, 255, False, copy_chunks=4)),
    (
        H200,
        make_problem("layer", 8192),
        MANY_ROWS,
        PipelinedPlan(1, 512, 8, 2, 4, 2, 255, False, cluster=2, copy_chunks=8),
    ),
    (
        H200,
        make_problem("layer", 12288),
        MANY_ROWS,
        PipelinedPlan(1, 1024, 3, 3, 4, 3, 168, False, cluster=4, copy_chunks=4),
    ),
    (
        H200,
        make_problem("layer", 16384),
        MANY_ROWS,
        PipelinedPlan(1, 512, 8, 3, 4, 2, 255, False, cluster=4, copy_chunks=8),
    ),
    (
        H200,
        make_problem("layer", 32768, direction="forward"),
        MANY_ROWS,
        PipelinedPlan(2, 1024, 4, 2, 4, 2, 255, True, cluster=8, copy_chunks=4, short_lived=True),
    ),
    (
        H200,
        make_problem("layer", 4096, direction="forward"),
        MANY_ROWS,
        PipelinedPlan(2, 512, 8, 2, 4, 4, 128, True, copy_chunks=8, short_lived=True),
    ),
    (H200, make_problem("layer", 2048), MANY_ROWS, PipelinedPlan(2, 512, 4, 2, 4, 2, 255, False, copy_chunks=4)),
    (H200, make_problem("layer", 1024), MANY_ROWS, PipelinedPlan(4, 1024, 1, 2, 4, 2, 255, False)),
    (
        H200,
        make_problem("layer", 5120),
        MANY_ROWS,
        PipelinedPlan(2, 512, 5, 2, 4, 2, 255, False, cluster=2, copy_chunks=8),
    ),
    (
        H200,
        make_problem("rms", 11264),
        MANY_ROWS,
        PipelinedPlan(2, 256, 11, 2, 4, 2, 255, False, cluster=4, copy_chunks=16),
    ),
    (H200, make_problem("rms", 4096, direction="forward"), 1024, MultiWavePlan(1, 1024, 4, 4, 8, 64, True)),
    (H200, make_problem("layer", 512, direction="forward"), 1000, MultiWavePlan(2, 256, 2, 2, 8, 128, True)),
    (H200, make_problem("layer", 4096), 1024, PipelinedPlan(2, 1024, 4, 2, 8, 1, 255, False, copy_chunks=4)),
    (H200, make_problem("layer", 1023), MANY_ROWS, MultiWavePlan(2, 1024, 1, 4, 2, 255)),
    (H200, make_problem("layer", 1000), MANY_ROWS, MultiWavePlan(2, 1024, 1, 2, 4, 255)),
    (H200, make_problem("rms", 1000), MANY_ROWS, MultiWavePlan(4, 1024, 1, 4, 2, 255)),
    (H200, make_problem("layer", 440), MANY_ROWS, MultiWavePlan(2, 512, 1, 2, 4, 255)),
    (H200, make_problem("rms", 440), MANY_ROWS, MultiWavePlan(4, 512, 1, 2, 4, 255)),
    (H200, make_problem("layer", 768), MANY_ROWS, PipelinedPlan(4, 1024, 1, 2, 4, 2, 255, False)),
    (
        H200,
        make_problem("layer", 2752),
        MANY_ROWS,
        PipelinedPlan(1, 1024, 3, 2, 4, 3, 168, False, copy_chunks=2, tail=True),
    ),
    (
        H200,
        make_problem("layer", 5376),
        MANY_ROWS,
        PipelinedPlan(1, 512, 11, 2, 4, 2, 255, False, copy_chunks=16, tail=True),
    ),
    (
        H200,
        make_problem("layer", 204800),
        MANY_ROWS,
        PipelinedPlan(1, 1024, 13, 2, 8, 1, 255, True, cluster=16, copy_chunks=16, tail=True),
    ),
    (H200, make_problem("layer", 128), 4 * MANY_ROWS, PipelinedPlan(32, 128, 1, 2, 4, 2, 255, False)),
    (H200, make_problem("layer", 64), 4 * MANY_ROWS, MultiWavePlan(32, 64, 1, 4, 3, 168)),
    (
        H200,
        make_problem("rms", 65536),
        MANY_ROWS,
        PipelinedPlan(1, 1024, 4, 3, 4, 2, 255, False, cluster=16, copy_chunks=4),
    ),
    (
        H200,
        make_problem("layer", 8192, "fp32"),
        MANY_ROWS,
        PipelinedPlan(1, 512, 4, 3, 4, 2, 255, False, cluster=4, copy_chunks=4),
    ),
    (H200, make_problem("layer", 4096, wants_dx=False), MANY_ROWS, ColumnRingPlan(64, 128, 3, 8, 2, 128)),
    (A100, make_problem("layer", 4096), MANY_ROWS, MultiWavePlan(1, 1024, 4, 8, 2, 128)),
    (A100, make_problem("layer", 8192), MANY_ROWS, MultiWavePlan(1, 2048, 4, 16, 1, 128)),
    (A100, make_problem("layer", 65536), MANY_ROWS, ColumnTilePlan(1, 1024, 4, 3, 4096, 8)),
    (
        B200,
        make_problem("layer", 4096),
        MANY_ROWS,
        WarpSpecializedPlan(1, 512, 8, 8, 2, 4, 1, 240, False, False, copy_chunks=8),
    ),
    (B200, make_problem("layer", 1024), MANY_ROWS, WarpSpecializedPlan(4, 1024, 1, 8, 2, 4, 1, 240, False, True)),
    (B200, make_problem("layer", 4096), 1024, MultiWavePlan(1, 1024, 4, 8, 2, 128)),
    (B200, make_problem("layer", 4096, wants_dx=False), MANY_ROWS, ColumnRingPlan(64, 128, 3, 8, 2, 128)),
]


@pytest.mark.parametrize("device, problem, rows, plan", GOLDEN, ids=lambda v: getattr(v, "name", None))
def test_each_regime_has_the_plan_it_is_known_for(device, problem, rows, plan):
    assert choose(problem, rows, device) == plan


# --- Thresholds ---


@pytest.mark.parametrize("device", BLACKWELL, ids=lambda spec: spec.name)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_ring_begins_at_the_first_row_beyond_its_threshold(device, norm):
    problem = make_problem(norm, 4096)
    last = TUNINGS[device.arch, "backward"].ring_rows_per_sm[norm] * device.sm_count
    assert isinstance(choose(problem, last, device), MultiWavePlan)
    assert isinstance(choose(problem, last + 1, device), RingPlan)


@pytest.mark.parametrize("norm, last", [("rms", 592), ("layer", 2368)])
def test_thresholds_on_b200_are_those_published(norm, last):
    assert choose(make_problem(norm), last, B200).variant == "multi_wave"
    assert choose(make_problem(norm), last + 1, B200).variant == "warp_specialized"


@pytest.mark.parametrize("device", [H200, *BLACKWELL], ids=lambda device: device.name)
def test_gradients_of_parameters_alone_go_by_tma_from_some_rows_on(device):
    problem = make_problem("layer", 4096, wants_dx=False)
    assert isinstance(choose(problem, 8 * device.sm_count, device), ColumnTilePlan)
    assert isinstance(choose(problem, 8 * device.sm_count + 1, device), ColumnRingPlan)


@pytest.mark.parametrize("device", [H200, B200, RTX_5090], ids=lambda device: device.name)
@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("dtype, grad", [("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32")])
def test_parameter_gradients_alone_go_by_tma_two_ctas_on_an_sm(device, wants, dtype, grad):
    problem = make_problem(
        "layer", 1000, dtype, grad=grad, wants_dx=False, wants_dw=wants[0], wants_db=wants[1], tma_aligned=True
    )
    plan = decide(problem, MANY_ROWS, device, forced="pipelined").plan
    assert isinstance(plan, ColumnRingPlan)
    assert 2 * (budget.shared_bytes(plan, problem) + budget.RESERVED_SMEM_BYTES) <= device.smem_per_sm_bytes
    assert num_ctas(plan, MANY_ROWS, 1000, device) * -(-1000 // plan.chunk) <= 2 * device.sm_count
    assert plan == choose(problem, MANY_ROWS, device)


@pytest.mark.parametrize("cols", [4096, 8192])
def test_few_rows_go_through_a_ring_on_hopper_but_not_on_blackwell(cols):
    assert isinstance(choose(make_problem("layer", cols), 64, H200), PipelinedPlan)
    assert not isinstance(choose(make_problem("layer", cols), 64, B200), RingPlan)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("cols", [1024, 1280, 1536, 1600, 2048, 2560, 4096, 5120, 6656, 8192, 10240, 12288, 18432])
def test_a_forward_of_any_number_of_rows_is_a_ring_on_blackwell_and_warp_specialized_by_force_on_hopper(norm, cols):
    problem = make_problem(norm, cols, direction="forward")
    for rows in (B200.sm_count // 2, 2048, 2049):
        plan = choose(problem, rows, B200)
        assert isinstance(plan, WarpSpecializedPlan if cols <= 12288 else RingPlan)
        assert not isinstance(choose(problem, rows, H200), WarpSpecializedPlan)
        forced = choose(problem, rows, H200, "warp_specialized")
        assert isinstance(forced, WarpSpecializedPlan) and forced.num_stages <= 4
    assert plan.num_stages > 1 and not budget.fits_shared_memory(
        replace(plan, num_stages=2 * plan.num_stages), problem, B200
    )


@pytest.mark.parametrize("cols, is_ring", [(2032, False), (2064, True), (9232, True), (10256, False), (15376, True)])
def test_a_forward_that_tma_copies_by_32_bytes_is_a_ring_at_some_widths(cols, is_ring):
    plan = choose(make_problem("layer", cols, direction="forward"), MANY_ROWS, H200)
    assert isinstance(plan, PipelinedPlan) == is_ring


@pytest.mark.parametrize("device", [A100, H200], ids=lambda device: device.name)
@pytest.mark.parametrize("cols, rows_per_tile", [(328, 2), (520, 2), (1000, 2), (1544, 2), (1992, 2)])
def test_threads_of_a_multi_wave_backward_hold_the_same_columns_of_all_rows(device, cols, rows_per_tile):
    plan = best_plan("multi_wave", make_problem("layer", cols), device)
    assert (plan.rows_per_tile, plan.num_chunks) == (rows_per_tile, 1)
    assert plan.chunk >= 8 * 32 * plan.num_warps


@pytest.mark.parametrize("device, narrowest", [(H200, 96), (B200, 256)], ids=["H200", "B200"])
def test_a_ring_begins_at_the_narrowest_row_tried(device, narrowest):
    assert isinstance(choose(make_problem("layer", narrowest - 8), MANY_ROWS, device), MultiWavePlan)
    assert isinstance(choose(make_problem("layer", narrowest), MANY_ROWS, device), RingPlan)


@pytest.mark.parametrize("device", BLACKWELL, ids=lambda device: device.name)
@pytest.mark.parametrize("direction, narrowest", [("backward", 256), ("forward", 1024)])
def test_a_ring_begins_at_the_narrowest_row_published_on_each_blackwell_gpu(device, direction, narrowest):
    for norm in ("layer", "rms"):
        for cols, is_ring in ((narrowest - 8, False), (narrowest, True)):
            plan = choose(make_problem(norm, cols, direction=direction), MANY_ROWS, device)
            assert isinstance(plan, RingPlan if is_ring else MultiWavePlan)


@pytest.mark.parametrize("device", [H200, *BLACKWELL], ids=lambda device: device.name)
def test_a_ring_counts_rows_in_32_bits(device):
    assert isinstance(choose(make_problem(), legality.MAX_RING_ROWS, device), RingPlan)
    assert isinstance(choose(make_problem(), legality.MAX_RING_ROWS + 1, device), MultiWavePlan)


# --- The decisions published for B200 ---


def published() -> list[dict]:
    with open(DATA / "b200_decisions.csv") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["decision"] != "UNSCHEDULABLE"]


def as_problem(row: dict):
    dtype = {"2": "bf16", "4": "fp32"}
    return make_problem(row["norm"], int(row["cols"]), dtype[row["act_bytes"]], dtype[row["weight_bytes"]])


def agrees(row: dict) -> bool:
    """Whether our plan agrees with a published decision.

    For "WS" (warp specialization) ours must be a ring, otherwise multi-wave or pipelined. The published kernels read
    their inputs once, so a plan of two passes never agrees.
    """
    problem = as_problem(row)
    plan = choose(problem, int(row["rows"]), B200)
    alike = isinstance(plan, RingPlan if row["decision"] == "WS" else (MultiWavePlan, PipelinedPlan))
    return alike and num_passes(plan, problem) == 1


def test_95_of_100_choices_on_b200_are_the_published_ones():
    assert len(published()) == 100
    assert sum(map(agrees, published())) >= 95


def published_rings() -> list[tuple[dict, RingPlan]]:
    """(row, our plan) for the published decisions for warp specialization."""
    rows = [row for row in published() if row["decision"] == "WS"]
    return [(row, choose(as_problem(row), int(row["rows"]), B200)) for row in rows]


def test_rings_on_b200_are_as_full_as_the_published_ones():
    for row, plan in published_rings():
        problem = as_problem(row)
        held = plan.ctas_per_sm * budget.shared_bytes(plan, problem)
        if isinstance(plan, WarpSpecializedPlan):
            assert held >= 112 * 1024, row
            assert not budget.fits_shared_memory(replace(plan, num_stages=2 * plan.num_stages), problem, B200)
        on_their_way = held * (plan.num_stages - 1) / plan.num_stages
        assert on_their_way >= B200.bytes_in_flight_per_sm, row


def test_tiles_stay_in_registers_where_they_are_published_to_and_registers_suffice():
    agree = 0
    for row, plan in published_rings():
        if isinstance(plan, WarpSpecializedPlan) and row["cached"] == "1":
            agree += plan.cached
            held = budget.registers(replace(plan, cached=True), as_problem(row), B200)
            assert plan.cached == (plan.num_groups > 1 and held <= plan.max_registers), row
        assert row["cached"] == "1" or not getattr(plan, "cached", False), row
    assert agree >= 38  # of 47


def test_a_warp_specialized_ring_on_hopper_is_as_shallow_as_it_was_measured():
    for norm, cols in (("layer", 256), ("rms", 1024), ("layer", 4096), ("rms", 8192)):
        plan = best_plan("warp_specialized", make_problem(norm, cols), H200)
        assert plan.num_stages <= 4 and not plan.cached


@pytest.mark.parametrize("device", BLACKWELL, ids=lambda device: device.name)
def test_inputs_are_read_twice_on_blackwell_only_where_no_ring_has_room_or_registers(device):
    widths = (8448, 14336, 24832, 49152, 65544, 98304, 262144)
    twice = [p for p in sweep(widths, ("bf16", "fp32")) if num_passes(choose(p, 1000, device), p) == 2]
    for problem in twice:
        for variant in ("pipelined", "warp_specialized"):
            plan, fault = outcome(variant, problem, 1000, device)
            assert (fault.rule in ("spills", "one_stage")) if plan else fault.rule in ("shared_memory", "backward")
            assert decide(problem, 1000, device).reasons[variant] == fault.reason
    narrow = {100: set(widths[:4]) | {98304}, 103: set(widths[:4]) | {98304}, 110: {8448}}  # the widths that are rings
    assert {problem.cols for problem in twice} == set(widths) - narrow.get(device.arch, set())


def test_what_was_unschedulable_there_has_a_plan_here():
    with open(DATA / "b200_decisions.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["decision"] == "UNSCHEDULABLE"]
    assert len(rows) == 8
    for row in rows:
        problem = as_problem(row)
        assert_runs(choose(problem, int(row["rows"]), B200), problem, int(row["rows"]), B200)


# --- Invariants ---


def assert_runs(plan, problem, rows, device):
    """Checks everything about a plan that its launch relies on."""
    assert legality.broken_rule(plan.variant, problem, rows, device) is None
    if isinstance(plan, ReferencePlan):
        return
    ctas, tiles = num_ctas(plan, rows, problem.cols, device), -(-rows // plan.rows_per_tile)
    assert 1 <= ctas <= tiles
    assert budget.shared_bytes(plan, problem) <= device.smem_per_block_bytes
    warps = plan.num_warps * getattr(plan, "num_groups", 1) + 4 * isinstance(plan, WarpSpecializedPlan)
    assert 32 * warps <= 1024 and plan.ctas_per_sm * 32 * warps <= device.max_threads_per_sm
    if isinstance(plan, ColumnTilePlan):
        return
    assert budget.fits_shared_memory(plan, problem, device)
    assert plan.rows_per_tile & (plan.rows_per_tile - 1) == plan.chunk & (plan.chunk - 1) == 0
    assert (
        plan.cluster * plan.chunk * (plan.num_chunks - 1) < problem.cols <= plan.cluster * plan.chunk * plan.num_chunks
    )
    assert budget.registers(plan, problem, device) <= plan.max_registers <= 255
    if isinstance(plan, MultiWavePlan):
        assert plan.ctas_per_sm * 32 * plan.num_warps * plan.max_registers <= device.registers_per_sm
    elif isinstance(plan, PipelinedPlan):
        assert plan.ctas_per_sm * 32 * plan.num_warps * plan.max_registers <= device.registers_per_sm
        assert plan.chunk >= threads_per_row(plan)
        assert plan.num_stages >= 2 or ctas == tiles, "one stage is for one tile"
    else:
        assert plan.num_stages >= 2 and plan.num_stages % plan.num_groups == 0 and plan.chunk >= threads_per_row(plan)
        assert 32 * warps * budget.entry_registers(plan) <= device.registers_per_sm


DTYPE_NAMES = st.sampled_from(["fp16", "bf16", "fp32", "fp64"])
PLAIN_PROBLEMS = st.builds(
    make_problem,
    norm=st.sampled_from(["layer", "rms"]),
    cols=st.integers(1, 1 << 13).map(lambda n: 8 * n),
    dtype=st.sampled_from(["bf16", "fp32"]),
    weight=st.sampled_from(["bf16", "fp32", "none"]),
    direction=st.sampled_from(["forward", "backward"]),
)
ANY_PROBLEMS = st.builds(
    make_problem,
    norm=st.sampled_from(["layer", "rms"]),
    cols=st.integers(1, 1 << 18) | st.integers(1, 1 << 15).map(lambda n: 8 * n),
    dtype=DTYPE_NAMES,
    weight=DTYPE_NAMES | st.just("none"),
    direction=st.sampled_from(["forward", "backward"]),
    grad=DTYPE_NAMES,
    nested_rows=st.booleans(),
)
PROBLEMS = PLAIN_PROBLEMS | ANY_PROBLEMS
DEVICES = st.sampled_from(KNOWN) | st.builds(
    replace,
    st.sampled_from(KNOWN),
    sm_count=st.integers(1, 300),
    arch=st.sampled_from([70, 75, 80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121, 130]),
    smem_per_block_bytes=st.integers(48, 227).map(lambda kib: kib * 1024),
)
ROWS = st.integers(1, 1 << 20) | st.integers(1, 1 << 34)


@given(PROBLEMS, ROWS, DEVICES)
def test_every_problem_has_a_plan_that_runs(problem, rows, device):
    assert_runs(choose(problem, rows, device), problem, rows, device)


@given(PROBLEMS, ROWS, DEVICES, st.sampled_from(VARIANTS))
def test_forcing_overrides_quality_never_legality(problem, rows, device, variant):
    plan = choose(problem, rows, device, variant)
    decision = decide(problem, rows, device, variant)
    assert plan == decision.plan
    can = outcome(variant, problem, rows, device).plan is not None
    assert decision.forced == can
    assert plan.variant == variant if can else plan == choose(problem, rows, device)
    assert decision.reasons[variant].startswith("forced") and set(decision.reasons) == set(VARIANTS)


@given(PROBLEMS, ROWS, DEVICES)
def test_choosing_and_explaining_agree(problem, rows, device):
    decision = decide(problem, rows, device)
    assert decision.plan == choose(problem, rows, device)
    assert not decision.forced and decision.reasons[decision.plan.variant].startswith("chosen")
    assert sum(text.startswith("chosen") for text in decision.reasons.values()) == 1


@given(PROBLEMS, DEVICES, st.integers(0, 64))
def test_more_shared_memory_never_loses_a_variant(problem, device, more):
    more *= 1024
    larger = replace(
        device,
        smem_per_block_bytes=device.smem_per_block_bytes + more,
        smem_per_sm_bytes=device.smem_per_sm_bytes + more,
    )
    for variant in VARIANTS:
        before, after = (outcome(variant, problem, MANY_ROWS, spec) for spec in (device, larger))
        assert after.plan or not before.plan
        assert not after.fault or before.fault


@given(PROBLEMS, DEVICES)
def test_a_thousand_row_counts_need_two_plans_at_most(problem, device):
    rows = [int(2 ** random.Random(seed).uniform(0, 30)) for seed in range(1000)]
    assert len({choose(problem, count, device) for count in rows}) <= 2


@given(PROBLEMS, ROWS, DEVICES)
def test_no_cta_of_a_chosen_plan_is_idle(problem, rows, device):
    plan = choose(problem, rows, device)
    if isinstance(plan, ReferencePlan):
        return
    ctas, tiles = num_ctas(plan, rows, problem.cols, device), -(-rows // plan.rows_per_tile)
    assert 1 <= ctas <= tiles
    if problem.direction == "backward":
        assert num_partials(plan, ctas) <= max(2 * device.sm_count, rows // 2)


def test_architectures_without_tma_or_without_rules_run_multi_wave():
    for arch in (80, 86, 87, 89, 101, 130):
        device = replace(B200, arch=arch)
        for problem in sweep((64, 1024, 8192, 65536), ("bf16", "fp32")):
            assert choose(problem, MANY_ROWS, device).variant == "multi_wave"


def test_architectures_before_ampere_run_atens_kernels():
    plan = choose(make_problem(), MANY_ROWS, replace(A100, arch=75))
    assert plan == ReferencePlan("needs compute capability 8.0, A100 has 7.5")


@pytest.mark.parametrize("device", ARCHITECTURES.values(), ids=lambda spec: spec.name)
def test_rows_of_several_chunks_are_padded_by_little(device):
    for problem in sweep((1280, 2560, 3072, 5120, 6144, 7168, 10240, 12288), ("bf16", "fp32")):
        plan = choose(problem, MANY_ROWS, device)
        if not isinstance(plan, ColumnTilePlan) and plan.num_chunks > 1:
            assert plan.cluster * plan.chunk * plan.num_chunks <= 8 / 7 * problem.cols


# --- Cost of choosing ---


def test_a_choice_made_before_costs_three_python_calls():
    problem = make_problem(cols=4032)  # used by no other test: an equal problem in the cache would cost calls of __eq__
    choose(problem, MANY_ROWS, H200)
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        choose(problem, MANY_ROWS, H200)
    finally:
        sys.setprofile(None)
    assert 0 < len(calls) <= 3, calls
