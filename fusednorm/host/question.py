"""What the planner is asked for a call: about the call itself, or, if a row's bits must not depend on the call that it
is part of, about one that stands for all of its kind."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..planner import limits
from ..planner.device import DeviceSpec
from ..planner.legality import MAX_RING_ROWS
from ..planner.norm_problem import NormProblem
from ..settings import invariance


class Question(NamedTuple):
    problem: NormProblem
    rows: int
    device: DeviceSpec


def asked(problem: NormProblem, rows: int, device: DeviceSpec) -> Question:
    """What the planner is asked for a call, where groups of columns are rows. If rows are batch-invariant, it is the
    same for all numbers of rows that a ring may have. So it is for sums, if they are ordered."""
    rows *= problem.form.groups
    in_force = invariance.switch.invariance()
    if in_force and (in_force > 0 or problem.writes_rows) and rows <= MAX_RING_ROWS:
        return canonical(problem, device)
    return Question(problem, rows, device)


def canonical(problem: NormProblem, device: DeviceSpec) -> Question:
    """The same for every number of rows, every choice of gradients that has dx, every number of SMs and every GPU of an
    architecture. The tensors are packed: strides are no part of it, but modulations may be read by several rows. The
    rows of a sample are no part of it."""
    problem = replace(problem, nested_rows=False)
    if problem.wants_dx and not problem.is_forward:
        gradients = {"stored": tuple(range(1 + len(problem.rows_in))), "rows_out": problem.rows_in}
        sums = {"wants_dw": problem.weight_dtype is not None, "wants_db": problem.bias_dtype is not None}
        sums |= {"summed": tuple(range(1, 1 + problem.by_sample)), "sums_out": ()}
        problem = replace(problem, **gradients, **sums)
    problem = replace(problem, sample_divisor=int(problem.by_sample > 0))
    rows = max(1, min(limits.canonical_most_rows, limits.canonical_elements // max(1, problem.cols)))
    return Question(problem, rows, device.of_architecture())
