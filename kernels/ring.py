"""Rings in shared memory, through which TMA brings a kernel's tiles: num_stages stages, filled and emptied in turn.

A tile arrives in one or several copies. Each copy has memory of its own, so that the compiler sees no hazard between
copies.

Hazards of a stage, in every kernel with a ring:
- Read after write: a copy writes through the asynchronous proxy. Every warp waits for the stage's mbarrier before it
  reads the stage, and the wait makes the copy's bytes visible.
- Write after read: a stage may be refilled when every warp has read it (an execution barrier) and a proxy fence
  follows the reads. Reads go through the generic proxy; without the fence the copy could overtake them. Within one set
  of warps the compiler inserts both between the reads and the copy. It inserts no fence across warp partitions, so
  warp_specialized.release_stage has its own.
- Parity: a wait tells a phase from the next by one bit. A warp cannot be a whole phase late, since the next phase ends
  with a copy that starts after every warp has read the stage.

Names that differ between Triton's releases come from gluon_compat.py.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .gluon_compat import barrier_layout, barrier_shape, copy_to_shared

# Behind the initialization of mbarriers: shows it, a generic write, to the copies of the asynchronous proxy that
# complete on them.
fence_barriers = fence_async_shared
wait = mbarrier.wait
expect = mbarrier.expect
arrive = mbarrier.arrive


class Rings(NamedTuple):
    """The rings of a kernel's tensors: of each tensor a tuple with an element for each copy of a tile."""

    descs: tuple  # TMA descriptors
    slots: tuple  # shared memory, [num_stages] + the descriptor's block
    full: tuple  # num_stages mbarriers, which complete when the copy has arrived


class Position(NamedTuple):
    """The stage of a ring that is next, and the phase of its mbarrier to wait for."""

    stage: gl.tensor
    phase: gl.tensor


@gluon.jit
def next_position(at, tile: gl.constexpr, first: gl.constexpr = 0, step: gl.constexpr = 1):
    """The position `step` stages on. Behind the last stage comes stage `first`, in the next phase."""
    stage = at.stage + step
    phase = at.phase
    if stage == tile.num_stages + first:
        stage = first
        phase ^= 1
    return Position(stage, phase)


@gluon.jit
def allocate_slots(descs, tile: gl.constexpr):
    slots = ()
    for i in gl.static_range(len(descs)):
        of_copy = descs[i]
        stages = gl.allocate_shared_memory(of_copy.dtype, [tile.num_stages] + of_copy.block_type.shape, of_copy.layout)
        slots = slots + (stages,)
    return slots


@gluon.jit
def allocate_barriers(tile: gl.constexpr):
    # One mbarrier for each stage, in every CTA of a cluster. A phase completes with one arrival and all bytes that the
    # arrival expects. The caller must follow with `fence_barriers` before the first copy.
    shape: gl.constexpr = barrier_shape(tile.num_stages, tile.cluster)
    barriers = gl.allocate_shared_memory(gl.int64, shape, barrier_layout(tile.cluster))
    for stage in gl.static_range(tile.stages):
        mbarrier.init(barriers.index(stage), count=1)
    return barriers


@gluon.jit
def open_rings(descs, tile: gl.constexpr):
    """A ring for each tensor, by the descriptors of its copies. The fence shows the mbarriers' inits to the copies.

    Each copy has mbarriers of its own: with a common one, the compiler would put a CTA barrier between its copies."""
    slots = ()
    full = ()
    for t in gl.static_range(len(descs)):
        slots = slots + (allocate_slots(descs[t], tile),)
        barriers = ()
        for _ in gl.static_range(len(descs[t])):
            barriers = barriers + (allocate_barriers(tile),)
        full = full + (barriers,)
    fence_barriers()
    return Rings(descs, slots, full)


@gluon.jit
def close_barriers(rings, tile: gl.constexpr):
    """Invalidate the mbarriers, as their last use. A kernel that needs other shared memory after its row loop calls
    this at its very end, and thereby keeps the compiler from reusing their memory until then. Hardware may write to an
    mbarrier even after the wait for its last copy: it has overwritten row sums that were placed there."""
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
    """Start the copies of a tile of every ring into `stage`, if `pred`. corners has, for each copy, the coordinates of
    its block in the tensor.

    All mbarriers expect their bytes before the first copy starts; otherwise the compiler would put a CTA barrier
    between every two copies. The stage must have been read, and every warp must have seen the phase that its mbarriers
    leave: on a refill, the CTA barrier and the proxy fence that the compiler puts before the copies see to both."""
    for t in gl.static_range(len(rings.full)):
        for i in gl.static_range(len(corners)):
            expect(rings.full[t][i].index(stage), copy_bytes(rings.descs[t][i], tile), pred=pred)
    for t in gl.static_range(len(rings.full)):
        for i in gl.static_range(len(corners)):
            start_copy(rings.descs[t][i], corners[i], rings.full[t][i], rings.slots[t][i], stage, pred)


@gluon.jit
def start_copy(desc, corner, full, slots, stage, pred):
    """Start one copy into its slot of `stage`. The caller has made the mbarrier expect the bytes, and knows that all
    reads of the stage are done."""
    copy_to_shared(desc, corner, full.index(stage), slots.index(stage), pred=pred)


@gluon.jit
def wait_for_tile(rings, at):
    # Every warp waits for every copy itself, so that the copies' bytes are visible to its reads.
    for t in gl.static_range(len(rings.full)):
        for i in gl.static_range(len(rings.full[t])):
            wait(rings.full[t][i].index(at.stage), at.phase)
