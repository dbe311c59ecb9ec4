"""Times backwards beside other work: while a kernel of another stream holds SMs, or while a collective runs.

    python -m bench.beside                                     SMs held by a spinning kernel, on one GPU
    torchrun --nproc-per-node 2 -m bench.beside                beside NCCL's all-gather and reduce-scatter
    python -m bench.beside --dry-run                           without a GPU: the same steps on CPU tensors

The spinning kernel ends with the backward beside it, or after --patience milliseconds: a backward that waits for the
kernel's end takes that long. Collectives must last until the last of the timed calls has ended: --megabytes makes them
longer. `outlasted` counts the rounds in which that was so on all ranks, and the table marks the other cells. One JSON
line per time goes to beside.jsonl, or beside-collectives.jsonl. Exit code 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

import fusednorm
from fusednorm.tools.console import print_table, progress, show_beside

from .candidates import CANDIDATES, OURS, present, reason
from .cases import (
    SHAPE_HELP,
    SHAPE_SETS,
    BenchCase,
    add_plain_arguments,
    make_bench_inputs,
    make_parser,
    parse_shape,
    plain_cases,
)
from .collectives import COLLECTIVES
from .ranks import joined_ranks, largest
from .records import add_out_argument, case_fields, describe_machine, lacks_gpu, results_path, save, time_fields
from .timing import WARMUP_CALLS, Times, capture

MODES = ("eager", "graph")
HELD_SMS = (1, 8, 16, 32)
CALLS_BESIDE_A_COLLECTIVE = 4  # in a row, as the layers of a model
JOINED_S = 0.0003  # seconds in which all ranks join a collective: they begin some 10 us apart, and it lasts some ms


class Company(NamedTuple):
    """What runs beside backwards. `begin` starts it, returns once it runs, and returns the function that is called when
    the backwards are enqueued: it ends the company and says whether it ran until they were done."""

    name: str
    sms: int  # SMs that it takes; 0 where that is not known
    margin: int  # SMs that `sm_margin` leaves to it
    begin: Callable[[], Callable[[], bool]]
    calls: int = 1


class Candidate(NamedTuple):
    name: str
    mode: str  # one of MODES
    call: Callable[[], object]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not options.dry_run and lacks_gpu("beside", "--dry-run goes the same way without one"):
        return 2
    with joined_ranks(options.dry_run) as (rank, ranks):
        machine = describe_machine("none, dry run" if options.dry_run else None)
        companies = list(with_ranks(options, ranks) if ranks > 1 else holders(options))
        cases, records = plain_cases(options), []
        bar = progress(cases, "cases", "bench") if rank == 0 else cases
        for case in bar:
            if rank == 0:
                show_beside(bar, str(case))
            records += bench_case(case, companies, options, machine)
        if rank == 0:
            report(records)
            path = results_path(options.out, machine, "beside-collectives" if ranks > 1 else "beside")
            save(records, path)
            print(f"\n{len(records)} lines added to {path}")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("beside", __doc__)
    shapes = [parse_shape(text) for text in SHAPE_SETS["beside"]]
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=shapes, metavar="MxN", help=SHAPE_HELP)
    add_plain_arguments(parser)
    ours_and_peers = [OURS, "aten", "cudnn", "quack"]
    text = f"as of bench.bench_norm (default: {', '.join(ours_and_peers)})"
    parser.add_argument(
        "--candidates", nargs="+", choices=CANDIDATES, default=ours_and_peers, metavar="NAME", help=text
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="of calls (default: both)")
    parser.add_argument("--held", nargs="+", type=int, default=HELD_SMS, metavar="K", help="SMs that are held")
    parser.add_argument("--margins", nargs="+", type=int, default=[16], help="beside collectives (default: 0 and 16)")
    parser.add_argument("--patience", type=float, default=5.0, help="ms that a holder holds at most (default: 5)")
    parser.add_argument("--megabytes", type=int, default=2048, help="of a collective (default: 2048)")
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each (default: 15)")
    add_out_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="on CPU tensors, by gloo where there are ranks")
    return parser.parse_args(arguments)


# ---------------------------------------------------------------------------------------------------- company


def nothing() -> Callable[[], bool]:
    return lambda: True


def holders(options: argparse.Namespace) -> Iterator[Company]:
    """None, and holders of each number of SMs, without a margin and with a margin of as many SMs."""
    yield Company("alone", 0, 0, nothing)
    for sms in options.held:
        begin = nothing if options.dry_run else hold(sms, options.patience / 1e3)
        for margin in (0, sms):
            yield Company("held SMs", sms, margin, begin)


def hold(sms: int, patience_s: float) -> Callable[[], Callable[[], bool]]:
    from .holder import Holder

    holder = Holder(sms, patience_s)

    def end() -> bool:
        holder.release()
        return holder.was_told()

    def begin() -> Callable[[], bool]:
        holder.start()
        return end

    return begin


def with_ranks(options: argparse.Namespace, ranks: int) -> Iterator[Company]:
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", torch.cuda.current_device())
    whole = torch.ones(options.megabytes << 18, device=device)  # float32
    part = torch.ones(whole.numel() // ranks, device=device)
    yield Company("alone", 0, 0, nothing, CALLS_BESIDE_A_COLLECTIVE)
    for name in COLLECTIVES:
        for margin in (0, *(each for each in options.margins if each)):
            yield Company(name, 0, margin, collective(name, whole, part), CALLS_BESIDE_A_COLLECTIVE)


def collective(name: str, whole: torch.Tensor, part: torch.Tensor) -> Callable[[], Callable[[], bool]]:
    def begin() -> Callable[[], bool]:
        if name == "all_gather":
            work = dist.all_gather_into_tensor(whole, part, async_op=True)
        else:
            work = dist.reduce_scatter_tensor(part, whole, async_op=True)
        time.sleep(JOINED_S)
        return functools.partial(end, work)

    def end(work: dist.Work) -> bool:
        if whole.is_cuda:
            torch.cuda.current_stream().synchronize()  # the collective is on a stream of NCCL's
        runs = not work.is_completed()
        work.wait()
        return runs

    return begin


# ---------------------------------------------------------------------------------------------------- times


def bench_case(case: BenchCase, companies: list[Company], options: argparse.Namespace, machine: dict) -> list[dict]:
    inputs = make_bench_inputs(case, "cpu" if options.dry_run else "cuda")
    clock = host_clock if options.dry_run else gpu_clock
    records = []
    for margin in dict.fromkeys(company.margin for company in companies):
        with fusednorm.sm_margin(margin):  # captured graphs keep it
            for candidate in candidates_of(case, inputs, margin, options):
                for company in companies:
                    if company.margin == margin:
                        times, outlasted = measure(candidate, company, options.rounds, clock)
                        records.append(record_of(case, candidate, company, times, outlasted, machine))
    return records


def candidates_of(case: BenchCase, inputs, margin: int, options: argparse.Namespace) -> Iterator[Candidate]:
    """The candidates that take the case on all ranks; under a margin only ours, because peers do not know it.

    Their kernels are loaded: a first call beside a collective could wait for its end.
    """
    names = present(options.candidates) if not options.dry_run else {n: CANDIDATES[n] for n in (OURS, "aten")}
    for name, candidate in names.items():
        if margin and name != OURS:
            continue
        refusal = None
        try:
            calls = candidate.prepare(case, inputs)
            backward = functools.partial(calls.backward, calls.forward())
            backward()
        except Exception as error:  # a peer that does not take the case
            refusal = reason(error)
        if any(largest(refusal is not None)):  # a rank that went on alone would wait for the others in a collective
            print(f"{name} refuses {case}: {refusal or 'on another rank'}")
            continue
        for mode in options.modes:
            graphed = mode == "graph" and not options.dry_run
            yield Candidate(name, mode, capture(backward).replay if graphed else backward)


def measure(candidate: Candidate, company: Company, rounds: int, clock) -> tuple[Times, int]:
    """Microseconds of one call while the company runs, and the number of rounds in which it ran until the calls were
    done; the slowest rank's where there are several."""
    for _ in range(WARMUP_CALLS):
        candidate.call()
    found, outlasted = [], 0
    for _ in range(rounds):
        end = company.begin()
        elapsed, ran = clock(candidate.call, company.calls, end)
        slowest, too_short = largest(elapsed / company.calls, not ran)
        found.append(slowest)
        outlasted += not too_short
    return Times.of(found), outlasted


