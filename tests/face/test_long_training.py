"""What long_training.py notices in the curves and in the memory of its runs."""

from __future__ import annotations

import json

import pytest

from tests.long_training import KINDS, LEAST_STEPS, Run, faults, main

STEPS = 400


def run_of(first: float = 0.0, grows: float = 0.0, device: int = 0, steps: int = STEPS) -> Run:
    losses = [3 - each / STEPS + first for each in range(steps)]
    return Run(losses, [1000 + device * at for at in range(steps)], [500 + grows * at for at in range(steps)])


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


def test_memory_is_judged_of_steps_that_stock_norms_had_before_and_of_many():
    """A former bug: what libraries keep for each number of rows was taken for a leak of ours."""
    ours = run_of(0.01)
    ours.losses, ours.device_bytes = 2 * ours.losses, 2 * ours.device_bytes
    ours.host_mib = [500.0] * STEPS + [500.0 + at for at in range(STEPS)]
    assert faults("changing rows", {"stock": SEEDS, "ours": [ours] * 3}) == []
    short = [run_of(each, grows=4, device=20_000, steps=LEAST_STEPS - 1) for each in (0.0, 0.01, 0.02)]
    assert faults("changing rows", {"stock": short, "ours": short}) == []


def test_a_step_of_each_kind_runs_without_a_gpu_and_says_that_it_was_too_short(tmp_path, capsys):
    assert main(["--steps", "1", "--out", str(tmp_path / "said.json")]) == 0
    said = json.loads((tmp_path / "said.json").read_text())
    assert set(said["runs"]) == {f"{kind}, {label}" for kind in KINDS for label in ("stock", "ours")}
    assert f"but fewer than {LEAST_STEPS} say nothing of memory" in capsys.readouterr().out
