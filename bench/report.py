"""Makes bench/RESULTS.md and its pictures from the committed results.

    python -m bench.report            # writes page and pictures
    python -m bench.report --check    # exit code 1 if the page differs from what the results give

A table takes the newest day that has all its cells. A peer that was not timed on that day is taken from an older day
and compared with our time of that older day.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from . import plot
from .candidates import FLOOR, OURS
from .cases import NORMS, SHAPE_SETS, make_parser, parse_shape
from .records import RESULTS, by_day, is_plain, newest, rows_of, timed

FOLDER = RESULTS / "nvidia-h200"
HOST_FOLDERS = (FOLDER, RESULTS / "nvidia-h100-80gb-hbm3")
PAGE = RESULTS.parent / "RESULTS.md"
PICTURE, WIDTHS = RESULTS / "twelve-shapes.png", RESULTS / "share-of-floor.png"
SHAPES = [parse_shape(text).sizes for text in SHAPE_SETS["proof"]]
NAMES = {"layer": "LayerNorm", "rms": "RMSNorm", "aten": "ATen", "cudnn": "cuDNN", "quack": "QuACK", "liger": "Liger",
         "inductor": "torch.compile", FLOOR: "floor", OURS: "fusednorm"}  # fmt: skip
PEERS = ("cudnn", "quack", "inductor", "liger", "aten")
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
COLORS = {OURS: "#0072B2", "cudnn": "#E69F00", "aten": "#999999"}  # distinct for the colour-blind, too
MOST = 4  # times the floor: bars are cut off there
DIRECTIONS = ("backward", "forward")
INTRODUCTION = """# Results

