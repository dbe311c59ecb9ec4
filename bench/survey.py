"""Times the candidates of many problems, at several row counts, and the planner's own choices beside them.

    python -m bench.survey --cols 4096 5120 --rows-per-sm 4 16 62 248 --direction backward
    python -m bench.survey --dense --minutes 8
    python -m bench.survey --random 60 --seed 1

--dense takes every width of a table in both passes: multiples of 128 up to 16384, wider ones, and some that TMA
cannot copy; in bfloat16, then in float32. The coarse widths come first, so that a run that ends early is of use.
--random draws cells from all of them. Plans are compiled in parallel, ahead of the cells that are timed; a plan that
spills is not timed. One JSON line per cell goes to families.jsonl, with the planner's own choice (`own`) and the times
of all plans, the fastest first. Cells that the file has are not timed again. Outputs are not checked: bench.sweep and
the tests do. Exit code 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from fusednorm.host import gpus
from fusednorm.planner import choice
from fusednorm.planner.candidates import candidates
from fusednorm.planner.device import DeviceSpec
from fusednorm.planner.norm_problem import NormProblem
from fusednorm.planner.plan import Plan, ReferencePlan

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
    plan_text,
    results_path,
    rows_of,
    save,
)
from .timing import time_interleaved

MOST_ELEMENTS = 2**28  # of x
MOST_ROWS = 65536
ROWS_PER_SM = (1, 4, 16, 62, 248)
WIDE = (18432, 20480, 24576, 28672, 32768, 40960, 49152, 65536, 81920, 98304, 131072, 262144)
NARROW = (64, 96, 160, 192, 224, 320, 448)
OF_16_BYTES = (72, 200, 1000, 1032, 1560, 2000, 2056, 3000, 4104, 5000, 6008, 9000, 12296)
UNALIGNED = (77, 255, 777, 1001, 1501, 2001, 3001, 4097, 5001, 6001, 8191, 12001, 16001)
IN_FLOAT32 = (64, 96, 192, 320, 1000, 777, 2001, 4097, 5000, 20480, 32768, 65536)


class Problem(NamedTuple):
    """What plans are made for: all that a cell has but the rows."""

    norm: str
    direction: str
    cols: int
    dtype: str


class Compiled(NamedTuple):
    """The plans of a problem, None or why each is not timed, and the planner's own (most rows, plan)."""

    problem: Problem
    plans: dict[Plan, str | None]
    choices: tuple[tuple[float, Plan], ...]


def dense() -> Iterator[Problem]:
    """The coarse widths first: multiples of 2048, then of 1024, and so on."""
    for step in (2048, 1024, 512):
        yield from _both(cols for cols in range(step, 16385, step) if cols % (2 * step) or step == 2048)
    yield from _both((128, 256, 384, 768, 1152, 1280, 2304, 2880, 5376, *UNALIGNED[::2], *WIDE[::2]))
    yield from _both(range(1024, 16385, 1024), "fp32")
    yield from _both(range(128, 16385, 128))
    yield from _both((*NARROW, *OF_16_BYTES, *UNALIGNED, *WIDE))
    yield from _both((*range(256, 16385, 256), *IN_FLOAT32), "fp32")


def _both(widths: Iterable[int], dtype: str = "bf16") -> Iterator[Problem]:
    """Both norms and both passes of each width."""
    for cols in widths:
        yield from (Problem(norm, direction, cols, dtype) for direction in DIRECTIONS for norm in NORMS)


