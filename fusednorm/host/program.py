"""What a call launches, as data: a function of its row count and of its tensors' addresses.

A program is built (launch.py) from symbols: an Address stands for a tensor, a Number for what follows from the row
count. Its kernels are loaded (launcher.py). Then it is bound to the shape of x, and launched with the tensors'
addresses. The first call of a kind builds, loads and binds; later ones only bind (prepared.py). C++ gets the same
records (native.py) and binds them by the same rules (csrc/program.h).
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..operands import Role
from ..planner.plan import Grid
from ..problem.outputs import shape_of
from . import torch_compat

if TYPE_CHECKING:
    from .launcher import Build, Launch

KEPT_TENSOR_MAPS = 256  # for each descriptor
MOST_ROWS = 2**31 - 1  # a grid cannot have more CTAs, and some kernels have one for each row
STREAM = object()  # where a launch's arguments have the stream

Memory = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # the shape, strides and dtype of a contiguous tensor
Numbers = tuple[int, int, int, int]  # by Number
# Launches that run without a change of numbers and addresses: the block, the numbers, which of the program's launches.
Turn = tuple[int, Numbers, slice]
ALL = slice(None)


class Number(enum.Enum):
    """A number that follows from the row count, in a grid or among operands."""

    ROWS = 0
    CTAS = 1  # along the rows, those of a sample
    PARTIALS = 2  # rows of the partials of sums
    SAMPLES = 3  # of rows that have CTAs of their own

    def __init__(self, place: int):
        self.place = place  # among a program's numbers; .value takes two frames


@dataclass(frozen=True, slots=True)
class Address:
    """A tensor that each call has one of. Triton compiles with it as with the tensor."""

    index: int  # among the addresses: those of the call's tensors, of its outputs, of the parts of its workspace
    dtype: torch.dtype
    aligned: bool = True  # its address is a multiple of 16 bytes
    stride: int = 1  # in elements; of a statistic
    offset: int = 0  # in bytes, of a part of the tensor

    def data_ptr(self) -> int:
        return 0 if self.aligned else 1


@dataclass(frozen=True)
class Map:
    """A tensor map: the operand by which TMA copies blocks of a tensor. Shape, strides and block are in elements."""

    tensor: Address | Tensor
    shape: tuple[int | Number, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]  # of one copy
    cluster: int = 1  # CTAs over which the block's last dimension but one is spread


# An operand of a kernel: a symbol, a constant, or a tuple of either.
Operand = Address | Map | Number | int | float | tuple | None


FIRST_ADDRESS = 1 + len(Number)  # among the values of a launch, behind the stream and the numbers


class Output(NamedTuple):
    role: Role
    dtype: torch.dtype
    whole: tuple[bool, ...] = ()  # of a modulation: which of its batch dims are x's, and not 1
    shape: tuple[int, ...] | None = None  # of a STRIDED one


class Part(NamedTuple):
    """How many elements of the workspace's dtype a part of it has."""

    per_row: int = 0
    per_partial: int = 0
    beside: int = 0
    per_block: int = 0
    dtype: torch.dtype | None = None  # that the kernels see; None: the workspace's


