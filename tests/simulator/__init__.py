"""The kernels on a CPU, as compiled: a GPU that executes PTX, in an order that a seed fixes.

    from simulator import simulated

    with simulated("H200", sms=4, seed=3):
        y = fusednorm.functional.layer_norm(x, (1024,), weight, bias)  # of CPU tensors

ptx                  parses what Triton has compiled
translate            PTX to Python over numpy; instructions and arithmetic are those that compute
warp                 a warp, and what it is asked for: accesses, copies, synchronization, by opcode
memory, races        bytes, tensors and tensor maps; who knows of which access
barriers, order      what warps wait at; who goes on next
gpu                  places for CTAs, grids, memory
launching, host      from fusednorm's launches to these
recording, picture   what a run looked like
problems             norms and column sums to try it with; mutants and everything do, for `make`
small                kernels written by hand
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
