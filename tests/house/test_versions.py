"""The tool that compiles with every Triton: the list of its jobs, and how it continues after it was stopped."""

from __future__ import annotations

import json

import pytest
import versions
from column_sums import Sums
from head_norms import HeadCase
from planning import EVERY_ARCHITECTURE

from fusednorm.host import triton_compat


def options(*arguments: str, folder=None):
    return versions.parse([*arguments, *(["--folder", str(folder)] if folder else [])])


def test_the_list_has_both_directions_residuals_parts_of_the_gradients_sums_and_heads():
    problems = list(versions.some_problems())
    norms = [each for each in problems if not isinstance(each, (Sums, HeadCase))]
    assert len(problems) == len(set(map(str, problems)))
    assert f"{len(problems)} problems compile" in (versions.ROOT / "README.md").read_text()
    assert all(sum(isinstance(each, kind) for each in problems) >= 10 for kind in (Sums, HeadCase))
    assert {each.direction for each in norms} == {"forward", "backward"}
    assert any(each.residual_dtype for each in norms) and any(each.wants_dw and not each.wants_dx for each in norms)
    assert len({(each.x_dtype, each.weight_dtype, each.grad_dtype) for each in norms}) >= 8


def test_every_supported_triton_and_architecture_is_tried():
    given = options()
    assert {tuple(map(int, release.split(".")[:2])) for release in given.releases} == set(triton_compat.RELEASES)
    assert {job.arch for job in versions.jobs_of(given)} == set(EVERY_ARCHITECTURE) >= {80, 86, 89, 90, 100, 103, 120}


def test_parts_are_all_of_it_and_have_nothing_in_common():
    parts = [versions.jobs_of(options("--part", f"{part}/7", "--arch", "90")) for part in range(1, 8)]
    whole = versions.jobs_of(options("--arch", "90"))
    assert sorted(map(str, sum(parts, []))) == sorted(map(str, whole))


@pytest.mark.parametrize("part", ["0/3", "4/3"])
def test_a_part_beyond_the_last_is_refused(part, capsys):
    with pytest.raises(SystemExit):
        options("--part", part)
    assert "a part must be as 3/20" in capsys.readouterr().err


def test_what_was_found_is_found_again_and_counted(tmp_path):
    given = options("--arch", "90", "--releases", "3.9.0", "--small", folder=tmp_path)
    first, second, *_ = versions.jobs_of(given)
    results = versions.Results(tmp_path / "results.jsonl")
    results.add("3.9.0", first, [])
    results.add("3.9.0", second, ["spills 8 bytes a thread"])
    again = versions.Results(tmp_path / "results.jsonl")
    assert again.found == results.found and len(again.found) == 2
    text, failures = versions.table(again, given)
    assert "| 3.9.0 | 1 of 2 |" in text and failures == 1


def test_a_release_of_which_all_is_known_is_not_started(tmp_path, monkeypatch):
    given = options("--arch", "80", "--small", folder=tmp_path)
    jobs, results = versions.jobs_of(given), versions.Results(tmp_path / "results.jsonl")
    for job in jobs:
        results.add("3.6.0", job, [])
    monkeypatch.setattr(versions, "environment", lambda *_: pytest.fail("it was started"))
    counted = []
    progress = type("Progress", (), {"update": lambda self, n=1: counted.append(n)})()
    versions.run_release("3.6.0", given, jobs, results, progress)
    assert counted == [len(jobs)]


def test_a_kernel_that_does_not_compile_is_an_answer(monkeypatch):
    def complaints(job):
        raise ValueError("Layout has 1 CTAs per CGA,\nbut the context requires 2")

    monkeypatch.setattr(versions.Job, "complaints", complaints)
    (said,) = versions.answer(versions.Job(90, next(versions.some_problems())))
    assert said == "does not compile: ValueError: but the context requires 2"
    assert json.loads(json.dumps([said])) == [said]
