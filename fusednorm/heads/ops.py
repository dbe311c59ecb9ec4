"""torch.ops.fusednorm.head_norm_fwd and its backwards: LayerNorm or RMSNorm of the rows of two tensors at once, q and
k, with the rotation (RoPE) before or behind the norm.

head_norm_fwd
    for each tensor x of the two inputs, `[..., D]`, its rows normalized, times weight_offset + weight, plus bias; the
    first rotary_dim columns are rotated by cos and sin, before the norm unless norm_first
head_norm_bwd
    the gradients that output_mask wants of both inputs, then of the weights, then of the biases. An absent parameter
    has none. An absent one of grads is zero. Statistics are computed again from the inputs
head_norm_bwd_packed
    the same for q and k that lie in one tensor with v: the gradient of that tensor, which takes grads[2] as v's part,
    then those of the parameters

Shapes
    inputs may differ in all dims but the last. weights and biases are `[D]` or None. cos and sin have rotary_dim
    columns or, if those of a pair are equal, half as many. Their other dims broadcast against those of every input.
Dtypes
    Each tensor has its own: float16, bfloat16, float32 or float64. An output has the dtype of its input, or with
    rounds_x_hat the promoted dtype of input, weight and bias; gradients have those of their tensors. The arithmetic is
    float32, or float64 for a float64 input; outputs are rounded once.
Strides
    Any. Outputs and gradients are contiguous.
Derivatives
    Of any order. cos and sin must not require grad.
Errors
    RuntimeError if an operand has another shape, dtype or device than stated here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import Function

from .. import sharding
from ..host import native, torch_compat
from ..host.kernel_devices import runs_kernels
from ..host.program import Program
from ..host.torch_compat import is_intercepted, is_traced, needs_formula
from ..namespace import TORCH_OPS
from ..ops import define_of_list
from ..settings import invariance
from .call import HeadCall, described, in_place, packed_in_place, parts_of, symbol
from .problem import Heads, Packing, Settings, validate
from .reference import backward_formula, forward_formula

FORWARD, BACKWARD, PACKED = "head_norm_fwd", "head_norm_bwd", "head_norm_bwd_packed"
_OPERANDS = "Tensor?[] weights, Tensor?[] biases, Tensor? cos, Tensor? sin, float? eps"
_SETTINGS = (
    "bool layer=False, int? rotary_dim=None, bool interleaved=False, bool norm_first=True, float weight_offset=0.0, "
    "bool rounds_x_hat=False"
)
SCHEMAS = {
    FORWARD: f"(Tensor[] inputs, {_OPERANDS}, *, {_SETTINGS}) -> Tensor[]",
    BACKWARD: f"(Tensor?[] grads, Tensor[] inputs, {_OPERANDS}, bool[] output_mask, *, {_SETTINGS}) -> Tensor[]",
    PACKED: f"(Tensor?[] grads, Tensor qkv, {_OPERANDS}, bool[] output_mask, int heads, int kv_heads, bool grouped, *, "
    f"{_SETTINGS}) -> Tensor[]",
}


class Call:
    """A call of one of the ops: its operands, and what differs between the ops."""

    def __init__(self, op: str, arguments: Sequence, named: dict) -> None:
        self.grads, first, *rest = arguments if op != FORWARD else ((), *arguments)
        weights, biases, cos, sin, eps, *more = rest
        self.op, self.arguments, self.named, self.settings_by_position = op, arguments, named, (eps, *more)
        self.packed, self.packing, self.mask = None, None, list(more[0]) if more else []
        if op == PACKED:
            self.packed, self.packing = first, Packing(*more[1:])
            self.packing.check(op, first)
            first = self.packing.split(first)[:2]
            self.mask = self.mask[:1] + self.mask  # a flag for q and one for k
        self.heads = Heads(first, weights, biases, cos, sin, eps, Settings(**named))

    @property
    def tensors(self) -> list[Tensor | None]:
        """In the order of the schema."""
        heads = self.heads
        first = heads.inputs if self.packed is None else [self.packed]
        return [*self.grads, *first, *heads.weights, *heads.biases, heads.cos, heads.sin]

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Call:
        """The call with other tensors in this order."""
        left, count = iter(tensors), len(self.heads.inputs)
        grads, inputs, weights, biases = (
            [next(left) for _ in range(size)]
            for size in (len(self.grads), 1 if self.packed is not None else count, count, count)
        )
        first = [grads] if self.op != FORWARD else []
        x = inputs if self.packed is None else inputs[0]
        return Call(self.op, (*first, x, weights, biases, *left, *self.settings_by_position), self.named)

    def with_zeros(self) -> Call:
        """The call with zeros for absent gradients of outputs; itself if there are none."""
        if all(each is not None for each in self.grads):
            return self
        pairs = zip(self.grads, outputs_of(self.heads, self.packed), strict=True)
        like = self.heads.inputs[0]
        grads = [like.new_zeros(shape, dtype=dtype) if grad is None else grad for grad, (shape, dtype) in pairs]
        return self.with_tensors([*grads, *self.tensors[len(grads) :]])

    def in_place(self) -> tuple[Call, list[str]]:
        """The call with zeros for absent gradients, with copies of the tensors whose rows kernels cannot read in place,
        and which these are; itself if there are none."""
        given = self.with_zeros()
        heads, grads, copied = in_place(given.heads, given.grads)
        first = heads.inputs
        if given.packed is not None:
            of_packed = [name for name in copied if name.startswith("inputs")]
            first = [packed_in_place(given.packed) if of_packed else given.packed]
            if first[0] is given.packed:
                copied = [name for name in copied if name not in of_packed]
        if not copied:
            return given, copied
        return given.with_tensors([*grads, *first, *heads.weights, *heads.biases, heads.cos, heads.sin]), copied

    def apart(self) -> Call:
        """The backward for q and k alone, in place of that for a packed tensor."""
        grads, heads = self.with_zeros().grads, self.heads
        return Call(BACKWARD, (grads[:2], *heads[:-1], self.mask), self.named)

    def joined(self, outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The outputs, from those of `apart`."""
        dq, dk, *sums = outputs
        v = self.with_zeros().grads[2]
        return [self.packing.join(dq, dk, v.to(dq.dtype)) if self.mask[0] else None, *sums]

    def check(self) -> Call:
        grads, heads = self.grads, self.heads
        if len(heads.inputs) != 2:
            raise RuntimeError(f"{self.op}: inputs must be two tensors, as q and k are, got {len(heads.inputs)}")
        if self.packed is not None:
            if len(grads) != 3 or (grads[2] is not None and grads[2].shape != heads.inputs[1].shape):
                raise RuntimeError(f"{self.op}: grads must be those of q, k and v, got {len(grads)} tensors")
            grads = grads[:2]
        validate(self.op, heads, grads if self.op != FORWARD else None, self.mask)
        return self

    @property
    def outputs(self) -> list[tuple[torch.Size, torch.dtype] | None]:
        """Shape and dtype of each output of the op; None for one that is not wanted."""
        heads = self.heads
        if self.op == FORWARD:
            return outputs_of(heads)
        wanted = list(zip(heads.tensors, self.mask, strict=True))
        if self.packed is not None:
            wanted = [(self.packed, self.mask[0]), *wanted[2:]]
        return [(like.shape, like.dtype) if want and like is not None else None for like, want in wanted]

    def whole(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The outputs, with None for those that are not wanted."""
        left = iter(outputs)
        return [next(left) if each else None for each in self.outputs]

    def launches(self) -> list[HeadCall | None]:
        """What kernels compute for a call of readable tensors, by tensors without memory. Each of these has an Address
        among those of the program: the op's tensors, then its outputs."""
        tensors, count = self.tensors, len(self.heads.inputs)
        call = self.with_tensors([each if each is None else symbol(each, at) for at, each in enumerate(tensors)])
        like = self.heads.inputs[0]
        made = [
            each and symbol(like.new_empty(each[0], dtype=each[1], device="meta"), len(tensors) + at)
            for at, each in enumerate(self.outputs)
        ]
        outs, sums = made[:count], made[count:]
        if call.packed is not None:
            outs, sums = [None] * 3, made[1:]
            parts_of(call.packed, call.heads.inputs)
            if made[0] is not None:
                outs = parts_of(made[0], self.packing.split(made[0]))
        return list(described(call.heads, call.grads, outs, sums))

    @property
    def is_recorded(self) -> bool:
        """Whether autograd records the call."""
        return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in self.tensors[:-2])

    def formula(self) -> list[Tensor]:
        self.check()
        if self.op == FORWARD:
            return forward_formula(self.heads)
        if self.packed is None:
            return backward_formula(self.heads, self.with_zeros().grads, self.mask)
        apart = self.apart()
        return [each for each in self.joined(apart.whole(apart.formula())) if each is not None]

    def fake(self) -> list[Tensor]:
        like = self.check().heads.inputs[0]
        return [like.new_empty(each[0], dtype=each[1]) for each in self.outputs if each]


