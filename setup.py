"""Builds and installs the package. The folder kernels/ is installed as fusednorm.kernels.

The host side in C++ is built, for this torch, if the build can import torch and triton: by
`pip install --no-build-isolation .` or `python setup.py build_ext --inplace`. If it does not compile, the package is
pure Python; the build's last line and `python -m fusednorm doctor` then give the compiler's first error.
"""

import atexit
import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "fusednorm" / "__init__.py").read_text(), re.MULTILINE).group(1)
LINUX = "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"

NATIVE_FAILURE = "_native_failure.txt"  # beside where the extension would be; fusednorm/host/native.py reads it


class BuildNative(build_ext):
    """Writes the compiler's first error to NATIVE_FAILURE, and prints it as the build's last line."""

    def finalize_options(self):
        super().finalize_options()
        self.force = True  # objects in build/ may be of another torch, although they are newer than the sources

    def build_extension(self, extension):
        failure = Path(self.get_ext_fullpath(extension.name)).with_name(NATIVE_FAILURE)
        failure.unlink(missing_ok=True)
        with tempfile.TemporaryFile("w+", errors="replace") as messages:
            try:
                with stderr_to(messages):
                    super().build_extension(extension)
            except Exception as error:
                messages.seek(0)
                text = first_error(messages.read()) or str(error)
                failure.parent.mkdir(parents=True, exist_ok=True)
                failure.write_text(f"{text}\n")
                last = f"fusednorm: the host side in C++ was NOT built, everything runs in Python: {text}"
                atexit.register(print, last, file=sys.stderr, flush=True)
                raise
            finally:
                messages.seek(0)
                sys.stderr.write(messages.read())


@contextlib.contextmanager
def stderr_to(file):
    """Inside, what this process and those that it starts write to stderr goes to the file."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def first_error(messages: str) -> str:
    return next((line.strip() for line in messages.splitlines() if re.search(r"\b(fatal )?error\b:", line)), "")


def extensions() -> list[Extension]:
    try:
        import torch
        import triton
        from torch.utils import cpp_extension
    except ImportError:
        return []
    standard = "c++20" if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14) else "c++17"
    cuda_header = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    return [
        Extension(
            "fusednorm.host._native",
            ["fusednorm/host/csrc/native.cpp"],
            depends=sorted(str(each.relative_to(HERE)) for each in HERE.glob("fusednorm/host/csrc/*.h")),
            include_dirs=[*cpp_extension.include_paths(), str(cuda_header)],
            library_dirs=cpp_extension.library_paths(),
            libraries=["c10", "torch_cpu", "torch_python"],
            extra_compile_args=[f"-std={standard}", "-O2", "-g0", "-fvisibility=hidden"],
            language="c++",
            optional=True,
        )
    ]


setup(
    name="fusednorm",
    version=VERSION,
    description="LayerNorm and RMSNorm, forward and backward, as PyTorch operators with Triton kernels",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=[*find_packages(include=["fusednorm", "fusednorm.*"]), "fusednorm.kernels"],
    package_dir={"fusednorm.kernels": "kernels"},  # a top-level `kernels` would collide with another package
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildNative},
    package_data={"fusednorm": ["py.typed"]},
    python_requires=">=3.10",
    entry_points={"torch_dynamo_backends": ["fusednorm = fusednorm.integrations.inductor:compile_graph"]},
    install_requires=["torch>=2.11", f"triton>=3.6; {LINUX}"],
    extras_require={
        "test": [
            *("build", "expecttest", "hypothesis", "mypy", "numpy", "pytest", "pytest-xdist", "ruff", "setuptools>=68"),
            *("tqdm", "transformers", "typing_extensions"),
        ],
        "bench": ["matplotlib", "rich", "tqdm"],
        "demo": ["matplotlib", "numpy", "rich", "tqdm"],
        "docs": ["furo", "myst-parser", "sphinx"],
        "integrations": [
            *("pytest", "accelerate", "lightning", "megatron-core", "torchtitan", "transformers[kernels]", "trl"),
        ],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Environment :: GPU :: NVIDIA CUDA",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: C++",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
