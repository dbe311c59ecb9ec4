"""The trace of a run: when each warp ran which part of its kernel, when it waited, and when copies were under way."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from pathlib import Path
from typing import NamedTuple

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
WAITS, OTHERS = "waits", "other"


class Trace:
    """Gets the events of a run; this base class ignores them.

    Times count instructions, as if every warp continued as soon as the event that it waits for has happened.
    """

    def runs(self, warp, start: int, end: int) -> None:
        """A warp executes the instructions from start to end of its program, beginning at warp.time."""

    def waited(self, warp, time: int) -> None:
        """A warp's wait, since warp.time, is over at `time`."""

    def issued(self, copy, warp) -> None:
        """A copy is under way."""

    def landed(self, copy, time: int) -> None:
        """A copy has landed."""

    def completes(self, barrier) -> None:
        """A phase of an mbarrier is complete."""


class Span(NamedTuple):
    """A warp ran one part of its kernel, or waited, from `start` to `end`; for times see Trace."""

    who: str
    start: int
    end: int
    what: str


class Transfer(NamedTuple):
    """A TMA copy to a CTA, which completes on an mbarrier of this CTA."""

    cta: str
    barrier: int
    issued: int
    landed: int


@functools.cache
def _functions(file: str) -> list[tuple[int, int, str]]:
    path = KERNELS / file
    tree = ast.parse(path.read_text() if path.exists() else "")
    return [(n.lineno, n.end_lineno, n.name) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]


@functools.cache
def part_of(place: str) -> str:
    """The name of the part of a kernel to which an instruction belongs: the function in another file that the schedule
    calls there; the schedule's own function if it calls none."""
    frames = [frame for frame in re.findall(r"([\w.]+):(\d+)", place)[::-1] if _functions(frame[0])]  # outermost first
    if not frames:
        return OTHERS
    file, line = next((frame for frame in frames if frame[0] != frames[0][0]), frames[-1])
    inside = [name for start, end, name in _functions(file) if start <= int(line) <= end]
    return inside[-1] if inside else Path(file).stem


class Recording(Trace):
    def __init__(self):
        self.transfers: list[Transfer] = []
        self.log: list[str] = []  # lines, in the order of events
        self._spans: dict[str, list[Span]] = {}  # by warp
        self._parts: dict[tuple, list[tuple[str, int]]] = {}

    def runs(self, warp, start: int, end: int) -> None:
        key = id(warp.program), start, end
        if key not in self._parts:
            parts = (part_of(each.place) for each in warp.program.kernel.code[start:end])
            self._parts[key] = [(part, len(list(group))) for part, group in itertools.groupby(parts)]
        time = warp.time
        for part, count in self._parts[key]:
            self._extend(Span(str(warp), time, time + count, part))
            time += count

    def waited(self, warp, time: int) -> None:
        self._extend(Span(str(warp), warp.time, time, WAITS))
        self._say(time, warp, f"has waited since {warp.time} for {warp.waiting or 'what is over'}")

    def issued(self, copy, warp) -> None:
        target = f"byte {copy.at} of {copy.cta}"
        self._say(warp.time, warp, f"starts a {copy.kind} copy of {copy.nbytes} bytes to {target}")

    def landed(self, copy, time: int) -> None:
        if copy.kind == "TMA":
            self.transfers.append(Transfer(str(copy.cta), copy.barrier, copy.issued, time))
        self._say(time, copy.cta, f"has the {copy.nbytes} bytes at {copy.at}")

    def completes(self, barrier) -> None:
        self._say(barrier.time, barrier.cta, f"phase {barrier.phase} of mbarrier {barrier.address} is complete")

    def _extend(self, span: Span) -> None:
        spans = self._spans.setdefault(span.who, [])
        if spans and (spans[-1].what, spans[-1].end) == (span.what, span.start):
            spans[-1] = spans[-1]._replace(end=span.end)
            return
        if span.what != WAITS:
            self._say(span.start, span.who, span.what)
        spans.append(span)

    def _say(self, time: int, who, what: str) -> None:
        self.log.append(f"{time:>8}  {who!s:<20} {what}")

    def finished(self) -> list[Span]:
        return [span for spans in self._spans.values() for span in spans]

    def text(self) -> str:
        """A line for everything that happened, in the order of events; the number is its time."""
        return "\n".join(self.log)
