"""layer_norm and rms_norm with the signatures of torch.nn.functional, and the norms of the other forms.

Tensors that our kernels run on (kernel_devices.py) take our ops, under autocast in the dtype that the installed torch
would choose. All other tensors go to torch.nn.functional, except CPU and meta tensors of mixed dtypes, which our ops
take.

What overrides torch's functions (tensor subclasses with a __torch_function__, torch function modes) is shown
torch.nn.functional's own function, which it may know. If it calls that function, our implementation runs.

The other forms have no function of torch's: their ops run on all devices. They have no autocast rule, so that dtypes
follow from those of the arguments, as F.rms_norm's do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Proxy
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_variadic

from . import autograd
from .dtypes import FLOAT_DTYPES, SIXTEEN_BITS
from .forms import ACTIVATIONS, ROUNDINGS, STEPS, require_one_of
from .host import native, torch_compat
from .host.kernel_devices import runs_kernels
from .host.torch_compat import asks_function_modes, asks_subclasses
from .operands import BY_INDEX, NORMS, OPS


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.layer_norm: normalize the trailing dims of input that make up normalized_shape.

    Takes float16, bfloat16, float32 and float64; weight and bias may each have their own dtype. Returns a contiguous
    tensor of input's shape and dtype (float32 under CUDA autocast). Raises RuntimeError as
    torch.ops.fusednorm.layer_norm_fwd does, and torch.nn.functional's TypeError for an argument of another type.
    """
    y = native.y_of("layer_norm_fwd", (input, normalized_shape, weight, bias, eps))
    return _in_python("layer", input, normalized_shape, eps, weight, bias) if y is None else y


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """torch.nn.functional.rms_norm: scale the trailing dims of input that make up normalized_shape to unit mean square.

    Takes float16, bfloat16, float32 and float64; weight may have its own dtype. eps None is the machine epsilon of
    float32 (of float64 for float64 input). Returns a tensor of input's shape and dtype (under CUDA autocast float32 if
    the installed torch returns that). Our kernels' result is contiguous; torch.nn.functional.rms_norm, which runs CPU
    tensors, keeps the memory format of a channels-last input. Raises RuntimeError as torch.ops.fusednorm.rms_norm_fwd
    does, and torch.nn.functional's TypeError for an argument of another type.
    """
    y = native.y_of("rms_norm_fwd", (input, normalized_shape, weight, eps))
    return _in_python("rms", input, normalized_shape, eps, weight) if y is None else y


def _in_python(norm: str, input, normalized_shape, eps, weight, *bias) -> Tensor:
    """layer_norm or, without a bias, rms_norm, where C++ does not run the call."""
    stock, has_own_eps = getattr(F, f"{norm}_norm"), norm == "rms" and eps is None
    if asks_function_modes() or (has_torch_function_variadic(input, weight, *bias) and asks_subclasses()):
        return _by_overrides(stock, input, normalized_shape, weight, *bias, eps)
    try:
        eps = eps if has_own_eps or type(eps) is float else _number(eps)
        if runs_kernels(input):
            if _AUTOCASTS[norm] and torch.is_autocast_enabled():
                input, weight, *bias = map(_upcast, (input, weight, *bias))
            return autograd.y_of(norm, input, normalized_shape, weight, *(bias or (None,)), eps)
        if _is_mixture(input, weight, *bias) and _match_our_signature(input, normalized_shape, weight, *bias, eps=eps):
            return autograd.y_of(norm, input, normalized_shape, weight, *(bias or (None,)), eps)
    except Exception:
        if (has_own_eps or eps is not None) and _match_our_signature(input, normalized_shape, weight, *bias, eps=eps):
            raise
    return stock(input, normalized_shape, weight, *bias, eps)


