"""Derivatives of the ops: their implementations at the autograd dispatch key, the drop-in autograd Functions, and what
the functions return, a forward's outputs without the statistics.

A call takes one of three routes:

- If nothing is differentiated, the op's kernels run.
- If autograd records, the forward runs and NormFunction, the one autograd node, is recorded. Its backward is the
  backward op.
- If the inside of the op must be differentiated (torch.func transforms, forward-mode AD, a backward that is itself
  differentiated), the op's formula runs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import has_torch_function

from . import ops, reference, sharding
from .dtypes import accumulation_dtype
from .host import native, prepared, torch_compat
from .host.kernel_devices import runs_kernels
from .host.key import PLAIN_TYPES
from .namespace import NAMESPACE, TORCH_OPS
from .operands import (
    OPS,
    OWN_OUTPUTS,
    TRANSLATIONS,
    BackwardOperands,
    Derivative,
    ForwardOperands,
    Op,
    Operands,
    Outputs,
    as_op,
    backward_of,
    call_op,
    derivative_of,
    in_two,
    op_arguments,
    op_outputs,
    operands_by_position,
    operands_of,
)
from .operands import add as add_to_table
from .problem.outputs import settings_of
from .problem.validation import CHECKS, validate
from .settings import invariance
from .settings.forcing import asked_variants, force
from .settings.invariance import as_in_forward


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


class NodeInfo(NamedTuple):
    """What a node keeps of its forward beside tensors."""

    op: str  # the forward
    normalized_shape: tuple[int, ...]
    eps: float | None
    statistics_inside: bool  # whether mean and rstd stay inside the node, and are none of its outputs
    asked: tuple[str | None, ...]  # the variants that `force` asked for, the innermost last
    invariance: int  # in force: settings/invariance.py
    by: Derivative
    settings: dict[str, Any]  # operands of a form's backward that are no tensors

    def backward(self, grad_y, saved: dict[str, Tensor | None], mask, more: dict[str, Tensor]) -> dict[str, Any]:
        """The outputs of the backward op by name, or those of operations that can be differentiated if the statistics
        are inside the node and this backward is itself recorded. more: gradients of outputs that the backward op takes
        beside that of y, by the names of its operands."""
        operands = self.operands(grad_y, saved, mask, more)
        return dict(zip([each.name for each in operands.outputs], self.outputs(operands), strict=True))

    def outputs(self, operands: BackwardOperands, by_dispatcher: bool = False) -> Outputs:
        """The same in order. `by_dispatcher` is for calls that may be known in C++."""
        if self.statistics_inside and torch.is_grad_enabled():
            return differentiable_backward(operands, self.eps)
        return self._backward(operands, by_dispatcher)

    def operands(self, grad_y, saved: dict[str, Tensor | None], mask, more: dict[str, Tensor]) -> BackwardOperands:
        return backward_of(
            self.op,
            **saved,
            normalized_shape=self.normalized_shape,
            grad_out=grad_y,
            output_mask=mask,
            **self.settings,
            **more,
        )

    def _backward(self, operands: BackwardOperands, by_dispatcher: bool) -> Outputs:
        if not torch.compiler.is_dynamo_compiling():
            # What was asked for of the forward, not of autograd's thread.
            if self.asked != asked_variants():
                with force(self.asked[-1] if self.asked else None), as_in_forward(self.invariance):
                    return _backward(operands)
            if self.invariance != invariance.switch.invariance():
                with as_in_forward(self.invariance):
                    return _backward(operands)
        if by_dispatcher:
            return call_op(_overload(operands), operands)
        if not (_is_seen() or torch.is_grad_enabled() or torch_compat.is_intercepted()):
            grads, _ = prepared.run(operands)
            if grads is not None:
                return grads
        return _backward(operands)


# Without setup_context, because it slows every call. Only torch.func needs it, and torch.func never gets here: under a
# transform the ops run their formulas.
class NormFunction(Function):
    """The autograd node of a forward that has run. Its inputs are the forward's tensors, its outputs those of the
    forward, or all but the statistics."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, outputs, info = arguments
        ctx.set_materialize_grads(False)
        kept = *tensors, *outputs[1:]
        ctx.save_for_backward(*[kept[at] for at in info.by.sources])
        ctx.info = info
        return _without_statistics(outputs) if info.statistics_inside else outputs

    @staticmethod
    def backward(ctx, grad_y, *others):
        info, wanted = ctx.info, ctx.needs_input_grad[:-2]
        by = info.by
        saved = dict(zip(by.saved, ctx.saved_tensors, strict=True))
        count = 0 if info.statistics_inside else by.statistics
        of_statistics, behind = others[:count], others[count:]
        more = {name: grad for name, grad in zip(by.grads, behind, strict=True) if grad is not None}
        mask = tuple([any(map(wanted.__getitem__, ats)) for ats in by.mask])
        grads = {"grad_out": grad_y}
        runs = grad_y is not None or any(map(mask.__getitem__, by.of_dx))
        if not runs and all(more.get(name) is None or at in by.passed for at, name in enumerate(by.grads)):
            for at in by.passed:  # the norm adds nothing to these gradients
                grads["dx"] = more.get(by.grads[at])
                grads |= {name: grads["dx"] for name in by.copies}  # which autograd casts
        elif grad_y is not None or more:
            if grad_y is None and by.statistics:  # a norm of heads takes None for zeros
                grad_y = torch.zeros_like(saved["x"])
            grads |= info.backward(grad_y, saved, mask, more)
        if any(each is not None for each in of_statistics):
            operands = info.operands(grad_y, saved, mask, {})
            found = reference.statistics_gradients(operands, *of_statistics)
            for name, each in zip([output.name for output in operands.outputs], found, strict=True):
                if each is not None:
                    grads[name] = each if grads.get(name) is None else grads[name] + each
        return *[grads.get(name) if want else None for name, want in zip(by.gradients, wanted, strict=True)], None, None


