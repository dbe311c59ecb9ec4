"""The bench tools that read results: the gate, the reports, the pictures, and the search for cliffs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_records import CASE, MACHINE, TEN, cells, record_of

from bench import bench_norm, documents, make_table, neighbours, own_width, plot, report, tables, widths
from bench.cases import BenchCase
from bench.compare import compare_files
from bench.records import make_record, save


def compare(tmp_path, old: list[dict], new: list[dict]) -> int:
    for name, records in (("old", old), ("new", new)):
        (tmp_path / f"{name}.jsonl").unlink(missing_ok=True)
        save(records, tmp_path / f"{name}.jsonl")
    return bench_norm.main(["--compare", str(tmp_path / "old.jsonl"), str(tmp_path / "new.jsonl")])


@pytest.mark.parametrize(("microseconds", "status"), [(20, 0), (20.7, 0), (20.9, 1), (15, 0)])
def test_a_loss_of_more_than_3_percent_beyond_the_spread_fails_the_gate(tmp_path, microseconds, status):
    assert compare(tmp_path, [record_of("fusednorm", 20)], [record_of("fusednorm", microseconds)]) == status


def test_gate_lists_the_cells_that_lost_the_worst_first(tmp_path, capsys):
    wide = replace(CASE, shape=(16, 256))
    old = [
        record_of("fusednorm", 20),
        record_of("fusednorm", 20, wide),
        record_of("fusednorm", 20, direction="forward"),
    ]
    new = [
        record_of("fusednorm", 22),
        record_of("fusednorm", 30, wide),
        record_of("fusednorm", 20, direction="forward"),
    ]
    assert compare(tmp_path, old, new) == 1
    said = capsys.readouterr().out
    assert "3 cells compared, 0 of the old file are not in the new one, 2 lost" in said
    assert said.index("16x256") < said.index("16x64") and "+50.0%" in said and "+10.0%" in said


def test_gate_takes_times_as_multiples_of_the_floor_of_their_run(tmp_path):
    slow = {"times_floor": 2.0}  # the floor takes 1.5 times as long too
    assert compare(tmp_path, [record_of("fusednorm", 20)], [record_of("fusednorm", 30) | slow]) == 0


def test_gate_looks_at_our_own_times_only_and_needs_some_in_common(tmp_path, capsys):
    ours = record_of("fusednorm", 20)
    assert compare(tmp_path, [ours, record_of("aten", 40)], [ours, record_of("aten", 80)]) == 0
    assert compare_files(*(tmp_path / name for name in ("old.jsonl", "old.jsonl"))) == 0
    assert compare(tmp_path, [ours], [record_of("fusednorm", 20, direction="forward")]) == 2
    assert "none of our cells in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [(bench_norm, "--compare {0} {0}"), (plot, "{0}"), (make_table, "{0} --out {0}"), (own_width, "--cells {0}")],
)
def test_a_file_that_has_no_records_is_named_in_a_sentence(tool, arguments, tmp_path, capsys):
    (tmp_path / "text").write_text("no JSON")
    for name, why in (("text", "Expecting value"), ("missing", "No such file")):
        with pytest.raises(SystemExit, match="2"):
            tool.main(arguments.format(tmp_path / name).split())
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("bench: a file of records must have") and str(tmp_path / name) in said and why in said


def test_a_cell_that_failed_is_lost_and_one_that_was_refused_is_not(tmp_path):
    none = make_record(CASE, "backward", "fusednorm", None, TEN, MACHINE)
    assert compare(tmp_path, [record_of("fusednorm", 20)], [none | {"failed": True, "refusal": "wrong"}]) == 1
    assert compare(tmp_path, [record_of("fusednorm", 20)], [none | {"failed": False, "refusal": "forced"}]) == 0


def test_plots_are_drawn_of_every_direction_and_dtype(tmp_path):
    pytest.importorskip("matplotlib")
    records = []
    for norm in ("layer", "rms"):
        for cols in (1024, 4096):
            case = BenchCase(norm, (2048, cols), 1, torch.bfloat16, torch.bfloat16)
            times = {"floor": 10, "fusednorm": 12, "fusednorm:multi_wave": 13, "aten": 40, "cudnn": 14}
            records += [record_of(name, time, case) for name, time in times.items()]
    save(records, tmp_path / "some.jsonl")
    assert plot.main([str(tmp_path / "some.jsonl"), "--out", str(tmp_path / "pictures")]) == 0
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {f"nvidia-h200-nvl-backward-bfloat16-{kind}.png" for kind in ("floor", "roofline", "speedup")}
    assert all(path.stat().st_size > 5000 for path in (tmp_path / "pictures").iterdir())


def test_plots_of_a_clean_clone_leave_what_is_committed_alone(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    results = plot.RESULTS
    (newest,) = plot.newest(results)
    assert newest in results.glob("*/norm.jsonl")
    monkeypatch.chdir(tmp_path)
    drawn = []
    monkeypatch.setattr(plot, "draw_all", lambda records, folder: drawn.append((len(records), folder)) or [])
    assert plot.main([]) == 0
    assert plot.main([str(newest)]) == 0
    (count, folder), *_ = drawn
    assert drawn == [(count, Path("out"))] * 2 and count > 0


def test_plots_of_other_tools_results_say_what_they_need(capsys):
    pytest.importorskip("matplotlib")
    assert plot.main([str(next(plot.RESULTS.glob("*/host-time.jsonl")))]) == 2
    assert "plot: needs results of bench_norm, got others in" in capsys.readouterr().err


def test_the_gpu_that_was_timed_last_is_drawn(tmp_path):
    for gpu, year in (("old", 2029), ("new", 2031), ("older", 2028)):
        (tmp_path / gpu).mkdir()
        save([record_of("fusednorm", 20, date=f"{year}-01-01")], tmp_path / gpu / "norm.jsonl")
    assert plot.newest(tmp_path) == [tmp_path / "new" / "norm.jsonl"]


def test_speedup_is_over_the_best_peer_and_the_worst_of_the_weight_dtypes():
    mixed = replace(CASE, weight_dtype=torch.bfloat16)
    records = [record_of("fusednorm", 20), record_of("aten", 50), record_of("cudnn", 30)]
    records += [record_of("fusednorm", 20, mixed), record_of("aten", 22, mixed)]
    assert plot.speedups(records) == {(16, 64): (pytest.approx(1.1), "aten")}


def test_roofline_points_are_operations_of_the_formulas_over_bytes_and_time():
    case = BenchCase("layer", (1000, 1000), 1, torch.bfloat16)
    intensity, speed = plot.intensity_and_speed(record_of("fusednorm", 13, case))
    assert (intensity, speed) == (pytest.approx(13 / 6), pytest.approx(1.0))


def test_the_documents_say_what_the_results_say(tmp_path, monkeypatch, capsys):
    assert report.main(["--check"]) == 0
    wanted = report.contents()
    stale = tmp_path / "RESULTS.md"
    stale.write_text(wanted[report.PAGE].replace("1.08x", "1.07x", 1))
    monkeypatch.setattr(report, "contents", lambda: {stale: wanted[report.PAGE]})
    assert report.main(["--check"]) == 1
    assert "RESULTS.md differs from the results" in capsys.readouterr().err


def test_numbers_of_a_sentence_and_a_table_are_renewed(monkeypatch):
    sentences = [("a backward takes {} times as long, {} us", lambda: ["1.20", 15])]
    text = "Alone, a backward\ntakes 1.1 times as long,  14.5 us. A forward takes 3 us."
    said = documents.with_numbers(text, sentences, "some.md")
    assert said == "Alone, a backward\ntakes 1.20 times as long,  15 us. A forward takes 3 us."
    monkeypatch.setitem(documents.TABLES, "some", lambda: "| 2 |")
    text = "Before\n\n<!-- bench: some -->\n\n| 1 |\n\n<!-- end -->\n\nafter"
    assert documents.with_tables(text, "some.md") == text.replace("| 1 |", "| 2 |")


def test_a_sentence_or_a_table_without_its_records_is_an_error():
    sentences = [("takes {} us", lambda: [1])]
    for text in ("It is fast.", "It takes 1 us, and that one takes 2 us."):
        with pytest.raises(ValueError, match=r"some.md: must say once 'takes \{\} us'"):
            documents.with_numbers(text, sentences, "some.md")
    with pytest.raises(ValueError, match="no table 'unknown'"):
        documents.with_tables("<!-- bench: unknown -->\n<!-- end -->", "some.md")


def day(date: str, shapes, times: dict[str, float], dtypes=(torch.bfloat16, torch.float32)) -> list[dict]:
    cases = [
        BenchCase(norm, shape, 1, dtype, dtype)
        for norm, dtype, shape in itertools.product(("layer", "rms"), dtypes, shapes)
    ]
    return [
        record_of(name, time, case, direction, date=date)
        for case in cases for direction in ("forward", "backward") for name, time in times.items()
    ]  # fmt: skip


@pytest.fixture
def some_gpu(tmp_path, monkeypatch):
    """The folder of the only GPU's results."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path.parent)
    monkeypatch.setattr(tables, "GPUS", {"H200": tmp_path.name})
    tables.measured_days.cache_clear()
    yield tmp_path
    tables.measured_days.cache_clear()


