"""Triton's interpreter, with which the demo and the tests run the kernels on CPU tensors."""

from __future__ import annotations

import os
import sys

import torch


def enable_interpreter() -> None:
    """Make this process interpret every Triton kernel. Must be called before triton is imported.

    The same process cannot compile kernels. To do both, start a second process. Raises RuntimeError if triton has been
    imported without TRITON_INTERPRET=1.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("enable_interpreter: must be called before triton is imported, got a process that has it")
    os.environ["TRITON_INTERPRET"] = "1"
    _round_to_bfloat16()
    _accept_arrays_as_loop_bounds()


def _round_to_bfloat16() -> None:
    """Round floats to bfloat16 to nearest even, as GPUs do. The interpreter truncates float32, and turns float64 into
    an integer."""
    import triton.language as tl

    try:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    except ImportError:  # an interpreter with other internals keeps its own rounding
        return
    if not hasattr(InterpreterBuilder, "cast_impl"):
        return
    cast = InterpreterBuilder.cast_impl

    def cast_and_round(self, source, dtype):
        if dtype.scalar != tl.bfloat16 or source.dtype.scalar not in (tl.float16, tl.float32, tl.float64):
            return cast(self, source, dtype)
        rounded = torch.asarray(source.data.copy()).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast_and_round


def _accept_arrays_as_loop_bounds() -> None:
    """Let loop bounds be arrays of one element. Triton 3.6 converts them by int(), which numpy refuses from 2.4 on."""
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6."):
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
