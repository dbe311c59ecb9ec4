"""The bench of training steps under FSDP2, as a dry run of two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import bench_sharded_step as bench

ROOT = Path(__file__).parents[2]
SMALL = ["--dry-run", "--models", "gpt2", "--depth", "1", "--rounds", "3", "--steps", "2"]
NORMS = {("eager", "stock"), ("eager", "enable_eager"), ("eager", "patch_model"),
         ("compiled", "stock"), ("compiled", "enable_inductor")}  # fmt: skip


def test_two_ranks_write_one_record_of_each_variant(tmp_path):
    module = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "bench.bench_sharded_step"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *module, *SMALL, "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=240)
    (path,) = tmp_path.glob("*/sharded-step.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(record["way"], record["norms"]) for record in records} == NORMS and len(records) == len(NORMS)
    for record in records:
        assert record["bench"] == "sharded_step" and record["ranks"] == 2 and record["rounds"] == 3
        assert (record["model"], record["width"], record["tokens"], record["steps"]) == ("gpt2", 64, 32, 2)
        assert record["median_ms"] > 0 and record["speedup_error"] is not None
        assert record["early_loss"] == pytest.approx(records[0]["early_loss"], rel=0.02)


def test_the_tokens_of_a_cell_are_whole_sequences():
    for cell in bench.CELLS:
        size = cell.size(depth=4)
        assert size.batch * size.length == cell.tokens and size.width == cell.width == 128 * size.heads


def test_one_process_is_not_enough(capsys):
    assert bench.main(["--dry-run"]) == 2
    assert "needs torchrun with 2 processes or more, got 1 process" in capsys.readouterr().err


def test_without_a_gpu_it_says_how_to_go_the_same_way(capsys):
    assert bench.main([]) == 2
    assert "needs a CUDA GPU, got none (--dry-run goes the same way without one)" in capsys.readouterr().err
