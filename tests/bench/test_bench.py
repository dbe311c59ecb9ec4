"""The parts of the bench tools that need no GPU."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
import torch
from bench_records import CASE, MACHINE, TIMES, cells, record_of

from bench import bench_norm, candidates, first_call, widths
from bench.candidates import CANDIDATES, OURS, Calls, Refused, floor_bytes, floor_call, our_calls
from bench.cases import (
    BenchCase,
    Shape,
    add_backward_arguments,
    add_case_arguments,
    make_bench_inputs,
    make_cases,
    parse_shape,
)
from bench.peers import packages
from bench.records import best_peer, load, make_record, report_row, results_path, save, summary_rows
from bench.timing import Times, rotations
from fusednorm.settings import invariance
from fusednorm.tools.oracle import Inputs, assert_outputs_close, make_inputs


def parse_cases(*arguments: str) -> list[BenchCase]:
    import argparse

    parser = argparse.ArgumentParser()
    add_case_arguments(parser)
    add_backward_arguments(parser)
    return list(make_cases(parser.parse_args(arguments)))


def test_every_candidate_is_as_often_first_as_last():
    orders = list(rotations("abc", 6))
    assert orders[:4] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert sorted(order[0] for order in orders) == sorted(order[-1] for order in orders) == list("aabbcc")


def test_times_are_median_and_percentiles_whatever_the_order():
    times = Times.of([float(n) for n in reversed(range(1, 102))])
    assert (times.median, times.low, times.high, times.rounds) == (51.0, 11.0, 91.0, 101)
    assert times.spread == pytest.approx(80 / 51)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("frozen", [False, True])
def test_our_candidate_is_right_on_cpu_tensors(norm, frozen):
    case = replace(CASE, norm=norm, bias_dtype=torch.float32 if norm == "layer" else None, frozen=frozen)
    inputs = make_bench_inputs(case, "cpu")
    outputs = CANDIDATES[OURS].outputs(case, inputs)
    assert_outputs_close(outputs, case, inputs)
    assert (outputs.dweight is None) == frozen


@pytest.mark.parametrize("candidate", ["aten", "inductor", "inductor_mix"])
def test_candidates_that_come_with_torch_are_right_on_cpu_tensors(candidate):
    inputs = make_bench_inputs(CASE, "cpu")
    entry = bench_norm.enter(CANDIDATES[candidate], CASE, inputs)
    if entry.failed and "compiler" in entry.refusal.lower():
        pytest.skip(f"torch.compile has no C++ compiler here: {entry.refusal}")
    assert entry.check.fault is None
    assert set(entry.check.errors) == {"y", "mean", "rstd", "dx", "dweight", "dbias"}


@pytest.mark.parametrize("candidate", ["fusednorm", "batch_invariant", "aten", "inductor"])
@pytest.mark.parametrize("residual", [torch.bfloat16, torch.float32])
def test_a_residuals_gradient_is_part_of_dx_and_of_the_floor(candidate, residual):
    bf16 = torch.bfloat16
    case = BenchCase("layer", (16, 64), 1, bf16, bf16, bf16, residual_dtype=residual)
    inputs = make_bench_inputs(case, "cpu")
    checked = bench_norm.enter(CANDIDATES[candidate], case, inputs).check
    assert checked.errors["dx"] < 4e-3
    assert checked.fault is None or candidate != "fusednorm", "others round dx before they add, and dw in between"
    plain = CANDIDATES["fusednorm"].outputs(replace(case, residual_dtype=None), replace(inputs, residual_grad=None))
    joint = CANDIDATES[candidate].outputs(case, inputs)
    torch.testing.assert_close(joint.dx - plain.dx, inputs.residual_grad.to(bf16), atol=0.1, rtol=0.05)
    assert floor_call("backward", inputs)().dtype == bf16
    assert floor_bytes("backward", case) == (3 * 2 + residual.itemsize) * 16 * 64
    assert str(case).endswith("residual_bfloat16" if residual == bf16 else "residual_float32")


def test_the_candidate_batch_invariant_runs_both_directions_under_the_setting(monkeypatch):
    seen, ours = [], candidates.our_calls

    def watched(case, inputs):
        forward, backward, _ = ours(case, inputs)
        asked = lambda call: lambda *given: (seen.append(invariance.switch.invariance()), call(*given))[1]  # noqa: E731
        return Calls(asked(forward), asked(backward))

    monkeypatch.setattr(candidates, "our_calls", watched)
    CANDIDATES["batch_invariant"].outputs(CASE, make_bench_inputs(CASE, "cpu"))
    assert seen == [invariance.OF_ROWS] * 2 and invariance.switch.invariance() == invariance.OFF


def test_check_reports_a_candidate_that_is_wrong_and_it_is_not_timed():
    right = CANDIDATES[OURS]

    def prepare(case: BenchCase, inputs: Inputs):
        calls = right.prepare(case, inputs)

        def backward(ahead):
            outputs = calls.backward(ahead)
            return replace(outputs, dx=outputs.dx * 2)

        return calls._replace(backward=backward)

    entry = bench_norm.enter(replace(right, prepare=prepare), CASE, make_bench_inputs(CASE, "cpu"))
    assert "dx has an element beyond its bound" in entry.check.fault
    assert entry.check.errors["dx"] == pytest.approx(1)
    assert entry.calls is None and entry.failed
    assert entry.refusal == "wrong: dx has a relative error of 1.0e+00"


def test_a_peer_that_raises_is_a_line_of_the_report():
    def prepare(case, inputs):
        raise ValueError("no such width\nand more")

    entry = bench_norm.enter(replace(CANDIDATES["aten"], prepare=prepare), CASE, make_bench_inputs(CASE, "cpu"))
    assert (entry.refusal, entry.failed, entry.calls) == ("ValueError: no such width", True, None)


def test_a_forced_variant_that_is_the_planners_choice_is_refused_and_no_failure():
    with pytest.raises(Refused, match="the planner's own choice"):
        CANDIDATES["fusednorm:pipelined"].prepare(CASE, make_bench_inputs(CASE, "cpu"))
    assert not bench_norm.enter(CANDIDATES["fusednorm:pipelined"], CASE, make_bench_inputs(CASE, "cpu")).failed


def test_candidates_that_are_not_installed_are_left_out_with_a_reason(capsys, monkeypatch):
    monkeypatch.setattr(packages.util, "find_spec", lambda name: None)
    chosen = bench_norm.present(["fusednorm", "aten", "cudnn", "quack", "liger", "transformer_engine"])
    assert list(chosen) == ["fusednorm", "aten"]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "cudnn is left out: cudnn is not installed: pip install nvidia-cudnn-frontend brings it"
    assert len(said) == 4 and "comes as source only" in said[3]


def test_floor_moves_the_large_tensors_of_its_direction():
    inputs = make_bench_inputs(CASE, "cpu")
    assert torch.equal(floor_call("forward", inputs)(), -inputs.x)
    assert torch.equal(floor_call("backward", inputs)(), inputs.x + inputs.grad_out)
    assert floor_bytes("forward", CASE) == 2 * 16 * 64 * 4
    assert floor_bytes("backward", CASE) == 3 * 16 * 64 * 4


def test_flags_make_the_cases():
    first, second = parse_cases("--shapes", "8x16", "4x2", "--norms", "rms", "--weight-dtype", "fp32")
    assert first == BenchCase("rms", (8, 16), 1, torch.bfloat16, torch.float32)
    assert second.shape == (4, 2)
    assert [case.shape for case in parse_cases()][:4] == [(16384, 4096), (8192, 8192), (32768, 1024), (1024, 4096)]
    both = parse_cases("--set", "quick", "--shapes", "8x16", "--dtype", "bf16", "fp32", "--frozen")
    assert len(both) == 2 * 2 * 5
    assert both[0].output_mask == [True, False, False]


def test_a_process_of_its_own_is_given_the_same_case():
    for case in parse_cases("--dtype", "fp16", "fp32", "--weight-dtype", "bf16"):
        assert parse_cases(*first_call.arguments_of(case)) == [case]


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("16384x4096", Shape((16384, 4096))),
        ("4096x32x128", Shape((4096, 32, 128))),
        ("4096x32x128@6144", Shape((4096, 32, 128), 6144)),
    ],
)
def test_shapes_are_rows_and_columns_or_tokens_heads_and_columns(text, shape):
    assert parse_shape(text) == shape


@pytest.mark.parametrize("text", ["16384", "4x0", "4x5x6x7", "4x5@", "4x32x128@4095"])
def test_a_shape_that_is_none_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        bench_norm.parse(["--shapes", text])
    assert f"got {text}" in capsys.readouterr().err


def test_a_packed_shape_is_a_slice_of_longer_rows():
    (case,) = parse_cases("--shapes", "6x2x8@40", "--norms", "rms", "--dtype", "fp32")
    inputs = make_bench_inputs(case, "cpu")
    assert inputs.x.stride() == (40, 8, 1)
    assert torch.equal(inputs.x, make_inputs(case).x)
    assert_outputs_close(CANDIDATES[OURS].outputs(case, inputs), case, inputs)
    assert str(case).endswith("@40")


def test_records_are_json_lines_in_a_file_of_the_gpu_and_the_tool(tmp_path):
    record = make_record(CASE, "backward", "fusednorm", TIMES, Times.of([5.0]), MACHINE)
    path = results_path(tmp_path / "results", MACHINE, "norm")
    assert path == tmp_path / "results/nvidia-h200-nvl/norm.jsonl"
    assert results_path(tmp_path / "mine.jsonl", MACHINE, "norm") == tmp_path / "mine.jsonl"
    save([record, record], path)
    save([record], path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 3
    assert lines[0] == record
    assert (record["median_us"], record["times_floor"], record["gpu"]) == (11.0, 2.2, "NVIDIA H200 NVL")


def test_of_two_times_of_a_cell_the_later_is_loaded(tmp_path):
    path = tmp_path / "some.jsonl"
    save([record_of("fusednorm", 20), record_of("fusednorm", 30), record_of("aten", 40)], path)
    assert [(r["candidate"], r["median_us"]) for r in load([path])] == [("fusednorm", 30), ("aten", 40)]
    older = tmp_path / "older.jsonl"
    save([record_of("fusednorm", 50, date="2030-01-01T00:00:00+00:00")], older)
    assert [r["median_us"] for r in load([path, older])] == [30, 40], "by date, not by the order of the files"


def test_report_says_why_a_candidate_has_no_time():
    refused = make_record(CASE, "forward", "aten", None, TIMES, MACHINE) | {"refusal": "mixed dtypes"}
    timed = make_record(CASE, "forward", "floor", TIMES, TIMES, MACHINE)
    assert report_row(refused)[-1] == "mixed dtypes"
    assert report_row(timed)[5:8] == ["11.0", "18.2%", "1.00"]
    extras = record_of("fusednorm", 20, host_us=7.04, peak_bytes=2_500_000, errors={"dx": 1e-3}, fault="dx is off")
    assert report_row(extras)[8:] == ["7.0", "2.5", "1.0e-03 !"]


def test_summary_is_the_geometric_mean_over_the_floor_best_first():
    wide = replace(CASE, shape=(16, 256))
    records = [record_of("aten", 40), record_of("fusednorm", 20), record_of("fusednorm", 5, wide)]
    assert summary_rows(records) == [
        ["layer", "backward", "float32", "fusednorm", "1.000", "2"],
        ["layer", "backward", "float32", "aten", "4.000", "1"],
    ]


def test_best_peer_is_neither_ours_nor_the_floor():
    times = {"floor": 1, "fusednorm": 2, "fusednorm:pipelined": 3, "cudnn": 5, "aten": 9}
    assert best_peer({name: record_of(name, time) for name, time in times.items()})["candidate"] == "cudnn"
    assert best_peer({"fusednorm": record_of("fusednorm", 2)}) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so the tool would run")
@pytest.mark.parametrize("tool", [bench_norm, first_call, widths], ids=lambda tool: tool.__name__)
def test_without_a_gpu_a_tool_says_so_and_exits_with_2(tool, capsys):
    assert tool.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("variant", ["multi_wave", "pipelined", "warp_specialized"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_candidates_of_a_sweep_prepare_without_a_gpu(norm, variant):
    from bench import sweep
    from fusednorm.planner.device import H200

    bf16 = torch.bfloat16
    case = BenchCase(norm, (16384, 4096), 1, bf16, bf16, bf16 if norm == "layer" else None)
    inputs = sweep.meta_inputs(case)
    problem = sweep.make_call(case, inputs, "backward").problem
    plans = sweep.candidates(variant, problem, H200)
    assert 0 < len(plans) <= 16
    assert {plan.variant for plan in plans} == {variant}
    for plan in plans:
        launches, outputs = sweep.prepare(case, inputs, "backward", plan)[:2]
        assert launches[-1].kernel.__name__ in ("finalize", "backward")
        assert outputs[0].shape == inputs.x.shape


def test_a_sweep_writes_a_line_of_all_plans_with_a_time_or_the_reason_for_none(monkeypatch, tmp_path, capsys):
    from bench import sweep
    from fusednorm.planner.device import H200
    from fusednorm.planner.plan import MultiWavePlan

    plans = [MultiWavePlan(1, chunk, 1, 4, 1, 255) for chunk in (64, 128, 256, 512)]
    compiled = dict(zip(plans, [(40, 0), (80, 16), "RuntimeError: no", (50, 0)], strict=True))

    def prepare(case, inputs, direction, plan):
        want = sweep.exact(case, inputs)
        outputs = [getattr(want, name) * (2 if plan is plans[3] else 1) for name in ("dx", "dweight", "dbias")]
        return [], outputs

    class Pool(contextlib.nullcontext):
        def __enter__(self):
            return self

        def map(self, _, jobs, chunksize):
            return [compiled[plan] for _, _, plan, _ in jobs]

    monkeypatch.setattr(sweep, "lacks_gpu", lambda tool: False)
    monkeypatch.setattr(sweep, "describe_machine", lambda: MACHINE)
    monkeypatch.setattr(sweep, "make_bench_inputs", lambda case, device: make_bench_inputs(case, "cpu"))
    monkeypatch.setattr(sweep.gpus, "spec_of", lambda device: H200)
    monkeypatch.setattr(sweep, "candidates", lambda variant, problem, of: plans[2:] if of is H200 else plans[:3])
    monkeypatch.setattr(sweep.multiprocessing, "get_context", lambda way: type("Context", (), {"Pool": Pool}))
    monkeypatch.setattr(sweep, "prepare", prepare)
    monkeypatch.setattr(sweep, "time_interleaved", lambda calls, rounds: dict.fromkeys(calls, TIMES))
    arguments = ["--shapes", "8x64", "--norms", "layer", "--dtype", "fp32", "--variants", "multi_wave"]
    arguments += ["--of", "A100", "H200"]
    assert sweep.main([*arguments, "--run", "mine", "--out", str(tmp_path)]) == 1, "one plan is wrong"
    (line,) = (tmp_path / "nvidia-h200-nvl/plans.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert {name: record[name] for name in ("run", "direction", "rows", "x_dtype", "floor_us")} == {
        "run": "mine", "direction": "backward", "rows": 8, "x_dtype": "float32", "floor_us": TIMES.median,
    }  # fmt: skip
    assert [(e["plan"], e["median_us"], e.get("refusal"), e.get("wrong")) for e in record["timed"]] == [
        ("MultiWave(1,64,1,4,1,255,0)", TIMES.median, None, False),
        ("MultiWave(1,128,1,4,1,255,0)", None, "16 bytes of stack", None),
        ("MultiWave(1,256,1,4,1,255,0)", None, "RuntimeError: no", None),
        ("MultiWave(1,512,1,4,1,255,0)", TIMES.median, None, True),
    ]
    assert "4 plans, 2 timed" in capsys.readouterr().out


@pytest.fixture
def pretended_gpu(monkeypatch):
    """CPU tensors replace CUDA tensors, and a call replaces its CUDA graph. The n-th graph takes 10 n us."""
    warmed = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for tool in (bench_norm, widths):
        monkeypatch.setattr(tool, "describe_machine", lambda: MACHINE)
    monkeypatch.setattr(bench_norm, "make_bench_inputs", lambda case, device: make_bench_inputs(case, "cpu"))
    monkeypatch.setattr(bench_norm, "capture", lambda call: (call(), call)[1])
    monkeypatch.setattr(bench_norm, "read_clocks", lambda: None)
    monkeypatch.setattr(bench_norm, "extras", lambda call, host: {"peak_bytes": 1000, "host_us": 5.0 if host else None})
    monkeypatch.setattr(bench_norm.fusednorm, "warmup", lambda *args, **more: warmed.append((args, more)))

    def times(graphs, rounds):
        return {name: Times.of([10.0 * (place + 1)] * rounds) for place, name in enumerate(graphs)}

    monkeypatch.setattr(bench_norm, "time_graphs", times)
    return warmed


def test_a_run_checks_times_reports_and_saves_each_candidate(pretended_gpu, tmp_path, capsys):
    arguments = ["--shapes", "8x16", "4x2x8@40", "--dtype", "fp32", "--out", str(tmp_path), "--host"]
    assert bench_norm.main([*arguments, "--candidates", "fusednorm", "fusednorm:pipelined", "aten"]) == 0
    (path,) = tmp_path.rglob("*.jsonl")
    records = load([path])
    assert len(records) == 2 * 2 * 2 * 4  # 2 shapes, 2 norms, 2 directions, 3 candidates and the floor
    ours = [record for record in records if record["candidate"] == "fusednorm"]
    assert {(r["median_us"], r["times_floor"], r["host_us"], r["fault"], r["failed"]) for r in ours} == {
        (20.0, 2.0, 5.0, None, False)
    }
    forced = next(record for record in records if record["candidate"] == "fusednorm:pipelined")
    assert (forced["median_us"], forced["refusal"]) == (None, "the planner's own choice")
    said = capsys.readouterr().out
    assert "8x8@40" in said and "32 lines added to" in said
    assert [args[:3] for args, _ in pretended_gpu] == [(norm, [16], torch.float32) for norm in ("layer", "rms")] * 2


def test_a_forced_variant_is_timed_only_where_its_plan_is_another():
    def entry(**plans: str) -> bench_norm.Entry:
        return bench_norm.Entry(calls=Calls(lambda: None, lambda ahead: None, plans))

    entries = {OURS: entry(forward="A", backward="B"), "fusednorm:pipelined": entry(forward="A", backward="C")}
    entries |= {"aten": entry(), "fusednorm:multi_wave": bench_norm.Entry(refusal="cannot run")}
    again = [(n, d) for n in entries for d in ("forward", "backward") if bench_norm.repeats(n, entries, d)]
    assert again == [("fusednorm:pipelined", "forward")]


def test_a_peer_that_cannot_be_captured_is_left_out_and_ours_that_is_wrong_is_exit_code_1(
    pretended_gpu, tmp_path, monkeypatch, capsys
):
    def backward_fails(case, inputs):
        calls, asked = our_calls(case, inputs), []

        def backward(ahead):
            asked.append(ahead)
            if len(asked) > 1:
                raise RuntimeError("operation not permitted when stream is capturing")
            return calls.backward(ahead)

        return calls._replace(backward=backward)

    def wrong(case, inputs):
        calls = our_calls(case, inputs)
        return calls._replace(forward=lambda: replace(calls.forward(), y=inputs.x * 3))

    peer, ours = replace(CANDIDATES["aten"], prepare=backward_fails), replace(CANDIDATES[OURS], prepare=wrong)
    monkeypatch.setitem(CANDIDATES, "liger", replace(peer, name="liger"))
    arguments = ["--shapes", "8x16", "--norms", "rms", "--dtype", "fp32", "--out", str(tmp_path), "--candidates"]
    assert bench_norm.main([*arguments, "aten", "liger"]) == 0
    refused = [r for r in load(tmp_path.rglob("*.jsonl")) if r["candidate"] == "liger" and r["median_us"] is None]
    assert [(r["direction"], r["refusal"]) for r in refused] == [
        ("backward", "backward cannot be captured: RuntimeError: operation not permitted when stream is capturing")
    ]
    monkeypatch.setitem(CANDIDATES, OURS, ours)
    assert bench_norm.main([*arguments, OURS, "--no-save"]) == 1
    assert "WRONG: rms-8x16" in capsys.readouterr().err


def test_a_width_sweep_writes_a_line_for_each_cell_and_stops_in_time(pretended_gpu, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(widths, "compile_batch", lambda batch, options: compiled.append(batch))
    monkeypatch.setattr(
        widths, "measure", lambda norm, rows, cols, options: cells({cols: 0.8}, rows=rows, norm=norm)[0]
    )
    path = tmp_path / "widths.jsonl"
    assert widths.main(["--step", "8192", "--out", str(path)]) == 0
    done = widths.read(path)
    assert len(done) == 2 * (9 + 5) and sum(map(len, compiled)) == len(done)
    assert all(cell["gpu"] == MACHINE["gpu"] and cell["date"] == MACHINE["date"] for cell in done)
    late = tmp_path / "late.jsonl"
    assert widths.main(["--step", "8192", "--limit-seconds", "0", "--out", str(late)]) == 0
    assert not late.exists()


def test_what_looks_like_a_cliff_is_timed_again_with_its_neighbours(pretended_gpu, tmp_path, monkeypatch, capsys):
    asked = []

    def measure(norm, rows, cols, options):
        asked.append(cols)
        hiccup = cols == 3 * 8192 + 768 and asked.count(cols) == 1
        return cells({cols: 0.3 if hiccup else 0.8}, rows=rows, norm=norm)[0]

    monkeypatch.setattr(widths, "compile_batch", lambda batch, options: None)
    monkeypatch.setattr(widths, "measure", measure)
    path = tmp_path / "widths.jsonl"
    assert widths.main(["--step", "8192", "--norms", "rms", "--rows", "2048", "--out", str(path)]) == 0
    assert asked[-5:] == [768 + 8192 * n for n in range(1, 6)] and len(asked) == 9 + 5
    assert "9 of 9 cells timed, 5 of them again" in capsys.readouterr().out
    (again,) = (cell for cell in widths.read(path) if cell["cols"] == 25344)
    assert again["floor_us"] / again["median_us"] == pytest.approx(0.8)


def test_a_captured_call_lives_as_long_as_its_graph(monkeypatch):
    import gc
    import weakref

    from bench import timing

    class Statistics:
        """Stands for a tensor that a captured backward reads and only its closure holds."""

    monkeypatch.setattr(timing.torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(timing.torch.cuda, "graph", lambda graph, stream: contextlib.nullcontext())
    statistics = Statistics()
    alive = weakref.ref(statistics)
    captured = timing.CapturedCall(lambda held=statistics: held)
    del statistics
    gc.collect()
    assert alive() is not None
    del captured
    gc.collect()
    assert alive() is None
