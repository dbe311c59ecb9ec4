"""Loads the kernels of a program, and launches them without Triton's own lookup, which takes most of a launch's host
time.

A build depends on dtypes, on which operands are None, on the integers that its kernel is specialized for, and on which
pointers are multiples of 16 bytes. Triton's launcher is no public interface, so with releases that have not been tried
only kernels are launched that agree with what they would be passed (triton_compat.py). The measurements are in
bench/NOTES.md, "Host time".
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import JITFunction

from ..kernels.config import COMPILE_OPTIONS, Norm, Tile
from ..kernels.row_tile import cluster_bases
from . import triton_compat
from .fallback import BuildFailed, cause_of
from .program import STREAM, Address, Bound, Map, Number, Operand, Program, bound

TRITON = triton_compat.in_use()  # None: a release whose launcher is not known; then kernels are launched by `own`
SOME_NUMBER = 16  # in place of a Number where Triton compiles a kernel: no build depends on it

_builds: dict[tuple, Build | None] = {}  # loaded ones, by `build_key`; None if Triton itself must launch it
_kept: list[Launch] = []  # those that were compiled: a build_key has the ids of their norms and tiles
# Held while a kernel is loaded: Triton gives a kernel a launcher before it gives it the function to launch, so that a
# second thread may find the one without the other.
_loading = threading.Lock()
_differences: list[str] = []  # of kernels of an unknown release from what is expected
_failed: dict[tuple, str] = {}  # causes of failures, by key
_unspecialized: dict[int, frozenset[int | str]] = {}  # parameters that no build depends on, by id of the kernel


@dataclass(frozen=True)
class Launch:
    """One kernel with all arguments of its call. norm, tile and constants are compile-time arguments."""

    kernel: Any
    grid: tuple[int | Number, ...]
    operands: tuple[Operand, ...]  # the first parameters of the kernel
    norm: Norm | None  # None: not a norm's kernel
    tile: Tile
    options: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    named: dict[str, Operand] = field(default_factory=dict)  # operands that are not among the first parameters

    @property
    def args(self) -> tuple:
        """The operands in Triton's form."""
        return tuple(map(_tritons_form, self.operands))

    def keywords(self) -> dict[str, Any]:
        """The rest of what Triton takes."""
        named = {name: _tritons_form(each) for name, each in self.named.items()}
        return {**self._compile_time(), **COMPILE_OPTIONS, **self.options, **named}

    def arguments(self) -> list:
        """What each parameter of the kernel gets, in order."""
        given = self._compile_time() | self.named
        return [*self.operands, *map(given.get, self.kernel.arg_names[len(self.operands) :])]

    @property
    def num_tuples(self) -> int:
        """How many operands are tuples of addresses."""
        given = *self.operands, *self.named.values()
        return sum([type(each) is tuple and isinstance(each[0], Address) for each in given])

    def _compile_time(self) -> dict[str, Any]:
        norm = {} if self.norm is None else {"norm": self.norm}
        return {**norm, "tile": self.tile, "num_warps": self.tile.num_warps, **self.constants}

    def bound(self, tensors: Sequence[Tensor | None], numbers: tuple[int, ...]) -> Launch:
        """The launch with tensors and numbers in place of symbols."""
        grid, *operands = (bound(each, tensors, numbers) for each in (self.grid, *self.operands))
        named = {name: bound(each, tensors, numbers) for name, each in self.named.items()}
        return replace(self, grid=grid, operands=tuple(operands), named=named)

    def run(self) -> None:
        """Launch with tensors as operands, by Triton: on the current stream and device, or in the interpreter."""
        self.kernel[self.grid](*self.args, **self.keywords())


def _tritons_form(operand: Operand) -> Any:
    if isinstance(operand, Map):
        bits, rank = 8 * operand.tensor.dtype.itemsize, len(operand.shape)
        layout = NVMMASharedLayout(0, bits, rank, cga_layout=cluster_bases(operand, rank, rank - 2))
        shape = [_tritons_form(size) for size in operand.shape]
        return TensorDescriptor(operand.tensor, shape, list(operand.strides), list(operand.block), layout)
    return SOME_NUMBER if isinstance(operand, Number) else operand


