"""The optional host side in C++ (csrc/native.cpp), and its connection to Python.

For plain tensors on a GPU it runs kept programs and records autograd's node without Python. All other calls go to the
Python functions that `install` passes to it. Without the extension the same ops run in Python.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..namespace import NAMESPACE
from ..operands import (
    AGAIN_OPS,
    FORWARD,
    NEXT,
    OPS,
    OWN_OUTPUTS,
    TRANSLATIONS,
    Op,
    Operands,
    Outputs,
    Role,
    Slot,
    derivative_of,
    operands_of,
    ops_in_two,
)
from ..planner.plan import Grid
from ..settings import forcing, invariance, margin
from . import building, prepared, triton_compat
from .program import Address, Map, Number, Output, Program

if TYPE_CHECKING:
    from .launcher import Build, Launch

extension, reason = building.load()  # `reason` says why `extension` is None
if extension:
    invariance.use(extension)  # one place for both sides

ONE_CTA = Grid(1, 1, 1, 0, 0, 0, 1, 0)  # of a program that has no numbers
BYTES_OF_NUMBERS = {"i32": 4, "i64": 8, "fp32": 4, "fp64": 8}  # numeric parameter types, as Triton names them


_numbers: dict[str, int] = {}  # of the ops that C++ knows, by name
_installers: list[Callable[[Op], None]] = []  # one for each dispatch key


def install(
    key: str,
    above: Callable[[Operands], Outputs],
    ops: Any,
    statistics_gradients: Callable,
    differentiable_backward: Callable,
) -> None:
    """Register all ops, and those that are added later, in C++ at dispatch key `key` ("CUDA") and at the autograd key
    above it.

    above                    autograd.above_autograd, the implementation of all ops at the autograd key
    ops                      the module (ops.py) whose `launched` runs calls for which C++ has no program
    statistics_gradients     reference.statistics_gradients
    differentiable_backward  autograd.differentiable_backward, for nodes that keep the statistics inside
    """
    below = _and_program(ops.launched)

    def install_op(op: Op) -> None:
        given = {"above": above, "below": below, "differentiable_backward": differentiable_backward}
        given["statistics_gradients"] = statistics_gradients
        functions = {name: functools.partial(_run, each, op) for name, each in given.items()}
        extension.install(_numbers[op.name], key, **functions)

    extension.start(kept_kinds=prepared.KEPT_KINDS)
    forcing.observe(extension.pause)  # under `force`, calls run in Python
    margin.sm_margin.observe(lambda n: extension.set_sm_margin(n or 0))
    _installers.append(install_op)
    for op in [each.op for each in TRANSLATIONS.values()]:
        _describe(op)
        install_op(op)


def add(op: Op) -> None:
    """Register an op at the dispatch keys that `install` was called for."""
    for each in _installers:
        _describe(op)
        each(op)


def _describe(op: Op) -> None:
    """Tell C++ of an op, unless it knows the op."""
    if op.name in _numbers:
        return
    by = TRANSLATIONS[op.name]
    places = by.type.tensor_names
    sizes = {names[0]: len(names) for names in by.lists if len(names) > 1}
    inputs = [
        extension.Slot(
            role=getattr(extension.Role, _role(op, slot)),
            optional=slot.optional,
            is_argument=slot.role is not Role.FLAG,
            is_read=slot.is_read,
            place=places.index(slot.name) if slot.role.is_tensor else 0,
            list=sizes.get(slot.name, 0),
        )
        for slot in op.inputs
    ]
    outputs = [each.name for each in by.type.outputs]
    _numbers[op.name] = extension.add(
        name=f"{NAMESPACE}::{op.name}",
        inputs=inputs,
        x=_tensors(op).index("x"),
        num_tensors=len(places),
        num_outputs=len(outputs),
        outputs=[outputs.index(each.name) for each in op.outputs],
        follows_autocast=op.aten is not None,
        returns_list=op.of_lists,
    )
    if op in AGAIN_OPS:
        _connect_in_two(op)
    for forward in [TRANSLATIONS[name].op for name in _numbers if TRANSLATIONS[name].op.direction == FORWARD]:
        for packed in (False, True):
            backward = TRANSLATIONS[forward.name].backward + "_packed" * packed
            if backward in _numbers and op.name in (forward.name, backward):
                _connect(forward, TRANSLATIONS[backward].op, packed)


def _role(op: Op, slot: Slot) -> str:
    """The name of its role in C++."""
    if slot.role is Role.PARAMETER and not op.slot("normalized_shape"):
        return "STRIDED"
    if slot.name == "groups":
        return "GROUPS"
    if slot.role is Role.FORM:
        return {bool: "FLAG", str: "NAME", float: "NUMBER"}.get(type(slot.default), "INTEGER")
    return {Role.EPS: "NUMBER", Role.COUNT: "INTEGER", Role.BOOL: "FLAG"}.get(slot.role, slot.role.name)


def _connect(forward: Op, backward: Op, packed: bool) -> None:
    """Tell C++ how the autograd node of a forward calls its backward: derivative_of, with places in place of names. The
    node of a packed tensor, whose parts are the forward's first two tensors, has it in place of the first one."""
    by, names = derivative_of(forward.name), TRANSLATIONS[forward.name].type.tensor_names
    tensors, inputs, settings = _tensors(forward), _tensors(backward), _settings(forward)
    outputs, grads = ([each.name for each in TRANSLATIONS[op.name].type.outputs] for op in (forward, backward))
    kept = {name: [*names, *outputs[1:]][at] for name, at in zip(by.saved, by.sources, strict=True)}
    there = {*tensors, *(each.name for each in forward.outputs)}
    kept = {name: source for name, source in kept.items() if name in inputs and source in there}
    of_outputs = [each.gradient for each in TRANSLATIONS[forward.name].type.outputs]
    sources, gradients = [*kept, *of_outputs], dict(zip(names, by.gradients, strict=True))
    if packed:
        first, second = tensors[:2]
        takes_parts = kept.pop(second, None) is not None
        (behind,) = {slot.name for slot in backward.inputs if slot.role.is_tensor} - {first, *sources}
        sources = [None if takes_parts else first, *list(kept)[1:], first, second, *of_outputs, behind]
        gradients[second] = gradients[first]
    dtypes = {"output_mask": []} | {name: [tensors.index(names[at]) for at in ats] for name, ats in by.dtypes}
    integers = [name for name in _settings(backward) if packed and name not in (*by.settings, *dtypes)]
    settings += integers
    extension.set_backward(
        forward=_numbers[forward.name],
        backward=_numbers[backward.name],
        packed=packed,
        saved=[[*tensors, *outputs].index(each) for each in kept.values()],
        sources=[sources.index(each) if each in sources else None for each in inputs],
        gradients=[[*grads, *of_outputs].index(gradients[each]) for each in tensors],
        passed=[OWN_OUTPUTS + at for at in by.passed],
        of_dx=list(by.of_dx),
        copies=[grads.index(name) for name in by.copies],
        settings=[
            extension.Setting(of_forward=settings.index(name))
            if name in (*by.settings, *integers)
            else extension.Setting(dtype_of=dtypes[name])
            if name in dtypes
            else extension.Setting(name=backward.slot(name).default)
            for name in _settings(backward)
        ],
        eps=settings.index("eps"),
    )


