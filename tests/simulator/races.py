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
FRESH = 0  # the record of memory that nobody has touched


class Ledger:
    """All records. Memory holds their numbers: alike bytes share one."""

    def __init__(self, strict: bool):
        self.strict = strict  # a copy's fence must cover reads too, as PTX has it, and not only writes
        self.agents: list[str] = []
        self.sites: list[Instruction] = []
        self._accesses: list[Access] = []
        self._access_numbers: dict[Access, int] = {}
        self._records: list[tuple[int | None, tuple[int, ...]]] = [(None, ())]  # last write, reads since
        self._record_numbers = {self._records[0]: FRESH}
        self._next: dict[tuple[int, int, bool], int] = {}

    def agent(self, name: str) -> int:
        self.agents.append(name)
        return len(self.agents) - 1

    def number(self, access: Access) -> int:
        found = self._access_numbers.setdefault(access, len(self._accesses))
        if found == len(self._accesses):
            self._accesses.append(access)
        return found

    def after(self, record: int, access: int, writes: bool, clock: Clock) -> int:
        """The record of memory with `record` after an access (its number) by one who knows `clock`. Raises Race."""
        key = record, access, writes
        found = self._next.get(key)
        if found is None:
            found = self._next[key] = self._number_after(*self._records[record], access, writes, clock)
        return found

    def _number_after(self, write: int | None, reads: tuple[int, ...], access: int, writes: bool, clock: Clock) -> int:
        if write is not None:
            self._check(write, "written", access, writes, clock)
        if writes:
            for read in reads:
                self._check(read, "read", access, writes, clock)
            new = access, ()
        else:
            new = write, (*(each for each in reads if not self._is_known(each, access, clock)), access)
        found = self._record_numbers.setdefault(new, len(self._records))
        if found == len(self._records):
            self._records.append(new)
        return found

    def _is_known(self, before: int, access: int, clock: Clock) -> bool:
        """Whether who knows of `access` knows of `before` as well."""
        known, new = self._accesses[before], self._accesses[access]
        return known.agent == new.agent or known.time <= clock.seen.get(known.agent, 0)

    def _check(self, earlier: int, how: str, later: int, writes: bool, clock: Clock) -> None:
        before, access = self._accesses[earlier], self._accesses[later]
        if before.kind == access.kind == ATOMIC:
            return
        if before.kind == INIT and access.kind in (PLAIN, ATOMIC, COPY) and writes:
            raise SimulationError(f"{self._describe(access, writes)} the memory of a live mbarrier")
        if before.time > clock.seen.get(before.agent, 0):
            raise Race(f"{self._describe(access, writes)} what is {how} by {self.where(before)}: nothing orders them")
        by_copy = access.kind in (COPY, COPY_USE) and before.kind != COPY and (how == "written" or self.strict)
        if by_copy and before.time > clock.fenced.get(before.agent, 0):
            fence = "no proxy fence is between them"
            raise Race(f"{self._describe(access, writes)} what is {how} by {self.where(before)}: {fence}")

    def _describe(self, access: Access, writes: bool) -> str:
        return f"{self.where(access)} {'writes' if writes else 'reads'}"

    def where(self, access: Access) -> str:
        each = self.sites[access.site]
        return f"{self.agents[access.agent]} ({each.opcode} at {each.place or 'an unknown line'})"


class Shadow:
    """The records of a piece of memory, one for each `granule` bytes."""

    def __init__(self, ledger: Ledger, size: int, granule: int):
        self.ledger, self.shift = ledger, granule.bit_length() - 1
        self.records = np.zeros((size >> self.shift) + 1, np.int32)
        self._steps = {n << self.shift: np.arange(n) for n in (2, 4, 8, 16, 32)}

    def lanes(self, at: np.ndarray, nbytes: int) -> np.ndarray:
        """The pieces of accesses of so many bytes from `at` on."""
        first = at >> self.shift
        return first if nbytes >> self.shift <= 1 else first[:, None] + self._steps[nbytes]

    def bytes(self, at: int, nbytes: int) -> slice:
        return slice(at >> self.shift, -(-(at + nbytes) >> self.shift))

    def read(self, where, access: Access, clock: Clock) -> None:
        self._advance(where, access, False, clock, None)

    def write(self, where, access: Access, clock: Clock, unchanged=None) -> None:
        """`unchanged()` says of which pieces the bits stay as they are: such a store is no write where it would race,
        as several warps may store the same."""
        self._advance(where, access, True, clock, unchanged)

    def forget(self, where, access: Access) -> None:
        """What was there before is over."""
        self.records[where] = self.ledger.after(FRESH, self.ledger.number(access), True, Clock())

    def _advance(self, where, access, writes, clock, unchanged) -> None:
        now, after, access = self.records[where], self.ledger.after, self.ledger.number(access)
        first = now.item(0)
        if (now == first).all():
            try:
                new = after(first, access, writes, clock)
            except Race:
                if unchanged is None or not unchanged().all():
                    raise
                return
            if new != first:
                self.records[where] = new
            return
        alike, which = np.unique(now, return_inverse=True)
        new = alike.copy()
        for n, record in enumerate(alike.tolist()):
            try:
                new[n] = after(record, access, writes, clock)
            except Race:
                if unchanged is None or not unchanged()[which.reshape(now.shape) == n].all():
                    raise
        self.records[where] = new[which].reshape(now.shape)
