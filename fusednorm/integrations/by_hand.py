"""Norms that a model has written by hand: finds the formula of one, and runs it on this package's kernels.

transformers has about a hundred of them: LlamaRMSNorm, GemmaRMSNorm with its 1 + weight, T5LayerNorm, ... A candidate
has one eps, and no parameters but weight and bias. Its formula is found by trial: a copy with random parameters runs on
small CPU tensors and must agree with a formula that our kernels compute.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .. import autograd
from ..host.prepared import PLAIN_TYPES
from ..host.torch_compat import parameter
from ..planner.norm_problem import FLOAT_DTYPES

EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
HALF_DTYPES = (torch.float16, torch.bfloat16)
STOCK_FUNCTIONS = {F.layer_norm, F.rms_norm}
LOWER_STOCK_FUNCTIONS = {torch.layer_norm, torch.rms_norm, torch.native_layer_norm}
# The value of Formula.output for the dtypes of y in two trials: bfloat16 x with float32 weight, and float32 x with
# bfloat16 weight.
OUTPUT_DTYPES = {
    (torch.bfloat16, torch.float32): "x",
    (torch.float32, torch.float32): "promoted",
    (torch.float32, torch.bfloat16): "weight",
}
TRIAL_EPS = 0.25  # large enough to affect the result
TRIAL_COLS = (16, 48)  # columns for a module without a weight: it might normalize groups of a fixed width
TRIAL_BATCHES = ((), (3,), (2, 3), (2, 3, 2))  # batch shapes of x
COMMON_BATCH = (2, 3)  # for which a norm must not fail


class Unrecognized(Exception):  # noqa: N818  no error: it ends a search with its reason
    """The reason why a module keeps its own forward."""


@dataclass(frozen=True)
class Formula:
    """The computation of a norm over the last dim."""

    norm: str  # "layer" or "rms"
    one_plus_weight: bool  # y = x_hat * (1 + weight), the sum in float32
    # dtype of y: "x" is x's; "promoted" is x's and weight's promoted; "weight" is weight's if 16-bit, else promoted
    output: str
    eps_name: str
    ranks: frozenset[int]  # the numbers of dims of x for which the module computes it

    def __str__(self) -> str:
        norm = "LayerNorm" if self.norm == "layer" else "RMSNorm"
        return norm + (" with 1 + weight" if self.one_plus_weight else "")


class NormByHand(nn.Module):
    """The forward of a norm written by hand, on our kernels. A mixin to put before the norm's class; it computes
    `formula`, which a subclass sets."""

    formula: Formula

    def forward(self, *args, **kwargs) -> Tensor:
        (x,) = *args, *kwargs.values()  # models name the argument x, hidden_states or input
        weight, formula = parameter(self, "weight", None), self.formula
        if not _takes(x, weight) or x.dim() not in formula.ranks:
            return super().forward(x)
        dtype = _output_dtype(formula.output, x, weight)
        if formula.one_plus_weight and weight is not None:
            weight = 1 + weight.float()
        shape, eps = x.shape[-1:], getattr(self, formula.eps_name)
        if formula.norm == "rms":
            y = autograd.rms_norm(x, shape, weight, eps)
        else:
            y = autograd.layer_norm(x, shape, weight, parameter(self, "bias", None), eps)
        return y.to(dtype)


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


def formula_of(module: nn.Module) -> Formula:
    """The formula of `module`, found by trial. Raises Unrecognized. Changes neither the module nor the random state."""
    eps_name = _eps_name_of_a_norm(module)
    with torch.no_grad(), _disable_current_modes(), _StockNorms() as stock:
        norm, one_plus_weight = _matching_formula(module, eps_name)
        ranks = frozenset(
            len(batch) + 1 for batch in TRIAL_BATCHES if _computes(module, eps_name, batch, norm, one_plus_weight)
        )
        formula = Formula(norm, one_plus_weight, _output_rule(module, eps_name), eps_name, ranks)
    if any(call.input.dtype in HALF_DTYPES for call in stock.calls):
        raise Unrecognized("calls torch's own norm, which follows autocast: enable_eager() covers it")
    return formula


def returns_stock_norm(module: nn.LayerNorm | nn.RMSNorm) -> bool:
    """Whether a subclass's forward returns exactly torch's norm of its input with the module's own parameters."""
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return False
    trials = itertools.product(TRIAL_BATCHES, (True, False))
    with torch.no_grad(), _disable_current_modes():
        return all(_returns_stock_norm(module, batch, training) for batch, training in trials)


