"""Every compiled schedule gives the float64 oracle's numbers, and the same bits in every order of events."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import BF16, FP16, FP32, FP64
from column_sums import Sums
from simulator.host import simulated
from simulator.problems import DX_ONLY, NO_DX, Problem, SumProblem, bits
from squared import squared

import fusednorm
from fusednorm.planner import choice
from fusednorm.planner.candidates import candidates

MIXED, HALVES, FLOATS = (BF16, FP32, BF16), (FP16, FP16, FP16), (FP32, FP32, FP32)

# A comment at a case says what it tests that others do not.
PORTABLE = [
    Problem("forward", "multi_wave", "layer", 1, 200),
    Problem("forward", "multi_wave", "rms", 5, 1987, FLOATS),  # rows of an odd length
    Problem("backward", "multi_wave", "layer", 60, 200),
    Problem("backward", "multi_wave", "rms", 1, 200, HALVES),
    Problem("backward", "multi_wave", "layer", 6, 96, (FP64, FP64, FP64)),
    Problem("backward", "multi_wave", "layer", 10, 160, MIXED, layout="packed_slice"),
    Problem("backward", "multi_wave", "layer", 9, 200, device="B200"),
    Problem("backward", "multi_wave", "layer", 4, 33000, sms=20),  # column tiles; the last CTA sums partials
    Problem("backward", "multi_wave", "layer", 40, 136, mask=NO_DX),
]
PIPELINED = [
    Problem("forward", "pipelined", "layer", 1, 200),
    Problem("forward", "pipelined", "layer", 60, 200),  # more rows than the ring holds; the first tile is not full
    Problem("forward", "pipelined", "layer", 9, 1000, FLOATS),
    Problem("forward", "pipelined", "rms", 37, 1032, MIXED),  # the last chunk of a row is a tail
    Problem("forward", "pipelined", "rms", 3, 16384, sms=8),  # clusters of 2 with one tile each
    Problem("forward", "pipelined", "layer", 3, 12288, sms=8),
    Problem("backward", "pipelined", "layer", 1, 200),
    Problem("backward", "pipelined", "layer", 85, 200),
    Problem("backward", "pipelined", "rms", 85, 200, HALVES, sms=1),
    Problem("backward", "pipelined", "layer", 21, 1032, mask=DX_ONLY, sms=1),  # a tail, and stages that are used again
    Problem("backward", "pipelined", "layer", 20, 200, MIXED, layout="row_strided"),
    Problem("backward", "pipelined", "rms", 9, 512, FLOATS, mask=DX_ONLY, residual=FP32),
    Problem("backward", "pipelined", "layer", 85, 200, device="B200"),
    Problem("backward", "pipelined", "layer", 300, 136, mask=NO_DX),  # sums over rows, by columns
    Problem("backward", None, "rms", 5, 9216, device="RTX 5090"),  # two stages, where registers do not hold a row
]
COPIED = [
    Problem("forward", "async_copy", "layer", 60, 200),  # more rows than the ring holds; the first tile is not full
    Problem("forward", "async_copy", "rms", 37, 1032, MIXED, device="A100"),
    Problem("backward", "async_copy", "layer", 1, 200),
    Problem("backward", "async_copy", "layer", 85, 200, device="RTX 4090"),
    Problem("backward", "async_copy", "layer", 21, 1032, FLOATS, sms=1, device="A100"),  # a row ends within a chunk
    Problem("backward", "async_copy", "layer", 20, 200, MIXED, layout="row_strided"),
    Problem("backward", "async_copy", "rms", 9, 512, (FP32, FP32, BF16), mask=DX_ONLY, residual=FP32, device="A100"),
    Problem("backward", "async_copy", "layer", 7, 9216, device="A100"),  # one stage, refilled chunk by chunk
    Problem("backward", "async_copy", "rms", 5, 10248, HALVES, device="RTX 4090"),
]
CLUSTERS = [
    Problem("backward", "pipelined", "layer", 27, 5120, mask=DX_ONLY, sms=4),  # a cluster of 2
    Problem("backward", "pipelined", "rms", 3, 12288, mask=DX_ONLY, sms=8),  # a cluster of 4
    Problem("forward", "pipelined", "layer", 1, 65536, sms=16),  # a cluster of 8
    Problem("backward", "pipelined", "layer", 1, 65536, mask=DX_ONLY, sms=32),  # a cluster of 16
    Problem("backward", "pipelined", "layer", 5, 5120, mask=DX_ONLY, residual=BF16, sms=4, device="B200"),
]
SPECIALIZED = [
    Problem("backward", "warp_specialized", "layer", 1, 200),
    Problem("backward", "warp_specialized", "layer", 170, 200),  # two groups, and stages that are used again
    Problem("backward", "warp_specialized", "rms", 85, 512, HALVES, mask=DX_ONLY),
    Problem("backward", "warp_specialized", "layer", 9, 1032, mask=DX_ONLY, sms=1),  # one group
    Problem("backward", "warp_specialized", "layer", 20, 200, MIXED, residual=BF16),
    Problem("backward", "warp_specialized", "rms", 450, 200, device="B200", sms=1),  # a full ring, used again
    Problem("backward", "warp_specialized", "layer", 100, 512, FLOATS, residual=BF16, device="B200"),  # cached
    Problem("forward", "warp_specialized", "layer", 1, 200),
    Problem("forward", "warp_specialized", "layer", 301, 200),
    Problem("forward", "warp_specialized", "rms", 37, 1032, MIXED, sms=1),  # one group
    Problem("forward", None, "layer", 5, 4096, device="B200"),
]
SUMS = [
    SumProblem(Sums(1, 200)),
    SumProblem(Sums(300, 264, 3, BF16, total=True), "ring"),
    SumProblem(Sums(70, 264, 5, BF16), "ring", device="B200"),
    SumProblem(Sums(40, 264, 12, FP16, total=True), "ring"),  # more tensors than the kernel for few takes
    SumProblem(Sums(300, 200, 3, BF16, total=True), "portable"),
    SumProblem(Sums(70, 131, 5, FP32), "portable", device="B200"),
    SumProblem(Sums(20, 72, 57, FP16, total=True), "ring", device="B200"),  # the smallest tile
    SumProblem(Sums(700, 72), "ring", device="B200"),  # many rows of few columns; below, the reverse
    SumProblem(Sums(9, 2056), "ring"),
]
ORDERED = [
    Problem("backward", "async_copy", "layer", 60, 200, sms=1, device="A100"),
    Problem("backward", "multi_wave", "layer", 9, 200),
    Problem("backward", "pipelined", "layer", 60, 200, sms=1),
    Problem("backward", "pipelined", "rms", 5, 5120, mask=DX_ONLY, sms=4),
    Problem("backward", "warp_specialized", "layer", 105, 200, sms=1),
    Problem("backward", "warp_specialized", "rms", 150, 512, mask=DX_ONLY, sms=1, device="B200"),
    Problem("forward", "warp_specialized", "layer", 105, 200, sms=1),
]
# Padded rows, rows without padding, and clusters. A mean of 1000 numbers is one that Triton's division rounds wrongly.
# Products that ptxas fuses with additions are not fused here: what is inexact because of a fusion shows on a GPU alone.
EQUAL = [
    Problem("forward", "multi_wave", "layer", 3, 200, FLOATS, equal=True),
    Problem("forward", "pipelined", "layer", 9, 1000, FLOATS, equal=True),
    Problem("forward", "pipelined", "layer", 5, 1536, equal=True),
    Problem("forward", "pipelined", "layer", 5, 1536, FLOATS, equal=True),
    Problem("forward", "pipelined", "layer", 3, 12288, FLOATS, sms=8, equal=True),
    Problem("forward", "warp_specialized", "layer", 20, 200, FLOATS, equal=True),
    Problem("backward", "multi_wave", "layer", 6, 1000, HALVES, equal=True),
    Problem("backward", "multi_wave", "layer", 6, 1000, FLOATS, equal=True),
    Problem("backward", "multi_wave", "layer", 4, 9001, FLOATS, equal=True),
    Problem("backward", "async_copy", "layer", 9, 1000, FLOATS, equal=True, device="A100"),
    Problem("backward", "pipelined", "layer", 9, 1000, FLOATS, equal=True),
    Problem("backward", "pipelined", "layer", 9, 1536, FLOATS, equal=True),
    Problem("backward", "pipelined", "layer", 3, 5120, FLOATS, sms=4, equal=True),
    Problem("backward", "warp_specialized", "layer", 10, 1000, FLOATS, equal=True),
    Problem("backward", "warp_specialized", "layer", 10, 1000, MIXED, equal=True),
]
# Padded rows, rows without padding, and clusters, with the most that rstd may be off. The CTAs of a cluster tell each
# other a rounded mean.
FAR = {
    Problem("forward", "multi_wave", "layer", 3, 200, FLOATS): 5e-7,
    Problem("forward", "pipelined", "layer", 9, 64, FLOATS): 5e-7,
    Problem("forward", "pipelined", "layer", 9, 1000, FLOATS): 5e-7,
    Problem("forward", "pipelined", "layer", 9, 1536, FLOATS): 5e-7,
    Problem("forward", "pipelined", "layer", 3, 12288, FLOATS, sms=8): 6e-6,
    Problem("forward", "warp_specialized", "layer", 20, 256, FLOATS): 5e-7,
}
SEEDS = 5  # each number of CTAs that have a place, once more; `make simulate` tries thousands
EPS = 1e-5


@pytest.mark.parametrize("problem", [*PORTABLE, *PIPELINED, *COPIED, *SPECIALIZED, *SUMS], ids=str)
def test_outputs_are_the_oracles(problem):
    outputs, _ = problem.simulate()
    problem.check(outputs)


@pytest.mark.parametrize("problem", EQUAL, ids=str)
def test_equal_elements_are_normalized_exactly(problem):
    outputs, _ = problem.simulate()
    problem.check(outputs)


@pytest.mark.parametrize("problem, most", FAR.items(), ids=str)
def test_rstd_of_a_row_whose_mean_is_10000_standard_deviations_loses_no_digits(problem, most):
    x = 1e4 + torch.randn(problem.rows, problem.cols, generator=torch.Generator().manual_seed(0))
    with simulated("H200", problem.sms) as simulation, fusednorm.force(problem.variant):
        _, mean, rstd = torch.ops.fusednorm.layer_norm_fwd(x, [problem.cols], None, None, 0.0)
    assert [each.name for each in simulation.launched] == ["forward"]
    variance, exact = torch.var_mean(x.double(), 1, correction=0, keepdim=True)
    assert (rstd * variance.sqrt() - 1).abs().max() < most
    assert ((mean - exact) / exact).abs().max() < 2**-23


@pytest.mark.parametrize("column", [0, 3, 61])
@pytest.mark.parametrize("problem", [problem for problem in FAR if problem.cols <= 1536], ids=str)
def test_rstd_of_a_row_with_one_element_beyond_all_others_loses_no_digits(problem, column):
    x = torch.randn(problem.rows, problem.cols, generator=torch.Generator().manual_seed(0))
    x[:, column] = 1000.0
    with simulated("H200", problem.sms), fusednorm.force(problem.variant):
        _, _, rstd = torch.ops.fusednorm.layer_norm_fwd(x, [problem.cols], None, None, 0.0)
    variance = x.double().var(1, correction=0, keepdim=True)
    assert (rstd * variance.sqrt() - 1).abs().max() < 5e-7


@pytest.mark.parametrize("column", [0, 61])
@pytest.mark.parametrize("problem", [problem for problem in FAR if problem.cols <= 1536], ids=str)
def test_a_row_with_an_infinity_is_nan_and_others_are_as_without_it(problem, column):
    x = torch.randn(problem.rows, problem.cols, generator=torch.Generator().manual_seed(0))
    with simulated("H200", problem.sms), fusednorm.force(problem.variant):
        want = torch.ops.fusednorm.layer_norm_fwd(x, [problem.cols], None, None, EPS)
        x[1, column] = torch.inf
        y, mean, rstd = torch.ops.fusednorm.layer_norm_fwd(x, [problem.cols], None, None, EPS)
    assert y[1].isnan().all() and rstd[1].isnan().all() and not mean[1].isfinite().any()
    for got, before in zip((y, mean, rstd), want, strict=True):
        assert torch.equal(got[0], before[0]) and torch.equal(got[2:], before[2:])


@pytest.fixture
def of_size(monkeypatch, size):
    """Of the rings, only those over clusters of this size are planned."""
    cached = choice.choices, choice.best_plan

    def some(variant, *call):
        plans = candidates(variant, *call)
        return tuple(plan for plan in plans if plan.cluster == size) if variant == "pipelined" else plans

    monkeypatch.setattr(choice, "candidates", some)
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


@pytest.mark.parametrize("problem, size", [*zip(CLUSTERS, (2, 4, 8, 16, 2), strict=True)], ids=str)
def test_a_cluster_is_of_as_many_ctas_as_planned_and_its_outputs_are_the_oracles(problem, size, of_size):
    outputs, simulation = problem.simulate()
    problem.check(outputs)
    assert [each.cluster for each in simulation.launched] == [size]


@pytest.mark.parametrize("problem", ORDERED, ids=str)
def test_bits_are_the_same_in_every_order_and_however_few_ctas_have_a_place(problem):
    first, _ = problem.simulate()
    problem.check(first)
    for seed in range(1, SEEDS):
        outputs, _ = problem.simulate(seed=100 * seed, resident=(None, 1, 2, 3)[seed % 4])
        assert bits(outputs) == bits(first), seed


def test_a_norm_from_outside_runs_on_a_ring():
    x = torch.randn(20, 200, dtype=BF16, requires_grad=True)
    weight, dy = torch.randn(200, requires_grad=True), torch.randn(20, 200)
    with squared(), simulated("H200", 2) as simulation, fusednorm.force("pipelined"):
        y, rstd = torch.ops.fusednorm.rms_norm_fwd_squared(x, [200], weight, EPS)
        got = torch.autograd.grad(y, (x, weight), dy.to(BF16))
    want = F.rms_norm(x.double(), (200,), weight.double() ** 2, EPS)
    torch.testing.assert_close(y.double(), want, rtol=1e-2, atol=1e-5)
    for each, exact in zip(got, torch.autograd.grad(want, (x, weight), dy.to(BF16).double()), strict=True):
        torch.testing.assert_close(each.double(), exact.double(), rtol=1e-2, atol=1e-2)
    assert [each.name for each in simulation.launched] == ["forward", "backward", "finalize"]
