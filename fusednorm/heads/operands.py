"""The ops of norms of heads, as rows of a table like that of fusednorm/operands.py. x is q, or the tensor in which q, k
and v lie."""

from __future__ import annotations

from typing import NamedTuple

from ..operands import DEFAULT_EPS, Op, Output, Role, Slot, add


class Settings(NamedTuple):
    """What is computed, beside the tensors: the form of the ops."""

    layer: bool = False  # LayerNorm; else RMSNorm
    rotary_dim: int | None = None  # the first columns, which are rotated; None: as many as cos has
    interleaved: bool = False  # rotated pairs are columns 2i and 2i + 1; else i and i + rotary_dim / 2
    norm_first: bool = True  # the rotation follows the norm; else it precedes the norm
    weight_offset: float = 0.0  # added to the weights
    rounds_x_hat: bool = False  # x_hat is rounded to the input's dtype, and outputs have the promoted dtype

    @property
    def norm(self) -> str:
        return "layer" if self.layer else "rms"


def _list(argument: str, *names: str, role: Role = Role.STRIDED, optional: bool = True) -> tuple[Slot, ...]:
    return tuple(Slot(name, role, optional, argument=argument) for name in names)


INPUTS, (QKV,) = _list("inputs", "x", "k", optional=False), _list("qkv", "x", optional=False)
GRADS = _list("grads", "grad_out", "grad_k", "grad_v")
PARAMETERS = (
    *_list("weights", "weight", "k_weight", role=Role.PARAMETER),
    *_list("biases", "bias", "k_bias", role=Role.PARAMETER),
)
BESIDE = *PARAMETERS, Slot("cos", Role.CONSTANT, optional=True), Slot("sin", Role.CONSTANT, optional=True), DEFAULT_EPS
MASK = Slot("output_mask", Role.MASK)
PACKING = Slot("heads", Role.INTEGER), Slot("kv_heads", Role.INTEGER), Slot("grouped", Role.BOOL)
SETTINGS = tuple(
    Slot(name, Role.FORM, optional=default is None, default=default) for name, default in Settings()._asdict().items()
)
OUTPUTS = (
    Output("y", Role.STRIDED, gradient="grad_out", promoted_if_rounded=("weight", "bias")),
    Output("k_y", Role.STRIDED, like="k", gradient="grad_k", promoted_if_rounded=("k_weight", "k_bias")),
)
GRADIENTS = tuple(Output(f"d{slot.name}", slot.role, like=slot.name) for slot in (*INPUTS, *PARAMETERS))

OPS: dict[str, Op] = {}
for _direction, _suffix, _inputs, _outputs in (
    ("forward", "", (*INPUTS, *BESIDE), OUTPUTS),
    ("backward", "", (*GRADS[:2], *INPUTS, *BESIDE, MASK), GRADIENTS),
    ("backward", "_packed", (*GRADS, QKV, *BESIDE, MASK, *PACKING), (GRADIENTS[0], *GRADIENTS[2:])),
):
    add(Op("head", _direction, (*_inputs, *SETTINGS), _outputs, None, _suffix, Settings(), of_lists=True), OPS)
FORWARD, BACKWARD, PACKED = OPS
