"""Norms with a gate where x and the gate are columns of one tensor, such as a projection's output: its gradient is
written once, by one op, where slices would give autograd several to add up."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor
from torch.autograd import Function

from .. import autograd, functional
from ..forms import ROUNDINGS
from ..host import native
from ..host.torch_compat import recorder
from ..problem.validation import require_strided

Columns = tuple[int, int]

INTEGERS = int, Integral, torch.SymInt  # int first: isinstance then enters no frame of Python


def layer_norm_gated_packed(
    packed: Tensor,
    x: Columns,
    gate: Columns,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> tuple[Tensor, ...]:
    """A tuple of y, which is layer_norm_gated of two ranges of the columns of `packed`, `[..., width]`, and of views of
    the columns before, between and behind these ranges, if there are such.

    x and gate are (start, stop), equally many columns, which do not overlap. weight and bias have as many. The forward
    reads packed in place. The backward is one op that returns one gradient of packed, in which it writes those of x and
    of the gate, and to which it copies those of the other columns; autograd would concatenate the gradients of slices.
    Other arguments, dtypes and errors are those of layer_norm_gated, and RuntimeError for other ranges.
    """
    return _packed("layer", packed, x, gate, weight, bias, eps, activation, norm_before_gate, group_size,
                   weight_offset, rounding)  # fmt: skip


def rms_norm_gated_packed(
    packed: Tensor,
    x: Columns,
    gate: Columns,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> tuple[Tensor, ...]:
    """A tuple of y, which is rms_norm_gated of two ranges of the columns of `packed`, and of views of its others.
    Arguments as layer_norm_gated_packed's; eps None is the machine epsilon of float32 (float64 for float64 packed)."""
    return _packed("rms", packed, x, gate, weight, bias, eps, activation, norm_before_gate, group_size,
                   weight_offset, rounding)  # fmt: skip


def _packed(
    norm, packed, x, gate, weight, bias, eps, activation, norm_before_gate, group_size, weight_offset, rounding
) -> tuple[Tensor, ...]:
    op = functional.gated_op(norm, norm_before_gate, activation)
    require_strided(op, "packed", packed)
    places = _checked(op, packed, x, gate)
    cols = places[0][1] - places[0][0]
    groups = 1 if group_size is None else functional.groups_of(op, group_size, cols)
    settings = eps, weight_offset, ROUNDINGS.get(rounding), None, activation, groups
    outputs = _in_cpp(op, places, packed, (packed, (cols,), packed, weight, bias, *settings))
    if outputs is not None:
        return outputs
    record = recorder(PackedFunction, packed, weight, bias)
    if record is None:
        x, gate = _columns(packed, places)
        more = (cols,), weight_offset, rounding, (activation, groups)
        return functional.of_form(op, x, (gate,), weight, bias, eps, *more), *_columns(packed, _others(packed, places))
    functional.require_settings(op, eps, weight_offset, rounding)
    return record(op, places, (eps, float(weight_offset), *settings[2:]), packed, weight, bias)


def _in_cpp(op: str, places: tuple[Columns, Columns], packed: Tensor, arguments: tuple) -> tuple[Tensor, ...] | None:
    ranges = [number for start, stop in (*places, *_others(packed, places)) for number in (start, stop - start)]
    (x_at, _), (gate_at, _), width = *places, packed.shape[-1]
    return native.y_of_parts(op, (width,), ranges, (width, x_at, gate_at), arguments)


def _checked(op: str, packed: Tensor, *ranges: Columns) -> tuple[Columns, Columns]:
    width = packed.shape[-1] if packed.dim() else 0
    for name, each in zip(("x", "gate"), ranges, strict=True):
        is_pair = isinstance(each, (tuple, Sequence)) and len(each) == 2
        if not (is_pair and isinstance(each[0], INTEGERS) and isinstance(each[1], INTEGERS)):
            raise TypeError(f"{op}: {name} must be (start, stop), the range of its columns, got {each!r}")
    (x, x_end), (gate, gate_end) = ranges
    fits = 0 <= x < x_end <= width and 0 <= gate < gate_end <= width and x_end - x == gate_end - gate
    if not fits or (x < gate_end and gate < x_end):
        rule = f"x and gate must be ranges of equally many of the {width} columns, at least one, that do not overlap"
        raise RuntimeError(f"{op}: {rule}, got {ranges[0]} and {ranges[1]}")
    return (x, x_end), (gate, gate_end)


def _columns(packed: Tensor, ranges: Sequence[Columns]) -> list[Tensor]:
    return [packed[..., start:stop] for start, stop in ranges]


def _others(packed: Tensor, places: tuple[Columns, Columns]) -> list[Columns]:
    """The ranges of the other columns."""
    x, gate = places
    (first, end), (last, last_end) = (x, gate) if x[0] < gate[0] else (gate, x)  # Dynamo sorts no symbolic numbers
    runs = (0, first), (end, last), (last_end, packed.shape[-1])
    return [(start, stop) for start, stop in runs if stop > start]


class PackedFunction(Function):
    """apply(op, places, settings, packed, weight, bias) -> (y, *others), with the op's settings by position."""

    @staticmethod
    def forward(ctx, op, places, settings, packed, weight, bias):
        x, gate = _columns(packed, places)
        cols = places[0][1] - places[0][0]
        y, *statistics = autograd.outputs_of(op, (x, (cols,), gate, weight, bias, *settings))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(packed, weight, bias, *statistics)
        ctx.width = packed.shape[-1]  # in a backward, Dynamo would take it for a stride of a gradient, and be wrong
        ctx.op, ctx.places, ctx.settings = op, places, settings
        ctx.info = autograd.info_for_backward(op, settings[0])
        return y, *_columns(packed, _others(packed, places))

    @staticmethod
    def backward(ctx, grad_y, *grads):
        packed, weight, bias, *statistics = ctx.saved_tensors
        (x_at, x_end), (gate_at, _) = ctx.places
        x, gate = _columns(packed, ctx.places)
        _, _, _, *wanted = ctx.needs_input_grad
        mask = tuple([want and of is not None for want, of in zip(wanted, (packed, weight, bias), strict=True)])
        _, weight_offset, _, _, activation, groups = ctx.settings
        grad_y = torch.zeros_like(x) if grad_y is None else grad_y
        rest = _side_by_side(grads, packed, ctx.places)
        given = grad_y, x, (x_end - x_at,), gate, *statistics, weight, bias, rest, mask
        more = weight_offset, activation, groups, ctx.width, x_at, gate_at
        name = f"{ctx.op.replace('_fwd_', '_bwd_')}_packed"
        return None, None, None, *autograd.gradients_of(ctx.info, name, (*given, *more))


def _side_by_side(grads, packed: Tensor, places: tuple[Columns, Columns]) -> Tensor | None:
    """The gradients of the other columns as one tensor; None if there is none."""
    if all(each is None for each in grads):
        return None
    if len(grads) == 1:
        return grads[0]
    pairs = zip(grads, _columns(packed, _others(packed, places)), strict=True)
    return torch.cat([torch.zeros_like(of) if grad is None else grad for grad, of in pairs], -1)
