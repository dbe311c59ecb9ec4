"""Runs one model in all ways, in one process: gradients against float64, then steps in interleaved turns."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
import torch._dynamo.config as dynamo
import torch._functorch.config as functorch
from torch import Tensor, nn

from fusednorm.host import native
from fusednorm.tools.console import progress, show_beside

from ..bench_training_step import mean_ratio
from ..peers import packages
from ..records import describe_machine, save
from ..timing import Times
from .models import MODELS, Batch, Model, norm_parameters
from .profile import profile_step
from .ways import Absent, Way, make_way

CHECK_TOKENS = 256  # of the text whose gradients are compared with float64
WARMUP_ROUNDS = 1
RECOMPILE_LIMIT = 64
COMPILE_SHARE = 0.6  # of the time that is left, to build and compile a way before the last one
BASIS = {"eager": "eager stock", "compiled": "compiled stock"}
PEER_PACKAGES = ("transformers", "diffusers", "kernels")


@dataclass(frozen=True)
class Task:
    """What one process does with one model."""

    model: str
    ways: tuple[str, ...]
    out: Path
    source: str  # a digest of the code that was timed
    compile_seconds: float  # to build and compile all ways
    seconds: float  # to check and time them
    rounds: int
    steps: int  # of a turn
    tiny: bool = False
    profile: bool = False

    @property
    def spec(self) -> Model:
        return MODELS[self.model].smaller() if self.tiny else MODELS[self.model]

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"


@dataclass
class Runner:
    """A way with what was measured of it; without a way, `error` says why."""

    name: str
    way: Way | None = None
    error: str | None = None
    failed: bool = False  # and not for a reason that was to be expected
    milliseconds: list[float] = field(default_factory=list)
    measured: dict = field(default_factory=dict)

    def fail(self, error: Exception) -> None:
        self.way, self.error, self.failed = None, reason(error), not isinstance(error, Absent)

    @property
    def fields(self) -> dict:
        way, norms = self.name.split(" ", 1)
        return {"way": way, "norms": norms, "error": self.error, "failed": self.failed}


def reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, Absent) else f"{type(error).__name__}: {text[:300]}"


def run(task: Task, ready: Event | None = None, turn: Event | None = None) -> list[dict]:
    """Measures and saves; returns the records. Once all is compiled it sets `ready`, and waits for `turn`."""
    with compiling():
        try:
            zoo = Zoo(task)
            zoo.prepare()
        except Exception as error:  # no such class, or no such package
            zoo, failed = None, not isinstance(error, ModuleNotFoundError)
            records = [identity(task) | {"error": reason(error), "failed": failed}]
        if ready and turn:
            ready.set()
            turn.wait()
        if zoo:
            records = zoo.profiles() if task.profile else zoo.records()
    save(records, task.out)
    return records


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """A graph from the autograd cache is not traced, and so not reported. Every way compiles the same code once more,
    and beyond the limit Dynamo would run it uncompiled."""
    torch.compiler.reset()
    limits = {"recompile_limit": RECOMPILE_LIMIT, "fail_on_recompile_limit_hit": True}
    with functorch.patch(enable_autograd_cache=False), dynamo.patch(**limits):
        yield


def identity(task: Task) -> dict:
    """What every record says of the machine, the model and the code."""
    found = {name: packages.version(name) for name in PEER_PACKAGES}
    machine = describe_machine("CPU, tiny" if task.tiny else None)
    return (
        machine
        | {name: version for name, version in found.items() if version}
        | {
            "bench": "zoo_profile" if task.profile else "zoo",
            "model": task.model,
            "title": task.spec.title,
            "source": task.source,
            "native": native.extension is not None,
        }
    )


class Zoo:
    """One model in many ways, which share parameters and optimizer."""

    def __init__(self, task: Task):
        self.task, self.spec = task, task.spec
        torch.backends.cuda.enable_cudnn_sdp(self.spec.cudnn_attention)  # a model has a process of its own
        self.stock = self.spec.build(task.device, torch.bfloat16)
        torch.manual_seed(1)
        self.batches = [self.spec.inputs(self.spec, task.device) for _ in range(2)]
        self.parameters = dict(self.stock.named_parameters())
        fused = {"fused": True} if task.device == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-5, **fused)
        self.runners = [Runner(name) for name in task.ways]
        self.unchecked: str | None = None  # why gradients are not compared with float64

    def prepare(self) -> None:
        """Build every way, and compile it by a forward and a backward. A way that fails keeps its error."""
        end = time.monotonic() + self.task.compile_seconds
        bar = progress(self.runners, self.task.model, "bench")
        for runner in bar:
            show_beside(bar, runner.name)
            share = 1 if runner is self.runners[-1] else COMPILE_SHARE
            with self.kept_errors(runner), limited(share * (end - time.monotonic())):
                runner.way = make_way(runner.name, self.spec, self.stock, self.batches[0])
                self.gradients(runner.way)
                runner.measured["norms_run"] = runner.way.report() if runner.way.report else runner.way.norms
            self.forget()

    def check(self) -> None:
        """Compare the gradients of every way with float64, at the weights that all begin with."""
        try:
            exact = self.exact_gradients()
        except Exception as error:  # the times are worth having without it
            self.unchecked = reason(error)
            return
        norms = set(norm_parameters(self.stock))
        for runner in self.present:
            with self.kept_errors(runner):
                self.gradients(runner.way)
                runner.measured["errors"] = errors(self.parameters, exact, norms)
            self.forget()

    @contextlib.contextmanager
    def kept_errors(self, runner: Runner) -> Iterator[None]:
        """A way that fails ends alone, with its error."""
        try:
            yield
        except Exception as error:
            runner.fail(error)

    @property
    def present(self) -> list[Runner]:
        return [runner for runner in self.runners if runner.way]

    def forget(self) -> None:
        """Gradients, and memory that the allocator holds, which other processes may need."""
        self.optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def exact_gradients(self) -> dict[str, Tensor]:
        """Of the stock model in float64, on the first tokens of the first sample."""
        model = copy.deepcopy(self.stock).double()
        self.spec.drop_last_norms(model)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products know no float64
        self.batches[0].first(CHECK_TOKENS).double().loss(model).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def gradients(self, way: Way) -> None:
        """Of the loss over the first tokens, by all of the timed step but the optimizer."""
        with way.around():
            self.batches[0].counting_first(CHECK_TOKENS).loss(way.call).backward()

    def step(self, way: Way, batch: Batch) -> Tensor:
        loss = batch.loss(way.call)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def time(self) -> None:
        """Rounds of one turn of each way, in a new order each time, until the rounds or the time are over. Warming up
        is not counted: the first steps allocate their memory, which takes seconds."""
        orders, end = random.Random(0), float("inf")
        bar = progress(range(self.task.rounds + WARMUP_ROUNDS), f"{self.task.model}, rounds", "bench")
        for number in bar:
            if number == WARMUP_ROUNDS:
                end = time.monotonic() + self.task.seconds
            if number > WARMUP_ROUNDS and time.monotonic() > end:
                break
            for runner in orders.sample(self.present, len(self.present)):
                with self.kept_errors(runner):
                    self.turn(runner, number)
                if number < WARMUP_ROUNDS:
                    runner.milliseconds.clear()

    def turn(self, runner: Runner, number: int) -> None:
        """A few steps in a row, without waiting between."""
        with runner.way.around():
            synchronize()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            for step in range(self.task.steps):
                loss = self.step(runner.way, self.batches[(number + step) % 2])
            synchronize()
            runner.milliseconds.append(1e3 * (time.perf_counter() - start) / self.task.steps)
        runner.measured["loss"] = loss.item()
        if torch.cuda.is_available():
            runner.measured["peak_bytes"] = torch.cuda.max_memory_allocated()

    def common(self) -> dict:
        """What all records of the model say."""
        spec = self.spec
        return identity(self.task) | {
            "class": type(self.stock).__name__,
            "layers": spec.layers,
            "of_layers": spec.whole,
            "vocabulary": spec.words,
            "of_vocabulary": spec.vocabulary,
            "last_norms_left_out": len(spec.last_norms),
            "batch": spec.batch,
            "length": spec.length,
            "parameters": sum(p.numel() for p in self.parameters.values()),
            "attention": spec.attention,
            "reduced": spec.reduced,
            "check_tokens": CHECK_TOKENS,
            "unchecked": self.unchecked,
        }

    def records(self) -> list[dict]:
        self.check()
        self.time()
        return list(self._records())

    def _records(self) -> Iterator[dict]:
        common, timed = self.common(), {r.name: r.milliseconds for r in self.runners if r.way and r.milliseconds}
        for runner in self.runners:
            record = common | runner.fields | runner.measured
            if runner.name in timed:
                times = Times.of(runner.milliseconds)
                record |= {"steps": self.task.steps, "rounds": times.rounds}
                spreads = {"median_ms": times.median, "p10_ms": times.low, "p90_ms": times.high}
                record |= {name: round(value, 4) for name, value in spreads.items()}
                for base, name in BASIS.items():
                    if name in timed and len(timed[name]) == len(runner.milliseconds):
                        ratio, error = mean_ratio(timed[name], runner.milliseconds)
                        record[f"over_{base}"] = round(ratio, 4), None if error is None else round(error, 4)
            yield record

    def profiles(self) -> list[dict]:
        for runner in self.present:
            with self.kept_errors(runner), runner.way.around():
                runner.measured |= profile_step(lambda way=runner.way: self.step(way, self.batches[0]))
            self.forget()
        common = self.common()
        return [common | runner.fields | runner.measured for runner in self.runners]


def errors(parameters: dict[str, nn.Parameter], exact: dict[str, Tensor], norms: set[str]) -> dict[str, float]:
    """Distance of the gradients from the exact ones, relative to their length: of the norms' parameters, of all."""
    groups = {"norms": [name for name in exact if name in norms], "all": list(exact)}
    return {group: _distance(parameters, exact, names) for group, names in groups.items() if names}


def _distance(parameters: dict[str, nn.Parameter], exact: dict[str, Tensor], names: Sequence[str]) -> float:
    zero = torch.zeros((), dtype=torch.float64)
    apart = size = 0.0
    for name in names:
        grad = parameters[name].grad
        apart += ((zero.to(exact[name]) if grad is None else grad.double()) - exact[name]).square().sum().item()
        size += exact[name].square().sum().item()
    return math.sqrt(apart / size) if size else math.inf


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block once the time is over: a model that compiles for too long loses that way only."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than the {seconds:.0f} s that it had")

    seconds = max(seconds, 0.01)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
