"""The implementations that are timed. Each makes a forward and a backward for a case, or refuses it with a reason.

To add another implementation, add an entry to CANDIDATES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

import fusednorm
from fusednorm.host import gpus
from fusednorm.operands import BackwardOperands, ForwardOperands
from fusednorm.planner.plan import VARIANTS, Plan, ReferencePlan
from fusednorm.problem.calls import BackwardCall, ForwardCall, check_backward, check_forward
from fusednorm.settings.invariance import BLOCK_DIVISOR
from fusednorm.tools.explanation import decide
from fusednorm.tools.oracle import Outputs

from .cases import DIRECTIONS, BenchCase, BenchInputs
from .peers import cudnn, inductor, liger, quack, transformer_engine

OURS = "fusednorm"
UNDER_SETTINGS = {"batch_invariant": None, "ordered_sums": 4}  # ours, and in how many blocks of rows sums are ordered
FLOOR = "floor"


class Refused(Exception):
    """A candidate does not take a case; the text says why."""


def reason(error: Exception) -> str:
    """Why a candidate does not run, in one line."""
    if isinstance(error, Refused):
        return str(error)
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


class Calls(NamedTuple):
    """The forward, and the backward of what the forward returned. Both return fresh outputs and can be captured in a
    CUDA graph. plans holds the plan of each direction as text; only our candidates have plans."""

    forward: Callable[[], Outputs]
    backward: Callable[[Outputs], Outputs]
    plans: dict[str, str] = {}  # noqa: RUF012  never written to


@dataclass(frozen=True)
class Candidate:
    """prepare(case, inputs) -> Calls. missing() says why the candidate cannot run on this machine, or returns None."""

    name: str
    prepare: Callable[[BenchCase, BenchInputs], Calls]
    missing: Callable[[], str | None] = field(default=lambda: None)

    def outputs(self, case: BenchCase, inputs: BenchInputs) -> Outputs:
        """The outputs of forward and backward together, to be checked."""
        return joined(self.prepare(case, inputs))


def joined(calls: Calls) -> Outputs:
    ahead = calls.forward()
    back = calls.backward(ahead)
    return Outputs(ahead.y, ahead.mean, ahead.rstd, back.dx, back.dweight, back.dbias)


def floor_call(direction: str, inputs: BenchInputs) -> Callable[[], object]:
    """A stream kernel that moves the same rows x cols tensors: one read and one write in the forward, two reads and one
    write in the backward, and one read more where a residual's gradient is added."""
    out = torch.empty_like(inputs.x, memory_format=torch.contiguous_format)
    residual = inputs.residual_grad
    if direction == "forward":
        return lambda: torch.neg(inputs.x, out=out)
    if residual is not None:
        return lambda: torch.addcmul(residual, inputs.grad_out, inputs.x, out=out)
    return lambda: torch.add(inputs.grad_out, inputs.x, out=out)


def floor_bytes(direction: str, case: BenchCase) -> int:
    """Bytes that `floor_call` moves: those of the rows x cols tensors, without parameters and statistics."""
    element = {"forward": 2, "backward": 3}[direction] * case.x_dtype.itemsize
    if direction == "backward" and case.residual_dtype is not None:
        element += case.residual_dtype.itemsize
    return element * case.rows * case.cols


def _calls(case: BenchCase, inputs: BenchInputs, layer_fwd, layer_bwd, rms_fwd, rms_bwd) -> Calls:
    """Calls of ops that have ATen's signatures: ATen's own and ours."""
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
    """The calls of a candidate that has no such argument, with the residual's gradient added to dx afterwards."""
    if inputs.residual_grad is None:
        return calls
    return calls._replace(backward=lambda ahead: inputs.with_residual(calls.backward(ahead)))


def our_calls(case: BenchCase, inputs: BenchInputs) -> Calls:
    """Our ops, called as users call them."""
    ops, residual = torch.ops.fusednorm, inputs.residual_grad
    if residual is None:
        return _calls(case, inputs, ops.layer_norm_fwd, ops.layer_norm_bwd, ops.rms_norm_fwd, ops.rms_norm_bwd)

    def layer_bwd(*arguments):
        return ops.layer_norm_bwd_residual(*arguments[:-1], residual, arguments[-1])

    def rms_bwd(*arguments):
        return ops.rms_norm_bwd_residual(*arguments[:-1], None, residual, (*arguments[-1], False))[:2]

    return _calls(case, inputs, ops.layer_norm_fwd, layer_bwd, ops.rms_norm_fwd, rms_bwd)


