"""The C++ host side repeats calls exactly, and reports errors."""

from __future__ import annotations

import contextlib
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import formulas
import pytest
import test_errors
import torch
from cases import BF16, FP16, FP32, FP64, NORMS, lay_out, make_case, statistic_layouts
from devices import planned_for
from fake_gpu import ILLEGAL_ADDRESS, STREAM, Config, Launched, Map, build_of
from norms import (
    OPS,
    SHAPE,
    assert_grads_close,
    assert_right,
    backward_of,
    exact_grads,
    forward_of,
    layer_norm,
    norms,
    operands,
    ours,
    statistics_of,
)
from torch.testing import assert_close

from fusednorm import sm_margin
from fusednorm.host import fallback, gpus, launch, native
from fusednorm.operands import OPS as ALL_OPS
from fusednorm.operands import BackwardOperands, ForwardOperands, Role
from fusednorm.planner import choice
from fusednorm.planner.device import H200
from fusednorm.planner.plan import ColumnRingPlan, ColumnTilePlan, MultiWavePlan, PipelinedPlan
from fusednorm.problem.calls import check_backward, check_forward
from fusednorm.tools.oracle import make_inputs

BF16_FP32 = (BF16, FP32, BF16)


ALL, DX, NO_DX = (True, True, True), (True, False, False), (False, True, True)


REPEATED = [  # norm, plan, shape, dtypes, mask of a backward; the widest compile slowly, so they have one norm each
    *((norm, MultiWavePlan, (64, 2048), BF16_FP32, None) for norm in NORMS),
    *((norm, PipelinedPlan, (512, 2560), BF16_FP32, ALL) for norm in NORMS),
    *((norm, PipelinedPlan, (512, 2560), BF16_FP32, DX) for norm in NORMS),
    ("rms", PipelinedPlan, (16, 32768), BF16_FP32, None),
    ("layer", PipelinedPlan, (16, 32768), BF16_FP32, ALL),
    *((norm, ColumnRingPlan, (256, 1024), BF16_FP32, NO_DX) for norm in NORMS),
    ("rms", MultiWavePlan, (64, 1000), (BF16, BF16, FP32), None),
    ("layer", MultiWavePlan, (64, 1000), (BF16, BF16, FP32), ALL),
    *((norm, MultiWavePlan, SHAPE, (FP64, FP64, FP64), ALL) for norm in NORMS),
    *((norm, MultiWavePlan, SHAPE, (FP16, None, FP16), ALL) for norm in NORMS),
    ("layer", ColumnTilePlan, (3, 262144), (FP32, FP32, FP32), ALL),
]


@pytest.mark.parametrize("norm, plan, shape, dtypes, mask", REPEATED, ids=str)
def test_the_driver_gets_what_python_would_launch(norm, plan, shape, dtypes, mask, gpu):
    with planned_for(replace(H200, sm_count=16)):  # few rows are many
        builds = run_and_compare(make_case(norm, shape, dtypes), plan, mask, gpu)
    sums = mask not in (None, DX) and None not in dtypes and plan is not ColumnTilePlan
    assert (builds[-1].name == "finalize") == sums


@norms
@pytest.mark.parametrize("mask", [None, ALL], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "layout, statistics", [("row_strided", "[M, 1]"), ("packed_slice", "strided"), ("packed_slice_of_grad_only", "[M]")]
)
def test_so_it_does_for_memory_that_is_not_contiguous(norm, mask, layout, statistics, gpu):
    case = make_case(norm, (2, 3, 4, 40), (FP32, FP32, FP32))
    run_and_compare(case, MultiWavePlan, mask, gpu, layout, statistics)


def run_and_compare(case, plan, mask, gpu, layout=None, statistics="[M]") -> list:
    """Calls the case's op twice and compares the second call, which C++ runs, with what Python would launch. Returns
    the builds of its launches."""
    calls = []
    for seed in (0, 1):
        given = inputs = make_inputs(case, seed=seed)
        if layout is not None:
            given = lay_out(inputs, layout)
        if mask is None:
            op, arguments = forward_of(case, given)
        else:
            mean, rstd = (statistic_layouts(each)[statistics] for each in statistics_of(case, inputs))
            op, arguments = backward_of(case, given, mask, mean=mean, rstd=rstd)
        calls.append(arguments)
    op(*calls[0])
    with gpu.repeating():
        outputs = op(*calls[1])
    assert_right(case, inputs, outputs, mask)
    operands = operands_of(case, calls[1])
    call = (check_forward if mask is None else check_backward)(operands)
    assert isinstance(choice.choose(call.problem, call.rows, gpus.spec_of(None)), plan)
    assert_launched_as_by_itself(operands, outputs, gpu.launched)
    return [each.build for each in gpu.launched]


