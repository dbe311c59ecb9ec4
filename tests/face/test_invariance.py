"""fusednorm.batch_invariant: a row's bits are its own, whatever comes with it. Triton's interpreter runs the portable
kernels here; tests/kernels/simulated/test_invariant_rows.py runs compiled ones."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import pytest
import torch
from cases import BF16, FP16, FP32, row_strided, unaligned
from devices import planned_for
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import make_gated, make_problem, make_sum

import fusednorm
from fusednorm import batch_invariant
from fusednorm.host import fallback
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.operands import OPS as OPERANDS
from fusednorm.operands import operands_of
from fusednorm.planner import legality
from fusednorm.planner.device import A100, H100, H200, KNOWN
from fusednorm.planner.plan import ReferencePlan
from fusednorm.problem.calls import check, check_forward
from fusednorm.settings import invariance
from tests.fuzz.draw import FAMILY, draw

OPS = torch.ops.fusednorm


def is_invariant() -> bool:
    return bool(invariance.switch.invariance())


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert not is_invariant()
    batch_invariant._entries.clear()


def test_a_block_holds_until_it_ends_and_a_call_until_the_next_in_all_threads():
    seen = []
    with batch_invariant():
        thread = threading.Thread(target=lambda: seen.append(is_invariant()))
        thread.start()
        thread.join()
        with batch_invariant(False):
            seen.append(is_invariant())
    seen.append(is_invariant())
    batch_invariant(True)
    seen.append(is_invariant())
    batch_invariant(False)
    assert seen == [True, False, False, True]


def test_what_is_no_bool_is_refused_in_one_sentence():
    with pytest.raises(TypeError, match="^batch_invariant: on must be a bool, got int$"):
        batch_invariant(1)


# --- Plans ---


CALLS = st.lists(st.tuples(st.integers(1, 2**20), st.integers(1, 132), st.booleans()), min_size=2, max_size=4)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(KNOWN),
    st.sampled_from(["layer", "rms"]),
    st.integers(1, 70_000),
    st.sampled_from(["bf16", "fp32"]),
    st.sampled_from(["forward", "backward"]),
    CALLS,
)
def test_a_plan_follows_from_columns_dtypes_and_architecture_alone(device, norm, cols, dtype, direction, calls):
    problem = make_problem(norm, cols, dtype, direction=direction)
    chosen = set()
    with batch_invariant():
        for rows, sms, frozen in calls:
            asked = replace(problem, wants_dw=False, wants_db=False) if frozen else problem
            chosen.add(fallback.choose(asked, rows, replace(device, name="another", sm_count=sms)).plan)
    assert len(chosen) == 1


def test_without_it_the_number_of_rows_matters():
    plans = {fallback.choose(make_problem("layer", 4096), rows, H200).plan for rows in (1, 100, 10_000)}
    assert len(plans) > 1


def test_a_plan_that_fails_gives_way_to_one_for_all_numbers_of_rows():
    problem = make_problem("layer", 4096)
    with batch_invariant(), pytest.warns(RuntimeWarning, match="another kernel"):
        first = fallback.choose(problem, 100, H200)
        fallback.remember(first.plan, problem, H200, "for this test")
        found = {fallback.choose(problem, rows, H200) for rows in (1, 100, 10_000)}
    fallback.forget()
    assert len(found) == 1 and first.plan not in {each.plan for each in found}


def test_explain_says_what_is_copied():
    x = torch.empty(64, 8192, device="meta")[:, :4096]
    with batch_invariant():
        said = fusednorm.explain(x, (4096,), device=H100)
    assert "x is copied first: rows are batch-invariant" in str(said) and not isinstance(said.plan, ReferencePlan)


# --- Bits ---


def rows_of(outputs, at: list[int]) -> list[bytes]:
    """The bytes of these rows of all outputs that have rows."""
    picked = [each.flatten(0, -2)[at] for each in outputs if each is not None]
    return [each.contiguous().view(torch.uint8).numpy().tobytes() for each in picked]


LAYOUTS = {"contiguous": lambda tensor: tensor, "row_strided": row_strided, "unaligned": unaligned}


@st.composite
def packings(draw):
    """(norm, columns, dtype, rows of the whole, which of them the other call has, layouts, SMs)."""
    rows = draw(st.integers(1, 24))
    some = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=24))
    layouts = [draw(st.sampled_from([*LAYOUTS])) for _ in range(2)]
    cols = draw(st.sampled_from([1, 3, 40, 100, 256, 1000, 1027]))
    norm, dtype = draw(st.sampled_from(["layer", "rms"])), draw(st.sampled_from([BF16, FP16, FP32]))
    return norm, cols, dtype, rows, some, layouts, draw(st.sampled_from([1, 3, 16]))


def forward(norm, x, weight, bias):
    if norm == "layer":
        return OPS.layer_norm_fwd(x, x.shape[-1:], weight, bias, 1e-5)
    return OPS.rms_norm_fwd(x, x.shape[-1:], weight, 1e-5)


def backward(norm, grad, x, statistics, weight, bias, mask):
    if norm == "layer":
        return OPS.layer_norm_bwd(grad, x, x.shape[-1:], *statistics, weight, bias, mask)
    return OPS.rms_norm_bwd(grad, x, x.shape[-1:], *statistics, weight, mask[:2])


@settings(deadline=None, max_examples=24)
@given(packings())
def test_a_row_has_the_same_bits_in_every_packing(packing):
    norm, cols, dtype, rows, some, (of_x, of_grad), sms = packing
    generator = torch.Generator().manual_seed(cols)
    x, grad = (torch.randn(rows, cols, generator=generator, dtype=FP32).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(cols, generator=generator).to(dtype) for _ in range(2))
    with kernels_on("cpu"), batch_invariant():
        with planned_for(replace(A100, sm_count=16)):
            whole = forward(norm, x, weight, bias)
            grads = backward(norm, grad, x, whole[1:], weight, bias, (True, True, True))
        with planned_for(replace(A100, sm_count=sms)):
            x, grad = LAYOUTS[of_x](x[some]), LAYOUTS[of_grad](grad[some])
            part = forward(norm, x, LAYOUTS[of_x](weight), bias)
            part_grads = backward(norm, grad, x, part[1:], weight, bias, (True, False, False))
    everything = [*range(len(some))]
    assert rows_of(part, everything) == rows_of(whole, some)
    assert rows_of(part_grads[:1], everything) == rows_of(grads[:1], some)


def test_a_backward_does_as_its_forward_did():
    x = torch.randn(4, 256, requires_grad=True)
    seen = []
    asked = fallback.asked

    def watched(problem, rows, device):
        seen.append((problem.direction, is_invariant()))
        return asked(problem, rows, device)

    for first, then in ((True, False), (False, True)):
        with kernels_on("cpu"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(fallback, "asked", watched)
            with batch_invariant(first):
                y = fusednorm.functional.add_layer_norm(x, x.detach(), normalized_shape=(256,))[0]
            with batch_invariant(then):
                y.backward(torch.ones_like(y))
        assert {direction for direction, _ in seen} == {"forward", "backward"}
        assert {invariant for _, invariant in seen} == {first}
        seen.clear()


@pytest.mark.parametrize("shape", [(3, 1, 24), (3, 24)])
def test_the_gradient_of_a_slice_of_modulations_has_the_shape_of_the_slice(shape):
    x, table = torch.randn(3, 4, 24), torch.randn(3, 6, 24)
    scale, shift, gate = (table[:, at].view(shape).requires_grad_() for at in range(3))
    found = []
    for on in (False, True):
        with kernels_on("cpu"), planned_for(A100), batch_invariant(on):
            outputs = fusednorm.ada_layer_norm(x, scale, shift, residual=x, gate=gate)
            found.append(torch.autograd.grad(sum(each.sin().sum() for each in outputs), [scale, shift, gate]))
    for own, free in zip(*found, strict=True):
        torch.testing.assert_close(own, free)


def test_a_modulation_is_read_in_place_and_gives_the_bits_of_one_for_each_row():
    x, scale, shift = torch.randn(3, 4, 24), *torch.randn(2, 3, 1, 24)
    operands = operands_of("layer_norm_fwd_modulated", (), {"x": x, "normalized_shape": (24,), "scale": scale})
    with kernels_on("cpu"), planned_for(A100), batch_invariant():
        (read,) = [each.value for each in check_forward(operands).added if each.name == "scale"]
        assert read.tensor.data_ptr() == scale.data_ptr() and read.inner_rows == 4
        whole = fusednorm.ada_layer_norm(x, scale, shift)
        alone = fusednorm.ada_layer_norm(x[1:2, 2:3], scale[1:2], shift[1:2])
        of_rows = fusednorm.ada_layer_norm(x, *[each.expand(3, 4, 24).contiguous() for each in (scale, shift)])
    assert torch.equal(of_rows, whole) and torch.equal(alone, whole[1:2, 2:3])


@pytest.mark.parametrize("variant", [None, "pipelined"])
@pytest.mark.parametrize("form", ["modulated", "of_gated_sum_modulated"])
def test_a_sample_alone_has_the_plan_that_it_has_among_others_and_it_can_run(form, variant):
    plans = set()
    for samples in (1, 4):
        x, modulation = torch.empty(samples, 300, 1152, device="meta"), torch.empty(samples, 1, 1152, device="meta")
        given = {"x": x, "normalized_shape": (1152,), "scale": modulation, "shift": modulation}
        given |= {"residual": x, "gate": modulation} if form != "modulated" else {}
        with batch_invariant(), (fusednorm.force(variant) if variant else contextlib.nullcontext()):
            call = check_forward(operands_of(f"layer_norm_fwd_{form}", (), given))
            plans.add(fallback.choose(call.problem, call.rows, H200).plan)
        assert legality.broken_rule([*plans][-1].variant, call.problem, call.rows, H200) is None
    assert len(plans) == 1


def test_forms_are_covered():
    gated = make_gated("rms", 1000)
    without_that_of_the_gate = replace(gated, stored=(0,), rows_out=())
    with batch_invariant():
        for problems in ([make_sum("rms", 1000)], [gated, without_that_of_the_gate]):
            plans = {fallback.choose(each, rows, H200).plan for each in problems for rows in (1, 1000, 10**6)}
            assert len(plans) == 1


@pytest.mark.parametrize("op", [op for op in OPERANDS if OPERANDS[op].form is not None])
def test_every_op_has_one_plan_for_all_numbers_of_rows(op):
    drawn = (draw(at * FAMILY, 1, 300) for at in range(2000))
    with_rows = (each for each in drawn if each.op == op and each.given.get("output_mask", [True])[0])
    call = next(each for each in with_rows if 0 not in each.shape)
    operands = operands_of(op, (), call.arguments("cpu"))
    with batch_invariant():
        checked = check(operands)
        assert not checked.problem.nested_rows or checked.problem.form.modulate
        assert len({fallback.choose(checked.problem, rows, H200).plan for rows in (1, 1000, 10**6)}) == 1
