"""Times training steps of transformer stacks with stock norms and with ours: eager, compiled, with CUDA graphs.

    python -m bench.bench_training_step --models gpt2 --ways eager

A step is forward, loss, backward and fused AdamW on bfloat16 parameters. All variants of a stack start from the same
weights and see the same batches, and after a few steps their losses must agree. As in training, the host does not wait
for the GPU between steps: a variant's turn is a few steps in a row, timed together. With --steps 1 the host waits after
each step, so that its work before the first kernel counts, too.

Steps vary by some percent, because matrix products change clocks and temperature, and because of what ran just before.
Every round therefore runs all variants in a new order. A speedup is the mean over the rounds of the stock step's time
by the variant's time in the same round; its standard error is given. One JSON line per variant goes to
training-step.jsonl. Exit code 1 if a loss differs, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import fusednorm
from fusednorm.host import native
from fusednorm.tools.console import print_table

from .cases import make_parser
from .models import make_stack
from .records import add_out_argument, describe_machine, lacks_gpu, results_path, save
from .timing import Times


@dataclass(frozen=True)
class Size:
    """A stack of `depth` blocks, and the tokens of a step: batch x length."""

    depth: int
    width: int
    heads: int
    batch: int
    length: int


# GPT-2 XL's and Llama 7B's blocks, fewer of them: a norm's share of the step does not depend on how many there are.
SIZES = {"gpt2": Size(2, 1600, 25, 8, 1024), "llama": Size(2, 4096, 32, 4, 2048)}
WAYS = ("eager", "compiled", "graphs")
WARMUP_STEPS = 5  # CUDA graphs are recorded in the second or third
SAME_LOSS = 0.02  # largest relative difference of losses after the warm-up; later, other roundings make runs diverge


@dataclass
class Variant:
    """One way to run the stack. `around` is entered for every turn and is not timed."""

    way: str  # one of WAYS
    norms: str  # what runs them: "stock" or how ours came in
    model: Callable[[Tensor], Tensor]
    parameters: list[nn.Parameter]
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    milliseconds: list[float] = field(default_factory=list)  # time of a step, one number for each turn
    loss: float = float("nan")  # of the last step
    early_loss: float = float("nan")  # after the warm-up

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)

    def turn(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """A step on each of the batches, without waiting in between."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.around():
            torch.cuda.synchronize()
            begin.record()
            loss = self.steps(batches)
            end.record()
            torch.cuda.synchronize()
        self.milliseconds.append(begin.elapsed_time(end) / len(batches))
        self.loss = loss.item()

    def steps(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Returns the last step's loss."""
        return [self.step(x, target) for x, target in batches][-1]

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        loss = (self.model(x) - target).float().square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def make_variants(name: str, size: Size, ways: Sequence[str]) -> list[Variant]:
    """The variants of a stack; their parameters are separate and start equal."""

    def variant(way: str, norms: str, prepare: Callable[[nn.Module], object], around=contextlib.nullcontext) -> Variant:
        model = make_stack(name, size.depth, size.width, size.heads, device="cuda", dtype=torch.bfloat16)
        return Variant(way, norms, prepare(model), list(model.parameters()), around)

    def patched(model: nn.Module) -> nn.Module:
        fusednorm.patch_model(model)
        return model

    # Does what enable_inductor() does, but Dynamo keeps the graphs of this backend apart from those of the stock one.
    from fusednorm.integrations.inductor import compile_graph

    def compiled(**options) -> Callable[[nn.Module], object]:
        return lambda model: torch.compile(model, fullgraph=True, **options)

    graphs = {"mode": "reduce-overhead"}
    makers = [
        ("eager", "stock", lambda model: model),
        ("eager", "enable_eager", lambda model: model, fusednorm.enable_eager),
        ("eager", "patch_model", patched),
        ("compiled", "stock", compiled()),
        ("compiled", "enable_inductor", compiled(backend=compile_graph)),
        ("graphs", "stock", compiled(**graphs)),
        ("graphs", "enable_inductor", compiled(backend=compile_graph, **graphs)),
    ]
    return [variant(*maker) for maker in makers if maker[0] in ways]


def train(variants: list[Variant], size: Size, steps: int, rounds: int, seconds: float) -> None:
    """Warm up, then run `rounds` turns of each variant, fewer if `seconds` are over."""
    pairs = make_pairs(size, "cuda")
    warm_up(variants, pairs)
    orders, end = random.Random(0), time.monotonic() + seconds
    for number in range(rounds):
        if number and time.monotonic() > end:
            print(f"Stopped after {number} of {rounds} rounds: the time is over.")
            break
        run_round(variants, pairs, steps, number, orders)


def make_pairs(size: Size, device: torch.device | str, rank: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Two batches of random inputs and targets, others on every rank."""
    torch.manual_seed(1 + rank)
    shape = (size.batch, size.length, size.width)
    x, target, x2, target2 = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    return [(x, target), (x2, target2)]


def warm_up(variants: list[Variant], pairs: list[tuple[Tensor, Tensor]]) -> None:
    for variant in variants:
        for step in range(WARMUP_STEPS):
            variant.turn([pairs[step % 2]])
        variant.early_loss = variant.loss
        variant.milliseconds.clear()


def run_round(
    variants: list[Variant], pairs: list[tuple[Tensor, Tensor]], steps: int, number: int, orders: random.Random
) -> None:
    """A turn of each variant, in a new order."""
    batches = [pairs[(number * steps + step) % 2] for step in range(steps)]
    for variant in orders.sample(variants, len(variants)):
        variant.turn(batches)


def records_of(name: str, size: Size, steps: int, variants: list[Variant], machine: dict) -> Iterator[dict]:
    stock = {v.way: v.milliseconds for v in variants if v.norms == "stock"}
    for variant in variants:
        times = Times.of(variant.milliseconds)
        speedup, error = mean_ratio(stock[variant.way], variant.milliseconds)
        yield machine | {
            "bench": "training_step",
            "model": name,
            **vars(size),
            "steps": steps,
            "native": native.extension is not None,
            "way": variant.way,
            "norms": variant.norms,
            "median_ms": times.median,
            "p10_ms": times.low,
            "p90_ms": times.high,
            "rounds": times.rounds,
            "speedup": speedup,
            "speedup_error": error,
            "early_loss": variant.early_loss,
            "loss": variant.loss,
        }


def mean_ratio(before: list[float], after: list[float]) -> tuple[float, float | None]:
    """The mean of before / after, round by round, and its standard error; None for a single round."""
    ratios = [a / b for a, b in zip(before, after, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
    return statistics.mean(ratios), error


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("bench_training_step"):
        return 2
    machine, faults = describe_machine(), 0
    path = results_path(options.out, machine, "training-step")
    for name in options.models:
        torch.compiler.reset()
        variants = make_variants(name, SIZES[name], options.ways)
        train(variants, SIZES[name], options.steps, options.rounds, options.seconds / len(options.models))
        records = list(records_of(name, SIZES[name], options.steps, variants, machine))
        save(records, path)
        print_report(name, records)
        faults += report_faults(name, records)
        del variants
        torch.cuda.empty_cache()
    return 1 if faults else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("bench_training_step", __doc__)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES), help="default: both")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="default: all")
    parser.add_argument("--rounds", type=int, default=200, help="turns of each variant (default: 200)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn, without waiting between (default: 4)")
    parser.add_argument("--seconds", type=float, default=120, help="of all models (default: 120)")
    add_out_argument(parser)
    return parser.parse_args(arguments)


def print_report(name: str, records: list[dict]) -> None:
    header = ["", "norms", "ms per step (median)", "spread", "speedup", "early loss"]
    rows = [
        [
            record["way"],
            record["norms"],
            f"{record['median_ms']:.2f}",
            f"{(record['p90_ms'] - record['p10_ms']) / record['median_ms']:.1%}",
            f"{record['speedup']:.3f} ± {record['speedup_error'] or 0:.3f}",
            f"{record['early_loss']:.4f}",
        ]
        for record in records
    ]
    title = f"Training step, {name}, our host side in {'C++' if native.extension else 'Python'}"
    print_table(title, header, rows)


def report_faults(name: str, records: list[dict]) -> int:
    """Counts and prints variants whose loss after the warm-up is not the stock norms', or is not finite at the end."""
    want = records[0]["early_loss"]
    wrong = [r for r in records if not abs(r["early_loss"] - want) <= SAME_LOSS * want or not math.isfinite(r["loss"])]
    for r in wrong:
        losses = f"loss {r['early_loss']:.4f} and at the end {r['loss']:.4f}"
        print(f"WRONG: {name}, {r['way']} with {r['norms']}: {losses}, want {want:.4f}", file=sys.stderr)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
