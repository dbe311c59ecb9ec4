"""The planner: which plan it chooses, by which rule, and within which limits. It needs no GPU and no compiler."""

from __future__ import annotations

import csv
import itertools
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import choices as listed_choices
import pytest
import torch
from hypothesis import example
from hypothesis import strategies as st
from planning import given, make_gated, make_gated_sum, make_modulated, make_problem, num_ctas, sweep
from tables import Table

from fusednorm.forms import FormSpec
from fusednorm.host import derived
from fusednorm.planner import budget, legality, limits
from fusednorm.planner.candidates import candidates, chunkings, cluster_sizes, ways_to_copy
from fusednorm.planner.choice import best_plan, choices, choose
from fusednorm.planner.device import A100, B200, H100, H200, KNOWN, RTX_3090, RTX_4090, RTX_5090
from fusednorm.planner.model import work_of
from fusednorm.planner.plan import (
    VARIANTS,
    AsyncCopyPlan,
    ColumnRingPlan,
    ColumnTilePlan,
    MultiWavePlan,
    PipelinedPlan,
    ReferencePlan,
    RingPlan,
    WarpSpecializedPlan,
    num_passes,
)
from fusednorm.tools.explanation import derived_of
from fusednorm.tools.tune import MOST_CANDIDATES, all_plans_of, dense, plans_of, to_survey

DATA = Path(__file__).parents[1] / "data"
MANY_ROWS = 16384
BLACKWELL = [spec for spec in KNOWN if spec.arch >= 100]

# --- Thresholds ---


@pytest.mark.parametrize("norm, last", [("rms", 592), ("layer", 2368)])
def test_thresholds_on_b200_are_those_published(norm, last):
    assert choose(make_problem(norm), last, B200).variant == "multi_wave"
    assert choose(make_problem(norm), last + 1, B200).variant == "warp_specialized"


