"""LayerNorm's forward that rounds x_hat, where many products of it and the weight are ties but for the bias."""

from __future__ import annotations

import torch
from cases import BF16, FP16
from simulator import arithmetic
from torch import Tensor

from fusednorm.operands import Operands, operands_of

TO_16_BITS = {BF16: arithmetic.to_bf16, FP16: arithmetic.to_f16}


def operands_with_ties(rows: int, cols: int, dtype: torch.dtype, device: str = "cpu") -> Operands:
    """Every fourth x_hat or so times 1.5 is a tie; the bias is lost in float32."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0), dtype=dtype)
    bias = torch.tensor([2.0**-24, -(2.0**-24)], dtype=dtype).repeat(cols // 2)
    given = {"x": x, "weight": torch.full((cols,), 1.5, dtype=dtype), "bias": bias}
    given = {name: each.to(device) for name, each in given.items()} | {"normalized_shape": (cols,), "eps": 1e-6}
    return operands_of("layer_norm_fwd_affine", (), given | {"rounds_x_hat": True})


def check_that_y_is_rounded_once(operands: Operands, outputs: tuple[Tensor, ...]) -> None:
    y, mean, rstd = (each.cpu() for each in outputs)
    x, weight, bias = (each.cpu() for each in (operands.x, operands.weight, operands.bias))
    u = ((x.float() - mean) * rstd).to(x.dtype).double() * weight.double() + bias.double()
    assert torch.equal(y, torch.from_numpy(TO_16_BITS[x.dtype](u.numpy())).view(x.dtype))
    assert (y != u.float().to(x.dtype)).sum() > y.numel() / 100
