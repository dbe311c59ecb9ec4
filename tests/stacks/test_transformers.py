"""transformers' Trainer on a model whose norms patch_model replaced: the losses and checkpoints of the stock model."""

from __future__ import annotations

import pytest
import torch
from tiny import FOUR_STEPS, build, losses_of, tokens, trained_as_stock

import fusednorm

transformers = pytest.importorskip("transformers", reason="needs the package transformers: make test-integrations")
pytest.importorskip("accelerate", reason="needs the package accelerate: make test-integrations")


def trained(model, folder):
    data = [{"input_ids": row, "labels": row} for row in tokens(rows=4)]
    options = transformers.TrainingArguments(output_dir=str(folder), save_steps=2, **FOUR_STEPS)
    return losses_of(transformers.Trainer(model=model, args=options, train_dataset=data))


@pytest.mark.parametrize("name, op, count", [("Llama", "rms_norm", 5), ("Bert", "layer_norm", 6)])
def test_trainer_runs_ours_with_the_losses_of_stock(name, op, count, tmp_path):
    stock = build(name)
    ours = trained_as_stock(stock, trained, op, count, tmp_path, tolerance=1e-3)  # the log rounds to four digits
    reloaded = type(stock).from_pretrained(tmp_path / "ours" / "checkpoint-4")
    torch.testing.assert_close(reloaded.state_dict(), ours.state_dict(), rtol=0, atol=0)
    assert not [module for module in reloaded.modules() if type(module).__module__.startswith("fusednorm")]
    patched = type(stock).from_pretrained(tmp_path / "stock" / "checkpoint-4")
    fusednorm.patch_model(patched)
    torch.testing.assert_close(patched.state_dict(), stock.state_dict(), rtol=0, atol=0)
