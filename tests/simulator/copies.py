"""Asynchronous copies. A warp issues them, and they land later: TMA's boxes and st.async's words on an mbarrier, those
of cp.async in a group of the warp's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import OFFSET_BITS, RANK_SHIFT
from .barriers import CopyGroups
from .memory import COPY_ALIGNMENT, TensorMap
from .races import COPY, COPY_USE, PLAIN, USE, Clock, SimulationError
from .translate import effect

if TYPE_CHECKING:
    from .gpu import Cta

# In instructions, for the times in a trace only: the order of events does not depend on it.
LATENCY = {"TMA": 700, "st.async": 100, "cp.async": 600}


@dataclass
class Copy:
    """A copy that is under way."""

    kind: str
    cta: Cta  # the copy goes to its shared memory
    at: int
    nbytes: int
    barrier: int  # the shared address of the mbarrier
    source: tuple[TensorMap, list[int]] | np.ndarray
    knowledge: Clock  # handed to the mbarrier when the copy lands
    issued: int
    priority: float

    def step(self) -> bool:
        """Lands the copy. Returns False: there is nothing left to do."""
        cta, gpu = self.cta, self.cta.gpu
        cta.copies_under_way -= 1
        if isinstance(self.source, tuple):
            tensor, corner = self.source
            self.source = tensor.read(gpu.memory, corner)
        cta.memory.raw[self.at : self.at + self.nbytes] = self.source
        time = self.issued + LATENCY[self.kind]
        gpu.trace.landed(self, time)
        cta.mbarrier(self.barrier).come(self.knowledge, time, 0, -self.nbytes)
        return False


@dataclass
class LaneCopies:
    """The copies of a warp's lanes by one cp.async, under way. Bytes behind those of its source become zeros."""

    kind = "cp.async"
    cta: Cta
    targets: np.ndarray  # by lane: bytes in shared memory
    sources: np.ndarray  # by lane: the address, and how many bytes come from there
    counts: np.ndarray
    width: int  # bytes of a lane's copy
    groups: CopyGroups
    group: int
    issued: int
    priority: float

    @property
    def at(self) -> int:
        return int(self.targets[0])

    @property
    def nbytes(self) -> int:
        return self.width * len(self.targets)

    def step(self) -> bool:
        """Lands the copies. Returns False: there is nothing left to do."""
        cta, gpu = self.cta, self.cta.gpu
        cta.copies_under_way -= 1
        for at, source, count in zip(self.targets.tolist(), self.sources.tolist(), self.counts.tolist(), strict=True):
            target = cta.memory.raw[at : at + self.width]
            target[:] = 0
            if count:
                region, base = gpu.memory.find(source)
                target[:count] = region.raw[source - base : source - base + count]
        time = self.issued + LATENCY[self.kind]
        gpu.trace.landed(self, time)
        self.groups.land(self.group, time)
        return False


class Copies:
    """Methods of Warp, one for each kind of copy."""

    @effect(
        r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(?:cluster|cta)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes"
        r"(?:\.L2::cache_hint)?",
        "[] [map] [] -?",
    )
    def tma(self, lanes, site, targets, maps, coordinates, barriers) -> None:
        for target, tensor, barrier, *corner in self.each(lanes, targets, maps, barriers, *coordinates):
            cta, at = self._cta_of(target)
            if at % COPY_ALIGNMENT:
                raise SimulationError(f"TMA copy to shared byte {at}, no multiple of {COPY_ALIGNMENT}")
            tensor = self.cta.grid.tensor_maps.get(tensor)
            if tensor is None or len(corner) != len(tensor.box):
                raise SimulationError(f"TMA copy by {tensor} at {len(corner)} coordinates")
            self._issue("TMA", cta, at, tensor.box_bytes, barrier, (tensor, corner), Clock(), site)

    @effect(r"st\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes\.b(32|64)", "[] u{0} []")
    def st_async(self, lanes, site, bits, targets, values, barriers) -> None:
        for target, value, barrier in self.each(lanes, targets, values, barriers):
            (cta, at), (home, barrier) = self._cta_of(target), self._cta_of(barrier)
            if home is not cta:
                raise SimulationError("st.async with its mbarrier in another CTA than its target")
            data = np.array([value], f"u{int(bits) // 8}").view(np.uint8)
            self._issue("st.async", cta, at, len(data), barrier, data, self.clock.copy(), site)

    @effect(r"cp\.async\.c[ag]\.shared\.global(?:\.L2::\w+)*", "[] [] u32 u32? -?")
    def cp_async(self, lanes, site, targets, sources, widths, counts=None) -> None:
        """The bytes count as written, and as read, at once, by an agent that nobody knows before a wait for the
        group. There is no second proxy."""
        width = int(widths[0])
        counts = (widths if counts is None else counts)[lanes].astype(np.int64)  # a copy: registers change
        if width not in (4, 8, 16) or (counts > width).any():
            raise SimulationError(f"cp.async of {width} bytes, {counts.max()} of them from memory")
        cta, at, sources = self.cta, targets[lanes].astype(np.int64), sources[lanes].astype(np.int64)
        cta.memory.check(at, width)
        access = self.access(site)._replace(agent=self.groups.agent, time=self.groups.committed + 1)
        cta.memory.shadow.write(cta.memory.shadow.lanes(at, width), access, self.clock)
        if (read := counts > 0).any():
            region, base = self.gpu.memory.find(int(sources[read][0]))
            region.check(sources[read] - base, width)
            region.shadow.read(region.shadow.lanes(sources[read] - base, width), access, self.clock)
        cta.copies_under_way += 1
        group, order = self.groups.issue(), self.gpu.order
        resources = at, sources, counts, width, self.groups, group
        copies = LaneCopies(cta, *resources, self.time, order.draw_copy())
        self.gpu.trace.issued(copies, self)
        self.tick()
        order.add(copies)

    @effect(r"cp\.async\.commit_group")
    def commit_group(self, lanes, site) -> None:
        self.needs_whole(lanes, "cp.async.commit_group")
        self.groups.commit(self.time)

    @effect(r"cp\.async\.wait_group", "u32", waits=True)
    def wait_group(self, lanes, site, most) -> bool:
        """Waits until `most` of the last groups, at most, are under way. The warp gets to know those before them,
        and no other that has landed."""
        self.needs_whole(lanes, "cp.async.wait_group")
        last = self.groups.committed - int(most[0])
        if not self.is_over(self.groups, self.groups.phase >= last, f"group {last} of cp.async"):
            return False
        self.clock.join(Clock({self.groups.agent: max(last, 0)}))
        return True

    def _cta_of(self, address: int) -> tuple[Cta, int]:
        """The CTA of the cluster that the address belongs to, and the byte in that CTA's shared memory."""
        rank, members = address >> RANK_SHIFT, self.cta.cluster_barrier.members
        if not 0 <= rank <= len(members):
            raise SimulationError(f"access to shared memory at {address:#x}, which no CTA of the cluster has")
        cta = members[rank - 1] if rank else self.cta
        if not cta.running:
            raise SimulationError(f"access to the shared memory of {cta}, which has ended")
        return cta, address & OFFSET_BITS

    def _issue(self, kind, cta, at, nbytes, barrier, source, knowledge, site) -> None:
        """Starts a copy. The target counts as written at once, in the mbarrier's next phase: whoever accesses it before
        having waited for that phase races with the copy."""
        if at + nbytes > cta.memory.size:
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
        self.tick()
        order.add(copy)
