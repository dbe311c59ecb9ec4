"""Launches a build that Triton has made before, without asking Triton again which build that is: 2 us instead of 11 to
18 (Triton 3.6).

A build depends on dtypes, on what is None, on the integers that its kernel is specialized by and on whether pointers
are multiples of 16 bytes; launches with other pointers take Triton's own way. Encoded tensor maps are kept by address.
Triton's launcher is no public interface: versions that were not tried take Triton's way always.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from .kernels import ring
from .kernels.column_reduction import ColumnTile
from .kernels.config import Norm, RingTile, Tile
from .problem import RowView

TRIED = triton.__version__.startswith("3.6.")
ALIGNMENT = 16
KEPT_TENSOR_MAPS = 1024  # of a build

_builds: dict[tuple, _Build | None] = {}
_unspecialized: dict[int, frozenset[int]] = {}  # by kernel


class RowDescriptor(NamedTuple):
    """What TMA copies row tiles from: rows as [rows, cols / box, box], because no side of a box may be longer than 256;
    for copies of several chunks as [chunks, rows, chunk / box, box], so that each chunk is in one piece in shared
    memory."""

    view: RowView
    rows: int
    cols: int
    tile: RingTile

    def geometry(self) -> tuple[list[int], list[int], list[int]]:
        """Shape, strides and the block of a copy."""
        tile, chunk = self.tile, self.tile.cluster * self.tile.chunk  # of all CTAs
        boxes, row_stride = chunk // tile.box, self.view.outer_stride
        if tile.copy_chunks > 1:
            shape = [self.cols // chunk, self.rows, boxes, tile.box]
            return shape, [chunk, row_stride, tile.box, 1], [tile.copy_chunks, tile.rows, boxes, tile.box]
        return [self.rows, self.cols // tile.box, tile.box], [row_stride, tile.box, 1], [tile.rows, boxes, tile.box]

    def triton(self) -> TensorDescriptor:
        """The same in Triton's form."""
        rank = 4 if self.tile.copy_chunks > 1 else 3
        return _in_tritons_form(self, ring.cluster_bases(self.tile, rank, rank - 2))


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
        return {"norm": self.norm, "tile": self.tile, "num_warps": self.tile.num_warps, **self.options}

    def run(self) -> None:
        """Launch on the current stream of the current device, or in the interpreter."""
        if isinstance(self.kernel, JITFunction):
            run(self, torch.cuda.current_device())
        else:
            self.kernel[self.grid](*self.args, **self.keywords())


def run(launch: Launch, device_index: int) -> None:
    """Launch on the current stream of the current device, whose index is given."""
    key, values = _key_and_values(launch, device_index)
    build = _builds.get(key) if key is not None else None
    if build is not None and not launch.kernel.pre_run_hooks and not _is_hooked():
        build.run(launch.grid, values, torch._C._cuda_getCurrentRawStream(device_index))
        return
    compiled = launch.kernel[launch.grid](*launch.args, **launch.keywords())
    if TRIED and key is not None and key not in _builds:
        _builds[key] = _Build.of(compiled, launch)


def _key_and_values(launch: Launch, device_index: int) -> tuple[tuple | None, list]:
    """What a build depends on (None where a pointer is not aligned), and the operands with pointers as numbers."""
    kernel = launch.kernel
    # Kernels, norms and tiles are made once and kept; hashing a kernel would ask Triton for its source.
    key: list[Any] = [id(kernel), id(launch.norm), id(launch.tile), device_index]
    values: list[Any] = []
    pointers, unspecialized = 0, _unspecialized.get(id(kernel))
    if unspecialized is None:
        unspecialized = _unspecialized[id(kernel)] = _positions_no_build_depends_on(kernel)
    for position, operand in enumerate(launch.operands):
        if isinstance(operand, Tensor):
            pointer = operand.data_ptr()
            pointers |= pointer
            values.append(pointer)
            key.append(operand.dtype)
            continue
        values.append(operand)
        if isinstance(operand, DESCRIPTORS):
            key.append(operand.view.tensor.dtype)
        elif position not in unspecialized:
            key.append(operand)
    return (None if pointers % ALIGNMENT else tuple(key)), values


def _positions_no_build_depends_on(kernel) -> frozenset[int]:
    """Of the numbers said so, and of floating-point ones."""
    return frozenset(
        position
        for position, parameter in enumerate(kernel.params)
        if parameter.do_not_specialize or parameter.annotation_type.startswith("fp")
    )


def _is_hooked() -> bool:
    """Whether a profiler wants to see Triton's launches."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


class _Build:
    """One compiled kernel with what its launcher is called with every time."""

    @staticmethod
    def of(compiled, launch: Launch) -> _Build | None:
        """None where the launcher would need memory of its own."""
        launcher = compiled.run
        return None if launcher.global_scratch_size or launcher.profile_scratch_size else _Build(compiled, launch)

    def __init__(self, compiled, launch: Launch):
        launcher = compiled.run
        constants = {"norm": launch.norm, "tile": launch.tile, "num_warps": launch.tile.num_warps}
        names = launch.kernel.arg_names[len(launch.operands) :]
        self._constants = [constants[name] for name in names]
        self._head = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
        self._head += (compiled.packed_metadata, None, None, None)
        self._descriptors = getattr(compiled.metadata, "tensordesc_meta", None) or []  # operands that come first
        self._encoded: dict[tuple, list] = {}
        self._launch = launcher.launch
        if self._descriptors:  # the function inside the one that encodes tensor maps
            self._launch = inspect.getclosurevars(launcher.launch).nonlocals["launcher"]

    def run(self, grid: tuple[int, ...], values: list, stream: int) -> None:
        count = len(self._descriptors)
        if count:
            encoded = [each for at in range(count) for each in self._encode(at, values[at])]
            values = [*encoded, *values[count:]]
        self._launch(*grid, *(1, 1, 1)[len(grid) :], stream, *self._head, *values, *self._constants)

    def _encode(self, position: int, rows: RowDescriptor | TileDescriptor) -> list:
        """A tensor map and its sizes, in the form that the launcher takes."""
        pointer = rows.view.tensor.data_ptr()
        key = position, pointer, rows.rows, rows.view.outer_stride
        encoded = self._encoded.get(key)
        if encoded is None:
            if len(self._encoded) >= KEPT_TENSOR_MAPS:
                self._encoded.clear()
            shape, strides, _ = rows.geometry()
            described = SimpleNamespace(
                base=SimpleNamespace(data_ptr=lambda: pointer), shape=shape, strides=strides, padding="zero"
            )
            encoded = self._encoded[key] = make_tensordesc_arg(described, self._descriptors[position])
        return encoded
