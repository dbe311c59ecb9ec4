"""Norms with a residual or a gate as calls, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from cases import BF16, EPS, FP16, FP32, heads_first, packed_slice, row_strided
from exact import assert_near, backward, forward
from torch import Tensor

from fusednorm import operands as table
from fusednorm.forms import FormSpec
from fusednorm.operands import BACKWARD, FORWARD, WAYS, Operands, operands_of
from fusednorm.problem.calls import BackwardCall, ForwardCall, check_backward, check_forward

OFFSET = FormSpec(weight_offset=1.0)
ROUNDED = FormSpec(rounds_x_hat=True, weight_offset=1.0)
ADD = FormSpec(combine="add")
ADD_UNROUNDED = FormSpec(combine="add", rounds_sum=False, weight_offset=1.0)
ADDED_LAST = FormSpec(finish="add")
FORMS = [OFFSET, ROUNDED, ADD, ADD_UNROUNDED, ADDED_LAST]
# Of their ops; a sum of another dtype has an op of the same form.
SUFFIXES = {(form.combine, form.finish): suffix for form, suffix, *_ in reversed(table.FORMS) if not form.modulate}
LAYOUTS = {"row_strided": row_strided, "packed_slice": packed_slice, "heads_first": heads_first}
ALL = True, True, True, True


@dataclass(frozen=True)
class Steps:
    """A norm of [rows, cols] by a form: its forward, and with a gate its backward. RMSNorm has a bias, too."""

    norm: str
    form: FormSpec
    rows: int
    cols: int
    dtype: torch.dtype = BF16  # of x and dy
    parameters: torch.dtype | None = FP32
    other: torch.dtype | None = BF16  # of the residual or the gate. None: the first layer of a model has no residual
    stored: torch.dtype = BF16  # of the stored sum
    layout: str | None = None  # of the residual or the gate; the others are contiguous
    mask: tuple[bool, ...] = ALL  # which gradients are wanted: of x, weight, bias and gate
    added: torch.dtype | None = None  # of a gradient that is added to that of the row that is normalized
    places: tuple[int, int, int] | None = None  # x and the gate are columns of one tensor: its width, where they begin

    def __str__(self) -> str:
        form = "-".join(f"{name}_{value}" for name, value in self.form.changed.items())
        dtypes = "-".join(map(str, (self.dtype, self.parameters, self.other, self.stored, self.added)))
        text = f"{self.norm}-{form}-{self.rows}x{self.cols}-{dtypes}".replace("torch.", "")
        text += f"-{self.layout}" if self.layout else ""
        text += f"-at_{self.places[1]}_and_{self.places[2]}_of_{self.places[0]}" if self.places else ""
        return text + ("" if self.mask == ALL else "-" + "".join(str(int(each)) for each in self.mask))

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """By the names of operands, and what is added."""
        generator = torch.Generator().manual_seed(self.rows + self.cols)
        other = "gate" if self.form.activates else "residual"
        dtypes = {"x": self.dtype, other: self.other, "grad_out": self.dtype, "added": self.added}
        rows = {name: torch.randn(self.rows, self.cols, generator=generator) for name in dtypes}
        rows = {name: each.to(dtypes[name]) if dtypes[name] else None for name, each in rows.items()}
        if self.layout:
            rows = {name: each if each is None else each.view(1, -1, 2, self.cols) for name, each in rows.items()}
            rows[other] = LAYOUTS[self.layout](rows[other])
        if self.places:
            packed = torch.zeros(self.rows, self.places[0], dtype=self.dtype)
            for name, at in zip(("x", other), self.places[1:], strict=True):
                rows[name] = packed[:, at : at + self.cols].copy_(rows[name])
        parameters = {name: torch.randn(self.cols, generator=generator) for name in ("weight", "bias")}
        return rows | {name: each.to(self.parameters) if self.parameters else None for name, each in parameters.items()}

    def operands(self, direction: str) -> Operands:
        """Of a backward with the exact statistics."""
        op = f"{self.norm}_norm_{WAYS[direction]}{SUFFIXES[self.form.combine, self.form.finish]}"
        settings = {name: value for name, value in self.form.changed.items() if name not in ("combine", "finish")}
        given = self.tensors | settings | {"normalized_shape": (self.cols,)}
        if direction == FORWARD:
            more = {"eps": EPS, "y_dtype": self.dtype, "residual_dtype": self.stored}
            return operands_of(op, (), given | more)
        exact = forward(self.operands(FORWARD))
        given |= {name: exact[name].float() for name in ("mean", "rstd") if name in exact}
        if not self.places:
            return operands_of(op, (), given | {"output_mask": list(self.mask)})
        given |= dict(zip(("width", "x_at", "gate_at"), self.places, strict=True))
        return operands_of(f"{op}_packed", (), given | {"rest": self.rest, "output_mask": list(self.mask)[:3]})

    @property
    def forward(self) -> ForwardCall:
        return check_forward(self.operands(FORWARD))

    @property
    def backward(self) -> BackwardCall:
        """A gradient that is added to dh is none of the op's operands."""
        call, added = check_backward(self.operands(BACKWARD)), self.tensors["added"]
        if added is None:
            return call
        return call._replace(problem=replace(call.problem, residual_dtype=added.dtype), residual_grad=added)

    @property
    def rest(self) -> Tensor:
        """The gradient of the other columns."""
        return torch.arange(float(self.rows)).to(self.dtype)[:, None].repeat(1, self.places[0] - 2 * self.cols)

    def check_forward(self, outputs: tuple[Tensor, ...]) -> None:
        """The stored sum is exact, and x_hat is rounded or not, as most elements of 16 bits show."""
        operands, y = self.operands(FORWARD), outputs[0]
        exact = forward(operands)
        assert_near(operands, outputs, exact, self._bounds)
        assert not self.form.rows_out or torch.equal(outputs[-1].double(), exact["new_residual"])
        if self.dtype.itemsize < 4 and (self.form.rounds_x_hat or not self.form.finish):
            other = forward(operands._replace(rounds_x_hat=not self.form.rounds_x_hat))["y"]
            assert (y == exact["y"].to(y.dtype)).float().mean() > 0.97
            assert self.parameters is None or (y == other.to(y.dtype)).float().mean() < 0.95

    def _bounds(self, epsilon: float, terms: int) -> tuple[float, float]:
        """An x_hat that is about in the middle between two numbers of its dtype may be rounded to either."""
        return 1.5 * epsilon, 3 * epsilon if self.form.rounds_x_hat else min(5e-5, max(3 * epsilon, 2e-6))

    def check_backward(self, outputs: tuple[Tensor | None, ...]) -> None:
        operands = self.operands(BACKWARD)
        exact = backward(replace(self, places=None).operands(BACKWARD), self.tensors["added"])
        if self.places:
            exact["dx"] = self._packed(exact["dx"], exact["dgate"])
        assert_near(operands, outputs, exact)

    def _packed(self, dx: Tensor, dgate: Tensor) -> Tensor:
        width, x_at, gate_at = self.places
        taken = torch.zeros(width, dtype=torch.bool)
        whole = torch.empty(self.rows, width, dtype=torch.double)
        for at, rows in ((x_at, dx), (gate_at, dgate)):
            whole[:, at : at + self.cols], taken[at : at + self.cols] = rows, True
        whole[:, ~taken] = self.rest.double()
        return whole


