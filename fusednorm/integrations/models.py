"""patch_model: the norm modules of a model that is already built run this package's kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from .. import modules
from .by_hand import Formula, NormByHand, Unrecognized, formula_of, forward_of

STOCK = {nn.LayerNorm: modules.LayerNorm, nn.RMSNorm: modules.RMSNorm}


class Norm(NamedTuple):
    """One norm of a model. `note` says what it computes, or why it was left."""

    name: str
    class_name: str
    note: str

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'}: {self.class_name}, {self.note}"


@dataclass
class Patch:
    """What patch_model did: the norms that it replaced and those that it left, with the reasons. print() shows both."""

    replaced: list[Norm] = field(default_factory=list)
    left: list[Norm] = field(default_factory=list)
    _classes: list[tuple[nn.Module, type, type]] = field(default_factory=list, repr=False)  # module, before, after

    def restore(self) -> None:
        """Give every replaced module its own class back. Parameters, and what training made of them, stay."""
        for module, before, after in self._classes:
            if type(module) is after:
                module.__class__ = before
        self._classes.clear()

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)}", *(f"  {norm}" for norm in self.replaced)]
        return "\n".join([*lines, f"left {len(self.left)}", *(f"  {norm}" for norm in self.left)])


def patch_model(model: nn.Module) -> Patch:
    """Make the LayerNorms and RMSNorms in `model` run this package's kernels, in place.

    A module keeps everything but its class, which becomes a subclass of what it was: the very Parameter objects, names,
    state dict, hooks and mode. So optimizers, checkpoints and wrappers, made before or after, stay valid. Patch before
    torch.compile.

    Taken are torch.nn.LayerNorm and RMSNorm, and norms written by hand that compute the same, or the same with
    1 + weight (Hugging Face's Llama, Mistral, Qwen, Gemma, T5, ...). These return the shape and dtype that their own
    forward would, autocast or not, but rounded once, where many round x_hat before the weight as well; bfloat16 x times
    float32 weight is rounded to bfloat16 and returned as float32. The sum 1 + weight is made in float32 on each call.
    For dtypes, devices and tensor subclasses that this package does not take, and scripted (torch.jit.script) or traced
    by torch.fx, they run their own forward.

    Everything else is left, and Patch.left says why. Raises TypeError where `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch_model: model must be a torch.nn.Module, got {type(model).__name__}")
    patch = Patch()
    for name, module in list(model.named_modules()):
        if not _is_norm(module):
            continue
        before = type(module)
        try:
            after, note = _replacement(module)
        except Unrecognized as reason:
            patch.left.append(Norm(name, before.__name__, str(reason)))
            continue
        module.__class__ = after
        patch.replaced.append(Norm(name, before.__name__, note))
        patch._classes.append((module, before, after))
    return patch


def _is_norm(module: nn.Module) -> bool:
    """What is to be listed: a stock norm, or an innermost module that calls itself a norm."""
    return isinstance(module, tuple(STOCK)) or ("Norm" in type(module).__name__ and not module._modules)


def _replacement(module: nn.Module) -> tuple[type, str]:
    """The class that `module` is to have, and a note on what it computes; raises Unrecognized."""
    own = type(module)
    if isinstance(module, (NormByHand, *STOCK.values())):
        raise Unrecognized("runs this package's kernels already")
    if "forward" in vars(module):
        raise Unrecognized("its forward was replaced on the instance")
    if module._modules:
        raise Unrecognized("has modules inside, a parametrization for example")
    for stock, ours in STOCK.items():
        if own.forward is stock.forward:
            return ours if own is stock else _fused_class(ours, own, None), f"as torch.nn.{stock.__name__}"
    formula = formula_of(module)
    return _fused_class(NormByHand, own, formula), f"{formula}, written by hand"


class _MadeAtRunTime:
    """A class without a name to pickle by: copies and pickles make it again from what it was made of."""

    ingredients: tuple

    def __reduce_ex__(self, protocol):
        _, _, *state = super().__reduce_ex__(protocol)
        return _empty_module, self.ingredients, *state


@functools.cache
def _fused_class(ours: type, own: type, formula: Formula | None) -> type:
    attributes = {"__module__": __name__, "formula": formula, "ingredients": (ours, own, formula)}
    if formula is not None:
        attributes["forward"] = forward_of(own)
    return type(f"Fused{own.__name__}", (_MadeAtRunTime, ours, own), attributes)


def _empty_module(ours: type, own: type, formula: Formula | None) -> nn.Module:
    made = _fused_class(ours, own, formula)
    return made.__new__(made)
