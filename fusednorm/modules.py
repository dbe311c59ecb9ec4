"""torch.nn.LayerNorm and torch.nn.RMSNorm on this package's kernels: the same parameters, state dicts and repr."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import functional


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm whose CUDA tensors run this package's kernels; arguments, shapes and dtypes are the same.

    Parameters may have another dtype than the input. A parameter that does not require grad costs the backward nothing.
    A scripted module (torch.jit.script) runs ATen's op, and can be loaded where this package is not.
    """

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm whose CUDA tensors run this package's kernels; arguments, shapes and dtypes are the same.

    The weight may have another dtype than the input. A weight that does not require grad costs the backward nothing.
    The output is contiguous, also that of a channels-last input, whose memory format torch.nn.RMSNorm keeps. A scripted
    module (torch.jit.script) runs ATen's op, and can be loaded where this package is not.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
