"""Loads, stores and atomics of a warp."""

from __future__ import annotations

import numpy as np

from .races import ATOMIC, Clock, SimulationError
from .translate import PARAMETER_BASE, PARAMETER_PAGE, SHARED_BASE


class Accesses:
    """Of a Warp. `mask` are the lanes, None for all; `site` is the instruction."""

    def load_shared(self, into, addresses, offset, width, mask, site) -> None:
        if mask is None or mask.any():
            self._load(self.cta.memory, self._shared(addresses, offset, mask), into, width, mask, site)

    def store_shared(self, values, addresses, offset, width, mask, site) -> None:
        if mask is None or mask.any():
            self._store(self.cta.memory, self._shared(addresses, offset, mask), values, width, mask, site)

    def load_global(self, into, addresses, offset, width, mask, site) -> None:
        if mask is None or mask.any():
            self._load(*self._global(addresses, offset, mask), into, width, mask, site)

    def store_global(self, values, addresses, offset, width, mask, site) -> None:
        if mask is None or mask.any():
            self._store(*self._global(addresses, offset, mask), values, width, mask, site)

    def _shared(self, addresses, offset, mask) -> np.ndarray:
        return (addresses if mask is None else addresses[mask]).astype(np.int64) + (offset - SHARED_BASE)

    def _global(self, addresses, offset, mask):
        at = (addresses if mask is None else addresses[mask]).view(np.int64) + offset
        region, base = self.gpu.memory.find(int(at[0]))
        return region, at - base

    def _load(self, region, at, into, width, mask, site) -> None:
        nbytes = width * len(into)
        region.check(at, nbytes)
        region.shadow.read(region.shadow.lanes(at, nbytes), self.access(site), self.clock)
        lanes = slice(None) if mask is None else mask
        for register, values in zip(into, region.load(at, width, len(into)), strict=True):
            register[lanes] = values

    def _store(self, region, at, values, width, mask, site) -> None:
        nbytes = width * len(values)
        region.check(at, nbytes)
        values = [value if mask is None else value[mask] for value in values]
        if values[0].itemsize != width:
            values = [value.astype(f"uint{8 * width}") for value in values]
        pieces = region.shadow.lanes(at, nbytes)
        region.shadow.write(pieces, self.access(site), self.clock, lambda: region.holds(at, width, values))
        region.store(at, width, values)

    def load_matrices(self, into, addresses, offset, transposed, mask, site) -> None:
        """ldmatrix: 8 x 8 elements of 2 bytes each, whose rows' addresses are those of 8 lanes each."""
        at, memory = self._rows(addresses, offset, len(into), mask), self.cta.memory
        memory.shadow.read(memory.shadow.lanes(at, 16), self.access(site), self.clock)
        matrices = memory.views[2][(at[:, None] >> 1) + np.arange(8)].reshape(-1, 8, 8)
        for register, matrix in zip(into, matrices, strict=True):
            register[:] = np.ascontiguousarray(matrix.T if transposed else matrix).reshape(-1).view(np.uint32)

    def store_matrices(self, values, addresses, offset, transposed, mask, site) -> None:
        at, memory = self._rows(addresses, offset, len(values), mask), self.cta.memory
        matrices = np.stack([np.ascontiguousarray(value).view(np.uint16).reshape(8, 8) for value in values])
        rows = (matrices.transpose(0, 2, 1) if transposed else matrices).reshape(-1, 8)
        columns = list(rows.T)
        pieces = memory.shadow.lanes(at, 16)
        memory.shadow.write(pieces, self.access(site), self.clock, lambda: memory.holds(at, 2, columns))
        memory.store(at, 2, columns)

    def _rows(self, addresses, offset, count, mask) -> np.ndarray:
        if mask is not None:
            self.needs_all(mask, "ldmatrix or stmatrix")
        at = addresses[: 8 * count].astype(np.int64) + (offset - SHARED_BASE)
        self.cta.memory.check(at, 16)
        return at

    def atomic_add(self, into, addresses, offset, values, kind, order, mask, site) -> None:
        """Lane after lane. With `order`, what was known where it is done before becomes known, and the other way."""
        lanes = np.flatnonzero(np.ones(32, bool) if mask is None else mask)
        if not len(lanes):
            return
        region, at = self._global(addresses, offset, mask)
        width = values.itemsize
        region.check(at, width)
        region.shadow.write(region.shadow.lanes(at, width), self.access(site, ATOMIC), self.clock)
        memory = region.views[width].view(f"float{8 * width}" if kind[0] == "f" else values.dtype)
        for lane, place in zip(lanes, at, strict=True):
            before = memory[place // width]
            memory[place // width] = before + values.view(memory.dtype)[lane]
            if into is not None:
                into[lane] = np.array(before).view(into.dtype)
            self._synchronize(region, int(place), order in ("acquire", "acq_rel"), order in ("release", "acq_rel"))

    def load_atomic(self, into, addresses, offset, width, order, mask, site) -> None:
        """ld.acquire, ld.relaxed: reads of what others write at the same time."""
        if mask is not None and not mask.any():
            return
        region, at = self._global(addresses, offset, mask)
        region.check(at, width)
        for place in at:
            self._synchronize(region, int(place), order == "acquire", False)
        region.shadow.read(region.shadow.lanes(at, width), self.access(site, ATOMIC), self.clock)
        into[0][slice(None) if mask is None else mask] = region.load(at, width, 1)[0]

    def _synchronize(self, region, place: int, acquires: bool, releases: bool) -> None:
        known = self.gpu.released.setdefault((id(region), place), Clock())
        if acquires:
            self.clock.join(known)
        if releases:
            known.join(self.clock)
            self.tick()

    def parameter(self, addresses) -> np.ndarray:
        """Of one of several kernel parameters, chosen at run time."""
        number, within = np.divmod(addresses.astype(np.int64) - PARAMETER_BASE, PARAMETER_PAGE)
        if within.any() or number.min() < 0 or number.max() >= len(self.cta.grid.parameters):
            raise SimulationError("a load from within a parameter, or from none")
        return self.cta.grid.parameters[number]
