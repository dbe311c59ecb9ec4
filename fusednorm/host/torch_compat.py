"""Names of torch's that it does not promise to keep; each with what serves in its place where it is gone.

What serves is right, but slower; where torch offers nothing else it takes the careful answer, that somebody may look
on. `missing` has the names that were not there; doctor prints them. Integrations name what else they need themselves,
and everything works without these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

missing: list[str] = []


def _private(name: str, instead: Any) -> Any:
    """What is called torch.`name`, or `instead`."""
    found: Any = torch
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            missing.append(f"torch.{name}")
            return instead
    return found


# --- CUDA: what a host asks before a launch. A torch without CUDA has no such names, and nobody asks. ---


def _stream_by_public_names(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _empty_by_public_names(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# allocate(shape, strides, dtype) on the current device: what compiled graphs allocate with, which does not dispatch.
if torch.version.cuda:
    allocate = _private("_C._dynamo.guards._empty_strided_cuda", _empty_by_public_names)
    current_device = _private("_C._cuda_getDevice", torch.cuda.current_device)
    raw_stream = _private("_C._cuda_getCurrentRawStream", _stream_by_public_names)  # of a device's index
else:
    allocate, current_device, raw_stream = _empty_by_public_names, torch.cuda.current_device, _stream_by_public_names


# --- Who looks on ---

# forward_ad._current_level: 0 or more inside forward-mode AD.
_MAYBE_INSIDE = SimpleNamespace(_current_level=0)
_level = _private("autograd.forward_ad._current_level", None)
forward_ad = _MAYBE_INSIDE if _level is None else torch.autograd.forward_ad

is_transforming = _private("_C._are_functorch_transforms_active", lambda: True)
is_wrapped = _private("_C._functorch.is_functorch_wrapped_tensor", lambda tensor: True)
function_modes = _private("_C._len_torch_function_stack", lambda: 1)  # how many there are
dispatch_modes = _private("_C._len_torch_dispatch_stack", lambda: 1)
tracing_state = _private("_C._get_tracing_state", lambda: torch.jit.is_tracing() or None)


# --- Autograd ---

_BelowAutograd = _private("_C._AutoDispatchBelowAutograd", None)


def below_autograd(op: Callable, kernel: Callable, *operands, **named):
    """op(*operands, **named) by what is registered below autograd; `kernel` is that for CPU and CUDA."""
    if _BelowAutograd is None:
        if any(map(_is_subclassed, operands)):
            with torch.inference_mode():  # goes below autograd too, but to tensors that autograd does not take
                outputs = op(*operands, **named)
            return type(outputs)(each if each is None else each.clone() for each in outputs)
        with torch.no_grad():
            return kernel(*operands, **named)
    with _BelowAutograd():
        return op(*operands, **named)


def _is_subclassed(operand: Any) -> bool:
    """Whether it is, or holds, a tensor whose class may have its own way with an op, as fake tensors have."""
    if isinstance(operand, (list, tuple)):
        return any(map(_is_subclassed, operand))
    return isinstance(operand, Tensor) and type(operand) not in (Tensor, torch.nn.Parameter)


def record(function: type[torch.autograd.Function]) -> Callable:
    """function.apply without what it does for torch.func first (3 us before torch 2.14, which does it in C++)."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def has_autocast_rule(aten_op: str) -> bool:
    """Whether CUDA autocast of the installed torch has this op (in its float32 list): rms_norm is not there in 2.11."""
    return _has_kernel(aten_op, "AutocastCUDA")


_has_kernel = _private("_C._dispatch_has_kernel_for_dispatch_key", lambda op, key: True)

# --- Profilers ---

is_profiled = _private("autograd._profiler_enabled", lambda: False)  # in this thread; autograd's follow their caller's
_enter_record = _private("_C._autograd._record_function_with_args_enter", None)
_exit_record = _private("_C._autograd._record_function_with_args_exit", None)


@contextlib.contextmanager
def shown_to_profiler(name: str, *operands: Tensor | None):
    """Inside, torch.profiler shows an op of this name and these operands: for what goes round the dispatcher."""
    if _enter_record is None or _exit_record is None:
        with torch.profiler.record_function(name):
            yield
        return
    record = _enter_record(name, *operands)
    try:
        yield
    finally:
        _exit_record(record)


# --- What a tensor is to the dispatcher ---

_keys = _private("_C._dispatch_keys", None)
_included = _private("_C._dispatch_tls_local_include_set", None)
_excluded = _private("_C._dispatch_tls_local_exclude_set", None)
TensorGuards = _private("_C._dynamo.guards.TensorGuards", None)


def dispatch_keys(tensor: Tensor) -> object:
    """Of a tensor under the modes of the moment, to be compared: like no other where torch does not say."""
    if _keys is None or _included is None or _excluded is None:
        return object()
    keys = (_keys(tensor) | _included()) - _excluded()
    return keys.raw_repr() if hasattr(keys, "raw_repr") else object()
