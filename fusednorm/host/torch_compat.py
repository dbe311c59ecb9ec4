"""Private names of torch, each with a substitute if the installed torch lacks it.

A substitute gives correct results but is slower. A question that torch answers in no other way gets the safe answer:
that a mode, transform or the like may be active. `missing` lists the names that torch lacks; doctor prints them. The
integrations name the further private names that they need, and everything else works without those.
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
    """The object torch.`name`, or `instead` if torch lacks it."""
    found: Any = torch
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            missing.append(f"torch.{name}")
            return instead
    return found


# --- Modules ---


def quantize_as_stock(module: type[torch.nn.Module], stock: type[torch.nn.Module]) -> None:
    """Let static quantization convert `module` as it converts `stock`: it looks modules up by their exact type."""
    with contextlib.suppress(AttributeError):  # a torch without torch.ao.quantization
        known = torch.ao.quantization.quantization_mappings.DEFAULT_STATIC_QUANT_MODULE_MAPPINGS
        if stock in known:
            known[module] = known[stock]


def is_traced_for_quantization(value: Any) -> bool:
    """Whether FX traces a model to quantize it. It knows torch's own functions only."""
    return type(getattr(value, "tracer", None)).__name__ == "QuantizationTracer"


def parameter(module: torch.nn.Module, name: str) -> Any:
    """getattr(module, name), without Module.__getattr__, which takes a quarter of a forward's host time.
    A tensor that a parametrization, a hook or FSDP has put in a parameter's place is found in the slow way."""
    try:
        return module._parameters[name]
    except (AttributeError, KeyError):
        return getattr(module, name)


hooks_of_saved = _private("_C._autograd._top_saved_tensors_default_hooks", lambda _: True)  # the innermost ones or None
has_global_hooks = _private("nn.modules.module._has_any_global_hook", lambda: True)  # hooks of all modules


# --- CUDA: questions before a launch. A torch without CUDA lacks these names and launches nothing. ---


