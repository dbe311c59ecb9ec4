"""Norms that a model has written by hand: finds the formula of one, and runs it on this package's kernels.

transformers has about two hundred of them: LlamaRMSNorm, GemmaRMSNorm with its 1 + weight, T5LayerNorm, ... A candidate
has one eps, and no parameters but weight and bias. Its formula is found by trial: copies with random parameters run on
small CPU tensors, and their results and gradients must agree with a formula that our kernels compute.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import autograd
from ..host import native
from ..host.key import PLAIN_TYPES
from ..host.torch_compat import parameter
from ..planner.norm_problem import FLOAT_DTYPES
from . import trials
from .trials import Magnitude, Trial, Unrecognized, trial, undisturbed, unexplained

EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
HALF_DTYPES = (torch.float16, torch.bfloat16)
STOCK_FUNCTIONS = {F.layer_norm, F.rms_norm}
MODULES_OWN = frozenset(vars(nn.Module()))
LOWER_STOCK_FUNCTIONS = {torch.layer_norm, torch.rms_norm, torch.native_layer_norm}
# The value of Formula.output for the dtypes of y in two trials: bfloat16 x with float32 weight, and float32 x with
# bfloat16 weight.
OUTPUT_DTYPES = {
    (torch.bfloat16, torch.float32): "x",
    (torch.float32, torch.float32): "promoted",
    (torch.float32, torch.bfloat16): "weight",
}
TRIAL_COLS = (16, 48)  # columns for a module without a weight: it might normalize groups of a fixed width
TRIAL_BATCHES = ((), (3,), (2, 3), (2, 3, 2))  # batch shapes of x
COMMON_BATCH = (2, 3)  # for which a norm must not fail
# A norm may branch on the number of its rows.
MORE_ROWS = ((1,), (2, 1), (17,), (8, 8), (257,))
MOST_ELEMENTS = 2**20  # of an x with more rows than 64
MAGNITUDES = (Magnitude(x=1e-3, weight=1e-3), Magnitude(x=1e5, weight=1e3), Magnitude(spread=True))
TOLERANCE = 1e-4  # of a float32 trial, relative to the largest number of its row


@dataclass(frozen=True)
class Formula:
    """The computation of a norm over the last dim."""

    norm: str  # "layer" or "rms"
    one_plus_weight: bool  # y = x_hat * (1 + weight), the sum in float32
    # dtype of y: "x" is x's; "promoted" is x's and weight's promoted; "weight" is weight's if 16-bit, else promoted
    output: str
    eps_name: str
    ranks: frozenset[int]  # the numbers of dims of x for which the module computes it
    rounds_x_hat: tuple[bool, bool]  # whether 16-bit x_hat is rounded before a 16-bit weight, and before a wider one

    def __str__(self) -> str:
        norm = "LayerNorm" if self.norm == "layer" else "RMSNorm"
        return norm + (" with 1 + weight" if self.one_plus_weight else "")


class NormByHand(nn.Module):
    """The forward of a norm written by hand, on our kernels. A mixin to put before the norm's class; it computes
    `_fused_formula`, which a subclass sets."""

    _fused_formula: Formula

    def forward(self, *args, **kwargs) -> Tensor:
        (x,) = *args, *kwargs.values()  # models name the argument x, hidden_states or input
        weight, bias = parameter(self, "weight", None), parameter(self, "bias", None)
        formula = self._fused_formula
        if not _takes(x, weight) or x.dim() not in formula.ranks:
            return super().forward(x)
        offset = 1.0 if formula.one_plus_weight else 0.0
        rounds = weight is not None and formula.rounds_x_hat[weight.dtype not in HALF_DTYPES]
        op, shape, eps = f"{formula.norm}_norm_fwd_affine", x.shape[-1:], getattr(self, formula.eps_name)
        given = x, shape, weight, bias, eps, offset, rounds, _output_dtype(formula.output, x, weight)
        y = native.y_of(op, given)
        return autograd.of_form(op, given) if y is None else y


def forward_of(own: type) -> Callable:
    """NormByHand.forward wrapped for the class `own`, so that torch.jit.script works.

    torch.jit.script does not take *args. It reads the source of the wrapped function instead, which is own.forward, and
    resolves names in the globals of own.forward.
    """
    ours = NormByHand.forward

    def forward(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    with_its_globals = FunctionType(forward.__code__, own.forward.__globals__, "forward", None, forward.__closure__)
    return functools.wraps(own.forward)(with_its_globals)


def _takes(x: Tensor, weight: Tensor | None) -> bool:
    if weight is not None and not (type(weight) in PLAIN_TYPES and weight.dtype in FLOAT_DTYPES):
        return False
    return type(x) is Tensor and x.dtype in FLOAT_DTYPES and (x.is_cuda or x.is_cpu)


def _output_dtype(rule: str, x: Tensor, weight: Tensor | None) -> torch.dtype:
    if rule == "x" or weight is None:
        return x.dtype
    if rule == "weight" and weight.dtype in HALF_DTYPES:
        return weight.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def formula_of(module: nn.Module, known: dict[Any, Formula | Unrecognized]) -> Formula:
    """The formula of `module`, found by trial. Raises Unrecognized. Changes neither the module nor the random state.
    `known` keeps the answers for modules that differ in nothing but the numbers in their parameters."""
    eps_name = _eps_name_of_a_norm(module)
    trials.check_tensors(module)
    key = _key(module)
    if key is None or key not in known:
        try:
            answer = _by_trial(module, eps_name)
        except Unrecognized as reason:
            answer = reason
        if key is None:
            known = {}
        known[key] = answer
    if isinstance(known[key], Unrecognized):
        raise Unrecognized(*known[key].args)
    return known[key]


def _key(module: nn.Module) -> Any:
    """All that the module's code could depend on, but the numbers in its parameters; None if it holds more than
    numbers, names and sizes."""
    shapes = tuple((name, each if each is None else each.shape) for name, each in module._parameters.items())
    own = {name: value for name, value in vars(module).items() if name not in MODULES_OWN}
    simple = (bool, int, float, str, type(None), torch.Size, torch.dtype)
    if all(type(each) in simple for value in own.values() for each in (value if type(value) is tuple else (value,))):
        return type(module), shapes, tuple(own.items())
    return None


def _by_trial(module: nn.Module, eps_name: str) -> Formula:
    with undisturbed(), _StockNorms():
        norm, one_plus_weight = _matching_formula(module, eps_name)
        ranks = frozenset(
            len(batch) + 1
            for batch in TRIAL_BATCHES
            if _computes(module, eps_name, batch, norm, one_plus_weight, modes=(True, False))
        )
        for magnitude in MAGNITUDES:
            if not _computes(module, eps_name, COMMON_BATCH, norm, one_plus_weight, magnitude):
                raise Unrecognized("its forward computes something else for small or for large numbers")
        for batch in _more_rows(module, ranks):
            if not _computes(module, eps_name, batch, norm, one_plus_weight):
                raise Unrecognized("its forward computes something else for other numbers of rows")
    with undisturbed(), _StockNorms() as stock:
        output, rounds = _output_rule(module, eps_name), _roundings(module, eps_name, norm, one_plus_weight)
        formula = Formula(norm, one_plus_weight, output, eps_name, ranks, rounds)
    if any(call.input.dtype in HALF_DTYPES for call in stock.calls):
        raise Unrecognized("calls torch's own norm, which follows autocast: enable_eager() covers it")
    return formula


def _more_rows(module: nn.Module, ranks: frozenset[int]) -> list[tuple[int, ...]]:
    cols = max(_trial_cols(module))
    return [
        batch
        for batch in MORE_ROWS
        if len(batch) + 1 in ranks and (math.prod(batch) <= 64 or math.prod(batch) * cols <= MOST_ELEMENTS)
    ]


def returns_stock_norm(module: nn.LayerNorm | nn.RMSNorm) -> bool:
    """Whether a subclass's forward returns exactly torch's norm of its input with the module's own parameters. Raises
    Unrecognized."""
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return False
    trials.check_tensors(module)
    batches = (*TRIAL_BATCHES, *(batch for batch in MORE_ROWS if math.prod(batch) <= 64))
    with undisturbed():
        return all(_returns_stock_norm(module, *each) for each in itertools.product(batches, (True, False)))


def _returns_stock_norm(module: nn.LayerNorm | nn.RMSNorm, batch: tuple[int, ...], training: bool) -> bool:
    shape = *batch, *module.normalized_shape
    made = trial(module, "eps", shape, torch.bfloat16, training=training)
    with _StockNorms() as stock:
        try:
            y = made.run()
        except Unrecognized:
            return False
    if len(stock.calls) != 1 or stock.calls[0].input is not made.x or stock.calls[0].result is not y:
        return False
    if unexplained(module, made.reads, "eps", tuple(module.normalized_shape)) or not y.requires_grad:
        return False
    shape, weight, bias, eps = stock.calls[0].others
    own = weight is made.module.weight and bias is getattr(made.module, "bias", None)
    return own and shape == tuple(module.normalized_shape) and eps == trials.EPS


def _eps_name_of_a_norm(module: nn.Module) -> str:
    """The name of the module's eps. Raises Unrecognized unless it looks like a norm of one tensor over its last dim."""
    if type(module).__module__.startswith("torch.nn."):
        raise Unrecognized("is another module of torch.nn")
    present = {name for name, parameter in module._parameters.items() if parameter is not None}
    if not present <= {"weight", "bias"} or any(True for _ in module.buffers()):
        raise Unrecognized("has parameters or buffers besides weight and bias")
    if any(module._parameters[name].dim() != 1 for name in present):
        raise Unrecognized("normalizes more than one dim")
    if any(len(module._parameters[name]) == 1 for name in present):
        raise Unrecognized("has a parameter of one element, for rows of any width")
    if len(inspect.signature(type(module).forward).parameters) != 2:
        raise Unrecognized("its forward takes more than the tensor")
    names = [name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)]
    if len(names) != 1:
        raise Unrecognized(f"has no eps that we know of ({', '.join(EPS_NAMES)})")
    return names[0]


