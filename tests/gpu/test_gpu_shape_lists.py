"""Shapes for which such schedules were published, or on which they have failed, under every variant."""

from __future__ import annotations

import pytest
import torch
from calls import run, run_backward
from cases import BF16, FP32, NORMS, make_case
from test_gpu_variants import planned

import fusednorm
from fusednorm.host import fallback, gpus
from fusednorm.operands import ForwardOperands
from fusednorm.problem.calls import check_forward
from fusednorm.tools.oracle import assert_outputs_close, make_inputs

pytestmark = pytest.mark.gpu

VARIANTS = ("multi_wave", "pipelined", "warp_specialized")
DTYPES = [(BF16, BF16, BF16), (FP32, FP32, FP32)]
# Norms and dtypes in turn: a width has three cases of the four, one for each variant.
FOUR = [(norm, mix) for norm in NORMS for mix in DTYPES]
EVERY_256 = [
    (make_case(norm, (2048, 256 * at), mix), variant)
    for at in range(4, 33)
    for variant, (norm, mix) in zip(VARIANTS, (FOUR * 2)[at % 4 :], strict=False)
]
FORWARD_WIDTHS = (768, 1024, 1280, 1536, 1600, 2048, 2560, 4096, 5120, 6656, 8192, 12288, 18432)
FORWARDS = [
    make_case(norm, shape, mix)
    for at, shape in enumerate([*((rows, cols) for cols in FORWARD_WIDTHS for rows in (66, 2048)), (2049, 10240)])
    for norm, mix in zip(NORMS, DTYPES[:: 1 if at % 2 else -1], strict=True)
]
# The norms of models on which automatic choices of schedules have failed: Gemma, Mistral, StableCode and others.
OF_MODELS = [
    make_case("rms", (1, 4096, 3072)),
    make_case("layer", (147_456, 128)),
    make_case("rms", (14, 2048, 2048)),
    make_case("layer", (1, 16_384, 2560)),
    make_case("layer", (16_384, 2048)),
]


def assert_planned(case, inputs, outputs, variant) -> None:
    """Asserts that the variant ran; rows of more than 8192 columns may have no kernel of this variant."""
    plan = planned(case, inputs, outputs.mean, outputs.rstd)
    assert plan.variant == variant or case.cols > 8192


@pytest.mark.parametrize("case, variant", EVERY_256, ids=str)
def test_every_256th_width_is_right_and_reads_its_statistics_at_any_stride(case, variant):
    inputs = make_inputs(case, "cuda")
    with fusednorm.force(variant):
        outputs = run(case, inputs)
        assert_planned(case, inputs, outputs, variant)
        mean, rstd = (None if s is None else s.expand(-1, 3).contiguous()[:, 1] for s in (outputs.mean, outputs.rstd))
        again = run_backward(case, inputs, mean, rstd)
    assert_outputs_close(outputs, case, inputs)
    for name in ("dx", "dweight", "dbias"):
        got, want = getattr(again, name), getattr(outputs, name)
        assert want is None or torch.equal(got, want), name


@pytest.mark.parametrize("variant", ["multi_wave", "pipelined"])
@pytest.mark.parametrize("case", FORWARDS, ids=str)
def test_forwards_of_few_and_many_rows_are_right(case, variant):
    inputs = make_inputs(case, "cuda")
    with fusednorm.force(variant):
        call = check_forward(
            ForwardOperands(case.norm, inputs.x, case.normalized_shape, inputs.weight, inputs.bias, case.eps)
        )
        assert fallback.choose(call.problem, call.rows, gpus.spec_of(inputs.x.device)).plan.variant == variant
        outputs = run(case, inputs)
    assert_outputs_close(outputs, case, inputs)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", OF_MODELS, ids=str)
def test_norms_of_models_are_right(case, variant):
    inputs = make_inputs(case, "cuda")
    with fusednorm.force(variant):
        outputs = run(case, inputs)
        assert_planned(case, inputs, outputs, variant)
    assert_outputs_close(outputs, case, inputs)


@pytest.mark.parametrize("shape", [(1, 2048), (2048, 1), (1, 300, 1, 64), (300, 1, 1, 64), (1, 1, 1, 8)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("norm", NORMS)
def test_dims_of_size_one_are_right_wherever_they_stand(norm, variant, shape):
    case = make_case(norm, shape)
    inputs = make_inputs(case, "cuda")
    with fusednorm.force(variant):
        assert_outputs_close(run(case, inputs), case, inputs)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("norm", NORMS)
def test_two_streams_at_once_do_not_disturb_each_other(norm, variant):
    """Each stream has its own data, and neither waits for the other."""
    cases = [make_case(norm, (3001, 2048)), make_case(norm, (1024, 4096))]
    inputs = [make_inputs(case, "cuda") for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    with fusednorm.force(variant):
        wanted = [run(case, each) for case, each in zip(cases, inputs, strict=True)]
        torch.cuda.synchronize()
        got = []
        for _ in range(10):
            for case, each, stream in zip(cases, inputs, streams, strict=True):
                with torch.cuda.stream(stream):
                    got.append(run(case, each))
        torch.cuda.synchronize()
    for number, outputs in enumerate(got):
        want = wanted[number % 2]
        for name in ("y", "mean", "rstd", "dx", "dweight", "dbias"):
            a, b = getattr(outputs, name), getattr(want, name)
            assert (a is None and b is None) or torch.equal(a, b), name
    for case, each, outputs in zip(cases, inputs, wanted, strict=True):
        assert_outputs_close(outputs, case, each)
