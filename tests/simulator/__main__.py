"""Runs one norm on the simulated GPU and checks its outputs. From the repository root:

python -m tests.simulator --variant warp_specialized --rows 9 --cols 512 --picture out.png
"""

from __future__ import annotations

import argparse
import sys
import time

from fusednorm.dtypes import DTYPES
from fusednorm.planner.plan import VARIANTS

from .picture import draw
from .problems import Problem
from .races import SimulationError
from .recording import Recording


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.simulator", description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=VARIANTS[:-1], help="default: the planner's choice")
    parser.add_argument("--direction", choices=("forward", "backward"), default="backward")
    parser.add_argument("--norm", choices=("layer", "rms"), default="layer")
    parser.add_argument("--rows", type=int, default=9)
    parser.add_argument("--cols", type=int, default=512)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--dx-only", action="store_true", help="no gradients of weight and bias")
    parser.add_argument("--device", default="H200")
    parser.add_argument("--sms", type=int, default=2, help="at least twice a cluster")
    parser.add_argument("--seed", type=int, default=0, help="the order of events")
    parser.add_argument("--resident", type=int, help="CTAs, or clusters, that have a place at a time")
    parser.add_argument("--picture", help="write a picture of the run there")
    parser.add_argument("--trace", help="write what happened there, as text")
    options = parser.parse_args()
    mask = (True, False, False) if options.dx_only else (True, True, True)
    mix = (DTYPES[options.dtype],) * 3
    problem = Problem(
        options.direction, options.variant, options.norm, options.rows, options.cols, mix, mask,
        device=options.device, sms=options.sms,
    )  # fmt: skip
    how = {"seed": options.seed, "resident": options.resident}
    start = time.perf_counter()
    try:
        outputs, simulation = problem.simulate(**how, trace=Recording)
    except SimulationError as error:
        print(f"{problem}: {type(error).__name__}: {error}")
        return 1
    for each in simulation.launched:
        print(f"{each.name}: {each.grid} CTAs in clusters of {each.cluster}{', dependent' * each.dependent}")
    first, trace = simulation.launched[0], simulation.finished[0].trace
    if options.picture:
        norm, sms = {"layer": "LayerNorm", "rms": "RMSNorm"}[options.norm], f"{options.sms} SM{'s' * (options.sms > 1)}"
        size = f"{options.rows} x {options.cols}"
        title = f"{options.variant or first.name}: {norm} {options.direction} of {size} on {sms}"
        draw(trace, title, options.picture)
    if options.trace:
        with open(options.trace, "w") as file:
            file.write(trace.text() + "\n")
    problem.check(outputs)
    print(f"{problem}: as the oracle's, in {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
