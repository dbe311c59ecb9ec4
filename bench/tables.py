"""Tables and numbers of the documents, made from the records in bench/results.

A table takes the newest day that has all its cells. A peer that was not timed on that day is taken from an older day
and compared with our time of that older day.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from .candidates import FLOOR, OURS
from .cases import NORMS, SHAPE_SETS, parse_shape
from .records import RESULTS, by_day, is_plain, newest, rows_of, timed

GPUS = {"H200": "nvidia-h200", "H100": "nvidia-h100-80gb-hbm3"}  # name -> folder of its results
SHAPES = [parse_shape(text).sizes for text in SHAPE_SETS["proof"]]
NAMES = {"layer": "LayerNorm", "rms": "RMSNorm", "aten": "ATen", "cudnn": "cuDNN", "quack": "QuACK", "liger": "Liger",
         "inductor": "torch.compile", "inductor_mix": "torch.compile, mix-order", FLOOR: "floor", OURS: "fusednorm",
         "batch_invariant": "fusednorm, batch_invariant", "ordered_sums": "fusednorm, ordered sums of 4 blocks",
         "gpt2": "GPT-2", "llama": "Llama", "fla": "FLA", "unsloth": "Unsloth"}  # fmt: skip
PEERS = ("cudnn", "quack", "inductor", "liger", "aten")
DIRECTIONS = ("backward", "forward")
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
CHAINS = {"alone": "alone", "four": "four in a row", "elementwise": "between element-wise kernels",
          "matmul": "between matrix products"}  # fmt: skip
FRONT_PAGE = [("backward", "aten"), ("backward", "cudnn"), ("forward", "aten"), ("forward", "cudnn")]
OTHER_TRITON, SLOWER = "3.9.0", 1.05  # of releases.jsonl; the ratio from which a cell is named


def records_of(tool: str, gpu: str = "H200") -> list[dict]:
    """All records of a tool on a GPU, the oldest first; none if there is no file."""
    return _read(RESULTS / GPUS[gpu] / f"{tool}.jsonl")


@cache
def _read(path: Path) -> list[dict]:
    return rows_of([path]) if path.exists() else []


def newest_day(tool: str, gpu: str = "H200") -> list[dict]:
    return next(iter(by_day(records_of(tool, gpu)).values()))


def microseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 50 else f"{value:.1f}"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(tool: str, records: list[dict], gpu: str = "H200") -> str:
    """A line that says where numbers come from: file, day, GPU, versions."""
    first = records[0]
    peers = "".join(f", {name} {version}" for name, version in (first.get("peers") or {}).items())
    file = f"`bench/results/{GPUS[gpu]}/{tool}.jsonl`"
    return f"{file}, {first['date'][:10]}: {first['gpu']}, torch {first['torch']}, Triton {first['triton']}{peers}."


class Means(NamedTuple):
    """Geometric means of times over the floor, over the cells that both were timed in."""

    theirs: float
    ours: float
    cells: int
    ahead: int  # cells in which the peer is faster

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


class Cells:
    """The twelve shapes on one day, by bench_norm: (norm, direction, dtype) -> shape -> candidate -> record."""

    def __init__(self, records: list[dict]):
        self.records = timed(newest(records))
        self.found: dict[tuple, dict[tuple, dict[str, dict]]] = {}
        for each in self.records:
            shape = each["rows"], each["cols"]
            if shape in SHAPES and is_plain(each):
                group = self.found.setdefault((each["norm"], each["direction"], each["x_dtype"]), {})
                group.setdefault(shape, {})[each["candidate"]] = each

    @property
    def day(self) -> str:
        return self.records[0]["date"][:10]

    @cached_property
    def dtypes(self) -> list[str]:
        return [dtype for dtype in DTYPES if any(key[2] == dtype for key in self.found)]

    def has_all(self, dtypes: Iterable[str]) -> bool:
        """Whether there is a time of ours for every cell of the tables of these dtypes."""
        return all(OURS in self.of(*each) for each in itertools.product(NORMS, DIRECTIONS, dtypes, SHAPES))

    def of(self, norm: str, direction: str, dtype: str, shape: tuple) -> dict[str, dict]:
        return self.found.get((norm, direction, dtype), {}).get(shape, {})

    def means(self, norm: str, direction: str, dtype: str, candidate: str) -> Means:
        pairs = [
            (cell[candidate]["times_floor"], cell[OURS]["times_floor"])
            for cell in self.found.get((norm, direction, dtype), {}).values()
            if candidate in cell and OURS in cell
        ]
        theirs, ours = zip(*pairs, strict=True) if pairs else ((), ())
        both = (statistics.geometric_mean(each) if each else 0.0 for each in (theirs, ours))
        return Means(*both, len(pairs), sum(their < our for their, our in pairs))


@cache
def measured_days(gpu: str = "H200") -> list[Cells]:
    """The days on which bench_norm ran there, the newest first."""
    return [Cells(records) for records in by_day(records_of("norm", gpu)).values()]


def proof(days: list[Cells]) -> Cells:
    """The newest day that has all shapes, in all dtypes that were timed on any day."""
    dtypes = [dtype for dtype in DTYPES if any(dtype in cells.dtypes for cells in days)]
    return next(cells for cells in days if cells.has_all(dtypes))


def newest_with(days: list[Cells], norm: str, direction: str, dtype: str, peer: str) -> tuple[Cells, Means] | None:
    """The newest day that has times of the peer and ours, and its means."""
    found = ((cells, cells.means(norm, direction, dtype, peer)) for cells in days)
    return next((each for each in found if each[1].cells), None)


def means(norm: str, peer: str, direction: str = "backward", dtype: str = "bfloat16", gpu: str = "H200") -> Means:
    """What the tables say of a peer."""
    return newest_with(measured_days(gpu), norm, direction, dtype, peer)[1]


def twelve_shapes(cells: Cells, direction: str, dtype: str) -> str:
    header = ["rows x cols"]
    for norm in NORMS:
        header += ["floor", NAMES[norm], *(NAMES[peer] for peer in ("cudnn", "aten"))]
    lines = []
    for shape in SHAPES:
        line = [f"{shape[0]}x{shape[1]}"]
        for norm in NORMS:
            cell = cells.of(norm, direction, dtype, shape)
            line.append(microseconds(cell[FLOOR]["median_us"]))
            line.append(f"{microseconds(cell[OURS]['median_us'])} ({cell[OURS]['times_floor']:.2f}x)")
            line += [_beside_ours(cell, peer) for peer in ("cudnn", "aten")]
        lines.append(line)
    return table(header, lines)


def _beside_ours(cell: dict[str, dict], peer: str) -> str:
    """The peer's time, bold if it is faster than ours."""
    if peer not in cell:
        return ""
    time = microseconds(cell[peer]["median_us"])
    return f"**{time}**" if cell[peer]["times_floor"] < cell[OURS]["times_floor"] else time


