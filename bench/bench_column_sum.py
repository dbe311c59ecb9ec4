"""Times column_sum, x.sum(0) of each tensor by torch, and a kernel that only reads the same tensors.

    python -m bench.bench_column_sum --cases 8192x8192 4096x1024x5 4096x1024x5+ --dtypes fp16

A case is written rows x cols, or rows x cols x number of tensors, with + if the tensors' sums are added up too. Every
sum is compared with float64 before anything is timed. --sweep times every plan, with every number of splits worth
trying, in place of the planner's choice. One JSON line per time goes to column-sum.jsonl. Exit code 1 if one of our
sums is wrong, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fusednorm.columns import plan as column_plan
from fusednorm.columns.plan import KERNELS, Choice
from fusednorm.columns.problem import ColumnSumCall, check_column_sum
from fusednorm.host import gpus
from fusednorm.tools.console import print_table, progress, show_beside

from .candidates import FLOOR, OURS
from .cases import COLUMN_SUMS, DTYPES, make_parser
from .records import (
    add_out_argument,
    describe_machine,
    lacks_gpu,
    machine_text,
    read_clocks,
    results_path,
    save,
    spread,
    time_fields,
)
from .timing import Times, time_interleaved

TORCH = "torch"
WORST_ERROR = 1e-2  # relative L2 error: a 16-bit sum stays below, a sum that misses a tile is far above

Call = Callable[[], list[Tensor]]


class Case(NamedTuple):
    rows: int
    cols: int
    count: int
    total: bool

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}" + f"x{self.count}" * (self.count > 1) + "+" * self.total


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("bench_column_sum"):
        return 2
    machine, records = describe_machine(), []
    jobs = [(case, dtype) for dtype in options.dtypes for case in options.cases]
    bar = progress(jobs, "cases", "bench")
    for case, dtype in bar:
        show_beside(bar, f"{case} {dtype}")
        records += bench_case(case, dtype, options, machine)
        torch.cuda.empty_cache()
    print_report(records, machine)
    if not options.no_save:
        path = results_path(options.out, machine, "column-sum")
        save(records, path)
        print(f"\n{len(records)} lines added to {path}")
    wrong = [record for record in records if record["candidate"] not in (FLOOR, TORCH) and record["fault"]]
    for record in wrong:
        print(f"WRONG: {record['case']} {record['dtype']} {record['candidate']}: {record['fault']}", file=sys.stderr)
    return 1 if wrong else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("bench_column_sum", __doc__)
    cases = [parse_case(text) for text in COLUMN_SUMS]
    parser.add_argument("--cases", nargs="+", type=parse_case, default=cases, metavar="MxN[xK[+]]")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp16", "fp32"])
    parser.add_argument("--rounds", type=int, default=20, help="timed replays of each candidate (default: 20)")
    parser.add_argument("--sweep", action="store_true", help="every plan, with every number of splits worth trying")
    add_out_argument(parser)
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser.parse_args(arguments)


def parse_case(text: str) -> Case:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*)(\+?))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"a case is rows x cols [x tensors [+]] like 4096x1024x5+, got {text}")
    return Case(int(match[1]), int(match[2]), int(match[3] or 1), match[4] == "+")


def bench_case(case: Case, dtype: str, options: argparse.Namespace, machine: dict) -> list[dict]:
    """Check, then time, all candidates; a record for each."""
    from .read_floor import read_call

    shape = (case.rows, case.cols)
    inputs = [torch.randn(shape, device="cuda", dtype=DTYPES[dtype]).add_(0.25) for _ in range(case.count)]
    exact = sums_by_torch(inputs, case.total, torch.float64)
    choices = dict(choices_for(check_column_sum(inputs, case.total, None), options.sweep))
    calls: dict[str, Call] = {TORCH: lambda: sums_by_torch(inputs, case.total)}
    calls |= {name: our_call(inputs, case.total, choice) for name, choice in choices.items()}
    errors = {name: worst_error(call(), exact) for name, call in calls.items()}
    times = time_interleaved({FLOOR: read_call(inputs), **calls}, options.rounds)
    clocks = read_clocks()
    return [
        machine | make_record(case, dtype, name, times[name], times[FLOOR], errors.get(name), choices.get(name), clocks)
        for name in times
    ]


def choices_for(call: ColumnSumCall, sweep: bool) -> Iterator[tuple[str, Choice]]:
    """The planner's choice, then the best choice of each kernel or, in a sweep, every plan with every split."""
    problem, rows, device = call.problem, call.rows, gpus.spec_of(call.views[0].tensor.device)
    yield OURS, column_plan.choose(problem, rows, device)
    if not sweep:
        of_kernel = {kernel: column_plan.choose(problem, rows, device, kernel) for kernel in KERNELS}
        yield from ((kernel, choice) for kernel, choice in of_kernel.items() if choice.plan.kernel == kernel)
        return
    ring = [] if column_plan.ring_fault(problem, rows, device) else list(column_plan.ring_plans(problem, device))
    for plan in [*ring, *column_plan.portable_plans(problem, device)]:
        for splits in sorted(column_plan.splits_worth_trying(plan, problem, rows, device)):
            predicted = column_plan.predicted_us(plan, splits, problem, rows, device)
            yield f"{plan.kernel} {plan.rows_per_tile}x{plan.chunk} / {splits}", Choice(plan, splits, predicted)


