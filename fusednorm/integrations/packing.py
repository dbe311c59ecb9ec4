"""Norms of q and k in a joint graph that are parts of one tensor beside v, as a projection returns it.

Autograd concatenates the gradients of q, k and v. head_norm_bwd_packed makes the whole: it writes those of q and k to
where they belong, and copies v's by the way. It takes the place of two norms' backwards, or of the one that
rotations.py has made of both, and of the concatenation, if the gradient of each part lies where the part lies.

The forwards of two such norms become one op, too, if that cuts no fusion.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.virtualized import V
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..heads import operands as heads
from ..heads.call import HeadProblem
from ..heads.plan import choose
from ..heads.problem import Heads, Packing, Settings, validate
from ..host import gpus
from ..namespace import TORCH_OPS
from ..operands import BACKWARD, FORWARD, OPS, WAYS
from ..planner import limits
from ..planner.plan import ReferencePlan
from . import forwards, paying, routing
from .edits import arguments_of, call_before, dtype_of, is_equal, is_shape

aten = torch.ops.aten
OF_BOTH, BACKWARD_OF_BOTH, OF_PACKED = (getattr(TORCH_OPS, name).default for name in heads.OPS)
REASONS = {
    FORWARD: "one launch for q and k",
    BACKWARD: "the gradient of what q, k and v are parts of is written once",
}
FORM = "of heads"
RESHAPED = {getattr(aten, name).default for name in ("view", "_unsafe_view", "reshape")}
COPIED = {aten.clone.default, aten.alias.default}
MOVED = {aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim}
SCATTERED = {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}
SPLIT = {aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int}


class Part(NamedTuple):
    """The norm of q or of k in a backward."""

    node: Node  # the backward
    forward: Node | None  # of the norm; None if rotations.py has joined it with the other one
    x: Node
    grad: Node
    dx: Node
    weight: Node | None
    bias: Node | None
    sums: tuple[Node | None, Node | None]  # the gradients of weight and bias that are used
    tables: tuple[Node | None, Node | None]
    eps: float | None
    settings: Settings

    @property
    def alike(self) -> tuple:
        """What both parts have alike."""
        tensors = self.x, self.grad, self.weight, self.bias
        dtypes = [None if each is None else each.meta["val"].dtype for each in tensors]
        wanted = [each is not None for each in self.sums]
        tags = [self.node.meta.get(tag) for tag in forwards.TAGS]
        return self.eps, self.settings, self.tables, *dtypes, *wanted, *tags, self.forward is None


class Views(NamedTuple):
    """What makes of one view of memory another one."""

    is_unflattened: bool  # the columns become heads and columns
    squeezed: int | None  # a dim of one element goes
    is_swapped: bool  # dims -2 and -3


class Packed(NamedTuple):
    """q and k with the gradient of the whole."""

    q: Part
    k: Part
    grad_v: Node
    whole: Node  # of which q, k and v are parts
    gradient: Node  # of the whole
    batch: tuple[int | torch.SymInt, ...]  # sizes of its rows
    packing: Packing
    views: list[Views]  # of the gradients of q, k and v, as the op takes them

    @property
    def both(self) -> tuple[Part, Part]:
        return self[:2]

    @property
    def cols(self) -> int:
        return self.q.x.meta["val"].shape[-1]


def join(graph: Graph) -> list[set[str]]:
    """Join what can be joined, in place. Returns the marks of each pair."""
    found = [each for each in list(_found(graph)) if _pays(each) and _is_taken(each) and _has_kernel(each)]
    for each in found:
        _make_backward(each)
        if each.q.forward is not None:
            _make_forward(each)
    return [{mark for part in each.both for mark in routing.marks_of(part.node.meta)} for each in found]


def _found(graph: Graph) -> Iterator[Packed]:
    by_whole: dict[Node, list[Part]] = {}
    for node in graph.nodes:
        for part in _parts_of(node):
            by_whole.setdefault(_whole_of(part.x), []).append(part)
    for whole, parts in by_whole.items():
        if len(parts) == 2 and parts[0].alike == parts[1].alike:
            first, second = (part.x.meta["val"].storage_offset() for part in parts)
            found = _packed(whole, *(parts if statically_known_true(first < second) else parts[::-1]))
            if found:
                yield found


def _parts_of(node: Node) -> list[Part]:
    """The parts whose backward a node is."""
    if node.op != "call_function" or V.aot_compilation:
        return []
    op, is_of_both = routing.op_of(node), node.target is BACKWARD_OF_BOTH
    if not is_of_both and (not op or op.direction != BACKWARD or op.suffix not in ("", "_residual")):
        return []
    given, outputs = arguments_of(node), {each.args[1]: each for each in node.users if each.users}
    if is_of_both:
        return _parts_of_both(node, given, outputs)
    x, forward = given["x"], _whole_of(given["rstd"], paying.VIEWS)
    forward = forward.args[0] if forward.target is operator.getitem else forward
    if 0 not in outputs or not forwards.concerns(forward) or given.get("residual_grad"):
        return []
    of_forward = {"weight_offset": 0.0, "rounds_x_hat": False, "bias": None} | arguments_of(forward)
    names = "x", "normalized_shape", "weight", "weight_offset"
    is_same = all(of_forward[name] == given.get(name, of_forward[name]) for name in names)
    is_of_rows = len(given["normalized_shape"]) == 1 and not of_forward.get("residual")
    if not (is_same and is_of_rows and dtype_of(x) == dtype_of(outputs[0])):
        return []
    named = {name: of_forward[name] for name in ("weight_offset", "rounds_x_hat")}
    tensors = x, given["grad_out"], outputs[0], given["weight"], of_forward["bias"]
    sums = outputs.get(1), outputs.get(2)
    return [Part(node, forward, *tensors, sums, (None, None), of_forward["eps"], Settings(op.norm == "layer", **named))]


def _parts_of_both(node: Node, given: dict[str, Any], outputs: dict[int, Node]) -> list[Part]:
    settings = Settings(**{name: given[name] for name in Settings._fields})
    places = itertools.accumulate(given["output_mask"], initial=0)
    used = [outputs.get(at) if wanted else None for wanted, at in zip(given["output_mask"], places, strict=False)]
    rows = zip(given["inputs"], given["grads"], used[:2], given["weights"], given["biases"], strict=True)
    is_ours = given["inputs"][0].meta["val"].device.type in routing.DEVICE_TYPES
    if not is_ours or None in (*used[:2], *given["grads"]):
        return []
    more = (given["cos"], given["sin"]), given["eps"], settings
    sums = zip(used[2:4], used[4:], strict=True)
    return [Part(node, None, *tensors, of_it, *more) for tensors, of_it in zip(rows, sums, strict=True)]


def _whole_of(x: Node, views: Container = paying.VIEWS | SPLIT) -> Node:
    """The tensor that x is a view of."""
    while x.target in views or (x.target is operator.getitem and x.args[0].target in views):
        x = x.args[0]
    return x


def _packed(whole: Node, q: Part, k: Part) -> Packed | None:
    found = _concatenated(q.dx, k.dx)
    of_whole, *xs = (each.meta["val"] for each in (whole, q.x, k.x))
    if not found or not of_whole.is_contiguous() or not isinstance(xs[0].shape[-1], int):
        return None
    gradient, grad_v, places = found
    if {dtype_of(gradient), dtype_of(grad_v)} != {xs[0].dtype}:
        return None
    start = of_whole.storage_offset()
    if not all(_is_alike(*pair, start) for pair in zip(places, xs, strict=False)):
        return None
    for is_swapped in (False, True):
        of_q, of_k = (_swapped(each, is_swapped) for each in places[:2])
        *batch, count, cols = of_q.shape
        kv_count = of_k.shape[-2]
        if not (isinstance(count, int) and isinstance(kv_count, int)):
            continue
        packing = Packing(count, kv_count)
        memory = of_q.new_empty(*batch, packing.all_heads * cols)
        if all(is_equal(memory.numel(), each.numel()) for each in (of_whole, gradient.meta["val"])):
            views = [_views_to(*pair) for pair in zip(places, packing.split(memory), strict=True)]
            are_known = all(_sizes(whole.graph, each).count(-1) < 2 for each in (batch, gradient.meta["val"].shape))
            if None not in views and are_known:
                return Packed(q, k, grad_v, whole, gradient, tuple(batch), packing, views)
    return None


def _concatenated(dq: Node, dk: Node) -> tuple[Node, Node, list[Tensor]] | None:
    """(the gradient that is made of these and of one more, that one, where in its memory dq, dk and the other one
    lie)."""
    joined = _path(dq)[-1]
    root = next(iter(joined.users)) if len(joined.users) == 1 else None
    parts = root and (_of_cat(root) if root.target is aten.cat.default else _of_scattered(root))
    if not parts:
        return None
    root, pieces = parts
    ends = [each for each in _path(root) if each.meta["val"].is_contiguous()]
    if len(pieces) != 3 or not ends or not ends[-1].meta["val"].numel():
        return None
    gradient = ends[-1]
    memory = _back(gradient, root, gradient.meta["val"].new_empty(gradient.meta["val"].shape))
    found: dict[Node, Tensor | None] = {}
    for piece, place in pieces if memory is not None else ():
        start = next((each for each in (dq, dk) if piece in _path(each)), None) or _start_of(piece)
        found[start] = _back(piece, start, place(memory))
    others = [each for each in found if each not in (dq, dk)]
    if len(found) < 3 or len(others) != 1 or any(place is None for place in found.values()):
        return None
    return gradient, others[0], [found[each] for each in (dq, dk, *others)]


def _start_of(piece: Node) -> Node:
    """The node that the piece comes from, behind what only moves elements."""
    while piece.target in RESHAPED | COPIED | MOVED and len(piece.args[0].users) == 1:
        piece = piece.args[0]
    return piece


def _path(node: Node) -> list[Node]:
    """The node and what only moves its elements, each the only use of the one before."""
    path = [node]
    while len(path[-1].users) == 1 and (user := next(iter(path[-1].users))).target in RESHAPED | COPIED | MOVED:
        path.append(user)
    return path


Piece = tuple[Node, Callable[[Tensor], Tensor]]  # and where it is in the whole


def _of_cat(cat: Node) -> tuple[Node, list[Piece]] | None:
    """The pieces of a concatenation, or of a stack: of the view of one that tells the pieces apart."""
    tensors, (dim, *_) = cat.args[0], (*cat.args[1:], cat.kwargs.get("dim", 0))
    shapes = [each.meta["val"].shape for each in tensors]
    view = next(iter(cat.users)) if len(cat.users) == 1 else None
    if not dim and view is not None and view.target in RESHAPED:
        stacked = (len(tensors), *shapes[0])
        if all(map(is_shape, shapes, [shapes[0]] * len(shapes))) and is_shape(view.meta["val"].shape, stacked):
            return view, [(each, lambda whole, at=at: whole.select(0, at)) for at, each in enumerate(tensors)]
    starts = itertools.accumulate((shape[dim] for shape in shapes), initial=0)
    return cat, [
        (each, lambda whole, start=start, size=shape[dim]: whole.narrow(dim, start, size))
        for each, start, shape in zip(tensors, starts, shapes, strict=False)
    ]


def _of_scattered(first: Node) -> tuple[Node, list[Piece]] | None:
    """The pieces of a sum of tensors of zeros but for a piece in each."""
    root = first
    while len(root.users) == 1 and (user := next(iter(root.users))).target is aten.add.Tensor:
        root = user
    pieces, waiting = [], [root]
    while waiting:
        each = waiting.pop()
        if each.target is aten.add.Tensor and (each is root or len(each.users) == 1) and not each.kwargs:
            waiting += each.args
        elif each.target in SCATTERED and (zeros := each.args[0]).target is aten.full.default and not zeros.args[1]:
            function, (_, piece, *place) = SCATTERED[each.target], each.args
            pieces.append((piece, lambda whole, function=function, place=place: function(whole, *place)))
        else:
            return None
    return root, pieces


def _back(end: Node, start: Node, tensor: Tensor) -> Tensor | None:
    """The view of a tensor of the end's shape that was moved there from the start; None if that is no view."""
    while end is not start:
        source = end.args[0]
        try:
            tensor = _moved_back(end, source.meta["val"].shape, tensor)
        except RuntimeError:
            return None
        end = source
    return tensor


