"""qk_norm on CUDA against float64 autograd of what models write: shapes, layouts, graphs, memory."""

from __future__ import annotations

from dataclasses import replace

import head_norms
import hf_models
import pytest
import torch
from cases import guarded_buffers
from head_norms import BF16, CASES, FP16, FP32, FP64, HeadCase, assert_errs_no_more_than_plain_code, gradients
from op_log import OpLog

import fusednorm
from fusednorm.heads.problem import Packing
from fusednorm.host import native

pytestmark = pytest.mark.gpu
SIZES = [
    HeadCase(cols=128, heads=32, kv_heads=8, tokens=700, rotary=128),
    HeadCase(cols=64, heads=7, kv_heads=1, tokens=3001, rotary=64, interleaved=True, table_dims="BS"),
    HeadCase(cols=256, heads=16, kv_heads=2, tokens=513, rotary=64, weight_offset=1.0, heads_first=True),
    HeadCase(cols=512, heads=4, kv_heads=4, tokens=100, norm="layer", rotary=512, norm_first=False),
    HeadCase(cols=96, heads=5, kv_heads=3, tokens=1, rotary=32, half_table=True),
    HeadCase(cols=128, heads=16, kv_heads=2, tokens=3001, rotary=128, table_dtype=BF16, norm="layer"),
    HeadCase(cols=128, heads=5, kv_heads=3, tokens=70, rotary=128, table_dtype=FP16, half_table=True, heads_first=True),
    HeadCase(cols=256, heads=7, kv_heads=1, tokens=999, rotary=256, table_dtype=BF16, interleaved=True, norm="layer"),
    HeadCase(cols=512, heads=3, kv_heads=1, tokens=999, norm="layer"),
    HeadCase(cols=512, heads=3, kv_heads=1, tokens=99, rotary=512, table_dtype=BF16, norm="layer"),
    HeadCase(cols=1024, heads=3, kv_heads=1, tokens=99, norm="layer"),
    *(HeadCase(cols=128, heads=16, kv_heads=2, tokens=3001, rotary=rotary, table_dtype=BF16, norm="layer",
               norm_first=norm_first) for rotary in (128, 32) for norm_first in (False, True)),
    HeadCase(cols=64, heads=7, kv_heads=1, tokens=999, rotary=64, table_dtype=FP16, norm="layer", norm_first=False,
             interleaved=True, heads_first=True),
    HeadCase(cols=256, heads=5, kv_heads=3, tokens=999, rotary=64, table_dtype=BF16, interleaved=True),
    HeadCase(cols=96, heads=5, kv_heads=3, tokens=999, rotary=96, table_dtype=BF16, interleaved=True, norm="layer"),
    HeadCase(cols=128, heads=5, kv_heads=3, tokens=999, rotary=64, norm="layer", norm_first=False),
    HeadCase(cols=512, heads=3, kv_heads=1, tokens=99, rotary=512, table_dtype=BF16, norm="layer", norm_first=False),
]  # fmt: skip
OF_PACKED = [
    replace(SIZES[0], dtype=BF16),
    replace(SIZES[0], dtype=BF16, norm="layer"),
    replace(SIZES[1], dtype=BF16, batch=3),
    replace(SIZES[5], dtype=BF16),
    replace(SIZES[5], dtype=BF16, norm_first=False),
    replace(SIZES[5], dtype=BF16, norm_first=False, rotary=32),
]


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch):
    head_norms.without_formulas(monkeypatch)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP32), (FP32, FP32), (FP64, FP64)], ids=str)
@pytest.mark.parametrize("case", CASES + SIZES + head_norms.WHOLE, ids=str)
def test_outputs_and_gradients_err_no_more_than_those_of_the_plain_code(case, dtypes):
    case = replace(case, dtype=dtypes[0], weight_dtype=dtypes[1])
    given = case.tensors("cuda")
    with guarded_buffers():
        got = case.run(given)
        grads = gradients(got, given)
    assert_errs_no_more_than_plain_code(case, given, case.run(given))
    assert all(map(torch.equal, grads, gradients(case.run(given), given))), "the same bits again"


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("case", OF_PACKED, ids=str)
def test_a_packed_tensor_gives_the_bits_of_its_slices_and_takes_no_copy(case, grouped):
    given, packing, tables = case.tensors("cuda"), Packing(case.heads, case.kv_heads, grouped), case.tables("cuda")
    weights = {name: each for name, each in given.items() if name.endswith("weight")}
    width = (case.heads + 2 * case.kv_heads) * case.cols
    qkv = torch.randn(case.batch, case.tokens, width, device="cuda", dtype=BF16, requires_grad=True)
    leaves = {"qkv": qkv, **weights}

    def run():
        got = fusednorm.qk_norm_packed(
            qkv, case.heads, case.kv_heads, rotary=tables, grouped=grouped, **weights, **case.settings
        )
        return got, torch.autograd.grad(got, list(leaves.values()), [each.detach() for each in got])

    got, grads = run()
    q, k, v = (each.flatten(-3, -2) if grouped else each for each in packing.split(qkv))
    want = *case.run({"q": q, "k": k} | weights), v
    wanted = torch.autograd.grad(want, list(leaves.values()), [each.detach() for each in want])
    assert all(map(torch.equal, (*got, *grads), (*want, *wanted)))
    del got, grads, want, wanted, q, k, v
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    # Outputs and the gradient, and partial sums; a copy of q would be more than a fifth of qkv.
    made = qkv.nbytes * (2 - case.kv_heads / (case.heads + 2 * case.kv_heads))
    assert torch.cuda.max_memory_allocated() - before <= made + 0.1 * qkv.nbytes + (4 << 20)


