"""How each release of Triton launches a compiled kernel, so that launcher.py can skip Triton's own lookup.

All of this is internal to Triton. RELEASES lists the releases whose launchers were read and have run on a GPU. With all
other releases C++ launches (native.py), by CUDA's driver, or without it `own`, the launch that a compiled kernel has.
Both launch only kernels that agree with what they would pass: `declared` reads what a compiled kernel says of itself.
Triton looks up and launches the rest, and everything if a name is gone.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

WHOLE_GRID_AT_ONCE = False  # cooperative launch. Never used: beside other kernels it would wait for the whole GPU


# The launcher of a release, of (compiled, has_maps): (launch, head, packs_operands). launch(x, y, z, stream, *head,
# *operands) launches the kernel on the grid x, y, z; if the release packs operands, launch(x, y, z, stream, *head,
# operands). Among the operands, each tensor map is followed by its shape and strides.
LaunchOf = Callable[[Any, bool], tuple[Callable, tuple, bool]]


def _flat(compiled, has_maps: bool) -> tuple[Callable, tuple, bool]:
    """For releases that compile a launch function per kernel. If the kernel has tensor maps, that function is wrapped
    in another that encodes the maps; the inner one is returned."""
    launcher = compiled.run
    head = compiled.function, WHOLE_GRID_AT_ONCE, launcher.launch_pdl, None, None
    launch = inspect.getclosurevars(launcher.launch).nonlocals["launcher"] if has_maps else launcher.launch
    return launch, (*head, compiled.packed_metadata, None, None, None), False


def _packed(compiled, has_maps: bool) -> tuple[Callable, tuple, bool]:
    """For releases with one launch function for all kernels. It takes all operands as one argument, and their types
    as others."""
    from triton.runtime import driver

    launcher = compiled.run
    head = compiled.function, WHOLE_GRID_AT_ONCE, launcher.launch_pdl, compiled.packed_metadata
    head += None, None, None, None, None, launcher.arg_annotations, launcher.kernel_signature
    return driver.active.utils.launch, head, True


def own(compiled, has_maps: bool) -> tuple[Callable, tuple, bool]:
    """For all other releases: the launch of a compiled kernel that Triton's tutorials use. It encodes tensor maps."""

    def launch(x: int, y: int, z: int, stream: int, *operands) -> None:
        compiled[x, y, z](*operands, stream=stream)

    return launch, (), False


PTX_TYPES = {"nvTmaDesc": "b8", "i32": "u32", "i64": "u64", "fp32": "f32", "fp64": "f64"}  # of what is no pointer


class Declared(NamedTuple):
    """What the launch of a kernel must be like."""

    parameters: tuple[str, ...]  # types as PTX names them
    threads: int
    cluster: int


def declared(ptx: str) -> Declared:
    """What a compiled kernel says of its launch. Raises AttributeError if it does not say it."""
    head = re.search(r"\.entry\s+\w+\((.*?)\)(.*?)\{", ptx, re.DOTALL)
    parameters = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)", head[1]) if head else None
    threads = re.search(r"\.reqntid (\d+)", head[2]) if head else None
    if parameters is None or threads is None:
        raise AttributeError("PTX without an entry and its number of threads")
    cluster = re.search(r"\.reqnctapercluster (\d+)", head[2])
    return Declared(tuple(parameters), int(threads[1]), int(cluster[1]) if cluster else 1)


def encoder(metadata: dict) -> Callable[[int, list[int], list[int]], Any]:
    """encode(address, shape, strides): the tensor map of a TMA descriptor, in the form that `launch` takes."""
    from triton.runtime import driver

    utils = driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
    fixed = metadata["swizzle"], metadata["elem_size"], number_of_type(metadata["elem_type"]), metadata["block_size"]
    padding = 0  # zeros

    def encode(address: int, shape: list[int], strides: list[int]) -> Any:
        return fill(address, *fixed, shape, strides, padding)

    return encode


RELEASES: dict[tuple[int, int], LaunchOf] = {(3, 6): _flat, (3, 7): _packed, (3, 8): _packed, (3, 9): _packed}
# Host time of a call, in microseconds, if Triton itself launches its kernels: no program is kept (bench/NOTES.md,
# "Host time").
CALL_US = "240 to 560"


@functools.cache
def installed() -> tuple[int, int] | None:
    """(major, minor) of the installed Triton, without importing it. None if Triton is not installed."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def in_use() -> LaunchOf | None:
    """The launcher of the installed release if RELEASES has it; else None."""
    return RELEASES.get(installed())


def number_of_type(name: int) -> int:
    """CUDA's number of a tensor map's element type, from Triton's number."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return TMA_DTYPE_DEVICE_TO_HOST[name]
