"""Barriers of a CTA and of a cluster, mbarriers, groups of copies, and the end of a grid.

A barrier joins the clocks of all who arrive (see races.py). When it opens, whoever waits gets the joined clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .races import Clock, SimulationError

if TYPE_CHECKING:
    from .gpu import Cta
    from .warp import Warp

MAX_TX = (1 << 20) - 1


class Barrier:
    """A barrier with phases: each ends when the barrier opens, and hands the knowledge it gathered to its waiters."""

    def __init__(self):
        self.phase = 0
        self.time = self.opened = 0  # times: of the latest arrival; of the last opening
        self.gathered, self.known = Clock(), Clock()  # knowledge: in this phase; in the last
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
    """bar.sync: opens when as many threads have arrived as the instruction says; without a number, when all warps of
    the CTA that still run have arrived."""

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
    """barrier.cluster: opens when every warp of the cluster that still runs has arrived."""

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
    """An mbarrier in shared memory. A wait names only the parity of a phase: a waiter that is a phase late waits on.

    init_agent: the agent of its init. It is not the warp that did it, because a fence may publish the init alone.
    agent: the agent of the copies that complete on it. Its time is the number of the phase.
    """

    def __init__(self, cta: Cta, address: int, count: int, init_agent: int, agent: int):
        super().__init__()
        self.cta, self.address, self.count, self.init_agent, self.agent = cta, address, count, init_agent, agent
        self.pending, self.tx = count, 0  # arrivals that are missing; bytes that are expected and have not landed

    def __str__(self) -> str:
        return f"mbarrier {self.address} (phase {self.phase}, {self.pending} arrivals and {self.tx} bytes pending)"

    def come(self, knowledge: Clock, time: int, count: int, tx: int) -> None:
        """`count` arrivals that expect `tx` more bytes; or a copy that has landed: count is 0, and tx is negative."""
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


class CopyGroups(Barrier):
    """The groups of a warp's copies by cp.async: `phase` counts those that have landed, with all groups before them.

    agent: the agent of the copies. Its time is the number of the group, from 1 on.
    """

    def __init__(self, agent: int):
        super().__init__()
        self.agent, self.committed = agent, 0
        self.pending = [0]  # copies under way, by group from the first that has not landed to the one not committed

    def issue(self) -> int:
        """One more copy under way. Returns the number of groups before its own."""
        self.pending[-1] += 1
        return self.committed

    def commit(self, time: int) -> None:
        self.committed += 1
        self.pending.append(0)
        self._advance(time)

    def land(self, group: int, time: int) -> None:
        self.pending[group - self.phase] -= 1
        self._advance(time)

    def _advance(self, time: int) -> None:
        self.time = max(self.time, time)
        while self.phase < self.committed and not self.pending[0]:
            self.pending.pop(0)
            self.open()
