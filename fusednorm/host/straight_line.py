"""Recipes as values, and as Python functions that repeat a call without a loop.

The host time before a small kernel counts, most of all on autograd's thread, where Python takes twice as long. The
function of a forward reads:

    def repeat(t0, t1, t2):
        if not is_alike(t0, t1, t2):
            return None
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            return None
        p0, p1, p2 = t0.data_ptr(), t1.data_ptr(), t2.data_ptr()
        if (p0 | p1 | p2) & 15:
            return None
        if margin.sms != sm_margin:
            return None
        if current_device() != device:
            return _on_device(device, repeat, t0, t1, t2)
        stream = raw_stream(device)
        t3 = allocate(c7, c8, c9)
        p3 = t3.data_ptr()
        ...
        c40(c16, c17, c18, stream, c19, ..., p0, p1, p2, p3, ...)
        return (t3, t4, t5)

t are tensors and p their addresses: the call's tensors, its outputs and its workspace, in this order. c are constants;
c40 launches.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import margin
from ..planner.norm_problem import ALIGNMENT
from . import torch_compat

if TYPE_CHECKING:
    from .launcher import Build

allocate = torch_compat.allocate  # the functions that are made here call it
KEPT_TENSOR_MAPS = 256  # encoded tensor maps cached per operand of a recipe


class Memory(NamedTuple):
    """A contiguous tensor that is allocated for each call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def like(tensor: Tensor) -> Memory:
        return Memory(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Slot(NamedTuple):
    """An address among a launch's arguments. `index` counts the call's tensors, then its outputs, then its workspace;
    `offset` is in bytes."""

    position: int  # among the arguments of Build.launch
    index: int
    offset: int


class MapSlot(NamedTuple):
    """A tensor map among a launch's arguments."""

    position: int  # of the map, among the arguments of Build.launch
    index: int  # of the tensor, among the call's tensors
    operand: int  # of the descriptor, among the launch's operands
    shape: list[int]
    strides: list[int]


class Step(NamedTuple):
    """One launch. Its arguments are complete but for stream, slots and maps."""

    build: Build
    arguments: list
    slots: list[Slot]
    maps: list[MapSlot]


class Recipe(NamedTuple):
    """What a call allocated and launched."""

    device: int
    sm_margin: int  # the margin that it was planned for
    written: list[Memory | None]  # the outputs, then the workspace
    steps: list[Step]


Repeat = Callable[..., "tuple | None"]  # from a call's tensors to its outputs; None if the recipe is for other calls


def python_of(recipe: Recipe, tensors: Sequence[Tensor | None], is_alike: Callable[..., bool]) -> Repeat:
    """The function that repeats a recipe for tensors like these. It returns the outputs, or None if its tensors are not
    like these, a profiler hooks Triton's launches, or another number of SMs is to be left free."""
    constants = dict(is_alike=is_alike, margin=margin, sm_margin=recipe.sm_margin, device=recipe.device)
    constants |= dict(runtime=recipe.steps[0].build.RUNTIME, current_device=torch_compat.current_device)
    constants |= dict(raw_stream=torch_compat.raw_stream)

    def constant(value: Any) -> str:
        name = f"c{len(constants)}"
        constants[name] = value
        return name

    count = len(tensors)
    arguments = ", ".join(f"t{at}" for at in range(count))
    present = [at for at, each in enumerate(tensors) if each is not None]
    written = [count + at for at, each in enumerate(recipe.written) if each is not None]
    lines = [
        f"if not is_alike({', '.join(f't{at}' for at in present)}):",
        "    return None",
        "if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:",
        "    return None",
        *(f"p{at} = t{at}.data_ptr()" for at in present),
        f"if {_other_alignment(tensors)}:",
        "    return None",
        "if margin.sms != sm_margin:",
        "    return None",
        "if current_device() != device:",
        f"    return _on_device(device, repeat, {arguments})",
        "stream = raw_stream(device)",
    ]
    for at in written:
        memory = ", ".join(constant(each) for each in recipe.written[at - count])
        lines += [f"t{at} = allocate({memory})", f"p{at} = t{at}.data_ptr()"]
    lines += [_launch(step, constant) for step in recipe.steps]
    outputs = ", ".join(f"t{at}" if at in written else "None" for at in range(count, count + len(recipe.written) - 1))
    body = "\n".join([*lines, f"return ({outputs},)"])
    return _maker(arguments, body, tuple(constants))(*constants.values())


def _other_alignment(tensors: Sequence[Tensor | None]) -> str:
    """The expression that is true if the tensors that are aligned are not the same ones as in `tensors`."""
    addresses = {f"p{at}": each.data_ptr() for at, each in enumerate(tensors) if each is not None}
    aligned = " | ".join(name for name, address in addresses.items() if address % ALIGNMENT == 0)
    odd = [f"not {name} & {ALIGNMENT - 1}" for name, address in addresses.items() if address % ALIGNMENT]
    return " or ".join([f"({aligned}) & {ALIGNMENT - 1}"] * bool(aligned) + odd)


def _launch(step: Step, constant: Callable[[Any], str]) -> str:
    """The statement that launches a step."""
    build, values, slots, maps = step
    variable = {build.STREAM: "stream"}
    for position, index, offset in slots:
        variable[position] = f"p{index} + {constant(offset)}" if offset else f"p{index}"
    for position, index, operand, shape, strides in maps:
        encode = functools.partial(_tensor_map, build, operand, shape, strides)
        variable[position] = f"{constant(functools.lru_cache(KEPT_TENSOR_MAPS)(encode))}(p{index})"
    names = [variable.get(position) or constant(value) for position, value in enumerate(values)]
    return f"{constant(build.launch)}({', '.join(names)})"


def _tensor_map(build, operand: int, shape: list[int], strides: list[int], pointer: int):
    return build.tensor_map(operand, pointer, shape, strides)


@functools.cache  # one source serves many recipes, which differ in their constants alone
def _maker(arguments: str, body: str, constants: tuple[str, ...]) -> Callable[..., Callable]:
    """make(*constants): the function `repeat` with this body."""
    repeat = f"def repeat({arguments}):\n{textwrap.indent(body, '    ')}\n"
    source = f"def make({', '.join(constants)}):\n{textwrap.indent(repeat, '    ')}    return repeat\n"
    made: dict[str, Any] = {}
    exec(compile(source, "<recipe>", "exec"), globals(), made)
    return made["make"]


def _on_device(device: int, repeat: Callable, *tensors: Tensor | None) -> tuple | None:
    with torch.cuda.device(device):
        return repeat(*tensors)
