"""Synchronization orders accesses, a lack of it is found as a race or a deadlock, and a seed repeats a run."""

from __future__ import annotations

import pytest
import torch

from simulator import Deadlock, Race
from simulator.recording import Recording
from simulator.small import nans, run

# Warp 0 stores numbers in shared memory, and warp 1 reads them. The line {} is for synchronization.
PASS = """mov.u32 %r0, %tid.x; mov.u32 %r1, global_smem; setp.lt.u32 %p1, %r0, 32; mul.lo.u32 %r2, %r0, 4;
and.b32 %r3, %r2, 127; add.s32 %r4, %r1, %r3;
@%p1 st.shared.b32 [%r4], %r0;
{}
@!%p1 ld.shared.b32 %r5, [%r4]; cvt.u64.u32 %d1, %r3; add.s64 %d1, %d0, %d1;
@!%p1 st.global.b32 [%d1], %r5;"""
# CTA 0 stores a number in global memory and then raises a flag. The other CTA waits for the flag and reads the number.
SAY = """mov.u32 %r0, %ctaid.x; setp.eq.u32 %p1, %r0, 0; mov.u32 %r1, %tid.x; setp.eq.u32 %p2, %r1, 0;
@!%p1 bra OTHER;
@%p2 st.global.b32 [%d0], 7;
@%p2 red.{}.gpu.global.add.u32 [%d1], 1;
bra END;
OTHER: ld.{}.gpu.global.b32 %r2, [%d1]; setp.eq.u32 %p3, %r2, 0; @%p3 bra OTHER;
@%p2 ld.global.b32 %r3, [%d0];
@%p2 st.global.b32 [%d2], %r3;
END:"""


@pytest.mark.parametrize("seed", range(8))
def test_a_barrier_hands_on_what_was_stored(seed):
    out = torch.zeros(32, dtype=torch.int32)
    run(PASS.format("bar.sync 0;"), out, threads=64, seed=seed)
    assert out.tolist() == list(range(32))


@pytest.mark.parametrize("seed", range(8))
def test_a_race_is_found_in_any_order_and_names_both_places(seed):
    with pytest.raises(Race) as found:
        run(PASS.format(""), nans(32), threads=64, seed=seed)
    text = str(found.value)
    assert "small.py:2" in text and "small.py:4" in text and "nothing orders them" in text


def test_stores_of_what_is_there_already_are_no_race():
    code = "mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; mul.wide.u32 %d1, %r1, 4; add.s64 %d1, %d0, %d1;\n"
    run(code + "st.global.b32 [%d1], 5;", nans(32), threads=64)
    with pytest.raises(Race):
        run(code + "st.global.b32 [%d1], %r0;", nans(32), threads=64)


@pytest.mark.parametrize("seed", range(4))
def test_a_release_and_an_acquire_order_what_ctas_do(seed):
    x, said, out = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
    run(SAY.format("release", "acquire"), x, said, out, ctas=2, seed=seed)
    assert out.item() == 7


@pytest.mark.parametrize("release, acquire", [("relaxed", "acquire"), ("release", "relaxed")])
def test_relaxed_accesses_order_nothing(release, acquire):
    with pytest.raises(Race, match="reads what is written by warp 0 of CTA 0"):
        run(SAY.format(release, acquire), *(torch.zeros(1, dtype=torch.int32) for _ in range(3)), ctas=2)


# CTA 0 stores a number, at the first {} before it arrives or at the second after. CTA 1 waits, and reads the number.
MEET = """mov.u32 %r0, %ctaid.x; setp.eq.u32 %p1, %r0, 0;
{}
barrier.cluster.arrive.aligned;
{}
barrier.cluster.wait.aligned;
@!%p1 ld.global.b32 %r1, [%d0];
@!%p1 st.global.b32 [%d1], %r1;"""


@pytest.mark.parametrize("seed", range(4))
def test_a_cluster_knows_what_was_done_before_an_arrival_and_no_more(seed):
    stores, out = "@%p1 st.global.b32 [%d0], 7;", nans(1)
    run(MEET.format(stores, ""), nans(1), out, ctas=2, cluster=2, seed=seed)
    assert out.view(torch.int32).item() == 7
    with pytest.raises(Race, match="nothing orders them"):
        run(MEET.format("", stores), nans(1), out, ctas=2, cluster=2, seed=seed)


def test_nobody_can_go_on_where_a_barrier_lacks_a_warp():
    with pytest.raises(Deadlock, match=r"warp 0 of CTA 0 waits for bar\.sync 3, before .*small\.py"):
        run("mov.u32 %r0, %tid.x;\nbar.sync 3, 96;\nst.global.b32 [%d0], %r0;", nans(1), threads=64)


def test_a_seed_repeats_a_run_and_another_gives_another_order():
    def order(seed: int) -> list[str]:
        gpu = run(PASS.format("bar.sync 0;"), nans(32), threads=64, ctas=4, seed=seed, trace=Recording())
        return gpu.trace.log

    runs = [order(seed) for seed in range(6)]
    assert runs == [order(seed) for seed in range(6)]
    assert len({tuple(run) for run in runs}) > 2
