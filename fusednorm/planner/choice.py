"""choose(problem, rows, device, forced) -> Plan.

The first of these answers: the user's table of this GPU (`tune`), the shipped table of this GPU or of one alike, the
published rules of nvFuser (Blackwell; on Hopper backwards without dx), the model. `forced` is the variant that is asked
for; it overrides all of them, never legality. The row count never changes a plan. It selects one: `choices` has all of
a problem.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from . import limits, table
from .budget import is_within_budget, shared_bytes
from .candidates import are_better_in_registers, candidates, cluster_sizes, column_tile_plan, cut, faulty, fitted
from .device import DeviceSpec
from .legality import MAX_RING_ROWS, broken_rule
from .model import predict_us
from .norm_problem import NormProblem
from .plan import Plan, ReferencePlan, RingPlan, from_text, num_passes

Ranges = tuple[tuple[float, Plan], ...]  # (most rows, plan), ascending


class Chosen(NamedTuple):
    ranges: Ranges
    source: str  # "forced", a sentence about a table, "published", "model" or "legality"


def choose(problem: NormProblem, rows: int, device: DeviceSpec, forced: str | None = None) -> Plan:
    """The plan for `rows` rows. `forced` is ignored if that variant cannot run."""
    return at(choices(problem, device, forced), rows)


def at(ranges: Ranges, rows: float) -> Plan:
    for most, plan in ranges:  # a loop, because a generator costs a kept choice two calls more
        if rows <= most:
            return plan
    raise AssertionError("the last range has no end")


@functools.cache
def choices(problem: NormProblem, device: DeviceSpec, forced: str | None = None) -> Ranges:
    """Every plan that `choose` can return, as (most rows, plan), ascending. The last bound is infinity."""
    return decide(problem, device, forced).ranges


def variants_in_use(device: DeviceSpec) -> tuple[str, ...]:
    """The variants that are chosen without `force`, the first where nothing else decides."""
    return limits.value_of(limits.variants_in_use, {}, vars(device))


def decide(problem: NormProblem, device: DeviceSpec, forced: str | None = None) -> Chosen:
    if forced == "reference":
        return Chosen(((math.inf, ReferencePlan("asked for")),), "forced")
    fault, none = broken_rule("multi_wave", problem, 1, device), ReferencePlan(no_room(problem, device))
    tiles = column_tile_plan(problem, device)
    if fault or not (tiles or any(candidates(each, problem, device) for each in variants_in_use(device))):
        return Chosen(((math.inf, ReferencePlan(fault.reason) if fault else none),), "legality")
    can_force = forced and not broken_rule(forced, problem, 1, device)
    asked = can_force and (best_plan(forced, problem, device) or faulty(forced, problem, device))
    found = (((math.inf, asked),), "forced") if asked else measured(problem, device) or published(problem, device)
    ranges, source = found or (predicted(problem, device), "model")
    *few, (_, many) = ranges
    if problem.by_key or many.variant != "multi_wave":  # sorts and rings count rows in 32 bits
        rest = tiles or best_plan("multi_wave", problem, device) or none
        rest = ReferencePlan(f"sorts at most {MAX_RING_ROWS} rows") if problem.by_key else rest
        ranges = (*few, (MAX_RING_ROWS, many), (math.inf, rest))
    return Chosen(ranges, source)


def no_room(problem: NormProblem, device: DeviceSpec) -> str:
    return f"has no plan for {problem.cols} columns within the registers and shared memory of {device.name}"


def measured(problem: NormProblem, device: DeviceSpec) -> tuple[Ranges, str] | None:
    """What a table says of the problem's width or of the nearest one whose plan can run. Where none can, the model's is
    taken. None if no table can answer."""
    sms = device.leaving(0).sm_count
    for known in table.of_device(device, problem):
        found, widths, near = [], {}, known.lookup(problem)
        for fewest, most in itertools.pairwise((1.0, *sorted({most for _, ranges, _ in near for most, _ in ranges}))):
            rows = round(sms * max(fewest, min(most, limits.compared_rows_per_sm[-1])))
            asked = ((from_text(at(ranges, most)), cols, f"{cols} columns ({day})") for cols, ranges, day in near)
            plans = ((_adapted(plan, cols, rows, problem, device), width) for plan, cols, width in asked)
            fit = (each for each in plans if each[0])
            (_, plan), width = min(fit, key=lambda each: each[0][0], default=((0, None), ""))
            widths |= {width: plan} if plan else {}
            found.append((sms * most, plan))
        if widths:
            ranges = _merged((end, plan or at(predicted(problem, device), end)) for end, plan in found)
            return ranges, f"the fastest of those measured on {known.gpu} at {' and '.join(widths)}"
    return None


def _adapted(own: Plan, cols: int, rows: int, problem: NormProblem, device: DeviceSpec) -> tuple[float, Plan] | None:
    """A measured plan of `cols` columns for this problem, and how many octaves away it is: further if it cuts a row
    into other numbers of chunks there. None if it cannot run, or if another one is predicted to be much faster: a row
    of this width may need more padding, or more copies."""
    if broken_rule(own.variant, problem, 1, device) or own.cluster not in cluster_sizes(problem, device):
        return None
    if cols == problem.cols and not problem.rows_in and is_within_budget(own, problem, device):
        return 0.0, own
    if own.variant == "pipelined" and are_better_in_registers(problem, device):
        return None
    # Problems that share a line of their width may have room for the weight at different places.
    plan = (fitted if cols == problem.cols else cut)(own, problem, device)
    if plan and cols != problem.cols:
        plans, coefficients = (plan, at(predicted(problem, device), rows)), table.coefficients(device)
        us, least_us = (predict_us(each, problem, rows, device, coefficients) for each in plans)
        plan = plan if us <= least_us * (1 + limits.most_loss) else None
    chunks, chunks_there = (getattr(each, "num_chunks", 1) for each in (plan, own))
    more = limits.octaves_of_chunks * abs(math.log2(chunks / chunks_there))
    return plan and (abs(math.log2(cols / problem.cols)) + more, plan)


def published(problem: NormProblem, device: DeviceSpec) -> tuple[Ranges, str] | None:
    """nvFuser's rule on Blackwell: a ring for many rows that are not short, warp-specialized if it has registers and
    stages. The kernels that it was published for read their inputs once, so that a ring pays for any number of rows
    where ours in registers would read them twice."""
    asked = problem.quantities, vars(device)
    if not limits.value_of(limits.is_published, *asked):
        return None
    plans = [best_plan(variant, problem, device, full=True) for variant in variants_in_use(device)]
    ring, portable = next((plan for plan in plans[:-1] if plan), None), plans[-1]
    most_rows = limits.value_of(limits.rows_per_sm_of_ring, *asked) * device.sm_count
    if ring is None or problem.cols * problem.x_dtype.itemsize < limits.value_of(limits.row_bytes_of_ring, *asked):
        return ((math.inf, portable),), "published"
    few = ((most_rows, portable),) if most_rows and num_passes(portable, problem) == 1 else ()
    return (*few, (math.inf, ring)), "published"


@functools.lru_cache(maxsize=4096)
def predicted(problem: NormProblem, device: DeviceSpec) -> Ranges:
    """What the model says. A range ends half way, in octaves, between the row counts at which plans are compared."""
    plans = [plan for variant in variants_in_use(device) for plan in candidates(variant, problem, device)]
    if problem.is_forward or any(plan.kernel == "multi_wave" for plan in plans):
        # Threads copy only what registers do not hold, and a forward by column tiles reads its row again from L2.
        plans = [plan for plan in plans if plan.variant != "async_copy"]
    else:  # a backward that reads its rows once is faster at any number of rows
        plans = [plan for plan in plans if num_passes(plan, problem) == 1] or plans
    if problem.by_key:
        rings = [plan for plan in plans if plan.kernel == "pipelined"]
        plans = rings if any(plan.ctas_per_sm >= limits.ctas_of_order for plan in rings) else plans
    compared, sms = limits.compared_rows_per_sm, device.leaving(0).sm_count
    ends = [math.sqrt(few * many) * sms for few, many in itertools.pairwise(compared)]
    fastest = [_fastest(plans, problem, device, rows_per_sm) for rows_per_sm in compared]
    return _merged(zip((*ends, math.inf), fastest, strict=True))


@functools.lru_cache(maxsize=4096)
def best_plan(variant: str, problem: NormProblem, device: DeviceSpec, full: bool = False) -> Plan | None:
    """The candidate of a variant that is predicted to be the fastest for many rows; None if it has no candidate. If
    `full`, one of the rings that have as many bytes on their way as the device wants, as nvFuser's have, if any has."""
    plans, least = candidates(variant, problem, device), device.bytes_in_flight_per_sm
    rings = [plan for plan in plans if full and isinstance(plan, RingPlan)]
    # All stages are on their way but the one that is computed on.
    sizes = ((ring, ring.ctas_per_sm * shared_bytes(ring, problem) * (1 - 1 / ring.num_stages)) for ring in rings)
    plans = [ring for ring, size in sizes if size >= least] or plans
    return _fastest(plans, problem, device, limits.compared_rows_per_sm[-1])


def _fastest(plans: Iterable[Plan], problem: NormProblem, device: DeviceSpec, rows_per_sm: int) -> Plan | None:
    # SMs that are left to others do not change the choice, and so no sums change their order.
    device = device.leaving(0)
    rows, coefficients = rows_per_sm * device.sm_count, table.coefficients(device)
    return min(plans, key=lambda plan: predict_us(plan, problem, rows, device, coefficients), default=None)


def _merged(ranges: Iterable[tuple[float, Plan]]) -> Ranges:
    """The ranges, in whole rows, in which no neighbours have the same plan."""
    ends = [list(group)[-1] for _, group in itertools.groupby(ranges, key=lambda each: each[1])]
    return tuple((most if most == math.inf else int(most), plan) for most, plan in ends)
