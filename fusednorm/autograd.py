"""Derivatives of the ops: their implementations at the autograd dispatch key, the drop-in autograd Functions, and
layer_norm and rms_norm, which return y alone.

A call takes one of three routes:

- If nothing is differentiated, the call goes straight to the op's kernel.
- If autograd records, the forward runs and NormFunction, the one autograd node, is recorded. Its backward is the
  backward op.
- If the inside of the op must be differentiated (torch.func transforms, forward-mode AD, a backward that is itself
  differentiated), the op's formula runs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from . import ops, reference, sharding
from .host import native, recipe, torch_compat
from .host.kernel_devices import runs_kernels
from .host.torch_compat import (
    dispatch_modes,
    forward_ad,
    function_modes,
    is_profiled,
    is_transforming,
    is_wrapped,
    shown_to_profiler,
    tracing_state,
)
from .namespace import NAMESPACE, TORCH_OPS
from .operands import OPERANDS_OF_OP, BackwardOperands, ForwardOperands, Operands, Outputs, as_op, call_op
from .planner.forcing import asked_variants, force
from .planner.norm_problem import accumulation_dtype

PLAIN = (Tensor, torch.nn.Parameter)
KEPT_BACKWARDS = 4  # recipes of backwards kept per NormCall, which all layers of a model may share


class LayerNormFunction:
    """apply(x, normalized_shape, weight=None, bias=None, eps=1e-5) -> (y, mean, rstd), differentiable in all three.

    Arguments, outputs and errors are those of torch.ops.fusednorm.layer_norm_fwd. The backward is one layer_norm_bwd
    for the inputs that require grad. Under torch.func transforms call the op instead. Unlike here, mean and rstd of
    aten::native_layer_norm are not differentiable.
    """

    @staticmethod
    def apply(
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _apply("layer_norm_fwd", x, normalized_shape, weight, bias, eps)


class RMSNormFunction:
    """apply(x, normalized_shape, weight=None, eps=None) -> (y, rstd), differentiable in both.

    Arguments, outputs and errors are those of torch.ops.fusednorm.rms_norm_fwd. The backward is one rms_norm_bwd for
    the inputs that require grad. Under torch.func transforms call the op instead.
    """

    @staticmethod
    def apply(
        x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> tuple[Tensor, Tensor]:
        return _apply("rms_norm_fwd", x, normalized_shape, weight, eps)


@dataclass(eq=False, slots=True)
class NormCall:
    """A forward that has run, without its tensors. All forwards with the same signature share one."""

    norm: str
    normalized_shape: Sequence[int]
    eps: float | None
    y_alone: bool  # mean and rstd are no outputs, but stay inside the node
    asked: tuple[str | None, ...]  # the variants that `force` asked for
    repeats: tuple[recipe.Repeat, ...] = ()  # of its backwards, one per signature of grad_y, the latest first

    def backward(self, grad_y, x, mean, rstd, weight, bias, mask) -> Outputs:
        """(dx, dw, db), by whichever route applies."""
        if self.y_alone and torch.is_grad_enabled():
            return differentiable_backward(self.norm, self.normalized_shape, self.eps, grad_y, x, weight, bias, mask)
        mask = mask[0], weight is not None and mask[1], bias is not None and mask[2]
        operands = BackwardOperands(self.norm, grad_y, x, self.normalized_shape, mean, rstd, weight, bias, mask)
        with force(self.asked[-1] if self.asked else None):  # the forward's `force`, not that of autograd's thread
            grads = _backward(operands)
            traced = torch.compiler.is_dynamo_compiling()
            if not (traced or torch.is_grad_enabled()) and type(x) in PLAIN:
                known = recipe.find(recipe.look(operands))
                if known is not None and known.repeat not in self.repeats:
                    self.repeats = known.repeat, *self.repeats[: KEPT_BACKWARDS - 1]
        return grads


# Without setup_context, because it slows every call. Only torch.func needs it, and torch.func never gets here: under a
# transform the ops run their formulas.
class NormFunction(Function):
    """The autograd node of a forward that has run, of either norm. Its outputs are y, mean and rstd, or y alone.

    The backward runs on autograd's thread with cold caches, where most of a module's host time in Python goes. The
    common case therefore does as little as possible.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, outputs, call: NormCall):
        y, mean, rstd = outputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.call = call
        return y if call.y_alone else outputs

    @staticmethod
    def backward(ctx, grad_y, grad_mean=None, grad_rstd=None):
        x, mean, rstd, weight, bias = ctx.saved_tensors
        call, mask, grads = ctx.call, ctx.needs_input_grad[:3], None
        differentiated = torch.is_grad_enabled() or forward_ad._current_level >= 0
        if not (differentiated or torch.compiler.is_dynamo_compiling() or is_profiled()):
            # output_mask is not rechecked (None): it follows from requires_grad, which is part of the call's signature.
            for repeat in call.repeats:
                grads = repeat(grad_y, x, mean, rstd, weight, bias, None)
                if grads is not None:
                    break
        if grads is None:
            grads = (None,) * 3 if grad_y is None else call.backward(grad_y, x, mean, rstd, weight, bias, mask)
        if mask[0] and not (grad_mean is None and grad_rstd is None):
            statistics = mean, rstd, grad_mean, grad_rstd
            more = reference.statistics_backward_formula(x, call.normalized_shape, *statistics)
            grads = (more if grads[0] is None else grads[0] + more, *grads[1:])
        return *grads, None, None


