"""Small problems by the TMA kernels on a simulated GPU, against float64, as the package's demo checks the others:

python -m tests.simulator.demo
"""

from __future__ import annotations

import sys

from fusednorm import explain, force
from fusednorm.tools import demo
from fusednorm.tools.oracle import make_inputs

from . import simulated

VARIANTS = ("pipelined", "warp_specialized")
TITLE = "The TMA kernels as compiled for an H200, on a simulated GPU that also looks for races and deadlocks"


def simulate() -> demo.Checked:
    checked = {}
    for variant in VARIANTS:
        for case in demo.SMALL_PROBLEMS:
            with simulated("H200", sms=2) as simulation, force(variant):
                require_variant(case, variant, simulation.spec)
                checked[f"{variant}: {case}"] = demo.check_ops(case)
    return checked


def require_variant(case, variant: str, device) -> None:
    inputs = make_inputs(case)
    for direction in ("forward", "backward"):
        asked = {"norm": case.norm, "direction": direction, "device": device}
        plan = explain(inputs.x, case.normalized_shape, inputs.weight, inputs.bias, **asked).plan
        if plan.variant != variant:
            raise RuntimeError(f"{case} {direction} must be planned as {variant}, got {plan.variant}")


if __name__ == "__main__":
    sys.exit(not demo.print_errors(TITLE, simulate()))
