"""The optional host side in C++ (csrc/native.cpp), and its connection to Python.

For plain tensors on a GPU it runs kept programs and records autograd's node without Python. All other calls go to the
Python functions that `install` passes to it. Without the extension the same ops run in Python.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import margin
from ..operands import BackwardOperands, ForwardOperands, Operands, Outputs
from ..planner import forcing
from ..planner.plan import Grid
from . import prepared, triton_compat
from .program import Extent, Map, Number, Program, Slot

if TYPE_CHECKING:
    from .launcher import Build, Launch

try:
    from . import _native as extension
except ImportError as error:  # not built, or built for another Python
    extension, reason = None, str(error)
else:
    reason = ""  # why `extension` is None
    if not torch.__version__.startswith(extension.torch_version):  # another torch may lay out its tensors differently
        extension, reason = None, f"built for torch {extension.torch_version}, found {torch.__version__}"

_FAILURE = Path(__file__).with_name("_native_failure.txt")  # setup.py writes it if the extension does not compile

OPS = (  # in the order of csrc/cache.h
    "layer_norm_fwd", "layer_norm_bwd", "rms_norm_fwd", "rms_norm_bwd", "layer_norm_bwd_residual",
    "rms_norm_bwd_residual",
)  # fmt: skip
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
    ops                      the module (ops.py) whose `launched` runs calls for which C++ has no program
    statistics_gradient      reference.statistics_backward_formula
    differentiable_backward  autograd.differentiable_backward, for norms that returned y alone
    """

    functions = _of_each(above), _of_each(_and_program(ops.launched))
    extension.install(key, *functions, statistics_gradient, differentiable_backward, prepared.KEPT_KINDS)
    forcing.observe(extension.pause)  # under `force`, calls run in Python
    margin.observe(extension.set_sm_margin)


def y_of(norm: str, *arguments: Any) -> Tensor | None:
    """y of functional.layer_norm or functional.rms_norm, differentiable, for all of its arguments by position. None if
    Python must run the call."""
    if extension is None or torch.compiler.is_dynamo_compiling():
        return None
    return extension.layer_norm(*arguments) if norm == "layer" else extension.rms_norm(*arguments)


def overrides(key: str, launched: Callable[[Operands], tuple[Outputs, Program | None]]) -> Any:
    """Replaces ATen's norm ops at dispatch key `key` by ours until its `remove` is called. Calls that C++ does not run
    go to `launched`, which returns the outputs and a program that C++ can keep."""
    return extension.Overrides(key, _of_each(_and_program(launched)))


def _and_program(launched: Callable[[Operands], tuple[Outputs, Program | None]]) -> Callable:
    def outputs_and_program(operands: Operands) -> tuple[Outputs, Any]:
        outputs, program = launched(operands)
        # C++ knows of `force` only while a block is open. A task may outlive the block that it was started in.
        return outputs, None if program is None or forcing.asked_variants() else _in_cpp(program)

    return outputs_and_program


def _of_each(run: Callable[[Operands], Any]) -> list[Callable]:
    """For each of OPS, `run` of the operands that C++ passes: all but the norm, which the op names."""
    return [functools.partial(_run, run, *_kind_of(name)) for name in OPS]


def _kind_of(name: str) -> tuple[type, str]:
    """(type of the operands, norm) of an op."""
    return ForwardOperands if name.endswith("fwd") else BackwardOperands, name.partition("_")[0]


def _run(run: Callable[[Operands], Any], operands_type: type, norm: str, *arguments: Any) -> Any:
    return run(operands_type(norm, *arguments))


def _in_cpp(program: Program) -> Any:
    """The program as an extension.PreparedCall."""
    workspace = program.workspace
    extension.watch(*program.builds[0].hooks())
    return extension.PreparedCall(
        device=program.device,
        rows_above=program.rows_above,
        most_rows=program.most_rows,
        grid=grid_in_cpp(program.grid),
        outputs=[each and extension.Output(extent=_of(each.extent), dtype=each.dtype) for each in program.outputs],
        workspace=workspace
        and extension.Workspace(dtype=workspace.dtype, parts=[part[:3] for part in workspace.parts]),
        steps=[_step(*each) for each in zip(program.launches, program.builds, strict=True)],
        sm_margin=program.sm_margin,
    )


def grid_in_cpp(grid: Grid) -> Any:
    return extension.Grid(**dataclasses.asdict(grid))


def _of(name: Extent | Number) -> Any:
    """The same name in C++."""
    return getattr(getattr(extension, type(name).__name__), name.name)


def _step(launch: Launch, build: Build) -> Any:
    """A launch as an extension.Step. Adds the parameters in the kernel's order."""
    num_warps, cluster, shared_bytes = build.compiled.packed_metadata
    sides = [*launch.grid, 1, 1][:3]
    made = extension.Step(
        function=build.compiled.function,
        sides=[1 if isinstance(side, Number) else side for side in sides],
        grid=[_of(side) if isinstance(side, Number) else None for side in sides[:2]],
        threads=32 * num_warps,
        shared_bytes=shared_bytes,
        cluster=cluster,
        dependent=build.dependent,
    )
    descriptors = iter(build.descriptors)
    for given, kind in build.parameters(launch):
        if isinstance(given, Map):
            _add_map(made, given, next(descriptors))
        elif isinstance(given, Slot):
            made.add_address(given.index)
        elif kind not in BYTES_OF_NUMBERS:
            raise RuntimeError(f"native: a kernel's parameter must be a pointer, a map or a number, got {kind}")
        elif isinstance(given, Number):
            made.add_variable(_of(given), BYTES_OF_NUMBERS[kind])
        else:
            getattr(made, f"add_{kind}")(given)
    for _ in range(2):  # addresses of scratch memory for Triton and its profiler, which our kernels do not need
        made.add_i64(0)
    return made


def _add_map(made: Any, described: Map, metadata: dict) -> None:
    """Add a tensor map as the driver takes it: innermost dim first, and no stride for the innermost dim."""
    shape = described.shape[::-1]
    made.add_map(
        index=described.tensor.index,
        type=triton_compat.number_of_type(metadata["elem_type"]),
        rows_dim=shape.index(Number.ROWS),
        shape=[1 if isinstance(size, Number) else size for size in shape],
        strides=[metadata["elem_size"] * stride for stride in reversed(described.strides[:-1])],
        box=list(reversed(metadata["block_size"])),
    )


def failure() -> str:
    """The compiler's first error if the extension did not compile when the package was installed; else an empty
    string."""
    return "" if extension or not _FAILURE.exists() else _FAILURE.read_text().strip()


def repeats() -> int:
    """The number of calls that ran without Python; 0 if the extension was not built."""
    return extension.repeats() if extension else 0


def forget() -> None:
    """Drop all programs of the C++ side."""
    if extension:
        extension.forget()