def drawn(count: int, seed: int) -> list[tuple[Problem, int]]:
    """Cells at random: rows and columns evenly in octaves, three in four of bfloat16, one width in six odd."""
    at, found = random.Random(seed), []
    while len(found) < count:
        cols, rows = (round(2 ** at.uniform(6, math.log2(most))) for most in (32768, MOST_ROWS))
        cols = cols | 1 if at.random() < 1 / 6 else -(-cols // 8) * 8
        problem = Problem(at.choice(NORMS), at.choice(DIRECTIONS), cols, at.choice(("bf16", "bf16", "bf16", "fp32")))
        if rows * cols <= MOST_ELEMENTS:
            found.append((problem, rows))
    return found


def case_of(problem: Problem, rows: int) -> BenchCase:
    return plain_case(problem.norm, (rows, problem.cols), problem.dtype)


def norm_problem(problem: Problem) -> NormProblem:
    case = case_of(problem, 4)
    return sweep.make_call(case, make_bench_inputs(case, "cpu"), problem.direction).problem


def compile_all(job: tuple[Problem, DeviceSpec]) -> Compiled:
    """Compiles the candidates of a problem and the planner's own plans, in a process of its own."""
    problem, device = job
    asked = norm_problem(problem)
    choices = choice.choices(asked, device)
    own = (plan for _, plan in choices if not isinstance(plan, ReferencePlan))
    plans = {}
    all_of_them = (plan for variant in choice.variants_in_use(device) for plan in candidates(variant, asked, device))
    for plan in dict.fromkeys((*own, *all_of_them)):
        built = sweep.compile_plan((case_of(problem, 4), problem.direction, plan, device.arch))
        spills = None if isinstance(built, str) or not built[1] else f"{built[1]} bytes of stack"
        plans[plan] = built if isinstance(built, str) else spills
    return Compiled(problem, plans, choices)


def time_cell(compiled: Compiled, case: BenchCase, rounds: int) -> dict:
    """The record of one cell, without the machine."""
    inputs, direction = make_bench_inputs(case, "cuda"), compiled.problem.direction
    calls, refused = {FLOOR: floor_call(direction, inputs)}, {}
    for plan, why in compiled.plans.items():
        text = plan_text(plan)
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
        "own": plan_text(own),
        "plans": [[text, us] for us, text in plans],
        "refused": refused,
    }


def cells_of(path: Path, gpu: str) -> set[tuple]:
    """The cells that a file has."""
    records = rows_of([path]) if path.exists() else []
    return {tuple(r[name] for name in CELL) for r in records if r["gpu"] == gpu}


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
    add_out_argument(parser)
    return parser.parse_args(arguments)


def cells(options: argparse.Namespace, device: DeviceSpec) -> dict[Problem, list[BenchCase]]:
    """What is timed, in its order."""
    found: dict[Problem, list[BenchCase]] = {}
    if options.random:
        for problem, rows in drawn(options.random, options.seed):
            found.setdefault(problem, []).append(case_of(problem, rows))
        return found
    plain = (
        Problem(norm, options.direction, cols, options.dtype) for cols in options.cols or () for norm in options.norms
    )
    for problem in dense() if options.dense else plain:
        cases = [case_of(problem, per_sm * device.sm_count) for per_sm in options.rows_per_sm]
        found[problem] = [each for each in cases if each.rows <= MOST_ROWS and each.rows * each.cols <= MOST_ELEMENTS]
    return found


def main(arguments: list[str] | None = None) -> int:
    start, options = time.monotonic(), parse(arguments)
    if lacks_gpu("survey"):
        return 2
    machine, device = describe_machine(), gpus.spec_of(torch.device("cuda", torch.cuda.current_device()))
    path = results_path(options.out, machine, "families")
    known = cells_of(path, machine["gpu"])
    wanted = {}
    for problem, cases in cells(options, device).items():
        fields = [(case, case_fields(case, problem.direction)) for case in cases]
        left = [case for case, each in fields if tuple(each[name] for name in CELL) not in known]
        wanted |= {problem: left} if left else {}
    jobs, last = [(problem, device) for problem in wanted], start + 60 * options.minutes
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 1) - 1)) as pool:
        built = pool.imap(compile_all, jobs)
        with tqdm(total=sum(map(len, wanted.values())), desc="timed", unit="cell") as progress:
            for _ in jobs:
                try:
                    compiled = built.next(max(0, last - time.monotonic()))
                except multiprocessing.TimeoutError:
                    break
                torch.cuda.empty_cache()
                for case in wanted[compiled.problem]:
                    if time.monotonic() < last:
                        save([machine | time_cell(compiled, case, options.rounds)], path)
                        progress.update()
        pool.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
