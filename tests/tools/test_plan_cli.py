"""python -m fusednorm plan, fusednorm.explain, and the prediction that both print."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import afresh
import pytest
import torch
from devices import planned_for
from planning import make_problem, meta_call
from tables import Table
from wide_sums import WideSum

import fusednorm
from fusednorm.__main__ import main
from fusednorm.host.gpus import with_installed_triton
from fusednorm.operands import DIRECTIONS, operands_of
from fusednorm.planner.choice import choose
from fusednorm.planner.device import A100, H200
from fusednorm.planner.plan import VARIANTS
from fusednorm.problem.calls import check_backward, check_forward
from fusednorm.tools.explanation import explain, explain_problem

KEYS = {"variant", "forced", "reasons", "rows", "cols", "norm", "pass", "dtype", "device"}


def run(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def run_json(capsys, *arguments: str) -> list[dict]:
    return [json.loads(line) for line in run(capsys, *arguments, "--json").splitlines()]


def test_plan_says_what_runs_what_it_takes_and_why_nothing_else_does(capsys):
    text = run(capsys, "--rows", "16384", "--cols", "8192", "--norm", "layer", "--dtype", "bf16", "--device", "H200")
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "layer_norm backward on H200: 16384 rows of 8192 columns, x bf16, weight bf16, bias bf16"
    assert lines[1].startswith("pipelined: chosen: the fastest of those measured on NVIDIA H200 at 8192 columns")
    assert lines[2].startswith("PipelinedPlan(rows_per_tile=1, chunk=4096, num_chunks=1")
    assert "shared memory 49472 of 232448 bytes a CTA" in text and "of 255 a thread" in text
    assert "launches: 2; passes over x and dy: 1" in lines
    assert "MB moved" in text and "us predicted" in text and "% of the speed of light" in text
    refused = ["not multi_wave or reference", "not async_copy or warp_specialized"]
    assert [line.split(":")[0] for line in lines[-2:]] == refused


def test_json_has_a_line_for_each_case_of_the_lists(capsys):
    cases = run_json(capsys, "--rows", "512", "16384", "--cols", "1024", "8192", "--device", "b200", "--norm", "rms")
    assert [(case["rows"], case["cols"]) for case in cases] == [(512, 1024), (16384, 1024), (512, 8192), (16384, 8192)]
    assert [case["variant"] for case in cases] == ["multi_wave", "warp_specialized"] * 2
    for case in cases:
        assert case.keys() >= KEYS and case["reasons"].keys() == set(VARIANTS)
        assert (case["norm"], case["pass"], case["dtype"], case["device"]) == ("rms", "backward", "bf16", "B200")
        assert case["forced"] is False and case["plan"]["max_registers"] >= case["registers"]


CASES = [
    make_problem("layer", 4096),
    make_problem("layer", 65536),
    make_problem("layer", 65536, wants_dx=False),
    make_problem("layer", 65536, wants_dw=False, wants_db=False),
    make_problem("layer", 65536, direction="forward"),
]
ROW_PASSES = [make_problem("rms", cols, "fp32", direction="forward") for cols in (70001, 70004)]


@pytest.mark.parametrize("spec", [A100, H200], ids=lambda spec: spec.name)
def test_json_counts_launches_and_passes_as_they_are_made(spec):
    from fusednorm.host import launch

    for problem in CASES:
        explanation = explain_problem(problem, 4096, spec)
        with planned_for(spec):
            launches = launch.on_tensors(meta_call(problem), explanation.plan).launches
        kernels = [each.kernel.__name__ for each in launches]
        said = explanation.as_dict()
        twice = "backward_row_means" in kernels or "forward_by_column_tiles" in kernels
        assert (said["launches"], said["passes"]) == (len(kernels), 2 if twice else 1)
        assert twice == (spec is A100 and problem.cols == 65536 and problem != CASES[2])


@pytest.mark.parametrize("spec", [A100, H200], ids=lambda spec: spec.name)
@pytest.mark.parametrize("problem", [*CASES, *ROW_PASSES])
def test_what_follows_from_a_plan_is_what_its_kernels_are_launched_with(problem, spec):
    from fusednorm.host import launch

    spec = with_installed_triton(spec)
    explanation = explain_problem(problem, 4096, spec)
    with planned_for(spec):
        *_, main, last = [None, *launch.on_tensors(meta_call(problem), explanation.plan).launches]
    said, finalizes = explanation.as_dict()["derived"], last.kernel.__name__ == "finalize"
    assert finalizes == ("sums" in said)
    if finalizes:
        named = "cols", "num_loads", "num_warps", "dependent"
        assert said["sums"] == {name: getattr(last.tile, name) for name in named}
        assert last.options.get("launch_pdl", False) == said["sums"]["dependent"]
    kernel = main if finalizes else last
    if "register_limit" in said:
        assert kernel.options.get("maxnreg") == said["register_limit"]
    if "prefetches_statistics" in said:
        assert kernel.tile.prefetches_statistics == said["prefetches_statistics"]
        assert kernel.tile.in_pairs == said["widens_in_pairs"]
        assert kernel.tile.reads_once == said["reads_once"]


@pytest.mark.parametrize(
    "form, direction",
    [*itertools.product(["affine", "of_sum", "plus_residual"], DIRECTIONS), ("plus_residual_norm", "forward")],
)
def test_a_form_moves_its_row_tensors_too(form, direction, capsys):
    asked = "--rows", "16384", "--norm", "rms", "--pass", direction, "--device", "H200"
    ((plain,), (case,)) = run_json(capsys, *asked), run_json(capsys, *asked, "--form", form, "--weight-offset", "1")
    forward = {"of_sum": 2, "plus_residual": 1, "plus_residual_norm": 2}
    more = {"forward": forward, "backward": {"of_sum": 1}}[direction].get(form, 0)
    assert case["bytes_moved"] - plain["bytes_moved"] == pytest.approx(more * 16384 * 4096 * 2, rel=0.05)
    assert case["form"]["weight_offset"] == 1.0


def test_what_is_normalized_again_has_no_backward_of_its_own_nor_any_plan_for_wide_rows(capsys):
    asked = ["--norm", "rms", "--form", "plus_residual_norm", "--device", "H200"]
    assert main(["plan", *asked]) == 1
    assert capsys.readouterr().err.endswith("it takes those of plus_residual and of of_sum\n")
    (case,) = run_json(capsys, *asked, "--pass", "forward", "--cols", "65536")
    assert case["reasons"]["reference"] == "chosen: the kernels of two norms run"


def test_forced_plan_says_what_is_bad_about_it(capsys):
    (case,) = run_json(capsys, "--rows", "512", "--cols", "4096", "--device", "B200", "--force", "warp_specialized")
    assert case["variant"] == "warp_specialized" and case["forced"] is True
    assert case["reasons"]["warp_specialized"] == "forced; multi_wave would be chosen"
    assert case["reasons"]["multi_wave"].startswith("would be chosen")


def test_forced_plan_that_cannot_run_says_why_and_the_planners_runs(capsys):
    arguments = ("--rows", "16384", "--cols", "1023", "--device", "B200", "--force", "warp_specialized")
    (case,) = run_json(capsys, *arguments)
    assert case["variant"] == "multi_wave" and case["forced"] is False
    assert case["reasons"]["warp_specialized"].startswith("forced, but it needs base pointers, rows and row strides in")
    assert case["reasons"]["multi_wave"].startswith("chosen")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_dtype_and_pass_has_a_plan(capsys, dtype, direction):
    (case,) = run_json(capsys, "--dtype", dtype, "--weight-dtype", "fp32", "--pass", direction, "--device", "A100")
    assert case["pass"] == direction and case["dtype"] == dtype and case["weight_dtype"] == "fp32"
    assert case["variant"] == "multi_wave"


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--cols", "32768"], "30 clusters of 8 CTAs, up to 2 CTAs on each of 132 SMs"),
        (["--cols", "4096"], "264 CTAs, up to 2 CTAs on each of 132 SMs"),
        (["--rows", "1", "--cols", "300001"], "1 CTA for each of 293 column tiles, up to 4 CTAs on each of 132 SMs"),
        (["--cols", "4096", "--sm-margin", "4"], "256 CTAs, up to 2 CTAs on each of 128 SMs; sm_margin leaves 4 to"),
    ],
)
def test_the_grid_is_said_in_ctas_or_clusters(capsys, arguments, text):
    assert text in run(capsys, *arguments, "--device", "H200")


def test_a_margin_that_leaves_no_sm_is_refused(capsys):
    assert main(["plan", "--device", "H200", "--sm-margin", "132"]) == 1
    said = capsys.readouterr()
    assert said.err == "sm_margin: n must leave at least one of the 132 SMs of H200, got 132\n" and not said.out


def test_help_explains_every_variant(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    listed = capsys.readouterr().out.partition("variants:")[2].splitlines()
    assert [line.split()[0] for line in listed if line.startswith("  ") and line[2] != " "] == list(VARIANTS)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "V100"], "device must be one of A100, H100"),
        (["--rows", "0"], "must be a positive integer, got '0'"),
        (["--cols", "4k"], "must be a positive integer, got '4k'"),
        (["--force", "fast"], "invalid choice: 'fast'"),
    ],
)
def test_mistakes_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["plan", *arguments])
    assert message in capsys.readouterr().err


def test_command_needs_neither_triton_nor_cuda():
    code = (
        "import sys; from fusednorm.__main__ import main; main(['plan', '--json']);"
        "import torch; print('triton' in sys.modules, torch.cuda.is_initialized())"
    )
    assert afresh.run(code).stdout.splitlines()[-1] == "False False"


# --- explain ---


def test_explain_of_a_cpu_tensor_says_that_aten_runs_and_asks_another_device_if_told():
    x = torch.empty(16384, 4096, dtype=torch.bfloat16)
    plain = fusednorm.explain(x, (4096,))
    assert plain.plan.variant == "reference" and "x is on cpu, where ATen's kernels run" in str(plain)
    other = fusednorm.explain(x, (4096,), x[0], x[0], device=H200)
    assert other.plan == choose(make_problem("layer", 4096), 16384, H200)
    other = fusednorm.explain(x, (4096,), x[0], norm="rms", direction="forward", device=A100)
    assert other.plan.variant == "multi_wave"


def test_explain_is_of_the_inputs_given():
    x, weight = torch.empty(4096, 32, 64, device="meta"), torch.empty(32, 64, device="meta")
    problem = fusednorm.explain(x, (32, 64), weight, norm="rms", device=H200).problem
    assert problem == make_problem("rms", 2048, "fp32")
    problem = fusednorm.explain(x, (32, 64), weight, weight.half(), grad_out=x.bfloat16(), device=H200).problem
    assert (problem.bias_dtype, problem.grad_dtype) == (torch.float16, torch.bfloat16)
    assert problem.wants_dx and problem.wants_dw and problem.wants_db


def test_explain_sees_strides_alignment_and_copies():
    packed = torch.empty(64, 8, 3, 16, 128, dtype=torch.bfloat16)[:, :, 1]
    assert fusednorm.explain(packed, (128,), device=H200).problem.nested_rows
    odd = torch.empty(64, 129)[:, 1:]
    assert not fusednorm.explain(odd, (128,), device=H200).problem.tma_aligned
    flipped = torch.empty(128, 64).t()
    explanation = fusednorm.explain(torch.empty(64, 128), (128,), grad_out=flipped, device=H200)
    assert explanation.notes == (
        "grad_out is copied first: with strides (1, 64) its rows are at more than two strides, or their elements apart",
    )
    assert explanation.notes[0] in str(explanation)
    assert not fusednorm.explain(torch.empty(64, 128), (128,), direction="forward", device=H200).notes


def test_explain_gives_each_reason_once():
    text = str(fusednorm.explain(torch.empty(64, 128), (128,)))
    assert text.count("x is on cpu, where ATen's kernels run") == 1 and "not " not in text
    text = str(fusednorm.explain(torch.empty(64, 128), (128,), device=A100))
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("not ")]
    assert lines[1].startswith("not pipelined or warp_specialized: ") and len(lines) == 2


def test_explain_knows_of_force_and_of_nothing_to_do():
    x = torch.empty(64, 1024, dtype=torch.bfloat16)
    with fusednorm.force("pipelined"):
        assert fusednorm.explain(x, (1024,), device=H200).decision.forced
    empty = fusednorm.explain(x[:0], (1024,), device=H200)
    assert empty.plan.variant == "reference" and "no elements" in str(empty) and json.dumps(empty.as_dict())


def test_all_explanations_leave_the_margin_in_force_of_a_given_device_too():
    x = torch.empty(64, 4, 64, device="meta")
    ours = (
        lambda device: explain(x, (64,), device=device),
        lambda device: fusednorm.explain_qk_norm(x, x, device=device),
        lambda device: fusednorm.explain_column_sum([x], device=device),
    )
    for each in ours:
        assert each(H200.leaving(8)).device.sm_margin == 8
        with fusednorm.sm_margin(32):
            assert each(H200).device.sm_margin == 32


def test_explain_refuses_what_the_op_refuses():
    with pytest.raises(RuntimeError, match="x must end in normalized_shape"):
        fusednorm.explain(torch.empty(4, 8), (9,))
    with pytest.raises(ValueError, match="^explain: norm must be one of layer, rms, got 'batch'$"):
        fusednorm.explain(torch.empty(4, 8), (8,), norm="batch")


# --- Prediction ---

# Times of whole calls with the planner's choice, measured in bfloat16 on an H200 (families.jsonl).
MEASURED_US = {
    ("layer", "backward", 32736, 4096): 192.4,
    ("rms", "backward", 32736, 4096): 192.9,
    ("layer", "backward", 8184, 8192): 99.4,
    ("layer", "backward", 32736, 1024): 52.3,
    ("layer", "backward", 8184, 2048): 29.5,
    ("layer", "backward", 2112, 5120): 22.8,
    ("layer", "backward", 528, 4096): 11.7,
    ("rms", "backward", 2112, 65536): 200.8,
    ("layer", "backward", 8184, 1001): 24.8,
    ("layer", "forward", 16384, 4096): 69.8,
    ("rms", "forward", 8192, 8192): 68.4,
    ("layer", "forward", 32768, 1024): 34.2,
    ("layer", "forward", 4096, 12288): 52.2,
    ("layer", "forward", 132, 4096): 5.3,
    ("rms", "forward", 900, 1232): 5.7,
}


@pytest.mark.parametrize("case", MEASURED_US, ids=str)
def test_prediction_is_within_a_sixth_of_what_was_measured(case):
    norm, direction, rows, cols = case
    predicted = explain_problem(make_problem(norm, cols, direction=direction), rows, H200).cost.predicted_us
    assert predicted == pytest.approx(MEASURED_US[case], rel=1 / 6)


def test_bytes_are_those_of_the_tensors_and_little_more():
    for norm, direction, tensors in (("layer", "backward", 3), ("rms", "forward", 2)):
        problem = make_problem(norm, 4096, direction=direction)
        least = tensors * 16384 * 4096 * 2
        assert sum(problem.row_bytes) * 16384 * 4096 == least
        assert least < explain_problem(problem, 16384, H200).cost.bytes_moved < 1.05 * least


@pytest.mark.parametrize("cols", [64, 1024, 4096, 65536])
@pytest.mark.parametrize("rows", [1, 100, 10000, 1000000])
def test_nothing_is_predicted_to_outrun_light_and_more_bandwidth_is_faster(rows, cols):
    problem = make_problem("layer", cols)
    specs = (replace(A100, bandwidth_gb_s=bandwidth) for bandwidth in (1000, 2000))
    slow, fast = (explain_problem(problem, rows, spec).cost for spec in specs)
    assert 0 < slow.share_of_light <= 1 and 0 < fast.share_of_light <= 1
    assert fast.predicted_us < slow.predicted_us < 2 * fast.predicted_us


def test_groups_and_the_activation_of_a_gate_are_planned_and_said(capsys):
    asked = "--norm", "rms", "--device", "H200", "--form", "of_gated", "--activation", "sigmoid"
    (whole,) = run_json(capsys, "--rows", "65536", "--cols", "1024", *asked)
    (groups,) = run_json(capsys, "--rows", "8192", "--cols", "8192", "--group-size", "1024", *asked)
    assert groups["form"]["groups"] == 8 and groups["form"]["activation"] == "sigmoid" and groups["cols"] == 1024
    assert groups["plan"] == whole["plan"]  # a group's row is a row
    parameters = 2 * 8192 * 2 - 2 * 1024 * 2
    assert groups["bytes_moved"] == pytest.approx(whole["bytes_moved"], abs=parameters + 2**20)
    assert main(["plan", *asked, "--rows", "8192", "--cols", "8192", "--group-size", "1024"]) == 0
    said = capsys.readouterr().out
    assert "8192 rows of 8 groups of 1024 columns" in said and "CTAs for each of 8 groups" in said


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--form", "affine", "--group-size", "8"], "group_size=8 must come with a form that has it, got 'affine'"),
        (["--form", "of_gated", "--group-size", "1000"], "group_size must divide the 4096 columns, got 1000"),
        (["--activation", "sigmoid"], "plan: activation='sigmoid' must come with a form that has it, got ''"),
        (["--form", "of_sum", "--sample-rows", "8"], "plan: sample_rows must come with a modulated form, got 'of_sum'"),
        (["--form", "modulated", "--sample-rows", "99"], "plan: sample_rows must divide the 16384 rows, got 99"),
        (
            ["--form", "modulated_by_index", "--sample-rows", "8"],
            "plan: sample_rows must come with a form without an index, got 'modulated_by_index'",
        ),
    ],
)
def test_what_no_form_has_is_one_sentence(arguments, sentence, capsys):
    assert main(["plan", "--norm", "rms", "--device", "H200", *arguments]) == 1
    assert sentence in capsys.readouterr().err


def test_explain_knows_how_the_rows_of_a_gate_lie():
    x, gate = torch.empty(4096, 1024, dtype=torch.bfloat16), torch.empty(4096, 3072, dtype=torch.bfloat16)
    asked = {"norm": "rms", "form": "times_gate", "activation": "sigmoid", "group_size": 512, "device": H200}
    weight = torch.ones(1024, dtype=torch.bfloat16)
    for direction in ("forward", "backward"):
        inside = explain(x, (1024,), weight, gate=gate[:, 1024:2048], direction=direction, **asked)
        problem = inside.problem
        assert problem.tma_aligned and not problem.nested_rows and problem.cols == 512 and problem.form.groups == 2
        crooked = explain(x, (1024,), weight, gate=gate[:, 1:1025], direction=direction, **asked)
        assert not crooked.problem.tma_aligned and crooked.plan.variant == "multi_wave"


def test_explain_of_a_modulated_norm_is_of_calls_with_as_many_rows_to_a_sample():
    x = torch.empty(4 * 1152, 3072, dtype=torch.bfloat16, device="meta")
    asked = {"form": "modulated", "device": H200}
    for direction in ("forward", "backward"):
        for rows in (1152, 4608, 24, 1):
            packed = torch.empty(4608 // rows, 6, 3072, dtype=torch.bfloat16, device="meta")
            scale, shift, *_ = packed.split(1, 1)
            given = {"x": x.view(-1, rows, 3072), "normalized_shape": (3072,), "scale": scale, "shift": shift}
            if direction == "forward":
                call = check_forward(operands_of("layer_norm_fwd_modulated", (), given | {"eps": 1e-6}))
            else:
                statistic = torch.empty(4608, device="meta")
                given |= {"grad_out": given["x"], "mean": statistic, "rstd": statistic, "output_mask": [True] * 7}
                call = check_backward(operands_of("layer_norm_bwd_modulated", (), given))
            found = explain(x, (3072,), direction=direction, sample_rows=rows, **asked)
            wanted = choose(call.problem, 4608, H200)
            assert (found.plan, found.sample_rows) == (wanted, call.sample_rows), (direction, rows)
            assert found.problem.shared == call.problem.shared
    assert "for each of 4 samples" in str(explain(x, (3072,), direction="backward", sample_rows=1152, **asked))
    with pytest.raises(ValueError, match="^explain: sample_rows must divide the 4608 rows, got 1000$"):
        explain(x, (3072,), sample_rows=1000, **asked)
    with pytest.raises(ValueError, match="^explain: sample_rows must come with a modulated form, got ''$"):
        explain(x, (3072,), sample_rows=1152, device=H200)


@pytest.mark.parametrize("backward", [False, True])
def test_explain_of_a_norm_with_tables_is_of_its_calls(backward):
    of = Table("layer", "", 700, 1536, backward=backward)
    x = of.given["x"].to("meta")
    asked = {"form": "modulated_by_index", "modulation_dtype": of.modulation, "device": H200}
    found = explain(x, (1536,), direction="backward" if backward else "forward", **asked)
    call = check_backward(of.operands._replace(residual_grad=None)) if backward else of.call
    assert found.plan == choose(call.problem, 2100, H200) and found.problem.by_key == backward
    assert ("launches: 2 behind those that sort the rows by their numbers" in str(found)) == backward


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_explain_and_plan_know_modulations_in_another_dtype_than_x(capsys, direction):
    x, weight, bias = (torch.empty(*shape, 3072, dtype=torch.bfloat16, device="meta") for shape in ((4608,), (), ()))
    asked = {"form": "modulated", "direction": direction, "device": H200, "modulation_dtype": torch.float32}
    found = explain(x, (3072,), weight, bias, sample_rows=1152, **asked)
    assert set(found.problem.shared) == {torch.float32} and found.problem.x_dtype == torch.bfloat16
    told = ["--form", "modulated", "--pass", direction, "--modulation-dtype", "fp32", "--sample-rows", "1152"]
    assert main(["plan", *told, "--cols", "3072", "--rows", "4608", "--device", "H200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == found.as_dict()["plan"]
    with pytest.raises(ValueError, match="^explain: modulation_dtype must come with a modulated form, got 'of_sum'$"):
        explain(x, (3072,), **asked | {"form": "of_sum"})


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_explain_of_the_backward_of_a_wide_sum_is_of_both_gradients(norm):
    given = WideSum(norm, 64, 512).operands
    parameters = (given.weight, given.bias) if norm == "layer" else (given.weight,)
    found = explain(given.x, (512,), *parameters, norm=norm, form="of_sum", grad_out=given.grad_out, device=H200)
    problem = replace(check_backward(given).problem, bias_dtype=found.problem.bias_dtype)
    assert found.problem == replace(problem, wants_db=found.problem.wants_db)
    assert found.problem.rows_out == (torch.bfloat16,) and found.problem.form.combine == "summands"
