"""Forwards in a joint graph that run as ops: those that cut no fusion (paying.py).

    y = norm(h)         of h in memory; or of h = x + residual, which is an output, too; with casts and offset + weight

Inductor reads a row of many columns for its statistics, and again to normalize it. The op reads it once. What is
element-wise before or behind the norm would be a kernel of its own, so that such a norm becomes Inductor's code again.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node, map_arg

from ..dtypes import FLOAT_DTYPES, SIXTEEN_BITS
from ..operands import FORWARD, OPS, Op, Role
from . import edits, paying, routing
from .edits import CAST, arguments_of, call_before, call_op, dtype_of, is_shape, without_offset

aten = torch.ops.aten
READ_ONCE = 1024  # columns: rows of so many Inductor keeps in registers
REASON = "each tensor is read once, and nothing would be fused"
TAGS = "recompute", "ac_graph_id"  # of activation checkpointing


class Decision(NamedTuple):
    """On a norm, to be noted when that on its backward is known."""

    op: Op
    x: torch.Tensor
    why: str | None  # Inductor runs it
    meta: dict[str, Any]
    form: str

    def note(self, left: set[str]) -> None:
        """left: the marks of norms by hand whose backwards Inductor runs. It gets all of these."""
        is_left = routing.mark_of(self.meta) in left
        why = self.why or ("its backward stays there" if is_left else None)
        routing.note(self.op, self.x, not why, why or REASON, self.meta, self.form)


def concerns(node: Node) -> bool:
    """Whether it is a forward on which is decided here."""
    op = routing.op_of(node)
    if not op or op.direction != FORWARD or routing.is_joined(routing.mark_of(node.meta)):
        return False
    return routing.waits(op, map_arg(arguments_of(node), lambda each: each.meta["val"]))


def settle(graph: Graph, may_stay: bool) -> list[Decision]:
    """Decide on each forward, in place. may_stay: whether one may run our op."""
    return [_settled(node, may_stay) for node in list(graph.nodes) if concerns(node)]


class Folded(NamedTuple):
    """A forward with what the op can include."""

    op: Op
    arguments: dict[str, Any]
    replaced: dict[int, Node]  # what the op's outputs replace

    @property
    def inputs(self) -> dict[str, Node]:
        return {name: each for name in ("x", "residual") if (each := self.arguments.get(name)) is not None}

    @property
    def outputs(self) -> dict[str, Node]:
        names = {0: "y", len(self.op.outputs) - 1: "the sum"}
        is_row = {at for at, output in enumerate(self.op.outputs) if output.role is Role.ROWS}
        return {names[at]: each for at, each in self.replaced.items() if at in is_row}


def _settled(node: Node, may_stay: bool) -> Decision:
    op, x = routing.op_of(node), arguments_of(node)["x"].meta["val"]
    folded = _folded(node, op)
    why = _why_inductor(node, folded) if may_stay else routing.NARROW
    form = routing.form_of(op if why else folded.op, arguments_of(node) if why else folded.arguments)
    decision = Decision(op, x, why, node.meta, form)
    if why:
        edits.write_out(node)
    else:
        _replace(node, folded)
    return decision


def _why_inductor(node: Node, folded: Folded) -> str | None:
    values = [each.meta["val"] for each in (*folded.inputs.values(), *folded.outputs.values())]
    if values[0].shape[-1] <= READ_ONCE:
        return f"fused with its neighbours, and rows of at most {READ_ONCE} columns are read once there, too"
    if not all(each.is_contiguous() for each in values):
        return "rows are not next to each other"
    return paying.why_inductor_forward(node, folded.inputs, folded.outputs, concerns)


def _folded(node: Node, op: Op) -> Folded:
    arguments, replaced = arguments_of(node), {each.args[1]: each for each in node.users if each.users}
    arguments = {slot.name: op.default(slot) for slot in OPS[f"{op.norm}_norm_fwd_affine"].arguments} | arguments
    wide = edits.widened(arguments, ["weight", "bias"] if arguments["rounds_x_hat"] else ["weight", "bias", "x"])
    arguments |= {name: arguments[name].args[0] for name in wide}
    arguments["weight"], offset = without_offset(arguments["weight"])
    arguments["weight_offset"] += offset
    if y := replaced.get(0):
        user = next(iter(y.users))
        is_narrowed = len(y.users) == 1 and user.target is CAST and dtype_of(y) == torch.float32
        if is_narrowed and dtype_of(user) in SIXTEEN_BITS:
            replaced[0] = y = user
        arguments["y_dtype"] = dtype_of(y)
    summands = None if op.suffix == "_of_sum" else _summands(arguments["x"], node)
    op = OPS[f"{op.norm}_norm_fwd{'_of_sum' if summands else op.suffix or '_affine'}"]
    if summands:
        replaced[len(op.outputs) - 1] = arguments["x"]
        arguments |= dict(zip(("x", "residual"), summands, strict=True))
    return Folded(op, arguments, replaced)


def _summands(h: Node, node: Node) -> tuple[Node, Node] | None:
    """The two summands of h, if they have its shape and h is made where the norm is: both are computed again for the
    backward, or neither."""
    if h.target is not aten.add.Tensor or h.kwargs or not all(isinstance(each, Node) for each in h.args):
        return None
    if any(h.meta.get(tag) != node.meta.get(tag) for tag in TAGS):
        return None
    values = [each.meta["val"] for each in h.args]
    shape = h.meta["val"].shape
    are_alike = all(each.dtype in FLOAT_DTYPES and is_shape(each.shape, shape) for each in values)
    is_wide = torch.promote_types(*[each.dtype for each in values]) == dtype_of(h)
    return tuple(h.args) if are_alike and is_wide and h.args[0] is not h.args[1] else None


def _replace(node: Node, folded: Folded) -> None:
    new = call_op(node, folded.op, folded.arguments)
    for at, old in folded.replaced.items():
        old.replace_all_uses_with(call_before(node, operator.getitem, (new, at)))
