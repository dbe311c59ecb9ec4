"""Calls that look like an earlier one: neither checked nor planned again, but launched with their own addresses.

What a call looks like is everything that checks, plans and builds depend on: all arguments that are no tensors, and of
each tensor what likeness.py compares and whether it is aligned. What the first such call allocated and launched is the
recipe for those to come, with slots where the addresses go; straight_line.py makes Python of it. Recipes are for GPUs
only, and only for calls whose tensors were all read in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import margin
from ..operands import Operands
from ..planner.forcing import asked_variants
from ..planner.norm_problem import ALIGNMENT
from . import likeness
from .straight_line import MapSlot, Memory, Recipe, Repeat, Slot, Step, python_of

if TYPE_CHECKING:
    from .launch import Prepared

KEPT = 8192  # keys: one for each shape of x that comes along
KEPT_ALIKE = 32  # recipes of one key: tensors of other dtypes, strides or devices, with and without gradients

_recipes: dict[tuple, tuple[Known, ...]] = {}
of_key = _recipes.get  # whoever calls often does so without `repeat`


@dataclass(eq=False, slots=True)
class Known:
    """A recipe, and the calls of its key that it is for."""

    recipe: Recipe
    repeat: Repeat
    is_alike: Callable[..., bool]  # of those tensors that are not None
    aligned: list[bool]  # for each of these
    note: Any = None  # of who calls


Call = tuple[tuple, tuple[Tensor | None, ...]]  # what it looks like, but for its tensors; and these


def look(operands: Operands) -> Call:
    tensors = operands.tensors
    absent = tuple([each is None for each in tensors])
    return (operands.settings, operands.x.shape, asked_variants(), absent), tensors


def repeat(call: Call) -> tuple | None:
    """The outputs of a call like an earlier one; None if there was none, or this has to go the long way."""
    key, tensors = call
    for known in of_key(key, ()):
        outputs = known.repeat(*tensors)
        if outputs is not None:
            return outputs
    return None


def remember(call: Call, prepared: Prepared) -> None:
    """Keep what was launched for a call, if its addresses say all about it."""
    key, tensors = call
    recipe = _written_down(tensors, prepared)
    if recipe is None:
        return
    present = [each for each in tensors if each is not None]
    is_alike, aligned = likeness.of(present), _aligned(present)
    known = Known(recipe, python_of(recipe, tensors, is_alike), is_alike, aligned)
    if len(_recipes) >= KEPT:
        _recipes.clear()
    _recipes[key] = known, *_recipes.get(key, ())[: KEPT_ALIKE - 1]


def find(call: Call) -> Known | None:
    """What `repeat` would go by."""
    key, tensors = call
    present = [each for each in tensors if each is not None]
    for known in of_key(key, ()):
        same_margin = known.recipe.sm_margin == margin.sms
        if same_margin and known.is_alike(*present) and _aligned(present) == known.aligned:
            return known
    return None


def forget() -> None:
    """All recipes."""
    _recipes.clear()


def _aligned(tensors: list[Tensor]) -> list[bool]:
    return [each.data_ptr() % ALIGNMENT == 0 for each in tensors]


def _written_down(tensors: tuple[Tensor | None, ...], prepared: Prepared) -> Recipe | None:
    from . import launcher

    addresses = [0 if each is None else each.data_ptr() for each in tensors]
    present = [address for address in addresses if address]
    if len(set(present)) < len(present):
        return None  # nobody could say which of two tensors at one address a launch means
    device = next(each.get_device() for each in tensors if each is not None)
    written = *prepared.outputs, prepared.workspace
    starts = {address: index for index, address in enumerate(addresses) if address}
    starts |= {each.data_ptr(): len(addresses) + at for at, each in enumerate(written) if each is not None}
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
    memory = [None if each is None else Memory.like(each) for each in written]
    return Recipe(device, margin.sms, memory, steps)


def _place(address: int, starts: dict[int, int], workspace: Tensor | None, index: int) -> tuple[int, int] | None:
    """(index, offset) of an address: a tensor's own, or one inside the workspace, which is at `index`."""
    if address in starts:
        return starts[address], 0
    if workspace is not None and 0 < address - workspace.data_ptr() < workspace.nbytes:
        return index, address - workspace.data_ptr()
    return None
