"""The simulator checks accesses against their tensor and copies against their map; mbarriers tell only a parity."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from simulator import Race, SimulationError
from simulator.gpu import Gpu
from simulator.memory import TensorMap, swizzled
from simulator.small import launch, nans, program, run, tensor_map

LANE = "mov.u32 %r0, %tid.x; mul.wide.u32 %d9, %r0, 4; add.s64 %d1, %d0, %d9; mul.lo.u32 %r9, %r0, 4;"
# Pieces of a kernel: one thread starts a copy of the box at row %d1 and column %d2 to shared memory. All threads wait
# and then store the bytes that have landed.
OPEN = """mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; mov.u32 %r1, global_smem; add.s32 %r2, %r1, 2048;
cvta.param.u64 %d8, small_param_0; cvt.u32.u64 %r3, %d1; cvt.u32.u64 %r4, %d2;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024;
"""
COPY = "@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
COPY += "[%r1], [%d8, {%r4, %r3}], [%r2];\n"
WAIT = """WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra WAIT;
"""
OUT = """mul.lo.u32 %r5, %r0, 32; add.s32 %r6, %r1, %r5; cvt.u64.u32 %d9, %r5; add.s64 %d9, %d0, %d9;
ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r6]; st.global.v4.b32 [%d9], {%r10, %r11, %r12, %r13};
ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r6+16]; st.global.v4.b32 [%d9+16], {%r10, %r11, %r12, %r13};"""


def copied(x, row: int, col: int, box=(8, 32), swizzle: int = 0, code: str = OPEN + COPY + WAIT + OUT, seed: int = 0):
    """The box of floats that a TMA copy brings to shared memory."""
    gpu, out = Gpu(seed), nans(256)
    values = tensor_map(gpu, x, box, swizzle), out, row, col
    launch(gpu, program(code, 3, maps=1), *values)
    gpu.synchronize()
    return out.reshape(box)


@pytest.mark.parametrize("offset, message", [(8, "has 132"), (-4, "outside of all tensors"), (2, "not aligned")])
def test_an_access_outside_of_its_tensor_or_misaligned_is_an_error(offset, message):
    with pytest.raises(SimulationError, match=message):
        run(f"{LANE}\nld.global.b32 %r1, [%d1+{offset}];", nans(33))


def test_a_load_of_a_signed_number_extends_its_sign():
    numbers, out = torch.arange(-16, 16, dtype=torch.int32), torch.zeros(32, dtype=torch.int64)
    places = "mov.u32 %r0, %tid.x; mad.wide.u32 %d2, %r0, 4, %d0; mad.wide.u32 %d3, %r0, 8, %d1;"
    run(f"{places}\nld.global.s32 %d4, [%d2]; st.global.b64 [%d3], %d4;", numbers, out)
    assert torch.equal(out, numbers.long())


def test_warps_may_store_bytes_side_by_side():
    """As Triton does where a mask changes its layout."""
    store = "mov.u32 %r1, global_smem; and.b32 %r2, %r0, 31; shr.u32 %r3, %r0, 5; mad.lo.u32 %r2, %r2, 2, %r3;\n"
    store += "add.s32 %r2, %r1, %r2; cvt.u16.u32 %h0, %r0; st.shared.b8 [%r2], %h0; bar.sync 0;\n"
    load = "add.s32 %r4, %r1, %r0; ld.shared.b8 %r5, [%r4]; st.global.b32 [%d1], %r5;"
    out = torch.zeros(64, dtype=torch.int32)
    run(f"{LANE}\n{store}{load}", out, threads=64)
    assert torch.equal(out, torch.arange(64, dtype=torch.int32).view(2, 32).T.flatten())


def test_shared_memory_and_registers_begin_as_nan():
    out = nans(32).zero_()
    run(f"{LANE}\nmov.u32 %r2, global_smem; ld.shared.b32 %r3, [%r2+64]; st.global.b32 [%d1], %r3;", out)
    assert out.isnan().all()
    run(f"{LANE}\nst.global.b32 [%d1], %r20;", out.zero_())
    assert out.isnan().all()


@pytest.mark.parametrize("row, col", [(0, 0), (3, 4), (15, 44), (-3, -8), (40, 0)])
def test_a_tma_copy_brings_a_box_and_zeros_outside_of_the_tensor(row, col):
    x = torch.randn(20, 48)[:, :40]  # there are gaps between the rows
    wanted = torch.zeros(8, 32)
    for i in range(8):
        for j in range(32):
            if 0 <= row + i < 20 and 0 <= col + j < 40:
                wanted[i, j] = x[row + i, col + j]
    assert torch.equal(copied(x, row, col), wanted)


# Each lane copies 16 bytes of a row of 128 elements to shared memory. Then each stores what lane {reader} has copied.
OWN = """mov.u32 %r0, %tid.x; mul.lo.u32 %r5, %r0, 16; mov.u32 %r1, global_smem; add.s32 %r2, %r1, %r5;
cvt.u64.u32 %d9, %r5; add.s64 %d8, %d0, %d9; add.s64 %d7, %d1, %d9;
{first}
cp.async.cg.shared.global [ %r2 + 0 ], [ %d8 + 0 ], 0x10, {count};
{commit}
cp.async.wait_group {most};
{then}
ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r2]; st.global.v4.b32 [%d7], {{%r10, %r11, %r12, %r13}};
{end}"""
COMMIT = "cp.async.commit_group;"


def own_copy(x, seed=0, first="", count="0x10", commit=COMMIT, most=0, then="", end=""):
    out = nans(128)
    run(OWN.format(first=first, count=count, commit=commit, most=most, then=then, end=end), x, out, seed=seed)
    return out


@pytest.mark.parametrize("seed", range(8))
def test_a_lanes_copy_brings_its_bytes_and_zeros_behind_those_of_its_source(seed):
    x = torch.randn(128)
    assert torch.equal(own_copy(x, seed), x)
    few = own_copy(x, seed, first="and.b32 %r6, %r0, 1; mul.lo.u32 %r6, %r6, 8;", count="%r6").reshape(32, 4)
    assert few[0::2].eq(0).all() and few[:, 2:].eq(0).all() and torch.equal(few[1::2, :2], x.reshape(32, 4)[1::2, :2])


@pytest.mark.parametrize(
    "changes",
    [{"most": 1}, {"commit": ""}, {"then": "add.s32 %r2, %r1, %r5;", "most": 1}, {"first": COMMIT, "commit": ""}],
    ids=["a group may be under way", "no group", "the same bytes", "a group before"],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_read_of_what_no_wait_has_ordered_is_a_race(changes, seed):
    with pytest.raises(Race, match=r"reads what is written by a copy by warp 0"):
        own_copy(torch.randn(128), seed, **changes)


def test_a_wait_for_the_group_before_orders_no_later_group():
    again = "cp.async.cg.shared.global [%r2], [%d8], 16, 16;" + COMMIT
    assert torch.equal(own_copy(torch.ones(128), first=COMMIT, most=0), torch.ones(128))
    later = "add.s32 %r2, %r2, 1024; " + again + " sub.s32 %r2, %r2, 1024;"
    end = "cp.async.wait_group 0;"
    assert torch.equal(own_copy(torch.ones(128), commit=COMMIT + later, most=1, end=end), torch.ones(128))
    with pytest.raises(Race):
        own_copy(torch.ones(128), commit=COMMIT + later, most=2, end=end)


def test_a_copy_over_bytes_that_another_warp_reads_is_a_race():
    code = """mov.u32 %r0, %tid.x; mov.u32 %r1, global_smem; setp.lt.u32 %p1, %r0, 32; and.b32 %r5, %r0, 31;
