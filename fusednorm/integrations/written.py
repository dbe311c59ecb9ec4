"""Finds norms that a model has written by hand in Dynamo's graph, before autograd.

    h = x.float()                                       once, or x in float32
    h = h - h.mean(-1, keepdim=True)                    LayerNorm alone
    x_hat = h * rsqrt((h * h).mean(-1, keepdim=True) + eps)
    y = x_hat.to(x.dtype) * weight                      with or without casts and weight; weight or offset + weight

Only norms whose result needs a gradient are found. Any of these values may be computed again where it is used.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import SymFloat, SymInt, Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._inductor import config
from torch.fx import Graph, Node
from torch.nn import functional as F
from torch.utils import _pytree

from ..dtypes import FLOAT_DTYPES, SIXTEEN_BITS
from ..namespace import TORCH_OPS
from ..operands import NORMS
from . import routing
from .edits import arguments_of
from .paying import reached

NAMES = ("add", "sub", "mul", "neg", "pow", "square", "mean", "rsqrt", "cat", "chunk", "transpose", "unsqueeze",
         "addcmul", "view", "reshape", "unflatten", "flatten", "unbind", "stack", "empty_like")  # fmt: skip
VIEWS = "view", "reshape", "unflatten", "flatten"
KINDS: dict[Any, str] = {
    **{getattr(where, name): name for name in NAMES for where in (operator, torch) if hasattr(where, name)},
    **{name: name for name in NAMES},
    **dict.fromkeys(("to", "float", "half", "bfloat16", "type", "type_as"), "cast"),
    operator.getitem: "getitem",
}
REPEATED = ("cast", "sub", "mean", "getitem", "unsqueeze")  # what models may compute again where they use it
IN_PLACE = {name for name in dir(operator) if name[0] == "i" and hasattr(operator, name[1:])} | {"setitem"}
WRITTEN = "out", "running_mean", "running_var", "kwargs"  # by functions of torch, the last by a Triton kernel
BUILT_IN = {  # the norm, the default eps and the arguments, whose first one torch calls input
    torch.rms_norm: ("rms", None, "x", "normalized_shape", "weight", "eps"),
    F.layer_norm: ("layer", 1e-5, "x", "normalized_shape", "weight", "bias", "eps"),
}
OURS = {getattr(TORCH_OPS, f"{norm}_norm_fwd_affine").default: norm for norm in NORMS}


class Written(NamedTuple):
    """A norm from `x` to `y`."""

    norm: str
    x: Node
    y: Node
    weight: Node | None
    eps: float
    settings: dict[str, Any]  # of the op's form
    bias: Node | None = None
    x_hat: Node | None = None  # of a norm by hand

    @property
    def inputs(self) -> tuple[Node | None, ...]:
        return self.x, self.weight, self.bias


def find_called(node: Node) -> Written | None:
    """The norm over the last dim that a node calls: torch's, or what patch_model has put in place of one by hand."""
    if node.target in BUILT_IN:
        norm, eps, *names = BUILT_IN[node.target]
        given = dict.fromkeys(names) | {"eps": eps} | dict(zip(names, node.args, strict=False)) | node.kwargs
        given = {"x": given.pop("input", given["x"])} | given
        y, settings = node, {}
    elif node.target in OURS:
        norm, y = OURS[node.target], only_user(node)
        given = arguments_of(node)
        if kind_of(y) != "getitem" or y.args[1] != 0:
            return None
        settings = {name: given[name] for name in ("weight_offset", "rounds_x_hat")}
    else:
        return None
    x, shape = given["x"], given["normalized_shape"]
    if not _is_taken(x) or not value_of(y).requires_grad or isinstance(shape, Node) or len(shape) != 1:
        return None
    return Written(norm, x, y, given["weight"], given["eps"], settings, given.get("bias"))


def find(rstd: Node) -> Written | None:
    """The norm that has this reciprocal square root."""
    power = [None] if kind_of(rstd) == "rsqrt" else terms_of(rstd, "pow")
    if power and power[-1] not in (None, -0.5) or len(rstd.users) != 1 or not power:
        return None
    variance, eps = with_number(rstd.args[0])
    h = _squared(_mean(variance))
    if h is None or eps is None or not value_of(h).dtype.is_floating_point:
        return None
    difference = terms_of(h, "sub")
    wide = difference[0] if difference and is_same(_mean(difference[1]), difference[0]) else h
    x = uncast(wide)
    (x_hat,) = rstd.users
    factor, norm = other_factor(rstd, x_hat), "rms" if wide is h else "layer"
    if value_of(wide).dtype not in (torch.float32, torch.float64):
        return None
    if not (is_same(factor, h) or (wide is h and factor is x)) or not _is_taken(x):
        return None
    return rest(Written(norm, x, x_hat, None, eps, {}, None, x_hat))


def rest(norm: Written) -> Written | None:
    """With the casts and the weight that follow x_hat."""
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
        rounds &= getattr(config, "emulate_precision_casts", False)  # else Inductor leaves casts between its steps out
        settings |= {"weight_offset": offset, "rounds_x_hat": rounds}
    return norm._replace(y=y, weight=weight, settings=settings) if value_of(y).requires_grad else None


def _is_taken(x: Node) -> bool:
    value = value_of(x)
    return (
        isinstance(value, Tensor)
        and not is_functorch_wrapped_tensor(value)  # of torch.func: fails outside of its transform
        and value.device.type in routing.DEVICE_TYPES
        and value.dtype in FLOAT_DTYPES
        and not isinstance(value.shape[-1], SymInt)
    )


