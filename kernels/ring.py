"""Rings in shared memory, through which a kernel's tiles come: num_stages stages, filled and emptied in turn.

TMA copies the tiles or, with tile.by_threads, the threads do (cp.async): each copies the elements that it will read. A
tile arrives in one or several copies. Each of them has an allocation of its own, so that the compiler sees no hazard
between them.

Hazards of a stage, in every kernel with a ring that TMA fills:
- Read after write: a copy writes through the asynchronous proxy. Every warp waits for the stage's mbarrier before it
  reads the stage, and the wait makes the copy's bytes visible.
- Write after read: a stage may be refilled when every warp has read it (an execution barrier) and a proxy fence
  follows the reads. Reads go through the generic proxy; without the fence the copy could overtake them. Where the same
  warps read and refill, the compiler inserts barrier and fence between the reads and the copy. Across warp partitions
  it inserts neither, so warp_specialized.release_stage has a fence, and an mbarrier in place of the barrier.
- Parity: a wait knows a phase by one bit. A warp that is a whole phase late would miss the phase that it waits for. No
  warp can be: the next phase completes with a copy that starts only after every warp has read the stage.

Where threads copy, the copies of a stage's chunk are a group of each thread's, and there is one proxy:
- Read after write: every thread waits for its group of copies, and the compiler puts a CTA barrier behind this wait, so
  that the bytes are visible to every warp.
- Write after read: the compiler puts a CTA barrier between the reads of a chunk and the copies that refill it.
- Counting: a wait counts the groups behind its own, so that each chunk of each refill is a group, even one without a
  copy.

Names that differ between Triton's releases come from gluon_compat.py.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .gluon_compat import async_copy, barrier_layout, barrier_shape, copy_elements, copy_to_shared
from .row_tile import aligned, elements, has_no_outside, row_major

# Follows the initialization of mbarriers, which is a write of the generic proxy, and shows it to the copies, which
# complete on the mbarriers through the asynchronous proxy.
fence_barriers = fence_async_shared
wait = mbarrier.wait
expect = mbarrier.expect  # is also the one arrival that a phase of a copy needs
arrive = mbarrier.arrive


class Rings(NamedTuple):
    """The rings of a kernel's tensors. Each field has a tuple for each tensor, with an element for each copy of a
    tile."""

    descs: tuple  # TMA descriptors; where threads copy, pointers
    slots: tuple  # shared memory, [num_stages] + the descriptor's block, or one chunk
    full: tuple  # num_stages mbarriers: a phase completes when the copy has arrived; none where threads copy
    strides: tuple  # elements between rows, of each tensor where threads copy
    cols: gl.tensor


class Position(NamedTuple):
    """The stage of a ring that is next, and the phase of its mbarrier to wait for."""

    stage: gl.tensor
    phase: gl.tensor


@gluon.jit
def next_position(at, tile: gl.constexpr, first: gl.constexpr = 0, step: gl.constexpr = 1):
    """The position `step` stages on. Stage `first` follows the last stage, in the next phase."""
    stage = at.stage + step
    phase = at.phase
    if stage == tile.num_stages + first:
        stage = first
        phase ^= 1
    return Position(stage, phase)


@gluon.jit
def allocate_blocks(desc, tile: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [tile.num_stages] + desc.block_type.shape, desc.layout)


@gluon.jit
def allocate_chunks(dtype: gl.constexpr, tile: gl.constexpr):
    return gl.allocate_shared_memory(dtype, [tile.num_stages, tile.rows, 1, tile.chunk], row_major(tile, 3, 1))


@gluon.jit
def allocate_slots(descs, tile: gl.constexpr):
    """The slots of one tensor's ring: for each copy of a tile, num_stages blocks of its descriptor, or chunks."""
    slots = ()
    for i in gl.static_range(len(descs)):
        of_copy = descs[i]
        if tile.by_threads:
            stages = allocate_chunks(of_copy.dtype.element_ty, tile)
        else:
            stages = allocate_blocks(of_copy, tile)
        slots = slots + (stages,)
    return slots


@gluon.jit
def allocate_barriers(tile: gl.constexpr):
    # One mbarrier for each stage, in every CTA of a cluster. A phase completes with one arrival and all bytes that the
    # arrival expects, if any. The caller must call `fence_barriers` before the first copy. One thread initializes; the
    # compiler puts a CTA barrier before other warps wait.
    shape: gl.constexpr = barrier_shape(tile.num_stages, tile.cluster)
    barriers = gl.allocate_shared_memory(gl.int64, shape, barrier_layout(tile.cluster))
    for stage in gl.static_range(tile.stages):
        mbarrier.init(barriers.index(stage), count=1)
    return barriers