def _moved_back(node: Node, shape: Sequence, tensor: Tensor) -> Tensor:
    if node.target in COPIED:
        return tensor
    if node.target in RESHAPED:
        return tensor.view(shape)
    if node.target is aten.permute.default:
        dims = [dim % len(shape) for dim in node.args[1]]
        return tensor.permute([dims.index(dim) for dim in range(len(dims))])
    if node.target is aten.transpose.int:
        return tensor.transpose(*node.args[1:])
    dim = node.args[1]
    return tensor.squeeze(dim) if node.target is aten.unsqueeze.default else tensor.unsqueeze(dim)


def _views_to(place: Tensor, wanted: Tensor) -> Views | None:
    """What makes of a view of memory the wanted one; None if that is unknown."""
    is_unflattened = not is_equal(place.shape[-1], wanted.shape[-1])
    if is_unflattened:
        if not is_equal(place.shape[-1], wanted.shape[-2:].numel()):
            return None
        place = place.unflatten(-1, wanted.shape[-2:])
    for squeezed in (None, *[dim for dim in range(place.dim() - 1) if is_equal(place.shape[dim], 1)]):
        for is_swapped in (False, True):
            views = Views(is_unflattened, squeezed, is_swapped)
            if _is_alike(_swapped(place if squeezed is None else place.squeeze(squeezed), is_swapped), wanted):
                return views
    return None


