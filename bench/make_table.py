"""Makes a GPU's table of cells that were measured: lines of `python -m fusednorm tune`, bench.survey or bench.choices.

    python -m bench.make_table bench/results/nvidia-h200/families.jsonl --out fusednorm/planner/data/nvidia-h200.jsonl

With --add the table keeps its coefficients, its date, and the lines of widths that no cell has. New lines have the
dates of their newest cells.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from fusednorm.dtypes import DTYPE_NAMES
from fusednorm.host import gpus
from fusednorm.planner import table
from fusednorm.tools.tune import Cell, days_of, widths_of, write, write_table

from .records import rows_of

NAMES = {str(dtype).removeprefix("torch."): name for dtype, name in DTYPE_NAMES.items()}


def cell_of(record: dict) -> Cell:
    if "dtype" not in record:
        record = record | {"dtype": NAMES[record["x_dtype"]]}
    if "plans" not in record:
        times = [(record[each], record[f"{each}_us"]) for each in ("old", "new")]
        record = record | {"plans": times, "own": record["new"]}
    return Cell.of(record)


def add(cells: list[Cell], gpu: str, path: Path) -> None:
    known = table.read(path)
    if isinstance(known, str):
        raise SystemExit(f"make_table: {known}")
    head = {name: value for name, value in vars(known).items() if name not in ("coefficients", "lines", "skipped")}
    widths, days = widths_of(cells, gpus.named(gpu), known.coefficients), days_of(cells)
    for key, lines in known.lines.items():
        new = widths.setdefault(key, {})
        for cols, ranges, day in (known.parsed(lines[cols]) for cols in lines.keys() - new.keys()):
            new[cols], days[key, cols] = ranges, day
    write(path, head | {"coefficients": known.coefficients._asdict()}, widths, days)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, help="the table's file")
    parser.add_argument("--add", action="store_true", help="change the lines of these cells' widths alone")
    options = parser.parse_args(arguments)
    records = rows_of(options.files)
    cells, gpu = [cell_of(each) for each in records], records[0]["gpu"]
    if options.add:
        add(cells, gpu, options.out)
    else:
        write_table(cells, replace(gpus.named(gpu), name=gpu), options.out, records[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
