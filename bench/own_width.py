"""How far the planner's choices are behind the fastest plans that were timed, where a table has lost the cell's width.

    python -m bench.own_width
    python -m bench.own_width --gpu H100 --in --worst 20

It reads the cells of families.jsonl and choices.jsonl and times nothing. The planner chooses by shipped tables from
which the lines of the cell's width are taken, or with --in by tables as they are. A plan that was not timed in the cell
has the time of the fastest of its family. Cells in which none of the family was timed do not count; `unknown` is their
number.

A cell that was measured in several runs counts once, by the mean times. The fastest of many plans is partly the one
whose times were short by chance, so that the share behind it is too large. `by others` each run says how far the choice
is behind the plan that was the fastest in the cell's other runs, which is too little: these may miss the fastest.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from fusednorm.host import gpus
from fusednorm.planner import choice, limits, table
from fusednorm.planner.plan import Plan, from_text, text_of
from fusednorm.tools.tune import Cell, Task, family_of

from .cases import make_parser
from .make_table import cell_of
from .records import RESULTS, rows_of
from .tables import GPUS

UNLIKE_X = "traffic", "parameters", "rows", "tables", "again"  # keys that answer for one another differ in these
FEWEST_PLANS = 4  # of a cell: fewer say little of the fastest

Runs = Sequence[Cell]  # of one cell, the oldest first


class Behind(NamedTuple):
    """Shares are None if the plan's time is unknown, and by_others if the cell has one run."""

    cell: Cell
    plan: Plan
    share: float | None
    by_others: float | None


def cells_of(paths: Iterable[Path]) -> list[Runs]:
    """The runs of each cell. They have the plans of the newest; an earlier one that lacks some of these is left out."""
    found: dict[tuple[Task, int], list[Cell]] = defaultdict(list)
    for cell in map(cell_of, rows_of(paths)):
        if len(cell.times) >= FEWEST_PLANS:
            found[cell.task, cell.rows].append(cell)
    return [
        [run._replace(times={text: run.times[text] for text in plans}) for run in runs if plans <= run.times.keys()]
        for runs, plans in ((runs, runs[-1].times.keys()) for runs in found.values())
    ]


def without(cols: int, key: table.Key) -> tuple[table.Table, ...]:
    """The shipped tables without lines of a width, of keys that could answer in place of this one."""

    def left(each: table.Key, widths: dict[int, str]) -> dict[int, str]:
        alike = each._replace(**{name: getattr(key, name) for name in UNLIKE_X}) == key
        return {width: line for width, line in widths.items() if not (alike and width == cols)}

    shipped = table.shipped()
    return tuple(replace(each, lines={key: left(key, at) for key, at in each.lines.items()}) for each in shipped)


def behind(cells: Iterable[Runs], gpu: str, own: bool) -> Iterator[Behind]:
    by_task: dict[Task, list[Runs]] = defaultdict(list)
    for runs in cells:
        by_task[runs[0].task].append(runs)
    device = replace(gpus.named(gpu), name=f"NVIDIA {gpu}")
    for task, of_task in by_task.items():
        problem = task.wanted.problem
        tables = table.shipped() if own else without(task.cols, table.Key.of(problem))
        with mock.patch.multiple(table, shipped=lambda tables=tables: tables, of_user=lambda _: None):
            ranges = choice.decide(problem, device).ranges
        for runs in of_task:
            plan = choice.at(ranges, runs[0].rows)
            share, by_others = _share(plan, runs, runs), None
            if share is not None and len(runs) > 1:
                by_others = statistics.mean(
                    _share(plan, [*runs[:at], *runs[at + 1 :]], [runs[at]]) for at in range(len(runs))
                )
            yield Behind(runs[-1]._replace(times=_means(runs)), plan, share, by_others)


def _means(runs: Runs) -> dict[str, float]:
    return {text: statistics.geometric_mean(run.times[text] for run in runs) for text in runs[-1].times}


def _share(plan: Plan, picking: Runs, judging: Runs) -> float | None:
    """Behind the fastest plan of some runs, by the times of some. The first also say what stands for a family."""
    picked, judged = _means(picking), _means(judging)
    alike = [text for text in picked if family_of(from_text(text)) == family_of(plan)]
    chosen = text_of(plan) if text_of(plan) in picked else min(alike, key=picked.__getitem__, default=None)
    return None if chosen is None else judged[chosen] / judged[min(picked, key=picked.__getitem__)] - 1


def kinds_of(task: Task) -> tuple[str, ...]:
    """The groups of a report that count it."""
    if task.form or task.weights:
        return ("forms",)
    piece = table.Key.of(task.wanted.problem).piece
    short = "up to 512 columns" if task.cols <= 512 else "513 and more"
    return "plain", short if piece == limits.long_piece else f"pieces of {piece} bytes" if piece else "without TMA"


def _summary(shares: Collection[float]) -> str:
    slow = sorted(shares)[math.ceil(0.95 * len(shares)) - 1]
    return f"{statistics.mean(shares):6.2%} (p95 {slow:.1%})"


def report(found: list[Behind], worst: int) -> None:
    groups: dict[tuple[str, str], list[Behind]] = defaultdict(list)
    for each in found:
        for kind in kinds_of(each.cell.task):
            groups[each.cell.task.direction, kind].append(each)
    for (direction, kind), of_group in sorted(groups.items()):
        if known := [each.share for each in of_group if each.share is not None]:
            text = f"{len(known):5} cells ({len(of_group) - len(known)} unknown) {_summary(known)}"
            text += f", at worst {max(known):.0%}"
            if again := [(each.share, each.by_others) for each in of_group if each.by_others is not None]:
                all_runs, others = map(_summary, zip(*again, strict=True))
                text += f"; {len(again)} of several runs {all_runs}, by others {others}"
            print(f"{direction:8} {kind:20} {text}")
    for each in sorted(found, key=lambda each: -(each.share or 0))[:worst]:
        fastest = min(each.cell.times, key=each.cell.times.__getitem__)
        task = " ".join(str(value) for value in each.cell.task if value)
        print(f"{each.share:+6.1%} {task}, {each.cell.rows} rows: {text_of(each.plan)}, fastest {fastest}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("own_width", __doc__)
    parser.add_argument("--gpu", choices=tuple(GPUS), default="H200")
    parser.add_argument("--in", dest="own", action="store_true", help="by tables as they are")
    parser.add_argument("--worst", type=int, default=0, metavar="CELLS", help="print the cells that are most behind")
    text = "files of cells (default: families.jsonl and choices.jsonl of the GPU)"
    parser.add_argument("--cells", type=Path, nargs="+", metavar="FILE", help=text)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    files = options.cells or [RESULTS / GPUS[options.gpu] / f"{name}.jsonl" for name in ("families", "choices")]
    report(list(behind(cells_of(files), options.gpu, options.own)), options.worst)
    return 0


if __name__ == "__main__":
    sys.exit(main())
