"""An op is a row of the table and a formula: its schema, fake, checks, key, placements and derivatives follow."""

from __future__ import annotations

import formulas
import pytest
import torch

from fusednorm import autograd, operands, ops, sharding
from fusednorm.host import key
from fusednorm.operands import (
    BACKWARD,
    FORWARD,
    GRAD_OUT,
    MASK,
    RSTD,
    SHAPE,
    WANTS_STATISTICS,
    WEIGHT,
    Op,
    Output,
    Role,
    Slot,
    X,
)

GATE = Slot("gate", Role.ROWS)
EPS = Slot("eps", Role.EPS, default=1e-6)
FWD = Op(
    "rms", FORWARD, (X, SHAPE, GATE, WEIGHT, EPS, WANTS_STATISTICS), (operands.Y_, operands.RSTD_), suffix="_gated",
    form=None,
)  # fmt: skip
GRADS = operands.DX_, operands.DWEIGHT_, Output("dgate", Role.ROWS, like="gate")
BWD = Op("rms", BACKWARD, (GRAD_OUT, X, SHAPE, RSTD, GATE, WEIGHT, MASK), GRADS, suffix="_gated", form=None)


def forward(x, shape, gate, weight, eps):
    y, rstd = formulas.rms_norm(x, shape, weight, eps)
    return y * gate, rstd


def backward(grad_out, x, shape, rstd, gate, weight, mask):
    dx, dweight, _ = formulas.norm_backward(grad_out * gate, x, shape, None, rstd, weight, None, (*mask[:2], False))
    return dx, dweight, grad_out * x * rstd * (1 if weight is None else weight) if mask[2] else None


@pytest.fixture(scope="module", autouse=True)
def gated():
    """RMSNorm times a gate, as an op."""
    autograd.add(FWD, forward)
    autograd.add(BWD, backward)
    yield torch.ops.fusednorm.rms_norm_fwd_gated.default
    for op in (FWD, BWD):
        del operands.OPS[op.name]


def given(dtype=torch.float64, grad=True, rows=(2, 3)):
    x, gate = (torch.randn(*rows, 8, dtype=dtype, requires_grad=grad) for _ in range(2))
    return x, [8], gate, torch.randn(8, dtype=dtype, requires_grad=grad)


def test_schema_has_its_operands_and_outputs():
    assert ops.schema_of(BWD) == (
        "rms_norm_bwd_gated(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor rstd, Tensor gate,"
        " Tensor? weight=None, bool[3] output_mask=[True, True, True]) -> (Tensor dx, Tensor dweight, Tensor dgate)"
    )


def test_it_runs_has_a_fake_and_derivatives_of_any_order(gated):
    torch.library.opcheck(gated, given(), test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    tensors = [given()[at] for at in (0, 2, 3)]
    torch.autograd.gradcheck(lambda x, *others: gated(x, [8], *others), tensors, fast_mode=True)
    torch.autograd.gradgradcheck(lambda x, *others: gated(x, [8], *others)[0], tensors, fast_mode=True)


def test_it_checks_its_operands_and_refuses_other_devices(gated):
    x, shape, gate, weight = given(grad=False)
    with pytest.raises(RuntimeError, match=r"^rms_norm_fwd_gated: gate must have shape \(2, 3, 8\), got \(3, 8\)"):
        gated(x, shape, gate[0], weight)
    with pytest.raises(RuntimeError, match=r"^rms_norm_fwd_gated: gate must have shape"):
        gated(*(each.to("meta") if isinstance(each, torch.Tensor) else each for each in (x, shape, gate[0], weight)))
    with pytest.raises(
        RuntimeError, match=r"^rms_norm_bwd_gated: output_mask must have one flag per output, got \[True"
    ):
        torch.ops.fusednorm.rms_norm_bwd_gated(x, x, shape, torch.ones(6), gate, weight, [True, True])


def test_key_says_how_its_operands_lie_in_memory():
    x, shape, gate, weight = given(grad=False)
    calls = [operands.operands_of(FWD.name, (x, shape, each, weight), {}) for each in (gate, gate.clone())]
    assert key.look(calls[0])[0] == key.look(calls[1])[0]
    others = gate.float(), gate.transpose(0, 1).contiguous().transpose(0, 1)
    for other in others:
        assert key.look(calls[0]._replace(gate=other))[0] != key.look(calls[0])[0]
    plain = operands.operands_of("rms_norm_fwd", (x, shape, weight, 1e-6), {})
    assert key.look(plain)[0] != key.look(calls[0])[0]
    assert key.fit(calls[0], x.shape, 6) and not key.fit(calls[0]._replace(gate=gate[:1]), x.shape, 6)


def test_its_rows_are_sharded_and_the_sums_over_them_partial():
    x, shape, gate, weight = given(grad=False)
    op = torch.ops.fusednorm.rms_norm_bwd_gated.default
    outputs, placed, dims = sharding.placed(
        op, (x, x, shape, torch.ones(2, 3, 1), gate, weight, [True, True, False]), {}
    )
    rows, whole = sharding.ROWS, sharding.WHOLE
    assert placed == {"grad_out": rows, "x": rows, "rstd": rows, "weight": whole, "gate": rows} and dims == 2
    assert outputs == {"dx": rows, "dweight": sharding.SUM, "dgate": None}
