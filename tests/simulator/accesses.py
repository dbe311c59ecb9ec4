"""A warp's loads, stores and atomics."""

from __future__ import annotations

import numpy as np

from .arithmetic import LANES
from .races import ATOMIC, Clock, SimulationError
from .translate import PARAMETER_BASE, PARAMETER_PAGE, effect

TYPE = r"([busf])(8|16|32|64)"
HINTS = r"(?:\.(?:ca|cg|cs|lu|wb|wt))?(?:\.L1::\w+)?(?:\.L2::\w+)*"
ATOMIC_ADD = rf"(?:global\.gpu\.)?(relaxed|acquire|release|acq_rel)(?:\.gpu\.global)?\.add\.{TYPE}"


class Accesses:
    """Methods of Warp, one for each kind of load, store or atomic."""

    @effect(rf"ld(?:\.volatile)?\.(global|shared)(?:::cta)?{HINTS}(?:\.v[24])?\.{TYPE}", "= [] -?")
    def load(self, lanes, site, space, kind, bits, into, at) -> None:
        region, at = self._place(space, at[lanes])
        found = region.read(at, int(bits) // 8, len(into), self.access(site), self.clock)
        for register, values in zip(into, found, strict=True):  # a wider register gets the sign
            register[lanes] = values.view(f"i{values.itemsize}").astype(register.dtype) if kind == "s" else values

    @effect(rf"st\.(global|shared)(?:::cta)?{HINTS}(?:\.v[24])?\.{TYPE}", "[] *u{2} -?")
    def store(self, lanes, site, space, kind, bits, at, values) -> None:
        region, at = self._place(space, at[lanes])
        region.write(at, int(bits) // 8, [value[lanes] for value in values], self.access(site), self.clock)

    def _place(self, space: str, at: np.ndarray):
        """The region that the addresses are in, and their offsets in it."""
        if space == "shared":
            return self.cta.memory, at.astype(np.int64)
        region, base = self.gpu.memory.find(int(at[0]))
        return region, at - base

    @effect(r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(?:::cta)?\.b16", "= []")
    def load_matrices(self, lanes, site, transposed, into, at) -> None:
        """Each matrix has 8 x 8 elements of 2 bytes. Lanes 8n to 8n + 7 give the addresses of the rows of matrix n."""
        self.needs_all(lanes, "ldmatrix")
        region, at = self._place("shared", at[: 8 * len(into)])
        columns = region.read(at, 2, 8, self.access(site), self.clock)
        for register, matrix in zip(into, np.stack(columns, axis=1).reshape(-1, 8, 8), strict=True):
            register[:] = np.ascontiguousarray(matrix.T if transposed else matrix).reshape(-1).view(np.uint32)

    @effect(r"stmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(?:::cta)?\.b16", "[] *u32")
    def store_matrices(self, lanes, site, transposed, at, values) -> None:
        self.needs_all(lanes, "stmatrix")
        region, at = self._place("shared", at[: 8 * len(values)])
        matrices = np.stack([np.ascontiguousarray(value).view(np.uint16).reshape(8, 8) for value in values])
        rows = (matrices.transpose(0, 2, 1) if transposed else matrices).reshape(-1, 8)
        region.write(at, 2, list(rows.T), self.access(site), self.clock)

    @effect(rf"red\.{ATOMIC_ADD}", "[] u{2}")
    def reduce(self, lanes, site, order, kind, bits, at, values) -> None:
        self.atomic_add(lanes, site, order, kind, bits, (None,), at, values)

    @effect(rf"atom\.{ATOMIC_ADD}", "= [] u{2}")
    def atomic_add(self, lanes, site, order, kind, bits, into, at, values) -> None:
        """The lanes add one after the other. `order` says whether the warp acquires the knowledge that earlier releases
        left at this address, and whether it releases its own."""
        region, at = self._place("global", at[lanes])
        width = int(bits) // 8
        region.check(at, width)
        region.shadow.write(region.shadow.lanes(at, width), self.access(site, ATOMIC), self.clock)
        memory = region.views[width].view(f"{'f' if kind == 'f' else 'u'}{width}")
        for lane, place in zip(LANES[lanes], at, strict=True):
            before = memory[place // width]
            memory[place // width] = before + values.view(memory.dtype)[lane]
            if into[0] is not None:
                into[0][lane] = np.array(before).view(into[0].dtype)
            self._synchronize(region, int(place), order in ("acquire", "acq_rel"), order in ("release", "acq_rel"))

    @effect(rf"ld\.(acquire|relaxed)\.gpu\.global\.{TYPE}", "= [] -?")
    def load_atomic(self, lanes, site, order, kind, bits, into, at) -> None:
        """A load that is no race with atomics of other warps."""
        region, at = self._place("global", at[lanes])
        for place in at:
            self._synchronize(region, int(place), order == "acquire", False)
        into[0][lanes] = region.read(at, int(bits) // 8, 1, self.access(site, ATOMIC), self.clock)[0]

    def _synchronize(self, region, place: int, acquires: bool, releases: bool) -> None:
        known = self.gpu.released.setdefault((id(region), place), Clock())
        if acquires:
            self.clock.join(known)
        if releases:
            known.join(self.clock)
            self.tick()

    @effect(r"ld\.param\.[busf](8|16|32|64)", "= []")
    def load_parameter(self, lanes, site, bits, into, at) -> None:
        number, within = np.divmod(at[lanes].astype(np.int64) - PARAMETER_BASE, PARAMETER_PAGE)
        numbers = number.tolist()
        if any(within.tolist()) or min(numbers) < 0 or max(numbers) >= len(self.cta.grid.parameters):
            raise SimulationError("a load from within a parameter, or from none")
        into[0][lanes] = self.cta.grid.parameters[number].astype(f"u{int(bits) // 8}")
