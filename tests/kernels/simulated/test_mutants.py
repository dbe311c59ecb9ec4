"""The simulator notices missing synchronization: without a wait, arrival, fence or barrier of a kernel it fails."""

from __future__ import annotations

import pytest
from cases import FP32
from column_sums import Sums
from simulator.mutants import mutants_of, who_notices
from simulator.problems import DX_ONLY, Problem, SumProblem

SCHEDULES = [
    Problem("backward", "async_copy", "layer", 21, 1032, mask=DX_ONLY, sms=1, device="A100"),
    Problem("backward", "pipelined", "layer", 340, 200, mask=DX_ONLY, sms=1),
    Problem("backward", "pipelined", "rms", 15, 5120, mask=DX_ONLY, sms=2),
    Problem("backward", "warp_specialized", "layer", 105, 200, mask=DX_ONLY, sms=1),
    Problem("forward", "warp_specialized", "layer", 105, 200, sms=1),
]


def is_ours(mutant) -> bool:
    """Whether the kernel's source, not the compiler, put this instruction there, and its absence must be noticed.

    - The compiler puts several CTA barriers between inits, expects or copies, and one makes up for another.
    - Nothing uses an mbarrier again after mbarrier.inval at a kernel's end.
    - Newer compilers add a cluster barrier of their own. Its place is the kernel's `def`, which begins in column 1.
    """
    opcode, place = mutant.instruction.opcode, mutant.instruction.place
    return not (opcode.startswith(("bar.sync", "barrier.sync", "mbarrier.inval")) or place.endswith(":1"))


@pytest.mark.parametrize("problem", SCHEDULES, ids=str)
def test_every_wait_arrival_and_fence_of_a_ring_is_missed(problem):
    mutants = [each for each in mutants_of(problem) if is_ours(each)]
    assert len(mutants) >= 5
    assert [str(each) for each in mutants if who_notices(problem, [each], seeds=3) is None] == []


def test_every_barrier_of_rows_over_several_warps_is_missed():
    problem = Problem("backward", "multi_wave", "layer", 60, 1987, mask=DX_ONLY)
    mutants = list(mutants_of(problem))
    assert len(mutants) >= 4
    assert [str(each) for each in mutants if who_notices(problem, [each], seeds=2) is None] == []


def test_the_count_of_ctas_that_are_done_with_a_column_tile_is_missed():
    problem = Problem("backward", "multi_wave", "layer", 2, 33000, sms=20)
    (count,) = (each for each in mutants_of(problem) if each.instruction.opcode.startswith("atom"))
    assert who_notices(problem, [count], seeds=1) == "numbers"


@pytest.mark.filterwarnings("ignore:fusednorm. column_sum")
def test_a_race_in_a_column_sum_is_not_taken_for_a_kernel_that_cannot_be_built():
    problem = SumProblem(Sums(300, 264, 1, FP32), kernel="portable")
    mutants = list(mutants_of(problem))
    found = [who_notices(problem, [each], seeds=1) for each in mutants]
    assert found.count("race") == 2 and set(found) <= {"race", None}  # None: a needless barrier of Triton 3.9
    problem.check(problem.simulate()[0])