_record = torch_compat.record(NormFunction)  # skips torch.func's checks: no call under torch.func gets here


def differentiable_backward(norm, normalized_shape, eps, grad_y, x, weight, bias, mask) -> Outputs:
    """(dx, dw, db) of a norm that returned y alone, for a backward that is itself differentiated. The statistics are
    computed again, because gradients flow through them."""
    if norm == "layer":
        _, mean, rstd = reference.layer_norm_formula(x, normalized_shape, None, None, eps)
    else:
        mean, (_, rstd) = None, reference.rms_norm_formula(x, normalized_shape, None, eps)
    operands = BackwardOperands(norm, grad_y, x, normalized_shape, mean, rstd, weight, bias, mask)
    return call_op(IMPLEMENTATIONS[operands.op], operands)


def _above_autograd(name: str) -> Callable[..., tuple]:
    """The op's implementation at the autograd key."""
    op, operands_of = getattr(TORCH_OPS, name).default, OPERANDS_OF_OP[name]
    formula, recorded, below = (as_op(name, run) for run in (reference.formula, _recorded, _below_autograd))

    def run(*arguments, **named):
        if torch.compiler.is_dynamo_compiling():
            return op(*arguments, **named)
        if _is_transformed():
            return formula(*arguments, **named)
        operands = operands_of(*arguments, **named)
        if _is_recorded(*operands.differentiable):
            return (recorded if isinstance(operands, ForwardOperands) else formula)(*arguments, **named)
        return below(*arguments, **named)

    run.__name__ = name
    return run


def _apply(name: str, *arguments):
    """The outputs of a forward op, recorded. Raises under torch.func and in forward-mode AD, as every autograd Function
    without rules for these does."""
    if torch.compiler.is_dynamo_compiling():
        return getattr(TORCH_OPS, name).default(*arguments)
    operands = OPERANDS_OF_OP[name](*arguments)
    call = NormCall(operands.norm, operands.normalized_shape, operands.eps, False, asked_variants())
    with torch.no_grad():
        outputs = _below_autograd(operands)
    outputs = NormFunction.apply(*operands.tensors, outputs, call)
    return outputs if operands.norm == "layer" else (outputs[0], outputs[2])


