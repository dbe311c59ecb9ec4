"""Edits of a joint graph of AOTAutograd, whose nodes have fake tensors as meta["val"]."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..dtypes import SIXTEEN_BITS
from ..namespace import TORCH_OPS
from ..operands import FORWARD, Op
from . import routing
from .routing import named_arguments

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default


def write_out(node: Node) -> None:
    """Replace an op of ours by the graph that Inductor has without us."""
    nodes: list[Node] = []
    map_arg((node.args, node.kwargs), lambda each: nodes.append(each) or each)
    function = routing.written_out(node.target)
    is_forward = routing.op_of(node).direction == FORWARD
    # Asked here: of a node's sizes the tracer below knows only those that its inputs have, too.
    are_packed = [is_forward and each is not None and each.is_contiguous() for each in node.meta["val"]]

    def written(*values):
        given = dict(zip(nodes, values, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
        outputs = function(*named_arguments(node.target, args, kwargs).values())
        wanted = zip(outputs, node.meta["val"], strict=True)
        made = [None if like is None else got.to(like.dtype) for got, like in wanted]
        return tuple(each.contiguous() if is_packed else each for each, is_packed in zip(made, are_packed, strict=True))

    nodes = list(dict.fromkeys(nodes))
    values = [each.meta["val"] for each in nodes]
    with detect_fake_mode(values) or contextlib.nullcontext(), enable_python_dispatcher(), torch.no_grad():
        traced = make_fx(written, select_decomp_table())(*values)
    graph, places = node.graph, traced.graph.find_nodes(op="placeholder")
    before = set(graph.nodes)
    with graph.inserting_before(node):
        results = graph.graph_copy(traced.graph, dict(zip(places, nodes, strict=True)))
    for each in set(graph.nodes) - before:
        each.meta = {**node.meta, **each.meta}
        each.meta.pop("eager_input_vals", None)
    for getitem in list(node.users):
        if getitem.users:
            getitem.replace_all_uses_with(results[getitem.args[1]])
        graph.erase_node(getitem)
    graph.erase_node(node)


def without_offset(weight: Any) -> tuple[Any, float]:
    """The weight as tensor + number. The number is 0 if the weight is no such sum."""
    if isinstance(weight, Node) and weight.target is aten.add.Tensor and not weight.kwargs:
        tensor, number = weight.args
        if isinstance(number, (int, float)) and dtype_of(tensor) == dtype_of(weight):
            return tensor, float(number)
    return weight, 0.0


def is_cast(node: Any, source: tuple[torch.dtype, ...], target: torch.dtype) -> bool:
    is_of_source = isinstance(node, Node) and node.target is CAST and dtype_of(node.args[0]) in source
    return is_of_source and dtype_of(node) == target


def widened(arguments: dict[str, Any], names: Iterable[str]) -> list[str]:
    """The named arguments that are float32 copies of 16-bit tensors."""
    return [name for name in names if is_cast(arguments[name], SIXTEEN_BITS, torch.float32)]


def arguments_of(node: Node) -> dict[str, Any]:
    return named_arguments(node.target, node.args, node.kwargs)


def call_before(
    place: Node,
    function: Callable,
    args: tuple,
    kwargs: dict[str, Any] | None = None,
    meta: dict[str, Any] | None = None,
) -> Node:
    """A new node, with meta, or else with that of the place."""
    kwargs = kwargs or {}
    with place.graph.inserting_before(place):
        node = place.graph.call_function(function, args, kwargs)
    values, named = map_arg((args, kwargs), lambda argument: argument.meta["val"])
    # Inductor passes a traced op its inputs with the strides of eager mode. It takes these from eager_input_vals.
    traced = {"val": function(*values, **named), "eager_input_vals": (values, named)}
    node.meta = {**(meta or place.meta), **traced}
    return node


def is_shape(one: Sequence, other: Sequence) -> bool:
    return len(one) == len(other) and all(map(is_equal, one, other))


def is_equal(one: Any, other: Any) -> bool:
    return statically_known_true(one == other)


def call_op(place: Node, op: Op, arguments: dict[str, Any]) -> Node:
    """A new node that calls an op of ours. Those by name that are the schema's default are left out."""
    args = tuple(arguments[slot.name] for slot in op.arguments if not slot.role.is_by_name)
    by_name = {slot.name: op.default(slot) for slot in op.arguments if slot.role.is_by_name}
    named = {name: arguments[name] for name, default in by_name.items() if arguments.get(name, default) != default}
    return call_before(place, getattr(TORCH_OPS, op.name).default, args, named)


def dtype_of(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)
