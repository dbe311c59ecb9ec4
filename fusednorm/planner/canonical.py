"""The question that the planner is asked if a row's bits must not depend on the call that the row is part of."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from . import limits
from .device import KNOWN, DeviceSpec
from .norm_problem import NormProblem


class Question(NamedTuple):
    problem: NormProblem
    rows: int
    device: DeviceSpec


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
    return Question(problem, rows, of_architecture(device))


def of_architecture(device: DeviceSpec) -> DeviceSpec:
    """The same for every GPU of an architecture, whatever is left free."""
    known = next((each for each in KNOWN if each.arch == device.arch), device.leaving(0))
    return replace(known, triton=device.triton)
