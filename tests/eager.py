"""The override of ATen's norm ops, with a record of its calls. On CPU tensors its kernels run in the interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from fusednorm import reference
from fusednorm.integrations import aten


@contextlib.contextmanager
def aten_looks_like_cuda() -> Iterator[None]:
    """ATen has a fused RMSNorm for CUDA tensors only; inside, CPU tensors have one as well.

    Its forward is ATen's own, its backward this package's reference formula.
    """
    forward = torch.library.get_kernel("aten::_fused_rms_norm", "CPU")

    def backward(grad_out, x, normalized_shape, rstd, weight, output_mask):
        mask = (*output_mask, False)
        return reference.backward_formula(grad_out, x, normalized_shape, None, rstd, weight, None, mask)[:2]

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", forward.call_boxed, "CPU", with_keyset=True)
    library.impl("_fused_rms_norm_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


class Calls:
    """The calls of ATen's norm ops while the override is on, as (op, whether our kernels took it)."""

    def __init__(self) -> None:
        self.all: list[tuple[str, bool]] = []

    @property
    def taken(self) -> list[str]:
        return [name for name, taken in self.all if taken]

    def watch(self, name: str, kernel):
        def watched(*args):
            outputs = kernel(*args)
            self.all.append((name, outputs is not None))
            return outputs

        return watched


@contextlib.contextmanager
def watched_kernels() -> Iterator[Calls]:
    """Overrides that are installed inside record their calls."""
    calls = Calls()
    watched = {name: calls.watch(name, kernel) for name, kernel in aten.KERNELS.items()}
    with mock.patch.dict(aten.KERNELS, watched):
        yield calls


@contextlib.contextmanager
def override(key: str = "CPU") -> Iterator[Calls]:
    """Inside, the override is on for the tensors of one dispatch key."""
    with watched_kernels() as calls:
        overrides = aten.Overrides(key)
        try:
            yield calls
        finally:
            overrides.remove()