def gpu_clock(call: Callable[[], object], calls: int, end: Callable[[], bool]) -> tuple[float, bool]:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(calls):
        call()
    after.record()
    ran = end()
    torch.cuda.synchronize()
    return 1e3 * before.elapsed_time(after), ran


def host_clock(call: Callable[[], object], calls: int, end: Callable[[], bool]) -> tuple[float, bool]:
    before = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = 1e6 * (time.perf_counter() - before)
    return elapsed, end()


# ---------------------------------------------------------------------------------------------------- records


def record_of(
    case: BenchCase, candidate: Candidate, company: Company, times: Times, outlasted: int, machine: dict
) -> dict:
    company_fields = {
        "candidate": candidate.name,
        "mode": candidate.mode,
        "company": company.name,
        "held_sms": company.sms,
        "sm_margin": company.margin,
        "calls": company.calls,
        "outlasted": outlasted,
        "nccl_p2p": os.environ.get("NCCL_P2P_DISABLE") != "1",
    }
    return machine | case_fields(case, "backward") | company_fields | time_fields(times)


def report(records: list[dict]) -> None:
    """Prints a line for each cell: the time alone, and as a multiple of it the time beside each company."""
    found: dict[tuple, dict[str, dict]] = {}
    for record in records:
        cell = record["norm"], f"{record['rows']}x{record['cols']}", record["candidate"], record["mode"]
        found.setdefault(cell, {})[column_of(record)] = record
    columns = list(dict.fromkeys(column_of(record) for record in records))
    rows = []
    for cell, beside in found.items():
        alone = beside["alone"]["median_us"]
        rows.append([*cell, f"{alone:.1f}", *(multiple(beside.get(each), alone) for each in columns[1:])])
    title = "us of a backward alone, and beside others as a multiple"
    print_table(title, ["norm", "shape", "candidate", "mode", *columns], rows)
    if any(record["outlasted"] < record["rounds"] for record in records):
        print("* after the number of rounds in which the company ended before the last of the timed calls")


def multiple(record: dict | None, alone: float) -> str:
    if record is None:
        return ""
    too_short = record["rounds"] - record["outlasted"]
    return f"{record['median_us'] / alone:.2f}" + (f" {too_short}*" if too_short else "")


def column_of(record: dict) -> str:
    sms = f" {record['held_sms']}" if record["held_sms"] else ""
    margin = f", margin {record['sm_margin']}" if record["sm_margin"] else ""
    return f"{record['company']}{sms}{margin}"


if __name__ == "__main__":
    sys.exit(main())