def test_a_day_that_leaves_out_a_shape_is_not_the_proof_and_its_peers_count(some_gpu):
    early = day("2031-01-01", tables.SHAPES, {"floor": 10, "fusednorm": 12, "cudnn": 14})
    late = day("2031-01-02", tables.SHAPES[1:], {"floor": 10, "fusednorm": 12, "aten": 30})
    save(early + late, some_gpu / "norm.jsonl")
    days = tables.measured_days()
    assert [cells.day for cells in days] == ["2031-01-02", "2031-01-01"]
    assert tables.proof(days).day == "2031-01-01"
    rows = [line.strip("| ").split(" | ") for line in tables.every_peer().splitlines()[2:]]
    assert {(peer, cells, day) for *_, peer, _, _, _, cells, day in rows} == {
        ("cuDNN", "0 of 12", "2031-01-01"), ("ATen", "0 of 11", "2031-01-02"),
    }  # fmt: skip


def test_each_norm_has_its_own_floor_and_a_faster_peer_is_bold(some_gpu):
    records = day("2031-01-01", tables.SHAPES, {"floor": 10, "fusednorm": 12, "cudnn": 14}, [torch.bfloat16])
    for each in records:
        if (each["norm"], each["candidate"], each["cols"]) == ("rms", "cudnn", 5120):
            each |= {"median_us": 11.5, "times_floor": 1.15}
        if (each["norm"], each["candidate"]) == ("rms", "floor"):
            each["median_us"] = 9.5
    save(records, some_gpu / "norm.jsonl")
    cells = tables.proof(tables.measured_days())
    lines = tables.twelve_shapes(cells, "backward", "bfloat16").splitlines()
    (line,) = (line for line in lines if "5120" in line)
    assert line == "| 4096x5120 | 10.0 | 12.0 (1.20x) | 14.0 |  | 9.5 | 12.0 (1.20x) | **11.5** |  |"
    ahead = tables.shapes_ahead("H200", "cudnn")
    assert [each.where for each in ahead] == ["RMSNorm backward 4096x5120, bf16", "RMSNorm forward 4096x5120, bf16"]
    assert ahead[0].by == pytest.approx(1.2 / 1.15 - 1) and tables.num_cells("cudnn", "H200") == 48


