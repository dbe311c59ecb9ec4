"""column_sum on CUDA against float64 sums: shapes, counts, layouts, streams, graphs and builds."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from calls import captured, no_waiting, skip_unless_memory
from cases import BF16, FP16, FP32, FP64, guarded_buffers
from column_sums import Sums, assert_sums_close

import fusednorm
from fusednorm.columns.plan import KERNELS, Choice, RingSum, choose, portable_plans, ring_fault, ring_plans
from fusednorm.columns.problem import check_column_sum
from fusednorm.host import gpus
from fusednorm.planner.device import DeviceSpec

pytestmark = pytest.mark.gpu

SIDES = (256, 1024, 4096, 16384, 65536)
PAIRS = [Sums(rows, cols, 1, dtype) for rows, cols, dtype in itertools.product(SIDES, SIDES, (FP32, FP16))]
FEW = [
    Sums(4096, 1024, count, dtype, total)
    for count, dtype, total in itertools.product((2, 3, 5), (FP32, FP16), (False, True))
]
MANY = [
    Sums(2048, 1024, count, dtype, total)
    for count, dtype, total in itertools.product((7, 8, 14, 15, 29, 57), (FP32, FP16), (False, True))
]
ODD = [
    Sums(rows, cols, count, dtype, total)
    for (rows, cols), (count, total), dtype in zip(
        [(1, 1), (1, 70_000), (70_000, 1), (37, 1001), (1023, 1023), (2049, 129), (131, 64), (5000, 96), (3, 65)] * 3,
        itertools.cycle([(1, False), (2, True), (3, False), (9, True), (2, False)]),
        itertools.cycle([BF16, FP32, FP16, FP64]),
        strict=False,
    )
]


@pytest.fixture
def device() -> DeviceSpec:
    return gpus.spec_of(torch.device("cuda", torch.cuda.current_device()))


def run(inputs, **options):
    """column_sum with guarded buffers for outputs and partial sums."""
    with guarded_buffers() as buffers:
        outputs = fusednorm.column_sum(inputs, **options)
    assert buffers, "the op took its buffers from elsewhere"
    return outputs


def assert_right(sums: Sums) -> None:
    inputs = sums.inputs("cuda")
    assert_sums_close(run(inputs, total=sums.total, dtype=sums.out_dtype), inputs, sums.total)


@pytest.mark.parametrize("sums", PAIRS, ids=str)
def test_every_pair_of_sides(sums):
    skip_unless_memory(1 + 3 * sums.dtype.itemsize * sums.rows * sums.cols / 2**30)
    assert_right(sums)


@pytest.mark.parametrize("sums", FEW + MANY, ids=str)
def test_several_tensors(sums):
    assert_right(sums)


@pytest.mark.parametrize("sums", ODD, ids=str)
def test_odd_sizes(sums):
    assert_right(sums)


@pytest.mark.parametrize("dtype, out_dtype", [(BF16, FP32), (FP32, FP16), (FP16, BF16), (FP32, FP64), (FP64, FP32)])
def test_result_has_the_dtype_asked_for(dtype, out_dtype):
    assert_right(Sums(20_000, 512, 2, dtype, out_dtype=out_dtype))
    assert_right(Sums(20_000, 512, 2, dtype, True, out_dtype))


EVERY_PLAN = [
    Sums(1000, 1024, 1, FP32),
    Sums(1000, 1024, 1, BF16),
    Sums(515, 200, 3, FP16),
    Sums(515, 200, 3, FP16, total=True),
    Sums(4099, 136, 5, FP32, total=True),
    Sums(700, 72, 57, BF16, total=True),
    Sums(700, 72, 29, FP32, total=True),
    Sums(33, 70, 64, FP16),
]


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("sums", EVERY_PLAN, ids=str)
def test_every_plan_is_right_with_any_number_of_splits(sums, splits, device):
    from fusednorm.columns import launch as launch_columns

    inputs = sums.inputs("cuda")
    call = check_column_sum(inputs, sums.total, sums.out_dtype)
    rings = [] if ring_fault(call.problem, call.rows, device) else list(ring_plans(call.problem, device))
    assert rings or device.arch < 90 or call.rows * call.problem.cols == 33 * 70
    for plan in [*rings, *portable_plans(call.problem, device)]:
        with guarded_buffers():
            got = launch_columns.run(call, Choice(plan, splits))
        assert_sums_close(got, inputs, sums.total)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "sums",
    [
        Sums(2**16 + 5, 2**15 + 64, 1, BF16),
        Sums(2**25 + 3, 72, 1, BF16),
        Sums(5, 2**29 + 64, 1, BF16),
        Sums(2**16 + 5, 2**15 + 64, 2, FP16, total=True),
    ],
    ids=str,
)
def test_more_than_two_to_the_31_elements(sums, kernel, device):
    from fusednorm.columns import launch as launch_columns

    skip_unless_memory(4 + (10 * sums.count * sums.rows + 80) * sums.cols / 2**30)
    assert sums.rows * sums.cols > 2**31
    inputs = sums.inputs("cuda")
    call = check_column_sum(inputs, sums.total, None)
    choice = choose(call.problem, call.rows, device, kernel)
    assert choice.plan.kernel == kernel or device.arch < 90
    assert_sums_close(launch_columns.run(call, choice), inputs, sums.total)


def strided(rows: int, cols: int, count: int, offset: int = 0, dtype=BF16):
    """Tensors with NaN between their rows. They start `offset` elements after a multiple of 16 bytes."""
    storage = torch.full((rows, count * (cols + 16)), float("nan"), device="cuda", dtype=dtype)
    inputs = [storage[:, i * (cols + 16) + offset :][:, :cols] for i in range(count)]
    for x in inputs:
        x.copy_(torch.randn(rows, cols, device="cuda").add_(0.25))
    return inputs


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("rows, cols", [(3000, 512), (3000, 1000), (517, 72)])
def test_rows_at_a_stride_are_read_in_place(rows, cols, total, offset):
    inputs = strided(rows, cols, 3, offset)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = fusednorm.column_sum(inputs, total=total)
    assert torch.cuda.max_memory_allocated() - before < rows * cols * 2 / 2, "no input was copied"
    assert_sums_close(got, inputs, total)


@pytest.mark.parametrize("kernel", KERNELS)
def test_both_kernels_read_rows_that_end_where_no_multiple_of_16_bytes_does(kernel, device):
    from fusednorm.columns import launch as launch_columns

    inputs = [x[:, :1001] for x in strided(3000, 1004, 2, dtype=FP32)]
    call = check_column_sum(inputs, False, None)
    choice = choose(call.problem, call.rows, device, kernel)
    assert choice.plan.kernel == kernel or device.arch < 90
    assert_sums_close(launch_columns.run(call, choice), inputs)


def test_other_layouts():
    x = torch.randn(40, 30, 256, device="cuda", dtype=BF16)
    for inputs in ([x.transpose(0, 1)], [x.mT], [x[..., ::2]], [x[:1, :1].expand_as(x)], [x[:1, :1, :1].expand_as(x)]):
        assert_sums_close(run(inputs), inputs)


SEVERAL_PLANS = [
    Sums(256, 256, 1, FP32),
    Sums(4096, 4096, 1, FP16),
    Sums(8192, 8192, 1, BF16),
    Sums(65_537, 256, 2, BF16),
    Sums(4096, 1024, 5, FP16, total=True),
    Sums(4096, 1001, 3, FP32),
    Sums(20_000, 512, 29, BF16, total=True),
]


@pytest.mark.parametrize("sums", SEVERAL_PLANS, ids=str)
def test_twenty_runs_give_the_same_bits(sums):
    inputs = sums.inputs("cuda")
    first = run(inputs, total=sums.total)
    for _ in range(20):
        for a, b in zip(fusednorm.column_sum(inputs, total=sums.total), first, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("sums", SEVERAL_PLANS, ids=str)
def test_two_streams_at_once_do_not_disturb_each_other(sums):
    both = [sums.inputs("cuda", seed) for seed in (0, 1)]
    alone = [fusednorm.column_sum(inputs, total=sums.total) for inputs in both]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in both]
    results = [[], []]
    for _ in range(20):
        for stream, inputs, outputs in zip(streams, both, results, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(fusednorm.column_sum(inputs, total=sums.total))
    torch.cuda.synchronize()
    for outputs, want in zip(results, alone, strict=True):
        for got in outputs:
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("sums", SEVERAL_PLANS, ids=str)
def test_kernels_run_on_the_current_stream(sums):
    inputs, fresh = sums.inputs("cuda"), sums.inputs("cuda", seed=1)
    fusednorm.column_sum(inputs, total=sums.total)  # builds the kernels
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of ms: meanwhile work on a wrong stream would read the old inputs
        for x, new in zip(inputs, fresh, strict=True):
            x.copy_(new)
        got = fusednorm.column_sum(inputs, total=sums.total)
    stream.synchronize()
    assert_sums_close(got, fresh, sums.total)


@pytest.mark.parametrize("sums", SEVERAL_PLANS, ids=str)
def test_calls_do_not_wait_for_the_gpu(sums):
    inputs = sums.inputs("cuda")
    fusednorm.column_sum(inputs, total=sums.total)
    with no_waiting():
        fusednorm.column_sum(inputs, total=sums.total)


@pytest.mark.parametrize("sums", SEVERAL_PLANS, ids=str)
def test_cuda_graphs_replay_on_new_inputs_into_poisoned_outputs(sums):
    inputs = sums.inputs("cuda")
    graph, outputs = captured(lambda: fusednorm.column_sum(inputs, total=sums.total))
    for seed in (1, 2, 3):
        for x, new in zip(inputs, sums.inputs("cuda", seed), strict=True):
            x.copy_(new)
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        assert_sums_close(outputs, inputs, sums.total)


@pytest.mark.parametrize("sums", SEVERAL_PLANS, ids=str)
def test_a_call_is_two_launches_at_the_most(sums):
    inputs = sums.inputs("cuda")
    fusednorm.column_sum(inputs, total=sums.total)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fusednorm.column_sum(inputs, total=sums.total)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if "CUDA" in str(event.device_type)]
    kernels = [name for name in kernels if "sum_" in name]
    assert 1 <= len(kernels) <= 2, kernels


def test_row_counts_share_builds(builds_of_kernels):
    cols = 1712  # a width that no other test uses
    x = torch.randn(20_000, cols, device="cuda", dtype=BF16)
    random.seed(0)
    counts = [1, 2, 16, 17, 20_000, *(random.randint(1, 20_000) for _ in range(300))]
    for rows in counts:
        fusednorm.column_sum([x[:rows]])
    assert len(builds_of_kernels) <= 12, builds_of_kernels  # tiles of several widths, for results and for partial sums
    builds_of_kernels.clear()
    for rows in counts:
        fusednorm.column_sum([x[:rows]])
    assert not builds_of_kernels


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_op_is_registered_as_torch_demands(requires_grad, total):
    inputs = [torch.randn(6, 4, 32, device="cuda", dtype=BF16).requires_grad_(requires_grad) for _ in range(3)]
    op = torch.ops.fusednorm.column_sum.default
    torch.library.opcheck(op, (inputs,), {"total": total, "dtype": FP32})


@pytest.mark.parametrize("total", [False, True])
def test_derivatives_are_right(total):
    def sums(*inputs):
        return tuple(fusednorm.column_sum(inputs, total=total))

    inputs = [torch.randn(6, 5, device="cuda", dtype=FP64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(sums, inputs)
    assert torch.autograd.gradgradcheck(sums, inputs)


def test_tensors_on_another_than_the_current_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = Sums(20_000, 512, 2, BF16).inputs("cuda:1")
    assert torch.cuda.current_device() == 0
    assert_sums_close(run(inputs), inputs)


def test_large_sums_go_by_tma_on_gpus_that_have_it(device):
    if device.arch < 90:
        pytest.skip(f"{device.name} has no TMA")
    explanation = fusednorm.explain_column_sum([torch.empty(16384, 16384, device="cuda", dtype=BF16)])
    assert isinstance(explanation.choice.plan, RingSum), str(explanation)
