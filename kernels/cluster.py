"""Row sums over the CTAs of a cluster, through distributed shared memory.

Triton 3.6 spreads tensors and TMA copies over a cluster but does not reduce across it, and offers no address of
shared memory; so the exchange is PTX, on a few bytes of static shared memory per CTA: every CTA writes its share to
all of the cluster, meets the others at the cluster's barrier, and sums what has come in the order of the CTAs, the
same for all of them. The two halves of the buffer alternate (`parity`): the barrier of the next exchange tells that
all have read this one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MAX_SUMS = 2


@gluon.constexpr_function
def half_bytes(tile):
    return 4 * MAX_SUMS * tile.rows * tile.cluster


@gluon.constexpr_function
def open_ptx(tile):
    # Dynamic shared memory starts where static ends, and TMA writes to multiples of 128 bytes only.
    size = -(-2 * half_bytes(tile) // 128) * 128
    return f"""{{
        .shared .align 128 .b8 exchange[{size}];
        mov.u32 $0, exchange;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
    }}"""


@gluon.constexpr_function
def exchange_ptx(count, tile):
    """Operands: `count` sums over the cluster; then this CTA's `count` shares, the same in all its threads; then the
    buffer's address."""
    address = 2 * count
    writes = "".join(f"@writes st.shared::cluster.f32 [peer+{4 * i}], ${count + i};" for i in range(count))
    sums = ""
    for cta in range(tile.cluster):
        for i in range(count):
            share = f"[${address}+{4 * (cta * count + i)}]"
            if cta == 0:
                sums += f"ld.shared.f32 sum{i}, {share};"
            else:
                sums += f"ld.shared.f32 other, {share}; add.f32 sum{i}, sum{i}, other;"
    gives = "".join(f"mov.f32 ${i}, sum{i};" for i in range(count))
    return f"""{{
        .reg .b32 mine, peer, rank, thread;
        .reg .f32 other, sum<{count}>;
        .reg .pred writes;
        mov.u32 rank, %cluster_ctarank;
        mad.lo.u32 mine, rank, {4 * count}, ${address};
        mov.u32 thread, %tid.x;
        setp.lt.u32 writes, thread, {tile.cluster};
        @writes mapa.shared::cluster.u32 peer, mine, thread;
        {writes}
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        {sums}
        {gives}
    }}"""


@gluon.constexpr_function
def exchange_constraints(count, tile):
    return ",".join(["=f"] * count + ["f"] * count + ["r"] * tile.rows)  # the address comes once per row of the tile


@gluon.jit
def open_exchange(tile: gl.constexpr):
    """Address of the CTA's exchange buffer, once every CTA of the cluster has started and may be written to."""
    address = 0
    if tile.cluster > 1:
        address = gl.inline_asm_elementwise(open_ptx(tile), "=r,r", [address], gl.int32, is_pure=False, pack=1)
    return address


@gluon.jit
def sum_over_cluster(sums, address, parity, tile: gl.constexpr):
    """A tuple of one or two sums [rows, cluster], of which every CTA holds its own -> the same over the whole
    cluster, in each. parity alternates from call to call."""
    if tile.cluster > 1:
        count: gl.constexpr = len(sums) * tile.rows
        ptx: gl.constexpr = exchange_ptx(count, tile)
        constraints: gl.constexpr = exchange_constraints(count, tile)
        at = address + parity * half_bytes(tile)
        if len(sums) == 1:
            share = [sums[0], at]
            sums = (gl.inline_asm_elementwise(ptx, constraints, share, gl.float32, is_pure=False, pack=tile.rows),)
        else:
            sums = gl.inline_asm_elementwise(
                ptx, constraints, [sums[0], sums[1], at], (gl.float32, gl.float32), is_pure=False, pack=tile.rows
            )
    return sums