def operands_of(case, arguments):
    """The operands of a call of the case's op."""
    if len(arguments) <= 5 and case.norm == "layer":
        return ForwardOperands("layer", *arguments)
    if case.norm == "layer":
        return BackwardOperands("layer", *arguments)
    if len(arguments) == 4:
        return ForwardOperands("rms", *arguments[:3], None, arguments[3])
    grad_out, x, shape, rstd, weight, mask = arguments
    return BackwardOperands("rms", grad_out, x, shape, None, rstd, weight, None, (*mask, False))


def assert_launched_as_by_itself(operands, outputs, launched) -> None:
    """Compares what C++ has launched for a call with what a preparation of this call alone would launch: all
    configurations, and all parameters but addresses, which must point to the same places of the same tensors."""
    call = (check_forward if isinstance(operands, ForwardOperands) else check_backward)(operands)
    spec = gpus.spec_of(None)
    program = launch.program_of(call, fallback.choose(call.problem, call.rows, spec), spec)
    alone = program.on_tensors(call.tensors, call.shape, call.rows)
    assert len(launched) == len(alone.launches)
    written = [each for each in outputs if each is not None]
    by_itself = [each for each in alone.outputs if each is not None]
    parts = [part for part in alone.parts if part is not None]
    start, size = (parts[0].data_ptr(), parts[0].untyped_storage().nbytes()) if parts else (0, 0)
    names = places(operands.tensors, by_itself) | ({(start, size): "workspace"} if parts else {})
    wanted = []
    in_order = [each for *_, which in program.turns(call.rows) for each in program.launches[which]]
    for known, each in zip(in_order, alone.launches, strict=True):
        build = build_of(known)
        wanted.append((config_of(build, each.grid), [named(value, names) for value in build.values(each)]))
    names = places(operands.tensors, written)
    addresses = [value for each in launched for value in pointers_of(each) if named(value, names) == value]
    names |= {(min(addresses), size): "workspace"} if addresses else {}
    assert [(each.config, [named(value, names) for value in values_of(each)]) for each in launched] == wanted


def places(tensors, outputs) -> dict[tuple[int, int], str]:
    """{(address, bytes): name} of tensors."""
    found = [(f"tensor {at}", each) for at, each in enumerate(tensors) if each is not None]
    found += [(f"output {at}", each) for at, each in enumerate(outputs)]
    return {(each.data_ptr(), memory_bytes(each)): name for name, each in found}


