"""What Triton's releases name differently in Gluon. The one file that asks which of the names is there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# The old name of the copy is still there in 3.9, where it raises; so the new one is asked for first.
copy_to_shared = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

# reinterpret(memory, dtype, shape, layout): shared memory seen as another dtype, shape or layout.
_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret

# Since 3.7 barriers are spread over a cluster like other shared memory: each CTA has one element of them. Before, a
# barrier was every CTA's own whatever its layout said.
SPREADS_BARRIERS = hasattr(mbarrier.MBarrierLayout, "multicta")


@gluon.constexpr_function
def barrier_shape(num_barriers, cluster):
    return [num_barriers, cluster if SPREADS_BARRIERS else 1]


@gluon.constexpr_function
def barrier_layout(cluster):
    """The layout of barriers where every CTA of the cluster has its own."""
    bases = [[1 << bit] for bit in range((cluster - 1).bit_length())]
    return mbarrier.MBarrierLayout(bases if SPREADS_BARRIERS else None)
