"""Lightning's Trainer on a model whose norms patch_model replaced."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import build, tokens, trained_as_stock

lightning = pytest.importorskip("lightning", reason="needs the package lightning: make test-integrations")


class Lit(lightning.LightningModule):
    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, ids, _):
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(model, path):
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    module = Lit(model)
    trainer.fit(module, torch.utils.data.DataLoader(tokens(rows=8), batch_size=2))
    trainer.save_checkpoint(path)
    return module.losses


def test_trainer_runs_ours_with_the_losses_of_stock(tmp_path):
    stock = build("GPT2")
    other = Lit(copy.deepcopy(stock))
    ours = trained_as_stock(stock, trained, "layer_norm", 5, tmp_path, tolerance=1e-4)
    other.load_state_dict(torch.load(tmp_path / "ours", weights_only=False)["state_dict"])
    torch.testing.assert_close(other.model.state_dict(), ours.state_dict(), rtol=0, atol=0)
