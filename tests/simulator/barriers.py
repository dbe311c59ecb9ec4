"""What warps wait at: barriers of a CTA and of a cluster, and mbarriers. Each hands on what those who came know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .races import Clock, SimulationError

if TYPE_CHECKING:
    from .gpu import Cta
    from .warp import Warp

MAX_TX = (1 << 20) - 1


@dataclass
class NamedBarrier:
    """bar.sync: opens when as many threads have come as it is said to be of, or all of the CTA's that still run."""

    cta: Cta
    number: int
    threads: int | None = None
    waiting: list[Warp] = field(default_factory=list)

    def come(self, warp: Warp, threads: int | None) -> None:
        if self.waiting and self.threads != threads:
            raise SimulationError(f"bar.sync {self.number} of {self.threads} and of {threads} threads at a time")
        self.threads = threads
        self.waiting.append(warp)
        warp.wait(f"bar.sync {self.number}")
        self.check()

    def check(self) -> None:
        need = self.cta.running if self.threads is None else self.threads // 32
        if not self.waiting or len(self.waiting) < need:
            return
        known, here = Clock(), self.waiting
        self.waiting = []
        for warp in here:
            known.join(warp.clock)
        time = max(warp.time for warp in here)
        for warp in here:
            warp.clock = known.copy()
            warp.tick()
            warp.go_on(time)


@dataclass
class ClusterBarrier:
    """barrier.cluster: its wait opens when every thread of the cluster that still runs has arrived."""

    members: list[Cta] = field(default_factory=list)
    phase: int = 0
    arrived: int = 0
    time: int = 0  # of the last arrival
    opened: int = 0  # when the last phase was complete
    gathered: Clock = field(default_factory=Clock)
    known: Clock = field(default_factory=Clock)  # by those who wait, of the last phase
    waiting: list[Warp] = field(default_factory=list)

    def arrive(self, warp: Warp, knowledge: Clock) -> None:
        self.gathered.join(knowledge)
        self.arrived += 1
        self.time = max(self.time, warp.time)
        self.check()

    def check(self) -> None:
        if not self.arrived or self.arrived < sum(cta.running for cta in self.members):
            return
        self.phase, self.arrived, self.opened = self.phase + 1, 0, self.time
        self.known, self.gathered = self.gathered, Clock()
        waiting, self.waiting = self.waiting, []
        for warp in waiting:
            warp.clock.join(self.known)
            warp.go_on(self.opened)


@dataclass
class MBarrier:
    """An object in shared memory. A wait is for a parity only: whoever comes a phase late is not told."""

    cta: Cta
    address: int
    count: int
    init_agent: int  # of its init, which others may know of when they know nothing else of who did it
    agent: int  # of the copies that complete on it, whose time is the phase
    pending: int = 0
    tx: int = 0  # bytes that are expected and have not come
    phase: int = 0
    time: int = 0
    opened: int = 0
    gathered: Clock = field(default_factory=Clock)
    known: Clock = field(default_factory=Clock)
    waiting: list[Warp] = field(default_factory=list)

    def __post_init__(self):
        self.pending = self.count

    def __str__(self) -> str:
        return f"mbarrier {self.address} (phase {self.phase}, {self.pending} arrivals and {self.tx} bytes pending)"

    def arrive(self, knowledge: Clock, time: int, count: int = 1, expected: int = 0) -> None:
        self.gathered.join(knowledge)
        self.time = max(self.time, time)
        if self.pending < count:
            raise SimulationError(f"{self}: {count} more arrivals than it counts")
        self.tx += expected
        self.pending -= count
        self._check()

    def complete(self, nbytes: int, knowledge: Clock | None, time: int) -> None:
        """A copy has come."""
        if knowledge is not None:
            self.gathered.join(knowledge)
        self.time = max(self.time, time)
        self.tx -= nbytes
        self._check()

    def _check(self) -> None:
        if abs(self.tx) > MAX_TX:
            raise SimulationError(f"{self}: tx-count out of range")
        if self.pending or self.tx:
            return
        self.phase, self.pending, self.opened = self.phase + 1, self.count, self.time
        self.known, self.gathered = self.gathered, Clock()
        self.known.join(Clock({self.agent: self.phase}, {self.agent: self.phase}))
        waiting, self.waiting = self.waiting, []
        self.cta.gpu.trace.phase(self)
        for warp in waiting:
            warp.go_on(self.opened)
