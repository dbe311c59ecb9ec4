"""Prepared calls: what a call launches, as a function of its row count and of its tensors' addresses.

The first call of a kind is checked, planned and launched the long way (ops.py, launch.py) and leaves a prepared call.
Later calls of this kind are launched from it, without checks and planning, whatever their row counts are. The key of a
kind holds everything else that checks, plans and builds depend on. Only calls on a GPU are prepared, and only those
whose tensors are all read in place.

Here calls run in Python. native.py copies prepared calls to C++, which runs them by the same rules (csrc/prepared.h).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import margin
from ..forcing import forced_variant
from ..operands import Operands, Outputs
from ..planner import heuristics
from ..planner.plan import Grid
from ..problem import BackwardCall, ForwardCall
from . import gpus, torch_compat
from .key import Extent, fit, look, parts_of

if TYPE_CHECKING:
    from .launch import Prepared, WorkspaceSizes
    from .launcher import Build

KEPT_KINDS = 4096  # if there would be more, all prepared calls are dropped
KEPT_SHAPES = 64  # of x, for each kind; if there would be more, all shapes of the kind are forgotten
KEPT_TENSOR_MAPS = 256  # for each descriptor
MOST_ROWS = 2**31 - 1  # a grid cannot have more CTAs, and some kernels have one for each row

allocate = torch_compat.allocate

Memory = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # the shape, strides and dtype of a contiguous tensor


class Output(NamedTuple):
    extent: Extent
    dtype: torch.dtype


class Map(NamedTuple):
    """A tensor map among a launch's arguments."""

    address: int  # index of the tensor's address
    operand: int  # of the descriptor, among the launch's operands
    shape: list[int]  # a Rows stands for another number of rows
    strides: list[int]


class Step(NamedTuple):
    """One launch: the arguments of Build.launch in the first call, and which of them are other ones in later calls.

    Addresses are counted in this order: the call's tensors, its outputs, the parts of its workspace.
    """

    build: Build
    arguments: list  # Rows, Ctas and Partials among them stand for the numbers of another call
    addresses: dict[int, int]  # by position among the arguments: the index of the address that goes there
    maps: dict[int, Map]  # by position among the arguments


@dataclass(eq=False)
class PreparedCall:
    """What a call launches if it has more than `rows_above` rows, and at most `most_rows`."""

    device: int
    rows_above: int
    most_rows: int
    grid: Grid
    outputs: tuple[Output | None, ...]  # None for an unwanted one
    workspace: WorkspaceSizes | None
    steps: list[Step]
    num_tensors: int
    normalized_shape: tuple[int, ...]
    sm_margin: int  # that it was planned under

    @functools.cached_property
    def launches(self) -> tuple:
        """(device, runtime, maps, constants, launchers), by which `Sized.launch` runs the steps.

        It makes one list of values: the stream, rows, CTAs, partials, addresses, tensor maps, constants. Each launcher
        is (launch, head, operands). head and operands pick arguments from that list; operands is None for launch
        functions that take one argument for each operand.
        """
        from .launcher import Ctas, Partials, Rows

        first_map = 4 + self.num_tensors + len(self.outputs) + 4 * (self.workspace is not None)
        first_constant = first_map + sum(len(step.maps) for step in self.steps)
        maps: list[tuple[Callable, int]] = []
        constants: list[Any] = []
        launchers = []
        for build, arguments, addresses, described in self.steps:
            sources = []
            for position, value in enumerate(arguments):
                if position == build.STREAM:
                    sources.append(0)
                elif isinstance(value, (Rows, Ctas, Partials)):
                    sources.append(1 + (Rows, Ctas, Partials).index(type(value)))
                elif position in addresses:
                    sources.append(4 + addresses[position])
                elif position in described:
                    sources.append(first_map + len(maps))
                    maps.append((_encoder(build, described[position]), 4 + described[position].address))
                else:
                    sources.append(first_constant + len(constants))
                    constants.append(value)
            first = build.first_operand if build.packs_operands else len(sources)
            operands = itemgetter(*sources[first:]) if build.packs_operands else None
            launchers.append((build.launch, itemgetter(*sources[:first]), operands))
        return self.device, self.steps[0].build.RUNTIME, maps, constants, launchers

    @functools.cached_property
    def _constant(self) -> tuple:
        """What `sized` needs to know of the normalized dims and of the outputs."""
        inner, ones, cols = _strides(self.normalized_shape), (1,) * len(self.normalized_shape), self.cols
        memories = [
            (self.normalized_shape, inner, each.dtype) if each and each.extent is Extent.PARAMETER else None
            for each in self.outputs
        ]
        others = [(at, each) for at, each in enumerate(self.outputs) if each and each.extent is not Extent.PARAMETER]
        of_x = [(at, each.dtype) for at, each in others if each.extent is Extent.X]
        of_statistics = [(at, each.dtype) for at, each in others if each.extent is Extent.STATISTIC]
        return inner, ones, (cols, *inner), (1, *ones), memories, of_x, of_statistics

    @property
    def cols(self) -> int:
        return math.prod(self.normalized_shape)

    def sized(self, shape: tuple[int, ...], rows: int) -> Sized:
        """The call for x of one shape."""
        inner, ones, x_strides, statistic_strides, memories, of_x, of_statistics = self._constant
        batch_shape = shape[: len(shape) - len(ones)]
        if len(batch_shape) != 1:
            strides = _strides(batch_shape)  # in rows
            x_strides, statistic_strides = (*[each * x_strides[0] for each in strides], *inner), (*strides, *ones)
        outputs = memories.copy()
        for at, dtype in of_x:
            outputs[at] = shape, x_strides, dtype
        for at, dtype in of_statistics:
            outputs[at] = (*batch_shape, *ones), statistic_strides, dtype
        ctas = self.grid.ctas(rows)
        partials, offsets, size = ctas * self.grid.partials_of_cta, None, None
        if self.workspace is not None:
            size, offsets = self.workspace.places(rows, partials)
        return Sized(self, (rows, ctas, partials), outputs, size, offsets)


