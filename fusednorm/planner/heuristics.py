"""choose(problem, rows, device, forced) -> Plan. Pure: no GPU, no clock, no environment, no state of the thread.

Three questions are asked of each variant: is it legal (legality.py); which of its plans that fit shared memory is the
best (candidates.py); does that plan have a fault (`find_fault`). The first variant without a fault is chosen, in the
order of the device's `Tuning`. `force` overrides faults and order, never legality.

The row count never changes a plan. It selects one: for few rows, for many rows, or for more than 2^30 (no ring).

The measurements behind the constants are in bench/NOTES.md, "Evidence behind constants".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from . import budget, candidates, few_rows
from .device import DeviceSpec
from .few_rows import NO_REPLACEMENT, Replacement
from .legality import MAX_RING_ROWS, broken_rule, capability
from .norm_problem import NormProblem
from .plan import (
    VARIANTS,
    Plan,
    ReferencePlan,
    Rejected,
    RingPlan,
    box_columns,
    num_passes,
)

Ranges = tuple[tuple[float, float], ...]  # (least, most), both included


@dataclass(frozen=True)
class Tuning:
    """What is known about one direction on a family of GPUs, and how it is known.

    order names variants, best first. It ends with multi_wave, whose best plan never has a fault.
    """

    order: tuple[str, ...]
    evidence: str
    # By norm: a ring needs more rows per SM than this to pay for its start and for the parameters that every CTA loads.
    # Where multi-wave reads its inputs twice, a ring pays with any number of rows.
    ring_rows_per_sm: dict[str, int] = field(default_factory=dict)
    ring_rows_per_sm_without_dx: int | None = None  # the same for a backward of dw and db alone; None: not measured
    narrowest_ring_bytes: dict[str, int] = field(default_factory=dict)  # by norm: least bytes of a row of x
    # By (norm, bytes of an element of x), then by piece, the bytes of a row that TMA copies at once: the ranges of
    # columns at which a ring pays. The longest entry that is not longer than the piece holds; without one there is no
    # ring. Where multi-wave cannot hold the row in registers, only the start of the first range counts.
    columns_by_piece: dict[tuple[str, int], dict[int, Ranges]] = field(default_factory=dict)
    # By (norm, bytes of an element of x): columns at which multi-wave is faster than any ring.
    slower_columns: dict[tuple[str, int], tuple[range, ...]] = field(default_factory=dict)
    # With at most this many row tiles per CTA, another ring may replace the best one (few_rows.py). None: there are no
    # plans for few rows.
    few_tiles_per_cta: int | None = None


UNKNOWN = Tuning(("multi_wave",), "no other schedule has been tried on this architecture")

# Values of Tuning.columns_by_piece. A ring of short pieces is slow. In the backward multi-wave is slower still where it
# cannot hold a row in registers: from 8193 columns of 16 bits and 7169 of float32 on. The entry 64 holds for all longer
# pieces as well.
ANY_COLUMNS = ((0, math.inf),)
FLOAT32_BACKWARD_PIECES, FLOAT32_FORWARD_PIECES = {16: ((7168, math.inf),), 64: ANY_COLUMNS}, {64: ANY_COLUMNS}
# The values of Hopper were measured on an H200. Every GPU of compute capability 9.0 gets them.
HOPPER_BACKWARD_PIECES = {
    ("layer", 2): {16: ((8192, math.inf),), 32: ((160, 1280), (2049, math.inf)), 64: ANY_COLUMNS},
    ("rms", 2): {16: ((8192, math.inf),), 32: ((160, 1280), (4097, 5120)), 64: ANY_COLUMNS},
    ("layer", 4): FLOAT32_BACKWARD_PIECES,
    ("rms", 4): FLOAT32_BACKWARD_PIECES,
}
HOPPER_FORWARD_PIECES = {
    ("layer", 2): {32: ((513, 640), (2049, 2304), (4097, 4608), (7169, 10240)), 64: ((256, math.inf),)},
    ("rms", 2): {32: ((8193, 9216),), 64: ((256, math.inf),)},
    ("layer", 4): FLOAT32_FORWARD_PIECES,
    ("rms", 4): FLOAT32_FORWARD_PIECES,
}
# Values of Tuning.slower_columns. At these widths multi-wave is faster than a ring, whatever the ring's pieces: usually
# with one row tile per CTA (few_rows.py).
HOPPER_FORWARD_SLOWER = {
    ("layer", 2): (range(897, 1024),),
    ("rms", 2): (range(641, 769), range(1281, 1792), range(2305, 3584)),
}

HOPPER_BACKWARD = Tuning(
    ("pipelined", "multi_wave"),
    "1 to 50% faster than multi-wave almost wherever both were tried, at 128 to 262144 columns and 128 rows or more "
    "(H200, bfloat16, 2026-11-21)",
    ring_rows_per_sm_without_dx=8,
    narrowest_ring_bytes=dict(layer=192, rms=192),
    columns_by_piece=HOPPER_BACKWARD_PIECES,
    few_tiles_per_cta=8,
)
HOPPER_FORWARD = Tuning(
    ("pipelined", "multi_wave"),
    "between 6% slower and 50% faster than multi-wave wherever both were tried, at 64 to 262144 columns "
    "(H200, bfloat16, 2026-11-21)",
    narrowest_ring_bytes=dict(layer=128, rms=512),
    columns_by_piece=HOPPER_FORWARD_PIECES,
    slower_columns=HOPPER_FORWARD_SLOWER,
    few_tiles_per_cta=12,
)

# Nothing has been measured on Blackwell. Its plans follow what nvFuser has published for B200: the thresholds, and the
# rule that a plan must have two stages and registers to spare. nvFuser's forward needs 128 vectors of 16 bytes per row
# and takes any number of rows.
BLACKWELL_BACKWARD = Tuning(
    ("warp_specialized", "pipelined", "multi_wave"),
    "nvFuser found warp specialization the fastest on B200 wherever rows and registers suffice",
    ring_rows_per_sm={"layer": 16, "rms": 4},
    ring_rows_per_sm_without_dx=8,  # as on Hopper; nvFuser needs TMA and columns of 16 KiB on any GPU
    narrowest_ring_bytes=dict(layer=512, rms=512),  # the narrowest row among nvFuser's published decisions
)
BLACKWELL_FORWARD = Tuning(
    ("warp_specialized", "pipelined", "multi_wave"),
    "nvFuser reads rows of this size through a ring on B200",
    narrowest_ring_bytes=dict(layer=2048, rms=2048),
)

TUNINGS = {(90, "backward"): HOPPER_BACKWARD, (90, "forward"): HOPPER_FORWARD}
for _arch in (100, 103, 110, 120, 121):
    TUNINGS |= {(_arch, "backward"): BLACKWELL_BACKWARD, (_arch, "forward"): BLACKWELL_FORWARD}


@dataclass(frozen=True)
class Decision:
    """A plan, and for each variant a sentence: why it is chosen or why it is not."""

    plan: Plan
    forced: bool  # `force` asked for the plan's variant
    reasons: dict[str, str]  # by variant
    few: Replacement = NO_REPLACEMENT  # replaces the variant's best plan at some row counts, maybe not at this one


class Outcome(NamedTuple):
    """The best plan of a variant, and what speaks against it."""

    plan: Plan | None  # None: the variant cannot run at all
    fault: Rejected | None  # the rule that the variant breaks, or the plan's fault


def choose(problem: NormProblem, rows: int, device: DeviceSpec, forced: str | None = None) -> Plan:
    """The plan for `rows` rows. `forced` is the variant that is asked for; it is ignored if it cannot run."""
    for most_rows, plan in choices(problem, device, forced):
        if rows <= most_rows:
            return plan
    raise AssertionError("the last interval has no end")


@functools.cache
def choices(problem: NormProblem, device: DeviceSpec, forced: str | None = None) -> tuple[tuple[float, Plan], ...]:
    """Every plan that `choose` can return, as (most rows, plan), ascending. There is a bound at each row count at which
    the decision can change. The last bound is infinity."""
    few = decide(problem, MAX_RING_ROWS, device, forced).few
    lasts = sorted({least_rows(problem, device), few.more_than, few.most_rows, MAX_RING_ROWS})
    plans = [(last, decide(problem, last, device, forced).plan) for last in lasts if last]
    return (*plans, (math.inf, decide(problem, MAX_RING_ROWS + 1, device, forced).plan))


def alternatives(problem: NormProblem, rows: int, device: DeviceSpec) -> Iterator[Plan]:
    """Plans that may replace one that fails, best first: the best plan of each variant without a fault (multi_wave is
    the last), then ATen."""
    for variant in tuning(problem, device).order:
        plan, fault = outcome(variant, problem, rows, device)
        if plan and not fault:
            yield plan
    yield ReferencePlan("the kernels for it have failed")


def decide(problem: NormProblem, rows: int, device: DeviceSpec, forced: str | None = None) -> Decision:
    """The plan that `choose` returns if `forced` is asked for, and the reasons."""
    outcomes = {variant: outcome(variant, problem, rows, device) for variant in VARIANTS}
    order = (*tuning(problem, device).order, "reference")
    best = next(variant for variant in order if outcomes[variant].plan and not outcomes[variant].fault)
    obeyed = forced is not None and outcomes[forced].plan is not None
    chosen = forced if obeyed else best
    chosen_plan = outcomes[chosen].plan
    few = NO_REPLACEMENT if obeyed else replacement(chosen_plan, problem, device)
    if few.more_than < rows <= few.most_rows:
        chosen_plan = few.plan
    reasons, first = {}, best if obeyed else chosen_plan.variant
    for variant, (plan, fault) in outcomes.items():
        if variant == forced:
            reasons[variant] = _why_forced(fault, best, could_run=plan is not None, would_anyway=variant == best)
        elif fault:
            reasons[variant] = fault.reason
        elif variant == best:
            reasons[variant] = f"{'would be ' * obeyed}chosen: {_why_best(variant, problem, device)}"
        else:
            reasons[variant] = f"could run, but {first} comes first"
    if chosen_plan.variant != chosen:  # the plan for few rows is of another variant
        reasons[chosen] = f"is for more than {few.most_rows} rows, got {rows}"
        reasons[chosen_plan.variant] = f"chosen: {_why_few(few)}"
    return Decision(chosen_plan, obeyed, reasons, few)


def outcome(variant: str, problem: NormProblem, rows: int, device: DeviceSpec) -> Outcome:
    """The best plan of one variant and its fault, for `rows` rows."""
    broken = broken_rule(variant, problem, rows, device)
    if broken:
        return Outcome(None, broken)
    plan = best_plan(variant, problem, device)
    if plan is None:
        return Outcome(None, _too_wide(variant, problem, device))
    return Outcome(plan, find_fault(plan, problem, rows, device))


@functools.cache
def best_plan(variant: str, problem: NormProblem, device: DeviceSpec) -> Plan | None:
    """The best plan of a legal variant; None if no plan fits shared memory, or registers."""
    if variant == "reference":
        fault = outcome("multi_wave", problem, 1, device).fault
        return ReferencePlan(fault.reason if fault else "asked for")
    return getattr(candidates, variant)(problem, device)


def _too_wide(variant: str, problem: NormProblem, device: DeviceSpec) -> Rejected:
    cols, limit = problem.cols, device.smem_per_block_bytes
    if variant == "multi_wave":
        return Rejected("registers", f"has no room in registers for a row of {cols} columns and its sums by sample")
    text = f"needs more shared memory for one stage of {cols} columns than the {limit} bytes of a block"
    return Rejected("shared_memory", text)


def find_fault(plan: Plan, problem: NormProblem, rows: int, device: DeviceSpec) -> Rejected | None:
    """Why a plan that can run should not: the first rule of quality that it breaks, or None."""
    if plan.kernel == "column_ring":
        return _fault_without_dx(problem, rows, device)
    if not isinstance(plan, RingPlan):
        return None
    known = tuning(problem, device)
    if plan.variant not in known.order:
        where = f"for the {problem.direction} on compute capability {capability(device)}"
        return Rejected("untried", f"is not in use {where}")
    registers = budget.registers(plan, problem, device)
    if registers > plan.max_registers:
        return Rejected("spills", f"might spill: up to {registers} registers a thread, of {plan.max_registers}")
    one_tile = plan.kernel == "pipelined" and plan.short_lived  # with one stage, it has one tile per CTA
    if plan.num_stages == 1 and not one_tile:
        return Rejected("one_stage", "has room for one stage only: nothing would be copied while a tile is worked on")
    if rows <= least_rows(problem, device):
        return _too_few_rows(problem, rows, device)
    row_bytes = problem.cols * problem.x_dtype.itemsize
    narrowest = known.narrowest_ring_bytes[problem.norm]
    if row_bytes < narrowest:
        text = f"is for rows of {narrowest} bytes or more, got {row_bytes}"
        return Rejected("narrow_rows", text)
    for columns in known.slower_columns.get((problem.norm, problem.x_dtype.itemsize), ()):
        if problem.cols in columns:
            text = f"is slower than multi-wave at {_range_text(columns[0], columns[-1])}, got {problem.cols}"
            return Rejected("slower_columns", text)
    box_bytes = box_columns(plan, problem.cols) * problem.x_dtype.itemsize
    text = _why_pieces_are_short(box_bytes, problem, device) if box_bytes < row_bytes else None
    if text:
        return Rejected("short_pieces", f"would copy {problem.cols} columns by {box_bytes} bytes at once, {text}")
    return None


def _why_pieces_are_short(box_bytes: int, problem: NormProblem, device: DeviceSpec) -> str | None:
    """Why a ring that copies box_bytes at once is slow by the tuning's columns_by_piece; None if it is not."""
    known = tuning(problem, device).columns_by_piece
    columns_by_piece = known.get((problem.norm, problem.x_dtype.itemsize), {0: ANY_COLUMNS})
    tried = [piece for piece in columns_by_piece if piece <= box_bytes]
    if not tried:
        return "which pays nowhere"
    ranges = columns_by_piece[max(tried)]
    if any(least <= problem.cols <= most for least, most in ranges):
        return None
    if problem.cols < ranges[0][0]:
        return f"which pays from {ranges[0][0]} columns on"
    if best_plan("multi_wave", problem, device).kernel == "multi_wave":
        return f"which pays at {' and '.join(_range_text(*columns) for columns in ranges)}"
    return None


