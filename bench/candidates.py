"""Who is timed: each candidate makes a forward and a backward for one case, and may refuse it with a reason.

A further implementation is one more entry of CANDIDATES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

import fusednorm
from fusednorm.host import gpus
from fusednorm.operands import BackwardOperands, ForwardOperands
from fusednorm.planner.heuristics import decide
from fusednorm.planner.plan import VARIANTS, Plan, ReferencePlan
from fusednorm.problem import check_backward, check_forward
from fusednorm.testing import Outputs

from .cases import BenchCase, BenchInputs
from .peers import cudnn, inductor, liger, quack, transformer_engine

OURS = "fusednorm"
FLOOR = "floor"


class Refused(Exception):
    """A candidate does not take a case; the text says why."""


class Calls(NamedTuple):
    """The forward, and the backward of what the forward returned. Both return fresh outputs and can be captured in a
    CUDA graph. plans holds the text of what runs, by direction, where somebody knows it."""

    forward: Callable[[], Outputs]
    backward: Callable[[Outputs], Outputs]
    plans: dict[str, str] = {}  # noqa: RUF012  never written to


@dataclass(frozen=True)
class Candidate:
    """prepare(case, inputs) -> Calls; missing() is the reason why it cannot run on this machine at all, or None."""

    name: str
    prepare: Callable[[BenchCase, BenchInputs], Calls]
    missing: Callable[[], str | None] = field(default=lambda: None)
    by_default: bool = True

    @property
    def ours(self) -> bool:
        return self.name.partition(":")[0] == OURS

    def outputs(self, case: BenchCase, inputs: BenchInputs) -> Outputs:
        """Forward and backward together, for comparing with the oracle."""
        return joined(self.prepare(case, inputs))


def joined(calls: Calls) -> Outputs:
    ahead = calls.forward()
    back = calls.backward(ahead)
    return Outputs(ahead.y, ahead.mean, ahead.rstd, back.dx, back.dweight, back.dbias)


def floor_call(direction: str, inputs: BenchInputs) -> Callable[[], object]:
    """The stream kernel with the same traffic: forward 1 read 1 write, backward 2 reads 1 write of rows x cols; one
    read more where a residual's gradient is added."""
    out = torch.empty_like(inputs.x, memory_format=torch.contiguous_format)
    residual = inputs.residual_grad
    if direction == "forward":
        return lambda: torch.neg(inputs.x, out=out)
    if residual is not None:
        return lambda: torch.addcmul(residual, inputs.grad_out, inputs.x, out=out)
    return lambda: torch.add(inputs.grad_out, inputs.x, out=out)


def floor_bytes(direction: str, case: BenchCase) -> int:
    """Bytes of the large tensors, which is what `floor_call` moves; parameters and statistics are left out."""
    element = {"forward": 2, "backward": 3}[direction] * case.x_dtype.itemsize
    if direction == "backward" and case.residual_dtype is not None:
        element += case.residual_dtype.itemsize
    return element * case.rows * case.cols


def _calls(case: BenchCase, inputs: BenchInputs, layer_fwd, layer_bwd, rms_fwd, rms_bwd) -> Calls:
    """Ops with ATen's arguments at ATen's positions: ours are, so both are the same two functions."""
    x, dy, weight, bias, shape = inputs.x, inputs.grad_out, inputs.weight, inputs.bias, case.normalized_shape

    def forward() -> Outputs:
        if case.norm == "layer":
            return Outputs(*layer_fwd(x, shape, weight, bias, case.resolved_eps))
        y, rstd = rms_fwd(x, shape, weight, case.resolved_eps)
        return Outputs(y, None, rstd)

    def backward(ahead: Outputs) -> Outputs:
        mask = case.output_mask
        if case.norm == "layer":
            return Outputs(None, None, None, *layer_bwd(dy, x, shape, ahead.mean, ahead.rstd, weight, bias, mask))
        return Outputs(None, None, None, *rms_bwd(dy, x, shape, ahead.rstd, weight, mask[:2]))

    return Calls(forward, backward)


def _aten(case: BenchCase, inputs: BenchInputs) -> Calls:
    aten = torch.ops.aten
    ops = (
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
        aten._fused_rms_norm,
        aten._fused_rms_norm_backward,
    )
    return adding_residual(_calls(case, inputs, *ops), inputs)


