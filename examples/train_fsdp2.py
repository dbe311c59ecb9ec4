"""What this shows: a language model under FSDP2, on stock norms, on ours, or first on one and then on the other. Prints
tokens/s and memory, and draws loss curves.

    torchrun --nproc-per-node 8 -m examples.train_fsdp2 --model llama --norms both      on eight GPUs
    python -m examples.train_fsdp2 --model gpt2 --steps 20                              one process, a CPU will do

Each rank reads its own text and holds its share of every parameter, also of the norms'. FSDP2 gathers a block's
parameters before the block runs, on GPUs in bfloat16, so norms see whole tensors and need no special treatment. The
model has about 1 billion parameters on GPUs, and very few on a CPU, where our functionals call ATen, so that both kinds
of norms run the same code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .language_models import MODELS, LanguageModel
from .training import arguments, end_processes, start_processes, train_each


def shard(model: LanguageModel) -> nn.Module:
    on_gpu = next(model.parameters()).is_cuda
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def main(given: Sequence[str] | None = None) -> None:
    asked, (device, size) = arguments("train_fsdp2", __doc__, given, (*MODELS,), norms=True), start_processes()
    train_each(asked, device, size, shard, readers=dist.get_world_size())
    end_processes()


if __name__ == "__main__":
    main()
