"""Looks for cliffs: widths at which a norm reaches a much smaller share of the floor's speed than at their neighbours.

    python -m bench.widths --step 256 --limit-seconds 500
    python -m bench.widths --check bench/results/nvidia-h200/widths.jsonl

Only the planner's choice is timed, by a few replays, and outputs are not checked (bench.bench_norm does that). Kernels
are compiled side by side some widths ahead of the timing. Widths come in an order that halves the gaps, so that a run
that ends at its limit has covered the whole range. What looks like a cliff is timed again with its neighbours once the
compilers are quiet, and the later line counts. One JSON line per cell goes to widths.jsonl. Exit code 1 if a cell is a
cliff, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch

from fusednorm.host import gpus
from fusednorm.planner.plan import text_of
from fusednorm.tools import warm
from fusednorm.tools.console import print_table, progress, show_beside

from .candidates import FLOOR, OURS, floor_call, our_calls, our_plans, statistics_of
from .cases import (
    DTYPES,
    add_direction_argument,
    add_plain_arguments,
    make_bench_inputs,
    make_parser,
    plain_case,
)
from .records import add_out_argument, case_fields, describe_machine, lacks_gpu, results_path, rows_of, save
from .timing import time_interleaved

FIRST, LAST = 768, 73728
ROWS = (2048, 16384)
MOST_ELEMENTS = 16384 * 36864  # a cell whose x has more is left out
CLIFF = 0.15  # how far a cell's share of the floor lies below its neighbours'
NEIGHBOURS = 2  # on each side
BATCH = 48  # widths compiled at a time: starting the processes takes 5 s each time
PLACE = ("direction", "x_dtype", "norm", "rows", "cols")
# With a compiler on nearly every CPU the process that times had to wait, and single times were far too long.
COMPILERS = max(1, (os.cpu_count() or 1) // 2)
SECONDS_PER_CELL, SECONDS_PER_BUILD = 0.15, 2.0  # about, on one H200 with 16 CPUs


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.check:
        return report(read(options.check))
    if lacks_gpu("widths"):
        return 2
    cells = list(make_cells(options))
    machine = describe_machine()
    path = results_path(options.out, machine, "widths")
    print(f"{len(cells)} cells, about {estimate(cells):.0f} s; to {path}")
    done, end = [], time.monotonic() + options.limit_seconds

    def keep(found: Iterator[dict]) -> None:
        for cell in found:
            done.append(cell)
            save([machine | cell], path)

    keep(measured(cells, options, end))
    count = len(done)
    keep(measure(*place_of(cell)[2:], options) for cell in doubtful(done) if time.monotonic() < end)
    print(f"{count} of {len(cells)} cells timed, {len(done) - count} of them again")
    return report(latest(done))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("widths", __doc__)
    parser.add_argument("--first", type=int, default=FIRST)
    parser.add_argument("--last", type=int, default=LAST)
    parser.add_argument("--step", type=int, default=256)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    add_plain_arguments(parser)
    add_direction_argument(parser)
    parser.add_argument("--rounds", type=int, default=7, help="timed replays of each (default: 7)")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="stop in time")
    parser.add_argument("--processes", type=int, default=COMPILERS, help="that compile (default: half of the CPUs)")
    add_out_argument(parser)
    parser.add_argument("--check", type=Path, metavar="FILE", help="measure nothing: has this file a cliff?")
    return parser.parse_args(arguments)


def make_cells(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """(norm, rows, cols): all cells of one width together, widths in an order that halves the gaps."""
    for cols in halving(range(options.first, options.last + 1, options.step)):
        for norm, rows in itertools.product(options.norms, options.rows):
            if rows * cols <= MOST_ELEMENTS:
                yield norm, rows, cols


def halving(items: range) -> list[int]:
    """Both ends, the middle, the middles of the halves, and so on: each item once."""
    steps = 1 << max(0, len(items) - 1).bit_length()
    order = [0, len(items) - 1]
    while steps > 1:
        steps //= 2
        order += range(steps, len(items), 2 * steps)
    return [items[index] for index in dict.fromkeys(order) if 0 <= index < len(items)]


def estimate(cells: list[tuple[str, int, int]]) -> float:
    """Seconds, if the CPUs compile while the GPU times: about two builds for a norm and a width."""
    builds = 2 * len({(norm, cols) for norm, _, cols in cells})
    return max(SECONDS_PER_CELL * len(cells), SECONDS_PER_BUILD * builds / COMPILERS)


def measured(cells: list[tuple[str, int, int]], options: argparse.Namespace, end: float) -> Iterator[dict]:
    """Times the cells while the next batch of widths is compiled."""
    batches = list(in_batches(cells))
    with ThreadPoolExecutor(1) as ahead:  # a thread that waits for processes; loading happens at the first call
        compiled: list[Future] = [ahead.submit(compile_batch, batch, options) for batch in batches]
        try:
            bar = progress(list(zip(batches, compiled, strict=True)), "batches of widths", "bench")
            for batch, builds in bar:
                builds.result()
                for norm, rows, cols in batch:
                    if time.monotonic() > end:
                        return
                    show_beside(bar, f"{norm} {rows}x{cols}")
                    yield measure(norm, rows, cols, options)
        finally:
            ahead.shutdown(wait=False, cancel_futures=True)


def in_batches(cells: list[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int]]]:
    widths = list(dict.fromkeys(cols for *_, cols in cells))
    for start in range(0, len(widths), BATCH):
        chosen = set(widths[start : start + BATCH])
        yield [cell for cell in cells if cell[2] in chosen]


def compile_batch(batch: list[tuple[str, int, int]], options: argparse.Namespace) -> None:
    dtype, device = DTYPES[options.dtype], gpus.spec_of(torch.device("cuda", torch.cuda.current_device()))
    wanted = [
        warm.Wanted(norm, options.direction, cols, dtype, dtype, True, (True, True, norm == "layer"))
        for norm, cols in dict.fromkeys((norm, cols) for norm, _, cols in batch)
    ]
    rows = sorted({rows for _, rows, _ in batch})
    builds = warm.distinct_builds(list(warm.plans_of(wanted, rows, device)), device)
    warm.compile_builds(builds, device, options.processes)


def measure(norm: str, rows: int, cols: int, options: argparse.Namespace) -> dict:
    case = plain_case(norm, (rows, cols), options.dtype)
    inputs = make_bench_inputs(case, "cuda")
    calls, ahead = our_calls(case, inputs), statistics_of(case, inputs.x)
    ours = calls.forward if options.direction == "forward" else lambda: calls.backward(ahead)
    times = time_interleaved({FLOOR: floor_call(options.direction, inputs), OURS: ours}, options.rounds)
    plan = our_plans(case, inputs, None)[options.direction]
    microseconds = {"median_us": round(times[OURS].median, 2), "floor_us": round(times[FLOOR].median, 2)}
    return case_fields(case, options.direction) | microseconds | {"plan": text_of(plan)}


def read(path: Path) -> list[dict]:
    return latest(rows_of([path]))


def place_of(cell: dict) -> tuple:
    return tuple(cell[name] for name in PLACE)


def latest(cells: list[dict]) -> list[dict]:
    """Each cell once, as it was timed last."""
    return list({place_of(cell): cell for cell in cells}.values())


def doubtful(cells: list[dict]) -> list[dict]:
    """The cells that look like cliffs, and their neighbours."""
    found = {place_of(cell) for cell, *_ in cliffs(cells)}
    return [cell for line in lines_of(cells) for cell in line if found & set(map(place_of, beside(line, cell)))]


def cliffs(cells: list[dict]) -> list[tuple[dict, float, float]]:
    """(cell, its share of the floor, its neighbours' median) where the share is CLIFF below the neighbours'."""
    found = []
    for line in lines_of(cells):
        for cell in line:
            share = cell["floor_us"] / cell["median_us"]
            around = [other["floor_us"] / other["median_us"] for other in beside(line, cell) if other is not cell]
            if around and share < (1 - CLIFF) * median(around):
                found.append((cell, share, median(around)))
    return found


def lines_of(cells: list[dict]) -> Iterator[list[dict]]:
    """The cells of each direction, dtype, norm and row count, by width."""
    for _, line in itertools.groupby(sorted(cells, key=place_of), lambda cell: place_of(cell)[:-1]):
        yield list(line)


def beside(line: list[dict], cell: dict) -> list[dict]:
    """A cell and its neighbours."""
    index = line.index(cell)
    return line[max(0, index - NEIGHBOURS) : index + 1 + NEIGHBOURS]


def title(cell: dict) -> str:
    return f"{cell['norm']} {cell['direction']} {cell['rows']}x{cell['cols']} {cell['x_dtype']}"


def report(cells: list[dict]) -> int:
    found = cliffs(cells)
    worst = min(cells, key=lambda cell: cell["floor_us"] / cell["median_us"], default=None)
    if worst:
        share = worst["floor_us"] / worst["median_us"]
        print(f"lowest share of the floor: {share:.0%} at {title(worst)}")
    print(f"{len(found)} of {len(cells)} cells are {CLIFF:.0%} or more below their neighbours")
    rows = [[title(c), f"{share:.0%}", f"{around:.0%}", c["plan"]] for c, share, around in found]
    if rows:
        print_table("Share of the floor", ["cell", "here", "beside", "plan"], rows)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
