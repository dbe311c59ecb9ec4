"""The registered ops, torch.ops.fusednorm.*: schemas, fakes and entry points for CPU and CUDA.

x is `[*batch, *normalized_shape]`: rows of cols = prod(normalized_shape) elements, M of them.

layer_norm_fwd
    y = (x - mean) * rstd * weight + bias, with rstd = 1 / sqrt(var + eps), var the biased variance of a row
rms_norm_fwd
    y = x * rstd * weight, with rstd = 1 / sqrt(mean(x^2) + eps); eps None is the machine epsilon of float32 (float64
    for float64 x)
layer_norm_bwd, rms_norm_bwd
    gradients of x, weight and bias, from the gradient of y and the statistics that the forward returned
layer_norm_bwd_residual, rms_norm_bwd_residual
    the same, with residual_grad (the gradient of a residual stream that x also went into) added to dx before dx is
    rounded, once, to dx_dtype (x's by default); weight_offset is added to the weight. rms_norm's has a bias, too
layer_norm_fwd_affine, rms_norm_fwd_affine
    y = x_hat * (weight_offset + weight) + bias, in y_dtype (by default x's). If rounds_x_hat, x_hat is rounded to x's
    dtype, and y has the promoted dtype of x, weight and bias by default
layer_norm_fwd_of_sum, rms_norm_fwd_of_sum
    the same of new_residual = x + residual, in residual_dtype (by default the promoted dtype of both). The sum is
    normalized as it is stored if rounds_sum. residual None: new_residual is a copy of x
layer_norm_fwd_of_wide_sum, rms_norm_fwd_of_wide_sum
    the same for a residual of a wider dtype than x's, for which autograd calls one backward that writes both gradients
layer_norm_bwd_of_wide_sum, rms_norm_bwd_of_wide_sum
    as `*_bwd_residual`, with the gradient in a second dtype, too: dx in dx_dtype, dsummand in dsummand_dtype
layer_norm_fwd_plus_residual, rms_norm_fwd_plus_residual
    the same of x, plus residual; y has the promoted dtype of both by default
layer_norm_fwd_plus_residual_norm, rms_norm_fwd_plus_residual_norm
    the same, and next_y, the norm of y by next_weight and next_bias, with its statistics
layer_norm_fwd_of_gated, rms_norm_fwd_of_gated
    the same of x * act(gate), with the function that `activation` names
layer_norm_fwd_times_gate, rms_norm_fwd_times_gate
    the same of x, times act(gate); y has x's dtype. If rounds_x_hat, u is rounded, too, to the promoted dtype of x,
    weight and bias if that has 16 bits. Norms with a gate take groups: each of as many equal parts of adjacent columns
    is normalized by itself
layer_norm_bwd_of_gated, rms_norm_bwd_of_gated, layer_norm_bwd_times_gate, rms_norm_bwd_times_gate
    gradients of x, weight, bias and gate, from x and gate
layer_norm_bwd_times_gate_packed, rms_norm_bwd_times_gate_packed
    as the next ones, of the gate behind the norm
layer_norm_bwd_of_gated_packed, rms_norm_bwd_of_gated_packed
    the same of x and a gate that are columns of one tensor, from x_at and gate_at on: the gradient of this tensor of
    `width` columns, with rest, `[*batch, width - 2 * cols]`, as the gradient of its other columns side by side (None:
    zeros)
layer_norm_fwd_modulated, rms_norm_fwd_modulated
    y = u * (1 + scale) + shift, with u as y of `*_fwd_affine`; rounds_steps rounds u, 1 + scale and their product, too
layer_norm_fwd_of_sum_modulated, rms_norm_fwd_of_sum_modulated
    the same of new_residual = residual + x
layer_norm_fwd_of_gated_sum_modulated, rms_norm_fwd_of_gated_sum_modulated
    the same of new_residual = residual + gate * x
layer_norm_fwd_modulated_plus_residual, rms_norm_fwd_modulated_plus_residual
    u * factor + residual, where modulate names the factor: the scale ("identity"), its tanh, or 1 + scale ("one_plus")
layer_norm_bwd_modulated, rms_norm_bwd_modulated
    the gradients of all of these: x is the row that was normalized, branch what was multiplied by the gate
layer_norm_fwd_modulated_by_index, ..., rms_norm_bwd_modulated_by_index
    the same of scale, shift and gate that are tables, `[R, *normalized_shape]`: row_index has x's batch dims, and the
    number of each row of x

The first four take the arguments of aten::native_layer_norm, native_layer_norm_backward, _fused_rms_norm and
_fused_rms_norm_backward at the same positions.

Shapes
    grad_out and residual_grad have x's shape, weight and bias normalized_shape. mean and rstd have any shape of M
    elements, such as `[M]`, `[M, 1]` or the `[*batch, 1, ...]` that the forward returns; with groups any of M * groups,
    such as the `[*batch, 1, ..., groups]` that it returns then. scale, shift and gate have the first batch dims of x,
    each whole or 1, and normalized_shape; so have their gradients. Outputs are contiguous.
Dtypes
    Each operand has its own: float16, bfloat16, float32 or float64. y and dx have x's dtype, dweight and dbias that of
    their parameter. Statistics are float32, or float64 for float64 x.
Strides
    Any. Rows at one constant stride or at two nested strides are read in place; anything else is copied once.
Derivatives
    Of any order, of every output, mean and rstd included (ATen's ops do not differentiate these two).
Masks
    An output that output_mask leaves out, or whose parameter is None, is not computed and is returned as None.
Errors
    RuntimeError if an operand has another shape, dtype or device than stated here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .host import native, prepared
from .host.kernel_devices import runs_kernels
from .host.program import Program
from .namespace import NAMESPACE
from .operands import OPS, TRANSLATIONS, Op, Operands, Output, Outputs, Role, Slot, as_op, in_two, wanted_outputs
from .problem.calls import check
from .problem.outputs import output_dtype, shape_of
from .problem.validation import validate

LIBRARY = torch.library.Library(NAMESPACE, "DEF")

TYPES = {
    **{Role.SHAPE: "SymInt[]", Role.EPS: "float", Role.DTYPE: "ScalarType", Role.COUNT: "SymInt"},
    **{Role.INTEGER: "int", Role.BOOL: "bool"},
}


def schema_of(op: Op) -> str:
    """As torch.library takes it."""

    def argument(slot: Slot, *others: Slot) -> str:
        kind = TYPES.get(slot.role, "Tensor")
        if slot.role is Role.MASK:
            kind = f"bool[{len(op.outputs)}]" if slot.has_default else "bool[]"
        elif slot.role is Role.FORM:
            kind = "int" if slot.default is None else type(slot.default).__name__
        default = f'"{slot.default}"' if kind == "str" else op.default(slot)
        has_default = slot.has_default and (slot.role.is_by_name or not op.of_lists)
        name = f"{'?' * slot.optional}{'[]' * bool(others)} {slot.argument or slot.name}"
        return f"{kind}{name}" + f"={default}" * has_default

    by_position, by_name = (
        [argument(*slots) for slots in op.lists if slots[0].role.is_by_name is named] for named in (False, True)
    )
    outputs = ", ".join(f"Tensor {output.name}" for output in op.outputs)
    outputs = "Tensor[]" if op.of_lists else f"({outputs})"
    return f"{op.name}({', '.join([*by_position, *['*'][: len(by_name)], *by_name])}) -> {outputs}"


SCHEMAS = {name: schema_of(op) for name, op in OPS.items()}
__doc__ = f"{__doc__}\nSchemas\n    ::\n\n" + "".join(f"        {schema}\n\n" for schema in SCHEMAS.values())


def run(operands: Operands) -> Outputs:
    """The outputs of either direction, below autograd: (y, mean, rstd) or (dx, dw, db). mean is None for RMSNorm, and
    so is an unwanted gradient; kernels write statistics only if wants_statistics. Raises as `check_forward` and
    `check_backward` do."""
    return launched(operands)[0]


def launched(operands: Operands) -> tuple[Outputs, prepared.Kept]:
    """(what `run` returns, the program that has made it if the program is kept)."""
    return prepared.run(operands, first) if runs_kernels(operands.x) else first(operands)


Launched = tuple[Outputs | None, Program | None]
# Of ops that are no norms of rows: checked operands to outputs. None for both leaves the call to the formula.
LAUNCHES: dict[str, Callable[[Operands, prepared.Miss | None], Launched]] = {}


def first(operands: Operands, miss: prepared.Miss | None = None) -> tuple[Outputs, prepared.Kept]:
    """`launched`, if there is no program yet."""
    if prepared.are_in_two(miss):
        return in_two(operands, run), prepared.IN_TWO
    if TRANSLATIONS[operands.op].op.form is None:
        return reference.run(operands), None
    own = LAUNCHES.get(operands.op)
    if own:
        validate(operands)
        outputs, program = own(operands, miss) if runs_kernels(operands.x) else (None, None)
        return (reference.run(operands), None) if outputs is None else (outputs, program)
    call = check(operands)
    wanted = call.problem.wants_any
    if not wanted and not call.added_outputs:
        return (None,) * len(operands.outputs), None
    if wanted and runs_kernels(operands.x) and call.rows and call.problem.cols:
        copies = _copies(operands, call.tensors)
        if copies:
            return prepared.run(operands._replace(**copies), first)
        outputs, program = launch().run(call, miss)
        if outputs is not None:
            return outputs, program
        if operands.form.again:
            return in_two(operands, run), prepared.keep_in_two(miss)
    return in_two(operands, run) if operands.form.again else reference.run(operands, call), None


def _copies(operands: Operands, read: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    """The operands that were copied to be read, by name. For the copies there may be a program. None if a modulation
    was copied to more rows than it has, because its gradient has the rows of the operand."""
    names = [slot.name for slot in operands.slots if slot.role.is_tensor]
    given = zip(names, operands.tensors, read, strict=True)
    copied = [each for each in given if each[2] is not None and each[2].data_ptr() != each[1].data_ptr()]
    if not copied or any(used.numel() != tensor.numel() for _, tensor, used in copied):
        return {}
    return {name: used.view(tensor.shape) for name, tensor, used in copied}


@functools.cache
def launch() -> ModuleType:
    from .host import launch  # imported late: it imports Triton, which a process without CUDA tensors may lack

    native.warn_if_missing()
    return launch


def fake(operands: Operands) -> Outputs:
    """The fake kernel: outputs without values, each a tensor of its own."""
    validate(operands)
    given = operands.x.shape, operands.normalized_shape, operands.groups, operands.width

    def output(each: Output) -> Tensor:
        like = getattr(operands, each.like)
        shape = shape_of(each.role, *given) if each.role in (Role.STATISTIC, Role.COLUMNS) else like.shape
        return like.new_empty(shape, dtype=output_dtype(operands, each))

    wanted = zip(operands.outputs, wanted_outputs(operands), strict=True)
    return tuple(output(each) if is_wanted else None for each, is_wanted in wanted)


def _refuse(operands: Operands) -> Outputs:
    """Raises for calls that no kernel takes: nested or sparse tensors, other devices, no tensor at all."""
    validate(operands)  # raises first if an operand itself is wrong
    device = next(each.device for each in operands.tensors if isinstance(each, Tensor))
    raise RuntimeError(f"{operands.op}: x must be on a CPU or a CUDA GPU, got {device}")


# Dispatch keys that serve all tensors without a kernel of their own.
ELSEWHERE = ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA")
KERNELS: dict[str, Callable[..., tuple]] = {}


def register(op: Op) -> None:
    """Define an op, below autograd."""
    name = op.name
    KERNELS[name] = as_op(name, run)
    keys = ("CPU",) if native.extension else ("CPU", "CUDA")
    elsewhere = as_op(name, run if op.of_lists else _refuse)  # an empty list has no device
    define(schema_of(op), as_op(name, fake), (KERNELS[name], keys), (elsewhere, ELSEWHERE))


def define(schema: str, fake: Callable, *implementations: tuple[Callable, Sequence[str]]) -> None:
    """Define an op by its schema, with a fake kernel and (implementation, dispatch keys)."""
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    for function, keys in implementations:
        for key in keys:
            LIBRARY.impl(name, function, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)


for _op in OPS.values():
    register(_op)

# AOTInductor accepts None only for outputs declared `Tensor?`, but the schemas above declare `Tensor` as ATen's do.
# These copies of ops declare `Tensor?` and have no derivatives. Only AOTInductor's graphs use them
# (integrations/routing.py).
WITH_OPTIONAL_OUTPUTS = {name: f"{name}_optional" for name, op in OPS.items() if op.aten and op.slot("output_mask")}
for _name, _copy in WITH_OPTIONAL_OUTPUTS.items():
    _arguments, _outputs = SCHEMAS[_name].removeprefix(_name).split(" -> ")
    _copied = f"{_copy}{_arguments} -> {_outputs.replace('Tensor', 'Tensor?')}"
    define(_copied, as_op(_name, fake), (KERNELS[_name], ("CPU", "CUDA")))
