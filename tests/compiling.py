"""Compiles the kernels that the planner chooses for a GPU, without a GPU, in processes that do not interpret."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from unittest import mock

import torch
from cases import lay_out
from planning import ARCHITECTURES, meta_call

from fusednorm.host import fallback
from fusednorm.operands import BackwardOperands, ForwardOperands
from fusednorm.planner.device import DeviceSpec
from fusednorm.planner.norm_problem import NormProblem
from fusednorm.planner.plan import Plan, from_text
from fusednorm.problem.calls import check_backward, check_forward
from fusednorm.tools.oracle import Case, Inputs

DEVICES = ARCHITECTURES
ALL_OUTPUTS = (True, True, True)


def launches_of(
    case: Case, device: DeviceSpec, output_mask=ALL_OUTPUTS, layout: str | None = None
) -> list[tuple[Plan, object]]:
    """The kernel launches of forward and backward that this device would get, each with its plan; with slots."""
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
    for call in (forward, backward):
        chosen = fallback.choose(call.problem, call.rows, device)
        launches += [(chosen.plan, each) for each in launch.program_of(call, chosen, device).launches]
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
    from fusednorm.tools import compilation

    with force(variant):
        launches = launches_of(case, device, output_mask, layout)
    return [compilation.compile_for(each, device.arch).hash for _, each in launches]


@contextmanager
def stand_in_for_a_gpu(device: DeviceSpec) -> Iterator[None]:
    """Inside, Triton's own launch path compiles for this device."""
    from types import SimpleNamespace

    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", device.arch, 32)
    fake = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    with mock.patch.object(driver, "_active", fake):
        yield


def launch_case(case: Case, device: DeviceSpec, output_mask=ALL_OUTPUTS) -> list[str]:
    """The hashes of the same kernels, as Triton's own launch path computes them on this device."""
    with stand_in_for_a_gpu(device):
        return [
            each.kernel.warmup(*each.args, grid=each.grid, **each.keywords()).hash
            for _, each in launches_of(case, device, output_mask)
        ]


def worker_processes(count: int | None = None) -> ProcessPoolExecutor:
    """Processes that can compile, even if this one interprets; one for each processor if no count is given."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count or os.cpu_count(), context, initializer=_do_not_interpret)


def num_processes() -> int:
    """How many processes this pytest process may have at work: its share of the processors, beside xdist's others."""
    return max(1, os.cpu_count() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


class InParallel:
    """By job, a future of function(*job). Whoever asks for one begins as many, from it on, as there are processes; no
    more, because the tests of the others may be those of another pytest process, which begins them itself."""

    def __init__(self, pool: ProcessPoolExecutor, function: Callable, jobs: list[tuple]):
        self._jobs, self._begun = jobs, functools.cache(lambda job: pool.submit(function, *job))

    def __getitem__(self, job: tuple) -> Future:
        at = self._jobs.index(job)
        return [self._begun(each) for each in self._jobs[at : at + num_processes()]][0]


def _do_not_interpret() -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # still in time: the functions above import Triton when they are called


def statistics_stored(problem: NormProblem, plan: str, device: DeviceSpec) -> int:
    """How often a thread of a ring's forward stores one of four bytes: y it stores by 16."""
    from fusednorm.host import launch
    from fusednorm.tools import compilation

    with mock.patch.object(launch.gpus, "spec_of", lambda _: device):
        (forward,) = launch.on_tensors(meta_call(problem), from_text(plan)).launches
    return len(re.findall(r"st\.global\.b32", compilation.compile_for(forward, device.arch).asm["ptx"]))


def tiles_read(problem: NormProblem, plan: str, device: DeviceSpec) -> int:
    """How many tiles a row loop reads from its rings, counting each read. A tile has one chunk."""
    from fusednorm.host import launch
    from fusednorm.tools import compilation

    first = launch.on_tensors(meta_call(problem), from_text(plan)).launches[0]
    text = compilation.compile_for(first, device.arch).asm["ttgir"]
    return text.count("ttg.local_load")
