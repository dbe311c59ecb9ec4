"""Runs the tests of the compiled kernels on the simulated GPU, in two processes that do not interpret kernels.

`python -m pytest --confcutdir=tests/simulator tests/simulator tests/kernels/simulated` runs them in this process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = 2


def test_every_kernel_gives_its_numbers_on_a_simulated_gpu_whatever_the_order():
    simulator, kernels = ROOT / "tests" / "simulator", ROOT / "tests" / "kernels" / "simulated"
    options = ["-q", "-rs", "-p", "no:cacheprovider", f"--confcutdir={simulator}"]
    command = [sys.executable, "-m", "pytest", *options, simulator, kernels]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    started = [
        subprocess.Popen(
            [*command, f"--part={part}/{PARTS}"], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
        )
        for part in range(PARTS)
    ]
    outputs = [each.communicate()[0] for each in started]
    for each, output in zip(started, outputs, strict=True):
        assert each.returncode == 0, output[-20_000:]
        counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", output.splitlines()[-1])}
        assert counts.get("passed", 0) > 20, output[-2_000:]
