"""What it costs that row count and width are run-time values: a backward beside a build with both fixed.

    python -m bench.static_build --shapes 16384x4096 --norms layer

Both are launched on the same tensors by the same plan, and must give the same bits. One JSON line per case goes to
bench/results/<date>-<gpu>-static-build.jsonl. Exit code 1 if a result differs, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from fusednorm.tools.console import print_table

from .cases import BenchCase, add_case_arguments, make_bench_inputs, make_cases
from .records import RESULTS, describe_machine, results_path, save
from .sweep import make_call
from .timing import time_interleaved


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("static_build: needs a CUDA GPU, got none (python -m fusednorm doctor says more)", file=sys.stderr)
        return 2
    machine = describe_machine()
    records = [machine | compare(case, options.rounds) for case in make_cases(options)]
    rows = [
        [f"{r['norm']} {r['rows']}x{r['cols']} {r['x_dtype']}", f"{r['dynamic_us']:.2f}", f"{r['static_us']:.2f}",
         f"{r['dynamic_us'] / r['static_us']:.4f}", "yes" if r["same_bits"] else "NO"]
        for r in records
    ]  # fmt: skip
    print_table("Backward us", ["case", "run-time values", "fixed", "ratio", "same bits"], rows, "bench")
    save(records, results_path(options.out, machine, "-static-build"))
    return 0 if all(record["same_bits"] for record in records) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.static_build", description=__doc__.splitlines()[0])
    add_case_arguments(parser)
    parser.add_argument("--rounds", type=int, default=60, help="timed replays of each (default: 60)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines (default: bench/results)")
    return parser.parse_args(arguments)


def compare(case: BenchCase, rounds: int) -> dict:
    """A record of both builds of the case's backward."""
    from fusednorm.host import launch

    inputs = make_bench_inputs(case, "cuda")
    prepared = launch.prepare_backward(make_call(case, inputs, "backward"))
    outputs = [output for output in prepared.outputs if output is not None]

    def dynamic() -> None:
        for each in prepared.launches:
            each.run()

    def static() -> None:
        for each in prepared.launches:
            each.kernel[each.grid](*fixed(each), **each.keywords())

    dynamic()
    wanted = [output.clone() for output in outputs]
    for output in outputs:
        output.zero_()
    static()
    same = all(torch.equal(got, want) for got, want in zip(outputs, wanted, strict=True))
    times = time_interleaved({"dynamic": dynamic, "static": static}, rounds)
    return {
        "norm": case.norm, "rows": case.rows, "cols": case.cols, "x_dtype": str(case.x_dtype).removeprefix("torch."),
        "kernels": [each.kernel.__name__ for each in prepared.launches], "same_bits": same,
        "dynamic_us": times["dynamic"].median, "static_us": times["static"].median, "spread": times["dynamic"].spread,
    }  # fmt: skip


def fixed(launch) -> tuple:
    """The launch's arguments with every number a compile-time constant, where its kernel's annotation leaves that."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.language import constexpr

    constant = gl.constexpr if isinstance(launch.kernel, GluonJITFunction) else constexpr
    return tuple(constant(arg) if isinstance(arg, (int, float)) else arg for arg in launch.args)


if __name__ == "__main__":
    sys.exit(main())
