"""Modulated norms as calls, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from cases import BF16, EPS, FP16, FP32, statistics_of
from exact import assert_near, backward, forward, summed
from torch import Tensor

from fusednorm.operands import FORMS, OPS, Operands, operands_of
from fusednorm.problem.calls import BackwardCall, ForwardCall, check

OUTPUTS = "dx", "dweight", "dbias", "dscale", "dshift", "dbranch", "dgate"
FORWARDS = [suffix for form, suffix, *_ in FORMS if form.modulate]
SAMPLE, TOKEN, ALL = "sample", "token", "all"  # which rows of x share a row of a modulation


@dataclass(frozen=True)
class Modulated:
    """A norm of x, [samples, rows, cols], with a scale, a shift and the gate of a branch. Each of the three has rows by
    sample or by token. Those by sample are slices of one [samples, 6, cols]."""

    norm: str
    samples: int
    rows: int
    cols: int
    scale: str = SAMPLE
    shift: str | None = SAMPLE
    gate: str | None = None
    dtype: torch.dtype = BF16  # of x, dy and the branch
    modulation: torch.dtype = FP32
    parameters: torch.dtype | None = None
    added: torch.dtype | None = None  # of a residual; of a backward, of the gradient of the sum
    factor: str = "one_plus"
    weight_offset: float = 0.0
    unwanted: tuple[str, ...] = ()  # of OUTPUTS
    forward: str = ""  # the suffix of its op, or else the call is a backward
    device: str = field(default="cpu", compare=False)

    def __str__(self) -> str:
        of = "-".join(filter(None, (self.scale, self.shift, self.gate)))
        dtypes = (self.dtype, self.modulation, self.parameters, self.added)
        text = f"{self.norm}-{self.samples}x{self.rows}x{self.cols}-{of}-{self.factor}"
        text += "".join(f"-{each}".replace("torch.", "") for each in dtypes if each) + self.forward
        return text + "".join(f"-no_{each}" for each in self.unwanted)

    @property
    def op(self) -> str:
        return f"{self.norm}_norm_fwd{self.forward}" if self.forward else f"{self.norm}_norm_bwd_modulated"

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By the names of operands; x is the row that is normalized."""
        generator = torch.Generator(self.device).manual_seed(self.rows + self.cols)

        def draw(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device).to(dtype)

        shape = self.samples, self.rows, self.cols
        packed = draw(self.samples, 6, self.cols, dtype=self.modulation)
        found = {"grad_out": draw(*shape, dtype=self.dtype), "x": draw(*shape, dtype=self.dtype)}
        for at, name in enumerate(("scale", "shift", "gate")):
            kind = getattr(self, name)
            if kind == SAMPLE:
                found[name] = packed[:, at : at + 1]
            elif kind is not None:
                found[name] = draw(*(shape if kind == TOKEN else (1, self.cols)), dtype=self.modulation)
                found[name] = found[name] if kind == TOKEN else found[name][0]
        if self.gate:
            found["branch"] = draw(*shape, dtype=self.dtype)
        if self.parameters:
            found |= {name: draw(self.cols, dtype=self.parameters) for name in ("weight", "bias")}
        if self.added:
            found["residual" if self.forward else "residual_grad"] = draw(*shape, dtype=self.added)
        return found

    @property
    def mask(self) -> list[bool]:
        return [name not in self.unwanted for name in OUTPUTS]

    def arguments(self) -> dict:
        """Of the op, by name, with exact statistics; of a forward with others, too."""
        given = self.tensors
        settings = {"modulate": self.factor, "weight_offset": self.weight_offset, "normalized_shape": (self.cols,)}
        if not self.forward:
            return given | statistics_of(self.norm, given["x"]) | settings | {"output_mask": self.mask}
        return given | settings | {"x": given.get("branch", given["x"]), "eps": EPS, "rounds_sum": self.gate is None}

    @property
    def operands(self) -> Operands:
        return operands_of(self.op, (), self.arguments())

    @property
    def call(self) -> ForwardCall | BackwardCall:
        return check(self.operands)

    def check(self, outputs: tuple[Tensor | None, ...]) -> None:
        if self.forward:
            assert_near(self.operands, outputs, forward(self.operands))
        else:
            assert_near(self.operands, outputs, backward(self.operands), summed)


def forward_of(
    norm: str, suffix: str, *sizes: int, shift: str | None = TOKEN, gate: str = ALL, added: torch.dtype = FP32, **more
) -> Modulated:
    """A forward with the operands that its op has."""
    op, fields = OPS[f"{norm}_norm_fwd{suffix}"], {"shift": shift, "gate": gate, "residual": added}
    fields = {name: each if op.slot(name) else None for name, each in fields.items()}
    fields = {"added": fields.pop("residual"), "factor": op.form.modulate} | fields | more
    return Modulated(norm, *sizes, **fields, forward=suffix)


def some(*cases: Modulated) -> list[Modulated]:
    assert len({str(each) for each in cases}) == len(cases)
    return list(cases)


# Rows and columns that end within a tile, dtypes, kinds of modulations, absent operands, unwanted gradients.
PORTABLE = some(
    Modulated("layer", 3, 5, 77),
    Modulated("rms", 2, 9, 64, shift=None, dtype=FP16, modulation=FP16),
    Modulated("layer", 4, 3, 40, gate=SAMPLE, modulation=BF16),
    Modulated("layer", 9, 3, 77, gate=SAMPLE),
    Modulated("rms", 2, 7, 72, gate=ALL, added=FP32, parameters=FP32),
    Modulated("layer", 2, 6, 64, parameters=BF16, weight_offset=1.0, added=BF16),
    Modulated("rms", 1, 8, 64, factor="tanh", shift=None, parameters=BF16),
    Modulated("layer", 2, 5, 77, TOKEN, TOKEN, TOKEN, modulation=BF16, added=BF16),
    Modulated("rms", 3, 4, 64, TOKEN, SAMPLE, ALL, parameters=FP32),
    Modulated("layer", 2, 5, 40, ALL, SAMPLE, TOKEN, FP32),
    Modulated("rms", 3, 3, 64, SAMPLE, TOKEN, factor="identity"),
    Modulated("layer", 3, 1, 64, gate=SAMPLE),
    Modulated("layer", 1, 1, 40),
    Modulated("layer", 2, 5, 64, gate=SAMPLE, unwanted=("dx",)),
    Modulated("rms", 2, 5, 64, gate=SAMPLE, parameters=FP32, unwanted=("dbranch", "dscale", "dbias")),
    Modulated("layer", 2, 5, 64, unwanted=("dx", "dshift")),
    Modulated("layer", 2, 5, 64, parameters=FP32, unwanted=("dx", "dscale", "dshift")),
    Modulated("rms", 2, 5, 64, unwanted=("dscale", "dshift")),
    Modulated("layer", 2, 5, 72, TOKEN, TOKEN, unwanted=("dx", "dscale")),
)
