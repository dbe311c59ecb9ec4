"""bench.choices: which cells are timed, what another checkout is asked, and what is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tqdm")

from bench import choices, survey
from fusednorm.planner.choice import choose
from fusednorm.planner.device import H100
from fusednorm.planner.plan import text_of

HERE = Path(__file__).parents[2]


def test_random_cells_are_those_of_the_survey():
    cells = choices.cells_of(choices.parse(["--against", ".", "--random", "60", "--seed", "2"]))
    assert cells == [(t.norm, t.direction, rows, t.cols, t.dtype, "") for t, rows in survey.drawn(60, 2)]


def test_cells_of_shapes_are_both_norms_and_passes_once():
    cells = choices.cells_of(choices.parse(["--against", ".", "--shapes", "8x64", "8x64"]))
    assert sorted(cells) == [(n, d, 8, 64, "bf16", "") for n in ("layer", "rms") for d in ("backward", "forward")]


def test_cells_at_random_come_before_those_of_shapes_that_are_asked_for():
    options = choices.parse(["--against", ".", "--random", "3", "--shapes", "8x64"])
    assert [cell[2:4] for cell in choices.cells_of(options)[3:]] == [(8, 64)] * 4


def test_a_checkout_is_asked_for_the_plans_that_it_would_run(monkeypatch):
    stands_in = (
        "from fusednorm.planner.device import H100\n"
        "torch.cuda.current_device = lambda: 0\ngpus.spec_of = lambda device: H100\n"
    )
    monkeypatch.setattr(choices, "ASKED", choices.ASKED.replace("try:", stands_in + "try:", 1))
    cells = [("layer", "backward", 2048, 1024, "bf16", ""), ("rms", "forward", 16384, 4096, "fp32", "")]
    cells += [(*cell[:4], "bf16", "fp32") for cell in cells]
    wanted = [survey.Task(*cell[:2], cell[3], cell[4], "", cell[5]) for cell in cells]
    plans = [choose(task.wanted.problem, cell[2], H100) for task, cell in zip(wanted, cells, strict=True)]
    assert choices.chosen(HERE, cells) == [text_of(plan) for plan in plans]


def test_a_folder_without_a_planner_is_named(tmp_path):
    with pytest.raises(SystemExit, match=f"{tmp_path} has no planner"):
        choices.chosen(tmp_path, [("layer", "forward", 8, 64, "bf16", "")])


def test_cells_with_one_plan_count_as_equal(capsys):
    cells = [("rms", "forward", 8, cols, "bf16", "") for cols in range(64, 64 + 40)]
    record = {"norm": "rms", "direction": "forward", "rows": 8, "cols": 64, "old": "A", "new": "B", "old_us": 5.0}
    choices.report(cells, [record | {"ratio": 1.2}, record | {"ratio": 1.1}, record | {"ratio": 0.9}])
    first = capsys.readouterr().out.splitlines()[0]
    assert "3 of 40 cells have another plan; new / old +0.50%, p95 +0.0%, at worst +20.0%" in first
