"""What each variant can run at all: the rules of data/legality.json.

The planner reports the reason of a broken rule; launch asserts the rules. Nothing here is about speed; choice.py is.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from . import limits
from .device import DeviceSpec
from .norm_problem import NormProblem

OLDEST_ARCH = 80
OLDEST_TMA_ARCH = 90
# Ring kernels count rows in 32 bits, and the count runs past the last row by a few tiles per CTA. 2^30 leaves room.
MAX_RING_ROWS = 2**30
CONSTANTS = {"oldest_arch": OLDEST_ARCH, "oldest_tma_arch": OLDEST_TMA_ARCH, "most_rows": MAX_RING_ROWS}


class Rule(NamedTuple):
    """`holds` is an expression; `reason` is the report if it does not."""

    name: str
    variants: list[str]
    holds: str
    reason: str
    why: str = ""  # of this rule


@functools.cache
def rules(variant: str) -> tuple[Rule, ...]:
    """Those of a variant. The first that does not hold is the reported one."""
    return tuple(rule for each in limits.read("legality") if variant in (rule := Rule(**each)).variants)


def broken_rule(variant: str, problem: NormProblem, rows: int, device: DeviceSpec) -> Rule | None:
    """The first rule that `variant` breaks with this problem, row count and device, or None."""
    known = vars(device) | CONSTANTS | {"rows": rows}
    broken = (each for each in rules(variant) if not limits.value_of(each.holds, problem.quantities, known))
    gpu = f"{device.name} has {device.capability}"
    return next((each._replace(reason=each.reason.format(gpu=gpu, **known)) for each in broken), None)
