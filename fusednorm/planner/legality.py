"""What each variant can run at all. The planner reports the reason of a broken rule; launch asserts the rules.

Nothing here is about speed; see choice.py for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .device import DeviceSpec
from .norm_problem import NormProblem

OLDEST_ARCH = 80
OLDEST_TMA_ARCH = 90
# Ring kernels count rows in 32 bits, and the count runs past the last row by a few tiles per CTA. 2^30 leaves room.
MAX_RING_ROWS = 2**30


class Rule(NamedTuple):
    """`reason` is the report if the rule does not hold."""

    name: str
    holds: bool
    reason: str


def rules(variant: str, p: NormProblem, rows: int, device: DeviceSpec) -> Iterator[Rule]:
    """The rules of a variant for problem, row count and device. The first that does not hold is the reported one."""
    gpu, moves_rows = f"{device.name} has {capability(device)}", p.form.rows_in + p.form.rows_out > 0
    if variant in ("multi_wave", "async_copy"):
        yield Rule("arch", device.arch >= OLDEST_ARCH, f"needs compute capability 8.0, {gpu}")
    if variant == "multi_wave":
        narrow = p.x_dtype.itemsize == 8 or all(each.itemsize <= 4 for each in p.rows_in + p.shared)
        narrow |= not p.form.modulate
        yield Rule("wide_modulation", narrow, "computes in float64 for float64 rows only, not for modulations")
    if variant == "async_copy":
        older = f"stands in for TMA up to compute capability 9.0, {gpu}"
        yield Rule("older", device.arch <= OLDEST_TMA_ARCH, older)
        yield Rule("sums", p.writes_rows, "has no kernel for dw and db alone")
    if variant in ("multi_wave", "async_copy", "pipelined"):
        # On an H100 the kernels' steps were not rounded as tensor code's: some sums differed by a last bit.
        steps = 'does not round where rounding="steps" does: ATen\'s kernels do'
        yield Rule("steps", not p.form.rounds_steps, steps)
        scattered = "sums over rows that are next to each other, and a modulation is of others"
        yield Rule("scattered", not p.scattered, scattered)
    if variant in ("async_copy", "pipelined"):
        by_row = p.form.modulate and not {"scale", "shift", "gate"}.isdisjoint(p.names_in)
        yield Rule("modulations_by_row", not by_row, "reads no row of a modulation for each row of x")
        sums = p.writes_rows or not (p.rows_in or p.form.groups > 1)
        yield Rule("sums", sums, "reads neither groups nor row tensors beside x and dy for dw and db alone")
    if variant == "warp_specialized":
        yield Rule("dx", p.writes_rows, "computes dx, which is not asked for")
        beside = "reads and writes no row tensors beside x and y in a forward"
        yield Rule("row_tensors", not (p.is_forward and moves_rows), beside)
        yield Rule("groups", p.form.groups == 1, "has no kernels for groups of columns")
        yield Rule("unmodulated", not p.form.modulate, "has no kernels for modulated norms")
        yield Rule("packed", not p.packed, "writes no gradients of x and a gate as columns of one tensor")
    if variant in ("pipelined", "warp_specialized"):
        yield Rule("tma", device.arch >= OLDEST_TMA_ARCH, f"needs compute capability 9.0 for TMA, {gpu}")
    if variant in ("async_copy", "pipelined", "warp_specialized"):
        narrow = all(dtype is None or dtype.itemsize <= 4 for dtype in (p.x_dtype, p.grad_dtype, *p.rows_in, *p.shared))
        yield Rule("float64", narrow, "computes in float32, and x, the gradient or a residual is float64")
        by = "for copies by 16 bytes" if variant == "async_copy" else "for TMA"
        aligned = f"base pointers, rows and row strides in multiples of 16 bytes {by}, and not all tensors have them"
        yield Rule("alignment", p.tma_aligned, f"needs {aligned}")
        nested = "needs rows at one stride, and some tensor has them at two nested ones"
        yield Rule("nested_rows", not p.nested_rows, nested)
        yield Rule("rows", rows <= MAX_RING_ROWS, f"needs at most {MAX_RING_ROWS} rows, got {rows}")


def broken_rule(variant: str, problem: NormProblem, rows: int, device: DeviceSpec) -> Rule | None:
    """The first rule that `variant` breaks with this problem, row count and device, or None."""
    return next((rule for rule in rules(variant, problem, rows, device) if not rule.holds), None)


def capability(device: DeviceSpec) -> str:
    return f"{device.arch // 10}.{device.arch % 10}"