def affine_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> Tensor:
    """LayerNorm with another map of x_hat, y = x_hat * (weight_offset + weight) + bias.

    normalized_shape is by default the shape of weight, or of bias, or the last dim of x. weight_offset is added to the
    weight in float32 (float64 for float64 x); without a weight there is no factor at all. rounding "once" rounds y
    alone, to x's dtype; "x_hat" also rounds x_hat to x's dtype before the weight, and y has the promoted dtype of x,
    weight and bias, as in most of transformers' RMSNorms. Any float dtypes; each gradient has its input's. Raises
    RuntimeError as torch.ops.fusednorm.layer_norm_fwd_affine does, and ValueError for another rounding.
    """
    return of_form("layer_norm_fwd_affine", x, (), weight, bias, eps, normalized_shape, weight_offset, rounding)


def affine_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> Tensor:
    """RMSNorm with another map of x_hat, y = x_hat * (weight_offset + weight) + bias. weight_offset=1.0 is the RMSNorm
    of Gemma 1 to 3 and Qwen3-Next, rounding="x_hat" that of Llama. Arguments as affine_layer_norm's; eps None is the
    machine epsilon of float32 (float64 for float64 x)."""
    return of_form("rms_norm_fwd_affine", x, (), weight, bias, eps, normalized_shape, weight_offset, rounding)


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual_dtype: torch.dtype | None = None,
    *,
    normalized_shape: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalize_rounded: bool = True,
) -> tuple[Tensor, Tensor]:
    """(LayerNorm of x + residual, x + residual): the norm before a layer of a residual stream.

    residual has x's shape. The sum is computed in float32 and stored in residual_dtype, by default the promoted dtype
    of x and residual. The stored sum is normalized (as transformers does), or without normalize_rounded the one that
    was not rounded (as QuACK and FLA do). residual None is a stream's beginning: the sum is a copy of x. The backward
    is one pass that adds the stream's gradient; either gradient may be absent. Other arguments, dtypes and errors are
    those of affine_layer_norm.
    """
    return of_form("layer_norm_fwd_of_sum", x, (residual,), weight, bias, eps, normalized_shape, weight_offset,
                   rounding, (normalize_rounded, residual_dtype))  # fmt: skip


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    residual_dtype: torch.dtype | None = None,
    *,
    normalized_shape: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalize_rounded: bool = True,
) -> tuple[Tensor, Tensor]:
    """(RMSNorm of x + residual, x + residual). Arguments as add_layer_norm's; eps None is the machine epsilon of
    float32 (float64 for float64 x or residual)."""
    return of_form("rms_norm_fwd_of_sum", x, (residual,), weight, bias, eps, normalized_shape, weight_offset,
                   rounding, (normalize_rounded, residual_dtype))  # fmt: skip


def layer_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    gate: Tensor | None = None,
    gate_activation: str | None = None,
) -> Tensor:
    """residual + LayerNorm of x: the norm behind a layer, added to the residual stream. The sum is rounded once, to the
    promoted dtype of x and residual.

    gate makes it residual + gate * LayerNorm of x, with gate_activation="tanh" tanh(gate) for gate. Its shape is that
    of ada_layer_norm's modulations; rounding may be "steps" then. Other arguments, dtypes and errors are those of
    affine_layer_norm."""
    return behind("layer", x, residual, gate, gate_activation, weight, bias, eps,
                   normalized_shape, weight_offset, rounding)  # fmt: skip


def rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    gate: Tensor | None = None,
    gate_activation: str | None = None,
) -> Tensor:
    """residual + RMSNorm of x, as in Gemma 2 to 4, OLMo 2 and GLM-4; with gate and gate_activation="tanh" as in Z-Image
    and Lumina. Arguments as layer_norm_add's; eps None is the machine epsilon of float32 (float64 for float64 x or
    residual)."""
    return behind("rms", x, residual, gate, gate_activation, weight, bias, eps,
                   normalized_shape, weight_offset, rounding)  # fmt: skip


