"""Removes one barrier, wait, arrival, fence or atomic of a kernel at a time, and reports what notices.

    make mutants                 or: python -m tests.simulator.mutants [--match TEXT] [--seeds N]

A mutant is a kernel without one such instruction. Mutants that nothing notices are listed with their lines in kernels/.
Then these instructions are removed one after the other, and stay removed as long as nothing notices. The ones removed
in the end are "redundant", as far as this simulator can see: it takes a warp's lanes for one agent. The rest "makes up
for others".
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from cases import BF16, FP32
from column_sums import Sums
from head_norms import HeadCase
from tables import Table
from tqdm import tqdm

from fusednorm.planner.plan import PipelinedPlan

from .order import Deadlock
from .problems import DX_ONLY, NO_DX, FormProblem, HeadProblem, Problem, SumProblem, bits
from .ptx import Instruction
from .races import Race, SimulationError

SYNCHRONIZES = re.compile(
    r"(bar\.sync|barrier|mbarrier\.(try_wait|arrive|inval)|cp\.async\.(commit|wait)_group|fence|membar|red|atom"
    r"|griddepcontrol)\b(?!.*\.warp)"
)
ORDERED = PipelinedPlan(1, 256, 1, 3, 2, 1, 255, weight_in_smem=False)
PROBLEMS = [
    Problem("backward", "multi_wave", "layer", 60, 200),
    Problem("backward", "multi_wave", "layer", 40, 5000, mask=NO_DX),
    Problem("backward", "multi_wave", "layer", 2, 33000, sms=20),
    Problem("backward", "async_copy", "layer", 60, 200, sms=1, device="A100"),
    Problem("backward", "async_copy", "rms", 5, 9216, mask=DX_ONLY, device="A100"),
    Problem("backward", "pipelined", "layer", 340, 200, sms=1),
    Problem("backward", "pipelined", "layer", 21, 1032, mask=DX_ONLY, sms=1),
    Problem("backward", "pipelined", "layer", 27, 5120, mask=DX_ONLY, sms=4),
    Problem("backward", "pipelined", "layer", 700, 136, mask=NO_DX, sms=1),
    Problem("backward", "warp_specialized", "layer", 105, 200, mask=DX_ONLY, sms=1),
    Problem("backward", "warp_specialized", "layer", 9, 1032, sms=1),
    Problem("backward", "warp_specialized", "rms", 150, 512, mask=DX_ONLY, sms=1, device="B200"),
    Problem("forward", "warp_specialized", "layer", 105, 200, sms=1),
    Problem("forward", "pipelined", "layer", 400, 200, sms=1),
    Problem("forward", "pipelined", "rms", 40, 12288, sms=4),
    SumProblem(Sums(300, 264, 3, BF16, total=True), kernel="ring"),
    SumProblem(Sums(300, 264, 1, FP32), kernel="portable"),
    FormProblem(Table("layer", "", 12, 256, parameters=BF16, backward=True), "backward", ORDERED, sms=1),
    HeadProblem(HeadCase(cols=64, rotary=64, tokens=70, dtype=BF16, norm="layer", norm_first=False)),
]


class Mutant(NamedTuple):
    kernel: str
    build: str
    at: int  # the index of the instruction that is missing
    instruction: Instruction

    def __str__(self) -> str:
        return f"{self.kernel} #{self.at} {self.instruction.opcode} at {self.instruction.place}"


def mutants_of(problem) -> Iterator[Mutant]:
    """The mutants of all kernels of a problem."""
    _, simulation = problem.simulate()
    for each in {launched.build: launched for launched in simulation.launched}.values():
        for at, instruction in enumerate(each.kernel.code):
            if SYNCHRONIZES.match(instruction.opcode):
                yield Mutant(each.name, each.build, at, instruction)


def who_notices(problem, missing: list[Mutant], seeds: int) -> str | None:
    """What notices that these instructions are missing: "race", "deadlock", "error" for another SimulationError, or
    "numbers" for outputs that are wrong or differ between seeds; None if nothing does."""
    without: dict[str, frozenset[int]] = {}
    for each in missing:
        without[each.build] = without.get(each.build, frozenset()) | {each.at}
    first = None
    for seed in range(seeds):
        try:
            outputs, _ = problem.simulate(seed=seed, without=without)
            problem.check(outputs)
        except (Race, Deadlock, SimulationError) as error:
            return {Race: "race", Deadlock: "deadlock"}.get(type(error), "error")
        except AssertionError:
            return "numbers"
        if first is not None and bits(outputs) != first:
            return "numbers"
        first = bits(outputs)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="", help="only problems whose name has this")
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    total: Counter = Counter()
    for problem in PROBLEMS:
        if options.match not in str(problem):
            continue
        counts, unnoticed = Counter(), []
        for mutant in tqdm(list(mutants_of(problem)), desc=str(problem), leave=False, file=sys.stderr):
            found = who_notices(problem, [mutant], options.seeds)
            kind = ".".join(mutant.instruction.opcode.split(".")[:2])
            counts[kind, found or "nobody"] += 1
            unnoticed += [mutant] if found is None else []
        total += counts
        print(f"{problem}: " + ", ".join(f"{kind} {who} {n}" for (kind, who), n in sorted(counts.items())), flush=True)
        gone: list[Mutant] = []
        for mutant in unnoticed:
            makes_up = who_notices(problem, [*gone, mutant], options.seeds)
            gone += [] if makes_up else [mutant]
            print(f"    {'makes up for others' if makes_up else 'redundant'}: {mutant}", flush=True)
    print("in all: " + ", ".join(f"{kind} {who} {n}" for (kind, who), n in sorted(total.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