def _stream_by_public_names(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _empty_by_public_names(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# allocate(shape, strides, dtype) allocates on the current device without the dispatcher, as compiled graphs do.
if torch.version.cuda:
    allocate = _private("_C._dynamo.guards._empty_strided_cuda", _empty_by_public_names)
    current_device = _private("_C._cuda_getDevice", torch.cuda.current_device)
    raw_stream = _private("_C._cuda_getCurrentRawStream", _stream_by_public_names)  # takes a device index
else:
    allocate, current_device, raw_stream = _empty_by_public_names, torch.cuda.current_device, _stream_by_public_names


# --- Active modes, transforms and tracers ---

# forward_ad._current_level is 0 or more inside forward-mode AD.
_MAYBE_INSIDE = SimpleNamespace(_current_level=0)
_level = _private("autograd.forward_ad._current_level", None)
forward_ad = _MAYBE_INSIDE if _level is None else torch.autograd.forward_ad

is_transforming = _private("_C._are_functorch_transforms_active", lambda: True)
is_wrapped = _private("_C._functorch.is_functorch_wrapped_tensor", lambda tensor: True)
function_modes = _private("_C._len_torch_function_stack", lambda: 1)  # the number of active modes
dispatch_modes = _private("_C._len_torch_dispatch_stack", lambda: 1)
tracing_state = _private("_C._get_tracing_state", lambda: torch.jit.is_tracing() or None)


def needs_formula() -> bool:
    """Whether a torch.func transform or forward-mode AD is active, which must see the operations inside an op."""
    return is_transforming() or forward_ad._current_level >= 0


def is_intercepted() -> bool:
    """Whether a mode, a transform or forward-mode AD sees the calls of this thread."""
    return bool(dispatch_modes() or function_modes()) or needs_formula()


def is_traced() -> bool:
    """Whether torch.compile or torch.jit.trace is recording the ops that are called."""
    return torch.compiler.is_dynamo_compiling() or tracing_state() is not None


# Whether torch's functions ask modes, and whether they ask subclasses, before they run. Dynamo traces both questions.
asks_function_modes = _private("_C._is_torch_function_mode_enabled", lambda: False)
asks_subclasses = _private("_C._is_torch_function_enabled", lambda: True)
_push_function_mode = _private("_C._push_on_torch_function_stack", None)
_pop_function_mode = _private("_C._pop_torch_function_stack", None)
_has_mode_stack = not any(name.endswith("_torch_function_stack") for name in missing)


class DefaultDeviceAside:
    """Deactivates torch.set_default_device's mode for a block if it alone is active. It makes new tensors on a device
    and hands all other calls on, but asking it takes more host time than a repeated call."""

    __slots__ = ("done", "mode")

    def __enter__(self):
        self.done = False
        if _has_mode_stack and function_modes() == 1 and not torch.compiler.is_dynamo_compiling():
            self.mode = _pop_function_mode()
            self.done = type(self.mode).__module__ == "torch.utils._device"
            if not self.done:
                _push_function_mode(self.mode)
        return self

    def __exit__(self, *_):
        if self.done:
            _push_function_mode(self.mode)


class BelowFunctionModes:
    """Activates the mode for a block, below all modes that are active, so that torch's functions ask it last. If it is
    active, nothing changes. If torch lacks a name for this, the mode is not asked."""

    __slots__ = ("mode", "was_active")

    def __init__(self, mode: torch.overrides.TorchFunctionMode):
        self.mode = mode

    def __enter__(self):
        above = _take_function_modes()
        self.was_active = not _has_mode_stack or self.mode in above
        _put_function_modes(above if self.was_active else [*above, self.mode])

    def __exit__(self, *_):
        if not self.was_active:
            _put_function_modes([each for each in _take_function_modes() if each is not self.mode])


def _take_function_modes() -> list:
    """Deactivates all function modes, and returns them, the topmost first."""
    return [_pop_function_mode() for _ in range(function_modes())] if _has_mode_stack else []


def _put_function_modes(modes: list) -> None:
    for mode in reversed(modes):
        _push_function_mode(mode)


# --- Autograd ---

_BelowAutograd = _private("_C._AutoDispatchBelowAutograd", None)


def below_autograd(op: Callable, kernel: Callable, *operands, **named):
    """op(*operands, **named) below autograd. `kernel` is the implementation that the op has there for CPU and CUDA."""
    if _BelowAutograd is None:
        if any(map(_is_subclassed, operands)):
            with torch.inference_mode():  # skips autograd too; its outputs are cloned, as autograd does not take them
                outputs = op(*operands, **named)
            return type(outputs)(each if each is None else each.clone() for each in outputs)
        with torch.no_grad():
            return kernel(*operands, **named)
    with _BelowAutograd():
        return op(*operands, **named)


def _is_subclassed(operand: Any) -> bool:
    """Whether the operand is, or contains, a tensor whose class may handle ops itself, as fake tensors do."""
    if isinstance(operand, (list, tuple)):
        return any(map(_is_subclassed, operand))
    return isinstance(operand, Tensor) and type(operand) not in (Tensor, torch.nn.Parameter)


def record(function: type[torch.autograd.Function]) -> Callable:
    """function.apply without its checks for torch.func, which are slow before torch 2.14 (later they run in C++)."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def recorder(function: type[torch.autograd.Function], *tensors: Tensor | None) -> Callable | None:
    """function.apply for these tensors. None if autograd records nothing, or if torch.jit.trace, a torch.func
    transform or forward-mode AD must see the operations inside."""
    if torch.compiler.is_dynamo_compiling():
        return function.apply
    recorded = torch.is_grad_enabled() and any([isinstance(each, Tensor) and each.requires_grad for each in tensors])
    return record(function) if recorded and not (needs_formula() or tracing_state()) else None


def has_autocast_rule(aten_op: str) -> bool:
    """Whether CUDA autocast of the installed torch lists this op as float32. torch 2.11 does not list rms_norm."""
    return _has_kernel(aten_op, "AutocastCUDA")


_has_kernel = _private("_C._dispatch_has_kernel_for_dispatch_key", lambda op, key: True)

# --- Profilers ---

is_profiled = _private("autograd._profiler_enabled", lambda: False)  # per thread; autograd's threads inherit it
_enter_record = _private("_C._autograd._record_function_with_args_enter", None)
_exit_record = _private("_C._autograd._record_function_with_args_exit", None)


@contextlib.contextmanager
def shown_to_profiler(name: str, *operands: Tensor | None):
    """Show the block to torch.profiler as an op of this name and operands, for calls that bypass the dispatcher."""
    if _enter_record is None or _exit_record is None:
        with torch.profiler.record_function(name):
            yield
        return
    record = _enter_record(name, *operands)
    try:
        yield
    finally:
        _exit_record(record)