def ada_layer_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    index: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual_dtype: torch.dtype | None = None,
    normalized_shape: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalize_rounded: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """y = LayerNorm(x) * (1 + scale) + shift: the norm of diffusion transformers (adaLN; Peebles, Xie, "Scalable
    Diffusion Models with Transformers", 2023). With a residual (y, h): the norm is that of h = residual + gate * x, or
    of residual + x without a gate, and h is the next residual.

    scale, shift and gate are *modulations*, each of the first batch dims of x, whole or 1, and of normalized_shape. For
    x of shape [B, S, C], [B, C] and [B, 1, C] are one row per sample, [B, S, C] is one per token. Slices of one
    [B, 6, C] are read in place. With an index, a tensor of integers of x's batch shape, modulations are tables [R, C],
    and row r of x has row index[r] of each, which is read in place. A number that is no row of the tables reads NaN
    and adds nothing to their gradients. Any float dtypes; each gradient has its input's shape and dtype, and is the
    same in every run.

    rounding "once" rounds y alone (and h), to x's dtype, as Wan does. "steps" rounds as code in x's dtype, such as
    FLUX's and SD3's: the norm, 1 + scale, their product, gate * x, and the sums; y has the promoted dtype of h, weight,
    bias, scale and shift. "x_hat" rounds as in affine_layer_norm. residual_dtype and normalize_rounded are those of
    add_layer_norm. Raises RuntimeError as torch.ops.fusednorm.layer_norm_fwd_modulated does, and for a gate without a
    residual; ValueError for another rounding.
    """
    return ada("layer", x, residual, gate, scale, shift, index, weight, bias, eps, residual_dtype, normalize_rounded,
                normalized_shape, weight_offset, rounding)  # fmt: skip


def ada_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    index: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    residual_dtype: torch.dtype | None = None,
    normalized_shape: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
    normalize_rounded: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """y = RMSNorm(x) * (1 + scale) + shift, as in LTX-2, and with a weight in Z-Image and Lumina. Arguments as
    ada_layer_norm's; eps None is the machine epsilon of float32 (float64 for float64 x or residual)."""
    return ada("rms", x, residual, gate, scale, shift, index, weight, bias, eps, residual_dtype, normalize_rounded,
                normalized_shape, weight_offset, rounding)  # fmt: skip


def ada(
    norm, x, residual, gate, scale, shift, index, weight, bias, eps, residual_dtype, normalize_rounded,
    normalized_shape, weight_offset, rounding,
):  # fmt: skip
    """ada_layer_norm or ada_rms_norm of positional arguments."""
    of, rows, more = "", (), ()
    if residual is not None:
        of, rows, more = "_of_sum", (residual,), (normalize_rounded, residual_dtype)
    if gate is not None:
        of, rows = "_of_gated_sum", (*rows, gate)
        if residual is None:
            raise RuntimeError(f"{norm}_norm_fwd{of}_modulated: a gate must have a residual, got none")
    steps, by = rounding == STEPS, ""
    if index is not None:
        rows, by = (*rows, index), BY_INDEX
    return of_form(f"{norm}_norm_fwd{of}_modulated{by}", x, (*rows, scale, shift), weight, bias, eps, normalized_shape,
                   weight_offset, "once" if steps else rounding, (*more, steps))  # fmt: skip


def behind(
    norm, x, residual, gate, gate_activation, weight, bias, eps, normalized_shape, weight_offset, rounding
) -> Tensor:
    """layer_norm_add or rms_norm_add of positional arguments."""
    if gate_activation not in (None, "tanh") or (gate is None and gate_activation):
        raise ValueError(f"{norm}_norm_add: gate_activation must be None, or 'tanh' of a gate, got {gate_activation!r}")
    given = weight, bias, eps, normalized_shape, weight_offset
    if gate is None:
        return of_form(f"{norm}_norm_fwd_plus_residual", x, (residual,), *given, rounding)
    steps = rounding == STEPS
    op, settings = f"{norm}_norm_fwd_modulated_plus_residual", (gate_activation or "identity", steps)
    return of_form(op, x, (residual, gate), *given, "once" if steps else rounding, settings)


