"""What a norm does beside normalizing rows, as a value: the form.

Every norm takes four steps, of which only the second is not by element:

    h = combine(x, ...)         nothing, x + residual or x * act(gate)
    x_hat = normalize(h)        LayerNorm or RMSNorm of a row
    u = x_hat * (weight_offset + weight) + bias
    y = finish(u, ...)          nothing, u + residual or u * act(gate)

A FormSpec names the steps. An op has one, a problem, a plan and a launch carry it on, and the kernels look up the
functions of its steps (rowmath.py: form_of). The planner asks for counts alone, which are those of the steps.
"""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """What a step costs beside the plain norm's traffic."""

    rows_in: int = 0  # tensors of x's shape that it reads
    rows_out: int = 0  # and that it writes
    reads_u: bool = False  # whether its gradients need u, and so weight and bias


COMBINE = {  # the sum is an output: the next residual
    "": Step(),
    "add": Step(rows_in=1, rows_out=1),
    "gate": Step(rows_in=1),
}
FINISH = {"": Step(), "add": Step(rows_in=1), "gate": Step(rows_in=1, reads_u=True)}
ACTIVATIONS = "silu", "sigmoid"  # of a gate


class FormSpec(NamedTuple):
    """A form. The default is the plain norm, y = x_hat * weight + bias."""

    name: str = ""  # of functions that a norm from outside the package has registered
    combine: str = ""  # a name among COMBINE
    rounds_sum: bool = True  # whether the sum that is normalized is the one that is stored
    weight_offset: float = 0.0  # added to the weight in the accumulation dtype, if there is a weight
    rounds_x_hat: bool = False  # to x's dtype, before the weight
    finish: str = ""  # a name among FINISH
    activation: str = "silu"  # of the gate, if there is one: a name among ACTIVATIONS

    @property
    def rows_before(self) -> int:
        """How many row tensors are read for h. They come before those that are read for y."""
        return COMBINE[self.combine].rows_in

    @property
    def rows_in(self) -> int:
        return self.rows_before + FINISH[self.finish].rows_in

    @property
    def rows_out(self) -> int:
        return COMBINE[self.combine].rows_out + FINISH[self.finish].rows_out

    @property
    def reads_u(self) -> bool:
        return FINISH[self.finish].reads_u


PLAIN = FormSpec()
ROUNDINGS = {"once": False, "x_hat": True}  # FormSpec.rounds_x_hat, as callers name it
