"""Only so many CTAs are resident at a time, and grids wait for each other as streams and griddepcontrol say."""

from __future__ import annotations

import pytest
import torch

from simulator import Race, order
from simulator.gpu import Gpu
from simulator.order import Deadlock
from simulator.small import launch, program, run

FIRST = "mov.u32 %r0, %ctaid.x; mul.wide.u32 %d9, %r0, 4; add.s64 %d9, %d0, %d9; setp.lt.u32 %p1, %r0, 99;"
LANE_0 = "mov.u32 %r1, %tid.x; setp.eq.u32 %p2, %r1, 0;"
STORES = f"{FIRST}\n{LANE_0}\n{{}}\n@%p2 st.global.b32 [%d9], 5;"
READS = f"{FIRST}\n{LANE_0}\n{{}}\n@%p2 ld.global.b32 %r2, [%d9]; add.s64 %d8, %d1, 0;\n@%p2 st.global.b32 [%d8], %r2;"


def numbers(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def pair(first: str, second: str, dependent: bool, stream: int = 0, seed: int = 0) -> tuple[torch.Tensor, Gpu]:
    """Launches a grid of 4 CTAs that store, then a grid that reads one of the numbers.

    `first` and `second` are PTX that the grids execute before they store or read.
    """
    gpu, x, out = Gpu(seed), numbers(4), numbers(1)
    launch(gpu, program(STORES.format(first), 1), x, ctas=4)
    launch(gpu, program(READS.format(second), 2), x, out, stream=stream, dependent=dependent)
    gpu.synchronize()
    return out, gpu


@pytest.mark.parametrize("resident", [1, 2, None])
def test_as_many_ctas_are_resident_as_there_are_places(resident):
    most = 0

    class Watched(Gpu):
        def fill(self):
            super().fill()
            nonlocal most
            most = max(most, sum(len(each.clusters) for each in self.grids))

    gpu, x = Watched(0, resident), numbers(40)
    launch(gpu, program(STORES.format(""), 1), x, ctas=40)
    gpu.synchronize()
    assert x.tolist() == [5] * 40
    assert most == (resident or 16)


def test_who_spins_on_a_cta_that_has_no_place_never_ends(monkeypatch):
    monkeypatch.setattr(order, "MAX_STEPS", 5_000)
    meets = "red.release.gpu.global.add.u32 [%d0], 1;\nWAIT: ld.acquire.gpu.global.b32 %r0, [%d0];"
    meets = f"{LANE_0} @%p2 {meets} setp.lt.u32 %p1, %r0, 3; @%p1 bra WAIT;"
    run(meets, numbers(1), ctas=3, resident=3)
    with pytest.raises(Deadlock, match="no end after 5000 steps"):
        run(meets, numbers(1), ctas=3, resident=2)


@pytest.mark.parametrize("seed", range(4))
def test_a_second_launch_of_a_stream_knows_what_the_first_has_stored(seed):
    assert pair("", "", dependent=False, seed=seed)[0].item() == 5


def test_launches_of_two_streams_know_nothing_of_each_other():
    with pytest.raises(Race, match="nothing orders them"):
        for seed in range(8):
            pair("", "", dependent=False, stream=1, seed=seed)


@pytest.mark.parametrize("seed", range(8))
def test_a_dependent_launch_knows_the_firsts_stores_at_its_wait_only(seed):
    triggers, waits = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"
    assert pair(triggers, waits, dependent=True, seed=seed)[0].item() == 5
    assert pair("", waits, dependent=True, seed=seed)[0].item() == 5  # without a trigger, the ends of its CTAs count
    with pytest.raises(Race, match="nothing orders them"):
        for more in range(8):
            pair(triggers, "", dependent=True, seed=8 * seed + more)


def test_a_dependent_launch_has_its_place_when_every_cta_has_triggered():
    # All 4 CTAs spin until the dependent grid has written `word`: it must begin before they end. It can, if all have
    # triggered; if only the first 3 have, nothing ever ends.
    first = f"{FIRST}\n{LANE_0}\nsetp.lt.u32 %p3, %r0, {{}}; @%p3 griddepcontrol.launch_dependents;\n"
    first += "WAIT: ld.acquire.gpu.global.b32 %r2, [%d1]; setp.eq.u32 %p4, %r2, 0; @%p4 bra WAIT;"
    second = f"{LANE_0} @%p2 red.release.gpu.global.add.u32 [%d0], 1;"

    def started(triggering: int) -> None:
        gpu, x, word = Gpu(0), numbers(4), numbers(1)
        launch(gpu, program(first.format(triggering), 2), x, word, ctas=4)
        launch(gpu, program(second, 1), word, dependent=True)
        gpu.synchronize()

    started(4)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Deadlock):
        patch.setattr(order, "MAX_STEPS", 5_000)
        started(3)