def layer_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    normalized_shape: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> Tensor:
    """LayerNorm with a gate of x's shape: the norm of x times act(gate), or without norm_before_gate the norm of
    x * act(gate). act is silu, z * sigmoid(z), or sigmoid, by `activation`. With a group_size, which divides the
    columns, each group of as many adjacent columns is normalized by itself, with a mean and an rstd of its own.

    All is computed in float32 and rounded once, to x's dtype. With rounding="x_hat", a norm before its gate is rounded
    to the promoted dtype of x, weight and bias, too, as in transformers' Qwen3-Next. The backward is one pass from x,
    gate and the gradient of y, and gives the gradients of x, gate, weight and bias. gate is read at its own strides.
    Other arguments, dtypes and errors are those of affine_layer_norm, and ValueError for another activation.
    """
    return _gated("layer", x, gate, weight, bias, eps, activation, norm_before_gate, group_size,
                  normalized_shape, weight_offset, rounding)  # fmt: skip


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    normalized_shape: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> Tensor:
    """RMSNorm with a gate, as in Qwen3-Next and Kimi-Linear (norm_before_gate) and in Mamba2 (without). Arguments as
    layer_norm_gated's; eps None is the machine epsilon of float32 (float64 for float64 x or gate)."""
    return _gated("rms", x, gate, weight, bias, eps, activation, norm_before_gate, group_size,
                  normalized_shape, weight_offset, rounding)  # fmt: skip


def _gated(
    norm, x, gate, weight, bias, eps, activation, norm_before_gate, group_size, normalized_shape, *more
) -> Tensor:
    op, shape = gated_op(norm, norm_before_gate, activation), normalized_shape
    if shape is None:
        shape = shape_of(x, weight, bias)
    groups = 1 if group_size is None else groups_of(op, group_size, math.prod(shape))
    return of_form(op, x, (gate,), weight, bias, eps, shape, *more, (activation, groups))


