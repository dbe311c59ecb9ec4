"""Trains a small GPT in bfloat16 on our norms and on stock's, for long: the losses stay within the spread of seeds, and
memory stays flat.

    python -m tests.long_training [--steps 20000] [--minutes 9] [--kinds graph] [--out FILE]

Each seed trains twice with each kind of norms: eagerly with another number of rows in each step, and as one CUDA graph
that is replayed. With --minutes each of these runs gets an equal share of the time that is left, and the curves are
compared as far as the shortest goes, which is printed. FILE gets a JSON object. Exit code 1 if something is wrong. What
is measured of memory is this process's, and of steps that stock norms had before with the same numbers of rows: what
libraries keep for these is there already. Of short runs it says nothing, which is printed, too. So it needs a GPU for
itself: others on the same machine take time from the steps.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import trange

from examples.language_models import OURS, STOCK, LanguageModel, Norms, Size, batches, help_text, next_byte_loss
from examples.training import CPU_SIZE

GPU_SIZE = Size(width=384, blocks=6, heads=6, length=256, batch=4)
NORMS = {"stock": STOCK, "ours": OURS}
KINDS = ("changing rows", "graph")  # the longer runs have the time that is left
SEEDS = 3
WARM_UP = 0.2  # part of a run that fills caches: memory is compared from there on
MEANS = 20  # parts of the curves whose mean losses are compared
LEAST_STEPS = 200  # a shorter run says nothing of memory
LOOK = 10  # steps from one look at the memory to the next, which takes as long as a small step
HOST_GROWTH = 64  # MiB that a process may grow by after warming up
EAGER = 0.05  # eager steps for each replayed one: they take longer


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    device_bytes: list[int] = field(default_factory=list)  # asked for, and not given back, at the last look
    host_mib: list[float] = field(default_factory=list)  # the process's peak, at the last look


def capture(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def of_some_rows(feed: Iterator[tuple[Tensor, Tensor]], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Passages cut to another number and length in each step."""
    generator = torch.Generator().manual_seed(seed)
    for tokens, targets in feed:
        batch, length = (int(torch.randint(1, size + 1, (), generator=generator)) for size in tokens.shape)
        yield tokens[:batch, :length], targets[:batch, :length]


def train(norms: Norms, kind: str, seed: int, size: Size, steps: int, seconds: float) -> Run:
    """Trains on the same passages from the same parameters for a seed, whatever the norms."""
    torch.manual_seed(seed)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    model = LanguageModel("gpt2", size, norms).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=on_gpu)
    feed, run = batches(help_text(), size, seed), Run()
    if kind == "changing rows":
        feed = of_some_rows(feed, seed)
    tokens, targets = (each.to(device) for each in next(feed))

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=kind != "graph")
        loss = next_byte_loss(model(tokens).float(), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    replay = capture(step) if on_gpu and kind == "graph" else step
    begun = time.monotonic()
    for index in trange(steps, desc=f"{kind}, seed {seed}", leave=False):
        fresh = next(feed)
        if kind == "graph":
            tokens.copy_(fresh[0])
            targets.copy_(fresh[1])
        else:
            tokens, targets = (each.to(device) for each in fresh)
        run.losses.append(replay().item())
        if index % LOOK == 0:
            # What is allocated is more: blocks are not always split.
            live = torch.cuda.memory_stats()["requested_bytes.all.current"] if on_gpu else 0
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        run.device_bytes.append(live)
        run.host_mib.append(peak)
        if time.monotonic() - begun > seconds:
            break
    return run


def means(losses: list[float], count: int) -> list[float]:
    """The mean losses of MEANS equal parts of the first `count` steps."""
    part = max(1, count // MEANS)
    return [statistics.mean(losses[at : at + part]) for at in range(0, part * (count // part), part)]


def shared_steps(stock: Run, ours: Run) -> int:
    """Of a seed: steps of ours whose numbers of rows stock norms had before."""
    return min(len(stock.losses), len(ours.losses))


def faults(kind: str, runs: dict[str, list[Run]]) -> list[str]:
    """What is wrong with the runs of a kind, by norms and seeds."""
    found = []
    count = min(len(each.losses) for seeds in runs.values() for each in seeds)
    curves = {label: [means(each.losses, count) for each in seeds] for label, seeds in runs.items()}
    for at, by_norms in enumerate(zip(*(zip(*seeds, strict=True) for seeds in curves.values()), strict=True)):
        stock, ours = by_norms
        spread = max(max(each) - min(each) for each in by_norms)
        apart = abs(statistics.mean(ours) - statistics.mean(stock))
        if not apart <= spread:
            found.append(f"{kind}: in part {at} of {MEANS} the losses are {ours}, stock's are {stock}")
    for seed, (stock, run) in enumerate(zip(runs["stock"], runs["ours"], strict=True)):
        steps = shared_steps(stock, run)
        if steps < LEAST_STEPS:
            continue
        warm = int(WARM_UP * steps)
        # The tensors of a step of changing rows that are still alive after it are the loss and the tokens.
        live, later = run.device_bytes[warm], max(run.device_bytes[warm:steps])
        if later - live > 2**20:
            found.append(f"{kind}, seed {seed}: {live} bytes of GPU memory became {later}")
        before, after = run.host_mib[warm], run.host_mib[steps - 1]
        if after - before > HOST_GROWTH:
            found.append(f"{kind}, seed {seed}: {before:.0f} MiB of host memory became {after:.0f}")
    return found


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all runs together")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--out", type=Path, default=Path("out/long_training.json"))
    asked = parser.parse_args(given)
    size = GPU_SIZE if torch.cuda.is_available() else CPU_SIZE
    end, left = time.monotonic() + 60 * asked.minutes, len(asked.kinds) * len(NORMS) * SEEDS
    found, fewest, report = [], {}, {}
    for kind in asked.kinds:
        steps = asked.steps if kind == "graph" else max(1, int(EAGER * asked.steps))
        runs: dict[str, list[Run]] = {label: [] for label in NORMS}
        for seed in range(SEEDS):
            for label, norms in NORMS.items():
                share = (end - time.monotonic()) / left
                runs[label].append(train(norms, kind, seed, size, steps, share))
                left -= 1
        found += faults(kind, runs)
        fewest[kind] = min(len(each.losses) for seeds in runs.values() for each in seeds)
        for label, seeds in runs.items():
            kept = [
                {key: [values[0], values[len(values) // 2], values[-1]] for key, values in asdict(each).items()}
                | {"steps": len(each.losses), "losses": means(each.losses, len(each.losses))}
                for each in seeds
            ]
            report[f"{kind}, {label}"] = kept
            last = ", ".join(f"{each['losses'][-1]:.4f} after {each['steps']} steps" for each in kept)
            print(f"{kind}, {label}: loss {last}")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps({"faults": found, "fewest_steps": fewest, "runs": report}, indent=1))
    counts = " and ".join(f"{count} steps of kind {kind!r}" for kind, count in fewest.items())
    short = [kind for kind, count in fewest.items() if count < LEAST_STEPS]
    flat = f"but fewer than {LEAST_STEPS} say nothing of memory" if short else "and memory is flat"
    print(*found or [f"In {counts}, the losses are within the spread of seeds, {flat}."], sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