class Sized(NamedTuple):
    """A prepared call for one shape of x."""

    call: PreparedCall
    numbers: tuple[int, int, int]  # of rows, CTAs and partials
    outputs: list[Memory | None]
    workspace: int | None  # elements
    offsets: tuple[int, int, int] | None  # of the second to fourth part of the workspace, in bytes

    def launch(self, addresses: list[int]) -> Outputs | None:
        """The outputs for tensors at these addresses. None if a profiler hooks Triton's launches."""
        call, numbers, outputs, workspace, offsets = self
        device, runtime, maps, constants, launchers = call.launches
        try:
            if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
                return None
        except AttributeError:  # something else in place of Triton's lists of hooks
            return None
        if torch_compat.current_device() != device:
            with torch.cuda.device(device):
                return self.launch(addresses)
        values = [torch_compat.raw_stream(device), *numbers, *addresses]
        made: list[Tensor | None] = []
        for memory in outputs:
            if memory is None:
                made.append(None)
                values.append(0)
            else:
                tensor = allocate(*memory)
                made.append(tensor)
                values.append(tensor.data_ptr())
        if workspace is not None:
            # Freed at the end: memory of one stream is used again in the stream's order.
            parts = allocate((workspace,), (1,), call.workspace.dtype)
            start, (second, third, fourth) = parts.data_ptr(), offsets
            values += start, start + second, start + third, start + fourth
        for encode, at in maps:
            values.append(encode(values[at], numbers[0]))
        values += constants
        for launch, head, operands in launchers:
            if operands is None:
                launch(*head(values))
            else:
                launch(*head(values), operands(values))
        return tuple(made)


@dataclass(eq=False, slots=True)
class Kind:
    """The prepared calls of one key."""

    normalized_shape: tuple[int, ...]
    calls: list[PreparedCall] = field(default_factory=list)  # for different row counts
    by_shape: dict[torch.Size, Sized] = field(default_factory=dict)  # shapes of x that were seen lately

    def sized(self, shape: torch.Size) -> Sized | None:
        """The call for x of this shape; None if the shape is wrong, or no call is prepared for as many rows."""
        sizes = tuple(shape)  # a slice of a torch.Size takes three times as long
        batch_ndim = len(sizes) - len(self.normalized_shape)
        if batch_ndim < 0 or sizes[batch_ndim:] != self.normalized_shape:
            return None
        rows = math.prod(sizes[:batch_ndim])
        call = self.find(rows)
        if call is None:
            return None
        if len(self.by_shape) >= KEPT_SHAPES:
            self.by_shape.clear()
        sized = self.by_shape[shape] = call.sized(sizes, rows)
        return sized

    def find(self, rows: int) -> PreparedCall | None:
        for call in self.calls:
            if call.rows_above < rows <= call.most_rows:
                return call
        return None


_kinds: dict[tuple, Kind] = {}


