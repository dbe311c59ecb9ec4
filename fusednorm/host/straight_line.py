"""Recipes: what a call allocated and launched, and the same as straight-line Python for the calls to come.

One function knows its calls, allocates and launches, without a loop.

What a host does before a small kernel counts, above all on the thread of autograd's that runs backwards, where Python
takes twice the time. A forward reads like this:

    def repeat(t0, t1, t2):
        if not c1(t0, t1, t2):
            return None
        if c2.launch_enter_hook.calls or c2.launch_exit_hook.calls:
            return None
        p0, p1, p2 = t0.data_ptr(), t1.data_ptr(), t2.data_ptr()
        if (p0 | p1 | p2) & 15:
            return None
        if c3.sms != c4:
            return None
        if c5() != c0:
            return _on_device(c0, repeat, t0, t1, t2)
        stream = c6(c0)
        t3 = allocate(c7, c8, c9)
        p3 = t3.data_ptr()
        ...
        c40(c16, c17, c18, stream, c19, ..., p0, p1, p2, p3, ...)
        return (t3, t4, t5)

where c are constants (c0 the device, c1 says which tensors this is for, c2 has Triton's hooks, c3 how many SMs are left
free and c4 how many were, c5 and c6 are questions to CUDA, c40 launches), t tensors and p addresses: of the call's
tensors, its outputs and its workspace, in this order.
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

allocate = torch_compat.allocate  # for the source that is made here
MAPS_AT_HAND = 256  # tensor maps of one operand, by address


class Memory(NamedTuple):
    """What is allocated for a call, contiguous."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def like(tensor: Tensor) -> Memory:
        return Memory(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Slot(NamedTuple):
    """An address in a launch's arguments: `offset` bytes into what is at `index` among the call's tensors, its
    outputs and its workspace, in this order."""

    position: int
    index: int
    offset: int


class MapSlot(NamedTuple):
    """A tensor map in a launch's arguments, of the call's tensor at `index`."""

    position: int
    index: int
    operand: int
    shape: list[int]
    strides: list[int]


class Step(NamedTuple):
    """One launch: its arguments, right but for stream and slots."""

    build: Build
    arguments: list
    slots: list[Slot]
    maps: list[MapSlot]


class Recipe(NamedTuple):
    device: int
    sm_margin: int  # under which it was planned
    written: list[Memory | None]  # outputs, and last the workspace
    steps: list[Step]


Repeat = Callable[..., "tuple | None"]


def python_of(recipe: Recipe, tensors: Sequence[Tensor | None], is_alike: Callable[..., bool]) -> Repeat:
    """A function of tensors like these: the outputs of their call. None where the call has to go the long way: its
    tensors are not like these, a profiler hooks Triton's launches, or another number of SMs is left free.
    """
    constants: list[Any] = [recipe.device, is_alike, recipe.steps[0].build.RUNTIME, margin, recipe.sm_margin]
    constants += torch_compat.current_device, torch_compat.raw_stream

    def constant(value: Any) -> str:
        constants.append(value)
        return f"c{len(constants) - 1}"

    count = len(tensors)
    arguments = ", ".join(f"t{at}" for at in range(count))
    present = [at for at, each in enumerate(tensors) if each is not None]
    written = [count + at for at, each in enumerate(recipe.written) if each is not None]
    lines = [
        f"if not c1({', '.join(f't{at}' for at in present)}):",
        "    return None",
        "if c2.launch_enter_hook.calls or c2.launch_exit_hook.calls:",
        "    return None",
        *(f"p{at} = t{at}.data_ptr()" for at in present),
        f"if {_is_aligned_otherwise(tensors)}:",
        "    return None",
        "if c3.sms != c4:",
        "    return None",
        "if c5() != c0:",
        f"    return _on_device(c0, repeat, {arguments})",
        "stream = c6(c0)",
    ]
    for at in written:
        memory = ", ".join(constant(each) for each in recipe.written[at - count])
        lines += [f"t{at} = allocate({memory})", f"p{at} = t{at}.data_ptr()"]
    lines += [_launch(step, constant) for step in recipe.steps]
    outputs = ", ".join(f"t{at}" if at in written else "None" for at in range(count, count + len(recipe.written) - 1))
    body = "\n".join([*lines, f"return ({outputs},)"])
    return _maker(arguments, body, len(constants))(*constants)


def _is_aligned_otherwise(tensors: Sequence[Tensor | None]) -> str:
    """Whether any address is aligned where that of `tensors` is not, or the other way round."""
    addresses = {f"p{at}": each.data_ptr() for at, each in enumerate(tensors) if each is not None}
    aligned = " | ".join(name for name, address in addresses.items() if address % ALIGNMENT == 0)
    odd = [f"not {name} & {ALIGNMENT - 1}" for name, address in addresses.items() if address % ALIGNMENT]
    return " or ".join([f"({aligned}) & {ALIGNMENT - 1}"] * bool(aligned) + odd)


def _launch(step: Step, constant: Callable[[Any], str]) -> str:
    build, values, slots, maps = step
    variable = {build.STREAM: "stream"}
    for position, index, offset in slots:
        variable[position] = f"p{index} + {constant(offset)}" if offset else f"p{index}"
    for position, index, operand, shape, strides in maps:
        encode = functools.partial(_tensor_map, build, operand, shape, strides)
        variable[position] = f"{constant(functools.lru_cache(MAPS_AT_HAND)(encode))}(p{index})"
    names = [variable.get(position) or constant(value) for position, value in enumerate(values)]
    return f"{constant(build.launch)}({', '.join(names)})"


def _tensor_map(build, operand: int, shape: list[int], strides: list[int], pointer: int):
    return build.tensor_map(operand, pointer, shape, strides)


@functools.cache  # recipes of one kind differ in nothing but their constants
def _maker(arguments: str, body: str, constants: int) -> Callable[..., Callable]:
    names = ", ".join(f"c{at}" for at in range(constants))
    repeat = f"def repeat({arguments}):\n{textwrap.indent(body, '    ')}\n"
    source = f"def make({names}):\n{textwrap.indent(repeat, '    ')}    return repeat\n"
    made: dict[str, Any] = {}
    exec(compile(source, "<recipe>", "exec"), globals(), made)
    return made["make"]


def _on_device(device: int, repeat: Callable, *tensors: Tensor | None) -> tuple | None:
    with torch.cuda.device(device):
        return repeat(*tensors)
