"""Calls that look like an earlier one: neither checked nor planned again, but launched with their own addresses.

What a call looks like is everything that checks, plans and builds depend on: of each tensor dtype, shape, strides,
device and whether it is aligned, and all arguments that are no tensors. What the first such call allocated and launched
is the recipe for those to come, with slots where the addresses go. Recipes are for GPUs only, and only for calls whose
tensors were all read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda as _allocate  # what compiled graphs allocate with: no dispatch

from . import semaphore
from .forcing import forced_variant
from .problem import ALIGNMENT

if TYPE_CHECKING:
    from .launch import Prepared
    from .launcher import Build

KEPT = 8192  # recipes: one for each shape of x that comes along

_recipes: dict[tuple, Recipe] = {}


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
    outputs, its workspace and the semaphore at which CTAs meet, in this order."""

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
    outputs: list[Memory | None]
    workspace: Memory | None
    meets: bool
    steps: list[Step]

    def run(self, addresses: list[int]) -> tuple | None:
        """The outputs of the call whose tensors are at these addresses; None where it has to go the long way."""
        if torch._C._cuda_getDevice() == self.device:
            return self._run(addresses)
        with torch.cuda.device(self.device):
            return self._run(addresses)

    def _run(self, addresses: list[int]) -> tuple | None:
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        meeting = semaphore.of_device(self.device).address(stream) if self.meets else 0
        if meeting is None:
            return None
        outputs = [None if memory is None else _allocate(*memory) for memory in self.outputs]
        workspace = None if self.workspace is None else _allocate(*self.workspace)
        addresses = addresses + [0 if each is None else each.data_ptr() for each in (*outputs, workspace)] + [meeting]
        for build, arguments, slots, maps in self.steps:
            arguments = arguments.copy()
            arguments[build.STREAM] = stream
            for position, index, offset in slots:
                arguments[position] = addresses[index] + offset
            for position, index, operand, shape, strides in maps:
                arguments[position] = build.tensor_map(operand, addresses[index], shape, strides)
            build.launch(*arguments)
        return tuple(outputs)


class Sighting(NamedTuple):
    """A call that came along."""

    key: tuple  # what it looks like
    addresses: list[int]  # of its tensors, 0 for None
    device: int

    def recipe(self) -> Recipe | None:
        return _recipes.get(self.key)

    def repeat(self) -> tuple | None:
        """The outputs of a call like an earlier one; None if there was none, or this has to go the long way."""
        recipe = _recipes.get(self.key)
        if recipe is None or recipe.steps[0].build.is_hooked():
            return None
        try:
            return recipe.run(self.addresses)
        except RuntimeError as error:
            if "cooperative" not in str(error):
                raise
            forget()  # the GPU is shared with others, who hold a part of it: launch.py knows what to do
            return None

    def remember(self, prepared: Prepared) -> None:
        """Keep what was launched for the call, if its addresses say all about it."""
        recipe = _written_down(self.addresses, self.device, prepared)
        if recipe is not None:
            if len(_recipes) >= KEPT:
                _recipes.clear()
            _recipes[self.key] = recipe


def forward(
    norm: str,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    wants_statistics: bool = True,
) -> Sighting:
    return _sighting((x, weight, bias), x, "forward", norm, eps, wants_statistics, forced_variant(), *normalized_shape)


def backward(
    norm: str,
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
    residual_grad: Tensor | None = None,
    dx_dtype: torch.dtype | None = None,
) -> Sighting:
    tensors = grad_out, x, mean, rstd, weight, bias, residual_grad
    return _sighting(tensors, x, "backward", norm, *output_mask, dx_dtype, forced_variant(), *normalized_shape)


def _sighting(tensors: tuple[Tensor | None, ...], x: Tensor, *rest) -> Sighting:
    key, addresses = [*rest], []
    for tensor in tensors:
        if tensor is None:
            key.append(None)
            addresses.append(0)
        else:
            address = tensor.data_ptr()
            addresses.append(address)
            key += tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), address % ALIGNMENT == 0
    return Sighting(tuple(key), addresses, x.get_device())


def forget() -> None:
    """All recipes."""
    _recipes.clear()


def _written_down(addresses: list[int], device: int, prepared: Prepared) -> Recipe | None:
    from . import launcher

    present = [address for address in addresses if address]
    if len(set(present)) < len(present):
        return None  # nobody could say which of two tensors at one address a launch means
    written = *prepared.outputs, prepared.workspace
    starts = {address: index for index, address in enumerate(addresses) if address}
    starts |= {each.data_ptr(): len(addresses) + at for at, each in enumerate(written) if each is not None}
    if prepared.meeting is not None:
        starts[prepared.meeting.data_ptr()] = len(addresses) + len(written)
    steps = []
    for launch in prepared.launches:
        build, values = launcher.known_build(launch, device)
        if build is None:
            return None
        step = Step(build, build.arguments(launch.grid, values, 0), [], [])
        for operand, (position, each) in enumerate(zip(build.positions(launch.operands), launch.operands, strict=True)):
            if isinstance(each, Tensor):
                place = _place(each.data_ptr(), starts, prepared.workspace, len(addresses) + len(written) - 1)
                if place is None:
                    return None  # a copy that was made for the call
                step.slots.append(Slot(position, *place))
            elif isinstance(each, launcher.DESCRIPTORS):
                index = starts.get(each.view.tensor.data_ptr())
                if index is None:
                    return None
                shape, strides, _ = each.geometry()
                step.maps.append(MapSlot(position, index, operand, shape, strides))
        steps.append(step)
    outputs = [None if each is None else Memory.like(each) for each in prepared.outputs]
    workspace = None if prepared.workspace is None else Memory.like(prepared.workspace)
    return Recipe(device, outputs, workspace, prepared.meeting is not None, steps)


def _place(address: int, starts: dict[int, int], workspace: Tensor | None, index: int) -> tuple[int, int] | None:
    """(index, offset) of an address: a tensor's own, or one inside the workspace, which is at `index`."""
    if address in starts:
        return starts[address], 0
    if workspace is not None and 0 < address - workspace.data_ptr() < workspace.nbytes:
        return index, address - workspace.data_ptr()
    return None
