"""simulated(): inside, the ops, modules and gradients of CPU tensors go the way of a device's, and simulated kernels
do the work."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from devices import named, planned_for

from fusednorm import launch, launch_columns, launcher
from fusednorm.device import DeviceSpec
from fusednorm.kernel_devices import kernels_on

from . import launching
from .gpu import Gpu
from .trace import Trace


@dataclass
class Simulation:
    """How kernels run, and which have."""

    spec: DeviceSpec
    seed: int = 0
    resident: int | None = None
    trace: Callable[[], Trace] = Trace  # makes that of each op
    without: dict[str, frozenset[int]] = field(default_factory=dict)
    launched: list[launching.Launched] = field(default_factory=list)
    finished: list[Gpu] = field(default_factory=list)  # one for each op

    def launch(self, launch) -> None:
        """Hand over a launch; those of an op run at its end, as a dependent one may begin before another has ended."""
        self.launched.append(launching.enqueue(launch, self.spec.arch, self._gpu, self.without))

    @functools.cached_property
    def _gpu(self) -> Gpu:
        return Gpu(self.seed + len(self.finished), self.resident, self.trace())

    def op(self, function: Callable) -> Callable:
        """The function, whose launches have run when it returns."""

        def run(*operands):
            outputs = function(*operands)
            if "_gpu" in vars(self):
                gpu = self._gpu
                del self._gpu
                gpu.synchronize()
                self.finished.append(gpu)
            return outputs

        return run


@contextlib.contextmanager
def simulated(device: str | DeviceSpec = "H200", sms: int | None = None, **how) -> Iterator[Simulation]:
    """Inside, CPU tensors are planned for as on this device, with so many SMs (at least twice the largest cluster), and
    our kernels run on them as the compiler made them for it.

    seed: the order of events. resident: how many CTAs, or clusters, have a place at a time.
    Memory that the ops allocate is NaN at first. Raises SimulationError from within the call that a kernel fails in.
    """
    spec = named(device, sms) if isinstance(device, str) else device
    simulation = Simulation(spec, **how)
    with contextlib.ExitStack() as stack:
        for kind in (launcher.Launch, launch_columns.ColumnLaunch):
            stack.enter_context(mock.patch.object(kind, "run", lambda each: simulation.launch(each)))
            stack.enter_context(mock.patch.object(kind, "load", lambda each: None))
        for module, op in ((launch, "forward"), (launch, "backward"), (launch_columns, "column_sum")):
            stack.enter_context(mock.patch.object(module, op, simulation.op(getattr(module, op))))
        for each in (planned_for(spec), kernels_on("cpu"), _fresh_memory_is_nan()):
            stack.enter_context(each)
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
