"""The picture of what the planner chooses over rows and columns."""

from __future__ import annotations

import pytest

from bench import plan_map
from fusednorm.planner.plan import ReferencePlan

pytest.importorskip("matplotlib")


def test_the_choice_is_drawn_over_rows_and_columns(capsys, tmp_path):
    picture = tmp_path / "maps" / "out.png"
    shapes = "--rows", "64", "65536", "--cols", "64", "4096", "262144"
    assert plan_map.main(["--device", "H200", "--out", str(picture), *shapes]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and "2 x 3 shapes" in capsys.readouterr().out


def test_wrong_arguments_get_one_sentence(capsys, tmp_path):
    shape = ["--rows", "64", "--cols", "64", "--device", "H200", "--out", str(tmp_path / "out.png")]
    for wrong, said in (
        (["--form", "modulated", "--sample-rows", "7"], "plan: sample_rows must divide the 64 rows, got 7\n"),
        (["--out", str(tmp_path / "out.map")], "Format 'map' is not supported"),
    ):
        assert plan_map.main([*shape, *wrong]) == 1
        assert capsys.readouterr().err.startswith(said)
    with pytest.raises(SystemExit, match="2"):
        plan_map.main([*shape, "--json"])


def test_without_arguments_the_whole_grid_is_drawn(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_map, "choose", lambda *_: ReferencePlan("not planned here"))
    assert plan_map.main(["--device", "H200"]) == 0
    assert "out/plan.png: what is chosen for 17 x 48 shapes" in capsys.readouterr().out
    assert (tmp_path / "out/plan.png").read_bytes().startswith(b"\x89PNG")
