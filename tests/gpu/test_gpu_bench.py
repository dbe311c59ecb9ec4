"""The bench tools end to end, on shapes that take seconds."""

from __future__ import annotations

import json

import pytest

from bench import bench_norm, first_call, plot, widths

pytestmark = pytest.mark.gpu


def lines_of(folder) -> list[dict]:
    return [json.loads(line) for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()]


def test_bench_times_every_candidate_that_is_here_and_plots_it(tmp_path):
    shapes = ["--shapes", "2048x1024", "512x8x128@6144", "--rounds", "5", "--host", "--out", str(tmp_path)]
    assert bench_norm.main(shapes) == 0
    records = lines_of(tmp_path)
    assert {record["norm"] for record in records} == {"layer", "rms"}
    for record in records:
        if record["candidate"] in ("floor", "fusednorm", "aten"):
            assert record["median_us"] > 0, record
        if record["candidate"] == "fusednorm":
            assert record["host_us"] > 0 and record["peak_bytes"] > 0 and record["plan"] and record["fault"] is None
    path = str(next(tmp_path.rglob("*.jsonl")))
    assert bench_norm.main(["--compare", path, path]) == 0
    pytest.importorskip("matplotlib")
    assert plot.main([path]) == 0


def test_widths_are_swept_and_checked(tmp_path):
    path = tmp_path / "widths.jsonl"
    arguments = ["--first", "1024", "--last", "1536", "--rows", "2048", "--processes", "2", "--out", str(path)]
    assert widths.main(arguments) in (0, 1)
    cells = widths.read(path)
    assert sorted(cell["cols"] for cell in cells) == [1024, 1024, 1280, 1280, 1536, 1536]
    assert all(0 < cell["floor_us"] and 0 < cell["median_us"] < 1e4 for cell in cells)


def test_first_calls_are_timed_in_each_state_and_further_rows_build_nothing_after_warmup(tmp_path):
    assert first_call.main(["--shapes", "2048x1024", "--norms", "rms", "--out", str(tmp_path)]) == 0
    cold, disk, warm = lines_of(tmp_path)
    assert [record["state"] for record in (cold, disk, warm)] == ["cold", "disk", "warmup"]
    assert cold["forward_s"] + cold["backward_s"] > disk["forward_s"] + disk["backward_s"]
    assert warm["warmup_s"] > 0 and warm["further_builds"] == 0
