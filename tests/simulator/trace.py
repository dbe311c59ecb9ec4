"""What a run looked like. This one looks away; see recording.py."""

from __future__ import annotations


class Trace:
    """Times are in instructions, as if every warp went on as soon as what it waits for has come about."""

    def runs(self, warp, start: int, end: int) -> None:
        """A warp executes instructions start to end of its program, from its time on."""

    def waited(self, warp, time: int) -> None:
        """What a warp waits for has come about, at `time`."""

    def issued(self, copy, warp) -> None:
        """A copy is under way."""

    def landed(self, copy, time: int) -> None:
        """A copy is there."""

    def completes(self, barrier) -> None:
        """A phase of an mbarrier is complete."""
