"""torch.nn.LayerNorm and torch.nn.RMSNorm on this package's kernels: same parameters, state dicts and repr. And modules
of the other forms, in their style.

The classes of the same names in layers.py are forwards alone, for Hugging Face's `kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import functional
from .forms import ROUNDINGS
from .host.torch_compat import parameter, quantize_as_stock


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm that runs this package's kernels on CUDA tensors. Arguments, shapes and dtypes are the same.

    Parameters may have another dtype than the input. The backward computes no gradient for a parameter that does not
    require grad. A scripted module (torch.jit.script) runs ATen's op and loads without this package.
    """

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm that runs this package's kernels on CUDA tensors. Arguments, shapes and dtypes are the same.

    The weight may have another dtype than the input. The backward computes no gradient for a weight that does not
    require grad. The output is always contiguous; torch.nn.RMSNorm instead keeps the memory format of a channels-last
    input. A scripted module (torch.jit.script) runs ATen's op and loads without this package.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return functional.rms_norm(x, self.normalized_shape, parameter(self, "weight"), self.eps)


quantize_as_stock(LayerNorm, torch.nn.LayerNorm)


class _FormNorm(torch.nn.Module):
    """A norm of another form, with the parameters of torch.nn.LayerNorm. The weight starts as what makes the factor
    weight_offset + weight one, and the bias as zero. weight and bias are the only keys of the state dict."""

    op: str
    shown = "eps", "weight_offset", "rounding"  # attributes that are in the repr
    default_eps: float | None = None
    has_bias = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        bias: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        rounding: str = "once",
    ) -> None:
        super().__init__()
        if rounding not in ROUNDINGS:
            known = ", ".join(ROUNDINGS)
            raise ValueError(f"{type(self).__name__}: rounding must be one of {known}, got {rounding!r}")
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.elementwise_affine = shape, elementwise_affine
        self.eps = self.default_eps if eps is None else eps
        self.weight_offset, self.rounding = float(weight_offset), rounding
        wants = elementwise_affine, elementwise_affine and (self.has_bias if bias is None else bias)
        for name, wanted in zip(("weight", "bias"), wants, strict=True):
            made = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(name, made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def _run(self, x: Tensor, rows: tuple[Tensor | None, ...] = (), more: tuple = ()):
        weight, bias, shape = parameter(self, "weight"), parameter(self, "bias"), self.normalized_shape
        return functional.of_form(
            self.op, x, rows, weight, bias, self.eps, shape, self.weight_offset, self.rounding, more
        )

    def extra_repr(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.shown)
        return f"{self.normalized_shape}, {settings}, elementwise_affine={self.elementwise_affine}"


class _OfLayerNorm:
    default_eps, has_bias = 1e-5, True


class AffineRMSNorm(_FormNorm):
    """functional.affine_rms_norm as a module: RMSNorm with a weight_offset, a bias or another rounding."""

    op = "rms_norm_fwd_affine"

    def forward(self, x: Tensor) -> Tensor:
        return self._run(x)


class AffineLayerNorm(_OfLayerNorm, AffineRMSNorm):
    """functional.affine_layer_norm as a module: LayerNorm with a weight_offset or another rounding."""

    op = "layer_norm_fwd_affine"


class AddRMSNorm(_FormNorm):
    """functional.add_rms_norm as a module, called with (x, residual): returns (y, new_residual)."""

    op = "rms_norm_fwd_of_sum"
    shown = *_FormNorm.shown, "residual_dtype", "normalize_rounded"

    def __init__(
        self, *args, residual_dtype: torch.dtype | None = None, normalize_rounded: bool = True, **kwargs
    ) -> None:
        super().__init__(*args, **kwargs)
        self.residual_dtype, self.normalize_rounded = residual_dtype, normalize_rounded

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._run(x, (residual,), (self.normalize_rounded, self.residual_dtype))


class AddLayerNorm(_OfLayerNorm, AddRMSNorm):
    """functional.add_layer_norm as a module, called with (x, residual): returns (y, new_residual)."""

    op = "layer_norm_fwd_of_sum"


class RMSNormAdd(_FormNorm):
    """functional.rms_norm_add as a module, called with (x, residual): returns residual + RMSNorm of x."""

    op = "rms_norm_fwd_plus_residual"

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._run(x, (residual,))


class LayerNormAdd(_OfLayerNorm, RMSNormAdd):
    """functional.layer_norm_add as a module, called with (x, residual): returns residual + LayerNorm of x."""

    op = "layer_norm_fwd_plus_residual"
