"""Guards: functions that say whether tensors are like others in type, dtype, shape, strides, device, requires_grad and
dispatch keys.

The dispatch keys include those of the active modes. A tensor that a torch.func transform, a dispatch mode or a negated
view intercepts is therefore not like a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from . import torch_compat


def make_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """guard(*others): whether each of the others, one per tensor, is like the tensor at its position, and no tensor
    occurs twice."""
    try:
        return in_cpp(tensors)
    except TypeError:  # this torch lacks TensorGuards, or its TensorGuards take other arguments
        return in_python(tensors)


def in_cpp(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """By the guards of torch.compile's graphs, in a tenth of in_python's time."""
    shapes, strides = [list(each.shape) for each in tensors], [list(each.stride()) for each in tensors]
    return torch_compat.TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


def in_python(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    kinds, layouts = [_kind(each) for each in tensors], [_layout(each) for each in tensors]

    def is_alike(*others: Tensor | None) -> bool:
        # Kinds first: a tensor of another kind may have no strides, and a tracer would record that they were read.
        alike = [_kind(each) for each in others] == kinds and [_layout(each) for each in others] == layouts
        return alike and len({id(each) for each in others}) == len(others)

    return is_alike


def _kind(tensor: Tensor | None) -> tuple | None:
    if not isinstance(tensor, Tensor):
        return None
    return type(tensor), torch_compat.dispatch_keys(tensor)


def _layout(tensor: Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad
