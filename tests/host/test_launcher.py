"""The launcher: which properties of a launch decide the build of its kernel, and where launches happen."""

from __future__ import annotations

import gc
import itertools
import re
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from planning import make_problem, meta_call

from fusednorm.host import fallback
from fusednorm.host.program import Address, Map, Number
from fusednorm.planner.device import H200
from fusednorm.planner.plan import VARIANTS, PipelinedPlan
from fusednorm.tools.explanation import decide

FORWARD = {"direction": "forward"}


def test_errors_of_a_launch_reach_the_caller(monkeypatch):
    from fusednorm.host import launch, launcher

    def run(launches):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(launcher, "load", lambda launches, device: None)
    monkeypatch.setattr(launcher, "hand_over", run)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        launch.run(meta_call(make_problem("layer", 4096), 64))


def test_launches_are_run_in_one_place():
    package = Path(__file__).parents[2] / "fusednorm"
    callers = {path.name for path in package.rglob("*.py") if re.search(r"\blaunch\.run\(\)", path.read_text())}
    assert callers == {"launcher.py"}


def launch_of(rows=64, cols=2560, **changes):
    """(the plan, the first launch) of a backward through rings, whose kernel no test interprets."""
    from fusednorm import force
    from fusednorm.host import launch

    call = meta_call(make_problem("layer", cols, **changes), rows)
    with force("pipelined"):
        chosen = fallback.choose(call.problem, rows, H200)
    return chosen.plan, launch.program_of(call, chosen, H200).launches[0]


def key_of(launch, device=0):
    from fusednorm.host import launcher

    return launcher.build_key(launch, device)


def test_the_row_count_is_no_part_of_what_a_build_depends_on():
    (plan, few), (_, many) = launch_of(64), launch_of(65)
    assert isinstance(plan, PipelinedPlan)
    assert key_of(few) == key_of(many)


def programs() -> list:
    """(a program, the same on meta tensors) of all kinds; in a process that does not interpret."""
    from fusednorm.columns import launch as columns
    from fusednorm.columns.plan import KERNELS, choose
    from fusednorm.columns.problem import check_column_sum
    from fusednorm.host import launch

    calls = [
        (meta_call(problem), fallback.Choice(plan))
        for cols, changes in itertools.product((1000, 4096, 65536, 250001), ({}, FORWARD, {"wants_dx": False}))
        for problem in [make_problem("layer", cols, **changes)]
        for variant in VARIANTS[:-1]
        for plan in [decide(problem, 4096, H200, variant).plan]
    ]
    found = [(launch.program_of(*each, H200), call.tensors, call.shape) for each in calls for call in each[:1]]
    for count, kernel in itertools.product((1, 3), KERNELS):
        inputs = [torch.empty(50000, 4096, device="meta")] * count
        call = check_column_sum(inputs, False, None)
        found.append((columns.program_of(call, choose(call.problem, 50000, H200, kernel)), inputs, inputs[0].shape))
    return [(program, program.on_tensors(tensors, shape, shape[0])) for program, tensors, shape in found]


def builds_of_slots_and_of_tensors() -> tuple[list, list]:
    from fusednorm.tools import compilation

    pairs = [pair for program, on in programs() for pair in zip(program.launches, on.launches, strict=True)]
    return tuple([compilation.build_key(each, 90) for each in launches] for launches in zip(*pairs, strict=True))


def test_triton_builds_with_addresses_what_it_builds_with_tensors(workers):
    by_slots, by_tensors = workers.submit(builds_of_slots_and_of_tensors).result()
    assert by_slots == by_tensors and len(set(by_slots)) > 20


def numbers_of_kernels() -> set[tuple[str, str, bool]]:
    """(kernel, number, whether no build depends on it) of the numbers among the operands of all kinds of programs; in a
    process that does not interpret."""
    from fusednorm.host import launcher

    return {
        (each.kernel.__name__, operand.name, at in launcher._what_no_build_depends_on(each.kernel))
        for program, _ in programs()
        for each in program.launches
        for at, operand in enumerate(each.operands)
        if isinstance(operand, Number)
    }


