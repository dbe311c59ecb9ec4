"""warmup without a GPU: this process plans the builds, and processes that do not interpret Triton make them."""

from __future__ import annotations

import itertools
import os
import sys
from unittest import mock

import afresh
import pytest
import torch
from compiling import DEVICES
from norm_forms import gradients, leaves, run
from tables import Table

import fusednorm
from bench.written import modulations_of, rows_of
from fusednorm import ops, reference
from fusednorm.forms import Settings, fields_of
from fusednorm.operands import FORM_OPS, OPS, BackwardOperands, ForwardOperands, Role, operands_of
from fusednorm.planner.plan import MultiWavePlan
from fusednorm.problem.calls import check_backward, check_forward
from fusednorm.tools import warm

H200, B200, A100 = DEVICES[90], DEVICES[100], DEVICES[80]
BF16, FP32 = torch.bfloat16, torch.float32
ALL = (True, True, True)
ORDER = [1, 0, 4, 2, 3]  # in which KEYS_OF_KERNELS asks for them


def wanted(norm="layer", direction="backward", cols=4096, mask=ALL, weight=BF16) -> warm.Wanted:
    return warm.Wanted(norm, direction, cols, BF16, weight, True, mask)


def numbers_of_builds(many: list[list], device) -> list[int]:
    return [len(warm.distinct_builds(plans, device)) for plans in many]


def call_of(wanted: warm.Wanted):
    """The checked call of zeros that is expected."""
    shape, layer, rows = (wanted.cols,), wanted.norm == "layer", 16
    x, weight = torch.zeros(rows, wanted.cols, dtype=wanted.dtype), torch.zeros(shape, dtype=wanted.weight_dtype)
    bias = weight if layer and wanted.has_bias else None
    if wanted.direction == "forward":
        return check_forward(ForwardOperands(wanted.norm, x, shape, weight, bias, 1e-5))
    rstd, added = torch.zeros(rows), wanted.residual_dtype
    residual = None if added is None else torch.zeros(rows, wanted.cols, dtype=added)
    operands = x, x, shape, rstd if layer else None, rstd, weight, bias, wanted.output_mask, residual
    return check_backward(BackwardOperands(wanted.norm, *operands))


def launches_of_a_call(wanted: warm.Wanted, plan) -> list:
    from fusednorm.host import fallback, launch

    return list(launch.program_of(call_of(wanted), fallback.Choice(plan), H200).launches)


def test_expected_calls_look_as_real_ones_do():
    from fusednorm.host import launch

    for norm, direction in itertools.product(("layer", "rms"), ("forward", "backward")):
        for changes in ({}, {"cols": 1001}, {"weight": FP32}, {"mask": (True, False, False)}):
            for residual in (None, FP32):
                expected = wanted(norm, direction, **changes)._replace(residual_dtype=residual)
                found, real = launch.with_addresses(expected.call()), launch.with_addresses(call_of(expected))
                assert found == real and expected.problem == real.problem, expected


def test_callers_can_set_what_forms_have():
    fields = {field for name in Settings.__annotations__ for field in fields_of(name, None)}
    assert fields == {slot.name for op in FORM_OPS for slot in op.inputs if slot.role is Role.FORM}


SET = {
    "groups": {"activation": "sigmoid", "group_size": 1024},
    "rounds_sum": {"normalize_rounded": False},
    "modulate": {"gate_activation": "tanh"},
}
DTYPES = [(BF16, BF16, "once"), (FP32, FP32, "once"), (BF16, FP32, "x_hat"), (FP32, BF16, "x_hat")]


