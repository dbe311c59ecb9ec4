"""Times one plan of each family of plans, for many widths and row counts at once.

    python -m bench.survey --cols 4096 5120 --rows-per-sm 4 16 62 248 --direction backward

A family is what a plan does apart from how a row is cut: its kernel, rows of a tile, warps, CTAs on an SM, CTAs of a
row, stages. The plan that stands for a family needs the fewest copies, then has the least padding. Families whose
threads have too little or too much of a tile are left out (`is_plausible`). All plans are compiled in parallel first;
a plan that spills is not timed. One JSON line per cell goes to families.jsonl, with the planner's own choice (`own`)
and the times of all plans, the fastest first. Cells that the file has are not timed again. Outputs are not checked:
bench.sweep and the tests do. Exit code 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from fusednorm.host import gpus
from fusednorm.planner import budget, candidates, heuristics
from fusednorm.planner.device import DeviceSpec
from fusednorm.planner.norm_problem import NormProblem
from fusednorm.planner.plan import (
    MultiWavePlan,
    PipelinedPlan,
    Plan,
    ReferencePlan,
    columns_per_thread,
    num_copies,
    padded_columns,
    rows_per_thread,
)
from fusednorm.planner.preference import is_sound
from fusednorm.planner.tile_share import prefers_weight_in_smem

from . import sweep
from .candidates import FLOOR, floor_call, reason
from .cases import (
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

MOST_PADDING = 4 / 3  # columns that threads compute on, for each column of the row
MOST_COPIES = 4  # of a tile of one tensor
MOST_WARPS = 16  # on an SM, for a ring
LEAST_ELEMENTS = 8  # of a tile, for a thread of a ring; narrow rows may have fewer
NARROW = 512  # columns
MOST_ELEMENTS = 2**28  # of x
MOST_ROWS = 65536


class Width(NamedTuple):
    """What is timed at one width: the plans of the planner and of the survey."""

    norm: str
    cols: int
    problem: NormProblem
    plans: tuple[Plan, ...]


def family(plan: MultiWavePlan | PipelinedPlan) -> tuple:
    """The fields of a plan that the number of columns does not determine."""
    own = plan.rows_per_tile, plan.num_warps, plan.ctas_per_sm, plan.short_lived
    return (type(plan), *own, plan.cluster, plan.num_stages) if isinstance(plan, PipelinedPlan) else (type(plan), *own)


def is_plausible(plan: PipelinedPlan, problem: NormProblem, device: DeviceSpec) -> bool:
    forward, warps = problem.direction == "forward", plan.num_warps * plan.ctas_per_sm
    elements = rows_per_thread(plan) * columns_per_thread(plan)
    return (
        padded_columns(plan) <= MOST_PADDING * problem.cols
        and num_copies(plan) <= MOST_COPIES
        and (4 if forward else 8) <= warps <= MOST_WARPS
        and (elements >= LEAST_ELEMENTS or problem.cols <= NARROW)
        and (forward or plan.num_stages > 1)
        and plan.weight_in_smem == prefers_weight_in_smem(plan, problem)
        and is_sound(plan, problem, device)
        and budget.fits_shared_memory(plan, problem, device)
    )


def survey_plans(problem: NormProblem, device: DeviceSpec) -> tuple[Plan, ...]:
    """The planner's own plans, then one of each family."""
    best: dict[tuple, tuple] = {}
    rings = [(num_copies(p), padded_columns(p), -p.chunk, p) for p in candidates.pipelined_plans(problem, device)]
    in_registers = candidates.multiwave_plans(problem, device)
    rows = [(1, plan.chunk * plan.num_chunks, -plan.chunk, plan) for plan in in_registers]
    for *rank, plan in [*rows, *(ring for ring in rings if is_plausible(ring[-1], problem, device))]:
        if family(plan) not in best or rank < best[family(plan)][0]:
            best[family(plan)] = rank, plan
    own = (plan for _, plan in heuristics.choices(problem, device) if not isinstance(plan, ReferencePlan))
    return tuple(dict.fromkeys([*own, *(plan for _, plan in best.values())]))


