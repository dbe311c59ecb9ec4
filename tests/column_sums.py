"""Column sums for the tests of both tiers: inputs, a check of results, and the kernels compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from planning import ARCHITECTURES, EVERY_ARCHITECTURE
from torch import Tensor

from fusednorm.columns import plan as column_plan
from fusednorm.columns.plan import KERNELS, RingSum, SumPlan
from fusednorm.columns.problem import ColumnSumProblem, check_column_sum

DEVICES = ARCHITECTURES
LARGEST_COPY = 1 << 30  # bytes


class Sums(NamedTuple):
    """A column sum of `count` tensors [rows, cols]: one sum for each, or one for all together if `total`."""

    rows: int
    cols: int
    count: int = 1
    dtype: torch.dtype = torch.float32
    total: bool = False
    out_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.count}x{self.rows}x{self.cols}-{name}{'-total' if self.total else ''}"

    def inputs(self, device: str = "cpu", seed: int = 0) -> list[Tensor]:
        """Normal numbers around 1/4: their sums grow with the rows, and a missing row shows in each sum."""
        generator = torch.Generator(device).manual_seed(seed) if device != "meta" else None
        shape = (self.rows, self.cols)
        return [
            torch.randn(shape, generator=generator, device=device, dtype=self.dtype).add_(0.25)
            for _ in range(self.count)
        ]


def problem_of(sums: Sums) -> ColumnSumProblem:
    return check_column_sum(sums.inputs("meta"), sums.total, sums.out_dtype).problem


def exact_sum(rows: Tensor, function: Callable[[Tensor], Tensor] = Tensor.detach) -> Tensor:
    """The float64 sum of function(rows). By pieces, because torch makes a copy of its argument in float64."""
    pieces = rows.split(max(1, LARGEST_COPY // max(1, 8 * len(rows))), dim=1)
    return torch.cat([function(piece).sum(0, dtype=torch.float64) for piece in pieces])


def assert_sums_close(got: list[Tensor], inputs: list[Tensor], total: bool = False) -> None:
    """The sums are near those in float64.

    The bound has two terms: a few ulps of the sum of the absolute values, as pairwise summation in float32 (in float64
    for float64 outputs) is off by; and the rounding to the output's dtype.
    """
    rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in inputs]
    want = [exact_sum(tensor) for tensor in rows]
    size = [exact_sum(tensor, torch.abs) for tensor in rows]
    if total:
        want, size = [sum(want)], [sum(size)]
    assert len(got) == len(want)
    for i, (g, w, s) in enumerate(zip(got, want, size, strict=True)):
        epsilon = torch.finfo(torch.float64 if g.dtype == torch.float64 else torch.float32).eps
        bound = 8 * epsilon * s + torch.finfo(g.dtype).eps * w.abs() + torch.finfo(g.dtype).smallest_normal
        off = (g.double() - w).abs() > bound
        assert not off.any(), f"{int(off.sum())} of {off.numel()} sums of output {i} are off, such as {g[off][0]}"


def plans_of(sums: Sums, device) -> list[SumPlan]:
    """The different plans that choose() makes when each of KERNELS is forced."""
    problem = problem_of(sums)
    plans = [column_plan.choose(problem, sums.rows, device, kernel).plan for kernel in KERNELS]
    return list(dict.fromkeys(plans))


def complaints(sums: Sums, arch: int) -> list[str]:
    """Where the compiler's builds differ from what the plans expect, in a process that does not interpret."""
    from bench.resources import resources
    from fusednorm.columns import launch as launch_columns

    device, found = EVERY_ARCHITECTURE[arch], []
    call = check_column_sum(sums.inputs("meta"), sums.total, sums.out_dtype)
    for plan in plans_of(sums, device):
        launches = launch_columns.program_of(call, column_plan.Choice(plan, num_splits=2)).launches
        for launch, of in zip(launches, (plan, column_plan.finalizer(device)), strict=True):
            used = resources(launch, arch)
            if used.stack_bytes:
                found.append(f"{of} spills {used.stack_bytes} bytes a thread")
            if used.registers > of.max_registers:
                found.append(f"{of} takes {used.registers} registers of {of.max_registers}")
            expected = column_plan.shared_bytes(of, call.problem) if isinstance(of, RingSum) else used.shared_bytes
            if used.shared_bytes != expected:
                found.append(f"{of} takes {used.shared_bytes} bytes of shared memory, expected {expected}")
    return found


def builds(sums: Sums, arch: int) -> list[str]:
    """Compiles the planned kernels into Triton's on-disk cache, in a process that does not interpret; their hashes."""
    from fusednorm.columns import launch as launch_columns
    from fusednorm.tools import compilation

    call = check_column_sum(sums.inputs("meta"), sums.total, sums.out_dtype)
    choice = column_plan.choose(call.problem, sums.rows, DEVICES[arch])
    return [compilation.compile_for(launch, arch).hash for launch in launch_columns.program_of(call, choice).launches]


def loads(sums: Sums, arch: int) -> list[str]:
    """The hashes by which Triton's own launch path finds those kernels, in a process that does not interpret."""
    from compiling import stand_in_for_a_gpu

    from fusednorm.columns import launch as launch_columns

    call = check_column_sum(sums.inputs("meta"), sums.total, sums.out_dtype)
    choice = column_plan.choose(call.problem, sums.rows, DEVICES[arch])
    tensors = [view.tensor for view in call.views]
    launches = launch_columns.program_of(call, choice).on_tensors(tensors, tensors[0].shape, call.rows).launches
    with stand_in_for_a_gpu(DEVICES[arch]):
        return [each.kernel.warmup(*each.args, grid=each.grid, **each.keywords()).hash for each in launches]


def main() -> int:
    """Prints all complaints about many widths, counts and dtypes, on every architecture of DEVICES."""
    import itertools

    from compiling import worker_processes

    counts = [(1, False), *((n, total) for n in (2, 7, 8, 15, 29, 54, 57, 64) for total in (False, True))]
    dtypes = (torch.float16, torch.float32, torch.float64)
    shapes = itertools.product((4096, 1001, 1000, 72, 3), counts, dtypes)
    jobs = [
        (Sums(4096, cols, *count, total=total), arch)
        for cols, (n, total), dtype in shapes
        for count in [(n, dtype)]
        for arch in DEVICES
    ]
    failures = 0
    with worker_processes() as pool:
        for job, found in zip(jobs, pool.map(complaints, *zip(*jobs, strict=True), chunksize=4), strict=True):
            failures += len(found)
            for text in found:
                print(f"sm_{job[1]} {job[0]}: {text}", flush=True)
    print(f"{failures} complaints about {len(jobs)} jobs")
    return failures > 0


if __name__ == "__main__":
    raise SystemExit(main())
