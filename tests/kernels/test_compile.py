"""A plan is one build, and what is compiled ahead is what a launch looks up. No GPU is needed.

That every kernel compiles without spills and within its plan is tested in test_budget.py and test_column_plan.py.
"""

from __future__ import annotations

import column_sums
import pytest
from cases import BF16, FP32, make_case
from column_sums import Sums
from compiling import ALL_OUTPUTS, DEVICES, compile_case, launch_case, launches_of, statistics_stored, tiles_read
from planning import make_gated, make_problem

from fusednorm.planner.legality import MAX_RING_ROWS
from fusednorm.planner.plan import from_text

H200 = DEVICES[90]

CASES = [
    (make_case("layer", (4096, 4096), (BF16, BF16, BF16)), ALL_OUTPUTS),
    (make_case("layer", (64, 65535), (BF16, FP32, BF16)), ALL_OUTPUTS),
    (make_case("layer", (216, 1600), (BF16, FP32, BF16)), ALL_OUTPUTS),
    (make_case("layer", (216, 1000), (BF16, BF16, BF16)), (False, True, True)),
]


def kernel_name(launch) -> str:
    return f"{launch.kernel.fn.__module__.split('.')[-1]}.{launch.kernel.__name__}"


ROW_COUNTS = (1, 16, 130, 4097, 70_001, 2**31 + 5)


@pytest.mark.parametrize("cols", [1024, 1023, 65536])
def test_a_plan_is_one_build_for_every_row_count(workers, cols):
    builds, plans = {}, {False: set(), True: set()}
    for rows in ROW_COUNTS:
        case = make_case("layer", (rows, cols), (BF16, BF16, BF16))
        hashes = workers.submit(compile_case, case, H200).result()
        for (plan, launch), build in zip(launches_of(case, H200), hashes, strict=True):
            builds.setdefault((plan, kernel_name(launch)), set()).add(build)
            plans[rows > MAX_RING_ROWS].add((plan, launch.norm.wants_dx))
    assert all(len(hashes) == 1 for hashes in builds.values())
    assert len(plans[False]) <= 10, "a table has at most five ranges of row counts in each direction"
    assert len(plans[True]) <= 2


def test_what_is_compiled_ahead_is_what_a_launch_looks_up(workers):
    for case, mask in CASES:
        ahead = workers.submit(compile_case, case, H200, mask).result()
        assert workers.submit(launch_case, case, H200, mask).result() == ahead


@pytest.mark.parametrize("sums", [Sums(65536, 512), Sums(20000, 64), Sums(70, 131, 5)], ids=str)
def test_what_a_column_sum_loads_is_what_it_launches(workers, sums):
    assert workers.submit(column_sums.loads, sums, 90).result() == workers.submit(column_sums.builds, sums, 90).result()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_gated_backward_reads_a_tile_once_where_registers_hold_it(workers, after):
    problem = make_gated("layer", 1024, after=after)
    plans = "Pipelined(2,1024,1,2,4,3,168,0,1,1,0,0,1)", "Pipelined(2,1024,1,2,4,5,96,0,1,1,0,0,1)"
    assert [workers.submit(tiles_read, problem, plan, H200).result() for plan in plans] == [3, 6]


@pytest.mark.parametrize("norm, statistics", [("layer", 2), ("rms", 1)])
@pytest.mark.parametrize("plan", ["Pipelined(1,4096,1,2,4,4,128,1,1,1,1,0)", "Pipelined(2,2048,1,2,4,4,128,1,2,1,1,0)"])
def test_a_thread_of_a_ring_stores_each_statistic_of_a_row_once(workers, norm, statistics, plan):
    problem = make_problem(norm, 4096, direction="forward")
    stored = workers.submit(statistics_stored, problem, plan, H200).result()
    assert stored == statistics * from_text(plan).rows_per_tile


FORM = """
import triton
import triton.language as tl

@triton.jit
def inner(x):
    return x + {inner}

@triton.jit
def scale(x_hat, weight, norm: tl.constexpr):
    return inner(x_hat) * {outer}
"""


def key_of_form(folder, inner: str, outer: str) -> str:
    """The key of the build of a forward whose form has a function with these bodies."""
    import importlib.util
    import json
    from dataclasses import replace

    from fusednorm.kernels.rowmath import AFFINE

    from fusednorm.tools import compilation

    folder.mkdir(exist_ok=True)
    path = folder / f"{inner} {outer}.py"
    path.write_text(FORM.format(inner=inner, outer=outer))
    spec = importlib.util.spec_from_file_location("form", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    forward = launches_of(make_case("layer", (64, 4096), (BF16, BF16, BF16)), H200)[0][1]
    norm = replace(forward.norm, form=replace(AFFINE, scale=module.scale))
    assert json.loads(json.dumps(norm))["form"]["scale"]  # Triton's hooks write it so
    return compilation.build_key(replace(forward, norm=norm), 90)


def test_a_build_depends_on_the_bodies_of_a_forms_functions_and_of_what_they_call(workers, tmp_path):
    bodies = [("1.0", "weight"), ("1.0", "2.0"), ("2.0", "weight")]
    keys, again = (
        [workers.submit(key_of_form, tmp_path / name, *each).result() for each in bodies] for name in ("one", "other")
    )
    assert len(set(keys)) == len(bodies)
    assert again == keys, "a build must be found again"


LOOP = """
/*0000*/ STL [R1], R2 ;  /* 0x00 */
/*0010*/ FADD R3, R3, R2 ;
/*0020*/ @P0 BRA 0x10 ;
/*0030*/ LDL R2, [R1] ;
/*0040*/ EXIT ;
/*0050*/ BRA 0x50;
"""


@pytest.mark.parametrize(
    ("sass", "in_a_loop"),
    [
        (LOOP, False),
        (LOOP.replace("FADD R3, R3, R2", "LDL.LU R2, [R1]"), True),
        (LOOP.replace("FADD R3, R3, R2", "STL.64 [R1], R2"), True),
        (LOOP.replace("@P0 BRA 0x10 ", "@P0 BRA 0x30 "), True),  # no loop: all of it runs for each row tile
    ],
)
def test_a_spill_counts_unless_it_is_stored_before_and_loaded_after_the_loops(sass, in_a_loop):
    pytest.importorskip("triton")
    from bench.resources import spills_in_loops

    assert spills_in_loops(sass) == in_a_loop
