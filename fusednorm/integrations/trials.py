"""Trials of a norm module that somebody else wrote: a copy of it runs on small CPU tensors, and what it returns, reads
and changes is noted. The module itself, its tensors and the random state are not touched."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

EPS = 0.25  # of a module on trial: large enough to affect the result
CONTAINERS = (list, dict, set)
SETTINGS = (bool, str, torch.dtype)
READS = "_reads_of_the_trial"  # the attribute of a module on trial that holds Trial.reads


class Unrecognized(Exception):  # noqa: N818  no error: it ends a search with its reason
    """The reason why a module keeps its own forward."""


class Magnitude(NamedTuple):
    """The numbers of a trial are about `x` and `weight` large. With `spread`, each is scaled by 1e-3 to 1e3."""

    x: float = 1.0
    weight: float = 1.0
    spread: bool = False


class Trial(NamedTuple):
    """A copy of a module and what it is tried on. The first of `inputs` is x. `reads` names the attributes that the
    module's code has read."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    reads: set[str]

    @property
    def x(self) -> Tensor:
        return self.inputs[0]

    def run(self) -> Tensor:
        """The module's result. Raises Unrecognized if it fails, or if it changes its attributes."""
        before, own = dict(vars(self.module)), type(self.module)
        self.reads.clear()
        try:
            y = own.forward(self.module, *self.inputs)
        except Unrecognized:
            raise
        except Exception as error:
            problem = (str(error).splitlines() or [type(error).__name__])[0]
            raise Unrecognized(f"its forward failed on a small CPU tensor: {problem}") from error
        after = vars(self.module)
        changed = [name for name in before | after if before.get(name, own) is not after.get(name, own)]
        if changed:
            raise Unrecognized(f"its forward changes its attribute {changed[0]}")
        return y


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """What is active around a trial (modes, autocast, inference mode, no_grad) does not reach it, and forwards that are
    compiled run as they are written: Dynamo reads attributes of its own."""
    has_dynamo = "torch._dynamo" in sys.modules  # without it nothing is compiled, and its import takes a second
    with (
        torch.compiler.set_stance("force_eager") if has_dynamo else contextlib.nullcontext(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def trial(
    module: nn.Module,
    eps_name: str,
    shape: tuple[int, ...],
    x_dtype: torch.dtype = torch.float32,
    parameter_dtype: torch.dtype = torch.float32,
    training: bool = True,
    magnitude: Magnitude = Magnitude(),  # noqa: B008  immutable
    gate_dtypes: tuple[torch.dtype, ...] = (),
) -> Trial:
    """A copy of the module with random parameters on the CPU, an x of this shape, and a gate of it for each of
    gate_dtypes. Every call draws the same numbers."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        drawn = (drawn + 1) * scale  # a mean other than 0 tells LayerNorm from RMSNorm
        if magnitude.spread:
            drawn *= 10 ** (6 * torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32) - 3)
        return drawn.to(dtype)

    parameters = {
        name: None if old is None else nn.Parameter(draw(tuple(old.shape), magnitude.weight, parameter_dtype))
        for name, old in module._parameters.items()
    }
    changes = {"_parameters": parameters, eps_name: EPS, "training": training}
    reads: set[str] = set()
    copied = object.__new__(_noting_reads(type(module)))  # a class may define its own copying, as FSDP's do
    own = {name: copy.copy(value) if type(value) in CONTAINERS else value for name, value in vars(module).items()}
    vars(copied).update(own | changes | {READS: reads})
    inputs = tuple(draw(shape, magnitude.x, dtype).requires_grad_() for dtype in (x_dtype, *gate_dtypes))
    return Trial(copied, inputs, reads)


class Unannounced:
    """A first base of classes made at run time: the __init_subclass__ of other bases, which may keep a register of
    classes, does not learn of them."""

    def __init_subclass__(cls, **_: object) -> None:
        pass


@functools.cache
def _noting_reads(own: type) -> type:
    def note(self, name):
        attributes = own.__getattribute__(self, "__dict__")
        if name != "__dict__":  # Module's own look-up of a parameter reads it
            attributes[READS].add(name)
        return own.__getattribute__(self, name)

    return type(own.__name__, (Unannounced, own), {"__module__": own.__module__, "__getattribute__": note})


def unexplained(
    module: nn.Module, reads: set[str], eps_name: str, cols: int | tuple[int, ...], also: Sequence[int] = ()
) -> str | None:
    """An attribute that the module's code reads and that a norm of rows of this shape does not have; None if there is
    none. Its value may change the result later. Settings (flags, names, dtypes) and the numbers `also` are explained by
    the trial."""
    for name in sorted(reads - {"weight", "bias", "training", "_parameters", "__class__", eps_name}):
        on_class = inspect.getattr_static(type(module), name, None)
        is_code = isinstance(on_class, (staticmethod, classmethod, property)) or inspect.isroutine(on_class)
        if is_code and name not in vars(module):
            continue  # what a method or a property reads is noted as well
        value = getattr(module, name, None)
        if value is None or isinstance(value, SETTINGS) or (type(value) is int and value in also):
            continue
        shape = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if shape != (cols if isinstance(cols, tuple) else (cols,)):
            return name
    return None


def check_tensors(module: nn.Module) -> None:
    """Raises Unrecognized if code that reads the module's tensors might crash, or if its parameters are not those that
    its forward will see."""
    for name, tensor in _tensors_in(vars(module)):
        if _is_freed(tensor):
            raise Unrecognized(f"the memory of its {name} was freed: patch before the model is sharded")
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if hasattr(parameter, "ds_id"):
            raise Unrecognized(f"its {name} is partitioned by DeepSpeed: patch before the model is sharded")
        if getattr(parameter, "_fsdp_flattened", False):
            raise Unrecognized(f"its {name} is flattened by FSDP: patch before the model is sharded")
        if not parameter.numel():
            raise Unrecognized(f"its {name} is empty: there is nothing to compare")
    for name in ("weight", "bias"):
        if isinstance(vars(module).get(name), Tensor):
            raise Unrecognized(f"its {name} is a tensor that is no parameter: patch before the model is sharded")


def _tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a tensor or in a container of containers, each with the name of the innermost entry."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors_in(each, str(key))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _tensors_in(each, name)


def _is_freed(tensor: Tensor) -> bool:
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # of a DTensor also its mesh
        return any(_is_freed(each) for each in parts if isinstance(each, Tensor))
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return False
    last = tensor.storage_offset() + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    try:
        return tensor.untyped_storage().nbytes() < (last + 1) * tensor.element_size()
    except NotImplementedError:  # a tensor without storage of its own, as a transform's
        return False
