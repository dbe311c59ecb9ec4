"""python -m fusednorm build: compiles the host side in C++ for the installed torch and this Python."""

from __future__ import annotations

import argparse
import platform
import sys

import torch

from ..host import building


def run(options: argparse.Namespace) -> int:
    """Build the extension if it is not there. Returns 1, with the compiler's messages, if that is not possible."""
    what = f"the host side in C++, for torch {torch.__version__} and Python {platform.python_version()}"
    try:
        if building.load()[0] is None:
            print(f"Compiling {what}. This takes about a minute.", flush=True)
            building.path().unlink(missing_ok=True)  # what was built on another system may not load here
        file, (extension, reason) = building.build(), building.load()
        if extension is None:
            raise RuntimeError(f"build: the C++ host side compiles here, but {reason}")
        print(f"Built {what}: {file}")
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