def run(
    program: Program, tensors: Sequence[Tensor | None], shape: tuple[int, ...], rows: int
) -> tuple[tuple, Bound | None]:
    """(outputs, bound program) of a call with these tensors, whose x has this shape, on the current device. The second
    is None if Triton itself must launch the kernels. All kernels are loaded before the first one is launched, so
    that a failed build is noticed before anything runs. Raises BuildFailed if a kernel cannot be built or launched but
    another one could be, and all other errors as they are."""
    device = next(each.get_device() for each in tensors if each is not None)
    builds, made = load(program.launches, device), None
    if builds:
        made = replace(program, device=device, builds=builds).bind(tuple(shape), rows)
        try:
            outputs = made.launch([0 if each is None else each.data_ptr() for each in tensors])
        except Exception as error:
            _give_way(error, launched=True)
        if outputs is not None:
            return outputs, made
    on_tensors = program.on_tensors(tensors, shape, rows)
    hand_over(on_tensors.launches)
    return on_tensors.outputs, made


def load(launches: Iterable[Launch], device: int) -> list[Build] | None:
    """The builds of a program's launches, loaded on the current device, whose index is `device`. None if Triton itself
    must launch one of them. Raises as `run` does, and BuildFailed for a build that has failed before."""
    builds = [_load(each, device) if isinstance(each.kernel, JITFunction) else None for each in launches]
    return builds if all(builds) else None


def _load(launch: Launch, device: int) -> Build | None:
    key = build_key(launch, device)
    if key in _failed:
        raise BuildFailed(_failed[key])
    if key not in _builds:
        _kept.append(launch)
        try:
            compiled = launch.kernel.warmup(*launch.args, grid=(1,), **launch.keywords())
            with _loading:
                compiled[1, 1, 1]  # loads it, and asks whether its resources are there
                if key not in _builds:
                    _builds[key] = Build.of(compiled, launch)
        except Exception as error:
            _give_way(error, launched=False, failed=key)
    return None if launch.kernel.pre_run_hooks else _builds[key]


def hand_over(launches: Iterable[Launch]) -> None:
    """Let Triton run launches on tensors, in order, on the current device. Raises as `run` does."""
    for launch in launches:
        try:
            launch.run()
        except Exception as error:
            _give_way(error, launched=True)


def _give_way(error: Exception, *, launched: bool, failed: tuple | None = None) -> NoReturn:
    """Raise BuildFailed if another kernel could avoid the error, and remember which build has failed; else raise the
    error."""
    cause = cause_of(error, launched=launched)
    if cause is None:
        raise error
    if failed is not None:
        _failed[failed] = cause
    raise BuildFailed(cause) from error


def build_key(launch: Launch, device: int) -> tuple:
    """Everything that a build depends on."""
    kernel = launch.kernel
    unspecialized = _unspecialized.get(id(kernel))
    if unspecialized is None:
        unspecialized = _unspecialized[id(kernel)] = _what_no_build_depends_on(kernel)
    # id() is safe for kernels, norms and tiles: they are kept. Hashing a kernel would make Triton read its source.
    key: list[Any] = [id(kernel), id(launch.norm), id(launch.tile), device]
    key += *launch.options.items(), *launch.constants.items(), *launch.named
    for at, operand in (*enumerate(launch.operands), *launch.named.items()):
        if isinstance(operand, Address):
            key += operand.dtype, operand.aligned
        elif isinstance(operand, Map):
            key.append(operand.tensor.dtype)  # the rest follows from the tile
        elif isinstance(operand, tuple):
            key += [(each.dtype, each.aligned) if isinstance(each, Address) else each for each in operand]
        elif at not in unspecialized:
            key.append(operand)
    return tuple(key)


def _what_no_build_depends_on(kernel) -> frozenset[int | str]:
    """Positions and names of parameters marked do_not_specialize and of floating-point numbers."""
    return frozenset(
        each
        for position, parameter in enumerate(kernel.params)
        if parameter.do_not_specialize or parameter.annotation_type.startswith("fp")
        for each in (position, parameter.name)
    )


