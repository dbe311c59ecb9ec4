"""A pass over Inductor's joint graph that folds what surrounds a norm's backward into the op itself.

Inductor cannot fuse anything into an op that it does not know: a cast before it, or an addition after it, is one more
kernel that reads and writes whole tensors. layer_norm_bwd_residual and rms_norm_bwd_residual do these on the way:

    grad_out.float(), x.float()     a 16-bit tensor that was only widened is read as it is; weight and bias likewise
    dx.to(dtype)                    dx is rounded once, to that dtype
    dx + residual                   is added before dx is rounded

Every value is the one it was, or has been rounded less often. The joint graph, because its partition into forward and
backward keeps for the backward what the op reads: after it, the float32 copies would have been kept.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node, map_arg
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..planner.norm_problem import FLOAT_DTYPES
from .routing import named_arguments

aten, ours = torch.ops.aten, torch.ops.fusednorm

FOLDED = {  # the op, what takes its place, and the parameters whose gradients are outputs 1 and 2
    ours.layer_norm_bwd.default: ("layer_norm_bwd_residual", ("weight", "bias")),
    ours.rms_norm_bwd.default: ("rms_norm_bwd_residual", ("weight",)),
}
CAST = torch.ops.prims.convert_element_type.default
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
DX_DTYPES = (*SIXTEEN_BITS, torch.float32)


class FoldIntoNorms(CustomGraphPass):
    """Calls the pass that was there before, then folds."""

    def __init__(self, before: Callable[[Graph], None] | None = None) -> None:
        self.before = before

    def __call__(self, graph: Graph) -> None:
        if self.before is not None:
            self.before(graph)
        fold(graph)

    def uuid(self) -> Any | None:
        own = get_hash_for_files((__file__,))
        if self.before is None:
            return own
        before = self.before.uuid() if isinstance(self.before, CustomGraphPass) else None
        return before and (before, own)  # None, as for any pass that cannot be told from another: do not cache


def appended_to(custom_pass):
    """A value for Inductor's joint_custom_post_pass: what it was, and then ours, once."""
    if isinstance(custom_pass, (list, tuple)):  # which torch 2.11 does not know
        return (
            custom_pass if any(isinstance(p, FoldIntoNorms) for p in custom_pass) else [*custom_pass, FoldIntoNorms()]
        )
    return custom_pass if isinstance(custom_pass, FoldIntoNorms) else FoldIntoNorms(custom_pass)


def fold(graph: Graph) -> int:
    """Fold around every backward of a norm in the graph, in place. Returns how many of these took something in."""
    folded = [_fold_around(node) for node in list(graph.nodes) if node.target in FOLDED]
    if any(folded):
        stable_topological_sort(graph)  # a residual may have come after the op
        graph.eliminate_dead_code()
    return sum(folded)


def _fold_around(node: Node) -> bool:
    name, parameters = FOLDED[node.target]
    arguments = named_arguments(node.target, node.args, node.kwargs)
    getitems = [user for user in node.users if user.users]
    outputs = {getitem.args[1]: getitem for getitem in getitems}
    if len(outputs) < len(getitems):
        return False  # an output was taken twice, which Inductor's own passes do not leave behind
    tail = _follow(outputs) if 0 in outputs else Tail(None, _dtype(arguments["x"]))
    widened = [*_widened(arguments, ("grad_out", "x")), *_widened_parameters(arguments, parameters, outputs)]
    if not widened and tail.node is outputs.get(0):
        return False
    arguments |= {name: arguments[name].args[0] for name in widened}
    mask = arguments.pop("output_mask")
    args = (*arguments.values(), tail.residual, mask)
    new = _call_before(node, getattr(ours, name).default, args, {"dx_dtype": tail.dtype})
    for index, output in outputs.items():
        replaced = [tail.node] if index == 0 else [output]
        if index and parameters[index - 1] in widened:
            replaced = list(output.users)  # the casts of the gradient back to the parameter's dtype
        value = _call_before(node, operator.getitem, (new, index))
        for old in replaced:
            old.replace_all_uses_with(value)
    return True


@dataclass(frozen=True)
class Tail:
    """What becomes of dx, as far as the op can do it: `node` is dx in `dtype`, with the residual if there is one."""

    node: Node | None
    dtype: torch.dtype
    residual: Node | None = None


def _follow(outputs: dict[int, Node]) -> Tail:
    """Along the casts, and one addition, while each is the only use of what comes before it."""
    dx = outputs[0]
    tail = Tail(dx, _dtype(dx))
    after_other_outputs = _reached_from(output for index, output in outputs.items() if index)
    while len(tail.node.users) == 1:
        (user,) = tail.node.users
        dtype, narrowed = _dtype(user), tail.dtype in SIXTEEN_BITS and tail.dtype != _dtype(dx)
        if dtype not in (*DX_DTYPES, _dtype(dx)) or (narrowed and dtype != tail.dtype):
            break  # the second: rounded on purpose, and widened again
        residual = _other_summand(user, tail.node)
        if user.target is CAST:
            tail = replace(tail, node=user, dtype=dtype)
        elif residual and not tail.residual and residual not in after_other_outputs:
            tail = Tail(user, dtype, residual)
        else:
            break
    return tail


def _other_summand(user: Node, dx: Node) -> Node | None:
    """What `user` adds to dx, where it is a float tensor of the same shape."""
    if user.target is not aten.add.Tensor or user.kwargs or len(user.args) != 2:
        return None
    a, b = user.args
    other = b if a is dx else a
    if not isinstance(other, Node) or other is dx or _dtype(other) not in FLOAT_DTYPES:
        return None
    shapes = other.meta["val"].shape, dx.meta["val"].shape
    same = len(shapes[0]) == len(shapes[1]) and all(statically_known_true(m == n) for m, n in zip(*shapes, strict=True))
    return other if same else None


def _widened(arguments: dict[str, Any], names: Iterable[str]) -> list[str]:
    """Which of the arguments are float32 copies of 16-bit tensors."""
    return [name for name in names if _is_cast(arguments[name], SIXTEEN_BITS, torch.float32)]


def _widened_parameters(arguments: dict[str, Any], parameters: tuple[str, ...], outputs: dict[int, Node]) -> list[str]:
    """Which parameters are, of those whose gradient is only used in their own dtype: the op will give it in that."""
    found = []
    for index, name in enumerate(parameters, start=1):
        uses = outputs[index].users if index in outputs else ()
        if name in _widened(arguments, [name]):
            dtype = _dtype(arguments[name].args[0])
            if all(_is_cast(use, (torch.float32,), dtype) for use in uses):
                found.append(name)
    return found


def _is_cast(node: Any, source: tuple[torch.dtype, ...], target: torch.dtype) -> bool:
    return isinstance(node, Node) and node.target is CAST and _dtype(node.args[0]) in source and _dtype(node) == target


def _call_before(place: Node, function: Callable, args: tuple, kwargs: dict[str, Any] | None = None) -> Node:
    kwargs = kwargs or {}
    with place.graph.inserting_before(place):
        node = place.graph.call_function(function, args, kwargs)
    values = map_arg(args, lambda argument: argument.meta["val"])
    # Inductor hands a traced op its inputs with the strides of eager mode, which it finds here.
    traced = {"val": function(*values, **kwargs), "eager_input_vals": (values, kwargs)}
    node.meta = {**place.meta, **traced}
    return node


def _reached_from(nodes: Iterable[Node]) -> set[Node]:
    reached, ahead = set(), list(nodes)
    while ahead:
        node = ahead.pop()
        if node not in reached:
            reached.add(node)
            ahead += node.users
    return reached


def _dtype(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)
