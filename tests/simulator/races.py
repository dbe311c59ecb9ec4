"""Who knows of what: the happens-before order of PTX's memory model, and accesses that it leaves unordered.

An agent is a warp, or an mbarrier on behalf of the copies that complete on it. It counts its time in steps, one for
each release. A clock says up to which time of every agent its holder knows what was done ("seen"), and of how much of
it the asynchronous proxy is told by a proxy fence on the way ("fenced"). Every few bytes of memory have a record of
their last write and the reads since. A read must know of the write; a write of both; a TMA copy, which is of the
asynchronous proxy, by way of a fence. So a value that a GPU may or may not show is never used: it is an error.

Lanes of a warp are one agent: what bar.warp.sync is for is not seen.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .ptx import Instruction


class SimulationError(Exception):
    """What a GPU would not do, or not do reliably."""


class Race(SimulationError):
    """Two accesses to a byte, one of them a write, that nothing orders."""


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
    site: int  # of the instruction, in Ledger.sites
    kind: str


PLAIN, ATOMIC, COPY = "plain", "atomic", "copy"  # a copy is of the asynchronous proxy
INIT, USE, COPY_USE = "init", "use", "copy's use"  # of an mbarrier


class Numbered(list):
    """Values that can be hashed, each once."""

    def __init__(self, first):
        super().__init__([first])
        self._numbers = {first: 0}

    def number(self, value) -> int:
        found = self._numbers.setdefault(value, len(self))
        if found == len(self):
            self.append(value)
        return found


class Ledger:
    """All accesses and all sets of reads, by number: alike bytes share one. Number 0 is what memory begins with."""

    def __init__(self):
        self.agents: list[str] = ["nobody"]
        self.sites: list[Instruction] = []
        self.accesses, self.read_sets = Numbered(Access(0, 0, 0, PLAIN)), Numbered(())

    def agent(self, name: str) -> int:
        self.agents.append(name)
        return len(self.agents) - 1

    def with_read(self, reads: int, number: int, clock: Clock) -> int:
        """The set of reads with another, by one who knows `clock`; what it knows of is told with it."""
        agent, kept = self.accesses[number].agent, []
        for each in self.read_sets[reads]:
            before = self.accesses[each]
            if before.agent != agent and before.time > clock.seen.get(before.agent, 0):
                kept.append(each)
        return self.read_sets.number((*kept, number))

    def check(self, earlier: int, how: str, access: Access, writes: bool, clock: Clock) -> None:
        """That an access by one who knows `clock` may follow an earlier one. Raises Race."""
        before, this = self.accesses[earlier], "writes" if writes else "reads"
        if before.kind == access.kind == ATOMIC:
            return
        if before.kind == INIT and access.kind in (PLAIN, ATOMIC, COPY) and writes:
            raise SimulationError(f"{self.where(access)} {this} the memory of a live mbarrier")
        by_copy = access.kind in (COPY, COPY_USE) and before.kind != COPY  # after reads too, as PTX has it
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
    """The last write and the reads since then of a piece of memory, by `granule` bytes."""

    def __init__(self, ledger: Ledger, size: int, granule: int):
        self.ledger, self.shift = ledger, granule.bit_length() - 1
        self.writes = np.zeros((size >> self.shift) + 1, np.int32)
        self.reads = np.zeros_like(self.writes)
        self._steps = {n << self.shift: np.arange(n) for n in (2, 4, 8, 16, 32)}

    def lanes(self, at: np.ndarray, nbytes: int) -> np.ndarray:
        """The pieces of accesses of so many bytes from `at` on."""
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
        """`unchanged()` says which pieces keep their bits. There a store is not held to be a write: several warps may
        store the same value."""
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
        """What was there before this write is over."""
        self.writes[where], self.reads[where] = self.ledger.accesses.number(access), 0

    def _check(self, where, access: Access, writes: bool, clock: Clock) -> None:
        for write in _different(self.writes[where]):
            self.ledger.check(write, "written", access, writes, clock)
        for reads in _different(self.reads[where]) if writes else ():
            for read in self.ledger.read_sets[reads]:
                self.ledger.check(read, "read", access, writes, clock)


def _different(numbers: np.ndarray):
    first = numbers.item(0)
    return (first,) if (numbers == first).all() else set(numbers.ravel().tolist())
