"""Draws which variant is chosen over rows and columns, by default over a whole grid. It needs no GPU.

    python -m bench.plan_map --norm layer --device B300 --out out/plan.png

Other options are those of `python -m fusednorm plan`, but for --json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fusednorm.planner.choice import choose
from fusednorm.planner.device import DeviceSpec
from fusednorm.planner.plan import Plan
from fusednorm.tools.console import optional
from fusednorm.tools.plan import add_plan_arguments, device_of, wanted_of

MAP_ROWS = [2**exponent for exponent in range(4, 21)]
MAP_COLS = [quarters * 2**exponent for exponent in range(4, 16) for quarters in (4, 5, 6, 7)]  # 64 to 229376
COLUMN_TILES = "multi_wave, by column tiles"
REGIONS = {  # colours of the map, which the colour-blind can tell apart
    "multi_wave": "#E69F00",
    COLUMN_TILES: "#F0E442",
    "async_copy": "#56B4E9",
    "pipelined": "#0072B2",
    "warp_specialized": "#009E73",
    "reference": "#999999",
}
OUT = Path("out/plan.png")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_plan_arguments(parser, rows="16 to 1048576", cols="64 to 229376")
    parser.add_argument("--out", type=Path, default=OUT, metavar="PNG", help=f"the picture (default: {OUT})")
    options = parser.parse_args(arguments)
    try:
        return draw_map(options, device_of(options))
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


def region(plan: Plan) -> str:
    """The plan's name on the map."""
    return COLUMN_TILES if plan.kernel == "column_tiles" else plan.variant


def draw_map(options: argparse.Namespace, spec: DeviceSpec) -> int:
    """Draw the chosen variant over rows and columns. Returns the exit status."""
    if optional("matplotlib", "bench", "no map is drawn") is None:
        return 1
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows, cols = sorted(options.rows or MAP_ROWS), sorted(options.cols or MAP_COLS)
    names = list(REGIONS)
    shapes = [[(wanted_of(options, width, count).problem, count) for width in cols] for count in rows]
    plans = [[choose(*shape, spec, options.force) for shape in line] for line in shapes]
    regions = [[region(plan) for plan in of_rows] for of_rows in plans]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.pcolormesh(
        [[names.index(name) for name in line] for line in regions],
        cmap=ListedColormap(list(REGIONS.values())),
        vmin=-0.5,
        vmax=len(names) - 0.5,
        edgecolors="white",
        linewidth=0.3,
    )
    for axis, values in ((axes.xaxis, cols), (axes.yaxis, rows)):
        shown = range(0, len(values), max(1, len(values) // 12))
        axis.set_ticks([index + 0.5 for index in shown], [f"{values[index]:,}" for index in shown])
    axes.tick_params(axis="x", rotation=45)
    forced = f", {options.force} forced" if options.force else ""
    axes.set(xlabel="columns", ylabel="rows")
    axes.set_title(f"{options.norm} norm {options.direction}, {options.dtype}, on {spec.name}{forced}", loc="left")
    present = [name for name in names if any(name in line for line in regions)]
    patches = [Patch(color=REGIONS[name], label=name.replace("_", "-")) for name in present]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=150)
    print(f"{options.out}: what is chosen for {len(rows)} x {len(cols)} shapes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
