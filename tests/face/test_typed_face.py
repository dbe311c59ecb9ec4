"""The types of the public functions: mypy checks the calls below in `make lint`, and pytest runs them."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import fusednorm
from fusednorm import functional
from fusednorm.columns.explanation import ColumnSumExplanation
from fusednorm.heads.explanation import HeadExplanation
from fusednorm.integrations import inductor
from fusednorm.integrations.models import Patch
from fusednorm.planner.device import H200
from fusednorm.tools import oracle
from fusednorm.tools.explanation import Explanation


def test_calls_of_tensors_give_tensors() -> None:
    x, weight, bias = torch.randn(4, 8, requires_grad=True), torch.ones(8), torch.zeros(8)
    assert_type(functional.layer_norm(x, (8,), weight, bias, eps=1e-5), Tensor)
    assert_type(functional.rms_norm(x, [8], weight, eps=None), Tensor)
    assert_type(fusednorm.column_sum([x, x], total=True, dtype=torch.float64), list[Tensor])
    assert_type(fusednorm.LayerNorm([4, 8], eps=1e-6, bias=False, dtype=torch.float32).forward(x), Tensor)
    assert_type(fusednorm.RMSNorm(8, elementwise_affine=False).forward(x), Tensor)
    y, mean, rstd = assert_type(
        fusednorm.LayerNormFunction.apply(x, (8,), weight, bias, 1e-5), tuple[Tensor, Tensor, Tensor]
    )
    y, rstd = assert_type(fusednorm.RMSNormFunction.apply(x, (8,), weight, None), tuple[Tensor, Tensor])
    assert_type(fusednorm.affine_rms_norm(x, weight, weight_offset=1.0, rounding="x_hat"), Tensor)
    assert_type(fusednorm.affine_layer_norm(x, weight, bias, normalized_shape=(8,)), Tensor)
    assert_type(fusednorm.add_rms_norm(x, None, weight, residual_dtype=torch.float32), tuple[Tensor, Tensor])
    assert_type(fusednorm.add_layer_norm(x, x, weight, bias, 1e-5), tuple[Tensor, Tensor])
    assert_type(fusednorm.layer_norm_add(x, x, weight, bias), Tensor)
    assert_type(fusednorm.rms_norm_add(x, x, weight, eps=None), Tensor)
    assert_type(fusednorm.rms_norm_add_rms_norm(x, x, weight, weight), tuple[Tensor, Tensor])
    assert_type(fusednorm.layer_norm_add_layer_norm(x, x, bias=bias, eps=1e-6), tuple[Tensor, Tensor])
    assert_type(fusednorm.layer_norm_gated(x, x, weight, bias, activation="sigmoid"), Tensor)
    assert_type(fusednorm.rms_norm_gated(x, x, weight, norm_before_gate=False), Tensor)
    wide, halves = torch.randn(4, 20), ((0, 8), (12, 20))
    assert_type(fusednorm.rms_norm_gated_packed(wide, *halves, weight, group_size=4), tuple[Tensor, ...])
    assert_type(fusednorm.layer_norm_gated_packed(wide, *halves, weight, bias, rounding="x_hat"), tuple[Tensor, ...])
    assert_type(fusednorm.LayerNormGated(8).forward(x, x), Tensor)
    assert_type(fusednorm.RMSNormGated(8, 1e-6, norm_before_gate=False).forward(x, x), Tensor)
    assert_type(fusednorm.AffineRMSNorm(8, bias=True).forward(x), Tensor)
    assert_type(fusednorm.AffineLayerNorm(8, weight_offset=1.0).forward(x), Tensor)
    assert_type(fusednorm.AddRMSNorm(8, normalize_rounded=False).forward(x), tuple[Tensor, Tensor])
    assert_type(fusednorm.AddLayerNorm([8]).forward(x, x), tuple[Tensor, Tensor])
    assert_type(fusednorm.LayerNormAdd(8, rounding="x_hat").forward(x, x), Tensor)
    assert_type(fusednorm.RMSNormAdd(8, 1e-6).forward(x, x), Tensor)
    both = fusednorm.ada_rms_norm(x, weight, residual=x, gate=weight), fusednorm.ada_layer_norm(x, weight, bias)
    assert_type(both, tuple[Tensor | tuple[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]])
    assert_type(fusednorm.AdaRMSNorm(8).forward(x, weight), Tensor | tuple[Tensor, Tensor])
    assert_type(fusednorm.AdaLayerNorm(8).forward(x, weight, bias), Tensor | tuple[Tensor, Tensor])
    q, k, rotary = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 1, 8), (torch.ones(4, 8), torch.zeros(4, 8))
    assert_type(fusednorm.qk_norm(q, k, weight, None, rotary=rotary, norm_first=False), tuple[Tensor, Tensor])
    packed = fusednorm.qk_norm_packed(torch.randn(4, 40), 3, 1, weight, norm="layer", eps=1e-6)
    assert_type(packed, tuple[Tensor, Tensor, Tensor])
    assert_type(fusednorm.QKNorm(8, rotary_interleaved=True).forward(q, k, rotary), tuple[Tensor, Tensor])
    stock: nn.LayerNorm | nn.RMSNorm = fusednorm.LayerNorm(8)
    stock = fusednorm.RMSNorm(8)
    assert stock.eps is None and y.shape == x.shape and mean.shape == rstd.shape


def test_layers_for_hugging_face_are_forwards_and_two_flags() -> None:
    x, norm = torch.randn(4, 8), nn.LayerNorm(8)
    assert_type(fusednorm.layers.LayerNorm.forward(norm, x), Tensor)  # type: ignore[arg-type]  # as `kernels` calls it
    assert fusednorm.layers.RMSNorm.has_backward and fusednorm.layers.RMSNormZeroCentered.can_torch_compile


def test_models_are_patched() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Identity())
    with fusednorm.patch_model(model, classes=[nn.Identity]) as patch:
        assert_type(patch, Patch)
        assert_type([each.name for each in patch.replaced + patch.left], list[str])
    assert_type(patch.restore(), None)
    with fusednorm.enable_inductor():
        assert_type(inductor.report(clear=True), inductor.Report)
    with fusednorm.enable_eager():
        pass
    assert_type(fusednorm.disable_inductor(), None)
    assert_type(fusednorm.disable_eager(), None)


def test_what_runs_can_be_asked_and_told() -> None:
    x = torch.randn(4, 8)
    explained = fusednorm.explain(x, (8,), norm="rms", direction="forward", device=H200)
    assert_type(explained, Explanation)
    assert_type(str(explained) + explained.plan.variant, str)
    assert_type(fusednorm.explain_column_sum([x], device=H200), ColumnSumExplanation)
    assert_type(fusednorm.explain_qk_norm(x, x, device=H200, norm="layer"), HeadExplanation)
    assert_type(fusednorm.explain_qk_norm_packed(x, 2, 1, device=H200), HeadExplanation)
    assert_type(fusednorm.warmup("layer", [8, 16], torch.bfloat16, rows=4, device="cpu"), int)
    assert_type(fusednorm.warmup_qk_norm(x, x, norm="layer"), int)
    assert_type(fusednorm.warmup_qk_norm_packed(x, 2, 1, device="cpu"), int)
    with fusednorm.batch_invariant(), fusednorm.sm_margin(16), fusednorm.force("multi_wave"), fusednorm.force(None):
        pass


def test_kernels_of_others_can_be_held_to_our_bounds() -> None:
    case = oracle.Case("layer", (4, 8), weight_dtype=torch.float32)
    inputs = oracle.make_inputs(case)
    outputs = oracle.fused(case, inputs)
    assert_type(outputs, oracle.Outputs)
    assert_type(oracle.assert_outputs_close(outputs, case, inputs), None)
    assert_type(oracle.relative_error(inputs.x, inputs.x), float)
    assert_type((oracle.exact(case, inputs), oracle.stock(case, inputs)), tuple[oracle.Outputs, oracle.Outputs])


def test_no_public_name_is_missing_here() -> None:
    text = Path(__file__).read_text()
    used = set(re.findall(r"fusednorm\.(\w+)[(.]", text)) | {"functional"}
    assert {*fusednorm.__all__, *fusednorm._INTEGRATIONS} <= used
