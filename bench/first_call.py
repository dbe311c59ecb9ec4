"""How long the first call takes: with no kernel on disk, with all on disk, and after fusednorm.warmup.

    python -m bench.first_call --shapes 16384x4096 --norms layer

Each is measured in a process of its own, the first and the third with an empty Triton cache. One JSON line per shape,
norm and state goes to bench/results/<date>-<gpu>-first-call.jsonl. Exit code 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import fusednorm
from fusednorm.console import print_table

from .candidates import our_calls
from .cases import BenchCase, add_case_arguments, make_bench_inputs, make_cases
from .records import RESULTS, describe_machine, results_path, save

STATES = ("cold", "disk", "warmup")
COLUMNS = ("warmup_s", "forward_s", "backward_s", "second_forward_s", "second_backward_s")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("first_call: needs a CUDA GPU, got none (python -m fusednorm doctor says more)", file=sys.stderr)
        return 2
    if options.child:
        print(json.dumps(first_call(next(make_cases(options)), options.child == "warmup")))
        return 0
    machine, records = describe_machine(), []
    for case in make_cases(options):
        records += [machine | record for record in measure(case)]
    rows = [[f"{r['norm']} {r['rows']}x{r['cols']}", r["state"], *(f"{r[c]:.4f}" for c in COLUMNS)] for r in records]
    print_table("Seconds of the first call", ["case", "state", *(c.removesuffix("_s") for c in COLUMNS)], rows, "bench")
    save(records, results_path(options.out, machine, "-first-call"))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.first_call", description=__doc__.splitlines()[0])
    add_case_arguments(parser)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines (default: bench/results)")
    parser.add_argument("--child", choices=STATES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


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
    dtype = str(case.x_dtype).removeprefix("torch.")
    short = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}[dtype]
    command = [sys.executable, "-m", "bench.first_call", "--child", state, "--norms", case.norm, "--dtype", short]
    command += ["--shapes", "x".join(map(str, case.shape))]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(answer.splitlines()[-1])


def first_call(case: BenchCase, warm: bool) -> dict:
    """Seconds of the first and the second call of each direction in this process, waited for."""
    inputs = make_bench_inputs(case, "cuda")
    calls = our_calls(case, inputs)
    seconds = {"warmup_s": 0.0}
    if warm:
        arguments = (case.norm, case.cols, case.x_dtype)
        seconds["warmup_s"], _ = timed(
            lambda: fusednorm.warmup(*arguments, weight_dtype=case.weight_dtype, rows=case.rows)
        )
    for prefix in ("", "second_"):
        seconds[f"{prefix}forward_s"], ahead = timed(calls.forward)
        seconds[f"{prefix}backward_s"], _ = timed(lambda ahead=ahead: calls.backward(ahead))
    return seconds


def timed(call) -> tuple[float, object]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    sys.exit(main())
