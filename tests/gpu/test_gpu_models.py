"""Models of transformers on CUDA with their norms on our kernels: patched or under the override, eager or compiled."""

from __future__ import annotations

import copy

import hf_models
import pytest
import torch

import fusednorm
from fusednorm.host import native, prepared

pytestmark = pytest.mark.gpu

HIDDEN = 512
LAYER_NORM_MODELS = ("GPT2", "Bert")
models = pytest.mark.parametrize("name", hf_models.MODELS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def kernel_calls(monkeypatch, request) -> dict[str, int]:
    """How often our kernels have run, by direction. No program is kept for later calls, so that all are counted."""
    from fusednorm.host import launch

    monkeypatch.setattr(prepared, "keep", lambda miss, call, bound: None)
    prepared.forget()
    if native.extension:
        native.extension.pause(1)
        request.addfinalizer(lambda: native.extension.pause(-1))
    counts = {"forward": 0, "backward": 0}

    run = launch.run

    def counted(call, miss=None):
        counts[call.problem.direction] += 1
        return run(call, miss)

    monkeypatch.setattr(launch, "run", counted)
    return counts


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build(name, dtype, layers=2):
    return hf_models.build(name, HIDDEN, layers).to("cuda", dtype), hf_models.tokens("cuda", rows=4, length=256)


@models
@dtypes
def test_patched_models_train_as_stock(name, dtype, kernel_calls):
    model, ids = build(name, dtype)
    exact, stock = hf_models.in_float64(model, ids), hf_models.loss_and_grads(model, ids)
    fusednorm.patch_model(model)
    kernel_calls.update(forward=0, backward=0)
    ours = hf_models.loss_and_grads(model, ids)
    assert kernel_calls == {"forward": hf_models.norm_count(name), "backward": hf_models.norm_count(name)}
    hf_models.assert_as_good_as_stock(ours, stock, exact, dtype)


@pytest.mark.parametrize("name", sorted({*hf_models.MODELS} - {"Mistral", "Gemma", "Gemma2"}))  # norms of others
def test_patched_models_compile(name, kernel_calls, fresh_compiler):
    dtype = torch.bfloat16
    model, ids = build(name, dtype, layers=1)
    exact, stock = hf_models.in_float64(model, ids), hf_models.loss_and_grads(model, ids)
    fusednorm.patch_model(model)
    compiled = torch.compile(model)
    hf_models.loss_and_grads(model, ids, compiled)
    kernel_calls.update(forward=0, backward=0)
    ours = hf_models.loss_and_grads(model, ids, compiled)
    count = hf_models.norm_count(name, layers=1)
    assert kernel_calls == {"forward": count, "backward": count}
    hf_models.assert_as_good_as_stock(ours, stock, exact, dtype)


@pytest.mark.parametrize("name", LAYER_NORM_MODELS)
@dtypes
def test_unmodified_models_run_ours_under_the_override(name, dtype, kernel_calls):
    model, ids = build(name, dtype)
    exact, stock = hf_models.in_float64(model, ids), hf_models.loss_and_grads(model, ids)
    assert not any(kernel_calls.values())
    with fusednorm.enable_eager():
        ours = hf_models.loss_and_grads(model, ids)
    assert kernel_calls == {"forward": hf_models.norm_count(name), "backward": hf_models.norm_count(name)}
    hf_models.assert_as_good_as_stock(ours, stock, exact, dtype)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "Bert"])
def test_autocast_trains_patched_models_as_stock(name):
    model, ids = build(name, torch.float32)
    exact = hf_models.in_float64(model, ids)

    def under_autocast():
        with torch.autocast("cuda", torch.bfloat16):
            return hf_models.loss_and_grads(model, ids)

    stock = under_autocast()
    fusednorm.patch_model(model)
    hf_models.assert_as_good_as_stock(under_autocast(), stock, exact, torch.bfloat16)


def test_gradient_checkpointing_changes_nothing():
    model, ids = build("Llama", torch.float32)
    fusednorm.patch_model(model)
    model.train()
    want = hf_models.loss_and_grads(model, ids)
    model.gradient_checkpointing_enable()
    got = hf_models.loss_and_grads(model, ids)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "GPT2"])
def test_ten_steps_of_training_go_as_with_stock(name):
    stock, ids = build(name, torch.float32)
    patched = copy.deepcopy(stock)
    fusednorm.patch_model(patched)
    losses = []
    for model in (stock, patched):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(10):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=0)


def test_restored_models_give_the_stock_bits_of_the_forward():
    model, ids = build("Gemma", torch.bfloat16)
    with torch.no_grad():
        want = model(input_ids=ids).logits
        patch = fusednorm.patch_model(model)
        model(input_ids=ids)
        patch.restore()
        assert torch.equal(model(input_ids=ids).logits, want)
