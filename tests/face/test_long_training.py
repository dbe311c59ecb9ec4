"""What long_training.py notices in the curves and in the memory of its runs."""

from __future__ import annotations

import json

import pytest

from tests.long_training import KINDS, Run, faults, main

STEPS = 100


def run_of(first: float = 0.0, grows: float = 0.0, device: int = 0) -> Run:
    losses = [3 - each / STEPS + first for each in range(STEPS)]
    return Run(losses, [1000 + device * at for at in range(STEPS)], [500 + grows * at for at in range(STEPS)])


SEEDS = [run_of(), run_of(0.01), run_of(0.02)]


def test_runs_within_the_spread_of_seeds_are_right():
    assert faults("graph", {"stock": SEEDS, "ours": [run_of(0.01), run_of(0.02), run_of(0.03)]}) == []


@pytest.mark.parametrize(
    "other, words",
    [
        (run_of(0.2), "in part 0 of 20 the losses are"),
        (run_of(float("nan")), "the losses are"),
        (run_of(grows=2), "MiB of host memory became"),
        (run_of(device=20_000), "bytes of GPU memory became"),
    ],
)
def test_faults_are_noticed(other, words):
    assert words in "; ".join(faults("graph", {"stock": SEEDS, "ours": [other] * 3}))


def test_a_step_of_each_kind_runs_without_a_gpu(tmp_path):
    assert main(["--steps", "1", "--out", str(tmp_path / "said.json")]) == 0
    said = json.loads((tmp_path / "said.json").read_text())
    assert set(said["runs"]) == {f"{kind}, {label}" for kind in KINDS for label in ("stock", "ours")}
