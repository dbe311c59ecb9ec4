"""How far the planner's choices are behind the fastest plans that were timed, where a table has lost the cell's width.

    python -m bench.own_width
    python -m bench.own_width --gpu H100 --in --worst 20

It reads the cells of families.jsonl and choices.jsonl and times nothing. The planner chooses by shipped tables from
which the lines of the cell's width are taken, or with --in by tables as they are. A plan that was not timed in the cell
stands for its family. Cells in which none of the family was timed do not count; `unknown` is their number.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
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

UNLIKE_X = "traffic", "parameters", "rows", "tables"  # in which keys may differ that answer in place of one another
FEWEST_PLANS = 4  # of a cell: fewer say little of the fastest


class Behind(NamedTuple):
    """share is None if the plan's time is unknown."""

    cell: Cell
    plan: Plan
    share: float | None


def cells_of(paths: Iterable[Path]) -> list[Cell]:
    """The newest of each."""
    cells = {(cell.task, cell.rows): cell for cell in map(cell_of, rows_of(paths)) if len(cell.times) >= FEWEST_PLANS}
    return list(cells.values())


def without(cols: int, key: table.Key) -> tuple[table.Table, ...]:
    """The shipped tables without lines of a width, of keys that could answer in place of this one."""

    def left(each: table.Key, widths: dict[int, str]) -> dict[int, str]:
        alike = each._replace(**{name: getattr(key, name) for name in UNLIKE_X}) == key
        return {width: line for width, line in widths.items() if not (alike and width == cols)}

    shipped = table.shipped()
    return tuple(replace(each, lines={key: left(key, at) for key, at in each.lines.items()}) for each in shipped)


def behind(cells: Iterable[Cell], gpu: str, own: bool) -> Iterator[Behind]:
    by_task: dict[Task, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_task[cell.task].append(cell)
    device = replace(gpus.named(gpu), name=f"NVIDIA {gpu}")
    for task, of_task in by_task.items():
        problem = task.wanted.problem
        tables = table.shipped() if own else without(task.cols, table.Key.of(problem))
        with mock.patch.multiple(table, shipped=lambda tables=tables: tables, of_user=lambda _: None):
            ranges = choice.decide(problem, device).ranges
        for cell in of_task:
            plan = choice.at(ranges, cell.rows)
            yield Behind(cell, plan, _share(cell, plan))


def _share(cell: Cell, plan: Plan) -> float | None:
    alike = [us for text, us in cell.times.items() if family_of(from_text(text)) == family_of(plan)]
    us = cell.times.get(text_of(plan), min(alike, default=None))
    return None if us is None else us / min(cell.times.values()) - 1


def kinds_of(task: Task) -> tuple[str, ...]:
    """The groups of a report that count it."""
    if task.form or task.weights:
        return ("forms",)
    piece = table.Key.of(task.wanted.problem).piece
    short = "up to 512 columns" if task.cols <= 512 else "513 and more"
    return "plain", short if piece == limits.long_piece else f"pieces of {piece} bytes" if piece else "without TMA"


def report(found: list[Behind], worst: int) -> None:
    groups: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    for each in found:
        for kind in kinds_of(each.cell.task):
            groups[each.cell.task.direction, kind].append(each.share)
    for (direction, kind), shares in sorted(groups.items()):
        known = sorted(share for share in shares if share is not None)
        if known:
            slow = known[math.ceil(0.95 * len(known)) - 1]
            text = f"{len(known):5} cells ({len(shares) - len(known)} unknown) {statistics.mean(known):6.2%}"
            print(f"{direction:8} {kind:20} {text}, p95 {slow:.1%}, at worst {known[-1]:.0%}")
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