@pytest.mark.parametrize("device", [H200, B200, RTX_5090], ids=lambda device: device.name)
@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("dtype, grad", [("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32")])
def test_parameter_gradients_alone_go_by_tma_two_ctas_on_an_sm(device, wants, dtype, grad):
    problem = make_problem(
        "layer", 1000, dtype, grad=grad, wants_dx=False, wants_dw=wants[0], wants_db=wants[1], tma_aligned=True
    )
    plan = choose(problem, MANY_ROWS, device, "pipelined")
    assert isinstance(plan, ColumnRingPlan)
    assert 2 * (budget.shared_bytes(plan, problem) + budget.RESERVED_SMEM_BYTES) <= device.smem_per_sm_bytes
    assert num_ctas(plan, MANY_ROWS, 1000, device) * -(-1000 // plan.chunk) <= 2 * device.sm_count
    assert plan == choose(problem, MANY_ROWS, device)


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
    assert choose(make_problem(), legality.MAX_RING_ROWS + 1, device).variant == "multi_wave"


@pytest.mark.parametrize("cols", [64, 5120])
def test_a_sort_of_rows_counts_them_in_32_bits(cols):
    problem = Table("layer", "", 1, cols, backward=True).call.problem
    assert choose(problem, legality.MAX_RING_ROWS, H200).variant != "reference"
    assert choose(problem, legality.MAX_RING_ROWS + 1, H200).variant == "reference"


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rows_for_eight_ctas_wait_for_no_cluster_of_16(norm, direction):
    """A former bug: a backward of 32768 columns waited until a kernel ended that held 32 SMs."""
    clusters = {
        plan.cluster
        for device in (H100, H200)
        for cols in (20480, 32768)
        for _, plan in choices(make_problem(norm, cols, direction=direction), device)
    }
    assert max(clusters) <= 8
    assert any(plan.cluster == 16 for _, plan in choices(make_problem(norm, 262144, direction=direction), H100))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_rows_in_pieces_of_16_bytes_are_not_copied_in_many_boxes(norm):
    """A former bug: a forward of 22408 columns took three times as long by a ring that copies 256 boxes at a time."""
    forwards = [make_problem(norm, cols, direction="forward") for cols in (9000, 12296, 22408)]
    backward = make_problem(norm, 10904)
    assert not any(isinstance(plan, RingPlan) for each in forwards for _, plan in choices(each, H100))
    rings = [plan for _, plan in choices(backward, H100) if isinstance(plan, RingPlan)]
    assert all(plan.chunk <= limits.many_boxes * plan.box_columns(backward.cols) for plan in rings)


@pytest.mark.parametrize("device", KNOWN, ids=lambda device: device.name)
def test_column_tiles_are_not_asked_for_sums_by_sample(device):
    problem = replace(make_gated_sum("layer", 64), wants_dx=False)
    assert problem.by_sample and problem.num_sums
    assert all(plan.kernel != "column_tiles" for _, plan in choices(problem, device))


def test_rows_at_two_strides_keep_the_measured_plans_that_can_run():
    """A former bug: where a ring was the fastest for many rows, no number of rows got a measured plan."""
    plain, nested = (make_problem("layer", 512, direction="forward", nested_rows=nested) for nested in (False, True))
    few = choose(plain, 192, H200)
    assert few.variant == "multi_wave" and choose(plain, 65536, H200).variant == "pipelined"
    assert choose(nested, 192, H200) == few and choose(nested, 65536, H200).variant == "multi_wave"


def test_a_forced_producer_warp_may_copy_a_row_in_many_pieces():
    assert isinstance(choose(make_problem(cols=4352), MANY_ROWS, H200, "warp_specialized"), WarpSpecializedPlan)


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


def test_all_100_choices_on_b200_are_the_published_ones():
    assert len(published()) == 100
    assert [row for row in published() if not agrees(row)] == []


def published_rings() -> list[tuple[dict, RingPlan]]:
    """(row, our plan) for the published decisions for warp specialization."""
    rows = [row for row in published() if row["decision"] == "WS"]
    return [(row, choose(as_problem(row), int(row["rows"]), B200)) for row in rows]


def test_rings_on_b200_are_as_full_as_the_published_ones():
    for row, plan in published_rings():
        problem = as_problem(row)
        size = plan.ctas_per_sm * budget.shared_bytes(plan, problem)
        if isinstance(plan, WarpSpecializedPlan):
            assert size >= 112 * 1024, row
            assert not budget.fits_shared_memory(replace(plan, num_stages=2 * plan.num_stages), problem, B200)
        assert size * (plan.num_stages - 1) / plan.num_stages >= B200.bytes_in_flight_per_sm, row


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


def test_what_was_unschedulable_there_has_a_plan_here():
    with open(DATA / "b200_decisions.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["decision"] == "UNSCHEDULABLE"]
    assert len(rows) == 8
    for row in rows:
        problem = as_problem(row)
        assert_runs(choose(problem, int(row["rows"]), B200), problem, int(row["rows"]), B200)


# --- No loss ---


def test_no_choice_is_slower_than_the_one_that_is_listed():
    """`python tests/choices.py` lists what differs, and `--renew` writes the list anew after a measurement."""
    assert [each for each in listed_choices.differences() if each.is_loss] == []


@pytest.mark.parametrize("device", [A100, RTX_4090, RTX_5090, H200, B200], ids=lambda device: device.name)
def test_rows_are_read_twice_only_where_no_plan_within_the_budgets_reads_them_once(device):
    widths = (1001, 4097, 8192, 9000, 10496, 12288, 16385, 20480, 24576, 32768, 40960, 65536, 131072)
    for problem in sweep(widths, ("bf16", "fp32"), ("", "none")):
        if num_passes(choose(problem, MANY_ROWS, device), problem) == 2:
            assert next(plans_of_one_pass(problem, device), None) is None, problem


def plans_of_one_pass(problem, device):
    """Tiles of one row, in registers and in rings of two stages, by all warps and chunks that candidates may have."""
    for warps, (chunk, num_chunks) in itertools.product((4, 8, 16), chunkings(problem.cols, 16, limits.max_chunks)):
        limit = budget.register_limit(32 * warps, device)
        yield from _within_budget(problem, device, MultiWavePlan(1, chunk, num_chunks, warps, 1, limit))
    if device.arch < legality.OLDEST_TMA_ARCH and not (
        problem.is_forward or legality.broken_rule("async_copy", problem, 1, device)
    ):
        for warps, in_smem in itertools.product((4, 8), (False, True)):
            least, most = (size // problem.x_dtype.itemsize * 32 * warps for size in limits.copied_bytes)
            limit = budget.register_limit(32 * warps, device)
            for chunk, num_chunks in chunkings(problem.cols, least, limits.max_ring_chunks[problem.direction]):
                plan = AsyncCopyPlan(1, chunk, num_chunks, 1, warps, 1, limit, in_smem)
                yield from _within_budget(problem, device, plan) if chunk <= most else ()
    if legality.broken_rule("pipelined", problem, 1, device):
        return
    for warps, cluster, in_smem in itertools.product((4, 8, 16), cluster_sizes(problem, device), (False, True)):
        limit = budget.register_limit(32 * warps, device)
        for chunk, num_chunks in chunkings(-(-problem.cols // cluster), 32 * warps, 16):
            for copy_chunks, tail in ways_to_copy(num_chunks, problem.cols // (cluster * chunk)):
                resources = 2, warps, 1, limit, in_smem, cluster, copy_chunks, False, tail
                plan = PipelinedPlan(1, chunk, num_chunks, *resources)
                box = plan.box_columns(problem.cols)
                if plan.num_copies <= limits.most_copies and chunk <= limits.max_box_side * box:
                    yield from _within_budget(problem, device, plan)


def _within_budget(problem, device, plan):
    return [plan] if budget.is_within_budget(plan, problem, device) else []


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
        assert plan.chunk >= plan.threads_per_row
        assert plan.num_stages >= 2 or plan.by_threads or ctas == tiles, "one stage is for one tile"
    else:
        assert plan.num_stages >= 2 and plan.num_stages % plan.num_groups == 0 and plan.chunk >= plan.threads_per_row
        assert 32 * warps * derived.entry_registers(plan) <= device.registers_per_sm


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
    smem_per_block_bytes=st.integers(64, 227).map(lambda kib: kib * 1024),
)
ROWS = st.integers(1, 1 << 20) | st.integers(1, 1 << 34)


@given(PROBLEMS, ROWS, DEVICES)
def test_every_problem_has_a_plan_that_runs(problem, rows, device):
    assert_runs(choose(problem, rows, device), problem, rows, device)


@given(PROBLEMS, ROWS, DEVICES, st.sampled_from(VARIANTS))
def test_forcing_overrides_everything_but_legality(problem, rows, device, variant):
    plan, own = choose(problem, rows, device, variant), choose(problem, rows, device)
    legal = legality.broken_rule(variant, problem, rows, device) is None
    assert plan.variant == variant or plan == own or (plan.variant == "multi_wave" and rows > legality.MAX_RING_ROWS)
    if legal and candidates(variant, problem, device):
        assert plan.variant == variant


# Of an architecture whose SMs have more shared memory: float64 parameters take much of it.
FLOAT64_WEIGHT = replace(make_problem("layer", 16385, direction="forward"), weight_dtype=torch.float64)


@given(PROBLEMS, DEVICES)
@example(FLOAT64_WEIGHT, replace(RTX_4090, arch=90))
def test_candidates_are_few_and_all_within_their_budgets(problem, device):
    plans = all_plans_of(problem, device)
    assert len(plans) <= 2 * MOST_CANDIDATES
    assert all(budget.is_within_budget(plan, problem, device) for plan in plans)


@pytest.mark.parametrize("device", KNOWN, ids=lambda device: device.name)
def test_tune_times_all_candidates_of_nine_problems_in_ten_and_the_first_ones_of_the_others(device):
    problems = [task.wanted.problem for task in itertools.islice(dense(), 0, None, 7)]
    cut = [problem for problem in problems if len(all_plans_of(problem, device)) > MOST_CANDIDATES]
    assert len(cut) <= len(problems) / 10
    assert all(plans_of(each, device) == all_plans_of(each, device)[:MOST_CANDIDATES] for each in problems)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("cols", [1152, 1536, 3072, 5120, 6144])
def test_rings_of_forwards_load_modulations_wider_than_x_once_for_a_cta_that_lives_long(norm, cols):
    """A CTA of one tile reads scale and shift for a row or two: in float32, more bytes than those rows have."""
    plans = candidates("pipelined", make_modulated(norm, cols, modulation="fp32"), H200)
    assert plans and not any(plan.short_lived for plan in plans)
    assert all(plan.num_stages > 2 for plan in plans)
    assert any(plan.short_lived for plan in candidates("pipelined", make_modulated(norm, cols), H200))


@pytest.mark.parametrize("cols", [1024, 1152, 1536, 2304])
def test_rings_of_backwards_by_sample_keep_three_stages_where_their_tiles_have_several_rows(cols):
    plans = candidates("pipelined", make_modulated(cols=cols, direction="backward"), H200)
    assert any(plan.rows_per_tile > 1 for plan in plans) and all(plan.num_stages == 3 for plan in plans)


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("cols", [128, 1024, 3072, 4096, 8192, 12288])
def test_tune_alone_tries_gated_forwards_whose_ctas_live_long(cols, after):
    """Each loads weight and bias once, and converts them once. The model knows nothing of that."""
    problem = make_gated("layer", cols, direction="forward", after=after)
    long_lived = [plan for plan in to_survey(problem, H200) if not plan.short_lived]
    assert any(plan.num_stages == 3 and not plan.weight_in_smem for plan in long_lived)
    assert {*long_lived} & {*plans_of(problem, H200)}
    assert not {*long_lived} & {plan for variant in VARIANTS for plan in candidates(variant, problem, H200)}


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("cols", [1024, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384])
def test_tune_tries_gated_backwards_of_several_ctas_that_read_a_tile_once(norm, cols):
    """Of 3072 and 4096 columns by two CTAs a row, though no plain norm of so few columns has a cluster."""
    problem = make_gated(norm, cols)
    several = [plan for plan in plans_of(problem, H200) if plan.ctas_per_sm > 1]
    once = [plan for plan in several if derived_of(plan, problem, H200).get("reads_once")]
    assert once and any(plan.cluster > 1 for plan in once) == (cols > 2048)


@given(PROBLEMS, DEVICES)
def test_row_counts_select_among_few_plans_in_order(problem, device):
    ranges = choices(problem, device)
    bounds = [most for most, _ in ranges]
    assert bounds == sorted(set(bounds)) and bounds[-1] == float("inf")
    assert len(ranges) <= (11 if device.arch == H200.arch else len(limits.compared_rows_per_sm) + 1)


@given(PROBLEMS, ROWS, DEVICES)
def test_no_cta_of_a_chosen_plan_is_idle(problem, rows, device):
    plan = choose(problem, rows, device)
    if isinstance(plan, ReferencePlan):
        return
    ctas, tiles = num_ctas(plan, rows, problem.cols, device), -(-rows // plan.rows_per_tile)
    assert 1 <= ctas <= tiles
    if problem.direction == "backward":
        assert ctas * plan.num_groups <= max(2 * device.sm_count, rows // 2)


@pytest.mark.parametrize("device", KNOWN, ids=lambda device: device.name)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_there_may_be_more_groups_of_columns_than_rows(direction, device):
    problem = make_problem("rms", 8, direction=direction, form=FormSpec(groups=2048))
    assert isinstance(choose(problem, 66 * 2048, device), MultiWavePlan)


def test_architectures_without_tma_or_without_rules_run_multi_wave_where_registers_hold_a_row():
    for arch in (80, 86, 87, 89, 101, 130):
        device = replace(B200, arch=arch)
        for problem in sweep((64, 1024, 7168, 65536), ("bf16", "fp32")):
            assert choose(problem, MANY_ROWS, device).variant == "multi_wave"


@pytest.mark.parametrize("device", [A100, RTX_3090, RTX_4090], ids=lambda device: device.name)
def test_without_tma_threads_copy_rows_that_registers_do_not_hold(device):
    for norm, cols, rows in itertools.product(("layer", "rms"), (9216, 12288), (1, MANY_ROWS)):
        plan = choose(make_problem(norm, cols), rows, device)
        assert plan.variant == "async_copy" and num_passes(plan, make_problem(norm, cols)) == 1


def test_architectures_before_ampere_run_atens_kernels():
    plan = choose(make_problem(), MANY_ROWS, replace(A100, arch=75))
    assert plan == ReferencePlan("needs compute capability 8.0, A100 has 7.5")


# --- Cost of choosing ---


def test_a_problem_goes_to_worker_processes_after_it_was_planned():
    problem = make_gated_sum()
    choose(problem, MANY_ROWS, H200)
    pickled = pickle.dumps(problem)
    assert pickle.loads(pickled) == problem and len(pickled) < 4_000


def test_a_choice_made_before_costs_four_python_calls():
    problem = make_problem(cols=4032)  # used by no other test: an equal problem in the cache would cost calls of __eq__
    choose(problem, MANY_ROWS, H200)
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        choose(problem, MANY_ROWS, H200)
    finally:
        sys.setprofile(None)
    assert 0 < len(calls) <= 4, calls


@pytest.mark.parametrize("cols", [1024, 2048, 3072])
def test_tiles_of_several_float32_rows_own_columns_though_dy_has_16_bits(cols):
    """A former bug: with 16 bytes of x for a thread they would, but the compiler gives a thread 16 bytes of dy. Those
    that do not took up to 1.5 times as long, and the model chose them."""
    problem = make_problem("layer", cols, "fp32", grad="bf16")
    tiles = [plan for plan in candidates("multi_wave", problem, H200) if plan.rows_per_tile > 1]
    assert all(2 * plan.chunk >= 16 * 32 * plan.num_warps for plan in tiles)
    shared, own = MultiWavePlan(2, 1024, 1, 8, 2, 128), MultiWavePlan(2, 1024, 1, 4, 2, 255)
    works = [work_of(plan, make_problem("layer", 1024, "fp32", grad="bf16"), 512, H200) for plan in (shared, own)]
    assert [work.merged > 0 for work in works] == [True, False]
