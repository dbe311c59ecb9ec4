"""Times the presets of cuDNN frontend's own benchmark/norms, and writes its CSV, so that both can be laid side by side.

    python -m bench.cudnn_presets

As there, a time is the median over 20 calls of what a call's kernels took, by torch's profiler, with a cold L2. Bytes
are each tensor's once, statistics in float32. A backend that cannot run a preset has a line with the reason. The lines
go to cudnn-presets.csv. Exit code 1 if our backend failed, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from fusednorm.tools.console import progress

from .bench_norm import enter, timed_call
from .candidates import OURS, present
from .cases import DIRECTIONS, BenchCase, dtype_name, make_bench_inputs, make_parser, plain_case
from .peers import inductor
from .records import add_out_argument, describe_machine, lacks_gpu, results_path
from .timing import FLUSH_BYTES
from .zoo.profile import on_device, traced

WARMUP_CALLS, TIMED_CALLS = 5, 20
BACKENDS = {OURS: OURS, "cudnn": "cudnn", "quack": "quack", "aten": "pytorch", "inductor": "torch_compile"}
COLUMNS = (
    "config_name", "norm_name", "norm_type", "backend", "data_type", "N", "C", "epsilon", "has_bias", "profile_pass",
    "fwd_time_ms", "bwd_time_ms", "fwd_gbps", "bwd_gbps", "num_iterations", "success", "error_message", "gpu_name",
    "cudnn_version", "cudnn_backend_version",
)  # fmt: skip


class Preset(NamedTuple):
    name: str
    rows: int
    cols: int
    norm: str = "rms"


PRESETS = (
    Preset("llama3-8b", 16384, 4096),
    Preset("llama3-70b", 8192, 8192),
    Preset("llama31-405b", 4096, 16384),
    Preset("llama4-e16", 8192, 5120),
    Preset("gpt3-175b", 1024, 12288, "layer"),
    Preset("mixtral-8x7b", 8192, 4096),
    Preset("mixtral-8x22b", 4096, 6144),
    Preset("nemotronh-56b", 4096, 8192),
    Preset("deepseek-v3-2048x4096", 2048, 4096),
    Preset("deepseek-v3-131072x128", 131072, 128),
    Preset("deepseek-v3-8192x128", 8192, 128),
    Preset("qwen3-235b", 8192, 5120),
    Preset("qwen3-30b-4096x2048", 4096, 2048),
    Preset("qwen3-30b-131072x128", 131072, 128),
    Preset("qwen3-30b-16384x128", 16384, 128),
)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("cudnn_presets"):
        return 2
    machine = describe_machine()
    path = results_path(options.out, machine, "cudnn-presets").with_suffix(".csv")
    found = [line for preset in progress(options.presets, "presets", "bench") for line in lines(preset, machine)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(found)
    print(f"{len(found)} lines written to {path}")
    failed = [line for line in found if line["backend"] == OURS and not line["success"]]
    for line in failed:
        print(f"{line['norm_name']}: {line['error_message']}", file=sys.stderr)
    return 1 if failed else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("cudnn_presets", __doc__)
    named = {preset.name: preset for preset in PRESETS}
    parser.add_argument("--presets", nargs="+", choices=named, metavar="NAME", help=", ".join(named))
    add_out_argument(parser)
    options = parser.parse_args(arguments)
    options.presets = [named[name] for name in options.presets or named]
    return options


def lines(preset: Preset, machine: dict, device: str = "cuda") -> list[dict]:
    """A line of the CSV for each backend that is installed."""
    case = plain_case(preset.norm, (preset.rows, preset.cols), "bf16")
    inputs, found = make_bench_inputs(case, device), []
    for name, candidate in present(BACKENDS).items():
        entry, times, error = enter(candidate, case, inputs), {}, None
        try:
            times = {way: device_ms(timed_call(entry.calls, way)) for way in DIRECTIONS} if entry.calls else {}
        except Exception as raised:
            error = repr(raised)
        found.append(line(preset, case, BACKENDS[name], times, entry.refusal or error, machine))
    inductor.forget()
    return found


def device_ms(call: Callable[[], object]) -> float:
    """The median of what the kernels of a call take, in milliseconds."""
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def calls() -> None:
        for _ in range(TIMED_CALLS):
            flushed.zero_()
            call()
            torch.cuda.synchronize()

    for _ in range(WARMUP_CALLS):
        call()
    return median_ms(on_device(traced(calls)))


def median_ms(events: list[dict]) -> float:
    """Of TIMED_CALLS calls with as many events each, whose first is the flush."""
    each, rest = divmod(len(events), TIMED_CALLS)
    if rest or each < 2:
        raise RuntimeError(f"{TIMED_CALLS} calls and flushes must have as many kernels each, got {len(events)} in all")
    groups = (events[first + 1 : first + each] for first in range(0, len(events), each))
    return statistics.median(sum(event["dur"] for event in group) for group in groups) / 1000


def line(preset: Preset, case: BenchCase, backend: str, times: dict, error: str | None, machine: dict) -> dict:
    def gbps(way: str) -> float:
        return bytes_of(case, way) / times[way] / 1e6 if times else 0.0

    values = (
        "all_models", preset.name, f"{preset.norm}_norm", backend, dtype_name(case.x_dtype), preset.rows, preset.cols,
        case.resolved_eps, preset.norm == "layer", "both",
        *(times.get(way, float("inf")) for way in DIRECTIONS), *(gbps(way) for way in DIRECTIONS),
        TIMED_CALLS, bool(times), error, machine["gpu"], machine["peers"].get("nvidia-cudnn-frontend"), None,
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def bytes_of(case: BenchCase, way: str) -> int:
    """x and y, or dy, x and dx; the parameters, in the backward with their gradients; and the statistics."""
    large, parameters = (2, 1) if way == "forward" else (3, 2)
    layer = case.norm == "layer"
    # The frontend counts a LayerNorm's bias once in each direction.
    small = parameters + layer
    return (large * case.rows + small) * case.cols * case.x_dtype.itemsize + (1 + layer) * 4 * case.rows


if __name__ == "__main__":
    sys.exit(main())
