"""Forwards of forms with their own steps, as calls, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from cases import BF16, EPS, FP16, FP32, FP64, heads_first, packed_slice, row_strided
from torch import Tensor

from bench.written import finished, normalized
from fusednorm.forms import FormSpec
from fusednorm.operands import ForwardOperands, Role
from fusednorm.problem.calls import Added, ForwardCall, check_forward
from fusednorm.problem.rows import is_tma_aligned, row_view

OFFSET = FormSpec(weight_offset=1.0)
ROUNDED = FormSpec(rounds_x_hat=True, weight_offset=1.0)
ADD = FormSpec(combine="add")
ADD_UNROUNDED = FormSpec(combine="add", rounds_sum=False, weight_offset=1.0)
ADDED_LAST = FormSpec(finish="add")
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
        changed = {name: value for name, value in self.form._asdict().items() if value != getattr(FormSpec(), name)}
        form = "-".join(f"{name}_{value}" for name, value in changed.items())
        dtypes = "-".join(str(each).removeprefix("torch.") for each in (self.dtype, self.residual, self.stored))
        return f"{self.norm}-{form}-{self.rows}x{self.cols}-{dtypes}" + (f"-{self.layout}" if self.layout else "")

    @property
    def inputs(self) -> list[Tensor | None]:
        """x, residual, weight, bias."""
        generator = torch.Generator().manual_seed(self.rows + self.cols)
        shapes = {"x": (self.rows, self.cols), "residual": (self.rows, self.cols), "w": (self.cols,), "b": (self.cols,)}
        x, residual, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes.values())
        if self.residual is not None:
            residual = residual.to(self.residual)
            if self.layout:
                residual = LAYOUTS[self.layout](residual.view(1, self.rows // 2, 2, self.cols)).flatten(0, 1)
        parameters = [None if self.parameters is None else each.to(self.parameters) for each in (weight, bias)]
        return [x.to(self.dtype), residual if self.residual and self.form.rows_in else None, *parameters]

    @property
    def call(self) -> ForwardCall:
        x, residual, weight, bias = self.inputs
        plain = check_forward(ForwardOperands(self.norm, x, (self.cols,), weight, bias, EPS))
        problem, added, outputs = replace(plain.problem, form=self.form), (), ()
        if residual is not None:
            view = row_view(residual, residual.ndim - 1)
            added = (Added("residual", Role.ROWS, view),)
            aligned = problem.tma_aligned and is_tma_aligned(view, self.cols)
            rows = {"rows_in": (residual.dtype,), "names_in": ("residual",)}
            problem = replace(problem, nested_rows=view.inner_rows != 1, tma_aligned=aligned, **rows)
        if self.form.rows_out:
            outputs = (Added("new_residual", Role.ROWS, self.stored),)
            problem = replace(problem, rows_out=(self.stored,))
        return plain._replace(problem=problem, added=added, added_outputs=outputs)

    def check(self, outputs: tuple[Tensor, ...]) -> None:
        """Fails unless the stored sum is exact, and y and the statistics are near those in float64 by the rounding of
        y's dtype."""
        x, residual, weight, bias = self.inputs
        y, mean, rstd, *stored = outputs
        wide = x.float() if residual is None else x.float() + residual.reshape(x.shape)
        h = wide if self.form.combine else x
        if self.form.rows_out:
            assert torch.equal(stored[0], wide.to(self.stored))
            h = stored[0] if self.form.rounds_sum else wide
        x_hat, want_mean, want_rstd = normalized(self.norm, h.double(), EPS)
        if mean is not None:
            torch.testing.assert_close(mean.flatten().double(), want_mean.flatten(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rstd.flatten().double(), want_rstd.flatten(), rtol=1e-5, atol=1e-7)
        of = {"weight": weight, "bias": bias, "residual": None if residual is None else residual.reshape(x.shape)}
        exact = self.form._replace(rounds_x_hat=False)
        want, other = (finished(each, exact, of, FP64) for each in (x_hat, x_hat.to(self.dtype).double()))
        if self.form.rounds_x_hat:
            want, other = other, want
        epsilon = torch.finfo(y.dtype).eps
        torch.testing.assert_close(y.double(), want, rtol=1.5 * epsilon, atol=3 * epsilon)
        if self.dtype.itemsize < 4 and not self.form.finish:  # most elements show whether x_hat was rounded
            assert (y == want.to(y.dtype)).float().mean() > 0.97
            assert weight is None or (y == other.to(y.dtype)).float().mean() < 0.95


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
