"""torch.ops.fusednorm.head_norm_fwd and its backwards: LayerNorm or RMSNorm of the rows of several tensors at once, as
of q and k, with the rotation (RoPE) before or behind the norm.

head_norm_fwd
    for each tensor x of inputs, `[..., D]`, its rows normalized, times weight_offset + weight, plus bias; the first
    rotary_dim columns are rotated by cos and sin, before the norm unless norm_first
head_norm_bwd
    the gradients that output_mask wants of all inputs, then of all weights, then of all biases. An absent parameter has
    none. Statistics are computed again from the inputs
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
from ..host import torch_compat
from ..host.kernel_devices import runs_kernels
from ..host.torch_compat import forward_ad, is_transforming
from ..namespace import NAMESPACE, TORCH_OPS
from ..ops import ELSEWHERE, LIBRARY
from .problem import Heads, Packing, Settings, validate
from .reference import backward_formula, forward_formula, packed_backward_formula

FORWARD, BACKWARD, PACKED = "head_norm_fwd", "head_norm_bwd", "head_norm_bwd_packed"
_OPERANDS = "Tensor?[] weights, Tensor?[] biases, Tensor? cos, Tensor? sin, float? eps"
_SETTINGS = (
    "bool layer=False, int? rotary_dim=None, bool interleaved=False, bool norm_first=True, float weight_offset=0.0, "
    "bool rounds_x_hat=False"
)
SCHEMAS = {
    FORWARD: f"(Tensor[] inputs, {_OPERANDS}, *, {_SETTINGS}) -> Tensor[]",
    BACKWARD: f"(Tensor[] grads, Tensor[] inputs, {_OPERANDS}, bool[] output_mask, *, {_SETTINGS}) -> Tensor[]",
    PACKED: f"(Tensor[] grads, Tensor qkv, {_OPERANDS}, bool[] output_mask, int heads, int kv_heads, bool grouped, *, "
    f"{_SETTINGS}) -> Tensor[]",
}


class Call:
    """A call of one of the ops: its operands, and what differs between the ops."""

    def __init__(self, op: str, arguments: Sequence, named: dict) -> None:
        grads, first, *rest = arguments if op != FORWARD else (None, *arguments)
        weights, biases, cos, sin, eps, *more = rest
        self.op, self.arguments, self.named, self.grads = op, arguments, named, grads
        self.packed, self.packing, self.mask = None, None, list(more[0]) if more else []
        if op == PACKED:
            self.packed, self.packing = first, Packing(*more[1:])
            self.packing.check(op, first)
            first = self.packing.split(first)[:2]
            self.mask = self.mask[:1] + self.mask  # a flag for q and one for k
        self.heads = Heads(first, weights, biases, cos, sin, eps, Settings(**named))

    def check(self) -> Call:
        grads, heads = self.grads, self.heads
        if self.packed is not None:
            if len(grads) != 3 or grads[2].shape != heads.inputs[1].shape:
                raise RuntimeError(f"{self.op}: grads must be those of q, k and v, got {len(grads)} tensors")
            grads = grads[:2]
        validate(self.op, heads, grads, self.mask)
        return self

    def launched(self, *, again: bool = False) -> list[Tensor] | None:
        """The outputs by kernels of this package; None if these do not take the call. With `again`, also None unless
        such a call has run before; then nothing needs to be checked."""
        launch = _launch()
        if self.grads is None:
            return launch.repeated(self.heads) if again else launch.forward(self.heads)
        run = launch.repeated if again else launch.backward
        if self.packed is None:
            return run(self.heads, self.grads, self.mask)
        if not self.mask[0]:
            return run(self.heads, self.grads[:2], self.mask)
        dx = torch.empty(self.packed.shape, dtype=self.packed.dtype, device=self.packed.device)
        found = run(self.heads, self.grads, self.mask, self.packing.split(dx))
        return None if found is None else [dx, *found[3:]]

    def repeated(self) -> list[Tensor] | None:
        """The outputs, if such a call has run on kernels before; else None."""
        inputs = self.heads.inputs
        return self.launched(again=True) if inputs and runs_kernels(inputs[0]) else None

    @property
    def is_recorded(self) -> bool:
        """Whether autograd records the call."""
        return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in self.tensors)

    def formula(self) -> list[Tensor]:
        if self.grads is None:
            return forward_formula(self.heads)
        if self.packed is None:
            return backward_formula(self.heads, self.grads, self.mask)
        return packed_backward_formula(self.heads, self.packing, self.grads, self.mask)

    def fake(self) -> list[Tensor]:
        heads = self.heads
        if self.grads is None:
            return [x.new_empty(x.shape, dtype=heads.output_dtype(at)) for at, x in enumerate(heads.inputs)]
        wanted = list(zip(heads.tensors, self.mask, strict=True))
        if self.packed is not None:
            wanted = [(self.packed, self.mask[0]), *wanted[2:]]
        return [like.new_empty(like.shape) for like, want in wanted if want and like is not None]

    @property
    def tensors(self) -> list[Tensor | None]:
        """Those on which a derivative may depend."""
        return [*(self.grads or ()), *([self.packed] if self.packed is not None else []), *self.heads.tensors]


@functools.cache
def _launch() -> ModuleType:
    from . import launch  # imports Triton, which a process without CUDA tensors need not have

    return launch


def _below(op: str, *arguments, **named) -> list[Tensor]:
    """An op on CPU and CUDA."""
    given = Call(op, arguments, named)
    outputs = given.repeated()
    if outputs is None and runs_kernels(given.check().heads.inputs[0]):
        outputs = given.launched()
    if outputs is not None:
        return outputs
    with torch.no_grad():
        return given.formula()


def _fake(op: str, *arguments, **named) -> list[Tensor]:
    return Call(op, arguments, named).check().fake()


def _above(op: str, *arguments, **named) -> list[Tensor]:
    """An op at autograd's dispatch key."""
    given = Call(op, arguments, named)
    if is_transforming() or forward_ad._current_level >= 0:
        return given.check().formula()
    recorded = given.is_recorded
    if recorded and op != FORWARD:
        return given.check().formula()
    sharding.register_where_needed()
    outputs = torch_compat.below_autograd(getattr(TORCH_OPS, op), partial(_below, op), *arguments, **named)
    return _record(given.heads, outputs) if recorded else outputs


