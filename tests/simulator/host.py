"""simulated(): inside, the ops, modules and gradients of CPU tensors go the way of a device's, and simulated kernels
do the work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from devices import named, standing_in

from fusednorm.host.kernel_devices import kernels_on
from fusednorm.planner.device import DeviceSpec

from . import launching
from .gpu import Gpu
from .recording import Trace


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

    def hand_over(self, launches, loaded: bool = False) -> None:
        """Run an op's launches together: a dependent one may begin before another has ended."""
        gpu = Gpu(self.seed + len(self.finished), self.resident, self.trace())
        self.launched += [launching.enqueue(each, self.spec.arch, gpu, self.without) for each in launches]
        gpu.synchronize()
        self.finished.append(gpu)


@contextlib.contextmanager
def simulated(device: str | DeviceSpec = "H200", sms: int | None = None, **how) -> Iterator[Simulation]:
    """Inside, CPU tensors are planned for as on this device, with so many SMs (at least twice the largest cluster), and
    our kernels run on them as the compiler made them for it.

    seed: the order of events. resident: how many CTAs, or clusters, have a place at a time.
    Memory that the ops allocate is NaN at first. Raises SimulationError from within the call that a kernel fails in.
    """
    simulation = Simulation(named(device, sms) if isinstance(device, str) else device, **how)
    with standing_in(simulation.spec, simulation.hand_over), kernels_on("cpu"), _fresh_memory_is_nan():
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
