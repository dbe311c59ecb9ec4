"""The gated norms of transformers: recognized by patch_model, with the numbers of their own forwards."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from cases import BF16, FP32
from op_log import OpLog
from torch import nn

import fusednorm

pytest.importorskip("transformers", reason="needs the package transformers")
COLS, ROWS = 64, (2, 32)
AFTER, SIGMOID_AFTER = "RMSNorm, then a silu gate", "RMSNorm, then a sigmoid gate"
BEFORE = "RMSNorm behind a silu gate"
CLASSES = [  # the model and its class, what the class takes beside the columns, what it computes
    ("qwen3_next", "Qwen3NextRMSNormGated", {}, AFTER),
    ("qwen3_5", "Qwen3_5RMSNormGated", {}, AFTER),
    ("qwen3_5_moe", "Qwen3_5MoeRMSNormGated", {}, AFTER),
    ("qwen4_exp", "Qwen4ExpTextRMSNormGated", {"activation": "sigmoid"}, SIGMOID_AFTER),
    ("olmo_hybrid", "OlmoHybridRMSNormGated", {}, AFTER),
    ("lara_mini", "LaraMiniRMSNormGated", {}, AFTER),
    ("kimi_linear", "KimiLinearRMSNormGated", {}, SIGMOID_AFTER),
    ("bailing_hybrid", "BailingHybridRMSNormGated", {}, SIGMOID_AFTER),
    ("glm5_next", "Glm5NextTextRMSNormGated", {}, SIGMOID_AFTER),
    ("bamba", "BambaRMSNormGated", {"group_size": COLS}, BEFORE),
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated", {"group_size": COLS}, BEFORE),
    ("zamba2", "Zamba2RMSNormGated", {"group_size": COLS}, BEFORE),
]
ONCE = {"LaraMiniRMSNormGated", "KimiLinearRMSNormGated", "BailingHybridRMSNormGated", "Glm5NextTextRMSNormGated"}
classes = pytest.mark.parametrize(
    ("model", "name", "settings", "note"), CLASSES, ids=[name for _, name, *_ in CLASSES]
)


def build(model: str, name: str, settings: dict) -> nn.Module:
    made = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)(COLS, **settings)
    torch.manual_seed(0)
    nn.init.normal_(made.weight, mean=1.0, std=0.2)
    return made


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """x, and a gate whose rows lie in a wider tensor."""
    x, packed = torch.randn(*ROWS, COLS), torch.randn(*ROWS, 3 * COLS)
    return [x.to(dtype).requires_grad_(), packed.to(dtype)[..., COLS : 2 * COLS].detach().requires_grad_()]


def results(norm: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """y, and the gradients of x, the gate and the weight."""
    y = norm(*given)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [*given, norm.weight], grad)]


@classes
@pytest.mark.parametrize("weight", [BF16, FP32], ids=str)
def test_a_gated_norm_has_the_bits_of_its_class_and_gradients_as_near(model, name, settings, note, weight):
    stock = build(model, name, settings).to(weight)
    ours, exact, given = copy.deepcopy(stock), copy.deepcopy(stock).double(), inputs(BF16)
    patch = fusednorm.patch_model(nn.Sequential(ours))
    assert [each.note for each in patch.replaced] == [f"{note}, written by hand"]
    with OpLog() as log:
        got = results(ours, given)
    want, right = results(stock, given), results(exact, [each.detach().double().requires_grad_() for each in given])
    assert any(each.startswith("fusednorm.rms_norm_fwd") for each in log.names)
    assert [each.dtype for each in got] == [each.dtype for each in want]
    assert int((got[0] != want[0]).sum()) * 500 <= want[0].numel()  # where their float32 statistics differ
    for mine, theirs, exactly in zip(got[1:], want[1:], right[1:], strict=True):
        slack = torch.finfo(mine.dtype).eps / 100 * float(exactly.norm())
        assert float((mine.double() - exactly).norm()) <= 1.1 * float((theirs.double() - exactly).norm()) + slack


def test_a_gate_may_come_by_name_and_without_one_the_class_runs_its_own_forward():
    ours, (x, gate) = build("bamba", "BambaRMSNormGated", {"group_size": COLS}), inputs(FP32)
    by_position, alone = ours(x, gate), ours(x)
    fusednorm.patch_model(nn.Sequential(ours))
    with OpLog() as log:
        torch.testing.assert_close(ours(gate=gate, hidden_states=x), by_position)
    assert any(each.startswith("fusednorm.rms_norm_fwd_of_gated") for each in log.names)
    assert torch.equal(ours(x), alone)


@classes
def test_state_dicts_load_into_our_module_which_has_the_same_bits(model, name, settings, note):
    stock, given = build(model, name, settings).to(BF16), inputs(BF16)
    activation = "sigmoid" if "sigmoid" in note else "silu"
    ours = fusednorm.RMSNormGated(COLS, 1e-6, activation=activation, norm_before_gate=note != BEFORE,
                                  rounding="once" if name in ONCE else "x_hat", dtype=BF16)  # fmt: skip
    ours.load_state_dict(stock.state_dict())
    assert int((ours(*given) != stock(*given)).sum()) * 500 <= given[0].numel()
