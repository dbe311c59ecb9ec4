"""Times LayerNorm and RMSNorm, forward and backward, beside ATen and a stream kernel that moves the same bytes.

    python -m bench.bench_norm --shapes 16384x4096 8192x5120 --norms layer --dtype bf16

Every output is compared with float64 autograd before anything is timed. One JSON line per time goes to
bench/results/<date>-<gpu>.jsonl; exit code 1 if one of our outputs is wrong, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch

import fusednorm
from fusednorm.console import print_table, progress, show_beside
from fusednorm.testing import Case, Inputs, Outputs, assert_outputs_close, exact, make_inputs, relative_error

from .candidates import CANDIDATES, Candidate, floor_bytes, floor_call
from .timing import Times, time_interleaved

SHAPES = ("16384x4096", "8192x8192", "32768x1024", "1024x4096")
NORMS = ("layer", "rms")
DIRECTIONS = ("forward", "backward")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
FLOOR = "floor"
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Check:
    """Outputs against the oracle: relative L2 errors; and the sentence of a bound that does not hold, if any."""

    errors: dict[str, float]
    fault: str | None


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("bench_norm: needs a CUDA GPU, got none (python -m fusednorm doctor says more)", file=sys.stderr)
        return 2
    cases = list(make_cases(options))
    machine, records = describe_machine(), []
    bar = progress(cases, "cases", "bench")
    for case in bar:
        show_beside(bar, str(case))
        records += bench_case(case, options.candidates, options.directions, options.rounds, machine)
    print_report(records, machine)
    if not options.no_save:
        print(f"\n{len(records)} lines added to {save(records, machine, options.out)}")
    faults = [record for record in records if record["candidate"] == "fusednorm" and record["fault"]]
    for record in faults:
        print(f"WRONG: {record['fault']}", file=sys.stderr)
    return 1 if faults else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.bench_norm", description=__doc__.splitlines()[0])
    shapes = [parse_shape(shape) for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=shapes, metavar="MxN")
    parser.add_argument("--norms", nargs="+", choices=NORMS, default=NORMS)
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of x and grad_out (default: bf16)")
    parser.add_argument("--weight-dtype", choices=DTYPES, help="of the parameters (default: as --dtype)")
    parser.add_argument("--rounds", type=int, default=50, help="timed replays of each candidate (default: 50)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines (default: bench/results)")
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser.parse_args(arguments)


def parse_shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"a shape is rows x cols like 16384x4096, got {text}")
    return int(match[1]), int(match[2])


def make_cases(options: argparse.Namespace) -> Iterator[Case]:
    dtype = DTYPES[options.dtype]
    weight_dtype = DTYPES[options.weight_dtype or options.dtype]
    for norm in options.norms:
        for shape in options.shapes:
            yield Case(norm, shape, 1, dtype, weight_dtype, weight_dtype if norm == "layer" else None)


def bench_case(case: Case, names: list[str], directions: list[str], rounds: int, machine: dict) -> list[dict]:
    """Check, then time, all candidates on one case; a record per direction and candidate, the floor included."""
    inputs = make_inputs(case, "cuda")
    checks: dict[str, Check] = {}
    refusals: dict[str, str] = {}
    for name in names:
        try:
            checks[name] = check(CANDIDATES[name], case, inputs)
        except (RuntimeError, NotImplementedError) as error:
            refusals[name] = str(error).splitlines()[0]
    inputs = dataclasses.replace(inputs)  # without the oracle's float64 tensors, which would hold most of the memory
    records = []
    for direction in directions:
        calls = {FLOOR: floor_call(direction, inputs)}
        calls |= {name: timed_call(CANDIDATES[name], direction, case, inputs) for name in checks}
        times = time_interleaved(calls, rounds)
        clocks = read_clocks()
        for name in (FLOOR, *names):
            record = make_record(case, direction, name, times.get(name), times[FLOOR], checks.get(name), machine)
            records.append(record | {"refusal": refusals.get(name), "clocks": clocks})
    return records


def check(candidate: Candidate, case: Case, inputs: Inputs) -> Check:
    got, want = candidate.outputs(case, inputs), exact(case, inputs)
    names = [f.name for f in fields(Outputs) if getattr(got, f.name) is not None]
    errors = {name: relative_error(getattr(got, name), getattr(want, name)) for name in names}
    try:
        assert_outputs_close(got, case, inputs)
    except AssertionError as error:
        return Check(errors, str(error))
    return Check(errors, None)


def timed_call(candidate: Candidate, direction: str, case: Case, inputs: Inputs) -> Callable[[], object]:
    if direction == "forward":
        return lambda: candidate.forward(case, inputs)
    ahead = candidate.forward(case, inputs)
    ahead = Outputs(mean=ahead.mean, rstd=ahead.rstd)
    return lambda: candidate.backward(case, inputs, ahead)


def make_record(
    case: Case, direction: str, name: str, times: Times | None, floor: Times, checked: Check | None, machine: dict
) -> dict:
    """One JSON line. Times are microseconds; a candidate that refused the case has none."""
    record = machine | {
        "norm": case.norm,
        "direction": direction,
        "rows": case.rows,
        "cols": case.cols,
        "x_dtype": str(case.x_dtype).removeprefix("torch."),
        "weight_dtype": str(case.weight_dtype).removeprefix("torch."),
        "candidate": name,
        "errors": checked.errors if checked else None,
        "fault": checked.fault if checked else None,
    }
    if times is None:
        return record | {"median_us": None}
    return record | {
        "median_us": times.median,
        "p10_us": times.low,
        "p90_us": times.high,
        "rounds": times.rounds,
        "times_floor": times.median / floor.median,
        "floor_tb_s": floor_bytes(direction, case) / floor.median / 1e6,
    }


def describe_machine() -> dict:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        import triton
    except ModuleNotFoundError:
        triton = None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": properties.name,
        "fusednorm": fusednorm.__version__,
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", None),
        "cuda": torch.version.cuda,
    }


def read_clocks() -> dict[str, str] | None:
    """What nvidia-smi says of the current device right after timing; None where it says nothing."""
    names = ["clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "driver_version"]
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).removeprefix("GPU-")
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(names, (value.strip() for value in answer.strip().split(",")), strict=False))


def save(records: list[dict], machine: dict, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{machine['date'][:10]}-{slug(machine['gpu'])}.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


def slug(name: str) -> str:
    """NVIDIA H200 NVL is nvidia-h200-nvl."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def print_report(records: list[dict], machine: dict) -> None:
    title = f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, {machine['date']}"
    header = ["norm", "direction", "shape", "dtype", "candidate", "us", "spread", "time/floor", "worst error"]
    print_table(title, header, [report_row(record) for record in records], "bench")


def report_row(record: dict) -> list[str]:
    shape, dtype = f"{record['rows']}x{record['cols']}", record["x_dtype"]
    row = [record["norm"], record["direction"], shape, dtype, record["candidate"]]
    if record["median_us"] is None:
        return [*row, "", "", "", record.get("refusal") or ""]
    spread = (record["p90_us"] - record["p10_us"]) / record["median_us"]
    errors = record["errors"] or {}
    worst = f"{max(errors.values()):.1e}" if errors else f"{record['floor_tb_s']:.2f} TB/s"
    fault = " !" if record["fault"] else ""
    return [*row, f"{record['median_us']:.1f}", f"{spread:.1%}", f"{record['times_floor']:.2f}", worst + fault]


if __name__ == "__main__":
    sys.exit(main())
