"""Recipes repeat the launches of an earlier call that looks the same. A repeated call must launch exactly what it would
launch without a recipe."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, FP32, make_case

from fusednorm import sm_margin
from fusednorm.host import gpus, recipe, straight_line, torch_compat
from fusednorm.operands import BackwardOperands, ForwardOperands
from fusednorm.planner import heuristics
from fusednorm.planner.device import H200
from fusednorm.problem import check_backward, check_forward
from fusednorm.testing import make_inputs

STREAM = 77


@pytest.fixture(autouse=True)
def cpu_tensors_stand_in_for_those_of_an_h200(monkeypatch):
    """Yields a list that gets the arguments of each launch; no kernel runs."""
    from fusednorm.host import launcher

    launched = []

    class Build(launcher.Build):
        def __init__(self, launch):
            self._head, self._constants = ("head",) * 9, [launch.norm, launch.tile]
            self.descriptors = [each for each in launch.operands if isinstance(each, launcher.DESCRIPTORS)]
            self.launch = lambda *arguments: launched.append(list(arguments))

        def tensor_map(self, position, pointer, shape, strides):
            return "map", position, pointer, tuple(shape), tuple(strides)

    def known_build(launch, device):
        return Build(launch), [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in launch.operands]

    monkeypatch.setattr(launcher, "known_build", known_build)
    monkeypatch.setattr(gpus, "spec_of", lambda device: H200)
    monkeypatch.setattr(straight_line, "allocate", lambda *memory: torch.empty_strided(*memory[:2], dtype=memory[2]))
    monkeypatch.setattr(torch_compat, "current_device", lambda: -1)
    monkeypatch.setattr(torch_compat, "raw_stream", lambda device: STREAM)
    recipe.forget()
    yield launched
    recipe.forget()


def backward_arguments(rows=64, cols=4096, norm="layer", residual=False, mask=(True, True, True)) -> BackwardOperands:
    inputs = make_inputs(make_case(norm, (rows, cols), (BF16, FP32, BF16)))
    layer = norm == "layer"
    mean, rstd = (torch.randn(rows, 1) for _ in range(2))
    mask = mask if layer else (*mask[:2], False)
    extra = torch.randn(rows, cols, dtype=BF16) if residual else None
    operands = inputs.grad_out, inputs.x, (cols,), mean if layer else None, rstd, inputs.weight
    return BackwardOperands(norm, *operands, inputs.bias if layer else None, mask, extra)


def run_the_long_way(arguments, monkeypatch, variant=None, remember=True):
    """The launches as a first call prepares them, without running them; and a recipe is remembered."""
    from fusednorm.host import launch

    seen, call = recipe.look(arguments), check_backward(arguments)
    outcome = heuristics.decide(call.problem, call.rows, H200, variant)
    assert variant in (None, outcome.plan.variant)
    prepared = launch.prepare_backward(call, outcome.plan)
    if remember:
        recipe.remember(seen, prepared)
    return prepared


def launched_the_long_way(prepared):
    from fusednorm.host import launcher

    known = [(each.grid, *launcher.known_build(each, 0)) for each in prepared.launches]
    return [build.arguments(grid, values, STREAM) for grid, build, values in known]


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


NAMES = "grad_out", "x", "mean", "rstd", "weight", "bias", "residual"


def tensors_of(arguments, outputs, workspace) -> dict:
    inputs = dict(zip(NAMES, arguments.tensors, strict=True))
    return inputs | dict(zip(("dx", "dw", "db"), outputs, strict=True)) | {"workspace": workspace}


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
def test_a_second_call_is_launched_as_the_first_but_for_its_addresses(
    norm, variant, changes, cpu_tensors_stand_in_for_those_of_an_h200, monkeypatch
):
    launched, workspaces = cpu_tensors_stand_in_for_those_of_an_h200, []
    first, second = (backward_arguments(norm=norm, **changes) for _ in range(2))
    prepared = run_the_long_way(first, monkeypatch, variant)
    expected = [
        named(arguments, tensors_of(first, prepared.outputs, prepared.workspace))
        for arguments in launched_the_long_way(prepared)
    ]
    allocate = straight_line.allocate
    monkeypatch.setattr(straight_line, "allocate", lambda *each: workspaces.append(allocate(*each)) or workspaces[-1])
    outputs = recipe.repeat(recipe.look(second))
    tensors = tensors_of(second, outputs, workspaces[-1] if prepared.workspace is not None else None)
    assert [named(arguments, tensors) for arguments in launched] == expected
    for got, want in zip(outputs, prepared.outputs, strict=True):
        assert (got is None) == (want is None)
        assert got is None or (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


def test_a_forward_is_repeated_too(cpu_tensors_stand_in_for_those_of_an_h200):
    from fusednorm.host import launch

    launched = cpu_tensors_stand_in_for_those_of_an_h200
    inputs = make_inputs(make_case("layer", (6, 5, 4096)))
    arguments = ForwardOperands("layer", inputs.x, (4096,), inputs.weight, inputs.bias, 1e-5)
    assert recipe.repeat(recipe.look(arguments)) is None
    recipe.remember(recipe.look(arguments), launch.prepare_forward(check_forward(arguments)))
    y, mean, rstd = recipe.repeat(recipe.look(arguments))
    assert y.shape == inputs.x.shape and mean.shape == rstd.shape == (6, 5, 1)
    expected = {each.data_ptr() for each in (y, mean, rstd, inputs.weight, inputs.bias)} | {1e-5, STREAM}
    assert expected <= set(launched[0][:40])


def other_calls(arguments):
    _, grad_out, x, shape, mean, rstd, weight, bias, mask, *_ = arguments
    rows, cols = x.shape
    wide = torch.randn(rows, cols + 8, dtype=x.dtype)[:, :cols]
    yield "rows", arguments._replace(grad_out=grad_out[1:], x=x[1:], mean=mean[1:], rstd=rstd[1:])
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


def test_a_call_that_looks_different_in_anything_is_not_repeated(monkeypatch):
    arguments = backward_arguments()
    run_the_long_way(arguments, monkeypatch)
    assert recipe.repeat(recipe.look(arguments)) is not None
    tried = [name for name, other in other_calls(arguments) if recipe.repeat(recipe.look(other)) is None]
    assert tried == [name for name, _ in other_calls(arguments)]


def test_force_is_part_of_what_a_call_looks_like(monkeypatch):
    from fusednorm import force

    arguments = backward_arguments()
    run_the_long_way(arguments, monkeypatch)
    with force("multi_wave"):
        assert recipe.repeat(recipe.look(arguments)) is None
    assert recipe.repeat(recipe.look(arguments)) is not None


def test_two_tensors_at_one_address_are_not_remembered(monkeypatch):
    arguments = backward_arguments()
    twice = arguments._replace(grad_out=arguments.x)
    run_the_long_way(twice, monkeypatch)
    assert recipe.repeat(recipe.look(twice)) is None


@pytest.mark.parametrize("operand", ["x", "grad_out", "weight", "rstd"])
def test_what_had_to_be_copied_is_not_remembered(operand, monkeypatch):
    arguments = backward_arguments(rows=64, cols=4096)
    copied = {
        "x": torch.randn(4096, 64, dtype=BF16).t(),
        "grad_out": torch.randn(4096, 64, dtype=BF16).t(),
        "weight": torch.randn(4096, 2)[:, 0],
        "rstd": torch.randn(8, 8).t(),
    }
    arguments = arguments._replace(**{operand: copied[operand]})
    run_the_long_way(arguments, monkeypatch)
    assert recipe.repeat(recipe.look(arguments)) is None


def test_profilers_that_hook_tritons_launches_see_all(monkeypatch):
    from triton import knobs

    arguments = backward_arguments()
    run_the_long_way(arguments, monkeypatch)
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook.add(print)
        assert recipe.repeat(recipe.look(arguments)) is None
        hook.remove(print)
        assert recipe.repeat(recipe.look(arguments)) is not None


def test_errors_of_a_launch_reach_the_caller(monkeypatch):
    arguments = backward_arguments()
    run_the_long_way(arguments, monkeypatch)

    def refuse(self, position, pointer, shape, strides):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    ((cached,),) = recipe._cached.values()
    monkeypatch.setattr(type(cached.recipe.steps[0].build), "tensor_map", refuse)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        recipe.repeat(recipe.look(arguments))


def test_a_call_is_repeated_under_the_margin_that_it_was_planned_for(monkeypatch):
    arguments = backward_arguments()
    run_the_long_way(arguments, monkeypatch)
    with sm_margin(16):
        assert recipe.repeat(recipe.look(arguments)) is None
        assert recipe.find(recipe.look(arguments)) is None
        run_the_long_way(arguments, monkeypatch)
        assert recipe.repeat(recipe.look(arguments)) is not None
        assert recipe.find(recipe.look(arguments)).recipe.sm_margin == 16
    assert recipe.repeat(recipe.look(arguments)) is not None
    assert recipe.find(recipe.look(arguments)).recipe.sm_margin == 0


def test_recipes_are_bounded(monkeypatch):
    monkeypatch.setattr(recipe, "KEPT_KEYS", 3)
    for rows in range(64, 72):
        run_the_long_way(backward_arguments(rows=rows), monkeypatch)
        assert 1 <= len(recipe._cached) <= 3


def test_recipes_of_one_key_are_bounded_and_the_latest_stay(monkeypatch):
    monkeypatch.setattr(recipe, "KEPT_PER_KEY", 2)
    arguments = backward_arguments()
    looks = [arguments._replace(weight=arguments.weight.to(dtype)) for dtype in (FP32, BF16, torch.float16)]
    for each in looks:
        run_the_long_way(each, monkeypatch)
    assert [recipe.repeat(recipe.look(each)) is not None for each in looks] == [False, True, True]


def test_source_is_made_once_for_calls_that_differ_in_numbers_alone(monkeypatch):
    straight_line._maker.cache_clear()
    for rows in (64, 100, 1000):
        run_the_long_way(backward_arguments(rows=rows), monkeypatch, "pipelined")
    assert straight_line._maker.cache_info().misses == 1