def test_a_width_far_below_its_neighbours_is_a_cliff():
    even = {cols: 0.8 for cols in range(1024, 4096, 256)}
    assert widths.cliffs(cells(even)) == []
    ((cell, share, around),) = widths.cliffs(cells(even | {2048: 0.67}))
    assert (cell["cols"], share, around) == (2048, pytest.approx(0.67), pytest.approx(0.8))
    assert widths.cliffs(cells(even | {2048: 0.69})) == []
    assert len(widths.cliffs(cells(even | {1024: 0.5}))) == 1, "the first width has neighbours on one side"
    assert widths.cliffs(cells(even) + cells({2048: 0.1}, rows=16384)) == [], "other row counts are no neighbours"


def test_a_drop_that_stays_is_found_at_its_edge():
    steps = {cols: 0.9 if cols <= 8192 else 0.6 for cols in range(7168, 9472, 256)}
    assert [cell["cols"] for cell, *_ in widths.cliffs(cells(steps))] == [8448]


def test_widths_halve_the_gaps_and_come_once_each():
    order = widths.halving(range(0, 900, 100))
    assert order == [0, 800, 400, 200, 600, 100, 300, 500, 700]
    for count in range(1, 40):
        assert sorted(widths.halving(range(count))) == list(range(count))


def test_width_cells_leave_out_what_is_too_large_and_the_check_reads_what_was_written(tmp_path, capsys):
    options = widths.parse(["--step", "36096"])
    assert list(dict.fromkeys(widths.make_cells(options))) == [
        (norm, rows, cols)
        for cols in (768, 72960, 36864)
        for norm in ("layer", "rms")
        for rows in (2048, 16384)
        if (rows, cols) != (16384, 72960)
    ]
    path = tmp_path / "widths.jsonl"
    save([MACHINE | cell for cell in cells({1024: 0.8, 1280: 0.8, 1536: 0.5})], path)
    assert widths.main(["--check", str(path)]) == 1
    assert "1 of 3 cells are 15% or more below their neighbours" in capsys.readouterr().out