mul.lo.u32 %r5, %r5, 16; add.s32 %r2, %r1, %r5; cvt.u64.u32 %d9, %r5; add.s64 %d8, %d0, %d9;
@!%p1 ld.shared.b32 %r3, [%r2];
{}
@%p1 cp.async.cg.shared.global [%r2], [%d8], 16;
cp.async.commit_group;
cp.async.wait_group 0;"""
    run(code.format("bar.sync 0;"), torch.randn(128), threads=64)
    with pytest.raises(Race, match="nothing orders them"):
        run(code.format(""), torch.randn(128), threads=64)


def test_a_cta_does_not_end_before_its_copies_have_landed():
    end = "cp.async.ca.shared.global [%r2], [%d8], 8;"
    code = OWN.format(first="", count=16, commit=COMMIT, most=0, then="", end=end)
    with pytest.raises(SimulationError, match="ends with 1 copies to it under way"):
        for seed in range(8):
            run(code, torch.randn(128), nans(128), seed=seed)


def test_a_copy_is_of_4_8_or_16_bytes_within_its_tensor():
    with pytest.raises(SimulationError, match="cp.async of 16 bytes, 17 of them"):
        own_copy(torch.randn(128), count="17")
    with pytest.raises(SimulationError, match="outside of all tensors|has 508"):
        own_copy(torch.randn(127))


def test_a_swizzle_changes_the_places_of_16_bytes_within_a_span():
    x = torch.arange(20 * 40.0).reshape(20, 40)
    plain, mixed = copied(x, 0, 0).reshape(8, 8, 4), copied(x, 0, 0, swizzle=3).reshape(8, 8, 4)
    for row in range(8):
        for piece in range(8):
            assert torch.equal(mixed[row, piece ^ row], plain[row, piece])
    pieces = np.arange(1024, dtype=np.uint16).view(np.uint8)
    for mode, span in ((1, 2), (2, 4)):
        found = swizzled(pieces, mode).view(np.uint16)[::8] // 8
        assert [each ^ ((n >> 3) % span) for n, each in enumerate(found.tolist())] == list(range(128))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"address": 8}, "its address"),
        ({"strides": (4, 36)}, "strides"),
        ({"box": (3, 8)}, "inner side is a multiple"),
        ({"box": (512, 8)}, "at most 256"),
        ({"box": (64, 8), "swizzle": 3}, "fits the swizzle"),
    ],
)
def test_a_tensor_map_that_the_driver_would_not_take_is_an_error(changes, message):
    with pytest.raises(SimulationError, match=message):
        TensorMap(**{"address": 64, "shape": (64, 64), "strides": (4, 256), "box": (32, 8)} | changes)


@pytest.mark.parametrize("seed", range(6))
def test_what_a_copy_brings_may_be_read_after_its_wait_only(seed):
    with pytest.raises(Race, match=r"ld\.shared.*small\.py.*reads what is written by a copy to CTA 0 \(cp\.async"):
        copied(torch.randn(20, 40), 0, 0, code=OPEN + COPY + OUT + WAIT, seed=seed)


ACCESSES = [("st.shared.b32 [%r6], %r0;", "written"), ("ld.shared.b32 %r7, [%r6];", "read")]


@pytest.mark.parametrize("access, how", ACCESSES)
def test_what_a_copy_overwrites_needs_a_proxy_fence(access, how):
    before = f"mul.lo.u32 %r5, %r0, 4; add.s32 %r6, %r1, %r5; {access} bar.sync 0;\n"
    fence = "fence.proxy.async.shared::cta; bar.sync 0;\n"
    with pytest.raises(Race, match=f"writes what is {how} .*: no proxy fence"):
        copied(torch.randn(20, 40), 0, 0, code=OPEN + before + COPY + WAIT + OUT)
    copied(torch.randn(20, 40), 0, 0, code=OPEN + before + fence + COPY + WAIT + OUT)


def test_a_store_to_a_live_mbarrier_is_an_error():
    code = OPEN + "bar.sync 0; @%p1 st.shared.b32 [%r2], 0;" + COPY + WAIT
    with pytest.raises(SimulationError, match="the memory of a live mbarrier"):
        copied(torch.randn(20, 40), 0, 0, code=code)


def test_an_init_without_a_fence_is_not_known_to_a_copy():
    code = (OPEN + COPY + WAIT + OUT).replace("fence.proxy.async.shared::cta;", "")
    with pytest.raises(Race, match="no proxy fence"):
        copied(torch.randn(20, 40), 0, 0, code=code)


PHASES = """mov.u32 %r1, global_smem; mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
bar.sync 0;
@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1]; bar.sync 0;
{}
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; selp.b32 %r2, 1, 0, %p2; @%p1 st.global.b32 [%d0], %r2;"""


def test_a_wait_knows_the_parity_of_a_phase_only():
    out = torch.zeros(1, dtype=torch.int32)
    run(PHASES.format(""), out)
    assert out.item() == 1
    gpu_waits = PHASES.format("@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1]; bar.sync 0;")  # one phase too many
    with pytest.raises(SimulationError, match="parity 0 of mbarrier"):
        run(gpu_waits, out)
