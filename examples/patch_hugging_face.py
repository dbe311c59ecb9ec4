"""What this shows: one line, `fusednorm.patch_model(model)`, makes a Llama of Hugging Face's transformers, whose norms
are written by hand, train on our kernels. Prints what was patched, tokens/s and memory, and draws loss curves.

    pip install transformers
    python -m examples.patch_hugging_face

The model has random parameters, so nothing is downloaded. A patched norm rounds as Llama's own does. In float32, as
here, the losses differ only in their last digits. On a CPU our functionals call ATen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import fusednorm

from .language_models import BYTES, Size, batches, help_text
from .training import arguments, only_process, report, train


def make_llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES,
            hidden_size=size.width,
            intermediate_size=3 * size.width,
            num_hidden_layers=size.blocks,
            num_attention_heads=size.heads,
            max_position_embeddings=size.length,
        )
    )


def main(given: Sequence[str] | None = None) -> None:
    asked = arguments("patch_hugging_face", __doc__, given)
    device, size = only_process()
    runs = {}
    for label in ("as it is", "patched"):
        model = make_llama(size).to(device)
        if label == "patched":
            print(fusednorm.patch_model(model))
        runs[label] = train(model, batches(help_text(), size), asked.steps)
    report(runs, size.tokens, asked.out / "patch_hugging_face.png")


if __name__ == "__main__":
    main()
