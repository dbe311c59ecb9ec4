"""Makes bench/RESULTS.md, its pictures, and the numbers in other documents from the committed results.

python -m bench.report            # writes all of it
python -m bench.report --check    # exit code 1 if a document differs from what the results give
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from . import documents, neighbours
from .candidates import OURS
from .cases import NORMS, make_parser
from .records import RESULTS
from .tables import (
    DIRECTIONS,
    DTYPES,
    GPUS,
    NAMES,
    SHAPES,
    Cells,
    beside,
    chains,
    every_peer,
    host_records,
    host_time,
    measured_days,
    newest_day,
    others_ahead,
    peers_ahead,
    proof,
    records_of,
    releases,
    source,
    training_steps,
    twelve_shapes,
)
from .zoo import page as zoo

PAGE = RESULTS.parent / "RESULTS.md"
PICTURE, WIDTHS = RESULTS / "twelve-shapes.png", RESULTS / "widths.png"
COLORS = {OURS: "#0072B2", "cudnn": "#E69F00", "aten": "#999999"}  # distinct for the colour-blind, too
MOST = 4  # times the floor: bars are cut off there
DISTURBED = 0.9  # of the floor's time: in a cell below it something else held the GPU while the floor was timed
INTRODUCTION = """# Results

Made by `python -m bench.report` from `bench/results/`, whose README says what the files hold. Times are microseconds of
the whole call, medians. The floor is a kernel that streams the same large tensors, timed in the same run as the norm to
its right. A forward can be faster than the floor, because it leaves less to write behind. **Bold**: a peer that is
faster than ours."""


def page() -> str:
    parts = [INTRODUCTION, f"![Times over the floor]({PICTURE.relative_to(RESULTS.parent)})"]
    parts += zoo.section()
    for gpu in GPUS:
        cells = proof(measured_days(gpu))
        for dtype in cells.dtypes:
            for direction in DIRECTIONS:
                title = f"## {direction.capitalize()}, {DTYPES[dtype]}, {gpu}"
                parts.append(f"{title}\n\n{twelve_shapes(cells, direction, dtype)}")
        parts.append(source("norm", cells.records, gpu))
    parts.append(f"## Every peer\n\nGeometric means over the shapes that both were timed on.\n\n{every_peer()}")
    said = "All places of norms, forms, norms of q and k, chains, and norms beside a kernel that holds SMs, by times "
    said += "over\nthe floors of their runs. Times of chains are those of the whole graph."
    others = (each for ahead in (others_ahead, neighbours.peers_ahead) for gpu in GPUS for each in ahead(gpu))
    parts.append(f"## Where a peer is faster\n\n{said}\n\n{peers_ahead(others)}")
    said = "Forward, backward and both (if timed with these) over a kernel that streams the same large tensors; in "
    said += f"bf16 and, if\nthe norm is modulated, of {neighbours.SAMPLES} samples, unless a row says otherwise."
    for gpu in GPUS:
        parts.append(f"## Forms, {gpu}\n\n{said}\n\n{neighbours.forms(gpu)}")
        parts += neighbours.sources("forms", gpu)
    for gpu in GPUS:
        parts.append(f"## Norms of q and k, {gpu}\n\n{said}\n\n{neighbours.heads(gpu)}")
        parts += neighbours.sources("heads", gpu)
    said = "Forward and backward with all gradients, a CUDA graph with a cold L2; bf16."
    for gpu in GPUS:
        parts.append(f"## Compiled by Inductor, {gpu}\n\n{said}\n\n{neighbours.compiled(gpu)}")
        parts += neighbours.sources("graphs", gpu)
    said = "A CUDA graph with a cold L2 at its start, backward, bf16."
    parts.append(f"## Between other kernels, H100\n\n{said}\n\n{chains('H100')}")
    parts.append(source("chains", newest_day("chains", "H100"), "H100"))
    parts.append(f"## Beside a kernel that holds SMs\n\n{beside()}\n\n{source('beside', newest_day('beside'))}")
    said = "Our times over the floor with Triton 3.9, divided by those with Triton 3.6, on the twelve shapes."
    parts.append(f"## Triton 3.9\n\n{said}\n\n{releases()}\n\n{source('releases', records_of('releases'))}")
    parts.append(f"## Training steps\n\nForward, backward and optimizer in bf16, H200.\n\n{training_steps()}")
    parts.append("## Host time\n\nOf a call on 128 x 1024, in ATen's time of the same run.")
    for gpu in GPUS:
        parts += [host_time(gpu), source("host-time", host_records(gpu), gpu)]
    return "\n\n".join(parts) + "\n"


def contents() -> dict[Path, str]:
    """What the documents should say."""
    return {PAGE: page()} | documents.renewed()


def draw_twelve_shapes(cells: Cells, path: Path) -> None:
    """Bars of times over the floor: the bfloat16 backward of each shape by us and by peers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    shown = (OURS, "cudnn", "aten")
    axes = figure.subplots(2, 1, sharex=True)
    for axis, norm in zip(axes, NORMS, strict=True):
        for at, candidate in enumerate(shown):
            heights = [cells.of(norm, "backward", "bfloat16", shape)[candidate]["times_floor"] for shape in SHAPES]
            places = [number + 0.27 * (at - 1) for number in range(len(SHAPES))]
            axis.bar(places, heights, width=0.26, color=COLORS[candidate], label=NAMES[candidate])
            for place, height in zip(places, heights, strict=True):
                if height > MOST:  # the bar ends at the axis, its value stands above
                    axis.annotate(f"{height:.0f}x", (place, MOST), (0, 3), textcoords="offset points", ha="center")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(ylim=(0, MOST), ylabel="time / floor\n(lower is better)")
        axis.set_title(f"{NAMES[norm]} backward, bfloat16, H200", pad=18)
        axis.set_xticks(range(len(SHAPES)), [f"{rows}\nx {cols}" for rows, cols in SHAPES], fontsize=9)
    axes[-1].set_xlabel("rows x columns; the line at 1 is the floor, a kernel that only streams the same tensors")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(shown), frameon=False)
    figure.savefig(path, dpi=110)


def draw_widths(records: list[dict], path: Path) -> None:
    """Our times over the floor at every width that bench.widths timed: a panel for each direction and norm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    cells = [each | {"times_floor": each["median_us"] / each["floor_us"]} for each in records]
    for (i, direction), (j, norm) in itertools.product(enumerate(DIRECTIONS), enumerate(NORMS)):
        axis = axes[i][j]
        for rows, color in ((2048, "#0072B2"), (16384, "#D55E00")):
            points = [
                (each["cols"], each["times_floor"])
                for each in cells
                if (each["direction"], each["norm"], each["rows"]) == (direction, norm, rows)
                and each["times_floor"] >= DISTURBED
            ]
            axis.plot(*zip(*points, strict=True), ".", color=color, label=f"{rows} rows", markersize=4)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_title(f"{NAMES[norm]} {direction}, bfloat16, H200", fontsize=11)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("time / floor\n(lower is better)")
    for axis in axes[-1]:
        axis.set_xlabel("columns")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("report", __doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    try:
        wanted = contents()
    except ValueError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    differ = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if options.check:
        for path in differ:
            print(f"report: {path} differs from the results: python -m bench.report renews it", file=sys.stderr)
        return int(bool(differ))
    for path in differ:
        path.write_text(wanted[path])
    draw_twelve_shapes(proof(measured_days()), PICTURE)
    draw_widths(newest_day("widths"), WIDTHS)
    if records := zoo.on_front():
        zoo.draw(records, zoo.PICTURE)
    print(*differ, PICTURE, WIDTHS, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
