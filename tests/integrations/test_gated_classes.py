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
AFTER, BEFORE, SIGMOID_AFTER = {}, {"norm_before_gate": False}, {"activation": "sigmoid"}
CLASSES = [  # the model and its class, what the class takes beside the columns, the settings of ours
    ("qwen3_next", "Qwen3NextRMSNormGated", {}, AFTER | {"rounding": "x_hat"}),
    ("qwen3_5", "Qwen3_5RMSNormGated", {}, AFTER | {"rounding": "x_hat"}),
    ("qwen3_5_moe", "Qwen3_5MoeRMSNormGated", {}, AFTER | {"rounding": "x_hat"}),
    ("qwen4_exp", "Qwen4ExpTextRMSNormGated", {"activation": "sigmoid"}, SIGMOID_AFTER | {"rounding": "x_hat"}),
    ("olmo_hybrid", "OlmoHybridRMSNormGated", {}, AFTER | {"rounding": "x_hat"}),
    ("lara_mini", "LaraMiniRMSNormGated", {}, AFTER),
    ("kimi_linear", "KimiLinearRMSNormGated", {}, SIGMOID_AFTER),
    ("bailing_hybrid", "BailingHybridRMSNormGated", {}, SIGMOID_AFTER),
    ("glm5_next", "Glm5NextTextRMSNormGated", {}, SIGMOID_AFTER),
    ("bamba", "BambaRMSNormGated", {"group_size": COLS}, BEFORE | {"rounding": "x_hat"}),
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated", {"group_size": COLS}, BEFORE | {"rounding": "x_hat"}),
    ("mamba2", "MambaRMSNormGated", {"group_size": 16}, BEFORE | {"group_size": 16, "rounding": "x_hat"}),
    ("nemotron_h", "NemotronHRMSNormGated", {"group_size": 8}, BEFORE | {"group_size": 8, "rounding": "x_hat"}),
    ("zamba2", "Zamba2RMSNormGated", {"group_size": 32}, BEFORE | {"group_size": 32, "rounding": "x_hat"}),
    ("falcon_h1", "FalconH1RMSNormGated", {"n_groups": 4, "norm_before_gate": True}, AFTER | {"group_size": 16}),
    ("falcon_h1", "FalconH1RMSNormGated", {"n_groups": 2, "norm_before_gate": False}, BEFORE | {"group_size": 32}),
]
classes = pytest.mark.parametrize(
    ("model", "name", "settings", "ours"), CLASSES, ids=[f"{name}-{at}" for at, (_, name, *_) in enumerate(CLASSES)]
)


def note_of(ours: dict) -> str:
    gate, size = f"a {ours.get('activation', 'silu')} gate", ours.get("group_size")
    norm = f"RMSNorm of {COLS // size} groups" if size else "RMSNorm"
    return f"{norm} behind {gate}" if "norm_before_gate" in ours else f"{norm}, then {gate}"


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
def test_a_gated_norm_has_the_bits_of_its_class_and_gradients_as_near(model, name, settings, ours, weight):
    stock = build(model, name, settings).to(weight)
    patched, exact, given = copy.deepcopy(stock), copy.deepcopy(stock).double(), inputs(BF16)
    patch = fusednorm.patch_model(nn.Sequential(patched))
    assert [each.note for each in patch.replaced] == [f"{note_of(ours)}, written by hand"]
    with OpLog() as log:
        got = results(patched, given)
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


class PromotingRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(COLS)), 1e-6

    def forward(self, x, gate):
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype) * torch.nn.functional.silu(gate)


@pytest.mark.parametrize("weight", [BF16, FP32], ids=str)
def test_the_dtype_of_a_gate_may_be_that_of_the_result(weight):
    stock, (x, gate) = PromotingRMSNorm().to(weight), inputs(BF16)
    patched = copy.deepcopy(stock)
    assert fusednorm.patch_model(patched).replaced
    for dtype in (BF16, FP32, torch.float64):
        assert patched(x, gate.to(dtype)).dtype == stock(x, gate.to(dtype)).dtype


@classes
def test_state_dicts_load_into_our_module_which_has_the_same_bits(model, name, settings, ours):
    stock, given = build(model, name, settings).to(BF16), inputs(BF16)
    module = fusednorm.RMSNormGated(COLS, 1e-6, dtype=BF16, **ours)
    module.load_state_dict(stock.state_dict())
    assert int((module(*given) != stock(*given)).sum()) * 500 <= given[0].numel()
