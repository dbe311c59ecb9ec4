"""Triton's interpreter, with which tests and demo run the kernels on CPU tensors."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

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
    _replace_functions_once_per_launch()
    _make_types_once()


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


def _replace_functions_once_per_launch() -> None:
    """Replace the functions of triton.language once per launch and module. The interpreter does it again in each call
    of a device function, which takes as long as the calls themselves."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "GridExecutor") or not hasattr(interpreter, "_patch_lang"):
        return  # other internals, which may need no help
    launch, patch_lang, patched = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()

    def launch_anew(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_lang_once(function):
        module = id(function.__globals__)
        if module not in patched:
            patched.add(module)
            return patch_lang(function)

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._patch_lang = patch_lang_once


def _make_types_once() -> None:
    """Keep what follows from the types of a result alone. The interpreter makes block types, shapes and NumPy's types
    for every result anew. It also computes whether each sum of integers overflows, which only its debug mode asserts.
    Kernels run three times as fast without all this."""
    import triton.language.core as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    block, tensor, numpy_type = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
    blocks, tensors, numpy_types = {}, {}, {}  # the attributes of those that were made

    def fill_block(self, element_ty, shape) -> None:
        key = (element_ty.name, *shape)
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def fill_tensor(self, handle, type) -> None:
        if type.name not in tensors:
            tensor(self, handle, type)
            tensors[type.name] = dict(vars(self))
        vars(self).update(tensors[type.name], handle=handle, type=type)

    def look_up(type):
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type(type)
        return numpy_types[type.name]

    tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype = fill_block, fill_tensor, look_up