def _swapped(tensor: Tensor, if_: bool) -> Tensor:
    return tensor.transpose(-2, -3) if if_ and tensor.dim() > 2 else tensor


def _is_alike(one: Tensor, other: Tensor, start: int | torch.SymInt = 0) -> bool:
    """Whether both lie alike in memory, in which that of the other one begins at `start`."""
    if not is_shape(one.shape, other.shape) or not is_equal(one.storage_offset(), other.storage_offset() - start):
        return False
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(is_equal(size, 1) or is_equal(mine, theirs) for size, mine, theirs in strides)


def _pays(found: Packed) -> bool:
    """Whether more is saved than what is element-wise before and behind the op would write and read, in heads."""
    count, kv_count, _ = found.packing
    many = count + kv_count
    pairs = (found.q.grad, count), (found.k.grad, kv_count), (found.grad_v, kv_count)
    moved = sum(2 * size for grad, size in pairs if paying.is_computed(grad))
    moved += 2 * found.packing.all_heads * paying.is_computed_with(found.gradient)
    norm = found.q.settings.norm
    # Norms that rotations.py has joined save the concatenation alone, which reads and writes each element.
    saved = limits.saved_tensors[norm if any(found.q.sums) else "no sums"] if found.q.forward is not None else 2
    return moved < saved * many or not moved


