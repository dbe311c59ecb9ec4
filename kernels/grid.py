"""Meetings of all CTAs of a grid that runs at once (a cooperative launch)."""

import triton
import triton.language as tl

# A semaphore is WORDS words of global memory. The CTAs of a grid come to one each, by groups, so that whoever needs
# what one group wrote waits for no other. The lower half of a word counts who has come, the upper half how often all
# had: the first of n CTAs of a group adds 2^16 - (n - 1), the others 1 each (of CTAs that run at once there are
# fewer). As words without a group are added 2^16 as well, all are equal before and after a grid, and serve any number
# of grids one after the other. The texts below are no global constants: Triton's keys of the kernels that call them
# would then depend on which was looked up first, and what another process has compiled would not be found on disk.

WORDS = 4
WORD_BYTES = 128  # from word to word: a cache line each


@triton.jit
def group_of(member, adjacent: tl.constexpr, groups: tl.constexpr):
    """Members are dealt out by so many adjacent ones, to one group after the other."""
    return member // adjacent % groups


@triton.jit
def group_size(group, members, adjacent: tl.constexpr, groups: tl.constexpr):
    """How many of so many members are in a group."""
    of_last_round = members % (adjacent * groups) - group * adjacent
    return members // (adjacent * groups) * adjacent + min(max(of_last_round, 0), adjacent)


@triton.jit
def groups_with_members(members, adjacent: tl.constexpr, groups: tl.constexpr):
    """The first so many groups have members."""
    return min((members + adjacent - 1) // adjacent, groups)


@triton.constexpr_function
def arrival():
    return f"""{{
    .reg .pred leads, first, unused;
    .reg .b32 thread, cta, share;
    .reg .b64 word;
    mov.u32 thread, %tid.x;
    mov.u32 cta, %ctaid.x;
    setp.eq.u32 leads, thread, 0;
    setp.eq.u32 first, cta, $3;
    sub.u32 share, 65537, $4;
    selp.u32 share, share, 1, first;
    mad.wide.u32 word, $2, {WORD_BYTES}, $1;
    @leads red.release.gpu.global.add.u32 [word], share;
    setp.eq.u32 unused, cta, 0;
    setp.lt.and.u32 unused, thread, {WORDS}, unused;
    setp.ge.and.u32 unused, thread, $5, unused;
    mad.wide.u32 word, thread, {WORD_BYTES}, $1;
    @unused red.relaxed.gpu.global.add.u32 [word], 65536;
    mov.u32 $0, 0;
}}"""


@triton.jit
def arrive(semaphore_ptr, group, first, ctas, groups):
    """Let it be known that this CTA has come; what it wrote before is for all to read. Its group is of so many CTAs,
    the first of which is CTA `first` of the grid; so many groups have CTAs."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        arrival(), "=r,l,r,r,r,r", [semaphore_ptr.to(tl.uint64), group, first, ctas, groups],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def meet(semaphore_ptr):
    """Return once every CTA of the grid is here."""
    arrive(semaphore_ptr, 0, 0, tl.num_programs(0), 1)
    tl.inline_asm_elementwise(
        """{
    .reg .pred leads, waits;
    .reg .b32 thread, count;
    mov.u32 thread, %tid.x;
    setp.eq.u32 leads, thread, 0;
    @!leads bra MET;
WAIT:
    ld.acquire.gpu.global.u32 count, [$1];
    and.b32 count, count, 65535;
    setp.ne.u32 waits, count, 0;
    @waits bra WAIT;
MET:
    mov.u32 $0, 0;
}""",
        "=r,l", [semaphore_ptr.to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()


@triton.constexpr_function
def waiting(groups):
    return f"""{{
    .reg .pred waits;
    .reg .b32 group, times, wanted;
    .reg .b64 word;
    mad.wide.u32 word, $2, {WORD_BYTES}, $1;
    ld.relaxed.gpu.global.u32 wanted, [word];
    mov.u32 group, %tid.x;
    shr.u32 group, group, 5;
    and.b32 group, group, {groups - 1};
    mad.wide.u32 word, group, {WORD_BYTES}, $1;
    add.u32 wanted, wanted, 65535;
    shr.u32 wanted, wanted, 16;
WAIT:
    ld.acquire.gpu.global.u32 times, [word];
    shr.u32 times, times, 16;
    setp.ne.u32 waits, times, wanted;
    @!waits bra MET;
    nanosleep.u32 40;
    bra WAIT;
MET:
    mov.u32 $0, 0;
}}"""


@triton.jit
def wait_for_group(semaphore_ptr, own, groups: tl.constexpr):
    """Let warp w go on once every CTA of group w % groups has come. How often they will have by then, the word of the
    own group says, to which this CTA has come: a count of zero means that all of it have, and that is counted
    already."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        waiting(groups), "=r,l,r", [semaphore_ptr.to(tl.uint64), own], dtype=tl.int32, is_pure=False, pack=1
    )
