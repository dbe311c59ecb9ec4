"""Keeps gradients of slices of one tensor right in torch 2.10 to 2.14, whose Inductor may leave parts unwritten.

Where norms share a table of scales and shifts, the table's gradient is a concatenation of sums over rows. Inductor lets
each sum write into the result's memory, but a sum that it has fused with sums over columns ("mix-order reduction") gets
memory of its own, and its part of the result stays unwritten (pytorch#193061, mended in 2.15). Here such a
concatenation becomes an addition of padded tensors: a small element-wise kernel, which reads the sums from where they
are. Sums over few rows, such as those over heads, are never fused so, and stay concatenated: what they make may be as
large as an activation, and slow to add up (Mamba2's training step took 1.10 times as long).
"""

from __future__ import annotations

import math

import torch
from torch._inductor import config
from torch.fx import Graph, Node

from .edits import call_before
from .paying import SUMS, VIEWS, is_fusible, is_over_rows, reached

aten = torch.ops.aten
IS_WRONG = torch.__version__ < (2, 15)
MANY_ROWS = 1024  # a mix-order reduction of these releases has over 3200, but for a mode in which it may have any


def add_up(graph: Graph) -> None:
    """Replace each concatenation of sums, in place."""
    for node in [node for node in graph.nodes if node.target is aten.cat.default and _is_of_sums(node)]:
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


def _is_of_sums(cat: Node) -> bool:
    """Whether a part is made of sums over many rows, and all its sizes are known."""
    values = [part.meta["val"] for part in cat.args[0]]
    same = all(len(each.shape) == len(cat.meta["val"].shape) and each.dtype == cat.meta["val"].dtype for each in values)
    known = all(isinstance(size, int) for each in values for size in each.shape)
    return same and known and any(_has_sum(part, cat) for part in cat.args[0])


def _has_sum(part: Node, cat: Node) -> bool:
    """Whether a sum makes the part, or one of what it is made of by element-wise code on tensors that are not larger
    than the whole."""

    def is_small(node: Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.numel() <= cat.meta["val"].numel()

    def of_it(node: Node) -> list[Node]:
        goes_on = node.target not in SUMS and (node.target in VIEWS or is_fusible(node))
        return list(filter(is_small, node.all_input_nodes)) if goes_on else []

    sums = [each for each in reached(filter(is_small, [part]), of_it) if each.target in SUMS]
    return any(is_over_rows(each) and _sums_many(each) for each in sums)


def _sums_many(node: Node) -> bool:
    if getattr(config.triton, "mix_order_reduction_non_strict_mode", False):
        return True
    shape = node.args[0].meta["val"].shape
    summed = [shape[dim] for dim in node.args[1] or range(len(shape))]
    return not all(isinstance(size, int) for size in summed) or math.prod(summed) >= MANY_ROWS
