"""Compiles what a tool will time in processes, so that its kernels lie in the caches of Triton and Inductor.

Nothing is measured there, because the processes share the GPU: Inductor's kernels are compiled and not launched, and
autotuners choose in the process that times. So that may begin while later cases are compiled.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from triton.runtime.autotuner import Autotuner

PARTS = 9  # of an autotuner's choices, each compiled by a job: FLA's kernels have nine, and Triton compiles one by one

Case = TypeVar("Case", bound=Hashable)


def in_turn(cases: Sequence[Case], jobs_of: Callable[[Case], Iterable[tuple]]) -> Iterator[Case]:
    """The cases in their order, each once its jobs are done. A job is a function and its arguments, and equal ones run
    once. One that fails is told when its candidate is timed. Two CPUs are left to this process."""
    _compile_alone()
    cpus, context = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max(1, cpus - 2), context, initializer=_compile_alone)
    begun: Callable[[tuple], Future] = functools.cache(lambda job: pool.submit(_run, *job))
    try:
        waiting = [(case, [begun(job) for job in jobs_of(case)]) for case in cases]
        for case, futures in waiting:
            wait(futures)
            yield case
        pool.shutdown()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():  # nobody waits for what is still compiled
            process.terminate()


def _compile_alone() -> None:
    """Without a pool of compiling processes, which Inductor would start in each process, one for each CPU."""
    inductor_config.compile_threads = 1


def _run(job: Callable, *arguments) -> None:
    """A job, whose tensors are gone at its end: what the process kept of their memory, no case could have."""
    job(*arguments)
    torch.cuda.empty_cache()


def compile_call(run: Callable[[], Sequence[Tensor]], leaves: list[Tensor], gradients: bool, part: int = 0) -> None:
    """Compiles a candidate as it is called: alone, or with its gradients. Both have graphs of their own."""
    torch.compiler.reset()  # a process compiles many cases by one function
    with _without_choices(part), functorch_config.patch(donated_buffer=False), torch.set_grad_enabled(gradients):
        outputs = run()
        if gradients:
            torch.autograd.grad(outputs, leaves, [torch.ones_like(each) for each in outputs])


@contextlib.contextmanager
def _without_choices(part: int) -> Iterator[None]:
    """Inside, kernels of Inductor are not launched, nor those of Triton's autotuners, whose choices of one part are
    compiled."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def compile_choices(self: Autotuner, *args, **kwargs) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for choice in self.prune_configs(kwargs)[part::PARTS]:
            with contextlib.suppress(Exception):  # autotuners leave out such a choice, too
                self.fn.run(*args, **kwargs | {"warmup": True} | choice.all_kwargs())

    def not_launched(*_, **__) -> None: ...

    with mock.patch.object(Autotuner, "run", compile_choices), mock.patch.object(CachingAutotuner, "run", not_launched):
        yield
