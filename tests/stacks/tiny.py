"""What the tests of several stacks share: a tiny model of transformers, tokens, and our ops in place on CPU tensors."""

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
    """Inside, modules and functionals of the package reach its ops on CPU tensors as they do on CUDA tensors, with
    ATen in place of the kernels; and the ops that run are recorded."""
    with package.host.kernel_devices.kernels_on("cpu"), package.force("reference"), OpLog() as log:
        yield log


def norms(log: OpLog, namespace: str = "fusednorm") -> dict[str, int]:
    """How often each op of the package ran, such as {"rms_norm_fwd": 5, "rms_norm_bwd": 5}."""
    names = [name.removeprefix(f"{namespace}.").split(".")[0] for name in log.names if name.startswith(f"{namespace}.")]
    return {name: names.count(name) for name in dict.fromkeys(names)}