def outputs_of(heads: Heads, packed: Tensor | None = None) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of what a forward returns: q and k and, of a packed tensor, v."""
    found = [(x.shape, heads.output_dtype(at)) for at, x in enumerate(heads.inputs)]
    return found if packed is None else [*found, (heads.inputs[1].shape, packed.dtype)]


def both_ways(heads: Heads, packed: Tensor | None = None, packing: Packing | None = None) -> tuple[Call, Call]:
    """A forward and a backward that wants all gradients, for contiguous gradients of the outputs. The inputs may be
    parts of a packed tensor."""
    op, first, more = BACKWARD, heads.inputs, ([True] * len(heads.tensors),)
    if packed is not None:
        heads = heads._replace(inputs=packing.split(packed)[:2])
        op, first, more = PACKED, packed, ([True] * (len(heads.tensors) - 1), *packing)
    of_outputs = outputs_of(heads, packed)
    grads = [heads.inputs[0].new_empty(shape, dtype=dtype, device="meta") for shape, dtype in of_outputs]
    named = heads.settings._asdict()
    return Call(FORWARD, heads[:-1], named), Call(op, (grads, first, *heads[1:-1], *more), named)


@functools.cache
def _launch() -> ModuleType:
    from . import launch  # imports Triton, which a process without CUDA tensors need not have

    return launch


def launched(given: Call) -> tuple[list[Tensor | None], Program | None]:
    """Each output of an op on CPU and CUDA, None for one that is not wanted, and the program that has made them if it
    is kept."""
    if given.heads.inputs and runs_kernels(given.heads.inputs[0]):
        outputs, program = _launch().run(given)
        if outputs is not None:
            return outputs, program
    with torch.no_grad():
        return given.whole(given.formula()), None


def below(given: Call) -> list[Tensor]:
    """An op on CPU and CUDA."""
    return [each for each in launched(given)[0] if each is not None]


def above(given: Call) -> list[Tensor]:
    """An op at autograd's dispatch key."""
    if needs_formula():
        return given.formula()
    recorded = given.is_recorded
    if recorded and given.op != FORWARD:
        return given.formula()
    sharding.register_where_needed()
    op, kernel = getattr(TORCH_OPS, given.op), partial(_run, given.op, below)
    outputs = torch_compat.below_autograd(op, kernel, *given.arguments, **given.named)
    return _record(given.heads, outputs) if recorded else outputs


