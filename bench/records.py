"""Makes, saves and reads records: the JSON lines in bench/results/<gpu>/<tool>.jsonl.

A tool appends to its file. A reader takes the newest record of each cell and candidate. A cell is what was measured:
GPU, norm, direction, shape, dtypes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

import fusednorm
from fusednorm.tools.console import print_table

from .candidates import FLOOR, floor_bytes, is_ours
from .cases import BenchCase, dtype_name
from .peers import packages
from .timing import Times

RESULTS = Path(__file__).parent / "results"
PEER_DISTRIBUTIONS = "nvidia-cudnn-frontend quack-kernels nvidia-cutlass-dsl liger-kernel fla-core unsloth".split()
# The fields that identify a cell: records that agree in them are the same measurement, repeated.
CELL = tuple("gpu norm direction rows cols x_dtype weight_dtype token_stride frozen residual_dtype".split())


def describe_machine(gpu: str | None = None) -> dict:
    """Date, versions and the current GPU's name, or `gpu` in its place."""
    found = {name: packages.version(name) for name in PEER_DISTRIBUTIONS}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": gpu or torch.cuda.get_device_name(),
        "fusednorm": fusednorm.__version__,
        "torch": torch.__version__,
        "triton": packages.version("triton"),
        "cuda": torch.version.cuda,
        "peers": {name: version for name, version in found.items() if version},
    }


def lacks_gpu(tool: str, hint: str = "python -m fusednorm doctor says more") -> bool:
    """Whether there is no CUDA GPU; if so, prints an error that ends with the hint."""
    if torch.cuda.is_available():
        return False
    print(f"{tool}: needs a CUDA GPU, got none ({hint})", file=sys.stderr)
    return True


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


def case_fields(case: BenchCase, direction: str) -> dict:
    """The fields that every tool writes about the problem that it timed."""
    return {
        "norm": case.norm,
        "direction": direction,
        "rows": case.rows,
        "cols": case.cols,
        "x_dtype": dtype_name(case.x_dtype),
    }


def time_fields(times: Times) -> dict:
    """Microseconds, rounded to the nanosecond."""
    found = {"median_us": times.median, "p10_us": times.low, "p90_us": times.high}
    return {name: round(value, 3) for name, value in found.items()} | {"rounds": times.rounds}


def make_record(case: BenchCase, direction: str, name: str, times: Times | None, floor: Times, machine: dict) -> dict:
    """A record of bench_norm. A candidate that was not timed has no time."""
    record = (
        machine
        | case_fields(case, direction)
        | {
            "weight_dtype": dtype_name(case.weight_dtype),
            "token_stride": case.token_stride,
            "frozen": case.frozen,
            "residual_dtype": dtype_name(case.residual_dtype),
            "candidate": name,
            "median_us": None,
        }
    )
    if times is None:
        return record
    return (
        record
        | time_fields(times)
        | {
            "times_floor": round(times.median / floor.median, 4),
            "floor_tb_s": round(floor_bytes(direction, case) / floor.median / 1e6, 4),
        }
    )


def add_out_argument(parser: argparse.ArgumentParser) -> None:
    text = "where the JSON lines go: a .jsonl file, or a folder for <gpu>/<tool>.jsonl (default: bench/results)"
    parser.add_argument("--out", type=Path, default=RESULTS, help=text)


def results_path(out: Path, machine: dict, tool: str) -> Path:
    """`out` if it names a file, otherwise <out>/<gpu>/<tool>.jsonl. Makes the folder."""
    path = out if out.suffix == ".jsonl" else out / slug(machine["gpu"]) / f"{tool}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def slug(name: str) -> str:
    """NVIDIA H200 NVL is nvidia-h200-nvl."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def save(records: Iterable[dict], path: Path) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record, separators=(",", ":")) + "\n" for record in records)


def rows_of(paths: Iterable[Path]) -> list[dict]:
    """All records of some files, the oldest first. Ends the program with a sentence if a file has something else."""
    found: list[dict] = []
    for path in paths:
        try:
            found += map(json.loads, path.read_text().splitlines())
        except (OSError, ValueError) as error:
            print(f"bench: a file of records must have a line of JSON for each, got {path}: {error}", file=sys.stderr)
            raise SystemExit(2) from None
    return sorted(found, key=lambda record: record["date"])


def by_day(records: Iterable[dict]) -> dict[str, list[dict]]:
    """The records of each day, the newest day first. Only times of the same day are compared."""
    days: dict[str, list[dict]] = {}
    for record in records:
        days.setdefault(record["date"][:10], []).append(record)
    return dict(sorted(days.items(), reverse=True))


def load(paths: Iterable[Path]) -> list[dict]:
    """The newest record of each cell and candidate in bench_norm's files; records of other tools are left out."""
    return newest(record for record in rows_of(paths) if {"candidate", "median_us"} <= record.keys())


