"""The parts of the bench of backwards beside other work that need no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench import beside

ROOT = Path(__file__).parents[2]
SMALL = ["--dry-run", "--shapes", "16x64", "--norms", "layer", "--rounds", "2", "--megabytes", "1"]
FIELDS = {
    "date", "gpu", "torch", "norm", "rows", "cols", "x_dtype", "candidate", "mode", "company", "held_sms", "sm_margin",
    "calls", "outlasted", "nccl_p2p", "median_us", "p10_us", "p90_us", "rounds",
}  # fmt: skip


def records_in(folder: Path) -> list[dict]:
    (path,) = folder.glob("*/beside*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_dry_run_writes_a_record_of_each_time(tmp_path):
    assert beside.main([*SMALL, "--held", "1", "8", "--out", str(tmp_path)]) == 0
    records = records_in(tmp_path)
    assert all(record.keys() >= FIELDS and record["median_us"] > 0 for record in records)
    found = {(r["candidate"], r["company"], r["held_sms"], r["sm_margin"], r["mode"]) for r in records}
    ours = {("alone", 0, 0), *(("held SMs", sms, margin) for sms in (1, 8) for margin in (0, sms))}
    wanted = {("fusednorm", *each) for each in ours} | {("aten", *each) for each in ours if not each[2]}
    assert found == {(*each, mode) for each in wanted for mode in ("eager", "graph")} and len(records) == len(found)


def test_two_ranks_write_one_record_of_each_time(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "bench.beside", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, env=environment, check=True, timeout=120)
    records = records_in(tmp_path)
    assert {record["company"] for record in records} == {"alone", "all_gather", "reduce_scatter"}
    assert {record["sm_margin"] for record in records if record["candidate"] == "fusednorm"} == {0, 16}
    assert all(record["calls"] == 4 and 0 <= record["outlasted"] <= record["rounds"] for record in records)
    assert all(record["outlasted"] == record["rounds"] for record in records if record["company"] == "alone")


def test_without_a_gpu_it_says_how_to_go_the_same_way(capsys):
    assert beside.main([]) == 2
    assert "needs a CUDA GPU, got none (--dry-run goes the same way without one)" in capsys.readouterr().err
