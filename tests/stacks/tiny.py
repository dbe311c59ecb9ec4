"""Helpers for the tests of several stacks: a tiny model of transformers, tokens, and our ops on CPU tensors."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from hf_models import build, tokens
from op_log import OpLog

import fusednorm

__all__ = ["FOUR_STEPS", "build", "losses_of", "norms", "ops_logged", "tokens", "trained_as_stock"]

# Arguments of transformers' Trainer and of those that inherit from it.
FOUR_STEPS = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1}
FOUR_STEPS |= {"report_to": [], "use_cpu": True, "disable_tqdm": True}


@contextlib.contextmanager
def ops_logged(package: ModuleType = fusednorm) -> Iterator[OpLog]:
    """A context in which the package's modules and functionals call its ops for CPU tensors as for CUDA tensors. ATen
    does the kernels' work. Yields a log of the ops that run."""
    with package.host.kernel_devices.kernels_on("cpu"), package.force("reference"), OpLog() as log:
        yield log


def norms(log: OpLog, namespace: str = "fusednorm") -> dict[str, int]:
    """How often each norm of the package ran, of whatever form, such as {"rms_norm_fwd": 5, "rms_norm_bwd": 5}."""
    of_form = re.compile(rf"{namespace}\.(\w+_norm_(?:fwd|bwd))")
    names = [found[1] for found in map(of_form.match, log.names) if found]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def losses_of(trainer) -> list[float]:
    """The losses of the steps of transformers' Trainer."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained_as_stock(
    stock: torch.nn.Module, train: Callable[..., list[float]], op: str, count: int, folder: Path, tolerance: float
) -> torch.nn.Module:
    """A copy of the model with replaced norms, once `train` has trained both: the model in folder/stock, the copy in
    folder/ours. Fails unless the losses are alike and the copy ran `count` norms by our ops in each of four steps."""
    ours = copy.deepcopy(stock)
    assert len(fusednorm.patch_model(ours).replaced) == count
    expected = train(stock, folder / "stock")
    with ops_logged() as log:
        got = train(ours, folder / "ours")
    assert norms(log) == {f"{op}_fwd": 4 * count, f"{op}_bwd": 4 * count}
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance / 10)
    return ours
