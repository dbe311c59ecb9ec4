"""The optional host side in C++ is built once for each torch and found from then on. Without it, or if it is broken,
Python serves. host/native/ tests what it does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import afresh
import pytest
import torch

from fusednorm import ops
from fusednorm.__main__ import main
from fusednorm.host import building, native, triton_compat
from fusednorm.tools import doctor

ROOT = Path(__file__).parents[2]
IMPORT = """
import sys, torch, fusednorm
from fusednorm.host import native
print('triton' in sys.modules, torch.cuda.is_initialized(), native.extension and native.extension.__file__)
"""
USE = """
x = torch.randn(2, 8, requires_grad=True)
y, _, _ = torch.ops.fusednorm.layer_norm_fwd(x, [8])
y.sum().backward()
print(native.repeats(), y.shape == x.grad.shape)
"""


def environment(package: Path = ROOT, **variables: object) -> dict[str, str]:
    """Of a process that finds the package in a folder, and does not interpret kernels."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": str(package)} | {name: str(value) for name, value in variables.items()}


@pytest.fixture
def compiler(tmp_path) -> Path:
    """A command that takes half a second, writes a file that is no library, and a line to `calls`."""
    command = tmp_path / "compiler"
    script = f'echo call >> {tmp_path}/calls; sleep 0.5; while [ "$1" != -o ]; do shift; done; : > "$2"'
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return command


def test_importing_it_brings_no_triton_and_starts_no_cuda_and_plain_cpu_tensors_work_as_without():
    try:
        built = building.build()
    except RuntimeError as error:
        pytest.skip(f"it cannot be built here: {error}")
    asked = afresh.run(IMPORT + USE, environment=environment())
    assert asked.stdout.split() == ["False", "False", str(built), "0", "True"], asked.stderr


def test_without_it_the_package_is_pure_python(tmp_path):
    code = f"{IMPORT}{USE}print(native.reason)"
    asked = afresh.run(code, environment=environment(XDG_CACHE_HOME=tmp_path))
    assert asked.stdout.split(maxsplit=5)[:5] == ["False", "False", "None", "0", "True"], asked.stderr
    assert asked.stdout.endswith(f"it was not built for torch {torch.__version__} and this Python\n")


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_a_file_that_cannot_be_loaded_is_no_extension_and_gives_a_reason(content, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    building.path().parent.mkdir()
    building.path().write_bytes(content)
    extension, reason = building.load()
    assert extension is None and reason.startswith("it cannot be loaded: ") and str(building.path()) in reason


def test_where_the_file_cannot_be_asked_for_there_is_no_extension(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + "x" * 300)  # as of a home that another user owns, which root may read
    assert building.load()[0] is None


def test_what_cannot_be_loaded_is_built_again_and_is_no_success(compiler, tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    building.path().parent.mkdir(parents=True)
    building.path().write_bytes(b"of another system")
    assert main(["build"]) == 1 and (tmp_path / "calls").read_text().splitlines() == ["call"]
    said = capsys.readouterr()
    assert "it cannot be loaded" in said.err and "Built" not in said.out


def test_another_torch_and_other_sources_find_another_file(tmp_path, monkeypatch):
    sources = shutil.copytree(building.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(building, "SOURCES", sources)
    paths = [building.path()]
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "2.1.0")
        paths.append(building.path())
    (sources / "call.h").write_text("int changed;")
    paths.append(building.path())
    assert len(set(paths)) == 3 and len({path.parent for path in paths}) == 1


def test_where_it_does_not_compile_the_command_says_why_and_leaves_nothing(tmp_path):
    ours = shutil.ignore_patterns("__pycache__")
    package = shutil.copytree(ROOT / "fusednorm", tmp_path / "site/fusednorm", ignore=ours).parent
    shutil.copytree(ROOT / "kernels", package / "kernels", ignore=ours)
    (package / "fusednorm/host/csrc/native.cpp").write_text("int here;\n#error no such thing\n#error nor this\n")
    tried = subprocess.run(
        [sys.executable, "-m", "fusednorm", "build"], cwd=package, capture_output=True, text=True,
        env=environment(package, XDG_CACHE_HOME=tmp_path / "cache"),
    )  # fmt: skip
    assert tried.returncode == 1 and "This takes about a minute" in tried.stdout
    first = tried.stderr.strip().splitlines()[0]
    assert first.startswith("build: the C++ host side does not compile here: ") and "native.cpp:2:2" in first
    assert "nor this" in tried.stderr
    assert [each.suffix for each in (tmp_path / "cache/fusednorm").iterdir()] == [".lock"]


def test_two_that_build_at_once_compile_once_and_a_third_not_at_all(compiler, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor() as pool:  # a lock keeps out threads as it does processes
        both = [pool.submit(building.build) for _ in range(2)]
    assert {each.result() for each in both} == {building.build()} and building.path().exists()
    assert (tmp_path / "calls").read_text().splitlines() == ["call"]


@pytest.mark.parametrize("missing, rule", [("compiler", "needs a C++ compiler"), ("triton", "needs Triton")])
def test_what_the_build_lacks_is_named(missing, rule, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "" if missing == "compiler" else "c++")
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=f"^build: {rule.replace('+', '.')}"):
        building.build()


@pytest.fixture
def on_a_gpu_without_it(monkeypatch):
    monkeypatch.setattr(native, "extension", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(triton_compat, "installed", lambda: (3, 6))
    ops.launch.cache_clear()
    yield
    ops.launch.cache_clear()


def test_the_first_use_on_a_gpu_without_it_says_what_that_costs_and_how_to_build_it(on_a_gpu_without_it):
    pytest.importorskip("triton")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ops.launch()
        ops.launch()
    (warning,) = (each for each in said if "fusednorm" in str(each.message))
    text = str(warning.message)
    assert "1.5 to 1.9 times the host time of ATen's" in text and text.endswith("run: python -m fusednorm build")
    assert "\n" not in text


@pytest.mark.parametrize("useless", ["without sources", "no GPU", "built"])
def test_nothing_is_said_where_the_command_would_not_help(useless, on_a_gpu_without_it, tmp_path, monkeypatch):
    change = {
        "without sources": (building, "SOURCES", tmp_path / "none"),
        "no GPU": (torch.cuda, "is_initialized", lambda: False),
        "built": (native, "extension", SimpleNamespace()),
    }
    monkeypatch.setattr(*change[useless])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        native.warn_if_missing()


def test_the_doctor_says_why_it_is_not_there_and_how_to_build_it(on_a_gpu_without_it, monkeypatch):
    monkeypatch.setattr(native, "reason", "it cannot be loaded: undefined symbol: torch")
    (finding,) = doctor.check_native()
    assert finding.status == "note" and "undefined symbol: torch" in finding.text
    assert finding.text.endswith("To build it, run: python -m fusednorm build")