def every_peer() -> str:
    """A row for every peer: geometric means over the cells of the newest day that has its times and ours."""
    lines = []
    for gpu in GPUS:
        days = measured_days(gpu)
        for dtype, norm, direction, peer in itertools.product(DTYPES, NORMS, DIRECTIONS, PEERS):
            found = newest_with(days, norm, direction, dtype, peer)
            if found:
                cells, mean = found
                line = [gpu, NAMES[norm], direction, DTYPES[dtype], NAMES[peer], f"{mean.theirs:.2f}"]
                line += [f"{mean.ours:.2f}", f"{mean.ratio:.2f}", f"{mean.ahead} of {mean.cells}", cells.day]
                lines.append(line)
    header = ["GPU", "norm", "direction", "dtype", "peer", "its times/floor", "ours", "peer / ours"]
    return table([*header, "peer faster in", "day"], lines)


def speeds() -> str:
    """What the front page says: geometric means over the twelve shapes in bfloat16."""
    lines = [
        [
            f"{NAMES[norm]}, {gpu}",
            *(f"{means(norm, peer, direction, gpu=gpu).ratio:.2f}" for direction, peer in FRONT_PAGE),
        ]
        for gpu, norm in itertools.product(GPUS, NORMS)
    ]
    names = {"aten": "PyTorch", "cudnn": "cuDNN"}
    return table(["", *(f"{direction}, {names[peer]}" for direction, peer in FRONT_PAGE)], lines)


