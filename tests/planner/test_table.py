"""Tables of plans: which one is used, what answers for a width that it lacks, and files that are no tables."""

from __future__ import annotations

import json
import math
import pwd
from dataclasses import replace

import pytest
import torch
from planning import make_gated, make_modulated, make_problem, make_sum

from fusednorm.planner import choice, table
from fusednorm.planner.candidates import cut
from fusednorm.planner.device import B200, H100, H200
from fusednorm.planner.plan import from_text, text_of
from fusednorm.tools import doctor, tune
from fusednorm.tools.explanation import explain_problem

ALONE, HELD = "MultiWave(1,4096,1,8,1,255,0)", "Pipelined(1,1024,3,3,4,2,255,0,1,4,0,0)"
MY_GPU = replace(H200, name="NVIDIA H200 of mine")


@pytest.fixture
def file(monkeypatch, tmp_path):
    monkeypatch.setattr(table, "user_file", lambda gpu: tmp_path / "table.jsonl")
    for cached in (table.of_user, choice.choices, choice.best_plan):
        cached.cache_clear()
    yield tmp_path / "table.jsonl"
    for cached in (table.of_user, choice.choices, choice.best_plan):
        cached.cache_clear()


def head(gpu=MY_GPU.name) -> dict:
    coefficients = table.shipped()[0].coefficients._asdict()
    return {"gpu": gpu, "arch": 90, "triton": "3.6.0", "date": "2026-11-26", "coefficients": coefficients}


def written(file, cols=4096, day="", **changes):
    key = table.Key.of(make_problem(cols=cols))
    ranges = ((4.0, ALONE), (math.inf, "Pipelined(1,4096,1,3,4,2,255,0,1,1,0,0)"))
    tune.write(file, head(**changes), {key: {cols: ranges}}, {(key, cols): day})


def test_the_users_table_comes_before_the_shipped_one_up_to_its_rows_per_sm(file):
    written(file)
    problem = make_problem(cols=4096)
    assert choice.choose(problem, 4 * 132, MY_GPU) == from_text(ALONE)
    assert choice.choose(problem, 4 * 132 + 1, MY_GPU).variant == "pipelined"
    assert choice.decide(problem, MY_GPU).source.startswith(f"the fastest of those measured on {MY_GPU.name} at 4096")


def test_the_date_that_is_told_is_that_of_the_line(file):
    written(file, day="2026-11-29")
    assert choice.decide(make_problem(cols=4096), MY_GPU).source.endswith(" at 4096 columns (2026-11-29)")
    assert "mine, 2026-11-29, Triton" in doctor.describe_table(MY_GPU.name, MY_GPU).text
    *others, line = file.read_text().splitlines()
    file.write_text("\n".join([*others, line, line.replace("4096", "5120", 1).replace(',"2026-11-29"]', "]")]))
    table.of_user.cache_clear()
    assert "mine, 2026-11-26 to 2026-11-29, Triton" in doctor.describe_table(MY_GPU.name, MY_GPU).text


def test_a_width_that_is_lacking_gets_the_family_of_a_near_one_cut_for_itself(file):
    written(file)
    plan = choice.choose(make_problem(cols=4032), 100, MY_GPU)
    assert plan.variant == "multi_wave" and (plan.num_warps, plan.ctas_per_sm) == (8, 1)
    far = make_problem(cols=1024)
    assert choice.choose(far, 100, MY_GPU) == choice.choose(far, 100, H200), "the shipped table answers"


def test_where_a_near_widths_plan_cannot_be_cut_that_of_the_next_near_width_is(file):
    """A former miss: 2304 columns went by what the model says, 1.5 times as long as the plan of 3072 cut for them."""
    task = tune.Task("layer", "backward", 2304, "bf16", "_of_sum_modulated")
    problem, held = task.wanted.problem, "MultiWave(1,1024,3,8,2,128,0)"
    lines = {2048: ((math.inf, "MultiWave(1,2048,1,4,4,128,0)"),), 3072: ((math.inf, held),)}
    assert cut(from_text(lines[2048][0][1]), problem, MY_GPU) is None
    tune.write(file, head(), {table.Key.of(problem): lines}, {})
    assert choice.choose(problem, 32768, MY_GPU) == from_text(held)
    assert " at 3072 columns" in choice.decide(problem, MY_GPU).source, "the width that was measured is told"


