"""Recipes: a call with the signature of an earlier one is launched as that one was, without checks and planning.

The signature holds everything that checks, plans and builds depend on: all arguments that are no tensors, and for each
tensor what likeness.py compares and whether it is aligned. The recipe holds what the first such call allocated and
launched, with slots for the addresses of later calls. straight_line.py makes a Python function of it, native.py a C++
struct. Recipes are for GPUs only, and only for calls whose tensors were all read in place.
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

KEPT_KEYS = 8192  # one for each shape of x; if there would be more, all are dropped
KEPT_PER_KEY = 32  # recipes: one for each combination of dtypes, strides, devices and requires_grad

_cached: dict[tuple, tuple[CachedCall, ...]] = {}
lookup = _cached.get  # lookup(key, ()) are the cached calls of a key; frequent callers use it instead of `repeat`


@dataclass(eq=False, slots=True)
class CachedCall:
    """A recipe, and what the tensors of a call must be like for it."""

    recipe: Recipe
    repeat: Repeat
    is_alike: Callable[..., bool]  # the guard of the tensors that are not None
    aligned: list[bool]  # whether each of these starts at a multiple of 16 bytes
    node_info: Any = None  # the caller may keep here what autograd's node needs


Signature = tuple[tuple, tuple[Tensor | None, ...]]  # the key, and the tensors, whose guard is part of the signature


def look(operands: Operands) -> Signature:
    tensors = operands.tensors
    absent = tuple([each is None for each in tensors])
    return (operands.settings, operands.x.shape, asked_variants(), absent), tensors


def repeat(signature: Signature) -> tuple | None:
    """The outputs of a call by the recipe of its signature; None if there is no recipe that can be repeated now."""
    key, tensors = signature
    for cached in lookup(key, ()):
        outputs = cached.repeat(*tensors)
        if outputs is not None:
            return outputs
    return None


def remember(signature: Signature, prepared: Prepared) -> None:
    """Cache what was launched for a call, if anything was and later calls differ from it in nothing but addresses."""
    if not prepared.launches:
        return
    key, tensors = signature
    recipe = _recipe_of(tensors, prepared)
    if recipe is None:
        return
    present = [each for each in tensors if each is not None]
    is_alike, aligned = likeness.make_guard(present), _aligned(present)
    cached = CachedCall(recipe, python_of(recipe, tensors, is_alike), is_alike, aligned)
    if len(_cached) >= KEPT_KEYS:
        _cached.clear()
    _cached[key] = cached, *_cached.get(key, ())[: KEPT_PER_KEY - 1]


def find(signature: Signature) -> CachedCall | None:
    """The cached call that `repeat` would use."""
    key, tensors = signature
    present = [each for each in tensors if each is not None]
    for cached in lookup(key, ()):
        same_margin = cached.recipe.sm_margin == margin.sms
        if same_margin and cached.is_alike(*present) and _aligned(present) == cached.aligned:
            return cached
    return None


def forget() -> None:
    """Drop all recipes."""
    _cached.clear()


def _aligned(tensors: list[Tensor]) -> list[bool]:
    return [each.data_ptr() % ALIGNMENT == 0 for each in tensors]


def _recipe_of(tensors: tuple[Tensor | None, ...], prepared: Prepared) -> Recipe | None:
    """The recipe of a call that was launched; None if it cannot be repeated with other addresses."""
    from . import launcher

    addresses = [0 if each is None else each.data_ptr() for each in tensors]
    present = [address for address in addresses if address]
    if len(set(present)) < len(present):
        return None  # two tensors share an address, so an argument does not tell which of them it is
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
    """(index, offset) for a Slot: of a tensor that starts at `address`, or of the workspace, whose index is `index`."""
    if address in starts:
        return starts[address], 0
    if workspace is not None and 0 < address - workspace.data_ptr() < workspace.nbytes:
        return index, address - workspace.data_ptr()
    return None
