"""A pass over Inductor's joint graph that folds casts and additions around a norm's backward into the op. Before that
it joins norms of packed q and k (packing.py), decides on forwards (forwards.py), and looks which joins pay (paying.py).

Inductor cannot fuse into an op that it does not know. A cast before the op or an addition after it is then a kernel of
its own that reads and writes whole tensors. layer_norm_bwd_residual and rms_norm_bwd_residual include this work:

    grad_out.float(), x.float()     the op reads the 16-bit tensor itself; weight and bias likewise
    dx.to(dtype)                    the op rounds dx once, to that dtype
    dx + residual                   the op adds the residual before it rounds dx
    weight + 1                      the op's weight_offset

Every value stays the same or is rounded less often. A backward that does not pay as an op, although it includes this
work, becomes what Inductor would have without us (paying.py). The pass runs on the joint graph, before its partition
into forward and backward: the partition saves the op's inputs for the backward, which would otherwise be the float32
copies.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.virtualized import V
from torch.fx import Graph, Node

from ..dtypes import FLOAT_DTYPES, SIXTEEN_BITS
from ..namespace import TORCH_OPS
from ..operands import BACKWARD, FORWARD, OPS, Op, Role
from . import edits, forwards, gathering, packing, paying, routing
from .edits import CAST, arguments_of, call_before, call_op, dtype_of, is_cast, is_shape, without_offset
from .routing import op_of

aten, ours = torch.ops.aten, TORCH_OPS

WITH_RESIDUAL = [op for op in OPS.values() if op.suffix == "_residual"]
FOLDED = {  # per op: the op that takes a residual gradient as well, which may be the op itself
    getattr(ours, each.name).default: op for op in WITH_RESIDUAL for each in (op, op._replace(suffix=""))
}
JOINS = "packed", "forwards"  # what packing.py and forwards.py make
DX_DTYPES = (*SIXTEEN_BITS, torch.float32)


class FoldIntoNorms(CustomGraphPass):
    """Runs the pass that was installed before, then decides and folds."""

    def __init__(self, before: Callable[[Graph], None] | None = None, joins: Set[str] = frozenset()) -> None:
        self.before, self.joins = before, joins

    def __call__(self, graph: Graph) -> None:
        if self.before is not None:
            self.before(graph)
        fold(graph, self.joins)

    def uuid(self) -> Any | None:
        own = "fusednorm", *sorted(self.joins)  # the tag of the caches' keys tells versions apart (inductor.py)
        if self.before is None:
            return own
        before = self.before.uuid() if isinstance(self.before, CustomGraphPass) else None
        return before and (before, own)  # None, which turns caching off, if the earlier pass has no identity


def appended_to(custom_pass, joins: Set[str] = frozenset()):
    """A value for Inductor's joint_custom_post_pass: the earlier value followed by our pass, which is added once."""
    if isinstance(custom_pass, (list, tuple)):  # not in torch 2.11, which takes one pass only
        is_there = any(isinstance(each, FoldIntoNorms) for each in custom_pass)
        return custom_pass if is_there else [*custom_pass, FoldIntoNorms(None, joins)]
    return custom_pass if isinstance(custom_pass, FoldIntoNorms) else FoldIntoNorms(custom_pass, joins)


class LeftToInductor(Exception):  # noqa: N818  no error: the graph is to be traced again
    """Norms by hand stay with Inductor, or norms are not one op with what surrounds them. `marks` names them."""

    def __init__(self, marks: set[str]) -> None:
        super().__init__(marks)
        self.marks = marks


def makes_any(joins: Set[str]) -> bool:
    """Whether forwards have to be ops until the graph is known."""
    return not joins.isdisjoint(JOINS)


