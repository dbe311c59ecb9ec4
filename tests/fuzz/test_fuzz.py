"""What the fuzzer finds: no fault in a few calls of each op, and each kind of fault that a kernel may have."""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import replace

import pytest
import torch

from fusednorm.host.kernel_devices import kernels_on
from fusednorm.operands import OPS

from .__main__ import Progress
from .check import Finding, check, run
from .draw import FAMILY, Call, draw
from .others import OTHERS
from .traits import traits
from .wide import FP32, FP64, passes, to_wide
from .workers import STARTS, Worker, failure

pytest.importorskip("triton")
ELEMENTS = 300


def small_call(op: str, **changes) -> Call:
    """The first call of an op that draw.py makes and that asks for all outputs, with changes."""
    calls = (draw(each, 1, ELEMENTS) for each in range(0, 1000 * FAMILY, FAMILY))
    first = next(call for call in calls if call.op == op and all(call.given.get("output_mask", ())))
    return replace(first, **changes)


@pytest.mark.parametrize("op", (*OPS, *OTHERS))
def test_calls_of_every_op_are_within_their_bounds(op):
    with kernels_on("cpu"):
        findings = check(small_call(op, variant=None), "cpu").findings
    assert findings and all(each.excess <= 1 for each in findings), findings


FEW_ROWS = {"shape": (9, 40), "normalized_ndim": 1, "mode": "plain", "variant": None, "setting": None}
TYPES = {"x": torch.bfloat16, "gate": FP64, "weight": None, "bias": FP32}
NUMBERS, WANTED = {"row_index": torch.int32}, {"output_mask": [True, True, False, True, True, True, True]}
FOUND: list[tuple[str, dict, dict]] = [  # what calls once were outside of their bounds for
    (
        "layer_norm_bwd_modulated", {"grad_out": FP64, "bias": FP64},
        {"output_mask": [True] * 7, "dx_dtype": FP64},
    ),
    ("rms_norm_bwd_modulated_by_index", NUMBERS | {"grad_out": FP64, "shift": FP64}, WANTED),
    ("rms_norm_bwd_modulated_by_index", NUMBERS | {"branch": FP64, "grad_out": FP32, "shift": FP32}, WANTED),
    ("layer_norm_bwd_modulated_by_index", NUMBERS | {"x": FP64, "scale": FP32}, WANTED),
    ("layer_norm_fwd_times_gate", TYPES, {"rounds_x_hat": True, "y_dtype": FP64, "groups": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "dtypes", "given"), FOUND)
def test_formulas_round_as_kernels_do(op, dtypes, given):
    call = small_call(op, **FEW_ROWS)
    values = {name: "normal" for name in call.values}
    layouts = {name: "[M]" if name in ("mean", "rstd") else "contiguous" for name in call.layouts}
    of = {name: torch.float16 for name in call.dtypes} | dtypes
    call = replace(call, dtypes=of, values=values, layouts=layouts, given=call.given | {"eps": 1e-5} | given)
    with kernels_on("cpu"):
        assert all(each.excess <= 1 for each in check(call, "cpu").findings)


@pytest.mark.parametrize("shape", [(0, 40), (3, 0), (40,)])
def test_calls_with_tables_may_have_no_rows_no_columns_or_one_row_without_a_dim(shape):
    for variant in (None, "warp_specialized"):  # the latter, which such a call never has, gives way to tensor code
        call = small_call("rms_norm_bwd_modulated_by_index", **FEW_ROWS | {"shape": shape, "variant": variant})
        assert all(each.excess <= 1 for each in check(call, "cpu").findings)


def test_large_means_of_heads_are_judged_as_those_of_rows():
    call = small_call("head_norm_fwd", shape=(4, 1, 32, 7), kv_heads=8, values="mean 1e4", rotary=0, setting=None)
    call = replace(call, dtypes=call.dtypes | {"x": torch.float32}, given=call.given | {"layer": True, "eps": 1e-6})
    with kernels_on("cpu"):
        assert all(each.excess <= 1 for each in check(call, "cpu").findings)


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_two_columns_may_differ_from_float64_by_errors_that_do_not_cancel(seed):
    """Where both columns err by one sign, no pass shows what the row's variance may lose."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(500, 1, generator=generator) + torch.tensor([0.0, 1e-3])
    exact, *others = (outputs[0] for outputs in passes(lambda: ((to_wide(x) * 3.0).std(-1),), seed, "cpu"))
    missed = sum((each - exact).abs().sum(0) for each in others)
    assert (missed > 0.5 * torch.finfo(torch.float32).eps * 3 * x.abs().amax(-1)).all()


CALL = Call(
    op="layer_norm_fwd", shape=(6, 40), normalized_ndim=1,
    dtypes={"x": torch.float32, "weight": torch.float32, "bias": None},
    values={"x": "normal", "weight": "parameter"}, layouts={"x": "contiguous", "weight": "contiguous"},
    given={"eps": 1e-5}, variant=None, margin=0, mode="plain", seed=0,
)  # fmt: skip


def spoiled(change):
    """Runs the op, then `change(outputs, arguments)`."""

    def runner(call, arguments):
        outputs = tuple(each.clone() for each in run(call, arguments))
        change(outputs, arguments)
        return outputs

    return runner


def test_one_wrong_element_is_found():
    def change(outputs, arguments):
        outputs[0][3, 7] *= 1.0001

    findings = check(CALL, "cpu", spoiled(change)).findings
    assert [each.excess > 1 for each in findings] == [True, False, False]
    assert "1 of 240 elements, worst at 127" in findings[0].text


def test_a_lost_digit_of_a_mean_is_found():
    findings = check(CALL, "cpu", spoiled(lambda outputs, arguments: outputs[1].mul_(1 + 2e-5))).findings
    assert [each.output for each in findings if each.excess > 1] == ["mean"]


def test_nan_is_found():
    findings = check(CALL, "cpu", spoiled(lambda outputs, arguments: outputs[2].fill_(torch.nan))).findings
    assert [each.output for each in findings if each.excess > 1] == ["rstd"]


@pytest.mark.parametrize(("mean", "right"), [(torch.nan, True), (torch.inf, True), (0.0, False)])
def test_the_mean_of_a_row_with_an_infinity_is_no_number(mean, right):
    def change(outputs, arguments):
        assert not outputs[1].isfinite().all()
        outputs[1].nan_to_num_(nan=mean, posinf=mean)

    call = replace(CALL, values=CALL.values | {"x": "inf"}, seed=1)
    findings = check(call, "cpu", spoiled(change)).findings
    assert [each.output for each in findings if each.excess > 1] == ([] if right else ["mean"])


def test_other_bits_in_a_second_call_are_found():
    with pytest.raises(AssertionError, match="output 0 has other bits in a second call"):
        check(CALL, "cpu", spoiled(lambda outputs, arguments: outputs[0].add_(torch.rand(()) * 1e-6)))


def test_a_write_beside_an_operand_is_found():
    call = replace(CALL, layouts=CALL.layouts | {"x": "row_strided"})
    with pytest.raises(AssertionError, match="wrote into its operands"):
        check(call, "cpu", spoiled(lambda outputs, arguments: arguments["x"]._base[0, -1].fill_(1)))


@pytest.mark.parametrize("eps_off, right", [(2, True), (-2, True), (200, False)])
def test_each_of_many_rows_may_be_off_by_the_last_bits_of_float64(eps_off, right):
    call = replace(CALL, shape=(2000, 3), dtypes=CALL.dtypes | {"x": torch.float64})
    off = 1 + eps_off * torch.finfo(torch.float64).eps
    findings = check(call, "cpu", spoiled(lambda outputs, arguments: outputs[2].mul_(off))).findings
    assert all(each.excess <= 1 for each in findings) is right, findings


@pytest.mark.parametrize("factor, right", [(1 - 1.4e-3, True), (1.02, False)])
def test_a_sigmoid_may_err_by_one_sign_below_a_gate_and_by_the_other_above_it(factor, right):
    """exp2 of a GPU does near 0. Deviations of a row of equal elements are as small as its gate."""
    call = small_call("layer_norm_fwd_of_gated", shape=(20, 256), normalized_ndim=1, variant=None, setting=None)
    call = replace(
        call,
        dtypes={"x": torch.float32, "gate": torch.float32, "weight": None, "bias": None},
        values=call.values | {"x": "constant", "gate": "tiny"},
        layouts=call.layouts | {"x": "contiguous", "gate": "contiguous"},
        given=call.given | {"eps": 1e-12, "activation": "sigmoid", "groups": 1},
    )
    findings = check(call, "cpu", spoiled(lambda outputs, arguments: outputs[2].mul_(factor))).findings
    assert all(each.excess <= 1 for each in findings) is right, findings


def test_a_row_is_judged_by_atens_error_too_but_not_by_its_infinity():
    finding = Finding("rstd", 3.0, None)
    assert [finding._replace(atens=each).is_fault for each in (None, 1.0, 2.0, math.inf)] == [True, True, False, True]


def test_numbers_that_were_rounded_to_either_side_are_rounded_again():
    """x_hat of a tie becomes 1 or 1 + 2^-7, and three times it another number of bfloat16."""
    tie = torch.tensor([1 + 2**-8])

    def formula():
        x_hat = (to_wide(tie) * 1.0).to(torch.bfloat16).float()
        return ((x_hat * 3.0).to(torch.bfloat16).float() * 1.0,)

    met = torch.cat([outputs[0].view(-1, 1) for outputs in passes(formula, 0, "cpu")])
    assert {*met.bfloat16().flatten().tolist()} >= {3.0, 3.015625, 3.03125}


def test_equal_numbers_that_are_added_to_larger_ones_vanish_as_in_float32():
    """1e4 + 1e-4 is 1e4 in float32, so the rows' deviations are 0, whatever the signs of the errors are."""
    x = torch.full((1, 8), 1e4), torch.arange(8.0) * 1e-5

    def formula():
        h = to_wide(x[0]) + to_wide(x[1])
        return (h - h.mean(-1, keepdim=True),)

    assert any((outputs[0] == 0).all() for outputs in passes(formula, 0, "cpu"))


def test_a_stored_number_near_a_tie_may_be_rounded_to_either_side():
    tie = 1 + 2**-8
    numbers = torch.tensor([tie, tie * (1 + 2**-23), tie * (1 - 2**-23), 1 + 2**-9, 1 + 3 * 2**-9])

    def formula():
        product = to_wide(numbers) * 1.0
        return (product.to(torch.bfloat16).float(),)

    met = torch.cat([outputs[0].view(-1, len(numbers)) for outputs in passes(formula, 0, "cpu")]).bfloat16()
    assert [set(column.tolist()) for column in met.T] == [*3 * [{1, 1 + 2**-7}], {1}, {1 + 2**-7}]


@pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value) encountered")
@pytest.mark.parametrize("op", ["layer_norm_fwd", "rms_norm_fwd_affine"])
def test_rows_whose_rstd_is_beyond_float32_are_what_they_are_in_aten(op):
    call = small_call(
        op, shape=(5, 40), normalized_ndim=1, dtypes={"x": torch.float32, "weight": None, "bias": None},
        values={"x": "denormal"}, layouts={"x": "contiguous"}, variant=None,
    )  # fmt: skip
    call = replace(call, given=call.given | {"eps": 0.0})

    def aten(call, arguments):
        x = arguments["x"]
        return torch.native_layer_norm(x, x.shape[1:], None, None, 0.0)

    with kernels_on("cpu"):
        ours = check(call, "cpu").findings
    theirs = check(call, "cpu", aten).findings if op == "layer_norm_fwd" else []
    assert all(each.excess <= 1 for each in (*ours, *theirs)), (ours, theirs)


