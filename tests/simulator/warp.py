"""A warp: registers, the lanes that go together, and what its instructions ask of memory and of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .accesses import Accesses
from .arithmetic import DTYPES, LANES
from .copies import Copies
from .races import PLAIN, Access, Clock, SimulationError
from .synchronization import Synchronization
from .translate import EXIT, Program

if TYPE_CHECKING:
    from .gpu import Cta


class Warp(Accesses, Copies, Synchronization):
    def __init__(self, program: Program):
        self.program = program
        rows = program.kernel.registers
        self._files = {bits: np.empty((rows[bits], 32), f"uint{bits}") for bits in (16, 32, 64)}
        self.pred = list(np.empty((rows[1], 32), bool))

    def __getattr__(self, name: str):
        """The lists of registers, when they are first used: u32 ... f64, the halves low32 ... high64, and f32x2."""
        if name == "f32x2":
            found = list(self._files[64].view(np.float32))
        elif name in ("low32", "high32", "low64", "high64"):
            bits = int(name[-2:])
            found = list(self._files[bits].view(f"uint{bits // 2}")[:, name.startswith("high") :: 2])
        elif name in DTYPES and not name.startswith("_"):
            found = list(self._files[int(name[1:])].view(DTYPES[name]))
        else:
            raise AttributeError(name)
        self.__dict__[name] = found
        return found

    def begin(self, cta: Cta, number: int, priority: float) -> None:
        """From the first instruction on, as this warp of this CTA; registers are NaN."""
        self.cta, self.gpu, self.number, self.priority = cta, cta.gpu, number, priority
        for file in self._files.values():
            file.fill(np.iinfo(file.dtype).max)
        for row in self.pred:
            row.fill(False)
        self.pc, self.lanes, self.others, self.alive = 0, None, [], np.ones(32, bool)
        self.waiting: str | None = None
        self.done = self.parked = False
        self.cluster_phase: int | None = None
        self.time = cta.grid.start_time  # instructions, where none waits for another longer than it must
        self.agent = self.gpu.ledger.agent(str(self))
        self.first_site = cta.grid.first_site
        self.clock = cta.grid.initial_clock()
        self.inits = Clock()  # what of it is known to be of mbarriers' inits, and published as such
        self.clock.seen[self.agent] = 1
        grid, (x, y, z), cluster = cta.grid, cta.index, cta.grid.cluster
        numbers = {"%tid.y": 0, "%tid.z": 0, "%ctaid.x": x, "%ctaid.y": y, "%ctaid.z": z, "%ntid.y": 1, "%ntid.z": 1,
                   "%ntid.x": self.program.kernel.threads, "%nctaid.x": grid.size[0], "%nctaid.y": grid.size[1],
                   "%nctaid.z": grid.size[2], "%warpid": number, "%cluster_ctarank": cta.rank,
                   "%cluster_nctarank": cluster, "%cluster_ctaid.x": cta.rank, "%clusterid.x": x // cluster,
                   "%clusterid.y": y, "%clusterid.z": z, "%nclusterid.x": grid.size[0] // cluster,
                   "%nclusterid.y": grid.size[1], "%nclusterid.z": grid.size[2]}  # fmt: skip
        self.special = {name: np.full(32, value, np.uint32) for name, value in numbers.items()}
        self.special["%laneid"] = LANES.astype(np.uint32)
        self.special["%tid.x"] = self.special["%laneid"] + np.uint32(32 * number)

    def __str__(self) -> str:
        return f"warp {self.number} of {self.cta}"

    # --- Going on ---

    def step(self) -> bool:
        masked = self.lanes is not None
        start, end = self.program.blocks[self.pc]
        self.gpu.trace.runs(self, start, end)
        self.time += end - start
        try:
            after = self.program.block(self.pc, masked)(self, self.lanes)
        except SimulationError as error:
            raise type(error)(f"{error}\n    at {self._where(error, masked)}") from error
        if type(after) is int and after >= 0 and not self.others:
            self.pc = after
        elif not self._divide(after):
            self.done = True
            self.cta.warp_ends(self)  # from here on it may be another CTA's
            return False
        self.parked = self.waiting is not None
        return not self.parked

    def _divide(self, after) -> bool:
        """Lanes that part go on one part at a time, those furthest back first, and join where they meet again. False
        when all have ended."""
        mask = self.alive if self.lanes is None else self.lanes
        if isinstance(after, tuple):
            taken, target, other = after
            parts = [(target, taken), (other, mask & ~taken)]
        else:
            parts = [(after, mask)]
        for pc, lanes in parts:
            if pc == EXIT:
                self.alive = self.alive & ~lanes
                continue
            there = next((n for n, (where, _) in enumerate(self.others) if where == pc), None)
            if there is None:
                self.others.append((pc, lanes))
            else:
                self.others[there] = pc, self.others[there][1] | lanes
        if not self.others:
            return False
        self.others.sort(key=lambda part: -part[0])
        self.pc, self.lanes = self.others.pop()
        if self.lanes.all():
            self.lanes = None
        return True

    def wait(self, what: str) -> None:
        self.waiting = what

    def go_on(self, time: int) -> None:
        """What it waits for has come about, at that time."""
        self.catch_up(time)
        self.waiting = None
        if self.parked:
            self.parked = False
            self.gpu.order.add(self)

    def catch_up(self, time: int) -> None:
        """It can have gone on at that time only."""
        if time > self.time:
            self.gpu.trace.waited(self, time)
            self.time = time

    def where(self) -> str:
        each = self.program.kernel.code[self.program.blocks[self.pc][0]]
        return f"{self} waits for {self.waiting}, before {each.text!r} ({each.place})"

    def _where(self, error: Exception, masked: bool) -> str:
        trace, line = error.__traceback__, 0
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == f"<{self.program.kernel.name}>":
                line = trace.tb_lineno
            trace = trace.tb_next
        each = self.program.instruction_at(self.pc, masked, line)
        return f"{each.text!r} ({each.place}) in {self}"

    # --- What is asked of the warp itself ---

    def access(self, site: int, kind: str = PLAIN) -> Access:
        return Access(self.agent, self.clock.seen[self.agent], self.first_site + site, kind)

    def tick(self) -> None:
        """What it does from now on is not known by those who know what it did."""
        self.clock.seen[self.agent] += 1

    def needs_all(self, mask, what: str) -> None:
        if not mask.all():
            raise SimulationError(f"{what} by a part of a warp")

    def needs_whole(self, mask, what: str) -> None:
        """Lanes that have ended may be missing."""
        if self.others or (mask is not None and not (mask == self.alive).all()):
            raise SimulationError(f"{what} by a part of a warp")

    def uniform(self, values, mask) -> int:
        chosen = np.unique(values if mask is None else values[mask])
        if len(chosen) != 1:
            raise SimulationError("brx.idx to several targets in a warp")
        return int(chosen[0])

    def elect(self, into, pred, mask) -> None:
        if mask is not None:
            self.needs_all(mask, "elect")
        pred[:] = self.gpu.elected == LANES
        if into is not None:
            into[:] = self.gpu.elected
