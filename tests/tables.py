"""Norms whose modulations are tables with an index for each row of x, as calls, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from cases import BF16, EPS, FP16, FP32, statistics_of
from exact import assert_near, backward, forward, summed
from torch import Tensor

from fusednorm.operands import Operands, operands_of
from fusednorm.problem.calls import BackwardCall, ForwardCall, check_backward, check_forward

BATCH = 3  # x is [BATCH, rows, cols]


@dataclass(frozen=True)
class Table:
    """A call of one direction. Tables are columns of one [size, 6, cols]; the first and the last row are read. Of more
    than four rows no number names the first one, which is NaN."""

    norm: str
    form: str  # of the forward, without "_modulated"
    rows: int
    cols: int
    size: int = 4
    dtype: torch.dtype = BF16
    modulation: torch.dtype = FP32
    index: torch.dtype = torch.int64
    parameters: torch.dtype | None = None
    has_shift: bool = True
    backward: bool = False
    has_sums: bool = True  # a backward without is one of dx and dbranch alone, for which no rows are sorted
    nested: bool = False  # x is a slice of a wider tensor, with rows at two strides
    device: str = field(default="cpu", compare=False)

    def __str__(self) -> str:
        dtypes = (self.dtype, self.modulation, self.index, self.parameters)
        text = f"{self.norm}{self.form}-{self.rows}x{self.cols}-{self.size}" + "-nested" * self.nested
        text += "".join(f"-{each}".replace("torch.", "") for each in dtypes if each) + "-backward" * self.backward
        return text + "-without-sums" * (not self.has_sums)

    @property
    def given(self) -> dict[str, Tensor]:
        generator = torch.Generator(self.device).manual_seed(self.rows + self.cols)

        def draw(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device).to(dtype)

        shape = BATCH, self.rows, self.cols
        packed, first = draw(self.size, 6, self.cols, dtype=self.modulation), int(self.size > 4)
        index = torch.randint(first, self.size, shape[:2], generator=generator, device=self.device, dtype=self.index)
        packed[:first], index[0, 0], index[-1, -1] = float("nan"), self.size - 1, first
        x = draw(BATCH, 2, *shape[1:], dtype=self.dtype)[:, 1] if self.nested else draw(*shape, dtype=self.dtype)
        given = {"x": x, "row_index": index, "scale": packed[:, 1]}
        given |= {"shift": packed[:, 2]} if self.has_shift else {}
        given |= {"gate": packed[:, 4]} if self.form == "_of_gated_sum" else {}
        if self.parameters:
            given |= {name: draw(self.cols, dtype=self.parameters) for name in ("weight", "bias")}
        row = draw(*shape, dtype=FP32)
        if not self.backward:
            return given | ({"residual": row} if "sum" in self.form else {})
        given |= {"branch": draw(*shape, dtype=self.dtype)} if "gate" in given else {}
        given |= statistics_of(self.norm, x) | {"grad_out": draw(*shape, dtype=self.dtype)}
        return given | {"residual_grad": row}

    @property
    def operands(self) -> Operands:
        mask = [True, *[self.has_sums] * 4, True, self.has_sums]
        settings = {"output_mask": mask} if self.backward else {"eps": EPS}
        if self.form == "_of_gated_sum" and not self.backward:
            settings["rounds_sum"] = False
        op = f"{self.norm}_norm_bwd_modulated" if self.backward else f"{self.norm}_norm_fwd{self.form}_modulated"
        return operands_of(f"{op}_by_index", (), self.given | settings | {"normalized_shape": (self.cols,)})

    @property
    def call(self) -> ForwardCall | BackwardCall:
        return self.call_by(self.given["row_index"])

    def call_by(self, index: Tensor) -> ForwardCall | BackwardCall:
        return (check_backward if self.backward else check_forward)(self.operands._replace(row_index=index))

    def check(self, outputs: tuple[Tensor | None, ...]) -> None:
        assert_near(self.operands, outputs, (backward if self.backward else forward)(self.operands), summed)


# Rows and columns that end within a tile, dtypes, tables of one row, absent operands.
FORWARDS = (
    Table("layer", "", 5, 77),
    Table("rms", "", 11, 64, modulation=BF16, has_shift=False, index=torch.int32),
    Table("rms", "_of_sum", 5, 40, dtype=FP16, modulation=FP16, parameters=FP32),
    Table("layer", "_of_gated_sum", 7, 72, modulation=BF16, nested=True),
    Table("layer", "_of_gated_sum", 5, 40, size=1, parameters=BF16),
)
BACKWARDS = (
    Table("layer", "", 5, 77, backward=True),
    Table("rms", "", 11, 64, modulation=BF16, has_shift=False, index=torch.int32, parameters=FP32, backward=True),
    Table("layer", "_of_gated_sum", 7, 72, modulation=BF16, nested=True, backward=True),
    Table("rms", "_of_gated_sum", 5, 40, dtype=FP32, parameters=BF16, backward=True),
    Table("layer", "", 13, 32, size=20, parameters=FP32, backward=True),
    Table("layer", "_of_gated_sum", 5, 77, backward=True, has_sums=False),
)
