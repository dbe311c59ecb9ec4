"""Names in Gluon that differ between Triton's releases. No other file asks which of them exists."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# The new name first: in 3.9 the old one still exists, but raises.
copy_to_shared = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_elements = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

# reinterpret(memory, dtype, shape, layout): the same shared memory with another dtype, shape or layout.
_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret

# Since 3.7 mbarriers are spread over a cluster like other shared memory: each CTA has one element of them. In older
# releases every CTA has mbarriers of its own, whatever their layout says.
SPREADS_BARRIERS = hasattr(mbarrier.MBarrierLayout, "multicta")

# Since 3.9 Triton puts a cluster barrier before the end of a kernel that is launched by clusters. The release that
# brought this barrier also brought `async_load`.
MEETS_AT_THE_END = hasattr(tma, "async_load")


@gluon.constexpr_function
def barrier_shape(num_barriers, cluster):
    return [num_barriers, cluster if SPREADS_BARRIERS else 1]


@gluon.constexpr_function
def barrier_layout(cluster):
    """Layout of mbarriers. Every CTA of the cluster has its own."""
    bases = [[1 << bit] for bit in range((cluster - 1).bit_length())]
    return mbarrier.MBarrierLayout(bases if SPREADS_BARRIERS else None)
