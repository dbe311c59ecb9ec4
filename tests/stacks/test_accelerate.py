"""Accelerate's loop on a model whose norms patch_model replaced."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import build, tokens, trained_as_stock

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
    other = copy.deepcopy(stock)
    ours = trained_as_stock(stock, trained, "rms_norm", 5, tmp_path, tolerance=1e-4)
    accelerate.load_checkpoint_in_model(other, str(tmp_path / "ours" / "model.safetensors"))
    torch.testing.assert_close(other.state_dict(), ours.state_dict(), rtol=0, atol=0)
