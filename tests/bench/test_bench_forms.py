"""bench.forms without a GPU: what it times computes the same, and its floor moves what a form moves."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from bench import forms
from bench.written import of_op
from fusednorm.operands import Role, operands_of
from fusednorm.problem.calls import check_forward

BF16, FP32 = torch.bfloat16, torch.float32


def case(norm, form, residual=FP32):
    return forms.FormCase(norm, form, 6, 40, BF16, residual, 1.0, samples=2)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(
    "form, table",
    [*itertools.product(forms.FORM_NAMES, [0]), ("modulated", 3), ("of_gated_sum_modulated", 3)],
)
@pytest.mark.parametrize("rounding", ["once", "x_hat"])
def test_ours_is_what_is_written_out(norm, form, table, rounding):
    of = replace(case(norm, form), table=table, rounding=rounding)
    given = of.inputs("cpu")
    generator = torch.Generator().manual_seed(0)
    grads = tuple(torch.randn(each.shape, generator=generator) for each in forms.written(of, given))
    exact = forms.written_in_pieces(of, given, grads, wide=True)
    ours, least = (
        forms.errors_of(forms.all_of(lambda each, run=run: run(of, each), given, grads), exact)
        for run in (forms.ours, forms.written)
    )
    assert all(error <= forms.FACTOR * max(most, 2**-9) for error, most in zip(ours, least, strict=True))


def test_a_rounded_x_hat_has_the_bits_of_what_is_written_out():
    once, rounded = case("rms", "affine"), replace(case("rms", "affine"), rounding="x_hat")
    given = once.inputs("cpu")
    (y,), (same,), (other,) = forms.ours(rounded, given), forms.written(rounded, given), forms.written(once, given)
    assert torch.equal(y, same) and not torch.equal(y, other) and rounded.fields != once.fields
    assert {"quack", "fla"}.isdisjoint(forms.candidates(rounded))


@pytest.mark.parametrize(
    "form, samples, table",
    [*itertools.product(["plus_residual", "of_gated_sum_modulated"], [2, 6], [0]), ("of_gated_sum_modulated", 2, 4)],
)
def test_float64_in_pieces_is_the_same(form, samples, table, monkeypatch):
    of = replace(case("layer", form), samples=samples, table=table)
    given = of.inputs("cpu")
    grads = tuple(torch.randn(each.shape) for each in forms.written(of, given))
    whole = forms.written_in_pieces(of, given, grads, wide=True)
    monkeypatch.setattr(forms, "PIECE", 100)
    assert all(each.dtype == torch.float64 for each in whole)
    torch.testing.assert_close(forms.written_in_pieces(of, given, grads, wide=True), whole)


@pytest.mark.parametrize("form", ["of_gated", "times_gate"])
def test_a_projection_has_one_gradient_and_its_other_columns_are_counted(form, monkeypatch):
    of, moved = replace(case("rms", form), packed=True), []
    given = of.inputs("cpu")
    x, gate, rest = given["projection"].detach().chunk(3, -1)
    outputs = forms.ours(of, given)
    assert list(given) == ["projection", "weight"] and torch.equal(outputs[1], rest)
    expected = forms.ours(case("rms", form), {"x": x, "gate": gate, "weight": given["weight"]})
    torch.testing.assert_close(outputs[0], expected[0])
    torch.testing.assert_close(forms.written(of, given), outputs, rtol=2e-2, atol=2e-2)
    monkeypatch.setattr(forms, "stream", {(1,): lambda reads, writes, *_, **__: moved.append((reads, writes))})
    forms.floors(of, given, outputs)["both"]()
    assert [(len(reads), len(writes)) for reads, writes in moved] == [(2, 1), (4, 3)]
    assert all(each.is_contiguous() and each.shape == x.shape for of_it in moved for part in of_it for each in part)


@pytest.mark.parametrize("form", [form for form in forms.FORM_NAMES if form != forms.SANDWICH])
def test_a_floor_moves_the_rows_that_the_planner_counts(form, monkeypatch):
    of, moved = case("rms", form), []
    monkeypatch.setattr(forms, "stream", {(1,): lambda reads, writes, *_, **__: moved.append((reads, writes))})
    given = of.inputs("cpu")
    outputs = forms.written(of, given)
    forms.floors(of, given, outputs)["both"]()
    problem = check_forward(operands_of(of.op.name, (), {"normalized_shape": (40,)} | of_op(of.op, given))).problem
    (reads, writes), (back_reads, back_writes) = moved
    rows = zip(problem.names_in, problem.rows_in, strict=True)
    modulations = {slot.name for slot in of.op.inputs if slot.role is Role.MODULATION}
    assert [each.dtype for each in reads[1:]] == [dtype for name, dtype in rows if name not in modulations]
    assert [each.dtype for each in writes[1:]] == list(problem.rows_out)
    gated = "gated_sum" in form or "gate" in of.rows_in
    assert len(back_reads) == 2 + len(problem.rows_out) + gated and len(back_writes) == 1 + gated + (form == "of_sum")
    assert of.op.form.rows_in == len(reads) - 1


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_sandwich_is_two_ops_over_the_floor_of_one(norm, monkeypatch):
    of, moved = case(norm, forms.SANDWICH, BF16), []
    given = of.inputs("cpu")
    monkeypatch.setattr(forms, "stream", {(1,): lambda reads, writes, *_, **__: moved.append((reads, writes))})
    outputs = forms.ours(of, given)
    torch.testing.assert_close(forms.plain(of, given), outputs, rtol=2e-2, atol=2e-2)
    forms.floors(of, given, outputs)["both"]()
    assert [(len(reads), len(writes)) for reads, writes in moved] == [(2, 2), (4, 2)]


@pytest.mark.parametrize("form", ["modulated", "of_gated_sum_modulated"])
def test_a_modulation_of_each_row_is_large(form, monkeypatch):
    of, moved = replace(case("rms", form, BF16), samples=6), []
    given = of.inputs("cpu")
    outputs = forms.ours(of, given)
    torch.testing.assert_close(forms.written(of, given), outputs, rtol=2e-2, atol=2e-2)
    monkeypatch.setattr(forms, "stream", {(1,): lambda reads, writes, *_, **__: moved.append((reads, writes))})
    forms.floors(of, given, outputs)["both"]()
    counts = [(3, 1), (3, 3)] if form == "modulated" else [(5, 2), (6, 5)]
    assert [(len(reads), len(writes)) for reads, writes in moved] == counts
    assert all(each.numel() == 6 * 40 for of_it in moved for part in of_it for each in part)


def test_options_are_combined_for_forms_that_have_them():
    text = "--shapes 8x64 --norms rms --forms affine of_gated modulated --samples 2 0 --modulation-dtype bf16 fp32 "
    text += "--rounding x_hat"
    cases = list(forms.make_cases(forms.parse([*text.split(), "--group-size", "16", "32"])))
    groups, modulations = cases[:3], [(each.samples, each.modulation_dtype) for each in cases[3:]]
    assert [(each.form, each.group_size) for each in groups] == [("affine", None), ("of_gated", 16), ("of_gated", 32)]
    assert {each.rounding for each in cases} == {"x_hat"}
    assert modulations == [(2, BF16), (2, FP32), (8, BF16), (8, FP32)]