def _matching_formula(module: nn.Module, eps_name: str) -> tuple[str, bool]:
    """(norm, one_plus_weight) of the formula that the module computes. Raises Unrecognized."""
    cols = _trial_cols(module)[0]
    made = trial(module, eps_name, (*COMMON_BATCH, cols))
    made.run()  # raises if its forward does
    if name := unexplained(module, made.reads, eps_name, cols):
        raise Unrecognized(f"its forward reads its attribute {name}, which a norm does not have")
    for norm, one_plus_weight in itertools.product(("rms", "layer"), (False, True)):
        if _computes(module, eps_name, COMMON_BATCH, norm, one_plus_weight, modes=(True, False)):
            return norm, one_plus_weight
    raise Unrecognized("its forward computes something else")


def _computes(
    module: nn.Module,
    eps_name: str,
    batch: tuple[int, ...],
    norm: str,
    one_plus_weight: bool,
    magnitude: Magnitude = Magnitude(),  # noqa: B008  immutable
    modes: tuple[bool, ...] = (True,),
) -> bool:
    """Whether the module computes a formula and its gradients for such a batch of rows. modes: in training (True) or
    in evaluation (False)."""
    for cols, training in itertools.product(_trial_cols(module), modes):
        made = trial(module, eps_name, (*batch, cols), training=training, magnitude=magnitude)
        try:
            y = made.run()
        except Unrecognized:
            return False
        if unexplained(module, made.reads, eps_name, cols) or not _agrees(y, made, norm, one_plus_weight):
            return False
    return True