_record = torch_compat.record(NormFunction)  # skips torch.func's checks: no call under torch.func gets here


def differentiable_backward(operands: BackwardOperands, eps: float | None) -> Outputs:
    """The outputs of a backward that is itself differentiated, of a node that keeps the statistics inside. They are
    computed again, because gradients flow through them."""
    if operands.has_statistics:
        mean, rstd = reference.statistics_of(operands, eps)
        operands = operands._replace(mean=mean, rstd=rstd)
    return call_op(
        _overload(operands) if torch.compiler.is_dynamo_compiling() else IMPLEMENTATIONS[operands.op], operands
    )


def above_autograd(operands: Operands) -> Outputs:
    """The implementation of the ops at the autograd key."""
    if torch.compiler.is_dynamo_compiling():
        return call_op(_overload(operands), operands)
    recorded = _is_recorded(*operands.differentiable)
    if torch_compat.needs_formula() or (recorded and operands.direction != "forward"):
        return reference.formula(operands)
    if recorded and TRANSLATIONS[operands.op].backward not in TRANSLATIONS:  # each of both norms has a backward
        return in_two(operands, above_autograd)
    outputs = _below_autograd(operands)
    return _record(*operands.tensors, outputs, node_info(operands, statistics_inside=False)) if recorded else outputs


def _apply(name: str, *arguments):
    """The outputs of a forward op, recorded. Raises under torch.func and in forward-mode AD, as autograd's Functions
    without rules for them do."""
    if torch.compiler.is_dynamo_compiling():
        return getattr(TORCH_OPS, name).default(*arguments)
    operands = operands_of(name, arguments, {})
    with torch.no_grad():
        outputs = _below_autograd(operands)
    if not torch.is_inference_mode_enabled():
        outputs = NormFunction.apply(*operands.tensors, outputs, node_info(operands, statistics_inside=False))
    return op_outputs(name, outputs)


def node_info(operands: Operands, *, statistics_inside: bool) -> NodeInfo:
    op, shape = operands.op, tuple(operands.normalized_shape)
    by = derivative_of(op)
    settings = settings_of(operands, by) if by.settings or by.dtypes else {}
    asked = asked_variants(), invariance.switch.invariance()
    return NodeInfo(op, shape, operands.eps, statistics_inside, *asked, by, settings)


def info_for_backward(op: str, eps: float | None) -> NodeInfo | None:
    """What a Function keeps of its forward for `gradients_of`; None while Dynamo traces it."""
    if torch.compiler.is_dynamo_compiling():
        return None
    inside = TRANSLATIONS[op].type.has_statistics
    return NodeInfo(op, (), eps, inside, asked_variants(), invariance.switch.invariance(), derivative_of(op), {})


def outputs_of(name: str, arguments: tuple) -> Sequence[Tensor | None]:
    """The outputs of an op inside a Function. Its arguments are given by position, those of lists one by one."""
    operands = operands_by_position(name, arguments)
    try:
        return _own_outputs(name, call_op(_overload(operands), operands))
    except (TypeError, RuntimeError):
        validate(operands)  # raises a sentence if an operand is wrong
        raise


