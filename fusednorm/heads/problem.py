"""Arguments of the norms of heads, validated. Only this module raises errors on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..operands import Operands, Role
from ..problem.validation import are_equal, is_one_or, require, require_float, require_strided
from .operands import GRADS, Settings


class Heads(NamedTuple):
    """The operands of a forward: tensors `[..., D]` of equal D, and for each a weight and a bias `[D]` or None; of
    tensors `[..., H, D]` whose H rows are normalized together, `[H * D]` or `[H, D]`. cos and sin, `[..., rotary_dim]`
    or `[..., rotary_dim / 2]`, broadcast against the rows of every tensor."""

    inputs: Sequence[Tensor]
    weights: Sequence[Tensor | None]
    biases: Sequence[Tensor | None]
    cos: Tensor | None = None
    sin: Tensor | None = None
    eps: float | None = None
    settings: Settings = Settings()

    @property
    def cols(self) -> int:
        return self.inputs[0].shape[-1]

    @property
    def are_whole(self) -> bool:
        """Whether rows of H heads are normalized together."""
        return spans_heads(self.inputs[0].shape[-1:], (*self.weights, *self.biases))

    @property
    def are_rows(self) -> bool:
        """Whether qk_norm runs a norm of rows, of all heads of a token, for each input."""
        return self.are_whole and self.cos is None

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims that are normalized."""
        return (-2, -1) if self.are_whole else (-1,)

    def together(self, at: int) -> int:
        """How many rows are normalized as one."""
        return self.inputs[at].shape[-2] if self.are_whole else 1

    def shape_of_parameter(self, at: int, parameter: Tensor) -> tuple[int, ...]:
        """The shape that it must have: of the two for all heads, the one of as many dims."""
        if self.inputs[at].dim() < 2:
            return (self.cols,)
        heads, dims = self.together(at), parameter.dim() if isinstance(parameter, Tensor) else 1
        return (heads, self.cols) if dims > 1 else (heads * self.cols,)

    @property
    def rotary_dim(self) -> int:
        """How many columns are rotated."""
        if self.cos is None:
            return 0
        asked, of_cos = self.settings.rotary_dim, self.cos.shape[-1] if self.cos.dim() else 0
        return of_cos if asked is None else asked

    def output_dtype(self, at: int) -> torch.dtype:
        return output_dtype(self.inputs[at], (self.weights[at], self.biases[at]), self.settings.rounds_x_hat)


def output_dtype(x: Tensor, parameters: Sequence[Tensor | None], rounds_x_hat: bool) -> torch.dtype:
    """The dtype of the norm of x."""
    dtype = x.dtype
    for each in parameters:
        if rounds_x_hat and each is not None:
            dtype = torch.promote_types(dtype, each.dtype)
    return dtype


def spans_heads(of_head: torch.Size, parameters: Sequence[Tensor | None]) -> bool:
    """Whether a parameter is for all heads of a token."""
    for each in parameters:
        if each is not None and getattr(each, "shape", of_head) != of_head:
            return True
    return False


def dim_of(role: Role, shape: Sequence[int], dim: int, ndim: int) -> int | None:
    """Which dim of a tensor of this role is `dim` of q, which has ndim dims; None if all its indices share the tensor.
    """
    if role is Role.STRIDED:
        return dim
    at = dim - ndim + len(shape)  # a constant is broadcast from the last dim
    return at if role is Role.CONSTANT and at >= 0 and shape[at] != 1 else None


def heads_of(operands: Operands) -> Heads:
    """q and k, which may be parts of a packed tensor, and what an op has beside them."""
    packing = packing_of(operands)
    inputs = packing.split(operands.x)[:2] if packing else (operands.x, operands.k)
    weights, biases = (operands.weight, operands.k_weight), (operands.bias, operands.k_bias)
    return Heads(inputs, weights, biases, operands.cos, operands.sin, operands.eps, operands.form)


def grads_of(operands: Operands) -> list[Tensor | None]:
    """The gradients of q, k and, in a packed tensor, of v; none in a forward."""
    return [getattr(operands, slot.name) for slot in GRADS if hasattr(operands, slot.name)]


def check(operands: Operands) -> torch.Size:
    """The shape of the rows of x. Raises as `validate` does, and as `Packing.check`."""
    op, packing, grads = operands.op, packing_of(operands), grads_of(operands)
    if packing:
        require_strided(op, "qkv", operands.x)
        packing.check(op, operands.x)
    heads = heads_of(operands)
    validate(op, heads, grads, may_span=not packing)
    if grads and len(operands.output_mask) != len(operands.outputs):
        raise RuntimeError(f"{op}: output_mask must have one flag per gradient, got {list(operands.output_mask)}")
    return operands.x.shape[:-1]


