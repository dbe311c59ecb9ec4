"""Norm classes of transformers: the list of those that patch_model leaves, and the bits of those that it replaces."""

from __future__ import annotations

import importlib

import norm_classes
import pytest
import torch
from cases import BF16

from fusednorm.host.kernel_devices import kernels_on

pytest.importorskip("transformers", reason="needs the package transformers")
ROWS, COLS, EPS = 64, 768, 1e-6


def test_classes_that_are_left_are_listed_with_the_reason():
    found = {each.name: each.reason for each in norm_classes.list_of(["llama", "olmo"])}
    assert found["LlamaRMSNorm"] == "" and "has no eps" in found["OlmoLayerNorm"]


CLASSES = [  # the model and its class, the offset of its weight, whether it rounds x_hat before the weight
    ("llama", "LlamaRMSNorm", 0.0, True),
    ("qwen3", "Qwen3RMSNorm", 0.0, True),
    ("deepseek_v3", "DeepseekV3RMSNorm", 0.0, True),
    ("glm4", "Glm4RMSNorm", 0.0, True),
    ("gpt_oss", "GptOssRMSNorm", 0.0, False),
    ("olmo2", "Olmo2RMSNorm", 0.0, False),
    ("gemma3", "Gemma3RMSNorm", 1.0, False),
]


@pytest.mark.parametrize(("model", "name", "offset", "rounds_x_hat"), CLASSES, ids=[name for _, name, *_ in CLASSES])
def test_y_has_the_bits_of_the_class_in_every_row_whose_rstd_is_the_same(model, name, offset, rounds_x_hat):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    norm = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)(COLS, eps=EPS)
    torch.nn.init.normal_(norm.to(BF16).weight, mean=1.0 - offset, std=0.2)
    x, weight = (3 * torch.randn(ROWS, COLS)).to(BF16), norm.weight.detach()
    settings = {"weight_offset": offset, "rounds_x_hat": rounds_x_hat}
    with kernels_on("cpu"):
        y, rstd = torch.ops.fusednorm.rms_norm_fwd_affine(x, [COLS], weight, None, EPS, **settings)
    same = rstd.view(ROWS, 1) == torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    differ = y != norm(x).detach()
    assert same.sum() >= ROWS // 4
    assert int((differ & same).sum()) == 0, "elements differ"
    assert int(differ.sum()) <= y.numel() // 1000