def _ours(variant: str | None) -> Callable[[BenchCase, BenchInputs], Calls]:
    """Our ops by a variant, or by the planner's choice. A forced variant is refused where it gives the planner's own
    plan in both directions, because the same plan would be timed twice."""

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


def checked_call(
    direction: str, case: BenchCase, inputs: BenchInputs, statistics: Outputs
) -> ForwardCall | BackwardCall:
    """Our description of the call; a backward takes mean and rstd from `statistics`."""
    x, weight, bias, shape = inputs.x, inputs.weight, inputs.bias, case.normalized_shape
    if direction == "forward":
        return check_forward(ForwardOperands(case.norm, x, shape, weight, bias, case.resolved_eps))
    mean, rstd, mask = statistics.mean, statistics.rstd, tuple(case.output_mask)
    return check_backward(
        BackwardOperands(
            case.norm, inputs.grad_out, x, shape, mean, rstd, weight, bias, mask, inputs.residual_grad
        )
    )  # fmt: skip


def statistics_of(case: BenchCase, x: torch.Tensor) -> Outputs:
    """mean and rstd by torch, so that no forward kernel of ours has to be compiled for them: [..., 1] each."""
    variance, mean = torch.var_mean(x.to(case.acc_dtype), dim=-1, correction=0, keepdim=True)
    if case.norm == "layer":
        return Outputs(mean=mean, rstd=(variance + case.resolved_eps).rsqrt())
    return Outputs(rstd=(variance + mean.square() + case.resolved_eps).rsqrt())


def our_plans(case: BenchCase, inputs: BenchInputs, variant: str | None) -> dict[str, Plan]:
    """The plan by direction. Raises Refused where the variant can run in neither direction."""
    if inputs.x.device.type == "cpu":
        return {direction: ReferencePlan("CPU tensors") for direction in DIRECTIONS}
    rstd = torch.empty(case.rows, dtype=case.acc_dtype, device=inputs.x.device)
    statistics = Outputs(mean=rstd if case.norm == "layer" else None, rstd=rstd)
    device = gpus.spec_of(inputs.x.device)
    problems = {direction: checked_call(direction, case, inputs, statistics).problem for direction in DIRECTIONS}
    decisions = {direction: decide(problem, case.rows, device, variant) for direction, problem in problems.items()}
    if variant and not any(decision.forced for decision in decisions.values()):
        raise Refused(decisions["backward"].reasons[variant])
    return {direction: decision.plan for direction, decision in decisions.items()}


def _invariant(blocks: int | None) -> Callable[[BenchCase, BenchInputs], Calls]:
    """Our ops under batch_invariant, with sums in the order of so many blocks of rows if these are given."""

    def prepare(case: BenchCase, inputs: BenchInputs) -> Calls:
        plain = our_calls(case, inputs)
        rows = blocks and -(-case.rows // (blocks * BLOCK_DIVISOR)) * BLOCK_DIVISOR

        def forward() -> Outputs:
            with fusednorm.batch_invariant(ordered_sums=rows):
                return plain.forward()

        def backward(ahead: Outputs) -> Outputs:
            with fusednorm.batch_invariant(ordered_sums=rows):
                return plain.backward(ahead)

        return Calls(forward, backward)

    return prepare


def _peer(module, **options) -> Candidate:
    name = options.pop("name", module.NAME)

    def prepare(case: BenchCase, inputs: BenchInputs) -> Calls:
        calls = Calls(*module.prepare(case, inputs, **options))
        return calls if module.ADDS_RESIDUAL else adding_residual(calls, inputs)

    return Candidate(name, prepare, module.missing)


CANDIDATES = {
    candidate.name: candidate
    for candidate in (
        Candidate(OURS, _ours(None)),
        *(Candidate(f"{OURS}:{variant}", _ours(variant)) for variant in VARIANTS if variant != "reference"),
        *(Candidate(name, _invariant(blocks)) for name, blocks in UNDER_SETTINGS.items()),
        Candidate("aten", _aten),
        _peer(inductor),
        _peer(inductor, name="inductor_mix", options={"triton.mix_order_reduction_non_strict_mode": True}),
        _peer(cudnn),
        _peer(quack),
        _peer(liger),
        _peer(transformer_engine),
    )
}


def is_ours(name: str) -> bool:
    return name.partition(":")[0] in (OURS, *UNDER_SETTINGS)


def present(names: Iterable[str]) -> dict[str, Candidate]:
    """The candidates that this machine has; prints why the others are left out."""
    missing = {name: CANDIDATES[name].missing() for name in names}
    for name, why in missing.items():
        if why:
            print(f"{name} is left out: {why}")
    return {name: CANDIDATES[name] for name, why in missing.items() if not why}
