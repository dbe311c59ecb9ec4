"""Times a residual's addition and the norm behind it in a compiled graph: both in one kernel of Inductor's, or the norm
by our kernel behind Inductor's addition.

    python -m bench.fused_forward --shapes 8192x8192 4096x16384 2048x32768 1024x65536

WIDE_ROW of fusednorm/integrations/routing.py is the width from which ours is faster. One JSON line per case goes to
fused-forward.jsonl. Exit code 1 if a result is wrong, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from fusednorm.tools.console import print_table
from fusednorm.tools.oracle import relative_error

from .cases import BenchCase, add_case_arguments, make_bench_inputs, make_cases, make_parser
from .records import add_out_argument, case_fields, describe_machine, lacks_gpu, results_path, save
from .timing import time_interleaved

MAX_ERROR = 1e-2  # relative, of a bfloat16 result
FUSED, OURS = "fused", "ours"
Block = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("fused_forward"):
        return 2
    machine = describe_machine()
    path = results_path(options.out, machine, "fused-forward")
    records = []
    for case in make_cases(options):
        records.append(machine | compare(case, options.rounds))
        save(records[-1:], path)
    rows = [
        [f"{r['norm']} {r['rows']}x{r['cols']} {r['x_dtype']}", f"{r['fused_us']:.1f}", f"{r['ours_us']:.1f}",
         f"{r['fused_us'] / r['ours_us']:.3f}", f"{max(r['errors'].values()):.1e}"]
        for r in records
    ]  # fmt: skip
    print_table("Addition and norm, us", ["case", "one kernel", "ours behind", "faster by", "error"], rows)
    return 0 if all(max(record["errors"].values()) <= MAX_ERROR for record in records) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("fused_forward", __doc__)
    add_case_arguments(parser)
    parser.add_argument("--rounds", type=int, default=40, help="timed replays of each (default: 40)")
    add_out_argument(parser)
    return parser.parse_args(arguments)


def make_block(case: BenchCase, weight: Tensor | None, bias: Tensor | None) -> Block:
    """What a layer does between two matrix products: it adds to the residual stream, and normalizes the sum."""

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        stream = x + residual
        if case.norm == "layer":
            return stream, torch.nn.functional.layer_norm(stream, stream.shape[1:], weight, bias)
        return stream, torch.nn.functional.rms_norm(stream, stream.shape[1:], weight, 1e-5)

    return block


def compile_both(block: Block, *example: Tensor) -> dict[str, Block]:
    """The block compiled in both ways, whatever the width. Caches of compiled graphs are off, because their keys do not
    hold WIDE_ROW."""
    from fusednorm.integrations import routing
    from fusednorm.integrations.inductor import compile_graph

    compiled = {FUSED: torch.compile(block, fullgraph=True, dynamic=False)}
    compiled[OURS] = torch.compile(block, fullgraph=True, dynamic=False, backend=compile_graph)
    with torch._inductor.config.patch(force_disable_caches=True), mock.patch.object(routing, "WIDE_ROW", 0):
        for each in compiled.values():
            each(*example)
        ours = [entry for entry in routing.report(clear=True) if entry.direction == "forward" and entry.taken]
    if len(ours) != 1:
        raise RuntimeError(f"one norm must run our kernel, got {len(ours)}")
    return compiled


def compare(case: BenchCase, rounds: int) -> dict:
    """A record of both ways."""
    from fusednorm.integrations import routing

    torch.compiler.reset()
    routing.report(clear=True)
    inputs = make_bench_inputs(case, "cuda")
    operands = inputs.x, inputs.grad_out
    block = make_block(case, inputs.weight, inputs.bias)
    with torch.no_grad():
        compiled = compile_both(block, *operands)
        want = block(*operands)[1]
        errors = {name: relative_error(run(*operands)[1], want) for name, run in compiled.items()}
        times = time_interleaved({name: lambda run=run: run(*operands) for name, run in compiled.items()}, rounds)
    found = {f"{name}_us": round(each.median, 3) for name, each in times.items()}
    return case_fields(case, "forward") | {"errors": errors} | found | {"spread": round(times[FUSED].spread, 4)}


if __name__ == "__main__":
    sys.exit(main())
