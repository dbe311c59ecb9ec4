"""torch.nn.LayerNorm and torch.nn.RMSNorm on this package's kernels: same parameters, state dicts and repr.

The classes of the same names in layers.py are forwards alone, for Hugging Face's `kernels`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import functional
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
