"""Prepared calls in Python: each launches exactly what it would launch by itself, for any number of rows. A wrong call
is never taken for a known one."""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import BF16, FP32, make_case
from planning import make_problem
from tables import BACKWARDS, FORWARDS, Table

from fusednorm import batch_invariant, force, ops, sm_margin
from fusednorm.host import gpus, key, native, prepared, torch_compat
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.host.program import MOST_ROWS, Map, OnTensors, Program
from fusednorm.operands import BackwardOperands, ForwardOperands, operands_of
from fusednorm.planner import choice
from fusednorm.planner.device import H200
from fusednorm.planner.plan import VARIANTS, grid_of
from fusednorm.problem.calls import check_backward, check_forward
from fusednorm.tools.oracle import make_inputs
from fusednorm.tools.tune import ROWS_PER_SM

STREAM, HEAD = 77, ("head",) * 9


def strictly_allocated(shape, strides, dtype):
    """As torch 2.11 allocates: it takes tuples, and no torch.Size."""
    assert type(shape) is type(strides) is tuple and all(type(size) is int for size in shape + strides)
    return torch.empty_strided(shape, strides, dtype=dtype)


@pytest.fixture(autouse=True, params=[False, True], ids=["operands one by one", "operands packed"])
def launched(monkeypatch, request):
    """CPU tensors stand in for those of an H200. Yields a list that gets the arguments of each launch; no kernel
    runs."""
    from fusednorm.host import launcher

    launched = []

    def packed(*arguments):
        assert len(arguments) == 5 + len(HEAD) and type(arguments[-1]) is tuple
        launched.append([*arguments[:-1], *arguments[-1]])

    class Build(launcher.Build):
        head, packs_operands = HEAD, request.param

        def __init__(self, launch):
            self.launch = packed if request.param else lambda *arguments: launched.append(list(arguments))
            maps = sum(isinstance(each, Map) for each in launch.arguments())
            self.encoders = [partial(encoded, at) for at in range(maps)]

    monkeypatch.setattr(launcher, "load", lambda launches, device: [Build(each) for each in launches])
    monkeypatch.setattr(gpus, "spec_of", lambda device: H200)
    monkeypatch.setattr(torch_compat, "allocate", strictly_allocated)
    monkeypatch.setattr(torch_compat, "current_device", lambda: -1)
    monkeypatch.setattr(torch_compat, "raw_stream", lambda device: STREAM)
    prepared.forget()
    with kernels_on("cpu"):
        yield launched
    prepared.forget()


def encoded(position, pointer, shape, strides):
    return "map", position, pointer, tuple(shape), tuple(strides)


def backward_arguments(rows=64, cols=4096, norm="layer", residual=False, mask=(True, True, True)) -> BackwardOperands:
    inputs = make_inputs(make_case(norm, (rows, cols), (BF16, FP32, BF16)))
    layer = norm == "layer"
    mean, rstd = (torch.randn(rows, 1) for _ in range(2))
    mask = mask if layer else (*mask[:2], False)
    extra = torch.randn(rows, cols, dtype=BF16) if residual else None
    operands = inputs.grad_out, inputs.x, (cols,), mean if layer else None, rstd, inputs.weight
    return BackwardOperands(norm, *operands, inputs.bias if layer else None, mask, extra)


def first(operands) -> Program | None:
    """A first call, which need not be the first; the program that is kept for calls like it."""
    return prepared.run(operands, ops.first)[1]


def found(operands):
    """The outputs by a kept program, or None."""
    return prepared.run(operands)[0]


def by_itself(operands) -> OnTensors:
    """What a call would launch by Triton, whatever is kept."""
    from fusednorm.host import launch

    if operands.direction == "forward":
        return launch.on_tensors(check_forward(operands))
    return launch.on_tensors(check_backward(operands))


def address_of(given):
    if type(given) is tuple:
        return tuple(address_of(each) for each in given)
    return given.data_ptr() if isinstance(given, torch.Tensor) else given


