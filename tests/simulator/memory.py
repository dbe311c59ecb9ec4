"""Memory as bytes: a CTA's shared memory, tensors at their real addresses, and tensor maps for TMA copies."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass

import numpy as np

from .races import Access, Clock, Ledger, Shadow, SimulationError

MAX_BOX, MAX_STRIDE, TMA_ALIGNMENT, COPY_ALIGNMENT = 256, 1 << 40, 16, 128
# By CUtensorMapSwizzle: 16-byte pieces change places within a span of this size.
SWIZZLE_BYTES = {0: 16, 1: 32, 2: 64, 3: 128}


class Region:
    """A piece of memory, with a record of the accesses to each `granule` bytes of it."""

    def __init__(self, raw: np.ndarray, name: str, ledger: Ledger, granule: int):
        self.raw, self.name, self.size = raw, name, len(raw)
        self.views = {width: raw[: len(raw) // width * width].view(f"u{width}") for width in (1, 2, 4, 8)}
        self.shadow = Shadow(ledger, len(raw), granule)

    def check(self, at: np.ndarray, nbytes: int) -> None:
        """Raises SimulationError unless accesses of `nbytes` at these offsets are inside and aligned."""
        low, high = int(np.minimum.reduce(at)), int(np.maximum.reduce(at))
        if low < 0 or high + nbytes > self.size:
            raise SimulationError(f"access to bytes {low} to {high + nbytes} of {self.name}, which has {self.size}")
        if int(np.bitwise_or.reduce(at)) & (nbytes - 1):
            raise SimulationError(f"access to {self.name} that is not aligned to its {nbytes} bytes")

    def read(self, at: np.ndarray, width: int, count: int, access: Access, clock: Clock) -> list[np.ndarray]:
        """`count` elements of `width` bytes from each offset on: a row for each element. Raises SimulationError."""
        self.check(at, width * count)
        self.shadow.read(self.shadow.lanes(at, width * count), access, clock)
        return self._elements(at, width, count)

    def write(self, at: np.ndarray, width: int, values: list[np.ndarray], access: Access, clock: Clock) -> None:
        self.check(at, width * len(values))
        values = [value.astype(f"u{width}", copy=False) for value in values]
        pieces = self.shadow.lanes(at, width * len(values))

        def unchanged() -> np.ndarray:
            now = self._elements(at, width, len(values))
            same = np.stack([old == new for old, new in zip(now, values, strict=True)], axis=1)
            return same.all(axis=1) if pieces.ndim == 1 else same.repeat(-(-pieces.shape[1] // len(values)), axis=1)

        self.shadow.write(pieces, access, clock, unchanged)
        index, view = at >> (width.bit_length() - 1), self.views[width]
        for j, value in enumerate(values):
            view[index + j] = value

    def _elements(self, at: np.ndarray, width: int, count: int) -> list[np.ndarray]:
        index, view = at >> (width.bit_length() - 1), self.views[width]
        return [view[index + j] if j else view[index] for j in range(count)]


class GlobalMemory:
    """The tensors that launches were given, at their own addresses; an access elsewhere is an error."""

    def __init__(self):
        self._bases: list[int] = []
        self._regions: dict[int, Region] = {}
        self._owners: list[object] = []  # keeps the tensors' memory alive until the launches have run

    def add(self, address: int, nbytes: int, owner: object, name: str, ledger: Ledger, granule: int) -> None:
        if nbytes and address not in self._regions:
            raw = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
            self._regions[address] = Region(raw, name, ledger, granule)
            self._owners.append(owner)
            bisect.insort(self._bases, address)

    def find(self, address: int) -> tuple[Region, int]:
        """The region that holds this address, and the address where the region begins."""
        nearest = bisect.bisect_right(self._bases, address) - 1
        if nearest < 0:
            raise SimulationError(f"access outside of all tensors, at {address:#x}")
        base = self._bases[nearest]
        region = self._regions[base]
        if address >= base + region.size:
            behind = f"{address - base - region.size} bytes behind the {region.size} of {region.name}"
            raise SimulationError(f"access outside of all tensors, {behind}")
        return region, base


@dataclass(frozen=True)
class TensorMap:
    """The contents of a CUtensorMap, innermost first, with strides in bytes; strides[0] is an element's size."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self):
        span = self.box[0] * self.strides[0]
        for rule, holds in {
            "its address is a multiple of 16": self.address % TMA_ALIGNMENT == 0,
            "strides are multiples of 16 bytes": not any(s % TMA_ALIGNMENT for s in self.strides[1:]),
            "strides are less than 2^40": all(0 <= s < MAX_STRIDE for s in self.strides[1:]),
            "it has 1 to 5 sides of at most 2^32": len(self.shape) <= 5 and all(0 < n <= 1 << 32 for n in self.shape),
            "a box has sides of at most 256": all(0 < n <= MAX_BOX for n in self.box),
            "a box's inner side is a multiple of 16 bytes": span % TMA_ALIGNMENT == 0,
            "a swizzled box's inner side fits the swizzle": not self.swizzle or span <= SWIZZLE_BYTES[self.swizzle],
        }.items():
            if not holds:
                raise SimulationError(f"tensor map: {rule}, but it is {self}")

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.strides[0]

    def read(self, memory: GlobalMemory, corner: list[int]) -> np.ndarray:
        """The bytes of the box at `corner`, swizzled for shared memory, with zeros outside of the tensor."""
        itemsize = self.strides[0]
        box = np.zeros(self.box[::-1], f"u{itemsize}")
        inside = [(max(c, 0), min(c + b, n)) for c, b, n in zip(corner, self.box, self.shape, strict=True)]
        if all(low < high for low, high in inside):
            start = self.address + sum(low * s for (low, _), s in zip(inside, self.strides, strict=True))
            last = start + sum((high - low - 1) * s for (low, high), s in zip(inside, self.strides, strict=True))
            region, base = memory.find(start)
            if last + itemsize > base + region.size:
                raise SimulationError(f"TMA copy from behind the end of {region.name}")
            shape = [high - low for low, high in inside][::-1]
            elements = region.views[itemsize][(start - base) // itemsize :]
            into = tuple(slice(low - c, high - c) for (low, high), c in zip(inside, corner, strict=True))[::-1]
            box[into] = np.lib.stride_tricks.as_strided(elements, shape, self.strides[::-1])
        return swizzled(box.reshape(-1).view(np.uint8), self.swizzle)


def swizzled(data: np.ndarray, mode: int) -> np.ndarray:
    """The bytes, with the 16-byte pieces of each span in swizzled order. The first byte must be at a multiple of 1024.

    A piece goes to the place in its span that is its own number exclusive-or the number of its 128-byte line.
    """
    if not mode:
        return data
    piece = np.arange(len(data) // 16)
    pieces_of_span = SWIZZLE_BYTES[mode] // 16
    place = piece ^ ((piece >> 3) & (pieces_of_span - 1))
    out = np.empty_like(data).reshape(-1, 16)
    out[place] = data.reshape(-1, 16)
    return out.reshape(-1)
