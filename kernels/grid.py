"""A meeting of all CTAs of a grid that runs at once (a cooperative launch)."""

import triton
import triton.language as tl


@triton.jit
def meet(semaphore_ptr):
    """Return once every CTA has called this, with what each wrote before to be read by all."""
    # One word of global memory, zero at first, serves any number of grids one after the other. CTA 0 adds
    # 2^31 - (CTAs - 1) and each other CTA 1, so that the top bit turns over with the last to come and the other bits
    # are zero again. What the top bit was is read beforehand: the addition could return it, but not as soon.
    # The text is no global constant: Triton's keys of the kernels that call this would then depend on which of them was
    # looked up first, and what another process has compiled would not be found on disk.
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        """{
    .reg .pred leads, first, waits;
    .reg .b32 x, y, width, height, share, before, now;
    mov.u32 x, %tid.x;
    setp.eq.u32 leads, x, 0;
    @!leads bra MET;
    mov.u32 x, %ctaid.x;
    mov.u32 y, %ctaid.y;
    or.b32 x, x, y;
    setp.eq.u32 first, x, 0;
    mov.u32 width, %nctaid.x;
    mov.u32 height, %nctaid.y;
    mul.lo.u32 share, width, height;
    sub.u32 share, 0x80000001, share;
    selp.u32 share, share, 1, first;
    ld.relaxed.gpu.global.u32 before, [$1];
    red.release.gpu.global.add.u32 [$1], share;
WAIT:
    ld.acquire.gpu.global.u32 now, [$1];
    xor.b32 now, now, before;
    setp.ge.s32 waits, now, 0;
    @waits bra WAIT;
MET:
    mov.u32 $0, 0;
}""",
        "=r,l",
        [semaphore_ptr.to(tl.uint64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()