def _is_taken(found: Packed) -> bool:
    """Whether the op takes the tensors."""
    q, k = found.both
    is_swapped = {views.is_swapped for views in found.views[:2]}
    if any(q.tables) and len(is_swapped) > 1:
        return False
    values = [each if each is None else each.meta["val"] for each in (q.weight, k.weight, q.bias, k.bias, *q.tables)]
    tables = [each if each is None else _table(each, True in is_swapped) for each in values[4:]]
    width = found.packing.all_heads * found.cols
    both = found.packing.split(q.x.meta["val"].new_empty(*found.batch, width))[:2]
    try:
        validate("head_norm_bwd_packed", Heads(both, values[:2], values[2:4], *tables, q.eps, q.settings))
    except RuntimeError:
        return False
    return True


def _table(tensor: Tensor, is_swapped: bool) -> Tensor:
    return tensor.unsqueeze(-2) if is_swapped and tensor.dim() < 3 else _swapped(tensor, is_swapped)


def _has_kernel(found: Packed) -> bool:
    x = found.q.x.meta["val"]
    tables = [each.meta["val"] for each in found.q.tables if each is not None]
    turned = (found.q.settings.rotary_dim or tables[0].shape[-1]) if tables else 0
    dtypes = (None if each is None else dtype_of(each) for each in (found.q.weight, found.q.bias))
    problem = HeadProblem("backward", 2, found.cols, x.dtype, dtype_of(found.q.grad), *dtypes, found.q.settings,
                          turned=turned, copies=True, wants_dx=True)  # fmt: skip
    return x.device.type != "cuda" or not isinstance(choose(problem, gpus.spec_of(x.device)), ReferencePlan)


