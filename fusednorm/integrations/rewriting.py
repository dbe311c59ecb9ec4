"""Makes ops of the norms in Dynamo's graph that a model has written by hand (written.py), and of norms with what
surrounds them.

A norm with a rotation behind or before it becomes an op together with its partner (rotations.py), a modulated or gated
one with what surrounds it (joining.py). The forward of any other norm becomes Inductor's code again where it does not
pay (routing.py, forwards.py). Its backward is one op, too, and stays ours where it pays. Where a backward or a join
does not pay, the norm is traced again as the model wrote it.

Other norms by hand are taken if x is contiguous: an op returns contiguous rows, and the model's code might not. Where
packing.py looks at them, only y has to be contiguous.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Container, Iterable, Set
from typing import Any, TypeVar

from torch.fx import Graph, GraphModule, Node

from . import folding, gates, joining, modulations, rotations, routing
from .folding import LeftToInductor
from .joining import Joined
from .rotations import Pair
from .routing import JOINED, MARK
from .written import BUILT_IN, OURS, find, find_called, is_disturbed, kind_of, memory_written_in, value_of

FINDERS = {"modulated": (modulations.find, modulations.find_behind), "gated": (gates.find,)}
JOINS = "rotary", *FINDERS, *folding.JOINS  # what becomes one op together with a norm, by the names that a user gives
Result = TypeVar("Result")


def joins_of(join: str | Iterable[str]) -> frozenset[str]:
    """The names in what a user has given."""
    one = isinstance(join, str) or not isinstance(join, Iterable)
    names = frozenset(JOINS if join == "all" else [join] if one else join)
    if not names.issubset(JOINS):
        raise ValueError(f"join must be 'all' or names among {', '.join(map(repr, JOINS))}, got {join!r}")
    return names


def compiled(model: Any, compile: Callable[[], Result], joins: Set[str]) -> Result:
    """What `compile` makes of the model, in whose graphs ops replace the norms that pay, and those that are joined.

    What Inductor fuses, and what it keeps in memory, depends on how a gradient is written. So the gradient of a norm
    that stays with Inductor has to be that of the model's own code (bench/NOTES.md, "integrations/written.py").
    """
    left: set[str] = set()
    while True:
        with routing.noting() as forget:
            before = make_ops(model, left, joins)
            try:
                return compile()
            except LeftToInductor as norms:
                left |= norms.marks
                forget(but=norms.marks)
        for each, graph in before.items():
            each.graph = graph


def make_ops(model: Any, left: Container[str], joins: Set[str]) -> dict[GraphModule, Graph]:
    """Replace the norms in the graphs of a model, but for those whose marks are in `left`. Returns the graphs that were
    there before."""
    packed = "y" if "packed" in joins else "x"  # what has to be contiguous
    before: dict[GraphModule, Graph] = {}
    marks, join_marks = (map(f"{name}{{}}".format, itertools.count()) for name in (MARK, JOINED))
    for each in model.modules() if hasattr(model, "modules") else ():
        if isinstance(each, GraphModule):
            nodes, written = each.graph.nodes, memory_written_in(each.graph)
            found = [norm for node in nodes if (norm := find(node)) and not is_disturbed(written, norm.y, norm.inputs)]
            called = [norm for node in nodes if joins and (norm := find_called(node))]
            norms = sorted([*found, *called], key=lambda norm: norm.y)
            pairs = [*rotations.pairs_of(norms, written)] if "rotary" in joins else []
            joined = {of.norm.y for pair in pairs for of in pair.both}
            marks_of = dict(zip((norm.y for norm in norms), join_marks, strict=False))
            others = [norm for norm in norms if norm.y not in joined and marks_of[norm.y] not in left]
            finders = [each for name, finders in FINDERS.items() if name in joins for each in finders]
            calls = [(marks_of[of.norm.y], of) for of in joining.joined(others, finders, written)]
            joined |= {of.norm.y for _, of in calls}
            marked = [
                (mark, joining.alone(norm)) for norm, mark in zip(found, marks, strict=False)
                if mark not in left and norm.y not in joined and value_of(getattr(norm, packed)).is_contiguous()
            ]  # fmt: skip
            if marked or joined:
                before[each] = _copied(each.graph)
                _make_ops(each, [*calls, *marked], pairs)
    return before


def _copied(graph: Graph) -> Graph:
    """With what Dynamo keeps on the nodes beside their meta."""
    copied = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, copied.nodes, strict=True):
        for name in vars(old).keys() - vars(new).keys():
            setattr(new, name, getattr(old, name))
    return copied


def _make_ops(model: GraphModule, calls: list[tuple[str, Joined]], pairs: list[Pair]) -> None:
    made: dict[Node, Node] = {}  # by what they replace, which may be the input of a later norm
    for mark, each in calls:
        joining.make_op(model.graph, each, mark, made)
    for pair in pairs:
        rotations.make_op(model.graph, pair, made)
    for each in reversed(model.graph.nodes):  # other code may be there for its side effects
        if not each.users and (kind_of(each) is not None or each.target in BUILT_IN | OURS):
            model.graph.erase_node(each)
    model.recompile()
