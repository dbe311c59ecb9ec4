"""Plans of qk_norm: tiles and CTAs, what is left to ATen, and what the compiler makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compiling import InParallel
from head_norms import (
    BF16,
    FP16,
    FP32,
    FP64,
    OF_MODELS,
    WHOLE_OF_MODELS,
    HeadCase,
    builds_of,
    calls_of,
    carried_halves,
    complaints,
    shared_bytes_of_forward,
)
from planning import ARCHITECTURES, EVERY_ARCHITECTURE

import fusednorm
from fusednorm.heads import functional
from fusednorm.heads.plan import HeadPlan, ReferencePlan, choose, ctas_of, has_kernels
from fusednorm.heads.problem import heads_of
from fusednorm.planner import limits
from fusednorm.planner.device import A100, H200

pytest.importorskip("triton")


@pytest.mark.parametrize("case", OF_MODELS, ids=str)
@pytest.mark.parametrize("device", EVERY_ARCHITECTURE.values(), ids=lambda device: device.name)
def test_a_plan_fits_the_gpu_and_covers_the_rows(case, device):
    for call in calls_of(case):
        plan = choose(call.problem, device)
        assert plan.num_chunks * plan.width >= case.cols and plan.width <= plan.chunk
        if case.rotary and not case.interleaved and plan.kernel == "narrow":
            assert plan.width == case.rotary // 2, "the halves of what is rotated are chunks"
        threads = 32 * plan.num_warps * plan.ctas_per_sm
        assert threads <= device.max_threads_per_sm and threads * plan.max_registers <= device.registers_per_sm
        ctas = ctas_of(plan, call.problem, call.rows, device)
        assert len(ctas) == 2 and all(
            1 <= count <= -(-rows // plan.rows_per_tile) for count, rows in zip(ctas, call.rows, strict=True)
        )


@pytest.mark.parametrize("tokens", [1, 100, 4096, 100_000])
def test_the_ctas_of_a_backward_run_at_the_same_time_and_have_equally_many_tiles(tokens):
    call = calls_of(replace(OF_MODELS[0], tokens=tokens))[1]
    plan = choose(call.problem, H200)
    ctas = ctas_of(plan, call.problem, call.rows, H200)
    tiles = [-(-rows // plan.rows_per_tile) for rows in call.rows]
    assert sum(ctas) <= H200.sm_count * plan.ctas_per_sm
    of_cta = [-(-count // some) for count, some in zip(tiles, ctas, strict=True)]
    assert max(of_cta) <= max(2, 1.1 * sum(tiles) / sum(ctas) + 1) and sum(ctas) >= min(H200.sm_count, sum(tiles) // 2)


def test_sums_that_are_wanted_in_float32_have_few_tiles():
    call = calls_of(HeadCase(cols=128, heads=32, kv_heads=8, tokens=200_000, dtype=FP32))[1]
    plan = choose(call.problem, H200)
    ctas = ctas_of(plan, call.problem, call.rows, H200)
    tiles = [rows / plan.rows_per_tile / count for rows, count in zip(call.rows, ctas, strict=True)]
    assert max(tiles) <= limits.most_tiles_of_sum
    with_margin = ctas_of(plan, call.problem, call.rows, H200.leaving(32))
    assert sum(with_margin) <= 100 * plan.ctas_per_sm, "they would take the SMs that are left to others"


@pytest.mark.parametrize(
    ("case", "device", "reason"),
    [
        (HeadCase(cols=64, rotary=2), H200, "rotates 2 of 64 columns, which makes more than 16 chunks"),
        (HeadCase(cols=4096), H200, "takes at most 2048 columns, got 4096"),
        (HeadCase(), replace(A100, name="V100", arch=70), "needs compute capability 8.0, V100 has 7.0"),
    ],
)
def test_what_no_kernel_takes_is_left_to_aten_and_told(case, device, reason):
    assert [choose(call.problem, device) for call in calls_of(case)] == [ReferencePlan(reason)] * 2
    given = case.tensors("meta")
    text = str(fusednorm.explain_qk_norm(**given, rotary=case.tables("meta"), device=device))
    assert f"forward of q and k: ATen, {reason}" in text


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({}, "narrow_async"),
        ({"interleaved": True, "dtype": FP16}, "narrow_async"),
        ({"norm": "layer", "rotary": 0}, "narrow_async"),
        ({"rotary": 0}, "narrow_async"),
        ({"cols": 64, "rotary": 64}, "narrow_async"),
        ({"cols": 64, "rotary": 0, "norm": "layer"}, "narrow_async"),
        ({"cols": 64, "rotary": 0}, "narrow_async"),
        ({"cols": 96, "rotary": 0}, "narrow"),
        ({"cols": 96, "rotary": 0, "norm": "layer"}, "narrow_async"),
        ({"norm_first": False}, "narrow_async"),
        ({"rotary": 64}, "narrow_async"),
        ({"rotary": 24}, "narrow"),
        ({"rotary": 24, "interleaved": True}, "narrow_async"),
        ({"rotary": 64, "norm_first": False, "norm": "layer"}, "narrow_async"),
        ({"cols": 96, "rotary": 96}, "narrow"),
        ({"norm_first": False, "norm": "layer"}, "narrow_async"),
        ({"norm_first": False, "norm": "layer", "cols": 96, "rotary": 96, "interleaved": True}, "narrow"),
        ({"norm_first": False, "norm": "rms", "cols": 96, "rotary": 96, "interleaved": True}, "narrow_async"),
        ({"dtype": FP32}, "narrow"),
        ({"table_dtype": FP32}, "narrow_async"),
        ({"table_dtype": FP64}, "narrow"),
        ({"cols": 512, "rotary": 512, "norm": "layer"}, "narrow_async"),
        ({"cols": 1024, "rotary": 1024}, "narrow"),
        ({"cols": 16, "rotary": 16}, "narrow_async"),
        ({"cols": 8, "rotary": 8}, "narrow"),
    ],
)
def test_backwards_copy_to_shared_memory_what_has_16_bits_and_is_rotated_by_vectors(change, kernel):
    case = replace(HeadCase(cols=128, rotary=128, dtype=BF16, table_dtype=BF16), **change)
    forward, backward = (choose(call.problem, H200).kernel for call in calls_of(case))
    assert (forward, backward) == ("narrow", kernel)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({}, 2),
        ({"norm": "rms"}, 1),
        ({"interleaved": True, "dtype": FP16}, 2),
        ({"table_dims": "BSH1", "half_table": True}, 2),
        ({"rotary": 0}, 1),
        ({"heads": 5}, 1),
        ({"kv_heads": 1}, 1),
        ({"heads_first": True}, 1),
        ({"norm_first": False}, 1),
        ({"interleaved": True, "half_table": True}, 1),
        ({"whole": True}, 1),
    ],
)
def test_a_thread_of_a_forward_has_two_heads_that_share_cos_and_sin(change, rows):
    case = replace(HeadCase(cols=128, rotary=128, norm="layer", dtype=BF16, table_dims="BS"), **change)
    assert {choose(call.problem, H200).adjacent for call in calls_of(case)[:1]} == {rows}


def test_rows_that_do_not_begin_at_16_bytes_are_not_copied_to_shared_memory():
    kernels = []
    for width in (132, 136):
        q = torch.empty(2, 5, 4, width, dtype=BF16, device="meta")[..., :128]
        kernels.append(fusednorm.explain_qk_norm(q, q, norm="layer", device=H200).launches[1].plan.kernel)
    assert kernels == ["narrow", "narrow_async"]


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 16, 32, 40, 64])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_tile_has_all_heads_of_a_token_that_are_normalized_together(heads, dtype):
    case = replace(WHOLE_OF_MODELS[0], heads=heads, kv_heads=heads, dtype=dtype)
    for call in calls_of(case):
        plan = choose(call.problem, H200)
        assert plan.rows_per_tile >= heads or heads == 1
        threads = 32 * plan.num_warps * plan.ctas_per_sm
        assert threads <= H200.max_threads_per_sm and threads * plan.max_registers <= H200.registers_per_sm
        assert all(ctas <= case.batch * case.tokens for ctas in ctas_of(plan, call.problem, call.rows, H200))


@pytest.mark.parametrize(("heads", "kv_heads", "have"), [(40, 40, True), (128, 8, False), (8, 128, False)])
def test_a_rotation_joins_norms_of_all_heads_that_kernels_hold_in_both_directions(heads, kv_heads, have):
    case = replace(WHOLE_OF_MODELS[0], heads=heads, kv_heads=kv_heads, cols=128, dtype=BF16)
    given = functional.operands(**case.tensors("meta"), rotary=case.tables("meta"))
    assert has_kernels(heads_of(given), H200) == have


@pytest.mark.parametrize("kv_heads, launches", [(8, (("q", "k"),) * 2), (2, (("q",), ("k",)) * 2)])
def test_norms_of_all_heads_share_a_launch_if_they_have_equally_many(kv_heads, launches):
    case = HeadCase(heads=8, kv_heads=kv_heads, cols=64, rotary=64, dtype=BF16, whole=True)
    explained = fusednorm.explain_qk_norm(**case.tensors("meta"), rotary=case.tables("meta"), device=H200)
    assert tuple(each.tensors for each in explained.launches) == launches


def test_an_explanation_names_plans_and_copies():
    case = OF_MODELS[0]
    given, rotary = case.tensors("meta"), case.tables("meta")
    explained = fusednorm.explain_qk_norm(**given, rotary=rotary, device=H200)
    assert [each.direction for each in explained.launches] == ["forward", "backward"]
    assert all(isinstance(each.plan, HeadPlan) and each.tensors == ("q", "k") for each in explained.launches)
    assert "forward of q and k: narrow, 16 rows of 2 x 64 columns, 4 warps, 256 + 64 CTAs" in str(explained)
    given["k"] = given["k"].mT.contiguous().mT
    assert "CTAs, k copied first" in str(fusednorm.explain_qk_norm(**given, rotary=rotary, device=H200))
    given["k_weight"] = given["k_weight"].float()
    explained = fusednorm.explain_qk_norm(**given, rotary=rotary, device=H200)
    assert [each.tensors for each in explained.launches] == [("q",), ("k",)] * 2


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=BF16)


B, S, HEADS, D = 2, 16, (8, 2), 64
BY_TOKEN = [empty(B, S, heads, D) for heads in HEADS]
OF_PACKED = list(empty(B * S, 12, D).split((8, 2, 2), 1))[:2]
CACHE = empty(4 * S, 2 * D)[:S].view(1, S, 1, 2 * D)
LAYOUTS = {  # q and k, cos, and sin if it is not like cos
    "transformers": ([x.transpose(1, 2) for x in BY_TOKEN], empty(B, S, D)),
    "transformers, [1, S, r]": ([x.transpose(1, 2) for x in BY_TOKEN], empty(1, S, D)),
    "transformers, expanded": ([x.transpose(1, 2) for x in BY_TOKEN], empty(1, S, D).expand(B, S, D)),
    "transformers, [B, 1, S, r]": ([x.transpose(1, 2) for x in BY_TOKEN], empty(B, 1, S, D)),
    "[q | gate]": ([empty(B, S, 8, 2 * D)[..., :D], BY_TOKEN[1]], empty(B, S, D // 4)),
    "Megatron": ([x.transpose(0, 1) for x in BY_TOKEN], empty(S, 1, 1, D)),
    "Megatron, grouped": (list(empty(S, B, 2, 6, D).split((4, 1, 1), 3))[:2], empty(S, 1, 1, 1, D)),
    "torchtitan": (BY_TOKEN, CACHE[..., :D], CACHE[..., D:]),
    "varlen": (OF_PACKED, empty(B * S, D)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_usual_layouts_are_read_in_place(layout):
    (q, k), *tables = LAYOUTS[layout]
    of_dim = -3 if layout.startswith("transformers") else -2
    explained = fusednorm.explain_qk_norm(q, k, rotary=(tables[0], tables[-1]), heads_dim=of_dim, device=H200)
    assert [(each.tensors, each.copied) for each in explained.launches] == [(("q", "k"), ())] * 2
    assert all(isinstance(each.plan, HeadPlan) for each in explained.launches)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_packed_tensor_is_read_and_its_gradient_written_in_place(grouped):
    qkv, weight, tables = empty(B, S, 12 * D), empty(D), (empty(S, D), empty(S, D))
    settings = {"rotary": tables, "grouped": grouped, "device": H200}
    explained = fusednorm.explain_qk_norm_packed(qkv, *HEADS, weight, weight, 1e-6, **settings)
    assert [(each.tensors, each.copied) for each in explained.launches] == [(("q", "k"), ())] * 2
    other = fusednorm.explain_qk_norm_packed(qkv.mT.contiguous().mT, *HEADS, **settings)
    assert [each.copied for each in other.launches] == [("q", "k"), ("qkv",)]
    with pytest.raises(RuntimeError, match="^explain_qk_norm_packed: qkv must end in a multiple of 12 columns, got"):
        fusednorm.explain_qk_norm_packed(qkv[..., 1:], *HEADS, device=H200)
    assert "tensors are on cpu" in str(fusednorm.explain_qk_norm_packed(torch.empty(S, 12 * D), *HEADS))


def test_an_explanation_tells_what_atens_operations_do():
    case = HeadCase(dtype=BF16)
    given = case.tensors()
    assert "ATen, the tensors are on cpu, where ATen's kernels run" in str(fusednorm.explain_qk_norm(**given))
    q, k = given["q"], given["k"]
    whole = fusednorm.explain_qk_norm(q, k, given["q_weight"].repeat(4), given["k_weight"].repeat(2), device=H200)
    assert whole.device == H200 and "ATen" not in str(whole)
    assert "a weight of all heads: a norm of ours for each of q and k" in str(whole)
    with pytest.raises(RuntimeError, match="^explain_qk_norm: "):
        fusednorm.explain_qk_norm(q, k.long(), given["q_weight"].repeat(4), given["k_weight"].repeat(2), device=H200)


# Each architecture compiles every third of the cases; `python tests/versions.py` compiles them all.
COMPILED = OF_MODELS + WHOLE_OF_MODELS
JOBS = [(case, arch) for turn, arch in enumerate(ARCHITECTURES) for case in COMPILED[turn % 3 :: 3]]


@pytest.fixture(scope="module")
def compiled(workers):
    return InParallel(workers, complaints, JOBS)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[0]}-sm_{job[1]}")
def test_kernels_compile_within_their_plans_without_spills(compiled, job):
    assert compiled[job].result() == []


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_a_call_of_few_tokens_has_the_kernels_of_later_ones(workers, case):
    few, many = workers.submit(builds_of, [replace(case, tokens=tokens) for tokens in (2, 4099)], 90).result()
    assert few == many


@pytest.mark.parametrize("more", [{"cols": 1}, {"cols": 1, "norm": "layer"}, {"cols": 2, "rotary": 2}], ids=str)
def test_chunks_of_one_column_compile(workers, more):
    """A thread has one element of their weight, which bfloat16 widened in pairs would not take."""
    workers.submit(complaints, HeadCase(dtype=BF16, **more), 90).result()


@pytest.mark.parametrize("cols", [64, 128, 256])
def test_a_forward_does_not_move_its_rows_through_shared_memory(workers, cols):
    """To the layout of its weight: that took 1.6 times as long with 256 columns."""
    asked = workers.submit(shared_bytes_of_forward, HeadCase(cols=cols, rotary=cols, dtype=BF16), 90)
    assert asked.result() == 0


@pytest.mark.parametrize("rotary", [0, 128])
def test_a_bias_takes_no_ctas_of_a_forward(rotary):
    """It is needed once the weight no longer is, where a thread has one head."""
    both = [HeadCase(cols=128, heads=5, rotary=rotary, dtype=BF16, norm=norm) for norm in ("rms", "layer")]
    rms, layer = (choose(calls_of(case)[0].problem, H200).ctas_per_sm for case in both)
    assert layer == rms


def test_a_rotating_backward_carries_bfloat16_in_pairs(workers):
    """It would join two halves of a register at the end of each tile, and wait there for the loads of the next."""
    assert workers.submit(carried_halves, HeadCase(cols=128, rotary=128, dtype=BF16), 90).result() == 0