def test_products_of_a_row_and_its_gate_have_squares_within_float32():
    calls = [call for call in (draw(each, 1, ELEMENTS) for each in range(0, 400 * FAMILY, 23)) if "gate" in call.dtypes]
    large = [call.values for call in calls if "large" in (call.values["x"], call.values.get("gate"))]
    assert large and all("normal" in (each["x"], each.get("gate", "normal")) for each in large)


def options_of(path, **changes) -> argparse.Namespace:
    return argparse.Namespace(**{"seed": 3, "elements": ELEMENTS, "out": path} | changes)


def test_a_run_goes_on_with_what_the_last_one_left_and_counts_each_call_once(tmp_path):
    path, most, done = tmp_path / "fuzz.jsonl.progress.json", 3 * FAMILY, []
    progress = Progress(path, options_of(path))
    first, second = (argparse.Namespace(numbers=progress.following(most)) for _ in range(2))
    for number in (0, 1):
        first.numbers.remove(number)
        progress.add({"number": number, "of": {"host": ["Python", "C++"]}})
    progress.save([first, second])
    progress = Progress(path, options_of(path))
    assert progress.state["of"] == {"host": {"Python": 2, "C++": 2}}
    while numbers := progress.following(most):
        done += numbers
    assert sorted(done) == [*range(2, most)]
    with pytest.raises(ValueError, match="must be of the calls that are asked for, .*'seed': 4"):
        Progress(path, options_of(path, seed=4))


