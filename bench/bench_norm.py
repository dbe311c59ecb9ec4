"""Times LayerNorm and RMSNorm, forward and backward, beside other implementations and a stream of the same bytes.

    python -m bench.bench_norm --shapes 16384x4096 8192x5120 --norms layer --dtype bf16 fp32
    python -m bench.bench_norm --compare old.jsonl new.jsonl

Every output is compared with float64 autograd before anything is timed: a candidate that is wrong is reported and not
timed. One JSON line per time goes to norm.jsonl. Exit code 1 if one of our outputs is wrong or
fails, or if --compare finds a loss; 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

import fusednorm
from fusednorm.testing import Inputs, Outputs, assert_outputs_close, exact, relative_error
from fusednorm.tools.console import progress, show_beside

from .candidates import CANDIDATES, FLOOR, OURS, Calls, Candidate, Refused, floor_call, joined
from .cases import BenchCase, add_case_arguments, make_bench_inputs, make_cases
from .compare import compare_files
from .peers import inductor
from .records import (
    add_out_argument,
    describe_machine,
    is_ours,
    lacks_gpu,
    make_record,
    print_report,
    read_clocks,
    results_path,
    save,
)
from .timing import CapturedCall, capture, host_microseconds, peak_bytes, time_graphs

# Relative L2 error beyond which an output is wrong, not just rounded otherwise than ours: rounding once gives 0.42 of
# the machine epsilon (bfloat16: 1.7e-3), and peers round some intermediate results, too.
WRONG = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5, torch.float64: 1e-13}


@dataclass(frozen=True)
class Check:
    """Outputs against the oracle: relative L2 errors; and the sentence of a bound that does not hold, if any."""

    errors: dict[str, float]
    fault: str | None


@dataclass
class Entry:
    """A candidate on one case: what it may be timed by, or the refusal; failed says that this is its own fault."""

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
    parser = argparse.ArgumentParser(prog="python -m bench.bench_norm", description=__doc__.splitlines()[0])
    add_case_arguments(parser)
    default = [name for name, candidate in CANDIDATES.items() if candidate.by_default]
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=default)
    parser.add_argument("--rounds", type=int, default=50, help="timed replays of each candidate (default: 50)")
    parser.add_argument("--host", action="store_true", help="host time of an eager call, too")
    add_out_argument(parser)
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="measure nothing: what got slower?"
    )
    return parser.parse_args(arguments)


def present(names: Iterable[str]) -> dict[str, Candidate]:
    """The candidates that are on this machine; why the others are not is printed."""
    reasons = {name: CANDIDATES[name].missing() for name in names}
    for name, reason in reasons.items():
        if reason:
            print(f"{name} is left out: {reason}")
    return {name: CANDIDATES[name] for name, reason in reasons.items() if not reason}


def compile_ours(cases: list[BenchCase], chosen: dict[str, Candidate]) -> None:
    """Our kernels of all contiguous cases, side by side, before the first is timed."""
    problems: dict[tuple, set[int]] = {}
    for case in cases:
        if case.token_stride is None:
            mask = tuple(case.output_mask)
            key = (case.norm, case.x_dtype, case.weight_dtype, mask, case.residual_dtype)
            problems.setdefault(key, set()).add(case.cols)
    variants = [name.partition(":")[2] or None for name, candidate in chosen.items() if candidate.ours]
    for variant in variants:
        with fusednorm.force(variant):
            for (norm, dtype, weight_dtype, mask, residual), cols in problems.items():
                more = {"weight_dtype": weight_dtype, "output_mask": mask, "residual_dtype": residual}
                fusednorm.warmup(norm, sorted(cols), dtype, **more)


def bench_case(case: BenchCase, chosen: dict[str, Candidate], options: argparse.Namespace, machine: dict) -> list[dict]:
    """Check, then time, all candidates on one case; a record per direction and candidate, the floor included."""
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
    """Whether a forced variant runs what the planner chooses in this direction: its time would stand there twice."""
    entry, own = entries[name], entries.get(OURS)
    if name == OURS or not is_ours(name) or not (entry.calls and own and own.calls):
        return False
    return entry.calls.plans[direction] == own.calls.plans[direction]


def captured(name: str, entry: Entry, direction: str) -> dict[str, CapturedCall]:
    """The graph of one candidate; none, and a refusal, where it cannot be captured."""
    try:
        return {name: capture(timed_call(entry.calls, direction))}
    except Exception as error:
        entry.refusal, entry.failed = f"{direction} cannot be captured: {first_line(error)}", True
        return {}


def enter(candidate: Candidate, case: BenchCase, inputs: Inputs) -> Entry:
    """Prepare and check. Whatever a peer raises is a line of the report, not the end of the run."""
    try:
        calls = candidate.prepare(case, inputs)
        checked = check(calls, case, inputs)
    except Refused as refusal:
        return Entry(refusal=str(refusal))
    except Exception as error:
        return Entry(refusal=first_line(error), failed=True)
    if not max(checked.errors.values()) <= WRONG[case.x_dtype]:
        worst = max(checked.errors, key=checked.errors.get)
        return Entry(None, checked, f"wrong: {worst} has a relative error of {checked.errors[worst]:.1e}", failed=True)
    return Entry(calls, checked)


def first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


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
    return {"peak_bytes": peak_bytes(call), "host_us": host_microseconds(call) if host else None}


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
