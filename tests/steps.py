"""Forwards of forms with their own steps, as calls, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases import BF16, EPS, FP16, FP32, heads_first, packed_slice, row_strided
from exact import assert_near, forward
from torch import Tensor

from fusednorm.forms import FormSpec
from fusednorm.operands import Operands, operands_of
from fusednorm.problem.calls import ForwardCall, check_forward

OFFSET = FormSpec(weight_offset=1.0)
ROUNDED = FormSpec(rounds_x_hat=True, weight_offset=1.0)
ADD = FormSpec(combine="add")
ADD_UNROUNDED = FormSpec(combine="add", rounds_sum=False, weight_offset=1.0)
ADDED_LAST = FormSpec(finish="add")
OPS = {("", ""): "affine", ("add", ""): "of_sum", ("", "add"): "plus_residual"}
FORMS = [OFFSET, ROUNDED, ADD, ADD_UNROUNDED, ADDED_LAST]
LAYOUTS = {"row_strided": row_strided, "packed_slice": packed_slice, "heads_first": heads_first}


@dataclass(frozen=True)
class Steps:
    """A forward of [rows, cols] by a form. RMSNorm has a bias, too."""

    norm: str
    form: FormSpec
    rows: int
    cols: int
    dtype: torch.dtype = BF16  # of x
    parameters: torch.dtype | None = FP32
    residual: torch.dtype | None = BF16  # None: the first layer of a model has none
    stored: torch.dtype = BF16  # of the stored sum
    layout: str | None = None  # of the residual; x is contiguous

    def __str__(self) -> str:
        form = "-".join(f"{name}_{value}" for name, value in self.form.changed.items())
        dtypes = "-".join(str(each).removeprefix("torch.") for each in (self.dtype, self.residual, self.stored))
        return f"{self.norm}-{form}-{self.rows}x{self.cols}-{dtypes}" + (f"-{self.layout}" if self.layout else "")

    @property
    def operands(self) -> Operands:
        generator = torch.Generator().manual_seed(self.rows + self.cols)
        shapes = (self.rows, self.cols), (self.rows, self.cols), (self.cols,), (self.cols,)
        x, residual, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
        settings = {name: value for name, value in self.form.changed.items() if name not in ("combine", "finish")}
        settings |= {"residual": None, "residual_dtype": self.stored} if self.form.rows_out else {}
        given = settings | {"x": x.to(self.dtype), "normalized_shape": (self.cols,), "eps": EPS, "y_dtype": self.dtype}
        if self.parameters is not None:
            given |= {"weight": weight.to(self.parameters), "bias": bias.to(self.parameters)}
        if self.form.rows_in and self.residual is not None:
            given["residual"] = residual.to(self.residual)
        if self.layout:
            shape = self.rows // 2, 2, self.cols
            given["x"], residual = given["x"].view(shape), given["residual"].view(1, *shape)
            given["residual"] = LAYOUTS[self.layout](residual).flatten(0, 1)
        return operands_of(f"{self.norm}_norm_fwd_{OPS[self.form.combine, self.form.finish]}", (), given)

    @property
    def call(self) -> ForwardCall:
        return check_forward(self.operands)

    def check(self, outputs: tuple[Tensor, ...]) -> None:
        """Fails unless the stored sum is exact, and y and the statistics are near those in float64 by the rounding of
        y's dtype."""
        operands, y = self.operands, outputs[0]
        exact = forward(operands)
        assert_near(operands, outputs, exact, lambda epsilon, _: (1.5 * epsilon, max(3 * epsilon, 1e-6)))
        assert not self.form.rows_out or torch.equal(outputs[-1].double(), exact["new_residual"])
        if self.dtype.itemsize < 4 and not self.form.finish:  # most elements show whether x_hat was rounded
            other = forward(operands._replace(rounds_x_hat=not self.form.rounds_x_hat))["y"]
            assert (y == exact["y"].to(y.dtype)).float().mean() > 0.97
            assert self.parameters is None or (y == other.to(y.dtype)).float().mean() < 0.95


# Rows and columns that end within a tile, dtypes, layouts and absent operands, each in some form.
PORTABLE = [
    Steps("layer", OFFSET, 9, 77),
    Steps("rms", OFFSET, 4, 64, FP32, FP32),
    Steps("rms", ROUNDED, 9, 77, FP16),
    Steps("layer", ROUNDED, 7, 40, parameters=BF16),
    Steps("layer", ADD, 9, 77),
    Steps("rms", ADD, 8, 64, residual=FP32, stored=FP32, layout="row_strided"),
    Steps("rms", ADD, 8, 72, layout="packed_slice", parameters=None),
    Steps("layer", ADD, 5, 64, residual=None),
    Steps("layer", ADD_UNROUNDED, 8, 77, layout="heads_first"),
    Steps("rms", ADD_UNROUNDED, 9, 64, FP16, residual=FP32, stored=FP16),
    Steps("layer", ADDED_LAST, 8, 64, layout="packed_slice"),
    Steps("rms", ADDED_LAST, 9, 77, residual=FP32),
]
# More rows than a ring holds at once; a tail; masked and whole rows; clusters (of 2 SMs each).
PIPELINED = [
    Steps("layer", ROUNDED, 9, 200),
    Steps("rms", ADD, 60, 200),
    Steps("layer", ADD, 36, 1032, residual=FP32, stored=FP32, layout="row_strided"),
    Steps("layer", ADD_UNROUNDED, 6, 1536, layout="row_strided"),
    Steps("rms", ADD_UNROUNDED, 9, 1000, FP32, residual=BF16, stored=FP32),
    Steps("layer", ADD, 5, 200, residual=None),
    Steps("rms", ADDED_LAST, 60, 200, residual=FP32),
    Steps("rms", ADD, 3, 16384),
    Steps("layer", ADDED_LAST, 4, 12288, FP16, residual=FP16),
]
SPECIALIZED = [Steps("layer", ROUNDED, 60, 200), Steps("rms", OFFSET, 37, 1032)]
