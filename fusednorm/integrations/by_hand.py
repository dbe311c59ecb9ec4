"""Norms that a model has written by hand: finds the formula of one, and runs it on this package's kernels.

transformers has hundreds of them: LlamaRMSNorm, GemmaRMSNorm with its 1 + weight, T5LayerNorm,
Qwen3NextRMSNormGated, ... A candidate has one eps, no parameters but weight and bias, and a forward of x, or of x and a
gate. Its formula is found by trial: copies with random parameters run on small CPU tensors, and their results and
gradients must agree with a formula that our kernels compute.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import autograd, functional, reference
from ..dtypes import FLOAT_DTYPES, SIXTEEN_BITS
from ..forms import ACTIVATIONS, FormSpec
from ..host.key import PLAIN_TYPES
from ..host.torch_compat import parameter
from ..operands import ForwardOperands, operands_of
from . import trials
from .rotating import Deferred, Wait, result_of
from .trials import Magnitude, Trial, Unrecognized, trial, undisturbed, unexplained

EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
PARAMETERS = ("weight", "bias")
STOCK_FUNCTIONS = {F.layer_norm, F.rms_norm}
MODULES_OWN = frozenset(vars(nn.Module()))
LOWER_STOCK_FUNCTIONS = {torch.layer_norm, torch.rms_norm, torch.native_layer_norm}
# The rule of _output_rule for the dtypes of y in two trials: bfloat16 x with float32 weight, and float32 x with
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
class Computation:
    """What a norm over the last dim computes, but for roundings."""

    norm: str  # "layer" or "rms"
    form: FormSpec
    op: str
    more: tuple  # the op's last arguments

    @classmethod
    def of(cls, norm: str, form: FormSpec) -> Computation:
        if not (form.combine or form.finish):
            return cls(norm, form, f"{norm}_norm_fwd_affine", ())
        return cls(norm, form, functional.gated_op(norm, bool(form.finish)), (form.activation, form.groups))

    def __str__(self) -> str:
        form, norm = self.form, "LayerNorm" if self.norm == "layer" else "RMSNorm"
        norm += " with 1 + weight" if form.weight_offset else ""
        norm += f" of {form.groups} groups" if form.groups > 1 else ""
        gate = f"a {form.activation} gate"
        return f"{norm}, then {gate}" if form.finish else f"{norm} behind {gate}" if form.combine else norm

    def arguments(self, inputs: Sequence[Tensor], weight, bias, eps: float, rounds_x_hat=False, y_dtype=None) -> tuple:
        """All arguments of the op by position, for an x and a gate if the form has one."""
        x, *gate = inputs
        offset = self.form.weight_offset
        return x, (x.shape[-1],), *gate, weight, bias, eps, offset, rounds_x_hat, y_dtype, *self.more


@dataclass(frozen=True)
class Formula:
    """How a module computes what it does."""

    computes: Computation
    eps_name: str
    inputs: tuple[str, ...]  # the names of its forward's arguments
    parameters: tuple[str, ...]  # "weight" and "bias", if it has them: asking for one that is absent is slow
    width: int | None  # the columns of x for which the module computes it, if it has no weight but a normalized_shape
    ranks: frozenset[int]  # the numbers of dims of x for which it computes it
    any_gate: bool  # whether the dtype of y is the same for a gate of another dtype than x's
    # By the dtypes of x and weight: whether x_hat is rounded before the weight, and the dtype of y.
    roundings: dict[tuple[torch.dtype, torch.dtype | None], tuple[bool, torch.dtype]] = field(hash=False)


class NormByHand(nn.Module):
    """The forward of a norm written by hand, on our kernels. A mixin to put before the norm's class; it computes
    `_fused_formula`, which a subclass sets. The result of one that waits for a rotation may be a Deferred."""

    _fused_formula: Formula
    _fused_wait: Wait | None = None

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Tensor | Deferred:
        formula, inputs = self._fused_formula, args
        if len(args) + len(kwargs) != len(formula.inputs):
            return super().forward(*args, **kwargs)
        if kwargs:
            given = dict(zip(formula.inputs, args, strict=False)) | kwargs
            inputs = tuple([given.get(name) for name in formula.inputs])
        weight = parameter(self, "weight") if "weight" in formula.parameters else None
        bias = parameter(self, "bias") if "bias" in formula.parameters else None
        x = inputs[0]
        if not _are_plain(inputs, weight, formula.any_gate) or x.dim() not in formula.ranks:
            return super().forward(*args, **kwargs)
        if formula.width is not None and x.shape[-1] != formula.width:
            return super().forward(*args, **kwargs)
        roundings = formula.roundings.get((x.dtype, None if weight is None else weight.dtype))
        if roundings is None:
            return super().forward(*args, **kwargs)
        computes = formula.computes
        arguments = computes.arguments(inputs, weight, bias, getattr(self, formula.eps_name), *roundings)
        if self._fused_wait is not None:
            return result_of(self, self._fused_wait, computes.op, arguments)
        return autograd.of_form_in_cpp(computes.op, arguments)


def forward_of(own: type) -> Callable:
    """NormByHand.run wrapped for the class `own`, so that torch.jit.script works.

    torch.jit.script does not take *args. It reads the source of the wrapped function instead, which is own.forward, and
    resolves names in the globals of own.forward.
    """
    by_hand, run = NormByHand, NormByHand.run

    def forward(self, *args, **kwargs):
        if not isinstance(self, by_hand):  # whoever keeps the bound method calls it after `restore`, too
            return own.forward(self, *args, **kwargs)
        return run(self, args, kwargs)

    with_its_globals = FunctionType(forward.__code__, own.forward.__globals__, "forward", None, forward.__closure__)
    return functools.wraps(own.forward)(with_its_globals)


def _are_plain(inputs: Sequence[Tensor | None], weight: Tensor | None, any_gate: bool) -> bool:
    if weight is not None and type(weight) not in PLAIN_TYPES:
        return False
    for each in inputs:
        if type(each) is not Tensor or not (each.is_cuda or each.is_cpu):
            return False
    if len(inputs) == 1:
        return True
    x, gate = inputs
    return x.shape == gate.shape and (gate.dtype == x.dtype or (any_gate and gate.dtype in FLOAT_DTYPES))


class Subject(NamedTuple):
    """A module on trial."""

    module: nn.Module
    eps_name: str
    inputs: tuple[str, ...]  # the names of its forward's arguments: x, or x and a gate

    @property
    def width(self) -> int | None:
        """Formula.width."""
        weight, shape = self.module._parameters.get("weight"), getattr(self.module, "normalized_shape", None)
        return shape[0] if weight is None and type(shape) is tuple and len(shape) == 1 else None

    @property
    def cols(self) -> tuple[int, ...]:
        """The widths of rows to try."""
        weight, width = self.module._parameters.get("weight"), self.width
        return (len(weight),) if weight is not None else TRIAL_COLS if width is None else (width,)

    def trial(
        self,
        batch: tuple[int, ...],
        cols: int,
        x_dtype: torch.dtype = torch.float32,
        parameter_dtype: torch.dtype = torch.float32,
        gate_dtype: torch.dtype | None = None,  # None: x's
        **more: Any,
    ) -> Trial:
        gates = (gate_dtype or x_dtype,) * (len(self.inputs) - 1)
        return trial(self.module, self.eps_name, (*batch, cols), x_dtype, parameter_dtype, gate_dtypes=gates, **more)

    def unexplained(self, made: Trial, numbers: Iterable[int]) -> str | None:
        """`trials.unexplained` of a norm, to which these numbers mean something if it has a gate."""
        also = numbers if len(self.inputs) == 2 else ()
        return unexplained(self.module, made.reads, self.eps_name, made.x.shape[-1], tuple(also))

    def numbers_of_groups(self, made: Trial) -> list[int]:
        """Numbers of groups of columns to try. An attribute that was read may be this number, or a group's size."""
        read, cols = [getattr(self.module, name, None) for name in sorted(made.reads)], made.x.shape[-1]
        sizes = [each for each in read if type(each) is int and 0 < each and cols % each == 0]
        return list(dict.fromkeys([1, *sizes, *(cols // each for each in sizes)]))


def formula_of(module: nn.Module, known: dict[Any, Formula | Unrecognized]) -> Formula:
    """The formula of `module`, found by trial. Raises Unrecognized. Changes neither the module nor the random state.
    `known` keeps the answers for modules that differ in nothing but the numbers in their parameters."""
    subject = _norm_to_try(module)
    trials.check_tensors(module)
    key = _key(module) or id(module)
    if key not in known:
        try:
            known[key] = _by_trial(subject)
        except Unrecognized as reason:
            known[key] = reason
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


def _by_trial(subject: Subject) -> Formula:
    with undisturbed(), _StockNorms():
        computes = _what_it_computes(subject)
        ranks = frozenset(
            len(batch) + 1 for batch in TRIAL_BATCHES if _agrees(subject, computes, batch, modes=(True, False))
        )
        for magnitude in MAGNITUDES:
            if not _agrees(subject, computes, COMMON_BATCH, magnitude):
                raise Unrecognized("its forward computes something else for small or for large numbers")
        for batch in _more_rows(subject, ranks):
            if not _agrees(subject, computes, batch):
                raise Unrecognized("its forward computes something else for other numbers of rows")
    with undisturbed(), _StockNorms() as stock:
        own = tuple(name for name in PARAMETERS if hasattr(subject.module, name))
        roundings = _roundings(subject, computes)
        names = subject.eps_name, subject.inputs, own
        formula = Formula(computes, *names, subject.width, ranks, _takes_any_gate(subject), roundings)
    if any(call.input.dtype in SIXTEEN_BITS for call in stock.calls):
        raise Unrecognized("calls torch's own norm, which follows autocast: enable_eager() covers it")
    return formula


def _more_rows(subject: Subject, ranks: frozenset[int]) -> list[tuple[int, ...]]:
    cols = max(subject.cols)
    return [
        batch
        for batch in MORE_ROWS
        if len(batch) + 1 in ranks and (math.prod(batch) <= 64 or math.prod(batch) * cols <= MOST_ELEMENTS)
    ]


def returns_stock_norm(module: nn.LayerNorm | nn.RMSNorm) -> bool:
    """Whether a subclass's forward returns exactly torch's norm of its input with the module's own parameters. Raises
    Unrecognized."""
    if len(_arguments_of(module)) != 2:
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


def _norm_to_try(module: nn.Module) -> Subject:
    """Raises Unrecognized unless the module looks like a norm over the last dim of one tensor, maybe with a gate."""
    if type(module).__module__.startswith("torch.nn."):
        raise Unrecognized("is another module of torch.nn")
    present = {name for name, parameter in module._parameters.items() if parameter is not None}
    if not present <= {*PARAMETERS} or any(True for _ in module.buffers()):
        raise Unrecognized("has parameters or buffers besides weight and bias")
    if any(module._parameters[name].dim() != 1 for name in present):
        raise Unrecognized("normalizes more than one dim")
    if any(len(module._parameters[name]) == 1 for name in present):
        raise Unrecognized("has a parameter of one element, for rows of any width")
    inputs = _arguments_of(module)[1:]
    by_name = all(each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for each in inputs)
    if not (len(inputs) == 1 or (len(inputs) == 2 and by_name)):
        raise Unrecognized("its forward takes more than the tensor and a gate")
    names = [name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)]
    if len(names) != 1:
        raise Unrecognized(f"has no eps that we know of ({', '.join(EPS_NAMES)})")
    return Subject(module, names[0], tuple(each.name for each in inputs))


def _arguments_of(module: nn.Module) -> list[inspect.Parameter]:
    """Those of its forward, self included."""
    try:
        return [*inspect.signature(type(module).forward).parameters.values()]
    except (TypeError, ValueError):
        raise Unrecognized("its forward is no function of Python") from None


def _what_it_computes(subject: Subject) -> Computation:
    """Raises Unrecognized if it is nothing that our kernels compute."""
    made = subject.trial(COMMON_BATCH, subject.cols[0])
    made.run()  # raises if its forward does
    groups = subject.numbers_of_groups(made)
    if name := subject.unexplained(made, groups):
        raise Unrecognized(f"its forward reads its attribute {name}, which a norm does not have")
    for computes in _computations(subject, groups):
        if _agrees(subject, computes, COMMON_BATCH, modes=(True, False)):
            return computes
    raise Unrecognized("its forward computes something else")


def _computations(subject: Subject, numbers_of_groups: Sequence[int]) -> Iterator[Computation]:
    forms = [FormSpec()]
    if len(subject.inputs) == 2:
        options = itertools.product(numbers_of_groups, ({"finish": "gate"}, {"combine": "gate"}), ACTIVATIONS)
        forms = [FormSpec(**place, groups=groups, activation=each) for groups, place, each in options]
    for form, norm, offset in itertools.product(forms, ("rms", "layer"), (0.0, 1.0)):
        yield Computation.of(norm, form._replace(weight_offset=offset))


def _agrees(
    subject: Subject,
    computes: Computation,
    batch: tuple[int, ...],
    magnitude: Magnitude = Magnitude(),  # noqa: B008  immutable
    modes: tuple[bool, ...] = (True,),
) -> bool:
    """Whether the module computes this and its gradients for such a batch of rows. modes: in training (True) or in
    evaluation (False)."""
    for cols, training in itertools.product(subject.cols, modes):
        made = subject.trial(batch, cols, training=training, magnitude=magnitude)
        try:
            y = made.run()
        except Unrecognized:
            return False
        groups = computes.form.groups
        if subject.unexplained(made, (groups, cols // groups)) or not _is_right(y, made, computes):
            return False
    return True


def _roundings(subject: Subject, computes: Computation) -> dict:
    """Formula.roundings."""
    rule, (narrow, wide) = _output_rule(subject), _rounds_x_hat(subject, computes)
    return {
        (x, weight): (narrow if weight in (None, *SIXTEEN_BITS) else wide, _output_dtype(rule, x, weight))
        for x, weight in itertools.product(FLOAT_DTYPES, (None, *FLOAT_DTYPES))
    }


def _output_dtype(rule: str, x: torch.dtype, weight: torch.dtype | None) -> torch.dtype:
    if rule == "x" or weight in (None, x):
        return x
    return weight if rule == "weight" and weight in SIXTEEN_BITS else torch.promote_types(x, weight)


def _output_rule(subject: Subject) -> str:
    """The dtype of y: "x" is x's; "promoted" is x's and weight's promoted; "weight" is weight's if 16-bit, else
    promoted."""
    cols = subject.cols[0]
    if getattr(subject.module, "weight", None) is None:
        found = {(subject.trial(COMMON_BATCH, cols, torch.bfloat16).run().dtype, torch.float32)}
    else:  # whatever the dtype of a gate is
        mixtures = (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)
        gates = (None, torch.bfloat16, torch.float32)[: 3 if len(subject.inputs) == 2 else 1]
        found = {
            tuple(subject.trial(COMMON_BATCH, cols, *mixture, gate).run().dtype for mixture in mixtures)
            for gate in gates
        }
    (dtypes,) = found if len(found) == 1 else (None,)
    if dtypes not in OUTPUT_DTYPES:
        raise Unrecognized("its forward returns a dtype that follows from neither x nor weight")
    return OUTPUT_DTYPES[dtypes]


def _takes_any_gate(subject: Subject) -> bool:
    """Formula.any_gate."""
    y = subject.trial(COMMON_BATCH, subject.cols[0], torch.bfloat16, torch.bfloat16, torch.float32).run()
    return y.dtype == torch.bfloat16


def _rounds_x_hat(subject: Subject, computes: Computation) -> tuple[bool, bool]:
    """Whether 16-bit x_hat is rounded before a 16-bit weight, and before a wider one: the rounding by which more
    elements of a bfloat16 trial are those of the module."""
    if getattr(subject.module, "weight", None) is None and len(subject.inputs) == 1:
        return False, False  # y is rounded in any case
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        made = subject.trial(COMMON_BATCH, subject.cols[0], torch.bfloat16, dtype)
        y, parameters = made.run(), (getattr(made.module, name, None) for name in PARAMETERS)
        given = made.inputs, *parameters, trials.EPS
        once, rounded = (
            autograd.of_form(computes.op, computes.arguments(*given, rounds, y.dtype)) for rounds in (False, True)
        )
        found.append(int((rounded != y).sum()) < int((once != y).sum()))
    return found[0], found[1]


def _is_right(y: object, made: Trial, computes: Computation) -> bool:
    """Whether y and its gradients of the inputs and the parameters are what is computed, in float64."""
    if not isinstance(y, Tensor) or y.shape != made.x.shape or y.dtype != torch.float32 or not y.requires_grad:
        return False
    parameters = {name: each for name, each in made.module._parameters.items() if each is not None}
    leaves = [*made.inputs, *parameters.values()]
    wide = [each.detach().double().requires_grad_() for each in leaves]
    inputs, named = wide[: len(made.inputs)], dict(zip(parameters, wide[len(made.inputs) :], strict=True))
    weight, bias, form, (x, *gate) = named.get("weight"), named.get("bias"), computes.form, inputs
    arguments = computes.arguments(inputs, weight, bias, trials.EPS)
    want, *_ = reference.formula(operands_of(computes.op, arguments, {}))
    act, slope = reference.ACTIVATIONS[form.activation](*gate) if gate else (1.0, None)
    h = (x * act if form.combine else x).unflatten(-1, (form.groups, -1))
    plain = ForwardOperands(computes.norm, h, h.shape[-1:], eps=trials.EPS)
    x_hat, _, rstd = (each if each is None else each.expand_as(h).flatten(-2) for each in reference.formula(plain))
    grad = 1 + x_hat.detach()  # such a gradient shows statistics that are not differentiated
    grads = torch.autograd.grad(y, leaves, grad.float(), allow_unused=True)
    wants = torch.autograd.grad(want, wide, grad, allow_unused=True)
    of_u = grad if weight is None else grad * (weight + form.weight_offset)
    sizes = [_largest(want), _largest(rstd * of_u)]
    if gate:
        of_h = _largest(rstd * of_u * act) if form.finish else sizes[1]
        sizes[1:] = (of_h, _largest(wants[1])) if form.finish else (of_h * _largest(act), of_h * _largest(x * slope))
    sizes += [w if w is None else w.abs().max() for w in wants[len(inputs) :]]
    return all(
        got is not None and right is not None and bool(((got - right).abs() <= TOLERANCE * size).all())
        for got, right, size in zip((y, *grads), (want, *wants), sizes, strict=True)
    )


def _largest(rows: Tensor) -> Tensor:
    """Of each row."""
    return rows.detach().abs().amax(-1, keepdim=True)


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
        for name in PARAMETERS:
            if operands.get(name) is not None:
                operands[name] = operands[name].to(operands["input"].dtype)
        result = function(*given.args, **given.kwargs)
        self.calls.append(StockCall(operands["input"], others, result))
        return result
