"""TRL's SFTTrainer on a model whose norms patch_model replaced."""

from __future__ import annotations

import pytest
import torch
from tiny import FOUR_STEPS, build, losses_of, tokens, trained_as_stock

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
    options = trl.SFTConfig(output_dir=str(folder), bf16=False, gradient_checkpointing=False, **FOUR_STEPS)
    return losses_of(trl.SFTTrainer(model=model, args=options, train_dataset=data, processing_class=tokenizer))


def test_sft_trainer_runs_ours_with_the_losses_of_stock(tmp_path):
    stock = build("Qwen3")
    ours = trained_as_stock(stock, trained, "rms_norm", 9, tmp_path, tolerance=1e-3)  # the log rounds to four digits
    reloaded = type(stock).from_pretrained(tmp_path / "ours" / "checkpoint-4")
    torch.testing.assert_close(reloaded.state_dict(), ours.state_dict(), rtol=0, atol=0)
