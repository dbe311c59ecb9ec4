"""The optional host side in C++ (csrc/native.cpp), and its connection to Python.

For plain tensors on a GPU it runs prepared calls and records autograd's node without Python. All other calls go to the
Python functions that `install` passes to it. Without the extension the same ops run in Python.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import forcing, margin
from ..operands import OPS as ALL_OPS
from ..operands import TRANSLATIONS, ForwardOperands, Operands, Outputs
from ..planner.plan import Grid
from . import building, prepared, triton_compat

extension, reason = building.load()  # `reason` says why `extension` is None

OPS = tuple(ALL_OPS)  # in the order of csrc/cache.h
BYTES_OF_NUMBERS = {"i32": 4, "i64": 8, "fp32": 4, "fp64": 8}  # numeric parameter types, as Triton names them


def install(
    key: str,
    above: Callable[[Operands], Outputs],
    ops: Any,
    statistics_gradient: Callable,
    differentiable_backward: Callable,
) -> None:
    """Register the OPS in C++ at dispatch key `key` ("CUDA") and at the autograd key above it.

    above                    autograd.above_autograd, the implementation of all ops at the autograd key
    ops                      the module (ops.py) whose `run` runs calls that are not prepared
    statistics_gradient      reference.statistics_backward_formula
    differentiable_backward  autograd.differentiable_backward, for norms that returned y alone
    """

    def differentiate(norm, shape, eps, grad_y, x, weight, bias, mask):
        return differentiable_backward(ForwardOperands(norm, x, shape, weight, bias, eps), grad_y, mask)

    functions = _of_each(above), _of_each(_and_prepared_call(ops.run))
    extension.install(key, *functions, statistics_gradient, differentiate, prepared.KEPT_KINDS)
    forcing.observe(extension.pause)  # under `force`, calls run in Python
    margin.observe(extension.set_sm_margin)


def y_of(norm: str, *arguments: Any) -> Tensor | None:
    """y of functional.layer_norm or functional.rms_norm, differentiable, for all of its arguments by position. None if
    Python must run the call."""
    if extension is None or torch.compiler.is_dynamo_compiling():
        return None
    return getattr(extension, norm + "_norm")(*arguments)


def overrides(key: str, run: Callable[[Operands], Outputs]) -> Any:
    """Replaces ATen's norm ops at dispatch key `key` by ours until its `remove` is called. Calls that C++ does not run
    go to `run`."""
    return extension.Overrides(key, _of_each(_and_prepared_call(run)))


def _and_prepared_call(run: Callable[[Operands], Outputs]) -> Callable[[Operands], tuple[Outputs, Any]]:
    def outputs_and_prepared_call(operands: Operands) -> tuple[Outputs, Any]:
        outputs = run(operands)
        # C++ knows of `force` only while a block is open. A task may outlive the block that it was started in.
        return outputs, None if forcing.asked_variants() else _in_cpp(prepared.find(operands))

    return outputs_and_prepared_call


def _of_each(run: Callable[[Operands], Any]) -> list[Callable]:
    """For each of OPS, `run` of the operands that C++ passes: all but the norm and the suffix, which the op names."""
    ops = [(TRANSLATIONS[name].type, ALL_OPS[name].norm, ALL_OPS[name].suffix) for name in OPS]
    return [functools.partial(_run, run, *op) for op in ops]


def _run(run: Callable[[Operands], Any], operands_type: type, norm: str, suffix: str, *arguments: Any) -> Any:
    return run(operands_type(norm, *arguments, suffix))


def _in_cpp(call: prepared.PreparedCall | None) -> Any:
    """The call as an extension.PreparedCall; None if none is given."""
    if call is None:
        return None
    extension.watch(*call.steps[0].build.hooks())
    return extension.PreparedCall(
        device=call.device,
        rows_above=call.rows_above,
        most_rows=call.most_rows,
        grid=grid_in_cpp(call.grid),
        outputs=[each and extension.Output(extent=_extent(each), dtype=each.dtype) for each in call.outputs],
        workspace=call.workspace and extension.Workspace(**call.workspace._asdict()),
        steps=[_step_in_cpp(step) for step in call.steps],
        sm_margin=call.sm_margin,
    )


def grid_in_cpp(grid: Grid) -> Any:
    return extension.Grid(**dataclasses.asdict(grid))


def _extent(output: prepared.Output) -> Any:
    return getattr(extension.Extent, output.extent.name)


def _number(value: Any) -> Any:
    """The extension.Number that a Rows, Ctas or Partials stands for; None for a constant."""
    return getattr(extension.Number, type(value).__name__.upper(), None)


def _step_in_cpp(step: prepared.Step) -> Any:
    """A launch as an extension.Step. Adds the parameters in the kernel's order."""
    build, arguments = step.build, step.arguments
    num_warps, cluster, shared_bytes = build.compiled.packed_metadata
    made = extension.Step(
        function=build.compiled.function,
        sides=arguments[: build.STREAM],
        grid=[_number(side) for side in arguments[:2]],
        threads=32 * num_warps,
        shared_bytes=shared_bytes,
        cluster=cluster,
        dependent=build.dependent,
    )
    for position, kind in build.parameter_types():
        value = arguments[position]
        if kind == "nvTmaDesc":
            _add_map(made, build, step.maps[position])
        elif kind.startswith("*"):
            made.add_address(step.addresses[position])
        elif kind not in BYTES_OF_NUMBERS:
            raise RuntimeError(f"native: a kernel's parameter must be a pointer, a map or a number, got {kind}")
        elif number := _number(value):
            made.add_variable(number, BYTES_OF_NUMBERS[kind])
        else:
            getattr(made, f"add_{kind}")(value)
    for _ in range(2):  # addresses of scratch memory for Triton and its profiler, which our kernels do not need
        made.add_i64(0)
    return made


def _add_map(made: Any, build: Any, described: prepared.Map) -> None:
    """Add a tensor map as the driver takes it: innermost dim first, and no stride for the innermost dim."""
    element_bytes, cuda_type, box = build.map_geometry(described.operand)
    shape = described.shape[::-1]
    made.add_map(
        index=described.address,
        type=cuda_type,
        rows_dim=[_number(size) is not None for size in shape].index(True),
        shape=shape,
        strides=[element_bytes * stride for stride in reversed(described.strides[:-1])],
        box=list(reversed(box)),
    )


def warn_if_missing() -> None:
    """Warn if calls on a GPU run in Python although a command could change that."""
    if extension is None and building.SOURCES.is_dir() and triton_compat.in_use() and torch.cuda.is_initialized():
        text = f"{building.WITHOUT_IT}; to build the C++ host side, run: {building.COMMAND}"
        warnings.warn(f"fusednorm: {text}", RuntimeWarning, stacklevel=2)


def repeats() -> int:
    """The number of calls that ran without Python; 0 if the extension was not built."""
    return extension.repeats() if extension else 0


def forget() -> None:
    """Drop all prepared calls of the C++ side."""
    if extension:
        extension.forget()
