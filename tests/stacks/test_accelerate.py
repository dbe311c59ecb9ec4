"""Accelerate's loop on a model whose norms patch_model replaced."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import build, norms, ops_logged, tokens

import fusednorm

accelerate = pytest.importorskip("accelerate", reason="needs the package accelerate: make test-integrations")


def trained(model, folder, steps=4):
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(tokens(rows=2 * steps), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for ids in data:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(folder)
    return losses


def test_loop_runs_ours_with_the_losses_of_stock(tmp_path):
    stock = build("Llama")
    ours, other = copy.deepcopy(stock), copy.deepcopy(stock)
    fusednorm.patch_model(ours)
    expected = trained(stock, tmp_path / "stock")
    with ops_logged() as log:
        got = trained(ours, tmp_path / "ours")
    assert norms(log) == {"rms_norm_fwd": 4 * 5, "rms_norm_bwd": 4 * 5}
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    accelerate.load_checkpoint_in_model(other, str(tmp_path / "ours" / "model.safetensors"))
    torch.testing.assert_close(other.state_dict(), ours.state_dict(), rtol=0, atol=0)
