"""Launches a build that Triton has made before without Triton's own lookup, which takes most of a launch's host time.

A build depends on dtypes, on which operands are None, on the integers that its kernel is specialized for, and on which
pointers are multiples of 16 bytes. Triton's launcher is no public interface, so with releases that have not been tried
Triton itself launches every kernel (triton_compat.py). The measurements are in bench/NOTES.md, "Evidence behind
constants".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import JITFunction

from ..kernels.config import COMPILE_OPTIONS, ColumnTile, Norm, RingTile, Tile
from ..kernels.row_tile import cluster_bases
from ..planner.norm_problem import ALIGNMENT
from ..problem import RowView
from . import torch_compat, triton_compat
from .fallback import BuildFailed, cause_of

TRITON = triton_compat.in_use()  # None: Triton itself launches every kernel

_builds: dict[tuple, Build | None] = {}  # by key (`_key_and_values`); None if Triton itself must launch it
_loaded: set[tuple] = set()  # keys of builds that Triton has loaded
_failed: dict[tuple, str] = {}  # causes of failures, by key
_unspecialized: dict[int, frozenset[int]] = {}  # operand positions that no build depends on, by id of the kernel


class Rows(int):
    """The number of rows in a grid or among operands. A prepared call puts its own number of rows there."""


class Ctas(int):
    """The number of CTAs along the rows."""


class Partials(int):
    """The number of rows of the dw and db partials."""


class RowDescriptor(NamedTuple):
    """A tensor from which TMA copies row tiles, or with `tail` their tails.

    It is described as [rows, cols / box, box], because no side of a TMA box may exceed 256 elements. For copies of
    several chunks it is [chunks, rows, chunk / box, box], so that each chunk is contiguous in shared memory.
    """

    view: RowView
    rows: int
    cols: int
    tile: RingTile
    tail: bool = False

    def geometry(self) -> tuple[list[int], list[int], list[int]]:
        """(shape, strides, block of one copy), in elements."""
        tile, chunk = self.tile, self.tile.cluster * self.tile.chunk  # chunk of all CTAs of the cluster together
        boxes, row_stride = chunk // tile.box, self.view.outer_stride
        if self._has_chunks:
            shape = [self.cols // chunk, self.rows, boxes, tile.box]
            return shape, [chunk, row_stride, tile.box, 1], [tile.copy_chunks, tile.rows, boxes, tile.box]
        return [self.rows, self.cols // tile.box, tile.box], [row_stride, tile.box, 1], [tile.rows, boxes, tile.box]

    def triton(self) -> TensorDescriptor:
        """This descriptor in Triton's form."""
        rank = 4 if self._has_chunks else 3
        return _in_tritons_form(self, cluster_bases(self.tile, rank, rank - 2))

    @property
    def _has_chunks(self) -> bool:
        return self.tile.copy_chunks > 1 and not self.tail


class TileDescriptor(NamedTuple):
    """A tensor from which TMA copies tiles of rows and columns, described as [rows, cols]."""

    view: RowView
    rows: int
    cols: int
    tile: ColumnTile

    def geometry(self) -> tuple[list[int], list[int], list[int]]:
        """(shape, strides, block of one copy), in elements."""
        return [self.rows, self.cols], [self.view.outer_stride, 1], [self.tile.rows, self.tile.chunk]

    def triton(self) -> TensorDescriptor:
        """This descriptor in Triton's form."""
        return _in_tritons_form(self, [])


DESCRIPTORS = RowDescriptor, TileDescriptor


def _in_tritons_form(descriptor: RowDescriptor | TileDescriptor, cluster_bases: list) -> TensorDescriptor:
    tensor, (shape, strides, block) = descriptor.view.tensor, descriptor.geometry()
    layout = NVMMASharedLayout(0, 8 * tensor.element_size(), len(shape), cga_layout=cluster_bases)
    return TensorDescriptor(tensor, [int(size) for size in shape], strides, block, layout)


def _tritons_form(operand: Any) -> Any:
    if isinstance(operand, DESCRIPTORS):
        return operand.triton()
    return int(operand) if isinstance(operand, (Rows, Ctas, Partials)) else operand


@dataclass
class Launch:
    """One kernel with all arguments of its call. norm and tile are compile-time arguments. What follows from the number
    of rows is a Rows, Ctas or Partials, so that a call with other rows can be launched from this one."""

    kernel: Any
    grid: tuple[int, ...]
    operands: tuple
    norm: Norm
    tile: Tile
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> tuple:
        """The operands in Triton's form."""
        return tuple(map(_tritons_form, self.operands))

    def keywords(self) -> dict[str, Any]:
        constants = {"norm": self.norm, "tile": self.tile, "num_warps": self.tile.num_warps}
        return {**constants, **COMPILE_OPTIONS, **self.options}

    def load(self) -> None:
        """Compile and load the kernel. Raises BuildFailed if it has failed before, else what Triton raises."""
        if isinstance(self.kernel, JITFunction):
            load(self, torch.cuda.current_device())

    def run(self) -> None:
        """Launch on the current stream of the current device, or in the interpreter."""
        if isinstance(self.kernel, JITFunction):
            run(self, torch.cuda.current_device())
        else:
            self.kernel[self.grid](*self.args, **self.keywords())


