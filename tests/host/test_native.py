"""The optional host side in C++ is built and tested on CPU tensors. Without it, or if it is broken, Python serves."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def run(*command, cwd: Path, site: Path | None = None) -> subprocess.CompletedProcess:
    """Runs Python in a process that does not interpret kernels, with the folder `site` first on its import path."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if site is not None:
        shared = ROOT / "tests", ROOT / "tests" / "face"  # tests/face for test_errors.WRONG_CALLS
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (site, *shared)))
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def copy_package(site: Path) -> Path:
    """Copies the package to `site` as pip would install it, without the extension."""
    ours = shutil.ignore_patterns("__pycache__", "*.so", "csrc")
    shutil.copytree(ROOT / "fusednorm", site / "fusednorm", ignore=ours)
    shutil.copytree(ROOT / "kernels", site / "fusednorm" / "kernels", ignore=ours)
    return site


def said(code: str, site: Path) -> list[str]:
    """The words that `code` prints in a process that imports the package from `site`."""
    asked = run("-c", code, cwd=site, site=site)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout.split()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the package and its built extension."""
    if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no C++ compiler")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton, which has CUDA's header")
    folder = tmp_path_factory.mktemp("native")
    site = copy_package(folder / "site")
    built = run("setup.py", "-q", "build_ext", "--build-lib", site, "--build-temp", folder / "temporary", cwd=ROOT)
    assert (site / "fusednorm" / "host" / f"_native{SUFFIX}").exists(), built.stdout + built.stderr
    return site


def test_all_that_it_does_is_right_on_cpu_tensors(site):
    tests = ROOT / "tests" / "host" / "native"
    options = ["-q", "-o", f"pythonpath={site}", "-p", "no:cacheprovider", f"--confcutdir={tests}"]
    tried = run("-m", "pytest", *options, tests, cwd=site, site=site)
    output = tried.stdout[-20_000:] + tried.stderr[-5_000:]
    assert tried.returncode == 0, output
    counts = re.findall(r"(\d+) (\w+)", tried.stdout.splitlines()[-1])
    assert {kind for _, kind in counts} <= {"passed", "warning", "warnings"}, output
    assert int(counts[0][0]) > 0, output


IMPORT = """
import sys, torch, fusednorm
from fusednorm.host import native
from fusednorm.tools import doctor
print('triton' in sys.modules, torch.cuda.is_initialized(), native.extension and native.extension.__file__)
"""
USE = """
x = torch.randn(2, 8, requires_grad=True)
y, _, _ = torch.ops.fusednorm.layer_norm_fwd(x, [8])
y.sum().backward()
print(native.repeats(), y.shape == x.grad.shape)
"""


def test_importing_it_brings_no_triton_and_starts_no_cuda_and_plain_cpu_tensors_work_as_without(site):
    *imported, file, repeats, same = said(IMPORT + USE, site)
    assert imported == ["False", "False"]
    assert Path(file).is_relative_to(site)
    assert (repeats, same) == ("0", "True")


def asked_in_pure_python(question: str, site: Path) -> str:
    """The answer in a process that has first used the package in `site`, and checked that it works without the
    extension."""
    words = said(f"{IMPORT}{USE}print({question})", site)
    assert words[:5] == ["False", "False", "None", "0", "True"]
    return " ".join(words[5:])


def test_without_it_the_package_is_pure_python(tmp_path):
    report = asked_in_pure_python("doctor.check_native()[0].text", copy_package(tmp_path))
    assert "could not import torch and triton" in report
    assert report.endswith("&& pip install --no-build-isolation .")


def test_where_it_does_not_compile_the_last_line_and_the_doctor_say_why(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.so", "bench", "tests", "build"))
    native = source / "fusednorm" / "host" / "csrc" / "native.cpp"
    native.write_text("int here;\n#error no such thing\n#error nor this\n")
    site = copy_package(tmp_path / "site")
    built = run("setup.py", "-q", "build_ext", "--build-lib", site, "--build-temp", tmp_path / "temporary", cwd=source)
    assert built.returncode == 0  # the extension is optional: the package builds without it
    *_, last = built.stderr.strip().splitlines()
    assert "NOT built" in last and "native.cpp:2:2: error: #error no such thing" in last
    report = asked_in_pure_python("doctor.check_native()[0].text", site)
    assert report.startswith("does not compile here") and report.endswith("error: #error no such thing")


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_a_file_that_cannot_be_loaded_leaves_pure_python_and_a_reason(content, tmp_path):
    file = copy_package(tmp_path) / "fusednorm" / "host" / f"_native{SUFFIX}"
    file.write_bytes(content)
    report = asked_in_pure_python("doctor.check_native()[0].text", tmp_path)
    assert "cannot be loaded (" in report and str(file) in report


def test_one_that_was_built_for_another_torch_is_left_alone(tmp_path):
    (copy_package(tmp_path) / "fusednorm" / "host" / "_native.py").write_text("torch_version = '2.1.0'")
    report = asked_in_pure_python("doctor.check_native()[0].text", tmp_path)
    assert "cannot be loaded (built for torch 2.1.0, found " in report
