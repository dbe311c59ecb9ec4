"""Finds norms that a model has written by hand in Dynamo's graph, before autograd.

    h = x.float()                                       once, or x in float32
    h = h - h.mean(-1, keepdim=True)                    LayerNorm alone
    x_hat = h * rsqrt((h * h).mean(-1, keepdim=True) + eps)
    y = x_hat.to(x.dtype) * weight                      with or without casts and weight; weight or offset + weight

Only norms whose result needs a gradient are found.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import SymFloat, SymInt, Tensor
from torch.fx import Node
from torch.nn import functional as F

from ..planner.norm_problem import FLOAT_DTYPES
from . import routing
from .folding import SIXTEEN_BITS

NAMES = ("add", "sub", "mul", "neg", "pow", "square", "mean", "rsqrt", "cat", "chunk", "transpose", "unsqueeze")
KINDS: dict[Any, str] = {
    **{getattr(where, name): name for name in NAMES for where in (operator, torch) if hasattr(where, name)},
    **{name: name for name in NAMES},
    **dict.fromkeys(("to", "float", "half", "bfloat16", "type", "type_as"), "cast"),
    operator.getitem: "getitem",
}
BUILT_IN = {  # the norm, the default eps and the arguments
    torch.rms_norm: ("rms", None, "input", "normalized_shape", "weight", "eps"),
    F.layer_norm: ("layer", 1e-5, "input", "normalized_shape", "weight", "bias", "eps"),
}


class Written(NamedTuple):
    """A norm from `x` to `y`."""

    norm: str
    x: Node
    y: Node
    weight: Node | None
    eps: float
    settings: dict[str, Any]  # of the op's form
    bias: Node | None = None


def find_built_in(node: Node) -> Written | None:
    """The norm of torch that a node calls, over the last dim."""
    norm, eps, *names = BUILT_IN.get(node.target, (None, None))
    given = dict.fromkeys(names) | {"eps": eps} | dict(zip(names, node.args, strict=False)) | node.kwargs
    x = given.get("input")
    if not norm or len(given["normalized_shape"]) != 1 or not _is_taken(x) or not value_of(node).requires_grad:
        return None
    return Written(norm, x, node, given["weight"], given["eps"], {}, given.get("bias"))


def find(rstd: Node) -> Written | None:
    """The norm that has this reciprocal square root."""
    power = [None] if kind_of(rstd) == "rsqrt" else terms_of(rstd, "pow")
    if power and power[-1] not in (None, -0.5) or len(rstd.users) != 1 or not power:
        return None
    variance, eps = _with_number(rstd.args[0])
    h = _squared(_mean(variance))
    if h is None or eps is None or not value_of(h).dtype.is_floating_point:
        return None
    difference = terms_of(h, "sub")
    wide = difference[0] if difference and _mean(difference[1]) is difference[0] else h
    x = _uncast(wide)
    (x_hat,) = rstd.users
    factor, norm = other_factor(rstd, x_hat), "rms" if wide is h else "layer"
    if value_of(wide).dtype not in (torch.float32, torch.float64):
        return None
    if not (_is_same(factor, h) or (wide is h and factor is x)) or not _is_taken(x):
        return None
    return _rest(Written(norm, x, x_hat, None, eps, {}))


def _rest(norm: Written) -> Written | None:
    """With the casts and the weight that follow."""
    x, y = value_of(norm.x), norm.y
    if value_of(y).dtype != (torch.float64 if x.dtype == torch.float64 else torch.float32):
        return None
    weight, offset, is_narrow = None, 0.0, False
    while len(y.users) == 1:
        (user,) = y.users
        factor = other_factor(y, user)
        if is_cast_to(user, x) and not is_narrow:
            y, is_narrow = user, weight is None
            if weight is not None:
                break
        elif weight is None and factor is not None and _is_row(factor, x):
            y, (weight, offset), rounds = user, _weight(factor), is_narrow and x.dtype in SIXTEEN_BITS
            is_narrow = False
        else:
            break
    settings = {"y_dtype": value_of(y).dtype}
    if weight is not None:
        settings |= {"weight_offset": offset, "rounds_x_hat": rounds}
    return norm._replace(y=y, weight=weight, settings=settings) if value_of(y).requires_grad else None


def _is_taken(x: Node) -> bool:
    value = value_of(x)
    return (
        isinstance(value, Tensor)
        and value.device.type in routing.DEVICE_TYPES
        and value.dtype in FLOAT_DTYPES
        and not isinstance(value.shape[-1], SymInt)
        and not any(_writes(user) for user in x.users)
    )


def _writes(user: Node) -> bool:
    name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
    return user.op.startswith("call") and (name.endswith("_") or (name.startswith("i") and name[1:] in NAMES))


def _weight(factor: Node) -> tuple[Node, float]:
    """(weight, offset) of weight or offset + weight. A sum in 16 bits is a weight itself."""
    if kind_of(factor) == "add" and value_of(factor).dtype not in SIXTEEN_BITS:
        weight, offset = _with_number(factor)
        if offset is not None:
            return _uncast(weight), offset
    return _uncast(factor), 0.0


def _is_same(node: Any, other: Node) -> bool:
    """Whether they are one node, or the same difference."""
    return node is other or (kind_of(other) == "sub" and terms_of(node, "sub") == terms_of(other, "sub"))


def _is_row(node: Node, x: Tensor) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.dim() == 1 and len(value) == x.shape[-1] and value.dtype in FLOAT_DTYPES


def kind_of(node: Any) -> str | None:
    return KINDS.get(node.target) if isinstance(node, Node) and node.op in ("call_function", "call_method") else None


def value_of(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else None


def is_cast_to(node: Any, like: Tensor) -> bool:
    """Whether it is a cast to a tensor's dtype, and no move to another device."""
    value = value_of(node)
    return kind_of(node) == "cast" and (value.dtype, value.device) == (like.dtype, like.device)


