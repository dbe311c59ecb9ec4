"""A call becomes a problem: its tensors are read as rows in place, and the problem holds all that plans depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BF16, FP32

from fusednorm.operands import BackwardOperands, ForwardOperands
from fusednorm.planner.norm_problem import NormProblem
from fusednorm.problem.calls import check_backward, check_forward
from fusednorm.problem.rows import is_tma_aligned, row_view


def gather_rows(view, rows, cols):
    """Read a RowView as a kernel does: by element offsets from the first element."""
    row = torch.arange(rows)
    starts = (row // view.inner_rows) * view.outer_stride + (row % view.inner_rows) * view.inner_stride
    flat = view.tensor.as_strided((view.tensor.untyped_storage().nbytes() // view.tensor.element_size(),), (1,), 0)
    return flat[view.tensor.storage_offset() + starts[:, None] + torch.arange(cols)]


def backward_call(x, grad_out=None, normalized_ndim=1, mean=None, rstd=None, **overrides):
    shape = x.shape[x.dim() - normalized_ndim :]
    rstd = torch.ones(x.shape[: x.dim() - normalized_ndim]) if rstd is None else rstd
    mean = rstd if mean is None else mean
    grad_out = torch.ones(x.shape, dtype=x.dtype) if grad_out is None else grad_out
    arguments = {"weight": torch.ones(shape), "bias": torch.ones(shape), "output_mask": (True, True, True)} | overrides
    return check_backward(BackwardOperands("layer", grad_out, x, shape, mean, rstd, **arguments))


@pytest.mark.parametrize(
    ("tensor", "batch_ndim", "inner_rows", "outer_stride", "inner_stride"),
    [
        (torch.zeros(5, 7), 1, 1, 7, 0),
        (torch.zeros(2, 3, 5, 7), 2, 1, 35, 0),
        (torch.zeros(7), 0, 1, 7, 0),
        (torch.zeros(5, 9)[:, 1:8], 1, 1, 9, 0),
        (torch.zeros(5, 9)[::2, :7], 1, 1, 18, 0),
        (torch.zeros(3, 5, 7).transpose(0, 1), 2, 3, 7, 35),
        (torch.zeros(2, 4, 3 * 8)[..., 8:16].unflatten(-1, (2, 4)), 3, 2, 24, 4),
        (torch.zeros(7).expand(5, 7), 1, 1, 0, 0),
        (torch.zeros(5, 1, 7).expand(5, 3, 7), 2, 3, 7, 0),
        (torch.zeros(3, 1, 9)[..., :7].transpose(0, 1), 2, 1, 9, 0),
        (torch.zeros(4, 1, 7)[:, :, :5], 1, 1, 7, 0),
    ],
)
def test_row_view_describes_rows_at_one_or_two_strides(tensor, batch_ndim, inner_rows, outer_stride, inner_stride):
    view = row_view(tensor, batch_ndim)
    assert view.tensor is tensor
    assert (view.inner_rows, view.outer_stride, view.inner_stride) == (inner_rows, outer_stride, inner_stride)


@pytest.mark.parametrize(
    ("tensor", "batch_ndim"),
    [
        (torch.zeros(5, 14)[:, ::2], 1),
        (torch.zeros(1).expand(5, 7), 1),
        (torch.zeros(7, 5).t(), 1),
        (torch.zeros(5, 7, 3).transpose(1, 2), 1),
        (torch.zeros(3, 5, 9)[..., :7], 1),
        (torch.zeros(4, 3, 2, 7).permute(2, 1, 0, 3), 3),
    ],
)
def test_row_view_is_none_where_only_a_copy_would_do(tensor, batch_ndim):
    assert row_view(tensor, batch_ndim) is None


@pytest.mark.parametrize(
    ("tensor", "aligned"),
    [
        (torch.zeros(5, 8), True),
        (torch.zeros(5, 7), False),
        (torch.zeros(5, 12)[:, 4:], True),
        (torch.zeros(5, 12)[:, 3:11], False),
        (torch.zeros(5, 11)[:, :8], False),
        (torch.zeros(8).expand(5, 8), True),
        (torch.zeros(5, 8, dtype=torch.bfloat16), True),
        (torch.zeros(5, 4, dtype=torch.bfloat16), False),
        (torch.zeros(3, 5, 8)[..., :4].transpose(0, 1), True),
        (torch.zeros(3, 5, 6)[..., :4].transpose(0, 1), False),
    ],
)
def test_tma_alignment_needs_base_row_and_strides_at_sixteen_bytes(tensor, aligned):
    assert is_tma_aligned(row_view(tensor, tensor.dim() - 1), tensor.shape[-1]) is aligned


def test_forward_call_reads_a_packed_slice_in_place():
    qkv = torch.randn(4, 6, 3 * 16)
    query = qkv[..., :16].unflatten(-1, (2, 8))
    call = check_forward(ForwardOperands("rms", query, (8,), torch.ones(8), None, None))
    assert call.x.tensor is query
    assert (call.rows, call.problem.cols, call.problem.nested_rows) == (48, 8, True)
    assert torch.equal(gather_rows(call.x, 48, 8), query.reshape(48, 8))


def test_forward_call_copies_once_what_strides_cannot_describe():
    x = torch.randn(5, 14)[:, ::2]
    call = check_forward(ForwardOperands("layer", x, (7,), None, None, 1e-5))
    assert call.x.tensor.is_contiguous() and torch.equal(call.x.tensor, x)
    assert not call.problem.nested_rows


def test_parameters_arrive_contiguous():
    weight, bias = torch.randn(2, 7).t()[:, 0], torch.randn(14)[::2]
    call = check_forward(ForwardOperands("layer", torch.randn(5, 7), (7,), weight, bias, 1e-5))
    assert call.weight.is_contiguous() and call.bias.is_contiguous()
    assert torch.equal(call.weight, weight) and torch.equal(call.bias, bias)
    assert backward_call(torch.randn(5, 7), weight=bias).weight.is_contiguous()


@pytest.mark.parametrize(
    ("x_dtype", "eps", "resolved"),
    [
        (torch.bfloat16, None, torch.finfo(torch.float32).eps),
        (torch.float32, None, torch.finfo(torch.float32).eps),
        (torch.float64, None, torch.finfo(torch.float64).eps),
        (torch.float32, -0.5, -0.5),
    ],
)
def test_eps_none_is_the_epsilon_of_the_accumulation_dtype(x_dtype, eps, resolved):
    assert check_forward(ForwardOperands("rms", torch.ones(5, 7, dtype=x_dtype), (7,), None, None, eps)).eps == resolved


@pytest.mark.parametrize("shape", [(6,), (6, 1), (2, 3, 1), (1, 6)])
def test_backward_call_flattens_statistics_of_any_shape(shape):
    rstd = torch.arange(6.0).reshape(shape)
    call = backward_call(torch.randn(2, 3, 7), rstd=rstd)
    assert call.rows == 6
    assert torch.equal(call.rstd, torch.arange(6.0)) and torch.equal(call.mean, torch.arange(6.0))


def test_backward_call_keeps_the_stride_of_strided_statistics():
    rstd = torch.randn(6, 3)[:, :1]
    call = backward_call(torch.randn(6, 7), rstd=rstd)
    assert call.rstd.shape == (6,) and call.rstd.stride() == (3,) and call.rstd.data_ptr() == rstd.data_ptr()


def test_backward_call_wants_no_gradient_of_an_absent_parameter():
    x = torch.randn(5, 7)
    assert _wants(backward_call(x)) == (True, True, True)
    assert _wants(backward_call(x, weight=None)) == (True, False, True)
    assert _wants(backward_call(x, bias=None)) == (True, True, False)
    assert _wants(backward_call(x, output_mask=(False, True, False))) == (False, True, False)


def _wants(call):
    return call.problem.wants_dx, call.problem.wants_dw, call.problem.wants_db


def test_backward_problem_depends_on_every_tensor_that_is_read():
    x, grad_out = torch.randn(3, 5, 8), torch.randn(5, 3, 8, dtype=torch.float64).transpose(0, 1)
    problem = backward_call(x, grad_out).problem
    assert problem.nested_rows and problem.grad_dtype == torch.float64 and problem.tma_aligned
    assert not backward_call(x, torch.randn(3, 5, 9)[..., 1:]).problem.tma_aligned
    assert not backward_call(torch.randn(3, 5, 9)[..., 1:]).problem.tma_aligned


def test_equal_calls_have_equal_problems_whatever_their_row_count():
    first, second = (
        check_forward(ForwardOperands("rms", torch.randn(rows, 8), (8,), None, None, 1e-6)) for rows in (3, 500)
    )
    assert first.problem == second.problem and hash(first.problem) == hash(second.problem)
    other = check_forward(ForwardOperands("rms", torch.randn(3, 16), (16,), None, None, 1e-6))
    assert other.problem != first.problem


@pytest.mark.parametrize("wanted, is_bound", [(torch.float64, True), (FP32, True), (BF16, False)], ids=str)
def test_a_float32_sum_is_bound_where_its_output_shows_its_errors(wanted, is_bound):
    problem = NormProblem("rms", "backward", 128, FP32, weight_dtype=wanted, wants_dw=True)
    assert problem.wants_float32_sum == is_bound
    assert not replace(problem, wants_dw=False).wants_float32_sum
    assert not replace(problem, x_dtype=torch.float64).wants_float32_sum, "sums are float64"