def width_of(norm: str, cols: int, options: argparse.Namespace, device: DeviceSpec) -> Width:
    case = plain_case(norm, (4, cols), options.dtype)
    problem = sweep.make_call(case, make_bench_inputs(case, "cpu"), options.direction).problem
    return Width(norm, cols, problem, survey_plans(problem, device))


def compile_all(widths: list[Width], options: argparse.Namespace, device: DeviceSpec) -> dict[tuple, str | None]:
    """{(norm, cols, plan): None, or why it is not timed}."""
    keys = [(width.norm, width.cols, plan) for width in widths for plan in width.plans]
    jobs = [(plain_case(norm, (4, cols), options.dtype), options.direction, p, device.arch) for norm, cols, p in keys]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        built = list(tqdm(pool.imap(sweep.compile_plan, jobs, chunksize=2), "compiled", len(jobs), unit="plan"))
    found = (each if isinstance(each, str) else f"{each[1]} bytes of stack" if each[1] else None for each in built)
    return dict(zip(keys, found, strict=True))


def time_cell(width: Width, case: BenchCase, refusals: dict, options: argparse.Namespace, device: DeviceSpec) -> dict:
    """The record of one cell, without the machine."""
    inputs = make_bench_inputs(case, "cuda")
    calls, refused = {FLOOR: floor_call(options.direction, inputs)}, {}
    for plan in width.plans:
        text, why = plan_text(plan), refusals[width.norm, width.cols, plan]
        try:
            if not why:
                launches = sweep.prepare(case, inputs, options.direction, plan)
                calls[text] = lambda launches=launches: [launch.run() for launch in launches[0]]  # keeps the outputs
                calls[text]()
        except Exception as error:  # goes into the record and does not end the survey
            why = reason(error)
            calls.pop(text, None)
        if why:
            refused[text] = why
    times = time_interleaved(calls, options.rounds)
    plans = sorted((round(each.median, 2), text) for text, each in times.items() if text != FLOOR)
    return case_fields(case, options.direction) | {
        "floor_us": round(times[FLOOR].median, 2),
        "own": plan_text(heuristics.choose(width.problem, case.rows, device)),
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
    parser.add_argument("--cols", nargs="+", type=int, required=True, help="widths")
    per_sm = [4, 16, 62, 248]
    parser.add_argument("--rows-per-sm", nargs="+", type=int, default=per_sm, help="row counts (default: 4 16 62 248)")
    add_plain_arguments(parser)
    add_direction_argument(parser)
    parser.add_argument("--rounds", type=int, default=11, help="timed replays of each plan (default: 11)")
    parser.add_argument("--minutes", type=float, default=60, help="no cell is begun after this time (default: 60)")
    add_out_argument(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    start, options = time.monotonic(), parse(arguments)
    if lacks_gpu("survey"):
        return 2
    machine, device = describe_machine(), gpus.spec_of(torch.device("cuda", torch.cuda.current_device()))
    path = results_path(options.out, machine, "families")
    known = cells_of(path, machine["gpu"])
    widths = [width_of(norm, cols, options, device) for cols in options.cols for norm in options.norms]
    refusals = compile_all(widths, options, device)
    cells = [
        (width, case)
        for width in widths
        for rows in (per_sm * device.sm_count for per_sm in options.rows_per_sm)
        for case in [plain_case(width.norm, (rows, width.cols), options.dtype)]
        if rows <= MOST_ROWS and rows * width.cols <= MOST_ELEMENTS
    ]
    for width, case in tqdm(cells, "timed", unit="cell"):
        fields = case_fields(case, options.direction)
        if time.monotonic() - start < 60 * options.minutes and tuple(fields[name] for name in CELL) not in known:
            save([machine | time_cell(width, case, refusals, options, device)], path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