def memory_bytes(tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def named(value, names):
    """The value; an address in one of the named places as "name + offset"."""
    if isinstance(value, tuple):
        return tuple(named(each, names) for each in value)
    if not isinstance(value, int) or value < 2**32:
        return value
    return next((f"{name} + {value - at}" for (at, size), name in names.items() if at <= value < at + size), value)


def pointers_of(launched: Launched) -> list[int]:
    return [value for name, value in launched.parameters.items() if name.endswith("_ptr")]


def config_of(build, grid) -> Config:
    """The configuration that Triton's launcher would use for this grid."""
    num_warps, cluster, shared_bytes = build.compiled.packed_metadata
    x, y, z = [*grid, 1, 1][:3]
    return Config(
        build.compiled.function, STREAM, (x * cluster, y, z), (32 * num_warps, 1, 1), shared_bytes,
        (cluster, 1, 1), int(cluster > 1), int(build.name == "finalize"),
    )  # fmt: skip


def values_of(launched: Launched) -> list:
    """All parameters in order, without the last two: null pointers to Triton's scratch memory."""
    values = [v.known() if isinstance(v, Map) else v for v in launched.parameters.values()]
    assert values[-2:] == [0, 0]
    return values[:-2]


ROW_COUNTS = [  # norm, columns, dtypes, mask of a backward: plans of every form of grid
    ("rms", 1024, BF16_FP32, None),
    ("layer", 1024, BF16_FP32, ALL),
    ("layer", 1024, BF16_FP32, NO_DX),
    ("layer", 40, (FP32, FP32, FP32), ALL),
    ("rms", 16384, BF16_FP32, ALL),
    ("layer", 262144, (FP32, FP32, FP32), ALL),
]


@pytest.mark.parametrize("norm, cols, dtypes, mask", ROW_COUNTS, ids=str)
def test_each_of_500_row_counts_is_launched_as_it_would_be_by_itself(norm, cols, dtypes, mask, gpu):
    most = min(20_000, 2**24 // cols)
    case = make_case(norm, (most, cols), dtypes)
    inputs, gpu.computes = make_inputs(case), False
    mean, rstd = torch.rand(most), torch.rand(most)
    pick = random.Random(0)
    counts = [1, 2, 3, *(max(1, round(most ** pick.random())) for _ in range(497))]
    asked = len(gpu.python_calls)
    for rows in counts:
        x, grad_out = inputs.x[:rows], inputs.grad_out[:rows]
        if mask is None:
            op, arguments = forward_of(case, inputs, x=x)
        else:
            op, arguments = backward_of(case, inputs, mask, grad_out=grad_out, x=x, mean=mean[:rows], rstd=rstd[:rows])
        gpu.launched.clear()
        outputs = op(*arguments)
        if gpu.launched:
            assert_launched_as_by_itself(operands_of(case, arguments), outputs, gpu.launched)
    check = check_forward if mask is None else check_backward
    plans = choice.choices(check(operands_of(case, arguments)).problem, H200)
    assert len(gpu.python_calls) - asked <= max(5, len(plans))  # one for each range of row counts with a plan


@pytest.mark.parametrize("shape", [(20, 40), (4, 5, 40), (7, 40), (1, 40), (2, 3, 4, 40), (40,)], ids=str)
def test_a_known_call_runs_for_another_shape_of_x(shape, known_calls, gpu):
    case, _ = known_calls
    case = make_case("layer", shape, (FP32, FP32, FP32))
    inputs = make_inputs(case, seed=2)
    with gpu.repeating(2):
        op, arguments = forward_of(case, inputs)
        outputs = op(*arguments)
        assert_right(case, inputs, outputs)
        op, arguments = backward_of(case, inputs, mean=outputs[1], rstd=outputs[2])
        assert_right(case, inputs, op(*arguments), ALL)


def other_operands(inputs):
    """(name, changes): each changes one property of the operands that forward and backward share."""
    x, weight, bias = inputs.x, inputs.weight, inputs.bias
    yield "strides", {"x": torch.randn(4, 5, 48)[..., :40]}
    yield "alignment of x", {"x": torch.randn(801)[1:].view(4, 5, 40)}
    yield "dtype of x", {"x": x.double(), "statistics": FP64}
    yield "dtype of weight", {"weight": weight.bfloat16()}
    yield "dtype of bias", {"bias": bias.bfloat16()}
    yield "strides of weight", {"weight": torch.randn(80)[::2]}
    yield "alignment of weight", {"weight": torch.randn(41)[1:]}
    yield "no weight", {"weight": None}
    yield "no bias", {"bias": None}
    yield "normalized_shape", {"shape": (5, 40), "weight": torch.randn(5, 40), "bias": torch.randn(5, 40), "rows": 4}


def other_forwards(case, inputs):
    for name, changes in other_operands(inputs):
        operands = {key: each for key, each in changes.items() if key not in ("rows", "statistics", "grad_out")}
        yield name, forward_of(case, inputs, **operands)
    yield "eps", forward_of(case, inputs, eps=2 * case.eps)
    yield "norm", forward_of(make_case("rms", case.shape, (FP32,) * 3), inputs)


def other_backwards(case, inputs):
    for name, changes in other_operands(inputs):
        rows, dtype = changes.pop("rows", 20), changes.pop("statistics", FP32)
        statistics = {each: torch.rand(rows, dtype=dtype) for each in ("mean", "rstd")}
        like = changes.get("x", inputs.x)
        yield name, backward_of(case, inputs, **({"grad_out": torch.randn(like.shape)} | statistics | changes))
    yield "dtype of grad_out", backward_of(case, inputs, grad_out=inputs.grad_out.double())
    yield "strides of grad_out", backward_of(case, inputs, grad_out=torch.randn(4, 5, 80)[..., :40])
    yield "strides of rstd", backward_of(case, inputs, rstd=torch.rand(40)[::2])
    yield "dtype of mean", backward_of(case, inputs, mean=torch.rand(20, dtype=FP64))
    yield "mask", backward_of(case, inputs, mask=(True, False, True))
    yield "norm", backward_of(make_case("rms", case.shape, (FP32,) * 3), inputs)


@pytest.mark.parametrize("others, known", [(other_forwards, forward_of), (other_backwards, backward_of)])
def test_a_call_that_looks_different_in_anything_goes_to_python(others, known, known_calls, gpu):
    for name, (op, arguments) in others(*known_calls):
        try:
            with gpu.going_to_python(others.__name__.removeprefix("other_").removesuffix("s")):
                got = op(*arguments)
        except AssertionError as error:
            raise AssertionError(f"another {name}: {error}") from error
        on_meta = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in arguments]
        for output, like in zip(got, op(*on_meta), strict=True):
            assert output is None and like is None or (output.shape, output.dtype) == (like.shape, like.dtype)
    op, arguments = known(*known_calls)
    with gpu.repeating():
        op(*arguments)


def test_a_call_that_only_its_addresses_tell_apart_is_repeated(known_calls, gpu):
    case, _ = known_calls
    inputs = make_inputs(case, seed=5)
    with gpu.repeating(2):
        (op, arguments), (backward_op, operands) = forward_of(case, inputs), backward_of(case, inputs)
        assert_right(case, inputs, op(*arguments))
        assert_right(case, inputs, backward_op(*operands), ALL)


def test_x_and_gradients_in_any_order_of_memory_are_copied_without_python(known_calls, gpu):
    case, inputs = known_calls
    x, grad_out = (each.permute(2, 0, 1).contiguous().permute(1, 2, 0) for each in (inputs.x, inputs.grad_out))
    with gpu.repeating(3):
        op, arguments = forward_of(case, inputs, x=x)
        assert_right(case, inputs, op(*arguments))
        op, arguments = backward_of(case, inputs, x=x, grad_out=grad_out)
        assert_right(case, inputs, op(*arguments), ALL)
        op, arguments = backward_of(case, inputs, grad_out=torch.ones(()).expand(case.shape))  # of y.sum()
        got = op(*arguments)
    assert_close(got, formulas.norm_backward(*arguments[:8]))


def test_one_tensor_as_two_operands_is_repeated_right(known_calls, gpu):
    case, inputs = known_calls
    op, arguments = backward_of(case, inputs, grad_out=inputs.x)
    with gpu.repeating():
        got = op(*arguments)
    assert_close(got, formulas.norm_backward(*arguments[:8]))


def test_an_eps_of_nan_is_not_taken_for_the_default(gpu):
    """Whatever the bits of the NaN are."""
    x = torch.randn(SHAPE)
    for _ in range(2):
        OPS.rms_norm_fwd(x, [40], None, None)
    for bits in (-1, 0x7FF8_0000_0000_0000):
        (eps,) = struct.unpack("d", struct.pack("q", bits))
        with gpu.going_to_python("forward"):
            assert OPS.rms_norm_fwd(x, [40], None, eps)[0].isnan().all()


@pytest.mark.parametrize("row", [0, 3])
def test_a_tensor_whose_memory_was_freed_is_refused(row, known_norm):
    x = torch.randn(row + SHAPE[0], SHAPE[1])[row:]
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"layer_norm: all tensors must have memory, got one of shape \(6, 40\)"):
        layer_norm(known_norm, x=x)


