"""Every kernel compiles for every architecture, with no spills and within what its plan counts on. No GPU is needed."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import mock

import pytest
from cases import BF16, FP16, FP32, FP64, make_case
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

H200 = DEVICES[90]
NO_DX, NO_DB = (False, True, True), (True, True, False)

# On every architecture: all kernels, and the main path.
ALWAYS = [
    (make_case("layer", (4096, 4096), (BF16, BF16, BF16)), ALL_OUTPUTS),
    (make_case("layer", (64, 65536), (BF16, FP32, BF16)), ALL_OUTPUTS),
]
# Taken in turns by the architectures: another width, dtype or way to cut a row each.
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


def submit(workers, function, *args):
    # A worker starts with its first job and keeps the environment of that moment.
    with mock.patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        return workers.submit(function, *args)


@pytest.fixture(scope="module")
def builds(workers):
    """Futures of all builds, so that they are made in parallel."""
    return {job: submit(workers, builds_of, job[1], DEVICES[job[0]], job[2]) for job in SAMPLE}


@pytest.mark.parametrize("job", SAMPLE, ids=lambda job: f"sm_{job[0]}-{job[1]}")
def test_kernels_compile_without_spills_within_their_plans(builds, job):
    made = builds[job].result()
    assert made
    found = [f"{b.resources.kernel}: {text}; {b.plan}" for b in made for text in complaints(b, DEVICES[job[0]])]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("arch", DEVICES)
def test_sample_holds_every_kernel_on_every_architecture(arch):
    names = {
        launch.kernel.__name__
        for a, case, mask in SAMPLE
        if a == arch
        for _, launch in launches_of(case, DEVICES[a], mask)
    }
    assert names >= {
        "forward",
        "forward_by_column_tiles",
        "backward",
        "backward_row_means",
        "backward_by_column_tiles",
        "finalize",
    }


ROW_COUNTS = (1, 2, 16, 17, 4097, 2**31 + 5)


@pytest.mark.parametrize("cols", [1024, 1023, 65536])
def test_one_build_serves_every_row_count(workers, cols):
    case = make_case("layer", (64, cols), (BF16, BF16, BF16))
    want = submit(workers, compile_case, case, H200).result()
    for rows in ROW_COUNTS:
        assert submit(workers, compile_case, replace(case, shape=(rows, cols)), H200).result() == want, rows


def test_what_is_compiled_ahead_is_what_a_launch_looks_up(workers):
    for case, mask in ALWAYS:
        ahead = submit(workers, compile_case, case, H200, mask).result()
        assert submit(workers, launch_case, case, H200, mask).result() == ahead
