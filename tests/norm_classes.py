"""Lists the norm classes of the installed transformers that patch_model leaves, with its reasons.

    python tests/norm_classes.py [MODEL ...]        # all models: some minutes

A norm class is a module in a file of a model whose name ends in Norm. Each is built with 64 columns, and alone. Classes
of the same code are one line.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import fusednorm

COLS = 64
NORM = re.compile(r"Norm(Gated|1P|2d)?$")


class Config:
    """Of any model: 64 for every size."""

    def __getattr__(self, name: str) -> float:
        return 1e-6 if "eps" in name else COLS


SIZES = "hidden_size", "dim", "intermediate_size"  # that have defaults
GIVEN = {"eps": 1e-6, "group_size": 16, "n_groups": 4, "num_groups": 4, "config": Config()}


class Found(NamedTuple):
    name: str
    models: list[str]
    reason: str  # why patch_model leaves it; "" if it does not


def modules_of(model: str) -> Iterator[type[nn.Module]]:
    """The norm classes in the files of a model."""
    package = importlib.import_module(f"transformers.models.{model}")
    for path in sorted(Path(package.__file__).parent.glob("modeling_*.py")):
        if not re.search(r"^class \w*Norm", path.read_text(), re.MULTILINE):
            continue
        try:
            file = importlib.import_module(f"transformers.models.{model}.{path.stem}")
        except Exception:
            continue  # needs a package that is not installed
        for name, each in vars(file).items():
            is_own = isinstance(each, type) and each.__module__ == file.__name__ and issubclass(each, nn.Module)
            if is_own and NORM.search(name):
                yield each


def reason_of(norm: type[nn.Module]) -> str:
    given = {}
    for name, each in list(inspect.signature(norm.__init__).parameters.items())[1:]:
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and (each.default is each.empty or name in SIZES):
            given[name] = GIVEN.get(name, COLS)
    try:
        module = norm(**given)
    except Exception as error:
        return f"not tried: {type(error).__name__} when it is built alone"
    with torch.no_grad():
        for each in module.parameters():
            nn.init.normal_(each, mean=1.0, std=0.2)
    patch = fusednorm.patch_model(module)
    if any(not norm.name for norm in patch.replaced):
        return ""
    return patch.left[0].note if patch.left else "no norm: it has modules of its own"


def list_of(models: Iterable[str]) -> list[Found]:
    """A line for each class, or for all of the same code."""
    found: dict[str, Found] = {}
    for model in models:
        for norm in modules_of(model):
            code = re.sub(r"class \w+", "class", inspect.getsource(norm))
            if code in found:
                found[code].models.append(model)
            else:
                found[code] = Found(norm.__name__, [model], reason_of(norm))
    return [*found.values()]


def main(asked: list[str]) -> int:
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    found = list_of(asked or sorted(each.parent.name for each in folder.glob("*/__init__.py")))
    left = [each for each in found if each.reason]
    many = sum(len(each.models) for each in found)
    print(f"transformers {transformers.__version__}: {many} classes, {len(found)} of different code")
    print(f"left: {sum(len(each.models) for each in left)} classes, {len(left)} of different code")
    for each in sorted(left, key=lambda each: (each.reason, each.name)):
        print(f"| {each.name} | {', '.join(each.models)} | {each.reason} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
