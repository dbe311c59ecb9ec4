"""choose(problem, rows, device) -> Plan. Pure: no GPU, no clock, no environment.

For each variant: is it legal (legality.py); which of its plans fit shared memory, and which of these is the best
(candidates.py); has that one a fault (`fault`). Of the variants without a fault, the first in the order of the `Tuning`
for the device is chosen. `force` overrides faults and order, never legality.

A plan does not depend on the row count; which of two plans is chosen does, and at 2^30 rows a third.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from . import budget, candidates, few_rows
from .device import DeviceSpec
from .few_rows import NO_SHORT_WALK, ShortWalk
from .forcing import forced_variant
from .legality import MAX_RING_ROWS, broken_rule, capability
from .norm_problem import NormProblem
from .plan import (
    VARIANTS,
    ColumnRingPlan,
    ColumnTilePlan,
    MultiWavePlan,
    PipelinedPlan,
    Plan,
    ReferencePlan,
    Rejected,
    RingPlan,
    box_columns,
    num_passes,
)

Ranges = tuple[tuple[float, float], ...]  # (least, most)


@dataclass(frozen=True)
class Tuning:
    """What is known about one direction on a family of GPUs, and how it is known.

    order names variants, best first. multi_wave ends it: its best plan has no fault, ever.
    """

    order: tuple[str, ...]
    evidence: str
    # A ring pays for its start, and for the parameters that every CTA loads, with more rows for each SM than this; with
    # any number where multi-wave reads its inputs twice.
    ring_rows_per_sm: dict[str, int] = field(default_factory=dict)  # by norm
    ring_rows_per_sm_without_dx: int | None = None  # the same for sums over rows alone; None: not measured
    narrowest_ring_bytes: dict[str, int] = field(default_factory=dict)  # of a row of x, by norm
    # By norm and the bytes of an element of x: the bytes of a row that TMA copies at once, and the columns of which a
    # ring pays that has no longer pieces, in ranges; beyond the first it pays as well where multi-wave does not hold
    # the row in registers. Shorter ones than those named do not pay, or have not been tried.
    columns_by_piece: dict[tuple[str, int], dict[int, Ranges]] = field(default_factory=dict)
    # Columns of which multi-wave is faster than any ring, keyed likewise.
    slower_columns: dict[tuple[str, int], tuple[range, ...]] = field(default_factory=dict)
    # Row tiles of a ring's CTA that has no more, for which there is another plan than for many rows; None: none is.
    tiles_of_a_short_walk: int | None = None


UNKNOWN = Tuning(("multi_wave",), "no other schedule has been tried on this architecture")

# Short pieces take long, but in the backward multi-wave takes longer where it cannot hold a row in registers, which
# is from 8193 columns of bfloat16 and 7169 of float32 on (8192 rows, H200, both norms, 2026-11-22; -odd-widths,
# -short-pieces and -one-chunk.jsonl). Pieces of 16 bytes: 4104 columns 92 us and 75 by multi-wave, 8200 177 and 225,
# but 10248 293 and 264 (LayerNorm backward), forward 8200 columns 131 and 91. Of 32: 1040 columns 13.6 and 13.2, 2064
# 21.9 and 22.2 (LayerNorm forward), 40000 x 144 19.3 and 17.9, 8000 x 176 10.5 and 13.7, 8000 x 496 13.7 and 18.4
# (LayerNorm backward). Of 64: 65536 x 416 29.4 and 32.2, 65536 x 224 18.2 and 18.6 (LayerNorm forward), 65536 x 160
# 13.8 and 13.7 (RMSNorm). Wide rows by pieces of 32: 4096 x 9232 43.6 and 46.6, 4096 x 12496 66.8 and 59.0, 250 x
# 12496 9.3 and 8.5 (LayerNorm forward). float32, pieces of 32 bytes: 4104 columns 118 and 102, of 64: 4112 100 and
# 103 (RMSNorm backward). By pieces of 32 bytes RMSNorm's backward 4000 x 1840 18.1 and 17.1, 4000 x 2960 27.8 and
# 24.6, 1500 x 5392 26.2 and 20.2, but 8000 x 1232 21.8 and 24.4, 8000 x 4880 69 and 77; LayerNorm's 3500 x 1392 16.9
# and 16.0, but 4718 x 7536 66 and 90; LayerNorm's forward 4500 x 2800 20.5 and 16.6, 3600 x 7152 33.0 and 29.8, but
# 8000 x 4240 39.4 and 41.3; RMSNorm's 8000 x 3440 31.4 and 28.3, 8000 x 7664 66 and 60.
# 64 is for longer pieces as well: by 128 bytes 20000 x 192 10.1 us and 8.5 (LayerNorm forward).
ANY_COLUMNS = ((0, math.inf),)
FLOAT32_BACKWARD_PIECES, FLOAT32_FORWARD_PIECES = {16: ((7168, math.inf),), 64: ANY_COLUMNS}, {64: ANY_COLUMNS}
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
# Whatever the pieces, one row tile for each CTA is faster than a ring: 40000 x 960 43.6 us and 46.7 by the ring
# (LayerNorm), 30000 x 1312 39.4 and 43.0, 13000 x 2816 36.1 and 38.4; or multi-wave, 3318 x 704 6.9 and 7.4 (RMSNorm;
# bfloat16, 2026-11-22, -every-row.jsonl).
HOPPER_FORWARD_SLOWER = {
    ("layer", 2): (range(897, 1024),),
    ("rms", 2): (range(641, 769), range(1281, 1792), range(2305, 3584)),
}

HOPPER_BACKWARD = Tuning(
    ("pipelined", "multi_wave"),
    "1 to 50% faster than multi-wave almost wherever both were tried, at 128 to 262144 columns and 128 rows or more "
    "(H200, bfloat16, 2026-11-21)",
    # dw and db of 16384 x 4096: 73.0 us and 85.4 by multi-wave, of 1024 x 4096: 16.7 and 13.4 (LayerNorm, bfloat16).
    ring_rows_per_sm_without_dx=8,
    # 65536 x 128 takes 19.9 us and 21.3 by multi-wave, 65536 x 96 16.8 and 17.7, but 65536 x 80 18.6 and 16.2.
    narrowest_ring_bytes=dict(layer=192, rms=192),
    columns_by_piece=HOPPER_BACKWARD_PIECES,
    # 1500 x 4096 takes 16.2 us and 16.6 by two CTAs on an SM, 2000 x 4096, 16 rows of each, 18.7 and 18.8 (LayerNorm).
    tiles_of_a_short_walk=8,
)
HOPPER_FORWARD = Tuning(
    ("pipelined", "multi_wave"),
    "between 6% slower and 50% faster than multi-wave wherever both were tried, at 64 to 262144 columns "
    "(H200, bfloat16, 2026-11-21)",
    # 128 columns: 12.5 us and 12.8 by multi-wave (LayerNorm), but 12.2 and 11.6 (RMSNorm); 64 columns: 12.8 and 13.3.
    narrowest_ring_bytes=dict(layer=128, rms=512),
    columns_by_piece=HOPPER_FORWARD_PIECES,
    slower_columns=HOPPER_FORWARD_SLOWER,
    # 512 x 8192 takes 8.9 us and 9.7 with two rows over two CTAs, 2400 x 6656 19.4 us and 22.1, but 4096 x 8192, 16
    # tiles, 36 us and 34.5 (LayerNorm).
    tiles_of_a_short_walk=12,
)

# Nothing has been measured on Blackwell. It is planned for by what nvFuser has published on its choice for B200: its
# thresholds, and its rule that a plan must have two stages and registers to spare. Its forward asks for 128 vectors of
# 16 bytes a row, and for any number of rows.
BLACKWELL_BACKWARD = Tuning(
    ("warp_specialized", "pipelined", "multi_wave"),
    "nvFuser found warp specialization the fastest on B200 wherever rows and registers suffice",
    ring_rows_per_sm={"layer": 16, "rms": 4},
    ring_rows_per_sm_without_dx=8,  # as on Hopper: nvFuser asks for TMA and for columns of 16 KiB, whatever the GPU
    narrowest_ring_bytes=dict(layer=512, rms=512),  # the narrowest of its published decisions
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
    """A plan, and for each variant the sentence why it is the one or why it is not."""

    plan: Plan
    forced: bool  # the plan is there because it was asked for
    reasons: dict[str, str]
    short: ShortWalk = NO_SHORT_WALK  # in the place of the variant's best plan for some rows, these or others


class Outcome(NamedTuple):
    """The best plan of a variant, or None where it cannot run at all; and what speaks against it, if anything does."""

    plan: Plan | None
    fault: Rejected | None


def choose(problem: NormProblem, rows: int, device: DeviceSpec) -> Plan:
    """The plan for `rows` rows, under `force` as it holds in this thread."""
    for most_rows, plan in choices(problem, device):
        if rows <= most_rows:
            return plan
    raise AssertionError("the last interval has no end")


def choices(problem: NormProblem, device: DeviceSpec) -> tuple[tuple[float, Plan], ...]:
    """Every plan that `choose` may choose here and now, as (most rows, plan), ascending."""
    return _plans_by_rows(problem, device, forced_variant())


def alternatives(problem: NormProblem, rows: int, device: DeviceSpec) -> Iterator[Plan]:
    """What may run in the place of a plan that fails, best first: the best plans of the variants without a fault, which
    multi_wave ends, and ATen."""
    for variant in tuning(problem, device).order:
        plan, fault = outcome(variant, problem, rows, device)
        if plan and not fault:
            yield plan
    yield ReferencePlan("the kernels for it have failed")


def decide(problem: NormProblem, rows: int, device: DeviceSpec, forced: str | None = None) -> Decision:
    """What `choose` chooses, and why."""
    outcomes = {variant: outcome(variant, problem, rows, device) for variant in VARIANTS}
    order = (*tuning(problem, device).order, "reference")
    best = next(variant for variant in order if outcomes[variant].plan and not outcomes[variant].fault)
    obeyed = forced is not None and outcomes[forced].plan is not None
    chosen = forced if obeyed else best
    chosen_plan = outcomes[chosen].plan
    short = NO_SHORT_WALK if obeyed else short_walk(chosen_plan, problem, device)
    if short.more_than < rows <= short.most_rows:
        chosen_plan = short.plan
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
    if chosen_plan.variant != chosen:  # the one for few rows is of another variant
        reasons[chosen] = f"is for more than {short.most_rows} rows, got {rows}"
        reasons[chosen_plan.variant] = f"chosen: {_why_few(short)}"
    return Decision(chosen_plan, obeyed, reasons, short)


def outcome(variant: str, problem: NormProblem, rows: int, device: DeviceSpec) -> Outcome:
    """What becomes of one variant."""
    broken = broken_rule(variant, problem, rows, device)
    if broken:
        return Outcome(None, broken)
    plan = best_plan(variant, problem, device)
    if plan is None:
        limit = device.smem_per_block_bytes
        text = f"needs more shared memory for one stage of {problem.cols} columns than the {limit} bytes of a block"
        return Outcome(None, Rejected("shared_memory", text))
    return Outcome(plan, fault(plan, problem, rows, device))


@functools.cache
def best_plan(variant: str, problem: NormProblem, device: DeviceSpec) -> Plan | None:
    """The best plan of a variant that is legal; None where none fits shared memory."""
    if variant == "reference":
        broken = broken_rule("multi_wave", problem, 1, device)
        return ReferencePlan(broken.reason if broken else "asked for")
    return getattr(candidates, variant)(problem, device)


def fault(plan: Plan, problem: NormProblem, rows: int, device: DeviceSpec) -> Rejected | None:
    """Why a plan that could run should not: the first of the rules of quality that it breaks."""
    if isinstance(plan, ColumnRingPlan):
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
    one_tile = isinstance(plan, PipelinedPlan) and plan.short_lived  # for each CTA
    if plan.num_stages == 1 and not one_tile:
        return Rejected("one_stage", "has room for one stage only: nothing would be copied while a tile is worked on")
    if rows <= least_rows(problem, device):
        return _few_rows(problem, rows, device)
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
    if isinstance(best_plan("multi_wave", problem, device), MultiWavePlan):
        return f"which pays at {' and '.join(_range_text(*columns) for columns in ranges)}"
    return None


def _range_text(least: int, most: float) -> str:
    return f"{least} columns or more" if most == math.inf else f"{least} to {most} columns"


def _fault_without_dx(problem: NormProblem, rows: int, device: DeviceSpec) -> Rejected | None:
    if tuning(problem, device).ring_rows_per_sm_without_dx is None:
        where = f"on compute capability {capability(device)}"
        return Rejected("unmeasured", f"has not been measured without dx {where}")
    return _few_rows(problem, rows, device) if rows <= least_rows(problem, device) else None


def _few_rows(problem: NormProblem, rows: int, device: DeviceSpec) -> Rejected:
    least = least_rows(problem, device)
    return Rejected("few_rows", f"needs more than {least} rows to pay for its start, got {rows}")


def least_rows(problem: NormProblem, device: DeviceSpec) -> int:
    """Rows of which a ring needs more."""
    known = tuning(problem, device)
    if problem.direction == "backward" and not problem.wants_dx:
        return (known.ring_rows_per_sm_without_dx or 0) * device.sm_count
    if num_passes(best_plan("multi_wave", problem, device), problem) != 1:
        return 0  # a ring spares a pass
    return known.ring_rows_per_sm.get(problem.norm, 0) * device.sm_count


@functools.cache
def short_walk(plan: Plan, problem: NormProblem, device: DeviceSpec) -> ShortWalk:
    """What there is in the place of the plan for many rows; of variants that are not forced, which have one plan."""
    tiles = tuning(problem, device).tiles_of_a_short_walk
    if tiles is not None and isinstance(plan, PipelinedPlan):
        return few_rows.pipelined_short(plan, problem, device, tiles)
    if tiles is not None and isinstance(plan, MultiWavePlan):
        return few_rows.multi_wave_short(plan, problem, device)
    if tiles is not None and isinstance(plan, ColumnTilePlan):
        return few_rows.column_tiles_short(problem, device)
    return NO_SHORT_WALK


def tuning(problem: NormProblem, device: DeviceSpec) -> Tuning:
    return TUNINGS.get((device.arch, problem.direction), UNKNOWN)


@functools.cache
def _plans_by_rows(problem: NormProblem, device: DeviceSpec, forced: str | None) -> tuple[tuple[float, Plan], ...]:
    """(most rows, plan), ascending: divided where something depends on the row count, the last without an end."""
    short = decide(problem, MAX_RING_ROWS, device, forced).short
    lasts = sorted({least_rows(problem, device), short.more_than, short.most_rows, MAX_RING_ROWS})
    plans = [(last, decide(problem, last, device, forced).plan) for last in lasts if last]
    return (*plans, (math.inf, decide(problem, MAX_RING_ROWS + 1, device, forced).plan))


def _why_best(variant: str, problem: NormProblem, device: DeviceSpec) -> str:
    known = tuning(problem, device)
    if variant == "reference":
        return "no kernel of this package runs here"
    if variant != known.order[0]:
        return f"{' and '.join(known.order[: known.order.index(variant)])} cannot run or should not"
    return known.evidence


def _why_few(short: ShortWalk) -> str:
    if isinstance(short.plan, PipelinedPlan):
        how = "by a ring over two CTAs"
    elif short.plan.short_lived:
        how = "without a ring, by one row tile for each CTA"
    else:
        how = "without a ring, by multi-wave CTAs"
    return f"up to {short.most_rows} rows are done sooner {how}"


def _why_forced(fault: Rejected | None, best: str, *, could_run: bool, would_anyway: bool) -> str:
    if fault:
        return f"forced, {'though' if could_run else 'but'} it {fault.reason}"
    return "forced, and would be chosen anyway" if would_anyway else f"forced; {best} would be chosen"
