"""A kernel that applies an activation of kernels/rowmath.py to each number, and what it may err by."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fusednorm.kernels import rowmath
from torch import Tensor

LARGEST = 87.0  # exp(-z) is a normal number of float32
STEPS = 1 << 14


@triton.jit
def apply(z_ptr, found_ptr, activation: tl.constexpr, size: tl.constexpr):
    at = tl.arange(0, size)
    z = tl.load(z_ptr + at)
    if activation == "tanh":
        found, _ = rowmath.tanh(z)
    else:
        found, _ = rowmath.sigmoid(z.to(tl.float32), z.dtype)
    tl.store(found_ptr + at, found)


def errors_of(activation: str, z: Tensor, exact: Tensor) -> Tensor:
    """Relative to the exact numbers."""
    found = torch.empty(z.shape, dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
    apply[(1,)](z, found, activation, z.numel())
    return (found.double() - exact) / exact


def error_of(activation: str, z: Tensor, exact: Tensor) -> float:
    return float(errors_of(activation, z, exact).abs().max())


def assert_activations_keep_their_digits(device: str) -> None:
    z = torch.linspace(-LARGEST, LARGEST, STEPS, device=device)
    assert error_of("sigmoid", z, torch.sigmoid(z.double())) < 5e-7
    positive = torch.linspace(0, 8, STEPS, device=device)  # exp's own error is halved at least
    assert errors_of("sigmoid", positive, torch.sigmoid(positive.double())).square().mean().sqrt() < 2**-24
    of_16_bits = z.bfloat16()
    assert error_of("sigmoid", of_16_bits, torch.sigmoid(of_16_bits.double())) < LARGEST * 2**-24 + 6e-7
    for dtype, bound in ((torch.float32, 4e-7), (torch.float64, 1e-15)):
        sizes = torch.logspace(-30, 1, STEPS // 2, dtype=dtype, device=device)
        z = torch.cat([sizes, -sizes])
        assert error_of("tanh", z, torch.tanh(z.double())) < bound