def hand_over(launches: Sequence[Any], loaded: bool = False) -> None:
    """Run Launches or ColumnLaunches in order on the current device. All kernels are loaded before the first one is
    launched, so that a failed build is noticed before anything runs. All launches come through here, except those of
    prepared calls. Raises BuildFailed if a kernel cannot be built or launched but another one could be, and all other
    errors as they are."""
    for launch in [] if loaded else launches:
        try:
            launch.load()
        except Exception as error:
            _fail(launch, error, launched=False)
    for launch in launches:
        try:
            launch.run()
        except Exception as error:
            _fail(launch, error, launched=True)


def _fail(launch: Any, error: Exception, *, launched: bool) -> NoReturn:
    """Raise BuildFailed if another kernel could avoid the error, and mark the build as failed; else raise the error."""
    cause = str(error) if isinstance(error, BuildFailed) else cause_of(error, launched=launched)
    if cause is None:
        raise error
    if isinstance(launch, Launch) and isinstance(launch.kernel, JITFunction):
        key, _ = _key_and_values(launch, torch.cuda.current_device())
        _failed[key] = cause
        _loaded.discard(key)
        _builds.pop(key, None)
    raise BuildFailed(cause) from error


def load(launch: Launch, device_index: int) -> None:
    """Load the build of a launch on the device. Raises BuildFailed for a build that has failed before."""
    key, _ = _key_and_values(launch, device_index)
    if key in _builds or key in _loaded:
        return
    if key in _failed:
        raise BuildFailed(_failed[key])
    compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.keywords())
    compiled.run  # noqa: B018  loads it, and asks whether its resources are there
    _loaded.add(key)


def run(launch: Launch, device_index: int) -> None:
    """Launch on the current stream of the current device, whose index is device_index."""
    if TRITON is None:
        launch.kernel[launch.grid](*launch.args, **launch.keywords())
        return
    key, values = _key_and_values(launch, device_index)
    build = _builds.get(key)
    if build is not None and not launch.kernel.pre_run_hooks and not build.is_hooked():
        build.run(launch.grid, values, torch_compat.raw_stream(device_index))
        return
    compiled = launch.kernel[launch.grid](*launch.args, **launch.keywords())
    if key not in _builds:
        _builds[key] = Build.of(compiled, launch)


def known_build(launch: Launch, device_index: int) -> tuple[Build | None, list]:
    """The build that `run` has launched before, or None if Triton itself must launch it; and the operands in the form
    of `_key_and_values`."""
    if TRITON is None or not isinstance(launch.kernel, JITFunction) or launch.kernel.pre_run_hooks:
        return None, []
    key, values = _key_and_values(launch, device_index)
    return _builds.get(key), values


def _key_and_values(launch: Launch, device_index: int) -> tuple[tuple, list]:
    """(key, values): everything that a build depends on, and the operands with tensors replaced by their addresses."""
    kernel = launch.kernel
    # id() is safe for kernels, norms and tiles: each is made once and kept. Hashing a kernel would make Triton read its
    # source.
    key: list[Any] = [id(kernel), id(launch.norm), id(launch.tile), device_index, *launch.options.items()]
    values: list[Any] = []
    unspecialized = _unspecialized.get(id(kernel))
    if unspecialized is None:
        unspecialized = _unspecialized[id(kernel)] = _positions_no_build_depends_on(kernel)
    for position, operand in enumerate(launch.operands):
        if isinstance(operand, Tensor):
            pointer = operand.data_ptr()
            values.append(pointer)
            key += (operand.dtype, pointer % ALIGNMENT == 0)
            continue
        values.append(operand)
        if isinstance(operand, DESCRIPTORS):
            key.append(operand.view.tensor.dtype)
        elif position not in unspecialized:
            key.append(operand)
    return tuple(key), values


def _positions_no_build_depends_on(kernel) -> frozenset[int]:
    """Positions of parameters marked do_not_specialize and of floating-point numbers."""
    return frozenset(
        position
        for position, parameter in enumerate(kernel.params)
        if parameter.do_not_specialize or parameter.annotation_type.startswith("fp")
    )


