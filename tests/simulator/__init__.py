"""The kernels on a CPU, as compiled: a GPU that executes PTX, in an order that a seed fixes.

    from simulator import simulated

    with simulated("H200", sms=4, seed=3):
        y = fusednorm.functional.layer_norm(x, (1024,), weight, bias)  # of CPU tensors

ptx         parses what Triton compiled                     translate, instructions, arithmetic   PTX to Python over numpy
warp        a warp, and what its instructions ask:          effects (which instruction asks what),
                                                            accesses, copies, synchronization
memory      bytes, tensors, tensor maps                     races      who knows of which access
barriers    what warps wait at                              order      who goes on next
gpu         places, grids, memory                           launching, host   from fusednorm's launches to these
recording, picture   what a run looked like                 everything, mutants   the commands of `make`
"""

import sys
from pathlib import Path

TESTS = str(Path(__file__).resolve().parent.parent)
if TESTS not in sys.path:  # `python -m tests.simulator`: what all tests share lies beside this package
    sys.path.insert(0, TESTS)

from .host import Simulation, simulated  # noqa: E402
from .order import Deadlock  # noqa: E402
from .races import Race, SimulationError  # noqa: E402

__all__ = ["Deadlock", "Race", "Simulation", "SimulationError", "simulated"]