class Ahead(NamedTuple):
    """A place where a peer is faster than ours, by the fraction `by`."""

    gpu: str
    file: str
    where: str
    peer: str
    theirs_us: float
    ours_us: float
    by: float


def shapes_ahead(gpu: str, peer: str) -> list[Ahead]:
    """Cells of the twelve shapes in which the peer is faster, over the floor of its run."""
    found, days = [], measured_days(gpu)
    for dtype, norm, direction in itertools.product(DTYPES, NORMS, DIRECTIONS):
        cells, _ = newest_with(days, norm, direction, dtype, peer) or (None, None)
        for shape in SHAPES if cells else ():
            cell = cells.of(norm, direction, dtype, shape)
            if peer in cell and OURS in cell:
                theirs, ours = cell[peer], cell[OURS]
                where = f"{NAMES[norm]} {direction} {shape[0]}x{shape[1]}, {DTYPES[dtype]}"
                by = ours["times_floor"] / theirs["times_floor"] - 1
                found.append(Ahead(gpu, "norm", where, peer, theirs["median_us"], ours["median_us"], by))
    return [each for each in found if each.by > 0]


def num_cells(peer: str, gpu: str) -> int:
    """In how many cells of the twelve shapes both were timed."""
    found = (
        newest_with(measured_days(gpu), norm, direction, dtype, peer)
        for norm, direction, dtype in itertools.product(NORMS, DIRECTIONS, DTYPES)
    )
    return sum(each[1].cells for each in found if each)


def others_ahead(gpu: str) -> Iterator[Ahead]:
    """Chains, and backwards beside held SMs, in which cuDNN is faster: times of whole graphs."""
    for each in chains_of(gpu):
        where = f"{NAMES[each['norm']]} {each['direction']} {each['rows']}x{each['cols']}, {CHAINS[each['chain']]}"
        theirs, ours = each["cudnn_us"], each["fusednorm_us"]
        yield Ahead(gpu, "chains", where, "cudnn", theirs, ours, ours / theirs - 1)
    times = beside_times(gpu)
    for (norm, rows, cols, candidate, held, margin), theirs in times.items():
        ours = times.get((norm, rows, cols, OURS, held, margin))
        if candidate == "cudnn" and ours:
            where = f"{NAMES[norm]} backward {rows}x{cols}, {f'beside {held} held SMs' if held else 'warm L2'}"
            yield Ahead(gpu, "beside", where, candidate, theirs, ours, ours / theirs - 1)


def peers_ahead(others: Iterable[Ahead]) -> str:
    """Every place where a peer is faster than ours: of the twelve shapes, and of others."""
    found = [each for gpu in GPUS for peer in PEERS for each in shapes_ahead(gpu, peer)]
    found += [each for each in others if each.by > 0]
    header = ["GPU", "file", "peer", "where", "its us", "ours", "ours takes longer by"]
    return table(header, (
        [each.gpu, f"{each.file}.jsonl", NAMES[each.peer], each.where, microseconds(each.theirs_us),
         microseconds(each.ours_us), f"{each.by:.1%}"]
        for each in found
    ))  # fmt: skip


