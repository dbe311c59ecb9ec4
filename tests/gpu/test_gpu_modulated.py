"""Modulated norms on a GPU: errors against float64, fixed sums, memory, rows beyond 2^31 elements."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from calls import skip_unless_memory
from cases import BF16, EPS, FP16, FP32, FP64
from modulations import ALL, OUTPUTS, PORTABLE, SAMPLE, TOKEN, Modulated
from tables import BACKWARDS, FORWARDS, Table

import fusednorm
from fusednorm import ops, reference
from fusednorm.host import fallback, gpus
from fusednorm.operands import call_op, operands_of
from fusednorm.planner.plan import Plan
from fusednorm.problem.calls import check_forward

pytestmark = pytest.mark.gpu
VARIANTS = "multi_wave", "async_copy", "pipelined"
OF_MODELS = [
    Modulated("layer", 4, 1152, 3072, gate=SAMPLE, modulation=BF16, added=BF16),
    Modulated("layer", 2, 4096, 1536, modulation=FP32),
    Modulated("rms", 3, 1000, 3840, shift=None, parameters=BF16),
    Modulated("layer", 16, 300, 1152, gate=SAMPLE, dtype=FP16, modulation=FP16),
    Modulated("layer", 1, 2048, 5120, gate=SAMPLE, added=FP32),
    Modulated("rms", 2, 1031, 6144, gate=ALL, modulation=BF16),
    Modulated("layer", 300, 16, 1024, gate=SAMPLE),
    Modulated("layer", 2, 513, 3072, TOKEN, TOKEN, TOKEN, added=BF16),
    Modulated("rms", 2, 700, 4096, TOKEN, SAMPLE, ALL, parameters=FP32),
    Modulated("rms", 2, 256, 2048, dtype=FP32, factor="tanh", shift=None),
    Modulated("layer", 2, 150, 16384, gate=SAMPLE, modulation=BF16),
]


def forced(variant: str | None) -> contextlib.AbstractContextManager:
    return fusednorm.force(variant) if variant else contextlib.nullcontext()


def planned(call) -> Plan:
    return fallback.choose(call.problem, call.rows, gpus.spec_of(torch.device("cuda", 0))).plan


def gradients(modulated: Modulated, **changes) -> tuple[torch.Tensor | None, ...]:
    given = modulated.arguments() | changes
    plan = planned(replace(modulated, device="cuda").call)
    assert plan.variant != "reference", f"{modulated} would run as {plan}"
    op = getattr(torch.ops.fusednorm, modulated.op)
    return op(**given)


@pytest.mark.parametrize("variant", [None, *VARIANTS])
@pytest.mark.parametrize("modulated", [*PORTABLE, *OF_MODELS], ids=str)
def test_gradients_are_those_of_autograd_in_float64(modulated, variant):
    modulated = replace(modulated, device="cuda")
    with forced(variant):
        for _ in range(2):  # planned, then repeated
            modulated.check(gradients(modulated))


@pytest.mark.parametrize("modulated", [each for each in OF_MODELS if TOKEN not in (each.scale, each.shift)], ids=str)
def test_modulations_by_sample_run_by_rings_if_asked_to(modulated):
    with forced("pipelined"):
        assert planned(replace(modulated, device="cuda").call).variant == "pipelined"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("modulated", OF_MODELS, ids=str)
def test_every_run_gives_the_same_bits(modulated, variant):
    modulated = replace(modulated, device="cuda")
    given = modulated.arguments()
    with forced(variant):
        first, *others = (gradients(modulated, **given) for _ in range(4))
    for other in others:
        assert all(torch.equal(one, same) for one, same in zip(first, other, strict=True) if one is not None)


# Rows of a sample that are a multiple of a tile's and that are not, rows that end within a chunk, one sample, clusters.
@pytest.mark.parametrize("variant", [None, *VARIANTS])
@pytest.mark.parametrize("shape", [(4, 1152, 3072), (3, 1000, 1152), (16, 300, 1536), (1, 4097, 5120), (2, 33, 16384)])
@pytest.mark.parametrize("form", ["modulated", "modulated_plus_residual", "of_gated_sum_modulated"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_forwards_give_the_numbers_of_the_formula_in_float64(norm, form, shape, variant):
    samples, rows, cols = shape
    modulation = BF16 if (norm == "layer") == (rows % 2 == 0) else FP32
    torch.manual_seed(rows)
    packed = torch.randn(samples, 6, cols, device="cuda").to(modulation)
    tensors = {"x": torch.randn(shape, device="cuda").to(BF16), "scale": packed[:, 1:2]}
    tensors |= {"residual": torch.randn(shape, device="cuda").to(BF16)} if form != "modulated" else {}
    tensors |= {"shift": packed[:, 2:3]} if form != "modulated_plus_residual" else {}
    tensors |= {"gate": packed[:, 5:]} if form == "of_gated_sum_modulated" else {}
    op = f"{norm}_norm_fwd_{form}"
    settings = {"normalized_shape": (cols,), "eps": EPS}
    wide = {name: each.double() for name, each in tensors.items()}
    exact = [each for each in reference.formula(operands_of(op, (), wide | settings)) if each is not None]
    if variant and "gate" not in tensors:
        with forced(variant):
            assert planned(check_forward(operands_of(op, (), tensors | settings))).variant == variant
    least = torch.finfo(BF16).eps * (4 if "gate" in tensors else 1)  # y is that of the sum as it is stored
    for _ in range(2):
        with forced(variant):
            outputs = getattr(torch.ops.fusednorm, op)(**tensors, **settings)
        for got, want in zip(outputs, exact, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=least, atol=least)


def forward_of(form: str, samples: int, rows: int, modulation: torch.dtype, cols: int = 3072) -> dict:
    """Operands of a LayerNorm, with modulations in slices of one [samples, 6, cols]."""
    packed = torch.randn(samples, 6, cols, device="cuda", dtype=modulation)
    given = {"scale": packed[:, 1:2], "shift": packed[:, :1], "normalized_shape": (cols,), "eps": EPS}
    given |= {"gate": packed[:, 2:3]} if "gated" in form else {}
    names = ["x", "residual"] if "gated" in form else ["x"]
    return given | {name: torch.randn(samples, rows, cols, device="cuda", dtype=BF16) for name in names}


@pytest.mark.parametrize("modulation", [BF16, FP32], ids=str)
def test_a_forward_reads_slices_in_place_and_takes_no_memory_of_the_size_of_x(modulation):
    given = forward_of("of_gated_sum_modulated", 4, 1152, modulation)
    op = torch.ops.fusednorm.layer_norm_fwd_of_gated_sum_modulated
    kept = sum(each.numel() * each.element_size() for each in op(**given))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    op(**given)
    torch.cuda.synchronize()
    x = given["x"]
    assert torch.cuda.max_memory_allocated() - before < kept + x.numel() * x.element_size() // 8


def test_slices_are_read_in_place_and_no_memory_of_the_size_of_x_is_taken():
    modulated = replace(OF_MODELS[0], device="cuda")
    given = modulated.arguments()
    outputs = gradients(modulated, **given)
    kept = sum(each.numel() * each.element_size() for each in outputs if each is not None)
    del outputs
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = getattr(torch.ops.fusednorm, modulated.op)(**given)
    torch.cuda.synchronize()
    x = given["x"]  # the partial sums are a third of its size here
    assert torch.cuda.max_memory_allocated() - before < kept + x.numel() * x.element_size() // 2
    assert outputs[0] is not None


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("rows", [1000, 8192])
def test_gradients_of_a_table_have_the_same_bits_in_every_run(rows, dtype, is_sorted, is_compiled):
    x = torch.randn(2, rows, 1024, device="cuda", dtype=BF16)
    table = torch.randn(7, 3, 1024, device="cuda", dtype=dtype).requires_grad_()
    index = torch.randint(7, (2, rows), device="cuda")
    index = index.flatten().sort().values.view_as(index) if is_sorted else index

    def modulated(x, table, index):
        scale, shift, gate = table.unbind(1)
        y, h = fusednorm.ada_layer_norm(x, scale, shift, residual=x, gate=gate, index=index)
        return y + h

    model, dy = torch.compile(modulated) if is_compiled else modulated, torch.randn_like(x)
    first, *others = (torch.autograd.grad(model(x, table, index), table, dy)[0] for _ in range(4))
    assert all(torch.equal(each, first) for each in others)
    wide = table.detach().double().requires_grad_()
    exact = torch.autograd.grad(modulated(x.double(), wide, index), wide, dy.double())[0]
    torch.testing.assert_close(first.double(), exact, rtol=torch.finfo(dtype).eps, atol=exact.abs().max().item() * 2e-2)


OF_TABLES = [
    *BACKWARDS,
    Table("layer", "_of_gated_sum", 6144, 3072, size=8, modulation=BF16, backward=True),
    Table("rms", "", 6144, 1152, size=1024, parameters=FP32, backward=True),
    Table("layer", "", 4200, 5120, size=1, backward=True),
    Table("layer", "_of_gated_sum", 1000, 6144, size=300, modulation=BF16, backward=True),
    Table("rms", "_of_gated_sum", 1300, 394, size=6, dtype=FP32, modulation=FP64, backward=True),  # tensor code
]


@pytest.mark.parametrize("table", OF_TABLES, ids=str)
def test_backwards_with_tables_give_the_sums_of_float64_with_the_same_bits_in_every_run(table):
    table = replace(table, device="cuda")
    operands = table.operands

    def run():
        return call_op(getattr(torch.ops.fusednorm, operands.op).default, operands)

    first, *others = (run() for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        others.append(run())
    graph.replay()
    assert all(a is b is None or torch.equal(a, b) for each in others for a, b in zip(first, each, strict=True))
    table.check(first)


@pytest.mark.parametrize("variant", [None, *VARIANTS])
@pytest.mark.parametrize("modulation", [BF16, FP32], ids=str)
def test_steps_are_rounded_where_flux_and_sd3_round_them(modulation, variant):
    x, residual = (torch.randn(2, 1024, 3072, device="cuda", dtype=BF16) for _ in range(2))
    shift, scale, gate = (torch.randn(2, 6, 3072, device="cuda", dtype=modulation)[:, at : at + 1] for at in range(3))
    h = residual + gate * x
    want, of_x = (F.layer_norm(each, (3072,), eps=1e-6) * (1 + scale) + shift for each in (h, x))
    given = {"residual": residual, "gate": gate, "eps": 1e-6, "residual_dtype": h.dtype}
    with forced(variant):
        y, stream = fusednorm.ada_layer_norm(x, scale, shift, rounding="steps", **given)
        alone = fusednorm.ada_layer_norm(x, scale, shift, rounding="steps", eps=1e-6)
    assert torch.equal(stream, h) and y.dtype == want.dtype
    assert min(torch.isclose(*pair, rtol=1e-5, atol=1e-5).float().mean() for pair in ((y, want), (alone, of_x))) > 0.998
    once, _ = fusednorm.ada_layer_norm(x, scale, shift, **given)
    assert torch.isclose(once.to(y.dtype), want, rtol=1e-5, atol=1e-5).float().mean() < 0.9


def test_a_sample_beyond_2_to_the_31_elements_has_the_gradients_of_its_copy():
    skip_unless_memory(42)
    modulated = Modulated("layer", 1, 350_000, 3072, gate=SAMPLE, modulation=BF16, device="cuda")
    one = modulated.arguments()
    rows = {name: each for name, each in one.items() if torch.is_tensor(each) and each.dim() == 3}
    two = one | {name: torch.cat([each, each]) for name, each in rows.items()}
    assert two["x"].numel() > 2**31
    op = getattr(torch.ops.fusednorm, modulated.op)
    alone = op(**one)
    for name, each, single in zip(OUTPUTS, op(**two), alone, strict=True):
        if each is None:
            continue
        assert torch.equal(each[0], each[1]), name
        if each.shape[1] > 1:
            assert torch.equal(each[:1], single), name
        else:
            torch.testing.assert_close(each[:1].float(), single.float(), rtol=2e-2, atol=2.0, msg=name)
        del each


@pytest.mark.parametrize("modulation", [BF16, FP32], ids=str)
@pytest.mark.parametrize("shape", [(2, 350_000), (32, 21_900)], ids=str)  # samples, and rows of each
@pytest.mark.parametrize("form", ["modulated", "of_gated_sum_modulated"])
def test_the_last_rows_of_a_forward_beyond_2_to_the_31_elements_are_those_of_a_slice(form, shape, modulation):
    skip_unless_memory(24)
    given, op = forward_of(form, *shape, modulation), getattr(torch.ops.fusednorm, f"layer_norm_fwd_{form}")
    assert given["x"].numel() > 2**31
    few = {name: each[-1:, -64:] for name, each in given.items() if torch.is_tensor(each)}
    for whole, last in zip(op(**given), op(**given | few), strict=True):
        least = max(torch.finfo(last.dtype).eps * 8, 2e-5)
        torch.testing.assert_close(whole[-1:, -64:], last, rtol=least, atol=least)


@pytest.mark.parametrize("variant", VARIANTS)
def test_modulations_in_a_table_beyond_2_to_the_31_elements_are_those_of_its_copy(variant):
    skip_unless_memory(30)
    x, dy = torch.randn(2, 118_000, 2, 3072, device="cuda", dtype=BF16)
    scale, shift, *_ = torch.randn(118_000, 6, 3072, device="cuda", dtype=BF16).split(1, 1)
    assert scale.stride(0) * len(scale) > 2**31
    given = {"grad_out": dy, "x": x, "shift": shift, "normalized_shape": (3072,), "output_mask": [True] * len(OUTPUTS)}
    given |= {"mean": torch.zeros(118_000, 2, 1, device="cuda"), "rstd": torch.ones(118_000, 2, 1, device="cuda")}
    with forced(variant):
        near, far = (torch.ops.fusednorm.layer_norm_bwd_modulated(**given, scale=s) for s in (scale.clone(), scale))
    for name, got, want in zip(OUTPUTS, far, near, strict=True):
        assert (got is None) == (want is None) and (got is None or torch.equal(got, want)), name


WIDTHS = [
    Table(norm, "_of_gated_sum", 333, cols, size=9, modulation=of, backward=backward)
    for norm, cols, of in (("layer", 1152, FP32), ("layer", 3072, BF16), ("rms", 5120, FP32), ("layer", 16384, BF16))
    for backward in (False, True)
]


@pytest.mark.parametrize("table", [*FORWARDS, *BACKWARDS, *WIDTHS], ids=str)
def test_rows_of_tables_give_what_gathered_rows_give_in_float64(table):
    table = replace(table, device="cuda")
    for _ in range(2):  # the second call by the program that the first has left
        table.check(ops.run(table.operands))
    assert not fallback.failures()


@pytest.mark.parametrize("cols", [1152, 3072, 16384])
def test_a_number_that_is_no_row_of_the_tables_reads_nan_and_is_left_out_of_their_gradients(cols):
    x, residual, dy = torch.randn(3, 2, 200, cols, device="cuda", dtype=BF16)
    table = torch.randn(4, 3, cols, device="cuda").requires_grad_()
    index = torch.randint(4, (2, 200), device="cuda")
    strange = index.clone()
    strange[0, 3], strange[1, 7], strange[1, 199] = 4, -1, 2**62
    unknown, found = strange != index, {}
    for name, numbers in {"known": index, "strange": strange}.items():
        scale, shift, gate = table.unbind(1)
        y, _ = fusednorm.ada_layer_norm(x, scale, shift, residual=residual, gate=gate, index=numbers)
        found[name] = y.detach(), torch.autograd.grad(y, table, dy * ~unknown[..., None])[0]
    (want, of_want), (got, of_got) = found["known"], found["strange"]
    assert got[unknown].isnan().all() and torch.equal(got[~unknown], want[~unknown])
    torch.testing.assert_close(of_got, of_want, rtol=1e-5, atol=1e-4)
