"""The GPU: memory, a limited number of places for resident CTAs, and grids that wait for each other."""

from __future__ import annotations

import itertools

import numpy as np
from torch import Tensor

from .barriers import Barrier, ClusterBarrier, MBarrier, NamedBarrier
from .memory import GlobalMemory, Region, TensorMap
from .order import Deadlock, Order
from .races import Clock, Ledger, SimulationError
from .recording import Trace
from .translate import PARAMETER_BASE, PARAMETER_PAGE, Program
from .warp import Warp

PLACES = 16  # how many CTAs are resident at a time by default
MOST_REPORTED = 16  # warps that the message of a deadlock lists


class Cta:
    def __init__(self, grid: Grid, index: tuple[int, int, int], cluster_barrier: ClusterBarrier):
        self.grid, self.gpu, self.index, self.cluster_barrier = grid, grid.gpu, index, cluster_barrier
        self.rank = len(cluster_barrier.members)
        cluster_barrier.members.append(self)
        program, order = grid.program, self.gpu.order
        size = -(-(program.dynamic_base + grid.shared_bytes) // 16) * 16
        raw = np.full(size, 0xFF, np.uint8)  # NaN in every type
        self.memory = Region(raw, f"shared memory of {self}", self.gpu.ledger, granule=1)
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.copies_under_way = 0
        self.triggered = False
        self.running = program.kernel.threads // 32
        of_cta = order.draw_cta()
        self.warps = [program.idle_warps.pop() if program.idle_warps else Warp(program) for _ in range(self.running)]
        for number, warp in enumerate(self.warps):
            warp.begin(self, number, order.draw(of_cta))

    def __str__(self) -> str:
        index = self.index[0] if self.grid.size[1:] == (1, 1) else self.index
        return f"CTA {index}" + (f" of {self.grid.program.kernel.name}" if self.grid.is_later else "")

    def mbarrier(self, at: int) -> MBarrier:
        if at not in self.mbarriers:
            raise SimulationError(f"no mbarrier at shared byte {at} of {self}")
        return self.mbarriers[at]

    def barrier(self, number: int) -> NamedBarrier:
        if number not in self.named:
            self.named[number] = NamedBarrier(self, number)
        return self.named[number]

    def trigger(self, time: int) -> None:
        self.triggered = True
        self.grid.announced = max(self.grid.announced, time)
        self.grid.check()

    def warp_ends(self, warp: Warp) -> None:
        self.running -= 1
        self.grid.end.gather(warp.clock, warp.time)
        if not self.triggered:
            self.grid.announced = max(self.grid.announced, warp.time)
        for barrier in self.named.values():
            if barrier.threads is None:
                barrier.check()
        self.cluster_barrier.check()
        if not self.running and self.copies_under_way:
            raise SimulationError(f"{self} ends with {self.copies_under_way} copies to it under way")
        if not any(cta.running for cta in self.cluster_barrier.members):
            self.grid.cluster_ends(self.cluster_barrier)


class Grid:
    """One launch.

    It may begin when the grid before it in its stream has ended. A dependent grid may begin earlier: when every CTA of
    the grid before has executed griddepcontrol.launch_dependents ("triggered") or ended.
    """

    def __init__(
        self, gpu: Gpu, program: Program, size, cluster: int, shared_bytes: int, parameters: list,
        before: Grid | None, dependent: bool,
    ):  # fmt: skip
        self.gpu, self.program, self.size, self.cluster = gpu, program, tuple(size), cluster
        self.shared_bytes, self.before, self.dependent = shared_bytes, before, dependent
        self.is_later = bool(gpu.grids)
        maps = ((n, each) for n, each in enumerate(parameters) if isinstance(each, TensorMap))
        self.tensor_maps = {PARAMETER_BASE + PARAMETER_PAGE * n: each for n, each in maps}  # by address
        words = [0 if isinstance(each, TensorMap) else each & ((1 << 64) - 1) for each in parameters]
        self.parameters = np.array(words, np.uint64)
        self.first_site = len(gpu.ledger.sites)
        gpu.ledger.sites += program.kernel.code
        self.to_come = [index[::-1] for index in itertools.product(*map(range, size[::-1]))][::-1]
        self.clusters: list[ClusterBarrier] = []
        self.end = Barrier()
        self.start_time = 0
        self.announced = 0  # the time when the latest CTA triggered or ended

    @property
    def done(self) -> bool:
        return self.end.phase > 0

    def ctas(self) -> list[Cta]:
        """The CTAs that are resident."""
        return [cta for each in self.clusters for cta in each.members]

    def may_begin(self) -> bool:
        if self.before is None or self.before.done:
            return True
        announced = all(cta.triggered or not cta.running for cta in self.before.ctas())
        return self.dependent and not self.before.to_come and announced

    def initial_clock(self) -> Clock:
        return Clock() if self.before is None or self.dependent else self.before.end.known.copy()

    def begin_cluster(self) -> None:
        if self.before is not None and not self.start_time:
            self.start_time = self.before.announced if self.dependent else self.before.end.opened
        barrier = ClusterBarrier()
        for _ in range(self.cluster):
            Cta(self, self.to_come.pop(), barrier)
        self.clusters.append(barrier)
        for cta in barrier.members:
            for warp in cta.warps:
                self.gpu.order.add(warp)

    def cluster_ends(self, barrier: ClusterBarrier) -> None:
        self.clusters.remove(barrier)
        self.program.idle_warps += [warp for cta in barrier.members for warp in cta.warps]
        self.check()

    def check(self) -> None:
        """To be called when a CTA has ended or triggered: ends the grid after its last CTA, and begins CTAs that waited
        for this."""
        if not self.to_come and not self.clusters and not self.done:
            self.end.gathered.fence()
            self.end.open()
        self.gpu.fill()


class Gpu:
    """resident: how many CTAs are resident at a time; in a grid with clusters, how many clusters."""

    def __init__(self, seed: int = 0, resident: int | None = None, trace: Trace | None = None):
        self.order, self.ledger, self.memory = Order(seed), Ledger(), GlobalMemory()
        self.resident, self.trace = resident, trace or Trace()
        self.elected = self.order.random.randrange(32)
        self.released: dict[tuple[int, int], Clock] = {}  # by (region, address): what releases there published
        self.grids: list[Grid] = []
        self._last: dict[int, Grid] = {}  # by stream

    def add_tensor(self, tensor: Tensor) -> None:
        """Let kernels reach a tensor's memory."""
        memory = tensor.untyped_storage()
        name = f"a tensor of shape {tuple(tensor.shape)}"
        self.memory.add(memory.data_ptr(), memory.nbytes(), memory, name, self.ledger, min(tensor.element_size(), 4))

    def launch(self, program: Program, size, cluster, shared_bytes, parameters, stream=0, dependent=False) -> None:
        """Queues a grid, which runs at the next `synchronize`.

        `size` counts CTAs; each of `parameters` is an integer or a TensorMap.
        """
        before = self._last.get(stream)
        self._last[stream] = Grid(self, program, size, cluster, shared_bytes, parameters, before, dependent)
        self.grids.append(self._last[stream])

    def fill(self) -> None:
        """Begins clusters of CTAs until no place is free or no grid may begin more."""
        for grid in self.grids:
            while grid.to_come and grid.may_begin():
                places = self.resident if self.resident is not None else max(1, PLACES // grid.cluster)
                if sum(len(each.clusters) for each in self.grids) >= places:
                    return
                grid.begin_cluster()

    def synchronize(self) -> None:
        """Runs all queued grids to their end. Raises SimulationError."""
        with np.errstate(all="ignore"):
            self.fill()
            self.order.run()
        if any(not grid.done for grid in self.grids):
            raise Deadlock("nobody can go on\n" + "\n".join(self._waiting()))
        self.grids.clear()
        self._last.clear()

    def _waiting(self) -> list[str]:
        warps = [warp for grid in self.grids for cta in grid.ctas() for warp in cta.warps if not warp.done]
        lines = [warp.where() for warp in warps]
        lines += [f"{len(grid.to_come)} CTAs have no place" for grid in self.grids if grid.to_come]
        more = len(lines) - MOST_REPORTED
        return [*lines[:MOST_REPORTED], *([f"and {more} more"] if more > 0 else [])]
