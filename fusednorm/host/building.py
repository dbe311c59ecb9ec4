"""Builds the host side in C++ (csrc/), and finds what was built.

The file lies in the user's cache folder. Its name has a key of the torch release, this Python and the sources: a
process never loads what was built for another torch or from other sources, and one package serves them all.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).with_name("csrc")
COMMAND = "python -m fusednorm build"
# Medians over forwards and backwards in bench/results/nvidia-h100-80gb-hbm3/host-time.jsonl
WITHOUT_IT = "the host side runs in Python, so an op takes 1.5 to 1.9 times the host time of ATen's (0.7 to 0.8 in C++)"
TORCH = Path(torch.__file__).parent
STANDARD = "c++20" if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14) else "c++17"  # of torch's headers
FLAGS = (f"-std={STANDARD}", "-O2", "-g0", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-shared")


def path() -> Path:
    """Where the extension for this torch, this Python and these sources is, or would be."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    key = hashlib.sha256("\n".join([torch.__version__, str(torch.version.git_version), suffix, *FLAGS]).encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "fusednorm", f"host-{key.hexdigest()[:16]}{suffix}")


def load() -> tuple[ModuleType | None, str]:
    """(the extension, ""), or (None, why there is none)."""
    if not SOURCES.is_dir():
        return None, "this copy of the package comes without its sources"
    file = path()
    try:
        if not file.exists():
            return None, f"it was not built for torch {torch.__version__} and this Python"
        spec = importlib.util.spec_from_file_location(f"{__package__}._native", file)
        extension = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(extension)
    except (ImportError, OSError) as error:  # or a home that another user owns
        return None, f"it cannot be loaded: {error}"
    return extension, ""


def build() -> Path:
    """Compile the extension, unless it is there. Returns its path.

    Raises RuntimeError if a compiler, a header or Triton (whose package has CUDA's header) is missing, or if the
    sources do not compile; the message begins with the compiler's first error. Raises OSError if the cache folder
    cannot be written."""
    if not SOURCES.is_dir():
        raise RuntimeError("build: this copy of the package comes without the sources of the C++ host side")
    from filelock import FileLock  # torch needs it, too

    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        if file.exists():
            return file
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder, file.name)
            done = subprocess.run(_command(made), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                raise RuntimeError(_first_error(done.stdout))
            made.replace(file)  # at once: other processes see all of it or nothing
    return file


def _command(out: Path) -> list[str]:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise RuntimeError("build: needs a C++ compiler, got no c++, g++ or clang++ on the path")
    triton = importlib.util.find_spec("triton")
    if triton is None:
        raise RuntimeError("build: needs Triton, whose package has CUDA's header: pip install triton")
    headers = TORCH / "include", TORCH / "include/torch/csrc/api/include", sysconfig.get_path("include")
    cuda = Path(triton.origin).parent / "backends/nvidia/include"
    libraries = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    includes = [f"-I{folder}" for folder in (*headers, cuda)]
    return [*compiler.split(), *FLAGS, *includes, str(SOURCES / "native.cpp"), "-o", str(out), *libraries]


def _first_error(messages: str) -> str:
    """The first line that names an error, then all that the compiler said."""
    errors = (line.strip() for line in messages.splitlines() if re.search(r"\b(fatal )?error\b:", line))
    return f"build: the C++ host side does not compile here: {next(errors, 'see below')}\n{messages}"
