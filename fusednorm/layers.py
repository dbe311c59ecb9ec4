"""Norms as layers for Hugging Face's `kernels`, which replaces forwards of a model's modules by those of layers.

Nobody constructs these classes: the modules of the same names that users construct are in modules.py. `kernels` finds
this module and its classes by name. The class of a model's module names its layer: transformers' models name "RMSNorm",
"RMSNormZeroCentered" and "RMSNormGated", and stock LayerNorms name ours after
kernels.replace_kernel_forward_from_hub(torch.nn.LayerNorm, "LayerNorm"). `kernels` demands that a layer is a forward
and two flags, nothing more. `python -m fusednorm hub FOLDER` writes the repository that it loads.

The output has the dtype of the input, even if the weight has another.
"""

from torch import Tensor, nn

from . import functional
from .host.torch_compat import parameter


class LayerNorm(nn.Module):
    """The forward of torch.nn.LayerNorm."""

    can_torch_compile = True
    has_backward = True
    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        return functional.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.Module):
    """The forward of transformers' LlamaRMSNorm and of all RMSNorms like it."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = parameter(self, "weight")
        return functional.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


class RMSNormZeroCentered(nn.Module):
    """The forward of transformers' Qwen3_5RMSNorm, which multiplies by 1 + weight. The sum is taken in float32."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        weight = parameter(self, "weight")
        return functional.affine_rms_norm(x, weight, None, self.eps, weight_offset=1.0)


class RMSNormGated(nn.Module):
    """The forward of transformers' Qwen3NextRMSNormGated and KimiLinearRMSNormGated: the norm, times silu or sigmoid of
    the gate. It is rounded once, as in FLA; classes that also round before the weight differ by these roundings."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor
    variance_epsilon: float
    activation: str

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        weight, activation = parameter(self, "weight"), "silu" if self.activation == "swish" else self.activation
        return functional.rms_norm_gated(
            hidden_states, gate, weight, None, self.variance_epsilon, activation=activation
        )
