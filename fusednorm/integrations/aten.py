"""enable_eager: ATen's own norm ops run this package's kernels, so that eager models need no change.

Our kernels replace those that ATen has registered for CUDA tensors. Everything above them stays ATen's: autograd's
nodes, second derivatives, autocast, torch.func, DTensor. Calls that we do not take go to the kernel that was registered
before.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable

import torch

from .. import ops
from ..host import fallback, gpus, native, prepared
from ..host.program import Program
from ..operands import OPS, Operands, Outputs, call_op, op_outputs, operands_of
from ..planner.plan import ReferencePlan
from ..problem.calls import BackwardCall, ForwardCall, check

_destroy, _get_kernel = torch.library.Library._destroy, torch.library.get_kernel


class enable_eager:  # noqa: N801  reads as a function: with enable_eager(): ...
    """enable_eager(): from now on, eager LayerNorm and RMSNorm of CUDA tensors run this package's kernels.

    The ops are aten::native_layer_norm, native_layer_norm_backward, _fused_rms_norm and _fused_rms_norm_backward, and
    therefore torch.nn.functional.layer_norm and rms_norm and whatever calls them. Outputs have ATen's shapes, strides
    and dtypes. Our kernels take float16, bfloat16, float32 and float64 on GPUs from sm_80 on. Other dtypes and GPUs,
    tensors without elements, and all calls under force("reference") go to ATen's kernel as before. A LayerNorm whose
    parameters have another dtype than x works here, although ATen refuses it. An RMSNorm whose weight has another dtype
    than x never gets here, because ATen decomposes it first.

    `with enable_eager(): ...` ends with the block. Calls may be repeated and blocks nested. Either applies to the whole
    process, including autograd's threads, so enable and disable only while no other thread runs a norm. Graphs that
    torch.compile has made do not change. `force` does not reach the backwards.
    """

    def __init__(self) -> None:
        self.__enter__()

    def __enter__(self) -> None:
        with _lock:
            _wanted_by.add(self)
            _install_or_remove()

    def __exit__(self, *_: object) -> None:
        with _lock:
            _wanted_by.discard(self)
            _install_or_remove()


def disable_eager() -> None:
    """Restore ATen's own kernels, and end all enable_eager() calls and open `with enable_eager()` blocks."""
    with _lock:
        _wanted_by.clear()
        _install_or_remove()


class Overrides:
    """Replaces ATen's kernels by ours for one dispatch key, from construction until `remove`."""

    def __init__(self, key: str):
        atens = {name: _kernel_of(name, key) for name in ATENS_NAMES.values()}
        with warnings.catch_warnings():
            # The dispatcher warns once per process that a kernel is overridden. Here that is intended.
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            if native.extension:
                keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
                self.remove = native.overrides(key, functools.partial(_launched_or_atens, atens, keys)).remove
            else:
                library = torch.library.Library("aten", "IMPL")
                for ours, name in ATENS_NAMES.items():
                    kernel = functools.partial(_run, ours, atens)
                    library.impl(name, kernel, key, with_keyset=True, allow_override=True)
                self.remove = functools.partial(_destroy, library)


_lock = threading.Lock()  # guards _wanted_by and _installed
_wanted_by: set[enable_eager] = set()  # calls in force and open blocks
_installed: list[Overrides] = []  # at most one


def _install_or_remove() -> None:
    if _wanted_by and not _installed:
        _installed.append(Overrides("CUDA"))
    elif _installed and not _wanted_by:
        _installed.pop().remove()


def _launched(operands: Operands) -> tuple[Outputs | None, Program | None]:
    """(the outputs by our kernels, their program if it is kept); None for both if our kernels do not take the call."""
    return prepared.run(operands, _first)


def _first(operands: Operands, miss: prepared.Miss | None) -> tuple[Outputs | None, Program | None]:
    try:
        call = check(operands)
    except RuntimeError:  # a user's error, or a call that only ATen takes: ATen's kernel decides
        return None, None
    return ops.launch().run(call, miss) if _takes(call) else (None, None)


ATENS_NAMES = {name: op.aten for name, op in OPS.items() if op.aten}


def _launched_or_atens(
    atens: dict[str, Callable], keys: torch._C.DispatchKeySet, operands: Operands
) -> tuple[Outputs, Program | None]:
    """A call that C++ leaves to Python."""
    outputs, program = _launched(operands)
    if outputs is None:
        outputs = call_op(functools.partial(atens[ATENS_NAMES[operands.op]], keys), operands)
    return outputs, program


def _run(op: str, atens: dict[str, Callable], keys: torch._C.DispatchKeySet, *arguments) -> tuple:
    """In place of an op of ATen, where there is no C++: while enabled, every eager norm on a CUDA tensor runs here."""
    return op_outputs(op, _launched_or_atens(atens, keys, operands_of(op, arguments, {}))[0])


def _takes(call: ForwardCall | BackwardCall) -> bool:
    problem, device = call.problem, gpus.spec_of(call.x.tensor.device)
    has_work = call.rows and problem.cols and problem.wants_any
    return bool(has_work) and not isinstance(fallback.choose(problem, call.rows, device).plan, ReferencePlan)


def _kernel_of(name: str, key: str) -> Callable[..., tuple]:
    """The kernel now registered for aten::`name` under `key`."""
    try:
        return _get_kernel(f"aten::{name}", key).call_boxed
    except RuntimeError:  # a torch without CUDA has no such kernel and never calls one

        def missing(*_) -> tuple:
            raise NotImplementedError(f"aten::{name} has no kernel for {key}")

        return missing
