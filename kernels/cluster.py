"""Row sums and moments over the CTAs of a cluster, through distributed shared memory.

Triton 3.6 spreads tensors and TMA copies over a cluster, but it does not reduce across one and offers no address of
shared memory. The exchange is therefore PTX, on a few bytes of static shared memory per CTA. Each CTA sends its share
to every CTA of the cluster, itself included, by stores that complete on the receiver's mbarrier. It waits for its own
mbarrier and then sums (or merges) the shares in the order of the CTAs, which is the same in all of them. A cluster
barrier in place of the mbarrier would also wait for other memory accesses, such as stores to global memory.

Hazards of an exchange:
- A share must find an initialized mbarrier: every CTA initializes its own, fences and arrives at a cluster barrier
  (`open_exchange`), and waits at that barrier (`join_cluster`) before its first exchange.
- A phase must not complete early: a share may arrive before its receiver expects the bytes, but the phase also needs
  the arrival of the receiver's own thread, which comes with the expected bytes of all shares.
- A share must not overwrite one that is still to be read: there are two buffers, used in turn, and exchange n + 2
  reuses the buffer of exchange n. A CTA starts n + 2 only after it has received all shares of n + 1. All threads of
  their senders had read the shares of n by then: the CTA barrier of the sender's next row sum lies between.
- A share must not reach a CTA that has ended: each CTA waits for all shares of its last exchange.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_compat import MEETS_AT_THE_END

MAX_SUMS = 2
BARRIER_BYTES = 16  # two mbarriers, one for each buffer


@gluon.constexpr_function
def buffer_bytes(tile):
    return 4 * MAX_SUMS * tile.rows * tile.cluster


@gluon.constexpr_function
def open_ptx(tile):
    # Dynamic shared memory starts where static shared memory ends, and TMA writes only to multiples of 128 bytes: the
    # size is a multiple of 128 too.
    # The fence shows the initialization to the other CTAs that wait at the cluster barrier. The arrival there is
    # relaxed, because a releasing one would wait for all loads under way.
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
    """PTX that sums the received shares into registers sum0, sum1, ..., in the order of the CTAs."""
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
    """PTX that merges the received shares, the means of the tile's rows and then their variances, into registers sum0,
    sum1, ...: the mean of the means, and the mean of the variances plus the mean of the means' squared distances from
    it. The CTAs hold equal numbers of columns."""
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
    """PTX of one exchange.

    Operands: `count` results (sums or moments over the cluster); this CTA's `count` shares, the same in all its
    threads; the buffers' address, once for each row of the tile; the number of exchanges before, as often.

    Thread 0 arrives at the CTA's mbarrier and expects the bytes of all shares. Thread t sends the shares to CTA t.
    Every thread waits for the mbarrier before it reads: the wait makes the shares visible."""
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
    """Initialize the CTA's mbarriers; the state of its exchanges, (buffers' address, number of exchanges so far).
    `join_cluster` must come before the first exchange."""
    address = gl.to_tensor(0)
    if tile.cluster > 1:
        address = gl.inline_asm_elementwise(open_ptx(tile), "=r,r", [address], gl.int32, is_pure=False, pack=1)
    return address, gl.to_tensor(0)


@gluon.jit
def join_cluster(exchange, tile: gl.constexpr):
    """Return once every CTA of the cluster has opened its exchange. Without this wait, a share could be sent to an
    mbarrier that is not initialized yet."""
    address = exchange[0]
    if tile.cluster > 1:
        ptx: gl.constexpr = "barrier.cluster.wait.acquire.aligned; mov.u32 $0, $1;"
        address = gl.inline_asm_elementwise(ptx, "=r,r", [address], gl.int32, is_pure=False, pack=1)
    return address, exchange[1]


@gluon.constexpr_function
def meets_at_the_end(tile):
    return tile.cluster > 1 and MEETS_AT_THE_END


@gluon.jit
def leave_cluster(tile: gl.constexpr):
    """End the CTA here, without the barrier that some releases of Triton put before a kernel's end. That barrier waits
    until all that the cluster has stored is visible, and holds the place of the next CTA meanwhile. Nobody needs it: a
    CTA whose rows are done has received every share that was sent to it."""
    if meets_at_the_end(tile):
        zero = gl.to_tensor(0)
        gl.inline_asm_elementwise("exit; mov.b32 $0, $1;", "=r,r", [zero], gl.int32, is_pure=False, pack=1)


@gluon.jit
def sum_over_cluster(sums, exchange, tile: gl.constexpr, moments: gl.constexpr = False):
    """Sums over the whole cluster, in every CTA, and the state for the next exchange. `sums` is a tuple of one or two
    sums [rows, cluster], of which each CTA holds its own; with `moments`, a mean and a variance over equal numbers of
    elements, which are merged."""
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
