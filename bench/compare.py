"""The regression gate: finds our times that got worse between two results files.

Times are compared as multiples of the floor of their own run, so that clocks and temperature cancel. A cell has lost if
its median grew by more than 3% beyond half the width of the middle 80% of the replays, of the noisier run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from fusednorm.tools.console import print_table

from .candidates import is_ours
from .records import cell, load, shape_text, spread, timed

TOLERANCE = 0.03


class Loss(NamedTuple):
    """A cell that got slower, in multiples of the floor, or that was not timed any more. allowed: relative growth."""

    old: dict
    new: dict
    allowed: float

    @property
    def grown(self) -> float | None:
        if self.new["median_us"] is None:
            return None
        return self.new["times_floor"] / self.old["times_floor"] - 1


def compare_files(old: Path, new: Path) -> int:
    """Print the cells that lost. Returns 1 if there are any; 2 if no cell is in both."""
    before, after = load([old]), load([new])
    pairs = common(before, after)
    if not pairs:
        print(f"compare: {old} and {new} have none of our cells in common", file=sys.stderr)
        return 2
    found = losses(pairs)
    absent = sum(is_ours(record["candidate"]) for record in timed(before)) - len(pairs)
    print(f"{len(pairs)} cells compared, {absent} of the old file are not in the new one, {len(found)} lost")
    if found:
        header = ["cell", "candidate", "old", "new", "grown", "allowed"]
        print_table("Times as multiples of the floor", header, [row(loss) for loss in found])
    return 1 if found else 0


def common(before: list[dict], after: list[dict]) -> list[tuple[dict, dict]]:
    """(old, new) for each of our cells that had a time and is in both files."""
    known = {(cell(record), record["candidate"]): record for record in after}
    ours = [record for record in timed(before) if is_ours(record["candidate"])]
    keyed = ((record, known.get((cell(record), record["candidate"]))) for record in ours)
    return [(old, new) for old, new in keyed if new is not None]


def losses(pairs: list[tuple[dict, dict]]) -> list[Loss]:
    """The worst first."""
    found = []
    for old, new in pairs:
        if new["median_us"] is None and not new.get("failed"):
            continue  # refused: a forced variant that became the planner's own choice, or that cannot run any more
        noise = max(spread(record) for record in timed((old, new)))
        loss = Loss(old, new, TOLERANCE + noise / 2)
        if loss.grown is None or loss.grown > loss.allowed:
            found.append(loss)
    return sorted(found, key=lambda loss: -(loss.grown if loss.grown is not None else float("inf")))


def row(loss: Loss) -> list[str]:
    old = loss.old
    text = f"{old['norm']} {old['direction']} {shape_text(old)} {old['x_dtype']}"
    start = [text, loss.old["candidate"], f"{loss.old['times_floor']:.3f}"]
    if loss.grown is None:
        return [*start, loss.new.get("refusal") or "not timed", "", ""]
    return [*start, f"{loss.new['times_floor']:.3f}", f"{loss.grown:+.1%}", f"{loss.allowed:.1%}"]
