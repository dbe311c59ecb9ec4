"""Modulated norms in C++: modulations are read in place, and have gradients, for any number of samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from norm_forms import FP32, FP64, composite, gradients, run
from tables import BACKWARDS, FORWARDS, Table
from torch.testing import assert_close

from fusednorm import ada_layer_norm, batch_invariant
from fusednorm.operands import FORM_OPS, call_op

COLS = 24


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP32)


def given(op, samples: int, rows: int) -> dict[str, torch.Tensor | None]:
    """Scale and gate by sample as slices, and a shift by row. Of a norm behind a layer the gate is the scale."""
    packed, shape = draw(samples, 6, COLS, seed=1), (samples, rows, COLS)
    tensors = {"x": draw(*shape, seed=2), "residual": draw(*shape, seed=3), "shift": draw(*shape, seed=4)}
    tensors |= {"scale": packed[:, 1], "gate": packed[:, 2:3]}
    names = {slot.name for slot in op.inputs}
    names = names - {"scale"} | {"gate"} if op.form.finish else names
    return {name: each for name, each in tensors.items() if name in names} | {
        "weight": draw(COLS, seed=5),
        "bias": None,
    }


MODULATED = [op for op in FORM_OPS if op.form.modulate]


@pytest.mark.parametrize("op", MODULATED, ids=lambda op: op.name)
def test_forwards_are_right_by_python_and_when_repeated_for_more_samples(op, gpu):
    for samples in (2, 3):
        tensors = given(op, samples, 5)
        with torch.no_grad(), gpu.repeating() if samples == 3 else gpu.going_to_python("forward"):
            got = run(op, tensors)
        exact = {name: None if each is None else each.double() for name, each in tensors.items()}
        for ours, right in zip(got, composite(op, exact), strict=True):
            assert_close(ours, right.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("op", MODULATED, ids=lambda op: op.name)
def test_gradients_are_right_by_python_and_when_repeated_for_more_samples(op, gpu):
    for samples, rows in ((2, 5), (3, 5), (2, 7), (4, 7)):
        tensors = given(op, samples, rows)
        tensors = {name: each if each is None else each.detach().requires_grad_() for name, each in tensors.items()}
        is_new = samples == 2
        with gpu.going_to_python("forward", "backward") if is_new else gpu.repeating(2):
            got = gradients(run(op, tensors), tensors)
        exact = {name: None if each is None else each.detach().double() for name, each in tensors.items()}
        exact = {name: each if each is None else each.requires_grad_() for name, each in exact.items()}
        for ours, right in zip(got, gradients(composite(op, exact), exact), strict=True):
            assert_close(ours, right.float(), atol=1e-4, rtol=1e-4)


def test_many_samples_have_a_backward_of_their_own_which_is_repeated(gpu):
    for samples in (2, 8, 9, 3):
        scale, shift = (draw(samples, 1, COLS, seed=seed).requires_grad_() for seed in (1, 2))
        x = draw(samples, 5, COLS, seed=5).requires_grad_()
        leaves = {"x": x, "scale": scale, "shift": shift}
        y = ada_layer_norm(x, scale, shift)
        with gpu.going_to_python("backward") if samples in (2, 8) else gpu.repeating():
            got = gradients((y,), leaves)
        normalized = torch.nn.functional.layer_norm(x, (COLS,), eps=1e-6)
        want = gradients((normalized * (1 + scale) + shift,), leaves)
        for ours, right in zip(got, want, strict=True):
            assert_close(ours, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("op", MODULATED, ids=lambda op: op.name)
def test_slices_of_modulations_are_right_under_batch_invariant_in_every_call(op, gpu):
    for seed in range(3):
        tensors = {name: each if each is None else each + seed for name, each in given(op, 2, 5).items()}
        packed = draw(2, 6, COLS, seed=seed)
        tensors |= {name: packed[:, at] for at, name in enumerate(("scale", "gate")) if name in tensors}
        leaves, exact = (
            {name: each if each is None else each.detach().to(dtype).requires_grad_() for name, each in tensors.items()}
            for dtype in (FP32, FP64)
        )
        with batch_invariant():
            got = gradients(run(op, leaves), leaves)
        for ours, right in zip(got, gradients(composite(op, exact), exact), strict=True):
            assert_close(ours, right.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("op", MODULATED[:1], ids=lambda op: op.name)
def test_slices_of_modulations_are_copied_without_python_under_batch_invariant(op, gpu):
    with torch.no_grad(), batch_invariant():
        run(op, given(op, 2, 5))
        with gpu.repeating():
            got = run(op, tensors := given(op, 3, 5))
    exact = {name: None if each is None else each.double() for name, each in tensors.items()}
    assert_close(got[0], composite(op, exact)[0].float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("op", MODULATED, ids=lambda op: op.name)
def test_other_modulations_of_the_same_x_are_other_calls(op, gpu):
    tensors = given(op, 2, 5)
    name = "gate" if op.form.finish else "scale"
    with torch.no_grad():
        run(op, tensors)
        for shape in ((COLS,), (2, 5, COLS), (1, 5, COLS)):
            changed = tensors | {name: draw(*shape, seed=6)}
            with gpu.going_to_python("forward"):
                got = run(op, changed)
            exact = {name: None if each is None else each.double() for name, each in changed.items()}
            assert_close(got[0], composite(op, exact)[0].float(), atol=1e-4, rtol=1e-4)
        wrong = tensors | {name: draw(4, COLS, seed=6)}
        with pytest.raises(RuntimeError, match="scale must have shape"):
            run(op, wrong)


def run_table(operands):
    return call_op(getattr(torch.ops.fusednorm, operands.op).default, operands)


@pytest.mark.parametrize("table", [*FORWARDS, *BACKWARDS], ids=str)
def test_norms_with_tables_are_repeated_for_other_rows(table, gpu):
    direction = "backward" if table.backward else "forward"
    with gpu.going_to_python(direction):
        table.check(run_table(table.operands))
    other = replace(table, rows=table.rows + 2 * (not table.nested))  # on which one of two nested strides depends
    with gpu.repeating():
        other.check(run_table(other.operands))


def test_gradients_of_tables_are_those_of_rows_that_torch_gathers(gpu):
    for nth in range(2):
        tables, index = draw(4, 3, COLS, seed=nth), torch.arange(10).view(2, 5) % 4
        tables.requires_grad_()
        x = draw(2, 5, COLS, seed=5 + nth).requires_grad_()
        scale, shift, _ = tables.unbind(1)
        with gpu.repeating(2) if nth else gpu.going_to_python("forward", "backward"):
            got = gradients((ada_layer_norm(x, scale, shift, index=index),), {"x": x, "tables": tables})
        want = gradients((ada_layer_norm(x, scale[index], shift[index]),), {"x": x, "tables": tables})
        for ours, right in zip(got, want, strict=True):
            assert_close(ours, right, atol=1e-5, rtol=1e-4)


def test_other_tables_and_indices_are_other_calls(gpu):
    table = Table("layer", "", 5, 64, modulation=FP32)
    operands = table.operands
    run_table(operands)
    index = operands.row_index
    for changes in ({"row_index": index.int()}, {"scale": operands.scale.clone()}, {"x": operands.x[:, 1:]}):
        changed = operands._replace(**changes | ({"row_index": index[:, 1:]} if "x" in changes else {}))
        with gpu.going_to_python("forward"):
            run_table(changed)
    with gpu.repeating():  # of a copy
        table.check(run_table(operands._replace(row_index=index.t().contiguous().t())))
    wrong = {"row_index": (index[1:], "index must have int32"), "scale": (operands.scale[1:], "shift must have")}
    for name, (value, text) in wrong.items():
        with pytest.raises(RuntimeError, match=text):
            run_table(operands._replace(**{name: value}))


def test_tables_without_adjacent_columns_are_copied_by_python_in_every_call(gpu):
    table = Table("layer", "", 5, 64)
    operands = table.operands
    for _ in range(2):
        with gpu.going_to_python("forward"):
            table.check(run_table(operands._replace(scale=operands.scale.t().contiguous().t())))


def test_ordered_sums_of_all_gradients_of_tables_and_parameters_are_repeated(gpu):
    table = Table("layer", "_of_gated_sum", 5, 40, parameters=FP32, backward=True)
    with batch_invariant(ordered_sums=8):
        run_table(table.operands)
        with gpu.repeating():
            table.check(run_table(table.operands))


def test_tables_are_read_from_copies_under_batch_invariant(gpu):
    table = Table("layer", "", 5, 64)
    with batch_invariant():
        run_table(table.operands)
        with gpu.repeating():
            table.check(run_table(table.operands))
