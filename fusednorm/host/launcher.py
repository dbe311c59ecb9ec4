"""Launches a build that Triton has made before, without asking Triton again which build that is: 2 us instead of 11 to
18 (Triton 3.6).

A build depends on dtypes, on what is None, on the integers that its kernel is specialized by and on which pointers are
multiples of 16 bytes. Encoded tensor maps are kept by address. Triton's launcher is no public interface: releases that
have not been tried take Triton's way always (triton_compat.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import JITFunction

from ..kernels import ring
from ..kernels.column_reduction import ColumnTile
from ..kernels.config import COMPILE_OPTIONS, Norm, RingTile, Tile
from ..planner.norm_problem import ALIGNMENT
from ..problem import RowView
from . import torch_compat, triton_compat
from .fallback import BuildFailed, cause_of

TRITON = triton_compat.in_use()  # None: all launches are Triton's
KEPT_TENSOR_MAPS = 1024  # of a build

_builds: dict[tuple, Build | None] = {}
_loaded: set[tuple] = set()
_failed: dict[tuple, str] = {}  # and why
_unspecialized: dict[int, frozenset[int]] = {}  # by kernel


class RowDescriptor(NamedTuple):
    """What TMA copies row tiles from: rows as [rows, cols / box, box], because no side of a box may be longer than 256;
    for copies of several chunks as [chunks, rows, chunk / box, box], so that each chunk is in one piece in shared
    memory. Of a tile's copies, or of its tail."""

    view: RowView
    rows: int
    cols: int
    tile: RingTile
    tail: bool = False

    def geometry(self) -> tuple[list[int], list[int], list[int]]:
        """Shape, strides and the block of a copy."""
        tile, chunk = self.tile, self.tile.cluster * self.tile.chunk  # of all CTAs
        boxes, row_stride = chunk // tile.box, self.view.outer_stride
        if self._has_chunks:
            shape = [self.cols // chunk, self.rows, boxes, tile.box]
            return shape, [chunk, row_stride, tile.box, 1], [tile.copy_chunks, tile.rows, boxes, tile.box]
        return [self.rows, self.cols // tile.box, tile.box], [row_stride, tile.box, 1], [tile.rows, boxes, tile.box]

    def triton(self) -> TensorDescriptor:
        """The same in Triton's form."""
        rank = 4 if self._has_chunks else 3
        return _in_tritons_form(self, ring.cluster_bases(self.tile, rank, rank - 2))

    @property
    def _has_chunks(self) -> bool:
        return self.tile.copy_chunks > 1 and not self.tail


class TileDescriptor(NamedTuple):
    """What TMA copies tiles of rows and columns from: [rows, cols]."""

    view: RowView
    rows: int
    cols: int
    tile: ColumnTile

    def geometry(self) -> tuple[list[int], list[int], list[int]]:
        """Shape, strides and the block of a copy."""
        return [self.rows, self.cols], [self.view.outer_stride, 1], [self.tile.rows, self.tile.chunk]

    def triton(self) -> TensorDescriptor:
        """The same in Triton's form."""
        return _in_tritons_form(self, [])


DESCRIPTORS = RowDescriptor, TileDescriptor


def _in_tritons_form(descriptor: RowDescriptor | TileDescriptor, cluster_bases: list) -> TensorDescriptor:
    tensor, (shape, strides, block) = descriptor.view.tensor, descriptor.geometry()
    layout = NVMMASharedLayout(0, 8 * tensor.element_size(), len(shape), cga_layout=cluster_bases)
    return TensorDescriptor(tensor, shape, strides, block, layout)


@dataclass
class Launch:
    """One kernel with all that it is called with; norm and tile are its compile-time arguments."""

    kernel: Any
    grid: tuple[int, ...]
    operands: tuple
    norm: Norm
    tile: Tile
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> tuple:
        """The operands in Triton's form."""
        return tuple(each.triton() if isinstance(each, DESCRIPTORS) else each for each in self.operands)

    def keywords(self) -> dict[str, Any]:
        constants = {"norm": self.norm, "tile": self.tile, "num_warps": self.tile.num_warps}
        return {**constants, **COMPILE_OPTIONS, **self.options}

    def load(self) -> None:
        """Do all of a launch that another kernel could mend if it failed, but for the launch: compile and load. Raises
        BuildFailed."""
        if isinstance(self.kernel, JITFunction):
            load(self, torch.cuda.current_device())

    def run(self) -> None:
        """Launch on the current stream of the current device, or in the interpreter. Raises BuildFailed where the
        driver refuses."""
        if not isinstance(self.kernel, JITFunction):
            self.kernel[self.grid](*self.args, **self.keywords())
            return
        device_index = torch.cuda.current_device()
        try:
            run(self, device_index)
        except Exception as error:
            refused(self, device_index, error)
            raise


def hand_over(launches: Sequence[Any], loaded: bool = False) -> None:
    """Launch them in turn, Launches or ColumnLaunches, on the current device: the one place where all launches go, but
    for those that a recipe repeats. All kernels are loaded before the first is launched. Raises BuildFailed."""
    if not loaded:
        for launch in launches:
            launch.load()
    for launch in launches:
        launch.run()


def load(launch: Launch, device_index: int) -> None:
    """Have the build of a launch on the device. Raises BuildFailed, for a build that has failed before at once."""
    key, _ = _key_and_values(launch, device_index)
    if key in _builds or key in _loaded:
        return
    if key not in _failed:
        try:
            compiled = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.keywords())
            compiled.run  # noqa: B018  loads it, and asks whether its resources are there
        except Exception as error:
            cause = cause_of(error, launched=False)
            if cause is None:
                raise
            _failed[key] = cause
        else:
            _loaded.add(key)
            return
    raise BuildFailed(_failed[key])


def refused(launch: Launch, device_index: int, error: Exception) -> None:
    """Raises BuildFailed, from here on at once, where the error of a launch says that the driver has refused it."""
    cause = cause_of(error, launched=True)
    if cause is not None:
        key, _ = _key_and_values(launch, device_index)
        _failed[key] = cause
        _loaded.discard(key)
        _builds.pop(key, None)
        raise BuildFailed(cause) from error


def run(launch: Launch, device_index: int) -> None:
    """Launch on the current stream of the current device, whose index is given."""
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
    """The build that `run` has launched before (None where Triton itself has to launch it), and its operands as
    `_key_and_values` has them."""
    if TRITON is None or not isinstance(launch.kernel, JITFunction) or launch.kernel.pre_run_hooks:
        return None, []
    key, values = _key_and_values(launch, device_index)
    return _builds.get(key), values


def _key_and_values(launch: Launch, device_index: int) -> tuple[tuple, list]:
    """What a build depends on, and the operands with pointers as numbers."""
    kernel = launch.kernel
    # Kernels, norms and tiles are made once and kept; hashing a kernel would ask Triton for its source.
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
    """Of the numbers said so, and of floating-point ones."""
    return frozenset(
        position
        for position, parameter in enumerate(kernel.params)
        if parameter.do_not_specialize or parameter.annotation_type.startswith("fp")
    )


class Build:
    """One compiled kernel with what its launcher is called with every time.

    `launch(grid x, y, z, stream, *head, *values, *constants)` launches it, where each tensor map among the values is
    followed by its shape and strides.
    """

    STREAM = 3  # position of the stream in a launch's arguments
    RUNTIME = knobs.runtime  # where those who want to see Triton's launches leave their hooks

    @staticmethod
    def of(compiled, launch: Launch) -> Build | None:
        """None where the launcher would need memory of its own, or is another than is known."""
        try:
            launcher = compiled.run
            needs_memory = launcher.global_scratch_size or launcher.profile_scratch_size
            Build.hooks()  # must be there to be asked
            watched = getattr(launcher, "gsan_enabled", False)  # a sanitizer's launches take more operands
            return None if needs_memory or watched else Build(compiled, launch, TRITON)
        except (AttributeError, KeyError):
            return None

    def __init__(self, compiled, launch: Launch, triton: triton_compat.Release):
        constants = {"norm": launch.norm, "tile": launch.tile, "num_warps": launch.tile.num_warps}
        names = launch.kernel.arg_names[len(launch.operands) :]
        self.compiled = compiled
        self._constants = [constants[name] for name in names]
        self.dependent = compiled.metadata.launch_pdl  # on the launch before it: may be placed while that one ends
        self.descriptors = getattr(compiled.metadata, "tensordesc_meta", None) or []  # of operands that come first
        self._encoded: dict[tuple, Any] = {}
        self._encode = triton.encode
        self.launch, self._head = triton.launch_of(compiled, bool(self.descriptors))

    def run(self, grid: tuple[int, ...], values: list, stream: int) -> None:
        """Launch with the operands as `_key_and_values` has them."""
        self.launch(*self.arguments(grid, values, stream))

    def arguments(self, grid: tuple[int, ...], values: list, stream: int) -> list:
        """What `launch` is called with."""
        count = len(self.descriptors)
        if count:
            encoded = []
            for at in range(count):
                shape, strides, _ = values[at].geometry()
                encoded += [self.tensor_map(at, values[at].view.tensor.data_ptr(), shape, strides), *shape, *strides]
            values = [*encoded, *values[count:]]
        return [*grid, *(1, 1, 1)[len(grid) :], stream, *self._head, *values, *self._constants]

    def positions(self, operands: tuple) -> list[int]:
        """Where each operand (of a descriptor the tensor map) is among the arguments."""
        sizes = [1 + 2 * len(o.geometry()[0]) if isinstance(o, DESCRIPTORS) else 1 for o in operands]
        return [self.STREAM + 1 + len(self._head) + sum(sizes[:at]) for at in range(len(operands))]

    def parameter_types(self) -> list[tuple[int, str]]:
        """(position among the arguments, type by Triton's name) of all that the kernel is called with: constants are
        not."""
        types: list[str] = []
        for each in self.compiled.src.signature.values():
            if isinstance(each, str) and each.startswith("tensordesc"):
                rank = len(self.descriptors[sum(name == "nvTmaDesc" for name in types)]["block_size"])
                types += ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]
            else:
                types.append(each)
        start = self.STREAM + 1 + len(self._head)
        return [(position, each) for position, each in enumerate(types, start) if each != "constexpr"]

    def map_geometry(self, position: int) -> tuple[int, int, list[int]]:
        """Of the tensor map of a descriptor: bytes of an element, CUDA's number of its type, and the box of a copy."""
        described = self.descriptors[position]
        return described["elem_size"], triton_compat.number_of_type(described["elem_type"]), described["block_size"]

    @staticmethod
    def is_hooked() -> bool:
        """Whether a profiler wants to see Triton's launches."""
        before, after = Build.hooks()
        return bool(before or after)

    @staticmethod
    def hooks() -> tuple[list, list]:
        """Triton's lists of those who want to: before a launch, and after."""
        return Build.RUNTIME.launch_enter_hook.calls, Build.RUNTIME.launch_exit_hook.calls

    def tensor_map(self, position: int, pointer: int, shape: list[int], strides: list[int]):
        """What the TMA copies of a descriptor need, in the form that `launch` takes."""
        key = position, pointer, *shape, *strides
        encoded = self._encoded.get(key)
        if encoded is None:
            if len(self._encoded) >= KEPT_TENSOR_MAPS:
                self._encoded.clear()
            base = SimpleNamespace(data_ptr=lambda: pointer)
            described = SimpleNamespace(
                base=base, shape=shape, strides=strides, padding="zero", round_f32_to_tf32=False
            )
            encoded = self._encoded[key] = self._encode(described, self.descriptors[position])
        return encoded
