"""Properties that hold for all values, tested with hypothesis on random ones.

They have a file of their own, because the other tests in this folder run without hypothesis.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_problem import gather_rows

import fusednorm  # noqa: F401  registers the ops
from fusednorm.planner import limits
from fusednorm.planner.device import A100, H200, RTX_5090
from fusednorm.planner.plan import MOST_CTAS, ColumnTilePlan, MultiWavePlan
from fusednorm.problem.rows import row_view

pytest.importorskip("hypothesis", reason="the extra `test` brings hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from planning import num_ctas  # noqa: E402

OPS = torch.ops.fusednorm
SMALL_GPU = replace(A100, sm_count=3)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_row_view_reads_every_row_of_any_strided_tensor(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4), "shape")
    base = [size * data.draw(st.integers(1, 2), "room") for size in shape]
    tensor = torch.arange(torch.Size(base).numel(), dtype=torch.float32).reshape(base)
    tensor = tensor[
        tuple(slice(0, size * step, step) for size, step in zip(shape, _steps(data, shape, base), strict=True))
    ]
    batch_ndim = data.draw(st.integers(0, tensor.dim() - 1), "batch_ndim")
    tensor = tensor.permute(*data.draw(st.permutations(range(batch_ndim))), *range(batch_ndim, tensor.dim()))
    view = row_view(tensor, batch_ndim)
    if view is not None:
        rows = tensor.flatten(0, batch_ndim - 1) if batch_ndim else tensor[None]
        rows = rows.flatten(1)
        assert torch.equal(gather_rows(view, *rows.shape), rows)


def _steps(data, shape, base):
    return [data.draw(st.integers(1, have // size), "step") for size, have in zip(shape, base, strict=True)]


@given(
    rows=st.integers(1, 1 << 22) | st.integers(1, 2000),
    rows_per_tile=st.sampled_from([1, 2, 4, 8, 64]),
    ctas_per_sm=st.integers(1, 16),
    spec=st.sampled_from([A100, H200, RTX_5090, SMALL_GPU]),
)
def test_no_cta_is_idle_and_each_that_shares_an_sm_has_two_tiles(rows, rows_per_tile, ctas_per_sm, spec):
    plan = MultiWavePlan(rows_per_tile, 128, 1, 4, ctas_per_sm, 128)
    tiles, ctas = -(-rows // rows_per_tile), num_ctas(plan, rows, 128, spec)
    assert 1 <= ctas <= min(tiles, spec.sm_count * ctas_per_sm)
    assert ctas <= max(spec.sm_count, tiles // 2)
    if rows >= 8 * rows_per_tile * spec.sm_count * ctas_per_sm:
        assert ctas == spec.sm_count * ctas_per_sm


@given(
    rows=st.integers(1, 1 << 23) | st.integers(1, 1 << 40),
    rows_per_tile=st.sampled_from([1, 2, 64]),
    ctas_per_sm=st.integers(1, 16),
    spec=st.sampled_from([A100, H200, RTX_5090, SMALL_GPU]),
)
def test_no_float32_sum_has_more_terms_than_its_bound_allows(rows, rows_per_tile, ctas_per_sm, spec):
    plan = MultiWavePlan(rows_per_tile, 128, 1, 4, ctas_per_sm, 128)
    tiles, at_once = -(-rows // rows_per_tile), num_ctas(plan, rows, 128, spec)
    ctas = num_ctas(plan, rows, 128, spec, float32_sums=True)
    assert at_once <= ctas <= min(tiles, MOST_CTAS)
    if -(-tiles // at_once) <= 2 * limits.most_tiles_of_sum:
        assert ctas == at_once, "the CTAs of two turns would not share SMs equally"
    else:
        assert ctas % at_once == 0 or ctas == tiles, "all waves are full"
        assert -(-tiles // ctas) <= limits.most_tiles_of_sum or ctas + at_once > MOST_CTAS
    ctas, without = (num_ctas(plan, rows, 128, spec.leaving(1), float32_sums=sums) for sums in (True, False))
    assert ctas == without, "a margin stays free"


@given(rows=st.integers(1, 1 << 20), cols=st.integers(1, 1 << 18), rows_per_tile=st.sampled_from([1, 4]))
def test_column_tiles_and_row_tiles_together_fill_the_gpu_once(rows, cols, rows_per_tile):
    plan = ColumnTilePlan(rows_per_tile, 1024, 4, 4, 4096, 8)
    ctas, column_tiles = num_ctas(plan, rows, cols, H200), -(-cols // 1024)
    assert 1 <= ctas <= -(-rows // rows_per_tile)
    assert ctas == 1 or ctas * column_tiles <= H200.sm_count * 4


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_ops_give_the_same_wherever_their_tensors_lie(data):
    batch = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2), "batch")
    normalized = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=2), "normalized")
    norm = data.draw(st.sampled_from(["layer", "rms"]), "norm")
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]), "dtype")
    statistic = [*batch, *[1] * len(normalized)]

    def tensor(shape, optional=False):
        return None if optional and data.draw(st.booleans(), "None") else torch.rand(shape, dtype=dtype) + 0.5

    x, weight, bias = tensor(batch + normalized), tensor(normalized, optional=True), tensor(normalized, optional=True)
    grad_out, mean, rstd = tensor(batch + normalized), tensor(statistic), tensor(statistic)
    residual_grad = tensor(batch + normalized, optional=True)

    def outputs(x, weight, bias, grad_out, mean, rstd, residual_grad):
        if norm == "layer":
            given = grad_out, x, normalized, mean, rstd, weight, bias, residual_grad
            return *OPS.layer_norm_fwd(x, normalized, weight, bias), *OPS.layer_norm_bwd_residual(*given)
        given = grad_out, x, normalized, rstd, weight, bias, residual_grad
        return *OPS.rms_norm_fwd(x, normalized, weight), *OPS.rms_norm_bwd_residual(*given)

    tensors = x, weight, bias, grad_out, mean, rstd, residual_grad
    want, got = outputs(*tensors), outputs(*(each if each is None else _moved(data, each) for each in tensors))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def _moved(data, tensor):
    """The same values at other strides, with NaN between them."""
    order = data.draw(st.permutations(range(tensor.dim())), "order")
    steps = [data.draw(st.integers(1, 3), "step") for _ in order]
    sizes = [tensor.shape[dim] * step for dim, step in zip(order, steps, strict=True)]
    memory = tensor.new_full(sizes, float("nan"))[tuple(slice(None, None, step) for step in steps)]
    return memory.permute([order.index(dim) for dim in range(tensor.dim())]).copy_(tensor)