def run(operands: Operands) -> Outputs | None:
    """The outputs by a prepared call; None if there is none for these operands. The caller has made sure that no mode
    and no transform is active."""
    try:
        key, addresses = look(operands)
        kind = _kinds.get(key)
        if kind is None:
            return None
        shape = operands.x.shape
        sized = kind.by_shape.get(shape) or kind.sized(shape)
        if sized is None or not fit(operands, shape, sized.numbers[0]):
            return None
    except (RuntimeError, TypeError, AttributeError):  # arguments of other types, or tensors without shape or memory
        return None
    return sized.launch(addresses)


def remember(operands: Operands, call: ForwardCall | BackwardCall, launched: Prepared) -> None:
    """Keep what was launched for a call as a prepared call, if anything was launched, all tensors were read in place,
    and no thread has changed the margin since it was planned."""
    if not launched.launches or call.rows > MOST_ROWS:
        return
    try:
        key, addresses = look(operands)
        kind = _kinds.get(key)
    except (RuntimeError, TypeError):
        return
    rows = _rows_of_plan(call)
    if launched.margin is not margin.sms or (kind and kind.find(call.rows)):
        return
    steps = _steps(addresses, call, launched)
    if not steps:
        return
    if kind is None:
        if len(_kinds) >= KEPT_KINDS:
            _kinds.clear()
        kind = _kinds[key] = Kind(call.normalized_shape)
    device, extents = call.x.tensor.get_device(), parts_of(type(operands)).extents
    outputs = [
        each if each is None else Output(extent, each.dtype)
        for each, extent in zip(launched.outputs, extents, strict=True)
    ]
    sizes = launched.grid, outputs, launched.workspace
    made = device, *rows, *sizes, steps, len(addresses), call.normalized_shape, launched.margin
    kind.calls.append(PreparedCall(*made))


def find(operands: Operands) -> PreparedCall | None:
    """The prepared call that `run` would use."""
    try:
        kind, rows = _kinds.get(look(operands)[0]), operands.x.numel() // math.prod(operands.normalized_shape)
    except (RuntimeError, TypeError):
        return None
    return kind and kind.find(rows)


def _rows_of_plan(call: ForwardCall | BackwardCall) -> tuple[int, int]:
    """(above, most): the planner chooses the same for all row counts above the one, up to the other."""
    choices = heuristics.choices(call.problem, gpus.spec_of(call.x.tensor.device), forced_variant())
    ends = [min(most, MOST_ROWS) for most, _ in choices]
    return max((end for end in ends if end < call.rows), default=0), min(end for end in ends if end >= call.rows)


def _steps(addresses: list[int], call: ForwardCall | BackwardCall, launched: Prepared) -> list[Step] | None:
    """The steps of a call that was launched; None if they cannot be repeated with other addresses."""
    from . import launcher

    indices: dict[int, int] = {}  # by id of a tensor of the call
    for index, (tensor, address) in enumerate(zip(call.tensors, addresses, strict=True)):
        if tensor is None:
            continue
        if tensor.data_ptr() != address or id(tensor) in indices:
            return None  # a copy was made for the call; or one tensor is two operands, which cannot be told apart
        indices[id(tensor)] = index
    written = *launched.outputs, *launched.parts
    indices |= {id(each): index for index, each in enumerate(written, len(addresses)) if each is not None}
    steps = []
    for launch in launched.launches:
        build, values = launcher.known_build(launch, call.x.tensor.get_device())
        if build is None:
            return None
        step = Step(build, build.arguments(launch.grid, values, 0), {}, {})
        for operand, (position, each) in enumerate(zip(build.positions(launch.operands), launch.operands, strict=True)):
            if isinstance(each, Tensor):
                step.addresses[position] = indices[id(each)]
            elif isinstance(each, launcher.DESCRIPTORS):
                shape, strides, _ = each.geometry()
                step.maps[position] = Map(indices[id(each.view.tensor)], operand, shape, strides)
        steps.append(step)
    return steps


def forget() -> None:
    """Drop all prepared calls."""
    _kinds.clear()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Those of a contiguous tensor without empty dims."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def _encoder(build: Build, described: Map) -> Callable[[int, int], Any]:
    """encode(address, rows): the tensor map, from a cache."""
    from .launcher import Rows

    def encode(address: int, rows: int) -> Any:
        shape = [rows if isinstance(size, Rows) else size for size in described.shape]
        return build.tensor_map(described.operand, address, shape, described.strides)

    return functools.lru_cache(KEPT_TENSOR_MAPS)(encode)
