"""What a warp does at barriers, fences, and the borders between grids."""

from __future__ import annotations

import numpy as np

from .barriers import MBarrier
from .races import INIT, USE, Clock, SimulationError
from .translate import SHARED_BASE

SPURIOUS = 0.1  # how often a try_wait gives up, as hardware may


class Synchronization:
    """Of a Warp. `mask` are the lanes, None for all; `site` is the instruction."""

    def bar(self, number, threads, mask) -> None:
        self.needs_whole(mask, "bar.sync")
        self.cta.barrier(int(number[0])).come(self, None if threads is None else int(threads[0]))

    def cluster_arrive(self, relaxed, mask) -> None:
        self.needs_whole(mask, "barrier.cluster.arrive")
        if self.cluster_phase is not None:
            raise SimulationError("barrier.cluster.arrive twice without a wait")
        barrier = self.cta.cluster_barrier
        self.cluster_phase = barrier.phase
        knowledge = self.inits if relaxed else self.clock
        self.tick()
        barrier.arrive(self, knowledge)

    def cluster_wait(self, mask) -> None:
        self.needs_whole(mask, "barrier.cluster.wait")
        if self.cluster_phase is None:
            raise SimulationError("barrier.cluster.wait without an arrive")
        barrier = self.cta.cluster_barrier
        if barrier.phase == self.cluster_phase:
            barrier.waiting.append(self)
            self.wait("barrier.cluster")
        else:
            self.clock.join(barrier.known)
            self.catch_up(barrier.opened)
        self.cluster_phase = None

    # --- Fences ---

    def fence_proxy(self, mask) -> None:
        """fence.proxy.async: copies may count on what is known here."""
        if mask is None or mask.any():
            self.clock.fence()
            self.tick()

    def fence_inits(self, mask) -> None:
        """fence.mbarrier_init: even a relaxed arrival makes the inits known."""
        if mask is None or mask.any():
            own = {barrier.init_agent: 1 for barrier in self.cta.mbarriers.values()}
            known = {agent: 1 for agent in own if agent in self.clock.seen}
            self.inits.join(Clock(known, known))
            self.clock.fenced.update(known)

    # --- Mbarriers ---

    def _lanes(self, addresses, offset, mask):
        for lane in range(32) if mask is None else np.flatnonzero(mask):
            yield lane, int(addresses[lane]) + offset - SHARED_BASE

    def mbarrier_init(self, addresses, offset, counts, mask, site) -> None:
        for lane, at in self._lanes(addresses, offset, mask):
            self.cta.memory.check(np.array([at]), 8)
            if at in self.cta.mbarriers:
                raise SimulationError(f"mbarrier.init of {self.cta.mbarriers[at]}, which is valid")
            agents = self.gpu.ledger.agent(str(self)), self.gpu.ledger.agent(f"a copy to {self.cta}")
            self.cta.mbarriers[at] = MBarrier(self.cta, at, int(counts[lane]), *agents)
            self.clock.seen[agents[0]] = 1
            access = self.access(site, INIT)._replace(agent=agents[0], time=1)
            self._note(at, access, True)

    def mbarrier_inval(self, addresses, offset, mask, site) -> None:
        for _, at in self._lanes(addresses, offset, mask):
            barrier = self.cta.mbarrier(at)
            if barrier.waiting or barrier.tx:
                raise SimulationError(f"mbarrier.inval of {barrier}, which is in use")
            self._note(at, self.access(site, INIT), True)
            self._note(at, self.access(site), True, forget=True)
            del self.cta.mbarriers[at]

    def mbarrier_arrive(self, addresses, offset, count, expected, mask, site) -> None:
        for lane, at in self._lanes(addresses, offset, mask):
            barrier = self.cta.mbarrier(at)
            self._note(at, self.access(site, USE), False)
            knowledge = self.clock.copy()
            self.tick()
            barrier.arrive(knowledge, self.time, int(count[lane]), int(expected[lane]))

    def mbarrier_wait(self, pred, addresses, offset, parity, mask, site) -> bool:
        """False if it has to wait. It waits for a parity, and may give up before."""
        lanes = np.arange(32) if mask is None else np.flatnonzero(mask)
        if not len(lanes):
            return True
        asked = {(int(addresses[lane]) + offset - SHARED_BASE, int(parity[lane]) & 1) for lane in lanes}
        if len(asked) > 1:
            raise SimulationError("lanes of a warp wait for different mbarriers")
        at, wanted = asked.pop()
        barrier = self.cta.mbarrier(at)
        self._note(at, self.access(site, USE), False)
        over = barrier.phase & 1 != wanted
        if over:
            self.clock.join(barrier.known)
            self.catch_up(barrier.opened)
        elif self.gpu.order.random.random() >= SPURIOUS:
            barrier.waiting.append(self)
            self.wait(f"parity {wanted} of {barrier}")
            return False
        pred[lanes] = over
        return True

    def _note(self, at: int, access, writes: bool, forget: bool = False) -> None:
        """An access to an mbarrier's memory."""
        shadow = self.cta.memory.shadow
        if forget:
            shadow.forget(shadow.bytes(at, 8), access)
        elif writes:
            shadow.write(shadow.bytes(at, 8), access, self.clock)
        else:
            shadow.read(shadow.bytes(at, 8), access, self.clock)

    # --- Dependent grids ---

    def grid_wait(self, mask) -> bool:
        """griddepcontrol.wait: until the grid before is done, all of whose stores are known then."""
        before = self.cta.grid.before
        if before is None or not self.cta.grid.dependent or (mask is not None and not mask.any()):
            return True
        if not before.done:
            before.waiting.append(self)
            self.wait("the grid before")
            return False
        self.clock.join(before.known)
        self.catch_up(before.time)
        return True

    def grid_trigger(self, mask) -> None:
        """griddepcontrol.launch_dependents."""
        if mask is None or mask.any():
            self.cta.trigger(self.time)
