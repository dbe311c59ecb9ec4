"""What this shows: norms under PyTorch's tensor parallelism, where SequenceParallel shards their rows over the ranks.

    torchrun --nproc-per-node 2 -m examples.tensor_parallel --model llama --norms both      on two GPUs
    torchrun --nproc-per-node 2 -m examples.tensor_parallel --steps 20                      on a CPU

All ranks read the same text. Between the blocks each rank has a part of the text. Within attention and MLP each has the
whole text, and a part of the heads and of the hidden width. Norms get DTensors, for which our ops have sharding rules:
every rank has the whole weight, and its gradient is a partial sum. All tensors are float32; on a GPU matrix products
use TF32. On a CPU our functionals call ATen, whose rules are the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .language_models import MODELS, LanguageModel
from .training import arguments, end_processes, start_processes, train_each

ROWS = Shard(1)  # [batch, length, width] sharded along the text


def parallelize(model: LanguageModel, mesh: DeviceMesh) -> LanguageModel:
    """Parallelizes `model` in place, by the plans of torch.distributed.tensor.parallel."""
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=ROWS)
    plan = {"embed.token": embedding, "norm": SequenceParallel()}
    plan["head"] = ColwiseParallel(input_layouts=ROWS, output_layouts=Replicate())
    if model.embed.position is not None:
        plan["embed.position"] = embedding
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        parallelize_module(block, mesh, plan_of(block))
    return model


def plan_of(block: nn.Module) -> dict:
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    gather = PrepareModuleInput(input_layouts=(ROWS,), desired_input_layouts=(Replicate(),))
    for part, last in (("attention", "out"), ("mlp", "down")):
        plan[part] = gather
        for name, _ in getattr(block, part).named_children():
            plan[f"{part}.{name}"] = RowwiseParallel(output_layouts=ROWS) if name == last else ColwiseParallel()
    return plan


def main() -> None:
    asked, (device, size) = arguments("tensor_parallel", __doc__, models=(*MODELS,), norms=True), start_processes()
    torch.set_float32_matmul_precision("high")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    train_each(asked, device, size, lambda model: parallelize(model, mesh))
    end_processes()


if __name__ == "__main__":
    main()
