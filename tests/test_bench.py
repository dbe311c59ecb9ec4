"""The parts of the bench tool that need no GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from bench import bench_norm
from bench.candidates import CANDIDATES, floor_bytes, floor_call
from bench.timing import Times, rotations
from fusednorm.testing import Case, assert_outputs_close, make_inputs

CASE = Case("layer", (16, 64), weight_dtype=torch.float32, bias_dtype=torch.float32)
MACHINE = {"date": "2031-05-06T07:08:09+00:00", "gpu": "NVIDIA H200 NVL", "torch": "2", "triton": "3"}
TIMES = Times.of([12.0, 10.0, 11.0])


def test_every_candidate_is_as_often_first_as_last():
    orders = list(rotations("abc", 6))
    assert orders[:4] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert sorted(order[0] for order in orders) == sorted(order[-1] for order in orders) == list("aabbcc")


def test_times_are_median_and_percentiles_whatever_the_order():
    times = Times.of([float(n) for n in reversed(range(1, 102))])
    assert (times.median, times.low, times.high, times.rounds) == (51.0, 11.0, 91.0, 101)
    assert times.spread == pytest.approx(80 / 51)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_our_candidate_is_right_on_cpu_tensors(norm):
    case = replace(CASE, norm=norm, bias_dtype=torch.float32 if norm == "layer" else None)
    inputs = make_inputs(case)
    assert_outputs_close(CANDIDATES["fusednorm"].outputs(case, inputs), case, inputs)


def test_aten_candidate_is_right_on_cpu_tensors():
    checked = bench_norm.check(CANDIDATES["aten"], CASE, make_inputs(CASE))
    assert checked.fault is None
    assert set(checked.errors) == {"y", "mean", "rstd", "dx", "dweight", "dbias"}


def test_check_reports_a_candidate_that_is_wrong():
    right = CANDIDATES["fusednorm"]

    def wrong(case, inputs, ahead):
        outputs = right.backward(case, inputs, ahead)
        return replace(outputs, dx=outputs.dx * 2)

    checked = bench_norm.check(replace(right, backward=wrong), CASE, make_inputs(CASE))
    assert "dx has an element beyond its bound" in checked.fault
    assert checked.errors["dx"] == pytest.approx(1)


def test_floor_moves_the_large_tensors_of_its_direction():
    inputs = make_inputs(CASE)
    assert torch.equal(floor_call("forward", inputs)(), -inputs.x)
    assert torch.equal(floor_call("backward", inputs)(), inputs.x + inputs.grad_out)
    assert floor_bytes("forward", CASE) == 2 * 16 * 64 * 4
    assert floor_bytes("backward", CASE) == 3 * 16 * 64 * 4


def test_flags_make_the_cases():
    options = bench_norm.parse(["--shapes", "8x16", "4x2", "--norms", "rms", "--weight-dtype", "fp32"])
    first, second = bench_norm.make_cases(options)
    assert first == Case("rms", (8, 16), 1, torch.bfloat16, torch.float32)
    assert second.shape == (4, 2)
    assert [case.shape for case in bench_norm.make_cases(bench_norm.parse([]))][:4] == [
        (16384, 4096),
        (8192, 8192),
        (32768, 1024),
        (1024, 4096),
    ]


def test_a_shape_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_norm.parse(["--shapes", "16384"])
    assert "a shape is rows x cols like 16384x4096, got 16384" in capsys.readouterr().err


def test_records_are_json_lines_in_a_file_named_by_date_and_gpu(tmp_path):
    floor = Times.of([5.0])
    record = bench_norm.make_record(CASE, "backward", "fusednorm", TIMES, floor, None, MACHINE)
    path = bench_norm.save([record, record], MACHINE, tmp_path / "results")
    assert path.name == "2031-05-06-nvidia-h200-nvl.jsonl"
    bench_norm.save([record], MACHINE, tmp_path / "results")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 3
    assert lines[0] == record
    assert (record["median_us"], record["times_floor"], record["gpu"]) == (11.0, 2.2, "NVIDIA H200 NVL")


def test_report_says_why_a_candidate_has_no_time():
    refused = bench_norm.make_record(CASE, "forward", "aten", None, TIMES, None, MACHINE) | {"refusal": "mixed dtypes"}
    timed = bench_norm.make_record(CASE, "forward", "floor", TIMES, TIMES, None, MACHINE)
    assert bench_norm.report_row(refused)[-1] == "mixed dtypes"
    assert bench_norm.report_row(timed)[5:8] == ["11.0", "18.2%", "1.00"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so the tool would run")
def test_without_a_gpu_the_tool_says_so_and_exits_with_2(capsys):
    assert bench_norm.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("variant", ["multi_wave", "pipelined", "warp_specialized"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_sweep_draws_plans_of_the_variant_that_prepare_without_a_gpu(norm, variant):
    from bench import sweep
    from fusednorm.device import H200

    bf16 = torch.bfloat16
    case = Case(norm, (16384, 4096), 1, bf16, bf16, bf16 if norm == "layer" else None)
    inputs = sweep.meta_inputs(case)
    problem = sweep.make_call(case, inputs, "backward").problem
    plans = sweep.fitting_plans(problem, H200, variant, most=5)
    assert 1 < len(plans) <= 7
    assert {plan.variant for plan in plans} == {variant}
    for plan in plans:
        launches, outputs = sweep.prepare(case, inputs, "backward", plan)
        assert launches[-1].kernel.__name__ == "finalize"
        assert outputs[0].shape == inputs.x.shape
