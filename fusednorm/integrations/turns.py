"""Recognizes what rotates the columns of a tensor (RoPE) in Dynamo's graph, by the halves a and b of x, or by pairs.

    x * cos + cat([-b, a], -1) * sin
    cat([a * cos - b * sin, b * cos + a * sin], -1)     where cos and sin have half as many columns
    cat([that, rest], -1)                               of x's first columns, where rest are the others
    x * cos + stack([-b, a], -1).flatten(3) * sin       where a and b are the even and the odd columns
    y = empty_like(x)                                   and these
    y[..., ::2], y[..., 1::2] = a * cos - b * sin, b * cos + a * sin

All but the fourth one are recognized with the other signs before sin, too. There, as diffusers' FLUX has it, and in the
last one, Wan's, a and b are taken from a view by unbind, as halves may be; in FLUX's x may be cast before its products.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch.fx import Node

from .paying import reached
from .written import VIEWS, is_same, kind_of, only_user, other_factor, terms_of, value_of

STEPS = ("add", "sub", "mul", "neg", "cat", "chunk", "getitem")


class Turn(NamedTuple):
    """A rotation from `x` to `y`."""

    x: Node
    y: Node
    cos: Node
    sin: Node
    is_backward: bool  # with the other signs
    rotary_dim: int | None = None  # the columns that are rotated, if cos has half as many
    interleaved: bool = False  # by pairs
    stores: tuple[Node, ...] = ()  # into memory of its own


def find_turn(x: Node) -> Turn | None:
    """The rotation of all columns or of the first ones."""
    return _of_all(x) or _of_first(x) or _of_unbound(x) or _of_stored(x)


def find_turn_to(y: Node) -> Turn | None:
    """The rotation whose result y is."""
    sources = reached([y], lambda node: node.all_input_nodes if kind_of(node) in STEPS else ())
    of_heads = (each for each in sources if getattr(value_of(each), "ndim", 0) == 4)
    turns = (find_turn(each) for each in of_heads if isinstance(value_of(each).shape[-1], int))
    return next((turn for turn in turns if turn and turn.y is y), None)


def _of_all(x: Node) -> Turn | None:
    cols, parts = value_of(x).shape[-1], _parts(x)
    halves, product = [parts.get((0, cols // 2)), parts.get((cols // 2, cols))], parts.get(None)
    if None in halves:
        return None
    return _at_once(x, product, *halves) if product else _by_halves(x, halves) if len(parts) == 2 else None


def _at_once(x: Node, product: Node, first: Node, second: Node) -> Turn | None:
    is_backward = kind_of(only_user(first)) == "neg"
    negative = only_user(first if is_backward else second)
    turned = only_user(negative)
    if kind_of(negative) != "neg" or _joined(turned) != ((second, negative) if is_backward else (negative, first)):
        return None
    return _summed(x, x, product, turned, is_backward)


def _summed(x: Node, wide: Node, product: Node, turned: Node, is_backward: bool, interleaved=False) -> Turn | None:
    """The rotation whose result is wide * cos + turned * sin, if product is the first of both. wide: x or a cast."""
    turned_product, y = only_user(turned), only_user(product)
    tables = other_factor(wide, product), other_factor(turned, turned_product)
    is_sum = {*(terms_of(y, "add") or ())} == {product, turned_product} and only_user(turned_product) is y
    is_turn = is_sum and all(isinstance(each, Node) for each in tables)
    return Turn(x, y, *tables, is_backward, interleaved=interleaved) if is_turn else None


def _of_unbound(x: Node) -> Turn | None:
    """The rotation of all columns whose halves, or pairs, are a dim of a view."""
    split = next((user for user in x.users if kind_of(user) in VIEWS), None)
    first, second, interleaved = _unbound(x, split)
    negative = only_user(second)
    turned = only_user(negative)
    if kind_of(negative) != "neg" or (_stacked if interleaved else _joined)(turned) != (negative, first):
        return None
    if interleaved:
        turned = only_user(turned)
        if kind_of(turned) not in VIEWS or value_of(turned).shape != value_of(x).shape:
            return None
    other, *more = [user for user in x.users if user is not split] or [None]
    if other is None or more:
        return None
    wide, product = (other, only_user(other)) if kind_of(other) == "cast" else (x, other)
    turned = user if kind_of(user := only_user(turned)) == "cast" else turned
    return _summed(x, wide, product, turned, False, interleaved)


def _unbound(x: Node, split: Node | None) -> tuple[Node | None, Node | None, bool]:
    """The halves of x that a view has, and whether these are the columns of even and of odd places."""
    unbound = only_user(split)
    if kind_of(unbound) != "unbind":
        return None, None, False
    given = dict(zip(("input", "dim"), unbound.args, strict=False)) | unbound.kwargs
    *rows, cols = value_of(x).shape
    parts = {each.args[1]: each for each in unbound.users if kind_of(each) == "getitem"}
    shape = [*value_of(split).shape]
    for dim, interleaved in ((-1, True), (-2, False)):
        halves = [cols // 2, 2][:: 1 if interleaved else -1]
        is_there = shape == [*rows, *halves] and given.get("dim", 0) in (dim, len(shape) + dim)
        if is_there and len(unbound.users) == 2 and {*parts} == {0, 1}:
            return parts[0], parts[1], interleaved
    return None, None, False


def _stacked(node: Node | None) -> tuple[Node, ...]:
    """The tensors whose columns alternate in a node, if a last dim has one of each."""
    given = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs if node is not None else {}
    is_last = kind_of(node) == "stack" and given.get("dim", 0) in (-1, value_of(node).dim() - 1)
    return tuple(given["tensors"]) if is_last else ()


def _by_halves(x: Node, halves: Sequence[Node]) -> Turn | None:
    y = only_user(only_user(next(iter(halves[0].users), None)))
    return _of_sums(x, y, halves, _joined(y))


def _of_stored(x: Node) -> Turn | None:
    """The rotation of all columns whose pairs are stored into memory like x's."""
    split = next((user for user in x.users if kind_of(user) in VIEWS), None)
    memory = next((user for user in x.users if kind_of(user) == "empty_like"), None)
    first, second, interleaved = _unbound(x, split)
    if not interleaved or memory is None or len(memory.users) != 3 or memory.kwargs:
        return None
    *stores, y = sorted(memory.users)
    places = [(..., slice(at, None, 2)) for at in range(2)]
    are_stores = all(each.target is operator.setitem and each.args[0] is memory for each in stores)
    if not are_stores or [each.args[1] for each in stores] != places or not {*x.users} <= {split, memory, y}:
        return None
    if kind_of(y) != "cast" or y.args[0] is not memory:
        return None
    turn = _of_sums(x, y, (first, second), [each.args[2] for each in stores])
    return turn and turn._replace(interleaved=True, stores=tuple(stores))