class Build:
    """One compiled kernel, with the arguments that are the same in each of its launches.

    `launch(grid x, y, z, stream, *head, *values, *constants)` launches it; if packs_operands, it takes values and
    constants as one tuple. Among the values, each tensor map is followed by its shape and strides.
    """

    STREAM = 3  # position of the stream among the arguments of `launch`
    RUNTIME = knobs.runtime  # has the hooks of profilers that watch Triton's launches

    @staticmethod
    def of(compiled, launch: Launch) -> Build | None:
        """The build; None if its launcher needs scratch memory or has an unknown form."""
        try:
            launcher = compiled.run
            needs_memory = launcher.global_scratch_size or launcher.profile_scratch_size
            Build.hooks()  # raises AttributeError if this Triton has no such hooks
            watched = getattr(launcher, "gsan_enabled", False)  # launches under the sanitizer take more operands
            return None if needs_memory or watched else Build(compiled, launch, TRITON)
        except (AttributeError, KeyError):
            return None

    def __init__(self, compiled, launch: Launch, triton: triton_compat.Release):
        constants = {"norm": launch.norm, "tile": launch.tile, "num_warps": launch.tile.num_warps}
        names = launch.kernel.arg_names[len(launch.operands) :]
        self.compiled = compiled
        self._constants = [constants[name] for name in names]
        # A dependent launch may be placed on the GPU while the launch before it ends.
        self.dependent = compiled.metadata.launch_pdl
        # Metadata of the TMA descriptors, which are the first operands.
        self.descriptors = getattr(compiled.metadata, "tensordesc_meta", None) or []
        self.launch, self._head = triton.launch_of(compiled, bool(self.descriptors))
        self.first_operand = self.STREAM + 1 + len(self._head)
        self.packs_operands = triton.packs_operands

    def run(self, grid: tuple[int, ...], values: list, stream: int) -> None:
        """Launch with the operands in the form of `_key_and_values`."""
        arguments, first = self.arguments(grid, values, stream), self.first_operand
        if self.packs_operands:
            self.launch(*arguments[:first], tuple(arguments[first:]))
        else:
            self.launch(*arguments)

    def arguments(self, grid: tuple[int, ...], values: list, stream: int) -> list:
        """The arguments for `launch`, the operands not packed."""
        count = len(self.descriptors)
        if count:
            encoded = []
            for at in range(count):
                shape, strides, _ = values[at].geometry()
                encoded += [self.tensor_map(at, values[at].view.tensor.data_ptr(), shape, strides), *shape, *strides]
            values = [*encoded, *values[count:]]
        return [*grid, *(1, 1, 1)[len(grid) :], stream, *self._head, *values, *self._constants]

    @functools.cached_property
    def _encoders(self) -> list[Callable]:
        return [triton_compat.encoder(each) for each in self.descriptors]

    def positions(self, operands: tuple) -> list[int]:
        """The position of each operand among the arguments of `launch`; of a descriptor, that of its tensor map."""
        sizes = [1 + 2 * len(o.geometry()[0]) if isinstance(o, DESCRIPTORS) else 1 for o in operands]
        return [self.first_operand + sum(sizes[:at]) for at in range(len(operands))]

    def parameter_types(self) -> list[tuple[int, str]]:
        """(position among the arguments of `launch`, Triton's name of the type) of each kernel parameter, without the
        compile-time constants."""
        types: list[str] = []
        for each in self.compiled.src.signature.values():
            if isinstance(each, str) and each.startswith("tensordesc"):
                rank = len(self.descriptors[sum(name == "nvTmaDesc" for name in types)]["block_size"])
                types += ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]
            else:
                types.append(each)
        return [(at, each) for at, each in enumerate(types, self.first_operand) if each != "constexpr"]

    def map_geometry(self, position: int) -> tuple[int, int, list[int]]:
        """(bytes of an element, CUDA's number of the element type, box of a copy) of a descriptor's tensor map."""
        described = self.descriptors[position]
        return described["elem_size"], triton_compat.number_of_type(described["elem_type"]), described["block_size"]

    @staticmethod
    def is_hooked() -> bool:
        """Whether a profiler watches Triton's launches."""
        try:
            before, after = Build.hooks()
        except AttributeError:  # something else in place of Triton's lists of hooks: Triton must launch
            return True
        return bool(before or after)

    @staticmethod
    def hooks() -> tuple[list, list]:
        """Triton's lists of hooks that run before and after a launch."""
        return Build.RUNTIME.launch_enter_hook.calls, Build.RUNTIME.launch_exit_hook.calls

    def tensor_map(self, position: int, pointer: int, shape: list[int], strides: list[int]):
        """The encoded tensor map of the descriptor at `position`, in the form that `launch` takes."""
        return self._encoders[position](pointer, shape, strides)
