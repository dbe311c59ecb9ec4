"""Small norms, with forms or without, and column sums to simulate, each with the device that it is planned for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import head_norms
import torch
from cases import BF16, LAYOUTS, lay_out, make_case
from column_sums import Sums, assert_sums_close
from equal_rows import assert_exact, equal_rows
from head_norms import HeadCase
from torch import Tensor

import fusednorm
from fusednorm.columns import plan as column_plan
from fusednorm.planner import limits
from fusednorm.planner.plan import Plan, text_of
from fusednorm.tools import oracle
from fusednorm.tools.oracle import Case, Inputs, Outputs

from .host import Simulation, simulated

ALL, DX_ONLY, NO_DX = (True, True, True), (True, False, False), (False, True, True)


@dataclass(frozen=True)
class Problem:
    """One direction of a norm of [rows, cols] by one variant, or by the planner's choice if it is None."""

    direction: str
    variant: str | None
    norm: str
    rows: int
    cols: int
    mix: tuple = (BF16, BF16, BF16)  # dtypes of x, of the parameters and of the gradient
    mask: tuple[bool, bool, bool] = ALL  # which gradients are wanted: of x, weight and bias
    residual: torch.dtype | None = None
    layout: str | None = None  # one of cases.LAYOUTS
    device: str = "H200"
    sms: int = 2
    equal: bool = False  # every row has equal elements

    def __str__(self) -> str:
        dtypes = "-".join(str(each).removeprefix("torch.") for each in dict.fromkeys(self.mix))
        text = f"{self.variant or 'planned'}-{self.norm}-{self.direction}-{self.rows}x{self.cols}-{dtypes}"
        wanted = "".join(itertools.compress(("dx", "dw", "db"), self.mask))
        text += f"-{wanted}" if self.mask != ALL else ""
        text += "-residual" if self.residual else ""
        text += "-equal" if self.equal else ""
        text += f"-{self.layout}" if self.layout else ""
        return f"{text}-{self.device}" if self.device != "H200" else text

    @property
    def case(self) -> Case:
        if self.layout is None:
            return make_case(self.norm, (self.rows, self.cols), self.mix)
        batches = LAYOUTS[self.layout][0]
        return make_case(self.norm, (batches, self.rows // batches, 4, self.cols // 4), self.mix, 2)

    def inputs(self) -> Inputs:
        inputs = equal_rows(self.case) if self.equal else oracle.make_inputs(self.case)
        return inputs if self.layout is None else lay_out(inputs, self.layout)

    def simulate(self, **how) -> tuple[Outputs, Simulation]:
        """The outputs of the simulated kernels. Raises SimulationError."""
        inputs = self.inputs()
        with fusednorm.force(self.variant), simulated(self.device, self.sms, **how) as simulation:
            outputs = (self._forward if self.direction == "forward" else self._backward)(inputs)
        assert simulation.launched, f"{self} went to ATen"
        return outputs, simulation

    def _forward(self, inputs: Inputs) -> Outputs:
        ops, shape = torch.ops.fusednorm, self.case.normalized_shape
        if self.norm == "layer":
            return Outputs(*ops.layer_norm_fwd(inputs.x, shape, inputs.weight, inputs.bias, self.case.eps))
        y, rstd = ops.rms_norm_fwd(inputs.x, shape, inputs.weight, self.case.eps)
        return Outputs(y, None, rstd)

    def _backward(self, inputs: Inputs) -> Outputs:
        case, want = self.case, oracle.exact(self.case, inputs)
        has_bias = self.norm == "layer" or self.residual is not None  # an argument of the op, which may be None
        parameters = [inputs.weight, inputs.bias][: 1 + has_bias]
        statistics = [each.to(case.acc_dtype) for each in (want.mean, want.rstd) if each is not None]
        residual = [] if self.residual is None else [self.residual_grad()]
        mask = [wanted and each is not None for wanted, each in zip(self.mask, [inputs.x, *parameters], strict=False)]
        op = getattr(torch.ops.fusednorm, f"{self.norm}_norm_bwd{'_residual' if residual else ''}")
        operands = (*statistics, *parameters, *residual, mask)
        return Outputs(None, None, None, *op(inputs.grad_out, inputs.x, case.normalized_shape, *operands))

    def residual_grad(self) -> Tensor:
        return torch.randn(self.case.shape, generator=torch.Generator().manual_seed(7)).to(self.residual)

    def check(self, outputs: Outputs) -> None:
        """Fails unless the outputs are near the float64 oracle, by the bounds of fusednorm.tools.oracle."""
        inputs = self.inputs()
        if self.equal:
            assert_exact(outputs, self.case, inputs)
            return
        if self.residual is not None:
            want = oracle.exact(self.case, inputs).dx + self.residual_grad().double()
            epsilon = torch.finfo(outputs.dx.dtype).eps
            torch.testing.assert_close(outputs.dx.double(), want, rtol=epsilon, atol=1e-5)
            outputs = replace(outputs, dx=None)
        oracle.assert_outputs_close(outputs, self.case, inputs)


@dataclass(frozen=True)
class SumProblem:
    """Column sums by one of column_plan's kernels (None: the planner's choice)."""

    sums: Sums
    kernel: str | None = None
    device: str = "H200"
    sms: int = 2

    def __str__(self) -> str:
        device = "" if self.device == "H200" else f"-{self.device}"
        return f"column_sum-{self.kernel or 'planned'}-{self.sums}{device}"

    def simulate(self, **how) -> tuple[list[Tensor], Simulation]:
        choose = column_plan.choose
        by_kernel = lambda problem, rows, spec, kernel=None: choose(problem, rows, spec, self.kernel)  # noqa: E731
        chosen = mock.patch.object(column_plan, "choose", by_kernel)
        with chosen, simulated(self.device, self.sms, **how) as simulation:
            outputs = fusednorm.column_sum(self.sums.inputs(), total=self.sums.total, dtype=self.sums.out_dtype)
        assert simulation.launched, f"{self} went to ATen"
        return outputs, simulation

    def check(self, outputs: list[Tensor]) -> None:
        assert_sums_close(outputs, self.sums.inputs(), self.sums.total)


@dataclass(frozen=True)
class FormProblem:
    """A direction of a norm with a form by a plan. `case` is one of steps.py, modulations.py, tables.py or
    wide_sums.py."""

    case: Any
    direction: str  # all cases but a norm with a gate have one
    plan: Plan
    device: str = "H200"
    sms: int = 2

    def __str__(self) -> str:
        return f"{type(self.case).__name__}-{text_of(self.plan)}-{self.direction}-{self.case}-{self.device}"

    @property
    def call(self) -> Any:
        return self.case.call if hasattr(self.case, "call") else getattr(self.case, self.direction)

    def simulate(self, **how) -> tuple[Any, Simulation]:
        from fusednorm.host import launch

        with simulated(self.device, self.sms, **how) as simulation, few_ctas_sort():
            prepared = launch.on_tensors(self.call, self.plan)
            simulation.hand_over(prepared.launches)
        return prepared.outputs, simulation

    def check(self, outputs: Any) -> None:
        (self.case.check if hasattr(self.case, "check") else getattr(self.case, f"check_{self.direction}"))(outputs)


@dataclass(frozen=True)
class HeadProblem:
    """Norms of q and k and their gradients, by the planner's plans."""

    case: HeadCase
    device: str = "H200"
    sms: int = 1

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self.case).items() if value != getattr(HeadCase(), name)}
        text = "-".join(f"{name}_{value}".replace("torch.", "") for name, value in changed.items())
        return f"heads-{text}-{self.device}"

    def simulate(self, **how) -> tuple[tuple[Tensor, ...], Simulation]:
        given = self.case.tensors()
        with simulated(self.device, self.sms, **how) as simulation:
            got = self.case.run(given)
            outputs = (*got, *head_norms.gradients(got, given))
        assert {"forward", "backward"} <= {each.name for each in simulation.launched}, f"{self} went to ATen"
        return outputs, simulation

    def check(self, outputs: tuple[Tensor, ...]) -> None:
        got, grads = outputs[:2], outputs[2:]
        head_norms.assert_errs_no_more_than_plain_code(self.case, self.case.tensors(), got, grads)


def few_ctas_sort():
    """Inside, rows are sorted by 3 CTAs: the simulation runs one after another."""
    return mock.patch.object(limits, "sort", [*limits.sort[:3], 3])


def bits(outputs) -> dict:
    """The bytes of every output, by name, for exact comparison."""
    named = vars(outputs) if isinstance(outputs, Outputs) else dict(enumerate(outputs))
    tensors = {name: each for name, each in named.items() if isinstance(each, Tensor)}
    return {name: each.contiguous().view(torch.uint8).numpy().tobytes() for name, each in tensors.items()}
