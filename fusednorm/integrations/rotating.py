"""Norms of q and k whose rotation follows, in the attention of a model: both and the rotation in one launch.

In transformers the norms are modules of an attention, and the rotation is a function of its file, such as
apply_rotary_pos_emb(q, k, cos, sin). Such a norm returns a Deferred in place of its result. The rotation, which is
replaced in its file, calls qk_norm if both q and k are Deferred. Whatever else torch does with a Deferred makes the
norm's result first. Other code, such as an extension's, must never get one. So a norm defers its result only if its
caller is the attention's forward, if this cannot go on without the rotation, as its bytecode tells, and if an earlier
call has rotated the results of both norms. Compiled code never sees a Deferred.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

from .. import autograd
from ..dtypes import FLOAT_DTYPES
from ..heads.functional import operands, qk_norm
from ..heads.operands import Settings
from ..heads.plan import has_kernels
from ..heads.problem import Heads, heads_of, output_dtype
from ..heads.reference import rotated
from ..host import gpus, torch_compat
from ..host.kernel_devices import runs_kernels
from .trials import undisturbed

HEADS_FIRST, HEADS_LAST = 1, 2  # the dim of cos and sin [B, S, r] that is put in for the heads
MOST_FRAMES = 8  # between a module's forward and that of a module inside
TOLERANCE = 1e-5  # of a trial, whose numbers are about 1


class Deferred:
    """The result of a norm, not computed yet: an op of a form and its arguments. The first argument is x, with 4 dims,
    or with 3 for a norm over all heads; `heads`, their number and columns, splits its last dim. `swapped` swaps dims 1
    and 2 of the result."""

    def __init__(self, op: str, arguments: tuple, swapped: bool = False, heads: tuple[int, int] | None = None) -> None:
        self.op, self.arguments, self.swapped, self.heads = op, arguments, swapped, heads

    @property
    def x(self) -> Tensor:
        return _apart(self.arguments[0], self.heads)

    @property
    def shape(self) -> torch.Size:
        return (self.x.transpose(1, 2) if self.swapped else self.x).shape

    @functools.cached_property
    def made(self) -> Tensor:
        y = _apart(autograd.of_form_in_cpp(self.op, self.arguments), self.heads)
        return y.transpose(1, 2) if self.swapped else y

    @property
    def is_made(self) -> bool:
        return "made" in vars(self)

    def transpose(self, first: int, second: int) -> Any:
        if {first, second} in ({1, 2}, {-3, -2}) and not self.is_made and self.x.dim() == 4:
            return Deferred(self.op, self.arguments, not self.swapped, self.heads)
        return self.made.transpose(first, second)

    def view(self, *sizes: Any, **named: Any) -> Any:
        x, shape = self.x, tuple(sizes[0]) if isinstance(sizes[0] if sizes else None, (tuple, list)) else sizes
        if x.dim() != 3 or self.is_made or len(shape) != 4 or shape[:2] != x.shape[:2]:
            return self.made.view(*sizes, **named)
        return Deferred(self.op, self.arguments, heads=tuple(x.unflatten(-1, shape[2:]).shape[2:]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made, name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args, kwargs = _pytree.tree_map(_made, (args, kwargs or {}))
        return function(*args, **kwargs)


def _apart(tensor: Tensor, heads: tuple[int, int] | None) -> Tensor:
    return tensor.unflatten(-1, heads) if heads else tensor


def _made(value: Any) -> Any:
    return value.made if type(value) is Deferred else value


def _operator(name: str) -> Callable:
    return lambda self, *others: getattr(self.made, name)(*map(_made, others))


_OF_TWO = "add", "sub", "mul", "truediv", "matmul", "pow"
_OTHERS = "neg", "getitem", "len", "iter", "eq", "ne", "lt", "le", "gt", "ge", "bool"
for _name in (*_OF_TWO, *map("r{}".format, _OF_TWO), *_OTHERS):
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))


class Place(NamedTuple):
    """A name in a file, and the function that was put there."""

    file: dict[str, Any]
    name: str
    function: Any

    @property
    def is_kept(self) -> bool:
        """Other code may have put a function of its own there."""
        return self.file.get(self.name) is self.function


class Wait:
    """Of a norm: the code of a forward that calls a rotation behind it, and whether this has rotated its result."""

    def __init__(self, code: CodeType, place: Place) -> None:
        self.code, self.place, self.has_rotated = code, place, False

    def __deepcopy__(self, _: dict) -> Wait:
        return Wait(self.code, self.place)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a pickled norm does not wait


_results: deque[tuple[weakref.ref[Tensor], Wait]] = deque(maxlen=4)  # the last ones of norms that do not wait yet


def result_of(module: nn.Module, wait: Wait, op: str, arguments: tuple) -> Tensor | Deferred:
    """The result of a norm that a rotation may follow, deferred if that is sure."""
    x, hooks = arguments[0], (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    is_watched = any(hooks) or torch_compat.has_global_hooks()
    may_wait = x.dim() in (3, 4) and runs_kernels(x) and not is_watched and not torch.compiler.is_compiling()
    if may_wait and wait.has_rotated and wait.place.is_kept and _is_called_by(wait.code):
        return Deferred(op, arguments)
    if not may_wait or wait.has_rotated or torch_compat.is_wrapped(x):
        return autograd.of_form_in_cpp(op, arguments)
    # A checkpoint's hooks must not see what is saved here: when it computes this again, the norm may wait.
    has_hooks = torch_compat.hooks_of_saved(False) is not None
    with saved_tensors_hooks(_itself, _itself) if has_hooks else contextlib.nullcontext():
        y = autograd.of_form_in_cpp(op, arguments)
    y.deferred = op, arguments  # as long as y lives
    _results.append((weakref.ref(y), wait))
    return y


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _is_called_by(code: CodeType) -> bool:
    frame = sys._getframe(2)
    for _ in range(MOST_FRAMES):
        if frame is None or frame.f_code is code:
            return frame is not None
        frame = frame.f_back
    return False


def _as_deferred(*rotated: Any) -> tuple[Any, ...]:
    """The tensors, as if their norms had waited, if each is the result of one. From now on these wait."""
    if any(type(each) is not Tensor or torch_compat.is_wrapped(each) for each in rotated):
        return rotated
    found = [(wait, y, each) for each in rotated for result, wait in _results if (y := result()) is not None
             and each.data_ptr() == y.data_ptr() and each.numel() == y.numel()]  # fmt: skip
    views = [view for _, y, each in found for view in _views_to(each, y)]
    if not len(rotated) == len(found) == len(views):
        return rotated
    for wait, _, _ in found:
        wait.has_rotated = True
    return tuple([Deferred(*y.deferred, *view) for (_, y, _), view in zip(found, views, strict=True)])


def _views_to(tensor: Tensor, y: Tensor) -> Iterator[tuple[bool, tuple[int, int] | None]]:
    """`swapped` and `heads` of a Deferred whose view of y the tensor is."""
    for swapped in (False, True):
        of = tensor.transpose(1, 2) if swapped and tensor.dim() == 4 else tensor
        heads = tuple(of.shape[2:]) if of.dim() == 4 == y.dim() + 1 else None
        if of.shape[:2] == y.shape[:2] and _is_alike(of, _apart(y, heads)):
            yield swapped, heads


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride()) == (other.shape, other.stride())


class Rotation(NamedTuple):
    """What a function of (q, k, cos, sin) computes: the rotation of pairs of adjacent columns, or of halves; `partial`
    also of the first columns alone. unsqueeze_dim is the function's default, if it has such an argument. `narrows` says
    that results have the dtype of q and k beside tables of a wider one."""

    interleaved: bool
    partial: bool
    unsqueeze_dim: int | None
    narrows: bool = False


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """Of a function, or of the module that Hugging Face's `kernels`, if installed, makes of one in transformers' files;
    none of anything else."""
    runs = function.forward if isinstance(function, nn.Module) else function
    return inspect.signature(runs).parameters if inspect.isfunction(runs) or inspect.ismethod(runs) else {}


def rotation_of(function: Callable) -> Rotation | None:
    """The rotation that a function computes, found by trial on small CPU tensors. None if it computes another one."""
    parameters = _parameters(function)
    dim = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in parameters else None
    dims = (HEADS_FIRST, HEADS_LAST) if dim in (HEADS_FIRST, HEADS_LAST) else (HEADS_FIRST,)
    for interleaved in (False, True):
        right = [
            all(_rotates(function, interleaved, turned, at, dim is not None) for at in dims) for turned in (16, 8)
        ]  # fmt: skip
        if right[0]:
            return Rotation(interleaved, right[1], dim, _narrows(function, dim or HEADS_FIRST))
    return None


def _drawn(heads_dim: int, turned: int) -> tuple[list[Tensor], list[Tensor]]:
    """q and k, cos and sin."""
    generator = torch.Generator("cpu").manual_seed(0)
    of_heads = [(2, heads, 5, 16) if heads_dim == HEADS_FIRST else (2, 5, heads, 16) for heads in (3, 1)]
    shapes = *of_heads, *[(2, 5, turned)] * 2
    drawn = [torch.randn(each, generator=generator, device="cpu", dtype=torch.float32) for each in shapes]
    return drawn[:2], drawn[2:]


def _narrows(function: Callable, heads_dim: int) -> bool:
    (q, k), tables = _drawn(heads_dim, 16)
    try:
        with undisturbed():
            return all(each.dtype == torch.bfloat16 for each in function(q.bfloat16(), k.bfloat16(), *tables))
    except Exception:  # of a function that takes tables of one dtype with q and k
        return False


def _rotates(function: Callable, interleaved: bool, turned: int, heads_dim: int, named: bool) -> bool:
    (q, k), tables = _drawn(heads_dim, turned)
    try:
        with undisturbed():
            given = [each.clone().requires_grad_() for each in (q, k)]
            found = tuple(function(*given, *tables, **({"unsqueeze_dim": heads_dim} if named else {})))
            grads = torch.autograd.grad(found, given, [q, k])
    except Exception:  # of a function that takes other tensors
        return False
    cos, sin = (each.unsqueeze(heads_dim) for each in tables)
    heads = Heads([q], [None], [None], cos, sin, None, Settings(interleaved=interleaved))
    wanted = [rotated(each, heads, back=back) for back in (False, True) for each in (q, k)]
    pairs = zip((*found, *grads), wanted, strict=True)
    return all(got.shape == want.shape and bool((got - want).abs().max() <= TOLERANCE) for got, want in pairs)


class Replaced(NamedTuple):
    """A function that was replaced in the globals of its file, and the norms that wait for it."""

    place: Place
    norms: list[nn.Module]

    @property
    def name(self) -> str:
        return self.place.name

    def restore(self) -> None:
        for each in self.norms:
            vars(each).pop("_fused_wait", None)
        file, name, function = self.place
        function.users -= 1
        if not function.users and self.place.is_kept:
            file[name] = function.__wrapped__


def join(module: nn.Module, is_norm: Callable[[nn.Module], bool]) -> Iterator[Replaced]:
    """Let the norms inside wait for the rotations that a module's forward calls, if qk_norm computes these. A function
    comes back when each that replaced it has restored it."""
    forward = inspect.unwrap(type(module).forward)
    if not inspect.isfunction(forward):
        return
    file = forward.__globals__
    for name, inside in _led_to_rotations(forward, module._modules):
        norms = [each for each in inside if is_norm(each)]
        function = file[name]
        if norms and not hasattr(function, "users"):
            rotation = rotation_of(function)
            if rotation is None:
                continue
            file[name] = function = _of_deferred(function, rotation)
        if norms:
            function.users += 1
            place = Place(file, name, function)
            for each in norms:
                vars(each)["_fused_wait"] = Wait(forward.__code__, place)
            yield Replaced(place, norms)


def _led_to_rotations(forward: FunctionType, modules: dict[str, nn.Module | None]):
    """(name, modules): a function of (q, k, cos, sin), and the modules whose calls in a forward lead to it. It is named
    once and behind them, and no jump and no end between leads past it."""
    code = list(dis.get_instructions(forward))
    places: dict[str, list[int]] = {}
    for at, each in enumerate(code):
        if each.opname.startswith("LOAD_"):
            places.setdefault(str(each.argval), []).append(at)
    for name, rotations in places.items():
        if len(rotations) == 1 and [*_parameters(forward.__globals__.get(name))][2:4] == ["cos", "sin"]:
            (end,) = rotations
            start = max((at for at, each in enumerate(code[:end]) if _leads_past(each, code[end].offset)), default=-1)
            between = {of for of, found in places.items() if all(start < at < end for at in found)}
            yield name, [each for of, each in modules.items() if each is not None and of in between]


def _leads_past(instruction: dis.Instruction, offset: int) -> bool:
    jumps = instruction.opcode in (*dis.hasjrel, *dis.hasjabs) and instruction.argval > offset
    return jumps or instruction.opname.startswith(("RETURN_", "RAISE_"))


def _of_deferred(function: Callable, rotation: Rotation) -> Callable:
    names, signature = [*_parameters(function)][:4], inspect.Signature([*_parameters(function).values()])

    @functools.wraps(function)
    def rotate(*arguments, **named):
        if torch.compiler.is_compiling():
            return function(*arguments, **named)
        if len(arguments) == 4 and not named:  # as all models call it: to bind is slow
            (q, k, cos, sin), others = arguments, {}
        else:
            others = signature.bind(*arguments, **named).arguments
            q, k, cos, sin = [others.pop(name) for name in names]
        if type(q) is not Deferred and type(k) is not Deferred:
            q, k = _as_deferred(q, k)
        if type(q) is Deferred and type(k) is Deferred:
            made = _by_qk_norm(q, k, rotation, cos, sin, **others)
            if made is not None:
                return made
        return function(*_pytree.tree_map(_made, arguments), **_pytree.tree_map(_made, named))

    rotate.users, rotate.__signature__ = 0, signature
    return rotate


def _by_qk_norm(q: Deferred, k: Deferred, rotation: Rotation, cos, sin, **others: Any) -> tuple[Tensor, Tensor] | None:
    """q and k, normalized and rotated; None unless qk_norm gives what the norms and the function give."""
    heads_dim = others.pop("unsqueeze_dim", rotation.unsqueeze_dim) or HEADS_FIRST
    if heads_dim not in (HEADS_FIRST, HEADS_LAST) or any([each is not None for each in others.values()]):
        return None
    (_, _, q_weight, q_bias, *settings, q_dtype), (_, _, k_weight, k_bias, *of_k, k_dtype) = q.arguments, k.arguments
    if q.op != k.op or settings != of_k or q.swapped != k.swapped or q.is_made or k.is_made:
        return None
    x_of_q, x_of_k = q.x, k.x
    if not x_of_q.dim() == x_of_k.dim() == 4 or bool(q.heads) != bool(k.heads):
        return None
    for table in (cos, sin):
        if type(table) is not Tensor or table.dim() != 3 or table.requires_grad or table.shape != cos.shape:
            return None
        if table.dtype not in FLOAT_DTYPES:
            return None
    if not (rotation.partial or cos.shape[-1] == x_of_q.shape[-1]):
        return None
    eps, weight_offset, rounds_x_hat = settings
    tables = () if rotation.narrows else (cos.dtype, sin.dtype)
    parameters = (q_weight, q_bias), (k_weight, k_bias)
    for x, of_x, dtype in zip((x_of_q, x_of_k), parameters, (q_dtype, k_dtype), strict=True):  # of the norm's result
        if {output_dtype(x, of_x, rounds_x_hat), functools.reduce(torch.promote_types, tables, dtype)} != {dtype}:
            return None
    named = {
        "q_weight": q_weight,
        "k_weight": k_weight,
        "q_bias": q_bias,
        "k_bias": k_bias,
        "eps": eps,
        "norm": q.op.partition("_")[0],
        "rotary": (cos, sin),
        "rotary_interleaved": rotation.interleaved,
        "heads_dim": -2 if (heads_dim == HEADS_FIRST) == q.swapped else -3,
        "weight_offset": weight_offset,
        "rounding": "x_hat" if rounds_x_hat else "once",
    }
    if q.heads:
        if named["heads_dim"] != -2 or q_weight is None or k_weight is None:
            return None
        heads = heads_of(operands(x_of_q, x_of_k, **named))
        if x_of_q.is_cuda and not has_kernels(heads, gpus.spec_of(x_of_q.device)):
            return None
    both = qk_norm(x_of_q, x_of_k, **named)
    return tuple([each.transpose(1, 2) for each in both]) if q.swapped else both