def _run(op: str, way: Callable[[Call], list[Tensor]], *arguments, **named) -> list[Tensor]:
    return way(Call(op, arguments, named))


class HeadNormFunction(Function):
    """apply(heads, outputs, *heads.tensors) returns the outputs, which a forward has made, as a tuple."""

    @staticmethod
    def forward(ctx, heads, outputs, *tensors):
        ctx.save_for_backward(*tensors, heads.cos, heads.sin)
        ctx.eps, ctx.settings, ctx.invariance = heads.eps, heads.settings, invariance.of_forward()
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        *tensors, cos, sin = ctx.saved_tensors
        mask = [need and of is not None for need, of in zip(ctx.needs_input_grad[2:], tensors, strict=True)]
        operands = tensors[:2], tensors[2:4], tensors[4:], cos, sin, ctx.eps
        named = ctx.settings._asdict()
        made = iter(invariance.call_as(ctx.invariance, call, BACKWARD, grads, *operands, mask, **named))
        return None, None, *[next(made) if want else None for want in mask]


def _record(heads: Heads, outputs: list[Tensor]) -> list[Tensor]:
    return list(torch_compat.record(HeadNormFunction)(heads, outputs, *heads.tensors))


def call(op: str, *arguments, **named) -> list[Tensor]:
    """An op by its name. Without C++, a call that has run before skips the dispatcher if nobody intercepts it there."""
    if not (native.extension or is_traced() or is_intercepted() or torch_compat.is_profiled()):
        given = Call(op, arguments, named)
        recorded = given.is_recorded
        if runs_kernels(given.heads.inputs[0]) and (op == FORWARD or not recorded):
            outputs = _launch().repeated(given)
            if outputs is not None:
                made = [each for each in outputs if each is not None]
                return _record(given.heads, made) if recorded else made
    return getattr(TORCH_OPS, op)(*arguments, **named)


for _op, _schema in SCHEMAS.items():
    define_of_list(_op + _schema, *[partial(_run, _op, way) for way in (Call.fake, below, above, Call.formula)])
