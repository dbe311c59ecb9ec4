"""The parts of the bench of whole training steps that need no GPU."""

from __future__ import annotations

import pytest
import torch

from bench import bench_training_step as bench
from bench.models import make_stack


def record(norms: str, early_loss: float, loss: float = 1.0) -> dict:
    return {"way": "eager", "norms": norms, "early_loss": early_loss, "loss": loss}


def test_training_steps_that_come_to_another_loss_are_faults(capsys):
    assert bench.report_faults("gpt2", [record("stock", 2.0), record("a", 2.01), record("b", 2.5)]) == 1
    assert "gpt2, eager with b: loss 2.5000 and at the end 1.0000, want 2.0000" in capsys.readouterr().err
    assert bench.report_faults("gpt2", [record("stock", 2.0), record("stock", 2.0, 5.0)]) == 0
    for lost in (record("a", float("nan")), record("a", 2.0, float("nan")), record("a", 2.0, float("inf"))):
        assert bench.report_faults("gpt2", [record("stock", 2.0), lost]) == 1


def test_a_speedup_is_of_the_same_rounds_whatever_drifts_between_them():
    drift = [1.0, 1.5, 0.7, 1.2]
    speedup, error = bench.mean_ratio([1.02 * d for d in drift], drift)
    assert speedup == pytest.approx(1.02) and error == pytest.approx(0, abs=1e-12)
    assert bench.mean_ratio([3.0, 1.0], [2.0, 2.0]) == (pytest.approx(1.0), pytest.approx(0.5))
    assert bench.mean_ratio([3.0], [2.0]) == (1.5, None)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_stacks_of_the_training_bench_begin_alike(name):
    models = [make_stack(name, 1, 32, 2) for _ in range(2)]
    x = torch.randn(2, 3, 32)
    assert models[0](x).shape == x.shape and torch.equal(models[0](x), models[1](x))
