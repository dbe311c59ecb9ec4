"""DeviceSpec: everything that a plan may know about a GPU, as a value that is read once per device."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

KIB = 1024
OLDEST_TRITON = (3, 6)


@dataclass(frozen=True)
class DeviceSpec:
    """The resources of one CUDA device. arch is 10 * major + minor of its compute capability."""

    name: str
    arch: int
    sm_count: int
    smem_per_block_bytes: int  # the most that a CTA may opt in to
    smem_per_sm_bytes: int
    registers_per_sm: int  # 32-bit
    max_threads_per_sm: int
    bandwidth_gb_s: float  # of device memory, by the datasheet
    # Bytes that each SM must have requested to keep the memory busy. By Little's law this is bandwidth times loaded
    # latency, divided by the number of SMs (bench/NOTES.md, "Row loops of the backward").
    bytes_in_flight_per_sm: int = 32 * KIB
    sm_margin: int = 0  # SMs of the device that are left to others; sm_count does not include them
    triton: tuple[int, int] = OLDEST_TRITON  # the release that compiles: each needs its own number of registers

    @property
    def capability(self) -> str:
        return f"{self.arch // 10}.{self.arch % 10}"

    @property
    def places_dependents(self) -> bool:
        """Whether a dependent launch may be placed before the one that it depends on has ended."""
        return self.arch >= 90

    @functools.cache  # noqa: B019  there are few devices, and they live as long as the process
    def leaving(self, sms: int) -> DeviceSpec:
        """The same device with `sms` of its SMs left to others. Raises ValueError if no SM would remain."""
        count = self.sm_count + self.sm_margin
        check_that_one_is_left(sms, self.name, count)
        return replace(self, sm_count=count - sms, sm_margin=sms)

    def of_architecture(self) -> DeviceSpec:
        """The same for every GPU of an architecture, whatever is left free."""
        known = next((each for each in KNOWN if each.arch == self.arch), self.leaving(0))
        return replace(known, triton=self.triton)


def check_that_one_is_left(n: int, name: str, count: int) -> None:
    if n >= count:
        raise ValueError(f"sm_margin: n must leave at least one of the {count} SMs of {name}, got {n}")


# Full GPUs. Resources are the driver's attributes; bandwidths are the datasheet's, of the SXM module or the card. For
# GPUs on which no test has run, the limits of an SM are CCCL's (cuda/__device/arch_traits.h), and users reported the
# numbers of SMs (Thor: topic 356355 of NVIDIA's forum; GB10: 6144 CUDA cores, 128 per SM).
A100 = DeviceSpec("A100", 80, 108, 163 * KIB, 164 * KIB, 65536, 2048, 2039)
H100 = DeviceSpec("H100", 90, 132, 227 * KIB, 228 * KIB, 65536, 2048, 3352)
H200 = DeviceSpec("H200", 90, 132, 227 * KIB, 228 * KIB, 65536, 2048, 4800)
B200 = DeviceSpec("B200", 100, 148, 227 * KIB, 228 * KIB, 65536, 2048, 8000, 49 * KIB)
GB200 = DeviceSpec("GB200", 100, 152, 227 * KIB, 228 * KIB, 65536, 2048, 8000, 48 * KIB)
B300 = DeviceSpec("B300", 103, 148, 227 * KIB, 228 * KIB, 65536, 2048, 8000, 49 * KIB)
GB300 = DeviceSpec("GB300", 103, 152, 227 * KIB, 228 * KIB, 65536, 2048, 8000, 48 * KIB)
THOR = DeviceSpec("Thor", 110, 20, 227 * KIB, 228 * KIB, 65536, 1536, 273)
RTX_3090 = DeviceSpec("RTX 3090", 86, 82, 99 * KIB, 100 * KIB, 65536, 1536, 936)
RTX_4090 = DeviceSpec("RTX 4090", 89, 128, 99 * KIB, 100 * KIB, 65536, 1536, 1008)
RTX_5090 = DeviceSpec("RTX 5090", 120, 170, 99 * KIB, 100 * KIB, 65536, 1536, 1792)
GB10 = DeviceSpec("GB10", 121, 48, 99 * KIB, 100 * KIB, 65536, 1536, 273)
KNOWN = (A100, H100, H200, B200, GB200, B300, GB300, THOR, RTX_3090, RTX_4090, RTX_5090, GB10)
