"""What each schedule can run at all: one predicate per rule. The planner asks for the reason, launch asserts the same predicates.

Nothing here is about speed; see heuristics.py for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .device import DeviceSpec
from .plan import Rejected
from .problem import NormProblem

OLDEST_ARCH = 80
OLDEST_TMA_ARCH = 90
# Ring kernels count rows in 32 bits, and look a few tiles of every CTA ahead.
MAX_RING_ROWS = 2**30

Predicate = Callable[[NormProblem, int, DeviceSpec], bool]


class Rule(NamedTuple):
    """`holds` must be true of (problem, rows, device); `reason` says what is wrong where it is not."""

    name: str
    holds: Predicate
    reason: str


def has_kernels(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return device.arch >= OLDEST_ARCH


def has_tma(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return device.arch >= OLDEST_TMA_ARCH


def is_backward(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return problem.direction == "backward"


def wants_dx(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return problem.direction == "forward" or problem.wants_dx


def accumulates_in_float32(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return all(dtype is None or dtype.itemsize <= 4 for dtype in (problem.x_dtype, problem.grad_dtype))


def rows_are_tma_aligned(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return problem.tma_aligned


def rows_have_one_stride(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return not problem.nested_rows


def rows_fit_int32(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return rows <= MAX_RING_ROWS


KERNELS = Rule("arch", has_kernels, "needs compute capability 8.0 or later, {device.name} has {arch}")
RING = (
    Rule("tma", has_tma, "needs compute capability 9.0 or later for TMA, {device.name} has {arch}"),
    Rule("dx", wants_dx, "computes dx, which is not asked for"),
    Rule("float64", accumulates_in_float32, "computes in float32, and x or the gradient is float64"),
    Rule(
        "alignment",
        rows_are_tma_aligned,
        "TMA needs base pointers, rows and row strides in multiples of 16 bytes, and some tensor's are not",
    ),
    Rule("nested_rows", rows_have_one_stride, "reads rows at one stride, and some tensor's lie at two nested ones"),
    Rule("rows", rows_fit_int32, f"counts rows in 32 bits: at most {MAX_RING_ROWS}, got {{rows}}"),
)
NO_FORWARD = Rule("forward", is_backward, "has no forward kernel")

RULES: dict[str, tuple[Rule, ...]] = {
    "multi_wave": (KERNELS,),
    "pipelined": (*RING, NO_FORWARD),
    "warp_specialized": (*RING, NO_FORWARD),
    "reference": (),
}


def broken_rule(variant: str, problem: NormProblem, rows: int, device: DeviceSpec) -> Rejected | None:
    """The first rule that keeps `variant` from running this, or None."""
    for rule in RULES[variant]:
        if not rule.holds(problem, rows, device):
            arch = f"{device.arch // 10}.{device.arch % 10}"
            return Rejected(rule.name, rule.reason.format(device=device, rows=rows, arch=arch))
    return None