def _recorded(operands: ForwardOperands) -> Outputs:
    call = NormCall(operands.norm, operands.normalized_shape, operands.eps, False, asked_variants())
    return _record(*operands.tensors, _below_autograd(operands), call)


def _below_autograd(operands: Operands) -> Outputs:
    """The outputs of an op, without recording it."""
    outputs = _without_dispatcher(operands)
    return _by_dispatcher(operands) if outputs is None else outputs


def _backward(operands: BackwardOperands) -> Outputs:
    """The backward op; or its implementation at the autograd key, which is faster, if no tracer or profiler must see
    the op itself."""
    shown = torch.compiler.is_dynamo_compiling() or is_profiled()
    return call_op(_overload(operands) if shown else IMPLEMENTATIONS[operands.op], operands)


def _overload(operands: Operands) -> Callable[..., tuple]:
    return getattr(TORCH_OPS, operands.op).default


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """y of layer_norm_fwd, differentiable. The statistics are not written if no gradient needs them."""
    if not _is_traced() and native.extension:
        y = native.extension.layer_norm(x, normalized_shape, weight, bias, eps)
        if y is not NotImplemented:
            return y
    return _y_of(ForwardOperands("layer", x, normalized_shape, weight, bias, eps))


def rms_norm(x, normalized_shape, weight=None, eps=None):
    """y of rms_norm_fwd, differentiable. The statistics are not written if no gradient needs them."""
    if not _is_traced() and native.extension:
        y = native.extension.rms_norm(x, normalized_shape, weight, eps)
        if y is not NotImplemented:
            return y
    return _y_of(ForwardOperands("rms", x, normalized_shape, weight, None, eps))


def _y_of(operands: ForwardOperands) -> Tensor:
    if not _is_traced():
        y = (_shown_forward if is_profiled() else _forward)(operands)
        if y is not None:
            return y
    if _is_for_onnx():
        return _for_onnx(operands)
    return call_op(_overload(operands) if _is_traced() else IMPLEMENTATIONS[operands.op], operands)[0]


def _forward(operands: ForwardOperands) -> Tensor | None:
    """y if all tensors are plain (`_is_plain`) and no mode, transform or forward-mode AD is active; else None."""
    norm, x, normalized_shape, weight, bias, eps, _ = operands
    if type(x) not in PLAIN or forward_ad._current_level >= 0 or function_modes():
        return None
    recorded = torch.is_grad_enabled() and (x.requires_grad or _is_recorded(weight, bias))
    if not recorded:
        operands = operands._replace(wants_statistics=False)
    seen = recipe.look(operands)
    for known in recipe.of_key(seen[0], ()):
        outputs = known.repeat(x, weight, bias)
        if outputs is not None:
            break
    else:
        if _is_transformed() or not _is_plain(operands.tensors):
            return None
        outputs, known = ops.forward(operands), recipe.find(seen)
    if not recorded:
        return outputs[0]
    call = known and known.note
    if call is None:
        call = NormCall(norm, tuple(normalized_shape), eps, True, asked_variants())
        if known is not None:
            known.note = call
    return _record(x, weight, bias, outputs, call)


def _shown_forward(operands: ForwardOperands) -> Tensor | None:
    """`_forward`, shown to torch.profiler as the dispatcher shows an op that it runs."""
    if not _is_plain(operands.tensors):
        return None
    with shown_to_profiler(f"{NAMESPACE}::{operands.op}", *operands.tensors):
        return _forward(operands)


def _is_traced() -> bool:
    """Whether torch.compile or torch.jit.trace is recording the ops that are called."""
    return torch.compiler.is_dynamo_compiling() or tracing_state() is not None


def _is_for_onnx() -> bool:
    """Whether an ONNX exporter is recording the ops that are called. False under torch.compile's tracer: the tracer
    cannot evaluate the question, and the exporter uses it only after everything else has failed."""
    return not torch.compiler.is_dynamo_compiling() and torch.onnx.is_in_onnx_export()


