"""How the ops run on a GPU: the same bits every time, on the right stream and device, in graphs, with few builds."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from calls import assert_same_bits, captured, fill_with_nan, no_waiting, overwrite, run
from cases import BF16, FP32, make_case

import fusednorm
from fusednorm.host import gpus, launch
from fusednorm.operands import BackwardOperands
from fusednorm.planner import choice
from fusednorm.planner.plan import PipelinedPlan
from fusednorm.problem.calls import check_backward
from fusednorm.tools.oracle import Outputs, assert_outputs_close, fused, make_inputs

pytestmark = pytest.mark.gpu

SEVERAL_PLANS = [
    make_case("layer", (4099, 128), (BF16, FP32, BF16)),
    make_case("rms", (4099, 1024), (BF16, BF16, BF16)),
    make_case("layer", (4099, 4096), (BF16, FP32, BF16)),
    make_case("rms", (1031, 5120), (FP32, FP32, FP32)),
    make_case("layer", (301, 8191), (BF16, FP32, BF16)),
    make_case("layer", (301, 65536), (BF16, FP32, BF16)),
    make_case("layer", (60013, 256), (BF16, BF16, BF16)),
    make_case("layer", (4099, 2048), (BF16, BF16, BF16)),
    make_case("layer", (2048, 36864), (BF16, BF16, BF16)),
]


@pytest.mark.parametrize("case", SEVERAL_PLANS, ids=str)
def test_twenty_runs_give_the_same_bits(case):
    inputs = make_inputs(case, "cuda")
    first = run(case, inputs)
    for _ in range(20):
        assert_same_bits(fused(case, inputs), first)


def test_sums_are_right_where_what_follows_the_row_loop_takes_more_memory_than_the_ring():
    """A former bug: the last sums shared memory with the barriers, which were written after the sums."""
    case = make_case("layer", (2048, 36864), (BF16, BF16, BF16))
    inputs = make_inputs(case, "cuda")
    want = run(case, inputs)
    call = check_backward(BackwardOperands(
        "layer", inputs.grad_out, inputs.x, case.normalized_shape, want.mean, want.rstd, inputs.weight, inputs.bias,
        (True, True, True),
    ))  # fmt: skip
    plan = PipelinedPlan(1, 512, 5, 3, 4, 3, 168, False, cluster=16)
    prepared = launch.on_tensors(call, plan)
    for _ in range(50):
        fill_with_nan(prepared.parts)  # NaN
        for each in prepared.launches:
            each.run()
        got = Outputs(want.y, want.mean, want.rstd, *(output.clone() for output in prepared.outputs))
        assert_outputs_close(got, case, inputs)


@pytest.mark.parametrize("cols", [128, 2048, 8192])
def test_grids_of_all_sizes_run_one_after_the_other(cols):
    """The order is random, and the partials are NaN before each run."""
    calls = []
    for variant, rows in product(("pipelined", "multi_wave"), (1, 2, 3, 9, 16, 17, 33, 65, 130, 263, 529, 4099)):
        case = make_case("layer", (rows, cols), (BF16, BF16, BF16))
        inputs = make_inputs(case, "cuda")
        statistics = run(case, inputs)
        call = check_backward(BackwardOperands(
            "layer", inputs.grad_out, inputs.x, case.normalized_shape, statistics.mean, statistics.rstd,
            inputs.weight, inputs.bias, (True, True, True),
        ))  # fmt: skip
        plan = choice.best_plan(variant, call.problem, gpus.spec_of(inputs.x.device))
        prepared = launch.on_tensors(call, plan)
        calls.append((case, inputs, statistics, prepared))
    for _ in range(4):
        random.shuffle(calls)
        for *_, prepared in calls:
            fill_with_nan(prepared.parts)
            for each in prepared.launches:
                each.run()
        for case, inputs, statistics, prepared in calls:
            got = Outputs(statistics.y, statistics.mean, statistics.rstd, *prepared.outputs)
            assert_outputs_close(got, case, inputs)


@pytest.mark.parametrize("case", SEVERAL_PLANS, ids=str)
def test_a_row_comes_out_the_same_whatever_rows_surround_it(case):
    inputs = make_inputs(case, "cuda")
    everything = run(case, inputs)
    rows = slice(7, None)  # enough rows for the same plan
    part = replace(inputs, x=inputs.x[rows], grad_out=inputs.grad_out[rows])
    some = run(replace(case, shape=part.x.shape), part)
    for name in ("y", "mean", "rstd", "dx"):
        got, want = getattr(some, name), getattr(everything, name)
        assert got is None or torch.equal(got, want[rows]), name


@pytest.mark.parametrize("case", SEVERAL_PLANS, ids=str)
def test_kernels_run_on_the_current_stream(case):
    inputs, fresh = make_inputs(case, "cuda"), make_inputs(case, "cuda", seed=1)
    fused(case, inputs)  # builds the kernels: the call below must not wait for a build
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of ms: meanwhile work on a wrong stream would read the old inputs
        inputs.x.copy_(fresh.x)
        inputs.grad_out.copy_(fresh.grad_out)
        outputs = fused(case, inputs)
    stream.synchronize()
    assert_outputs_close(outputs, case, replace(fresh, weight=inputs.weight, bias=inputs.bias))


@pytest.mark.parametrize("case", SEVERAL_PLANS, ids=str)
def test_calls_do_not_wait_for_the_gpu(case):
    inputs = make_inputs(case, "cuda")
    fused(case, inputs)
    with no_waiting():
        fused(case, inputs)


@pytest.mark.parametrize("case", SEVERAL_PLANS, ids=str)
def test_cuda_graphs_replay_on_new_inputs(case):
    inputs, fresh = make_inputs(case, "cuda"), make_inputs(case, "cuda", seed=1)
    graph, outputs = captured(lambda: fused(case, inputs))
    overwrite(inputs, fresh)
    graph.replay()
    assert_outputs_close(outputs, case, fresh)


@pytest.mark.parametrize("case", SEVERAL_PLANS[:1], ids=str)
def test_tensors_on_another_than_the_current_device(case):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make_inputs(case, "cuda:1")
    assert torch.cuda.current_device() == 0
    assert_outputs_close(run(case, inputs), case, inputs)


def test_a_thousand_row_counts_build_each_kernel_once(builds_of_kernels):
    cols = 1696  # a width that no other test uses: the first calls must build
    random.seed(0)
    case = make_case("layer", (4000, cols), (BF16, FP32, BF16))
    inputs = make_inputs(case, "cuda")

    def run_rows(rows: int) -> None:
        part = replace(inputs, x=inputs.x[:rows], grad_out=inputs.grad_out[:rows])
        fused(replace(case, shape=(rows, cols)), part)

    for rows in (17, 4000):  # few rows and many may run different kernels
        built = len(builds_of_kernels)
        run_rows(rows)
        new = builds_of_kernels[built:]
        assert len(new) == len(set(new)), f"a kernel was built twice for {rows} rows: {new}"
    assert {"forward", "backward"} <= set(builds_of_kernels)
    fusednorm.warmup("layer", cols, BF16, weight_dtype=FP32)  # row counts between these may run others
    builds_of_kernels.clear()
    for rows in (1, 2, 16, *(random.randint(1, 4000) for _ in range(1000))):
        run_rows(rows)
    assert not builds_of_kernels


@pytest.mark.parametrize("case", [make_case("layer", (2048, 4096), (FP32, FP32, FP32))], ids=str)
def test_another_row_count_reuses_the_kernels(case, builds_of_kernels):
    fused(case, make_inputs(case, "cuda"))
    builds_of_kernels.clear()
    more = replace(case, shape=(2056, 4096))
    inputs = make_inputs(more, "cuda")
    outputs = fused(more, inputs)
    assert not builds_of_kernels
    assert_outputs_close(outputs, more, inputs)
