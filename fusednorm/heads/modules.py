"""QKNorm: qk_norm as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from ..forms import ROUNDINGS, require_one_of
from ..host.torch_compat import parameter
from .functional import NAMES, NORMS, Rotary, qk_norm


class QKNorm(torch.nn.Module):
    """qk_norm as a module, called with (q, k) or (q, k, (cos, sin)): returns (q, k).

    shape is the shape of the weights, an int or a tuple: D; or one for q and one for k, as a list: [(H * D,),
    (kv_heads * D,)] normalizes over all heads. Weights start as what makes the factor weight_offset + weight one, and
    biases as zero. q_weight, k_weight, q_bias and k_bias are the only keys of the state dict.
    """

    settings = "eps", "norm", "rotary_dim", "rotary_interleaved", "norm_first", "heads_dim", "weight_offset", "rounding"

    def __init__(
        self,
        shape: int | tuple[int, ...] | list[int | tuple[int, ...]],
        eps: float | None = None,
        elementwise_affine: bool = True,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: str = "rms",
        rotary_dim: int | None = None,
        rotary_interleaved: bool = False,
        norm_first: bool = True,
        heads_dim: int = -2,
        weight_offset: float = 0.0,
        rounding: str = "once",
    ) -> None:
        super().__init__()
        require_one_of("QKNorm", "norm", norm, NORMS)
        require_one_of("QKNorm", "rounding", rounding, ROUNDINGS)
        self.eps, self.norm, self.elementwise_affine = eps, norm, elementwise_affine
        self.rotary_dim, self.rotary_interleaved = rotary_dim, rotary_interleaved
        self.norm_first, self.heads_dim = norm_first, heads_dim
        self.weight_offset, self.rounding = float(weight_offset), rounding
        shapes = shape if isinstance(shape, list) else [shape, shape]
        if len(shapes) != 2:
            raise ValueError(f"QKNorm: a list of shapes must have one for q and one for k, got {shape!r}")
        for of, size in zip("qk", shapes, strict=True):
            for name, wanted in ((f"{of}_weight", elementwise_affine), (f"{of}_bias", elementwise_affine and bias)):
                made = torch.nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if wanted else None
                self.register_parameter(name, made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, each in self.named_parameters(recurse=False):
            torch.nn.init.constant_(each, 1.0 - self.weight_offset if name.endswith("weight") else 0.0)

    def forward(self, q: Tensor, k: Tensor, rotary: Rotary | None = None) -> tuple[Tensor, Tensor]:
        q_weight, k_weight, q_bias, k_bias = [parameter(self, name) for name in NAMES[2:]]
        return qk_norm(
            q, k, q_weight, k_weight, self.eps, q_bias=q_bias, k_bias=k_bias, norm=self.norm, rotary=rotary,
            rotary_dim=self.rotary_dim, rotary_interleaved=self.rotary_interleaved, norm_first=self.norm_first,
            heads_dim=self.heads_dim, weight_offset=self.weight_offset, rounding=self.rounding,
        )  # fmt: skip

    def extra_repr(self) -> str:
        shapes = "" if self.q_weight is None else f"{tuple(self.q_weight.shape)}, {tuple(self.k_weight.shape)}, "
        return shapes + ", ".join(f"{name}={getattr(self, name)!r}" for name in self.settings)
