"""choose(problem, rows, device, forced) -> Plan.

The first of these answers: the user's table of this GPU (`tune`), the shipped table of this GPU or of one alike, the
published rules of nvFuser (Blackwell), the model. `forced` is the variant that is asked for; it overrides all of them,
never legality. The row count never changes a plan. It selects one: `choices` has all of a problem.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from . import table
from .budget import is_within_budget
from .candidates import Family, candidates, cluster_sizes, column_tile_plan, faulty, plan_of
from .device import DeviceSpec
from .legality import MAX_RING_ROWS, broken_rule
from .model import predict_us
from .norm_problem import NormProblem
from .plan import Plan, ReferencePlan, WarpSpecializedPlan, from_text, num_passes

Ranges = tuple[tuple[float, Plan], ...]  # (most rows, plan), ascending

HOPPER, BLACKWELL = (90,), (100, 103, 110, 120, 121)
MANY_ROWS_PER_SM = 64  # at which plans are compared where their row count is not asked
# A backward without dx: rows per SM beyond which a ring pays for its start (measured on an H200)
ROWS_PER_SM_WITHOUT_DX = 8
ALIKE = 0.25  # octaves up to which the model is not asked whether another width's plan is good
MOST_LOSS = 0.15  # that it may predict for the plan


class Published:
    """What nvFuser has published for B200: a ring pays for more rows per SM than these, and for rows of these bytes."""

    ROWS_PER_SM = {"forward": {"layer": 0, "rms": 0}, "backward": {"layer": 16, "rms": 4}}
    ROW_BYTES = {"forward": 2048, "backward": 512}


class Chosen(NamedTuple):
    """The plans of a problem, and what they were chosen by: "forced", a sentence about a table, "published", "model"
    or "legality"."""

    ranges: Ranges
    source: str

    def plan(self, rows: int) -> Plan:
        return next(plan for most_rows, plan in self.ranges if rows <= most_rows)


def choose(problem: NormProblem, rows: int, device: DeviceSpec, forced: str | None = None) -> Plan:
    """The plan for `rows` rows. `forced` is ignored if that variant cannot run."""
    for most_rows, plan in choices(problem, device, forced):
        if rows <= most_rows:
            return plan
    raise AssertionError("the last interval has no end")


@functools.cache
def choices(problem: NormProblem, device: DeviceSpec, forced: str | None = None) -> Ranges:
    """Every plan that `choose` can return, as (most rows, plan), ascending. The last bound is infinity."""
    return decide(problem, device, forced).ranges


def variants_in_use(device: DeviceSpec) -> tuple[str, ...]:
    """The variants that are chosen without `force`, the first where nothing else decides."""
    if device.arch in HOPPER:
        return "pipelined", "multi_wave"
    return ("warp_specialized", "pipelined", "multi_wave") if device.arch in BLACKWELL else ("multi_wave",)


def alternatives(problem: NormProblem, rows: int, device: DeviceSpec) -> Iterator[Plan]:
    """The plan, and those that may replace it if it fails, best first: the best of each other variant in use, of
    multi_wave, and ATen."""
    chosen = choose(problem, rows, device)
    yield chosen
    for variant in variants_in_use(device):
        if variant == "multi_wave" or variant != chosen.variant:
            plan = best_plan(variant, problem, device)
            if plan and not broken_rule(variant, problem, rows, device):
                yield plan
    yield ReferencePlan("the kernels for it have failed")


def decide(problem: NormProblem, device: DeviceSpec, forced: str | None = None) -> Chosen:
    if forced == "reference":
        return Chosen(((math.inf, ReferencePlan("asked for")),), "forced")
    if fault := broken_rule("multi_wave", problem, 1, device):
        return Chosen(((math.inf, ReferencePlan(fault.reason)),), "legality")
    if not candidates("multi_wave", problem, device):
        return Chosen(((math.inf, ReferencePlan(no_room(problem, device))),), "legality")
    asked = None
    if forced and not broken_rule(forced, problem, 1, device):
        asked = best_plan(forced, problem, device) or faulty(forced, problem, device)
    if asked:
        ranges, source = ((math.inf, asked),), "forced"
    else:
        ranges, source = (
            measured(problem, device)
            or published(problem, device)
            or (((math.inf, _predicted(problem, device)),), "model")
        )
    *few, (_, many) = ranges
    if many.variant != "multi_wave":  # a ring counts rows in 32 bits
        ranges = (*few, (MAX_RING_ROWS, many), (math.inf, column_tile_plan(problem, device)))
    return Chosen(ranges, source)


def no_room(problem: NormProblem, device: DeviceSpec) -> str:
    return f"has no plan for {problem.cols} columns within the registers and shared memory of {device.name}"


def _merged(ranges: list[tuple[float, Plan]]) -> Ranges:
    return tuple(
        each for index, each in enumerate(ranges) if index == len(ranges) - 1 or each[1] != ranges[index + 1][1]
    )


def measured(problem: NormProblem, device: DeviceSpec) -> tuple[Ranges, str] | None:
    """What a table says; None if there is no table, or nothing in it can answer."""
    for known in table.of_device(device):
        lines = known.lookup(problem)
        ranges = lines and _of_lines(lines, problem, device)
        if ranges:
            width = f"{lines[0][0]} columns" + " and others" * (len(lines) > 1)
            return ranges, f"the fastest of those measured on {known.gpu} at {width} ({known.date})"
    return None


def _of_lines(lines: list[tuple[int, table.Ranges]], problem: NormProblem, device: DeviceSpec) -> Ranges | None:
    """The plans of the first width: as they are if it is the problem's own, else those of their families. Where one
    cannot run here, that of the next width takes its place, and in the end the model's. None if none of the first width
    can run."""
    found: list[tuple[float, Plan | None]] = []
    fewest = 1.0  # rows per SM
    for most, _ in lines[0][1]:
        at = max(fewest, min(most, MANY_ROWS_PER_SM)) * device.sm_count
        texts = ((cols, next(text for bound, text in ranges if most <= bound)) for cols, ranges in lines)
        plans = (_adapted(from_text(text), cols, problem, device) for cols, text in texts)
        plan = next((each for each in plans if each), None)
        if plan and abs(math.log2(lines[0][0] / problem.cols)) > ALIKE:
            plan = _believed(plan, at, problem, device)
        found.append((most if most == math.inf else int(most * device.sm_count), plan))
        fewest = most
    if not any(plan for _, plan in found):
        return None
    return _merged([(most, plan or _predicted(problem, device)) for most, plan in found])


def _believed(plan: Plan, rows: float, problem: NormProblem, device: DeviceSpec) -> Plan:
    """A plan of another width, or the model's if that one is predicted to be much slower: a row of this width may need
    more padding, or more copies."""
    own = _predicted(problem, device)
    us, own_us = (predict_us(each, problem, int(rows), device, table.coefficients(device)) for each in (plan, own))
    return plan if us <= own_us * (1 + MOST_LOSS) else own


def _adapted(plan: Plan, cols: int, problem: NormProblem, device: DeviceSpec) -> Plan | None:
    """A measured plan of `cols` columns for this problem."""
    if broken_rule(plan.variant, problem, 1, device) or plan.cluster not in cluster_sizes(device):
        return None
    if cols == problem.cols and not problem.rows_in and is_within_budget(plan, problem, device):
        return plan
    return None if isinstance(plan, WarpSpecializedPlan) else plan_of(Family.of(plan), problem, device)


def published(problem: NormProblem, device: DeviceSpec) -> tuple[Ranges, str] | None:
    """nvFuser's rule on Blackwell: a ring for many rows that are not short, warp-specialized if it has registers and
    stages. The kernels that it was published for read their inputs once, so that a ring pays for any number of rows
    where ours in registers would read them twice. A backward without dx has a rule of its own."""
    without_dx = problem.direction == "backward" and not problem.wants_dx
    if device.arch not in BLACKWELL and not (without_dx and device.arch in HOPPER):
        return None
    rings = (best_plan(variant, problem, device) for variant in variants_in_use(device)[:-1])
    ring = next((plan for plan in rings if plan), None)
    narrow = problem.cols * problem.x_dtype.itemsize < Published.ROW_BYTES[problem.direction]
    per_sm = ROWS_PER_SM_WITHOUT_DX if without_dx else Published.ROWS_PER_SM[problem.direction][problem.norm]
    if ring and not narrow and not per_sm:
        return ((math.inf, ring),), "published"
    portable = best_plan("multi_wave", problem, device)
    if ring is None or (narrow and not without_dx):
        return ((math.inf, portable),), "published"
    if num_passes(portable, problem) != 1 and not without_dx:
        return ((math.inf, ring),), "published"
    return ((per_sm * device.sm_count, portable), (math.inf, ring)), "published"


def _predicted(problem: NormProblem, device: DeviceSpec) -> Plan:
    plans = (best_plan(variant, problem, device) for variant in variants_in_use(device))
    return _fastest([plan for plan in plans if plan], problem, device)


@functools.lru_cache(maxsize=4096)
def best_plan(variant: str, problem: NormProblem, device: DeviceSpec) -> Plan | None:
    """The candidate of a variant that is predicted to be the fastest for many rows; None if it has no candidate."""
    return _fastest(candidates(variant, problem, device), problem, device)


def _fastest(plans: Iterable[Plan], problem: NormProblem, device: DeviceSpec) -> Plan | None:
    # SMs that are left to others do not change the choice, and so no sums change their order.
    device = replace(device, sm_count=device.sm_count + device.sm_margin, sm_margin=0)
    rows, coefficients = MANY_ROWS_PER_SM * device.sm_count, table.coefficients(device)
    return min(plans, key=lambda plan: predict_us(plan, problem, rows, device, coefficients), default=None)
