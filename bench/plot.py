"""Draws results: times over the floor by shape, rooflines, and the speed-up over the best other implementation.

    python -m bench.plot                                      # the newest times of the GPU that was timed last
    python -m bench.plot bench/results/nvidia-h200/norm.jsonl # the times in a file

Writes <gpu>-<direction>-<dtype>-{floor,roofline,speedup}.png into out/, or into --out.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from fusednorm.planner.device import KNOWN

from .candidates import FLOOR, OURS, is_ours
from .cases import DIRECTIONS, NORMS, make_parser
from .records import RESULTS, best_peer, by_cell, is_plain, load, rows_of, slug, timed
from .tables import NAMES

COLORS = {OURS: "#c1121f", "aten": "#6c757d", "inductor": "#e09f3e", "inductor_mix": "#bb7a1c", "cudnn": "#2a9d8f",
          "quack": "#3a6ea5", "liger": "#9d4edd"}  # fmt: skip
# Floating-point operations per element, by the formulas of kernels/rowmath.py; each term of a row sum counts one.
FLOPS = {("layer", "forward"): 8, ("rms", "forward"): 4, ("layer", "backward"): 13, ("rms", "backward"): 9}
FP32_TFLOPS = {"H100": 67, "H200": 67, "A100": 19.5, "B200": 75}  # by the datasheets, outside the matrix units
TENSORS = {"forward": 2, "backward": 3}  # rows x cols tensors that are read or written


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("plot: needs matplotlib: pip install 'fusednorm[bench]' brings it", file=sys.stderr)
        return 2
    matplotlib.use("Agg")
    files = options.files or newest(RESULTS)
    if not files:
        print(f"plot: needs results, got none in {RESULTS}: make bench makes some", file=sys.stderr)
        return 2
    records = plain_records(files)
    if not records:
        print(f"plot: needs results of bench_norm, got others in {', '.join(map(str, files))}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for path in draw_all(records, options.out):
        print(path)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("plot", __doc__)
    parser.add_argument("files", nargs="*", type=Path, help="JSON lines of bench.bench_norm (default: the newest)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the pictures (default: out)")
    return parser.parse_args(arguments)


def plain_records(files: list[Path]) -> list[dict]:
    """The times by bench_norm that the pictures show."""
    return [record for record in timed(load(files)) if "times_floor" in record and is_plain(record)]


def newest(folder: Path) -> list[Path]:
    """bench_norm's results of the GPU that was timed last."""
    return sorted(folder.glob("*/norm.jsonl"), key=lambda path: rows_of([path])[-1]["date"])[-1:]


def draw_all(records: list[dict], folder: Path) -> Iterator[Path]:
    """Three pictures for each direction and dtype that the records have."""
    for direction, dtype in itertools.product(DIRECTIONS, sorted({record["x_dtype"] for record in records})):
        for name in PICTURES:
            path = folder / f"{slug(records[-1]['gpu'])}-{direction}-{slug(dtype)}-{name}.png"
            if draw(records, name, direction, dtype, path):
                yield path


def draw(records: list[dict], name: str, direction: str, dtype: str, path: Path) -> bool:
    """Draws one picture. Draws nothing and returns False if no record has this direction and dtype."""
    chosen = [r for r in records if (r["direction"], r["x_dtype"]) == (direction, dtype)]
    if chosen:
        figure = PICTURES[name](chosen)
        figure.suptitle(f"{chosen[0]['gpu']}, {direction}, {dtype}", fontsize=11)
        figure.savefig(path, dpi=110)
    return bool(chosen)


def norms_of(records: list[dict]) -> list[str]:
    return [norm for norm in NORMS if any(record["norm"] == norm for record in records)]


def compared(records: list[dict]) -> list[str]:
    """Ours and the peers that were timed, without forced variants and the floor."""
    present = {record["candidate"] for record in records}
    return [OURS] * (OURS in present) + sorted(n for n in present if n != FLOOR and not is_ours(n))