VIEWS = {  # of the values of a tensor, in more memory or in another order
    "slice of a packed tensor": lambda x: torch.cat([x, x], -2)[..., : x.shape[-2], :],
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "first half of [q | gate]": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_give_the_bits_of_their_copies_and_take_no_copy(view):
    case = HeadCase(
        cols=128, heads=32, kv_heads=8, tokens=4096, dtype=BF16, rotary=128, heads_first=view == "transposed"
    )
    whole = case.tensors("cuda")
    given = whole | {name: VIEWS[view](whole[name]).detach().requires_grad_() for name in "qk"}
    assert not (given["q"].is_contiguous() or given["k"].is_contiguous())

    def run(given):
        got = case.run(given, rotary=rotary)
        return *got, *torch.autograd.grad(got, list(given.values()), [each.detach() for each in got])

    rotary = case.tables("cuda")
    assert all(map(torch.equal, run(given), run(whole)))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(given)
    made = 2 * (given["q"].nbytes + given["k"].nbytes)  # outputs and gradients
    assert torch.cuda.max_memory_allocated() - before <= made + given["k"].nbytes / 2  # and partial sums


@pytest.mark.skipif(native.extension is None, reason="needs the C++ host side")
@pytest.mark.parametrize("packed", [False, True])
def test_known_calls_run_without_python_and_give_the_same_bits(packed):
    case = replace(SIZES[0], dtype=BF16)
    given, rotary = case.tensors("cuda"), case.tables("cuda")
    weights = {name: each for name, each in given.items() if name.endswith("weight")}
    width = (case.heads + 2 * case.kv_heads) * case.cols
    qkv = torch.randn(case.batch, case.tokens, width, device="cuda", dtype=BF16, requires_grad=True)
    leaves = list((weights | {"qkv": qkv} if packed else given).values())

    def run():
        if packed:
            outputs = fusednorm.qk_norm_packed(qkv, case.heads, case.kv_heads, rotary=rotary, **weights)
        else:
            outputs = case.run(given, rotary=rotary)
        return *outputs, *torch.autograd.grad(outputs, leaves, [each.detach() for each in outputs])

    want = run()
    before = native.repeats()
    for _ in range(3):
        assert all(map(torch.equal, run(), want))
    assert native.repeats() - before == 6


def test_an_output_without_a_gradient_adds_nothing_in_any_call():
    case = replace(SIZES[0], dtype=BF16)
    for _ in range(3):
        given = case.tensors("cuda")
        q, _ = case.run(given)
        grads = torch.autograd.grad(q, list(given.values()), torch.ones_like(q))
        assert [bool(grad.any()) for grad in grads] == [name.startswith("q") for name in given]


def test_captured_calls_and_calls_beside_free_sms_give_the_same():
    case = replace(SIZES[0], dtype=BF16)
    given = case.tensors("cuda")
    rotary = case.tables("cuda")
    want = case.run(given, rotary=rotary)
    wanted = gradients(want, given)
    want = [each.detach() for each in want]  # a graph that is alive has nodes of the leaves, which no capture may use
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    saws = [(torch.arange(each.numel(), device="cuda") % 13 - 6).div(8).reshape(each.shape).to(BF16) for each in want]

    def both():
        outputs = case.run(given, rotary=rotary)
        return *outputs, *torch.autograd.grad(outputs, list(given.values()), saws)

    with torch.cuda.stream(side):
        both()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = both()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, (*want, *wanted)))
    with fusednorm.sm_margin(16):
        for ours, right in zip(both(), (*want, *wanted), strict=True):
            torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_compiled_code_computes_the_same(dtype):
    torch._dynamo.reset()
    case = replace(SIZES[0], dtype=dtype, tokens=64)
    given, rotary = case.tensors("cuda"), case.tables("cuda")
    want = case.run(given, rotary=rotary)
    got = torch.compile(lambda given: case.run(given, rotary=rotary), fullgraph=True)(given)
    for ours, right in zip((*got, *gradients(got, given)), (*want, *gradients(want, given)), strict=True):
        torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)


def test_more_elements_than_32_bits_count_are_addressed_right():
    x = torch.randn(1 << 14, 1, 128, device="cuda", dtype=BF16).expand(-1, 1100, -1).contiguous()  # 2^31 and more
    q, k = fusednorm.qk_norm(x, x[:, :1], eps=1e-6)
    assert x.numel() > 2**31 and torch.equal(q, k.expand_as(q))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["Qwen3", "Olmo2"])
def test_a_patched_model_normalizes_and_rotates_at_once(name, dtype):
    model, ids = hf_models.build(name, hidden=512).to("cuda", dtype), hf_models.tokens("cuda", rows=4, length=256)
    exact, stock = hf_models.in_float64(model, ids), hf_models.loss_and_grads(model, ids)
    with fusednorm.patch_model(model, rotary=True):
        model(input_ids=ids)  # shows that both norms are followed by the rotation
        with OpLog() as log:
            ours = hf_models.loss_and_grads(model, ids)
    hf_models.assert_as_good_as_stock(ours, stock, exact, dtype)
    counts = [log.names.count(f"fusednorm.head_norm_{way}.default") for way in ("fwd", "bwd")]
    assert counts == [2, 2] and log.names.count("fusednorm.rms_norm_fwd_affine.default") == 5