def arguments_of(launch) -> list:
    """What a launch on tensors should give to `Build.launch`."""
    given, maps = [], 0
    for each in launch.arguments():
        if isinstance(each, Map):
            shape, strides = each.shape, each.strides
            given += [encoded(maps, each.tensor.data_ptr(), shape, strides), *shape, *strides]
            maps += 1
        else:
            given.append(address_of(each))
    return [*[*launch.grid, 1, 1][:3], STREAM, *HEAD, *given]


def named(arguments: list, tensors: dict) -> list:
    """The arguments with "name+offset" in place of addresses in these tensors."""
    regions = [(each.data_ptr(), each.nbytes, name) for name, each in tensors.items() if each is not None]

    def name_of(value):
        if isinstance(value, tuple):
            return tuple(name_of(each) for each in value)
        if type(value) is not int:
            return value
        return next((f"{name}+{value - at}" for at, size, name in regions if at <= value < at + size), value)

    return [name_of(value) for value in arguments]


def tensors_of(arguments, outputs, workspace) -> dict:
    of_outputs = {f"output {at}": each for at, each in enumerate(outputs)}
    return dict(enumerate(arguments.tensors)) | of_outputs | {"workspace": workspace}


def memory_of(parts) -> torch.Tensor | None:
    """The workspace that has these parts."""
    part = next((each for each in parts if each is not None), None)
    return part if part is None else torch.tensor([], dtype=part.dtype).set_(part.untyped_storage())


