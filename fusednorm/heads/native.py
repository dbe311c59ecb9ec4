"""The norms of heads in the C++ host side: what it must know of their ops."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..host.native import extension, in_cpp
from ..namespace import NAMESPACE, TORCH_OPS
from .ops import BACKWARD, FORWARD, PACKED, Call, above, launched
from .problem import Heads, Settings

ROLES = {"bool": "FLAG", "int": "INTEGER", "float": "NUMBER", "List[bool]": "MASK"}  # by the type of an argument
LISTS = {FORWARD: (2, 2, 2), BACKWARD: (2, 2, 2, 2), PACKED: (3, 2, 2)}  # the lengths of an op's lists of tensors
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
        slots, grads = _slots(op), LISTS[op][0] if op != FORWARD else 0
        _numbers[op] = extension.add(
            name=f"{NAMESPACE}::{op}",
            inputs=slots,
            x=grads,
            num_tensors=TENSORS + grads - (op == PACKED),
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


def _slots(op: str) -> list:
    """The arguments of an op's schema. Those of a list of tensors have a slot each."""
    slots, tensors, lists = [], 0, iter(LISTS[op])
    for each in getattr(TORCH_OPS, op).default._schema.arguments:
        kind = str(each.type)
        is_tensor, is_list = "Tensor" in kind, kind.startswith("List[") and "Tensor" in kind
        role = ("TABLE" if each.name in ("cos", "sin") else "STRIDED") if is_tensor else ""
        role = role or ROLES[kind.removeprefix("Optional[").removesuffix("]") if "Optional" in kind else kind]
        size = next(lists) if is_list else 0
        for at in range(max(size, 1)):
            more = {"optional": "Optional" in kind, "place": tensors, "list": 0 if at else size}
            slots.append(extension.Slot(role=getattr(extension.Role, role), is_argument=True, is_read=True, **more))
            tensors += is_tensor
    return slots


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
    return given.whole(given.check().formula())


if extension:
    install("CUDA")