def _make_backward(found: Packed) -> None:
    end, (q, k) = found.gradient, found.both

    def call(function: Any, *args: Any, **named: Any) -> Node:
        return call_before(end, function, args, named, q.node.meta)

    def viewed(node: Node, views: Views) -> Node:
        if views.is_unflattened:
            *batch, cols = node.meta["val"].shape
            node = call(aten.view.default, node, [*_sizes(end.graph, batch), cols // found.cols, found.cols])
        if views.squeezed is not None:
            node = call(aten.squeeze.dim, node, views.squeezed)
        return call(*_swap_of(node)) if views.is_swapped else node

    grads = [viewed(*pair) for pair in zip((q.grad, k.grad, found.grad_v), found.views, strict=True)]
    width = found.packing.all_heads * found.cols
    whole = call(aten.view.default, found.whole, [*_sizes(end.graph, found.batch), width])
    tables = [each and (call(*_swap_of(each)) if found.views[0].is_swapped else each) for each in q.tables]
    sums = [part.sums[at] for at in range(2) for part in found.both]
    mask = [True, *[each is not None for each in sums]]
    lists = [q.weight, k.weight], [q.bias, k.bias]
    op = call(OF_PACKED, grads, whole, *lists, *tables, q.eps, mask, *found.packing, **q.settings._asdict())
    made = call(aten.view.default, call(operator.getitem, op, 0), _sizes(end.graph, end.meta["val"].shape))
    end.replace_all_uses_with(made)
    for at, old in enumerate((each for each in sums if each is not None), 1):
        old.replace_all_uses_with(call(operator.getitem, op, at))
    if q.forward is not None:
        _note(found, BACKWARD)


def _make_forward(found: Packed) -> None:
    """One op of both forwards, if it cuts no fusion."""
    nodes, (q, k) = [part.forward for part in found.both], found.both
    ys = [next((each for each in node.users if each.args[1] == 0 and each.users), None) for node in nodes]
    if None in ys or {dtype_of(each) for each in ys} != {dtype_of(q.x)}:
        return
    given = zip(nodes, ys, strict=True)
    if any(paying.why_inductor_forward(node, {"x": found.whole}, {"y": y}, forwards.concerns) for node, y in given):
        return
    last = max(nodes)
    lists = [q.x, k.x], [q.weight, k.weight], [q.bias, k.bias]
    op = call_before(last, OF_BOTH, (*lists, None, None, q.eps), q.settings._asdict())
    for at, y in enumerate(ys):
        y.replace_all_uses_with(call_before(last, operator.getitem, (op, at)))
    _note(found, FORWARD)


def _swap_of(node: Node) -> tuple:
    """What swaps dims -2 and -3, or those of what broadcasts against such a tensor."""
    ndim = node.meta["val"].dim()
    if ndim < 3:
        return aten.unsqueeze.default, node, ndim - 1
    return aten.permute.default, node, [*range(ndim - 3), ndim - 2, ndim - 3, ndim - 1]


def _sizes(graph: Graph, sizes: Sequence) -> list[int | Node]:
    """As arguments of a node: a number, the input that it is, or -1."""
    inputs = [each for each in graph.find_nodes(op="placeholder") if isinstance(each.meta["val"], torch.SymInt)]
    return [
        size if isinstance(size, int) else next((each for each in inputs if is_equal(each.meta["val"], size)), -1)
        for size in sizes
    ]


def _note(found: Packed, direction: str) -> None:
    for part in found.both:
        op = OPS[f"{part.settings.norm}_norm_{WAYS[direction]}"]
        node = part.forward if direction == FORWARD else part.node
        routing.note(op, part.x.meta["val"], True, REASONS[direction], node.meta, FORM)