def groups_of(op: str, group_size: int, cols: int) -> int:
    """The number of groups of `cols` columns. Raises RuntimeError unless group_size divides them."""
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"{op}: group_size must be an integer, got {group_size!r}")
    if group_size < 1 or cols % group_size:
        raise RuntimeError(f"{op}: group_size must divide the {cols} columns, got {group_size}")
    return max(1, cols // group_size)


def gated_op(norm: str, norm_before_gate: bool, activation: str = ACTIVATIONS[0]) -> str:
    """The name of the op. Raises ValueError for another activation."""
    op = f"{norm}_norm_fwd_{'times_gate' if norm_before_gate else 'of_gated'}"
    if activation not in ACTIVATIONS:  # otherwise no frame of Python is entered
        require_one_of(op, "activation", activation, ACTIVATIONS)
    return op


# Of a sum with a residual that is wider than x: one backward writes its gradient in both dtypes.
OF_WIDE_SUM = {f"{norm}_norm_fwd_of_sum": f"{norm}_norm_fwd_of_wide_sum" for norm in NORMS}


def op_of_sum(op: str, dtype: torch.dtype, residual_dtype: torch.dtype) -> str:
    """The op of a form of these dtypes."""
    return OF_WIDE_SUM.get(op, op) if residual_dtype.itemsize > dtype.itemsize else op


def of_form(op, x, rows, weight, bias, eps, normalized_shape, weight_offset, rounding, more=()):
    """What the op of a form returns without the statistics. more: the op's last settings."""
    if normalized_shape is None:
        normalized_shape = shape_of(x, weight, bias)
    if op in OF_WIDE_SUM and isinstance(x, Tensor) and isinstance(rows[0], Tensor) and rows[0].dtype is not x.dtype:
        op = op_of_sum(op, x.dtype, rows[0].dtype)
    given = (x, normalized_shape, *rows, weight, bias, eps, weight_offset, ROUNDINGS.get(rounding), None, *more)
    outputs = native.y_of(op, given)
    if outputs is not None:
        return outputs
    require_settings(op, eps, weight_offset, rounding)
    at = 5 + len(rows)
    return autograd.of_form(op, (*given[:at], float(weight_offset), *given[at + 1 :]))


def require_settings(op, eps, weight_offset, rounding) -> None:
    """Raises ValueError for another rounding, TypeError for what is no number."""
    if rounding not in ROUNDINGS:
        known = *ROUNDINGS, *[STEPS] * (OPS[op].slot("rounds_steps") is not None)
        raise ValueError(f"{op}: rounding must be one of {', '.join(known)}, got {rounding!r}")
    numbers = {"weight_offset": weight_offset} | ({} if eps is None and op.startswith("rms") else {"eps": eps})
    for name, value in numbers.items():
        if not isinstance(value, (float, Real, Tensor, torch.SymFloat)):  # Real is slow to ask
            raise TypeError(f"{op}: {name} must be a number, got {value!r}")


def shape_of(x, weight, bias) -> Sequence[int]:
    return getattr(bias if weight is None else weight, "shape", getattr(x, "shape", ())[-1:])


def _by_overrides(stock: Callable, *operands) -> Tensor:
    """A call that is overridden: as torch's function, until our own is called in its place. torch.fx, which overrides
    calls to record them, is to record ours, except to quantize a model: then it knows torch's alone."""
    proxies = [each for each in operands if isinstance(each, Proxy)]
    if proxies:
        quantized = any(map(torch_compat.is_traced_for_quantization, proxies))
        return stock(*operands) if quantized else handle_torch_function(_OURS[stock], operands, *operands)
    with torch_compat.DefaultDeviceAside() as aside:
        if aside.done and not has_torch_function_variadic(*operands):
            return _OURS[stock](*operands)
    with torch_compat.BelowFunctionModes(_IN_PLACE_OF_TORCHS):
        return stock(*operands)


class _InPlaceOfTorchs(TorchFunctionMode):
    """The last of the overrides: runs our function where the others have called torch's. It lies below all modes. For
    subclasses, which torch asks after all modes, it steps aside until their __torch_function__ calls torch's function.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if types and asks_subclasses():
            return NotImplemented
        return _OURS.get(function, function)(*args, **(kwargs or {}))


_IN_PLACE_OF_TORCHS = _InPlaceOfTorchs()
# torch.compile shows F.rms_norm to modes as torch.rms_norm, which takes the same arguments.
_OURS = {F.layer_norm: layer_norm, F.rms_norm: rms_norm, torch.rms_norm: rms_norm}

_AUTOCASTS = {norm: torch_compat.has_autocast_rule(f"aten::{norm}_norm") for norm in NORMS}


def _upcast(tensor: Tensor | None) -> Tensor | None:
    """Apply autocast's float32 rule: 16-bit floats become float32, everything else stays."""
    return tensor.float() if tensor is not None and tensor.dtype in SIXTEEN_BITS else tensor


def _is_mixture(input: Tensor, *parameters: Tensor | None) -> bool:
    """Whether a CPU or meta input has parameters of another float dtype. ATen takes few such mixtures."""
    dtypes = {each.dtype for each in (input, *parameters) if each is not None}
    return len(dtypes) > 1 and dtypes <= FLOAT_DTYPES and input.device.type in ("cpu", "meta")


def _number(eps: float) -> float:
    """eps as a number. Raises TypeError for whatever torch does not take as one; the callers then raise torch's own."""
    is_array = isinstance(eps, Tensor) and (eps.dim() or eps.requires_grad)
    if is_array or not isinstance(eps, (Real, Tensor, torch.SymFloat)):
        raise TypeError
    return eps if isinstance(eps, torch.SymFloat) else float(eps)


def _match_our_signature(input, normalized_shape, *parameters, eps) -> bool:
    """Whether the arguments have the types of the signature and all tensors are strided. If so, errors are raised here.
    Otherwise the call goes to torch.nn.functional, which takes nested tensors and raises its own errors."""
    shape = normalized_shape if isinstance(normalized_shape, Sequence) else [None]
    return (
        isinstance(input, Tensor)
        and all(each is None or isinstance(each, Tensor) for each in parameters)
        and all(each is None or (each.layout is torch.strided and not each.is_nested) for each in (input, *parameters))
        and all(isinstance(size, (Integral, torch.SymInt)) and not isinstance(size, bool) for size in shape)
        and (eps is None or isinstance(eps, (float, torch.SymFloat)))
    )
