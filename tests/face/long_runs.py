"""Long runs that hang or go wrong only now and then: combinations of worlds.py, with few steps on CPUs.

    PYTHONPATH=.:tests torchrun --nproc-per-node 2 tests/face/long_runs.py

runs them on two GPUs over NCCL, or on CPUs over gloo with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from sharded_models import BF16, FP64, KINDS, assert_equal, shard
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel
from worlds import World, combinations_in, ops_run, run_by_torchrun

from examples.language_models import OURS, STOCK, LanguageModel, Norms, Size, batches, help_text, next_byte_loss

MICROBATCHES = 4
# The first calls of kernels load them, and CUDA may wait for all running kernels before it loads one. A receive that is
# posted early could then never end. The optimizer calls its last kernels in the second step, the first with a momentum.
FIRST_EARLY_STEP = 2
PAUSE_S = 0.002  # of the host, at most
PAUSE_CYCLES = 1_500_000  # of the GPU, at most: about 1 ms
# This attention gives the same bits for the same inputs. Other backends add up in an order that varies.
SAME_BITS = SDPBackend.MATH


@dataclass(frozen=True)
class Run:
    size: Size
    steps: int


def of(world: World, on_gpu: Run, on_cpu: Run) -> Run:
    return on_gpu if world.device.type == "cuda" else on_cpu


# A pipeline whose receives are posted early


class Inbox:
    """Receives `count` tensors one after the other. Once `early` is set, the receive of the next is posted before the
    last is returned. On a GPU it is a kernel that waits on its SMs while other kernels compute."""

    def __init__(self, source: int, group: dist.ProcessGroup, like: Tensor, count: int) -> None:
        self.early = False
        self._source, self._group, self._like, self._left = source, group, like, count
        self._posted: list[tuple[Tensor, dist.Work]] = []

    def take(self) -> Tensor:
        for _ in range(1 + self.early - len(self._posted)):
            self._post()
        buffer, work = self._posted.pop(0)
        work.wait()
        return buffer

    def _post(self) -> None:
        if self._left:
            buffer = torch.empty_like(self._like)
            self._posted.append((buffer, dist.irecv(buffer, self._source, self._group)))
            self._left -= 1


class Outbox:
    def __init__(self, target: int, group: dist.ProcessGroup) -> None:
        self._target, self._group = target, group
        self._sent: list[tuple[Tensor, dist.Work]] = []

    def send(self, tensor: Tensor) -> None:
        tensor = tensor.detach().contiguous()
        self._sent.append((tensor, dist.isend(tensor, self._target, self._group)))

    def flush(self) -> None:
        for _, work in self._sent:
            work.wait()
        self._sent.clear()


def pipeline_with_receives_posted_early(world: World) -> None:
    """Two stages end with the bits of one process that runs them in turn; in float64 they end near stock norms'."""
    run = of(world, Run(Size(1024, 2, 8, 128, 16), 200), Run(Size(16, 2, 4, 8, 8), 5))
    # A group for each direction: the sends and receives of one group wait for each other.
    groups = [dist.new_group() for _ in range(2)]
    for name in KINDS:
        for dtype in (BF16, FP64):
            with ops_run(world), sdpa_kernel(SAME_BITS):
                stage, losses = train_stage(world, groups, name, dtype, run)
                stages, wanted = train_alone(world, name, dtype, run, OURS)
            for key, each in stages[world.rank].named_parameters():
                assert torch.equal(stage.get_parameter(key), each), f"{name}, {dtype}, {key}: other bits than alone"
            if losses is not None:
                assert torch.equal(losses, wanted), f"{name}, {dtype}: other losses than alone"
                assert losses[-1] < losses[0], f"{name}, {dtype}: the loss must fall, got {losses}"
            if dtype is FP64:
                with sdpa_kernel(SAME_BITS):
                    stages, _ = train_alone(world, name, dtype, run, STOCK)
                for key, each in stages[world.rank].named_parameters():
                    assert_equal(stage.get_parameter(key).detach(), each.detach(), f"{name}, {key}")


def stages_of(world: World, name: str, dtype: torch.dtype, size: Size, norms: Norms) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = LanguageModel(name, size, norms).to(world.device, dtype)
    first, last = model.blocks
    return nn.Sequential(model.embed, first), nn.Sequential(last, model.norm, model.head)


def microbatches(world: World, size: Size) -> list[tuple[Tensor, Tensor]]:
    """The same for every step."""
    tokens, targets = next(batches(help_text(), size))
    pairs = zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
    return [(a.to(world.device), b.to(world.device)) for a, b in pairs]


