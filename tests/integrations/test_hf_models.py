"""Models of transformers with their norms replaced: losses and gradients are compared with the stock model's."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import hf_models
import pytest
import torch
from cases import BF16, FP32
from graphs import RecordingBackend
from op_log import OpLog

import fusednorm
from bench.turns import ROOT

BY_HAND = ("Llama", "Mistral", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Olmo2", "T5")
models = pytest.mark.parametrize("name", hf_models.MODELS)


@models
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_replaced_norms_train_as_the_stock_model(name, dtype):
    model, ids = hf_models.build(name).to(dtype), hf_models.tokens()
    exact, stock = hf_models.in_float64(model, ids), hf_models.loss_and_grads(model, ids)
    patch = fusednorm.patch_model(model)
    assert len(patch.replaced) == hf_models.norm_count(name) and not patch.left
    with OpLog() as log:
        ours = hf_models.loss_and_grads(model, ids)
    hf_models.assert_as_good_as_stock(ours, stock, exact, dtype)
    if name in BY_HAND:
        for op in ("fwd_affine", "bwd_residual"):
            assert log.names.count(f"fusednorm.rms_norm_{op}.default") == hf_models.norm_count(name)
    else:  # a patched torch.nn.LayerNorm calls ATen for CPU tensors
        assert log.names.count("aten.native_layer_norm.default") == hf_models.norm_count(name)
    patch.restore()
    again = hf_models.loss_and_grads(model, ids)
    assert all(torch.equal(again[key], stock[key]) for key in stock)


# GPT-2 has torch's LayerNorm as BERT has.
COMPILED = [("Llama", FP32), ("Gemma", BF16), ("Qwen3", BF16), ("T5", FP32), ("Bert", BF16)]


@pytest.mark.parametrize(("name", "dtype"), COMPILED, ids=[name for name, _ in COMPILED])
def test_compiled_models_with_replaced_norms_train_as_the_stock_model(name, dtype):
    model, ids = hf_models.build(name, layers=1).to(dtype), hf_models.tokens()
    exact, stock = hf_models.in_float64(model, ids), hf_models.loss_and_grads(model, ids)
    fusednorm.patch_model(model)
    torch._dynamo.reset()
    backend = RecordingBackend()
    ours = hf_models.loss_and_grads(model, ids, torch.compile(model, backend=backend))
    hf_models.assert_as_good_as_stock(ours, stock, exact, dtype)
    for op in ("fwd_affine", "bwd_residual"):
        count = backend.ops.count(f"fusednorm.rms_norm_{op}.default")
        assert count == (hf_models.norm_count(name, layers=1) if name in BY_HAND else 0)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_replaced_norm_has_the_bits_of_its_class(name):
    """Elements that differ are those whose float32 statistics do: one in a thousand at most."""
    model = hf_models.build(name, hidden=256, layers=1).to(BF16)
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    hidden = [torch.randn(64, module.weight.shape[0], dtype=BF16) for module in norms]
    wants = [module(x) for module, x in zip(norms, hidden, strict=True)]
    fusednorm.patch_model(model)
    gots = [module(x) for module, x in zip(norms, hidden, strict=True)]
    assert [each.dtype for each in gots] == [each.dtype for each in wants]
    differ = sum(int((got != want).sum()) for got, want in zip(gots, wants, strict=True))
    assert differ * 1000 <= sum(each.numel() for each in wants)


def test_mixed_dtypes_of_model_and_norms_keep_their_dtypes():
    """A float32 norm of bfloat16 activations returns float32 in the stock model. A patched norm must do the same."""
    model, ids = hf_models.build("Llama"), hf_models.tokens()
    hidden = torch.randn(2, 24, 64, dtype=BF16)
    norm = model.model.norm
    want = norm(hidden)
    fusednorm.patch_model(model)
    assert norm(hidden).dtype == want.dtype == FP32
    with torch.autocast("cpu", BF16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(p.grad.dtype == FP32 and p.grad.isfinite().all() for p in model.parameters())


def test_generation_gives_the_same_tokens():
    model, ids = hf_models.build("Qwen3"), hf_models.tokens(rows=1, length=6)
    want = model.generate(ids, max_new_tokens=5, do_sample=False)
    fusednorm.patch_model(model)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), want)


def test_checkpoints_go_both_ways(tmp_path):
    stock, patched = hf_models.build("Gemma"), hf_models.build("Gemma")
    fusednorm.patch_model(patched)
    patched.save_pretrained(tmp_path)
    loaded = type(stock).from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == stock.state_dict().keys()
    patched.load_state_dict(stock.state_dict())
    ids = hf_models.tokens()
    torch.testing.assert_close(patched(input_ids=ids).logits, loaded(input_ids=ids).logits)


def test_the_folder_of_our_kernels_hides_no_installed_package(tmp_path, monkeypatch):
    (tmp_path / "kernels.py").write_text("")
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    monkeypatch.setattr(sys, "path", [str(ROOT), str(tmp_path), *sys.path])
    hf_models.build("GPT2")
    assert find_spec("kernels").origin == str(tmp_path / "kernels.py")