@pytest.mark.parametrize("op", FORM_OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("stream, weight, rounding", DTYPES)
def test_expected_calls_of_forms_look_as_those_of_their_functions(op, stream, weight, rounding, monkeypatch):
    from fusednorm.host import launch

    seen = []

    def first(operands, miss=None):
        seen.append(operands)
        return reference.run(operands), None

    settings = {"weight_offset": 1.0, "rounding": rounding}
    for field, changes in SET.items():
        settings |= changes if op.slot(field) and rounding == "once" else {}
    _, of_form = warm.form_named("warmup", op.suffix[1:], settings)
    monkeypatch.setattr(ops, "first", first)
    dtypes = (BF16, stream, weight) if len(rows_of(op)) > 1 else (BF16, weight)
    given = leaves(op, *dtypes, shape=(16, 4096))
    given |= {name: given[name].detach()[:1].to(BF16).requires_grad_() for name in modulations_of(op)}
    outputs = run(op, given, **settings)
    gradients(outputs, given)
    for direction, real in zip(("forward", "backward"), seen, strict=True):
        check = check_forward if direction == "forward" else check_backward
        expected = warm.Wanted(op.norm, direction, 4096, BF16, weight, True, ALL, stream, op.suffix, of_form)
        found, real = (launch.with_addresses(each) for each in (expected.call(), check(real)))
        assert found == (real if direction == "backward" else real._replace(eps=found.eps))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("stream, weight, rounding", DTYPES)
def test_expected_calls_of_a_norm_and_the_next_one_look_as_those_of_their_function(
    norm, stream, weight, rounding, monkeypatch
):
    from fusednorm.host import launch

    seen = []

    def first(operands, miss=None):
        seen.append(operands)
        return reference.run(operands), None

    settings = {"weight_offset": 1.0, "rounding": rounding}
    suffix, of_form = warm.form_named("warmup", "plus_residual_norm", settings)
    dtypes, shapes = (BF16, stream, *[weight] * 4), (*[(16, 4096)] * 2, *[(4096,)] * 4)
    given = [torch.zeros(shape, dtype=dtype).requires_grad_() for shape, dtype in zip(shapes, dtypes, strict=True)]
    monkeypatch.setattr(ops, "first", first)
    outputs = getattr(fusednorm, f"{norm}_norm_add_{norm}_norm")(*given, **settings)
    torch.autograd.grad(outputs, given, outputs)
    forward, backward = (
        warm.Wanted(norm, direction, 4096, BF16, weight, True, ALL, stream, suffix, of_form)
        for direction in ("forward", "backward")
    )
    assert backward.has_no_op and not forward.has_no_op
    plans = [each for each, _ in warm.plans_of([forward._replace(cols=65536)], [64], H200)]
    assert plans == [each._replace(cols=65536) for each in forward.parts], "no plan has rows that are so wide"
    for each, real in zip((forward, *backward.parts), seen, strict=True):
        check = check_forward if each.direction == "forward" else check_backward
        found, real = (launch.with_addresses(call) for call in (each.call(), check(real)))
        assert found == (real if each.direction == "backward" else real._replace(eps=found.eps))


def builds_of(op: str, shape: tuple[int, ...], dtype: torch.dtype = BF16) -> tuple[set[str], set[str]]:
    """The builds of a forward of a modulated norm and of its backward, with a row of modulations of `dtype` for each
    x[n], and those that warmup would make for it."""
    from fusednorm.host import fallback, launch
    from fusednorm.planner.choice import choose
    from fusednorm.tools import compilation

    of, rows, expected, real = OPS[op], shape[1], [], set()
    _, settings = warm.form_named("warmup", of.suffix[1:], {}, sample_rows=rows)
    for direction in ("forward", "backward"):
        of_form = of.suffix, settings, rows, dtype
        each = warm.Wanted(of.norm, direction, shape[-1], BF16, None, False, ALL, None, *of_form)
        expected += each.of_any_samples
        row = torch.empty(shape, dtype=BF16, device="meta")
        modulation = torch.empty(shape[0], 6, shape[2], dtype=dtype, device="meta")
        tensors = {Role.MODULATION: modulation[:, :1], Role.ROWS: row}
        tensors[Role.STATISTIC] = torch.empty(*shape[:2], 1, device="meta")
        absent = () if "gated" in of.suffix else ("branch", "gate")
        given = {slot.name: tensors[slot.role] for slot in each.op.inputs if slot.role in tensors}
        given = {name: tensor for name, tensor in given.items() if name not in absent}
        added = None if absent else row
        more = {"residual_grad": added, "output_mask": [True] * 7} if direction == "backward" else {"eps": 1e-6}
        check = check_backward if direction == "backward" else check_forward
        call = check(operands_of(each.op.name, (), given | more | {"normalized_shape": shape[-1:]}))
        plan = choose(call.problem, call.rows, H200)
        launches = launch.program_of(call, fallback.Choice(plan), H200).launches
        real |= {compilation.build_key(each, 90) for each in launches}
    plans = list(warm.plans_of(expected, [shape[0] * rows], H200))
    assert all(each.of_few_rows.call().rows <= 128 * each.samples for each in expected)
    made = {
        compilation.build_key(build.launch(H200), 90)
        for each, plan in plans
        for build in warm.distinct_builds([(each.of_few_rows, plan)], H200)
    }
    return real, made


@pytest.mark.parametrize("shape", [(4, 4608, 3072), (2, 1000, 1536), (3, 33, 1024), (9, 5, 256), (64, 1, 512)], ids=str)
@pytest.mark.parametrize("op", ["layer_norm_fwd_modulated", "rms_norm_fwd_of_gated_sum_modulated"])
def test_a_call_of_several_samples_needs_no_build_that_its_warmup_has_not_made(op, shape, workers):
    real, made = workers.submit(builds_of, op, shape).result()
    sums = made - real  # of fewer samples, or of more
    assert real <= made and len(real) == 2 + (shape[1] > 1) and len(sums) == (shape[1] > 1)


def test_a_call_with_modulations_in_float32_needs_no_build_that_its_warmup_has_not_made(workers):
    real, made = workers.submit(builds_of, "rms_norm_fwd_modulated", (4, 1280, 3072), FP32).result()
    narrow, _ = workers.submit(builds_of, "rms_norm_fwd_modulated", (4, 1280, 3072)).result()
    assert real <= made and len(real) == 3 and not real & narrow


def builds_of_tables(table: Table) -> tuple[set[str], set[str]]:
    """The builds of a call whose modulations are tables, and those that warmup would make for it."""
    from fusednorm.host import fallback, launch
    from fusednorm.planner.choice import choose
    from fusednorm.tools import compilation

    suffix, settings = warm.form_named("warmup", "modulated_by_index", {}, table_rows=table.size)
    direction, check = ("backward", check_backward) if table.backward else ("forward", check_forward)
    call = check(table.operands._replace(residual_grad=None) if table.backward else table.operands)
    more = ALL, None, suffix, settings, None, table.modulation, table.size
    expected = warm.Wanted(table.norm, direction, table.cols, BF16, None, False, *more)
    plan = choose(call.problem, call.rows, H200)
    launches = launch.program_of(call, fallback.Choice(plan), H200).launches
    made = warm.distinct_builds(list(warm.plans_of([expected], [call.rows], H200)), H200)
    keys = ({compilation.build_key(each, 90) for each in some} for some in (launches, (e.launch(H200) for e in made)))
    return next(keys), next(keys)


@pytest.mark.parametrize("size", [1, 8, 300])
@pytest.mark.parametrize("backward", [False, True])
def test_a_call_with_tables_needs_no_build_that_its_warmup_has_not_made(backward, size, workers):
    table = Table("rms", "", 700, 1536, size, backward=backward)
    real, made = workers.submit(builds_of_tables, table).result()
    passes = 1 + (size > 254)  # each a count and a sort
    assert real == made and len(real) == (2 + 2 * passes if backward else 1)


def warm_up_twice(folder: str) -> tuple[int, int, int, list[bool]]:
    """(kernels, builds on disk after the first and after the second warmup, whether each launch finds its build)."""
    from pathlib import Path

    from fusednorm.tools import compilation

    both = [wanted("layer", direction, 512) for direction in ("forward", "backward")]
    plans = list(warm.plans_of(both, None, H200))
    builds = warm.distinct_builds(plans, H200)

    def compile_all() -> int:
        warm.compile_builds(builds, H200, processes=2)
        return len(list(Path(folder).rglob("*.cubin")))

    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder):  # the next test in this process has the usual cache
        first, second = compile_all(), compile_all()
        looked_up = [compilation.is_built(each, 90) for pair in plans for each in launches_of_a_call(*pair)]
    return len(builds), first, second, looked_up


