"""Finds races: accesses that the happens-before order of PTX's memory model leaves unordered. It uses vector clocks.

An agent is a warp, the init of an mbarrier, the copies that complete on an mbarrier, or a warp's copies by cp.async. An
agent's time counts steps; a warp begins a new step at each release. A clock says, for every agent, up to which time its
holder knows the agent's accesses ("seen"). It also says up to which time a proxy fence has ordered them before
asynchronous copies ("fenced").

Each few bytes of memory have a record of their last write and of the reads since. Whoever reads must know the write.
Whoever writes must know the write and the reads. A TMA copy belongs to the asynchronous proxy, and must know earlier
plain accesses by way of a proxy fence. An access without this knowledge raises Race: a kernel never uses a value that
a GPU might or might not show.

The lanes of a warp are one agent: a missing bar.warp.sync is not found.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .ptx import Instruction


class SimulationError(Exception):
    """The kernel does something that a GPU would refuse, or would not do reliably."""


class Race(SimulationError):
    """Two accesses to the same bytes, at least one of them a write, in no order."""


class Clock:
    __slots__ = ("seen", "fenced")

    def __init__(self, seen=(), fenced=()):
        self.seen: dict[int, int] = dict(seen)  # time, by agent
        self.fenced: dict[int, int] = dict(fenced)

    def copy(self) -> Clock:
        return Clock(self.seen, self.fenced)

    def join(self, other: Clock) -> None:
        for mine, theirs in ((self.seen, other.seen), (self.fenced, other.fenced)):
            for agent, time in theirs.items():
                if mine.get(agent, 0) < time:
                    mine[agent] = time

    def fence(self) -> None:
        self.fenced.update(self.seen)


class Access(NamedTuple):
    agent: int
    time: int
    site: int  # index of the instruction in Ledger.sites
    kind: str


PLAIN, ATOMIC, COPY = "plain", "atomic", "copy"  # kinds of accesses to data; only TMA copies are "copy"
INIT, USE, COPY_USE = "init", "use", "copy's use"  # kinds of accesses to an mbarrier


class Numbered(list):
    """A list of distinct hashable values, which finds the number of a value."""

    def __init__(self, first):
        super().__init__([first])
        self._numbers = {first: 0}

    def number(self, value) -> int:
        found = self._numbers.setdefault(value, len(self))
        if found == len(self):
            self.append(value)
        return found


class Ledger:
    """Numbers for all accesses and all sets of reads: the records of bytes hold these numbers. Number 0 stands for no
    access yet."""

    def __init__(self):
        self.agents: list[str] = ["nobody"]
        self.sites: list[Instruction] = []
        self.accesses, self.read_sets = Numbered(Access(0, 0, 0, PLAIN)), Numbered(())

    def agent(self, name: str) -> int:
        self.agents.append(name)
        return len(self.agents) - 1

    def with_read(self, reads: int, number: int, clock: Clock) -> int:
        """The number of a set of reads with one more read, whose reader knows `clock`.

        Earlier reads that the reader knows are dropped: whoever knows the new read knows them, too.
        """
        agent, kept = self.accesses[number].agent, []
        for each in self.read_sets[reads]:
            before = self.accesses[each]
            if before.agent != agent and before.time > clock.seen.get(before.agent, 0):
                kept.append(each)
        return self.read_sets.number((*kept, number))

    def check(self, earlier: int, how: str, access: Access, writes: bool, clock: Clock) -> None:
        """Raises Race unless `access`, by an agent that knows `clock`, is ordered after the earlier one."""
        before, this = self.accesses[earlier], "writes" if writes else "reads"
        if before.kind == access.kind == ATOMIC:
            return
        if before.kind == INIT and access.kind in (PLAIN, ATOMIC, COPY) and writes:
            raise SimulationError(f"{self.where(access)} {this} the memory of a live mbarrier")
        by_copy = access.kind in (COPY, COPY_USE) and before.kind != COPY  # PTX wants the fence after reads, too
        if before.time > clock.seen.get(before.agent, 0):
            lacks = "nothing orders them"
        elif by_copy and before.time > clock.fenced.get(before.agent, 0):
            lacks = "no proxy fence is between them"
        else:
            return
        raise Race(f"{self.where(access)} {this} what is {how} by {self.where(before)}: {lacks}")

    def where(self, access: Access) -> str:
        each = self.sites[access.site]
        return f"{self.agents[access.agent]} ({each.opcode} at {each.place or 'an unknown line'})"


class Shadow:
    """The last write and the reads since, for each `granule` bytes of a region."""

    def __init__(self, ledger: Ledger, size: int, granule: int):
        self.ledger, self.shift = ledger, granule.bit_length() - 1
        self.writes = np.zeros((size >> self.shift) + 1, np.int32)
        self.reads = np.zeros((size >> self.shift) + 1, np.int32)
        self._steps = {n << self.shift: np.arange(n) for n in (2, 4, 8, 16, 32)}

    def lanes(self, at: np.ndarray, nbytes: int) -> np.ndarray:
        """The indices of the granules that accesses of `nbytes` at the offsets `at` touch."""
        first = at >> self.shift
        return first if nbytes >> self.shift <= 1 else first[:, None] + self._steps[nbytes]

    def bytes(self, at: int, nbytes: int) -> slice:
        return slice(at >> self.shift, -(-(at + nbytes) >> self.shift))

    def read(self, where, access: Access, clock: Clock) -> None:
        self._check(where, access, False, clock)
        before, number = self.reads[where], self.ledger.accesses.number(access)
        after = {each: self.ledger.with_read(each, number, clock) for each in _different(before)}
        if len(after) == 1:
            self.reads[where] = next(iter(after.values()))
        else:
            self.reads[where] = np.array([after[each] for each in before.ravel().tolist()]).reshape(before.shape)

    def write(self, where, access: Access, clock: Clock, unchanged=None) -> None:
        """Records a write. `unchanged()`, called only at a race, says which granules keep their bits. A store there is
        not a write, because several warps may store the same value."""
        try:
            self._check(where, access, True, clock)
        except Race:
            if unchanged is None:
                raise
            changed = ~unchanged()
            if not changed.any():
                return
            where = np.broadcast_to(where, changed.shape)[changed]
            self._check(where, access, True, clock)
        self.forget(where, access)

    def forget(self, where, access: Access) -> None:
        """Records a write without a check, and drops the reads before it."""
        self.writes[where], self.reads[where] = self.ledger.accesses.number(access), 0

    def _check(self, where, access: Access, writes: bool, clock: Clock) -> None:
        for write in _different(self.writes[where]):
            self.ledger.check(write, "written", access, writes, clock)
        for reads in _different(self.reads[where]) if writes else ():
            for read in self.ledger.read_sets[reads]:
                self.ledger.check(read, "read", access, writes, clock)


def _different(numbers: np.ndarray):
    first = numbers.item(0)
    return (first,) if 0 not in (numbers == first).tobytes() else set(numbers.ravel().tolist())
