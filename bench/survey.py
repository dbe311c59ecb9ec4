"""Times the candidates of many problems, at several row counts, and the planner's own choices beside them.

    python -m bench.survey --cols 4096 5120 --rows-per-sm 4 16 62 248 --direction backward
    python -m bench.survey --dense --minutes 8
    python -m bench.survey --random 60 --seed 1

--dense takes every width of a table in both passes: multiples of 128 up to 16384, wider ones, and some that TMA
cannot copy; in bfloat16, then in float32. The coarse widths come first, so that a run that ends early is of use.
--random draws cells from all of them. Plans are compiled in parallel, ahead of the cells that are timed; a plan that
spills is not timed. One JSON line per cell goes to families.jsonl, with the planner's own choice (`own`) and the times
of all plans, the fastest first. A cell is not timed again if the file, or one of --known, has times of all candidates.
Outputs are not checked: bench.sweep and the tests do. Exit code 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from fusednorm.host import gpus
from fusednorm.planner import choice
from fusednorm.planner.device import DeviceSpec
from fusednorm.planner.plan import Plan, ReferencePlan, text_of
from fusednorm.tools.tune import MOST_ELEMENTS, MOST_ROWS, ROWS_PER_SM, Task, dense, plans_of, row_counts

from . import sweep
from .candidates import FLOOR, floor_call, reason
from .cases import (
    DIRECTIONS,
    NORMS,
    BenchCase,
    add_direction_argument,
    add_plain_arguments,
    make_bench_inputs,
    make_parser,
    plain_case,
)
from .records import (
    add_out_argument,
    case_fields,
    describe_machine,
    lacks_gpu,
    results_path,
    rows_of,
    save,
)
from .timing import time_interleaved


class Compiled(NamedTuple):
    """The plans of a task, None or why each is not timed, and the planner's own (most rows, plan)."""

    task: Task
    plans: dict[Plan, str | None]
    choices: tuple[tuple[float, Plan], ...]


