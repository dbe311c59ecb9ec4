"""Backwards on a GPU that other kernels use, too: none waits for SMs that others hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import company
import pytest
import torch

pytestmark = pytest.mark.gpu

HERE = Path(company.__file__)
LIMIT_S = 180  # a hung kernel ends only with its process


@pytest.mark.parametrize("scenario", [each.__name__ for each in company.SCENARIOS])
def test_in_company(scenario):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("the holder takes more shared memory than an SM before Hopper has")
    places = [HERE.parents[2], HERE.parents[1], HERE.parent]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, places), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE), scenario]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    assert ran.returncode == 0 and ran.stdout.split()[-1] == "right", ran.stdout + ran.stderr[-4000:]
