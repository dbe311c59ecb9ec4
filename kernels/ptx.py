"""All PTX that the kernels contain: what Triton does not offer. One function for each use of it."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def launch_dependents():
    """From sm_90 on: a dependent launch may be placed on the GPU once every CTA of this launch has come here or ended.
    It saves time and orders no memory: the dependent launch calls `wait_for_prerequisites` before it reads."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_for_prerequisites():
    """From sm_90 on: return once all CTAs of the previous launch have ended and all that they wrote is visible.

    Every CTA of a dependent launch must call this. One that reads before could see partials that are not written yet,
    and one that skips it would let the launch behind it begin too early."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def opaque(value):
    """Returns `value` (int32). The compiler knows nothing about the result. It can compute neither the result nor what
    depends on it before a loop that precedes this call."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], tl.int32, is_pure=False, pack=1)


@gluon.jit
def end_thread():
    """Ends the thread that comes here."""
    zero = gl.to_tensor(0)
    tl.inline_asm_elementwise("exit; mov.b32 $0, $1;", "=r,r", [zero], tl.int32, is_pure=False, pack=1)


@triton.jit
def pack(low, high):
    """Two bfloat16 values in an int32."""
    return tl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], tl.int32, is_pure=True, pack=1)


@triton.jit
def unpack(pair):
    """The two of `pack` as float32."""
    ptx: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return tl.inline_asm_elementwise(ptx, "=f,=f,r", [pair], (tl.float32, tl.float32), is_pure=True, pack=1)


@triton.jit
def behind(x, a, b, zero):
    """x, of whose eight adjacent elements, which one load brings, the first two are known once those of a and b have
    come. All have 16 bits; the compiler does not know that `zero` is 0. Only for kernels that are never interpreted."""
    first: tl.constexpr = "{ .reg .b32 t; or.b32 t, $8, $12; and.b32 t, t, $16; xor.b32 $0, $4, t; "
    ptx: tl.constexpr = first + "mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }"
    constraints: tl.constexpr = "=r,=r,=r,=r" + ",r" * 16
    return tl.inline_asm_elementwise(ptx, constraints, [x, a, b, zero], x.dtype, is_pure=True, pack=8)


@triton.jit
def widen_pairs(x):
    """bfloat16 as float32, two adjacent values at a time, by one instruction each; the compiler takes three for both.
    Only for kernels that are never interpreted: the interpreter knows no PTX."""
    ptx: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return tl.inline_asm_elementwise(ptx, "=f,=f,r", [x], tl.float32, is_pure=True, pack=2)


@triton.jit
def to_bfloat16(x):
    """float32 rounded to bfloat16, as float32, two values at a time by three instructions. The compiler takes two for
    each value, and the first is one of a unit with a quarter of the lanes. Only for kernels that are never interpreted.
    """
    ptx: tl.constexpr = "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }"
    return tl.inline_asm_elementwise(ptx, "=f,=f,f,f", [x], tl.float32, is_pure=True, pack=2)


@triton.jit
def multiply_add_of_16_bits(x, a, b):
    """x, of float32, rounded to the dtype of a and b, times a plus b, rounded once; two values at a time by two
    instructions. Only for kernels that are never interpreted."""
    pair: tl.constexpr = "bf16x2" if a.dtype == tl.bfloat16 else "f16x2"
    ptx: tl.constexpr = f"{{ .reg .b32 t; cvt.rn.{pair}.f32 t, $2, $1; fma.rn.{pair} $0, t, $3, $4; }}"
    return tl.inline_asm_elementwise(ptx, "=r,f,f,r,r", [x, a, b], a.dtype, is_pure=True, pack=2)


# --- The slots of narrow_async.py. A slot is 16 bytes of shared memory. Each thread has some, far apart ---


@triton.constexpr_function
def open_slots_ptx(count, num_warps):
    return f"""{{
        .shared .align 128 .b8 slots[{512 * num_warps * count}];
        .reg .b32 first, thread;
        mov.u32 first, slots;
        mov.u32 thread, %tid.x;
        mad.lo.u32 $0, thread, 16, first;
    }}"""