def chains_of(gpu: str) -> list[dict]:
    """The newest record of each chain, by the kernels as they are: none that stores dx in another way."""
    return list({
        (each["norm"], each["direction"], each["rows"], each["cols"], each["chain"]): each
        for each in records_of("chains", gpu)
        if each.get("dx_stores", "default") == "default"
    }.values())  # fmt: skip


def chains(gpu: str) -> str:
    found = {(r["norm"], r["direction"], r["rows"], r["cols"], r["chain"]): r for r in chains_of(gpu)}
    header = ["graph", *(f"{name}: floor, ours, cuDNN" for name in CHAINS.values())]
    lines = []
    for norm, direction, rows, cols in dict.fromkeys(key[:4] for key in found):
        line = [f"{NAMES[norm]} {direction} {rows}x{cols}"]
        for chain in CHAINS:
            each = found[norm, direction, rows, cols, chain]
            times = [microseconds(each[f"{name}_us"]) for name in ("floor", "fusednorm", "cudnn")]
            if each["cudnn_us"] < each["fusednorm_us"]:
                times[2] = f"**{times[2]}**"
            line.append(", ".join(times))
        lines.append(line)
    return table(header, lines)


def beside_times(gpu: str = "H200") -> dict[tuple, float]:
    """(norm, rows, cols, candidate, held SMs, margin) -> us of a backward, replayed as a CUDA graph."""
    return {
        (r["norm"], r["rows"], r["cols"], r["candidate"], r["held_sms"], r["sm_margin"]): r["median_us"]
        for r in (newest_day("beside", gpu) if records_of("beside", gpu) else ())
        if r["mode"] == "graph"
    }


def beside() -> str:
    """Times of a backward while another stream's kernel holds SMs."""
    cells = beside_times()
    columns = [(OURS, held, 0) for held in (0, 1, 8, 16, 32)] + [(OURS, 32, 32)]
    columns += [(peer, held, 0) for peer in ("aten", "cudnn") for held in (0, 32)]
    header = ["backward", *(_column(*each) for each in columns)]
    lines = []
    for norm, rows, cols in dict.fromkeys(key[:3] for key in cells):
        times = [cells.get((norm, rows, cols, *each)) for each in columns]
        lines.append([f"{NAMES[norm]} {rows}x{cols}", *(microseconds(t) if t else "" for t in times)])
    return table(header, lines)


def _column(candidate: str, held: int, margin: int) -> str:
    company = f"{held} held" if held else "alone"
    return f"{NAMES[candidate]}, {company}" + (f", margin {margin}" if margin else "")


def held_sms() -> str:
    """What a margin of 32 gives beside 32 held SMs."""
    cells = beside_times()
    columns = ((0, 0), (32, 0), (32, 32))
    lines = [
        [f"{NAMES[norm]} {rows}x{cols}", *(microseconds(cells[(norm, rows, cols, OURS, *each)]) for each in columns)]
        for norm, rows, cols in dict.fromkeys(key[:3] for key in cells)
    ]
    return table(["backward, us", "alone", "32 held, no margin", "32 held, margin 32"], lines)


def loss_beside_held(norm: str, margin: int) -> list[float]:
    """By how much a backward of many rows of 4096 columns takes longer beside 32 held SMs."""
    cells = beside_times()
    return [
        cells[norm, rows, 4096, OURS, 32, margin] / cells[norm, rows, 4096, OURS, 0, 0] - 1 for rows in (4096, 16384)
    ]


def host_records(gpu: str) -> list[dict]:
    """Of each host side, C++ and Python, those of the newest day that has it."""
    timed = [each for each in records_of("host-time", gpu) if "candidate" in each]  # others: of many row counts
    days = [by_day(each for each in timed if each["native"] == native) for native in (True, False)]
    return [each for of_host in days for each in next(iter(of_host.values()), ())]


