"""Times the host side of eager calls, ours beside ATen's: the raw ops, and modules with autograd.

    python -m bench.host_time --rows 128 --cols 1024

Nothing is waited for: a call is over when its kernels are enqueued. The records say whether the host side in C++ was
built (fusednorm/host/native.py). One JSON line per call goes to host-time.jsonl. Exit code 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

import fusednorm
from fusednorm.host import native
from fusednorm.tools.console import print_table

from .candidates import OURS
from .cases import DTYPES, NORMS, add_dtype_argument, dtype_name, make_parser
from .records import add_out_argument, describe_machine, lacks_gpu, results_path, save
from .timing import HOST_CALLS, Times, host_times

ATEN = "aten"


class Timed(NamedTuple):
    """What is called, and in whose implementation: OURS or ATEN."""

    norm: str
    call: str
    candidate: str


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("host_time"):
        return 2
    calls: dict[Timed, Callable[[], object]] = {}
    for norm in NORMS:
        found = calls_of(norm, options.rows, options.cols, DTYPES[options.dtype])
        calls |= {Timed(norm, *key): call for key, call in found.items()}
    times = host_times(calls, options.rounds)
    report(times)
    machine = describe_machine()
    common = {
        "native": native.extension is not None,
        "rows": options.rows,
        "cols": options.cols,
        "x_dtype": dtype_name(DTYPES[options.dtype]),
    }
    records = [
        machine | common | key._asdict() | {"host_us": round(each.median, 3), "spread": round(each.spread, 4)}
        for key, each in times.items()
    ]
    save(records, results_path(options.out, machine, "host-time"))
    return 0


def report(times: dict[Timed, Times]) -> None:
    rows = []
    for key, each in times.items():
        if key.candidate == OURS:
            ours, atens = each.median, times[key._replace(candidate=ATEN)].median
            rows.append([key.norm, key.call, *(f"{number:.2f}" for number in (ours, atens, ours / atens))])
    title = f"Host us of a call, our host side in {'C++' if native.extension else 'Python'}"
    print_table(title, ["norm", "call", "fusednorm", "ATen", "ratio"], rows, "bench")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("host_time", __doc__)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--cols", type=int, default=1024)
    add_dtype_argument(parser)
    parser.add_argument("--rounds", type=int, default=15, help=f"of {HOST_CALLS} calls each (default: 15)")
    add_out_argument(parser)
    return parser.parse_args(arguments)


def calls_of(
    norm: str, rows: int, cols: int, dtype: torch.dtype, device: str = "cuda"
) -> dict[tuple[str, str], Callable[[], object]]:
    """By (call, candidate): forward and backward op, a module with its backward, and a module without gradients."""
    x, dy = (torch.randn(rows, cols, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(cols, device=device, dtype=dtype) for _ in range(2))
    ours, aten = torch.ops.fusednorm, torch.ops.aten
    if norm == "layer":
        parameters, module = (weight, bias), "LayerNorm"
        ops = {
            OURS: (ours.layer_norm_fwd, ours.layer_norm_bwd),
            ATEN: (aten.native_layer_norm, aten.native_layer_norm_backward),
        }
    else:
        parameters, module = (weight,), "RMSNorm"
        ops = {
            OURS: (ours.rms_norm_fwd, ours.rms_norm_bwd),
            ATEN: (aten._fused_rms_norm, aten._fused_rms_norm_backward),
        }
    operands, mask = (x, [cols], *parameters, 1e-5), [True] * (1 + len(parameters))
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for name, package in ((OURS, fusednorm), (ATEN, torch.nn)):
        forward, backward = ops[name]
        grads = (dy, x, [cols], *forward(*operands)[1:], *parameters, mask)
        make_module = functools.partial(getattr(package, module), cols, device=device, dtype=dtype)
        calls["forward op", name] = functools.partial(forward, *operands)
        calls["backward op", name] = functools.partial(backward, *grads)
        calls["module, forward and backward", name] = training_call(make_module(), x, dy)
        calls["module, no gradient", name] = inference_call(make_module(), x)
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


if __name__ == "__main__":
    sys.exit(main())