def test_a_run_ends_with_one_sentence_on_its_calls_their_hosts_and_the_worst_error(tmp_path):
    progress = Progress(tmp_path / "progress.json", options_of(tmp_path))
    assert progress.verdict() == "seed 3: of 0 calls of 0 ops (hosts: none) none failed"
    on_both = {"op": ["layer_norm_bwd"], "host": ["Python", "C++"]}
    progress.add({"of": on_both, "worst": {"layer_norm_bwd dw": 0.5}, "atens": {"layer_norm_bwd dw": 0.25}})
    progress.add({"of": on_both | {"host": ["Python"]}, "worst": {"layer_norm_bwd dx": 0.375}})
    said = "seed 3: of 2 calls of 1 ops (hosts: C++ 1, Python 2) none failed"
    worst = "; the worst error is 0.50 of its bound, in layer_norm_bwd dw, ATen's is 0.25"
    assert progress.verdict() == said + worst
    progress.add({"faults": ["the process ended with code 3"], "call": {"op": "column_sum"}})
    assert "of 3 calls" in progress.verdict() and " 1 failed (column_sum 1); " in progress.verdict()


def test_a_failure_has_the_commands_that_repeat_it_alone_and_behind_its_family(tmp_path):
    options = options_of(tmp_path, device="cpu")
    first, later = (failure(number, ["wrong"], options) for number in (FAMILY, FAMILY + 3))
    assert first["repeat"].endswith(f"--only {FAMILY}") and "repeat_with_family" not in first
    assert later["repeat_with_family"].endswith(f"--only {FAMILY + 3} --behind {FAMILY}")


