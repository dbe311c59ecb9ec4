"""torch.compile traces every public function and module as one graph. What Dynamo traces differs by release, so
tests/pairs.py runs this with each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusednorm
from fusednorm import force
from fusednorm.host.kernel_devices import kernels_on

COLS, HEAD = 24, 16
EXPLAIN = "explain explain_column_sum explain_qk_norm explain_qk_norm_packed"
NO_CALLS = f"batch_invariant {EXPLAIN} functional layers sm_margin warmup warmup_qk_norm warmup_qk_norm_packed"


def made(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


ROWS, SAMPLE, TABLE, WEIGHT = made(2, 5, COLS), made(2, COLS), made(3, COLS), made(COLS)
INDEX = torch.tensor([[0, 1, 2, 1, 0]] * 2)
Q, K, QKV, COS_SIN = made(2, 5, 4, HEAD), made(2, 5, 2, HEAD), made(2, 5, 8 * HEAD), (made(5, HEAD), made(5, HEAD))
PACKED = made(2, 5, 60), (4, 28), (30, 54), WEIGHT
OF_SUM = {"residual": ROWS, "gate": SAMPLE}


def forced(x: Tensor) -> Tensor:
    with force("multi_wave"):
        return fusednorm.functional.rms_norm(fusednorm.functional.layer_norm(x, (COLS,), WEIGHT, eps=1), [COLS])


CALLS = {  # of x
    "LayerNormFunction": lambda x: fusednorm.LayerNormFunction.apply(x, (COLS,), WEIGHT),
    "RMSNormFunction": lambda x: fusednorm.RMSNormFunction.apply(x, (COLS,), WEIGHT),
    "force": forced,
    "column_sum": lambda x: fusednorm.column_sum([x, x], total=True),
    "affine_layer_norm": lambda x: fusednorm.affine_layer_norm(x, WEIGHT, weight_offset=1),
    "affine_rms_norm": lambda x: fusednorm.affine_rms_norm(x, WEIGHT, rounding="x_hat"),
    "add_layer_norm": lambda x: fusednorm.add_layer_norm(x, ROWS, WEIGHT, normalize_rounded=False),
    "add_rms_norm": lambda x: fusednorm.add_rms_norm(x, None, WEIGHT, residual_dtype=torch.float32),
    "layer_norm_add": lambda x: fusednorm.layer_norm_add(x, ROWS, gate=SAMPLE, rounding="steps"),
    "layer_norm_add_layer_norm": lambda x: fusednorm.layer_norm_add_layer_norm(x, ROWS, WEIGHT, bias=WEIGHT),
    "rms_norm_add_rms_norm": lambda x: fusednorm.rms_norm_add_rms_norm(x, ROWS, WEIGHT, WEIGHT, rounding="x_hat"),
    "rms_norm_add": lambda x: fusednorm.rms_norm_add(x, ROWS, WEIGHT, gate=ROWS, gate_activation="tanh"),
    "ada_layer_norm": lambda x: fusednorm.ada_layer_norm(x, TABLE, TABLE, index=INDEX, residual=ROWS),
    "ada_rms_norm": lambda x: fusednorm.ada_rms_norm(x, SAMPLE, ROWS, **OF_SUM, weight=WEIGHT, rounding="steps"),
    "layer_norm_gated": lambda x: fusednorm.layer_norm_gated(x, ROWS, group_size=8),
    "rms_norm_gated": lambda x: fusednorm.rms_norm_gated(x, ROWS, WEIGHT, norm_before_gate=False),
    "layer_norm_gated_packed": lambda x: fusednorm.layer_norm_gated_packed(*PACKED),
    "rms_norm_gated_packed": lambda x: fusednorm.rms_norm_gated_packed(*PACKED, group_size=8, activation="sigmoid"),
    "qk_norm": lambda x: fusednorm.qk_norm(Q, K, rotary=COS_SIN, norm="layer"),
    "qk_norm of all heads": lambda x: fusednorm.qk_norm(Q, K, Q[0, 0], K[0, 0], rotary=COS_SIN),
    "qk_norm_packed": lambda x: fusednorm.qk_norm_packed(QKV, 4, 2, rotary=COS_SIN, grouped=True),
}
MODULES = {  # what each takes behind x
    "AffineLayerNorm": (), "AffineRMSNorm": (), "AddLayerNorm": (ROWS,), "AddRMSNorm": (), "LayerNorm": (),
    "RMSNorm": (), "LayerNormAdd": (ROWS,), "RMSNormAdd": (ROWS, SAMPLE), "AdaLayerNorm": (SAMPLE, ROWS),
    "AdaRMSNorm": (SAMPLE, None, ROWS, SAMPLE), "LayerNormGated": (ROWS,), "RMSNormGated": (ROWS,),
}  # fmt: skip


def of(module: torch.nn.Module, *more: Tensor | None) -> Callable:
    return lambda x: module(x, *more)


CALLS |= {name: of(getattr(fusednorm, name)(COLS), *more) for name, more in MODULES.items()}
CALLS["QKNorm"] = lambda x: QK_NORM(Q, K, COS_SIN)
QK_NORM = fusednorm.QKNorm(HEAD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_is_one_graph_and_computes_the_same(call, dtype):
    torch._dynamo.reset()
    x = ROWS.to(dtype).requires_grad_()
    with kernels_on("cpu"), force("reference"):
        want, got = call(x), torch.compile(call, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(got, want)


def test_no_public_name_is_left_out():
    assert set(fusednorm.__all__) == {name.split()[0] for name in CALLS} | set(NO_CALLS.split())
