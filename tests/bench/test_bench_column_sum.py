"""The parts of the column_sum bench that need no GPU."""

from __future__ import annotations

import json

import pytest
import torch
from column_sums import Sums

from bench import bench_column_sum as bench
from bench.timing import Times
from fusednorm.columns.problem import check_column_sum

TIMES, FLOOR = Times.of([20.0]), Times.of([18.0])


def test_a_case_is_read_as_it_is_written():
    for text, case in {
        "256x512": bench.Case(256, 512, 1, False),
        "4096x1024x5": bench.Case(4096, 1024, 5, False),
        "4096x1024x5+": bench.Case(4096, 1024, 5, True),
    }.items():
        assert bench.parse_case(text) == case
        assert str(case) == text


def test_a_case_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--cases", "4096x1024+"])
    assert "a case is rows x cols [x tensors [+]] like 4096x1024x5+, got 4096x1024+" in capsys.readouterr().err


def test_a_missing_row_is_a_fault():
    inputs = Sums(300, 8, 2).inputs()
    exact = bench.sums_by_torch(inputs, True, torch.float64)
    right = bench.worst_error(bench.sums_by_torch(inputs, True), exact)
    wrong = bench.worst_error(bench.sums_by_torch([x[:-16] for x in inputs], True), exact)
    case = bench.Case(300, 8, 2, True)
    records = [bench.make_record(case, "fp32", "fusednorm", TIMES, FLOOR, e, None, None) for e in (right, wrong)]
    assert [record["fault"] is None for record in records] == [True, False]
    nan = bench.make_record(case, "fp32", "fusednorm", TIMES, FLOOR, float("nan"), None, None)
    assert nan["fault"] == "a relative error of nan"


def test_records_are_json_lines_with_the_share_of_the_floor(tmp_path):
    call = check_column_sum(Sums(8192, 8192, 2).inputs("meta"), False, None)
    choices = dict(bench.choices_for(call, sweep=False))
    assert list(choices) == ["fusednorm", "ring", "portable"]
    case = bench.Case(8192, 8192, 2, False)
    record = bench.make_record(case, "fp32", "ring", TIMES, FLOOR, 1e-7, choices["ring"], None)
    bench.save([record], tmp_path / "lines.jsonl")
    assert json.loads((tmp_path / "lines.jsonl").read_text()) == record
    assert record["share_of_floor"] == 0.9
    assert record["tb_s"] == pytest.approx(2 * 8192 * 8192 * 4 / 20e-6 / 1e12)
    assert bench.report_row(record)[2].startswith("ring (ring 64x128")


def test_a_sweep_names_every_plan_once():
    call = check_column_sum(Sums(8192, 8192, 1).inputs("meta"), False, None)
    names = [name for name, _ in bench.choices_for(call, sweep=True)]
    assert len(names) == len(set(names)) > 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so the tool would run")
def test_without_a_gpu_the_tool_says_so_and_exits_with_2(capsys):
    assert bench.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 3])
def test_floor_reads_every_element_once(count, monkeypatch):
    pytest.importorskip("triton")
    from bench import read_floor

    tensors = [torch.full((70, 130), 2.0**i) for i in range(count)]
    created = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: created.append(empty(*size, **options)) or created[-1])
    read_floor.read_call(tensors)()
    (out,) = created
    assert out.sum() == sum(x.sum() for x in tensors)