def grid_of_axes(rows: int, columns: int, width: float, height: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def draw_times(records: list[dict]):
    """A panel for each norm: times over the floor, a place on the axis for each shape, a colour for each candidate."""
    from matplotlib.ticker import LogLocator

    norms, shapes = norms_of(records), sorted({(record["rows"], record["cols"]) for record in records})
    figure, axes = grid_of_axes(len(norms), 1, max(5.0, 1.5 + 0.32 * len(shapes)), 3.4)
    for norm, axis in zip(norms, axes[:, 0], strict=True):
        for name in compared(records):
            points = [
                (shapes.index((r["rows"], r["cols"])), r["times_floor"])
                for r in records
                if (r["norm"], r["candidate"]) == (norm, name)
            ]
            if points:
                look = {"markersize": 9} if name == OURS else {"markersize": 4, "zorder": 3}
                look |= {"color": COLORS.get(name), "label": NAMES.get(name, name)}
                axis.plot(*zip(*points, strict=True), "o", **look)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.set(title=NAMES[norm], ylabel="time / floor\n(lower is better)")
        axis.set_xticks(range(len(shapes)), [f"{rows} x {cols}" for rows, cols in shapes], rotation=90, fontsize=8)
        axis.grid(alpha=0.3)
    add_legend(figure, axes)
    return figure


def draw_roofline(records: list[dict]):
    """For each norm: operations per second over operations per byte, under the bandwidth and the fp32 peak."""
    norms = norms_of(records)
    figure, axes = grid_of_axes(1, len(norms), 5.2, 4.2)
    spec = next((spec for spec in KNOWN if slug(spec.name) in slug(records[0]["gpu"])), None)
    fastest = max(intensity_and_speed(r)[1] / intensity_and_speed(r)[0] for r in records if r["candidate"] == FLOOR)
    for norm, axis in zip(norms, axes[0], strict=True):
        draw_roofs(axis, spec, fastest)
        for offset, name in enumerate(compared(records)):
            points = [intensity_and_speed(r) for r in records if (r["norm"], r["candidate"]) == (norm, name)]
            if points:
                # All have the same intensity, so the candidates are moved apart a little.
                xs, ys = zip(*((x * 1.12**offset, y) for x, y in points), strict=True)
                axis.scatter(xs, ys, s=16, color=COLORS.get(name), label=NAMES.get(name, name), alpha=0.8)
        axis.set(xscale="log", yscale="log", title=NAMES[norm], xlabel="operations per byte (candidates set apart)")
        axis.set_ylabel("TFLOP/s")
        axis.grid(alpha=0.3, which="both")
    add_legend(figure, axes)
    return figure


def draw_roofs(axis, spec, floor_tb_s: float) -> None:
    intensities = [0.5, 64]
    axis.plot(
        intensities, [x * floor_tb_s for x in intensities], "k-", linewidth=1, label=f"floor {floor_tb_s:.1f} TB/s"
    )
    if spec is None:
        return
    datasheet = spec.bandwidth_gb_s / 1e3
    axis.plot(
        intensities, [x * datasheet for x in intensities], "k--", linewidth=1, label=f"memory {datasheet:.1f} TB/s"
    )
    if spec.name in FP32_TFLOPS:
        peak = FP32_TFLOPS[spec.name]
        axis.axhline(peak, color="black", linestyle=":", linewidth=1, label=f"fp32 {peak:g} TFLOP/s")


def intensity_and_speed(record: dict) -> tuple[float, float]:
    """(operations per byte of the large tensors, 1e12 operations per second)."""
    elements = record["rows"] * record["cols"]
    operations = FLOPS[record["norm"], record["direction"]] * elements
    moved = TENSORS[record["direction"]] * elements * getattr(torch, record["x_dtype"]).itemsize
    return operations / moved, operations / record["median_us"] / 1e6


def draw_speedups(records: list[dict]):
    """For each norm: best other implementation's time over ours, and its name, by rows and columns."""
    norms = norms_of(records)
    rows, cols = (sorted({record[side] for record in records}) for side in ("rows", "cols"))
    figure, axes = grid_of_axes(1, len(norms), max(4.5, 0.62 * len(cols) + 1.5), max(3.2, 0.42 * len(rows) + 1.6))
    for norm, axis in zip(norms, axes[0], strict=True):
        table = speedups([record for record in records if record["norm"] == norm])
        values = [[table.get((r, c), (float("nan"), ""))[0] for c in cols] for r in rows]
        image = axis.imshow(values, cmap="RdYlGn", vmin=0.5, vmax=1.5, aspect="auto", origin="lower")
        for (i, r), (j, c) in itertools.product(enumerate(rows), enumerate(cols)):
            if (r, c) in table:
                ratio, name = table[r, c]
                color = "black" if 0.7 < ratio < 1.35 else "white"
                said = f"{ratio:.2f}\n{NAMES.get(name, name)}"
                axis.text(j, i, said, ha="center", va="center", fontsize=6, color=color)
        axis.set_xticks(range(len(cols)), cols, rotation=45, fontsize=7)
        axis.set_yticks(range(len(rows)), rows, fontsize=7)
        axis.set(title=f"{NAMES[norm]}: best other / ours", xlabel="columns", ylabel="rows")
    figure.colorbar(image, ax=axes[0][-1], label="higher is better")
    return figure


def speedups(records: list[dict]) -> dict[tuple[int, int], tuple[float, str]]:
    """(rows, cols) -> (the best peer's time over ours, its name), for the weight dtype where that is lowest."""
    table: dict[tuple[int, int], tuple[float, str]] = {}
    for candidates in by_cell(records).values():
        ours, peer = candidates.get(OURS), best_peer(candidates)
        if ours and peer:
            place = ours["rows"], ours["cols"]
            here = peer["median_us"] / ours["median_us"], peer["candidate"]
            table[place] = min(here, table.get(place, here))
    return table


def add_legend(figure, axes) -> None:
    """One legend for all panels, below them."""
    known = {}
    for axis in axes.flat:
        known |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=min(len(known), 8), fontsize=8)


PICTURES = {"floor": draw_times, "roofline": draw_roofline, "speedup": draw_speedups}

if __name__ == "__main__":
    sys.exit(main())
