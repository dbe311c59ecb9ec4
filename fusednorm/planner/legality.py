"""What each variant can run at all, one predicate per rule. The planner reports the reason; launch asserts the rules.

Nothing here is about speed; see choice.py for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .device import DeviceSpec
from .norm_problem import NormProblem
from .plan import Rejected

OLDEST_ARCH = 80
OLDEST_TMA_ARCH = 90
# Ring kernels count rows in 32 bits, and the count runs past the last row by a few tiles per CTA. 2^30 leaves room.
MAX_RING_ROWS = 2**30

Predicate = Callable[[NormProblem, int, DeviceSpec], bool]


class Rule(NamedTuple):
    """`holds(problem, rows, device)` must be true; `reason` is the report if it is not."""

    name: str
    holds: Predicate
    reason: str


def has_kernels(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return device.arch >= OLDEST_ARCH


def is_not_modulated(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return not problem.form.modulate


def modulates_in_its_dtype(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return not problem.form.modulate or problem.acc_dtype.itemsize == 4 or problem.x_dtype.itemsize == 8


def rounds_once(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    """On an H100 the kernels' steps were not rounded as tensor code's: some sums differed by a last bit."""
    return not problem.form.rounds_steps


def sums_adjacent_rows(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return not problem.scattered


def is_of_one_group(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return problem.form.groups == 1


def is_not_packed(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return not problem.packed


def has_tma(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return device.arch >= OLDEST_TMA_ARCH


def wants_dx(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return problem.direction == "forward" or problem.wants_dx


def accumulates_in_float32(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    dtypes = problem.x_dtype, problem.grad_dtype, *problem.rows_in
    return all(dtype is None or dtype.itemsize <= 4 for dtype in dtypes)


def rows_are_tma_aligned(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return problem.tma_aligned


def rows_have_one_stride(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return not problem.nested_rows


def rows_fit_int32(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return rows <= MAX_RING_ROWS


def moves_x_alone(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return problem.direction == "backward" or not problem.form.rows_in + problem.form.rows_out


def moves_no_rows_for_sums(problem: NormProblem, rows: int, device: DeviceSpec) -> bool:
    return problem.direction == "forward" or problem.wants_dx or not (problem.rows_in or problem.form.groups > 1)


KERNELS = Rule("arch", has_kernels, "needs compute capability 8.0, {device.name} has {capability}")
MODULATED = (
    Rule("wide_modulation", modulates_in_its_dtype, "computes in float64 for float64 rows only, not for modulations"),
    Rule("steps", rounds_once, 'does not round where rounding="steps" does: ATen\'s kernels do'),
    Rule("scattered", sums_adjacent_rows, "sums over rows that are next to each other, and a modulation is of others"),
)
RING = (
    Rule("unmodulated", is_not_modulated, "has no kernels for modulated norms"),
    Rule("tma", has_tma, "needs compute capability 9.0 for TMA, {device.name} has {capability}"),
    Rule("float64", accumulates_in_float32, "computes in float32, and x, the gradient or a residual is float64"),
    Rule(
        "alignment",
        rows_are_tma_aligned,
        "needs base pointers, rows and row strides in multiples of 16 bytes for TMA, and not all tensors have them",
    ),
    Rule("nested_rows", rows_have_one_stride, "needs rows at one stride, and some tensor has them at two nested ones"),
    Rule("rows", rows_fit_int32, f"needs at most {MAX_RING_ROWS} rows, got {{rows}}"),
)
SUMS_ALONE = Rule(
    "sums", moves_no_rows_for_sums, "reads neither groups nor row tensors beside x and dy for dw and db alone"
)
ONE_GROUP = Rule("groups", is_of_one_group, "has no kernels for groups of columns")
UNPACKED = Rule("packed", is_not_packed, "writes no gradients of x and a gate as columns of one tensor")
DX = Rule("dx", wants_dx, "computes dx, which is not asked for")
X_ALONE = Rule("row_tensors", moves_x_alone, "reads and writes no row tensors beside x and y in a forward")

RULES: dict[str, tuple[Rule, ...]] = {
    "multi_wave": (KERNELS, *MODULATED),
    "pipelined": (SUMS_ALONE, *RING),
    "warp_specialized": (DX, X_ALONE, ONE_GROUP, UNPACKED, *RING),
    "reference": (),
}


def broken_rule(variant: str, problem: NormProblem, rows: int, device: DeviceSpec) -> Rejected | None:
    """The first rule that `variant` breaks with this problem, row count and device, or None."""
    for rule in RULES[variant]:
        if not rule.holds(problem, rows, device):
            return Rejected(rule.name, rule.reason.format(device=device, rows=rows, capability=capability(device)))
    return None


def capability(device: DeviceSpec) -> str:
    return f"{device.arch // 10}.{device.arch % 10}"
