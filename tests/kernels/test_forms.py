"""A norm can come from outside the package: here y = x_hat * weight^2 + bias, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import guarded_buffers

from fusednorm import reference
from fusednorm.host import gpus
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.planner import choice
from fusednorm.planner.device import A100
from fusednorm.planner.plan import ColumnTilePlan, MultiWavePlan

pytest.importorskip("triton")
SMALL_GPU = replace(A100, sm_count=3)
IN_REGISTERS, BY_COLUMN_TILES = MultiWavePlan(2, 32, 3, 4, 1, 255), ColumnTilePlan(4, 32, 4, 1, 64, 4)
ROWS, COLS, EPS = 13, 77, 1e-5
OPS = torch.ops.fusednorm


@pytest.fixture(autouse=True)
def squared_on_a_small_gpu(monkeypatch):
    from squared import squared

    monkeypatch.setattr(gpus, "spec_of", lambda device: SMALL_GPU)
    with squared():
        yield


def given(norm):
    torch.manual_seed(0)
    tensors = torch.randn(ROWS, COLS), torch.randn(COLS), torch.randn(COLS)
    return [each.double().requires_grad_() for each in tensors[: 3 if norm == "layer" else 2]]


def y_of(norm, x, *parameters):
    return getattr(OPS, f"{norm}_norm_fwd_squared")(x, [COLS], *parameters, EPS)[0]


def wanted_y(norm, x, weight, *bias):
    return getattr(F, f"{norm}_norm")(x, (COLS,), weight**2, *bias, eps=EPS)


def assert_derivatives_close(y, wanted, of):
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
    dy = torch.randn_like(y)
    got, want = (torch.autograd.grad(each, of, dy) for each in (y, wanted))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("plan, wants_dx", [(IN_REGISTERS, True), (BY_COLUMN_TILES, True), (BY_COLUMN_TILES, False)])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_norm_from_outside_runs_our_kernels_forward_and_backward(norm, plan, wants_dx, monkeypatch):
    monkeypatch.setattr(choice, "choices", lambda *_: ((2**31, plan),))
    tensors = given(norm)
    monkeypatch.setattr(reference, "run", None)
    with kernels_on("cpu"), guarded_buffers():
        assert_derivatives_close(y_of(norm, *tensors), wanted_y(norm, *tensors), tensors[0 if wants_dx else 1 :])


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_it_is_differentiated_twice_and_compiled(norm, monkeypatch):
    tensors, op = given(norm), getattr(OPS, f"{norm}_norm_fwd_squared").default
    torch.library.opcheck(op, (tensors[0], [COLS], *tensors[1:], EPS))
    torch.autograd.gradgradcheck(lambda *each: y_of(norm, *each), tensors, fast_mode=True)
    monkeypatch.setattr(reference, "run", None)
    with kernels_on("cpu"):
        compiled = torch.compile(y_of, backend="aot_eager", fullgraph=True)(norm, *tensors)
        assert_derivatives_close(compiled, wanted_y(norm, *tensors), tensors)


def test_adding_it_takes_fewer_than_60_lines():
    assert len((Path(__file__).parents[1] / "squared.py").read_text().splitlines()) < 60
