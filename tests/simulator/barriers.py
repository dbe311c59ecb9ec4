"""What warps wait at: barriers of a CTA and of a cluster, mbarriers, and the end of a grid. Each hands on what those
who came know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .races import Clock, SimulationError

if TYPE_CHECKING:
    from .gpu import Cta
    from .warp import Warp

MAX_TX = (1 << 20) - 1


class Barrier:
    """Its phases, each with what is known by whoever waits for its end."""

    def __init__(self):
        self.phase = 0
        self.time = self.opened = 0  # of the last arrival; when the last phase was complete
        self.gathered, self.known = Clock(), Clock()  # in this phase, in the last
        self.waiting: list[Warp] = []

    def gather(self, knowledge: Clock, time: int) -> None:
        self.gathered.join(knowledge)
        self.time = max(self.time, time)

    def open(self) -> None:
        self.phase, self.opened = self.phase + 1, self.time
        self.known, self.gathered = self.gathered, Clock()
        waiting, self.waiting = self.waiting, []
        for warp in waiting:
            warp.go_on(self.opened)


class NamedBarrier(Barrier):
    """bar.sync: opens when as many threads have come as it is said to be of, or all of the CTA's that still run."""

    def __init__(self, cta: Cta, number: int):
        super().__init__()
        self.cta, self.number = cta, number
        self.threads: int | None = None

    def come(self, warp: Warp, threads: int | None) -> None:
        if self.waiting and self.threads != threads:
            raise SimulationError(f"bar.sync {self.number} of {self.threads} and of {threads} threads at a time")
        self.threads = threads
        self.waiting.append(warp)
        warp.waiting = f"bar.sync {self.number}"
        self.gather(warp.clock, warp.time)
        self.check()

    def check(self) -> None:
        need = self.cta.running if self.threads is None else self.threads // 32
        here = self.waiting
        if here and len(here) >= need:
            self.open()
            for warp in here:
                warp.clock = self.known.copy()
                warp.tick()


class ClusterBarrier(Barrier):
    """barrier.cluster: its wait opens when every thread of the cluster that still runs has arrived."""

    def __init__(self):
        super().__init__()
        self.members: list[Cta] = []
        self.arrived = 0

    def arrive(self, knowledge: Clock, time: int) -> None:
        self.gather(knowledge, time)
        self.arrived += 1
        self.check()

    def check(self) -> None:
        if self.arrived and self.arrived >= sum(cta.running for cta in self.members):
            self.arrived = 0
            self.open()


class MBarrier(Barrier):
    """An object in shared memory. A wait is for a parity only: whoever comes a phase late is not told.

    init_agent: of its init, which others may know of when they know nothing else of who did it.
    agent: of the copies that complete on it, whose time is the phase.
    """

    def __init__(self, cta: Cta, address: int, count: int, init_agent: int, agent: int):
        super().__init__()
        self.cta, self.address, self.count, self.init_agent, self.agent = cta, address, count, init_agent, agent
        self.pending, self.tx = count, 0  # arrivals, and bytes that are expected and have not come

    def __str__(self) -> str:
        return f"mbarrier {self.address} (phase {self.phase}, {self.pending} arrivals and {self.tx} bytes pending)"

    def come(self, knowledge: Clock, time: int, count: int, tx: int) -> None:
        """So many arrivals, and more bytes to expect; or a copy, whose bytes are less to expect."""
        self.gather(knowledge, time)
        if self.pending < count:
            raise SimulationError(f"{self}: {count} more arrivals than it counts")
        self.tx += tx
        self.pending -= count
        if abs(self.tx) > MAX_TX:
            raise SimulationError(f"{self}: tx-count out of range")
        if not self.pending and not self.tx:
            self.pending = self.count
            copies = {self.agent: self.phase + 1}
            self.gathered.join(Clock(copies, copies))
            self.cta.gpu.trace.completes(self)
            self.open()
