"""transformers' Trainer on a model whose norms patch_model replaced: the losses and checkpoints of the stock model."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import build, norms, ops_logged, tokens

import fusednorm

transformers = pytest.importorskip("transformers", reason="needs the package transformers: make test-integrations")
pytest.importorskip("accelerate", reason="needs the package accelerate: make test-integrations")


def trained(model, folder):
    data = [{"input_ids": row, "labels": row} for row in tokens(rows=4)]
    options = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_steps=2,
    )
    trainer = transformers.Trainer(model=model, args=options, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name, op, count", [("Llama", "rms_norm", 5), ("Bert", "layer_norm", 6)])
def test_trainer_runs_ours_with_the_losses_of_stock(name, op, count, tmp_path):
    stock = build(name)
    ours = copy.deepcopy(stock)
    assert len(fusednorm.patch_model(ours).replaced) == count
    expected = trained(stock, tmp_path / "stock")
    with ops_logged() as log:
        got = trained(ours, tmp_path / "ours")
    assert norms(log) == {f"{op}_fwd": 4 * count, f"{op}_bwd": 4 * count}
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)  # the log rounds to four digits
    reloaded = type(stock).from_pretrained(tmp_path / "ours" / "checkpoint-4")
    torch.testing.assert_close(reloaded.state_dict(), ours.state_dict(), rtol=0, atol=0)
    assert not [module for module in reloaded.modules() if type(module).__module__.startswith("fusednorm")]
    patched = type(stock).from_pretrained(tmp_path / "stock" / "checkpoint-4")
    fusednorm.patch_model(patched)
    torch.testing.assert_close(patched.state_dict(), stock.state_dict(), rtol=0, atol=0)
