"""Finds modulated norms (adaLN) in Dynamo's graph, with the sum that they normalize, and makes one op of each.

    h = residual + gate * branch                or residual + branch, or no sum
    y = norm(h) * (1 + scale) + shift           a norm by hand or torch's; with or without shift and casts

Inductor computes the gradients of scale, shift and gate, which are sums over the rows of a sample, in kernels of their
own, and reads a row twice forward. The op reads and writes each large tensor once in each direction. Its results are
rounded once, where code in 16 bits rounds at each step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.virtualized import V
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

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
from .paying import reached
from .written import (
    Written,
    is_cast_to,
    kind_of,
    only_user,
    other_factor,
    reads_any,
    terms_of,
    uncast,
    value_of,
    with_number,
)

REASON = "each large tensor once, with what modulates the norm and the sum before it"
SAMPLE = 2, 1024  # samples and their rows, to ask whether there are kernels: any numbers


class Sum(NamedTuple):
    """residual + gate * branch, or residual + branch."""

    branch: Node
    residual: Node
    gate: Node | None


class Modulated(NamedTuple):
    """A norm of `h`, a sum or not, with what modulates it, whose result is `y`."""

    norm: Written
    h: Node
    y: Node
    scale: Node
    shift: Node | None
    sum: Sum | None = None

    @property
    def op(self) -> Op:
        of = "" if self.sum is None else "_of_gated_sum" if self.sum.gate else "_of_sum"
        return OPS[f"{self.norm.norm}_norm_{WAYS[FORWARD]}{of}_modulated"]

    @property
    def form(self) -> str:
        """As the report names it."""
        return self.op.suffix.strip("_").replace("_", " ")

    @property
    def tensors(self) -> dict[str, Node]:
        """The op's operands that are tensors."""
        x, rows = (self.sum.branch, self.sum._asdict()) if self.sum else (self.h, {})
        given = {"x": x, "weight": self.norm.weight, "bias": self.norm.bias, "scale": self.scale, "shift": self.shift}
        return {name: each for name, each in (rows | given).items() if name != "branch" and each is not None}

    def arguments(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The op's, with these tensors."""
        of_norm = {name: each for name, each in self.norm.settings.items() if name in ("weight_offset", "rounds_x_hat")}
        h = value_of(self.h)
        return tensors | of_norm | {"normalized_shape": [h.shape[-1]], "eps": self.norm.eps, "y_dtype": h.dtype}

    @property
    def inputs(self) -> list[Node]:
        return [*self.tensors.values()]

    @property
    def replaced(self) -> dict[Node, int]:
        """The results that the op has, and at which place."""
        return {self.y: 0} | ({self.h: len(self.op.outputs) - 1} if self.sum else {})

    def users(self) -> set[Node]:
        """What uses these results beside the code that the op replaces."""
        inputs = self.inputs
        gone = {*reached([self.y], lambda node: () if node in inputs else node.all_input_nodes)} - {*inputs}
        for node in sorted(gone, reverse=True):
            if node not in self.replaced and not gone.issuperset(node.users):
                gone.remove(node)
        return {user for each in self.replaced for user in each.users} - gone


def modulated(norms: Iterable[Written], written: set[int]) -> Iterator[Modulated]:
    """Those of the norms that the op takes. written: the memory that the graph writes in place."""
    for norm in norms:
        taken = (each for each in _find(norm) if _is_taken(each))
        yield from [each for each in [next(taken, None)] if each and not reads_any(written, each.y, each.inputs)]


def make_op(graph: Graph, found: Modulated, made: dict[Node, Node]) -> None:
    """Replace the norm, and add what replaces it to `made`, which has what replaces results of norms before."""
    place, y = min(found.users()), found.y
    tensors = {name: made.get(each, each) for name, each in found.tensors.items()}
    with graph.inserting_before(place):
        op = graph.call_function(getattr(TORCH_OPS, found.op.name).default, (), found.arguments(tensors))
        outputs = {old: graph.call_function(operator.getitem, (op, at)) for old, at in found.replaced.items()}
    op.meta = {name: each for name, each in y.meta.items() if name != "example_value"}
    routing.mark(op, routing.JOINED)
    for old, new in outputs.items():
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        made[old] = new
    for way in WAYS.values():
        routing.note(OPS[f"{found.norm.norm}_norm_{way}"], value_of(found.h), True, REASON, y.meta, found.form)


def _find(norm: Written) -> Iterator[Modulated]:
    """The ways to see it, the best first: with the sum, of which a model may also use a cast."""
    found = _modulated(norm, norm.x)
    while found:
        if summed := _sum_of(found):
            yield found._replace(sum=summed)
        if (h := uncast(found.h)) is found.h:
            yield found
            return
        found = _modulated(norm, h)


def _modulated(norm: Written, h: Node) -> Modulated | None:
    y = norm.y
    while _is_float_cast(user := only_user(y)):
        y = user
    product = only_user(y)
    factor = other_factor(y, product)
    scale, one = with_number(factor)
    if one != 1.0 or not _is_modulation(scale := uncast(scale), h):
        return None
    y, shift, summed = product, None, only_user(product)
    terms = terms_of(summed, "add") or []
    if product in terms and _has_shape_of(other := terms[terms[0] is product], scale):
        y, shift = summed, uncast(other)
    while value_of(y).dtype != value_of(h).dtype and is_cast_to(user := only_user(y), value_of(h)):
        y = user
    return Modulated(norm, h, y, scale, shift)


def _sum_of(found: Modulated) -> Sum | None:
    """What h is a sum of."""
    total = found.h
    while kind_of(total) == "cast" and only_user(total.args[0]) is total:
        total = total.args[0]
    terms = [uncast(each) for each in terms_of(total, "add") or ()]
    if not terms or not all(_has_shape_of(each, found.h) for each in terms):
        return None
    for residual, product in (terms, terms[::-1]):
        for gate, branch in _factors(product):
            if _has_shape_of(gate, found.scale) and _has_shape_of(branch, found.h) and only_user(product):
                return Sum(branch, residual, gate)
    return Sum(*terms, None)


def _factors(product: Node) -> list[tuple[Node, Node]]:
    """The two factors of a product, in both orders."""
    factors = [uncast(each) for each in terms_of(product, "mul") or ()]
    return [(one, other) for one, other in (factors, factors[::-1])] if factors else []


def _is_taken(found: Modulated) -> bool:
    tensors, h = {name: value_of(each) for name, each in found.tensors.items()}, value_of(found.h)
    rows = [tensors["x"], value_of(found.y), *([tensors["residual"]] if found.sum else [])]
    modulations = [tensors[name] for name in ("scale", "shift", "gate") if name in tensors]
    if {each.dtype for each in rows} != {h.dtype} or not all(each.is_contiguous() for each in (h, value_of(found.y))):
        return False
    if any(each.dtype not in (h.dtype, torch.float32) for each in modulations) or V.aot_compilation:
        return False
    users = found.users()
    if not users or max(found.inputs) > min(users):
        return False
    arguments = found.arguments(tensors)
    try:
        validate(operands_of(found.op.name, (), arguments))
    except RuntimeError:
        return False
    return h.device.type != "cuda" or has_kernels(found.op, arguments, gpus.spec_of(h.device))


def has_kernels(op: Op, arguments: dict[str, Any], device: DeviceSpec) -> bool:
    """Whether a modulated norm with these arguments has one in both directions, whatever the number of rows is."""
    given = dict(arguments)
    for slot in op.inputs:
        if isinstance(each := given.get(slot.name), Tensor):
            is_shared = slot.role is Role.MODULATION and statically_known_true(each.shape[-2] == 1)
            batch = () if slot.role is Role.PARAMETER else (SAMPLE[0], 1) if is_shared else SAMPLE
            given[slot.name] = torch.empty(*batch, each.shape[-1], dtype=each.dtype, device="meta")
    forward = operands_of(op.name, (), given)
    x, rstd = given["x"], torch.empty(*SAMPLE, 1, dtype=torch.float32, device="meta")
    saved = {"suffix": op.backward, "x": x, "mean": rstd, "rstd": rstd, "branch": x if "gate" in given else None}
    grads = {"grad_out": x, "residual_grad": x if "residual" in given else None}
    backward = backward_of(op.name, **(forward._asdict() | saved | grads))
    problems = check_forward(forward).problem, check_backward(backward).problem
    return not any(isinstance(choice.choose(each, SAMPLE[1], device), ReferencePlan) for each in problems)


def _is_float_cast(node: Node | None) -> bool:
    source = node.args[0] if kind_of(node) == "cast" else None
    return source is not None and value_of(node).device == value_of(source).device and _is_float(node)


def _is_float(node: Any) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype in FLOAT_DTYPES


def _has_shape_of(node: Any, other: Node) -> bool:
    if not _is_float(node):
        return False
    shapes = value_of(node).shape, value_of(other).shape
    return len(shapes[0]) == len(shapes[1]) and all(map(_is_equal, *shapes))


def _is_modulation(node: Any, h: Node) -> bool:
    """Whether it has h's columns, and h's other dims, the first ones whole and the rest 1: then rows that share one are
    next to each other."""
    if not _is_float(node) or value_of(node).dim() != value_of(h).dim():
        return False
    *batch, cols = value_of(node).shape
    *whole, width = value_of(h).shape
    ones = [_is_equal(size, 1) for size in batch]
    first = next((at for at in range(len(batch)) if all(ones[at:])), len(batch))
    return _is_equal(cols, width) and all(map(_is_equal, batch[:first], whole))


def _is_equal(one: Any, other: Any) -> bool:
    return statically_known_true(one == other)