def _batched(op: str, *arguments, **named) -> list[Tensor]:
    return Call(op, arguments, named).check().formula()


class HeadNormFunction(Function):
    """apply(heads, outputs, *heads.tensors) returns the outputs, which a forward has made, as a tuple."""

    @staticmethod
    def forward(ctx, heads, outputs, *tensors):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, heads.cos, heads.sin)
        ctx.count, ctx.eps, ctx.settings = len(heads.inputs), heads.eps, heads.settings
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        *tensors, cos, sin = ctx.saved_tensors
        count, needed = ctx.count, ctx.needs_input_grad[2:]
        kinds = [tensors[at : at + count] for at in range(0, 3 * count, count)]
        present = [at for at in range(count) if grads[at] is not None]  # the others add nothing
        heads = Heads(*kinds, cos, sin, ctx.eps, ctx.settings).some(present)
        which = [kind * count + at for kind in range(3) for at in present]
        mask = [needed[at] and tensors[at] is not None for at in which]
        given = [grads[at] for at in present], *heads[:-1], mask
        made = iter(call(BACKWARD, *given, **heads.settings._asdict()) if any(mask) else ())
        found = {at: next(made) for at, want in zip(which, mask, strict=True) if want}
        return (None, None, *[found.get(at) for at in range(3 * count)])


def _record(heads: Heads, outputs: list[Tensor]) -> list[Tensor]:
    return list(torch_compat.record(HeadNormFunction)(heads, outputs, *heads.tensors))


def call(op: str, *arguments, **named) -> list[Tensor]:
    """An op by its name. A call that has run before skips the dispatcher if nobody intercepts it there."""
    if not (torch.compiler.is_dynamo_compiling() or _is_intercepted()):
        given = Call(op, arguments, named)
        recorded = given.is_recorded
        outputs = None if recorded and op != FORWARD else given.repeated()
        if outputs is not None:
            return _record(given.heads, outputs) if recorded else outputs
    return getattr(TORCH_OPS, op)(*arguments, **named)


def _is_intercepted() -> bool:
    """Whether a mode, a transform, forward-mode AD, a tracer or a profiler sees the calls of this thread."""
    active = torch_compat.dispatch_modes() or torch_compat.function_modes() or torch_compat.is_profiled()
    return bool(active or is_transforming() or forward_ad._current_level >= 0 or torch_compat.tracing_state())


def _register(op: str, schema: str) -> None:
    LIBRARY.define(op + schema, tags=(torch.Tag.pt2_compliant_tag,))
    implementations: dict[Callable, Sequence[str]] = {
        _below: ELSEWHERE,  # these keys cover CPU, CUDA and an empty list, which has no device
        _above: ("Autograd", "FuncTorchBatchedDecomposition"),
        _batched: ("Batched",),
    }
    for function, keys in implementations.items():
        for key in keys:
            LIBRARY.impl(op, partial(function, op), key)
    torch.library.register_fake(f"{NAMESPACE}::{op}", partial(_fake, op), lib=LIBRARY)


for _op, _schema in SCHEMAS.items():
    _register(_op, _schema)
