"""TRL's SFTTrainer on a model whose norms patch_model replaced."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import build, norms, ops_logged, tokens

import fusednorm

trl = pytest.importorskip("trl", reason="needs the package trl: make test-integrations")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")


def trained(model, folder):
    words = {f"w{number}": number for number in range(126)} | {"<pad>": 126, "<eos>": 127}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    data = datasets.Dataset.from_dict({"input_ids": tokens(rows=4).tolist()})
    options = trl.SFTConfig(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(model=model, args=options, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_sft_trainer_runs_ours_with_the_losses_of_stock(tmp_path):
    stock = build("Qwen3")
    ours = copy.deepcopy(stock)
    fusednorm.patch_model(ours)
    expected = trained(stock, tmp_path / "stock")
    with ops_logged() as log:
        got = trained(ours, tmp_path / "ours")
    assert norms(log) == {"rms_norm_fwd": 4 * 9, "rms_norm_bwd": 4 * 9}
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)  # the log rounds to four digits
    reloaded = type(stock).from_pretrained(tmp_path / "ours" / "checkpoint-4")
    torch.testing.assert_close(reloaded.state_dict(), ours.state_dict(), rtol=0, atol=0)
