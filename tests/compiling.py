"""Compiles the kernels that the planner chooses for a GPU, without a GPU, in processes that do not interpret.

As a command it compiles many widths and reports spills, and builds that need more than their plans allow. From the
repository root:

    PYTHONPATH=. python tests/compiling.py --arch 90 --widths 1024 1987
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
from cases import MIXED_DTYPES, NORMS, SAME_DTYPES, TROUBLED_WIDTHS, lay_out, make_case
from devices import planned_for
from planning import ARCHITECTURES

from fusednorm.operands import BackwardOperands, ForwardOperands
from fusednorm.planner import budget, heuristics
from fusednorm.planner.device import DeviceSpec
from fusednorm.planner.plan import Plan, WarpSpecializedPlan
from fusednorm.problem import check_backward, check_forward
from fusednorm.testing import Case, Inputs

DEVICES = ARCHITECTURES
ALL_OUTPUTS = (True, True, True)
SWEEP_WIDTHS = sorted({1, *TROUBLED_WIDTHS, *(w + d for w in (64, 256, 1024, 4096, 16384) for d in (-1, 0, 1)), 262144})


class Build(NamedTuple):
    """One kernel of a case, its plan, and the compiler's resources for it."""

    plan: Plan
    resources: object


def launches_of(
    case: Case, device: DeviceSpec, output_mask=ALL_OUTPUTS, layout: str | None = None
) -> list[tuple[Plan, object]]:
    """The kernel launches of forward and backward that this device would get, each with its plan; on meta tensors."""
    from fusednorm.host import launch

    def meta(shape, dtype):
        return None if dtype is None else torch.empty(shape, dtype=dtype, device="meta")

    shape = case.normalized_shape
    inputs = Inputs(
        meta(case.shape, case.x_dtype),
        meta(case.shape, case.grad_dtype or case.x_dtype),
        meta(shape, case.weight_dtype),
        meta(shape, case.bias_dtype),
    )
    if layout is not None:
        inputs = lay_out(inputs, layout)
    x, weight, bias, rstd = inputs.x, inputs.weight, inputs.bias, meta(case.rows, case.acc_dtype)
    mean = rstd if case.norm == "layer" else None
    forward = check_forward(ForwardOperands(case.norm, x, shape, weight, bias, case.eps))
    backward = check_backward(
        BackwardOperands(case.norm, inputs.grad_out, x, shape, mean, rstd, weight, bias, output_mask)
    )
    launches = []
    with planned_for(device):
        for call, prepare in ((forward, launch.prepare_forward), (backward, launch.prepare_backward)):
            plan = heuristics.choose(call.problem, call.rows, device)
            launches += [(plan, each) for each in prepare(call, plan)[0]]
    return launches


def compile_case(
    case: Case,
    device: DeviceSpec,
    output_mask=ALL_OUTPUTS,
    layout: str | None = None,
    variant: str | None = None,
) -> list[str]:
    """Compiles every kernel of a case, planned under force(variant), into Triton's on-disk cache; their hashes."""
    from fusednorm import force
    from fusednorm.host import compilation

    with force(variant):
        launches = launches_of(case, device, output_mask, layout)
    return [compilation.compile_for(each, device.arch).hash for _, each in launches]


def stand_in_for_a_gpu(device: DeviceSpec) -> None:
    """For the rest of the process, Triton's own launch path compiles for this device."""
    from types import SimpleNamespace

    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", device.arch, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )


def launch_case(case: Case, device: DeviceSpec, output_mask=ALL_OUTPUTS) -> list[str]:
    """The hashes of the same kernels, as Triton's own launch path computes them on this device."""
    stand_in_for_a_gpu(device)
    return [
        each.kernel.warmup(*each.args, grid=each.grid, **each.keywords()).hash
        for _, each in launches_of(case, device, output_mask)
    ]


def builds_of(case: Case, device: DeviceSpec, output_mask=ALL_OUTPUTS) -> list[Build]:
    from fusednorm.host import compilation

    return [
        Build(plan, compilation.resources(each, device.arch)) for plan, each in launches_of(case, device, output_mask)
    ]


def complaints(build: Build, device: DeviceSpec) -> list[str]:
    """Where the resources of a build exceed what its plan expects: spills, registers, CTAs that fit an SM."""
    used, plan, found = build.resources, build.plan, []
    if used.stack_bytes:
        found.append(f"spills {used.stack_bytes} bytes a thread")
    if used.kernel in ("finalize", "forward_by_column_tiles", "backward_row_means"):
        return found  # their grids do not depend on how many CTAs fit an SM
    specialized = isinstance(plan, WarpSpecializedPlan)
    limit = budget.entry_registers(plan) if specialized else budget.max_registers(plan)
    if used.registers > limit:
        found.append(f"takes {used.registers} registers of {limit}")
    threads = 32 * plan.num_warps
    if specialized:
        threads = threads * plan.num_groups + budget.PRODUCER_WARPS * 32
    if plan.ctas_per_sm * threads * (-(-used.registers // 8) * 8) > device.registers_per_sm:
        found.append(f"{plan.ctas_per_sm} CTAs of {threads} threads at {used.registers} registers do not fit an SM")
    if plan.ctas_per_sm * (used.shared_bytes + budget.RESERVED_SMEM_BYTES) > device.smem_per_sm_bytes:
        found.append(f"{plan.ctas_per_sm} CTAs with {used.shared_bytes} bytes of shared memory do not fit an SM")
    return found


def worker_processes(count: int | None = None) -> ProcessPoolExecutor:
    """Processes that can compile, even if this one interprets; one for each processor if no count is given."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count or os.cpu_count(), context, initializer=_do_not_interpret)


def _do_not_interpret() -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # still in time: the functions above import Triton when they are called


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--widths", type=int, nargs="+", default=SWEEP_WIDTHS)
    parser.add_argument("--mixed", action="store_true", help="mixed dtypes too")
    options = parser.parse_args()
    dtypes = SAME_DTYPES + (MIXED_DTYPES if options.mixed else [])
    jobs = [
        (make_case(norm, (4096, cols), mix), DEVICES[arch])
        for arch, cols, norm, mix in itertools.product(options.arch, options.widths, NORMS, dtypes)
    ]
    failures = 0
    with worker_processes() as pool:
        for (case, device), builds in zip(jobs, pool.map(builds_of, *zip(*jobs, strict=True)), strict=True):
            for build in builds:
                for complaint in complaints(build, device):
                    failures += 1
                    print(f"sm_{device.arch} {case} {build.resources.kernel}: {complaint}; {build.plan}", flush=True)
    print(f"{failures} complaints about {len(jobs)} cases")
    return failures > 0


if __name__ == "__main__":
    raise SystemExit(main())