def _for_onnx(operands: ForwardOperands) -> Tensor:
    """ATen's op, which ONNX's exporters can translate. Mixed dtypes run in the accumulation dtype, because ATen might
    refuse the mixture."""
    x, dtypes = operands.x, {each.dtype for each in operands.tensors if each is not None}
    if len(dtypes) > 1:
        dtype = accumulation_dtype(x.dtype)
        upcast = (each if each is None else each.to(dtype) for each in operands.tensors)
        operands = operands._replace(**dict(zip(("x", "weight", "bias"), upcast, strict=True)))
    stock = F.layer_norm if operands.norm == "layer" else F.rms_norm
    return stock(*operands.op_arguments()[0]).to(x.dtype)


def _is_transformed() -> bool:
    """Whether a torch.func transform or forward-mode AD is active."""
    return is_transforming() or forward_ad._current_level >= 0


def _is_recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd would record an operation on these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _without_dispatcher(operands: Operands) -> Outputs | None:
    """The outputs by CUDA kernels without the dispatcher, if nothing else intercepts calls below autograd; else None.
    Skipping the dispatcher saves a good part of a call's host time."""
    if type(operands.x) not in PLAIN or function_modes():  # shapes of other classes may not be hashable
        return None
    try:
        key, tensors = recipe.look(operands)
        known = recipe.of_key(key, ())
    except (TypeError, RuntimeError):  # arguments of wrong types or a nested tensor: the op raises the right error
        return None
    # Recipes come before all other checks: a call with an earlier call's signature would pass the same checks.
    for each in known:
        outputs = each.repeat(*tensors)
        if outputs is not None:
            return outputs
    return ops.run(operands) if _is_plain(tensors) else None


def _by_dispatcher(operands: Operands) -> Outputs:
    """The op below autograd, through the dispatcher, which serves whatever intercepts calls there (modes, DTensors)."""
    if any(isinstance(each, Tensor) and each.is_nested for each in operands.tensors):
        raise RuntimeError(f"{operands.op}: all tensors must be strided, got a nested one")
    sharding.register_where_needed()
    op, kernel = _overload(operands), ops.KERNELS[operands.op]
    return call_op(lambda *arguments, **named: torch_compat.below_autograd(op, kernel, *arguments, **named), operands)


def _is_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call on these tensors would reach our CUDA kernels with nothing in between below autograd."""
    if dispatch_modes() or function_modes():
        return False
    return all(each is None or (_is_on_a_gpu(each) and not _is_wrapped(each)) for each in tensors)


def _is_on_a_gpu(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN and runs_kernels(tensor) and tensor.layout is torch.strided and not tensor.is_nested


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether the tensor's memory does not hold its value (a negated view), or the tensor belongs to a transform and
    has no memory: torch.func's, which may be over, or that of torch.autograd.grad(..., is_grads_batched=True)."""
    if tensor.is_neg() or is_wrapped(tensor):
        return True
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return True
    return False


# The ops' implementations at the autograd key, by name.
IMPLEMENTATIONS = {name: _above_autograd(name) for name in ops.OPS}
layer_norm_fwd, rms_norm_fwd = IMPLEMENTATIONS["layer_norm_fwd"], IMPLEMENTATIONS["rms_norm_fwd"]

for _name, _implementation in IMPLEMENTATIONS.items():
    ops.LIBRARY.impl(_name, _implementation, "Autograd")
    # Both vmaps, torch.func's and the older one of torch.autograd, pass batched tensors. The formula's operations have
    # batching rules.
    for _key in ("FuncTorchBatchedDecomposition", "Batched"):
        ops.LIBRARY.impl(_name, as_op(_name, reference.formula), _key)

if native.extension:
    native.install(
        "CUDA",
        [IMPLEMENTATIONS[name] for name in native.OPS],
        ops,
        reference.statistics_backward_formula,
        differentiable_backward,
    )
