"""simulated(): inside, ops and modules on CPU tensors, and their gradients, take the host path of CUDA tensors, and the
simulated GPU runs the kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from devices import named, standing_in
from torch import Tensor

from fusednorm.host.kernel_devices import kernels_on
from fusednorm.planner.device import DeviceSpec
from fusednorm.planner.plan import Plan

from . import launching
from .gpu import Gpu
from .recording import Trace


@dataclass
class Simulation:
    """The settings of the simulated GPU, and the launches that it has run."""

    spec: DeviceSpec
    seed: int = 0
    resident: int | None = None
    trace: Callable[[], Trace] = Trace  # makes the trace of each op
    without: dict[str, frozenset[int]] = field(default_factory=dict)
    launched: list[launching.Launched] = field(default_factory=list)
    finished: list[Gpu] = field(default_factory=list)  # one for each op

    def hand_over(self, launches) -> None:
        """Runs the launches of one op together: a dependent one may begin before the launch before it has ended."""
        gpu = Gpu(self.seed + len(self.finished), self.resident, self.trace())
        self.launched += [launching.enqueue(each, self.spec.arch, gpu, self.without) for each in launches]
        gpu.synchronize()
        self.finished.append(gpu)


@contextlib.contextmanager
def simulated(device: str | DeviceSpec = "H200", sms: int | None = None, **how) -> Iterator[Simulation]:
    """Inside, the planner plans for CPU tensors as on this device, and the compiled kernels run on them in simulation.

    device: a name or a spec. sms: its number of SMs, at least twice the largest cluster.
    seed: fixes the order of events. resident: how many CTAs, or clusters, are resident at a time.
    Memory that the ops allocate is NaN at first. A call whose kernel fails raises SimulationError.
    """
    simulation = Simulation(named(device, sms) if isinstance(device, str) else device, **how)
    with standing_in(simulation.spec, simulation.hand_over), kernels_on("cpu"), _fresh_memory_is_nan():
        yield simulation


def outputs_of(call, plan: Plan | None = None, device: str = "H200", sms: int = 2, **how) -> tuple[Tensor | None, ...]:
    """The outputs of a norm's call by this plan, or by the planner's choice, once `simulated`."""
    from fusednorm.host import launch

    with simulated(device, sms, **how) as simulation:
        prepared = launch.on_tensors(call, plan)
        simulation.hand_over(prepared.launches)
    return prepared.outputs


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