def test_every_kernel_is_built_once_and_found_by_the_launches(tmp_path, workers):
    before = workers.submit(os.getenv, "TRITON_CACHE_DIR").result()
    kernels, first, second, looked_up = workers.submit(warm_up_twice, str(tmp_path)).result()
    assert kernels == first == second > 3
    assert all(looked_up)
    assert workers.submit(os.getenv, "TRITON_CACHE_DIR").result() == before


def test_all_row_counts_take_every_plan_of_the_planner_and_given_ones_only_theirs():
    every = list(warm.plans_of([wanted()], None, B200))
    few = list(warm.plans_of([wanted()], [128], B200))
    many = list(warm.plans_of([wanted()], [16384, 65536], B200))
    assert len(few) == len(many) == 1
    assert [plan for _, plan in every] == [few[0][1], many[0][1]]
    assert list(warm.plans_of([wanted()], [0], B200)) == [], "no rows, no kernel"


def test_plans_are_those_of_the_device_and_of_force():
    assert {type(plan) for _, plan in warm.plans_of([wanted()], None, A100)} == {MultiWavePlan}
    with fusednorm.force("warp_specialized"):
        forced = list(warm.plans_of([wanted()], [16384], H200))
    assert [plan.variant for _, plan in forced] == ["warp_specialized"]
    with fusednorm.force("reference"):
        assert list(warm.plans_of([wanted()], None, H200)) == []


