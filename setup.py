"""The packages, what they need, and the one renaming: the folder kernels/ installs as fusednorm.kernels.

Where torch and triton can be imported while this runs (pip install --no-build-isolation, python setup.py build_ext
--inplace) the host side is built in C++ as well, for this torch; where it does not compile, a warning says so.
"""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "fusednorm" / "__init__.py").read_text(), re.MULTILINE).group(1)
LINUX = "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"


def extensions() -> list[Extension]:
    try:
        import triton
        from torch.utils import cpp_extension
    except ImportError:
        return []
    cuda_header = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    return [
        Extension(
            "fusednorm._native",
            ["fusednorm/csrc/native.cpp"],
            include_dirs=[*cpp_extension.include_paths(), str(cuda_header)],
            library_dirs=cpp_extension.library_paths(),
            libraries=["c10", "torch_cpu", "torch_python"],
            extra_compile_args=["-std=c++17", "-O2", "-g0", "-fvisibility=hidden"],
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
