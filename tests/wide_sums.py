"""Backwards of sums with a residual that is wider than x, as calls, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases import BF16, FP16, statistics_of
from exact import assert_near, backward
from torch import Tensor

from fusednorm.operands import OPS, Operands, operands_of
from fusednorm.problem.calls import BackwardCall, check_backward

FORM = OPS["rms_norm_bwd_of_wide_sum"].form


@dataclass(frozen=True)
class WideSum:
    """A backward of [rows, cols]: x is the float32 sum. The mask is of (dx, dweight, dbias, dsummand)."""

    norm: str
    rows: int
    cols: int
    summand: torch.dtype = BF16
    mask: tuple[bool, ...] = (True,) * 4
    has_residual_grad: bool = True

    def __str__(self) -> str:
        wants = "".join(str(int(each)) for each in self.mask)
        return f"{self.norm}-{self.rows}x{self.cols}-{str(self.summand)[6:]}-{wants}-{int(self.has_residual_grad)}"

    @property
    def operands(self) -> Operands:
        generator = torch.Generator().manual_seed(self.rows + self.cols)
        dy, x, stream = (torch.randn(self.rows, self.cols, generator=generator) for _ in range(3))
        weight, bias = (torch.randn(self.cols, generator=generator) for _ in range(2))
        given = {"grad_out": dy.to(self.summand), "x": x, "normalized_shape": (self.cols,), "weight": weight}
        given |= statistics_of(self.norm, x) | {"bias": bias, "output_mask": self.mask}
        given |= {"residual_grad": stream if self.has_residual_grad else None, "dsummand_dtype": self.summand}
        return operands_of(f"{self.norm}_norm_bwd_of_wide_sum", (), given)

    @property
    def call(self) -> BackwardCall:
        return check_backward(self.operands)

    def check(self, outputs: tuple[Tensor | None, ...]) -> None:
        assert_near(self.operands, outputs, backward(self.operands))
        dx, *_, dsummand = outputs
        assert dx is None or dsummand is None or torch.equal(dsummand, dx.to(self.summand))


PORTABLE = [
    WideSum("layer", 9, 77),
    WideSum("rms", 8, 64, FP16),
    WideSum("rms", 9, 77, mask=(False, True, False, True)),
    WideSum("layer", 5, 64, mask=(True, False, True, False), has_residual_grad=False),
    WideSum("layer", 5, 64, mask=(False, False, False, True)),
]
# More rows than a ring holds at once; whole and masked rows; a cluster (of 2 SMs); float32 beside 16 bits.
PIPELINED = [
    WideSum("rms", 60, 200),
    WideSum("layer", 37, 1032),
    WideSum("layer", 6, 1536, mask=(False, True, True, True)),
    WideSum("rms", 3, 6144, FP16, has_residual_grad=False),
]
SPECIALIZED = [WideSum("layer", 60, 200), WideSum("rms", 37, 1032, mask=(False, True, True, True))]
