"""Builds and installs the package. The folder kernels/ is installed as fusednorm.kernels.

The wheel is pure Python, with the sources of the host side in C++: `python -m fusednorm build` compiles these for the
torch that is there.
"""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "fusednorm" / "__init__.py").read_text(), re.MULTILINE).group(1)
LINUX = "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"

# An editable install needs no mapping, because the package finds kernels/ beside it. Without one setuptools writes a
# .pth file. Its other way would lose to the folder of the clone: in the folder that holds a clone called fusednorm,
# `import fusednorm` would find the clone, as an empty namespace.
EDITABLE = "editable_wheel" in sys.argv
KERNELS = {} if EDITABLE else {"fusednorm.kernels": "kernels"}  # a top-level `kernels` would hide another package

setup(
    name="fusednorm",
    version=VERSION,
    description="LayerNorm and RMSNorm, forward and backward, as PyTorch operators with Triton kernels",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=[*find_packages(include=["fusednorm", "fusednorm.*"]), *KERNELS],
    package_dir={"": "."} | KERNELS,
    package_data={"fusednorm": ["py.typed", "host/csrc/*", "planner/data/*.json*"]},
    python_requires=">=3.10",
    entry_points={"torch_dynamo_backends": ["fusednorm = fusednorm.integrations.inductor:compile_graph"]},
    install_requires=["filelock", "torch>=2.11", f"triton>=3.6; {LINUX}"],
    extras_require={
        "test": [
            *("build", "expecttest", "hypothesis", "mypy", "numpy", "pytest", "pytest-xdist", "ruff", "setuptools>=68"),
            *("tqdm", "transformers", "typing_extensions"),
        ],
        "bench": ["matplotlib", "tqdm"],
        "demo": ["matplotlib", "numpy", "tqdm"],
        "docs": ["furo", "myst-parser", "sphinx"],
        "integrations": [
            *("pytest", "accelerate", "addict", "diffusers", "fla-core", "lightning", "megatron-core", "peft"),
            *("torchtitan", "transformers[kernels]", "trl"),
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
