"""patch_model: makes the norm modules of an existing model run this package's kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from .. import modules
from . import rotating
from .by_hand import Formula, NormByHand, formula_of, forward_of, returns_stock_norm
from .trials import Unannounced, Unrecognized

NAMED = 3  # modules named per class when a patch is printed
STOCK = {nn.LayerNorm: modules.LayerNorm, nn.RMSNorm: modules.RMSNorm}


class Norm(NamedTuple):
    """One norm of a model. `note` is what the norm computes, or why it was left."""

    name: str  # its path in the model; "" for the model itself
    class_name: str
    note: str


@dataclass
class Patch:
    """The result of patch_model: the norms that it replaced, and those that it left with the reasons. print() shows
    both, one line per class and reason. `with patch_model(model): ...` restores the model at the end of the block."""

    replaced: list[Norm] = field(default_factory=list)
    left: list[Norm] = field(default_factory=list)
    _classes: list[tuple[nn.Module, type, type]] = field(default_factory=list, repr=False)  # module, before, after
    _functions: list[rotating.Replaced] = field(default_factory=list, repr=False)

    def restore(self) -> None:
        """Give every replaced module its own class back. Parameters stay, with all training since. A parametrization
        hides our class behind one of its own. Such a module gets its class back by a call after it has gone."""
        for module, before, after in self._classes:
            if type(module) is after:
                _set_class(module, before)
        for each in self._functions:
            each.restore()
        self._classes[:] = [each for each in self._classes if isinstance(each[0], each[2])]
        self._functions.clear()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
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


def patch_model(
    model: nn.Module, classes: type[nn.Module] | Iterable[type[nn.Module]] = (), *, rotary: bool = False
) -> Patch:
    """Make the LayerNorms and RMSNorms in `model` run this package's kernels, in place.

    A module's class becomes a subclass of its former class. The Parameter objects, names, state dict, hooks and mode
    stay the same, so optimizers, checkpoints and wrappers remain valid, whether made before or after. Patch before
    torch.compile, and before DeepSpeed's ZeRO-3 or FSDP1 shards the model (FSDP2 in either order).

    patch_model replaces torch.nn.LayerNorm and RMSNorm, subclasses that return their result unchanged, and norms
    written by hand that compute the same, or the same with 1 + weight (Hugging Face's Llama, Mistral, Qwen, Gemma, T5,
    ...), or with a silu or sigmoid gate behind the norm or before it (Qwen3-Next, Kimi-Linear, Bamba, ...). The name of
    a class does not matter: a module without submodules, with an eps, no parameters but weight and bias, and a forward
    of a tensor, or of a tensor and a gate, is tried on small CPU tensors. Its results and gradients must be those of a
    norm: for small, large and mixed magnitudes, for up to 257 rows (64, where rows are wider than 4080), in training
    and in evaluation.

    With rotary=True, eager calls run the norms of q and k by qk_norm together with the rotation behind them: a function
    of (q, k, cos, sin) in the file of the module that has the norms, such as apply_rotary_pos_emb. Then the result of a
    norm is not rounded before the rotation, and until `restore` another function is in that one's place in its file. A
    trial must show that qk_norm computes the function, the module's forward must not go on without it, and it must get
    the results of both norms as they are. Norms with hooks, and all norms while there are hooks of all modules, run by
    themselves. Compiled code keeps norms and rotation apart without enable_inductor().

    A trial cannot see what its inputs do not show: a branch for more rows, for larger numbers (x beyond 1e6, weights
    beyond 1e4) or for NaNs, one on a flag or a name that is set to another value later, and effects outside of the
    module, such as a global counter. A module is left, with the reason, whose forward changes an attribute or reads one
    that a norm does not have, and one with a tensor that cannot be compared or read now: a weight that is empty,
    partitioned or flattened, or memory that was freed.

    Norms written by hand keep the output shape and dtype of their own forward, under autocast too. They round
    x_hat before they multiply by the weight where the original does: then 16-bit results are the original's bits,
    except where its float32 statistics are others. 1 + weight is computed in float32, inside the kernel. They
    run their own forward for dtypes, devices and tensor subclasses that this package does not take, for a gate that is
    absent, of another shape, or of another dtype than x where the result's dtype follows from it, and when scripted
    (torch.jit.script) or traced by torch.fx.

    All other modules are left. Patch.left gives the reason for stock norms, modules of `classes`, one or several, and
    innermost modules with Norm in their class's name. Raises TypeError if `model` is no module or a member of `classes`
    no class.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch_model: model must be a torch.nn.Module, got {type(model).__name__}")
    classes = tuple(classes) if isinstance(classes, Iterable) else (classes,)
    for each in classes:
        if not isinstance(each, type):
            raise TypeError(f"patch_model: classes must be classes of modules, got {each!r}")
    patch, known = Patch(), {}
    for name, module in list(model.named_modules()):
        before = type(module)
        try:
            after, note = _replacement(module, known)
        except Unrecognized as reason:
            if _is_listed(module, classes):
                patch.left.append(Norm(name, before.__name__, str(reason)))
            continue
        _set_class(module, after)
        patch.replaced.append(Norm(name, before.__name__, note))
        patch._classes.append((module, before, after))
    if rotary:
        _join_rotations(patch, model)
    return patch