def our_call(inputs: list[Tensor], total: bool, choice: Choice) -> Call:
    from fusednorm.columns import launch as launch_columns

    return lambda: launch_columns.run(check_column_sum(inputs, total, None), choice)


def sums_by_torch(inputs: list[Tensor], total: bool, dtype: torch.dtype | None = None) -> list[Tensor]:
    sums = [x.sum(0, dtype=dtype) for x in inputs]
    return [functools.reduce(torch.add, sums)] if total else sums


def worst_error(got: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative L2 error of the sums."""
    pairs = zip(got, exact, strict=True)
    return max(((g.double() - want).norm() / want.norm()).item() for g, want in pairs)


def make_record(
    case: Case, dtype: str, name: str, times: Times, floor: Times, error: float | None, choice: Choice | None, clocks
) -> dict:
    """One JSON line. tb_s is the bandwidth in TB/s at which the tensors were read."""
    size = case.count * case.rows * case.cols * DTYPES[dtype].itemsize
    wrong = error is not None and not error < WORST_ERROR
    return {
        "op": "column_sum",
        "case": str(case),
        **case._asdict(),
        "dtype": dtype,
        "candidate": name,
        "plan": None if choice is None else {"kernel": choice.plan.kernel, **dataclasses.asdict(choice.plan)},
        "num_splits": None if choice is None else choice.num_splits,
        "predicted_us": None if choice is None else choice.predicted_us,
        "error": error,
        "fault": f"a relative error of {error:.1e}" if wrong else None,
        **time_fields(times),
        "share_of_floor": floor.median / times.median,
        "tb_s": size / times.median / 1e6,
        "clocks": clocks,
    }


def print_report(records: list[dict], machine: dict) -> None:
    header = ["case", "dtype", "candidate", "us", "spread", "of the floor", "TB/s", "error"]
    print_table(machine_text(machine), header, [report_row(record) for record in records])


def report_row(record: dict) -> list[str]:
    name = record["candidate"]
    if name in (OURS, *KERNELS):
        plan = record["plan"]
        name += f" ({plan['kernel']} {plan['rows_per_tile']}x{plan['chunk']} / {record['num_splits']})"
    error = "" if record["error"] is None else f"{record['error']:.1e}" + " !" * bool(record["fault"])
    times = [f"{record['median_us']:.1f}", f"{spread(record):.1%}"]
    times += [f"{record['share_of_floor']:.1%}", f"{record['tb_s']:.2f}"]
    return [record["case"], record["dtype"], name, *times, error]


if __name__ == "__main__":
    sys.exit(main())
