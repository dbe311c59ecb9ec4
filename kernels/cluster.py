"""Row sums and moments over the CTAs of a cluster, through distributed shared memory.

Triton 3.6 spreads tensors and TMA copies over a cluster but does not reduce across it, and offers no address of
shared memory; so the exchange is PTX, on a few bytes of static shared memory per CTA: every CTA sends its share to all
of the cluster by stores that complete on the receiver's mbarrier, waits for its own to be complete, and sums what has
come (or merges it) in the order of the CTAs, the same for all of them. Nobody waits for anything else, such as stores
to global memory, for which a barrier of the cluster would.

There are two buffers, used in turn. A CTA sends its next share but one only after it has received all of the next
ones, which the others send after they have read these: behind the CTA barrier of their next row sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MAX_SUMS = 2
BARRIER_BYTES = 16  # of two


@gluon.constexpr_function
def buffer_bytes(tile):
    return 4 * MAX_SUMS * tile.rows * tile.cluster


@gluon.constexpr_function
def open_ptx(tile):
    # Dynamic shared memory starts where static ends, and TMA writes to multiples of 128 bytes only.
    size = -(-(BARRIER_BYTES + 2 * buffer_bytes(tile)) // 128) * 128
    return f"""{{
        .shared .align 128 .b8 exchange[{size}];
        .reg .b32 thread;
        .reg .pred leads;
        mov.u32 $0, exchange;
        mov.u32 thread, %tid.x;
        setp.eq.u32 leads, thread, 0;
        @leads mbarrier.init.shared::cta.b64 [exchange], 1;
        @leads mbarrier.init.shared::cta.b64 [exchange+8], 1;
        @leads fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.relaxed.aligned;
    }}"""


@gluon.constexpr_function
def sums_ptx(count, tile):
    """Registers sum0, sum1 ... from what has been received."""
    text = ""
    for cta in range(tile.cluster):
        for i in range(count):
            share = f"[received+{4 * (cta * count + i)}]"
            if cta == 0:
                text += f"ld.shared.f32 sum{i}, {share};"
            else:
                text += f"ld.shared.f32 other, {share}; add.f32 sum{i}, sum{i}, other;"
    return text


@gluon.constexpr_function
def moments_ptx(count, tile):
    """The same where the shares are the rows' means and then their variances: mean and variance of all, by the mean of
    the means, and the mean of the variances and of the means' squared distances from it."""
    text = ""
    inverse = f"0f{(128 - tile.cluster.bit_length()) << 23:08X}"  # 1 / cluster, a power of two
    for row in range(tile.rows):
        mean, variance = f"sum{row}", f"sum{tile.rows + row}"
        of_mean, of_variance = 4 * row, 4 * (tile.rows + row)
        ctas = [4 * count * cta for cta in range(tile.cluster)]
        text += f"mov.f32 {mean}, 0f00000000; mov.f32 {variance}, 0f00000000;"
        for at in ctas:
            text += f"ld.shared.f32 other, [received+{at + of_mean}]; add.f32 {mean}, {mean}, other;"
        text += f"mul.f32 {mean}, {mean}, {inverse};"
        for at in ctas:
            text += f"ld.shared.f32 other, [received+{at + of_variance}]; add.f32 {variance}, {variance}, other;"
            text += f"ld.shared.f32 other, [received+{at + of_mean}]; sub.f32 other, other, {mean};"
            text += f"fma.rn.f32 {variance}, other, other, {variance};"
        text += f"mul.f32 {variance}, {variance}, {inverse};"
    return text


@gluon.constexpr_function
def exchange_ptx(moments, count, tile):
    """Operands: `count` sums or moments over the cluster; then this CTA's `count` shares, the same in all its threads;
    then, once for each row of the tile, the buffers' address; then, as often, how many exchanges there were before."""
    address, number = 2 * count, 2 * count + tile.rows
    sends = "".join(
        f"@sends st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [peer+{4 * i}], ${count + i}, [peer_full];"
        for i in range(count)
    )
    sums = moments_ptx(count, tile) if moments else sums_ptx(count, tile)
    gives = "".join(f"mov.f32 ${i}, sum{i};" for i in range(count))
    return f"""{{
        .reg .b32 full, received, which, phase, mine, peer, peer_full, rank, thread;
        .reg .f32 other, sum<{count}>;
        .reg .pred leads, sends, done;
        and.b32 which, ${number}, 1;
        shr.u32 phase, ${number}, 1;
        and.b32 phase, phase, 1;
        mad.lo.u32 received, which, {buffer_bytes(tile)}, ${address};
        add.u32 received, received, {BARRIER_BYTES};
        mad.lo.u32 full, which, 8, ${address};
        mov.u32 thread, %tid.x;
        setp.eq.u32 leads, thread, 0;
        setp.lt.u32 sends, thread, {tile.cluster};
        @leads mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], {4 * count * tile.cluster};
        mov.u32 rank, %cluster_ctarank;
        mad.lo.u32 mine, rank, {4 * count}, received;
        @sends mapa.shared::cluster.u32 peer, mine, thread;
        @sends mapa.shared::cluster.u32 peer_full, full, thread;
        {sends}
    WAIT:
        mbarrier.try_wait.parity.shared::cta.b64 done, [full], phase;
        @!done bra WAIT;
        {sums}
        {gives}
    }}"""


@gluon.constexpr_function
def exchange_constraints(count, tile):
    return ",".join(["=f"] * count + ["f"] * count + ["r"] * 2 * tile.rows)


@gluon.jit
def open_exchange(tile: gl.constexpr):
    """The state of the CTA's exchanges, (buffers' address, how many there were); `join_cluster` before the first."""
    address = gl.to_tensor(0)
    if tile.cluster > 1:
        address = gl.inline_asm_elementwise(open_ptx(tile), "=r,r", [address], gl.int32, is_pure=False, pack=1)
    return address, gl.to_tensor(0)


@gluon.jit
def join_cluster(exchange, tile: gl.constexpr):
    """Return once every CTA of the cluster has opened its exchange."""
    address = exchange[0]
    if tile.cluster > 1:
        ptx: gl.constexpr = "barrier.cluster.wait.acquire.aligned; mov.u32 $0, $1;"
        address = gl.inline_asm_elementwise(ptx, "=r,r", [address], gl.int32, is_pure=False, pack=1)
    return address, exchange[1]


@gluon.jit
def sum_over_cluster(sums, exchange, tile: gl.constexpr, moments: gl.constexpr = False):
    """A tuple of one or two sums [rows, cluster], of which every CTA holds its own -> the same over the whole
    cluster, in each; and the state of the next exchange. Or of means and variances of as many elements each."""
    address = exchange[0]
    number = exchange[1]
    if tile.cluster > 1:
        count: gl.constexpr = len(sums) * tile.rows
        ptx: gl.constexpr = exchange_ptx(moments, count, tile)
        constraints: gl.constexpr = exchange_constraints(count, tile)
        if len(sums) == 1:
            operands = [sums[0], address, number]
            sums = (gl.inline_asm_elementwise(ptx, constraints, operands, gl.float32, is_pure=False, pack=tile.rows),)
        else:
            operands = [sums[0], sums[1], address, number]
            sums = gl.inline_asm_elementwise(
                ptx, constraints, operands, (gl.float32, gl.float32), is_pure=False, pack=tile.rows
            )
        number += 1
    return sums, (address, number)