def _set_class(module: nn.Module, to: type) -> None:
    object.__setattr__(module, "__class__", to)  # a module of a class that forbids assignments, too


def _join_rotations(patch: Patch, model: nn.Module) -> None:
    """Let the norms that lead to a rotation wait for it, also those that an earlier call has replaced."""
    names = {module: name for name, module in model.named_modules()}
    for module in names:
        for each in rotating.join(module, _may_wait):
            patch._functions.append(each)
            joined = {names[norm] for norm in each.norms}
            for norms in (patch.replaced, patch.left):
                behind = f", with {each.name} behind it"
                norms[:] = [norm._replace(note=norm.note + behind * (norm.name in joined)) for norm in norms]


def _may_wait(norm: nn.Module) -> bool:
    wait = vars(norm).get("_fused_wait")
    is_of_one = isinstance(norm, NormByHand) and len(norm._fused_formula.inputs) == 1
    return is_of_one and not (wait and wait.place.is_kept)


def _is_listed(module: nn.Module, classes: tuple[type, ...]) -> bool:
    """Whether a user may expect the module to be replaced: a stock norm, an innermost module with Norm in its class's
    name, or one of `classes`."""
    return isinstance(module, (*STOCK, *classes)) or ("Norm" in type(module).__name__ and not module._modules)


def _replacement(module: nn.Module, known: dict) -> tuple[type, str]:
    """The new class of `module`, and a note on what it computes. `known` is formula_of's. Raises Unrecognized."""
    own = type(module)
    if isinstance(module, (NormByHand, *STOCK.values())):
        raise Unrecognized("runs this package's kernels already")
    if "forward" in vars(module):
        raise Unrecognized("its forward was replaced on the instance")
    if isinstance(module, torch.jit.ScriptModule):
        raise Unrecognized("is scripted")
    if module._modules:
        raise Unrecognized("has modules inside, a parametrization for example")
    if any(map(nn.parameter.is_lazy, module._parameters.values())):
        raise Unrecognized("gets its parameters at its first call: patch after it")
    for stock, ours in STOCK.items():
        if own.forward is stock.forward or (isinstance(module, stock) and returns_stock_norm(module)):
            return ours if own is stock else _fused_class(ours, own, None), f"as torch.nn.{stock.__name__}"
    formula = formula_of(module, known)
    return _fused_class(NormByHand, own, formula), f"{formula.computes}, written by hand"


class _MadeAtRunTime(Unannounced):
    """A base of classes made at run time. Pickle cannot find them by name, so copies and pickles build the class again
    from its ingredients."""

    _fused_from: tuple

    def __reduce_ex__(self, protocol):
        _, _, *state = super().__reduce_ex__(protocol)
        return _empty_module, self._fused_from, *state


@functools.cache
def _fused_class(ours: type, own: type, formula: Formula | None) -> type:
    attributes = {"__module__": __name__, "_fused_formula": formula, "_fused_from": (ours, own, formula)}
    if formula is not None:
        attributes["forward"] = forward_of(own)
    return type(f"Fused{own.__name__}", (_MadeAtRunTime, ours, own), attributes)


def _empty_module(ours: type, own: type, formula: Formula | None) -> nn.Module:
    made = _fused_class(ours, own, formula)
    return made.__new__(made)
