"""The bench of whole training steps, as far as it goes without a GPU."""

from __future__ import annotations

import pytest
import torch

from bench import bench_training_step as bench
from bench.models import make_stack


def test_training_steps_that_end_at_another_loss_are_faults(capsys):
    stock = {"way": "eager", "norms": "stock", "loss": 2.0}
    records = [stock | {"norms": norms, "loss": loss} for norms, loss in (("stock", 2.0), ("a", 2.01), ("b", 2.5))]
    assert bench.report_faults("gpt2", records) == 1 and bench.report_faults("gpt2", [stock, stock]) == 0
    assert bench.report_faults("gpt2", [stock, stock | {"loss": float("nan")}]) == 1
    assert "gpt2, eager with b: loss 2.5000, want 2.0000" in capsys.readouterr().err


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
