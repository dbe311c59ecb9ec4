"""Unsloth's norms and rotation of q and k. Only its files of kernels are loaded.

Its own import needs more packages and replaces functions of torch and transformers in the process. The kernels, and
what chooses their launches, need three names of unsloth_zoo that have no part in either.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from importlib import util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from . import packages


def missing() -> str | None:
    return packages.missing("unsloth", "--no-deps unsloth") or packages.missing("transformers", "transformers")


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, tables: tuple[Tensor, Tensor], eps: float
) -> tuple[Tensor, ...]:
    """As its Qwen3 calls it: one launch if both weights are frozen, else one for each norm and one for the rotation."""
    norms = (SimpleNamespace(weight=weight, eps=eps) for weight in (q_weight, k_weight))
    return tuple(each.transpose(1, 2) for each in _kernels().fast_qk_norm_rope(*norms, q, k, *tables))


@functools.cache  # its ops can be registered once
def _kernels() -> ModuleType:
    """Its packages, without their code, are modules only while this one is imported."""
    if reason := missing():
        raise ModuleNotFoundError(reason)
    from packaging.version import Version

    (folder,) = map(Path, util.find_spec("unsloth").submodule_search_locations)
    stand_ins: dict[str, dict[str, object]] = {
        "unsloth": {"__path__": [str(folder)]},
        "unsloth.kernels": {"__path__": [str(folder / "kernels")]},
        "unsloth_zoo": {},
        "unsloth_zoo.utils": {"Version": Version},
        "unsloth_zoo.log": {"logger": logging.getLogger(__name__)},
        "unsloth_zoo.temporary_patches.common": {"torch_compile": torch.compile},
    }
    for name, names in stand_ins.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(names)
    tag = torch.compiler.config.cache_key_tag
    try:
        return importlib.import_module("unsloth.kernels.qk_norm_rope")
    finally:
        torch.compiler.config.cache_key_tag = tag  # else Inductor finds nothing that other processes compile ahead
        for name in [name for name in sys.modules if name.partition(".")[0] in ("unsloth", "unsloth_zoo")]:
            del sys.modules[name]

