"""Processes that run calls, each with a limit of time for a call."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .draw import FAMILY, Call, draw
from .traits import traits

STARTS = "starts"  # what a worker says of a call before it runs
MOST_RESERVED = 2**31  # bytes of GPU memory that a worker keeps between calls
GRACE = 60.0  # seconds that a worker has to start, beside a call's limit


def described(call: Call) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(call).items() if value not in (None, 0, {})}


def examine(number: int, options: argparse.Namespace) -> dict[str, Any]:
    """{"worst": {output: excess}, "atens": likewise, "of": traits, "seconds": by phase}, and of a failure also "call",
    "faults" and commands that repeat it."""
    from .check import check

    call = draw(number, options.seed, options.elements)
    faults: list[str] = []
    said: dict[str, Any] = {"number": number, "worst": {}, "atens": {}, "of": traits(call)}
    try:
        checked = check(call, options.device)
        said["of"]["host"], said["seconds"] = checked.hosts, checked.seconds
        for finding in checked.findings:
            key = f"{call.op} {finding.output}"
            said["worst"][key] = finding.excess
            if finding.atens is not None:
                said["atens"][key] = finding.atens
            if finding.is_fault:
                faults.append(f"{finding.output}: {finding.text}; ATen's error is {finding.atens} bounds")
    except AssertionError as error:
        faults.append(str(error))
    except Exception as error:
        faults.append(f"{type(error).__name__}: {error} ({traceback.format_exc().splitlines()[-3].strip()})"[:600])
        said["lost"] = "CUDA" in str(error)  # the process cannot go on
    return said | failure(number, faults, options) if faults else said


def failure(number: int, faults: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """With the commands that repeat the call: alone, and behind those of its family, whose programs are kept."""
    where = f"--seed {options.seed} --elements {options.elements} --device {options.device} --only {number}"
    said = {"number": number, "faults": faults, "call": described(draw(number, options.seed, options.elements))}
    said["repeat"] = f"python -m tests.fuzz {where}"
    if first := number % FAMILY:
        said["repeat_with_family"] = f"{said['repeat']} --behind {number - first}"
    return said


def prepare(options: argparse.Namespace) -> contextlib.AbstractContextManager:
    """In which this process can run calls."""
    if options.device == "cuda":
        return contextlib.nullcontext()
    from tests.interpreting import enable_fast_interpreter

    enable_fast_interpreter()
    from fusednorm.host.kernel_devices import kernels_on

    return kernels_on("cpu")


def work(pipe: Connection, options: argparse.Namespace) -> None:
    """A worker: gets ranges of numbers, says each call's start and result."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of numpy, and of kernels that gave way, which `check` asks for
    with prepare(options):
        while numbers := pipe.recv():
            for number in numbers:
                pipe.send((STARTS, number))
                said = examine(number, options)
                pipe.send(("said", said))
                if options.device == "cuda" and torch.cuda.memory_reserved() > MOST_RESERVED:
                    torch.cuda.empty_cache()  # for the other workers
                if said.get("lost"):
                    os._exit(1)


@dataclasses.dataclass(eq=False)
class Worker:
    """A process, and what it is doing."""

    options: argparse.Namespace
    target: Callable[[Connection, argparse.Namespace], None] = work
    context: str = "spawn"
    numbers: list[int] = dataclasses.field(default_factory=list)  # that it has not finished

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context(self.context)
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=self.target, args=(end, self.options), daemon=True)
        self.process.start()
        end.close()
        self.since = time.monotonic() + GRACE
        if self.numbers:
            self.pipe.send(self.numbers)

    def give(self, numbers: list[int]) -> None:
        self.numbers = numbers
        self.pipe.send(numbers)
        self.since = max(self.since, time.monotonic())

    def take(self) -> dict[str, Any] | None:
        """A result, if there is one. A worker that has died or that takes too long gives a failure, and starts anew
        behind the call."""
        try:
            while self.pipe.poll():
                kind, what = self.pipe.recv()
                self.since = time.monotonic()
                if kind != STARTS:
                    self.numbers.remove(what["number"])
                    return what
        except (EOFError, ConnectionResetError):
            self.process.join()
            return self.lost(f"the process ended with code {self.process.exitcode}")
        if time.monotonic() - self.since > self.options.limit:
            self.process.kill()
            return self.lost(f"the call took more than {self.options.limit:.0f} seconds")
        return None

    def lost(self, why: str) -> dict[str, Any] | None:
        number = self.numbers.pop(0) if self.numbers else None
        self.start()
        return None if number is None else failure(number, [why], self.options)