FORM = {"norm": "layer", "rows": 8, "cols": 8, "x_dtype": "bfloat16", "direction": "forward", "date": "1"}


def test_a_form_of_a_projection_and_one_with_modulations_of_other_samples_have_rows_of_their_own(monkeypatch):
    timed = FORM | {"candidate": "ours", "median_us": 1, "times_floor": 1.0}
    records = [timed | {"form": "gated", "samples": 1}, timed | {"form": "gated", "packed": True}]
    records += [timed | {"form": "modulated", "samples": samples} for samples in (neighbours.SAMPLES, 1, 2, 8)]
    monkeypatch.setattr(neighbours, "records_of", lambda tool, gpu: records)
    titles = [row.split("|")[1].strip() for row in neighbours.forms("NVIDIA H200").splitlines()[2:]]
    of_modulated = (f"modulated{more}" for more in ("", ", 1 sample", ", 2 samples", ", each row its own"))
    assert titles == [f"LayerNorm {each}" for each in ("gated", "gated, packed", *of_modulated)]


def test_forms_in_which_a_peer_is_faster_and_right_are_listed(monkeypatch):
    times = {"ours": (1.2, 1.0), "inductor": (1.1, 1.0), "liger": (1.3, 1.0), "fla": (1.0, 1.6)}  # and errors
    timed = FORM | {"form": "gated", "median_us": 9}
    records = [
        timed | {"candidate": name, "times_floor": time, "error_over_written": error}
        for name, (time, error) in times.items()
    ]
    monkeypatch.setattr(neighbours, "records_of", lambda tool, gpu: records if tool == "forms" else [])
    rows = tables.peers_ahead(neighbours.peers_ahead("H200")).splitlines()
    found = [row for row in rows if "forms.jsonl" in row]
    assert found == ["| H200 | forms.jsonl | torch.compile | LayerNorm gated, forward 8x8 | 9.0 | 9.0 | 9.1% |"]


def test_a_form_in_another_dtype_has_a_row_of_its_own(monkeypatch):
    timed = {"norm": "layer", "form": "gated", "rows": 8, "cols": 8, "candidate": "ours", "median_us": 1, "date": "1"}
    records = [
        timed | {"x_dtype": dtype, "direction": way, "times_floor": floor}
        for dtype, floor in (("bfloat16", 1.25), ("float32", 1.0))
        for way in ("forward", "backward")
    ]
    monkeypatch.setattr(neighbours, "records_of", lambda tool, gpu: records)
    rows = neighbours.forms("NVIDIA H200").splitlines()[2:]
    assert [("float32" in row, "1.25, 1.25" in row, "1.00, 1.00" in row) for row in rows] == [
        (False, True, False), (True, False, True),
    ]  # fmt: skip