def gradients_of(info: NodeInfo | None, name: str, arguments: tuple) -> Sequence[Tensor | None]:
    """The same for a backward op, in the backward of a Function that is no NormFunction."""
    if info is None:
        return outputs_of(name, arguments)
    operands = operands_by_position(name, arguments)
    return _own_outputs(name, info.outputs(operands, by_dispatcher=native.extension is not None))


def _own_outputs(name: str, outputs: Outputs) -> Sequence[Tensor | None]:
    """Without those that the op lacks."""
    absent = TRANSLATIONS[name].absent
    return [each for at, each in enumerate(outputs) if at not in absent]


def _below_autograd(operands: Operands) -> Outputs:
    """The outputs, without a derivative."""
    outputs = _without_dispatcher(operands)
    return _by_dispatcher(operands) if outputs is None else outputs


def _backward(operands: BackwardOperands) -> Outputs:
    """The outputs of the backward op. The op itself is called only if a tracer or profiler must see it; else its
    implementation at the autograd key is."""
    return call_op(_overload(operands) if _is_seen() else IMPLEMENTATIONS[operands.op], operands)


def _is_seen() -> bool:
    """Whether a tracer or a profiler must see the ops that are called."""
    return torch.compiler.is_dynamo_compiling() or torch_compat.is_profiled()


def _overload(operands: Operands) -> Callable[..., tuple]:
    return getattr(TORCH_OPS, operands.op).default


def y_of(norm, x, normalized_shape, weight, bias, eps) -> Tensor:
    """y of a forward op, for calls that do not run in C++."""
    traced = torch_compat.is_traced()
    wants_statistics = traced or _is_recorded(x, weight, bias)
    operands = ForwardOperands(norm, x, normalized_shape, weight, bias, eps, wants_statistics)
    if not traced:
        y = (_shown_forward if torch_compat.is_profiled() else _forward)(operands, wants_statistics)
        if y is not None:
            return y
    if _is_for_onnx():
        return _for_onnx(operands)
    return call_op(_overload(operands) if traced else IMPLEMENTATIONS[operands.op], operands)[0]


def of_form(name: str, arguments: tuple) -> Tensor | tuple[Tensor, ...]:
    """What a form's forward op returns without the statistics, for all of its arguments by position: y, or y and what
    follows."""
    return of_operands(operands_of(name, arguments, {}))


def of_operands(operands: Operands) -> Tensor | tuple[Tensor, ...]:
    """The same for operands."""
    try:
        if not torch.compiler.is_dynamo_compiling() and torch_compat.tracing_state() is not None:
            if TRANSLATIONS[operands.op].op.of_lists:  # torch.jit.trace takes no list with a None
                return reference.formula(operands)
            if operands.normalized_shape:  # sizes are tensors then
                operands = operands._replace(normalized_shape=[int(size) for size in operands.normalized_shape])
        return _of_form(operands)
    except (AttributeError, TypeError, RuntimeError):
        validate(operands)  # raises a sentence if an operand is wrong
        raise


def of_form_in_cpp(name: str, arguments: tuple) -> Tensor | tuple[Tensor, ...]:
    """`of_form`, in C++ where it runs the call."""
    outputs = native.y_of(name, arguments)
    return of_form(name, arguments) if outputs is None else outputs


def _of_form(operands: Operands) -> Tensor | tuple[Tensor, ...]:
    if torch_compat.is_traced() or torch_compat.asks_function_modes() or (
        has_torch_function(operands.tensors) and torch_compat.asks_subclasses()
    ):
        op = _overload(operands)
    else:
        recorded = _is_recorded(*operands.tensors)
        if operands.has_statistics and not recorded:
            operands = operands._replace(wants_statistics=False)
        outputs = (_shown_forward if torch_compat.is_profiled() else _forward)(operands, recorded)
        if outputs is not None:
            return outputs
        op = IMPLEMENTATIONS[operands.op]
    outputs = reference.formula(operands) if _is_for_onnx() else call_op(op, operands)
    return _without_statistics(outputs) if operands.has_statistics else outputs


def _without_statistics(outputs: Outputs) -> Tensor | tuple[Tensor, ...]:
    return outputs[0] if len(outputs) == OWN_OUTPUTS else (outputs[0], *outputs[OWN_OUTPUTS:])


def _forward(operands: Operands, recorded: bool) -> Tensor | tuple[Tensor, ...] | None:
    """The outputs without the statistics if all tensors are plain (`_is_plain`) and no mode, transform or forward-mode
    AD is active; else None."""
    if type(operands.x) not in PLAIN_TYPES or torch_compat.is_intercepted():
        return None
    outputs, _ = prepared.run(operands, _first_if_plain)
    if outputs is None:
        return None
    if recorded:
        return _record(*operands.tensors, outputs, node_info(operands, statistics_inside=operands.has_statistics))
    return _without_statistics(outputs) if operands.has_statistics else outputs


