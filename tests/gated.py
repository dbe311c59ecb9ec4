"""Norms with a gate, forward and backward, as calls, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from cases import BF16, EPS, FP16, FP32
from exact import assert_near, backward, forward
from steps import LAYOUTS
from torch import Tensor

from fusednorm.forms import FormSpec
from fusednorm.operands import BACKWARD, FORWARD, WAYS, Operands, operands_of
from fusednorm.problem.calls import BackwardCall, ForwardCall, check_backward, check_forward

BEFORE = FormSpec(combine="gate")
BEFORE_BY_SIGMOID = FormSpec(combine="gate", activation="sigmoid", weight_offset=1.0)
AFTER = FormSpec(finish="gate")
AFTER_BY_SIGMOID = FormSpec(finish="gate", activation="sigmoid", weight_offset=1.0)
AFTER_ROUNDED = FormSpec(finish="gate", rounds_x_hat=True)
BEFORE_BY_GROUP, AFTER_BY_GROUP = FormSpec(combine="gate", groups=4), FormSpec(finish="gate", groups=2)
FORMS = [BEFORE, BEFORE_BY_SIGMOID, AFTER, AFTER_BY_SIGMOID]
ALL = True, True, True, True


@dataclass(frozen=True)
class Gated:
    """A norm of [rows, cols] with a gate."""

    norm: str
    form: FormSpec
    rows: int
    cols: int
    dtype: torch.dtype = BF16  # of x and dy
    parameters: torch.dtype | None = FP32
    gate: torch.dtype = BF16
    layout: str | None = None  # of the gate
    mask: tuple[bool, ...] = ALL  # which gradients are wanted: of x, weight, bias and gate
    added: torch.dtype | None = None  # of a gradient that is added to that of the row that is normalized
    places: tuple[int, int, int] | None = None  # x and the gate are columns of one tensor: its width, where they begin

    def __str__(self) -> str:
        place = "before" if self.form.combine else "after"
        dtypes = "-".join(str(each).removeprefix("torch.") for each in (self.dtype, self.parameters, self.gate))
        rounded = "-rounded" * self.form.rounds_x_hat + f"-{self.form.groups}_groups" * (self.form.groups > 1)
        text = f"{self.norm}-{self.form.activation}-{place}{rounded}-{self.rows}x{self.cols}-{dtypes}"
        text += f"-{self.layout}" if self.layout else ""
        text += f"-at_{self.places[1]}_and_{self.places[2]}_of_{self.places[0]}" if self.places else ""
        text += f"-added_{self.added}".replace("torch.", "") if self.added else ""
        return text + ("" if self.mask == ALL else "-" + "".join(str(int(each)) for each in self.mask))

    @property
    def inputs(self) -> list[Tensor | None]:
        """x, weight, bias, gate, dy, the added gradient."""
        generator = torch.Generator().manual_seed(self.rows + self.cols)
        shapes = [(self.rows, self.cols), (self.cols,), (self.cols,), *[(self.rows, self.cols)] * 3]
        x, weight, bias, gate, dy, added = (torch.randn(shape, generator=generator) for shape in shapes)
        gate = gate.to(self.gate)
        rows = [x.to(self.dtype), gate, dy.to(self.dtype), None if self.added is None else added.to(self.added)]
        if self.layout:
            x, gate, dy, added = (each if each is None else each.view(1, -1, 2, self.cols) for each in rows)
            rows = [x, LAYOUTS[self.layout](gate), dy, added]
        x, gate, dy, added = rows
        if self.places:
            width, x_at, gate_at = self.places
            packed = torch.zeros(self.rows, width, dtype=self.dtype)
            packed[:, x_at : x_at + self.cols], packed[:, gate_at : gate_at + self.cols] = x, gate
            x, gate = packed[:, x_at : x_at + self.cols], packed[:, gate_at : gate_at + self.cols]
        return [x, *(None if self.parameters is None else each.to(self.parameters) for each in (weight, bias)),
                gate, dy, added]  # fmt: skip

    def operands(self, direction: str) -> Operands:
        """Of a backward with the exact statistics."""
        x, weight, bias, gate, dy, _ = self.inputs
        op = f"{self.norm}_norm_{WAYS[direction]}_{'of_gated' if self.form.combine else 'times_gate'}"
        given = {"x": x, "normalized_shape": (self.cols,), "gate": gate, "weight": weight, "bias": bias}
        given |= {name: getattr(self.form, name) for name in ("weight_offset", "activation", "groups")}
        if direction == FORWARD:
            return operands_of(op, (), given | {"eps": EPS, "rounds_x_hat": self.form.rounds_x_hat})
        exact = forward(self.operands(FORWARD))
        given |= {name: exact[name].float() for name in ("mean", "rstd") if name in exact}
        given |= {"grad_out": dy, "output_mask": list(self.mask)[: 3 if self.places else 4]}
        if self.places:
            given |= dict(zip(("width", "x_at", "gate_at"), self.places, strict=True)) | {"rest": self.rest}
        return operands_of(op + "_packed" * (self.places is not None), (), given)

    @property
    def forward(self) -> ForwardCall:
        return check_forward(self.operands(FORWARD))

    @property
    def backward(self) -> BackwardCall:
        """A gradient that is added to dh is none of the op's operands."""
        call, added = check_backward(self.operands(BACKWARD)), self.inputs[-1]
        if added is None:
            return call
        return call._replace(problem=replace(call.problem, residual_dtype=added.dtype), residual_grad=added)

    @property
    def rest(self) -> Tensor:
        """The gradient of the other columns."""
        return torch.arange(float(self.rows)).to(self.dtype)[:, None].repeat(1, self.places[0] - 2 * self.cols)

    def check_forward(self, outputs: tuple[Tensor, ...]) -> None:
        operands = self.operands(FORWARD)
        exact, y = forward(operands), outputs[0]
        assert_near(operands, outputs, exact)
        if self.form.rounds_x_hat:
            assert (y == exact["y"].to(y.dtype)).float().mean() > 0.97

    def check_backward(self, outputs: tuple[Tensor | None, ...]) -> None:
        operands = self.operands(BACKWARD)
        exact = backward(replace(self, places=None).operands(BACKWARD), self.inputs[-1])
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


