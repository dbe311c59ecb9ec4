"""Times a norm among its neighbours, as a training step has it: its input was just written, its output is read at once.

    python -m bench.chains --shapes 16384x4096 --candidates fusednorm cudnn

A chain is one CUDA graph, with a cold L2 at its start:

alone         one call
four          four calls in a row, on the same tensors
elementwise   a kernel that writes what the norm reads (grad_out in a backward, x in a forward), the call, and a kernel
              that reads what it wrote (dx or y)
matmul        the same between two matrix products

Each candidate is checked against float64 first. The floor's stream kernel takes the norm's place in every chain, and
without_norm_us is the time of a chain without a norm. One JSON line per case and chain goes to chains.jsonl. Exit code
1 if one of our outputs is wrong or fails, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from fusednorm.tools.console import print_table

from .bench_norm import compile_ours, enter, timed_call
from .candidates import CANDIDATES, FLOOR, OURS, Calls, floor_call, is_ours, present
from .cases import (
    SHAPE_HELP,
    SHAPE_SETS,
    BenchInputs,
    add_direction_argument,
    add_plain_arguments,
    make_bench_inputs,
    make_parser,
    parse_shape,
    plain_cases,
)
from .records import add_out_argument, case_fields, describe_machine, lacks_gpu, results_path, save
from .timing import time_interleaved

CHAINS = ("alone", "four", "elementwise", "matmul")
INNER = 512  # inner side of the matrix products, which then take about as long as a norm
WITHOUT = "without_norm"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("chains"):
        return 2
    chosen, cases, machine = present(options.candidates), plain_cases(options), describe_machine()
    path = results_path(options.out, machine, "chains")
    compile_ours(cases, chosen)
    records, wrong = [], False
    for case in cases:
        inputs = make_bench_inputs(case, "cuda")
        entries = {name: enter(candidate, case, inputs) for name, candidate in chosen.items()}
        inputs.forget()  # the oracle's float64 tensors
        for name, entry in entries.items():
            if not entry.calls:
                print(f"{name} is left out of {case}: {entry.refusal}", file=sys.stderr)
                wrong |= is_ours(name) and entry.failed
        calls = {name: entry.calls for name, entry in entries.items() if entry.calls}
        norms, written = norms_of(calls, options.direction, inputs), written_before(options.direction, inputs)
        for chain in options.chains:
            times = time_interleaved(chain_calls(chain, norms, written), options.rounds)
            found = {f"{name}_us": round(each.median, 3) for name, each in times.items()}
            records.append(machine | case_fields(case, options.direction) | {"chain": chain} | found)
            save(records[-1:], path)
            torch.cuda.empty_cache()  # the graphs' own pools
    names = [*chosen, FLOOR]
    print_table("Us of the norm in each chain", ["case", "chain", *names], [row_of(r, names) for r in records])
    return 1 if wrong else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("chains", __doc__)
    shapes = [parse_shape(text) for text in SHAPE_SETS["quick"]]
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=shapes, metavar="MxN", help=SHAPE_HELP)
    add_plain_arguments(parser)
    add_direction_argument(parser)
    parser.add_argument("--chains", nargs="+", choices=CHAINS, default=CHAINS, help="default: all")
    ours_and_peers = [OURS, "aten", "cudnn"]
    text = f"as of bench.bench_norm (default: {', '.join(ours_and_peers)})"
    parser.add_argument(
        "--candidates", nargs="+", choices=CANDIDATES, default=ours_and_peers, metavar="NAME", help=text
    )
    parser.add_argument("--rounds", type=int, default=40, help="timed replays of each (default: 40)")
    add_out_argument(parser)
    return parser.parse_args(arguments)


def written_before(direction: str, inputs: BenchInputs) -> Tensor:
    """The tensor that the kernel before the norm writes."""
    return inputs.x if direction == "forward" else inputs.grad_out


def norms_of(calls: dict[str, Calls], direction: str, inputs: BenchInputs) -> dict[str, Callable[[], Tensor]]:
    """Calls that return y or dx, by candidate; the floor among them."""

    def norm_of(call: Callable) -> Callable[[], Tensor]:
        return (lambda: call().y) if direction == "forward" else (lambda: call().dx)

    norms = {name: norm_of(timed_call(each, direction)) for name, each in calls.items()}
    return norms | {FLOOR: floor_call(direction, inputs)}


def chain_calls(chain: str, norms: dict[str, Callable[[], Tensor]], written: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The chain of each norm, and where the norm has neighbours, the chain without a norm. Each returns what its last
    kernel wrote. `written` is contiguous, and is what the first neighbour writes."""
    if chain == "alone":
        return norms
    if chain == "four":
        return {name: lambda norm=norm: [norm() for _ in range(4)][-1] for name, norm in norms.items()}
    before, after = elementwise_neighbours(written) if chain == "elementwise" else products(written)

    def between(norm: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def call() -> Tensor:
            before()
            return after(norm())

        return call

    return {name: between(norm) for name, norm in norms.items()} | {WITHOUT: between(lambda: written)}


def elementwise_neighbours(written: Tensor) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    source, result = -written, torch.empty_like(written)
    return lambda: torch.neg(source, out=written), lambda read: torch.neg(read, out=result)


def products(written: Tensor) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
    rows, cols = written.flatten(0, -2).shape
    sides = (rows, INNER), (INNER, cols), (rows, INNER)
    left, right, result = (torch.randn(each, dtype=written.dtype, device=written.device) for each in sides)
    return (
        lambda: torch.mm(left, right, out=written.view(rows, cols)),
        lambda read: torch.mm(read.view(rows, cols), right.t(), out=result),
    )


def row_of(record: dict, names: list[str]) -> list[str]:
    """Microseconds of the norm itself: of the chain less the chain without it, or a fourth of four."""
    share, rest = (4 if record["chain"] == "four" else 1), record.get(f"{WITHOUT}_us", 0.0)
    times = [record.get(f"{name}_us") for name in names]
    texts = ["" if each is None else f"{(each - rest) / share:.1f}" for each in times]
    return [f"{record['norm']} {record['rows']}x{record['cols']}", record["chain"], *texts]


if __name__ == "__main__":
    sys.exit(main())
