"""Finds rotations (RoPE, turns.py) of q and k behind or before their norms in Dynamo's graph, and makes one op of norms
and rotations.

The op, head_norm_fwd, has one launch for both norms and their rotations, and its backward has one, too. Inductor makes
kernels for each of the two tensors, and reads the gradient of such a concatenation more than once.

Taken are q and k of four dims whose norms are of one formula and whose rotations have the same tables, which need no
gradient. The op returns contiguous tensors, and so does the model's code, but for dims 1 and 2, which may be swapped.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.virtualized import V
from torch.fx import Graph, Node

from ..heads.call import HeadProblem
from ..heads.plan import choose
from ..heads.problem import Heads, Settings, validate
from ..host import gpus
from ..namespace import TORCH_OPS
from ..operands import FORWARD, OPS, WAYS
from ..planner.plan import ReferencePlan
from . import routing
from .paying import reached
from .turns import Turn, find_turn, find_turn_to
from .written import Written, is_cast_to, is_same, kind_of, only_user, read_by, reads_any, uncast, value_of

REASON = "one launch for q, k and their rotations"


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

    @property
    def settings(self) -> Settings:
        of_form = {name: each for name, each in self.norm.settings.items() if name in Settings._fields}
        turn = self.turn.rotary_dim, self.turn.interleaved
        return Settings(self.norm.norm == "layer", *turn, norm_first=self.norm_first, **of_form)

    @property
    def inputs(self) -> tuple[Node | None, ...]:
        return self.x, self.norm.weight, self.norm.bias, self.turn.cos, self.turn.sin


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
        if reads_any(written, each.y, each.inputs):
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
        inputs = [swap(made.get(each.x, each.x), pair.x_is_swapped) for each in pair.both]
        tables = [swap(each, pair.tables_are_swapped, value_of(each).dim()) for each in first.inputs[3:]]
        tables[1] = call(torch.neg, tables[1]) if first.turn.is_backward else tables[1]
        weights, biases = ([getattr(each.norm, name) for each in pair.both] for name in ("weight", "bias"))
        operands = inputs, weights, biases, *tables, first.norm.eps
        op = call(TORCH_OPS.head_norm_fwd.default, *operands, **first.settings._asdict())
        outputs = [swap(call(operator.getitem, op, at), pair.y_is_swapped) for at in range(len(pair.both))]
    for each, output in zip(pair.both, outputs, strict=True):
        each.y.replace_all_uses_with(output)
        output.meta = dict(each.y.meta)
        made[each.y] = output
        for way in WAYS.values():
            op = OPS[f"{each.norm.norm}_norm_{way}"]
            routing.note(op, value_of(each.norm.x), True, REASON, each.norm.y.meta, "rotated")


def _find(norm: Written) -> Rotated | None:
    """The rotation beside a norm."""
    if value_of(norm.x).dim() != 4:
        return None
    y, is_swapped = _behind_swaps(norm.y)
    users = [user for user in y.users if kind_of(user) != "cast" or user.args[0] is y]  # others read its dtype alone
    turn = find_turn(users[0] if len(users) == 1 and uncast(users[0]) is y else y)
    if not turn:
        return _find_before(norm)
    y = turn.y
    while is_cast_to(user := only_user(y), value_of(norm.x)):
        y = user
    y, is_swapped_behind = _behind_swaps(y)
    return _rotated(norm, norm.x, y, turn, True, is_swapped != is_swapped_behind, is_swapped_behind)


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


def _rotated(norm: Written, x: Node, y: Node, turn: Turn, *flags: bool) -> Rotated:
    orders = tuple(order for order in (False, True) if _swapped(value_of(y), order).is_contiguous())
    return Rotated(norm, x, y, turn, *flags, orders)


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
    alike = [(each.settings, each.turn.is_backward, each.norm.eps, each.is_swapped, each.tables_are_swapped)
             for each in pair.both]  # fmt: skip
    if alike[0] != alike[1] or not all(map(is_same, first.inputs[3:], second.inputs[3:])) or V.aot_compilation:
        return False
    if not all(pair.last < user for each in pair.both for user in each.y.users):
        return False
    xs, weights, biases = ([value_of(each.inputs[at]) for each in pair.both] for at in range(3))
    inputs = [_swapped(x, pair.x_is_swapped) for x in xs]
    tables = [_swapped(value_of(each), pair.tables_are_swapped) for each in first.inputs[3:]]
    heads = Heads(inputs, weights, biases, *tables, first.norm.eps, first.settings)
    try:
        validate("head_norm_fwd", heads)
    except RuntimeError:
        return False
    dtypes = [(heads.output_dtype(at), value_of(each.y).dtype) for at, each in enumerate(pair.both)]
    if not all({*both} == {x.dtype} for both, x in zip(dtypes, xs, strict=True)):
        return False
    dtype = xs[0].dtype
    problem = HeadProblem(FORWARD, 2, heads.cols, dtype, dtype, None, None, heads.settings, turned=heads.rotary_dim)
    return has_kernel(problem, xs[0].device)


def has_kernel(problem: HeadProblem, device: torch.device) -> bool:
    return device.type != "cuda" or not isinstance(choose(problem, gpus.spec_of(device)), ReferencePlan)


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
    return {dim % 4 for dim in (*node.args[1:], *node.kwargs.values())} == {1, 2}