def _returns_stock_norm(module: nn.LayerNorm | nn.RMSNorm, batch: tuple[int, ...], training: bool) -> bool:
    shape = *batch, *module.normalized_shape
    copied, x = _trial(module, "eps", shape, torch.bfloat16, training=training)
    with _StockNorms() as stock:
        try:
            y = _run(copied, x)
        except Unrecognized:
            return False
    if len(stock.calls) != 1 or stock.calls[0].input is not x or stock.calls[0].result is not y:
        return False
    shape, weight, bias, eps = stock.calls[0].others
    own = weight is copied.weight and bias is getattr(copied, "bias", None)
    return own and shape == tuple(copied.normalized_shape) and eps == TRIAL_EPS


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
    _run(*_trial(module, eps_name, (*COMMON_BATCH, _trial_cols(module)[0])))  # raises if its forward does
    for norm, one_plus_weight in itertools.product(("rms", "layer"), (False, True)):
        if _computes(module, eps_name, COMMON_BATCH, norm, one_plus_weight):
            return norm, one_plus_weight
    raise Unrecognized("its forward computes something else")


def _computes(module: nn.Module, eps_name: str, batch: tuple[int, ...], norm: str, one_plus_weight: bool) -> bool:
    """Whether the module computes a formula for such a batch of rows, in training and in evaluation."""
    for cols, training in itertools.product(_trial_cols(module), (True, False)):
        copied, x = _trial(module, eps_name, (*batch, cols), training=training)
        try:
            got = _run(copied, x)
        except Unrecognized:
            return False
        if not _agree(got, _norm_in_float64(copied, x, norm, one_plus_weight)):
            return False
    return True


def _trial_cols(module: nn.Module) -> tuple[int, ...]:
    """The widths of rows to try."""
    weight = module._parameters.get("weight")
    return TRIAL_COLS if weight is None else (len(weight),)


def _output_rule(module: nn.Module, eps_name: str) -> str:
    shape = *COMMON_BATCH, _trial_cols(module)[0]
    if getattr(module, "weight", None) is None:
        dtypes = _run(*_trial(module, eps_name, shape, torch.bfloat16)).dtype, torch.float32
    else:
        mixtures = (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)
        dtypes = tuple(_run(*_trial(module, eps_name, shape, *mixture)).dtype for mixture in mixtures)
    if dtypes not in OUTPUT_DTYPES:
        raise Unrecognized("its forward returns a dtype that follows from neither x nor weight")
    return OUTPUT_DTYPES[dtypes]


def _trial(
    module: nn.Module,
    eps_name: str,
    shape: tuple[int, ...],
    x_dtype: torch.dtype = torch.float32,
    parameter_dtype: torch.dtype = torch.float32,
    training: bool = True,
) -> tuple[nn.Module, Tensor]:
    """A copy of the module with random parameters on the CPU, and an x for it. Every call draws the same numbers."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)

    parameters = {
        name: None if old is None else nn.Parameter(normal(*old.shape, dtype=parameter_dtype))
        for name, old in module._parameters.items()
    }
    copied = object.__new__(type(module))  # not copy.copy: a class may define its own copying, as FSDP's do
    vars(copied).update(vars(module) | {"_parameters": parameters, eps_name: TRIAL_EPS, "training": training})
    return copied, normal(*shape, dtype=x_dtype) + 1  # a mean other than 0 tells LayerNorm from RMSNorm


def _run(module: nn.Module, x: Tensor) -> Tensor:
    try:
        return type(module).forward(module, x)
    except Unrecognized:
        raise
    except Exception as error:
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        raise Unrecognized(f"its forward failed on a small CPU tensor: {problem}") from error


def _norm_in_float64(module: nn.Module, x: Tensor, norm: str, one_plus_weight: bool) -> Tensor:
    x, weight, bias = x.double(), getattr(module, "weight", None), getattr(module, "bias", None)
    if norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + TRIAL_EPS)
    if weight is not None:
        y = y * (weight.double() + one_plus_weight)
    if norm == "layer" and bias is not None:
        y = y + bias.double()
    return y


def _agree(got: object, want: Tensor) -> bool:
    if not isinstance(got, Tensor) or got.shape != want.shape or got.dtype != torch.float32:
        return False
    return torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4)


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
