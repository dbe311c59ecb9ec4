"""Tests that run in processes apart (tests/apart.py), and what they compile (tests/compiling.py)."""

from __future__ import annotations

import multiprocessing
import os
from types import SimpleNamespace

import apart
import pytest
from compiling import InParallel


def test_a_test_may_follow_that_of_another_folder_which_was_not_to_be_next(tmp_path):
    """xdist's workers take tests from each other."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    ours, theirs = multiprocessing.Pipe()
    options = [f"{tmp_path}/a", f"{tmp_path}/b", f"--rootdir={tmp_path}", "-p", "no:cacheprovider", "-p", "no:terminal"]
    process = multiprocessing.get_context("spawn").Process(target=apart.serve, args=(theirs, options), daemon=True)
    process.start()
    for asked, following in (("a/test_a.py::test_one", "a/test_a.py::test_two"), ("b/test_b.py::test_one", None)):
        ours.send((asked, following))
        assert [each["outcome"] for each in ours.recv()] == ["passed"] * 3
    ours.close()
    process.join(60)


@pytest.mark.parametrize("count, begun", [(1, [1, 2]), (2, [1])])
def test_a_job_that_is_asked_for_begins_no_more_than_there_are_processors_for(monkeypatch, count, begun):
    """Else xdist's workers compile the same."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(count))
    given = []
    pool = SimpleNamespace(submit=lambda function, number: given.append(number) or number)
    jobs = InParallel(pool, print, [(number,) for number in range(4)])
    assert (jobs[1,], jobs[1,]) == (1, 1) and given == begun
