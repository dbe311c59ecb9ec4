"""How each release of Triton launches a compiled kernel: what launcher.py needs to do that without asking Triton again.

No release promises any of it. So RELEASES is a table of those whose launchers were read, and only one that has run on a
GPU is used; with all others, and where a name is gone, calls take Triton's own way.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

WHOLE_GRID_AT_ONCE = False  # no launch of ours asks for that: beside others it would wait for the whole GPU


class Release(NamedTuple):
    """launch_of(compiled, has_maps): what launches a compiled kernel, called with grid x, y, z, stream, then the second
    of what is returned here, then the kernel's operands; a tensor map among these is followed by its shape and strides.
    encode(descriptor, metadata): the tensor map of a TMA descriptor."""

    launch_of: Callable[[Any, bool], tuple[Callable, tuple]]
    encode: Callable[[Any, dict], Any]
    has_run: bool  # on a GPU, with this package


def _flat(compiled, has_maps: bool) -> tuple[Callable, tuple]:
    """A function compiled for each kernel; for one with tensor maps, inside another that encodes them."""
    launcher = compiled.run
    head = compiled.function, WHOLE_GRID_AT_ONCE, launcher.launch_pdl, None, None
    launch = inspect.getclosurevars(launcher.launch).nonlocals["launcher"] if has_maps else launcher.launch
    return launch, (*head, compiled.packed_metadata, None, None, None)


def _packed(compiled, has_maps: bool) -> tuple[Callable, tuple]:
    """One function for all kernels, which takes the operands as one argument and is told what they are."""
    from triton.runtime import driver

    launcher, launch_packed = compiled.run, driver.active.utils.launch
    head = compiled.function, WHOLE_GRID_AT_ONCE, launcher.launch_pdl, compiled.packed_metadata
    head += None, None, None, None, None, launcher.arg_annotations, launcher.kernel_signature
    first = 4 + len(head)

    def launch(*arguments):
        launch_packed(*arguments[:first], arguments[first:])

    return launch, head


def _encode(descriptor, metadata: dict):
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(descriptor, metadata)[0]


def _encode_with_signature(descriptor, metadata: dict):
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(descriptor, metadata, None)[0]


RELEASES = {
    (3, 6): Release(_flat, _encode, has_run=True),
    (3, 7): Release(_packed, _encode, has_run=False),
    (3, 8): Release(_packed, _encode_with_signature, has_run=False),
    (3, 9): Release(_packed, _encode_with_signature, has_run=False),
}
SLOWER_US = "9 to 16"  # of host time, for each kernel that Triton itself launches (H200, Triton 3.6)


@functools.cache
def installed() -> tuple[int, int] | None:
    """Major and minor version, without importing it; None where there is none."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def in_use() -> Release | None:
    """The installed release, if its launcher is in the table and has run on a GPU."""
    release = RELEASES.get(installed())
    return release if release is not None and release.has_run else None


def number_of_type(name: int) -> int:
    """CUDA's number of a tensor map's type, from Triton's."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return TMA_DTYPE_DEVICE_TO_HOST[name]
