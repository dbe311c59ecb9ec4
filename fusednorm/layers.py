"""Norms as layers for Hugging Face's `kernels`, which puts their forwards onto modules of a model.

A module's class names the layer that it takes. Models of transformers name "RMSNorm" and "RMSNormZeroCentered". Stock
LayerNorms take ours after kernels.replace_kernel_forward_from_hub(torch.nn.LayerNorm, "LayerNorm"). `kernels` wants a
layer to be a forward and two flags, nothing more. `python -m fusednorm hub FOLDER` writes the repository that it loads.

The output has the dtype of the input, also where the weight has another one.
"""

import torch
from torch import Tensor, nn

from . import functional


class LayerNorm(nn.Module):
    """The forward of torch.nn.LayerNorm."""

    can_torch_compile = True
    has_backward = True
    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """The forward of transformers' LlamaRMSNorm and its kin."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class RMSNormZeroCentered(nn.Module):
    """The forward of transformers' Qwen3_5RMSNorm, which multiplies by 1 + weight. The sum is taken in float32."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, 1 + self.weight.to(torch.float32), self.eps)
