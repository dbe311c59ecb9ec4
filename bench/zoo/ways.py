"""The ways to run a model: stock, with our norms, with Liger's, eager and compiled.

Every way has a model of its own, which shares its parameters with those of the other ways.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import fusednorm
from fusednorm.tools.hub import write_repository

from .models import Batch, Model, is_norm

STOCK_FORWARDS = {F.layer_norm: "LayerNorm", F.rms_norm: "RMSNorm"}
LAYERS = ("RMSNorm", "RMSNormZeroCentered")  # of `fusednorm hub`, which transformers' classes name


class Absent(Exception):  # noqa: N818  no error: the way does not apply
    """Why a model has no such way."""


@dataclass
class Way:
    """A model made ready. `norms` says for each kind of norm how many there are and what runs them, or why they were
    left."""

    model: nn.Module
    call: Callable
    norms: list[str] = field(default_factory=list)
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    report: Callable[[], list[str]] | None = None  # says `norms` once the model has run


def sharing_parameters(model: nn.Module) -> nn.Module:
    """A copy with the same Parameter objects."""
    return copy.deepcopy(model, {id(each): each for each in model.parameters()})


def make_way(name: str, spec: Model, stock: nn.Module, batch: Batch) -> Way:
    """Raises Absent if there is no such way."""
    model = sharing_parameters(stock)
    if name != "eager liger":
        spec.drop_last_norms(model)
        return WAYS[name](model, batch)
    way = WAYS[name](model, batch)  # Liger's patch looks for the last norm
    spec.drop_last_norms(model)
    return way


def _stock(model: nn.Module, batch: Batch) -> Way:
    return Way(model, model)


def _patch_model(model: nn.Module, batch: Batch, **settings: bool) -> Way:
    patch = fusednorm.patch_model(model, **settings)
    notes = [*counted(f"replaced: {n.class_name}, {n.note}" for n in patch.replaced)]
    return Way(model, model, [*notes, *counted(f"left: {n.class_name}, {n.note}" for n in patch.left)])


def _enable_eager(model: nn.Module, batch: Batch) -> Way:
    """Not for models that never call torch's own norms."""
    with torch.no_grad(), _StockCalls() as calls:
        batch.loss(model)
    if not calls.found:
        raise Absent("its norms are written by hand: none calls torch's own")
    return Way(model, model, [*counted(f"replaced: {n}, torch's own" for n in calls.found)], fusednorm.enable_eager)


def _hub(model: nn.Module, batch: Batch) -> Way:
    """By transformers and Hugging Face's `kernels`, from a repository in a local folder."""
    import transformers

    if not isinstance(model, transformers.PreTrainedModel):
        raise Absent("not a model of transformers")
    if not torch.cuda.is_available():
        raise Absent("transformers takes a KernelConfig only for models on an accelerator")
    _needs("kernels")
    folder = Path(tempfile.mkdtemp(prefix="fusednorm-hub-"))
    write_repository(folder)
    named = {getattr(type(each), "kernel_layer_name", None) for each in model.modules()}
    mapping = {name: f"{folder}:{name}" for name in LAYERS if name in named}
    if not mapping:
        raise Absent("none of its classes names a layer that we have")
    model.set_use_kernels(True, transformers.KernelConfig(mapping, use_local_kernel=True))
    return Way(model, model, norms_of_instances(model))


def _liger(model: nn.Module, batch: Batch) -> Way:
    """Its norms alone: its other kernels would hide what a norm is worth. Its patch also changes transformers' modules,
    which are restored."""
    _needs("liger_kernel")
    liger = importlib.import_module("liger_kernel.transformers.monkey_patch")
    kind = getattr(model.config, "model_type", None)
    if kind not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise Absent("Liger has no patch for it")
    others = dict.fromkeys(("rope", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy"), False)
    home = importlib.import_module(type(model).__module__)
    before = dict(vars(home))
    try:
        liger._apply_liger_kernel_to_instance(model, **others)
    finally:
        vars(home).update(before)
    norms_of_instances(model)
    return Way(model, model, report=lambda: norms_of_instances(model))


def _compiled(model: nn.Module, batch: Batch) -> Way:
    return Way(model, compiled(model, stock_backend()))


def _enable_inductor(model: nn.Module, batch: Batch, **options: Any) -> Way:
    return _under_inductor(Way(model, model), **options)


def _patched_compiled(model: nn.Module, batch: Batch) -> Way:
    way = _patch_model(model, batch)
    way.call = compiled(model, stock_backend())
    return way


def _patched_enable_inductor(model: nn.Module, batch: Batch) -> Way:
    return _under_inductor(_patch_model(model, batch))


def _under_inductor(way: Way, **options: Any) -> Way:
    """What enable_inductor(**options) does, for this model alone."""
    from fusednorm.integrations import inductor

    notes = way.norms
    inductor.report(clear=True)
    way.call = compiled(way.model, partial(inductor.compile_graph, options=options))
    way.report = lambda: [*notes, *(f"{count} x {entry}" for entry, count in inductor.report().items())]
    return way


# way and norms, as the records name them
WAYS: dict[str, Callable[[nn.Module, Batch], Way]] = {
    "eager stock": _stock,
    "eager patch_model": _patch_model,
    "eager enable_eager": _enable_eager,
    "eager hub": _hub,
    "eager liger": _liger,
    "compiled stock": _compiled,
    "compiled enable_inductor": _enable_inductor,
    "compiled patch_model": _patched_compiled,
    "compiled both": _patched_enable_inductor,
    "eager patch_model rotary": partial(_patch_model, rotary=True),
    "compiled enable_inductor apart": partial(_enable_inductor, join=()),
}


def compiled(model: nn.Module, backend: Callable) -> Callable:
    return torch.compile(model, backend=backend, dynamic=False)


def stock_backend() -> Callable:
    """Inductor, as an object of its own: Dynamo keeps the graphs of backends apart, but two ways share their code."""
    inductor = torch._dynamo.lookup_backend("inductor")
    return lambda graph, inputs: inductor(graph, inputs)


def counted(notes) -> list[str]:
    return [f"{count} x {note}" for note, count in Counter(notes).items()]


def norms_of_instances(model: nn.Module) -> list[str]:
    """What runs each norm of a model, some of whose instances got another forward. Raises Absent if none did."""
    norms = [module for module in model.modules() if is_norm(module)]
    if not any("forward" in vars(module) for module in norms):
        raise Absent("it replaced no norm")
    return counted(f"{'replaced' if 'forward' in vars(each) else 'left'}: {type(each).__name__}" for each in norms)


def _needs(package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise Absent(f"{package} is not installed: {error}") from error


class _StockCalls(TorchFunctionMode):
    """Names the calls of torch's own norms."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in STOCK_FORWARDS:
            self.found.append(STOCK_FORWARDS[function])
        return function(*args, **(kwargs or {}))
