"""Times training steps under FSDP2 with stock norms and with ours, eager and compiled, on the GPUs of one host.

    torchrun --nproc-per-node 2 -m bench.bench_sharded_step
    torchrun --nproc-per-node 2 -m bench.bench_sharded_step --models llama --cells 4096x8192
    torchrun --nproc-per-node 2 -m bench.bench_sharded_step --dry-run       without a GPU: small sizes over gloo

The steps, rounds and speedups are those of bench.bench_training_step. Each block is a group of FSDP2; compiled ways
compile the blocks and leave the last norm eager. A cell is the width of the stack and the tokens of a step on each
rank. All ranks begin a turn together, and its time is that of the slowest rank. Memory is what a step needs beside the
parameters and the optimizers of all variants, on the rank that needs most. One JSON line per variant goes to
sharded-step.jsonl. Exit code 1 if a loss after the warm-up differs, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fusednorm
from fusednorm.tools.console import print_table

from .bench_training_step import Size, Variant, make_pairs, records_of, report_faults, run_round, warm_up
from .cases import make_parser
from .models import BLOCKS, make_stack
from .ranks import joined_ranks, largest
from .records import add_out_argument, describe_machine, lacks_gpu, results_path, save

WAYS = ("eager", "compiled")
LENGTH = 2048  # tokens of a sequence
HEAD_WIDTH = 128
FEWEST_ROUNDS = 3  # even if the time is over: fewer give no standard error that means anything


class Cell(NamedTuple):
    width: int
    tokens: int  # of a step, on each rank

    def size(self, depth: int) -> Size:
        length = min(self.tokens, LENGTH)
        return Size(depth, self.width, max(self.width // HEAD_WIDTH, 1), self.tokens // length, length)


CELLS = [Cell(2048, 2048), Cell(2048, 8192), Cell(4096, 2048), Cell(4096, 4096), Cell(4096, 8192)]
DRY_CELLS = [Cell(64, 32)]


@dataclass
class ShardedVariant(Variant):
    step_bytes: float = 0.0

    def turn(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        clock = on_gpu if batches[0][0].is_cuda else on_cpu
        with self.around():
            largest(0)  # ranks that begin together do not wait for each other in the first collective
            milliseconds, step_bytes, loss = clock(lambda: self.steps(batches))
        milliseconds, self.step_bytes = largest(milliseconds, step_bytes)
        self.milliseconds.append(milliseconds / len(batches))
        self.loss = loss.item()


def on_gpu(steps: Callable[[], Tensor]) -> tuple[float, float, Tensor]:
    """(milliseconds, bytes allocated at most, what the steps returned)"""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin.record()
    loss = steps()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), torch.cuda.max_memory_allocated() - before, loss


def on_cpu(steps: Callable[[], Tensor]) -> tuple[float, float, Tensor]:
    begin = time.perf_counter()
    loss = steps()
    return 1e3 * (time.perf_counter() - begin), 0.0, loss


def make_variants(name: str, size: Size, ways: Sequence[str], dry_run: bool) -> list[Variant]:
    """The variants of a stack; their parameters are separate and start equal, on every rank."""
    # Does what enable_inductor() does, but Dynamo keeps the graphs of this backend apart from those of the stock one.
    from fusednorm.integrations.inductor import compile_graph

    def compiled(backend) -> Callable[[nn.Module], None]:
        def prepare(model: nn.Module) -> None:
            for block in model.blocks:  # before fully_shard, whose hooks then stay outside of the graphs
                block.compile(backend=backend, fullgraph=True, dynamic=False)

        return prepare

    def variant(way: str, norms: str, prepare: Callable[[nn.Module], object], **options) -> Variant:
        with torch.device("cpu" if dry_run else "cuda"):  # initializing large weights on the host takes minutes
            model = make_stack(name, size.depth, size.width, size.heads, dtype=torch.bfloat16)
        prepare(model)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

        def behind_embedding(x: Tensor) -> Tensor:
            # Every block's input wants a gradient, as behind an embedding. Otherwise the first needs graphs of its own.
            return model(x.detach().requires_grad_())

        return ShardedVariant(way, norms, behind_embedding, list(model.parameters()), **options)

    makers = [
        (("eager", "stock", lambda model: None), {}),
        (("eager", "enable_eager", lambda model: None), {"around": fusednorm.enable_eager}),
        (("eager", "patch_model", fusednorm.patch_model), {}),
        (("compiled", "stock", compiled("inductor")), {}),
        (("compiled", "enable_inductor", compiled(compile_graph)), {}),
    ]
    return [variant(*maker, **options) for maker, options in makers if maker[0] in ways]


def train(variants: list[Variant], size: Size, options: argparse.Namespace, rank: int, end: float) -> None:
    """Warm up, then run the rounds, fewer if `time.monotonic()` has passed `end` on any rank."""
    pairs, orders = make_pairs(size, "cpu" if options.dry_run else "cuda", rank), random.Random(0)
    warm_up(variants, pairs)
    for number in range(options.rounds):
        (late,) = largest(time.monotonic() - end)
        if late > 0 and number >= FEWEST_ROUNDS:
            break
        run_round(variants, pairs, options.steps, number, orders)


def bench_cell(
    name: str, cell: Cell, options: argparse.Namespace, rank: int, ranks: int, machine: dict, end: float
) -> list[dict]:
    size = cell.size(options.depth)
    variants = make_variants(name, size, options.ways, options.dry_run)
    train(variants, size, options, rank, end)
    records = records_of(name, size, options.steps, variants, machine)
    more = [{"tokens": cell.tokens, "ranks": ranks, "step_bytes": int(each.step_bytes)} for each in variants]
    return [a | b | {"bench": "sharded_step"} for a, b in zip(records, more, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not options.dry_run and lacks_gpu("bench_sharded_step", "--dry-run goes the same way without one"):
        return 2
    last = time.monotonic() + options.seconds
    with joined_ranks(options.dry_run) as (rank, ranks):
        if ranks == 1:
            print("bench_sharded_step: needs torchrun with 2 processes or more, got 1 process", file=sys.stderr)
            return 2
        machine = describe_machine("none, dry run" if options.dry_run else None)
        path = results_path(options.out, machine, "sharded-step")
        problems = list(itertools.product(options.models, options.cells))
        done, faults = [], 0
        for at, (name, cell) in enumerate(problems):
            now = time.monotonic()
            end = now + (last - now) / (len(problems) - at)
            records = bench_cell(name, cell, options, rank, ranks, machine, end)
            done += records
            torch.compiler.reset()
            gc.collect()  # FSDP2's hooks make cycles, which would keep the models of this cell on the GPU
            if not options.dry_run:
                torch.cuda.empty_cache()
            if rank == 0:
                save(records, path)
                faults += report_faults(f"{name} {cell.width}x{cell.tokens}", records)
        if rank == 0:
            print_report(done, ranks)
            print(f"\n{len(done)} lines added to {path}")
    return 1 if faults else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("bench_sharded_step", __doc__)
    parser.add_argument("--models", nargs="+", choices=BLOCKS, default=list(BLOCKS), help="default: both")
    text = "width and tokens of a rank's step, such as 4096x8192 (default: five)"
    parser.add_argument("--cells", nargs="+", type=parse_cell, metavar="WxT", help=text)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="default: both")
    parser.add_argument("--depth", type=int, default=4, help="blocks (default: 4)")
    parser.add_argument("--rounds", type=int, default=100, help="turns of each variant at most (default: 100)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn, without waiting between (default: 4)")
    parser.add_argument("--seconds", type=float, default=140, help="of all cells, compilation included (default: 140)")
    add_out_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="a small cell on CPU tensors, by gloo")
    options = parser.parse_args(arguments)
    options.cells = options.cells or (DRY_CELLS if options.dry_run else CELLS)
    return options


def parse_cell(text: str) -> Cell:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"a cell is width x tokens like 4096x8192, got {text}")
    return Cell(*map(int, text.split("x")))


def print_report(records: list[dict], ranks: int) -> None:
    header = "model width tokens way norms ms spread speedup rounds MB".split() + ["early loss", "last loss"]
    title = f"Training step under FSDP2 on {ranks} ranks, medians"
    print_table(title, header, list(report_rows(records)))


def report_rows(records: list[dict]) -> Iterator[list[str]]:
    for record in records:
        yield [
            *(str(record[name]) for name in ("model", "width", "tokens", "way", "norms")),
            f"{record['median_ms']:.2f}",
            f"{(record['p90_ms'] - record['p10_ms']) / record['median_ms']:.1%}",
            f"{record['speedup']:.3f} ± {record['speedup_error'] or 0:.3f}",
            str(record["rounds"]),
            f"{record['step_bytes'] / 1e6:.0f}",
            f"{record['early_loss']:.4f}",
            f"{record['loss']:.4f}",
        ]


if __name__ == "__main__":
    sys.exit(main())
