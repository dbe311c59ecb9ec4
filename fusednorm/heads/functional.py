"""qk_norm and qk_norm_packed: the norms of q and k, with rotary position embedding, as one op."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .. import autograd, functional
from ..forms import ROUNDINGS
from ..host import native
from ..host.torch_compat import recorder
from ..operands import TRANSLATIONS, Operands
from ..problem.validation import require_strided
from . import ops  # noqa: F401  registers them
from .operands import FORWARD, PACKED
from .problem import Heads, Packing, heads_of, spans_heads, validate

NORMS = {"rms": None, "layer": 1e-5}  # and the default eps
NAMES = "q", "k", "q_weight", "k_weight", "q_bias", "k_bias"
Rotary = tuple[Tensor, Tensor]
Forward = TRANSLATIONS[FORWARD].type


def qk_norm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float | None = None,
    *,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    norm: str = "rms",
    rotary: Rotary | None = None,
    rotary_dim: int | None = None,
    rotary_interleaved: bool = False,
    norm_first: bool = True,
    heads_dim: int = -2,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> tuple[Tensor, Tensor]:
    """The norms of each head of q and k, and their rotation (RoPE), in one launch.

    q and k are `[B, S, H, D]`, or `[B, H, S, D]` with heads_dim=-3, each with its own number of heads and any strides,
    such as slices of one buffer. Fewer or more dims before these are fine. Returns contiguous tensors of their shapes.

    Weights and biases are `[D]`, or None. `[H * D]` or `[H, D]` normalizes all heads of a token together; q and k then
    have a launch each, unless they are rotated and have equally many heads. norm is "rms" (eps None: the machine
    epsilon of float32, or of float64 for float64 tensors) or "layer" (eps None: 1e-5). weight_offset and rounding are
    those of affine_rms_norm.

    rotary is (cos, sin), which must not require grad. Their last dim has rotary_dim entries, one for each rotated
    column, or half as many, one for each pair; rotary_dim is by default its size. The other dims are those of q without
    the heads (`[S, r]`, `[B, S, r]`, as in transformers and torchtitan), or of q with size 1 for the heads
    (`[S, 1, 1, r]` for Megatron's `[S, B, H, D]`). The first rotary_dim columns x of a head become

        x * cos + rotate(x) * sin

    with rotate(x) = (-b, a) for the halves x = (a, b), or, if rotary_interleaved, for each two adjacent columns (Su et
    al., "RoFormer", 2021). The norm comes first, unless norm_first is False.

    Any float dtypes; each gradient has its tensor's. Raises RuntimeError as torch.ops.fusednorm.head_norm_fwd does,
    ValueError for another norm, rounding or heads_dim, and TypeError for an eps or weight_offset that is no number.
    """
    parameters = q_weight, k_weight, q_bias, k_bias
    settings = norm, eps, rotary_dim, rotary_interleaved, norm_first, weight_offset, rounding
    given = _arguments(q, k, parameters, rotary, heads_dim, *settings)
    if not spans_heads(q.shape[-1:], parameters):
        return _forward("qk_norm", given)
    heads = heads_of(_of(given))
    made = _of_rows(heads) if heads.are_rows else _forward("qk_norm", given)
    return made if heads_dim == -2 else tuple([each.transpose(-2, -3).contiguous() for each in made])


def operands(
    q, k, q_weight=None, k_weight=None, eps=None, *, q_bias=None, k_bias=None, norm="rms", rotary=None, rotary_dim=None,
    rotary_interleaved=False, norm_first=True, heads_dim=-2, weight_offset=0.0, rounding="once",
) -> Operands:  # fmt: skip
    """The operands of qk_norm, for its arguments; for norms of all heads with these in the last dim but one. Raises its
    errors, but for those of the op."""
    parameters = q_weight, k_weight, q_bias, k_bias
    settings = norm, eps, rotary_dim, rotary_interleaved, norm_first, weight_offset, rounding
    return _of(_arguments(q, k, parameters, rotary, heads_dim, *settings))


def _arguments(q, k, parameters, rotary, heads_dim, *settings) -> tuple:
    """The arguments of the op by position, those of lists one by one."""
    settings = _settings("qk_norm", *settings)
    if heads_dim not in (-2, -3):
        raise ValueError(f"qk_norm: heads_dim must be -2 or -3, got {heads_dim!r}")
    if not isinstance(q, Tensor):
        require_strided("qk_norm", "q", q)  # raises
    tables = _tables("qk_norm", rotary, q.dim(), heads_dim)
    if heads_dim == -3 and spans_heads(q.shape[-1:], parameters):
        for name, each in (("q", q), ("k", k)):
            if each.dim() < 3:
                raise RuntimeError(f"qk_norm: {name} must have heads in dim -3, got shape {tuple(each.shape)}")
        q, k, *tables = [
            each.transpose(-2, -3) if each is not None and each.dim() > 2 else each for each in (q, k, *tables)
        ]
    return q, k, *parameters, *tables, *settings


def _of(arguments: tuple) -> Operands:
    return Forward("head", *arguments)


def qk_norm_packed(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float | None = None,
    *,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    grouped: bool = False,
    norm: str = "rms",
    rotary: Rotary | None = None,
    rotary_dim: int | None = None,
    rotary_interleaved: bool = False,
    norm_first: bool = True,
    weight_offset: float = 0.0,
    rounding: str = "once",
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of a packed projection `[..., (heads + 2 * kv_heads) * D]`, with q and k as qk_norm returns them.

    The columns are all heads of q, then those of k, then those of v. With grouped, as in Megatron, they are groups, one
    for each head of k: the heads of q that it serves, itself, and its head of v. q is `[..., heads, D]`, k and v are
    `[..., kv_heads, D]`; v is a view of qkv. The backward writes one gradient of qkv, v's part included, where slices
    would give autograd three to add. Weights are `[D]` or None. cos and sin have the dims of qkv but the last (or its
    last ones, or 1 for each), and rotary_dim or half as many entries. Everything else is as for qk_norm.
    """
    op = "qk_norm_packed"
    settings = _settings(op, norm, eps, rotary_dim, rotary_interleaved, norm_first, weight_offset, rounding)
    packing, parameters = Packing(heads, kv_heads, grouped), (q_weight, k_weight, q_bias, k_bias)
    require_strided(op, "qkv", qkv)
    cols = packing.check(op, qkv)
    for name, each in zip(NAMES[2:], parameters, strict=True):
        if isinstance(each, Tensor) and each.shape != (cols,):
            raise RuntimeError(f"{op}: {name} must have shape {(cols,)}, got {tuple(each.shape)}")
    cos, sin = packed_tables(op, rotary, qkv.dim() + 1, grouped) if rotary is not None else (None, None)
    of_q, of_k, of_v = packing.counts
    ranges, arguments = (0, of_q, of_q, of_k, of_q + of_k, of_v), (qkv, qkv, *parameters, cos, sin, *settings)
    made = native.y_of_parts(FORWARD, packing.sizes(cols), ranges, packing, arguments)
    record = None if made is not None else recorder(PackedFunction, qkv, *parameters)
    if record is not None:
        if torch.compiler.is_compiling():  # Dynamo of torch 2.15 wants tensors of its own
            parameters = [each if each is None else each.view_as(each) for each in parameters]
        made = record(tuple(packing), settings, qkv, *parameters, cos, sin)
    elif made is None:
        *both, v = packing.split(qkv)
        made = *_forward(op, (*both, *parameters, cos, sin, *settings)), v
    return tuple([each.flatten(-3, -2) for each in made]) if grouped else made


class PackedFunction(Function):
    """q, k and v of a packed tensor, whose gradient is written once."""

    @staticmethod
    def forward(ctx, packing, settings, qkv, *others):
        ctx.save_for_backward(qkv, *others)
        ctx.packing, ctx.settings = packing, settings
        *both, v = Packing(*packing).split(qkv)
        ctx.info = autograd.info_for_backward(FORWARD, settings[0])
        return *_forward("qk_norm_packed", (*both, *others, *settings)), v

    @staticmethod
    def backward(ctx, *grads):
        qkv, *parameters, cos, sin = ctx.saved_tensors
        wanted, (eps, *settings) = ctx.needs_input_grad[2:7], ctx.settings
        mask = tuple([want and of is not None for want, of in zip(wanted, (qkv, *parameters), strict=True)])
        given = *grads, qkv, *parameters, cos, sin, eps, mask, *ctx.packing, *settings
        return None, None, *autograd.gradients_of(ctx.info, PACKED, given), None, None


def _forward(op: str, arguments: tuple) -> tuple[Tensor, ...]:
    made = native.y_of(FORWARD, arguments)
    if made is not None:  # C++ has looked at the tensors
        return made
    for name, each in zip(NAMES, arguments, strict=False):
        if each is not None or name in "qk":
            require_strided(op, name, each)
    return autograd.of_operands(_of(arguments))


def _settings(op, norm, eps, rotary_dim, interleaved, norm_first, weight_offset, rounding) -> tuple:
    """eps, and the values of Settings."""
    if norm not in NORMS or rounding not in ROUNDINGS:
        name, value, known = ("rounding", rounding, ROUNDINGS) if norm in NORMS else ("norm", norm, NORMS)
        raise ValueError(f"{op}: {name} must be one of {', '.join(known)}, got {value!r}")
    eps = NORMS[norm] if eps is None else _number(op, "eps", eps)
    weight_offset = _number(op, "weight_offset", weight_offset)
    return eps, norm == "layer", rotary_dim, interleaved, norm_first, weight_offset, ROUNDINGS[rounding]


def _number(op: str, name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if not isinstance(value, (Real, torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}")
    return float(value)


def _tables(op: str, rotary: Rotary | None, ndim: int, heads_dim: int) -> tuple[Tensor | None, Tensor | None]:
    """cos and sin with a dim for the heads, where q has ndim dims."""
    if rotary is None:
        return None, None
    cos, sin = rotary if isinstance(rotary, (tuple, list)) and len(rotary) == 2 else (None, None)
    if not (isinstance(cos, Tensor) and isinstance(sin, Tensor)):
        raise TypeError(f"{op}: rotary must be a pair of tensors, cos and sin, got {type(rotary).__name__}")
    return _with_heads(cos, ndim, heads_dim), _with_heads(sin, ndim, heads_dim)


def packed_tables(op: str, rotary: Rotary | None, ndim: int, grouped: bool) -> tuple[Tensor | None, Tensor | None]:
    """cos and sin with a dim for the heads and, if grouped, one for the groups."""
    cos, sin = _tables(op, rotary, ndim, -2)
    return (cos.unsqueeze(-2), sin.unsqueeze(-2)) if grouped and cos is not None else (cos, sin)


def packed_operands(
    op: str, qkv: Tensor, heads: int, kv_heads: int, *arguments: Any, grouped: bool = False,
    rotary: Rotary | None = None, **named: Any,
) -> tuple[Operands, Packing]:  # fmt: skip
    """The operands of qk_norm for q and k of a packed tensor, by the arguments of qk_norm_packed; `op` is who asks."""
    packing = Packing(heads, kv_heads, grouped)
    require_strided(op, "qkv", qkv)
    packing.check(op, qkv)
    q, k, _ = packing.split(qkv)
    cos, sin = packed_tables(op, rotary, qkv.dim() + 1, grouped)
    return operands(q, k, *arguments, **named)._replace(cos=cos, sin=sin), packing


def _with_heads(table: Tensor, ndim: int, heads_dim: int) -> Tensor:
    has = table.dim()
    return table if has >= ndim else table.unsqueeze(max(heads_dim, -has - 1))


def _of_rows(heads: Heads) -> tuple[Tensor, ...]:
    """The norms of rows of all heads of a token, which nothing follows: our norm for each of q and k."""
    validate("qk_norm", heads, may_span=True)
    settings = heads.settings
    more = settings.weight_offset, "x_hat" if settings.rounds_x_hat else "once"
    found = []
    for x, *parameters in zip(*heads[:3], strict=True):
        shape = x.shape[-2:]
        whole = [each if each is None else each.reshape(shape) for each in parameters]
        found.append(functional.of_form(f"{settings.norm}_norm_fwd_affine", x, (), *whole, heads.eps, shape, *more))
    return tuple(found)
