"""simulated(): inside, the ops, modules and gradients of CPU tensors go the way of a device's, and simulated kernels
do the work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from devices import named, planned_for

from fusednorm import autograd, column_ops, functional, launch, launch_columns, launcher, ops, reference
from fusednorm.device import DeviceSpec
from fusednorm.problem import check_backward, check_forward

from . import launching
from .gpu import Gpu
from .trace import Trace


@dataclass
class Simulation:
    """How kernels run, and which have."""

    spec: DeviceSpec
    seed: int = 0
    resident: int | None = None
    strict: bool = True
    trace: Callable[[], Trace] = Trace  # makes that of each launch
    without: dict[str, frozenset[int]] = field(default_factory=dict)
    launched: list[launching.Launched] = field(default_factory=list)

    def run(self, launch) -> None:
        gpu = Gpu(self.seed + len(self.launched), self.resident, self.strict, self.trace())
        self.launched.append(launching.run(launch, self.spec.arch, gpu, self.without))


@contextlib.contextmanager
def simulated(device: str | DeviceSpec = "H200", sms: int | None = None, **how) -> Iterator[Simulation]:
    """Inside, CPU tensors are planned for as on this device, with so many SMs (at least twice the largest cluster), and
    our kernels run on them as the compiler made them for it.

    seed: the order of events. resident: how many CTAs, or clusters, have a place at a time. strict: a TMA copy needs a
    proxy fence after reads of what it overwrites too. Memory that the ops allocate is NaN at first. Raises
    SimulationError from within the call that a kernel fails in.
    """
    spec = named(device, sms) if isinstance(device, str) else device
    simulation = Simulation(spec, **how)
    with planned_for(spec), mock.patch.object(launcher, "hand_over", simulation.run), _fresh_memory_is_nan(), _on_cpu():
        yield simulation


@contextlib.contextmanager
def _fresh_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """Inside, CPU tensors go where CUDA tensors go."""

    def forward(norm, *operands):
        call = check_forward(norm, *operands)
        return launch.forward(call) if call.rows and call.problem.cols else reference.forward(call)

    def backward(norm, *operands):
        call = check_backward(norm, *operands)
        problem = call.problem
        if not (problem.wants_dx or problem.wants_dw or problem.wants_db):
            return None, None, None
        return launch.backward(call) if call.rows and problem.cols else reference.backward(call)

    def sums(tensors, total, dtype):
        with torch.no_grad():
            return launch_columns.column_sum(column_ops.check_column_sum(tensors, total, dtype))

    with (
        mock.patch.object(ops, "forward", forward),
        mock.patch.object(ops, "backward", backward),
        mock.patch.object(column_ops, "formula", sums),
        mock.patch.object(functional, "layer_norm", autograd.layer_norm),
        mock.patch.object(functional, "rms_norm", autograd.rms_norm),
    ):
        yield
