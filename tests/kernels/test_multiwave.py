"""The Triton kernels, in Triton's interpreter, against float64 autograd.

Buffers hold NaN at first, with margins of NaN around them (see guarded_buffers): stray reads and writes fail.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from cases import (
    BF16,
    EPS,
    FP16,
    FP32,
    FP64,
    LAYOUTS,
    MIXED_DTYPES,
    NORMS,
    SAME_DTYPES,
    STATISTIC_LAYOUTS,
    TROUBLED_ROWS,
    guarded_buffers,
    lay_out,
    make_case,
    rotate,
    statistic_layouts,
)
from planning import num_ctas

from fusednorm.host import gpus
from fusednorm.operands import BackwardOperands, ForwardOperands
from fusednorm.planner import choice
from fusednorm.planner.device import A100
from fusednorm.planner.plan import ColumnTilePlan, MultiWavePlan
from fusednorm.problem.calls import BackwardCall, ForwardCall, check_backward, check_forward
from fusednorm.tools.oracle import Case, Inputs, Outputs, assert_outputs_close, make_inputs

# It has few SMs, so that a CTA walks over several row tiles of a small tensor. On arch 80 the planner chooses no Gluon
# kernels, which the interpreter cannot run.
SMALL_GPU = replace(A100, sm_count=3)

ALL_OUTPUTS = (True, True, True)


@pytest.fixture(autouse=True)
def plans_for_a_small_gpu(monkeypatch):
    monkeypatch.setattr(gpus, "spec_of", lambda device: SMALL_GPU)


def forward_call(case: Case, inputs: Inputs, **options) -> ForwardCall:
    shape = case.normalized_shape
    return check_forward(ForwardOperands(case.norm, inputs.x, shape, inputs.weight, inputs.bias, case.eps, **options))


def backward_call(case: Case, inputs: Inputs, mean, rstd, mask=ALL_OUTPUTS) -> BackwardCall:
    operands = inputs.grad_out, inputs.x, case.normalized_shape, mean, rstd, inputs.weight, inputs.bias, mask
    return check_backward(BackwardOperands(case.norm, *operands))


def launched(call, plan):
    """The outputs of a call, once its kernels have run."""
    from fusednorm.host import launch

    with guarded_buffers() as buffers:
        launches, outputs = launch.on_tensors(call, plan)[:2]
        assert len(buffers) >= len([output for output in outputs if output is not None])
        for each in launches:
            each.run()
    return outputs


def run_forward(case: Case, inputs: Inputs, plan=None):
    return launched(forward_call(case, inputs), plan)


def run_backward(case: Case, inputs: Inputs, mean, rstd, plan=None, mask=ALL_OUTPUTS):
    return launched(backward_call(case, inputs, mean, rstd, mask), plan)


def run(case: Case, inputs: Inputs, forward_plan=None, backward_plan=None) -> Outputs:
    y, mean, rstd = run_forward(case, inputs, forward_plan)
    return Outputs(y, mean, rstd, *run_backward(case, inputs, mean, rstd, backward_plan))


def planned(case: Case, inputs: Inputs) -> list:
    rstd = torch.ones(case.rows)
    mean = rstd if case.norm == "layer" else None
    calls = forward_call(case, inputs), backward_call(case, inputs, mean, rstd)
    return [choice.choose(call.problem, call.rows, SMALL_GPU) for call in calls]


SHAPES = [  # rows, cols
    *((TROUBLED_ROWS, 1), (TROUBLED_ROWS, 3), (TROUBLED_ROWS, 32)),
    *((1, 32), (2, 1), (37, 96), (25, 576), (11, 1023), (7, 1600), (7, 1987), (5, 4096)),
]


@pytest.mark.parametrize("case", rotate(SHAPES, SAME_DTYPES + MIXED_DTYPES[:5]), ids=str)
def test_outputs_match_fp64_autograd_as_planned(case):
    inputs = make_inputs(case)
    assert_outputs_close(run(case, inputs), case, inputs)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtypes", SAME_DTYPES + MIXED_DTYPES, ids=lambda mix: "-".join(str(d)[6:] for d in mix))
def test_every_mix_of_dtypes_matches_fp64_autograd(norm, dtypes):
    case = make_case(norm, (23, 41), dtypes)
    inputs = make_inputs(case)
    assert_outputs_close(run(case, inputs), case, inputs)


WIDE_CASES = [make_case("rms", (3, 20001), (BF16, None, BF16)), make_case("layer", (2, 10242), (FP64, None, FP64))]


@pytest.mark.parametrize("case", WIDE_CASES, ids=str)
def test_rows_that_fit_no_registers_go_by_column_tiles(case):
    inputs = make_inputs(case)
    assert all(isinstance(plan, ColumnTilePlan) for plan in planned(case, inputs))
    assert_outputs_close(run(case, inputs), case, inputs)


TILES = [  # rows_per_tile, chunk, num_chunks, cols
    (1, 16, 1, 16),
    (1, 16, 1, 9),
    (2, 16, 3, 33),
    (4, 32, 2, 63),
    (4, 8, 8, 57),
    (8, 1, 3, 3),
    (16, 4, 1, 3),
    (2, 64, 5, 300),
    (64, 2, 1, 2),
    (4, 1, 1, 1),
]
COLUMN_TILES = [  # rows_per_tile, chunk, row_pass_chunk, cols
    (1, 16, 32, 50),
    (4, 16, 16, 16),
    (2, 32, 64, 33),
    (8, 64, 128, 200),
    (1, 16, 64, 1),
]
TILED = [(MultiWavePlan(*tile, num_warps=4, ctas_per_sm=2, max_registers=128), cols) for *tile, cols in TILES]
TILED += [(ColumnTilePlan(rows, chunk, 4, 2, of_pass, 8), cols) for rows, chunk, of_pass, cols in COLUMN_TILES]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("plan, cols", TILED, ids=str)
def test_every_tile_shape_serves_ragged_rows_and_columns(norm, plan, cols, rows):
    case = make_case(norm, (rows, cols), SAME_DTYPES[(rows + cols) % 4])
    inputs = make_inputs(case)
    assert_outputs_close(run(case, inputs, plan, plan), case, inputs)


PLANS = {
    "rows in registers": MultiWavePlan(4, 32, 2, 4, 2, 128),
    "column tiles": ColumnTilePlan(4, 16, 4, 2, 64, 8),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_read_where_they_lie(layout, plan):
    case = make_case("layer", (LAYOUTS[layout][0], 5, 3, 48), (FP32, FP32, FP32))
    inputs = lay_out(make_inputs(case), layout)
    assert_outputs_close(run(case, inputs, plan, plan), case, inputs)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("cols, x_stride, grad_stride", [(40, 40, 40), (40, 44, 40), (40, 40, 42), (36, 41, 40)])
def test_rows_may_be_apart_by_what_their_length_is_no_multiple_of(norm, plan, cols, x_stride, grad_stride):
    case = make_case(norm, (9, cols), (BF16, BF16, BF16))
    inputs = make_inputs(case)
    x, grad_out = (
        torch.full((9, stride), float("nan"), dtype=BF16)[:, :cols].copy_(tensor)
        for tensor, stride in ((inputs.x, x_stride), (inputs.grad_out, grad_stride))
    )
    inputs = replace(inputs, x=x, grad_out=grad_out)
    assert_outputs_close(run(case, inputs, plan, plan), case, inputs)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_forward_without_statistics_has_the_same_y_and_writes_nothing_else(norm, plan):
    from fusednorm.host import launch

    case = make_case(norm, (9, 48))
    inputs = make_inputs(case)
    call = forward_call(case, inputs, wants_statistics=False)
    with guarded_buffers() as buffers:
        prepared = launch.on_tensors(call, plan)
        for each in prepared.launches:
            each.run()
    assert len(buffers) == 1
    assert prepared.outputs[1:] == (None, None)
    assert torch.equal(prepared.outputs[0], run_forward(case, inputs, plan)[0])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rows", [1, 8, 13])
@pytest.mark.parametrize("rows_per_tile", [1, 4])
def test_a_forward_by_ctas_of_one_row_tile_each_has_the_same_bits(norm, rows, rows_per_tile):
    case = make_case(norm, (rows, 1000), (BF16, FP32, BF16))
    inputs, plan = make_inputs(case), MultiWavePlan(rows_per_tile, 1024, 1, 4, 2, 255)
    short_lived = replace(plan, short_lived=True)
    assert num_ctas(short_lived, rows, 1000, SMALL_GPU) == -(-rows // rows_per_tile)
    for got, want in zip(run_forward(case, inputs, short_lived), run_forward(case, inputs, plan), strict=True):
        assert got is want is None or torch.equal(got, want)


@pytest.mark.parametrize("shape", [(1, 7, 6, 8), (7, 1, 6, 8), (7, 6, 1, 8), (1, 1, 6, 8), (7, 6, 8, 1)], ids=str)
def test_dims_of_size_one_stand_anywhere(shape):
    case = make_case("layer", shape, (FP32, FP32, FP32), normalized_ndim=2)
    inputs = make_inputs(case)
    assert_outputs_close(run(case, inputs), case, inputs)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("norm", NORMS)
def test_statistics_are_read_in_every_layout_and_dtype(norm, plan):
    case = make_case(norm, (13, 40), (BF16, FP32, BF16))
    inputs = make_inputs(case)
    _, mean, rstd = run_forward(case, inputs)
    for dtype in (FP32, BF16, FP16, FP64):
        rounded = [None if statistic is None else statistic.to(dtype) for statistic in (mean, rstd)]
        want = run_backward(case, inputs, *(None if s is None else s.to(FP32) for s in rounded), plan)
        means, rstds = ({} if s is None else statistic_layouts(s) for s in rounded)
        for of_mean, of_rstd in STATISTIC_LAYOUTS if dtype == FP32 else STATISTIC_LAYOUTS[1:2]:
            got = run_backward(case, inputs, means.get(of_mean), rstds[of_rstd], plan)
            same = [torch.equal(a, b) for a, b in zip(got, want, strict=True) if b is not None]
            assert all(same), (of_mean, of_rstd, dtype)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("norm", NORMS)
def test_masked_outputs_are_none_and_the_others_what_they_are_without_a_mask(norm, plan):
    case = make_case(norm, (13, 40), (FP32, FP32, FP32))
    inputs = make_inputs(case)
    _, mean, rstd = run_forward(case, inputs)
    for mask in itertools.product((True, False), repeat=3):
        if not any(mask) or (not mask[0] and isinstance(plan, MultiWavePlan)):
            continue
        outputs = run_backward(case, inputs, mean, rstd, plan, mask)
        exists = (True, True, norm == "layer")
        assert [o is not None for o in outputs] == [m and e for m, e in zip(mask, exists, strict=True)]
        assert_outputs_close(Outputs(None, None, None, *outputs), case, inputs)


@pytest.mark.parametrize("norm", NORMS)
def test_a_backward_without_dx_is_planned_as_one_that_needs_no_row_sums(norm):
    from fusednorm.host import launch

    case = make_case(norm, (40, 96), (BF16, FP32, BF16))
    inputs = make_inputs(case)
    _, mean, rstd = run_forward(case, inputs)
    outputs = run_backward(case, inputs, mean, rstd, mask=(False, True, True))
    assert_outputs_close(Outputs(None, None, None, *outputs), case, inputs)
    assert len(launch.on_tensors(backward_call(case, inputs, mean, rstd, (False, True, True)))[0]) == 2


@pytest.mark.parametrize("mask", [ALL_OUTPUTS, (True, True, False), (True, False, True), (True, False, False)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP64], ids=str)
def test_a_backward_of_rows_too_wide_for_registers_is_two_launches(dtype, mask):
    from fusednorm.host import launch

    case = make_case("layer", (30, 100), (dtype, FP32, dtype))
    inputs = make_inputs(case)
    _, mean, rstd = run_forward(case, inputs)
    plan = ColumnTilePlan(4, 16, 4, 2, 64, 8)
    assert len(launch.on_tensors(backward_call(case, inputs, mean, rstd, mask), plan).launches) == 2
    assert_outputs_close(Outputs(None, None, None, *run_backward(case, inputs, mean, rstd, plan, mask)), case, inputs)


@pytest.mark.parametrize("weight, bias", [(None, FP32), (FP32, None), (None, None), (FP16, FP64)], ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_absent_and_unlike_parameters(weight, bias, plan):
    case = Case("layer", (13, 40), x_dtype=BF16, weight_dtype=weight, bias_dtype=bias, eps=EPS)
    inputs = make_inputs(case)
    outputs = run(case, inputs, plan, plan)
    assert (outputs.dweight is None, outputs.dbias is None) == (weight is None, bias is None)
    assert_outputs_close(outputs, case, inputs)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("shift", [1e4, -3e4])
def test_layer_norm_of_rows_far_from_zero_stays_accurate(plan, shift):
    case = make_case("layer", (40, 61), (FP32, FP32, FP32))
    inputs = make_inputs(case)
    inputs = replace(inputs, x=inputs.x / 1.5 + shift)
    assert_outputs_close(run(case, inputs, plan, plan), case, inputs)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("norm", NORMS)
def test_constant_and_zero_rows_have_finite_gradients(norm, plan):
    case = make_case(norm, (5, 64), (FP32, FP32, FP32))
    inputs = make_inputs(case)
    inputs.x[1], inputs.x[3] = 0.0, 0.75
    assert_outputs_close(run(case, inputs, plan, plan), case, inputs)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_nan_stays_in_its_row_and_in_the_column_sums(norm, plan):
    case = make_case(norm, (9, 50), (FP32, FP32, FP32))
    inputs = make_inputs(case)
    clean = run(case, inputs, plan, plan)
    inputs = replace(inputs, x=inputs.x.clone())
    inputs.x[4, 7] = float("nan")
    outputs = run(case, inputs, plan, plan)
    others = torch.arange(9) != 4
    for got, want in ((outputs.y, clean.y), (outputs.dx, clean.dx), (outputs.rstd, clean.rstd)):
        assert got[4].isnan().all() and torch.equal(got[others], want[others])
    assert outputs.dweight.isnan().all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_row_comes_out_the_same_whatever_rows_surround_it(norm):
    case = make_case(norm, (41, 96), (BF16, FP32, BF16))
    inputs = make_inputs(case)
    everything = run(case, inputs)
    part = slice(17, 26)
    some = run(replace(case, shape=(9, 96)), replace(inputs, x=inputs.x[part], grad_out=inputs.grad_out[part]))
    for name in ("y", "mean", "rstd", "dx"):
        if getattr(some, name) is not None:
            assert torch.equal(getattr(some, name), getattr(everything, name)[part]), name


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rows", [1, 5])
def test_ctas_without_rows_leave_no_partials(norm, rows):
    """More CTAs are launched here than there are row tiles: the extra CTAs must not write partials."""
    from fusednorm.host import launch

    case = make_case(norm, (rows, 96), (FP32, FP32, FP32))
    inputs = make_inputs(case)
    want = run(case, inputs)
    call = backward_call(case, inputs, want.mean, want.rstd)
    with guarded_buffers():  # the buffer of partials has no rows for the extra CTAs
        launches, (_, *got) = launch.on_tensors(call, MultiWavePlan(2, 128, 1, 4, 1, 255))[:2]
        replace(launches[0], grid=(8,)).run()
        launches[1].run()
    assert_outputs_close(replace(want, dweight=got[0], dbias=got[1]), case, inputs)


@pytest.mark.parametrize("num_partials", [1, 2, 63, 64, 65, 200])
def test_finalizer_sums_any_number_of_partials(num_partials):
    from fusednorm.host import launch

    case = make_case("layer", (num_partials * 8, 33), (FP32, FP32, FP32))
    inputs = make_inputs(case)
    statistic = torch.ones(case.rows)
    *_, finalize = launch.on_tensors(backward_call(case, inputs, statistic, statistic))[0]
    partial, out = inputs.grad_out.view(num_partials, 8, 33).sum(1), torch.full((2, 33), float("nan"))
    replace(finalize, operands=(partial, partial * 2, *out, num_partials, 33, None)).run()
    assert_outputs_close(Outputs(dbias=out[0]), case, inputs)
    assert_outputs_close(Outputs(dbias=out[1] / 2), case, inputs)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dx_dtype", [None, FP32], ids=str)
def test_a_residual_gradient_of_any_strides_is_added_before_dx_is_rounded(norm, plan, dx_dtype):
    case = make_case(norm, (13, 40), (BF16, FP32, BF16))
    inputs, residual = make_inputs(case), torch.randn(40, 13).t()
    _, mean, rstd = run_forward(case, inputs)
    operands = inputs.grad_out, inputs.x, case.normalized_shape, mean, rstd, inputs.weight, inputs.bias, ALL_OUTPUTS
    calls = (check_backward(BackwardOperands(norm, *operands, *more)) for more in ((None, FP32), (residual, dx_dtype)))
    plain, got = (launched(call, plan)[0] for call in calls)
    torch.testing.assert_close(got, (plain + residual).to(dx_dtype or BF16), rtol=1e-6 if dx_dtype else 8e-3, atol=1e-6)
