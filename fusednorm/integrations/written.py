"""Finds norms that a model has written by hand in Dynamo's graph, before autograd, and makes one op of each.

    h = x.float()                                       once, or x in float32
    h = h - h.mean(-1, keepdim=True)                    LayerNorm alone
    x_hat = h * rsqrt((h * h).mean(-1, keepdim=True) + eps)
    y = x_hat.to(x.dtype) * weight                      with or without casts and weight; weight or offset + weight

The op's forward becomes Inductor's code again (routing.py). Its backward is one op, too, and stays ours where it pays.
Where it does not, the norm is traced again as the model wrote it.

Only norms of contiguous tensors whose result needs a gradient are taken: an op returns contiguous rows, which others
than the written ones may not be.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Container
from typing import Any, NamedTuple, TypeVar

import torch
from torch import SymFloat, SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from ..namespace import TORCH_OPS
from ..planner.norm_problem import FLOAT_DTYPES
from . import routing
from .folding import SIXTEEN_BITS, LeftToInductor
from .routing import MARK

Result = TypeVar("Result")
NAMES = ("add", "sub", "mul", "pow", "square", "mean", "rsqrt")
KINDS: dict[Any, str] = {
    **{getattr(where, name): name for name in NAMES for where in (operator, torch) if hasattr(where, name)},
    **{name: name for name in NAMES},
    **dict.fromkeys(("to", "float", "half", "bfloat16", "type", "type_as"), "cast"),
}


class Written(NamedTuple):
    """A norm from `x` to `y`."""

    norm: str
    x: Node
    y: Node
    weight: Node | None
    eps: float
    settings: dict[str, Any]  # of the op's form


def compiled(model: Any, compile: Callable[[], Result]) -> Result:
    """What `compile` makes of the model, in whose graphs ops replace the norms that pay.

    What Inductor fuses, and what it keeps in memory, depends on how a gradient is written. So the gradient of a norm
    that stays with Inductor has to be that of the model's own code (bench/NOTES.md, "integrations/written.py").
    """
    left: set[str] = set()
    while True:
        before = make_ops(model, left)
        with routing.noting() as forget:
            try:
                return compile()
            except LeftToInductor as norms:
                left |= norms.marks
                forget(but=norms.marks)
        for each, graph in before.items():
            each.graph = graph


def make_ops(model: Any, left: Container[str] = ()) -> dict[GraphModule, Graph]:
    """Replace the norms in the graphs of a model, but for those whose marks are in `left`. Returns the graphs that were
    there before."""
    before, marks = {}, (f"{MARK}{number}" for number in itertools.count())
    for each in model.modules() if hasattr(model, "modules") else ():
        if isinstance(each, GraphModule):
            found = [norm for node in each.graph.nodes if _kind(node) in ("rsqrt", "pow") and (norm := find(node))]
            marked = [(mark, norm) for norm, mark in zip(found, marks, strict=False) if mark not in left]
            if marked:
                before[each] = _copied(each.graph)
                _make_ops(each, marked)
    return before


def _copied(graph: Graph) -> Graph:
    """With what Dynamo keeps on the nodes beside their meta."""
    copied = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, copied.nodes, strict=True):
        for name in vars(old).keys() - vars(new).keys():
            setattr(new, name, getattr(old, name))
    return copied


def _make_ops(model: GraphModule, marked: list[tuple[str, Written]]) -> None:
    made: dict[Node, Node] = {}  # by what they replace, which may be the input of a later norm
    for mark, norm in marked:
        x = made.get(norm.x, norm.x)
        arguments = x, [_value(x).shape[-1]], norm.weight, None, norm.eps
        with model.graph.inserting_after(norm.y):
            op = model.graph.call_function(
                getattr(TORCH_OPS, f"{norm.norm}_norm_fwd_affine").default, arguments, norm.settings
            )
        with model.graph.inserting_after(op):
            y = model.graph.call_function(operator.getitem, (op, 0))
        op.meta = {name: each for name, each in norm.y.meta.items() if name != "example_value"}
        op.meta["source_fn_stack"] = [*op.meta.get("source_fn_stack", ()), (mark, op.target)]
        norm.y.replace_all_uses_with(y)
        made[norm.y] = y
        y.meta = dict(norm.y.meta)
        _erase(norm.y)
    model.recompile()


def _erase(node: Node) -> None:
    """The node, if nothing uses it, and what is then without use. Other code may be there for its side effects."""
    if not node.users and _kind(node):
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        for each in inputs:
            _erase(each)


def find(rstd: Node) -> Written | None:
    """The norm that has this reciprocal square root."""
    power = [None] if _kind(rstd) == "rsqrt" else _operands(rstd, "pow")
    if power and power[-1] not in (None, -0.5) or len(rstd.users) != 1 or not power:
        return None
    variance, eps = _with_number(rstd.args[0])
    h = _squared(_mean(variance))
    if h is None or eps is None or not _value(h).dtype.is_floating_point:
        return None
    difference = _operands(h, "sub")
    wide = difference[0] if difference and _mean(difference[1]) is difference[0] else h
    x = _uncast(wide)
    (x_hat,) = rstd.users
    factor, norm = _times(rstd, x_hat), "rms" if wide is h else "layer"
    if not (_is_same(factor, h) or (wide is h and factor is x)) or not _is_taken(x, wide):
        return None
    return _rest(Written(norm, x, x_hat, None, eps, {}))


def _rest(norm: Written) -> Written | None:
    """With the casts and the weight that follow."""
    x, y = _value(norm.x), norm.y
    if _value(y).dtype != (torch.float64 if x.dtype == torch.float64 else torch.float32):
        return None
    weight, offset, is_narrow = None, 0.0, False
    while len(y.users) == 1:
        (user,) = y.users
        factor = _times(y, user)
        if _kind(user) == "cast" and _value(user).dtype == x.dtype and not is_narrow:
            y, is_narrow = user, weight is None
            if weight is not None:
                break
        elif weight is None and factor is not None and _is_row(factor, x):
            y, (weight, offset), rounds = user, _weight(factor), is_narrow and x.dtype in SIXTEEN_BITS
            is_narrow = False
        else:
            break
    settings = {"y_dtype": _value(y).dtype}
    if weight is not None:
        settings |= {"weight_offset": offset, "rounds_x_hat": rounds}
    return norm._replace(y=y, weight=weight, settings=settings) if _value(y).requires_grad else None


def _is_taken(x: Node, wide: Node) -> bool:
    value = _value(x)
    return (
        isinstance(value, Tensor)
        and value.device.type in routing.DEVICE_TYPES
        and value.dtype in FLOAT_DTYPES
        and _value(wide).dtype in (torch.float32, torch.float64)
        and not isinstance(value.shape[-1], SymInt)
        and value.is_contiguous()
        and not any(_writes(user) for user in x.users)
    )


def _writes(user: Node) -> bool:
    name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
    return user.op.startswith("call") and (name.endswith("_") or (name.startswith("i") and name[1:] in NAMES))


def _weight(factor: Node) -> tuple[Node, float]:
    """(weight, offset) of weight or offset + weight. A sum in 16 bits is a weight itself."""
    if _kind(factor) == "add" and _value(factor).dtype not in SIXTEEN_BITS:
        weight, offset = _with_number(factor)
        if offset is not None:
            return _uncast(weight), offset
    return _uncast(factor), 0.0


def _is_same(node: Any, other: Node) -> bool:
    """Whether they are one node, or the same difference."""
    return node is other or (_kind(other) == "sub" and _operands(node, "sub") == _operands(other, "sub"))


def _is_row(node: Node, x: Tensor) -> bool:
    value = _value(node)
    return isinstance(value, Tensor) and value.dim() == 1 and len(value) == x.shape[-1] and value.dtype in FLOAT_DTYPES


def _kind(node: Any) -> str | None:
    return KINDS.get(node.target) if isinstance(node, Node) and node.op in ("call_function", "call_method") else None


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else None


def _operands(node: Any, kind: str) -> list | None:
    return list(node.args) if _kind(node) == kind and len(node.args) == 2 and not node.kwargs else None


def _times(factor: Node, product: Node) -> Node | None:
    """The other factor of a product."""
    operands = _operands(product, "mul")
    if operands is None or operands[0] is operands[1] or factor not in operands:
        return None
    return operands[operands[0] is factor]


def _with_number(node: Any) -> tuple[Any, float | None]:
    """The summands of a tensor and a number."""
    operands = _operands(node, "add") or []
    numbers = [each if isinstance(each, (int, float)) else _value(each) for each in operands]
    for at, number in enumerate(numbers):
        if isinstance(number, (int, float, SymFloat)):
            return operands[1 - at], float(number)
    return None, None


def _mean(node: Any) -> Any:
    """Of what the node is the mean over the last dim, which it keeps."""
    if _kind(node) != "mean":
        return None
    given = dict(zip(("of", "dim", "keepdim"), node.args, strict=False)) | node.kwargs
    dim, value = given.get("dim"), _value(given.get("of"))
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    is_last = isinstance(value, Tensor) and [each % value.dim() for each in dims] == [value.dim() - 1]
    return given["of"] if is_last and given.get("keepdim") and not given.get("dtype") else None


def _squared(node: Any) -> Node | None:
    factors = _operands(node, "mul") or [None, node]
    if factors[0] is factors[1]:
        return factors[0]
    if _kind(node) == "square":
        return node.args[0]
    power = _operands(node, "pow")
    return power[0] if power and power[1] == 2 else None


def _uncast(node: Any) -> Any:
    """Behind a cast to a dtype that has all numbers of the one before."""
    source = node.args[0] if _kind(node) == "cast" else None
    before, after = _value(source), _value(node)
    if not (isinstance(before, Tensor) and before.device == after.device and before.dtype in FLOAT_DTYPES):
        return node
    return source if torch.promote_types(before.dtype, after.dtype) == after.dtype else node
