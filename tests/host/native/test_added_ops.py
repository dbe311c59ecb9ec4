"""Ops that are added to the table run in both hosts, without a line of C++: a norm of other formulas, and one with more
row tensors in and out."""

import functools

import formulas
import pytest
import torch
from fake_gpu import miss_of
from norms import EPS, OPS, SHAPE, norms, operands
from squared import squared
from torch.testing import assert_close

from fusednorm import autograd, ops
from fusednorm.forms import FormSpec
from fusednorm.host import prepared
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.operands import (
    DEFAULT_EPS,
    DWEIGHT_,
    DX_,
    GRAD_OUT,
    MASK,
    RSTD,
    RSTD_,
    WANTS_STATISTICS,
    WEIGHT,
    Y_,
    Op,
    Output,
    Role,
    Slot,
    X,
    op_outputs,
    operands_of,
)
from fusednorm.operands import (
    SHAPE as NORMALIZED_SHAPE,
)

RESIDUAL = Slot("residual", Role.ROWS)
SUM, SUM_GRAD = Slot("new_residual", Role.ROWS), Slot("new_residual_grad", Role.ROWS, optional=True)
FORWARD = Op(
    "rms",
    "forward",
    (X, NORMALIZED_SHAPE, RESIDUAL, WEIGHT, DEFAULT_EPS, WANTS_STATISTICS),
    (Y_, RSTD_, Output("new_residual", Role.ROWS, gradient="new_residual_grad")),
    suffix="_of_toy_sum",
    form=FormSpec(combine="add"),
)
BACKWARD = Op(
    "rms",
    "backward",
    (GRAD_OUT, X, NORMALIZED_SHAPE, RSTD, SUM, WEIGHT, SUM_GRAD, MASK),
    (DX_, DWEIGHT_, Output("dresidual", Role.ROWS, like="new_residual")),
    suffix="_of_toy_sum",
    form=None,
)


def forward_formula(x, normalized_shape, residual, weight, eps=None):
    return *formulas.rms_norm(x + residual, normalized_shape, weight, eps), x + residual


def backward_formula(
    grad_out, x, normalized_shape, rstd, new_residual, weight, new_residual_grad, output_mask=(True, True, True)
):
    dx, dw, _ = formulas.norm_backward(
        grad_out, new_residual, normalized_shape, None, rstd, weight, None, (True, True, False), new_residual_grad
    )
    return tuple(each if wanted else None for each, wanted in zip((dx, dw, dx), output_mask, strict=True))


@functools.cache
def add_sum() -> None:
    autograd.add(FORWARD, forward_formula)
    autograd.add(BACKWARD, backward_formula)


@pytest.fixture
def of_sum():
    """The op of the normalized sum."""
    add_sum()
    return OPS.rms_norm_fwd_of_toy_sum


def in_python(name, *arguments):
    """The outputs of a call that the Python host repeats."""
    run = prepared_run
    given = operands_of(name, arguments, {})
    with kernels_on("cpu"):
        ops.first(given, miss_of(given))
        outputs, program = run(given)
    assert program is not None
    return op_outputs(name, outputs)


prepared_run = prepared.run


@norms
def test_a_norm_of_other_formulas_runs_in_both_hosts(norm, gpu):
    with squared():
        forward = getattr(OPS, f"{norm}_norm_fwd_squared")
        for seed in (0, 1):
            x, *parameters = [each for each in operands(norm, seed=seed) if each is not None]
            wanted_y = wanted = getattr(torch.nn.functional, f"{norm}_norm")(
                x, SHAPE[-1:], parameters[0].square(), *parameters[1:], eps=EPS
            )
            with gpu.repeating(2) if seed else gpu.going_to_python("forward", "backward"):
                y, *_ = forward(x, SHAPE[-1:], *parameters, EPS)
                got = torch.autograd.grad(y.sin().sum(), (x, *parameters))
            wanted = torch.autograd.grad(wanted_y.sin().sum(), (x, *parameters))
            assert_close((y, *got), (wanted_y, *wanted), atol=1e-4, rtol=1e-4)
            arguments = x.detach(), SHAPE[-1:], *[each.detach() for each in parameters], EPS
            assert_close(in_python(f"{norm}_norm_fwd_squared", *arguments)[0], wanted_y.detach(), atol=1e-4, rtol=1e-4)


def test_an_op_with_more_row_tensors_runs_in_both_hosts(of_sum, gpu):
    for rows in (6, 6, 9):
        generator = torch.Generator().manual_seed(rows)
        x, residual = (torch.randn(rows, 48, generator=generator)[:, :40] for _ in range(2))
        weight = torch.randn(40, generator=generator)
        asked = len(gpu.python_calls)
        outputs = of_sum(x, [40], residual, weight, EPS)
        first = asked == 0
        assert len(gpu.python_calls) - asked == first
        wanted = forward_formula(x, (40,), residual, weight, EPS)
        assert_close(outputs, wanted, atol=1e-5, rtol=1e-5)
        assert_close(
            in_python("rms_norm_fwd_of_toy_sum", x, (40,), residual, weight, EPS), wanted, atol=1e-5, rtol=1e-5
        )


def test_rows_of_another_shape_or_layout_are_no_repetition(of_sum, gpu):
    x, residual, weight = torch.randn(6, 40), torch.randn(6, 40), torch.randn(40)
    of_sum(x, [40], residual, weight, EPS)
    for other in (torch.randn(6, 48)[:, :40], residual.double()):
        with gpu.going_to_python("forward"):
            outputs = of_sum(x, [40], other, weight, EPS)
        assert_close(
            outputs[0], forward_formula(x, (40,), other, weight, EPS)[0], atol=1e-5, rtol=1e-5, check_dtype=False
        )
    with gpu.repeating():  # of a copy
        y, *_ = of_sum(x, [40], residual.t().contiguous().t(), weight, EPS)
    assert_close(y, forward_formula(x, (40,), residual, weight, EPS)[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(RuntimeError, match="residual must have shape"):
        of_sum(x, [40], residual[:5], weight, EPS)


@pytest.mark.parametrize("without", ["", "y", "sum"])
def test_its_node_calls_its_backward_with_all_gradients(without, of_sum, gpu):
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        leaves = [torch.randn(size, generator=generator, requires_grad=True) for size in (SHAPE, SHAPE, SHAPE[-1:])]
        found = []
        for op in (of_sum, forward_formula):
            x, residual, weight = leaves
            y, _, total = op(x, [40], residual, weight, EPS)
            loss = (without != "y") * y.sin().sum() + (without != "sum") * total.cos().sum()
            found.append(torch.autograd.grad(loss, leaves, allow_unused=True))
            assert op is forward_formula or y.grad_fn.name() == "NormBackward"
        assert_close(*found, atol=1e-4, rtol=1e-4)
