"""Runs the combinations of sharded_ops.py, sharded_models.py and long_runs.py in worlds of two and of four processes,
over gloo.

    PYTHONPATH=.:tests torchrun --nproc-per-node 2 tests/face/test_distributed.py

runs those of the first two on two GPUs over NCCL, or on CPUs over gloo with TRITON_INTERPRET=1. The long runs have a
command of their own.

Only the run on GPUs tests our kernels beside NCCL's on streams, attention in context_parallel_shards, and offload from
GPU to CPU memory. No run tests what torch 2.13 cannot do with stock norms: see compiled_blocks in sharded_models.py.
"""

from __future__ import annotations

import functools
import os
import sys

import long_runs
import pytest
import sharded_models
import sharded_ops
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from worlds import Combination, World, ops_run, run_all, run_by_torchrun

import fusednorm
from fusednorm import sharding

SHORT = sharded_ops.COMBINATIONS + sharded_models.COMBINATIONS
COMBINATIONS = SHORT + long_runs.COMBINATIONS


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


def abort(world: World) -> None:
    os.abort()


def test_a_process_that_a_signal_ends_says_where(tmp_path):
    failures = run_all(1, [Combination(abort, (1,))], tmp_path)
    assert "rank 0: did not end" in failures["abort"] and "in abort" in failures["abort"]


# What a process does first with DTensors: each has one of its own, in which no rule is registered.


def rows_of(world: World) -> DTensor:
    assert not sharding.missing and not has_rule(), "another call has registered rules"
    return distribute_tensor(torch.randn(4, 8), world.mesh(), [Shard(0)])


def has_rule() -> bool:
    tables = vars(DTensor._op_dispatcher.sharding_propagator).values()
    return any(torch.ops.fusednorm.rms_norm_fwd.default in each for each in tables if isinstance(each, dict))


def column_sum_in_inference_mode(world: World) -> None:
    x = rows_of(world)
    with torch.inference_mode(), ops_run(world):
        assert type(fusednorm.column_sum([x])[0]) is DTensor


def a_norm_in_inference_mode(world: World) -> None:
    x = rows_of(world)
    with torch.inference_mode(), ops_run(world):
        assert type(fusednorm.functional.rms_norm(x, (8,))) is DTensor
    assert has_rule()


def without_a_way_to_register_rules(world: World) -> None:
    x = rows_of(world)
    for name in ("_op_schema", "_ops.single_dim_strategy", "experimental"):
        sys.modules[f"torch.distributed.tensor.{name}"] = None  # importing it fails
    torch.ops.fusednorm.rms_norm_fwd(x.to_local(), (8,))
    fusednorm.column_sum([x.to_local()])
    without = [each.split(",")[0] for each in sharding.missing]
    assert without == ["layer_norm_fwd", next(iter(sharding.RULES))], sharding.missing
    with pytest.raises(RuntimeError, match="rms_norm_fwd"):
        torch.ops.fusednorm.rms_norm_fwd(x, (8,))


@pytest.mark.parametrize(
    "first",
    [column_sum_in_inference_mode, a_norm_in_inference_mode, without_a_way_to_register_rules],
    ids=lambda run: run.__name__,
)
def test_what_a_process_does_first_with_dtensors_passes(first, tmp_path):
    failure = run_all(1, [Combination(first, (1,))], tmp_path)[first.__name__]
    assert not failure, failure


if __name__ == "__main__":
    sys.exit(run_by_torchrun(SHORT))