def validate(op: str, heads: Heads, grads: Sequence[Tensor | None] = (), *, may_span: bool = False) -> None:
    """Raises RuntimeError unless the operands are as `Heads` says and all tensors are strided, float and on one device;
    TypeError if one is no tensor, or rotary_dim no integer. Only shapes, dtypes and devices are read, so traced tensors
    are accepted. Parameters for all heads of a token are wrong unless they `may_span` these."""
    inputs, weights, biases, cos, sin, _, settings = heads
    require_strided(op, "inputs[0]", inputs[0])
    if not inputs[0].dim():
        raise RuntimeError(f"{op}: inputs[0] must have at least one dimension, got shape ()")
    cols, device = inputs[0].shape[-1], inputs[0].device
    for at, x in enumerate(inputs):
        _require(op, f"inputs[{at}]", x, device)
        if not x.dim() or x.shape[-1] != cols:
            raise RuntimeError(f"{op}: inputs[{at}] must end in {cols} columns as inputs[0] does, got {_shape(x)}")
    wanted = [(f"{name}[{at}]", each, heads.shape_of_parameter(at, each))
              for name, some in (("weights", weights), ("biases", biases))
              for at, each in enumerate(some) if each is not None]  # fmt: skip
    if not may_span or any(getattr(each, "shape", None) == (cols,) != shape for _, each, shape in wanted):
        wanted = [(name, each, (cols,)) for name, each, _ in wanted]  # where one is for a head, all are
    of_grads = (*inputs, inputs[-1])  # v has the shape of k
    wanted += [(f"grads[{at}]", each, of_grads[at].shape) for at, each in enumerate(grads) if each is not None]
    for name, tensor, shape in wanted:
        require(op, name, tensor, shape, device, "inputs[0]")
    for name in ("interleaved", "norm_first"):
        if not isinstance(flag := getattr(settings, name), bool):
            raise TypeError(f"{op}: {name} must be a bool, got {flag!r}")
    if not isinstance(settings.rotary_dim, (int, torch.SymInt, type(None))):
        raise TypeError(f"{op}: rotary_dim must be an integer, got {settings.rotary_dim!r}")
    if (cos is None) != (sin is None):
        raise RuntimeError(f"{op}: cos and sin must be given together, got {'sin' if cos is None else 'cos'} alone")
    if cos is None:
        if settings.rotary_dim:
            raise RuntimeError(f"{op}: rotary_dim needs cos and sin, got {settings.rotary_dim} without them")
        return
    for name, table in (("cos", cos), ("sin", sin)):
        _require(op, name, table, device)
        if table.requires_grad:
            raise RuntimeError(f"{op}: {name} must not require grad, because the rotation has no gradient for it")
    if not are_equal(cos.shape, sin.shape):
        raise RuntimeError(f"{op}: sin must have the shape of cos, {_shape(cos)}, got {_shape(sin)}")
    turned, width = heads.rotary_dim, cos.shape[-1] if cos.dim() else 0
    if turned % 2 or not 0 < turned <= cols:
        raise RuntimeError(f"{op}: rotary_dim must be even and from 2 to {cols}, got {turned}")
    if width not in (turned, turned // 2):
        raise RuntimeError(f"{op}: cos must have {turned} columns or half as many, got {_shape(cos)}")
    for at, x in enumerate(inputs):
        if cos.dim() > x.dim() or not all(map(is_one_or, cos.shape[-2::-1], x.shape[-2::-1])):
            raise RuntimeError(
                f"{op}: cos must broadcast against the rows of inputs[{at}], {_shape(x)}, got {_shape(cos)}"
            )


def _require(op: str, name: str, tensor: Any, device: torch.device) -> None:
    require_strided(op, name, tensor)
    require_float(op, name, tensor, device, "inputs[0]")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


class Packing(NamedTuple):
    """How q, k and v lie in one tensor `[..., (heads + 2 * kv_heads) * D]`: all heads of q, then those of k, then those
    of v; or, if grouped, for each head of k and v the heads of q that it serves, itself, and its v."""

    heads: int
    kv_heads: int
    grouped: bool = False

    def check(self, op: str, packed: Tensor) -> int:
        """D. Raises RuntimeError unless the tensor has such heads, TypeError if their numbers are no integers, or
        grouped no bool."""
        heads, kv_heads, grouped = self
        if not (isinstance(heads, (int, torch.SymInt)) and isinstance(kv_heads, (int, torch.SymInt))):
            raise TypeError(f"{op}: heads and kv_heads must be integers, got {heads!r} and {kv_heads!r}")
        if not isinstance(grouped, bool):
            raise TypeError(f"{op}: grouped must be a bool, got {grouped!r}")
        if heads < 1 or kv_heads < 1 or (grouped and heads % kv_heads):
            rule = "positive, and heads a multiple of kv_heads if grouped"
            raise RuntimeError(f"{op}: heads and kv_heads must be {rule}, got {heads} and {kv_heads}")
        many, width = self.all_heads, packed.shape[-1] if packed.dim() else 1
        if width % many:
            raise RuntimeError(f"{op}: qkv must end in a multiple of {many} columns, got {_shape(packed)}")
        return width // many

    @property
    def all_heads(self) -> int:
        """How many there are of q, k and v."""
        return self.heads + 2 * self.kv_heads

    @property
    def counts(self) -> tuple[int, int, int]:
        """The heads of q, k and v, of a group if grouped."""
        return (self.heads // self.kv_heads, 1, 1) if self.grouped else (self.heads, self.kv_heads, self.kv_heads)

    def sizes(self, cols: int) -> tuple[int, ...]:
        """Of the dims that take the place of the last one."""
        groups = (self.kv_heads,) if self.grouped else ()
        return *groups, sum(self.counts), cols

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views: q `[..., heads, D]`, k and v `[..., kv_heads, D]`; if grouped, `[..., kv_heads, heads of one, D]`."""
        q, k, v = packed.unflatten(-1, self.sizes(-1)).split(self.counts, -2)
        return q, k, v


def packing_of(operands: Operands) -> Packing | None:
    """None if q and k are two tensors."""
    return None if operands.grouped is None else Packing(operands.heads, operands.kv_heads, operands.grouped)
