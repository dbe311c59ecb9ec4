"""Which norms of a joint graph pay as ops of ours, and which stay with Inductor: backwards, forwards, and both together
where a norm is one op with what surrounds it.

Inductor fuses a norm with its element-wise neighbours. An op is a barrier: a gradient that an element-wise kernel makes
must be written and read again, and so must a dx that one uses. For backwards and joins the rule compares this traffic
with that which our kernel saves. Both are counted in tensors of x's size in bytes, so neither depends on the number of
rows. A forward alone saves less than one such tensor: it pays where none would move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..planner import limits
from . import routing

aten = torch.ops.aten

VIEWS = frozenset(
    getattr(aten, name).default
    for name in ("view", "_unsafe_view", "reshape", "permute", "unsqueeze", "expand", "alias", "t")
) | {aten.transpose.int, aten.slice.Tensor, aten.select.int, aten.squeeze.dim, aten.squeeze.dims}
COPIES = {  # element-wise to Inductor, without torch's tag
    torch.ops.prims.convert_element_type.default,
    *(getattr(aten, name).default for name in ("cat", "clone", "constant_pad_nd", "slice_scatter", "select_scatter")),
}
SUMS = {aten.sum.dim_IntList, aten.mean.dim}
REDUCTION = getattr(torch.Tag, "reduction", None)  # the tag that they have in newer releases
REDUCTIONS = SUMS | {aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.var_mean.correction}
LOOKUPS = {aten.embedding.default, aten.index.Tensor, aten.gather.default}  # Inductor fuses them with what reads them


def why_inductor(
    op: Node, norm: str, has_sums: bool, x: Node, inputs: dict[str, Node | None], dx: Node | None
) -> str | None:
    """Why Inductor's code is to run a backward, `op`; None if our op pays.

    has_sums    whether gradients of weight or bias are wanted
    inputs      the row tensors that it reads beside x, by name
    dx          the gradient that it writes, or the sum of it and a residual gradient
    """
    moved = {name: _moved_for({op}, each, x, inputs) for name, each in inputs.items() if each is not None}
    if dx is not None:
        moved["dx"] = _moved_after(dx, x, dx)
    return _why(moved, limits.saved_tensors[norm if has_sums else "no sums"])


class Call(NamedTuple):
    """One of our op, and the row tensors that it reads and writes."""

    node: Node
    reads: dict[str, Node]
    writes: dict[str, Node]


def why_apart(calls: Sequence[Call], suffix: str) -> str | None:
    """Why a norm is not to be one op with what surrounds it; None if that pays. calls: forward and backward. suffix: of
    the forward's name."""
    moved: dict[str, float] = {}
    in_memory: set[Node] = set()
    nodes, x = {call.node for call in calls}, calls[0].reads["x"]
    for call in calls:
        for name, each in call.reads.items():
            if each not in in_memory:
                moved[name] = _moved_for(nodes, each, x, call.reads, is_backward=call is not calls[0])
        for name, each in call.writes.items():
            moved[name] = _moved_after(each, x, call.node)
        in_memory |= {*call.reads.values(), *call.writes.values()}
    return _why(moved, limits.saved_by_joins[suffix])


def _why(moved: dict[str, float], saved: float) -> str | None:
    more = sum(moved.values())
    if not more or more < saved:
        return None
    names = " and ".join(name for name, tensors in moved.items() if tensors)
    moved = f"our op would move {more:g} tensors of x's size more there, and {saved:g} less itself"
    return f"fused with element-wise code at {names}: {moved}"


def why_inductor_forward(
    op: Node, inputs: dict[str, Node], outputs: dict[str, Node], is_norm: Callable[[Node], bool]
) -> str | None:
    """Why Inductor's code is to run a forward, `op`; None if our op pays: where what it reads is in memory, and what
    uses its results has to read them from there. Else a tensor more would move, which is more than the op saves.

    inputs, outputs     the row tensors that it reads and writes, by name
    is_norm             whether a node is a forward of a norm, which Inductor would fuse, too
    """
    cut = [
        name
        for name, each in inputs.items()
        if is_computed(source := _behind_views(each))
        and not _is_before(source, [other for other in inputs.values() if other is not each])
    ]
    tangents = [node for node in op.graph.find_nodes(op="placeholder") if "tangents" in node.name]
    later = {*reached([op, *tangents], lambda node: node.users)}
    ys = [user for user in op.users if user.args[1] == 0]  # of which y may be a cast
    for name, each in outputs.items():
        users = {*_users_behind_views(each)}
        users |= {norm for user in users if _is_for_norms(user) for norm in user.users}
        fused = (user for user in users - {op} if not _is_for_norms(user) and (is_computed(user) or is_norm(user)))
        if any(later.isdisjoint(_kernels_before(user) - {each, *ys}) for user in fused):
            cut.append(name)
    return f"fused with element-wise code at {' and '.join(cut)}" if cut else None


