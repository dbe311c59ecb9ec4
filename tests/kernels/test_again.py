"""A norm behind a layer and the next one in one kernel, in Triton's interpreter: the bits are those of two kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import BF16, EPS, FP16, FP32, FP64, guarded_buffers, packed_slice, row_strided

import fusednorm
from fusednorm import reference
from fusednorm.host import gpus, launch
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.operands import in_two, operands_of
from fusednorm.ops import run
from fusednorm.planner import choice
from fusednorm.planner.device import A100, H200
from fusednorm.planner.norm_problem import NormProblem
from fusednorm.planner.plan import MultiWavePlan
from fusednorm.problem.calls import check_forward

pytest.importorskip("triton")
PLANS = MultiWavePlan(2, 32, 3, 4, 1, 255), MultiWavePlan(1, 64, 2, 4, 1, 255, True)
ROWS, COLS = 13, 77
CASES = [  # x, residual, parameters, how the residual lies
    (BF16, BF16, BF16, None),
    (BF16, FP32, FP32, row_strided),
    (FP16, FP16, None, packed_slice),
    (FP32, FP32, FP16, None),
    (FP64, FP64, FP64, None),
    (FP16, BF16, BF16, None),
]


@pytest.fixture
def on_a_small_gpu(monkeypatch):
    monkeypatch.setattr(gpus, "spec_of", lambda device: replace(A100, sm_count=3))
    monkeypatch.setattr(reference, "run", None)
    with kernels_on("cpu"), guarded_buffers():
        yield


def operands(norm, x, residual, parameters, layout=None, **settings):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(ROWS, COLS, generator=generator, dtype=FP64).to(each) for each in (x, residual)]
    rows[1] = layout(rows[1].view(1, ROWS, 1, COLS)).view(ROWS, COLS) if layout else rows[1]
    names = "weight", "bias", "next_weight", "next_bias"
    made = {name: torch.randn(COLS, generator=generator, dtype=FP64) for name in names} if parameters else {}
    made = {name: each.to(parameters) for name, each in made.items()}
    given = dict(zip(("x", "residual"), rows, strict=True)) | made | {"normalized_shape": (COLS,), "eps": EPS}
    return operands_of(f"{norm}_norm_fwd_plus_residual_norm", (), given | settings)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_two_kernels(case, norm, plan, monkeypatch, on_a_small_gpu):
    monkeypatch.setattr(choice, "choices", lambda *_: ((2**31, plan),))
    for rounds in (False, True):
        given = operands(norm, *case, weight_offset=1.0, rounds_x_hat=rounds)
        outputs, want = run(given), in_two(given, run)
        assert len(launch.on_tensors(check_forward(given)).launches) == 1
        for ours, theirs in zip(outputs, want, strict=True):
            assert theirs is ours is None or (ours.dtype is theirs.dtype and torch.equal(ours, theirs))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_function_runs_one_kernel_forward(norm, monkeypatch, on_a_small_gpu):
    monkeypatch.setattr(choice, "choices", lambda *_: ((2**31, PLANS[0]),))
    given = operands(norm, FP32, FP32, FP32)
    tensors = given.x, given.residual, given.weight, given.next_weight, given.bias, given.next_bias
    function, launched = getattr(fusednorm, f"{norm}_norm_add_{norm}_norm"), []
    monkeypatch.setattr(launch, "program_of", _noting(launch.program_of, launched))
    exact = in_two(given._replace(**{name: getattr(given, name).double() for name in given.tensor_names}), _formula)
    for leaves in (tensors, [each.clone().requires_grad_() for each in tensors]):
        launched.clear()
        y, h = function(*leaves, EPS)
        assert launched == [f"{norm}_norm forward"]
        torch.testing.assert_close((h.double(), y.double()), (exact[0], exact[3]), rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((y, h), leaves, (y.detach(), h.detach()))
    assert len(launched) == 3 and all(each.isfinite().all() for each in grads)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(("case", "settings"), [
    ((FP32, FP64, BF16), {}), ((FP16, FP32, FP32), {"y_dtype": FP64}), ((FP64, FP64, FP64), {"y_dtype": FP32}),
])  # fmt: skip
def test_rows_are_normalized_again_in_the_dtype_that_they_have_then(case, settings, norm, on_a_small_gpu):
    given = operands(norm, *case, rounds_x_hat=True, **settings)
    outputs, want = run(given), in_two(given, run)
    assert outputs[0].dtype is settings.get("y_dtype", FP64)
    for ours, theirs in zip(outputs, want, strict=True):
        assert theirs is ours is None or (ours.dtype is theirs.dtype and torch.equal(ours, theirs))


def test_rows_that_registers_do_not_hold_for_two_ctas_of_an_sm_are_two_calls():
    for cols, variant in ((4096, "multi_wave"), (10240, "multi_wave"), (16384, "reference"), (2**18, "reference")):
        form = operands("rms", BF16, BF16, BF16).form
        rows = {"rows_in": (BF16,), "names_in": ("residual",), "rows_out": (BF16,)}
        problem = NormProblem("rms", "forward", cols, BF16, BF16, form=form, **rows)
        for forced in (None, "pipelined"):
            assert choice.choose(problem, 4096, H200, forced).variant == variant


def _formula(operands):
    return reference.formula(operands)


def _noting(build, found):
    def noting(call, *given):
        found.append(call.problem.title)
        return build(call, *given)

    return noting