def test_no_kernel_is_specialized_for_a_number_that_follows_from_the_row_count(workers):
    """A program's kernels are built once, and then get the numbers of every call."""
    found = workers.submit(numbers_of_kernels).result()
    assert len(found) > 8 and {number for _, number, _ in found} == {"ROWS", "PARTIALS"}
    assert not [(kernel, number) for kernel, number, is_free in found if not is_free]


@pytest.mark.parametrize(
    "changes", [{"cols": 8192}, {"dtype": "fp16"}, {"weight": "fp32"}, {"wants_db": False}], ids=str
)
def test_what_a_build_depends_on_is(changes):
    assert key_of(launch_of()[1]) != key_of(launch_of(**changes)[1])


def test_a_build_depends_on_every_dtype_and_alignment_on_norm_tile_and_options_and_on_the_device():
    _, launch = launch_of()
    at, slot = next((at, each) for at, each in enumerate(launch.operands) if isinstance(each, Address))
    described = launch.operands[0]
    assert isinstance(described, Map)

    def put(operand, at=at):
        return replace(launch, operands=(*launch.operands[:at], operand, *launch.operands[at + 1 :]))

    keys = [
        key_of(launch), key_of(launch, device=1), key_of(replace(launch, options={"maxnreg": 64})),
        key_of(replace(launch, norm=replace(launch.norm, layer=not launch.norm.layer))),
        key_of(replace(launch, tile=replace(launch.tile, num_warps=2))),
        key_of(replace(launch, constants={"total": True})), key_of(replace(launch, named={"d0": described})),
        key_of(put(None)), key_of(put((slot, slot))), key_of(put(replace(slot, dtype=torch.float64))),
        key_of(put(replace(slot, aligned=not slot.aligned))),
        key_of(put(replace(described, tensor=replace(described.tensor, dtype=torch.float16)), at=0)),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key_of(launch) == key_of(put(replace(slot, index=9))), "a build depends on no tensor's place"


class Compiled:
    """A kernel as Triton has it: what loads it sets a launcher long before the function. The second thread that asks
    for it comes in between."""

    def __init__(self, failure: Exception | None = None):
        self.failure, self.function, self.launcher = failure, None, None
        self.asked = threading.Barrier(2)

    def __getitem__(self, grid):
        if self.function is None:
            self.launcher = "launcher"
            time.sleep(0.2)
            if self.failure:
                raise self.failure
            self.function = 7

    @property
    def run(self):
        if self.launcher is None:
            self[1, 1, 1]
        return self.launcher


@pytest.fixture
def loading(monkeypatch):
    """load(compiled): the functions of the builds that two threads get, or the causes why they get none."""
    from fusednorm.host import launcher

    def load(compiled):
        def warmup(*_, **__):
            compiled.asked.wait()
            return compiled

        launch = replace(
            launch_of()[1], kernel=SimpleNamespace(warmup=warmup, params=(), arg_names=(), pre_run_hooks=())
        )

        def one(_):
            try:
                return launcher._load(launch, 0)
            except fallback.BuildFailed as failed:
                return str(failed)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))

    monkeypatch.setattr(launcher.Build, "of", lambda compiled, launch: (compiled.run, compiled.function))
    for name in ("_builds", "_failed"):
        monkeypatch.setattr(launcher, name, {})
    return load


def test_threads_that_load_a_kernel_at_once_get_one_build_with_its_function(loading):
    first, second = loading(Compiled())
    assert first == ("launcher", 7) and first is second


def test_a_kernel_that_cannot_be_loaded_is_no_build_for_either_thread(loading):
    cause = "RuntimeError: no room"
    assert loading(Compiled(RuntimeError("no room"))) == [cause, cause]


def test_no_norm_or_tile_takes_the_place_of_another_among_the_builds(loading, monkeypatch):
    from fusednorm.host import launcher

    compiled = Compiled()
    compiled.asked = threading.Barrier(1)
    launch = launch_of()[1]
    kernel = SimpleNamespace(warmup=lambda *_, **__: compiled, params=(), arg_names=(), pre_run_hooks=())
    other = replace(launch, kernel=kernel, norm=replace(launch.norm), tile=replace(launch.tile))
    kept = [weakref.ref(other.norm), weakref.ref(other.tile)]
    launcher._load(other, 0)
    del other
    gc.collect()
    assert all(each() is not None for each in kept), "a build_key has their ids"
