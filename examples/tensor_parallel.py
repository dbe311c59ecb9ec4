"""What this shows: norms in PyTorch's tensor parallelism, where SequenceParallel shards their rows over the ranks.

Between the blocks every rank has a part of the text; within attention and MLP all of it, and a part of the heads and
of the hidden width. A norm's weight is whole on every rank, and its gradient is added up over them.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

try:
    from language_models import LanguageModel
except ImportError:
    from examples.language_models import LanguageModel

ROWS = Shard(1)  # [batch, length, width] sharded along the text


def parallelize(model: LanguageModel, mesh: DeviceMesh) -> LanguageModel:
    """In place, by the plans of torch.distributed.tensor.parallel."""
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
