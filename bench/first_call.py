"""Times the first call: with no kernel on disk, with all kernels on disk, and after fusednorm.warmup.

    python -m bench.first_call --shapes 16384x4096 --norms layer

Each is measured in a process of its own; the first and the third start with an empty Triton cache. The process then
counts the kernels that other row counts need. One JSON line per shape, norm and state goes to first-call.jsonl. Exit
code 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import torch

import fusednorm
from fusednorm.tools.console import print_table

from .candidates import joined, our_calls
from .cases import DTYPES, BenchCase, add_case_arguments, make_bench_inputs, make_cases, make_parser
from .records import add_out_argument, describe_machine, lacks_gpu, results_path, save

STATES = ("cold", "disk", "warmup")
FURTHER_ROWS = (1, 2, 17, 128, 1000, 2048, 4097, 12345, 16384)
COLUMNS = ("warmup_s", "forward_s", "backward_s", "second_forward_s", "second_backward_s")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("first_call"):
        return 2
    if options.child:
        print(json.dumps(first_call(next(make_cases(options)), options.child == "warmup")))
        return 0
    machine, records = describe_machine(), []
    for case in make_cases(options):
        records += [machine | record for record in measure(case)]
    header = ["case", "state", *(name.removesuffix("_s") for name in COLUMNS), "further builds"]
    print_table("Seconds of the first call", header, [row(record) for record in records])
    save(records, results_path(options.out, machine, "first-call"))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("first_call", __doc__)
    add_case_arguments(parser)
    add_out_argument(parser)
    parser.add_argument("--child", choices=STATES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def row(record: dict) -> list[str]:
    seconds = (f"{record[name]:.4f}" for name in COLUMNS)
    case = f"{record['norm']} {record['rows']}x{record['cols']}"
    return [case, record["state"], *seconds, str(record["further_builds"])]


def measure(case: BenchCase) -> list[dict]:
    """A record for each state; "disk" finds what "cold" left on disk."""
    records = []
    with tempfile.TemporaryDirectory() as filled, tempfile.TemporaryDirectory() as fresh:
        for state, cache in (("cold", filled), ("disk", filled), ("warmup", fresh)):
            record = {"norm": case.norm, "rows": case.rows, "cols": case.cols, "state": state}
            records.append(record | in_process(case, state, cache))
    return records


def in_process(case: BenchCase, state: str, cache: str) -> dict:
    """`first_call` of a fresh process with that folder as Triton's cache."""
    command = [sys.executable, "-m", "bench.first_call", "--child", state, *arguments_of(case)]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(answer.splitlines()[-1])


def arguments_of(case: BenchCase) -> list[str]:
    """The flags that make the same case, of contiguous rows, in another process."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    dtypes = ["--dtype", names[case.x_dtype], "--weight-dtype", names[case.weight_dtype]]
    return ["--norms", case.norm, "--shapes", f"{case.rows}x{case.cols}", *dtypes]


def first_call(case: BenchCase, warm: bool) -> dict:
    """Seconds of the first and the second call of each direction in this process, until the GPU is done."""
    inputs = make_bench_inputs(case, "cuda")
    calls = our_calls(case, inputs)
    seconds = {"warmup_s": 0.0}
    if warm:
        arguments = (case.norm, case.cols, case.x_dtype)
        seconds["warmup_s"], _ = timed(
            lambda: fusednorm.warmup(*arguments, weight_dtype=case.weight_dtype, rows=[case.rows, *FURTHER_ROWS])
        )
    for prefix in ("", "second_"):
        seconds[f"{prefix}forward_s"], ahead = timed(calls.forward)
        seconds[f"{prefix}backward_s"], _ = timed(lambda ahead=ahead: calls.backward(ahead))
    return seconds | {"further_builds": further_builds(case)}


def further_builds(case: BenchCase) -> int:
    """Kernels that Triton builds, or takes from disk, when the row count goes through FURTHER_ROWS."""
    from triton import knobs

    built: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **build: built.append(build["fn"].name)
    for rows in FURTHER_ROWS:
        joined(our_calls(case, make_bench_inputs(replace(case, shape=(rows, case.cols)), "cuda")))
    return len(built)


def timed(call) -> tuple[float, object]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    sys.exit(main())
