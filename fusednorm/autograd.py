"""Derivatives of the ops: the drop-in autograd Functions, and the ops' implementations at the autograd dispatch key.

A call takes one of three routes:

- If nothing is differentiated, the call goes straight to the op's kernel.
- If autograd records, the call goes through LayerNormFunction or RMSNormFunction, whose backward is the backward op.
  layer_norm and rms_norm, which return y alone, go through RecordedNorm.
- If the op's inside must be visible (torch.func transforms, forward-mode AD, a backward that is itself differentiated),
  the op's formula runs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from . import formulas, ops, reference, sharding
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
from .planner.forcing import asked_variants, force, forced_variant
from .planner.norm_problem import accumulation_dtype

PLAIN = (Tensor, torch.nn.Parameter)
KEPT_BACKWARDS = 4  # recipes of backwards kept per NormCall, which all layers of a model may share

_layer_norm_fwd_op = TORCH_OPS.layer_norm_fwd.default
_layer_norm_bwd_op = TORCH_OPS.layer_norm_bwd.default
_rms_norm_fwd_op = TORCH_OPS.rms_norm_fwd.default
_rms_norm_bwd_op = TORCH_OPS.rms_norm_bwd.default
_layer_norm_bwd_residual_op = TORCH_OPS.layer_norm_bwd_residual.default
_rms_norm_bwd_residual_op = TORCH_OPS.rms_norm_bwd_residual.default


# Neither Function has setup_context, because it slows every call. Only torch.func needs it, and torch.func never gets
# here: under a transform the ops run their formulas.
class LayerNormFunction(Function):
    """apply(x, normalized_shape, weight=None, bias=None, eps=1e-5) -> (y, mean, rstd), differentiable in all three.

    Arguments, outputs and errors are those of torch.ops.fusednorm.layer_norm_fwd. The backward is one layer_norm_bwd
    for the inputs that require grad. Under torch.func transforms call the op instead. Unlike here, mean and rstd of
    aten::native_layer_norm are not differentiable.
    """

    @staticmethod
    def forward(ctx, x, normalized_shape, weight=None, bias=None, eps=1e-5):
        y, mean, rstd = _layer_norm_fwd(x, normalized_shape, weight, bias, eps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.normalized_shape = normalized_shape
        ctx.forced = forced_variant()  # `force` does not reach autograd's thread, where the backward runs
        return y, mean, rstd

    @staticmethod
    def backward(ctx, grad_y, grad_mean, grad_rstd):
        x, mean, rstd, weight, bias = ctx.saved_tensors
        shape, needs = ctx.normalized_shape, ctx.needs_input_grad
        mask = (needs[0], weight is not None and needs[2], bias is not None and needs[3])
        dx = dw = db = None
        if grad_y is not None:
            with force(ctx.forced):
                run = _shown(_layer_norm_bwd_op, layer_norm_bwd)
                dx, dw, db = run(grad_y, x, shape, mean, rstd, weight, bias, mask)
        if needs[0] and not (grad_mean is None and grad_rstd is None):
            dx = _add(dx, reference.statistics_backward_formula(x, shape, mean, rstd, grad_mean, grad_rstd))
        return dx, None, dw, db, None


class RMSNormFunction(Function):
    """apply(x, normalized_shape, weight=None, eps=None) -> (y, rstd), differentiable in both.

    Arguments, outputs and errors are those of torch.ops.fusednorm.rms_norm_fwd. The backward is one rms_norm_bwd for
    the inputs that require grad. Under torch.func transforms call the op instead.
    """

    @staticmethod
    def forward(ctx, x, normalized_shape, weight=None, eps=None):
        y, rstd = _rms_norm_fwd(x, normalized_shape, weight, eps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, rstd, weight)
        ctx.normalized_shape = normalized_shape
        ctx.forced = forced_variant()  # `force` does not reach autograd's thread, where the backward runs
        return y, rstd

    @staticmethod
    def backward(ctx, grad_y, grad_rstd):
        x, rstd, weight = ctx.saved_tensors
        shape, needs = ctx.normalized_shape, ctx.needs_input_grad
        mask = (needs[0], weight is not None and needs[2])
        dx = dw = None
        if grad_y is not None:
            with force(ctx.forced):
                dx, dw = _shown(_rms_norm_bwd_op, rms_norm_bwd)(grad_y, x, shape, rstd, weight, mask)
        if needs[0] and grad_rstd is not None:
            dx = _add(dx, reference.statistics_backward_formula(x, shape, None, rstd, None, grad_rstd))
        return dx, None, dw, None


@dataclass(eq=False, slots=True)
class NormCall:
    """A forward that has run, without its tensors. All forwards with the same signature share one."""

    norm: str
    normalized_shape: Sequence[int]
    eps: float | None
    asked: tuple[str | None, ...]  # the variants that `force` asked for
    repeats: tuple[recipe.Repeat, ...] = ()  # of its backwards, one per signature of grad_y, the latest first

    def backward(self, grad_y, x, mean, rstd, weight, bias, mask) -> tuple[Tensor | None, ...]:
        """(dx, dw, db), by whichever route applies."""
        norm, shape = self.norm, self.normalized_shape
        if torch.is_grad_enabled():
            return differentiable_backward(norm, shape, self.eps, grad_y, x, weight, bias, mask)
        with force(self.asked[-1] if self.asked else None):  # the forward's `force`, not that of autograd's thread
            if norm == "layer":
                grads = _shown(_layer_norm_bwd_op, layer_norm_bwd)(grad_y, x, shape, mean, rstd, weight, bias, mask)
            else:
                grads = *_shown(_rms_norm_bwd_op, rms_norm_bwd)(grad_y, x, shape, rstd, weight, mask[:2]), None
            if not torch.compiler.is_dynamo_compiling() and type(x) in PLAIN:
                known = recipe.find(recipe.backward(norm, grad_y, x, shape, mean, rstd, weight, bias, mask))
                if known is not None and known.repeat not in self.repeats:
                    self.repeats = known.repeat, *self.repeats[: KEPT_BACKWARDS - 1]
        return grads


class RecordedNorm(Function):
    """The autograd node of a forward that has run. Its one output is y; mean and rstd stay inside the node.

    The backward runs on autograd's thread with cold caches, where most of a module's host time in Python goes. The
    common case therefore does as little as possible.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, outputs, call: NormCall):
        y, mean, rstd = outputs
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, mean, rstd, weight, bias = ctx.saved_tensors
        call = ctx.call
        looked_into = torch.is_grad_enabled() or forward_ad._current_level >= 0
        if not (looked_into or torch.compiler.is_dynamo_compiling() or is_profiled()):
            # output_mask is not rechecked (None): it follows from requires_grad, which is part of the call's signature.
            for repeat in call.repeats:
                grads = repeat(grad_y, x, mean, rstd, weight, bias, None)
                if grads is not None:
                    return *grads, None, None
        return *call.backward(grad_y, x, mean, rstd, weight, bias, ctx.needs_input_grad[:3]), None, None


