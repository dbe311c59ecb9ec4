"""Every kernel compiles for every architecture, without spills and within its plan's resources. No GPU is needed."""

from __future__ import annotations

import column_sums
import pytest
from cases import BF16, FP16, FP32, FP64, make_case
from column_sums import Sums
from compiling import (
    ALL_OUTPUTS,
    DEVICES,
    builds_of,
    compile_case,
    complaints,
    launch_case,
    launches_of,
    worker_processes,
)

from fusednorm.planner.legality import MAX_RING_ROWS

H200 = DEVICES[90]
NO_DX, NO_DB = (False, True, True), (True, True, False)

# Compiled for every architecture: together they have all portable kernels and the usual plans.
ALWAYS = [
    (make_case("layer", (4096, 4096), (BF16, BF16, BF16)), ALL_OUTPUTS),
    (make_case("layer", (64, 65535), (BF16, FP32, BF16)), ALL_OUTPUTS),
    (make_case("layer", (216, 1600), (BF16, FP32, BF16)), ALL_OUTPUTS),
    (make_case("layer", (216, 1000), (BF16, BF16, BF16)), NO_DX),
]
# Each compiled for one architecture, in turn: every case has another width, mix of dtypes or division of a row.
IN_TURNS = [
    (make_case("rms", (4096, 1024), (BF16, FP32, BF16)), ALL_OUTPUTS),
    (make_case("layer", (216, 1987), (FP32, FP32, FP32)), ALL_OUTPUTS),
    (make_case("rms", (216, 3), (FP64, FP64, FP64)), ALL_OUTPUTS),
    (make_case("layer", (4096, 5120), (FP16, FP32, FP16)), ALL_OUTPUTS),
    (make_case("layer", (216, 576), (FP64, FP64, FP64)), ALL_OUTPUTS),
    (make_case("layer", (216, 1), (FP32, FP32, BF16)), ALL_OUTPUTS),
    (make_case("rms", (512, 8192), (BF16, None, BF16)), ALL_OUTPUTS),
    (make_case("layer", (4096, 768), (BF16, FP32, BF16)), NO_DB),
    (make_case("layer", (4096, 2048), (FP16, FP16, FP16)), NO_DX),
    (make_case("rms", (216, 1023), (BF16, BF16, BF16)), ALL_OUTPUTS),
    (make_case("layer", (216, 32), (BF16, BF16, BF16)), ALL_OUTPUTS),
    (make_case("rms", (4096, 12288), (FP32, FP32, FP32)), ALL_OUTPUTS),
    (make_case("layer", (4096, 1600), (FP64, BF16, FP16)), ALL_OUTPUTS),
    (make_case("rms", (64, 262144), (FP64, FP64, FP64)), ALL_OUTPUTS),
    (make_case("layer", (16, 3072), (FP32, BF16, FP32)), ALL_OUTPUTS),
]
SAMPLE = [(arch, *job) for turn, arch in enumerate(DEVICES) for job in ALWAYS + IN_TURNS[turn :: len(DEVICES)]]


@pytest.fixture(scope="module")
def workers():
    with worker_processes() as pool:
        yield pool


@pytest.fixture(scope="module")
def builds(workers):
    """A future of the builds of each job: the worker processes compile in parallel."""
    return {job: workers.submit(builds_of, job[1], DEVICES[job[0]], job[2]) for job in SAMPLE}


@pytest.mark.parametrize("job", SAMPLE, ids=lambda job: f"sm_{job[0]}-{job[1]}")
def test_kernels_compile_without_spills_within_their_plans(builds, job):
    made = builds[job].result()
    assert made
    found = [f"{b.resources.kernel}: {text}; {b.plan}" for b in made for text in complaints(b, DEVICES[job[0]])]
    assert not found, "\n".join(found)


def kernel_name(launch) -> str:
    return f"{launch.kernel.fn.__module__.split('.')[-1]}.{launch.kernel.__name__}"


@pytest.mark.parametrize("arch", DEVICES)
def test_sample_holds_every_portable_kernel_on_every_architecture(arch):
    jobs = [(case, mask) for job_arch, case, mask in SAMPLE if job_arch == arch]
    names = {kernel_name(launch) for case, mask in jobs for _, launch in launches_of(case, DEVICES[arch], mask)}
    assert names >= {
        "multiwave.forward",
        "column_tiles.forward_by_column_tiles",
        "multiwave.backward",
        "column_tiles.backward_row_means",
        "column_tiles.backward_by_column_tiles",
        "column_sum.finalize",
    }


ROW_COUNTS = (1, 2, 16, 17, 130, 4096, 4097, 70_001, 2**31 + 5)


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
    assert len(plans[False]) <= 4, "few rows and many are planned for apart in each direction, and nothing else"
    assert len(plans[True]) <= 2


def test_what_is_compiled_ahead_is_what_a_launch_looks_up(workers):
    for case, mask in ALWAYS:
        ahead = workers.submit(compile_case, case, H200, mask).result()
        assert workers.submit(launch_case, case, H200, mask).result() == ahead


@pytest.mark.parametrize("sums", [Sums(65536, 512), Sums(20000, 64), Sums(70, 131, 5)], ids=str)
def test_what_a_column_sum_loads_is_what_it_launches(workers, sums):
    assert workers.submit(column_sums.loads, sums, 90).result() == workers.submit(column_sums.builds, sums, 90).result()


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
    from fusednorm.host.compilation import spills_in_loops

    assert spills_in_loops(sass) == in_a_loop
