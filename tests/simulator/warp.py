"""A warp: its registers, its lanes that execute together, and how it runs, waits and diverges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import instructions  # noqa: F401  the import registers the instructions
from .accesses import Accesses
from .arithmetic import DTYPES, LANES
from .barriers import CopyGroups
from .copies import Copies
from .races import PLAIN, Access, Clock, SimulationError
from .synchronization import Synchronization
from .translate import ALL, EXIT, Program, effect

if TYPE_CHECKING:
    from .gpu import Cta


class Warp(Accesses, Copies, Synchronization):
    def __init__(self, program: Program):
        self.program = program
        rows = program.kernel.registers
        self._files = {bits: np.empty((rows[bits], 32), f"u{bits // 8}") for bits in (16, 32, 64)}
        self._files[1] = np.empty((rows[1], 32), bool)

    def __getattr__(self, name: str):
        """Makes a list of registers when it is first used: "u32" ... "f64" by type, "low32" ... "high64" for halves of
        registers, "f32x2" for pairs, "pred"."""
        if name == "pred":
            found = list(self._files[1])
        elif name == "f32x2":
            found = list(self._files[64].view(np.float32))
        elif name in ("low32", "high32", "low64", "high64"):
            bits = int(name[-2:])
            found = list(self._files[bits].view(f"u{bits // 16}")[:, name.startswith("high") :: 2])
        elif name in DTYPES:
            found = list(self._files[int(name[1:])].view(DTYPES[name]))
        else:
            raise AttributeError(name)
        self.__dict__[name] = found
        return found

    def begin(self, cta: Cta, number: int, priority: float) -> None:
        """Starts as this warp of this CTA, at the first instruction, with NaN in all registers."""
        self.cta, self.gpu, self.number, self.priority = cta, cta.gpu, number, priority
        for bits, file in self._files.items():
            file.fill(bits > 1 and np.iinfo(file.dtype).max)
        self.pc, self.lanes, self.others, self.alive = 0, None, [], np.ones(32, bool)
        self.waiting: str | None = None
        self.done = self.parked = False
        self.cluster_phase: int | None = None
        self.time = cta.grid.start_time  # counts instructions; a wait adds only the time until its event
        self.agent = self.gpu.ledger.agent(str(self))
        self.first_site = cta.grid.first_site
        self.clock = cta.grid.initial_clock()
        self.groups = CopyGroups(self.gpu.ledger.agent(f"a copy by {self}"))
        self.inits = Clock()  # the inits of mbarriers that fence.mbarrier_init has published
        self.clock.seen[self.agent] = 1

    def __str__(self) -> str:
        return f"warp {self.number} of {self.cta}"

    def special(self, name: str) -> np.ndarray:
        """The values of a special register such as %tid.x."""
        if name == "%laneid" or name == "%tid.x":
            return (LANES + (name == "%tid.x") * 32 * self.number).astype(np.uint32)
        size, cluster, (x, y, z) = self.cta.grid.size, self.cta.grid.cluster, self.cta.index
        triples = {"%tid": (None, 0, 0), "%ntid": (self.program.kernel.threads, 1, 1), "%ctaid": (x, y, z),
                   "%nctaid": size, "%cluster_ctaid": (self.cta.rank, 0, 0), "%clusterid": (x // cluster, y, z),
                   "%nclusterid": (size[0] // cluster, *size[1:])}  # fmt: skip
        numbers = {f"{name}.{axis}": n for name, three in triples.items() for axis, n in zip("xyz", three, strict=True)}
        numbers |= {"%warpid": self.number, "%cluster_ctarank": self.cta.rank, "%cluster_nctarank": cluster}
        return np.full(32, numbers[name], np.uint32)

    # --- Running ---

    def step(self) -> bool:
        """Runs one block. Returns whether the warp can run on: it has not ended, and waits for nothing."""
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
            self.cta.warp_ends(self)  # from here on this object may serve as a warp of another CTA
            return False
        self.parked = self.waiting is not None
        return not self.parked

    def _divide(self, after) -> bool:
        """Divides the lanes after a branch that only some take. Returns False when all lanes have ended.

        One part runs at a time: the part at the smallest block number. Parts that reach the same block join.
        """
        mask = self.alive if self.lanes is None else self.lanes
        taken, target, other = after if isinstance(after, tuple) else (mask, after, EXIT)
        parts = dict(self.others)
        for pc, lanes in ((target, taken), (other, mask & ~taken)):
            if pc == EXIT:
                self.alive = self.alive & ~lanes
            else:
                parts[pc] = parts.get(pc, False) | lanes
        self.others = sorted(parts.items(), reverse=True)
        if not self.others:
            return False
        self.pc, self.lanes = self.others.pop()
        if 0 not in self.lanes.tobytes():
            self.lanes = None
        return True

    def go_on(self, time: int) -> None:
        """Ends the warp's wait: what it waits for has happened at `time`."""
        self.catch_up(time)
        self.waiting = None
        if self.parked:
            self.parked = False
            self.gpu.order.add(self)

    def catch_up(self, time: int) -> None:
        """Moves the warp's time forward to `time`, when its wait was over."""
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

    # --- For the instructions ---

    def access(self, site: int, kind: str = PLAIN) -> Access:
        return Access(self.agent, self.clock.seen[self.agent], self.first_site + site, kind)

    def tick(self) -> None:
        """Begins the next step of the warp's time: a clock that was copied before does not know the steps after."""
        self.clock.seen[self.agent] += 1

    def needs_all(self, lanes, what: str) -> None:
        if lanes is not ALL and 0 in lanes.tobytes():
            raise SimulationError(f"{what} by a part of a warp")

    def needs_whole(self, lanes, what: str) -> None:
        """Raises unless all lanes that have not ended take part."""
        if self.others or (lanes is not ALL and 0 in (lanes == self.alive).tobytes()):
            raise SimulationError(f"{what} by a part of a warp")

    def uniform(self, lanes, values) -> int:
        chosen = np.unique(values[lanes])
        if len(chosen) != 1:
            raise SimulationError("brx.idx to several targets in a warp")
        return int(chosen[0])

    @effect(r"elect\.sync", "= u32")
    def elect(self, lanes, site, into, members) -> None:
        self.needs_all(lanes, "elect")
        number, chosen = into
        chosen[:] = self.gpu.elected == LANES
        if number is not None:
            number[:] = self.gpu.elected
