"""Counts the attentions of the installed transformers whose norms of q and k run together with the rotation.

    python tests/attention_classes.py [MODEL ...]        # all models: some minutes

An attention is a module in a file of a model with a norm of q and one of k. Each is built alone from a default config
of its model, and runs twice under `patch_model(rotary=True)`. Those that do not run are left out of the count.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import nn

import fusednorm
from fusednorm.integrations import rotating

NORMS = [re.compile(rf"{of}_?(layer_?)?norm") for of in ("q(uery)?", "k(ey)?")]
TOKENS = 4


def files_of(model: str) -> Iterator[ModuleType]:
    package = importlib.import_module(f"transformers.models.{model}")
    for path in sorted(Path(package.__file__).parent.glob("modeling_*.py")):
        if re.search(r"self\.k\w*norm = ", path.read_text()):
            try:
                yield importlib.import_module(f"transformers.models.{model}.{path.stem}")
            except Exception:
                continue  # needs a package that is not installed


def classes_of(file: ModuleType, ending: str) -> list[type]:
    """Those of the model whose names end so."""
    of_model = f"{file.__package__}."
    found = [each for name, each in vars(file).items() if name.endswith(ending) and isinstance(each, type)]
    return [each for each in found if each.__module__.startswith(of_model)]


def built(attention: type[nn.Module], config: type) -> tuple[nn.Module, object] | None:
    """The attention, and its config. None if it takes other arguments, or has no such norms."""
    module = None
    for more in ({"layer_idx": 0}, {}):  # Hugging Face's `kernels` hides what its constructor takes
        with contextlib.suppress(Exception), torch.device("meta"):
            made = config(attn_implementation="sdpa")
            module = module or attention(made, **more)
    if module is None or not all(any(norm.fullmatch(name) for name in module._modules) for norm in NORMS):
        return None
    module.to_empty(device="cpu")
    for each in module.parameters():
        nn.init.constant_(each, each.dim() == 1)
    return module, made


def joins(module: nn.Module, config: object, file: ModuleType) -> bool:
    """Whether the attention runs qk_norm. Raises what its forward raises."""
    x, positions = torch.randn(1, TOKENS, config.hidden_size), torch.arange(TOKENS)[None]
    tables = (torch.ones(1, TOKENS, getattr(module, "head_dim", 0)),) * 2
    for rotary in classes_of(file, "RotaryEmbedding"):
        with contextlib.suppress(Exception):  # of another part of the model, or it asks for the kind of layer
            tables = rotary(config)(x, positions)
    given = {"position_embeddings": tables, "attention_mask": None, "past_key_values": None, "position_ids": positions}
    given = {name: each for name, each in given.items() if name in inspect.signature(module.forward).parameters}
    qk_norm = mock.Mock(wraps=rotating.qk_norm)
    ours = mock.patch.multiple(rotating, qk_norm=qk_norm, runs_kernels=lambda x: True)
    with ours, fusednorm.patch_model(module, rotary=True), torch.no_grad():
        for _ in range(2):
            module(x, **given)
    return qk_norm.called


def found_in(models: Iterable[str]) -> dict[str, bool]:
    """Of each attention that runs, whether it runs qk_norm."""
    found = {}
    for file in (file for model in models for file in files_of(model)):
        for attention in classes_of(file, "Attention"):
            for config in classes_of(file, "Config"):
                if (made := built(attention, config)) is not None:
                    try:
                        found[attention.__name__] = joins(*made, file)
                        break
                    except Exception as error:
                        print(f"{attention.__name__} does not run: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def main(asked: list[str]) -> int:
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    found = found_in(asked or sorted(each.parent.name for each in folder.glob("*/__init__.py")))
    for says, wanted in (("run qk_norm", True), ("do not", False)):
        names = [name for name, has in found.items() if has == wanted]
        print(f"{len(names)} of {len(found)} {says}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
