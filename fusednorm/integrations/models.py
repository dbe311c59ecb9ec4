"""patch_model: the norm modules of a model that is already built run this package's kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from .. import modules
from .by_hand import Formula, NormByHand, Unrecognized, formula_of, forward_of, hands_on

NAMED = 3  # modules of a class, when a patch is printed
STOCK = {nn.LayerNorm: modules.LayerNorm, nn.RMSNorm: modules.RMSNorm}


class Norm(NamedTuple):
    """One norm of a model. `note` says what it computes, or why it was left."""

    name: str  # its path in the model; "" for the model itself
    class_name: str
    note: str


@dataclass
class Patch:
    """What patch_model did: the norms that it replaced and those that it left, with the reasons. print() shows both, a
    line for each class. `with patch_model(model): ...` restores at the end of the block."""

    replaced: list[Norm] = field(default_factory=list)
    left: list[Norm] = field(default_factory=list)
    _classes: list[tuple[nn.Module, type, type]] = field(default_factory=list, repr=False)  # module, before, after

    def restore(self) -> None:
        """Give every replaced module its own class back. Parameters, and what training made of them, stay."""
        for module, before, after in self._classes:
            if type(module) is after:
                module.__class__ = before
        self._classes.clear()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_) -> None:
        self.restore()

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)}", *_by_class(self.replaced)]
        return "\n".join([*lines, f"left {len(self.left)}", *_by_class(self.left)])


def _by_class(norms: list[Norm]) -> Iterator[str]:
    names: dict[tuple[str, str], list[str]] = {}
    for norm in norms:
        names.setdefault(norm[1:], []).append(norm.name or "the model itself")
    for (class_name, note), found in names.items():
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        yield f"  {len(found)} x {class_name}, {note}: {', '.join(found[:NAMED])}{more}"


def patch_model(model: nn.Module, classes: Iterable[type[nn.Module]] = ()) -> Patch:
    """Make the LayerNorms and RMSNorms in `model` run this package's kernels, in place.

    A module keeps everything but its class, which becomes a subclass of what it was: the very Parameter objects, names,
    state dict, hooks and mode. So optimizers, checkpoints and wrappers, made before or after, stay valid. Patch before
    torch.compile.

    Taken are torch.nn.LayerNorm and RMSNorm, subclasses that hand on to them, and norms written by hand that compute
    the same, or the same with 1 + weight (Hugging Face's Llama, Mistral, Qwen, Gemma, T5, ...). The name of a class
    does not count: a module without modules inside, with an eps and no parameters but weight and bias, is tried on
    small CPU tensors. Norms written by hand return the shape and dtype that their own forward would, autocast or not,
    but rounded once, where many round x_hat before the weight as well; bfloat16 x times float32 weight is rounded to
    bfloat16 and returned as float32. The sum 1 + weight is made in float32 on each call. For dtypes, devices and tensor
    subclasses that this package does not take, and scripted (torch.jit.script) or traced by torch.fx, they run their
    own forward.

    Everything else is left, and Patch.left says why: for what has Norm in its class's name, and for modules of
    `classes`. Raises TypeError where `model` is no module, or one of `classes` no class.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch_model: model must be a torch.nn.Module, got {type(model).__name__}")
    classes = tuple(classes)
    for each in classes:
        if not isinstance(each, type):
            raise TypeError(f"patch_model: classes must be classes of modules, got {each!r}")
    patch = Patch()
    for name, module in list(model.named_modules()):
        before = type(module)
        try:
            after, note = _replacement(module)
        except Unrecognized as reason:
            if _is_listed(module, classes):
                patch.left.append(Norm(name, before.__name__, str(reason)))
            continue
        module.__class__ = after
        patch.replaced.append(Norm(name, before.__name__, note))
        patch._classes.append((module, before, after))
    return patch


def _is_listed(module: nn.Module, classes: tuple[type, ...]) -> bool:
    """Whether somebody may expect it to be replaced: a stock norm, an innermost module that calls itself a norm, or one
    that was asked for."""
    return isinstance(module, (*STOCK, *classes)) or ("Norm" in type(module).__name__ and not module._modules)


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
        if own.forward is stock.forward or (isinstance(module, stock) and hands_on(module)):
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
