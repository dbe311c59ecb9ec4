"""The kernels of qk_norm in Triton's interpreter, against float64 autograd. Buffers hold NaN at first, with margins of
NaN around them (see guarded_buffers): stray reads and writes fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import guarded_buffers
from head_norms import BF16, CASES, FP16, FP32, FP64, HeadCase, assert_errs_no_more_than_plain_code, gradients
from torch import Tensor
from torch.testing import assert_close

import fusednorm
from fusednorm.heads import ops
from fusednorm.heads import plan as head_plan
from fusednorm.heads.problem import Packing, rows_of
from fusednorm.host import gpus
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.planner.device import A100

pytest.importorskip("triton")
SMALL_GPU = replace(A100, sm_count=1)


@pytest.fixture(autouse=True)
def kernels_for_a_small_gpu(monkeypatch):
    """Few CTAs, so that each walks over several row tiles; no formula in place of a kernel."""
    monkeypatch.setattr(gpus, "spec_of", lambda device: SMALL_GPU)
    monkeypatch.setattr(head_plan, "NUM_WARPS", 1)
    monkeypatch.setattr(ops.Call, "formula", None)
    head_plan.choose.cache_clear()
    with kernels_on("cpu"), guarded_buffers():
        yield
    head_plan.choose.cache_clear()


@pytest.mark.parametrize("dtypes", [(FP64, FP64), (BF16, FP32), (FP32, FP16)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_match_float64_autograd(case, dtypes):
    case = replace(case, dtype=dtypes[0], weight_dtype=dtypes[1], tokens=23)
    given = case.tensors()
    assert_errs_no_more_than_plain_code(case, given, case.run(given))