def host_ratios(gpu: str) -> dict[tuple[bool, str, str], float]:
    """(C++, norm, call) -> our host time divided by ATen's of the same run, median over the runs."""
    times: dict[tuple, float] = {}
    for each in host_records(gpu):
        key = each["native"], each["norm"], each["call"]
        times[key, each["date"], each["candidate"]] = each["host_us"]
    ratios: dict[tuple, list[float]] = {}
    for (key, date, candidate), time in times.items():
        if candidate == OURS and (key, date, "aten") in times:
            ratios.setdefault(key, []).append(time / times[key, date, "aten"])
    return {key: statistics.median(found) for key, found in ratios.items()}


def op_host_ratios(native: bool) -> list[float]:
    """Of the forward and the backward op of both norms, on an H100."""
    return [ratio for key, ratio in host_ratios("H100").items() if key[0] == native and key[2].endswith(" op")]


def host_time(gpu: str) -> str:
    """Our host time in ATen's, for each host side that was timed."""
    ratios = host_ratios(gpu)
    hosts = [native for native in (True, False) if any(key[0] == native for key in ratios)]
    columns = list(itertools.product(NORMS, hosts))
    header = ["call", *(f"{NAMES[norm]}, {'C++' if native else 'Python'}" for norm, native in columns)]
    lines = [
        [call, *(f"{ratio:.2f}" if (ratio := ratios.get((native, norm, call))) else "" for norm, native in columns)]
        for call in dict.fromkeys(call for _, _, call in ratios)
    ]
    return table(header, lines)


def step_speeds() -> dict[tuple, dict]:
    """(model, depth, width, way, norms, C++, steps in a row) -> the newest record of a training step with our norms."""
    return {
        (r["model"], r["depth"], r["width"], r["way"], r["norms"], r["native"], r.get("steps") or 1): r
        for r in records_of("training-step")
        if r["norms"] != "stock" and "speedup_error" in r and r.get("native") is not None
    }


def step_gains(model: str, depth: int) -> list[float]:
    """Speeds over stock less one: of all ways and host sides."""
    return [each["speedup"] - 1 for key, each in step_speeds().items() if key[:2] == (model, depth)]


def training_steps() -> str:
    """The newest speedup of each model, way, host side and number of steps in a row."""
    lines = []
    for (model, depth, width, way, norms, native, steps), each in sorted(step_speeds().items()):
        line = [f"{NAMES[model]} like, {depth} blocks of width {width}", way, norms, "C++" if native else "Python"]
        lines.append([*line, str(steps), f"{each['speedup']:.3f} +- {each['speedup_error']:.3f}", each["date"][:10]])
    return table(["model", "way", "norms", "host side", "steps in a row", "speed over stock", "day"], lines)


def release_ratios() -> dict[tuple[str, str, str], dict[tuple, float]]:
    """(norm, direction, dtype) -> shape -> our times over the floor with OTHER_TRITON, divided by Triton 3.6's on the
    same day."""
    later = Cells([each for each in records_of("releases") if each["triton"] == OTHER_TRITON])
    (earlier,) = (cells for cells in measured_days() if cells.day == later.day)
    return {
        key: {
            shape: cell[OURS]["times_floor"] / earlier.of(*key, shape)[OURS]["times_floor"]
            for shape, cell in shapes.items()
        }
        for key, shapes in later.found.items()
    }


def releases() -> str:
    lines = []
    for (norm, direction, dtype), ratios in release_ratios().items():
        slow = {shape: ratio for shape, ratio in ratios.items() if ratio >= SLOWER}
        said = ", ".join(f"{rows}x{cols} {ratio:.2f}" for (rows, cols), ratio in slow.items())
        line = [NAMES[norm], direction, DTYPES[dtype], f"{statistics.geometric_mean(ratios.values()):.3f}"]
        lines.append([*line, f"{min(ratios.values()):.2f}", f"{max(ratios.values()):.2f}", said])
    return table(["norm", "direction", "dtype", "geometric mean", "least", "most", f"{SLOWER} and more"], lines)
