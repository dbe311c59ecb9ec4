"""Every kernel compiles for every architecture, without spills and within its plan's budgets. No GPU is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from budgets import check, plans_of
from compiling import InParallel
from hypothesis import strategies as st
from planning import ARCHITECTURES, given, make_gated, make_gated_sum, make_modulated, make_problem, make_sum

from fusednorm.host import derived
from fusednorm.planner import budget
from fusednorm.planner.device import A100, B200, H200, KNOWN
from fusednorm.planner.plan import ColumnTilePlan, MultiWavePlan, PipelinedPlan, WarpSpecializedPlan

# Widths, dtypes and masks that have caused trouble. Each problem is compiled for one architecture, in turn; the command
# `make budgets` tries thousands.
SAMPLE = [
    make_problem("layer", 4096),
    make_problem("rms", 1024, weight="fp32"),
    make_problem("layer", 8192, "fp32"),
    make_problem("rms", 576),
    make_problem("layer", 5120, "fp16", "fp32"),
    make_problem("rms", 16384),
    make_problem("layer", 1987),
    make_problem("layer", 12288),
    make_problem("rms", 3072, wants_dw=False),
    make_problem("layer", 3, "fp64"),
    make_problem("layer", 1600, grad="fp32"),
    make_problem("rms", 12288, "fp32"),
    make_problem("layer", 31),
    make_problem("layer", 1280, weight="none"),
    make_problem("rms", 4104),
    make_problem("layer", 768, "fp64"),
    make_problem("layer", 20480),
    make_problem("rms", 1023, "fp32", "bf16"),
    make_problem("layer", 128),
    make_problem("rms", 2048),
    make_problem("layer", 36864),
    make_problem("layer", 8448),
    make_problem("rms", 8192, weight="none"),
    make_problem("layer", 1, "fp32", grad="bf16"),
    make_problem("layer", 768, weight="fp32", wants_db=False),
    make_problem("layer", 1600, "fp64", "bf16", grad="fp16"),
    make_problem("rms", 262144, "fp64"),
    make_problem("layer", 3072, "fp32", "bf16"),
]
SPILLED = [  # these plans once spilled 8 to 312 bytes a thread on sm_90 or sm_100
    make_problem("layer", 392, direction="forward"),
    make_problem("layer", 904, "fp16", "fp32", direction="forward"),
    make_problem("layer", 136, "fp16", "fp64", grad="bf16"),
    make_problem("layer", 2056, "fp32"),
    make_problem("rms", 4096, "fp32", wants_dw=False),
    make_problem("layer", 12296),
    make_problem("layer", 504),
]
FORWARD = [
    make_problem("layer", 4096, direction="forward"),
    make_problem("rms", 8192, direction="forward"),
    make_problem("layer", 576, "fp32", direction="forward"),
    make_problem("layer", 16384, direction="forward", weight="fp32"),
    make_problem("rms", 29, direction="forward"),
    make_problem("layer", 1, "fp32", direction="forward"),
    make_problem("rms", 262144, "fp64", direction="forward"),
    make_problem("layer", 5120, "fp16", "fp32", direction="forward"),
    make_problem("layer", 1600, "fp64", "bf16", direction="forward"),
    make_problem("rms", 12288, "fp32", weight="none", direction="forward"),
]


def of_tables(problem):
    """The forward with an index for each row, in place of samples."""
    names, dtypes = problem.names_shared, problem.shared
    return replace(problem, rows_in=dtypes, names_in=names, tables=names, shared=(), names_shared=())


DIRECTIONS = ("forward", "backward")
WIDE = [make_problem("layer", 65535, weight="fp32", direction=each) for each in DIRECTIONS]  # column tiles, no rings
JOBS = [
    *((arch, problem) for turn, arch in enumerate(ARCHITECTURES) for problem in SAMPLE[turn :: len(ARCHITECTURES)]),
    *zip([*ARCHITECTURES] * 2, FORWARD, strict=True),
    *((arch, problem) for arch in ARCHITECTURES for problem in WIDE),
    *((arch, problem) for arch in (90, 100) for problem in SPILLED),
    (90, make_problem("layer", 4096, "fp32")),
    (90, make_problem("rms", 7680, grad="fp32")),
    (90, make_problem("layer", 16384)),
    (90, make_problem("layer", 36864)),
    (90, make_problem("layer", 8448, direction="forward")),
    (90, make_problem("layer", 256)),
    (90, make_problem("layer", 256, direction="forward")),
    (90, make_problem("layer", 7040)),
    (90, make_problem("layer", 245760)),
    (90, make_problem("rms", 163856)),
    (100, make_problem("layer", 61440)),
    (100, make_problem("rms", 15368)),  # 64 columns of a thread, in 16 chunks
    (103, make_problem("layer", 237568)),
    (103, make_problem("rms", 7680)),  # 15 chunks of a weight, and no bias
    (120, make_problem("layer", 4096)),
    (120, make_problem("layer", 6516)),
    (90, make_problem("layer", 4096, wants_dx=False)),
    (100, make_problem("rms", 1000, "fp32", grad="bf16", wants_dx=False)),
    (120, make_problem("layer", 1000, wants_dx=False, wants_dw=False)),
    (120, make_problem("layer", 128, direction="forward")),
    (100, make_problem("layer", 128)),
    (103, make_problem("layer", 640)),
    (103, make_problem("layer", 36084, "fp32", direction="forward")),  # 16 CTAs have two rows
    (100, replace(make_problem("layer", 4096), residual_dtype=torch.bfloat16)),
    (80, make_problem("layer", 16383, weight="none", direction="forward")),
    (80, make_sum("layer", 4096, finish="add")),
    (90, make_problem("layer", 10304, direction="forward")),  # 48 columns of a thread of two CTAs, and a tail
    (90, make_sum("layer", 4096)),
    (90, make_problem("layer", 8192, "fp32", direction="forward")),  # warps exchange means, what these lack, variances
    (90, make_sum("layer", 1032, residual="fp32")),  # a tail, and the mean of a float32 row is corrected
    (100, make_sum("rms", 1987, rounds_sum=False)),
    (90, make_gated("rms", 128)),
    (100, make_gated("layer", 1024)),
    *((90, make_gated("layer", cols, after=False)) for cols in (1024, 8192)),  # 16 elements of 168 registers, held
    (90, make_gated("layer", 3072, direction="forward")),  # by CTAs that live long, too
    (90, make_gated("layer", 4096, direction="forward", after=False)),  # 128 registers, by a cap
    (80, make_gated("layer", 256, gate="fp32", after=False)),
    (120, make_gated("rms", 4096, after=False)),
    (90, make_gated("layer", 12001)),  # column tiles of an odd number of columns
    (90, make_modulated("layer", 3072, modulation="fp32", direction="backward")),
    # 168 and 128 registers, by caps
    (90, make_modulated("layer", 1152, modulation="fp32", direction="backward")),
    (90, replace(make_modulated("layer", 1152, direction="backward"), residual_dtype=torch.bfloat16)),
    (90, make_modulated("rms", 5120, direction="backward", by_sample=False)),  # 20 elements a thread
    (90, make_modulated("rms", 3072, modulation="fp32")),
    (120, make_modulated("layer", 1152, modulation="fp32")),
    (80, make_gated_sum("layer", 1152, weight="bf16")),
    (100, make_gated_sum("rms", 3072, by_sample=False)),
    *((90, replace(make_modulated(norm, 2560, direction="backward"), by_key=True)) for norm in ("layer", "rms")),
    # Rings of single rows.
    *((90, replace(make_modulated("layer", cols, direction="backward"), by_key=True)) for cols in (6144, 16384)),
    (100, replace(make_gated_sum("rms", 8192), by_key=True)),
    *((90, replace(make_gated_sum("layer", cols), by_key=True)) for cols in (4096, 6144)),
    *((arch, of_tables(make_modulated("layer", 3072))) for arch in (80, 90)),  # 72 registers, by a cap
]


@pytest.fixture(scope="module")
def builds(workers):
    return InParallel(workers, check, [(problem, arch) for arch, problem in JOBS])


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"sm_{job[0]}-{job[1].norm}-{job[1].direction}-{job[1].cols}")
def test_compiler_needs_no_more_than_the_budget_says_and_rings_little_less_shared_memory(builds, job):
    assert list(plans_of(job[1], ARCHITECTURES[job[0]]))
    assert builds[job[::-1]].result() == []


def test_sample_holds_every_variant_that_an_architecture_has():
    for arch, device in ARCHITECTURES.items():
        jobs = [(problem, plan) for a, problem in JOBS if a == arch for plan in plans_of(problem, device)]
        rings = {PipelinedPlan, WarpSpecializedPlan} if arch >= 90 else set()
        for direction in DIRECTIONS:
            plans = {type(plan) for problem, plan in jobs if problem.direction == direction}
            assert plans >= {MultiWavePlan, ColumnTilePlan} | rings


def test_a_stage_costs_its_tiles_and_nothing_else_grows():
    problem = make_problem("layer", 4096)
    plan = PipelinedPlan(2, 4096, 1, 2, 8, 1, 255, False)
    sizes = [budget.shared_bytes(replace(plan, num_stages=stages), problem) for stages in (2, 4, 6)]
    tile = 2 * 2 * 4096 * 2
    assert [b - a for a, b in zip(sizes, sizes[1:], strict=False)] == [2 * tile + 2 * 16] * 2


@pytest.mark.parametrize(
    "num_groups, num_warps, registers", [(1, 4, 240), (1, 8, 240), (2, 4, 240), (1, 16, 112), (2, 8, 112)]
)
def test_compute_groups_get_what_the_producer_gives_away(num_groups, num_warps, registers):
    limit = budget.group_register_limit(num_groups, num_warps, B200)
    assert limit == registers
    plan = WarpSpecializedPlan(1, 4096, 1, 4, num_warps, 1, limit, False, num_groups=num_groups)
    threads = 32 * num_warps * num_groups
    entry = derived.entry_registers(plan)
    assert entry % 8 == 0 and entry * (threads + 128) <= B200.registers_per_sm
    assert entry * (threads + 128) >= threads * limit + 128 * budget.PRODUCER_REGISTERS


@given(st.sampled_from(KNOWN), st.integers(32, 2048))
def test_registers_of_all_threads_fit_an_sm(device, threads):
    limit = budget.register_limit(threads, device)
    assert limit <= 255 and limit * threads <= device.registers_per_sm
    assert limit == 255 or (limit % 8 == 0 and (limit + 8) * threads > device.registers_per_sm)


@given(st.sampled_from(["layer", "rms"]), st.sampled_from([1, 2, 4]), st.sampled_from([1024, 4096]), st.integers(1, 4))
def test_more_to_hold_never_needs_fewer_registers(norm, rows, chunk, num_chunks):
    problem = make_problem(norm, chunk * num_chunks)
    plan = PipelinedPlan(rows, chunk, num_chunks, 3, 4, 1, 255, False)
    need = budget.registers(plan, problem, H200)
    for more in ({"rows_per_tile": 2 * rows}, {"num_chunks": num_chunks + 1}, {"chunk": 2 * chunk}):
        larger = replace(plan, **more)
        assert budget.registers(larger, problem, H200) >= need
    assert budget.registers(replace(plan, weight_in_smem=True), problem, H200) <= need
    assert budget.registers(plan, replace(problem, wants_dw=False, wants_db=False), H200) <= need


def test_eight_rows_of_a_layer_norm_that_end_within_a_chunk_have_no_plan_that_triton_3_6_spills():
    plan = PipelinedPlan(8, 128, 5, 2, 4, 2, 255, True, copy_chunks=4, tail=True)
    assert not budget.is_within_budget(plan, make_problem("layer", 592), H200)
    assert budget.is_within_budget(plan, make_problem("rms", 592), H200)


def test_unaligned_rows_need_more_registers():
    plan = MultiWavePlan(1, 1024, 4, 8, 2, 128)
    assert budget.registers(plan, make_problem(cols=4095), A100) > budget.registers(plan, make_problem(cols=4096), A100)


def test_budget_and_kernel_leave_the_producer_the_same_registers():
    from fusednorm.kernels import warp_specialized

    assert warp_specialized.PRODUCER_REGISTERS.value == budget.PRODUCER_REGISTERS
