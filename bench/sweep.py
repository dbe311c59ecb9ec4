"""Times and checks every candidate of the planner, shape by shape.

    python -m bench.sweep --shapes 16384x4096 4096x5120 --direction backward --variants pipelined multi_wave
    python -m bench.sweep --shapes 5461x12288 --variants async_copy multi_wave --of A100 "RTX 4090"

--of takes the candidates of other GPUs, which this one runs as they are. Plans are compiled in parallel first, and a
plan that spills is not timed. Each is checked against float64 autograd, then timed beside the others and the floor. One
JSON line per case, with all its plans, goes to plans.jsonl. Exit code 1 if an output is wrong, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import sys
from multiprocessing.pool import Pool

import torch

from fusednorm.host import gpus
from fusednorm.planner.candidates import candidates
from fusednorm.planner.plan import Plan, text_of
from fusednorm.tools.oracle import exact, relative_error

from .candidates import FLOOR, checked_call, floor_call, reason, statistics_of
from .cases import (
    SHAPE_HELP,
    BenchCase,
    BenchInputs,
    add_direction_argument,
    add_plain_arguments,
    make_bench_inputs,
    make_parser,
    parse_shape,
    plain_cases,
)
from .records import (
    add_out_argument,
    case_fields,
    describe_machine,
    lacks_gpu,
    results_path,
    save,
    time_fields,
)
from .timing import time_interleaved

VARIANTS = ("multi_wave", "async_copy", "pipelined", "warp_specialized")
# Relative L2 error of an output: rounding to bfloat16 gives 1.7e-3.
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-13}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("sweep"):
        return 2
    machine = describe_machine() | {"run": options.run}
    path = results_path(options.out, machine, "plans")
    wrong = 0
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        for case in plain_cases(options):
            record = machine | sweep(case, options, pool)
            save([record], path)
            report(case, record["timed"])
            wrong += sum(each.get("wrong", False) for each in record["timed"])
    return 1 if wrong else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("sweep", __doc__)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, required=True, metavar="MxN", help=SHAPE_HELP)
    add_plain_arguments(parser)
    add_direction_argument(parser)
    text = "default: multi_wave pipelined (python -m fusednorm plan --help lists the variants)"
    variants = ["multi_wave", "pipelined"]
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=variants, help=text)
    text = "GPUs whose candidates are timed (default: this one)"
    parser.add_argument("--of", nargs="+", type=gpus.named, default=[], metavar="GPU", help=text)
    parser.add_argument("--rounds", type=int, default=15, help="timed replays of each plan (default: 15)")
    parser.add_argument("--run", default="sweep", help="name of this run in its lines (default: sweep)")
    add_out_argument(parser)
    return parser.parse_args(arguments)


def compile_plan(job: tuple) -> tuple[int, int] | str:
    """(registers, stack bytes) of the plan's largest kernel, or why the plan does not compile."""
    from .resources import resources

    case, direction, plan, arch = job
    try:
        used = [resources(launch, arch) for launch in prepare(case, meta_inputs(case), direction, plan)[0]]
    except Exception as error:  # goes into the plan's entry and does not end the sweep
        return reason(error)
    return max(r.registers for r in used), max(r.stack_bytes for r in used)


def meta_inputs(case: BenchCase) -> BenchInputs:
    """Four rows of the case's inputs, without data: no build depends on the row count."""
    few = make_bench_inputs(dataclasses.replace(case, shape=(4, *case.shape[1:])), "cpu")
    tensors = (few.x, few.grad_out, few.weight, few.bias)
    return BenchInputs(*(None if tensor is None else tensor.to("meta") for tensor in tensors))


def make_call(case: BenchCase, inputs: BenchInputs, direction: str):
    return checked_call(direction, case, inputs, statistics_of(case, inputs.x))


def prepare(case: BenchCase, inputs: BenchInputs, direction: str, plan: Plan):
    from fusednorm.host import launch

    return launch.on_tensors(make_call(case, inputs, direction), plan)


def sweep(case: BenchCase, options: argparse.Namespace, pool: Pool) -> dict:
    """A record of the case: for each plan its time, or the reason why it has none."""
    inputs = make_bench_inputs(case, "cuda")
    device = gpus.spec_of(inputs.x.device)
    problem = make_call(case, inputs, options.direction).problem
    pairs = itertools.product(options.variants, options.of or [device])
    found = itertools.chain.from_iterable(candidates(variant, problem, of) for variant, of in pairs)
    plans = list(dict.fromkeys(found))
    jobs = [(case, options.direction, plan, device.arch) for plan in plans]
    compiled = pool.map(compile_plan, jobs, chunksize=1)
    want = exact(case, inputs)
    names = ("y", "mean", "rstd") if options.direction == "forward" else ("dx", "dweight", "dbias")
    calls, entries = {FLOOR: floor_call(options.direction, inputs)}, []
    for plan, result in zip(plans, compiled, strict=True):
        entry = {"plan": text_of(plan), "median_us": None}
        entries.append(entry)
        if isinstance(result, str) or result[1] > 0:
            entry["refusal"] = result if isinstance(result, str) else f"{result[1]} bytes of stack"
            continue
        launches, outputs = prepare(case, inputs, options.direction, plan)[:2]
        calls[entry["plan"]] = lambda launches=launches: [launch.run() for launch in launches]
        calls[entry["plan"]]()
        errors = [relative_error(o, getattr(want, n)) for n, o in zip(names, outputs, strict=True) if o is not None]
        entry.update(registers=result[0], wrong=not max(errors) <= TOLERANCE[case.x_dtype])
    times = time_interleaved(calls, options.rounds)
    timed = [entry | time_fields(times[entry["plan"]]) if entry["plan"] in times else entry for entry in entries]
    return case_fields(case, options.direction) | {"floor_us": round(times[FLOOR].median, 3), "timed": timed}


def report(case: BenchCase, entries: list[dict]) -> None:
    timed = sorted((e for e in entries if e["median_us"]), key=lambda e: e["median_us"])
    print(f"{case}: {len(entries)} plans, {len(timed)} timed")
    for entry in timed[:5]:
        print(f"  {entry['median_us']:8.1f} us {entry['plan']}{' WRONG' * entry['wrong']}")


if __name__ == "__main__":
    sys.exit(main())
