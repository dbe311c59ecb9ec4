"""torch.ao.quantization converts our LayerNorm as it converts torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fusednorm

quantization = pytest.importorskip("torch.ao.quantization")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about quantization's future

LAYER_NORMS = {"stock": nn.LayerNorm, "ours": fusednorm.LayerNorm}


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), LAYER_NORMS[kind](16), nn.Linear(16, 4)).eval()


def eager(float_model: nn.Module, x: torch.Tensor) -> nn.Module:
    wrapped = quantization.QuantWrapper(float_model)
    wrapped.qconfig = quantization.get_default_qconfig("x86")
    prepared = quantization.prepare(wrapped)
    prepared(x)
    return quantization.convert(prepared)


def by_fx(float_model: nn.Module, x: torch.Tensor) -> nn.Module:
    fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    prepared = fx.prepare_fx(float_model, quantization.get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    return fx.convert_fx(prepared)


def norms_of(quantized: nn.Module) -> set[str]:
    """Names of the modules and functions of a quantized model that normalize."""
    found = {f"{type(each).__module__}.{type(each).__name__}" for each in quantized.modules()}
    if isinstance(quantized, torch.fx.GraphModule):
        found |= {str(node.target) for node in quantized.graph.nodes if node.op == "call_function"}
    return {name for name in found if "norm" in name.lower()}


@pytest.mark.parametrize("quantize", [eager, by_fx])
def test_static_quantization_gives_the_numbers_of_the_stock_model_by_quantized_norms(quantize):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    stock, ours = (quantize(copy.deepcopy(model(kind)), x) for kind in LAYER_NORMS)
    assert torch.equal(ours(x), stock(x))
    assert all("quantized" in name for name in norms_of(ours)) and norms_of(ours)


def test_dynamic_quantization_leaves_our_norm_in_place():
    quantized = quantization.quantize_dynamic(model("ours"))
    assert type(quantized[1]) is fusednorm.LayerNorm
    assert quantized(torch.randn(3, 8)).shape == (3, 4)