def _is_for_norms(node: Node) -> bool:
    """Whether it is a cast that the norms which read it include."""
    is_cast = node.target is torch.ops.prims.convert_element_type.default
    return is_cast and all(map(routing.op_of, node.users))


def is_computed_with(node: Node) -> bool:
    """Whether Inductor fuses a use of the node with how it is made."""
    return any(is_computed(user) for user in _users_behind_views(node))


def is_computed(node: Node) -> bool:
    """Whether Inductor fuses it with what is element-wise."""
    node = _behind_views(node)
    is_reduction = REDUCTION in getattr(node.target, "tags", ()) or node.target in REDUCTIONS
    return is_fusible(node) or is_reduction or node.target in LOOKUPS


def _kernels_before(node: Node) -> set[Node]:
    """What is not element-wise among that from which it is made."""
    before = reached(node.all_input_nodes, lambda each: each.all_input_nodes if _is_on_the_way(each) else ())
    return {each for each in before if not _is_on_the_way(each)}


def _is_on_the_way(node: Node) -> bool:
    return node.target in VIEWS or is_fusible(node)


def _moved_for(
    ops: Set[Node], read: Node, x: Node, inputs: dict[str, Node | None], is_backward: bool = True
) -> float:
    """The traffic for an input of an op that an element-wise kernel makes. ops: that one, and those that the norm has
    beside it."""
    source = _behind_views(read)
    if not (is_fusible(source) and _is_large(source, x)):
        return 0
    leaves = _leaves(source, x)
    others = [leaf for each in inputs.values() if each not in (read, None) for leaf in _leaves(each, x)]
    if _is_before(source, others):
        return 0  # it is in memory, because a kernel before the norm's reads it there
    users = {*_users_behind_views(source)} - ops
    is_written = any(not (is_fusible(user) or user.target in SUMS) for user in users)
    # A sum over rows, in the backward, reads these tensors in any case. Its kernel can make the input, which ours reads
    # in their place.
    shared = sum(_tensors(leaf, x) for leaf in leaves if is_backward and _is_summed_over_rows(leaf, x))
    return max(0.0, _tensors(read, x) * (1 if is_written else 2) - shared)


def _moved_after(written: Node, x: Node, op: Node) -> float:
    """The traffic for element-wise kernels that use what an op has written. One that runs after what else uses the op
    reads it from memory."""

    def others(user: Node) -> list[Node]:
        return [leaf for leaf in _leaves(user, x) if leaf is not written and op not in leaf.all_input_nodes]

    users = [*_users_behind_views(written)]
    fused = [user for user in users if is_fusible(user) and not _is_before(op, others(user))]
    is_written = len(fused) < len(users)
    return _tensors(written, x) * (1 if is_written else 2) if fused else 0


def _leaves(node: Node, x: Node) -> list[Node]:
    """The large tensors from memory from which element-wise code makes the node."""

    def of_it(each: Node) -> list[Node]:
        inputs = each.all_input_nodes if is_fusible(each) else []
        return [source for source in map(_behind_views, inputs) if _is_large(source, x)]

    start = [source for source in [_behind_views(node)] if _is_large(source, x)]
    return [each for each in reached(start, of_it) if not is_fusible(each)]


def _is_before(node: Node, others: list[Node]) -> bool:
    """Whether one of the others depends on the node."""
    return any(each is node for each in reached(others, lambda each: each.all_input_nodes if node < each else ()))


def _is_summed_over_rows(node: Node, x: Node) -> bool:
    """Whether a sum over rows, which is no part of the norm, reads the tensor."""

    def fused(each: Node) -> list[Node]:
        return [user for user in each.users if (user.target in VIEWS or is_fusible(user)) and _is_large(user, x)]

    return any(
        user.target in SUMS and is_over_rows(user) for each in reached([node], fused) for user in each.users
    )


def reached(start: Iterable[Node], ahead: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """The nodes to which `ahead` leads from the first ones, these included, each once."""
    waiting, seen = list(start), set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += ahead(node)


def is_over_rows(summed: Node) -> bool:
    """Whether a sum leaves the columns apart."""
    rank = len(summed.args[0].meta["val"].shape)
    return rank - 1 not in {dim % rank for dim in summed.args[1] or range(rank)}


def _behind_views(node: Node) -> Node:
    while node.target in VIEWS:
        node = node.args[0]
    return node


def _users_behind_views(node: Node) -> Iterator[Node]:
    for user in node.users:
        if user.target in VIEWS:
            yield from _users_behind_views(user)
        else:
            yield user


def is_fusible(node: Node) -> bool:
    """Whether it is element-wise to Inductor."""
    return node.target in COPIES or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_large(node: Node, x: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and statically_known_true(value.numel() >= x.meta["val"].numel())


def _tensors(node: Node, x: Node) -> float:
    """The part of the node that the norm has, in tensors of x's size."""
    return node.meta["val"].dtype.itemsize / x.meta["val"].dtype.itemsize
