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
import subprocess
import sys
from pathlib import Path

import long_runs
import pytest
import sharded_models
import sharded_ops
from worlds import Combination, World, run_all, run_by_torchrun

ROOT = Path(__file__).parents[2]
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


ONE_PROCESS = """
import sys, tempfile, torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, init_device_mesh, Shard, distribute_tensor
import fusednorm
from fusednorm import force, sharding
from fusednorm.host import kernel_devices
from fusednorm.tools import interpreter

interpreter.enable_interpreter()
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
x = distribute_tensor(torch.randn(4, 8), init_device_mesh("cpu", (1,)), [Shard(0)])
"""


def run_in_one_process(code: str) -> None:
    command = [sys.executable, "-c", ONE_PROCESS + code]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize("call", ["column_sum([x])[0]", "functional.rms_norm(x, (8,))"])
def test_functions_find_the_rules_in_inference_mode_too(call):
    run_in_one_process(f"""
with torch.inference_mode(), kernel_devices.kernels_on("cpu"), force("reference"):
    assert type(fusednorm.{call}) is DTensor
""")


def test_where_torch_has_no_way_to_register_rules_everything_else_works():
    run_in_one_process("""
for name in ("_op_schema", "_ops.single_dim_strategy", "experimental"):
    sys.modules[f"torch.distributed.tensor.{name}"] = None  # importing it fails
torch.ops.fusednorm.rms_norm_fwd(x.to_local(), (8,))
fusednorm.column_sum([x.to_local()])
without = [each.split(",")[0] for each in sharding.missing]
assert without == ["layer_norm_fwd", "column_sum", "head_norm_fwd"], sharding.missing
try:
    torch.ops.fusednorm.rms_norm_fwd(x, (8,))
except RuntimeError as error:
    assert "rms_norm_fwd" in str(error), error
else:
    raise AssertionError("there is a rule")
""")


if __name__ == "__main__":
    sys.exit(run_by_torchrun(SHORT))
