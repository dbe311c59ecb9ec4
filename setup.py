"""The packages, what they need, and the one renaming: the folder kernels/ installs as fusednorm.kernels."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "fusednorm" / "__init__.py").read_text(), re.MULTILINE).group(1)
LINUX = "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"

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
    package_data={"fusednorm": ["py.typed"]},
    python_requires=">=3.10",
    entry_points={"torch_dynamo_backends": ["fusednorm = fusednorm.integrations.inductor:compile_graph"]},
    install_requires=["torch>=2.11", f"triton>=3.6; {LINUX}"],
    extras_require={
        "test": ["pytest", "hypothesis", "expecttest", "numpy", "ruff", "setuptools>=68", "transformers"],
        "bench": ["matplotlib", "rich", "tqdm"],
        "demo": ["matplotlib", "rich", "tqdm"],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
