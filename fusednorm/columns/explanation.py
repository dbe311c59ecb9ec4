"""explain_column_sum: which kernel a column_sum runs, and why no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..host import fallback, gpus
from ..host.kernel_devices import runs_kernels
from ..planner.device import DeviceSpec
from ..planner.plan import ReferencePlan
from ..settings import invariance
from .plan import MAX_TENSORS, Choice, RingSum, choose, ring_fault, shared_bytes
from .problem import OP, ColumnSumProblem, describe, in_place, validate_column_sum


@dataclass(frozen=True)
class ColumnSumExplanation:
    """The choice for one column_sum and its reasons; str() makes text for people. device is None if ATen sums because
    there are no elements or the inputs are on a device without kernels of this package."""

    problem: ColumnSumProblem
    rows: int
    device: DeviceSpec | None
    choice: Choice
    ring_fault: str | None  # why the ring of TMA tiles cannot run; None if it can
    notes: tuple[str, ...] = ()  # about the tensors, such as copies that their strides make necessary

    @property
    def num_launches(self) -> int:
        return 2 if self.choice.num_splits > 1 else 1

    def __str__(self) -> str:
        problem, (plan, splits, _) = self.problem, self.choice
        where = f" on {self.device.name}" if self.device else ""
        sums = "one sum of all" if problem.total else "a sum each"
        dtypes = f"{problem.dtype} to {problem.out_dtype}".replace("torch.", "")
        shape = f"{problem.count} tensors of {self.rows} rows of {problem.cols} columns"
        lines = [f"{OP}{where}: {shape}, {dtypes}, {sums}"]
        if isinstance(plan, ReferencePlan):
            return "\n  ".join([*lines, f"ATen: {plan.reason}", *self.notes])
        finish = f"rows in {splits} splits, summed by a second launch" if splits > 1 else "rows not split, one launch"
        lines += [str(plan), finish]
        if isinstance(plan, RingSum):
            used, limit = shared_bytes(plan, problem), self.device.smem_per_block_bytes
            lines.append(f"shared memory {used} of {limit} bytes a CTA")
        elif self.ring_fault:
            lines.append(f"not by TMA: it {self.ring_fault}")
        else:
            lines.append("not by TMA: it could run, but is predicted to take longer")
        return "\n  ".join([*lines, *self.notes])


def explain_column_sum(
    inputs: Sequence[Tensor], *, total: bool = False, dtype: torch.dtype | None = None, device: DeviceSpec | None = None
) -> ColumnSumExplanation:
    """Explain how fusednorm.column_sum of these tensors runs, and why: print() the result.

    `device`, such as fusednorm.planner.device.H200, replaces the inputs' own device. Nothing is copied or launched.
    One launch takes 64 tensors; if there are more, the explanation is about the first 64. Raises the op's errors
    (RuntimeError, or TypeError if an input is no tensor).
    """
    validate_column_sum(inputs, dtype, "explain_column_sum")
    inputs = inputs[:MAX_TENSORS]
    problem, rows = describe(inputs, [in_place(tensor) for tensor in inputs], total, dtype)
    copied = [str(i) for i, tensor in enumerate(inputs) if in_place(tensor) is None]
    notes = (f"inputs {', '.join(copied)} are copied first: their rows are not at one stride",) if copied else ()
    why = None
    if not rows or not problem.cols:
        why = "the inputs have no elements"
    elif device is None and not runs_kernels(inputs[0]):
        why = f"the inputs are on {inputs[0].device}, where ATen's kernels run"
    if why:
        return ColumnSumExplanation(problem, rows, None, Choice(ReferencePlan(why)), why, notes)
    spec = gpus.less_margin(device) if device else gpus.spec_of(inputs[0].device)
    ordered, of_block = invariance.switch.invariance(), rows
    if ordered > 0:
        spec, of_block = spec.of_architecture(), min(rows, ordered)
    if of_block < rows:
        notes += (f"runs for {-(-rows // of_block)} blocks of up to {of_block} rows in turn: ordered_sums",)
    choice, fault = choose(problem, of_block, spec), ring_fault(problem, of_block, spec)
    failed = fallback.failed_of(problem, spec)
    if choice.plan in failed:
        choice, fault = choose(problem, of_block, spec, "portable"), f"cannot run here: {failed[choice.plan]}"
        if choice.plan in failed:
            choice = Choice(ReferencePlan(f"the kernels for it have failed: {failed[choice.plan]}"))
    return ColumnSumExplanation(problem, rows, spec, choice, fault, notes)