def _range_text(least: int, most: float) -> str:
    return f"{least} columns or more" if most == math.inf else f"{least} to {most} columns"


def _fault_without_dx(problem: NormProblem, rows: int, device: DeviceSpec) -> Rejected | None:
    if tuning(problem, device).ring_rows_per_sm_without_dx is None:
        where = f"on compute capability {capability(device)}"
        return Rejected("unmeasured", f"has not been measured without dx {where}")
    return _too_few_rows(problem, rows, device) if rows <= least_rows(problem, device) else None


def _too_few_rows(problem: NormProblem, rows: int, device: DeviceSpec) -> Rejected:
    least = least_rows(problem, device)
    return Rejected("few_rows", f"needs more than {least} rows to pay for its start, got {rows}")


def least_rows(problem: NormProblem, device: DeviceSpec) -> int:
    """A ring needs more rows than this to be faster than multi-wave."""
    known = tuning(problem, device)
    if problem.direction == "backward" and not problem.wants_dx:
        return (known.ring_rows_per_sm_without_dx or 0) * device.sm_count
    plan = best_plan("multi_wave", problem, device)
    if plan is None or num_passes(plan, problem) != 1:
        return 0  # multi-wave reads its inputs twice, and a ring saves that pass
    return known.ring_rows_per_sm.get(problem.norm, 0) * device.sm_count


