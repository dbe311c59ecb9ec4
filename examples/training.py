"""What the examples share: arguments, processes, a training loop, and its results as a table and a picture."""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fusednorm.tools.plan import positive

from .language_models import OURS, STOCK, LanguageModel, Norms, Size, batches, help_text, next_byte_loss

CPU_SIZE = Size(width=64, blocks=2, heads=4, length=64, batch=8)
SMALL_GPU_SIZE = Size(width=768, blocks=12, heads=12, length=1024, batch=8)  # 86 to 92 million parameters
GPU_SIZE = Size(width=2048, blocks=16, heads=16, length=1024, batch=16)  # 0.8 to 1 billion parameters
WARM_UP_STEPS = 5  # they compile, allocate and fill caches
NORMS: dict[str, dict[str, Norms]] = {"stock": {"stock norms": STOCK}, "ours": {"fusednorm": OURS}}
NORMS["both"] = NORMS["stock"] | NORMS["ours"]


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)  # of each step, averaged over all ranks
    seconds: list[float] = field(default_factory=list)
    memory_bytes: int = 0  # this rank's peak of GPU memory, or of process memory if there is no GPU


def arguments(
    example: str,
    description: str,
    given: Sequence[str] | None = None,
    models: Sequence[str] = (),
    norms: bool = False,
    **switches: str,
) -> argparse.Namespace:
    """Parses `given`, or the command line. --help shows the first paragraph of the example's docstring. The example has
    a choice of `models`, if there are any, of `norms` to train, and `switches`, each with its help."""
    parser = argparse.ArgumentParser(prog=f"python -m examples.{example}", description=description.split("\n\n")[0])
    parser.set_defaults(example=example)
    if models:
        parser.add_argument("--model", choices=models, default=models[-1], help=f"default: {models[-1]}")
    for name, text in switches.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
    if norms:
        parser.add_argument("--norms", choices=tuple(NORMS), default="both", help="default: both")
    parser.add_argument("--steps", type=positive, default=100, help="of each run (default: 100)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of what is written (default: out)")
    return parser.parse_args(given)


def only_process() -> tuple[torch.device, Size]:
    """The device of an example that runs in one process, and a model size for it."""
    torch.set_float32_matmul_precision("high")  # TF32, on a GPU
    return (torch.device("cuda"), SMALL_GPU_SIZE) if torch.cuda.is_available() else (torch.device("cpu"), CPU_SIZE)


def start_processes() -> tuple[torch.device, Size]:
    """Joins the processes of torchrun, or forms a group of one. Returns this rank's device and a model size."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device, GPU_SIZE if cuda else CPU_SIZE


def end_processes() -> None:
    dist.destroy_process_group()
    # gloo's threads let go of the tensors of the last collective a moment after it has ended. If Python ends before,
    # the process aborts (torch 2.15).
    time.sleep(0.5)


def as_it_is(model: LanguageModel) -> nn.Module:
    return model


def train_each(
    asked: argparse.Namespace,
    device: torch.device,
    size: Size,
    spread: Callable[[LanguageModel], nn.Module] = as_it_is,
    readers: int = 1,
) -> None:
    """Trains a model on each kind of norms that `asked` names, and reports. `spread` distributes a model over ranks.
    The ranks form `readers` groups, and each group reads its own text."""
    runs = {}
    for label, norms in NORMS[asked.norms].items():
        torch.manual_seed(0)
        model = spread(LanguageModel(asked.model, size, norms).to(device))
        group = rank() * readers // world_size()
        runs[label] = train(model, batches(help_text(), size, seed=group), asked.steps)
        del model
    if rank() == 0:
        print(f"{asked.model}, processes: {world_size()}, {readers * size.tokens} tokens a step")
        report(runs, readers * size.tokens, asked.out / f"{asked.example}_{asked.model}.png")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4 if next(model.parameters()).is_cuda else 3e-3)


def train(
    model: nn.Module,
    feed: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = next_byte_loss,
) -> Run:
    """Trains a model that maps inputs, such as tokens, to what the loss takes, or to an object of transformers with
    `logits`."""
    run, device = Run(), next(model.parameters()).device
    optimizer = optimizer or make_optimizer(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _, (tokens, targets) in zip(range(steps), feed, strict=False):
        began = time.perf_counter()
        output = model(tokens.to(device))
        logits = output if isinstance(output, Tensor) else output.logits
        found = loss(logits.float(), targets.to(device))
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = found.detach() / world_size()
        if dist.is_initialized():
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


def report(
    runs: dict[str, Run],
    tokens_in_a_step: int,
    picture: Path,
    loss: str = "cross entropy (nats per byte)",
    title: str = "A language model on Python's help",
) -> None:
    for label, run in runs.items():
        timed = run.seconds[WARM_UP_STEPS:]
        speed = f"{tokens_in_a_step / statistics.median(timed):.0f} tokens/s" if timed else "not timed"
        last = statistics.mean(run.losses[-10:])
        print(f"{label:12} {speed:>19}  {run.memory_bytes / 2**30:6.2f} GiB  loss {run.losses[0]:.3f} -> {last:.3f}")
    if not all(run.seconds[WARM_UP_STEPS:] for run in runs.values()):
        print(f"The first {WARM_UP_STEPS} steps warm up and are not timed: ask for --steps {10 * WARM_UP_STEPS}.")
    elif not torch.cuda.is_available():
        print("On a CPU all of these run the same norms: differences in tokens/s are noise.")
    draw({label: run.losses for label, run in runs.items()}, picture, title, loss)


def draw(losses: dict[str, list[float]], path: Path, title: str, loss: str = "cross entropy (nats per byte)") -> None:
    """The loss curves as a picture, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed, so there is no picture: pip install 'fusednorm[demo]'")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (label, each), style in zip(losses.items(), ("-", "--", ":", "-."), strict=False):
        axes.plot(each, style, label=label)
    axes.set(xlabel="step", ylabel=loss, title=title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"Loss curves: {path}")
