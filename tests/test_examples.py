"""The examples run on a CPU, with few steps, and stock norms and ours learn the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.language_models import STOCK, LanguageModel
from examples.training import GPU_SIZE

ROOT = Path(__file__).parent.parent
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # two share the processor
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    "starter, example, model", [((), "train_fsdp2", "gpt2"), (TORCHRUN, "tensor_parallel", "llama")]
)
def test_example_trains_on_both_kinds_of_norms_and_draws(starter, example, model, tmp_path):
    pytest.importorskip("matplotlib")
    command = [*starter, "-m", f"examples.{example}", "--model", model, "--steps", "3", "--out", str(tmp_path)]
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=ONE_THREAD)
    assert ran.returncode == 0, ran.stderr[-2000:]
    stock, ours = re.findall(r"tokens/s +\d+\.\d+ GiB  loss (\d\.\d+) -> (\d\.\d+)", ran.stdout)
    assert stock == ours and float(ours[1]) < float(ours[0])
    assert (tmp_path / f"{example}_{model}.png").stat().st_size > 10_000


@pytest.mark.parametrize("example", ["train_fsdp2", "tensor_parallel"])
def test_example_says_first_what_it_shows_and_what_a_cpu_makes_of_it(example):
    text = (ROOT / "examples" / f"{example}.py").read_text()
    assert text.startswith('"""What this shows: ')
    assert "our functionals hand tensors to ATen" in " ".join(text.split('"""')[1].split())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_for_gpus_have_about_a_billion_parameters(name):
    with torch.device("meta"):
        model = LanguageModel(name, GPU_SIZE, STOCK)
    assert 0.7e9 < sum(each.numel() for each in model.parameters()) < 1.1e9