def test_a_width_whose_plan_cuts_a_row_alike_answers_before_one_that_is_a_little_nearer(file):
    problem, few = make_problem(cols=5120), "Pipelined(1,512,5,3,4,3,168,0,2,8,0,0)"
    many = "Pipelined(1,512,11,2,4,2,255,1,1,16,0,0)"
    tune.write(file, head(), {table.Key.of(problem): {5632: ((math.inf, many),), 4608: ((math.inf, few),)}}, {})
    assert cut(from_text(many), problem, MY_GPU).num_chunks == 5
    assert choice.choose(problem, 16384, MY_GPU) == from_text(few)


def test_a_line_of_two_forms_keeps_its_ring_where_only_one_has_room_for_the_weight_in_registers(file):
    before, after = (make_gated("layer", 4096, direction="forward", after=each) for each in (False, True))
    assert table.Key.of(before) == table.Key.of(after)
    ring = from_text("Pipelined(1,4096,1,2,4,4,128,0,1,1,1,0,1)")
    tune.write(file, head(), {table.Key.of(before): {4096: ((math.inf, text_of(ring)),)}}, {})
    assert choice.choose(before, 16384, MY_GPU) == ring
    assert choice.choose(after, 16384, MY_GPU) == replace(ring, weight_in_smem=True)


def test_lines_of_parameters_in_float32_are_for_these_alone_and_without_them_the_others_answer(file):
    plain, wide = (make_problem(cols=4096, weight=dtype) for dtype in ("bf16", "fp32"))
    before = choice.choose(wide, 16384, MY_GPU)
    key = table.Key.of(wide)
    assert key == table.Key.of(plain)._replace(parameters=4)
    tune.write(file, head(), {key: {4096: ((math.inf, ALONE),)}}, {})
    choice.choices.cache_clear()
    table.of_user.cache_clear()
    assert choice.choose(wide, 16384, MY_GPU) == from_text(ALONE) != before
    assert choice.choose(plain, 16384, MY_GPU) == choice.choose(plain, 16384, H200)


def test_lines_of_modulations_in_float32_are_for_forwards_and_backwards_that_hold_them_alone(file):
    for direction in ("forward", "backward"):
        narrow, wide = (make_modulated(cols=3072, modulation=each, direction=direction) for each in ("bf16", "fp32"))
        key = table.Key.of(wide)
        assert key == table.Key.of(narrow)._replace(parameters=4)
        assert table.Key.of(make_modulated(cols=3072, dtype="fp32", direction=direction)).parameters == 0
        tune.write(file, head(), {key: {3072: ((math.inf, HELD),)}}, {})
        choice.choices.cache_clear()
        table.of_user.cache_clear()
        assert choice.choose(wide, 16384, MY_GPU) == from_text(HELD)
        assert choice.choose(narrow, 16384, MY_GPU) == choice.choose(narrow, 16384, H200)


def test_lines_of_streams_in_float32_are_for_these_alone_and_come_before_those_of_parameters(file):
    narrow, wide = (make_sum(cols=4096, residual=each) for each in ("bf16", "fp32"))
    key, streamed = table.Key.of(wide), "MultiWave(2,1024,4,8,2,128,1)"
    before = choice.choose(wide, 16384, MY_GPU)
    assert key == table.Key.of(narrow)._replace(rows=4) and table.Key.of(make_sum(dtype="fp32")).rows == 0
    far = (choice.decide(make_sum(cols=512, residual=each), MY_GPU).source for each in ("bf16", "fp32"))
    assert len({*far}) == 1, "lines of other streams, where a table has no others"
    of_parameters = {4096: ((math.inf, ALONE),)}
    lines = {key._replace(rows=0, parameters=4): of_parameters, key: {4096: ((math.inf, streamed),)}}
    tune.write(file, head(), lines, {})
    choice.choices.cache_clear()
    table.of_user.cache_clear()
    assert choice.choose(wide, 16384, MY_GPU) == from_text(streamed) != before
    assert choice.choose(replace(wide, weight_dtype=torch.float32), 16384, MY_GPU).rows_per_tile == 2, "cut for itself"
    assert choice.choose(narrow, 16384, MY_GPU) == choice.choose(narrow, 16384, H200)


