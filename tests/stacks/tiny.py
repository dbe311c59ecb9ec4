"""Helpers for the tests of several stacks: a tiny model of transformers, tokens, and our ops on CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

from hf_models import build, tokens
from op_log import OpLog

import fusednorm

__all__ = ["build", "norms", "ops_logged", "tokens"]


@contextlib.contextmanager
def ops_logged(package: ModuleType = fusednorm) -> Iterator[OpLog]:
    """A context in which the package's modules and functionals call its ops for CPU tensors as for CUDA tensors. ATen
    does the kernels' work. Yields a log of the ops that run."""
    with package.host.kernel_devices.kernels_on("cpu"), package.force("reference"), OpLog() as log:
        yield log


def norms(log: OpLog, namespace: str = "fusednorm") -> dict[str, int]:
    """How often each op of the package ran, such as {"rms_norm_fwd": 5, "rms_norm_bwd": 5}."""
    names = [name.removeprefix(f"{namespace}.").split(".")[0] for name in log.names if name.startswith(f"{namespace}.")]
    return {name: names.count(name) for name in dict.fromkeys(names)}