def fold(graph: Graph, joins: Set[str] = frozenset()) -> int:
    """Fold around every norm backward that stays ours, in place. Returns the number of ops that changed. Raises
    LeftToInductor. joins: what else is made one op, of those in JOINS."""
    by_hand = _norms_by_hand(graph)
    if gathering.IS_WRONG:
        gathering.add_up(graph)
    packed = packing.join(graph) if "packed" in joins else []
    if packed:
        _tidy(graph)
    decisions = forwards.settle(graph, "forwards" in joins) if makes_any(joins) else []
    changed = len(packed) + sum(not each.why for each in decisions)
    unpaid = _joined_in_vain(graph)
    folded = [_fold_around(node) for node in list(graph.nodes) if node.target in FOLDED]
    changed += sum(folded)
    if changed:
        _tidy(graph)
    left = unpaid | by_hand - _norms_by_hand(graph).union(*packed)
    for each in decisions:
        each.note(left)
    if left:
        raise LeftToInductor(left)
    return changed


def _tidy(graph: Graph) -> None:
    stable_topological_sort(graph)  # an input of an op may have been computed after it
    graph.eliminate_dead_code()


def _norms_by_hand(graph: Graph) -> set[str]:
    """The marks of those that our ops run, but for forwards on which forwards.py decides."""
    marks = {routing.mark_of(node.meta) for node in graph.nodes if op_of(node) and not forwards.concerns(node)}
    return {mark for mark in marks if mark and not routing.is_joined(mark)}


def _joined_in_vain(graph: Graph) -> set[str]:
    """The marks of norms that do not pay as one op with what surrounds them. Notes why."""
    unpaid = set()
    for node in graph.nodes:
        op, mark = op_of(node), routing.mark_of(node.meta)
        if op and op.direction == FORWARD and routing.is_joined(mark):
            forward = _call(node, op)
            calls = [forward, *(_call(each, op_of(each)) for each in _backwards_of(node, op))]
            if why := paying.why_apart(calls, op.suffix):
                unpaid.add(mark)
                for each in calls:
                    x = forward.reads["x"].meta["val"]
                    routing.note(op_of(each.node), x, False, why, node.meta, routing.form_of_join(op))
    return unpaid


def _backwards_of(forward: Node, op: Op) -> list[Node]:
    """By the statistics that they read: a mark may be that of the op behind it, to whose node AOTAutograd has given the
    same number."""
    at = [each.name for each in op.outputs].index("rstd")
    statistics = [each for each in forward.users if each.args[1] == at]
    readers = paying.reached(statistics, lambda each: () if op_of(each) else each.users)
    return [each for each in readers if (read := op_of(each)) and read.direction == BACKWARD]


def _call(node: Node, op: Op) -> paying.Call:
    arguments = arguments_of(node)
    rows = [slot.name for slot in op.inputs if slot.role in (Role.ROWS, Role.PACKED_ROWS)]
    reads = {name: arguments[name] for name in rows if isinstance(arguments.get(name), Node)}
    outputs = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    writes = {each.name: outputs[at] for at, each in enumerate(op.outputs) if each.role is Role.ROWS and at in outputs}
    return paying.Call(node, reads, writes)


def _fold_around(node: Node) -> bool:
    op = FOLDED[node.target]
    rows = [slot.name for slot in op.inputs if slot.role is Role.ROWS]
    parameters = [output.like for output in op.outputs[1:]]  # whose gradients these outputs are
    arguments = {slot.name: op.default(slot) for slot in op.arguments} | arguments_of(node)
    mask = arguments["output_mask"]
    arguments["output_mask"] = [*mask, *[False] * (len(op.outputs) - len(mask))]
    getitems = [user for user in node.users if user.users]
    outputs = {getitem.args[1]: getitem for getitem in getitems}
    if len(outputs) < len(getitems):
        return False  # two getitems of one output: unexpected, because Inductor's own passes merge them
    residual = arguments["residual_grad"]
    tail = _follow(outputs, residual) if 0 in outputs else Tail(None, dtype_of(arguments["x"]), residual)
    weight, offset = without_offset(arguments["weight"])
    arguments |= {"weight": weight, "weight_offset": arguments["weight_offset"] + offset}
    wide = [*edits.widened(arguments, rows), *_widened_parameters(arguments, parameters, outputs)]
    folds = wide or offset or tail.node is not outputs.get(0)
    arguments |= {name: arguments[name].args[0] for name in wide}
    arguments["residual_grad"] = tail.residual
    if _is_left_to_inductor(node, op, arguments, tail.node) or not folds:
        return False
    new = call_op(node, op, arguments | {"dx_dtype": tail.dtype})
    for index, output in outputs.items():
        replaced = [tail.node] if index == 0 else [output]
        if index and parameters[index - 1] in wide:
            replaced = list(output.users)  # casts of the gradient back to the parameter's dtype
        value = call_before(node, operator.getitem, (new, index))
        for old in replaced:
            old.replace_all_uses_with(value)
    return True