def newest(records: Iterable[dict]) -> list[dict]:
    """The last record of each cell and candidate."""
    return list({(*cell(record), record["candidate"]): record for record in records}.values())


def cell(record: dict) -> tuple:
    """The values of CELL; older records lack the last fields."""
    return tuple(record.get(name) or None for name in CELL)


def spread(record: dict) -> float:
    """Width of the middle 80% of the times, relative to the median."""
    return (record["p90_us"] - record["p10_us"]) / record["median_us"]


def is_plain(record: dict) -> bool:
    """Whether rows were contiguous and of the parameters' dtype, all gradients wanted, and nothing added to dx."""
    special = any(record.get(name) for name in ("token_stride", "frozen", "residual_dtype"))
    return not special and record["weight_dtype"] == record["x_dtype"]


def timed(records: Iterable[dict]) -> list[dict]:
    return [record for record in records if record["median_us"] is not None]


def by_cell(records: Iterable[dict]) -> dict[tuple, dict[str, dict]]:
    """cell -> candidate -> record, without the records that have no time."""
    cells: dict[tuple, dict[str, dict]] = {}
    for record in timed(records):
        cells.setdefault(cell(record), {})[record["candidate"]] = record
    return cells


def best_peer(candidates: dict[str, dict]) -> dict | None:
    """The fastest candidate of a cell, ours and the floor left out."""
    peers = [r for name, r in candidates.items() if name != FLOOR and not is_ours(name)]
    return min(peers, key=lambda record: record["median_us"], default=None)


def machine_text(machine: dict) -> str:
    return f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, {machine['date']}"


def print_report(records: list[dict], machine: dict) -> None:
    header = "norm direction shape dtype candidate us spread time/floor host_us MB error".split()
    ordered = sorted(records, key=lambda r: (*map(str, cell(r)), r["median_us"] or math.inf))
    print_table(machine_text(machine), header, [report_row(record) for record in ordered])
    print_table(
        "Geometric mean of time/floor over each candidate's shapes",
        ["norm", "direction", "dtype", "candidate", "time/floor", "shapes"],
        summary_rows(records),
    )


def report_row(record: dict) -> list[str]:
    row = [record["norm"], record["direction"], shape_text(record), record["x_dtype"], record["candidate"]]
    if record["median_us"] is None:
        return [*row, "", "", "", "", "", (record.get("refusal") or "")[:60]]
    errors = record.get("errors") or {}
    worst = f"{max(errors.values()):.1e}" if errors else f"{record['floor_tb_s']:.2f} TB/s"
    fault = " !" if record.get("fault") else ""
    host, peak = record.get("host_us"), record.get("peak_bytes")
    return [
        *row,
        f"{record['median_us']:.1f}",
        f"{spread(record):.1%}",
        f"{record['times_floor']:.2f}",
        "" if host is None else f"{host:.1f}",
        "" if peak is None else f"{peak / 1e6:.1f}",
        worst + fault,
    ]


def shape_text(record: dict) -> str:
    """rows x cols, with marks for packed rows, frozen parameters and a residual's gradient."""
    packed = f"@{record['token_stride']}" if record.get("token_stride") else ""
    frozen = " frozen" if record.get("frozen") else ""
    residual = f" +{record['residual_dtype']}" if record.get("residual_dtype") else ""
    return f"{record['rows']}x{record['cols']}{packed}{frozen}{residual}"


def summary_rows(records: list[dict]) -> list[list[str]]:
    groups: dict[tuple, list[float]] = {}
    for record in timed(records):
        if record["candidate"] != FLOOR:
            key = (record["norm"], record["direction"], record["x_dtype"], record["candidate"])
            groups.setdefault(key, []).append(record["times_floor"])
    means = {key: statistics.geometric_mean(values) for key, values in groups.items()}
    ordered = sorted(groups, key=lambda key: (*key[:3], means[key]))
    return [[*key, f"{means[key]:.3f}", str(len(groups[key]))] for key in ordered]
