"""What a norm does beside normalizing rows, as a value: the form.

Every norm takes five steps, of which only the second is not by element:

    h = combine(x, ...)         as COMBINE says
    x_hat = normalize(h)        LayerNorm or RMSNorm of a row
    u = x_hat * (weight_offset + weight) + bias
    v = modulate(u, ...)        u * factor(scale) + shift, with a factor of MODULATE
    y = finish(v, ...)          as FINISH says

With groups, a row is normalized in as many parts of adjacent columns, each by itself. A form that normalizes again has
the norm of y as another output.

A FormSpec names the steps. An op has one, a problem, a plan and a launch carry it on, and the kernels look up the
functions of its steps (rowmath.py: form_of). The planner asks for counts alone, which are those of the steps.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple, TypedDict


class Step(NamedTuple):
    """What a step costs beside the plain norm's traffic."""

    rows_in: int = 0  # tensors of x's shape that it reads
    rows_out: int = 0  # and that it writes
    reads_u: bool = False  # whether its gradients need u, and so weight and bias
    activates: bool = False  # whether it takes an activation of a gate


COMBINE = {
    "": Step(),  # x
    "add": Step(rows_in=1, rows_out=1),  # x + residual; a sum is an output: the next residual
    "gate": Step(rows_in=1, activates=True),  # x * act(gate)
    "add_gated": Step(rows_in=1, rows_out=1),  # residual + gate * x
    "summands": Step(),  # of a backward: h is a sum, of which each summand gets the gradient in its own dtype
}
FINISH = {
    "": Step(),  # v
    "add": Step(rows_in=1),  # v + residual
    "gate": Step(rows_in=1, reads_u=True, activates=True),  # v * act(gate)
}
ACTIVATIONS = "silu", "sigmoid"  # of a gate
MODULATE = "", "one_plus", "identity", "tanh"  # the factors that a scale may stand for; the first is no modulation
MODULATIONS = "scale", "shift", "gate"  # their names, where a norm is modulated


class FormSpec(NamedTuple):
    """A form. The default is the plain norm, y = x_hat * weight + bias."""

    name: str = ""  # of functions that a norm from outside the package has registered
    combine: str = ""  # a name among COMBINE
    rounds_sum: bool = True  # whether the sum that is normalized is the one that is stored
    weight_offset: float = 0.0  # added to the weight in the accumulation dtype, if there is a weight
    rounds_x_hat: bool = False  # to x's dtype, before the weight; u likewise, before a gate
    modulate: str = ""  # a name among MODULATE
    finish: str = ""  # a name among FINISH
    activation: str = "silu"  # of the gate, if there is one: a name among ACTIVATIONS
    groups: int = 1  # of the columns: each has a mean and an rstd of its own
    rounds_steps: bool = False  # every step of combine, modulate and finish to the dtype that torch gives it
    again: bool = False  # whether y, as it is stored, is normalized again, with parameters of its own: another output

    @property
    def changed(self) -> dict[str, Any]:
        """What it has beside the plain norm."""
        return {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}

    @property
    def rows_before(self) -> int:
        """How many row tensors are read for h. They come before those that are read for y."""
        return COMBINE[self.combine].rows_in

    @property
    def rows_in(self) -> int:
        return self.rows_before + FINISH[self.finish].rows_in

    @property
    def rows_out(self) -> int:
        return COMBINE[self.combine].rows_out + FINISH[self.finish].rows_out + self.again

    @property
    def modulates(self) -> bool:
        return bool(self.modulate)

    @property
    def reads_u(self) -> bool:
        return FINISH[self.finish].reads_u or self.modulates

    @property
    def activates(self) -> bool:
        return COMBINE[self.combine].activates or FINISH[self.finish].activates

    @property
    def rounds_u(self) -> bool:
        """Whether u is rounded before a gate, to the promoted dtype of x, weight and bias, if that has 16 bits."""
        return self.rounds_x_hat and FINISH[self.finish].activates

    @property
    def late(self) -> tuple[str, ...]:
        """Names of the row tensors that a backward reads for gradients alone, and not for h or the gradient of u."""
        return ("branch", "gate") if self.modulates else ()


PLAIN = FormSpec()
CHOICES = {"modulate": MODULATE, "activation": ACTIVATIONS}  # the values of fields that operands set by name
ROUNDINGS = {"once": False, "x_hat": True}  # FormSpec.rounds_x_hat, as callers name it
STEPS = "steps"  # FormSpec.rounds_steps, as callers of modulated norms name it


class Settings(TypedDict, total=False):
    """What callers set of a form, by the names that arguments of its function have."""

    weight_offset: float
    rounding: str
    normalize_rounded: bool
    activation: str
    group_size: int | None
    gate_activation: str | None


FIELDS = {"normalize_rounded": "rounds_sum", "group_size": "groups", "gate_activation": "modulate"}  # of FormSpec


def fields_of(setting: str, value: Any) -> dict[str, Any]:
    """What a setting says of a FormSpec; a group_size stands for the number of groups."""
    if setting == "rounding":
        return {"rounds_x_hat": ROUNDINGS.get(value, False), "rounds_steps": value == STEPS}
    return {FIELDS.get(setting, setting): value}


def require_one_of(asker: str, name: str, value: str, known: Collection[str]) -> None:
    """Raises ValueError for another value."""
    if value not in known:
        raise ValueError(f"{asker}: {name} must be one of {', '.join(known)}, got {value!r}")