def assert_launches_as_by_itself(operands, launched, monkeypatch):
    """Runs a call by a kept program, and compares it with the same call by itself."""
    allocated, alone = [], by_itself(operands)
    launched.clear()
    monkeypatch.setattr(
        torch_compat, "allocate", lambda *each: allocated.append(strictly_allocated(*each)) or allocated[-1]
    )
    outputs = found(operands)
    expected = tensors_of(operands, alone.outputs, memory_of(alone.parts))
    tensors = tensors_of(operands, outputs, allocated[-1] if alone.parts else None)
    wanted = [named(arguments_of(each), expected) for each in alone.launches]
    assert [named(each, tensors) for each in launched] == wanted
    for got, want in zip(outputs, alone.outputs, strict=True):
        assert (got is None) == (want is None)
        assert got is None or (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(
    "variant, changes",
    [
        ("pipelined", {}),
        ("pipelined", {"residual": True}),
        ("pipelined", {"mask": (False, True, True), "rows": 2048}),
        ("pipelined", {"cols": 32768}),
        ("multi_wave", {"cols": 1000}),
        ("multi_wave", {"mask": (True, False, False)}),
        ("multi_wave", {"cols": 262144, "rows": 3}),
        ("warp_specialized", {"cols": 2048}),
    ],
    ids=str,
)
def test_a_second_call_is_launched_as_the_first_but_for_its_addresses(norm, variant, changes, launched, monkeypatch):
    one, other = (backward_arguments(norm=norm, **changes) for _ in range(2))
    with force(variant):
        program = first(one)
        assert choice.choose(check_backward(one).problem, len(one.x), H200, variant).variant == variant
        assert_launches_as_by_itself(one, launched, monkeypatch)
        assert_launches_as_by_itself(other, launched, monkeypatch)
        assert first(other) is program


@pytest.mark.parametrize("changes", [{}, {"residual": True}, {"norm": "rms"}, {"cols": 33001}, {"rows": 16}], ids=str)
def test_blocks_of_rows_are_launched_each_with_its_own(changes, launched, monkeypatch):
    one, other = (backward_arguments(**{"rows": 20, "cols": 256} | changes) for _ in range(2))
    with batch_invariant(ordered_sums=8):
        program = first(one)
        assert program.blocks.rows == 8 and (program.rows_above, program.most_rows) == (8, MOST_ROWS)
        assert_launches_as_by_itself(one, launched, monkeypatch)
        assert_launches_as_by_itself(other, launched, monkeypatch)
        assert first(other) is program


def forward_arguments(*shape, norm="layer", dims=1):
    inputs = make_inputs(make_case(norm, shape, (BF16, FP32, BF16)))
    end = shape[-dims:]
    weight, bias = (torch.randn(end) for _ in range(2))
    return ForwardOperands(norm, inputs.x, end, weight, bias if norm == "layer" else None, 1e-5)


@pytest.mark.parametrize(
    "shape", [(6, 4096), (6, 5, 4096), (2, 3, 5, 4096), (1, 4096), (4096,), (1, 6, 1, 4096)], ids=str
)
def test_a_forward_runs_for_x_of_another_shape(shape, launched, monkeypatch):
    program = first(forward_arguments(7, 4096))
    arguments = forward_arguments(*shape)
    assert first(arguments) is program
    assert_launches_as_by_itself(arguments, launched, monkeypatch)


def test_several_normalized_dims_are_one_row(launched, monkeypatch):
    first(forward_arguments(7, 8, 512, dims=2))
    arguments = forward_arguments(3, 5, 8, 512, dims=2)
    assert_launches_as_by_itself(arguments, launched, monkeypatch)


def test_the_stride_of_a_single_statistic_is_nothing_to_later_calls(launched, monkeypatch):
    """One element of every second is contiguous, whatever its stride."""
    mean, rstd = (torch.randn(2)[::2] for _ in range(2))
    assert rstd.is_contiguous() and rstd.stride() == (2,)
    program = first(backward_arguments(rows=1)._replace(mean=mean, rstd=rstd))
    second = backward_arguments(rows=2)
    assert first(second) is program
    assert_launches_as_by_itself(second, launched, monkeypatch)


@pytest.mark.parametrize("name", ["weight", "mean"])
def test_a_tensor_without_memory_is_not_taken_for_one_with_memory(name):
    arguments = backward_arguments()
    first(arguments)
    without = torch._efficientzerotensor(getattr(arguments, name).shape, dtype=getattr(arguments, name).dtype)
    assert found(arguments) is not None
    assert found(arguments._replace(**{name: without})) is None


ROW_COUNTS = [
    ("layer", 4096, (True, True, True)),
    ("rms", 1024, (False, True, True)),
    ("layer", 96, (True, True, True)),
]


@pytest.mark.parametrize(
    "norm, cols, mask", [*ROW_COUNTS, ("rms", 1024, None), ("layer", 262144, (True,) * 3)], ids=str
)
def test_many_row_counts_are_launched_as_each_would_be_by_itself(norm, cols, mask, launched, monkeypatch):
    pick, most = random.Random(0), min(20_000, 2**24 // cols)
    x = torch.zeros(most, cols, dtype=BF16)
    many = BackwardOperands(
        norm, x.clone(), x, (cols,), torch.zeros(most, 1) if norm == "layer" else None, torch.zeros(most, 1),
        torch.zeros(cols), torch.zeros(cols) if norm == "layer" else None, mask,
    )  # fmt: skip
    programs = set()
    for rows in [1, 2, 3, *(max(1, round(most ** pick.random())) for _ in range(300))]:
        if mask is None:
            arguments = ForwardOperands(norm, x[:rows], (cols,), many.weight, many.bias, 1e-5)
        else:
            mean = None if many.mean is None else many.mean[:rows]
            arguments = many._replace(grad_out=many.grad_out[:rows], x=x[:rows], mean=mean, rstd=many.rstd[:rows])
        programs.add(first(arguments))
        assert_launches_as_by_itself(arguments, launched, monkeypatch)
    problem = (check_forward if mask is None else check_backward)(arguments).problem
    assert len(programs) <= len(choice.choices(problem, H200)) <= len(ROWS_PER_SM)
    assert len(prepared.kind_of(key.look(arguments)[0]).by_shape) <= prepared.KEPT_SHAPES


@pytest.mark.parametrize("variant", VARIANTS[:-1])
def test_both_hosts_know_one_rule_for_the_number_of_ctas(variant):
    if native.extension is None:
        pytest.skip("the host side in C++ is not built")
    pick = random.Random(0)
    for cols in (64, 1024, 1987, 4096, 16384, 65536, 262144):
        for changes in ({}, {"direction": "forward"}, {"wants_dx": False}):
            problem = make_problem("layer", cols, **changes)
            for _, plan in choice.choices(problem, H200, variant):
                if plan.variant == "reference":
                    continue
                unwanted, in_float32 = {"wants_dw": False, "wants_db": False}, {"weight_dtype": torch.float32}
                for changed, samples in ((unwanted, 1), ({}, 1), (in_float32, 1), ({}, 7)):
                    for rows in [1, 2, 131, 132, 133, *(round(2 ** (31 * pick.random())) for _ in range(100))]:
                        asked = replace(problem, **changed)
                        grid = grid_of(plan, asked, H200, rows if samples > 1 else 0)
                        rows *= samples
                        numbers = [rows, grid.ctas(rows), grid.partials(rows), samples]
                        assert native.grid_in_cpp(grid).numbers(rows) == numbers


class Subclass(torch.Tensor):
    pass


def other_calls(arguments):
    _, grad_out, x, shape, mean, rstd, weight, bias, mask, *_ = arguments
    rows, cols = x.shape
    wide = torch.randn(rows, cols + 8, dtype=x.dtype)[:, :cols]
    yield "no rows", arguments._replace(grad_out=grad_out[:0], x=x[:0], mean=mean[:0], rstd=rstd[:0])
    yield "rows of grad_out alone", arguments._replace(grad_out=grad_out[1:])
    yield "rows of x alone", arguments._replace(x=x[1:])
    yield "batch dims of grad_out alone", arguments._replace(grad_out=grad_out.unflatten(0, (-1, 2)))
    yield "rows of mean alone", arguments._replace(mean=mean[1:])
    yield "columns", arguments._replace(x=x.view(-1, cols // 2), grad_out=grad_out.view(-1, cols // 2))
    yield "a negated view", arguments._replace(x=torch._neg_view(x))
    yield "a subclass", arguments._replace(x=x.as_subclass(Subclass))
    yield "a sparse tensor", arguments._replace(grad_out=grad_out.to_sparse())
    yield "no tensor", arguments._replace(weight=3)
    yield "no tuple", arguments._replace(normalized_shape=3)
    yield "a nested statistic", arguments._replace(mean=torch.nested.nested_tensor([mean[:1], mean[1:]]))
    yield "rows at an expanded stride", arguments._replace(grad_out=grad_out[:1].expand(rows, cols))
    yield "strides of x", arguments._replace(x=wide)
    yield "strides of grad_out", arguments._replace(grad_out=wide)
    yield "dtype of grad_out", arguments._replace(grad_out=grad_out.float())
    yield "dtype of weight", arguments._replace(weight=weight.double())
    yield "no bias", arguments._replace(bias=None)
    yield "mask", arguments._replace(output_mask=(True, False, True))
    yield "residual", arguments._replace(residual_grad=torch.randn(rows, cols))
    yield "dx_dtype", arguments._replace(dx_dtype=FP32)
    yield "shape", arguments._replace(normalized_shape=(rows, cols))
    yield "unaligned", arguments._replace(weight=torch.randn(cols + 1)[1:])
    yield "norm", arguments._replace(norm="rms")
    yield "wrong shape of rstd", arguments._replace(rstd=rstd[1:])


def test_a_call_that_looks_different_in_anything_is_not_taken_for_a_known_one():
    arguments = backward_arguments()
    first(arguments)
    assert found(arguments) is not None
    tried = [name for name, other in other_calls(arguments) if found(other) is None]
    assert tried == [name for name, _ in other_calls(arguments)]


@pytest.mark.parametrize("cols, size", [(4096, 4096.0), (1, True)], ids=str)
def test_a_size_that_is_no_integer_is_not_taken_for_one(cols, size):
    arguments = forward_arguments(6, cols)
    first(arguments)
    assert found(arguments) is not None
    assert found(arguments._replace(normalized_shape=(size,))) is None


def test_calls_with_an_eps_of_nan_are_not_remembered():
    arguments = forward_arguments(6, 4096)._replace(eps=math.nan)
    first(arguments)
    assert found(arguments) is None


@pytest.mark.parametrize("eps", [1, torch.tensor(1e-5), True, None], ids=str)
def test_an_eps_that_is_no_float_is_not_taken_for_a_known_one(eps):
    arguments = forward_arguments(6, 4096)._replace(eps=1.0)
    first(arguments)
    assert found(arguments) is not None
    assert found(arguments._replace(eps=eps)) is None


def test_force_is_part_of_what_a_call_looks_like():
    arguments = backward_arguments()
    first(arguments)
    with force("multi_wave"):
        assert found(arguments) is None
    assert found(arguments) is not None


def test_a_call_does_not_depend_on_what_requires_grad():
    arguments = forward_arguments(6, 4096)
    first(arguments)
    assert found(arguments._replace(x=arguments.x.requires_grad_())) is not None


def test_one_tensor_may_be_two_operands_of_a_first_call_and_of_later_ones(launched, monkeypatch):
    arguments = backward_arguments()
    twice = arguments._replace(grad_out=arguments.x)
    program = first(twice)
    assert first(arguments) is program
    assert_launches_as_by_itself(arguments, launched, monkeypatch)
    assert_launches_as_by_itself(twice, launched, monkeypatch)


@pytest.mark.parametrize("operand", ["x", "grad_out", "weight", "rstd"])
def test_calls_that_copy_an_operand_are_planned_once(operand, launched, monkeypatch):
    copied = {
        "x": torch.randn(4096, 64, dtype=BF16).t(),
        "grad_out": torch.randn(4096, 64, dtype=BF16).t(),
        "weight": torch.randn(4096, 2)[:, 0],
        "rstd": torch.randn(8, 8).t(),
    }
    arguments = backward_arguments(rows=64, cols=4096)._replace(**{operand: copied[operand]})
    outputs, program = prepared.run(arguments, ops.first)
    assert outputs[0].shape == (64, 4096) and len(launched) == 2
    assert program is not None and found(arguments) is None
    monkeypatch.setattr(ops.launch(), "run", lambda *_: pytest.fail("the call was planned again"))
    assert prepared.run(arguments, ops.first)[1] is program and len(launched) == 4


def test_tensors_of_transforms_are_not_taken():
    arguments = forward_arguments(6, 4096)
    first(arguments)
    seen = []

    def function(x):
        seen.append(x)
        assert found(arguments._replace(x=x)) is None
        return x.float().sum()

    torch.func.grad(function)(arguments.x)
    torch.func.vmap(function)(torch.stack([arguments.x] * 3))
    assert len(seen) == 2 and all(found(arguments._replace(x=leaked)) is None for leaked in seen)


def test_profilers_that_hook_tritons_launches_see_all():
    from triton import knobs

    arguments = backward_arguments()
    first(arguments)
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook.add(print)
        assert found(arguments) is None
        hook.remove(print)
        assert found(arguments) is not None


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_without_tritons_lists_of_hooks_triton_launches(name, monkeypatch):
    from triton import knobs

    from fusednorm.host import launcher

    arguments, by_triton = backward_arguments(), []
    program = first(arguments)
    monkeypatch.setattr(launcher, "hand_over", by_triton.extend)
    monkeypatch.setattr(knobs.runtime, name, None)
    assert found(arguments) is None
    assert first(arguments) is program and len(by_triton) == 2


def test_errors_of_a_launch_reach_the_caller(monkeypatch):
    arguments = backward_arguments()
    first(arguments)

    def refuse(device):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(torch_compat, "raw_stream", refuse)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        found(arguments)


def test_a_call_runs_under_the_margin_that_it_was_planned_for():
    arguments = backward_arguments()
    without = first(arguments)
    with sm_margin(16):
        assert found(arguments) is None
        within = first(arguments)
        assert found(arguments) is not None
    assert first(arguments) is without and (without.sm_margin, within.sm_margin) == (0, 16)


@pytest.mark.parametrize("after", [100, 0])
@pytest.mark.parametrize("stage", ["check", "plan"])
def test_a_call_is_not_remembered_if_the_margin_changed_while_it_was_planned(stage, after, monkeypatch):
    from fusednorm.host import launch

    arguments, blocks = backward_arguments(), contextlib.ExitStack()
    module, name = {"check": (ops, "check"), "plan": (launch, "program_of")}[stage]
    done = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: blocks.enter_context(sm_margin(after)) or done(*given))
    with blocks:
        outputs, program = prepared.run(arguments, ops.first)
        assert outputs is not None and program is None and found(arguments) is None
    assert found(arguments) is None


def test_another_current_device_is_made_current(monkeypatch, launched):
    arguments, current = backward_arguments(), [0]
    first(arguments)

    @contextlib.contextmanager
    def device(index):
        current[0] = index
        yield
        current[0] = 0

    monkeypatch.setattr(torch_compat, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    assert found(arguments) is not None and launched
    assert current == [0]


def test_kinds_of_calls_are_bounded(monkeypatch):
    monkeypatch.setattr(prepared, "KEPT_KINDS", 3)
    calls = [backward_arguments(rows=8, cols=cols) for cols in range(1024, 1024 + 8 * 16, 16)]
    for last, each in enumerate(calls, 1):
        first(each)
        assert 1 <= sum(found(known) is not None for known in calls[:last]) <= 3


def unlike_forwards():
    """(name, a forward, another that differs from it in this alone); both are right."""
    known = forward_arguments(6, 4096)
    bare = known._replace(weight=None, bias=None)
    parts = torch.randn(7, 6, 4096, dtype=BF16)
    yield "norm", known._replace(bias=None), known._replace(norm="rms", bias=None)
    shapes = forward_arguments(6, 8, 512, norm="rms")._replace(weight=None), (8, 512)
    yield "normalized_shape", shapes[0], shapes[0]._replace(normalized_shape=shapes[1])
    yield "eps", known, known._replace(eps=1e-6)
    yield "whether statistics are wanted", known, known._replace(wants_statistics=False)
    yield "dtype of x", known, known._replace(x=known.x.half())
    yield "strides of x", bare, bare._replace(x=torch.randn(6, 4104, dtype=BF16)[:, :4096])
    yield "rows at the inner stride", *(bare._replace(x=parts[:n].transpose(0, 1)) for n in (5, 7))
    for name in ("weight", "bias"):
        yield f"no {name}", known, known._replace(**{name: None})
        yield f"dtype of {name}", known, known._replace(**{name: getattr(known, name).double()})
        yield f"alignment of {name}", known, known._replace(**{name: torch.randn(4097)[1:]})
    one, other = (known._replace(**{name: torch.randn(4097)[1:]}) for name in ("weight", "bias"))
    yield "which is not aligned", one, other


def unlike_backwards():
    known = backward_arguments(residual=True)
    spaced = torch.rand(64, 3), torch.rand(64, 2)
    yield "dtype of x", known, known._replace(x=known.x.half())
    for name in ("mean", "rstd", "bias", "residual_grad"):
        yield f"dtype of {name}", known, known._replace(**{name: getattr(known, name).double()})
    for name in ("mean", "rstd"):
        yield f"stride of {name}", *(known._replace(**{name: each[:, 0]}) for each in spaced)
    unaligned = torch.randn(64 * 4096 + 1).bfloat16()[1:].view(64, 4096)
    yield "alignment of residual_grad", known, known._replace(residual_grad=unaligned)


@pytest.mark.parametrize("pairs", [unlike_forwards, unlike_backwards])
def test_right_calls_that_differ_in_one_thing_are_told_apart(pairs):
    for name, known, other in pairs():
        prepared.forget()
        first(known)
        assert found(known) is not None, name
        assert found(other) is None, name
        first(other)
        assert found(other) is not None, f"{name}: refused for another reason"


def test_force_and_the_margin_are_part_of_what_a_forward_looks_like():
    arguments = forward_arguments(6, 4096)
    first(arguments)
    for block in (lambda: force("multi_wave"), lambda: sm_margin(16)):
        with block():
            assert found(arguments) is None
        assert found(arguments) is not None


def test_another_device_is_told_apart(monkeypatch):
    arguments = forward_arguments(6, 4096)._replace(weight=None, bias=None)  # the device of x alone
    first(arguments)
    assert found(arguments) is not None
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1)
    assert found(arguments) is None


@pytest.mark.parametrize("name", ["mean", "rstd", "weight", "residual_grad"])
def test_a_tensor_of_another_shape_at_an_aligned_address_is_not_taken(name):
    arguments = backward_arguments(residual=True)
    first(arguments)
    assert found(arguments) is not None
    assert found(arguments._replace(**{name: getattr(arguments, name)[8:]})) is None


@pytest.mark.parametrize("make", [forward_arguments, lambda *shape: backward_arguments(*shape, residual=True)])
def test_no_tensor_without_memory_is_taken(make):
    arguments = make(64, 4096)
    first(arguments)
    assert found(arguments) is not None
    for name, tensor in zip(arguments._fields, arguments, strict=True):
        if isinstance(tensor, torch.Tensor) and (name, type(arguments)) != ("bias", BackwardOperands):
            without = torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)
            assert found(arguments._replace(**{name: without})) is None, name


@pytest.mark.parametrize("name", ["x", "grad_out", "mean", "rstd", "weight", "bias", "residual_grad"])
def test_no_negated_view_is_taken(name):
    arguments = backward_arguments(residual=True)
    first(arguments)
    assert found(arguments._replace(**{name: torch._neg_view(getattr(arguments, name))})) is None


def test_each_plan_ends_at_the_last_row_that_the_planner_gives_it():
    last, _ = choice.choices(check_backward(backward_arguments()).problem, H200)[0]
    first(backward_arguments(rows=last + 1))
    assert found(backward_arguments(rows=last + 1)) is not None
    assert found(backward_arguments(rows=last)) is None
    prepared.forget()
    first(backward_arguments(rows=last))
    assert found(backward_arguments(rows=last)) is not None
    assert found(backward_arguments(rows=last + 1)) is None


@pytest.mark.parametrize("table", [FORWARDS[0], FORWARDS[1], BACKWARDS[0], BACKWARDS[3]], ids=str)
def test_a_norm_with_tables_runs_for_other_rows(table, launched, monkeypatch):
    program = first(table.operands)
    other = replace(table, rows=table.rows + 2).operands
    assert first(other) is program
    assert_launches_as_by_itself(other, launched, monkeypatch)
    index, scale = other.row_index, other.scale
    for changes in (
        {"row_index": index.int() if index.dtype == torch.int64 else index.long()},
        {"row_index": index[:, 1:]},
        {"row_index": index.t().contiguous().t()},
        {"row_index": index.flatten()},
        {"scale": scale.clone()},
        {"scale": scale[1:]},
        {"scale": scale[:, 1:]},
        {"scale": scale.double()},
        {"scale": scale[None]},
    ):
        assert found(other._replace(**changes)) is None, changes
    without_adjacent_columns = other._replace(scale=scale.t().contiguous().t())
    first(without_adjacent_columns)
    assert found(without_adjacent_columns) is None


def test_an_index_that_is_no_tensor_of_the_rows_gets_one_sentence():
    operands = Table("layer", "", 5, 64).operands
    for changes, kind, text in (
        ({"row_index": None}, TypeError, "index must be a tensor, got NoneType"),
        ({"row_index": operands.row_index[:2]}, RuntimeError, r"index must have int32 or int64 of x's batch shape"),
        ({"scale": operands.scale[:, 1:]}, RuntimeError, r"scale must have shape \(4, 64\), got \(4, 63\)"),
        ({"scale": operands.scale[0]}, RuntimeError, r"scale must have shape \(64, 64\), got \(64,\)"),
        ({"shift": operands.shift[1:]}, RuntimeError, r"shift must have shape \(4, 64\), got \(3, 64\)"),
    ):
        with pytest.raises(kind, match=text):
            ops.run(operands._replace(**changes))


def test_a_call_that_normalizes_twice_in_two_launches_is_checked_once(launched, monkeypatch):
    checked = []
    monkeypatch.setattr(ops, "check", lambda operands: checked.append(operands.op) or check_forward(operands))
    monkeypatch.setattr(ops, "runs_kernels", lambda x: True)
    name = "rms_norm_fwd_plus_residual_norm"
    for rows in (3, 5):
        given = {each: torch.randn(rows, 32768, dtype=BF16) for each in ("x", "residual")}
        ops.run(operands_of(name, (), given | {"normalized_shape": (32768,)}))
    assert checked == [name, "rms_norm_fwd_plus_residual", "rms_norm_fwd_affine"] and len(launched) == 4
    with force("multi_wave"):
        ops.run(operands_of(name, (), given | {"normalized_shape": (32768,)}))
    assert checked.count(name) == 2  # plans depend on it