def _trial_cols(module: nn.Module) -> tuple[int, ...]:
    """The widths of rows to try."""
    weight = module._parameters.get("weight")
    return TRIAL_COLS if weight is None else (len(weight),)


def _output_rule(module: nn.Module, eps_name: str) -> str:
    shape = *COMMON_BATCH, _trial_cols(module)[0]
    if getattr(module, "weight", None) is None:
        dtypes = trial(module, eps_name, shape, torch.bfloat16).run().dtype, torch.float32
    else:
        mixtures = (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)
        dtypes = tuple(trial(module, eps_name, shape, *mixture).run().dtype for mixture in mixtures)
    if dtypes not in OUTPUT_DTYPES:
        raise Unrecognized("its forward returns a dtype that follows from neither x nor weight")
    return OUTPUT_DTYPES[dtypes]


def _roundings(module: nn.Module, eps_name: str, norm: str, one_plus_weight: bool) -> tuple[bool, bool]:
    """Formula.rounds_x_hat: the rounding by which more elements of a bfloat16 trial are those of the module."""
    if getattr(module, "weight", None) is None:
        return False, False
    shape = *COMMON_BATCH, _trial_cols(module)[0]
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        made = trial(module, eps_name, shape, torch.bfloat16, dtype)
        y = made.run()
        arguments = made.x, shape[-1:], *(getattr(made.module, name, None) for name in ("weight", "bias")), trials.EPS
        once, rounded = (
            autograd.of_form(f"{norm}_norm_fwd_affine", (*arguments, float(one_plus_weight), rounds, y.dtype))
            for rounds in (False, True)
        )
        found.append(int((rounded != y).sum()) < int((once != y).sum()))
    return found[0], found[1]