class Workspace(NamedTuple):
    """Memory that is needed during the call only. Each part begins at a multiple of 16 bytes, whatever the row count.
    csrc/program.h has the same rule."""

    dtype: torch.dtype
    parts: tuple[Part, ...]

    def sizes(self, rows: int, partials: int, blocks: int = 0) -> list[int]:
        """The elements of each part, rounded up to a multiple of 4 (16 bytes of float32)."""
        return [-(-(rows * a + partials * b + c + blocks * d) // 4) * 4 for a, b, c, d, _ in self.parts]


@dataclass(frozen=True)
class Blocks:
    """A program that runs for one block of rows after another. Its last launches may come once, behind all blocks, and
    get their number as that of the partials. csrc/program.h has the same rule."""

    rows: int  # of a block; the last may have fewer
    once: int  # how many of the launches come once
    bytes: tuple[int, ...]  # by address: from what a block has to what the next one has


class OnTensors(NamedTuple):
    """A program bound to tensors, for Triton's own launcher and its interpreter."""

    launches: list[Launch]
    outputs: tuple[Tensor | None, ...]
    parts: tuple[Tensor | None, ...]  # of the workspace; None for a part of no elements


@dataclass(frozen=True, eq=False)
class Program:
    """What a call launches if it has more than `rows_above` rows, and at most `most_rows`."""

    launches: tuple[Launch, ...]
    num_tensors: int  # of the call, absent ones included
    outputs: tuple[Output | None, ...]  # None for an unwanted one
    workspace: Workspace | None
    grid: Grid | None  # None: no launch has a number of CTAs or partials that follows from the rows
    normalized_shape: tuple[int, ...]
    groups: int = 1  # of columns, each with statistics of its own
    width: int = 0  # columns of an output that has others than x
    rows_above: int = 0
    most_rows: int = MOST_ROWS
    sm_margin: int = 0  # that it was planned under
    invariance: int = 0  # and under what of settings/invariance.py
    blocks: Blocks | None = None
    device: int = -1  # on which its kernels are loaded
    builds: Sequence[Build] = ()  # of the launches; none if its kernels are not loaded

    def numbers(self, rows: int) -> Numbers:
        """The values of each Number."""
        if not self.grid:
            return rows, 0, 0, 0
        samples, ctas = self.grid.samples(rows), self.grid.ctas(rows)
        return rows, ctas, samples * ctas * self.grid.partials_of_cta, samples

    def turns(self, rows: int) -> list[Turn]:
        """All that is launched, in order."""
        if self.blocks is None:
            return [(0, self.numbers(rows), ALL)]
        size, starts, first = self.blocks.rows, range(0, rows, self.blocks.rows), len(self.launches) - self.blocks.once
        turns = [(at, self.numbers(min(size, rows - start)), slice(first)) for at, start in enumerate(starts)]
        return [*turns, (0, (rows, 0, len(starts), 0), slice(first, None))]

    def sizes(self, turns: list[Turn]) -> list[int]:
        """The elements of the workspace's parts, for the largest block: the first or the last."""
        first, blocks = turns[0][1], len(turns) - 1
        sizes = self.workspace.sizes(first[0], first[2], blocks)
        if blocks:
            last = turns[-2][1]
            sizes = [*map(max, sizes, self.workspace.sizes(last[0], last[2], blocks))]
        return sizes

    def memory(self, shape: tuple[int, ...]) -> list[Memory | None]:
        """The outputs for x of this shape."""
        given, found = (shape, self.normalized_shape, self.groups, self.width), []
        for each in self.outputs:
            of_it = each and (each.shape or shape_of(each.role, *given, each.whole))
            found.append(each and (of_it, _strides(of_it), each.dtype))
        return found

    def on_tensors(self, tensors: Sequence[Tensor | None], shape: tuple[int, ...], rows: int) -> OnTensors:
        """Bound to the tensors of a call whose x has this shape. Allocates outputs and workspace."""
        device = next(each.device for each in tensors if each is not None)
        outputs = tuple(
            memory and torch.empty(memory[0], dtype=memory[2], device=device) for memory in self.memory(tuple(shape))
        )
        turns, parts = self.turns(rows), ()
        if self.workspace:
            sizes = self.sizes(turns)
            memory = torch.empty(sum(sizes), dtype=self.workspace.dtype, device=device)
            pairs = zip(memory.split(sizes), self.workspace.parts, strict=True)
            parts = tuple(each.view(part.dtype or each.dtype) if each.numel() else None for each, part in pairs)
        given = *tensors, *outputs, *parts
        launches = [
            launch.bound(self._of_block(block, given), numbers)
            for block, numbers, which in turns
            for launch in self.launches[which]
        ]
        return OnTensors(launches, outputs, parts)

    def _of_block(self, block: int, given: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        """What the block has of each tensor, and what comes behind it."""
        if not block:
            return given
        pairs = zip(given, self.blocks.bytes, strict=True)
        return [each.view(-1)[block * by // each.itemsize :] if by else each for each, by in pairs]

    def bind(self, shape: tuple[int, ...], rows: int) -> Bound:
        """The loaded program for x of one shape."""
        turns, size, offsets = self.turns(rows), None, []
        if self.workspace is not None:
            sizes, itemsize = self.sizes(turns), self.workspace.dtype.itemsize
            size, offsets = sum(sizes), [itemsize * each for each in itertools.accumulate(sizes[:-1], initial=0)]
        return Bound(self, rows, turns, self.memory(shape), size, offsets)

    @functools.cached_property
    def launchers(self) -> tuple:
        """(device, runtime, parts, maps, tuples, constants, launchers), by which `Bound.launch` runs the launches.

        It makes one list of values: the stream, the numbers, addresses, those of parts of tensors, tensor maps, tuples
        of addresses, constants. Each launcher is (launch, head, operands). head and operands pick arguments from that
        list; operands is None for launch functions that take one argument for each operand. Plain loops, without
        functions: a first call takes this way.
        """
        launchers = []
        parts: dict[Address, int] = {}  # their places
        maps: list[tuple[Callable, int]] = []
        tuples: list[Callable] = []
        constants: list[Any] = []
        first_part = FIRST_ADDRESS + self.num_tensors + len(self.outputs)
        first_part += len(self.workspace.parts) if self.workspace else 0
        for launch in self.launches:
            for each in launch.operands:
                for one in each if type(each) is tuple else (each,):
                    if isinstance(one, Address) and one.offset:
                        parts.setdefault(one, first_part + len(parts))
        first_map = first_part + len(parts)
        first_tuple = first_map + sum([len(build.encoders) for build in self.builds])
        first_constant = first_tuple + sum([launch.num_tuples for launch in self.launches])
        for launch, build in zip(self.launches, self.builds, strict=True):
            encoders, sources = iter(build.encoders), []
            for each in build.arguments(launch):
                if each is STREAM:
                    sources.append(0)
                elif isinstance(each, Number):
                    sources.append(1 + each.place)
                elif isinstance(each, Address):
                    sources.append(parts[each] if each.offset else FIRST_ADDRESS + each.index)
                elif isinstance(each, Map):
                    sources.append(first_map + len(maps))
                    maps.append((_encode(next(encoders), each), FIRST_ADDRESS + each.tensor.index))
                elif type(each) is tuple and isinstance(each[0], Address):
                    sources.append(first_tuple + len(tuples))
                    tuples.append(_pick([parts[one] if one.offset else FIRST_ADDRESS + one.index for one in each]))
                else:
                    sources.append(first_constant + len(constants))
                    constants.append(each)
            first = 4 + len(build.head)
            head, operands = (sources[:first], sources[first:]) if build.packs_operands else (sources, None)
            launchers.append((build.launch, itemgetter(*head), operands and _pick(operands)))
        return self.device, self.builds[0].RUNTIME, tuple(parts), maps, tuples, constants, launchers


def bound(operand: Operand, tensors: Sequence[Tensor | None], numbers: tuple[int, ...]) -> Any:
    """The operand with tensors and numbers in place of symbols."""
    if isinstance(operand, Address):
        tensor = tensors[operand.index]
        if operand.offset:
            start = tensor.storage_offset() + operand.offset // tensor.dtype.itemsize
            return tensor.as_strided((1,), (1,), start)
        return tensor
    if isinstance(operand, Number):
        return numbers[operand.place]
    if isinstance(operand, Map):
        shape = bound(operand.shape, tensors, numbers)
        return replace(operand, tensor=tensors[operand.tensor.index], shape=shape)
    if isinstance(operand, tuple):
        return tuple(bound(each, tensors, numbers) for each in operand)
    return operand


class Bound(NamedTuple):
    """A loaded program for one shape of x."""

    program: Program
    rows: int
    turns: list[Turn]
    outputs: list[Memory | None]
    workspace: int | None  # elements
    offsets: list[int]  # of the workspace's parts, in bytes

    def launch(self, addresses: list[int]) -> tuple[Tensor | None, ...] | None:
        """The outputs for tensors at these addresses. None if a profiler hooks Triton's launches."""
        program, _, turns, outputs, workspace, offsets = self
        device, runtime, parts_of_tensors, maps, tuples, constants, launchers = program.launchers
        try:
            if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
                return None
        except AttributeError:  # something else in place of Triton's lists of hooks
            return None
        if torch_compat.current_device() != device:
            with torch.cuda.device(device):
                return self.launch(addresses)
        stream, addresses = torch_compat.raw_stream(device), [*addresses]
        made: list[Tensor | None] = []
        for memory in outputs:
            if memory is None:
                made.append(None)
                addresses.append(0)
            else:
                tensor = torch_compat.allocate(*memory)
                made.append(tensor)
                addresses.append(tensor.data_ptr())
        if workspace is not None:
            # Freed at the end: memory of one stream is used again in the stream's order.
            parts = torch_compat.allocate((workspace,), (1,), program.workspace.dtype)
            start = parts.data_ptr()
            for offset in offsets:
                addresses.append(start + offset)
        for block, numbers, which in turns:
            values = [stream, *numbers, *addresses]
            if block:
                for at, step in enumerate(program.blocks.bytes, FIRST_ADDRESS):
                    values[at] += block * step
            for part in parts_of_tensors:
                values.append(values[FIRST_ADDRESS + part.index] + part.offset)
            for encode, at in maps:
                values.append(encode(values[at], numbers[0]))
            for pick in tuples:
                values.append(pick(values))
            values += constants
            for launch, head, operands in launchers[which]:
                if operands is None:
                    launch(*head(values))
                else:
                    launch(*head(values), operands(values))
        return tuple(made)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor without empty dims."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def _pick(indices: list[int]) -> Callable[[list], tuple]:
    """A tuple of the values at these indices."""
    return itemgetter(*indices) if len(indices) > 1 else lambda values: (values[indices[0]],)


def _encode(encoder: Callable, described: Map) -> Callable[[int, int], Any]:
    """encode(address, rows): the tensor map, from a cache."""

    def encode(address: int, rows: int) -> Any:
        shape = [rows if size is Number.ROWS else size for size in described.shape]
        return encoder(address, shape, list(described.strides))

    return functools.lru_cache(KEPT_TENSOR_MAPS)(encode)