class Build:
    """One compiled kernel, loaded.

    `launch(grid x, y, z, stream, *head, *arguments)` launches it, with the arguments in the order of the kernel's
    parameters; if packs_operands, it takes them as one tuple. Each tensor map is followed by its shape and strides, but
    for a kernel's own launch, which takes descriptors.
    """

    SCRATCH = 2  # addresses behind the parameters, for Triton and its profiler, which our kernels do not need
    takes_descriptors = False  # in place of tensor maps, their shapes and strides
    RUNTIME = knobs.runtime  # has the hooks of profilers that watch Triton's launches

    @staticmethod
    def of(compiled, launch: Launch) -> Build | None:
        """The build; None if its launcher needs scratch memory or has an unknown form, or if the release is not known
        and the kernel is other than expected, of which a first warning tells."""
        try:
            launcher = compiled.run
            needs_memory = launcher.global_scratch_size or launcher.profile_scratch_size
            Build.hooks()  # raises AttributeError if this Triton has no such hooks
            watched = getattr(launcher, "gsan_enabled", False)  # launches under the sanitizer take more operands
            build = None if needs_memory or watched else Build(compiled, TRITON or triton_compat.own, launch)
            return None if build and TRITON is None and not build.is_as_expected(launch) else build
        except (AttributeError, KeyError) as error:
            if TRITON is None:
                _warn_of_triton(f"{type(error).__name__}: {error}")
            return None

    def __init__(self, compiled, launch_of: triton_compat.LaunchOf, launch: Launch):
        self.compiled = compiled
        self.maps = [each for each in launch.arguments() if isinstance(each, Map)]
        self.takes_descriptors = launch_of is triton_compat.own
        # A dependent launch may be placed on the GPU while the launch before it ends.
        self.dependent = compiled.metadata.launch_pdl
        self.descriptors = getattr(compiled.metadata, "tensordesc_meta", None) or []  # of the tensor maps, in order
        self.launch, self.head, self.packs_operands = launch_of(compiled, bool(self.descriptors))

    def arguments(self, launch: Launch) -> list:
        """The arguments for `launch`, with symbols and STREAM among them."""
        given = launch.arguments()
        given = given if self.takes_descriptors else _expanded(given)
        return [*launch.grid, *(1, 1, 1)[len(launch.grid) :], STREAM, *self.head, *given]

    @functools.cached_property
    def encoders(self) -> list[Callable]:
        """encode(address, shape, strides) of each tensor map, in the form that `launch` takes."""
        if self.takes_descriptors:
            return [functools.partial(_descriptor, each) for each in self.maps]
        return [triton_compat.encoder(each) for each in self.descriptors]

    def parameters(self, launch: Launch) -> Iterator[tuple[Any, str]]:
        """(what it gets, Triton's name of its type) of each parameter of the kernel that is left in its build."""
        for given, kind in zip(launch.arguments(), self.compiled.src.signature.values(), strict=True):
            yield from _parameters(given, kind)

    def is_as_expected(self, launch: Launch) -> bool:
        """Whether the compiled kernel says of its launch what we would do."""
        num_warps, cluster, _ = self.compiled.packed_metadata
        kinds = [kind for _, kind in self.parameters(launch)]
        types = ["u64" if kind.startswith("*") else triton_compat.PTX_TYPES[kind] for kind in kinds]
        expected = triton_compat.Declared((*types, *["u64"] * self.SCRATCH), 32 * num_warps, cluster)
        declared = triton_compat.declared(self.compiled.asm["ptx"])
        swizzled = [each for each in self.descriptors if each["swizzle"]]
        if declared != expected or swizzled or not isinstance(self.compiled.function, int):
            _warn_of_triton(f"{launch.kernel.__name__} is {declared}, not {expected}")
            return False
        return True

    @staticmethod
    def hooks() -> tuple[list, list]:
        """Triton's lists of hooks that run before and after a launch."""
        return Build.RUNTIME.launch_enter_hook.calls, Build.RUNTIME.launch_exit_hook.calls


def _warn_of_triton(difference: str) -> None:
    """Warn, once, that Triton's own launcher runs kernels."""
    if not _differences:
        release = ".".join(map(str, triton_compat.installed() or ()))
        text = f"Triton {release} launches kernels itself, {triton_compat.CALL_US} us a call, because {difference}"
        warnings.warn(f"fusednorm: {text}", RuntimeWarning, stacklevel=2)
    _differences.append(difference)


def _parameters(given: Any, kind: Any) -> Iterator[tuple[Any, str]]:
    """(what it gets, Triton's name of its type) of each parameter that a kernel has for an operand."""
    if isinstance(given, Map) and kind != "constexpr":
        rank = len(given.shape)
        yield from zip(_expanded([given]), ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank], strict=True)
    elif isinstance(kind, (tuple, list)):
        for pair in zip(given, kind, strict=True):
            yield from _parameters(*pair)
    elif kind != "constexpr":
        yield given, kind


class _Memory(NamedTuple):
    """In place of a tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def _descriptor(described: Map, address: int, shape: list[int], strides: list[int]) -> TensorDescriptor:
    return _tritons_form(replace(described, tensor=_Memory(address, described.tensor.dtype), shape=tuple(shape)))


def _expanded(arguments: Iterable[Any]) -> list:
    """The arguments, with each tensor map followed by its shape and strides."""
    found: list[Any] = []
    for each in arguments:
        found.append(each)
        if isinstance(each, Map):
            found += *each.shape, *each.strides
    return found
