"""Finds rotations (RoPE, turns.py) of q and k behind or before their norms in Dynamo's graph, and makes one op of norms
and rotations.

The op, head_norm_fwd, has one launch for both norms and their rotations, and its backward has one, too. Inductor makes
kernels for each of the two tensors, and reads the gradient of such a concatenation more than once.

Taken are q and k of four dims whose norms are of one formula and whose rotations have the same tables, which need no
gradient. A norm may also be one over all heads, whose result a view splits into these, and then has the rotation behind
it. The op returns contiguous tensors, and so does the model's code, but for dims 1 and 2, which may be swapped.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.virtualized import V
from torch.fx import Graph, Node

from ..heads.plan import has_kernels
from ..heads.problem import Heads, Settings, validate
from ..host import gpus
from ..namespace import TORCH_OPS
from ..operands import OPS, WAYS
from . import routing
from .edits import is_shape
from .paying import reached
from .turns import Turn, find_turn, find_turn_to
from .written import (
    VIEWS,
    Written,
    is_cast_to,
    is_disturbed,
    is_same,
    kind_of,
    memory_of,
    only_user,
    read_by,
    uncast,
    value_of,
)

REASON = "one op for q, k and their rotations"


class Rotated(NamedTuple):
    """A norm and the rotation behind it or before it, from `x` to `y`."""

    norm: Written
    x: Node
    y: Node
    turn: Turn
    norm_first: bool
    is_swapped: bool  # dims 1 and 2 of y are x's swapped
    tables_are_swapped: bool  # and those of the tables
    orders: tuple[bool, ...]  # whether y is contiguous with these dims swapped: both, if one of them has one element
    heads: tuple[int, int] | None = None  # their number and columns, if x's last dim has all of them

    @property
    def settings(self) -> Settings:
        of_form = {name: each for name, each in self.norm.settings.items() if name in Settings._fields}
        turn = self.turn.rotary_dim, self.turn.interleaved
        return Settings(self.norm.norm == "layer", *turn, norm_first=self.norm_first, **of_form)

    @property
    def inputs(self) -> tuple[Node | None, ...]:
        return self.x, self.norm.weight, self.norm.bias, self.turn.cos, self.turn.sin

    @property
    def own(self) -> set[int | None]:
        """The memory that the rotation alone writes."""
        return {memory_of(each.args[0]) for each in self.turn.stores}


class Pair(NamedTuple):
    """q and k, or k and q."""

    first: Rotated
    second: Rotated
    y_is_swapped: bool  # y is the op's output with dims 1 and 2 swapped

    @property
    def both(self) -> tuple[Rotated, Rotated]:
        return self[:2]

    @property
    def x_is_swapped(self) -> bool:
        """Whether x is the op's input with these dims swapped."""
        return self.y_is_swapped != self.first.is_swapped

    @property
    def tables_are_swapped(self) -> bool:
        return self.y_is_swapped != self.first.tables_are_swapped

    @property
    def last(self) -> Node:
        return max(each.y for each in self.both)


def pairs_of(norms: Iterable[Written], written: set[int]) -> Iterator[Pair]:
    """Those of q and k that the op takes. written: the memory that the graph writes in place."""
    before = None
    for each in filter(None, map(_find, norms)):
        if any(is_disturbed(written - each.own, end, each.inputs) for end in (each.y, *each.turn.stores)):
            continue
        orders = [order for order in each.orders if before and order in before.orders]
        if orders and _is_taken(pair := Pair(before, each, orders[0])):
            yield pair
            before = None
        else:
            before = each


def make_op(graph: Graph, pair: Pair, made: dict[Node, Node]) -> None:
    """Replace both, and add what replaces them to `made`, which has what replaces results of norms before."""
    first, last = pair.first, pair.last

    def call(function: Any, *arguments: Any, **named: Any) -> Node:
        node = graph.call_function(function, arguments, named)
        node.meta = {name: each for name, each in last.meta.items() if name != "example_value"}
        return node

    def swap(node: Node, if_: bool, ndim: int = 4) -> Node:
        function, *dims = _swap_of(ndim)
        return call(function, node, *dims) if if_ and dims else node

    with graph.inserting_before(last):
        inputs = [made.get(each.x, each.x) for each in pair.both]
        if first.heads:
            inputs = [call(torch.unflatten, x, -1, each.heads) for x, each in zip(inputs, pair.both, strict=True)]
        inputs = [swap(each, pair.x_is_swapped) for each in inputs]
        tables = [swap(each, pair.tables_are_swapped, value_of(each).dim()) for each in first.inputs[3:]]
        # The op copies tables whose columns are apart. A graph has one copy for all layers.
        if any(value_of(each).stride(-1) != 1 for each in first.inputs[3:]):
            tables = [call(torch.clone, each, memory_format=torch.contiguous_format) for each in tables]
        tables[1] = call(torch.neg, tables[1]) if first.turn.is_backward else tables[1]
        weights, biases = ([getattr(each.norm, name) for each in pair.both] for name in ("weight", "bias"))
        operands = inputs, weights, biases, *tables, first.norm.eps
        op = call(TORCH_OPS.head_norm_fwd.default, *operands, **first.settings._asdict())
        outputs = [swap(call(operator.getitem, op, at), pair.y_is_swapped) for at in range(len(pair.both))]
    for each, output in zip(pair.both, outputs, strict=True):
        each.y.replace_all_uses_with(output)
        output.meta = dict(each.y.meta)
        made[each.y] = output
        for store in each.turn.stores:
            graph.erase_node(store)
        for way in WAYS.values():
            op = OPS[f"{each.norm.norm}_norm_{way}"]
            routing.note(op, value_of(each.norm.x), True, REASON, each.norm.y.meta, "rotated")


