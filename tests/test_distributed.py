"""Many processes: what people combine with norms, over gloo, in one world of two processes and one of four."""

from __future__ import annotations

import functools

import pytest
import sharded_ops
from worlds import run_all

COMBINATIONS = sharded_ops.COMBINATIONS


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return functools.cache(lambda size: run_all(size, COMBINATIONS, tmp_path_factory.mktemp(f"world-of-{size}")))


@pytest.mark.parametrize(
    "size, name",
    [(size, each.name) for size in (2, 4) for each in COMBINATIONS if size in each.sizes],
    ids=lambda value: f"{value} processes" if isinstance(value, int) else value,
)
def test_combination_passes(size, name, failures):
    failure = failures(size)[name]
    assert not failure, failure