@gluon.jit
def open_slots(count: gl.constexpr, num_warps: gl.constexpr):
    """The address of the first of a thread's `count` slots. The next one lies slot_step(num_warps) behind it."""
    ptx: gl.constexpr = open_slots_ptx(count, num_warps)
    return tl.inline_asm_elementwise(ptx, "=r,r", [gl.to_tensor(0)], tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def slot_step(num_warps):
    return 512 * num_warps


@gluon.jit
def fill_slot(slot, source, size, reused: gl.constexpr):
    """Start the copy of 16 bytes from `source` to a slot. With a `size` of 0 the slot becomes zeros. Each argument is
    one for each thread. What is `reused` stays in L1."""
    level: gl.constexpr = "ca" if reused else "cg"
    ptx: gl.constexpr = "cp.async." + level + ".shared.global [$1], [$2], 16, $3; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(ptx, "=r,r,l,r", [slot, source, size], tl.int32, is_pure=False, pack=1)


@gluon.jit
def await_copies(but: gl.constexpr):
    """End the group of copies that this thread has started, and wait for all of its groups but the last ones."""
    ptx: gl.constexpr = f"cp.async.commit_group; cp.async.wait_group {but}; mov.b32 $0, $1;"
    tl.inline_asm_elementwise(ptx, "=r,r", [gl.program_id(0)], tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def read_slot_ptx(dtype, num_warps, again):
    load = "ld.volatile.shared" if again else "ld.shared"
    if dtype == tl.float32:
        return f"{load}.v4.f32 {{$0, $1, $2, $3}}, [$8]; {load}.v4.f32 {{$4, $5, $6, $7}}, [$8+{slot_step(num_warps)}];"
    low, high = "shl.b32 ${}, p{}, 16;", "and.b32 ${}, p{}, 0xffff0000;"
    if dtype == tl.float16:
        low, high = "mov.b32 {{h, g}}, p{1}; cvt.f32.f16 ${0}, h;", "cvt.f32.f16 ${0}, g;"
    gives = "".join(low.format(2 * i, i) + high.format(2 * i + 1, i) for i in range(4))
    return f"{{ .reg .b32 p<4>; .reg .b16 h, g; {load}.v4.b32 {{p0, p1, p2, p3}}, [$8]; {gives} }}"


@gluon.jit
def read_slot(slot, dtype: gl.constexpr, num_warps: gl.constexpr, again: gl.constexpr = False):
    """The eight elements of this dtype in a slot, or in two if they are float32; in float32. `slot` comes eight times.
    What is read `again` is not held in registers since it was read first."""
    ptx: gl.constexpr = read_slot_ptx(dtype, num_warps, again)
    constraints: gl.constexpr = "=f,=f,=f,=f,=f,=f,=f,=f,r,r,r,r,r,r,r,r"
    return tl.inline_asm_elementwise(ptx, constraints, [slot], tl.float32, is_pure=False, pack=8)


# --- The exchange of cluster.py, which says why it is safe ---

MAX_SUMS = 2  # shares of each row that a CTA sends in one exchange, at most
BARRIER_BYTES = 16  # two mbarriers, one for each buffer


@triton.constexpr_function
def buffer_bytes(tile):
    """Bytes of one buffer: the float32 shares of every row from every CTA."""
    return 4 * MAX_SUMS * tile.rows * tile.cluster


@triton.constexpr_function
def open_exchange_ptx(tile):
    """PTX that initializes the CTA's mbarriers and arrives at the cluster barrier. It gives the address of the
    exchange's memory: two mbarriers, then two buffers."""
    # Dynamic shared memory starts where static shared memory ends, and TMA writes only to multiples of 128 bytes: the
    # size is a multiple of 128 too.
    # The fence shows the initialization to all CTAs, which wait at the cluster barrier before they use the mbarriers.
    # The arrival there is relaxed, because a releasing one would wait for all loads under way.
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


@triton.constexpr_function
def sums_ptx(count, tile):
    """PTX that sums the `count` received shares of each CTA into registers sum0, sum1, ..., in the order of the
    CTAs."""
    text = ""
    for cta in range(tile.cluster):
        for i in range(count):
            share = f"[received+{4 * (cta * count + i)}]"
            if cta == 0:
                text += f"ld.shared.f32 sum{i}, {share};"
            else:
                text += f"ld.shared.f32 other, {share}; add.f32 sum{i}, sum{i}, other;"
    return text


@triton.constexpr_function
def moments_ptx(count, tile):
    """PTX that merges the received shares into registers sum0, sum1, ... Each CTA's `count` shares are the means of the
    tile's rows and then their variances. The merged mean is the mean of the means: the first plus the mean distance
    from it, which is 0 if all are equal. The merged variance is the mean of the variances plus the mean of (a CTA's
    mean - merged mean)^2. This holds because the CTAs have equally many columns."""
    text = ""
    inverse = f"0f{(128 - tile.cluster.bit_length()) << 23:08X}"  # 1 / cluster, a power of two
    for row in range(tile.rows):
        mean, variance = f"sum{row}", f"sum{tile.rows + row}"
        of_mean, of_variance = 4 * row, 4 * (tile.rows + row)
        ctas = [4 * count * cta for cta in range(tile.cluster)]
        text += f"mov.f32 {mean}, 0f00000000; mov.f32 {variance}, 0f00000000;"
        text += f"ld.shared.f32 first, [received+{of_mean}];"
        for at in ctas[1:]:
            text += f"ld.shared.f32 other, [received+{at + of_mean}]; sub.f32 other, other, first;"
            text += f"add.f32 {mean}, {mean}, other;"
        text += f"fma.rn.f32 {mean}, {mean}, {inverse}, first;"
        for at in ctas:
            text += f"ld.shared.f32 other, [received+{at + of_variance}]; add.f32 {variance}, {variance}, other;"
            text += f"ld.shared.f32 other, [received+{at + of_mean}]; sub.f32 other, other, {mean};"
            text += f"fma.rn.f32 {variance}, other, other, {variance};"
        text += f"mul.f32 {variance}, {variance}, {inverse};"
    return text


@triton.constexpr_function
def exchange_ptx(moments, count, tile):
    """PTX of one exchange.

    Operands: `count` results (sums or moments over the cluster); this CTA's `count` shares, the same in all its
    threads; the address of the exchange's memory; the number of exchanges before. Address and number come once for each
    row of the tile, because inline_asm_elementwise repeats scalars for every packed element.

    Thread 0 arrives at the CTA's mbarrier and expects the bytes of all shares. Thread t sends the shares to CTA t.
    Every thread waits for the mbarrier before it reads: the wait makes the shares visible. The buffer and the phase
    follow from the number: buffers alternate, and each has its phases in turn."""
    address, number = 2 * count, 2 * count + tile.rows
    sends = "".join(
        f"@sends st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [peer+{4 * i}], ${count + i}, [peer_full];"
        for i in range(count)
    )
    sums = moments_ptx(count, tile) if moments else sums_ptx(count, tile)
    gives = "".join(f"mov.f32 ${i}, sum{i};" for i in range(count))
    return f"""{{
        .reg .b32 full, received, which, phase, mine, peer, peer_full, rank, thread;
        .reg .f32 first, other, sum<{count}>;
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


@triton.constexpr_function
def exchange_constraints(count, tile):
    return ",".join(["=f"] * count + ["f"] * count + ["r"] * 2 * tile.rows)


@gluon.jit
def open_exchange(tile: tl.constexpr):
    """The address of the exchange's memory, which is static shared memory, with its mbarriers initialized. The CTA has
    arrived at the cluster barrier."""
    zero = gl.to_tensor(0)
    return tl.inline_asm_elementwise(open_exchange_ptx(tile), "=r,r", [zero], tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_cluster(address):
    """Wait at the cluster barrier. Returns `address`: users of the result cannot be moved before the wait."""
    ptx: tl.constexpr = "barrier.cluster.wait.acquire.aligned; mov.u32 $0, $1;"
    return tl.inline_asm_elementwise(ptx, "=r,r", [address], tl.int32, is_pure=False, pack=1)


@triton.jit
def exchange(shares, address, number, moments: tl.constexpr, tile: tl.constexpr):
    """Send one or two `shares` [rows, cluster] to all CTAs of the cluster, wait for theirs, and sum or merge them. A
    thread has the shares of all rows of the tile and packs them together, so it runs the PTX once."""
    count: tl.constexpr = len(shares) * tile.rows
    ptx: tl.constexpr = exchange_ptx(moments, count, tile)
    constraints: tl.constexpr = exchange_constraints(count, tile)
    if len(shares) == 1:
        operands = [shares[0], address, number]
        total = (tl.inline_asm_elementwise(ptx, constraints, operands, tl.float32, is_pure=False, pack=tile.rows),)
    else:
        operands = [shares[0], shares[1], address, number]
        total = tl.inline_asm_elementwise(
            ptx, constraints, operands, (tl.float32, tl.float32), is_pure=False, pack=tile.rows
        )
    return total
