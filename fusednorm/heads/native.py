"""The norms of heads in the C++ host side: what it must know of their ops."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..host.native import extension, in_cpp
from ..namespace import NAMESPACE, TORCH_OPS
from .ops import BACKWARD, FORWARD, PACKED, Call, above, launched
from .problem import Heads, Settings

ROLES = {"BoolType": "FLAG", "IntType": "INTEGER", "FloatType": "NUMBER", "TensorType": "STRIDED"}  # by type
OTHER_ROLES = {"cos": "TABLE", "sin": "TABLE", "output_mask": "MASK"}  # by name
OUTPUTS = {FORWARD: 2, BACKWARD: 6, PACKED: 5}
TENSORS = 8  # of a forward: q, k, their weights and biases, cos and sin

_numbers: dict[str, int] = {}  # of the ops that C++ knows


def install(key: str) -> None:
    """Register the ops in C++ at dispatch key `key` ("CUDA") and at the autograd key above it."""
    if not _numbers:
        _describe()
    for op, number in _numbers.items():
        functions = {"above": _above, "below": _below, "differentiable_backward": _differentiable}
        given = {name: partial(function, op) for name, function in functions.items()}
        extension.install(number, key, **given, statistics_gradients=None)


def _describe() -> None:
    """Tell C++ of the ops, and how autograd's node of the forward calls the backward."""
    for op, outputs in OUTPUTS.items():
        slots, tensors = _slots(op)
        _numbers[op] = extension.add(
            name=f"{NAMESPACE}::{op}",
            inputs=slots,
            x=tensors.count("grads"),
            num_tensors=len(tensors),
            num_outputs=outputs,
            outputs=list(range(outputs)),
            follows_autocast=False,
            returns_list=True,
        )
    of_forward = [extension.Setting(of_forward=at) for at in range(1 + len(Settings._fields))]  # eps is the first
    extension.set_backward(
        forward=_numbers[FORWARD],
        backward=_numbers[BACKWARD],
        saved=list(range(TENSORS)),
        sources=[TENSORS, TENSORS + 1, *range(TENSORS)],
        gradients=[*range(OUTPUTS[BACKWARD]), 0, 0],  # cos and sin have none
        passed=[],
        of_dx=list(range(OUTPUTS[BACKWARD])),
        settings=[of_forward[0], extension.Setting(), *of_forward[1:]],  # the second is the mask
        eps=0,
    )


def _slots(op: str) -> tuple[list, list[str]]:
    """The arguments of an op's schema, those of a list of tensors with a slot each; and the name of each tensor's."""
    slots: list = []
    tensors: list[str] = []
    for each in getattr(TORCH_OPS, op).default._schema.arguments:
        kinds = [each.type]
        while kinds[-1].kind() in ("OptionalType", "ListType"):
            kinds.append(kinds[-1].getElementType())
        *around, kind = [of.kind() for of in kinds]
        length = 0
        if kind == "TensorType" and "ListType" in around:
            length = 3 if (op, each.name) == (PACKED, "grads") else 2
        role = getattr(extension.Role, OTHER_ROLES.get(each.name, ROLES[kind]))
        for at in range(length or 1):
            more = {"optional": "OptionalType" in around, "place": len(tensors), "list": 0 if at else length}
            slots.append(extension.Slot(role=role, is_argument=True, is_read=True, **more))
            tensors += [each.name] if kind == "TensorType" else []
    return slots, tensors


def of_heads(heads: Heads) -> tuple | None:
    """The outputs of a forward. None if Python must run the call."""
    if not _numbers or torch.compiler.is_dynamo_compiling():
        return None
    inputs, weights, biases, cos, sin, eps, settings = heads
    return extension.y_of(_numbers[FORWARD], *inputs, *weights, *biases, cos, sin, eps, *settings)


def _call(op: str, inputs: tuple) -> Call:
    """The call whose arguments C++ passes by position."""
    count = len(Settings._fields)
    return Call(op, inputs[:-count], dict(zip(Settings._fields, inputs[-count:], strict=True)))


def _above(op: str, *inputs: Any) -> list:
    given = _call(op, inputs)
    return given.whole(above(given))


def _below(op: str, *inputs: Any) -> tuple[list, Any]:
    outputs, program = launched(_call(op, inputs))
    return outputs, program and in_cpp(program)


def _differentiable(op: str, eps: float | None, *inputs: Any) -> list:
    given = _call(op, inputs)
    return given.whole(given.formula())


if extension:
    install("CUDA")
