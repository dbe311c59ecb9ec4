"""Chooses a substitute for a plan whose kernel does not compile, assemble, load or launch, or needs more registers or
shared memory than there are. A norm's substitutes are the best plans of other variants, of multi-wave, and ATen.
Failures are remembered for the process.
"""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..planner import choice
from ..planner.device import DeviceSpec
from ..planner.legality import MAX_RING_ROWS, broken_rule
from ..planner.norm_problem import NormProblem
from ..planner.plan import Plan, ReferencePlan
from ..settings.forcing import forced_variant
from .program import MOST_ROWS
from .question import asked

# Parts of the CUDA driver's messages for errors that no other kernel could avoid: the context is lost, memory is
# exhausted, or the stream's state forbids the launch.
NOT_OF_THE_KERNEL = (
    "out of memory", "memory access", "illegal address", "misaligned", "illegal instruction", "invalid program counter",
    "invalid address space", "stack error", "device-side assert", "launch failure", "launch failed", "timed out",
    "timeout", "uncorrectable", "ecc ", "nvlink", "context is destroyed", "invalid device context", "not ready",
    "initialization error", "not initialized", "shutting down", "unloading", "captur", "external device",
    "unknown error",
)  # fmt: skip
# Parts of the driver's messages for a launch that it has refused. Nothing has run then.
REFUSED = ("too many resources requested", "out of resource", "cluster")


class BuildFailed(Exception):  # noqa: N818  never reaches the user
    """A kernel cannot run here, but another one could. str() is the cause."""


class Failure(NamedTuple):
    """A plan that cannot run a problem on a device, and why."""

    plan: Any
    problem: Any
    device: DeviceSpec
    cause: str

    def __str__(self) -> str:
        problem = self.problem
        dtype = problem.x_dtype if isinstance(problem, NormProblem) else problem.dtype
        what = f"{problem.title} of {problem.cols} columns of {str(dtype).removeprefix('torch.')}"
        return f"{what} cannot run as {self.plan.kernel} on {self.device.name}: {self.cause}"


_failures: dict[tuple, Failure] = {}
_warned: set[str] = set()  # causes that have been warned about


class Choice(NamedTuple):
    """A plan, for more than `rows_above` rows and at most `most_rows`."""

    plan: Plan
    rows_above: int = 0
    most_rows: int = MOST_ROWS


def choose(problem: NormProblem, rows: int, device: DeviceSpec) -> Choice:
    """The planner's choice under this thread's `force`, or if that has failed its first alternative that has not."""
    question = asked(problem, rows, device)
    choices = choice.choices(question.problem, question.device, forced_variant())
    at = bisect.bisect_left([most for most, _ in choices], question.rows)
    (most, plan), above = choices[at], choices[at - 1][0] if at else 0
    if _failures and has_failed(plan, problem, device):
        plan = substitute(problem, rows, device)
    groups = problem.form.groups
    if question != (problem, rows * groups, device):
        return Choice(plan, 0, MAX_RING_ROWS // groups)
    return Choice(plan, above // groups, min(most, MOST_ROWS) // groups)


def substitute(problem: NormProblem, rows: int, device: DeviceSpec) -> Plan:
    """The best plan that has not failed."""
    plans = alternatives(*asked(problem, rows, device))
    return next(plan for plan in plans if not has_failed(plan, problem, device))


def alternatives(problem: NormProblem, rows: int, device: DeviceSpec) -> Iterator[Plan]:
    """The plan, and those that may replace it if it fails, best first: the best of each other variant in use, of
    multi_wave, and ATen."""
    yield (chosen := choice.choose(problem, rows, device))
    for variant in choice.variants_in_use(device):
        plan = None if variant == chosen.variant != "multi_wave" else choice.best_plan(variant, problem, device)
        if plan and not broken_rule(variant, problem, rows, device):
            yield plan
    yield ReferencePlan("the kernels for it have failed")


def has_failed(plan: Any, problem: Any, device: DeviceSpec) -> bool:
    return (plan, problem, device) in _failures


def remember(plan: Any, problem: Any, device: DeviceSpec, cause: str) -> None:
    """Record a failure: from now on another plan runs. Warns once per cause."""
    failure = _failures[plan, problem, device] = Failure(plan, problem, device, cause)
    if cause not in _warned:
        _warned.add(cause)
        warnings.warn(f"fusednorm: {failure}; another kernel or ATen's runs instead", RuntimeWarning, stacklevel=2)


def failures() -> list[Failure]:
    """All remembered failures."""
    return list(_failures.values())


def failed_of(problem: Any, device: DeviceSpec) -> dict[Any, str]:
    """{plan: cause} of the plans of a problem that have failed on the device."""
    return {each.plan: each.cause for each in failures() if (each.problem, each.device) == (problem, device)}


def forget() -> None:
    """Forget all failures and warnings."""
    _failures.clear()
    _warned.clear()


def cause_of(error: Exception, *, launched: bool) -> str | None:
    """Why a kernel cannot be built, in one line; if it was built and `launched`, why the driver refused the launch.
    None if another kernel would not help, so that the user must see the error."""
    text = str(error)
    is_cudas = "CUDA" in text  # otherwise it is the compiler's message, which may contain the same words
    if isinstance(error, MemoryError) or (is_cudas and any(each in text.lower() for each in NOT_OF_THE_KERNEL)):
        return None
    if launched and not any(each in text.lower() for each in REFUSED):
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    summary = " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
    return f"{type(error).__name__}: {summary[:300]}"