def adding_residual(calls: Calls, inputs: BenchInputs) -> Calls:
    """For whoever has no such argument: the residual's gradient is added to dx afterwards."""
    if inputs.residual_grad is None:
        return calls
    return calls._replace(backward=lambda ahead: inputs.with_residual(calls.backward(ahead)))


def our_calls(case: BenchCase, inputs: BenchInputs) -> Calls:
    """Our ops as anybody calls them."""
    ops, residual = torch.ops.fusednorm, inputs.residual_grad
    if residual is None:
        return _calls(case, inputs, ops.layer_norm_fwd, ops.layer_norm_bwd, ops.rms_norm_fwd, ops.rms_norm_bwd)

    def layer_bwd(*arguments):
        return ops.layer_norm_bwd_residual(*arguments[:-1], residual, arguments[-1])

    def rms_bwd(*arguments):
        return ops.rms_norm_bwd_residual(*arguments[:-1], residual, arguments[-1])

    return _calls(case, inputs, ops.layer_norm_fwd, layer_bwd, ops.rms_norm_fwd, rms_bwd)


def _ours(variant: str | None) -> Callable[[BenchCase, BenchInputs], Calls]:
    """Our ops by a variant, or by the planner's choice. A forced variant must be another plan than the planner's in
    some direction, or its time would stand there twice."""

    def prepare(case: BenchCase, inputs: BenchInputs) -> Calls:
        plans = our_plans(case, inputs, variant)
        if variant and plans == our_plans(case, inputs, None):
            raise Refused("the planner's own choice")
        plain = our_calls(case, inputs)

        def forward() -> Outputs:
            with fusednorm.force(variant):
                return plain.forward()

        def backward(ahead: Outputs) -> Outputs:
            with fusednorm.force(variant):
                return plain.backward(ahead)

        texts = {direction: str(plan) for direction, plan in plans.items()}
        return Calls(forward, backward, texts) if variant else Calls(plain.forward, plain.backward, texts)

    return prepare


def our_plans(case: BenchCase, inputs: BenchInputs, variant: str | None) -> dict[str, Plan]:
    """The plan by direction. Raises Refused where the variant can run in neither direction."""
    x, weight, bias, shape = inputs.x, inputs.weight, inputs.bias, case.normalized_shape
    rstd = torch.empty(case.rows, dtype=case.acc_dtype, device=x.device)
    mean = rstd if case.norm == "layer" else None
    calls = {
        "forward": check_forward(ForwardOperands(case.norm, x, shape, weight, bias, case.resolved_eps)),
        "backward": check_backward(
            BackwardOperands(
                case.norm,
                inputs.grad_out,
                x,
                shape,
                mean,
                rstd,
                weight,
                bias,
                tuple(case.output_mask),
                inputs.residual_grad,
            )
        ),  # fmt: skip
    }
    if x.device.type == "cpu":
        return {direction: ReferencePlan("CPU tensors") for direction in calls}
    device = gpus.spec_of(x.device)
    decisions = {direction: decide(call.problem, case.rows, device, variant) for direction, call in calls.items()}
    if variant and not any(decision.forced for decision in decisions.values()):
        raise Refused(decisions["backward"].reasons[variant])
    return {direction: decision.plan for direction, decision in decisions.items()}


def _peer(module, *, by_default: bool = True, **options) -> Candidate:
    name = options.pop("name", module.NAME)

    def prepare(case: BenchCase, inputs: BenchInputs) -> Calls:
        calls = Calls(*module.prepare(case, inputs, **options))
        return calls if module.ADDS_RESIDUAL else adding_residual(calls, inputs)

    return Candidate(name, prepare, module.missing, by_default)


CANDIDATES = {
    candidate.name: candidate
    for candidate in (
        Candidate(OURS, _ours(None)),
        *(Candidate(f"{OURS}:{variant}", _ours(variant)) for variant in VARIANTS if variant != "reference"),
        Candidate("aten", _aten),
        _peer(inductor),
        _peer(inductor, name="inductor_mix", options={"triton.mix_order_reduction_non_strict_mode": True}),
        _peer(cudnn),
        _peer(quack),
        _peer(quack, name="quack_tuned", tuned=True, by_default=False),
        _peer(liger),
        _peer(transformer_engine),
    )
}