def compile_what_no_gpu_takes() -> str:
    plans = [MultiWavePlan(1, chunk, 1, 4, 1, 128) for chunk in (1000, 1001, 1002)]  # Triton needs powers of 2
    try:
        warm.compile_builds([warm.Build(wanted(), plan, 0) for plan in plans], H200, processes=2)
    except RuntimeError as error:
        return str(error)
    return "compiled"


def test_what_a_process_cannot_compile_is_raised_in_this_one(workers):
    assert workers.submit(compile_what_no_gpu_takes).result().startswith("warmup: a kernel does not compile: ")


def test_a_kernel_that_calls_share_is_built_once(workers):
    plans = [pair for cols in (65536, 131072) for pair in warm.plans_of([wanted(cols=cols)], [4096], A100)]
    *alone, together = workers.submit(numbers_of_builds, [*([plan] for plan in plans), plans], A100).result()
    assert together < sum(alone), "column tiles of any width end with the same finalizer"


KEYS_OF_KERNELS = """
import sys, torch
from fusednorm.kernels import finalizer, multiwave, pipelined, warp_specialized
backwards = multiwave.backward, pipelined.backward, warp_specialized.backward
kernels = *backwards, multiwave.forward, finalizer.finalize
for index in map(int, sys.argv[1:]):
    kernels[index].cache_key  # computes the key on first use
print(*(kernel.cache_key for kernel in kernels))
"""


def test_what_a_kernel_is_called_on_disk_does_not_depend_on_what_ran_before():
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    there, back = (afresh.run(KEYS_OF_KERNELS, *order, environment=variables) for order in (ORDER, ORDER[::-1]))
    assert there.stdout == back.stdout and len(there.stdout.split()) == len(ORDER), there.stderr


def test_a_gradient_to_be_added_is_a_problem_of_its_own():
    residual = wanted()._replace(residual_dtype=FP32)
    assert residual.problem.residual_dtype == FP32
    assert wanted().problem != residual.problem


def test_nothing_is_compiled_where_no_gradient_is_wanted():
    assert list(warm.plans_of([wanted(mask=(False, False, False))], None, H200)) == []


def test_warmup_has_nothing_to_do_on_the_cpu():
    assert fusednorm.warmup("layer", [4096], BF16, device="cpu") == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_warmup_without_a_gpu_has_nothing_to_do_unless_a_gpu_is_asked_for():
    assert fusednorm.warmup("layer", [4096], BF16) == 0
    with pytest.raises(RuntimeError, match="device must be a GPU that is there, got cuda"):
        fusednorm.warmup("layer", [4096], BF16, device="cuda")


