"""Compares the planner's budgets with the compiler, for every plan it can choose, in processes that do not interpret.

As a command it tries many widths, dtypes and architectures:  python tests/budgets.py --arch 90 --widths 1024 1987
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from compiling import worker_processes
from planning import ARCHITECTURES, make_problem, meta_call

from fusednorm.host import derived, gpus
from fusednorm.planner import budget
from fusednorm.planner.choice import best_plan, choices
from fusednorm.planner.device import DeviceSpec
from fusednorm.planner.norm_problem import NormProblem
from fusednorm.planner.plan import VARIANTS, ColumnRingPlan, Plan, ReferencePlan, RingPlan, WarpSpecializedPlan
from fusednorm.tools.tune import to_survey

MANY_ROWS = 1 << 20
UNUSED_BYTES = 1024  # most that a ring's bound may have to spare
EACH_CTA_BY_ITSELF = (3, 8)  # first Triton release whose exchange buffers count one CTA, not the whole cluster
FINALIZING = {"finalize", "finalize_samples", "count_digits", "sort_by_digit", "sum_keys"}
ROW_PASSES = {"forward_by_column_tiles", "backward_row_means"}  # their grids do not depend on the CTAs of an SM


def plans_of(problem: NormProblem, device: DeviceSpec) -> Iterator[Plan]:
    """The plans for few rows and for many, the best plan of every variant that can run, and one that tune alone tries.
    """
    plans = [plan for _, plan in choices(problem, device) if not isinstance(plan, ReferencePlan)]
    plans += [plan for variant in VARIANTS[:-1] if (plan := best_plan(variant, problem, device))]
    plans += itertools.islice(to_survey(problem, device), 1)
    yield from dict.fromkeys(plans)


def triton_release() -> tuple[int, int]:
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def complaints(problem: NormProblem, plan: Plan, device: DeviceSpec) -> list[str]:
    """Where the compiler's builds of a plan differ from its budget."""
    from bench.resources import resources
    from fusednorm.host import launch

    found = []
    with mock.patch.object(gpus, "spec_of", lambda _: device):
        launches = launch.on_tensors(meta_call(problem), plan)[0]
    for each in launches:
        name = each.kernel.__name__
        used = resources(each, device.arch)
        if used.stack_bytes:
            found.append(f"{name} spills {used.stack_bytes} bytes a thread")
        if name in FINALIZING:
            continue
        bound = budget.shared_bytes(plan, problem)
        if isinstance(plan, RingPlan):
            bound -= budget.static_bytes(plan)  # static shared memory is not in the compiler's sum
        if used.shared_bytes > bound:
            found.append(f"{name} takes {used.shared_bytes} bytes of shared memory, expected at most {bound}")
        elif isinstance(plan, (RingPlan, ColumnRingPlan)) and used.shared_bytes < bound - UNUSED_BYTES:
            counts_alone = plan.cluster > 1 and triton_release() >= EACH_CTA_BY_ITSELF
            if not counts_alone:
                found.append(f"{name} takes {used.shared_bytes} bytes of shared memory, expected some {bound}")
        specialized = isinstance(plan, WarpSpecializedPlan)
        limit = derived.entry_registers(plan) if specialized else plan.max_registers
        if used.registers > limit:
            found.append(f"{name} takes {used.registers} registers, expected at most {limit}")
        if name not in ROW_PASSES and not fit_an_sm(plan, used, device):
            found.append(f"{plan.ctas_per_sm} CTAs of {name} with {used} do not fit an SM")
    return found


def fit_an_sm(plan: Plan, used, device: DeviceSpec) -> bool:
    """Whether an SM has the registers and shared memory of as many CTAs as planned."""
    threads = 32 * plan.num_warps
    if isinstance(plan, WarpSpecializedPlan):
        threads = threads * plan.num_groups + 32 * budget.PRODUCER_WARPS
    registers = threads * (-(-used.registers // 8) * 8)
    shared_bytes = used.shared_bytes + budget.RESERVED_SMEM_BYTES
    enough_registers = plan.ctas_per_sm * registers <= device.registers_per_sm
    return enough_registers and plan.ctas_per_sm * shared_bytes <= device.smem_per_sm_bytes


def check(problem: NormProblem, arch: int) -> list[str]:
    """All complaints about the plans of a problem, each with the problem and the plan that it is about."""
    device = ARCHITECTURES[arch]
    return [
        f"sm_{arch} {problem}: {text}; {plan}, budget {budget.registers(plan, problem, device)} registers"
        for plan in plans_of(problem, device)
        for text in complaints(problem, plan, device)
    ]


WIDTHS = sorted(
    {1, 3, 32, 96, 262144}
    | {2**n + d for n in range(6, 18) for d in (-1, 0, 8)}
    | {768 * n for n in range(1, 17)}
    | {640 * n for n in (1, 2, 4, 8, 16, 32)}
    | {1600, 1984, 1987, 4104, 6656, 7168, 14336, 18432, 20480, 23040, 28672}
    # 8 more than a multiple of 64
    | {136, 392, 456, 904, 1160, 1416, 1928, 2568, 3208, 3592, 5128, 6152, 9224, 12296, 15368}
)
MIXES = [("bf16", "bf16", "bf16"), ("fp16", "fp32", "fp16"), ("fp32", "fp32", "fp32"), ("fp64", "fp64", "fp64")]
ODD_MIXES = [("bf16", "none", "bf16"), ("bf16", "bf16", "fp32"), ("fp32", "bf16", "bf16"), ("fp16", "fp64", "bf16")]


def problems(widths, mixes) -> Iterator[NormProblem]:
    for cols, (dtype, weight, grad), norm in itertools.product(widths, mixes, ("layer", "rms")):
        for direction in ("backward", "forward"):
            yield make_problem(norm, cols, dtype, weight, direction, grad)
        if weight != "none":
            problem = make_problem(norm, cols, dtype, weight, "backward", grad)
            yield replace(problem, wants_dw=False, wants_db=False)
            yield replace(problem, wants_dx=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--mixed", action="store_true", help="operands of different dtypes too")
    options = parser.parse_args()
    mixes = MIXES + (ODD_MIXES if options.mixed else [])
    jobs = [(p, arch) for arch in options.arch for p in problems(options.widths, mixes)]
    failures = 0
    with worker_processes() as pool:
        for found in pool.map(check, *zip(*jobs, strict=True), chunksize=4):
            failures += len(found)
            for text in found:
                print(text, flush=True)
    print(f"{failures} complaints about the plans of {len(jobs)} problems")
    return failures > 0


if __name__ == "__main__":
    raise SystemExit(main())