def _agrees(y: object, made: Trial, norm: str, one_plus_weight: bool) -> bool:
    """Whether y and its gradients of x and of the parameters are those of a formula, computed in float64."""
    if not isinstance(y, Tensor) or y.shape != made.x.shape or y.dtype != torch.float32 or not y.requires_grad:
        return False
    leaves = {"x": made.x, **{name: each for name, each in made.module._parameters.items() if each is not None}}
    wide = {name: each.detach().double().requires_grad_() for name, each in leaves.items()}
    x, weight, bias = wide["x"], wide.get("weight"), wide.get("bias")
    centered = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + trials.EPS)
    factor = torch.ones_like(x) if weight is None else weight + one_plus_weight
    want = centered * rstd * factor
    if bias is not None:
        want = want + bias
    grad = 1 + (centered * rstd).detach()  # such a gradient shows statistics that are not differentiated
    grads = torch.autograd.grad(y, list(leaves.values()), grad.float(), allow_unused=True)
    wants = torch.autograd.grad(want, list(wide.values()), grad, allow_unused=True)
    sizes = [
        (rstd * factor * grad).detach().abs().amax(-1, keepdim=True),
        *(w if w is None else w.abs().max() for w in wants[1:]),
    ]
    pairs = zip((y, *grads), (want, *wants), (want.detach().abs().amax(-1, keepdim=True), *sizes), strict=True)
    return all(
        got is not None and right is not None and bool(((got - right).abs() <= TOLERANCE * size).all())
        for got, right, size in pairs
    )


class StockCall(NamedTuple):
    """A call of torch's own norm. others is (normalized_shape, weight, bias, eps), as given."""

    input: Tensor
    others: tuple
    result: Tensor


class _StockNorms(TorchFunctionMode):
    """Records calls of torch's own norms while active. Parameters of another dtype than the input's are cast first,
    because ATen does not take them on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[StockCall] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in LOWER_STOCK_FUNCTIONS:
            raise Unrecognized("calls torch's own norm, which enable_eager() covers")
        if function not in STOCK_FUNCTIONS:
            return function(*args, **(kwargs or {}))
        given = inspect.signature(function).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        operands = given.arguments
        others = tuple(operands["normalized_shape"]), operands["weight"], operands.get("bias"), operands["eps"]
        for name in ("weight", "bias"):
            if operands.get(name) is not None:
                operands[name] = operands[name].to(operands["input"].dtype)
        result = function(*given.args, **given.kwargs)
        self.calls.append(StockCall(operands["input"], others, result))
        return result