def terms_of(node: Any, kind: str) -> list | None:
    return list(node.args) if kind_of(node) == kind and len(node.args) == 2 and not node.kwargs else None


def other_factor(factor: Node, product: Node) -> Node | None:
    """The other factor of a product."""
    operands = terms_of(product, "mul")
    if operands is None or operands[0] is operands[1] or factor not in operands:
        return None
    return operands[operands[0] is factor]


def _with_number(node: Any) -> tuple[Any, float | None]:
    """The summands of a tensor and a number."""
    operands = terms_of(node, "add") or []
    numbers = [each if isinstance(each, (int, float)) else value_of(each) for each in operands]
    for at, number in enumerate(numbers):
        if isinstance(number, (int, float, SymFloat)):
            return operands[1 - at], float(number)
    return None, None


def _mean(node: Any) -> Any:
    """Of what the node is the mean over the last dim, which it keeps."""
    if kind_of(node) != "mean":
        return None
    given = dict(zip(("of", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    dim, value = given.get("dim"), value_of(given.get("of"))
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    is_last = isinstance(value, Tensor) and [each % value.dim() for each in dims] == [value.dim() - 1]
    return given["of"] if is_last and given.get("keepdim") and not given.get("dtype") else None


def _squared(node: Any) -> Node | None:
    factors = terms_of(node, "mul") or [None, node]
    if factors[0] is factors[1]:
        return factors[0]
    if kind_of(node) == "square":
        return node.args[0]
    power = terms_of(node, "pow")
    return power[0] if power and power[1] == 2 else None


def _uncast(node: Any) -> Any:
    """Behind a cast to a dtype that has all numbers of the one before."""
    source = node.args[0] if kind_of(node) == "cast" else None
    before, after = value_of(source), value_of(node)
    if not (isinstance(before, Tensor) and before.device == after.device and before.dtype in FLOAT_DTYPES):
        return node
    return source if torch.promote_types(before.dtype, after.dtype) == after.dtype else node
