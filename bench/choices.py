"""Times the plans that two checkouts' planners choose, one beside the other, with this checkout's kernels.

    git archive main | tar x -C .wt/base --one-top-level
    python -m bench.choices --against .wt/base
    python -m bench.choices --against .wt/base --shapes 16384x4096 4096x5120 --allocations 5
    python -m bench.choices --against .wt/base --random 60 --seed 2 --minutes 3

By default the cells are the twelve shapes and the widths of models at few and many rows, both norms and passes;
--random draws them as bench.survey does, before those of --shapes. Cells in which the planners agree are not timed. The
others are timed once for each allocation of the tensors, and the ratio is the median over the allocations. Cells that
the file has with the same two plans are not timed again. The table has the mean and the 95th percentile per pass, over
all cells, and the cells that differ most. Exit code 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from fusednorm.host import gpus
from fusednorm.planner.plan import from_text, text_of
from fusednorm.tools.console import progress

from . import sweep
from .candidates import FLOOR, floor_call, reason
from .cases import DIRECTIONS, NORMS, SHAPE_SETS, BenchCase, make_bench_inputs, make_parser, parse_shape, plain_case
from .records import add_out_argument, case_fields, describe_machine, lacks_gpu, results_path, rows_of, save
from .survey import drawn
from .timing import time_interleaved

WIDTHS = (768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384)
ROWS = (256, 1024, 2048, 4096, 16384)
SHAPES = (*SHAPE_SETS["proof"], *(f"{rows}x{cols}" for rows in ROWS for cols in WIDTHS))
SHOWN = 12  # cells at each end of the table
# Runs in the other checkout, whose planner may have another name; prints each plan, or the fields of an early one.
ASKED = """
import json, sys, torch
from dataclasses import replace
from bench import sweep
from bench.cases import DTYPES, plain_case
from fusednorm.host import gpus
try:
    from fusednorm.planner.choice import choose
except ImportError:
    from fusednorm.planner.heuristics import choose
try:
    from fusednorm.planner.plan import text_of
except ImportError:
    def text_of(plan):
        numbers = ",".join(str(int(value)) for value in vars(plan).values())
        return f"{type(plan).__name__.removesuffix('Plan')}({numbers})"
device = gpus.spec_of(torch.device("cuda", torch.cuda.current_device()))
for norm, direction, rows, cols, dtype, weights in json.load(sys.stdin):
    weights = DTYPES[weights or dtype]
    case = plain_case(norm, (4, cols), dtype)
    case = replace(case, weight_dtype=weights, bias_dtype=case.bias_dtype and weights)
    problem = sweep.make_call(case, sweep.meta_inputs(case), direction).problem
    print(text_of(choose(problem, rows, device)))
