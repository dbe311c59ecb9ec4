"""A simulated GPU: it executes the PTX of the compiled kernels on a CPU, with warps in an order that a seed fixes.

    from simulator import simulated

    with simulated("H200", sms=4, seed=3):
        y = fusednorm.functional.layer_norm(x, (1024,), weight, bias)  # on CPU tensors

ptx                  parses the PTX that Triton has compiled
translate            turns PTX into Python functions over numpy arrays
instructions         the instructions that only compute, by opcode; arithmetic has their numpy functions
warp                 a warp and its registers; it runs the translated functions
accesses, copies,
synchronization      the instructions that reach memory or other warps, by opcode: methods of a warp
memory, races        memory by bytes, tensor maps; which accesses are ordered, and which race
barriers, order      the barriers that warps wait at; which warp or copy runs next
gpu                  CTAs, grids, and the limited number of CTAs that are resident at a time
launching, host      run fusednorm's launches on the simulated GPU
recording, picture   a trace of a run, and a picture of the trace
problems             norms and column sums to simulate; the commands `everything` and `mutants` run many of them
demo                 small problems, for `make demo`
small                kernels written by hand, for the tests of the simulator itself
"""

import sys
from pathlib import Path

TESTS = str(Path(__file__).resolve().parent.parent)
if TESTS not in sys.path:  # for `python -m tests.simulator`: the shared test helpers lie beside this package
    sys.path.insert(0, TESTS)

from .host import Simulation, simulated  # noqa: E402
from .order import Deadlock  # noqa: E402
from .races import Race, SimulationError  # noqa: E402

__all__ = ["Deadlock", "Race", "Simulation", "SimulationError", "simulated"]