def _connect_in_two(op: Op) -> None:
    """Tell C++ which ops make up one that normalizes again, by places, not names. All have the same settings, but for
    some of what autograd records, which its backward does not take."""
    first, following, recorded = ops_in_two(op.norm)
    tensors = _tensors(op)
    outputs, of_next = ([each.name for each in TRANSLATIONS[name].type.outputs] for name in (op.name, recorded))
    names = {"new_residual": "y"} | NEXT
    parts = [(first, _tensors(OPS[first]))]
    parts += [(name, [names.get(each) for each in _tensors(OPS[name])]) for name in (following, recorded)]
    extension.set_in_two(
        op=_numbers[op.name],
        parts=[
            (_numbers[name], [tensors.index(each) if each in tensors else None for each in given])
            for name, given in parts
        ],
        outputs=[outputs.index(names[each]) if names[each] in outputs else None for each in of_next],
    )


def _settings(op: Op) -> list[str]:
    """The inputs that C++ counts as settings."""
    return [slot.name for slot in op.inputs if not slot.role.is_tensor and slot.role is not Role.SHAPE]


def _tensors(op: Op) -> list[str]:
    return [slot.name for slot in op.inputs if slot.role.is_tensor]


def y_of(name: str, arguments: tuple) -> Any:
    """What a forward op returns without the statistics, differentiable, for all of its arguments by position: y, or y
    and what follows. None if Python must run the call."""
    if extension is None or torch.compiler.is_dynamo_compiling() or (number := _numbers.get(name)) is None:
        return None
    return extension.y_of(number, arguments)


