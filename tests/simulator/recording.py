"""The trace of a run: who did what part of the kernel when, who waited for what, and which copies were under way."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from pathlib import Path
from typing import NamedTuple

from .trace import Trace

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
WAITS = "waits"


class Span(NamedTuple):
    """From `start` to `end`, in instructions of a warp that never waits longer than it must."""

    who: str
    start: int
    end: int
    what: str


class Transfer(NamedTuple):
    """A copy: to which CTA, by its byte of shared memory, completing on which mbarrier."""

    kind: str
    cta: str
    at: int
    nbytes: int
    barrier: int
    issued: int
    landed: int


@functools.cache
def _functions(file: str) -> list[tuple[int, int, str]]:
    path = KERNELS / file
    tree = ast.parse(path.read_text()) if path.exists() else ast.parse("")
    return [(n.lineno, n.end_lineno, n.name) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]


@functools.cache
def part_of(place: str) -> str:
    """The function that a schedule calls and that an instruction is in; the schedule's own if it is in none."""
    frames = [frame for frame in re.findall(r"([\w.]+):(\d+)", place)[::-1] if _functions(frame[0])]  # outermost first
    if not frames:
        return "other"
    file, line = next((frame for frame in frames if frame[0] != frames[0][0]), frames[-1])
    inside = [name for start, end, name in _functions(file) if start <= int(line) <= end]
    return inside[-1] if inside else Path(file).stem


class Recording(Trace):
    def __init__(self):
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []
        self.log: list[str] = []  # in the order in which things went on
        self._open: dict[str, Span] = {}
        self._parts: dict[tuple, list[tuple[str, int]]] = {}

    def runs(self, warp, start: int, end: int) -> None:
        key = id(warp.program), start, end
        if key not in self._parts:
            parts = (part_of(each.place) for each in warp.program.kernel.code[start:end])
            self._parts[key] = [(part, len(list(group))) for part, group in itertools.groupby(parts)]
        time, who = warp.time, str(warp)
        for part, count in self._parts[key]:
            self._extend(Span(who, time, time + count, part))
            time += count

    def waited(self, warp, time: int) -> None:
        self._extend(Span(str(warp), warp.time, time, WAITS))
        self._say(time, str(warp), f"has waited since {warp.time} for {warp.waiting or 'what is over'}")

    def issued(self, copy, warp) -> None:
        target = f"byte {copy.at} of {copy.cta}"
        self._say(warp.time, str(warp), f"starts a {copy.kind} copy of {copy.nbytes} bytes to {target}")

    def landed(self, copy, time: int) -> None:
        self.transfers.append(Transfer(copy.kind, str(copy.cta), copy.at, copy.nbytes, copy.barrier, copy.issued, time))
        self._say(time, str(copy.cta), f"has the {copy.nbytes} bytes at {copy.at}")

    def completes(self, barrier) -> None:
        self._say(barrier.time, str(barrier.cta), f"phase {barrier.phase} of mbarrier {barrier.address} is complete")

    def _extend(self, span: Span) -> None:
        last = self._open.get(span.who)
        if last is not None and last.what == span.what and last.end == span.start:
            self._open[span.who] = last._replace(end=span.end)
            return
        if last is not None:
            self.spans.append(last)
        if last is None or last.what != span.what and span.what != WAITS:
            self._say(span.start, span.who, span.what)
        self._open[span.who] = span

    def _say(self, time: int, who: str, what: str) -> None:
        self.log.append(f"{time:>8}  {who:<20} {what}")

    def finished(self) -> list[Span]:
        """All spans, by who and when."""
        return sorted([*self.spans, *self._open.values()], key=lambda span: (span.who, span.start))

    def text(self) -> str:
        """A line for everything that happened, in the order of events; the number is its time."""
        return "\n".join(self.log)