def train_stage(
    world: World, groups: list[dist.ProcessGroup], name: str, dtype: torch.dtype, run: Run
) -> tuple[nn.Module, Tensor | None]:
    """This rank's stage, and on the last rank the losses of the steps."""
    data, rank = microbatches(world, run.size), world.rank
    stage = stages_of(world, name, dtype, run.size, OURS)[rank]
    optimizer, losses = optimizer_of(stage), []
    like = torch.zeros(*data[0][0].shape, run.size.width, dtype=dtype, device=world.device)
    connect(world, groups, like)
    inbox = Inbox(1 - rank, groups[1 - rank], like, run.steps * MICROBATCHES)
    outbox = Outbox(1 - rank, groups[rank])
    for step in range(run.steps):
        inbox.early = step >= FIRST_EARLY_STEP
        if rank == 0:
            first_stage_step(stage, data, inbox, outbox)
        else:
            losses.append(last_stage_step(stage, data, inbox, outbox))
        outbox.flush()
        optimizer.step()
        optimizer.zero_grad()
    return stage, torch.stack(losses) if losses else None


def connect(world: World, groups: list[dist.ProcessGroup], like: Tensor) -> None:
    """Sends one tensor in each direction, alone: both ranks make their connections in the same order."""
    for source, group in enumerate(groups):
        move = dist.isend if world.rank == source else dist.irecv
        move(like, 1 - world.rank, group).wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize()


def first_stage_step(stage: nn.Module, data: list[tuple[Tensor, Tensor]], inbox: Inbox, outbox: Outbox) -> None:
    """One forward, one backward: a forward goes ahead of each backward."""
    waiting = []
    for tokens, _ in data:
        y = stage(tokens)
        outbox.send(y)
        waiting.append(y)
        if len(waiting) == 2:
            waiting.pop(0).backward(inbox.take())
    for y in waiting:
        y.backward(inbox.take())


def last_stage_step(stage: nn.Module, data: list[tuple[Tensor, Tensor]], inbox: Inbox, outbox: Outbox) -> Tensor:
    losses = []
    for _, targets in data:
        x = inbox.take().requires_grad_()
        losses.append(next_byte_loss(stage(x), targets))
        losses[-1].backward()
        outbox.send(x.grad)
    return torch.stack(losses).detach().mean()


def train_alone(
    world: World, name: str, dtype: torch.dtype, run: Run, norms: Norms
) -> tuple[tuple[nn.Module, nn.Module], Tensor]:
    """(both stages, losses) of one process that passes each microbatch through both."""
    data, stages = microbatches(world, run.size), stages_of(world, name, dtype, run.size, norms)
    optimizers, losses = [optimizer_of(stage) for stage in stages], []
    for _ in range(run.steps):
        of_step = []
        for tokens, targets in data:
            y = stages[0](tokens)
            x = y.detach().requires_grad_()
            of_step.append(next_byte_loss(stages[1](x), targets))
            of_step[-1].backward()
            y.backward(x.grad)
        losses.append(torch.stack(of_step).detach().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return stages, torch.stack(losses)


def optimizer_of(stage: nn.Module) -> torch.optim.Optimizer:
    """Its steps are small: differences of rounding must not grow much over hundreds of steps."""
    return torch.optim.SGD(stage.parameters(), lr=0.02, momentum=0.9)


# FSDP2 whose ranks run apart


class Pause(torch.autograd.Function):
    """Returns a copy of its input; forward and backward pause."""

    @staticmethod
    def forward(ctx, x: Tensor, pause: Callable[[], None]) -> Tensor:
        ctx.pause = pause
        pause()
        return x.clone()

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple[Tensor, None]:
        ctx.pause()
        return dx, None


def fsdp_whose_ranks_pause(world: World) -> None:
    """Two runs with other pauses end with the same bits."""
    run = of(world, Run(Size(1024, 2, 8, 128, 8), 1000), Run(Size(16, 2, 4, 8, 4), 6))
    with ops_run(world), sdpa_kernel(SAME_BITS):
        first, again = (train_with_pauses(world, run, seed) for seed in range(2))
    for (key, a), (_, b) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        a, b = a.to_local(), b.to_local()
        assert a.isfinite().all(), f"{key} is not finite"
        assert torch.equal(a, b), f"{key}: two runs end with other bits"


def train_with_pauses(world: World, run: Run, seed: int) -> nn.Module:
    chance = random.Random(world.size * seed + world.rank)  # other pauses on every rank and in every run

    def pause() -> None:
        time.sleep(chance.uniform(0, PAUSE_S))
        if world.device.type == "cuda" and world.rank == 0:
            torch.cuda._sleep(chance.randrange(PAUSE_CYCLES))

    torch.manual_seed(0)
    model = LanguageModel("gpt2", run.size, OURS).to(world.device)
    for block in model.blocks:
        block.register_forward_hook(lambda block, inputs, y: Pause.apply(y, pause))
    shard(model, world.mesh(), mp_policy=MixedPrecisionPolicy(BF16, torch.float32))
    optimizer, data, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), batches(help_text(), run.size), []
    pairs = [tuple(each.chunk(world.size)[world.rank].to(world.device) for each in next(data)) for _ in range(2)]
    for step in range(run.steps):
        tokens, targets = pairs[step % 2]
        loss = next_byte_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert sum(losses[-2:]) < sum(losses[:2]), f"the loss must fall, got {torch.stack(losses)}"
    return model


COMBINATIONS = combinations_in(vars(), {})

if __name__ == "__main__":
    sys.exit(run_by_torchrun(COMBINATIONS))