def y_of_parts(name: str, sizes: tuple, ranges: tuple, integers: tuple, arguments: tuple) -> tuple[Any, ...] | None:
    """The same of a forward whose first two tensors are parts of one, which is given for each: a tuple, with the other
    parts, which are views. The whole has `sizes` in place of its last dim. The parts are ranges (start, length,
    start, ...) of the last one of these or, if there are several, of the one before. integers: what the backward takes
    beside the forward's settings."""
    if extension is None or torch.compiler.is_dynamo_compiling():
        return None
    return extension.y_of_parts(sizes, ranges, integers, _numbers[name], arguments)


def overrides(key: str, launched: Callable[[Operands], tuple[Outputs, prepared.Kept]]) -> Any:
    """Replaces ATen's norm ops at dispatch key `key` by ours until its `remove` is called. Calls that C++ does not run
    go to `launched`, which returns the outputs and a program that C++ can keep."""
    ops = [op for op in OPS.values() if op.aten]
    functions = [functools.partial(_run, _and_program(launched), op) for op in ops]
    return extension.Overrides(key, [_numbers[op.name] for op in ops], functions)


def _and_program(launched: Callable[[Operands], tuple[Outputs, prepared.Kept]]) -> Callable:
    def outputs_and_program(operands: Operands) -> tuple[Outputs, Any]:
        outputs, program = launched(operands)
        # C++ knows of `force` only while a block is open. A task may outlive the block that it was started in.
        if program is None or forcing.asked_variants():
            return outputs, None
        return outputs, True if program is prepared.IN_TWO else in_cpp(program)

    return outputs_and_program


def _run(run: Callable[..., Any], op: Op, *given: Any) -> Any:
    """`run` of the operands that C++ passes behind other arguments: the op's inputs."""
    names = list(dict.fromkeys([slot.argument or slot.name for slot in op.inputs]))
    others, inputs = given[: -len(names)], given[-len(names) :]
    named = dict(zip(names, inputs, strict=True))
    flags = {slot.name: named.pop(slot.name) for slot in op.inputs if slot.role is Role.FLAG}
    return run(operands_of(op.name, (), named)._replace(**flags), *others)


def in_cpp(program: Program) -> Any:
    """The program as an extension.Program."""
    workspace = program.workspace
    extension.watch(*program.builds[0].hooks())
    return extension.Program(
        device=program.device,
        rows_above=program.rows_above,
        most_rows=program.most_rows,
        grid=grid_in_cpp(program.grid or ONE_CTA),
        outputs=[each and _output(each, program.width) for each in program.outputs],
        workspace=workspace
        and extension.Workspace(dtype=workspace.dtype, parts=[part[:4] for part in workspace.parts]),
        steps=[_step(*each) for each in zip(program.launches, program.builds, strict=True)],
        sm_margin=program.sm_margin,
        invariance=program.invariance,
        blocks=program.blocks and extension.Blocks(**dataclasses.asdict(program.blocks)),
    )


def _output(each: Output, width: int) -> Any:
    whole = sum(is_whole << at for at, is_whole in enumerate(each.whole))
    more = {"dims": len(each.whole), "whole": whole, "shape": each.shape or (), "width": width}
    return extension.Output(role=_of(each.role), dtype=each.dtype, **more)


def grid_in_cpp(grid: Grid) -> Any:
    return extension.Grid(**dataclasses.asdict(grid))


def _of(name: Role | Number) -> Any:
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
        elif isinstance(given, Address):
            made.add_address(given.index, given.offset)
        elif kind not in BYTES_OF_NUMBERS:
            raise RuntimeError(f"native: a kernel's parameter must be a pointer, a map or a number, got {kind}")
        elif isinstance(given, Number):
            made.add_variable(_of(given), BYTES_OF_NUMBERS[kind])
        else:
            getattr(made, f"add_{kind}")(given)
    for _ in range(build.SCRATCH):
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


def warn_if_missing() -> None:
    """Warn if calls on a GPU run in Python although a command could change that."""
    if extension is None and building.SOURCES.is_dir() and torch.cuda.is_initialized():
        text = f"{building.WITHOUT_IT}; to build the C++ host side, run: {building.COMMAND}"
        warnings.warn(f"fusednorm: {text}", RuntimeWarning, stacklevel=2)


def repeats() -> int:
    """The number of calls that ran without Python; 0 if the extension was not built."""
    return extension.repeats() if extension else 0


def forget() -> None:
    """Drop all programs of the C++ side."""
    if extension:
        extension.forget()
