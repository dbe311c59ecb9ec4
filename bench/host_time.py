"""Host time of eager calls, ours beside ATen's: the raw ops, and modules with autograd.

    python -m bench.host_time --rows 128 --cols 1024

Nothing is waited for: a call is over when its kernels are enqueued. Candidates take turns, so that both see the same
moods of the machine. Says whether the host side in C++ was built (fusednorm/host/native.py). One JSON line per call
goes to host-time.jsonl. Exit code 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

import fusednorm
from fusednorm.host import native
from fusednorm.tools.console import print_table

from .cases import DTYPES, dtype_name
from .records import add_out_argument, describe_machine, lacks_gpu, results_path, save
from .timing import WARMUP_CALLS, Times, rotations

CALLS = 100  # between two looks at the clock: the GPU's queue holds more


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("host_time"):
        return 2
    calls = {
        (norm, what, whose): call
        for norm in ("layer", "rms")
        for (what, whose), call in calls_of(norm, options.rows, options.cols, DTYPES[options.dtype]).items()
    }
    times = host_times(calls, options.rounds)
    machine = describe_machine()
    common = {
        "native": native.extension is not None,
        "rows": options.rows,
        "cols": options.cols,
        "x_dtype": dtype_name(DTYPES[options.dtype]),
    }
    records = [
        {**machine, **common, "norm": norm, "call": what, "candidate": whose}
        | {"host_us": round(each.median, 3), "spread": round(each.spread, 4)}
        for (norm, what, whose), each in times.items()
    ]
    rows = []
    for norm, what, whose in calls:
        if whose == "fusednorm":
            ours, atens = times[norm, what, "fusednorm"], times[norm, what, "aten"]
            numbers = (ours.median, atens.median, ours.median / atens.median)
            rows.append([norm, what, *(f"{number:.2f}" for number in numbers)])
    title = f"Host us of a call, our host side in {'C++' if native.extension else 'Python'}"
    print_table(title, ["norm", "call", "fusednorm", "ATen", "ratio"], rows, "bench")
    save(records, results_path(options.out, machine, "host-time"))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.host_time", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--cols", type=int, default=1024)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=15, help=f"of {CALLS} calls each (default: 15)")
    add_out_argument(parser)
    return parser.parse_args(arguments)


def calls_of(
    norm: str, rows: int, cols: int, dtype: torch.dtype, device: str = "cuda"
) -> dict[tuple[str, str], Callable[[], object]]:
    """By (call, whose): forward and backward op, a module with its backward, and one that needs no gradient."""
    x, dy = (torch.randn(rows, cols, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(cols, device=device, dtype=dtype) for _ in range(2))
    modules = {"fusednorm": fusednorm, "aten": torch.nn}
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for whose, package in modules.items():
        if norm == "layer":
            ops = {"fusednorm": torch.ops.fusednorm.layer_norm_fwd, "aten": torch.ops.aten.native_layer_norm}
            backwards = {
                "fusednorm": torch.ops.fusednorm.layer_norm_bwd,
                "aten": torch.ops.aten.native_layer_norm_backward,
            }
            operands, mask, module = (x, [cols], weight, bias, 1e-5), [True] * 3, package.LayerNorm
        else:
            ops = {"fusednorm": torch.ops.fusednorm.rms_norm_fwd, "aten": torch.ops.aten._fused_rms_norm}
            backwards = {"fusednorm": torch.ops.fusednorm.rms_norm_bwd, "aten": torch.ops.aten._fused_rms_norm_backward}
            operands, mask, module = (x, [cols], weight, 1e-5), [True] * 2, package.RMSNorm
        forward, backward = ops[whose], backwards[whose]
        calls["forward op", whose] = lambda forward=forward, operands=operands: forward(*operands)
        grads = (dy, x, [cols], *forward(*operands)[1:], *operands[2:-1], mask)
        calls["backward op", whose] = lambda backward=backward, grads=grads: backward(*grads)
        calls["module, forward and backward", whose] = training_call(module(cols, device=device, dtype=dtype), x, dy)
        calls["module, no gradient", whose] = inference_call(module(cols, device=device, dtype=dtype), x)
    return calls


def training_call(module: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], None]:
    leaf = x.clone().requires_grad_()

    def call() -> None:
        module(leaf).backward(dy)
        leaf.grad = None
        module.zero_grad()

    return call


def inference_call(module: torch.nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            module(x)

    return call


def host_times(calls: dict[tuple, Callable[[], object]], rounds: int, synchronize=torch.cuda.synchronize) -> dict:
    """Microseconds of one call, by the same names: CALLS of one candidate in a row, candidates in rotating order."""
    for call in calls.values():
        for _ in range(WARMUP_CALLS):
            call()
    taken: dict[tuple, list[float]] = {name: [] for name in calls}
    for order in rotations(list(calls), rounds):
        for name in order:
            call = calls[name]
            synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            taken[name].append(1e6 * (time.perf_counter() - start) / CALLS)
            synchronize()
    return {name: Times.of(microseconds) for name, microseconds in taken.items()}


if __name__ == "__main__":
    sys.exit(main())
