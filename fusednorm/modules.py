"""torch.nn.LayerNorm and torch.nn.RMSNorm on this package's kernels: same parameters, state dicts and repr. And modules
of the other forms, in their style.

The classes of the same names in layers.py are forwards alone, for Hugging Face's `kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor

from . import functional
from .forms import ACTIVATIONS, ROUNDINGS, STEPS, require_one_of
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
    require grad. Our kernels' output is contiguous; torch.nn.RMSNorm's has the memory format of a channels-last input,
    also on a CPU here. A scripted module (torch.jit.script) runs ATen's op and loads without this package.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return functional.rms_norm(x, self.normalized_shape, parameter(self, "weight"), self.eps)


quantize_as_stock(LayerNorm, torch.nn.LayerNorm)


class _FormNorm(torch.nn.Module):
    """A norm of another form, with the parameters of torch.nn.LayerNorm. The weight starts as what makes the factor
    weight_offset + weight one, and the bias as zero. weight and bias are the only keys of the state dict."""

    norm, form = "rms", "affine"  # of the op
    roundings: Sequence[str] = tuple(ROUNDINGS)
    shown = "eps", "weight_offset", "rounding"  # attributes that are in the repr
    default_eps: float | None = None
    has_bias = False

    def __init_subclass__(cls) -> None:
        cls.op = f"{cls.norm}_norm_fwd_{cls.form}"

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
        require_one_of(type(self).__name__, "rounding", rounding, self.roundings)
        shape = (normalized_shape,) if isinstance(normalized_shape, Integral) else tuple(normalized_shape)
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
    norm, default_eps, has_bias = "layer", 1e-5, True


class AffineRMSNorm(_FormNorm):
    """functional.affine_rms_norm as a module: RMSNorm with a weight_offset, a bias or another rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return self._run(x)


class AffineLayerNorm(_OfLayerNorm, AffineRMSNorm):
    """functional.affine_layer_norm as a module: LayerNorm with a weight_offset or another rounding."""


class AddRMSNorm(_FormNorm):
    """functional.add_rms_norm as a module, called with (x, residual): returns (y, new_residual)."""

    form = "of_sum"
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


class RMSNormAdd(_FormNorm):
    """functional.rms_norm_add as a module, called with (x, residual) or (x, residual, gate): returns residual + RMSNorm
    of x, times the gate or its gate_activation."""

    form = "plus_residual"
    shown = *_FormNorm.shown, "gate_activation"
    roundings = *ROUNDINGS, STEPS  # the last with a gate

    def __init__(self, *args, gate_activation: str | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.gate_activation = gate_activation

    def forward(self, x: Tensor, residual: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None:
            return self._run(x, (residual,))
        rows, weight, bias = (residual, gate, self.gate_activation), parameter(self, "weight"), parameter(self, "bias")
        last = self.normalized_shape, self.weight_offset, self.rounding
        return functional.behind(self.norm, x, *rows, weight, bias, self.eps, *last)


class LayerNormAdd(_OfLayerNorm, RMSNormAdd):
    """functional.layer_norm_add as a module, called with (x, residual) or (x, residual, gate): returns residual +
    LayerNorm of x, times the gate or its gate_activation."""


class AdaRMSNorm(AddRMSNorm):
    """functional.ada_rms_norm as a module, called with (x, scale, shift), a residual, a gate and an index: returns y,
    or with a residual (y, h). Without parameters by default."""

    roundings = *ROUNDINGS, STEPS

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = False,
        *args,
        **kwargs,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, *args, **kwargs)

    def forward(
        self,
        x: Tensor,
        scale: Tensor,
        shift: Tensor | None = None,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        index: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        rows, weight, bias = (residual, gate, scale, shift, index), parameter(self, "weight"), parameter(self, "bias")
        last = self.normalized_shape, self.weight_offset, self.rounding
        of_sum = self.residual_dtype, self.normalize_rounded
        return functional.ada(self.norm, x, *rows, weight, bias, self.eps, *of_sum, *last)


class AdaLayerNorm(_OfLayerNorm, AdaRMSNorm):
    """functional.ada_layer_norm as a module, called with (x, scale, shift), a residual, a gate and an index: returns y,
    or with a residual (y, h). Without parameters by default, as in DiT, FLUX and Wan."""


class RMSNormGated(_FormNorm):
    """functional.rms_norm_gated as a module, called with (x, gate). Loads the state dicts of the gated norms of
    transformers, FLA and mamba_ssm."""

    shown = *_FormNorm.shown, "activation", "norm_before_gate", "group_size"

    def __init__(
        self, *args, activation: str = "silu", norm_before_gate: bool = True, group_size: int | None = None, **kwargs
    ) -> None:
        super().__init__(*args, **kwargs)
        require_one_of(type(self).__name__, "activation", activation, ACTIVATIONS)
        self.activation, self.norm_before_gate, self.group_size = activation, norm_before_gate, group_size
        cols, name = math.prod(self.normalized_shape), type(self).__name__
        self.groups = 1 if group_size is None else functional.groups_of(name, group_size, cols)
        self.op = functional.gated_op(self.norm, norm_before_gate)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self._run(x, (gate,), (self.activation, self.groups))


class LayerNormGated(_OfLayerNorm, RMSNormGated):
    """functional.layer_norm_gated as a module, called with (x, gate)."""
