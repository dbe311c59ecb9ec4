"""Runs the tests of tests/stacks/ with the released packages that they integrate with, without a GPU and offline.

    python tests/stacks.py                              # all of them: some three minutes on two cores
    python tests/stacks.py --stacks torchtitan megatron

The packages go into one virtual environment in --folder, made on first use, for which pip needs the network. It takes
600 MB, and shares this Python's torch and Triton. Ends with a table of stacks and releases; exit code 1 if a test fails
or a package is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
STACKS = {  # test_NAME.py in tests/stacks/: the packages it needs
    "kernels": ("kernels", "transformers"),
    "torchtitan": ("torchtitan", "spmd_types"),
    "megatron": ("megatron-core",),
    "transformers": ("transformers", "accelerate"),
    "trl": ("trl", "transformers"),
    "axolotl": ("axolotl", "peft", "transformers"),
    "accelerate": ("accelerate", "transformers"),
    "lightning": ("lightning", "transformers"),
    "fla": ("fla-core", "einops"),
    "diffusers": ("diffusers",),
}
# Packages that pin releases of others, which would take the place of this Python's torch: they go in alone.
PINNING = ("axolotl",)
VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


def environment(folder: Path) -> Path:
    """A Python with the packages, made on first use. If they do not install together, pip installs them one by one;
    the packages that fail are then missing."""
    home = folder / "stacks"
    python, ready = home / "bin" / "python", home / ".ready"
    if not ready.exists():
        venv.create(home, clear=True, symlinks=True, with_pip=True)
        (site,) = home.glob("lib/python*/site-packages")
        paths = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        (site / "beyond.pth").write_text("\n".join(paths) + "\n")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        pins = [f"{name}=={version(name)}" for name in ("torch", "triton")]
        if subprocess.run([*pip, *pins, "--editable", f"{ROOT}[integrations]"]).returncode:
            subprocess.run([*pip, "pytest", "--editable", ROOT], check=True)
            for name in dict.fromkeys(name for names in STACKS.values() for name in names if name not in PINNING):
                subprocess.run([*pip, *pins, name])
        subprocess.run([*pip, "--no-deps", *PINNING])
        ready.touch()
    return python


def release(python: Path, package: str) -> str | None:
    """The installed release of a package; None if it is not installed."""
    asked = subprocess.run([python, "-c", VERSION, package], capture_output=True, text=True)
    return asked.stdout.strip() or None


def run(python: Path, stack: str, folder: Path) -> str:
    """pytest's own count, such as "12 passed"; the rest of its output goes to a file."""
    variables = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    # Not started in ROOT: its folder kernels/ would hide the package `kernels`.
    command = [python, "-m", "pytest", "-q", "-o", "pythonpath=", "-p", "no:cacheprovider", f"test_{stack}.py"]
    place = ROOT / "tests" / "stacks"
    said = subprocess.run(command, cwd=place, env=variables | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    log = folder / f"stack-{stack}.log"
    log.write_text(said.stdout + said.stderr)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", (said.stdout.splitlines() or [""])[-1])
    if said.returncode:
        print(f"{stack}: see {log}", file=sys.stderr)
        counts = counts if any("failed" in each or "error" in each for each in counts) else ["not run: error"]
    return ", ".join(counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stacks", nargs="+", choices=STACKS, default=list(STACKS))
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python = environment(folder)
    print(f"with torch {release(python, 'torch')} and triton {release(python, 'triton')}")
    print("| stack | releases | tests |\n|---|---|---|")
    bad = False
    for stack in options.stacks:
        releases = {name: release(python, name) for name in STACKS[stack]}
        missing = [name for name, found in releases.items() if found is None]
        said = f"missing: {', '.join(missing)}" if missing else run(python, stack, folder)
        bad |= bool(missing) or "failed" in said or "error" in said or "passed" not in said
        named = ", ".join(f"{name} {found}" for name, found in releases.items() if found)
        print(f"| {stack} | {named} | {said} |", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
