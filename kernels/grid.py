"""A meeting of all CTAs of a grid that runs at once (a cooperative launch)."""

import triton
import triton.language as tl

# One word of global memory, zero at first, serves any number of grids one after the other. CTA 0 takes away the number
# of the others and each of these adds 1, so that it is zero again with the last to come, and not before: a CTA looks
# only when it has come itself. The texts below are no global constants: Triton's keys of the kernels that call them
# would then depend on which was looked up first, and what another process has compiled would not be found on disk.


@triton.jit
def ptx_on(semaphore_ptr, text: tl.constexpr):
    """Run PTX that knows the address of the word as $1."""
    tl.inline_asm_elementwise(text, "=r,l", [semaphore_ptr.to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def arrive(semaphore_ptr):
    """Let it be known that this CTA has come; what it wrote before is for all to read."""
    tl.debug_barrier()
    ptx_on(
        semaphore_ptr,
        """{
    .reg .pred leads, first;
    .reg .b32 x, y, width, height, share;
    mov.u32 x, %tid.x;
    setp.eq.u32 leads, x, 0;
    mov.u32 x, %ctaid.x;
    mov.u32 y, %ctaid.y;
    or.b32 x, x, y;
    setp.eq.u32 first, x, 0;
    mov.u32 width, %nctaid.x;
    mov.u32 height, %nctaid.y;
    mul.lo.u32 share, width, height;
    sub.u32 share, 1, share;
    selp.u32 share, share, 1, first;
    @leads red.release.gpu.global.add.u32 [$1], share;
    mov.u32 $0, 0;
}""",
    )


@triton.jit
def wait_for_all(semaphore_ptr):
    """Return once every CTA has come: this one has."""
    ptx_on(
        semaphore_ptr,
        """{
    .reg .pred leads, waits;
    .reg .b32 x, missing;
    mov.u32 x, %tid.x;
    setp.eq.u32 leads, x, 0;
    @!leads bra MET;
WAIT:
    ld.acquire.gpu.global.u32 missing, [$1];
    setp.ne.u32 waits, missing, 0;
    @waits bra WAIT;
MET:
    mov.u32 $0, 0;
}""",
    )
    tl.debug_barrier()