@gluon.jit
def open_rings(descs, tile: gl.constexpr, strides=0, cols=0):
    """A ring for each tensor; descs has, for each tensor, the descriptors of its copies, or as many pointers.

    Each copy has mbarriers of its own: between copies that share one, the compiler would put a CTA barrier."""
    slots = ()
    full = ()
    for t in gl.static_range(len(descs)):
        slots = slots + (allocate_slots(descs[t], tile),)
        if not tile.by_threads:
            barriers = ()
            for _ in gl.static_range(len(descs[t])):
                barriers = barriers + (allocate_barriers(tile),)
            full = full + (barriers,)
    if not tile.by_threads:
        fence_barriers()  # shows the initialized mbarriers to the copies
    return Rings(descs, slots, full, strides, cols)


@gluon.jit
def close_barriers(rings, tile: gl.constexpr):
    """Invalidate the mbarriers, at a kernel's very end. This is their last use, so until then the compiler does not
    place anything else in their memory. A kernel that could need other shared memory after its row loop calls this:
    hardware may write to an mbarrier even after the wait for its last copy, and has overwritten sums that the compiler
    had placed there."""
    for t in gl.static_range(len(rings.full)):
        for i in gl.static_range(len(rings.full[t])):
            for stage in gl.static_range(tile.stages):
                mbarrier.invalidate(rings.full[t][i].index(stage))


@gluon.constexpr_function
def copy_bytes(desc, tile):
    """Bytes that one copy brings to each CTA of a cluster."""
    return desc.block_type.nbytes // tile.cluster


@gluon.jit
def fill_stage(rings, stage, corners, pred, tile: gl.constexpr):
    """Start the copies of a tile of every ring into `stage`, if `pred`. Otherwise the mbarriers' phase does not
    complete, and nobody may wait for it. corners has, for each copy, the coordinates of its block in the tensor, or
    its row.

    All mbarriers expect their bytes before the first copy starts; otherwise the compiler would put a CTA barrier
    between every two copies. Before the copies of a refill start, every warp must have waited for the stage's last tile
    and read it. The CTA barrier and the proxy fence that the compiler puts between the reads and the copies ensure
    this."""
    for t in gl.static_range(len(rings.full)):
        for i in gl.static_range(len(corners)):
            expect(rings.full[t][i].index(stage), copy_bytes(rings.descs[t][i], tile), pred=pred)
    if tile.by_threads:
        for i in gl.static_range(len(corners)):
            fill_chunk(rings, stage, corners[i], i, pred, tile)
    for t in gl.static_range(len(rings.full)):
        for i in gl.static_range(len(corners)):
            start_copy(rings.descs[t][i], corners[i], rings.full[t][i], rings.slots[t][i], stage, pred)


@gluon.jit
def start_copy(desc, corner, full, slots, stage, pred):
    """Start one copy into its slot of `stage`. The caller has made the mbarrier expect the bytes, and knows that all
    reads of the stage are done."""
    copy_to_shared(desc, corner, full.index(stage), slots.index(stage), pred=pred)


@gluon.jit
def fill_chunk(rings, stage, row, c: gl.constexpr, pred, tile: gl.constexpr):
    """Start the threads' copies of chunk c of the tile at `row` of every ring into `stage`; of zeros if not `pred`, for
    which nobody waits before `wait_for_all`. Every warp must have read the chunk that was there.

    There is no branch here: behind one, the compiler would add up dw and db, and hold what it adds until then."""
    for t in gl.static_range(len(rings.slots)):
        slot = rings.slots[t][c].index(stage)
        copy_chunk(rings.descs[t][c], row, rings.strides[t], rings.cols, slot, c, pred, tile)
    async_copy.commit_group()


@gluon.jit
def copy_chunk(ptr, row, stride, cols, slot, c: gl.constexpr, pred, tile: gl.constexpr):
    """Start each thread's copies of its elements of chunk c of the tile at `row`, zeros for those outside the tensor,
    and for all if not `pred`."""
    dtype: gl.constexpr = ptr.dtype.element_ty
    source, inside = elements(row, stride, aligned(cols, dtype), c, tile, dtype)
    if has_no_outside(c, tile):
        copy_elements(slot, ptr + source, mask=pred)
    else:
        copy_elements(slot, ptr + source, mask=inside & pred)


@gluon.jit
def wait_for_chunk(c: gl.constexpr, tile: gl.constexpr):
    """Wait for chunk c of the tile that was started first of those of all stages, where threads copy. Of the groups,
    those of its later chunks and of the other stages may be under way."""
    async_copy.wait_group(tile.num_stages * tile.num_chunks - 1 - c)


@gluon.jit
def wait_for_all(tile: gl.constexpr):
    """Where threads copy, wait for the copies of zeros, after which nothing writes to the ring. For a CTA's end."""
    if tile.by_threads:
        async_copy.wait_group(0)


@gluon.jit
def wait_for_tile(rings, at, tile: gl.constexpr):
    if tile.by_threads:
        wait_for_chunk(tile.num_chunks - 1, tile)
    # Every warp waits for every copy itself, so that the copies' bytes are visible to its reads.
    for t in gl.static_range(len(rings.full)):
        for i in gl.static_range(len(rings.full[t])):
            wait(rings.full[t][i].index(at.stage), at.phase)
