"""Tables of cells that were measured before."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from bench import make_table
from fusednorm.planner import table
from fusednorm.planner.device import H200
from fusednorm.planner.plan import text_of
from fusednorm.tools import tune

TASK = tune.Task("rms", "forward", 4096, "bf16")
FIRST, SECOND = [text_of(plan) for plan in tune.plans_of(TASK.wanted.problem, H200)[:2]]


def test_what_two_checkouts_chose_is_a_cell():
    record = {"norm": "rms", "direction": "forward", "cols": 4096, "x_dtype": "bfloat16", "rows": 4096}
    chosen = record | {"old": FIRST, "new": SECOND, "old_us": 5.0, "new_us": 9.0}
    assert make_table.cell_of(chosen) == tune.Cell(TASK, 4096, {FIRST: 5.0, SECOND: 9.0}, SECOND)


def test_lines_of_a_file_make_a_table_and_the_newest_says_by_which_triton(tmp_path, capsys):
    cells = [tune.Cell(TASK, rows, {FIRST: 5.0, SECOND: 9.0}, SECOND) for rows in (1024, 4096)]
    machine = {"gpu": "H200", "triton": "3.6.0"}
    lines = [machine | {"date": f"2026-01-0{at}T00:00"} | each.record() for at, each in enumerate(cells, 1)]
    (tmp_path / "cells").write_text("".join(json.dumps(each) + "\n" for each in reversed(lines)))
    assert make_table.main([str(tmp_path / "cells"), "--out", str(tmp_path / "table")]) == 0
    assert "2 cells; the plans before were 80.0% behind the fastest" in capsys.readouterr().out
    head, _, widths = map(json.loads, (tmp_path / "table").read_text().splitlines())
    assert (head["gpu"], head["date"], head["triton"]) == ("H200", "2026-01-02", "3.6.0")
    assert widths == [4096, [[None, FIRST]]]


def test_a_line_has_the_date_of_its_newest_cell_if_it_is_not_the_tables(tmp_path):
    machine = {"gpu": "H200", "triton": "3.6.0"}
    dated = [(4096, 1024, 3), (4096, 4096, 2), (5120, 1024, 1), (5120, 4096, 2)]  # columns, rows, day
    cells = [(tune.Cell(TASK._replace(cols=cols), rows, {FIRST: 5.0}, FIRST), day) for cols, rows, day in dated]
    lines = [machine | {"date": f"2026-01-0{day}T00:00"} | each.record() for each, day in cells]
    (tmp_path / "cells").write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert make_table.main([str(tmp_path / "cells"), "--out", str(tmp_path / "table")]) == 0
    made = table.read(tmp_path / "table")
    found = [made.lookup(replace(TASK.wanted.problem, cols=cols)) for cols in (4096, 5120)]
    assert [day for ((_, _, day),) in found] == ["2026-01-03", "2026-01-02"] and made.date == "2026-01-03"


def test_added_cells_change_the_lines_of_their_widths_alone(tmp_path):
    path, key = tmp_path / "table", table.Key.of(TASK.wanted.problem)
    head = {"gpu": "H200", "arch": 90, "triton": "3.6.0", "date": "2026-01-01"}
    coefficients = table.shipped()[0].coefficients._asdict()
    ranges = {cols: ((math.inf, SECOND),) for cols in (4096, 5120)}
    tune.write(path, head | {"coefficients": coefficients}, {key: ranges}, {(key, 5120): "2025-12-31"})
    cells = [tune.Cell(TASK, rows, {FIRST: 5.0, SECOND: 9.0}, SECOND) for rows in (1024, 4096)]
    lines = [json.dumps({"gpu": "H200", "date": "2026-02-01"} | each.record()) + "\n" for each in cells]
    (tmp_path / "cells").write_text("".join(lines))
    before = path.read_text().splitlines()
    assert make_table.main([str(tmp_path / "cells"), "--add", "--out", str(path)]) == 0
    changed = [*before[:2], before[2].replace(SECOND, FIRST)[:-1] + ',"2026-02-01"]', before[3]]
    assert path.read_text().splitlines() == changed
