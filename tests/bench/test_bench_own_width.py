"""Choices at widths that a table has lost, against times that are known."""

from __future__ import annotations

import json

from bench import own_width
from fusednorm.planner import table
from fusednorm.planner.choice import at, decide
from fusednorm.planner.device import H200
from fusednorm.planner.plan import text_of
from fusednorm.tools.tune import Task

TASK = Task("layer", "backward", 4096, "bf16")
OTHERS = [f"MultiWave(1,4096,1,{warps},1,255,0)" for warps in (2, 4, 8, 32)]


def line(rows: int, plans: dict[str, float], date: str) -> str:
    fields = {"norm": TASK.norm, "direction": TASK.direction, "cols": TASK.cols, "x_dtype": "bfloat16"}
    return json.dumps({"date": date, **fields, "rows": rows, "own": OTHERS[0], "plans": plans, "refused": []})


def test_the_share_of_a_choice_is_that_of_its_newest_time_and_unknown_without_one(tmp_path, capsys):
    plan = text_of(at(decide(TASK.wanted.problem, H200).ranges, 8192))
    cell = dict.fromkeys(OTHERS, 10.0)
    lines = [line(8192, cell | {plan: us}, f"2026-11-2{day}") for day, us in ((8, 11.0), (7, 20.0))]
    path = tmp_path / "cells.jsonl"
    path.write_text("\n".join([*lines, line(16384, cell, "2026-11-28"), line(32768, {plan: 1.0}, "2026-11-28")]))
    assert own_width.main(["--in", "--cells", str(path), "--worst", "1"]) == 0
    total, shown = capsys.readouterr().out.splitlines()[-2:]
    assert "1 cells (1 unknown) 10.00%" in total and shown.startswith("+10.0% layer backward 4096 bf16, 8192 rows: ")


def test_tables_lose_the_width_in_all_keys_that_could_answer():
    key = table.Key.of(TASK.wanted.problem)
    left = own_width.without(TASK.cols, key)
    for before, after in zip(table.shipped(), left, strict=True):
        for each, widths in before.lines.items():
            alike = (each.norm, each.direction, each.itemsizes, each.piece) == (*key[:4],)
            assert set(widths) - set(after.lines[each]) == ({TASK.cols} & set(widths) if alike else set())
