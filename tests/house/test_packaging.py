"""The sdist and the wheel build without a network and hold the right files. An installed wheel needs no clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import afresh
import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("setuptools", minversion="68")

USE = """
import importlib.util, pathlib, sys, torch, fusednorm
assert pathlib.Path(fusednorm.__file__).is_relative_to(sys.argv[1]), fusednorm.__file__
y, rstd = torch.ops.fusednorm.rms_norm_fwd(torch.ones(2, 3), [3])
assert y.shape == (2, 3) and rstd.shape == (2, 1)
import fusednorm.kernels
assert pathlib.Path(fusednorm.kernels.__file__).is_relative_to(sys.argv[1]), fusednorm.kernels.__file__
print(fusednorm.__version__)
"""

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None"


def build(kind: str, source: Path, out: Path) -> Path:
    """Runs the build backend as pip does in isolation, where torch is not there."""
    out.mkdir(exist_ok=True)
    code = f"{WITHOUT_TORCH}; from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    finished = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    tracked = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "out", "*.egg-info")
    source = shutil.copytree(ROOT, folder / "source", ignore=tracked)
    return build("sdist", source, folder / "built")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """A wheel that is built from the sdist. The build fails if the sdist lacks a file that it needs."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    return build("wheel", source, folder / "built")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("target")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def use(code: str, *arguments: object, path: str, cwd: Path) -> str:
    """What the code prints."""
    asked = afresh.run(code, *arguments, cwd=cwd, environment=os.environ | {"PYTHONPATH": path})
    assert asked.returncode == 0, asked.stderr
    return asked.stdout


def test_wheel_installs_and_imports_on_its_own(installed, wheel, tmp_path):
    version = use(USE, installed, path=str(installed), cwd=tmp_path).strip()
    assert wheel.name == f"fusednorm-{version}-py3-none-any.whl"


def test_torch_compile_finds_the_backend_of_an_installed_package(installed, tmp_path):
    code = (
        "import sys, torch; from torch._dynamo.backends.registry import lookup_backend;"
        "before = 'fusednorm' in sys.modules; print(before, lookup_backend('fusednorm').__module__)"
    )
    asked = use(code, path=str(installed), cwd=tmp_path).split()
    assert asked == ["False", "fusednorm.integrations.inductor"]


def test_wheel_holds_the_package_and_nothing_beside_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fusednorm"}
    kernels = {f"fusednorm/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    assert kernels | {"fusednorm/py.typed"} <= set(names)
    assert any(name.endswith("LICENSE") for name in names)
    sources = {f"fusednorm/host/csrc/{path.name}" for path in (ROOT / "fusednorm/host/csrc").iterdir()}
    tables = {f"fusednorm/planner/data/{path.name}" for path in (ROOT / "fusednorm/planner/data").iterdir()}
    others = {name for name in names if name.startswith("fusednorm/") and not name.endswith(".py")}
    assert others == {*sources, *tables, "fusednorm/py.typed"}


def test_an_editable_install_is_found_from_the_folder_that_holds_the_clone(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    clone, site = unpacked.rename(tmp_path / "fusednorm"), tmp_path / "site"
    with zipfile.ZipFile(build("editable", clone, tmp_path / "wheel")) as archive:
        archive.extractall(site)
    code = f"import site; site.addsitedir({str(site)!r}); import fusednorm.kernels; print(fusednorm.LayerNorm)"
    assert "fusednorm.modules.LayerNorm" in use(code, path="", cwd=tmp_path)


def test_wheel_leaves_versions_open(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert any("torch>=2.11" in line for line in needed)
    assert any("triton>=3.6" in line and "linux" in line for line in needed)
    assert not any("<" in line.split(";")[0] for line in needed)
    assert {f"Provides-Extra: {extra}" for extra in ("test", "bench", "demo", "docs")} <= set(lines)


def test_sdist_holds_tests_bench_examples_and_documents(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"tests/conftest.py", "bench/bench_norm.py", "kernels/rowmath.py", "README.md", "CHANGELOG.md", "LICENSE"}
    assert needed | {"Makefile", "examples/train_gpt.py", "docs/conf.py"} <= names
    for folder in ("fusednorm/host/csrc", "fusednorm/planner/data"):
        assert {f"{folder}/{each.name}" for each in (ROOT / folder).iterdir()} <= names
    assert set(re.findall(r"\]\(([\w./-]+)\)", (ROOT / "README.md").read_text())) <= names
    assert not {name for name in names if name.endswith(".pyc")}
