"""Tests of the packages that users get: `make package` builds them into dist/, then runs this file.

Each wheel is installed into a fresh environment, which also sees the packages of this Python, such as torch and Triton,
but not this repository. pytest does not collect this file by itself.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
WHEELS = {"pure Python": "py3-none-any.whl", "with the extension": "linux_*.whl"}

TRAIN = """
import torch, fusednorm
torch.manual_seed(0)
x, dy = torch.randn(2, 16, 64), torch.randn(2, 16, 64)
for ours, stock in ((fusednorm.LayerNorm(64), torch.nn.LayerNorm(64)), (fusednorm.RMSNorm(64), torch.nn.RMSNorm(64))):
    ours.load_state_dict(stock.state_dict())
    for norm in (ours, stock):
        norm.x = x.clone().requires_grad_()
        norm(norm.x).backward(dy)
    torch.testing.assert_close(ours.x.grad, stock.x.grad)
    torch.testing.assert_close(ours.weight.grad, stock.weight.grad)
import fusednorm.kernels.rowmath
from torch._dynamo.backends.registry import lookup_backend
print(fusednorm.__file__, lookup_backend("fusednorm").__module__)
"""


def packages(pattern: str) -> list[Path]:
    return sorted((ROOT / "dist").glob(pattern))


@pytest.fixture(scope="module", params=WHEELS)
def installed(request, tmp_path_factory):
    """(python, kind): the Python of an environment in which the wheel of this kind is installed."""
    (wheel,) = packages(f"*{WHEELS[request.param]}")
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    (folder,) = home.glob("lib/python*/site-packages")
    # Python does not read the .pth files in a folder that a .pth file adds: an editable install of this package stays
    # invisible.
    (folder / "torch.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index", wheel)
    return python, request.param


def run(python: Path, *arguments: str | Path) -> str:
    """What the command prints. -P and the working directory keep this repository out of its sys.path."""
    command = [str(python), *(["-P"] if sys.version_info >= (3, 11) else []), *map(str, arguments)]
    finished = subprocess.run(command, cwd=python.parent, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout


def test_it_trains_and_torch_compile_knows_its_backend(installed):
    python, _ = installed
    where, backend = run(python, "-c", TRAIN).split()
    assert Path(where).is_relative_to(python.parent.parent)
    assert backend == "fusednorm.integrations.inductor"


def test_the_extension_is_there_if_and_only_if_it_was_built(installed):
    python, kind = installed
    asked = "import importlib.util, torch, fusednorm; print(importlib.util.find_spec('fusednorm.host._native'))"
    assert ("_native" in run(python, "-c", asked)) == (kind == "with the extension")
    if kind == "with the extension":  # and it loads, for this torch
        loaded = "import torch, fusednorm.host._native as it; assert torch.__version__.startswith(it.torch_version)"
        run(python, "-c", loaded)


def test_the_commands_run(installed):
    python, _ = installed
    assert "Everything this machine can run works" in run(python, "-m", "fusednorm", "doctor")
    asked = ("--rows", "16384", "--cols", "4096", "--norm", "layer", "--device", "H200")
    assert "pipelined" in run(python, "-m", "fusednorm", "plan", *asked)


def test_the_installed_demo_says_that_it_does_not_run_the_tma_kernels(installed, tmp_path):
    python, _ = installed
    said = run(python, "-m", "fusednorm", "demo", "--steps", "2", "--out", tmp_path)
    assert "The TMA kernels were not run" in said


def test_sdist_has_what_the_readme_names():
    (sdist,) = packages("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert not [name for name in tracked if not name.startswith((".ci", ".git", ".pre-commit")) and name not in names]