def _of_sums(x: Node, y: Node, halves: Sequence[Node], summed: Iterable[Node]) -> Turn | None:
    """The rotation whose first and second columns are such sums of products of both."""
    sums = [_factors(each, halves) for each in summed]
    if [len(each) for each in sums] != [2, 2]:
        return None
    (cos, of_first), (sin, of_second) = sums[0].values()
    (other_sin, of_other_first), (other_cos, of_other_second) = sums[1].values()
    signs = of_first, of_other_second, of_second == of_other_first
    if any(signs) or not is_same(cos, other_cos) or not is_same(sin, other_sin):
        return None
    return Turn(x, y, cos, sin, of_other_first, value_of(x).shape[-1])


def _factors(summed: Node, halves: Sequence[Node]) -> dict[Node, tuple[Node, bool]]:
    """What a sum or difference has each half multiplied with, and whether that is subtracted."""
    found = {}
    for half in halves:
        for kind in ("add", "sub"):
            for at, product in enumerate(terms_of(summed, kind) or ()):
                factor, is_subtracted = other_factor(half, product), kind == "sub" and at == 1
                if kind_of(factor) == "neg":
                    factor, is_subtracted = factor.args[0], not is_subtracted
                if isinstance(factor, Node):
                    found[half] = factor, is_subtracted
    return found


def _of_first(x: Node) -> Turn | None:
    parts = _parts(x)
    if len(parts) != 2 or None in parts:
        return None
    (start, end), (after, stop) = sorted(parts)
    turn, rest = _of_all(parts[start, end]), parts[after, stop]
    if (start, after, stop) != (0, end, value_of(x).shape[-1]) or not turn:
        return None
    y = only_user(rest)
    return turn._replace(x=x, y=y) if y is only_user(turn.y) and _joined(y) == (turn.y, rest) else None


def _parts(x: Node) -> dict[tuple[int, int] | None, Node]:
    """What slices and halves have of x's columns, by (first, end), and another user by None; empty if two are alike."""
    found, half = [], value_of(x).shape[-1] // 2
    for user in x.users:
        if _is_in_halves(user):
            found += [((half * each.args[1], half * (1 + each.args[1])), each) for each in user.users]
        else:
            found.append((_columns(user), user))
    parts = dict(found)
    return parts if len(parts) == len(found) else {}


def _is_in_halves(node: Node) -> bool:
    """Whether it is two chunks of columns, of equal size."""
    given = dict(zip(("input", "chunks", "dim"), node.args, strict=False)) | node.kwargs
    if kind_of(node) != "chunk" or given["chunks"] != 2 or given.get("dim", 0) not in (-1, 3):
        return False
    is_even = value_of(given["input"]).shape[-1] % 2 == 0
    return is_even and all(kind_of(each) == "getitem" and isinstance(each.args[1], int) for each in node.users)


def _columns(node: Node) -> tuple[int, int] | None:
    """(first, end) of the columns that a slice has, of all rows."""
    if kind_of(node) != "getitem" or not isinstance(node.args[1], tuple):
        return None
    *others, last = node.args[1]
    cols = value_of(node.args[0]).shape[-1]
    if others != [...] or not isinstance(last, slice) or last.step not in (None, 1):
        return None
    is_known = all(each is None or isinstance(each, int) for each in (last.start, last.stop))
    return last.indices(cols)[:2] if is_known else None


def _joined(node: Node | None) -> tuple[Node, ...]:
    """The tensors whose columns a node has, one's behind the other's."""
    if node is None or kind_of(node) != "cat":
        return ()
    given = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
    return tuple(given["tensors"]) if given.get("dim", 0) in (-1, 3) else ()
