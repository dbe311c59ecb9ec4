"""python -m fusednorm hub: writes this package as a repository that Hugging Face's `kernels` loads.

FOLDER/build/torch-cuda holds a build that loads as it is, by a local path or from the Hub. build.toml, flake.nix and
torch-ext/ are the same package as a source for kernel-builder, which builds and uploads it. Both are plain copies: the
host side in C++ is left out, because a build must serve every torch.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import textwrap
from importlib.util import find_spec
from pathlib import Path

from .. import __version__

README = """\
# fusednorm {version}, for Hugging Face's `kernels`

Written by `python -m fusednorm hub`; the next call replaces `build/` and `torch-ext/`.

- `build/torch-cuda/` is the build that `kernels` loads, from this folder or, after an upload, from the Hub.
- `torch-ext/`, `build.toml` and `flake.nix` are the same package as a source for `kernel-builder`.

The host side in C++ is left out, because a build serves every torch.

{use}
"""
SLOTS = "RMSNorm", "RMSNormZeroCentered", "RMSNormGated"  # for which transformers' models name layers
USE = """\
slots = {{getattr(module, "kernel_layer_name", None) for module in model.modules()}} & {{{slots}}}
layers = {{slot: f"{folder}:{{slot}}" for slot in slots}}
config = transformers.KernelConfig(layers, use_local_kernel=True)
model.train().set_use_kernels(True, config)"""
SOURCE = Path("torch-ext", "fusednorm")
PACKAGE = Path(__file__).parent.parent
KERNELS = Path(find_spec("..kernels", __package__).origin).parent  # beside the package in a source tree
LICENSE = "Apache-2.0"
MAJOR = int(__version__.split(".")[0])  # a version of a kernel is one number; 0 is a beta

BUILD = f"""\
[general]
edition = 5
name = "fusednorm"
version = {MAJOR}
license = "{LICENSE}"
backends = ["cuda"]

[torch-noarch]
"""
FLAKE = """\
{
  description = "fusednorm";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs { inherit self; path = ./.; };
}
"""


def run(options: argparse.Namespace) -> int:
    folder = options.folder
    if folder.exists() and any(folder.iterdir()) and not (folder / SOURCE).is_dir():
        raise FileExistsError(f"folder must be new, or one that an earlier call wrote, got {folder}")
    write_repository(folder)
    files = sum(each.is_file() for each in folder.rglob("*"))
    print(f"Wrote {files} files to {folder}; its README.md says what they are. A model of transformers takes it by:\n")
    print(_use(folder))
    return 0


def _use(folder: Path) -> str:
    return USE.format(slots=", ".join(f'"{slot}"' for slot in SLOTS), folder=folder.resolve())


def write_repository(folder: Path) -> None:
    """Write the repository to `folder`. What an earlier call wrote there is replaced."""
    build, source = folder / "build" / "torch-cuda", folder / SOURCE
    for target in (build, source):
        shutil.rmtree(target, ignore_errors=True)
        for file, name in _files():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / name)
    (build / "metadata.json").write_text(json.dumps(_metadata(build), indent=2) + "\n")
    (folder / "build.toml").write_text(BUILD)
    (folder / "flake.nix").write_text(FLAKE)
    use = textwrap.indent(_use(folder), " " * 4)
    (folder / "README.md").write_text(README.format(version=__version__, use=use))


def _files() -> list[tuple[Path, Path]]:
    """(path, path within the package) of each of its files."""
    found = {path: path.relative_to(PACKAGE) for path in _copied(PACKAGE)}
    found |= {path: Path("kernels") / path.name for path in KERNELS.glob("*.py")}
    return sorted(found.items())


def _copied(folder: Path) -> list[Path]:
    """Sources and the planner's data below a folder."""
    return sorted(path for kind in ("*.py", "data/*.json*") for path in folder.rglob(kind))


def _metadata(build: Path) -> dict:
    """What `kernels` reads about a build. It imports the build under the id, which is also the namespace of its ops
    (namespace.py)."""
    content = {path.relative_to(build).as_posix(): path.read_bytes() for path in _copied(build)}
    sums = {name: hashlib.sha256(text).digest() for name, text in content.items()}
    whole = hashlib.sha256(b"".join(name.encode() + sum for name, sum in sums.items())).hexdigest()
    digest = {"algorithm": "sha256", "files": {name: base64.b64encode(sum).decode() for name, sum in sums.items()}}
    return {
        "name": "fusednorm",
        "id": f"_fusednorm_cuda_{whole[:12]}",
        "version": MAJOR,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": "cuda"},
        "digest": digest,
    }
