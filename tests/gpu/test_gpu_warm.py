"""warmup on a GPU: afterwards nothing is compiled, not even during the capture of a graph."""

from __future__ import annotations

import pytest
import torch
from calls import assert_case_is_right
from cases import BF16, FP32, make_case

import fusednorm
from fusednorm.tools.oracle import fused, make_inputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("norm", "weight"), [("layer", BF16), ("rms", FP32)])
def test_a_first_call_under_capture_compiles_nothing_after_warmup(norm, weight, builds_of_kernels):
    cols = 3968 if norm == "layer" else 2944  # widths that no other test compiles before
    case = make_case(norm, (4096, cols), (BF16, weight, BF16))
    inputs = make_inputs(case, "cuda")
    assert fusednorm.warmup(norm, cols, BF16, weight_dtype=weight) >= 3
    builds_of_kernels.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused(case, inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert builds_of_kernels == []
    assert_case_is_right(case, inputs)


@pytest.mark.parametrize("rows", [64, 8192])
def test_given_row_counts_are_enough_for_themselves(rows, builds_of_kernels):
    case = make_case("layer", (rows, 2688), (BF16, BF16, BF16))
    fusednorm.warmup("layer", [2688], BF16, rows=rows)
    builds_of_kernels.clear()
    fused(case, make_inputs(case, "cuda"))
    assert builds_of_kernels == []


@pytest.mark.parametrize("shape", [(3, 80, 1920), (2, 4112, 1664), (40, 1, 896)])
def test_a_modulated_call_of_several_samples_compiles_nothing_after_its_warmup(shape, builds_of_kernels):
    fusednorm.warmup("layer", shape[-1], BF16, elementwise_affine=False, form="modulated", sample_rows=shape[1])
    builds_of_kernels.clear()
    x = torch.randn(shape, device="cuda").to(BF16).requires_grad_()
    packed = torch.randn(shape[0], 6, shape[-1], device="cuda").to(BF16).requires_grad_()
    scale, shift, *_ = packed.split(1, 1)
    fusednorm.ada_layer_norm(x, scale, shift).sum().backward()
    assert builds_of_kernels == [] and packed.grad.isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
def test_a_call_of_heads_compiles_nothing_after_its_warmup(packed, builds_of_kernels):
    def leaves(tokens: int, device: str) -> list[torch.Tensor]:
        shapes = [(2, tokens, 8 * 40)] if packed else [(2, tokens, 4, 40), (2, tokens, 2, 40)]
        return [torch.ones(shape, dtype=BF16, device=device, requires_grad=True) for shape in (*shapes, (40,), (40,))]

    def run(separate, of_packed, tokens: int, device: str):
        given, table = leaves(tokens, device), torch.ones(tokens, 40, device=device)
        made = (lambda qkv, *rest, **more: of_packed(qkv, 4, 2, *rest, **more)) if packed else separate
        return made(*given, norm="layer", rotary=(table, table)), given

    assert run(fusednorm.warmup_qk_norm, fusednorm.warmup_qk_norm_packed, 3, "meta")[0] >= 3
    builds_of_kernels.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs, given = run(fusednorm.qk_norm, fusednorm.qk_norm_packed, 70, "cuda")
        torch.autograd.grad(outputs, given, [torch.ones_like(each) for each in outputs])
    assert builds_of_kernels == []


def test_warmup_is_refused_during_a_capture():
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(RuntimeError, match="before the capture of a CUDA graph"):
            fusednorm.warmup("layer", [4096], BF16)