def _find(norm: Written) -> Rotated | None:
    """The rotation beside a norm."""
    normalized, heads = _in_heads(norm)
    if value_of(normalized).dim() != 4:
        return None
    y, is_swapped = _behind_swaps(normalized)
    users = [user for user in y.users if kind_of(user) != "cast" or user.args[0] is y]  # others read its dtype alone
    turn = find_turn(users[0] if len(users) == 1 and uncast(users[0]) is y else y)
    if not turn:
        return None if heads else _find_before(norm)
    y = turn.y
    while is_cast_to(user := only_user(y), value_of(norm.x)):
        y = user
    y, is_swapped_behind = _behind_swaps(y)
    return _rotated(norm, norm.x, y, turn, True, is_swapped != is_swapped_behind, is_swapped_behind, heads)


def _in_heads(norm: Written) -> tuple[Node, tuple[int, int] | None]:
    """The norm's result, or, if it has all heads in a row, the view that has them apart, and their sizes."""
    view, x = only_user(norm.y), value_of(norm.x)
    if x.dim() != 3 or norm.weight is None or kind_of(view) not in VIEWS or value_of(view).dim() != 4:
        return norm.y, None
    *rows, count, cols = value_of(view).shape
    are_heads = is_shape(rows, x.shape[:-1]) and isinstance(count, int) and isinstance(cols, int)
    return (view, (count, cols)) if are_heads else (norm.y, None)


def _find_before(norm: Written) -> Rotated | None:
    """The rotation whose result is a norm's x, and nothing else's."""
    inside = {*reached([norm.y], lambda node: () if node in norm.inputs else read_by(node))}
    whole, is_swapped = _before_swaps(norm.x)
    turned = whole
    while kind_of(turned) == "cast":
        turned = turned.args[0]
    if not inside.issuperset(norm.x.users) or not (turned is norm.x or only_user(turned)):
        return None
    y, is_swapped_behind = _behind_swaps(norm.y)
    tables_are_swapped = is_swapped != is_swapped_behind
    turn = find_turn_to(turned)
    if not turn:
        return None
    x, is_swapped_before = _before_swaps(uncast(turn.x))
    if whole is not turned and not is_cast_to(whole, value_of(x)):
        return None
    return _rotated(norm, x, y, turn, False, is_swapped_before != tables_are_swapped, tables_are_swapped)


def _rotated(norm, x: Node, y: Node, turn: Turn, norm_first, is_swapped, tables_are_swapped, heads=None) -> Rotated:
    orders = tuple(order for order in ([is_swapped] if heads else [False, True])  # all heads: the op has them together
                   if _swapped(value_of(y), order).is_contiguous())  # fmt: skip
    return Rotated(norm, x, y, turn, norm_first, is_swapped, tables_are_swapped, orders, heads)


def _before_swaps(y: Node) -> tuple[Node, bool]:
    """Of what y is swaps of dims 1 and 2, and whether these are swapped in y."""
    is_swapped = False
    while _is_swap(y):
        y, is_swapped = y.args[0], not is_swapped
    return y, is_swapped


def _behind_swaps(y: Node) -> tuple[Node, bool]:
    """What swaps of dims 1 and 2 make of y, and whether these are swapped then."""
    is_swapped = False
    while _is_swap(user := only_user(y)):
        y, is_swapped = user, not is_swapped
    return y, is_swapped


def _is_taken(pair: Pair) -> bool:
    first, second = pair.both
    alike = [(each.settings, each.turn.is_backward, each.norm.eps, each.is_swapped, each.tables_are_swapped,
              each.heads is None) for each in pair.both]  # fmt: skip
    if alike[0] != alike[1] or not all(map(is_same, first.inputs[3:], second.inputs[3:])) or V.aot_compilation:
        return False
    if not all(pair.last < user for each in pair.both for user in each.y.users):
        return False
    xs, weights, biases = ([value_of(each.inputs[at]) for each in pair.both] for at in range(3))
    inputs = [_swapped(x.unflatten(-1, each.heads) if each.heads else x, pair.x_is_swapped)
              for x, each in zip(xs, pair.both, strict=True)]  # fmt: skip
    tables = [_swapped(value_of(each), pair.tables_are_swapped) for each in first.inputs[3:]]
    heads = Heads(inputs, weights, biases, *tables, first.norm.eps, first.settings)
    try:
        validate("head_norm_fwd", heads, may_span=True)
    except RuntimeError:
        return False
    dtypes = [(heads.output_dtype(at), value_of(each.y).dtype) for at, each in enumerate(pair.both)]
    if not all({*both} == {x.dtype} for both, x in zip(dtypes, xs, strict=True)):
        return False
    device = xs[0].device
    return device.type != "cuda" or has_kernels(heads, gpus.spec_of(device))


def _swapped(tensor: Tensor, if_: bool) -> Tensor:
    function, *dims = _swap_of(tensor.dim())
    return function(tensor, *dims) if if_ and dims else tensor


def _swap_of(ndim: int) -> tuple:
    """What swaps dims 1 and 2 of four, and of what broadcasts against such a tensor: a function, and its dims; no dims
    if there is nothing to swap."""
    return (torch.transpose, -3, -2) if ndim > 2 else (torch.unsqueeze, -2) if ndim == 2 else (None,)


def _is_swap(node: Node | None) -> bool:
    """Whether it swaps dims 1 and 2 of four."""
    if kind_of(node) != "transpose" or value_of(node).dim() != 4:
        return False
    return {dim % 4 for dim in (*node.args[1:], *node.kwargs.values()) if isinstance(dim, int)} == {1, 2}