@functools.cache
def replacement(plan: Plan, problem: NormProblem, device: DeviceSpec) -> Replacement:
    """The plan that replaces `plan` at few rows, if there is one. Forced variants have one plan for all row counts."""
    tiles = tuning(problem, device).few_tiles_per_cta
    if tiles is not None and plan.kernel == "pipelined":
        return few_rows.replacement_of_pipelined(plan, problem, device, tiles)
    if tiles is not None and plan.kernel == "multi_wave":
        return few_rows.replacement_of_multi_wave(plan, problem, device)
    if tiles is not None and plan.kernel == "column_tiles":
        return few_rows.replacement_of_column_tiles(problem, device)
    return NO_REPLACEMENT


def tuning(problem: NormProblem, device: DeviceSpec) -> Tuning:
    return TUNINGS.get((device.arch, problem.direction), UNKNOWN)


def _why_best(variant: str, problem: NormProblem, device: DeviceSpec) -> str:
    known = tuning(problem, device)
    if variant == "reference":
        return "no kernel of this package runs here"
    if variant != known.order[0]:
        return f"{' and '.join(known.order[: known.order.index(variant)])} cannot run or should not"
    return known.evidence


def _why_few(few: Replacement) -> str:
    if few.plan.kernel == "pipelined":
        how = "by a ring over two CTAs"
    elif few.plan.short_lived:
        how = "without a ring, by one row tile for each CTA"
    else:
        how = "without a ring, by multi-wave CTAs"
    return f"up to {few.most_rows} rows are done sooner {how}"


def _why_forced(fault: Rejected | None, best: str, *, could_run: bool, would_anyway: bool) -> str:
    if fault:
        return f"forced, {'though' if could_run else 'but'} it {fault.reason}"
    return "forced, and would be chosen anyway" if would_anyway else f"forced; {best} would be chosen"
