"""The GPU that tensors are on, as a DeviceSpec for the planner."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import torch

from ..planner.device import A100, H200, OLDEST_TRITON, DeviceSpec, from_properties
from ..settings import margin
from . import triton_compat


def spec_of(device: torch.device) -> DeviceSpec:
    """The spec of a CUDA device, less the `sm_margin` in force. Meta tensors are planned as for an H200. CPU tensors,
    whose kernels run only in Triton's interpreter, are planned as for an A100, because the interpreter lacks TMA."""
    if device.type == "cuda":
        spec = _of_cuda(device.index)
    else:
        spec = A100 if device.type == "cpu" else H200
    return spec.leaving(margin.sms) if margin.sms else spec


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes `device` the current CUDA device inside the block."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else contextlib.nullcontext()


@functools.cache
def _of_cuda(index: int | None) -> DeviceSpec:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return with_installed_triton(from_properties(properties))


def with_installed_triton(spec: DeviceSpec) -> DeviceSpec:
    """The same device, compiled for by the installed Triton."""
    return replace(spec, triton=triton_compat.installed() or OLDEST_TRITON)