def test_lines_of_parameters_in_float32_answer_for_other_gpus_alike_and_for_near_widths_alone(monkeypatch):
    def left(each: table.Table) -> table.Table:
        known = {key: at for key, at in each.lines.items() if "H100" in each.gpu or not key.parameters}
        return replace(each, lines=known)

    of_h100_alone = tuple(map(left, table.shipped()))
    monkeypatch.setattr(table, "shipped", lambda: of_h100_alone)

    def answers(cols, device, **more):
        problem = make_problem(cols=cols, direction="forward", **more)
        return choice.decide(problem, replace(device, name=f"NVIDIA {device.name}"))

    assert "H100" in answers(4096, H200, weight="fp32").source and "H200" in answers(4096, H200).source
    assert answers(4096, H200, weight="fp32") != answers(4096, H200)
    for far in (65536, 131072):
        assert "H100" not in answers(far, H200, weight="fp32").source


@pytest.mark.parametrize("text", ["", "no table", '{"format": 99}', '{"format": 2, "gpu": "A"}', "[1]"])
def test_a_file_that_is_no_table_is_told_in_one_sentence_and_not_used(file, text):
    file.write_text(text)
    problem = make_problem(cols=4096)
    assert choice.choose(problem, 100, MY_GPU) == choice.choose(problem, 100, H200)
    assert str(file) in table.of_user(MY_GPU.name) and "\n" not in table.of_user(MY_GPU.name)
    assert_is_told(table.of_user(MY_GPU.name))


@pytest.mark.parametrize("home", ["/" + "x" * 300, None])  # the first is an error, as that of another user
def test_without_a_home_that_can_be_read_there_is_no_table(home, monkeypatch):
    monkeypatch.setenv("HOME", home) if home else monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a container may give a process a user that it does not know
    table.of_user.cache_clear()
    assert "a-gpu.jsonl is no table of plans: " in table.of_user("a GPU")


def assert_is_told(sentence):
    explained = str(explain_problem(make_problem(cols=4096), 100, MY_GPU))
    assert f"your table is not used: {sentence}" in explained
    assert sentence in doctor.describe_table(MY_GPU.name, MY_GPU).text


# A warp-specialized plan whose fields had another order, plans that there are not, and lines that are none.
OF_ANOTHER_RELEASE = [
    '[4096,[[4.0,"MultiWave(1,4096,1,8,1,255,0)"],[null,"WarpSpecialized(1,4096,1,4,2,4,1,240,0,1,0)"]]]',
    '[4096,[[null,"Diagonal(1,2,3)"]]]',
    '[4096,[[null,"Pipelined(1,4096,x)"]]]',
    '[4096,[[null,7]]]',
    '[4096,[[4.0,"MultiWave(1,4096,1,8,1,255,0)"]]]',
    "[4096,]",
    "[4096,[]]",
]


@pytest.mark.parametrize(("release", "status"), [((3, 6), "ok"), ((3, 9), "note")])
def test_a_table_that_was_measured_with_another_triton_is_used_and_told(file, release, status):
    written(file)
    spec, problem = replace(MY_GPU, triton=release), make_problem(cols=4096)
    found = doctor.describe_table(MY_GPU.name, spec)
    assert choice.choose(problem, 100, spec) == from_text(ALONE)
    told = "Triton 3.9 may make another plan the fastest; python -m fusednorm tune" in found.text
    assert (found.status, told) == (status, status == "note")


@pytest.mark.parametrize("line", OF_ANOTHER_RELEASE)
def test_lines_of_another_release_are_skipped_and_counted(file, line):
    written(file)
    *kept, _ = file.read_text().splitlines()
    file.write_text("\n".join([*kept, line]))
    problem = make_problem(cols=4096)
    assert choice.choose(problem, 100, MY_GPU) == choice.choose(problem, 100, H200)
    assert table.of_user(MY_GPU.name).skipped == 1
    text = doctor.describe_table(MY_GPU.name, MY_GPU).text
    assert "your table" in text and "of its lines are of another release and are skipped" in text


