"""Times LayerNorm and RMSNorm, forward and backward, beside other implementations and the floor.

    python -m bench.bench_norm --shapes 16384x4096 8192x5120 --norms layer --dtype bf16 fp32
    python -m bench.bench_norm --compare old.jsonl new.jsonl

The floor is a stream kernel that moves the same large tensors. Every output is compared with float64 autograd first,
and a candidate that is wrong is reported and not timed. The candidate fusednorm runs the planner's choice, and
fusednorm:<variant> runs a variant by force (`python -m fusednorm plan --help` lists the variants). One JSON line per
time goes to norm.jsonl. Exit code 1 if one of our outputs is wrong or fails, or if --compare finds a loss; 2 without a
CUDA GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

import fusednorm
from fusednorm.tools.console import progress, show_beside
from fusednorm.tools.oracle import Inputs, Outputs, assert_outputs_close, exact, relative_error

from .candidates import (
    CANDIDATES,
    FLOOR,
    OURS,
    Calls,
    Candidate,
    Refused,
    floor_call,
    is_ours,
    joined,
    present,
    reason,
)
from .cases import (
    DIRECTIONS,
    BenchCase,
    add_backward_arguments,
    add_case_arguments,
    make_bench_inputs,
    make_cases,
    make_parser,
)
from .compare import compare_files
from .peers import inductor
from .records import (
    add_out_argument,
    describe_machine,
    lacks_gpu,
    make_record,
    print_report,
    read_clocks,
    results_path,
    save,
)
from .timing import CapturedCall, capture, host_times, peak_bytes, time_graphs

HOST_ROUNDS = 5
# Relative L2 error beyond which an output is wrong. One rounding gives 0.42 of the machine epsilon (bfloat16: 1.7e-3),
# and peers round some intermediate results, too.
WRONG = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5, torch.float64: 1e-13}


@dataclass(frozen=True)
class Check:
    """Relative L2 errors against float64 by output, and the text of `assert_outputs_close` if a bound does not hold."""

    errors: dict[str, float]
    fault: str | None


@dataclass
class Entry:
    """A candidate on one case: its calls if it can be timed, or the refusal. `failed` tells an error of the candidate
    from a case that it does not take."""

    calls: Calls | None = None
    check: Check | None = None
    refusal: str | None = None
    failed: bool = False


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.compare:
        return compare_files(*options.compare)
    if lacks_gpu("bench_norm"):
        return 2
    chosen = present(options.candidates)
    cases = list(make_cases(options))
    machine, records = describe_machine(), []
    path = None if options.no_save else results_path(options.out, machine, "norm")
    compile_ours(cases, chosen)
    bar = progress(cases, "cases", "bench")
    for case in bar:
        show_beside(bar, str(case))
        made = bench_case(case, chosen, options, machine)
        records += made
        if path:
            save(made, path)
    print_report(records, machine)
    if path:
        print(f"\n{len(records)} lines added to {path}")
    faults = [record for record in records if is_ours(record["candidate"]) and (record["fault"] or record["failed"])]
    for record in faults:
        print(f"WRONG: {record['fault'] or record['refusal']}", file=sys.stderr)
    return 1 if faults else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("bench_norm", __doc__)
    add_case_arguments(parser)
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS, help="default: both")
    add_backward_arguments(parser)
    text = f"{', '.join(CANDIDATES)} (default: all)"
    names = list(CANDIDATES)
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=names, metavar="NAME", help=text)
    parser.add_argument("--rounds", type=int, default=50, help="timed replays of each candidate (default: 50)")
    parser.add_argument("--host", action="store_true", help="host time of an eager call, too")
    add_out_argument(parser)
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="measure nothing: what got slower?"
    )
    return parser.parse_args(arguments)


def compile_ours(cases: list[BenchCase], chosen: dict[str, Candidate]) -> None:
    """Compile our kernels for all contiguous cases side by side, before the first is timed."""
    problems: dict[tuple, set[int]] = {}
    for case in cases:
        if case.token_stride is None:
            mask = tuple(case.output_mask)
            key = (case.norm, case.x_dtype, case.weight_dtype, mask, case.residual_dtype)
            problems.setdefault(key, set()).add(case.cols)
    for variant in {name.partition(":")[2] or None for name in filter(is_ours, chosen)}:
        with fusednorm.force(variant):
            for (norm, dtype, weight_dtype, mask, residual), cols in problems.items():
                more = {"weight_dtype": weight_dtype, "output_mask": mask, "residual_dtype": residual}
                fusednorm.warmup(norm, sorted(cols), dtype, **more)


def bench_case(case: BenchCase, chosen: dict[str, Candidate], options: argparse.Namespace, machine: dict) -> list[dict]:
    """Check all candidates on one case, then time them. A record for each direction and candidate, floor included."""
    inputs = make_bench_inputs(case, "cuda")
    entries = {name: enter(candidate, case, inputs) for name, candidate in chosen.items()}
    inputs.forget()  # the oracle's float64 tensors, which would hold most of the memory
    records = []
    for direction in options.directions:
        graphs, beside = {FLOOR: capture(floor_call(direction, inputs))}, {}
        for name, entry in entries.items():
            if repeats(name, entries, direction):
                beside[name] = {"refusal": "the planner's own choice"}
            elif entry.calls:
                graphs |= captured(name, entry, direction)
                beside[name] = extras(timed_call(entry.calls, direction), options.host) if name in graphs else {}
        times, clocks = time_graphs(graphs, options.rounds), read_clocks()
        for name in (FLOOR, *entries):
            record = make_record(case, direction, name, times.get(name), times[FLOOR], machine)
            records.append(record | describe(entries.get(name, Entry()), direction) | beside.get(name, {}))
            records[-1]["clocks"] = clocks
    inductor.forget()
    torch.cuda.empty_cache()  # the graphs' own pools
    return records


def repeats(name: str, entries: dict[str, Entry], direction: str) -> bool:
    """Whether a forced variant runs the planner's own plan in this direction, so that it would be timed twice."""
    entry, own = entries[name], entries.get(OURS)
    if ":" not in name or not is_ours(name) or not (entry.calls and own and own.calls):
        return False
    return entry.calls.plans[direction] == own.calls.plans[direction]


