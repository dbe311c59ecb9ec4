"""Environments with other releases of some packages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def python_with(packages: dict[str, str], folder: Path, *options: str) -> Path:
    """A Python that has these releases, by name, and apart from them the packages of the running Python. It is made on
    first use, with more options for pip."""
    home = folder / "-".join(f"{name}-{release}" for name, release in packages.items())
    python, ready = home / "bin" / "python", home / ".ready"
    if not ready.exists():
        venv.create(home, clear=True, symlinks=True)
        (site,) = home.glob("lib/python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *options]
        wanted = [f"{name}=={release}" for name, release in packages.items()]
        subprocess.run([*pip, "--target", site, *wanted], check=True)
        paths = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        (site / "beyond.pth").write_text("\n".join(paths) + "\n")
        ready.touch()
    return python