@pytest.mark.parametrize(
    ("norm", "form", "wanted", "others"),
    [
        ("layer", "_of_sum_modulated", (3, 1, 2, 0), [(2, 1, 2, 1)]),
        ("rms", "_of_sum_modulated", (3, 1, 1, 0), [(2, 1, 2, 1), (3, 2, 2, 1)]),
        ("layer", "_of_sum", (2, 1, 2, 0), [(3, 2, 2, 0)]),
        ("layer", "_modulated", (2, 1, 2, 0), [(3, 1, 2, 0), (2, 1, 1, 0)]),
    ],
)
def test_lines_of_as_many_large_tensors_answer_in_place_of_those_that_lack(norm, form, wanted, others):
    problem = tune.Task(norm, "backward", 3072, "bf16", form).wanted.problem
    key = table.Key.of(problem)
    for order in ([wanted, *others], [*others, wanted]):
        known = {key._replace(traffic=each): {3072: f'[3072, [[null, "{each == wanted}"]]]'} for each in order}
        ((*found, _),) = replace(table.shipped()[0], lines=known).lookup(problem)
        assert found == [3072, ((math.inf, "True"),)]


@pytest.mark.parametrize("spec", [H100, H200], ids=lambda spec: spec.name)
def test_lines_of_forwards_that_hold_no_wide_rows_do_not_answer_for_one_that_does(spec):
    """Its CTAs would live shortly, and load the wide rows anew for every tile: twice the time (bench/NOTES.md)."""
    for cols, source in ((768, "model"), (3072, "measured")):
        task = tune.Task("rms", "forward", cols, "bf16", "_of_gated_sum_modulated", modulations="fp32")
        problem = task.wanted.problem
        chosen = choice.decide(problem, spec)
        assert problem.quantities["holds_wide"] and source in chosen.source
        assert not any(plan.variant == "pipelined" and plan.short_lived for _, plan in chosen.ranges)


def test_a_table_of_another_gpu_is_not_used(file):
    written(file, gpu="NVIDIA H100")
    assert table.of_user(MY_GPU.name) == f"{file} was measured on NVIDIA H100"
    assert_is_told(table.of_user(MY_GPU.name))


@pytest.mark.parametrize("spec", [H100, H200], ids=lambda spec: spec.name)
def test_the_shipped_table_of_a_gpu_is_its_own_and_is_told(spec):
    assert next(table.of_device(spec)).gpu.startswith(f"NVIDIA {spec.name}")
    assert next(table.of_device(B200), None) is None


def test_plans_of_shipped_tables_are_within_the_budgets_of_their_widths():
    kinds = {(task.direction, task[tune.Task._fields.index("dtype") :]) for task in tune.dense()}
    for shipped in table.shipped():
        for key in shipped.lines:
            for cols in list(shipped.lines[key])[::7]:
                tasks = (tune.Task(key.norm, way, cols, *kind) for way, kind in kinds if way == key.direction)
                problem = next(p for p in (task.wanted.problem for task in tasks) if table.Key.of(p) == key)
                ((found, ranges, _),) = shipped.lookup(problem)
                assert found == cols
                assert ranges[-1][0] == math.inf and all(text_of(from_text(text)) == text for _, text in ranges)
                assert len(choice.choices(problem, replace(H200, name=shipped.gpu))) <= len(ranges) + 1


def test_a_text_may_have_all_values_of_a_plan_that_has_no_rows_in_its_ring():
    assert from_text(HELD) == from_text(HELD.replace(")", ",0)")) != from_text(HELD.replace(")", ",1)"))
    assert text_of(from_text(HELD.replace(")", ",0,1)"))) == HELD.replace(")", ",0,1)")
    with pytest.raises(ValueError, match="is no plan"):
        from_text(HELD.replace(")", ",0,0,0)"))


def test_a_line_is_json_and_a_table_reads_what_it_wrote(file):
    written(file)
    assert all(json.loads(line) for line in file.read_text().splitlines())
    assert table.read(file).gpu == MY_GPU.name