def captured(name: str, entry: Entry, direction: str) -> dict[str, CapturedCall]:
    """The graph of one candidate. Where it cannot be captured, nothing, and the entry gets a refusal."""
    try:
        return {name: capture(timed_call(entry.calls, direction))}
    except Exception as error:
        entry.refusal, entry.failed = f"{direction} cannot be captured: {reason(error)}", True
        return {}


def enter(candidate: Candidate, case: BenchCase, inputs: Inputs) -> Entry:
    """Prepare and check. An error of a candidate becomes a line of the report and does not end the run."""
    try:
        calls = candidate.prepare(case, inputs)
        checked = check(calls, case, inputs)
    except Exception as error:
        return Entry(refusal=reason(error), failed=not isinstance(error, Refused))
    if not max(checked.errors.values()) <= WRONG[case.x_dtype]:
        worst = max(checked.errors, key=checked.errors.get)
        return Entry(None, checked, f"wrong: {worst} has a relative error of {checked.errors[worst]:.1e}", failed=True)
    return Entry(calls, checked)


def check(calls: Calls, case: BenchCase, inputs: Inputs) -> Check:
    got, want = joined(calls), exact(case, inputs)
    names = [f.name for f in fields(Outputs) if getattr(got, f.name) is not None]
    errors = {name: relative_error(getattr(got, name), getattr(want, name)) for name in names}
    try:
        assert_outputs_close(got, case, inputs)
    except AssertionError as error:
        return Check(errors, str(error))
    return Check(errors, None)


def timed_call(calls: Calls, direction: str) -> Callable[[], object]:
    if direction == "forward":
        return calls.forward
    ahead = calls.forward()
    ahead = Outputs(mean=ahead.mean, rstd=ahead.rstd)
    return lambda: calls.backward(ahead)


def extras(call: Callable[[], object], host: bool) -> dict:
    host_us = host_times({OURS: call}, HOST_ROUNDS)[OURS].median if host else None
    return {"peak_bytes": peak_bytes(call), "host_us": host_us}


def describe(entry: Entry, direction: str) -> dict:
    checked = entry.check
    return {
        "plan": entry.calls.plans.get(direction) if entry.calls else None,
        "errors": checked.errors if checked else None,
        "fault": checked.fault if checked else None,
        "refusal": entry.refusal,
        "failed": entry.failed,
    }


if __name__ == "__main__":
    sys.exit(main())