Made by `python -m bench.report` from `bench/results/`, whose README says what the files hold. Times are microseconds of
the whole call, medians. The floor is a kernel that streams the same large tensors, timed in the same run. A forward can
be faster than it, because it leaves less to write behind."""


def records_of(tool: str, folder: Path | None = None) -> list[dict]:
    return rows_of([(folder or FOLDER) / f"{tool}.jsonl"])


def newest_day(tool: str, folder: Path | None = None) -> list[dict]:
    return next(iter(by_day(records_of(tool, folder)).values()))


def microseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 50 else f"{value:.1f}"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(tool: str, records: list[dict], folder: Path | None = None) -> str:
    """A line that says where numbers come from: file, day, GPU, versions."""
    first = records[0]
    peers = "".join(f", {name} {version}" for name, version in (first.get("peers") or {}).items())
    file = f"`bench/results/{(folder or FOLDER).name}/{tool}.jsonl`"
    return f"{file}, {first['date'][:10]}: {first['gpu']}, torch {first['torch']}, Triton {first['triton']}{peers}."


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

    def has_all(self) -> bool:
        """Whether there is a time of ours for every cell of the tables."""
        return all(OURS in self.of(*each) for each in itertools.product(NORMS, DIRECTIONS, DTYPES, SHAPES))

    def of(self, norm: str, direction: str, dtype: str, shape: tuple) -> dict[str, dict]:
        return self.found.get((norm, direction, dtype), {}).get(shape, {})

    def mean(self, norm: str, direction: str, dtype: str, candidate: str) -> tuple[float, float, int]:
        """(the candidate's, ours, number of cells): geometric means of times over the floor, over cells with both."""
        pairs = [
            (cell[candidate]["times_floor"], cell[OURS]["times_floor"])
            for cell in self.found.get((norm, direction, dtype), {}).values()
            if candidate in cell and OURS in cell
        ]
        theirs, ours = zip(*pairs, strict=True) if pairs else ((), ())
        return (*(statistics.geometric_mean(each) if each else 0.0 for each in (theirs, ours)), len(pairs))


def twelve_shapes(cells: Cells, direction: str, dtype: str) -> str:
    header = ["rows x cols", "floor"]
    for norm in NORMS:
        header += [NAMES[norm], *(f"{NAMES[peer]}" for peer in ("cudnn", "aten"))]
    lines = []
    for shape in SHAPES:
        floors = [cells.of(norm, direction, dtype, shape)[FLOOR]["median_us"] for norm in NORMS]
        line = [f"{shape[0]}x{shape[1]}", microseconds(min(floors))]
        for norm in NORMS:
            cell = cells.of(norm, direction, dtype, shape)
            line.append(f"{microseconds(cell[OURS]['median_us'])} ({cell[OURS]['times_floor']:.2f}x)")
            line += [microseconds(cell[peer]["median_us"]) if peer in cell else "" for peer in ("cudnn", "aten")]
        lines.append(line)
    return table(header, lines)


def means(days: list[Cells]) -> str:
    """A row for every peer: geometric means over the cells of the newest day that has its times and ours."""
    lines = []
    for dtype, norm, direction, peer in itertools.product(DTYPES, NORMS, DIRECTIONS, PEERS):
        found = ((cells, cells.mean(norm, direction, dtype, peer)) for cells in days)
        cells, (theirs, ours, count) = next(((c, m) for c, m in found if m[2]), (None, (0, 0, 0)))
        if cells is not None:
            line = [NAMES[norm], direction, DTYPES[dtype], NAMES[peer], f"{theirs:.2f}", f"{ours:.2f}"]
            lines.append([*line, f"{theirs / ours:.2f}", str(count), cells.day])
    header = ["norm", "direction", "dtype", "peer", "its times/floor", "ours", "peer / ours", "shapes", "day"]
    return table(header, lines)


def beside(records: list[dict]) -> str:
    """Times of a backward, replayed as a CUDA graph, while another stream's kernel holds SMs."""
    cells = {
        (r["norm"], r["rows"], r["cols"], r["candidate"], r["held_sms"], r["sm_margin"]): r["median_us"]
        for r in records
        if r["mode"] == "graph"
    }
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


def host_time(records: list[dict]) -> str:
    """Our host time divided by ATen's of the same run, median over the runs, for each host side that was timed."""
    times: dict[tuple, float] = {}
    for each in records:
        if "candidate" in each:  # else it is the time of many row counts
            key = each["native"], each["norm"], each["call"]
            times[key, each["date"], each["candidate"]] = each["host_us"]
    ratios: dict[tuple, list[float]] = {}
    for (key, date, candidate), time in times.items():
        if candidate == OURS and (key, date, "aten") in times:
            ratios.setdefault(key, []).append(time / times[key, date, "aten"])
    hosts = [native for native in (True, False) if any(key[0] == native for key in ratios)]
    columns = list(itertools.product(NORMS, hosts))
    header = ["call", *(f"{NAMES[norm]}, {'C++' if native else 'Python'}" for norm, native in columns)]
    lines = []
    for call in dict.fromkeys(call for _, _, call in ratios):
        found = (statistics.median(ratios[native, norm, call]) for norm, native in columns)
        lines.append([call, *(f"{ratio:.2f}" for ratio in found)])
    return table(header, lines)


def training_steps(records: list[dict]) -> str:
    """The newest speedup of each model, way, host side and number of steps in a row."""
    latest: dict[tuple, list[str]] = {}
    for each in records:
        if each["norms"] == "stock" or "speedup_error" not in each or each.get("native") is None:
            continue
        model = f"{each['model']}, {each['depth']} blocks of width {each['width']}"
        key = model, each["way"], each["norms"], "C++" if each["native"] else "Python", str(each.get("steps") or 1)
        latest[key] = [f"{each['speedup']:.3f} +- {each['speedup_error']:.3f}", each["date"][:10]]
    header = ["model", "way", "norms", "host side", "steps in a row", "speed over stock", "day"]
    return table(header, ([*key, *said] for key, said in sorted(latest.items())))


def measured_days() -> list[Cells]:
    """The newest first."""
    return [Cells(records) for records in by_day(records_of("norm")).values()]


def proof(days: list[Cells]) -> Cells:
    return next(cells for cells in days if cells.has_all())


def page() -> str:
    days = measured_days()
    cells = proof(days)
    parts = [INTRODUCTION, f"![Times over the floor]({PICTURE.relative_to(RESULTS.parent)})"]
    for dtype, name in DTYPES.items():
        for direction in DIRECTIONS:
            parts.append(f"## {direction.capitalize()}, {name}\n\n{twelve_shapes(cells, direction, dtype)}")
    parts.append(source("norm", cells.records))
    parts.append(f"## Every peer\n\nGeometric means over the shapes that both were timed on.\n\n{means(days)}")
    company = newest_day("beside")
    parts.append(f"## Beside a kernel that holds SMs\n\n{beside(company)}\n\n{source('beside', company)}")
    steps = training_steps(records_of("training-step"))
    parts.append(f"## Training steps\n\nForward, backward and optimizer in bf16.\n\n{steps}")
    parts.append("## Host time\n\nOf a call on 128 x 1024, in ATen's time of the same run.")
    for folder in HOST_FOLDERS:
        host = newest_day("host-time", folder)
        parts += [host_time(host), source("host-time", host, folder)]
    return "\n\n".join(parts) + "\n"


def draw(cells: Cells, path: Path) -> None:
    """Bars of times over the floor: the bfloat16 backward of each shape by us and by peers."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(10, 6), sharex=True, layout="constrained")
    shown = (OURS, "cudnn", "aten")
    for axis, norm in zip(axes, NORMS, strict=True):
        for at, candidate in enumerate(shown):
            heights = [cells.of(norm, "backward", "bfloat16", shape)[candidate]["times_floor"] for shape in SHAPES]
            places = [number + 0.27 * (at - 1) for number in range(len(SHAPES))]
            axis.bar(places, heights, width=0.26, color=COLORS[candidate], label=NAMES[candidate])
            for place, height in zip(places, heights, strict=True):
                if height > MOST:
                    axis.text(place - 0.16, MOST, f"{height:.0f}", fontsize=8, ha="right", va="top")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(ylim=(0, MOST), ylabel="times the floor", title=f"{NAMES[norm]} backward, bfloat16, H200")
        axis.set_xticks(range(len(SHAPES)), [f"{rows}\nx {cols}" for rows, cols in SHAPES], fontsize=8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(shown), frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("report", __doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    wanted = page()
    if options.check:
        if not PAGE.exists() or PAGE.read_text() != wanted:
            print(f"report: {PAGE} differs from the results: python -m bench.report renews it", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(wanted)
    draw(proof(measured_days()), PICTURE)
    plot.draw(plot.plain_records([FOLDER / "norm.jsonl"]), "floor", "backward", "bfloat16", WIDTHS)
    print(f"{PAGE}\n{PICTURE}\n{WIDTHS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