def differentiable_backward(norm, normalized_shape, eps, grad_y, x, weight, bias, mask) -> tuple[Tensor | None, ...]:
    """(dx, dw, db) of a norm that returned y alone, for a backward that is itself differentiated. The statistics are
    computed again, because gradients flow through them."""
    if norm == "layer":
        _, mean, rstd = reference.layer_norm_formula(x, normalized_shape, None, None, eps)
        return layer_norm_bwd(grad_y, x, normalized_shape, mean, rstd, weight, bias, mask)
    _, rstd = reference.rms_norm_formula(x, normalized_shape, None, eps)
    return *rms_norm_bwd(grad_y, x, normalized_shape, rstd, weight, mask[:2]), None


_record = torch_compat.record(RecordedNorm)  # skips torch.func's checks: no call under torch.func gets here


def layer_norm_fwd(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    if torch.compiler.is_dynamo_compiling():
        return _layer_norm_fwd_op(x, normalized_shape, weight, bias, eps)
    if _is_looked_into():
        return formulas.layer_norm_fwd(x, normalized_shape, weight, bias, eps)
    if _is_recorded(x, weight, bias):
        return LayerNormFunction.apply(x, normalized_shape, weight, bias, eps)
    return _layer_norm_fwd(x, normalized_shape, weight, bias, eps)


def _layer_norm_fwd(x, normalized_shape, weight, bias, eps):
    """layer_norm_fwd below autograd."""
    if torch.compiler.is_dynamo_compiling():
        return _layer_norm_fwd_op(x, normalized_shape, weight, bias, eps)
    outputs = _at_once(x, recipe.forward, ops.forward, "layer", x, normalized_shape, weight, bias, eps)
    if outputs is not None:
        return outputs
    return _below_autograd(_layer_norm_fwd_op, x, normalized_shape, weight, bias, eps)


def layer_norm_bwd(grad_out, x, normalized_shape, mean, rstd, weight=None, bias=None, output_mask=(True, True, True)):
    if torch.compiler.is_dynamo_compiling():
        return _layer_norm_bwd_op(grad_out, x, normalized_shape, mean, rstd, weight, bias, output_mask)
    if _is_looked_into() or _is_recorded(grad_out, x, mean, rstd, weight):
        return formulas.layer_norm_bwd(grad_out, x, normalized_shape, mean, rstd, weight, bias, output_mask)
    operands = grad_out, x, normalized_shape, mean, rstd, weight, bias, output_mask
    grads = _at_once(x, recipe.backward, ops.backward, "layer", *operands)
    if grads is not None:
        return grads
    return _below_autograd(_layer_norm_bwd_op, grad_out, x, normalized_shape, mean, rstd, weight, bias, output_mask)


def rms_norm_fwd(x, normalized_shape, weight=None, eps=None):
    if torch.compiler.is_dynamo_compiling():
        return _rms_norm_fwd_op(x, normalized_shape, weight, eps)
    if _is_looked_into():
        return formulas.rms_norm_fwd(x, normalized_shape, weight, eps)
    if _is_recorded(x, weight):
        return RMSNormFunction.apply(x, normalized_shape, weight, eps)
    return _rms_norm_fwd(x, normalized_shape, weight, eps)


def _rms_norm_fwd(x, normalized_shape, weight, eps):
    """rms_norm_fwd below autograd."""
    if torch.compiler.is_dynamo_compiling():
        return _rms_norm_fwd_op(x, normalized_shape, weight, eps)
    outputs = _at_once(x, recipe.forward, ops.forward, "rms", x, normalized_shape, weight, None, eps)
    if outputs is not None:
        return outputs[0], outputs[2]
    return _below_autograd(_rms_norm_fwd_op, x, normalized_shape, weight, eps)


def rms_norm_bwd(grad_out, x, normalized_shape, rstd, weight=None, output_mask=(True, True)):
    if torch.compiler.is_dynamo_compiling():
        return _rms_norm_bwd_op(grad_out, x, normalized_shape, rstd, weight, output_mask)
    if _is_looked_into() or _is_recorded(grad_out, x, rstd, weight):
        return formulas.rms_norm_bwd(grad_out, x, normalized_shape, rstd, weight, output_mask)
    operands = grad_out, x, normalized_shape, None, rstd, weight, None, (*output_mask, False)
    grads = _at_once(x, recipe.backward, ops.backward, "rms", *operands)
    if grads is not None:
        return grads[:2]
    return _below_autograd(_rms_norm_bwd_op, grad_out, x, normalized_shape, rstd, weight, output_mask)


def layer_norm_bwd_residual(
    grad_out, x, normalized_shape, mean, rstd, weight=None, bias=None, residual_grad=None,
    output_mask=(True, True, True), *, dx_dtype=None,
):  # fmt: skip
    operands = (grad_out, x, normalized_shape, mean, rstd, weight, bias, residual_grad, output_mask)
    if torch.compiler.is_dynamo_compiling():
        return _layer_norm_bwd_residual_op(*operands, dx_dtype=dx_dtype)
    if _is_looked_into() or _is_recorded(grad_out, x, mean, rstd, weight, residual_grad):
        return formulas.layer_norm_bwd_residual(*operands, dx_dtype=dx_dtype)
    return _below_autograd(_layer_norm_bwd_residual_op, *operands, dx_dtype=dx_dtype)


def rms_norm_bwd_residual(
    grad_out, x, normalized_shape, rstd, weight=None, residual_grad=None, output_mask=(True, True), *, dx_dtype=None
):
    operands = (grad_out, x, normalized_shape, rstd, weight, residual_grad, output_mask)
    if torch.compiler.is_dynamo_compiling():
        return _rms_norm_bwd_residual_op(*operands, dx_dtype=dx_dtype)
    if _is_looked_into() or _is_recorded(grad_out, x, rstd, weight, residual_grad):
        return formulas.rms_norm_bwd_residual(*operands, dx_dtype=dx_dtype)
    return _below_autograd(_rms_norm_bwd_residual_op, *operands, dx_dtype=dx_dtype)


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """y of layer_norm_fwd, differentiable. The statistics are not written if no gradient needs them."""
    if not _is_traced():
        if native.extension:
            y = native.extension.layer_norm(x, normalized_shape, weight, bias, eps)
            if y is not NotImplemented:
                return y
        y = (_shown_forward if is_profiled() else _forward)("layer", x, normalized_shape, weight, bias, eps)
        if y is not None:
            return y
    if _is_for_onnx():
        return _for_onnx(F.layer_norm, x, normalized_shape, weight, bias, eps)
    return (_layer_norm_fwd_op if _is_traced() else layer_norm_fwd)(x, normalized_shape, weight, bias, eps)[0]


def rms_norm(x, normalized_shape, weight=None, eps=None):
    """y of rms_norm_fwd, differentiable. The statistics are not written if no gradient needs them."""
    if not _is_traced():
        if native.extension:
            y = native.extension.rms_norm(x, normalized_shape, weight, eps)
            if y is not NotImplemented:
                return y
        y = (_shown_forward if is_profiled() else _forward)("rms", x, normalized_shape, weight, None, eps)
        if y is not None:
            return y
    if _is_for_onnx():
        return _for_onnx(F.rms_norm, x, normalized_shape, weight, eps)
    return (_rms_norm_fwd_op if _is_traced() else rms_norm_fwd)(x, normalized_shape, weight, eps)[0]


def _forward(norm, x, normalized_shape, weight, bias, eps) -> Tensor | None:
    """y if all tensors are plain (`_is_plain`) and no mode, transform or forward-mode AD is active; else None."""
    if type(x) not in PLAIN or forward_ad._current_level >= 0 or function_modes():
        return None
    recorded = torch.is_grad_enabled() and (x.requires_grad or _is_recorded(weight, bias))
    operands = norm, x, normalized_shape, weight, bias, eps, recorded
    seen = recipe.forward(*operands)
    for known in recipe.of_key(seen[0], ()):
        outputs = known.repeat(x, weight, bias)
        if outputs is not None:
            break
    else:
        if _is_looked_into() or not _is_plain((x, weight, bias)):
            return None
        outputs, known = ops.forward(*operands), recipe.find(seen)
    if not recorded:
        return outputs[0]
    call = known and known.note
    if call is None:
        call = NormCall(norm, tuple(normalized_shape), eps, asked_variants())
        if known is not None:
            known.note = call
    return _record(x, weight, bias, outputs, call)


def _shown_forward(norm, x, normalized_shape, weight, bias, eps) -> Tensor | None:
    """`_forward`, recorded for torch.profiler as an op that the dispatcher runs would be."""
    if not _is_plain((x, weight, bias)):
        return None
    with shown_to_profiler(f"{NAMESPACE}::{norm}_norm_fwd", x, weight, bias):
        return _forward(norm, x, normalized_shape, weight, bias, eps)


def _is_traced() -> bool:
    """Whether torch.compile or torch.jit.trace is recording the ops that are called."""
    return torch.compiler.is_dynamo_compiling() or tracing_state() is not None


def _shown(op: Callable, function: Callable) -> Callable:
    """The function that does what the op does, or the op itself if a profiler must see it."""
    return op if not torch.compiler.is_dynamo_compiling() and is_profiled() else function


def _is_for_onnx() -> bool:
    """Whether an ONNX exporter is recording the ops that are called. False under torch.compile's tracer: the tracer
    cannot evaluate the question, and the exporter uses it only after everything else has failed."""
    return not torch.compiler.is_dynamo_compiling() and torch.onnx.is_in_onnx_export()


def _for_onnx(stock: Callable[..., Tensor], x, normalized_shape, *operands) -> Tensor:
    """ATen's op, which ONNX's exporters can translate. Mixed dtypes run in the accumulation dtype, because ATen might
    refuse the mixture."""
    dtypes = {each.dtype for each in (x, *operands) if isinstance(each, Tensor)}
    if len(dtypes) == 1:
        return stock(x, normalized_shape, *operands)
    dtype = accumulation_dtype(x.dtype)
    upcast = (each.to(dtype) if isinstance(each, Tensor) else each for each in operands)
    return stock(x.to(dtype), normalized_shape, *upcast).to(x.dtype)


def _is_looked_into() -> bool:
    """Whether a torch.func transform or forward-mode AD is active."""
    return is_transforming() or forward_ad._current_level >= 0


def _is_recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd would record an operation on these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _at_once(
    x: Tensor, look: Callable[..., recipe.Call], run: Callable[..., tuple], norm: str, *operands
) -> tuple | None:
    """The outputs by CUDA kernels without the dispatcher, if nothing else intercepts calls below autograd; else None.
    Skipping the dispatcher saves a good part of a call's host time."""
    if type(x) not in PLAIN or function_modes():  # shapes of other classes may not be hashable
        return None
    try:
        key, tensors = look(norm, *operands)
        known = recipe.of_key(key, ())
    except (TypeError, RuntimeError):  # arguments of other types or a nested tensor: the op raises the right error
        return None
    # Recipes come before all other checks: a call with an earlier call's signature would pass the same checks.
    for each in known:
        outputs = each.repeat(*tensors)
        if outputs is not None:
            return outputs
    return run(norm, *operands) if _is_plain(tensors) else None


def _below_autograd(op: Callable[..., tuple], *operands, **more) -> tuple:
    """The op through the dispatcher, which serves whatever intercepts calls below autograd (modes, DTensors, ...)."""
    name = op.name().removeprefix(f"{NAMESPACE}::")
    if any(isinstance(each, Tensor) and each.is_nested for each in operands):
        raise RuntimeError(f"{name}: all tensors must be strided, got a nested one")
    sharding.register_where_needed()
    return torch_compat.below_autograd(op, getattr(ops, name), *operands, **more)


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


def _add(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


for _name in ops.OPS:
    ops.LIBRARY.impl(_name, globals()[_name], "Autograd")
    # Both vmaps, torch.func's and the older one of torch.autograd, pass batched tensors. The formula's operations have
    # batching rules.
    for _key in ("FuncTorchBatchedDecomposition", "Batched"):
        ops.LIBRARY.impl(_name, getattr(formulas, _name), _key)

if native.extension:
    native.install(
        "CUDA",
        [globals()[name] for name in native.OPS],
        ops,
        reference.statistics_backward_formula,
        differentiable_backward,
    )
