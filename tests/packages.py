"""Tests of the packages that users get: `make package` builds them into dist/, then runs this file.

The wheel is installed by `pip install ./dist/...` and nothing else into three fresh environments: one with the oldest
supported pair of torch and Triton, one with the newest, and one that sees the packages of this Python but not this
repository. `-k linked` runs the last alone, without a network. pytest does not collect this file by itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
import torch
from pairs import PAIRS

import fusednorm

ROOT = Path(__file__).parent.parent
RELEASES = {"linked": None, "oldest": next(iter(PAIRS)), "newest": list(PAIRS)[-1]}  # of torch

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
print(fusednorm.__file__, lookup_backend("fusednorm").__module__, torch.__version__)
"""


def package(pattern: str) -> Path:
    (found,) = (ROOT / "dist").glob(pattern)
    return found


@pytest.fixture(scope="module", params=RELEASES)
def installed(request, tmp_path_factory):
    """(python, torch): the Python of an environment with the wheel, and the release of torch that must be there."""
    home, release = tmp_path_factory.mktemp("environment"), RELEASES[request.param]
    venv.create(home, with_pip=True)
    python, constraints = home / "bin" / "python", home / "constraints.txt"
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if release is None:
        (folder,) = home.glob("lib/python*/site-packages")
        # Python does not read the .pth files in a folder that a .pth file adds: an editable install of this package
        # stays invisible.
        (folder / "torch.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
        run(*install, "--no-deps", "--no-index", package("*.whl"))
    else:
        constraints.write_text(f"torch=={release}\ntriton=={PAIRS[release]}\n")
        run(*install, "--constraint", constraints, package("*.whl"))
    yield python, release or torch.__version__
    shutil.rmtree(home)  # gigabytes


def run(python: Path, *arguments: str | Path) -> str:
    """What the command prints. -P and the working directory keep this repository out of its sys.path. The user's cache
    folder is in the environment."""
    command = [str(python), *(["-P"] if sys.version_info >= (3, 11) else []), *map(str, arguments)]
    variables = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(python.parent.parent / "cache")}
    variables |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    finished = subprocess.run(command, cwd=python.parent, env=variables, capture_output=True, text=True)
    assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout


def test_it_trains_and_torch_compile_knows_its_backend(installed):
    python, release = installed
    where, backend, found = run(python, "-c", TRAIN).split()
    assert Path(where).is_relative_to(python.parent.parent) and found.startswith(release)
    assert backend == "fusednorm.integrations.inductor"


def test_the_host_side_in_cpp_is_built_by_a_command_and_found(installed):
    python, _ = installed
    built = run(python, "-m", "fusednorm", "build").split()[-1]
    asked = "import torch, fusednorm.host.native as it; print(it.extension.__file__)"
    assert run(python, "-c", asked).strip() == built
    assert "native      built: ops repeat without Python" in run(python, "-m", "fusednorm", "doctor")


def test_the_commands_run(installed):
    python, _ = installed
    assert run(python, "-m", "fusednorm", "--version") == f"fusednorm {fusednorm.__version__}\n"
    assert "Everything this machine can run works" in run(python, "-m", "fusednorm", "doctor")
    asked = ("--rows", "16384", "--cols", "4096", "--norm", "layer", "--device", "H200")
    assert "pipelined" in run(python, "-m", "fusednorm", "plan", *asked)


def test_the_installed_demo_says_that_it_does_not_run_the_tma_kernels(installed, tmp_path):
    python, _ = installed
    said = run(python, "-m", "fusednorm", "demo", "--steps", "2", "--out", tmp_path)
    assert "in a clone of the repository: python -m tests.simulator.demo" in said


def test_sdist_has_what_the_readme_names():
    with tarfile.open(package("*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert not [name for name in tracked if not name.startswith((".ci", ".git", ".pre-commit")) and name not in names]


def test_the_wheel_is_one_for_all_and_of_the_newest_version_of_the_changelog():
    newest = re.search(r"^## \[?v?(\d[\w.]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).group(1)
    assert package("*.whl").name == f"fusednorm-{newest}-py3-none-any.whl"