"""

Cell = tuple[str, str, int, int, str, str]  # norm, direction, rows, cols, dtype, that of the parameters if another


def chosen(folder: Path, cells: list[Cell]) -> list[str]:
    """The plan that the planner of a checkout chooses in each cell, as text."""
    environment = os.environ | {"PYTHONPATH": str(folder.resolve())}
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(
        command, input=json.dumps(cells), capture_output=True, text=True, env=environment, cwd=folder, check=False
    )
    if done.returncode:
        raise SystemExit(f"choices: {folder} has no planner that can be asked: {done.stderr.strip().splitlines()[-1]}")
    return [text_of(from_text(text)) for text in done.stdout.split()]


def case_of(cell: Cell, rows: int | None = None) -> BenchCase:
    norm, _, of_cell, cols, dtype, weights = cell
    return plain_case(norm, (rows or of_cell, cols), dtype, weights)


def time_cell(cell: Cell, plans: dict[str, str], allocations: int, rounds: int) -> dict:
    case, direction = case_of(cell), cell[1]
    kept, ratios, times = [], [], {}
    for allocation in range(allocations):
        kept.append(torch.empty((1 + 3 * allocation) << 21, dtype=torch.int8, device="cuda"))  # moves what follows
        inputs = make_bench_inputs(case, "cuda")
        calls = {FLOOR: floor_call(direction, inputs)}
        for name, text in plans.items():
            launches = sweep.prepare(case, inputs, direction, from_text(text))
            calls[name] = lambda launches=launches: [launch.run() for launch in launches[0]]  # keeps the outputs
        times = time_interleaved(calls, rounds)
        ratios.append(times["new"].median / times["old"].median)
    medians = {f"{name}_us": round(each.median, 2) for name, each in times.items()}
    return fields_of(cell, plans) | medians | {"ratio": round(statistics.median(ratios), 4)}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("choices", __doc__)
    parser.add_argument("--against", type=Path, required=True, metavar="FOLDER", help="the other checkout")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, help="default: see above; with --random none")
    parser.add_argument("--random", type=int, metavar="CELLS", default=0, help="cells at random")
    parser.add_argument("--seed", type=int, default=0, help="of --random (default: 0)")
    parser.add_argument("--dtype", nargs="+", choices=("bf16", "fp32"), default=["bf16"])
    text = "of the parameters, with --shapes (default: that of all tensors)"
    parser.add_argument("--weight-dtype", choices=("bf16", "fp32"), default="", help=text)
    parser.add_argument("--allocations", type=int, default=3, help="of the tensors of a cell (default: 3)")
    parser.add_argument("--rounds", type=int, default=15, help="timed replays of each plan (default: 15)")
    parser.add_argument("--minutes", type=float, default=60, help="no cell is begun after this time (default: 60)")
    add_out_argument(parser)
    return parser.parse_args(arguments)


def cells_of(options: argparse.Namespace) -> list[Cell]:
    shapes = options.shapes or [parse_shape(text) for text in SHAPES if not options.random]
    drawn_cells = drawn(options.random, options.seed)
    at_random = [(task.norm, task.direction, rows, task.cols, task.dtype, "") for task, rows in drawn_cells]
    asked = itertools.product(options.dtype, shapes, DIRECTIONS, NORMS)
    weights = options.weight_dtype
    of_shapes = [(norm, direction, *shape.sizes, dtype, weights) for dtype, shape, direction, norm in asked]
    return list(dict.fromkeys([*at_random, *of_shapes]))


def fields_of(cell: Cell, plans: dict[str, str]) -> dict:
    weights = {"weights": cell[-1]} if cell[-1] else {}
    return case_fields(case_of(cell), cell[1]) | weights | plans


def main(arguments: list[str] | None = None) -> int:
    start, options = time.monotonic(), parse(arguments)
    if lacks_gpu("choices"):
        return 2
    device = gpus.spec_of(torch.device("cuda", torch.cuda.current_device()))
    cells = cells_of(options)
    here = Path(__file__).parents[1]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        old, new = pool.map(lambda folder: chosen(folder, cells), (options.against, here))
    pairs = {cell: {"old": a, "new": b} for cell, a, b in zip(cells, old, new, strict=True) if a != b}
    machine, path = describe_machine(), results_path(options.out, describe_machine(), "choices")
    known = rows_of([path] if path.exists() else [])
    records = {
        cell: each for cell, plans in pairs.items() for each in known if fields_of(cell, plans).items() <= each.items()
    }
    left = {cell: plans for cell, plans in pairs.items() if cell not in records}
    jobs = {
        (case_of(cell, rows=4), cell[1], from_text(text), device.arch): None
        for cell, plans in left.items()
        for text in plans.values()
    }
    with multiprocessing.get_context("spawn").Pool(max(1, len(os.sched_getaffinity(0)) - 1)) as pool:
        for _ in progress(pool.imap_unordered(sweep.compile_plan, jobs), "compiled", "bench"):
            pass
    for cell, plans in progress(list(left.items()), "timed", "bench"):
        if time.monotonic() > start + 60 * options.minutes:
            break
        try:
            records[cell] = machine | time_cell(cell, plans, options.allocations, options.rounds)
        except Exception as error:  # ends this cell, and not the others
            print(f"choices: {cell} has no times: {reason(error)}", file=sys.stderr)
        else:
            save([records[cell]], path)
    report([cell for cell in cells if cell in records or cell not in pairs], list(records.values()))
    return 0


def report(cells: list[Cell], records: list[dict]) -> None:
    for direction in DIRECTIONS:
        found = [each["ratio"] for each in records if each["direction"] == direction]
        alike = sum(cell[1] == direction for cell in cells) - len(found)
        if ratios := sorted([*found, *[1.0] * alike]):
            slow = ratios[math.ceil(0.95 * len(ratios)) - 1]
            text = f"{len(found)} of {len(ratios)} cells have another plan; new / old "
            text += f"{statistics.mean(ratios) - 1:+.2%}, p95 {slow - 1:+.1%}, at worst {ratios[-1] - 1:+.1%}"
            print(f"{direction:8} {text}")
    ordered = sorted(records, key=lambda record: -record["ratio"])
    for each in ordered if len(ordered) <= 2 * SHOWN else (*ordered[:SHOWN], *ordered[-SHOWN:]):
        cell = f"{each['norm']:5} {each['direction']:8} {each['rows']:5} x {each['cols']:<5}"
        print(f"{cell} {each['ratio'] - 1:+6.1%} of {each['old_us']:7.1f} us  {each['old']} -> {each['new']}")


if __name__ == "__main__":
    sys.exit(main())
