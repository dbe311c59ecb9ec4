"""The GPU that tensors are on, or one of a name, as a DeviceSpec for the planner."""

from __future__ import annotations

import contextlib
import functools
import re
from dataclasses import replace

import torch

from ..planner.device import A100, H200, KNOWN, OLDEST_TRITON, DeviceSpec
from ..settings import margin
from . import triton_compat

UNKNOWN_BANDWIDTH_GB_S = 1000.0  # affects predicted times, and the plans of column sums


def spec_of(device: torch.device) -> DeviceSpec:
    """The spec of a CUDA device, less the `sm_margin` in force. Meta tensors are planned as for an H200. CPU tensors,
    whose kernels run only in Triton's interpreter, are planned as for an A100, because the interpreter lacks TMA."""
    if device.type == "cuda":
        spec = _of_cuda(device.index)
    else:
        spec = A100 if device.type == "cpu" else H200
    return less_margin(spec)


def less_margin(spec: DeviceSpec) -> DeviceSpec:
    """The same device, less the `sm_margin` in force."""
    return spec.leaving(margin.sms) if margin.sms else spec


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes `device` the current CUDA device inside the block."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else contextlib.nullcontext()


@functools.cache
def _of_cuda(index: int | None) -> DeviceSpec:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return with_installed_triton(from_properties(properties))


def from_properties(properties) -> DeviceSpec:
    """The spec of the device that torch.cuda.get_device_properties describes. For a partition of a GPU (MIG) the driver
    reports the partition's SMs; the partition is assumed to have the same share of the bandwidth."""
    arch = 10 * properties.major + properties.minor
    words = plain_name(properties.name)
    alike = [spec for spec in KNOWN if spec.arch == arch and plain_name(spec.name) in words]
    known = max(alike, key=lambda spec: len(spec.name), default=None)  # "GB200" contains "B200": the longest name wins
    share = min(1.0, properties.multi_processor_count / known.sm_count) if known else 1.0
    return DeviceSpec(
        name=properties.name,
        arch=arch,
        sm_count=properties.multi_processor_count,
        smem_per_block_bytes=properties.shared_memory_per_block_optin,
        smem_per_sm_bytes=properties.shared_memory_per_multiprocessor,
        registers_per_sm=properties.regs_per_multiprocessor,
        max_threads_per_sm=properties.max_threads_per_multi_processor,
        bandwidth_gb_s=known.bandwidth_gb_s * share if known else UNKNOWN_BANDWIDTH_GB_S,
        **({"bytes_in_flight_per_sm": known.bytes_in_flight_per_sm} if known else {}),
    )


def with_installed_triton(spec: DeviceSpec) -> DeviceSpec:
    """The same device, compiled for by the installed Triton."""
    return replace(spec, triton=triton_compat.installed() or OLDEST_TRITON)


def named(name: str) -> DeviceSpec:
    """The known device of that name. Case, spaces and underscores do not matter, and a longer name that torch reports,
    such as NVIDIA A100-SXM4-80GB, names it too. Raises ValueError for any other name, for a part of a GPU (MIG) and for
    a laptop's GPU."""
    words = [word for word in _words(name) if word not in ("nvidia", "geforce")]
    whole = not {"mig", "laptop"} & set(words)
    for spec in KNOWN:
        own = _words(spec.name)
        if plain_name(spec.name) == plain_name(name) or whole and words[: len(own)] == own:
            return spec
    raise ValueError(f"device must be one of {', '.join(spec.name for spec in KNOWN)}, got {name!r}")


def _words(name: str) -> list[str]:
    return re.findall("[a-z0-9]+", name.lower())


def plain_name(name: str) -> str:
    return "".join(_words(name))