def _is_left_to_inductor(node: Node, op: Op, arguments: dict[str, Any], dx: Node | None) -> bool:
    """Decides and notes it. arguments and dx are those of the folded op."""
    x, inputs = arguments["x"], {name: arguments[name] for name in ("grad_out", "residual_grad")}
    if x.meta["val"].device.type not in routing.DEVICE_TYPES or V.aot_compilation:
        return False  # a call in the user's code
    why = paying.why_inductor(node, op.norm, any(arguments["output_mask"][1:]), x, inputs, dx)
    form = routing.form_of(op, arguments)
    routing.note(op, x.meta["val"], not why, why or routing.REASONS[BACKWARD], node.meta, form)
    if why:
        edits.write_out(node)
    return bool(why)


@dataclass(frozen=True)
class Tail:
    """The work after dx that the op can include. `node` is the result: dx in `dtype`, plus the residual if any."""

    node: Node | None
    dtype: torch.dtype
    residual: Node | None = None


def _follow(outputs: dict[int, Node], residual: Node | None) -> Tail:
    """Follow dx through casts and at most one addition, while each is the only use of the value before it. residual is
    what the op adds already."""
    dx = outputs[0]
    tail = Tail(dx, dtype_of(dx), residual)
    others = [output for index, output in outputs.items() if index]
    after_other_outputs = {*paying.reached(others, lambda node: node.users)}
    while len(tail.node.users) == 1:
        (user,) = tail.node.users
        dtype, narrowed = dtype_of(user), tail.dtype in SIXTEEN_BITS and tail.dtype != dtype_of(dx)
        if dtype not in (*DX_DTYPES, dtype_of(dx)) or (narrowed and dtype != tail.dtype):
            break  # dtypes that the op cannot write; or dx was narrowed on purpose and then widened again
        residual = _other_summand(user, tail.node)
        if user.target is CAST:
            tail = replace(tail, node=user, dtype=dtype)
        elif residual and not tail.residual and residual not in after_other_outputs:
            tail = Tail(user, dtype, residual)
        else:
            break
    return tail


def _other_summand(user: Node, dx: Node) -> Node | None:
    """The other summand if `user` adds a float tensor of the same shape to dx; else None."""
    if user.target is not aten.add.Tensor or user.kwargs:
        return None
    a, b = user.args
    other = b if a is dx else a
    if not isinstance(other, Node) or other is dx or dtype_of(other) not in FLOAT_DTYPES:
        return None
    return other if is_shape(other.meta["val"].shape, dx.meta["val"].shape) else None


def _widened_parameters(arguments: dict[str, Any], parameters: list[str], outputs: dict[int, Node]) -> list[str]:
    """The parameters that are float32 copies of 16-bit tensors and whose gradient is used only in the 16-bit dtype. The
    folded op returns the gradient in that dtype."""
    found = []
    for index, name in enumerate(parameters, start=1):
        uses = outputs[index].users if index in outputs else ()
        if edits.widened(arguments, [name]):
            dtype = dtype_of(arguments[name].args[0])
            if all(is_cast(use, (torch.float32,), dtype) for use in uses):
                found.append(name)
    return found


