"""What the examples share: processes, a loop of training steps, and what it comes to as a table and a picture."""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .language_models import OURS, STOCK, LanguageModel, Norms, Size, batches, help_text, next_byte_loss

CPU_SIZE, CPU_BATCH = Size(width=64, blocks=2, heads=4, length=64), 8
GPU_SIZE, GPU_BATCH = Size(width=2048, blocks=16, heads=16, length=1024), 16  # 0.8 to 1 billion parameters
NORMS: dict[str, dict[str, Norms]] = {"stock": {"stock norms": STOCK}, "ours": {"fusednorm": OURS}}
NORMS["both"] = NORMS["stock"] | NORMS["ours"]


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)  # the mean over all ranks, of each step
    seconds: list[float] = field(default_factory=list)
    memory_bytes: int = 0  # the most of this rank: of the GPU, or of the process where there is none


def arguments(example: str, description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m examples.{example}", description=description.split("\n\n")[0])
    parser.set_defaults(example=example)
    parser.add_argument("--model", choices=("gpt2", "llama"), default="llama")
    parser.add_argument("--norms", choices=tuple(NORMS), default="both")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    return parser.parse_args()


def start_processes() -> torch.device:
    """Join the processes that torchrun started, or be the only one. Returns this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def train_each(
    asked: argparse.Namespace, device: torch.device, spread: Callable[[LanguageModel], nn.Module], readers: int
) -> None:
    """Train a model on each kind of norms that was asked for, spread over the ranks by `spread`, and report. The ranks
    read in `readers` groups, each a text of its own."""
    size, batch = (GPU_SIZE, GPU_BATCH) if device.type == "cuda" else (CPU_SIZE, CPU_BATCH)
    runs = {}
    for label, norms in NORMS[asked.norms].items():
        torch.manual_seed(0)
        model = spread(LanguageModel(asked.model, size, norms).to(device))
        group = dist.get_rank() * readers // dist.get_world_size()
        runs[label] = train(model, batches(help_text(), size.length, batch, seed=group), device, asked.steps)
        del model
    if dist.get_rank() == 0:
        report(runs, readers * batch * size.length, asked)


def train(model: nn.Module, feed: Iterator[tuple[Tensor, Tensor]], device: torch.device, steps: int) -> Run:
    run = Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4 if device.type == "cuda" else 3e-3)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _, (tokens, targets) in zip(range(steps), feed, strict=False):
        began = time.perf_counter()
        loss = next_byte_loss(model(tokens.to(device)).float(), targets.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        run.losses.append(mean.item())  # waits for the device
        run.seconds.append(time.perf_counter() - began)
    run.memory_bytes = peak_memory(device)
    return run


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def report(runs: dict[str, Run], tokens_in_a_step: int, asked: argparse.Namespace) -> None:
    print(f"{asked.model}, {dist.get_world_size()} processes, {tokens_in_a_step} tokens in a step")
    for label, run in runs.items():
        seconds = statistics.median(run.seconds[1:] or run.seconds)  # the first compiles
        last = statistics.mean(run.losses[-10:])
        print(
            f"{label:12} {tokens_in_a_step / seconds:10.0f} tokens/s  {run.memory_bytes / 2**30:6.2f} GiB  "
            f"loss {run.losses[0]:.3f} -> {last:.3f}"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed, so there is no picture: pip install 'fusednorm[demo]'")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (label, run), style in zip(runs.items(), ("-", "--"), strict=False):
        axes.plot(run.losses, style, label=label)
    axes.set(xlabel="step", ylabel="cross entropy (nats per byte)", title=f"{asked.model} on Python's help")
    axes.legend()
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{asked.example}_{asked.model}.png"
    figure.savefig(path, dpi=150)
    print(f"Loss curves: {path}")