def _shown_forward(operands: Operands, recorded: bool) -> Tensor | tuple[Tensor, ...] | None:
    """`_forward`, shown to torch.profiler as the dispatcher shows an op that it runs."""
    if not _is_plain(operands.tensors):
        return None
    with torch_compat.shown_to_profiler(f"{NAMESPACE}::{operands.op}", *operands.tensors):
        return _forward(operands, recorded)


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
    stock = getattr(F, f"{operands.norm}_norm")
    return stock(*op_arguments(operands)[0]).to(x.dtype)


def _is_recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd would record an operation on these tensors."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _without_dispatcher(operands: Operands) -> Outputs | None:
    """The outputs by CUDA kernels without the dispatcher, if nothing else intercepts calls below autograd; else None.
    Skipping the dispatcher saves a good part of a call's host time."""
    if type(operands.x) not in PLAIN_TYPES or torch_compat.dispatch_modes() or torch_compat.function_modes():
        return None
    return prepared.run(operands, _first_if_plain)[0]


def _first_if_plain(operands: Operands, miss: prepared.Miss | None) -> tuple:
    return ops.first(operands, miss) if _is_plain(operands.tensors) else (None, None)


def _by_dispatcher(operands: Operands) -> Outputs:
    """The op below autograd, through the dispatcher, which serves whatever intercepts calls there (modes, DTensors)."""
    if any(isinstance(each, Tensor) and each.is_nested for each in operands.tensors):
        raise RuntimeError(f"{operands.op}: all tensors must be strided, got a nested one")
    sharding.register_where_needed()
    op, kernel = _overload(operands), ops.KERNELS[operands.op]
    return call_op(partial(torch_compat.below_autograd, op, kernel), operands)


def _is_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call on these tensors would reach our CUDA kernels with nothing in between below autograd."""
    if torch_compat.dispatch_modes() or torch_compat.function_modes():
        return False
    return all(each is None or (_is_on_a_gpu(each) and not _is_indirect(each)) for each in tensors)


def _is_on_a_gpu(tensor: Tensor) -> bool:
    runs = type(tensor) in PLAIN_TYPES and runs_kernels(tensor)
    return runs and tensor.layout is torch.strided and not tensor.is_nested


def _is_indirect(tensor: Tensor) -> bool:
    """Whether the tensor's memory does not hold its value (a negated view), or the tensor has no memory: a ZeroTensor
    of forward-mode AD, a tensor whose storage was freed, or one of a transform (torch.func's, which may be over, or
    that of torch.autograd.grad(..., is_grads_batched=True))."""
    if tensor.is_neg() or torch_compat.is_wrapped(tensor):
        return True
    try:
        return not tensor.untyped_storage().data_ptr() and tensor.numel() > 0
    except (NotImplementedError, RuntimeError):
        return True


IMPLEMENTATIONS: dict[str, Callable[..., tuple]] = {}  # of the ops at the autograd key


def register(op: Op) -> None:
    """Implement an op at the autograd key and above."""
    name = op.name
    IMPLEMENTATIONS[name] = as_op(name, above_autograd)
    ops.LIBRARY.impl(name, IMPLEMENTATIONS[name], "Autograd")
    # Both vmaps, torch.func's and the older one of torch.autograd, pass batched tensors. The formula's operations have
    # batching rules.
    for key in ("FuncTorchBatchedDecomposition", "Batched"):
        ops.LIBRARY.impl(name, as_op(name, reference.formula), key)


def add(op: Op, formula: Callable[..., Any], check: Callable | None = None, launch: Callable | None = None) -> None:
    """Add an op to the package: torch.ops.fusednorm gets it, with a fake and derivatives. `formula` has its arguments
    and outputs, as tensor code that can be differentiated. CUDA tensors run kernels if op.form is not None; then
    FORMS of kernels/rowmath.py must have its name. An op that is no norm of rows comes with its own check
    (validation.CHECKS) and launch (ops.LAUNCHES), and is in a table of its own."""
    reference.FORMULAS[op.name] = formula
    if check and launch:
        CHECKS[op.name], ops.LAUNCHES[op.name] = check, launch
    else:
        add_to_table(op)
    ops.register(op)
    register(op)
    native.add(op)


for _op in OPS.values():
    register(_op)

if native.extension:
    native.install("CUDA", above_autograd, ops, reference.statistics_gradients, differentiable_backward)
