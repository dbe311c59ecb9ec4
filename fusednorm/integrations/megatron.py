"""Megatron-Core on this package's norms: a norm for its specs, and a function that puts this norm into a spec.

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(config, fusednorm.integrations.megatron.with_norms(spec), ...)

A norm that TransformerEngine fuses with the linear layer behind it is part of that layer, and stays.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from .. import modules

NORMS = {"LayerNorm": modules.LayerNorm, "RMSNorm": modules.RMSNorm}
ZERO_CENTERED = {"LayerNorm": modules.AffineLayerNorm, "RMSNorm": modules.AffineRMSNorm}
WITH_RESIDUAL = {"LayerNorm": modules.AddLayerNorm, "RMSNorm": modules.AddRMSNorm}
MEGATRONS = (FusedLayerNorm, TENorm, WrappedTorchNorm)

Spec = TypeVar("Spec")


class Norm:
    """Makes a fusednorm.LayerNorm or RMSNorm, as config.normalization says. It is a class because a spec must name one.

    Under config.layernorm_zero_centered_gamma the norm is an AffineLayerNorm or AffineRMSNorm that multiplies by
    1 + weight, in float32. With has_residual it is an AddLayerNorm or AddRMSNorm, which returns its input as well: its
    backward adds the gradients of both outputs in one kernel. Under config.sequence_parallel the parameters are marked,
    so that Megatron adds up their gradients over the ranks of tensor parallelism. Raises ValueError if the config asks
    for what these norms do not do.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, has_residual: bool = False, **_: Any
    ) -> nn.Module:
        if config.normalization not in NORMS:
            raise ValueError(f"fusednorm: normalization must be one of {sorted(NORMS)}, got {config.normalization!r}")
        if config.memory_efficient_layer_norm:
            raise ValueError("fusednorm: memory_efficient_layer_norm must be False, got True; Apex's norms have it")
        if has_residual or config.layernorm_zero_centered_gamma:
            kind = (WITH_RESIDUAL if has_residual else ZERO_CENTERED)[config.normalization]
            norm = kind(hidden_size, eps, weight_offset=float(config.layernorm_zero_centered_gamma))
        else:
            norm = NORMS[config.normalization](hidden_size, eps=eps)
        norm.returns_residual = has_residual  # releases after 0.16.1 ask
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class NormWithResidual:
    """Norm with has_residual, for a spec."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Module:
        return Norm(*args, has_residual=True, **kwargs)


class SpecProvider(LocalSpecProvider):
    """Megatron's modules with our norms, for functions that take a backend."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return NormWithResidual if has_residual else Norm


def with_norms(spec: Spec) -> Spec:
    """A copy of the spec of a layer or a block, with our norm in place of each of Megatron's."""
    if spec in MEGATRONS:
        return Norm
    if isinstance(spec, list):
        return [with_norms(each) for each in spec]
    if is_dataclass(spec) and not isinstance(spec, type):
        return replace(spec, **{each.name: with_norms(getattr(spec, each.name)) for each in fields(spec)})
    return spec