# Rows and columns that end within a tile, dtypes, layouts, and gradients that are not wanted.
PORTABLE = [
    Gated("layer", AFTER, 9, 77),
    Gated("rms", AFTER, 8, 64, gate=FP32, layout="row_strided"),
    Gated("rms", AFTER_BY_SIGMOID, 8, 72, layout="heads_first", parameters=None),
    Gated("layer", AFTER_BY_SIGMOID, 9, 64, FP16, added=FP32),
    Gated("rms", AFTER_ROUNDED, 9, 77, parameters=BF16),
    Gated("layer", AFTER_ROUNDED, 8, 64, FP16, gate=FP16),
    Gated("layer", AFTER, 9, 40, mask=(False, True, True, False)),
    Gated("rms", BEFORE, 9, 77, FP32, gate=FP16),
    Gated("layer", BEFORE, 8, 64, layout="packed_slice", mask=(False, True, True, True)),
    Gated("rms", BEFORE_BY_SIGMOID, 8, 72, mask=(True, False, False, False), added=BF16),
    Gated("layer", BEFORE_BY_SIGMOID, 9, 64, mask=(False, True, False, False)),
    Gated("rms", BEFORE_BY_GROUP, 9, 160),
    Gated("layer", AFTER_BY_GROUP, 8, 154, FP32, layout="row_strided"),
    Gated("layer", BEFORE_BY_GROUP, 8, 256, layout="heads_first", mask=(True, True, False, False), added=FP32),
    Gated("layer", AFTER_BY_GROUP, 9, 80, mask=(False, True, True, False)),
    Gated("rms", BEFORE_BY_GROUP, 9, 80, places=(160, 0, 80)),
    Gated("layer", AFTER, 9, 77, FP32, gate=FP32, places=(170, 90, 3)),
    Gated("rms", AFTER, 8, 64, places=(200, 8, 104), mask=(False, True, True, False)),
]
# More rows than a ring holds at once; a tail; masked and whole rows; clusters (of 2 SMs each).
PIPELINED = [
    Gated("rms", AFTER, 60, 200),
    Gated("layer", AFTER, 9, 1032, parameters=BF16, added=BF16),
    Gated("rms", BEFORE, 36, 1536, layout="row_strided"),
    Gated("layer", BEFORE_BY_SIGMOID, 36, 256, FP32, gate=BF16, mask=(True, True, False, False)),
    Gated("layer", AFTER_BY_SIGMOID._replace(groups=2), 3, 10240, mask=(False, True, True, True)),
    Gated("rms", BEFORE_BY_GROUP, 60, 800),
    Gated("layer", AFTER_BY_GROUP, 9, 2064, parameters=BF16, added=BF16),
    Gated("rms", BEFORE, 37, 1536, places=(3088, 1544, 0)),
]
SPECIALIZED = [Gated("layer", AFTER, 60, 200), Gated("rms", BEFORE, 37, 1032, added=FP32)]
