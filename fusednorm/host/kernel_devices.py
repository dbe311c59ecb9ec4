"""Which tensors this package's kernels run on: CUDA tensors. All code that needs to know asks here.

Tests without a GPU add CPU tensors by `kernels_on`. Something must then run the kernels on these, such as Triton's
interpreter (interpreter.py). Under `force("reference")` ATen does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

_cpu_blocks = 0  # open blocks of kernels_on("cpu"), over all threads


def runs_kernels(tensor: Tensor | None) -> bool:
    """Whether our kernels run on this tensor. If not, ATen's do. Ops may pass None; no kernel runs on it."""
    return tensor is not None and (tensor.is_cuda or (_cpu_blocks > 0 and tensor.is_cpu))


@contextlib.contextmanager
def kernels_on(device_type: str) -> Iterator[None]:
    """Run our kernels on tensors of this device type too, inside the block. For tests. device_type must be "cpu"; any
    other raises ValueError. Applies to all threads, autograd's included. Blocks may be nested."""
    global _cpu_blocks
    if device_type != "cpu":
        raise ValueError(f"kernels_on: device_type must be 'cpu', got {device_type!r}")
    _cpu_blocks += 1
    try:
        yield
    finally:
        _cpu_blocks -= 1
