"""explain_qk_norm and explain_qk_norm_packed: what qk_norm and qk_norm_packed run, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..host import gpus
from ..host.kernel_devices import runs_kernels
from ..operands import DIRECTIONS, Operands
from ..planner.device import DeviceSpec
from ..planner.plan import ReferencePlan
from . import functional
from .call import both_ways, calls_of, in_place
from .plan import HeadPlan, ctas_of, plans_of
from .problem import heads_of, packing_of, validate

NAMES = "q", "k"
OF_Q = {"x": "q", "weight": "q_weight", "bias": "q_bias", "grad_out": "grad_q"}  # among operands' names


@dataclass(frozen=True)
class HeadLaunch:
    """What computes a direction, "forward" or "backward", for some of q and k: a plan, and the CTAs of each. Without a
    plan, as of a weight of all heads without a rotation, a norm of each, as `explain` explains it."""

    direction: str
    tensors: tuple[str, ...]
    plan: HeadPlan | ReferencePlan | None
    ctas: tuple[int, ...] = ()
    copied: tuple[str, ...] = ()  # tensors that are copied first, because their rows cannot be read in place

    def __str__(self) -> str:
        start = f"{self.direction} of {' and '.join(self.tensors)}"
        if self.plan is None:
            return f"{start}: a weight of all heads: a norm of ours for each of q and k"
        if isinstance(self.plan, ReferencePlan):
            return f"{start}: ATen, {self.plan.reason}"
        copied = f", {', '.join(self.copied)} copied first" if self.copied else ""
        return f"{start}: {self.plan}, {' + '.join(map(str, self.ctas))} CTAs{copied}"


@dataclass(frozen=True)
class HeadExplanation:
    """What one qk_norm runs; str() makes text for people. device is None if all of it is ATen's."""

    device: DeviceSpec | None
    launches: tuple[HeadLaunch, ...]

    def __str__(self) -> str:
        return "\n  ".join([f"qk_norm{f' on {self.device.name}' if self.device else ''}", *map(str, self.launches)])


def explain_qk_norm(
    q: Tensor, k: Tensor, *arguments: Any, device: DeviceSpec | None = None, **named: Any
) -> HeadExplanation:
    """Explain how fusednorm.qk_norm with these arguments runs, and why: print() the result.

    `device`, such as fusednorm.planner.device.H200, replaces the tensors' own device. Nothing is copied or launched.
    Gradients of outputs are taken to be contiguous. Raises qk_norm's errors.
    """
    return _explained("explain_qk_norm", functional.operands(q, k, *arguments, **named), device)


def explain_qk_norm_packed(
    qkv: Tensor, heads: int, kv_heads: int, *arguments: Any, device: DeviceSpec | None = None, **named: Any
) -> HeadExplanation:
    """Explain how fusednorm.qk_norm_packed with these arguments runs, as explain_qk_norm does."""
    op = "explain_qk_norm_packed"
    operands, packing = functional.packed_operands(op, qkv, heads, kv_heads, *arguments, **named)
    return _explained(op, operands, device, qkv, packing)


def _explained(op: str, operands: Operands, device: DeviceSpec | None, *packed: Any) -> HeadExplanation:
    """`packed` is (qkv, packing) if q and k are parts of a packed tensor."""
    heads = heads_of(operands)
    validate(op, heads, may_span=not packed)
    if device is None and not runs_kernels(operands.x):
        plan = ReferencePlan(f"the tensors are on {operands.x.device}, where ATen's kernels run")
        return HeadExplanation(None, tuple(HeadLaunch(way, NAMES, plan) for way in DIRECTIONS))
    spec = gpus.less_margin(device) if device else gpus.spec_of(operands.x.device)
    if not packed and heads.are_rows:
        return HeadExplanation(spec, tuple(HeadLaunch(way, NAMES, None) for way in DIRECTIONS))
    return HeadExplanation(spec, tuple(_launches(both_ways(operands, *packed), spec)))


def _launches(ways: tuple[Operands, Operands], spec: DeviceSpec) -> Iterator[HeadLaunch]:
    for way, given in zip(DIRECTIONS, ways, strict=True):
        readable, copied = in_place(given)
        of_q = OF_Q | ({"x": "qkv"} if packing_of(given) else {})
        for call, plan in plans_of(calls_of(readable), spec):
            names = NAMES if call is None else tuple(side.name for side in call.sides)
            ctas = () if isinstance(plan, ReferencePlan) else ctas_of(plan, call.problem, call.rows, spec)
            yield HeadLaunch(way, names, plan, ctas, tuple(of_q.get(name, name) for name in copied))