def memory_written_in(graph: Graph) -> set[int]:
    """The memory that code of the graph writes in place."""
    return {memory_of(each) for node in graph.nodes for each in _written_by(node)} - {None}


def is_disturbed(written: set[int], y: Node, inputs: Iterable[Node | None]) -> bool:
    """Whether y is computed from its inputs through memory that is written in place, or in part without gradients.
    Where nothing of a graph is written, a tensor is the same wherever it is read."""
    behind = {*reached(read_by(y), lambda node: () if node in inputs else read_by(node))}
    return not written.isdisjoint(map(memory_of, behind)) or any(map(_stops_gradients, {y, *behind}.difference(inputs)))


def _stops_gradients(node: Node) -> bool:
    needs = [isinstance(each := value_of(of), Tensor) and each.requires_grad for of in (node, *read_by(node))]
    return isinstance(value_of(node), Tensor) and not needs[0] and any(needs)


def read_by(node: Node) -> list[Node]:
    """The nodes whose elements it reads: a cast to the dtype of another tensor reads none of that one."""
    return node.all_input_nodes[: {"cast": 1, "empty_like": 0}.get(kind_of(node))]


def memory_of(node: Node) -> int | None:
    value = value_of(node)
    while isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided
    return value.untyped_storage()._cdata if is_dense else None


def _written_by(node: Node) -> list[Node]:
    """The tensors that a call writes in place."""
    if not node.op.startswith("call"):
        return []
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    op, names, written = getattr(node.target, "default", node.target), [], [*WRITTEN]
    if isinstance(op, torch._ops.OpOverload):
        names = [each.name for each in op._schema.arguments]
        written = [each.name for each in op._schema.arguments if each.is_write]
    elif inspect.isfunction(op):
        names = [*inspect.signature(op).parameters]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if given.get("max_norm") is not None:  # of an embedding
        written.append("weight")
    found = [given.get(name) for name in written]
    if name.endswith("_") or name in IN_PLACE or given.get("inplace"):
        found = node.args[:1] or node.all_input_nodes[:1]
    return [each for each in _pytree.tree_leaves(found) if isinstance(each, Node)]


def _weight(factor: Node) -> tuple[Node, float]:
    """(weight, offset) of weight or offset + weight. A sum in 16 bits is a weight itself."""
    if kind_of(factor) == "add" and value_of(factor).dtype not in SIXTEEN_BITS:
        weight, offset = with_number(factor)
        if offset is not None:
            return uncast(weight), offset
    return uncast(factor), 0.0


def is_same(one: Any, other: Any) -> bool:
    """Whether they are one node, or equal calls of the same, or equal arguments of such."""
    if one is other or kind_of(one) not in REPEATED or not kind_of(other):
        return one == other
    is_alike = (one.target, one.kwargs, len(one.args)) == (other.target, other.kwargs, len(other.args))
    return is_alike and all(map(is_same, one.args, other.args))


def _is_row(node: Node, x: Tensor) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.dim() == 1 and len(value) == x.shape[-1] and value.dtype in FLOAT_DTYPES


def kind_of(node: Any) -> str | None:
    """None also for a call that is not given its first tensor by position, or that writes into another one."""
    is_call = isinstance(node, Node) and node.op in ("call_function", "call_method")
    return KINDS.get(node.target) if is_call and node.kwargs.keys().isdisjoint({"input", "out"}) else None


def value_of(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else None


def only_user(node: Any) -> Node | None:
    return next(iter(node.users)) if isinstance(node, Node) and len(node.users) == 1 else None


def is_cast_to(node: Any, like: Tensor) -> bool:
    """Whether it is a cast to a tensor's dtype, and no move to another device."""
    value = value_of(node)
    return kind_of(node) == "cast" and (value.dtype, value.device) == (like.dtype, like.device)


def terms_of(node: Any, kind: str, count: int = 2) -> list | None:
    return list(node.args) if kind_of(node) == kind and len(node.args) == count and not node.kwargs else None


def both_orders(pair: list | None) -> list[list]:
    return [pair, pair[::-1]] if pair else []


def other_factor(factor: Node, product: Node) -> Node | None:
    """The other factor of a product."""
    operands = terms_of(product, "mul")
    if operands is None or operands[0] is operands[1] or factor not in operands:
        return None
    return operands[operands[0] is factor]


def with_number(node: Any) -> tuple[Any, float | None]:
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
    dims = [dim] if isinstance(dim, (int, Node)) else list(dim or ())
    is_last = isinstance(value, Tensor) and dims in ([-1], [value.dim() - 1])
    return given["of"] if is_last and given.get("keepdim") and not given.get("dtype") else None


def _squared(node: Any) -> Node | None:
    factors = terms_of(node, "mul") or [None, node]
    if is_same(*factors):
        return factors[0]
    if kind_of(node) == "square":
        return node.args[0]
    power = terms_of(node, "pow")
    return power[0] if power and power[1] == 2 else None


def uncast(node: Any) -> Any:
    """Behind a cast to a dtype that has all numbers of the one before."""
    source = node.args[0] if kind_of(node) == "cast" else None
    before, after = value_of(source), value_of(node)
    if not (isinstance(before, Tensor) and before.device == after.device and before.dtype in FLOAT_DTYPES):
        return node
    return source if torch.promote_types(before.dtype, after.dtype) == after.dtype else node


def uncast_all(node: Any) -> Any:
    """Behind all such casts."""
    while (source := uncast(node)) is not node:
        node = source
    return node
