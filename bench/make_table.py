"""Makes a GPU's table of cells that were measured: lines of `python -m fusednorm tune`, bench.survey or bench.choices.

    python -m bench.make_table bench/results/nvidia-h200/families.jsonl --out fusednorm/planner/data/nvidia-h200.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from fusednorm.host import gpus
from fusednorm.tools.explanation import DTYPES
from fusednorm.tools.tune import Cell, write_table

NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


def cell_of(record: dict) -> Cell:
    if "dtype" not in record:
        record = record | {"dtype": NAMES[record["x_dtype"]]}
    if "plans" not in record:
        times = [(record[each], record[f"{each}_us"]) for each in ("old", "new")]
        record = record | {"plans": times, "own": record["new"]}
    return Cell.of(record)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, help="the table's file")
    options = parser.parse_args(arguments)
    records = [json.loads(line) for path in options.files for line in path.read_text().splitlines()]
    records.sort(key=lambda record: record["date"])
    device = replace(gpus.named(records[0]["gpu"]), name=records[0]["gpu"])
    write_table([cell_of(each) for each in records], device, options.out, records[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