def test_the_bias_of_a_backward_needs_no_memory(known_calls, gpu):
    case, inputs = known_calls
    bias = torch.empty(40)
    bias.untyped_storage().resize_(0)
    op, arguments = backward_of(case, inputs, bias=bias)
    with gpu.repeating():
        assert_right(case, inputs, op(*arguments), mask=(True, True, True))


def test_calls_without_rows_or_outputs_go_to_python_every_time(gpu):
    x, weight, statistic = torch.empty(0, 40), torch.ones(40), torch.ones(0)
    for _ in range(2):
        with gpu.going_to_python("forward", "backward", "backward"):
            assert OPS.rms_norm_fwd(x, [40], weight)[0].shape == (0, 40)
            assert (OPS.rms_norm_bwd(x, x, [40], statistic, weight)[1] == 0).all()
            assert OPS.rms_norm_bwd(x, x, [40], statistic, weight, [False, False]) == (None, None)


def test_inference_mode_is_repeated_too(known_calls, gpu):
    case, inputs = known_calls
    op, arguments = forward_of(case, inputs)
    with torch.inference_mode(), gpu.repeating():
        outputs = op(*arguments)
    assert_right(case, inputs, outputs)


def test_a_call_is_repeated_under_the_margin_that_it_was_planned_for(known_calls, gpu):
    (op, arguments), (backward_op, operands) = forward_of(*known_calls), backward_of(*known_calls)
    gpu.remembers = True
    with sm_margin(16):
        with gpu.going_to_python("forward", "backward"):
            op(*arguments)
            backward_op(*operands)
        with gpu.repeating(2):
            op(*arguments)
            backward_op(*operands)
    with gpu.repeating(2):
        op(*arguments)
        backward_op(*operands)


