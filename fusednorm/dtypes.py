"""What the package knows of dtypes: which there are, and in which one it computes."""

from __future__ import annotations

import torch

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}  # Triton's
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
FLOAT_DTYPES = frozenset(DTYPE_NAMES)


def bytes_of(dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else dtype.itemsize


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Dtype of statistics, accumulators and partials for row tensors of these dtypes: float64 if one is, else float32.
    """
    return torch.float64 if torch.float64 in dtypes else torch.float32


def is_float32_sum(acc: torch.dtype, *outputs: torch.dtype | bool | None) -> bool:
    """Whether a sum in the dtype `acc` is float32, and one of the outputs, which are dtypes or not wanted, is no
    narrower: the rounding errors of the sum are then all that this output has."""
    return acc == torch.float32 and any(each and each.itemsize >= acc.itemsize for each in outputs)
