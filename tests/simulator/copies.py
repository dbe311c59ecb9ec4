"""Copies that land later: TMA's boxes and st.async's words. They are issued by a warp and complete on an mbarrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .memory import COPY_ALIGNMENT, TensorMap
from .races import COPY, COPY_USE, PLAIN, USE, Clock, SimulationError
from .translate import SHARED_BASE

if TYPE_CHECKING:
    from .gpu import Cta

RANK_SHIFT, OFFSET_BITS = 24, (1 << 24) - 1  # of addresses that mapa makes: the CTA's rank + 1, and where in it
LATENCY = {"TMA": 700, "st.async": 100}  # instructions that a picture shows it to take


@dataclass
class Copy:
    """One that is under way."""

    kind: str
    cta: Cta  # to whose shared memory
    at: int
    nbytes: int
    barrier: int
    source: tuple[TensorMap, list[int]] | np.ndarray
    knowledge: Clock | None  # that it makes known when it completes
    issued: int
    priority: float

    def step(self) -> bool:
        cta, gpu = self.cta, self.cta.gpu
        cta.copies_under_way -= 1
        if isinstance(self.source, tuple):
            tensor, corner = self.source
            self.source = tensor.read(gpu.memory, corner)
        cta.memory.raw[self.at : self.at + self.nbytes] = self.source
        time = self.issued + LATENCY[self.kind]
        gpu.trace.landed(self, time)
        cta.mbarrier(self.barrier).complete(self.nbytes, self.knowledge, time)
        return False


class Copies:
    """Of a Warp. `mask` are the lanes, None for all; `site` is the instruction."""

    def tma(self, targets, offset, maps, coordinates, barriers, barrier_offset, mask, site) -> None:
        for lane, at in self._lanes(targets, offset, mask):
            cta, at = self._cta_of(at)
            if (at + SHARED_BASE) % COPY_ALIGNMENT:
                raise SimulationError(f"TMA copy to shared byte {at}, no multiple of {COPY_ALIGNMENT}")
            tensor = self.cta.grid.tensor_maps.get(int(maps[lane]))
            if tensor is None or len(coordinates) != len(tensor.box):
                raise SimulationError(f"TMA copy by {tensor} at {len(coordinates)} coordinates")
            source = tensor, [int(each[lane]) for each in coordinates]
            barrier = int(barriers[lane]) + barrier_offset - SHARED_BASE
            self._issue("TMA", cta, at, tensor.box_bytes, barrier, source, None, site)

    def st_async(self, addresses, offset, values, barriers, barrier_offset, mask, site) -> None:
        for lane, at in self._lanes(addresses, offset, mask):
            cta, at = self._cta_of(at)
            home, barrier = self._cta_of(int(barriers[lane]) + barrier_offset - SHARED_BASE)
            if home is not cta:
                raise SimulationError("st.async with its mbarrier in another CTA than its target")
            data = values[lane : lane + 1].view(np.uint8).copy()
            self._issue("st.async", cta, at, len(data), barrier, data, self.clock.copy(), site)

    def mapa(self, addresses, ranks) -> np.ndarray:
        return (addresses & np.uint32(OFFSET_BITS)) | ((ranks + np.uint32(1)) << np.uint32(RANK_SHIFT))

    def _cta_of(self, at: int) -> tuple[Cta, int]:
        """The CTA of the cluster that an address is in, and the byte of its shared memory."""
        rank, offset = (at + SHARED_BASE) >> RANK_SHIFT, ((at + SHARED_BASE) & OFFSET_BITS) - SHARED_BASE
        cta = self.cta if rank == 0 else self.cta.cluster_barrier.members[rank - 1]
        if not cta.running:
            raise SimulationError(f"access to the shared memory of {cta}, which has ended")
        return cta, offset

    def _issue(self, kind, cta, at, nbytes, barrier, source, knowledge, site) -> None:
        """Nobody may look at the target from now on who has not waited for the mbarrier's phase."""
        if at < 0 or at + nbytes > cta.memory.size:
            raise SimulationError(f"copy to bytes {at} to {at + nbytes} of {cta.memory.name}")
        shadow, completes_on = cta.memory.shadow, cta.mbarrier(barrier)
        writes, completes = (COPY, COPY_USE) if kind == "TMA" else (PLAIN, USE)
        shadow.read(shadow.bytes(barrier, 8), self.access(site, completes), self.clock)
        landing = self.access(site, writes)._replace(agent=completes_on.agent, time=completes_on.phase + 1)
        shadow.write(shadow.bytes(at, nbytes), landing, self.clock)
        cta.copies_under_way += 1
        order = self.gpu.order
        copy = Copy(kind, cta, at, nbytes, barrier, source, knowledge, self.time, order.draw_copy())
        self.gpu.trace.issued(copy, self)
        if knowledge is not None:
            self.tick()
        order.add(copy)
