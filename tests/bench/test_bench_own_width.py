"""Choices at widths that a table has lost, against times that are known."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics

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


def chosen(rows: int) -> str:
    return text_of(at(decide(TASK.wanted.problem, H200).ranges, rows))


def test_the_share_of_a_choice_is_that_of_its_mean_time_and_unknown_without_one(tmp_path, capsys):
    plan, cell = chosen(8192), dict.fromkeys(OTHERS, 10.0)
    lines = [line(8192, cell | {plan: us}, f"2026-11-2{day}") for day, us in ((8, 11.0), (7, 14.0))]
    path = tmp_path / "cells.jsonl"
    path.write_text("\n".join([*lines, line(16384, cell, "2026-11-28"), line(32768, {plan: 1.0}, "2026-11-28")]))
    assert own_width.main(["--in", "--cells", str(path), "--worst", "1"]) == 0
    total, shown = capsys.readouterr().out.splitlines()[-2:]
    assert "1 cells (1 unknown) 24.10%" in total and shown.startswith("+24.1% layer backward 4096 bf16, 8192 rows: ")
    assert "1 of several runs 24.10% (p95 24.1%), by others 25.00% (p95 25.0%)" in total


def test_an_earlier_run_that_lacks_a_plan_of_the_newest_does_not_count(tmp_path):
    plan, cell = chosen(8192), dict.fromkeys(OTHERS, 10.0)
    lines = [line(8192, cell, "2026-11-27"), line(8192, cell | {plan: 12.0}, "2026-11-28")]
    (tmp_path / "cells.jsonl").write_text("\n".join(lines))
    ((run,),) = own_width.cells_of([tmp_path / "cells.jsonl"])
    assert run.times == cell | {plan: 12.0}


def test_a_choice_among_equal_plans_is_behind_the_fastest_of_noisy_times_and_not_behind_that_of_other_runs(tmp_path):
    noise, lines = random.Random(1), []
    for rows, day in itertools.product(range(7000, 7300), (5, 6, 7)):
        times = {text: 10 * math.exp(noise.gauss(0, 0.03)) for text in (*OTHERS, chosen(rows))}
        lines.append(line(rows, times, f"2026-11-2{day}"))
    (tmp_path / "cells.jsonl").write_text("\n".join(lines))
    found = list(own_width.behind(own_width.cells_of([tmp_path / "cells.jsonl"]), "H200", True))
    assert len(found) == 300 and statistics.mean(each.share for each in found) > 0.015
    assert abs(statistics.mean(each.by_others for each in found)) < 0.004


def test_tables_lose_the_width_in_all_keys_that_could_answer():
    key = table.Key.of(TASK.wanted.problem)
    left = own_width.without(TASK.cols, key)
    for before, after in zip(table.shipped(), left, strict=True):
        for each, widths in before.lines.items():
            alike = (each.norm, each.direction, each.itemsizes, each.piece) == (*key[:4],)
            assert set(widths) - set(after.lines[each]) == ({TASK.cols} & set(widths) if alike else set())
