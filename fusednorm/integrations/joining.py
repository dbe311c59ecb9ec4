"""Makes one op of a norm in Dynamo's graph and of what surrounds it (modulations.py, gates.py).

A norm is joined if the op takes the tensors, has kernels in both directions, and can stand before all that uses its
results. Its forward is ours, too, unless the op does not pay: folding.py finds that out, and the norm is traced again
without it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.virtualized import V
from torch.fx import Graph, Node

from ..dtypes import FLOAT_DTYPES
from ..host import gpus
from ..namespace import TORCH_OPS
from ..operands import FORWARD, OPS, WAYS, Op, Role, backward_of, operands_of
from ..planner import choice
from ..planner.device import DeviceSpec
from ..planner.plan import ReferencePlan
from ..problem.calls import check_backward, check_forward
from ..problem.validation import validate
from . import routing
from .edits import is_equal, is_shape
from .paying import reached
from .written import Written, is_cast_to, is_disturbed, kind_of, only_user, read_by, value_of

REASON = "one op with what surrounds the norm, which moves each large tensor once"
SAMPLE = 2, 1024  # samples and their rows, to ask whether there are kernels: any numbers


class Joined(NamedTuple):
    """A norm with what surrounds it, as a call of an op."""

    norm: Written
    op: Op
    h: Node  # of y's shape
    operands: dict[str, Node | None]  # tensors
    settings: dict[str, Any]  # operands of the op's form; its y_dtype is that of y
    replaced: dict[Node, int]  # the results that the op has, y first, and at which place
    views: dict[str, Node] = {}  # of operands that the op gets as views: of what has their shape and dtype

    @property
    def y(self) -> Node:
        return next(iter(self.replaced))

    @property
    def tensors(self) -> dict[str, Node]:
        return {name: each for name, each in self.operands.items() if each is not None}

    @property
    def inputs(self) -> list[Node]:
        return [*self.tensors.values()]

    @property
    def place(self) -> Node:
        """The first node behind which the op can stand, and before what only looks at the results, such as code without
        gradients."""
        return max(min(self.replaced), *self.inputs)

    @property
    def values(self) -> dict[str, Tensor]:
        """The operands' as the op gets them."""
        return {name: value_of(self.views.get(name, each)) for name, each in self.tensors.items()}

    def arguments(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The op's, with these tensors."""
        cols, y_dtype = value_of(self.h).shape[-1], value_of(self.y).dtype
        return tensors | self.settings | {"normalized_shape": [cols], "eps": self.norm.eps, "y_dtype": y_dtype}

    def gone(self) -> set[Node]:
        """The code that the op replaces."""
        inputs = self.inputs
        gone = {*reached([self.y], lambda node: () if node in inputs else read_by(node))} - {*inputs}
        for node in sorted(gone, reverse=True):
            if node not in self.replaced and not gone.issuperset(node.users):
                gone.remove(node)
        return gone

    def users(self) -> set[Node]:
        """What uses the results beside that code."""
        return {user for each in self.replaced for user in each.users} - self.gone()


def alone(norm: Written) -> Joined:
    """A norm by hand as an op of its own."""
    op = OPS[f"{norm.norm}_norm_{WAYS[FORWARD]}_affine"]
    return Joined(norm, op, norm.x, {"x": norm.x, "weight": norm.weight}, norm.settings, {norm.y: 0})


Finder = Callable[[Written], Iterable[Joined]]  # the ways to see a norm, the best first


def joined(norms: Iterable[Written], finders: Iterable[Finder], written: set[int]) -> Iterator[Joined]:
    """Those of the norms that ops take. written: the memory that the graph writes in place."""
    replaced: set[Node] = set()
    inside: set[Node] = set()  # what other ops replace, but for their results
    for norm in norms:
        found = (each for find in finders for each in find(norm))
        ways = (each for each in found if replaced.isdisjoint(each.replaced) and inside.isdisjoint(each.inputs))
        first = next(filter(_is_taken, ways), None)
        if first and not is_disturbed(written, first.y, first.inputs):
            replaced.update(first.replaced)
            inside |= first.gone() - {*first.replaced}
            yield first


def make_op(graph: Graph, found: Joined, mark: str, made: dict[Node, Node]) -> None:
    """Replace the norm, and add what replaces it to `made`, which has what replaces results of norms before."""
    tensors = {name: made.get(each, each) for name, each in found.tensors.items()}
    with graph.inserting_before(found.place.next):
        for name, view in found.views.items():
            tensors[name] = graph.create_node(view.op, view.target, (tensors[name], *view.args[1:]), view.kwargs)
            tensors[name].meta = dict(view.meta)
        op = graph.call_function(getattr(TORCH_OPS, found.op.name).default, (), found.arguments(tensors))
        outputs = {old: graph.call_function(operator.getitem, (op, at)) for old, at in found.replaced.items()}
    op.meta = {name: each for name, each in found.y.meta.items() if name != "example_value"}
    routing.mark(op, mark)
    for old, new in outputs.items():
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        made[old] = new
    for way in WAYS.values() if routing.is_joined(mark) else ():
        of = OPS[f"{found.norm.norm}_norm_{way}"]
        routing.note(of, value_of(found.h), True, REASON, op.meta, routing.form_of_join(found.op))


def _is_taken(found: Joined) -> bool:
    tensors, h, y = found.values, value_of(found.h), value_of(found.y)
    stream = {y.dtype, *(tensors[name].dtype for name in ("x", "residual") if name in tensors)}
    is_wide = h.dtype != torch.float64 and any(each.dtype == torch.float64 for each in tensors.values())
    if stream != {h.dtype} or is_wide or V.aot_compilation:
        return False
    inputs, users = found.inputs, found.users()
    is_first = users and found.replaced.keys().isdisjoint(inputs) and max(inputs) < min(users)
    are_packed = all(value_of(each).is_contiguous() for each in found.replaced)
    if not is_first or not are_packed or _has_switch(min(found.replaced), found.place):
        return False
    arguments = found.arguments(tensors)
    try:
        validate(operands_of(found.op.name, (), arguments))
    except RuntimeError:
        return False
    return h.device.type != "cuda" or has_kernels(found.op, arguments, gpus.spec_of(h.device))


def _has_switch(first: Node, last: Node) -> bool:
    """Whether gradients are turned on or off from one node to a later one."""
    while first is not last:
        first = first.next
        if first.target is torch._C._set_grad_enabled:
            return True
    return False


def has_kernels(op: Op, arguments: dict[str, Any], device: DeviceSpec) -> bool:
    """Whether an op with these arguments has one in both directions, whatever the number of rows is."""
    given = dict(arguments)
    for slot in op.inputs:
        if isinstance(each := given.get(slot.name), Tensor):
            is_shared = slot.role is Role.MODULATION and is_equal(each.shape[-2], 1)
            batch = () if slot.role is Role.PARAMETER else (SAMPLE[0], 1) if is_shared else SAMPLE
            given[slot.name] = torch.empty(*batch, each.shape[-1], dtype=each.dtype, device="meta")
    forward = operands_of(op.name, (), given)
    x, groups = given["x"], given.get("groups", 1)
    rstd = torch.empty(*SAMPLE, groups, dtype=torch.float32, device="meta")
    saved = {"suffix": op.backward, "x": x, "mean": rstd, "rstd": rstd, "branch": x if "gate" in given else None}
    grads = {"grad_out": x, "residual_grad": x if op.outputs[-1].name == "new_residual" else None}
    backward = backward_of(op.name, **(forward._asdict() | saved | grads))
    problems = check_forward(forward).problem, check_backward(backward).problem
    return not any(isinstance(choice.choose(each, SAMPLE[1], device), ReferencePlan) for each in problems)


def behind_float_casts(y: Node) -> Node:
    """What is left of y behind casts to other float dtypes, each the only use of the one before."""
    while _is_float_cast(user := only_user(y)):
        y = user
    return y


def narrowed_to(y: Node, h: Node) -> Node:
    """y behind a cast to h's dtype, if it has another."""
    while value_of(y).dtype != value_of(h).dtype and is_cast_to(user := only_user(y), value_of(h)):
        y = user
    return y


def _is_float_cast(node: Node | None) -> bool:
    source = node.args[0] if kind_of(node) == "cast" else None
    return source is not None and value_of(node).device == value_of(source).device and is_float(node)


def is_float(node: Any) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype in FLOAT_DTYPES


def has_shape_of(node: Any, other: Node) -> bool:
    return is_float(node) and is_shape(value_of(node).shape, value_of(other).shape)
