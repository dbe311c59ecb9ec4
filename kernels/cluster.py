"""Row sums over the CTAs of a cluster, through distributed shared memory.

Triton 3.6 spreads tensors and TMA copies over a cluster but does not reduce across it, and offers no address of shared memory; so the
exchange is PTX, on a few bytes of static shared memory per CTA. `send` writes a CTA's share to every CTA of the cluster and arrives at the
cluster's barrier; `receive` waits there and sums what has come, in the order of the CTAs, the same for all of them. Work put between the two
hides the barrier's latency. The two halves of the buffer alternate (`parity`): that a CTA has sent its next share tells that it has read this.
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
def send_ptx(count, tile):
    """Operands: 0 the share's first value, given back; then `count` values, the same in every thread of the CTA; then the address."""
    writes = "".join(f"@writes st.shared::cluster.f32 [peer+{4 * i}], ${tile.rows + i};" for i in range(count))
    gives = "".join(f"mov.f32 ${i}, ${tile.rows + i};" for i in range(tile.rows))
    return f"""{{
        .reg .b32 mine, peer, rank, thread;
        .reg .pred writes;
        mov.u32 rank, %cluster_ctarank;
        mad.lo.u32 mine, rank, {4 * count}, ${tile.rows + count};
        mov.u32 thread, %tid.x;
        setp.lt.u32 writes, thread, {tile.cluster};
        @writes mapa.shared::cluster.u32 peer, mine, thread;
        {writes}
        barrier.cluster.arrive.release.aligned;
        {gives}
    }}"""


@gluon.constexpr_function
def receive_ptx(count, tile):
    """Operands: `count` sums; then `count` values that only give the shape; then the address."""
    address = 2 * count
    sums = ""
    for cta in range(tile.cluster):
        for i in range(count):
            load = f"[${address}+{4 * (cta * count + i)}];"
            sums += f"ld.shared.f32 sum{i}, {load}" if cta == 0 else f"ld.shared.f32 other, {load} add.f32 sum{i}, sum{i}, other;"
    gives = "".join(f"mov.f32 ${i}, sum{i};" for i in range(count))
    return f"""{{
        .reg .f32 other, sum<{count}>;
        barrier.cluster.wait.acquire.aligned;
        {sums}
        {gives}
    }}"""


@gluon.constexpr_function
def constraints(outputs, floats, tile):
    return ",".join(["=f"] * outputs + ["f"] * floats + ["r"] * tile.rows)  # the address comes once per row of the tile


@gluon.jit
def open_exchange(tile: gl.constexpr):
    """Address of the CTA's exchange buffer, once every CTA of the cluster has started and may be written to."""
    address = 0
    if tile.cluster > 1:
        address = gl.inline_asm_elementwise(open_ptx(tile), "=r,r", [address], gl.int32, is_pure=False, pack=1)
    return address


@gluon.jit
def send(sums, address, parity, tile: gl.constexpr):
    """Send a tuple of one or two sums [rows, cluster], of which every CTA holds its own. Gives them back."""
    if tile.cluster > 1:
        count: gl.constexpr = len(sums) * tile.rows
        ptx: gl.constexpr = send_ptx(count, tile)
        names: gl.constexpr = constraints(tile.rows, count, tile)
        at = address + parity * half_bytes(tile)
        if len(sums) == 1:
            sums = (gl.inline_asm_elementwise(ptx, names, [sums[0], at], gl.float32, is_pure=False, pack=tile.rows),)
        else:
            first = gl.inline_asm_elementwise(ptx, names, [sums[0], sums[1], at], gl.float32, is_pure=False, pack=tile.rows)
            sums = (first, sums[1])
    return sums


@gluon.jit
def receive(sums, address, parity, tile: gl.constexpr):
    """The sums over the cluster of what was sent last, in the shape of `sums`; `sums` themselves without a cluster."""
    if tile.cluster > 1:
        count: gl.constexpr = len(sums) * tile.rows
        ptx: gl.constexpr = receive_ptx(count, tile)
        names: gl.constexpr = constraints(count, count, tile)
        at = address + parity * half_bytes(tile)
        if len(sums) == 1:
            sums = (gl.inline_asm_elementwise(ptx, names, [sums[0], at], gl.float32, is_pure=False, pack=tile.rows),)
        else:
            sums = gl.inline_asm_elementwise(
                ptx, names, [sums[0], sums[1], at], (gl.float32, gl.float32), is_pure=False, pack=tile.rows
            )
    return sums
