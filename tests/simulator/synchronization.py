"""A warp's instructions for barriers, fences, and the order between dependent grids."""

from __future__ import annotations

import numpy as np

from .barriers import Barrier, MBarrier
from .races import INIT, USE, Clock, SimulationError
from .translate import effect

SPURIOUS = 0.1  # the share of try_waits that give up early, as hardware may
MBARRIER = r"\.shared(?:::cta)?\.b64"
ZERO, ONE = np.zeros(32, int), np.ones(32, int)


class Synchronization:
    """Methods of Warp, one for each kind of instruction."""

    def is_over(self, barrier: Barrier, over: bool, what: str) -> bool:
        """Returns `over`. If true, the warp joins the barrier's knowledge; if not, it waits until the barrier opens and
        then tries the instruction again."""
        if over:
            self.clock.join(barrier.known)
            self.catch_up(barrier.opened)
        else:
            barrier.waiting.append(self)
            self.waiting = what
        return over

    @effect(r"bar\.sync|barrier\.sync|barrier\.cta\.sync", "u32 u32?")
    def bar(self, lanes, site, number, threads=None) -> None:
        self.needs_whole(lanes, "bar.sync")
        self.cta.barrier(int(number[0])).come(self, None if threads is None else int(threads[0]))

    @effect(r"barrier\.cluster\.arrive(\.release|\.relaxed)?(?:\.aligned)?")
    def cluster_arrive(self, lanes, site, order) -> None:
        self.needs_whole(lanes, "barrier.cluster.arrive")
        if self.cluster_phase is not None:
            raise SimulationError("barrier.cluster.arrive twice without a wait")
        barrier = self.cta.cluster_barrier
        self.cluster_phase = barrier.phase
        knowledge = self.inits if order == ".relaxed" else self.clock.copy()
        self.tick()
        barrier.arrive(knowledge, self.time)

    @effect(r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?", waits=True)
    def cluster_wait(self, lanes, site) -> bool:
        self.needs_whole(lanes, "barrier.cluster.wait")
        if self.cluster_phase is None:
            raise SimulationError("barrier.cluster.wait without an arrive")
        barrier = self.cta.cluster_barrier
        if not self.is_over(barrier, barrier.phase != self.cluster_phase, "barrier.cluster"):
            return False
        self.cluster_phase = None
        return True

    # --- Fences ---

    @effect(r"fence\.proxy\.async(?:\.shared::cta|\.shared::cluster)?")
    def fence_proxy(self, lanes, site) -> None:
        """All that the warp knows now is ordered before its later copies as well."""
        self.clock.fence()
        self.tick()

    @effect(r"fence\.mbarrier_init\.release\.cluster")
    def fence_inits(self, lanes, site) -> None:
        """From now on even a relaxed arrival at the cluster's barrier publishes the inits that the warp knows."""
        known = {each.init_agent: 1 for each in self.cta.mbarriers.values() if each.init_agent in self.clock.seen}
        self.inits.join(Clock(known, known))
        self.clock.fenced.update(known)

    # --- Mbarriers ---

    @effect(rf"mbarrier\.init{MBARRIER}", "[] u32")
    def mbarrier_init(self, lanes, site, at, counts) -> None:
        for address, count in self.each(lanes, at, counts):
            self.cta.memory.check(np.array([address]), 8)
            if address in self.cta.mbarriers:
                raise SimulationError(f"mbarrier.init of {self.cta.mbarriers[address]}, which is valid")
            agents = self.gpu.ledger.agent(str(self)), self.gpu.ledger.agent(f"a copy to {self.cta}")
            self.cta.mbarriers[address] = MBarrier(self.cta, address, count, *agents)
            self.clock.seen[agents[0]] = 1
            access = self.access(site, INIT)._replace(agent=agents[0], time=1)
            shadow = self.cta.memory.shadow
            shadow.write(shadow.bytes(address, 8), access, self.clock)

    @effect(rf"mbarrier\.inval{MBARRIER}", "[]")
    def mbarrier_inval(self, lanes, site, at) -> None:
        for (address,) in self.each(lanes, at):
            barrier, shadow = self.cta.mbarrier(address), self.cta.memory.shadow
            if barrier.waiting or barrier.tx:
                raise SimulationError(f"mbarrier.inval of {barrier}, which is in use")
            shadow.write(shadow.bytes(address, 8), self.access(site, INIT), self.clock)
            shadow.forget(shadow.bytes(address, 8), self.access(site))
            del self.cta.mbarriers[address]

    @effect(rf"mbarrier\.arrive{MBARRIER}", "_ [] u32?")
    def mbarrier_arrive(self, lanes, site, at, counts=ONE) -> None:
        self._arrive(lanes, site, at, counts, ZERO)

    @effect(rf"mbarrier\.arrive\.expect_tx{MBARRIER}", "_ [] u32")
    def mbarrier_expect(self, lanes, site, at, nbytes) -> None:
        self._arrive(lanes, site, at, ONE, nbytes)

    def _arrive(self, lanes, site, at, counts, nbytes) -> None:
        for address, count, tx in self.each(lanes, at, counts, nbytes):
            barrier = self._used(address, site)
            knowledge = self.clock.copy()
            self.tick()
            barrier.come(knowledge, self.time, count, tx)

    @effect(rf"mbarrier\.(?:try|test)_wait\.parity{MBARRIER}", "= [] u32", waits=True)
    def mbarrier_wait(self, lanes, site, into, at, parity) -> bool:
        """Waits for the phase with this parity to end; may give up early, as hardware may."""
        asked = {(address, wanted & 1) for address, wanted in self.each(lanes, at, parity)}
        if len(asked) > 1:
            raise SimulationError("lanes of a warp wait for different mbarriers")
        ((address, wanted),) = asked
        barrier = self._used(address, site)
        over = barrier.phase & 1 != wanted
        if over or self.gpu.order.random.random() >= SPURIOUS:
            if not self.is_over(barrier, over, f"parity {wanted} of {barrier}"):
                return False
        into[0][lanes] = over
        return True

    def _used(self, address: int, site: int) -> MBarrier:
        barrier, shadow = self.cta.mbarrier(address), self.cta.memory.shadow
        shadow.read(shadow.bytes(address, 8), self.access(site, USE), self.clock)
        return barrier

    def each(self, lanes, *values):
        """A tuple of numbers for each lane: its elements of `values`."""
        return zip(*(value[lanes].tolist() for value in values), strict=True)

    # --- Dependent grids ---

    @effect(r"griddepcontrol\.wait", waits=True)
    def grid_wait(self, lanes, site) -> bool:
        """Waits until the grid before has ended; then all of its stores are known."""
        before = self.cta.grid.before
        if before is None or not self.cta.grid.dependent:
            return True
        return self.is_over(before.end, before.done, "the grid before")

    @effect(r"griddepcontrol\.launch_dependents")
    def grid_trigger(self, lanes, site) -> None:
        self.cta.trigger(self.time)
