"""layer_norm and rms_norm with the signatures of torch.nn.functional.

CUDA tensors run this package's kernels, under autocast in the dtype that the installed torch would choose; all other
tensors are handed on to torch.nn.functional.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import autograd, torch_compat


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.layer_norm: normalize the trailing dims of input that make up normalized_shape.

    Takes float16, bfloat16, float32 and float64, weight and bias each in its own dtype; returns input's shape and
    dtype (float32 under CUDA autocast), contiguous. Raises RuntimeError as torch.ops.fusednorm.layer_norm_fwd does.
    """
    if not input.is_cuda:
        return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)
    if torch.is_autocast_enabled("cuda") and _AUTOCASTS_LAYER_NORM:
        input, weight, bias = _upcast(input), _upcast(weight), _upcast(bias)
    return autograd.layer_norm(input, normalized_shape, weight, bias, eps)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """torch.nn.functional.rms_norm: scale the trailing dims of input that make up normalized_shape to unit mean square.

    Takes float16, bfloat16, float32 and float64, weight in its own dtype; eps None is the machine epsilon of float32
    (float64 for float64 input). Returns input's shape and dtype (under CUDA autocast float32 where the installed torch
    does), contiguous. Raises RuntimeError as torch.ops.fusednorm.rms_norm_fwd does.
    """
    if not input.is_cuda:
        return torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)
    if torch.is_autocast_enabled("cuda") and _AUTOCASTS_RMS_NORM:
        input, weight = _upcast(input), _upcast(weight)
    return autograd.rms_norm(input, normalized_shape, weight, eps)


_AUTOCASTS_LAYER_NORM = torch_compat.has_autocast_rule("aten::layer_norm")
_AUTOCASTS_RMS_NORM = torch_compat.has_autocast_rule("aten::rms_norm")


def _upcast(tensor: Tensor | None) -> Tensor | None:
    """What autocast's float32 rule does to an argument: 16-bit floats become float32, all else stays."""
    return tensor.float() if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16) else tensor
