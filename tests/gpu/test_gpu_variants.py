"""Every variant of the kernels, forced: each must give right results, also where the planner would not choose it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import assert_same_bits, overwrite, run, run_backward
from cases import BF16, FP16, FP32, guarded_buffers, make_case, rotate

import fusednorm
from fusednorm.host import fallback, gpus
from fusednorm.operands import BackwardOperands
from fusednorm.problem.calls import check_backward
from fusednorm.tools.oracle import assert_outputs_close, fused, make_inputs

pytestmark = pytest.mark.gpu

RINGS = ("async_copy", "pipelined", "warp_specialized")
DTYPES = [(BF16, BF16, BF16), (FP32, FP32, FP32), (BF16, FP32, BF16), (FP16, FP16, FP16)]
ONE_CTA = rotate([(2048, 1024), (2048, 2304), (2049, 8192), (1031, 5120), (216, 1600), (300, 768)], DTYPES)
CLUSTERS = rotate([(300, 12288), (301, 16384), (128, 32768), (67, 65536), (33, 131072), (40, 262144)], DTYPES[:1])
# Rows that end within a chunk; only 9216 columns are nine whole chunks.
TAILS = rotate([(300, 2816), (2049, 3328), (1031, 4352), (601, 8448), (600, 9216)], DTYPES)
TAILS += rotate([(2049, 8448), (130, 10496), (67, 16640), (33, 49408), (129, 98560)], DTYPES[:1])
# Wide rows that threads copy themselves: of up to 14 chunks, with the last one whole and not.
COPIED = rotate([(400, 9216), (301, 10248), (300, 14336), (140, 16384), (133, 20480), (140, 28672)], DTYPES[:1])
COPIED += rotate([(600, 7680), (300, 8200), (131, 10240), (300, 14336)], DTYPES[1:3])
# Each thread holds many columns of these rows, in up to 16 chunks.
MANY_CHUNKS = rotate([(1500, 5376), (1401, 6656), (1500, 7040), (1402, 11008), (300, 43520), (301, 61440)], DTYPES[::3])
MANY_CHUNKS += rotate([(600, 67584), (140, 122880), (40, 204800), (33, 237568), (33, 262144)], DTYPES[:2])
MANY_CHUNKS += rotate([(33, 131104), (33, 163856), (40, 239136)], DTYPES[:2])  # TMA boxes of 64 and 32 bytes
CHUNKED = TAILS + MANY_CHUNKS  # each shape with one norm, in turn: they share a schedule
CHUNKED = [CHUNKED[2 * at + at // 2 % 2] for at in range(len(CHUNKED) // 2)]


def planned(case, inputs, mean, rstd):
    """The plan of the backward under the current `force`."""
    arguments = (case.norm, inputs.grad_out, inputs.x, case.normalized_shape, mean, rstd, inputs.weight, inputs.bias)
    call = check_backward(BackwardOperands(*arguments, (True, inputs.weight is not None, inputs.bias is not None)))
    return fallback.choose(call.problem, call.rows, gpus.spec_of(inputs.x.device)).plan


@pytest.mark.parametrize("variant", RINGS)
@pytest.mark.parametrize("case", ONE_CTA, ids=str)
def test_a_forced_variant_runs_and_is_right(case, variant):
    inputs = make_inputs(case, "cuda")
    with fusednorm.force(variant):
        outputs = run(case, inputs)
        assert planned(case, inputs, outputs.mean, outputs.rstd).variant == variant
    assert_outputs_close(outputs, case, inputs)


@pytest.mark.parametrize("case", CLUSTERS, ids=str)
def test_rows_shared_by_a_cluster_are_right(case):
    inputs = make_inputs(case, "cuda")
    with fusednorm.force("pipelined"):
        outputs = run(case, inputs)
        for _ in range(10):  # a missing wait in an exchange shows only now and then
            assert_same_bits(fused(case, inputs), outputs)
    assert_outputs_close(outputs, case, inputs)


@pytest.mark.parametrize("case", CHUNKED, ids=str)
def test_rows_of_many_chunks_and_those_whose_last_comes_by_itself_are_right(case):
    inputs = make_inputs(case, "cuda")
    with fusednorm.force("pipelined"):
        outputs = run(case, inputs)
        for _ in range(5):
            assert_same_bits(fused(case, inputs), outputs)
    assert_outputs_close(outputs, case, inputs)


@pytest.mark.parametrize("case", COPIED, ids=str)
def test_wide_rows_that_threads_copy_are_right(case):
    inputs = make_inputs(case, "cuda")
    with fusednorm.force("async_copy"):
        outputs = run(case, inputs)
        assert planned(case, inputs, outputs.mean, outputs.rstd).variant == "async_copy"
        for _ in range(5):
            assert_same_bits(fused(case, inputs), outputs)
    assert_outputs_close(outputs, case, inputs)


@pytest.mark.parametrize("variant", RINGS)
@pytest.mark.parametrize("offset", [None, -1, 0, 1, 997], ids=["one row", "SM-1", "SM", "SM+1", "SM+997"])
def test_any_number_of_rows_is_right_under_a_forced_variant(variant, offset, sm_count):
    rows = 1 if offset is None else sm_count + offset
    case = make_case("layer", (rows, 2048))
    inputs = make_inputs(case, "cuda")
    with fusednorm.force(variant):
        assert_outputs_close(run(case, inputs), case, inputs)


WITHOUT_DX = rotate([(4099, 4096), (20_000, 1000), (1, 2048), (300, 128), (17, 200), (2049, 8)], DTYPES)


@pytest.mark.parametrize("mask", [(False, True, True), (False, True, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("case", WITHOUT_DX, ids=str)
def test_parameter_gradients_alone_by_tma_are_right(case, mask):
    if case.norm == "rms" and not mask[1]:
        pytest.skip("RMSNorm has no bias")
    inputs = make_inputs(case, "cuda")
    ahead = run(case, inputs)
    with fusednorm.force("pipelined"):
        outputs = run_backward(case, inputs, ahead.mean, ahead.rstd, mask)
        again = run_backward(case, inputs, ahead.mean, ahead.rstd, mask)
    assert outputs.dx is None
    assert (outputs.dweight is not None, outputs.dbias is not None) == (mask[1], mask[2] and case.norm == "layer")
    assert_outputs_close(outputs, case, inputs)
    assert_same_bits(again, outputs)


@pytest.mark.parametrize("variant", ["multi_wave", "pipelined"])
@pytest.mark.parametrize("case", [*rotate([(300, 768), (1031, 5120)], DTYPES[:1]), *CLUSTERS], ids=str)
def test_a_forward_that_needs_no_gradient_writes_y_alone(case, variant):
    inputs = make_inputs(case, "cuda")
    norm = getattr(fusednorm.functional, f"{case.norm}_norm")
    parameters = [inputs.weight] if case.norm == "rms" else [inputs.weight, inputs.bias]
    with fusednorm.force(variant):
        want = run(case, inputs).y
        with guarded_buffers() as buffers:
            got = norm(inputs.x, case.normalized_shape, *parameters, case.eps)
    assert len(buffers) == 1
    assert torch.equal(got, want)


@pytest.mark.parametrize("variant", RINGS)
@pytest.mark.parametrize("mask", [(True, False, False), (True, True, False), (True, False, True)], ids=str)
def test_masks_hold_under_a_forced_variant(variant, mask):
    case = make_case("layer", (700, 2048))
    inputs = make_inputs(case, "cuda")
    mean, rstd = torch.ops.fusednorm.layer_norm_fwd(inputs.x, (2048,), inputs.weight, inputs.bias, case.eps)[1:]
    with fusednorm.force(variant):
        outputs = run_backward(case, inputs, mean, rstd, mask)
    assert tuple(o is not None for o in (outputs.dx, outputs.dweight, outputs.dbias)) == mask
    assert_outputs_close(outputs, case, inputs)


@pytest.mark.parametrize("variant", RINGS)
@pytest.mark.parametrize("layout", ["[M]", "[M, 1] strided", "16 bits"])
def test_row_statistics_are_read_in_every_layout_under_a_forced_variant(variant, layout):
    case = make_case("layer", (2048, 2048))
    inputs = make_inputs(case, "cuda")
    mean, rstd = torch.ops.fusednorm.layer_norm_fwd(inputs.x, (2048,), inputs.weight, inputs.bias, case.eps)[1:]
    change = {
        "[M]": lambda s: s.flatten(),
        "[M, 1] strided": lambda s: s.expand(2048, 3).contiguous()[:, :1],
        "16 bits": lambda s: s.half(),
    }[layout]
    mean, rstd = change(mean), change(rstd)
    with fusednorm.force(variant):
        got = run_backward(case, inputs, mean, rstd)
    with fusednorm.force("multi_wave"):
        want = run_backward(case, inputs, mean, rstd)
    for name in ("dx", "dweight", "dbias"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("variant", RINGS)
def test_a_forced_variant_that_cannot_run_leaves_the_planner_its_choice(variant):
    case = make_case("rms", (1024, 1023))  # rows of an odd number of bytes, which no ring copies
    inputs = make_inputs(case, "cuda")
    want = run(case, inputs)
    with fusednorm.force(variant):
        assert_same_bits(run(case, inputs), want)


@pytest.mark.parametrize("variant", RINGS)
def test_a_narrower_row_after_a_wider_one_gets_kernels_of_its_own(variant):
    with fusednorm.force(variant):
        for cols in (8192, 8190):  # the second is no multiple of a vector
            case = make_case("layer", (512, cols))
            inputs = make_inputs(case, "cuda")
            assert_outputs_close(run(case, inputs), case, inputs)


@pytest.mark.parametrize("variant", RINGS)
def test_the_choice_of_the_forward_reaches_the_backward_on_its_own_thread(variant):
    x = torch.randn(2048, 2048, device="cuda", dtype=BF16, requires_grad=True)
    weight = torch.ones(2048, device="cuda", dtype=BF16, requires_grad=True)
    with fusednorm.force(variant):
        y = fusednorm.functional.rms_norm(x, (2048,), weight, 1e-5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        y.sum().backward()
        torch.cuda.synchronize()
    assert any(event.key.startswith("backward") for event in profile.key_averages())
    assert x.grad is not None and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("variant", RINGS)
def test_graph_replays_follow_their_inputs_under_a_forced_variant(variant):
    case = make_case("layer", (1000, 4096))
    inputs, fresh = make_inputs(case, "cuda"), make_inputs(case, "cuda", seed=1)
    with fusednorm.force(variant):
        fused(case, inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = fused(case, inputs)
        overwrite(inputs, fresh)
        for name in ("y", "mean", "rstd", "dx", "dweight", "dbias"):
            getattr(outputs, name).fill_(float("nan"))
        graph.replay()
        assert_outputs_close(outputs, case, fresh)


@pytest.mark.parametrize("variant", ["multi_wave", *RINGS])
def test_two_hundred_row_counts_build_a_forced_variant_once(variant, builds_of_kernels):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 3000, (200,), generator=generator).tolist()
    weight = torch.ones(1280, device="cuda", dtype=BF16)
    x = torch.randn(3000, 1280, device="cuda", dtype=BF16)
    rstd = torch.ones(3000, 1, device="cuda")
    with fusednorm.force(variant):
        for count in rows:
            torch.ops.fusednorm.rms_norm_bwd(x[:count], x[:count], (1280,), rstd[:count], weight)
    assert len([name for name in builds_of_kernels if "finalize" not in name]) <= 1


@pytest.mark.parametrize("variant", RINGS)
@pytest.mark.parametrize("layout", ["row strided", "one gradient row for all", "one row of x for all"])
def test_rows_at_any_stride_are_read_in_place_under_a_forced_variant(variant, layout):
    case = make_case("layer", (1500, 2048))
    inputs = make_inputs(case, "cuda")
    if layout == "row strided":
        wide = torch.full((1500, 2048 + 64), float("nan"), device="cuda", dtype=BF16)
        inputs = replace(inputs, x=wide[:, 64:].copy_(inputs.x))
    elif layout == "one gradient row for all":
        inputs = replace(inputs, grad_out=inputs.grad_out[:1].expand(1500, 2048))
    else:
        inputs = replace(inputs, x=inputs.x[:1].expand(1500, 2048))
    with fusednorm.force(variant):
        outputs = run(case, inputs)
    assert_outputs_close(outputs, case, inputs)
