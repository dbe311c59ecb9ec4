"""Which tensors this package's kernels run on: those of CUDA GPUs. Whoever has to know asks here.

Tests that have no GPU make it CPU tensors as well:

    with kernels_on("cpu"):
        fusednorm.functional.layer_norm(x, (8,))  # reaches torch.ops.fusednorm, and through it Triton

Inside, ops, functionals, modules and `explain` do with CPU tensors what they do with CUDA tensors. That needs something
that runs kernels there, such as Triton's interpreter (interpreter.py); under `force("reference")` nothing else is
needed, because ATen then stands in for the kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

_cpu_blocks = 0  # of kernels_on("cpu") that are open, in whatever thread


def runs_kernels(tensor: Tensor | None) -> bool:
    """Whether our kernels run on this tensor; elsewhere ATen's do. On None, which ops may get, nothing runs."""
    return tensor is not None and (tensor.is_cuda or (_cpu_blocks > 0 and tensor.is_cpu))


@contextlib.contextmanager
def kernels_on(device_type: str) -> Iterator[None]:
    """Inside, our kernels run on tensors of this device type too, which is "cpu". For tests; holds for all threads,
    autograd's included. May be nested. Raises ValueError for another type."""
    global _cpu_blocks
    if device_type != "cpu":
        raise ValueError(f"kernels_on: device_type must be 'cpu', got {device_type!r}")
    _cpu_blocks += 1
    try:
        yield
    finally:
        _cpu_blocks -= 1