def test_calls_are_counted_by_what_they_are_of():
    of = traits(replace(CALL, shape=(6, 131), values={"x": "inf", "weight": "tiny"}, setting=8))
    assert of["columns"] == ["odd", "prime"] and of["values"] == ["inf", "tiny"]
    assert of["batch_invariant"] == ["with ordered sums"] and of["variant"] == ["by the planner"]
    known = {value for each in range(0, 40 * FAMILY, FAMILY // 5) for value in traits(draw(each, 1, 2**23))["columns"]}
    assert known >= {"odd", "prime", "more than 65,536", "none"}


def hangs_then_dies(pipe, options):
    for number in pipe.recv():
        pipe.send((STARTS, number))
        if number == 0:
            time.sleep(600)
        if number == 1:
            os._exit(3)
        pipe.send(("said", {"number": number}))


def test_calls_that_hang_or_die_are_found_and_the_next_ones_run():
    options = argparse.Namespace(limit=1.4, seed=0, elements=ELEMENTS, device="cpu")
    worker = Worker(options, hangs_then_dies, "fork")
    worker.give([0, 1, 2])
    said, end = [], time.monotonic() + 60
    while worker.numbers and time.monotonic() < end:
        said += filter(None, [worker.take()])
    worker.process.kill()
    assert [each.get("faults") for each in said] == [
        ["the call took more than 1 seconds"], ["the process ended with code 3"], None,
    ]  # fmt: skip
