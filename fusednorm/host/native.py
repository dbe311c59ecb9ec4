"""The optional host side in C++ (csrc/native.cpp), and its connection to Python.

For plain tensors on a GPU it repeats recipes and records autograd's node without Python. All other calls go to the
Python functions that `install` passes to it. Without the extension the same ops run in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import margin
from ..operands import BackwardOperands, ForwardOperands
from ..planner import forcing
from . import recipe

try:
    from . import _native as extension
except ImportError as error:  # not built, or built for another Python
    extension, reason = None, str(error)
else:
    reason = ""  # why `extension` is None
    if not torch.__version__.startswith(extension.torch_version):  # another torch may lay out its tensors differently
        extension, reason = None, f"built for torch {extension.torch_version}, found {torch.__version__}"

_FAILURE = Path(__file__).with_name("_native_failure.txt")  # setup.py writes it if the extension does not compile

OPS = ("layer_norm_fwd", "layer_norm_bwd", "rms_norm_fwd", "rms_norm_bwd")
NAMES_OF_NUMBERS = {"i32", "i64", "fp32", "fp64"}  # numeric parameter types, as Triton names them


def install(
    key: str, above: list[Callable], ops: Any, statistics_gradient: Callable, differentiable_backward: Callable
) -> None:
    """Register the OPS in C++ at dispatch key `key` ("CUDA") and at the autograd key above it.

    above                    for each of OPS, the Python implementation at the autograd key
    ops                      the module (ops.py) whose forward and backward run calls without a recipe
    statistics_gradient      reference.statistics_backward_formula
    differentiable_backward  autograd.differentiable_backward, for norms that returned y alone
    """

    def below(run: Callable, operands_type: type, norm: str) -> Callable:
        def outputs_and_recipe(*arguments):
            operands = operands_type(norm, *arguments)
            return run(operands), _in_cpp(recipe.find(recipe.look(operands)))

        return outputs_and_recipe

    directions = (ops.forward, ForwardOperands), (ops.backward, BackwardOperands)
    below_autograd = [below(*direction, norm) for norm in ("layer", "rms") for direction in directions]
    extension.install(key, above, below_autograd, statistics_gradient, differentiable_backward, recipe.KEPT_KEYS)
    forcing.observe(extension.pause)  # under `force`, calls run in Python
    margin.observe(extension.set_sm_margin)


def _in_cpp(cached: recipe.CachedCall | None) -> Any:
    """The recipe of a cached call as an extension.Recipe; None if no call is given."""
    if cached is None:
        return None
    made = cached.recipe
    extension.watch(*made.steps[0].build.hooks())
    *outputs, workspace = (each and extension.Memory(*each) for each in made.written)
    steps = [_step_in_cpp(step) for step in made.steps]
    return extension.Recipe(device=made.device, outputs=outputs, workspace=workspace, steps=steps)


def _step_in_cpp(step: recipe.Step) -> Any:
    """A launch as an extension.Step. Adds the parameters in the kernel's order."""
    build, arguments = step.build, step.arguments
    num_warps, cluster, shared_bytes = build.compiled.packed_metadata
    made = extension.Step(
        function=build.compiled.function,
        grid=arguments[: build.STREAM],
        threads=32 * num_warps,
        shared_bytes=shared_bytes,
        cluster=cluster,
        dependent=build.dependent,
    )
    slots = {slot.position: slot for slot in step.slots}
    maps = {slot.position: slot for slot in step.maps}
    for position, kind in build.parameter_types():
        if kind == "nvTmaDesc":
            _add_map(made, build, maps[position])
        elif kind.startswith("*"):
            made.add_address(slots[position].index, slots[position].offset)
        elif kind in NAMES_OF_NUMBERS:
            getattr(made, f"add_{kind}")(arguments[position])
        else:
            raise RuntimeError(f"native: a kernel's parameter must be a pointer, a map or a number, got {kind}")
    for _ in range(2):  # addresses of scratch memory for Triton and its profiler, which our kernels do not need
        made.add_i64(0)
    return made


def _add_map(made: Any, build: Any, slot: recipe.MapSlot) -> None:
    """Add a tensor map as the driver takes it: innermost dim first, and no stride for the innermost dim."""
    element_bytes, cuda_type, box = build.map_geometry(slot.operand)
    strides = [element_bytes * stride for stride in reversed(slot.strides[:-1])]
    made.add_map(index=slot.index, type=cuda_type, shape=slot.shape[::-1], strides=strides, box=list(reversed(box)))


def failure() -> str:
    """The compiler's first error if the extension did not compile when the package was installed; else an empty
    string."""
    return "" if extension or not _FAILURE.exists() else _FAILURE.read_text().strip()


def repeats() -> int:
    """The number of calls repeated without Python; 0 if the extension was not built."""
    return extension.repeats() if extension else 0


def forget() -> None:
    """Drop all recipes of the C++ side."""
    if extension:
        extension.forget()