def test_a_call_whose_margin_changed_while_python_ran_it_is_not_known_by_it(gpu, monkeypatch):
    arguments, run = operands("rms", requires_grad=""), launch.run
    with sm_margin(16):
        ours("rms", *arguments)  # Python now knows the call under that margin
    native.forget()

    def change_and_run(call, miss):
        block.enter_context(sm_margin(16))
        return run(call, miss)

    with contextlib.ExitStack() as block, monkeypatch.context() as patch:
        patch.setattr(launch, "run", change_and_run)
        ours("rms", *arguments)
    with gpu.going_to_python("forward"):
        ours("rms", *arguments)
    with gpu.repeating():
        ours("rms", *arguments)


def test_a_margin_reaches_the_thread_that_runs_a_backward(gpu):
    tensors = operands("layer")
    for _ in range(2):
        ours("layer", *tensors)[0].sum().backward()
    y, *_ = ours("layer", *tensors)
    with sm_margin(16), gpu.going_to_python("backward"):
        y.sum().backward()


def test_errors_of_the_driver_reach_the_caller(known_calls, gpu):
    op, arguments = forward_of(*known_calls)
    gpu.result = ILLEGAL_ADDRESS
    with pytest.raises(RuntimeError, match="fusednorm: CUDA's driver says: an illegal memory access was encountered"):
        op(*arguments)
    gpu.result = 999
    with pytest.raises(RuntimeError, match="fusednorm: CUDA's driver says: unknown error"):
        op(*arguments)
    gpu.result = 0
    with gpu.repeating():
        op(*arguments)


def test_errors_in_a_backward_reach_the_caller(gpu):
    tensors = operands("layer")
    ours("layer", *tensors)[0].sin().sum().backward()
    y, *_ = ours("layer", *tensors)
    gpu.result = ILLEGAL_ADDRESS
    with pytest.raises(RuntimeError, match="illegal memory access"):
        y.sin().sum().backward()


@pytest.mark.parametrize("op, overrides, message", test_errors.WRONG_CALLS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_wrong_calls_get_pythons_sentence(op, overrides, message, requires_grad):
    for _ in range(2):
        test_errors.call(op)
    if requires_grad and "x" not in overrides:
        overrides = overrides | {"x": test_errors.X.clone().requires_grad_()}
    with test_errors.raises(op, message):
        test_errors.call(op, **overrides)


def test_a_mask_of_another_length_gets_pythons_sentence():
    with test_errors.raises("rms_norm_bwd", "output_mask must have one flag per output, got [True]"):
        test_errors.call("rms_norm_bwd", output_mask=[True])


def test_errors_of_python_in_a_backward_reach_the_caller(gpu, monkeypatch):
    y, *_ = ours("layer", *operands("layer"))

    def refuse(*_):
        raise RuntimeError("planned to fail")

    monkeypatch.setattr(launch, "run", refuse)
    with pytest.raises(RuntimeError, match="planned to fail"):
        y.sum().backward()


def test_many_threads_call_at_once(gpu):
    def work(seed):
        for turn in range(12):
            norm = ("layer", "rms")[(seed + turn) % 2]
            tensors = operands(norm, seed=12 * seed + turn, shape=((6, 40), (7, 40), (8, 40))[turn % 3])
            leaves = [each for each in tensors if each is not None]
            got = torch.autograd.grad(ours(norm, *tensors)[0].sin().sum(), leaves)
            want = exact_grads(norm, tensors, lambda out, leaves: torch.autograd.grad(out[0].sin().sum(), leaves))
            assert_grads_close(got, want)
            if turn == 7:
                native.forget()

    before = native.repeats()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert native.repeats() > before + 50


def test_a_launch_takes_two_tensor_maps_of_each_row_tensor_of_any_op():
    """A ring copies 1040 columns as 1024 and 16, by two maps of 128 bytes."""
    step = native.extension.Step(
        function=0, sides=[1, 1, 1], grid=[None, None], threads=32, shared_bytes=0, cluster=1, dependent=False
    )

    def add_a_map():
        step.add_map(index=0, type=9, rows_dim=1, shape=[16, 1], strides=[32], box=[16, 1])

    most = max(sum(slot.role is Role.ROWS for slot in (*op.inputs, *op.outputs)) for op in ALL_OPS.values())
    for _ in range(2 * most):
        add_a_map()
    with pytest.raises(RuntimeError, match=r"of 4096 bytes in all, got parameter 33 at byte 4096"):
        for _ in range(33):
            add_a_map()