def drawn(count: int, seed: int) -> list[tuple[Task, int]]:
    """Cells at random: rows and columns evenly in octaves, three in four of bfloat16, one width in six odd."""
    at, found = random.Random(seed), []
    while len(found) < count:
        cols, rows = (round(2 ** at.uniform(6, math.log2(most))) for most in (32768, MOST_ROWS))
        cols = cols | 1 if at.random() < 1 / 6 else -(-cols // 8) * 8
        task = Task(at.choice(NORMS), at.choice(DIRECTIONS), cols, at.choice(("bf16", "bf16", "bf16", "fp32")))
        if rows * cols <= MOST_ELEMENTS:
            found.append((task, rows))
    return found


def case_of(task: Task, rows: int) -> BenchCase:
    return plain_case(task.norm, (rows, task.cols), task.dtype)


def compile_all(job: tuple[Task, DeviceSpec]) -> Compiled:
    """Compiles the candidates of a task and the planner's own plans, in a process of its own."""
    task, device = job
    asked = task.wanted.problem
    choices = choice.choices(asked, device)
    own = (plan for _, plan in choices if not isinstance(plan, ReferencePlan))
    plans = {}
    for plan in dict.fromkeys((*own, *plans_of(asked, device))):
        built = sweep.compile_plan((case_of(task, 4), task.direction, plan, device.arch))
        spills = None if isinstance(built, str) or not built[1] else f"{built[1]} bytes of stack"
        plans[plan] = built if isinstance(built, str) else spills
    return Compiled(task, plans, choices)


def time_cell(compiled: Compiled, case: BenchCase, rounds: int) -> dict:
    """The record of one cell, without the machine."""
    inputs, direction = make_bench_inputs(case, "cuda"), compiled.task.direction
    calls, refused = {FLOOR: floor_call(direction, inputs)}, {}
    for plan, why in compiled.plans.items():
        text = text_of(plan)
        try:
            if not why:
                launches = sweep.prepare(case, inputs, direction, plan)
                calls[text] = lambda launches=launches: [launch.run() for launch in launches[0]]  # keeps the outputs
                calls[text]()
        except Exception as error:  # goes into the record and does not end the survey
            why = reason(error)
            calls.pop(text, None)
        if why:
            refused[text] = why
    times = time_interleaved(calls, rounds)
    plans = sorted((round(each.median, 2), text) for text, each in times.items() if text != FLOOR)
    own = next(plan for most_rows, plan in compiled.choices if case.rows <= most_rows)
    return case_fields(case, direction) | {
        "floor_us": round(times[FLOOR].median, 2),
        "own": text_of(own),
        "plans": [[text, us] for us, text in plans],
        "refused": refused,
    }


def timed_plans(paths: Iterable[Path], gpu: str) -> dict[tuple, set[str]]:
    """{cell: texts of the plans that were timed, or refused}."""
    found: dict[tuple, set[str]] = {}
    for record in rows_of(path for path in paths if path.exists()):
        if record["gpu"] == gpu:
            plans = {text for text, _ in record["plans"]} | {*record["refused"]}
            found.setdefault(tuple(record[name] for name in CELL), set()).update(plans)
    return found


CELL = "norm", "direction", "rows", "cols", "x_dtype"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("survey", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cols", nargs="+", type=int, help="widths")
    what.add_argument("--dense", action="store_true", help="all widths of a table")
    what.add_argument("--random", type=int, metavar="CELLS", help="cells at random")
    parser.add_argument("--seed", type=int, default=0, help="of --random (default: 0)")
    text = f"row counts (default: {' '.join(map(str, ROWS_PER_SM))})"
    parser.add_argument("--rows-per-sm", nargs="+", type=int, default=ROWS_PER_SM, help=text)
    add_plain_arguments(parser)
    add_direction_argument(parser)
    parser.add_argument("--rounds", type=int, default=11, help="timed replays of each plan (default: 11)")
    parser.add_argument("--minutes", type=float, default=60, help="no cell is begun after this time (default: 60)")
    parser.add_argument("--known", nargs="+", type=Path, default=[], metavar="FILE", help="earlier records")
    add_out_argument(parser)
    return parser.parse_args(arguments)


def cells(options: argparse.Namespace, device: DeviceSpec) -> dict[Task, list[int]]:
    """The row counts of each task, in the order in which they are timed."""
    if options.random:
        found: dict[Task, list[int]] = {}
        for task, rows in drawn(options.random, options.seed):
            found.setdefault(task, []).append(rows)
        return found
    asked = (
        Task(norm, options.direction, cols, options.dtype) for cols in options.cols or () for norm in options.norms
    )
    plain = (task for task in dense() if not task.form and not task.weights)
    return {task: list(row_counts(task, device, options.rows_per_sm)) for task in (plain if options.dense else asked)}


def main(arguments: list[str] | None = None) -> int:
    start, options = time.monotonic(), parse(arguments)
    if lacks_gpu("survey"):
        return 2
    machine, device = describe_machine(), gpus.spec_of(torch.device("cuda", torch.cuda.current_device()))
    path = results_path(options.out, machine, "families")
    known = timed_plans([path, *options.known], machine["gpu"])
    wanted: dict[Task, list[BenchCase]] = {}
    for task, counts in cells(options, device).items():
        texts = {text_of(plan) for plan in plans_of(task.wanted.problem, device)}
        fields = [(case, case_fields(case, task.direction)) for case in (case_of(task, rows) for rows in counts)]
        left = [case for case, each in fields if not texts <= known.get(tuple(each[name] for name in CELL), set())]
        wanted |= {task: left} if left else {}
    jobs, last = [(task, device) for task in wanted], start + 60 * options.minutes
    with multiprocessing.get_context("spawn").Pool(max(1, len(os.sched_getaffinity(0)) - 1)) as pool:
        built = pool.imap(compile_all, jobs)
        with tqdm(total=sum(map(len, wanted.values())), desc="timed", unit="cell") as progress:
            for _ in jobs:
                try:
                    compiled = built.next(max(0, last - time.monotonic()))
                except multiprocessing.TimeoutError:
                    break
                torch.cuda.empty_cache()
                for case in wanted[compiled.task]:
                    if time.monotonic() < last:
                        save([machine | time_cell(compiled, case, options.rounds)], path)
                        progress.update()
        pool.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