# Rows and columns that end within a tile, dtypes, layouts and absent operands, each in some form.
PORTABLE = [
    Steps("layer", OFFSET, 9, 77),
    Steps("rms", OFFSET, 4, 64, FP32, FP32),
    Steps("rms", ROUNDED, 9, 77, FP16),
    Steps("layer", ROUNDED, 7, 40, parameters=BF16),
    Steps("layer", ADD, 9, 77),
    Steps("rms", ADD, 8, 64, other=FP32, stored=FP32, layout="row_strided"),
    Steps("rms", ADD, 8, 72, layout="packed_slice", parameters=None),
    Steps("layer", ADD, 5, 64, other=None),
    Steps("layer", ADD_UNROUNDED, 8, 77, layout="heads_first"),
    Steps("rms", ADD_UNROUNDED, 9, 64, FP16, other=FP32, stored=FP16),
    Steps("layer", ADDED_LAST, 8, 64, layout="packed_slice"),
    Steps("rms", ADDED_LAST, 9, 77, other=FP32),
]
# More rows than a ring holds at once; a tail; masked and whole rows; clusters (of 2 SMs each).
PIPELINED = [
    Steps("layer", ROUNDED, 9, 200),
    Steps("rms", ADD, 60, 200),
    Steps("layer", ADD, 36, 1032, other=FP32, stored=FP32, layout="row_strided"),
    Steps("layer", ADD_UNROUNDED, 6, 1536, layout="row_strided"),
    Steps("rms", ADD_UNROUNDED, 9, 1000, FP32, other=BF16, stored=FP32),
    Steps("layer", ADD, 5, 200, other=None),
    Steps("rms", ADDED_LAST, 60, 200, other=FP32),
    Steps("rms", ADD, 3, 16384),
    Steps("layer", ADDED_LAST, 4, 12288, FP16, other=FP16),
]
SPECIALIZED = [Steps("layer", ROUNDED, 60, 200), Steps("rms", OFFSET, 37, 1032)]
