"""python -m fusednorm tune: from times to a table, without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import signal
import weakref
from unittest import mock

import pytest
import torch
from planning import make_problem

from fusednorm.host import launcher
from fusednorm.host.fallback import BuildFailed
from fusednorm.planner import table
from fusednorm.planner.device import H200
from fusednorm.planner.model import Coefficients, predict_us
from fusednorm.planner.plan import text_of
from fusednorm.tools import tune, warm

TASK = tune.Task("rms", "forward", 4096, "bf16")
PLANS = tune.plans_of(TASK.wanted.problem, H200)


COUNTS = list(tune.row_counts(TASK._replace(cols=1024), H200))


def cell(rows_per_sm: int, fastest: int) -> tune.Cell:
    """All candidates take 10 us, and one takes 5."""
    times = {text_of(plan): 5.0 if at == fastest else 10.0 for at, plan in enumerate(PLANS)}
    return tune.Cell(TASK, 132 * rows_per_sm, times, text_of(PLANS[0]))


def test_a_table_changes_plans_between_the_row_counts_at_which_their_times_cross():
    cells = [cell(1, 0), cell(4, 0), cell(16, 1), cell(64, 1)]
    ((key, found),) = tune.widths_of(cells, H200, table.coefficients(H200)).items()
    assert key == table.Key.of(make_problem("rms", 4096, direction="forward"))
    (most, first), last = found[4096]
    assert 4 < most < 16 and (first, last) == (text_of(PLANS[0]), (math.inf, text_of(PLANS[1])))


@pytest.mark.parametrize(("cols", "most"), [(64, 2**20), (256, 2**18), (1024, 65536), (4096, 32768), (16384, 16384)])
def test_narrow_rows_are_surveyed_up_to_as_many_as_heads_and_groups_of_columns_have(cols, most):
    found = list(tune.row_counts(TASK._replace(cols=cols), H200))
    assert found == [128 << n for n in range(len(found))] and found[-1] == most


def ranges_of(cells) -> table.Ranges:
    (found,) = tune.widths_of(cells, H200, table.coefficients(H200)).values()
    return found[4096]


def times(*fast: float) -> dict[str, float]:
    """Of all candidates: these of the first ones, and a long time of the others."""
    return dict.fromkeys(map(text_of, PLANS), 1000.0) | dict(zip(map(text_of, PLANS), fast, strict=False))


def test_a_plan_that_is_much_slower_for_more_rows_is_left_soon_after_the_rows_at_which_it_is_fastest():
    """A former bug: half way between two row counts, the plan for fewer rows was kept up to its 9% loss."""
    found = ranges_of([tune.Cell(TASK, 2112, times(16.5, 16.9), ""), tune.Cell(TASK, 8184, times(58.0, 53.0), "")])
    assert next(text for most, text in found if 4096 <= 132 * most) == text_of(PLANS[1])


@pytest.mark.parametrize(("gain", "changes"), [(0.005, 0), (0.3, 7)])
def test_a_change_of_plan_must_gain_more_than_a_build_costs(gain, changes):
    costs = [(128 << n, {PLANS[n % 2]: 1.0, PLANS[1 - n % 2]: 1 + gain}) for n in range(8)]
    assert len(tune._few_plans(costs, 132)) == 1 + changes


@pytest.mark.parametrize(("own_us", "wanted"), [(5.4, 0), (9.0, 1)])
def test_neighbouring_widths_decide_where_a_width_has_no_clear_winner_and_nowhere_else(own_us, wanted):
    tasks = [TASK._replace(cols=cols) for cols in (3968, 4032, 4096, 4160, 4224)]
    candidates = {task: tune.plans_of(task.wanted.problem, H200) for task in tasks}
    plans = {task: {tune.family_of(plan): text_of(plan) for plan in each} for task, each in candidates.items()}
    first, second, *_ = (family for family in plans[TASK] if all(family in each for each in plans.values()))
    cells = []
    for task, rows in itertools.product(tasks, (528, 1024)):
        here = (own_us, 5.0) if task == TASK else (5.0, 6.0)
        times = {plans[task][first]: here[0], plans[task][second]: here[1]}
        cells.append(tune.Cell(task, rows, times, ""))
    assert ranges_of(cells) == ((math.inf, plans[TASK][(first, second)[wanted]]),)


def test_one_row_count_makes_no_width_and_no_key():
    few, between = tune.Cell(TASK, 1024, times(6.0, 5.0), ""), tune.Cell(TASK, 4096, times(5.0, 9.0), "")
    many = cell(128, 1)
    assert [text for _, text in ranges_of([few, between, many])] == [text_of(PLANS[at]) for at in (1, 0, 1)]
    assert not tune.widths_of([between], H200, table.coefficients(H200))


def test_a_later_cell_of_few_plans_leaves_the_others_as_they_were_beside_it():
    """The second measurement ran on a machine on which all takes half as long."""
    first = [tune.Cell(TASK, rows, times(6.0, 5.0, 4.8), "") for rows in (1024, 4096)]
    again = [tune.Cell(TASK, rows, {text_of(PLANS[0]): 3.0, text_of(PLANS[1]): 2.5}, "") for rows in (1024, 4096)]
    assert ranges_of([*first, *again]) == ((math.inf, text_of(PLANS[2])),)
    assert ranges_of([*first, tune.Cell(TASK, 4096, times(6.0, 5.0, 9.0), "")])[-1] == (math.inf, text_of(PLANS[1]))


def test_row_counts_without_a_plan_in_common_have_a_line_all_the_same():
    cells = [tune.Cell(TASK, rows, {text_of(plan): 5.0}, "") for rows, plan in ((1024, PLANS[0]), (4096, PLANS[1]))]
    (few, first), (most, last) = ranges_of(cells)
    assert (first, last, most) == (text_of(PLANS[0]), text_of(PLANS[1]), math.inf) and 1024 < few * 132 < 4096


def test_of_several_runs_the_plan_of_the_least_mean_time_is_taken_in_any_order():
    """A former bug: of three runs the last had half of the weight."""
    us = ((8.5, 5.0), (4.0, 5.0), (2.0, 2.5))
    runs = [[tune.Cell(TASK, rows, times(*each), "") for rows in (1024, 4096)] for each in us]
    for order in itertools.permutations(runs):
        assert ranges_of([*itertools.chain(*order)]) == ((math.inf, text_of(PLANS[1])),)


def test_cells_that_share_a_line_count_as_much_as_runs_of_one():
    """A former bug: the last one counted alone."""
    cells = [
        tune.Cell(TASK._replace(dtype=dtype), rows, times(*us), "")
        for dtype, us in (("bf16", (8.5, 5.0)), ("fp16", (4.0, 5.0)))
        for rows in (1024, 4096)
    ]
    assert ranges_of(cells) == ranges_of(cells[::-1]) == ((math.inf, text_of(PLANS[1])),)


def test_a_record_is_read_back_as_the_same_cell():
    wide = cell(4, 2)._replace(task=TASK._replace(weights="fp32"), refused=("MultiWave(1,16384,1,4,1,255,0)",))
    modulated = cell(4, 2)._replace(task=TASK._replace(form="_modulated", modulations="fp32"))
    for each in (cell(4, 2), wide, modulated):
        assert tune.Cell.of(each.record()) == each


def cells_by(coefficients: Coefficients, levels=(1.0,)) -> list[tune.Cell]:
    """Cells of three widths whose times are what coefficients say, each times a level."""
    cells, level = [], itertools.cycle(levels)
    for cols, rows in itertools.product((1024, 4096, 8192), (132, 2112, 8184)):
        task, factor = TASK._replace(cols=cols), next(level)
        plans = tune.plans_of(task.wanted.problem, H200)
        us = {text_of(p): factor * predict_us(p, task.wanted.problem, rows, H200, coefficients) for p in plans}
        cells.append(tune.Cell(task, rows, us, ""))
    return cells


def test_coefficients_are_fitted_to_the_times():
    first = table.coefficients(H200)
    slower = Coefficients(*first)._replace(launch_us=2 * first.launch_us)
    assert tune.fit(cells_by(slower), H200, first).launch_us == pytest.approx(slower.launch_us, rel=0.05)


def test_coefficients_tell_the_plans_of_a_cell_apart_where_cells_as_a_whole_are_not_predicted():
    first = table.coefficients(H200)
    slower = Coefficients(*first)._replace(ring_us=0.12)
    found = tune.fit(cells_by(slower, levels=(1.2, 1.0, 0.8, 1.1)), H200, first)
    for name in ("ring_us", "meeting_us"):
        assert getattr(found, name) == pytest.approx(getattr(slower, name), rel=0.1)


def test_no_cell_is_begun_after_the_time_and_the_next_run_goes_on(monkeypatch, tmp_path):
    seconds = iter(range(0, 10_000, 20))
    monkeypatch.setattr(tune.table, "user_file", lambda gpu: tmp_path / "gpu.jsonl")
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune.gpus, "spec_of", lambda device: H200)
    monkeypatch.setattr(tune, "start_process", lambda *_, **streams: Builder([], []))
    monkeypatch.setattr(tune, "time_plans", lambda task, rows, plans, device: {text_of(plan): 1.0 for plan in plans})
    options = argparse.Namespace(cols=[1024], dtype=["bf16"], minutes=1, out=None)
    assert tune.run(options, lambda: next(seconds)) == 0
    begun = len((tmp_path / "gpu.cells").read_text().splitlines())
    assert 0 < begun < 4 * len(COUNTS)
    with (tmp_path / "gpu.cells").open("a") as killed:
        killed.write('{"norm": "rms", "dir')
    options.minutes = 100
    assert tune.run(options, lambda: next(seconds)) == 0
    assert len((tmp_path / "gpu.cells").read_text().splitlines()) == 4 * len(COUNTS) + 1
    assert table.read(tmp_path / "gpu.jsonl").gpu == H200.name
    (tmp_path / "gpu.jsonl").unlink()
    options.cols, times = [2048], iter([{text_of(PLANS[0]): 1.0}])
    monkeypatch.setattr(tune, "time_plans", lambda *_: next(times, None) or signal.raise_signal(signal.SIGINT))
    assert tune.run(options, lambda: next(seconds)) == 0
    assert len((tmp_path / "gpu.cells").read_text().splitlines()) == 4 * len(COUNTS) + 2
    assert table.read(tmp_path / "gpu.jsonl").gpu == H200.name


class Builder:
    """A process that builds; it says which task it has built when that is asked for."""

    def __init__(self, jobs: list, said: list[str]):
        self.built, self.said, self.stdout = iter(jobs), said, self

    def readline(self) -> bytes:
        self.said += [f"wait {wanted.cols}" for wanted, _ in itertools.islice(self.built, 1)]
        return b"\n"

    def kill(self) -> None:
        self.said.append("kill")


def test_a_cell_is_timed_once_the_process_of_its_task_has_built_it_and_none_builds_when_the_time_ends(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(tune.os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(tune, "start_process", lambda function, jobs, *_, **streams: Builder(jobs, said))
    monkeypatch.setattr(tune, "time_plans", lambda task, rows, plans, device: said.append(f"time {task.cols}") or {})
    tasks = [TASK._replace(cols=cols) for cols in (512, 1024, 2048)]
    cells = list(tune.measure(tasks, {}, H200, lambda: "time 1024" in said))
    assert list(dict.fromkeys(said)) == ["wait 512", "time 512", "wait 1024", "time 1024", "kill"]
    known = {(cell.task, cell.rows): cell for cell in cells}
    assert {cell.task.cols for cell in cells[: len(COUNTS)]} == {512} and cells[0].refused
    left = [cell for cell in tune.measure(tasks[:1], known, H200, lambda: False)]
    assert left == [], "plans that were refused are not tried again"


def test_the_planners_own_plan_is_built_ahead_even_if_it_is_no_candidate(monkeypatch):
    jobs: list[tuple] = []
    own = tune.plans_of(TASK._replace(direction="backward").wanted.problem, H200)[0]
    started = lambda _, given, *__, **streams: jobs.extend(given) or Builder(given, [])  # noqa: E731
    monkeypatch.setattr(tune, "start_process", started)
    monkeypatch.setattr(tune, "time_plans", lambda task, rows, plans, device: {})
    monkeypatch.setattr(tune.choice, "choose", lambda *_: own)
    assert own not in PLANS and len(list(tune.measure([TASK], {}, H200, lambda: False))) > 1
    assert jobs == [(TASK.wanted, (*PLANS, own))]


class Loaded:
    """A loaded program, whose launches make outputs."""

    made: list[weakref.ref] = []

    def launch(self, addresses: list[int]) -> tuple[torch.Tensor, ...]:
        assert not any(ref() is not None for ref in self.made), "no plan's outputs are there when others' are made"
        outputs = (torch.empty(4),)
        self.made.extend(map(weakref.ref, outputs))
        return outputs


def test_plans_that_run_are_timed_and_none_keeps_its_outputs(monkeypatch):
    by_triton, broken, *others = PLANS

    def run(planned, tensors, shape, rows):
        if planned is broken:
            raise BuildFailed("no")
        return None, None if planned is by_triton else Loaded()

    monkeypatch.setattr(launcher, "run", run)
    monkeypatch.setattr(tune, "program", lambda wanted, plan, device: plan)
    tensors = [torch.empty(4, 4096), None]
    calls = tune._loaded(TASK, 4, PLANS, H200, tensors)
    assert list(calls) == [text_of(plan) for plan in others]
    assert all(call() for call in calls.values()) and len(Loaded.made) == 2 * len(others)


class Clock:
    """In place of torch.cuda: only calls take time, each the longer the more often it was made."""

    def __init__(self):
        self.us, self.said, self.is_past = 0.0, [], itertools.repeat(False)

    def call(self, name: str, *took_us: float):
        each = iter(took_us)
        return lambda: self.said.append(name) or setattr(self, "us", self.us + next(each, took_us[-1]))

    def event(self, enable_timing: bool):
        event = mock.MagicMock()
        event.record = lambda: setattr(event, "at", self.us)
        event.elapsed_time = lambda end: 1e-3 * (end.at - event.at)
        event.query = lambda: next(self.is_past)
        return event


@pytest.mark.parametrize(("us", "rounds"), [(5.0, tune.ROUNDS_IF_SHORT), (500.0, tune.ROUNDS)])
def test_calls_take_turns_behind_a_flush_and_their_first_time_does_not_count(monkeypatch, us, rounds):
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = {"a": clock.call("a", 9 * us, us), "b": clock.call("b", us, 2 * us)}
    assert tune._in_turn(calls, clock.call("flush", 70.0)) == {"a": us, "b": 2 * us}
    names = [name for name in clock.said if name != "flush"]
    assert clock.said[::2] == ["flush"] * 2 * (1 + rounds) and "".join(names[:6]) == "abbaab"
    assert tune._in_turn({}, None) == {}


def test_a_call_for_which_the_gpu_waited_is_made_again(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock.is_past = itertools.chain([False], itertools.cycle([True, False]))  # all but the first round's
    a = clock.call("a", 5.0, *[90.0, 5.0] * tune.ROUNDS_IF_SHORT)
    assert tune._in_turn({"a": a}, clock.call("flush", 70.0)) == {"a": 5.0}
    clock.is_past = itertools.repeat(True)
    assert tune._in_turn({"a": a}, clock.call("flush", 70.0)), "it ends where the host is always late"


def test_a_process_says_each_task_that_it_has_built_and_goes_on_after_a_kernel_that_does_not_compile(monkeypatch):
    built = []

    def compile_for(launch, arch):
        built.append(launch.kernel.__name__)
        if len(built) == 1:
            raise RuntimeError("no")

    monkeypatch.setattr("fusednorm.tools.compilation.compile_for", compile_for)
    jobs = [(task.wanted, tune.plans_of(task.wanted.problem, H200)[:2]) for task in (TASK, TASK._replace(cols=1024))]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        warm.compile_in_order(jobs, H200)
    assert out.getvalue() == "\n\n" and len(built) > 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so the tool would run")
def test_without_a_gpu_it_says_so(capsys):
    assert tune.run(argparse.Namespace(minutes=1)) == 2
    assert capsys.readouterr().err == "tune: needs a CUDA GPU, got none\n"


def test_cells_keep_the_times_of_plans_of_this_release_alone():
    plans = {text_of(tune.plans_of(TASK.wanted.problem, H200)[0]): 1.0, "WarpSpecialized(1,4096,1,4,2,4)": 0.5}
    record = tune.Cell(TASK, 132, plans, "").record()
    assert tune.Cell.of(record).times == {next(iter(plans)): 1.0}