def test_warmup_refuses_samples_of_norms_without_modulations_and_of_no_rows():
    with pytest.raises(ValueError, match="^warmup: sample_rows must come with a modulated form, got 'of_sum'$"):
        fusednorm.warmup("layer", 4096, BF16, form="of_sum", sample_rows=8)
    for wrong, error in ((0, RuntimeError), (1.5, TypeError)):
        with pytest.raises(error, match="warmup: sample_rows must be"):
            fusednorm.warmup("layer", 4096, BF16, form="modulated", sample_rows=wrong)
    asked = {"form": "modulated", "sample_rows": [1024, 1], "device": "cpu"}
    assert fusednorm.warmup("layer", 4096, BF16, **asked, modulation_dtype=FP32) == 0


def test_warmup_refuses_a_dtype_of_modulations_of_norms_without_them_and_what_is_no_dtype():
    with pytest.raises(ValueError, match="^warmup: modulation_dtype must come with a modulated form, got 'of_sum'$"):
        fusednorm.warmup("layer", 4096, BF16, form="of_sum", modulation_dtype=FP32)
    with pytest.raises(TypeError, match="^warmup: dtypes must be torch.dtypes, got 'fp32'$"):
        fusednorm.warmup("layer", 4096, BF16, form="modulated", modulation_dtype="fp32")


def test_warmup_refuses_names_that_are_none():
    with pytest.raises(ValueError, match="warmup: norm must be one of layer, rms, got 'group'"):
        fusednorm.warmup("group", 4096, BF16)
    with pytest.raises(ValueError, match="warmup: directions must be one of forward, backward, got 'up'"):
        fusednorm.warmup("rms", 4096, BF16, directions=["up"])


def test_warmup_refuses_groups_that_do_not_divide_the_columns_on_every_device():
    for device in ("cpu", "meta"):
        with pytest.raises(RuntimeError, match="group_size must divide the 4096 columns, got 1000"):
            fusednorm.warmup("rms", 4096, BF16, form="of_gated", group_size=1000, device=device)


def build_with_another_triton() -> int:
    """The number of kernels that build_ahead reports if Triton compiles in an unknown way. Runs in a worker."""
    from fusednorm.tools import compilation

    plans = list(warm.plans_of([wanted(cols=512), wanted(direction="forward", cols=512)], [4096], H200))
    with mock.patch.object(compilation, "create_function_from_signature", lambda signature: None):
        with pytest.raises(compilation.UnknownTriton, match="another way than is known"):
            compilation.build_key(warm.program(*plans[0], H200).launches[0], 90)
        return warm.build_ahead(warm.launches_of(plans, H200), H200, None)


def test_with_a_triton_that_compiles_otherwise_nothing_is_built_ahead_and_nothing_fails(monkeypatch, workers):
    assert workers.submit(build_with_another_triton).result() >= 2
    monkeypatch.setitem(sys.modules, "fusednorm.tools.compilation", None)  # makes its import fail
    monkeypatch.delattr(fusednorm.tools, "compilation", raising=False)
    plans = list(warm.plans_of([wanted(direction="forward", cols=512)], [4096], H200))
    assert warm.build_ahead(warm.launches_of(plans, H200), H200, None) == 1


def test_a_kernel_that_cannot_be_built_gives_way_as_it_would_in_the_first_call(monkeypatch):
    from contextlib import nullcontext

    from fusednorm.kernels.config import RingTile

    from fusednorm.host import fallback, launcher

    loaded = []

    def run(program, tensors, shape, rows):
        kernel = program.launches[0].kernel.__name__
        if isinstance(program.launches[0].tile, RingTile):
            raise fallback.BuildFailed("PTXASError: no")
        assert shape == (rows, 4096) and all(each is None or each.numel() == rows * 4096 for each in tensors)
        loaded.append(kernel)

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(launcher, "run", run)
    plans = list(warm.plans_of([wanted()], None, H200))
    assert "pipelined" in {plan.variant for _, plan in plans}
    try:
        with pytest.warns(RuntimeWarning, match="cannot run as pipelined on H200: PTXASError: no"):
            warm._load(plans, torch.device("cpu"), H200)
    finally:
        fallback.forget()
    assert loaded == ["backward"] * len(plans)
