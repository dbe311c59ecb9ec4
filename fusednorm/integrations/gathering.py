"""Keeps gradients of slices of one tensor right in torch 2.10 to 2.14, whose Inductor may leave parts unwritten.

Where norms share a table of scales and shifts, the table's gradient is a concatenation of sums over rows. Inductor lets
each sum write into the result's memory, but a sum that it has fused with sums over columns ("mix-order reduction") gets
memory of its own, and its part of the result stays unwritten (pytorch#193061, mended in 2.15). Here such a
concatenation becomes an addition of padded tensors: a small element-wise kernel, which reads the sums from where they
are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from .paying import SUMS, VIEWS, is_fusible, is_over_rows

aten = torch.ops.aten
IS_WRONG = torch.__version__ < (2, 15)


def add_up(graph: Graph, call_before: Callable[..., Node]) -> int:
    """Replace each concatenation of sums, in place. call_before(place, function, args) makes a node. Returns their
    number."""
    found = [node for node in graph.nodes if node.target is aten.cat.default and _is_of_sums(node)]
    for node in found:
        parts, (dim, *_) = node.args[0], (*node.args[1:], node.kwargs.get("dim", 0))
        rank = len(node.meta["val"].shape)
        total, start = None, 0
        for part in parts:
            stop = start + part.meta["val"].shape[dim]
            padding = [0, 0] * (rank - 1 - dim % rank) + [start, node.meta["val"].shape[dim] - stop]
            padded = call_before(node, aten.constant_pad_nd.default, (part, padding))
            total = padded if total is None else call_before(node, aten.add.Tensor, (total, padded))
            start = stop
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    return len(found)


def _is_of_sums(cat: Node) -> bool:
    """Whether a part is made of sums over rows, and all sizes are known."""
    values = [part.meta["val"] for part in cat.args[0]]
    same = all(len(each.shape) == len(cat.meta["val"].shape) and each.dtype == cat.meta["val"].dtype for each in values)
    known = all(isinstance(size, int) for each in values for size in each.shape)
    return same and known and any(_has_sum(part, cat) for part in cat.args[0])


def _has_sum(part: Node, cat: Node) -> bool:
    """Whether a sum makes the part, or one of what it is made of by element-wise code on tensors that are not larger
    than the whole."""
    ahead, seen = [part], set()
    while ahead:
        each = ahead.pop()
        value = each.meta.get("val")
        if each in seen or not isinstance(value, torch.Tensor) or not value.numel() <= cat.meta["val"].numel():
            continue
        if each.target in SUMS:
            if is_over_rows(each):
                return True
            continue
        seen.add(each)
        if each.target in VIEWS or is_fusible(each):
            ahead += each.all_input_nodes
    return False
