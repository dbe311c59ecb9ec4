"""The forms on a GPU, over the table: errors against float64, layouts, graphs, compiled code."""

from __future__ import annotations

import contextlib

import pytest
import torch
from cases import NORMS
from norm_forms import (
    BF16,
    EPS,
    FACES,
    FP16,
    FP32,
    FP64,
    assert_errs_no_more_than_plain_code,
    forms,
    gradients,
    leaves,
    run,
)
from ties import check_that_y_is_rounded_once, operands_with_ties

import fusednorm
from bench.written import modulations_of, rows_of
from fusednorm.operands import FORM_OPS

pytestmark = pytest.mark.gpu
SHAPES = [(640, 4096), (3, 5, 1000), (33, 77), (2048, 768), (64, 16384), (16, 65536), (1, 128)]
DTYPES = [(BF16,), (FP16, FP32, FP32), (BF16, FP32, BF16), (FP32, BF16, FP64), (FP64,)]
VARIANTS = [  # and a number of columns
    ("multi_wave", 2048),
    ("async_copy", 2048),
    ("async_copy", 9216),
    ("pipelined", 2048),
    ("warp_specialized", 2048),
]


def in_turn(op, at: int) -> bool:
    """Whether it is the turn of this form's norm. LayerNorm and RMSNorm share their schedules, and the compiler takes
    most of a test's time."""
    forms_of = [each for each in FORM_OPS if each.norm == op.norm]
    return (forms_of.index(op) + at) % 2 == NORMS.index(op.norm)


CASES = [  # (op, shape, dtypes, offset): each mix of dtypes has both offsets with both norms
    (op, shape, dtypes, float((at + which) % 2))
    for at, shape in enumerate(SHAPES)
    for which, dtypes in enumerate(DTYPES)
    for op in FORM_OPS
    if in_turn(op, at // 2 + which) and (dtypes == (BF16,) or (at + which) % 3)
]


def name_of(value) -> str:
    return getattr(value, "name", str(value))


@pytest.mark.parametrize("op, shape, dtypes, offset", CASES, ids=name_of)
def test_outputs_and_gradients_err_no_more_than_those_of_the_plain_code(op, shape, dtypes, offset):
    if modulations_of(op) and dtypes[-1] == FP64 != dtypes[0]:
        pytest.skip("modulations in float64 of other rows run as tensor code")
    of = dtypes if len(rows_of(op)) > 1 else dtypes[:1] + dtypes[2:]
    assert_errs_no_more_than_plain_code(op, leaves(op, *of, shape=shape, device="cuda"), offset)


@pytest.mark.parametrize(
    "op, variant, cols",
    [(op, *each) for at, each in enumerate(VARIANTS) for op in FORM_OPS if in_turn(op, at)],
    ids=name_of,
)
def test_every_variant_computes_every_form(op, variant, cols):
    given = leaves(op, BF16, shape=(300, cols), device="cuda")
    with fusednorm.force(variant):
        assert_errs_no_more_than_plain_code(op, given, 1.0)


@forms
def test_rows_in_any_layout_give_the_bits_of_contiguous_rows(op):
    given = leaves(op, BF16, shape=(32, 6, 512), device="cuda")
    with fusednorm.force("multi_wave"):  # a ring copies no rows at two nested strides
        assert_layouts_give_the_same_bits(op, given)


def assert_layouts_give_the_same_bits(op, given):
    want = run(op, given)
    for layout in (
        lambda each: torch.cat([each, each], -1)[..., :512],
        lambda each: each.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        laid = {name: layout(each.detach()) if name in rows_of(op) else each for name, each in given.items()}
        assert all(map(torch.equal, run(op, laid), want))


@forms
def test_captured_calls_and_calls_beside_free_sms_give_the_same(op):
    given = leaves(op, BF16, shape=(2048, 1024), device="cuda")
    want = run(op, given)
    wanted = gradients(want, given)
    want = [each.detach() for each in want]  # a graph that is alive has nodes of the leaves, which no capture may use
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        gradients(run(op, given), given)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = run(op, given)
        grads = gradients(got, given)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, (*got, *grads), (*want, *wanted)))
    with fusednorm.sm_margin(16):
        for ours, right in zip(gradients(run(op, given), given), wanted, strict=True):
            torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)


@forms
def test_compiled_code_computes_the_same_with_inductor_or_without(op):
    torch._dynamo.reset()
    enabled = op.norm == "layer"  # each form has a LayerNorm and an RMSNorm
    given = leaves(op, BF16, shape=(512, 1024), device="cuda")
    want = run(op, given)
    wanted = gradients(want, given)
    with fusednorm.enable_inductor() if enabled else contextlib.nullcontext():
        got = torch.compile(lambda given: run(op, given), fullgraph=True)(given)
        grads = gradients(got, given)
    # Inductor does not round a sum before it normalizes it. A scale multiplies the difference.
    near = 1e-1 if modulations_of(op) else 2e-2
    for ours, right in zip((*got, *grads), (*want, *wanted), strict=True):
        torch.testing.assert_close(ours, right, rtol=2e-2, atol=near)


@pytest.mark.parametrize("cols", [128, 2048, 4096, 8192])
def test_rounding_of_x_hat_gives_the_bits_of_transformers_code(cols):
    x, weight = torch.randn(4096, cols, device="cuda", dtype=BF16), torch.randn(cols, device="cuda", dtype=BF16)
    wide = x.float()
    want = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(BF16)
    got = FACES["rms_norm_fwd_affine"][0](x, weight, eps=EPS, rounding="x_hat")
    assert int((got != want).sum()) <= got.numel() // 1000


@pytest.mark.parametrize("variant, cols", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_weight_and_a_bias_of_16_bits_take_one_rounding(dtype, variant, cols):
    given = operands_with_ties(128, cols, dtype, "cuda")
    with fusednorm.force(variant):
        outputs = torch.ops.fusednorm.layer_norm_fwd_affine(
            given.x, [cols], given.weight, given.bias, given.eps, rounds_x_hat=True
        )
    check_that_y_is_rounded_once(given, outputs)
