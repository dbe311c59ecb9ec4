"""Tests in several processes: with gloo on CPUs, started by pytest, or with NCCL on GPUs, started by torchrun.

A combination is one such test: a function of a World. A world runs all of its combinations in the same processes, one
after the other. A failure in one process ends all of them, because the others would wait for it in some collective.

Inside ops_run() the modules of this package call its ops on CPU tensors, too, and ATen stands in for the kernels.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import inspect
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from examples.training import end_processes
from fusednorm import force, functional
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.tools import interpreter

PATIENCE_SECONDS = 300  # for all combinations of a world together
NORMS = tuple(f"fusednorm.{norm}_norm_{way}.default" for norm in ("layer", "rms") for way in ("fwd", "bwd"))


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    folder: Path  # shared by all ranks
    calls_ops: bool = True  # whether modules call this package's ops, or ATen's (see ops_run)

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        return init_device_mesh(self.device.type, shape or (self.size,), mesh_dim_names=names)


@dataclass(frozen=True)
class Combination:
    run: Callable[[World], None]
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.run.__name__


def combinations_in(module: dict[str, object], sizes: dict[Callable, tuple[int, ...]]) -> list[Combination]:
    """The functions with the one parameter `world` that a module defines, in order. A function without an entry in
    `sizes` runs in a world of 2 processes."""
    runs = [each for each in module.values() if inspect.isfunction(each) and each.__module__ == module["__name__"]]
    runs = [run for run in runs if list(inspect.signature(run).parameters) == ["world"]]
    return [Combination(run, sizes.get(run, (2,))) for run in runs]


class Log(TorchDispatchMode):
    """Records the ops that run on local tensors, eagerly or in compiled graphs; collectives are ops as well."""

    @classmethod
    def is_infra_mode(cls) -> bool:  # torch.compile would otherwise refuse to compile under this mode
        return True

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor turns it into ops on local tensors, which come back here
        if not any(issubclass(each, FakeTensor) for each in types):  # ops on fake tensors only propagate shapes
            self.ops.append(str(op))
        return op(*args, **(kwargs or {}))

    def norms(self) -> list[str]:
        return [op for op in self.ops if op in NORMS]

    def collectives(self) -> list[str]:
        names = (op.split(".")[1] for op in self.ops if op.startswith(("_c10d_functional", "c10d.", "_dtensor")))
        return [name for name in names if name not in ("wait_tensor", "_wrap_tensor_autograd")]


@contextlib.contextmanager
def ops_run(world: World) -> Iterator[None]:
    """Inside, modules and functionals of this package call its ops on every device; or ATen's, in a world with
    calls_ops=False."""
    with contextlib.ExitStack() as stack:
        if not world.calls_ops:
            stack.enter_context(mock.patch.object(functional, "runs_kernels", lambda tensor: False))
        elif world.device.type == "cpu":
            stack.enter_context(kernels_on("cpu"))
            stack.enter_context(force("reference"))
        yield


def run_all(size: int, combinations: list[Combination], folder: Path) -> dict[str, str]:
    """Runs the combinations in `size` processes. Returns {name: what failed on which rank}, "" for a success."""
    context = multiprocessing.get_context("forkserver")
    # The server imports these modules once, before it forks the processes.
    modules = sorted({each.run.__module__ for each in combinations})
    context.set_forkserver_preload(["fusednorm.host.launch", "torch._inductor.compile_fx", *modules])
    names = [each.name for each in combinations if size in each.sizes]
    children = [context.Process(target=_work, args=(rank, size, combinations, folder)) for rank in range(size)]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # the fork server does not inherit sys.path
        for child in children:
            child.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(child.is_alive() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
        if any(child.exitcode for child in children):
            deadline = min(deadline, time.monotonic() + 2)  # the others may fail for a reason of their own
    for child in children:
        child.kill()
        child.join()
    told = [dict(json.loads(line) for line in _read(folder / f"{rank}.jsonl").splitlines()) for rank in range(size)]
    crashes = [_read(folder / f"{rank}.crash") for rank in range(size)]
    failures = {}
    for name in names:
        said = [each.get(name, f"did not end\n{crash}".strip()) for each, crash in zip(told, crashes, strict=True)]
        failures[name] = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
    return failures


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _work(rank: int, size: int, combinations: list[Combination], folder: Path) -> None:
    faulthandler.enable((folder / f"{rank}.crash").open("w"))  # where a signal has ended this process
    torch.set_num_threads(1)
    interpreter.enable_interpreter()
    world = World(rank, size, torch.device("cpu"), folder)
    seconds = datetime.timedelta(seconds=PATIENCE_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=seconds)
    with (folder / f"{rank}.jsonl").open("w") as told, (folder / f"{rank}.seconds").open("w") as took:
        for each in combinations:
            if size not in each.sizes:
                continue
            began, computed = time.perf_counter(), time.process_time()
            failure = _failure(each, world)
            print(json.dumps([each.name, failure]), file=told, flush=True)
            wall, cpu = time.perf_counter() - began, time.process_time() - computed
            print(f"{wall:6.2f} s, of the processor {cpu:6.2f}: {each.name}", file=took, flush=True)
            if failure:
                os._exit(1)
    dist.destroy_process_group()


def _failure(combination: Combination, world: World) -> str:
    torch.manual_seed(0)
    try:
        combination.run(world)
    except BaseException:
        return traceback.format_exc()
    return ""


def run_by_torchrun(combinations: list[Combination]) -> None:
    """The main program of a FILE that `torchrun --nproc-per-node 2 FILE [NAME ...]` starts in each process.

    Runs every combination for this number of processes, or those that are named, on GPUs, or on CPUs without CUDA.
    Prints a line for each, and exits with 1 at the first that fails.
    """
    cuda, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        interpreter.enable_interpreter()
    seconds = datetime.timedelta(seconds=PATIENCE_SECONDS)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=seconds)
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp(prefix="world-")]  # all processes are on one host
    dist.broadcast_object_list(folder)
    for each in combinations:
        if size in each.sizes and each.name in (sys.argv[1:] or [each.name]):
            began = time.perf_counter()
            failure = _failure(each, World(rank, size, device, Path(folder[0])))
            took = f"{time.perf_counter() - began:.1f} s"
            print(f"rank {rank}: {each.name}: {failure or 'passed'}, {took}", flush=True)
            if failure:
                os._exit(1)
    dist.barrier()
    end_processes()
