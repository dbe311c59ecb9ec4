"""The ops as a table: each op's operands and outputs, and the role of each. And a call's operands as one value.

Schemas, fakes, checks, the keys of calls, placements of DTensors and the tables of the integrations are
derived from OPS. Code below the ops knows no op: it gets the operands of a direction, forward or backward, which are
those of all its ops together, in the order of the table, with None for what an op lacks. Likewise the outputs: (y,
mean, rstd) of a forward, (dx, dweight, dbias) of a backward.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections import namedtuple
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from .forms import PLAIN, FormSpec

Outputs = tuple[Tensor | None, ...]
OWN_OUTPUTS = 3  # (y, mean, rstd) or (dx, dw, db)
FORWARD, BACKWARD = WAYS = {"forward": "fwd", "backward": "bwd"}
NORMS, DIRECTIONS = ("layer", "rms"), tuple(WAYS)


class Role(enum.Enum):
    """What an operand or an output is. Operands are checked in this order."""

    SHAPE = "the normalized dims"
    COUNT = "a number of columns"
    PARAMETER = "a tensor of shape normalized_shape"
    ROWS = "a tensor of x's shape"
    STATISTIC = "a tensor of one element per group of a row; [*batch, 1, ..., groups] as an output"
    PACKED_ROWS = "a tensor of x's shape that kernels read as if it were contiguous"
    INDEX = "an integer for each row of x, the row that it has of tables"
    MODULATION = "a tensor of normalized_shape behind batch dims of x, the first ones, each whole or 1"
    TABLE = "a tensor [table rows, *normalized_shape]; the index gives each row of x one of its rows"
    COLUMNS = "a tensor of x's batch dims and columns of its own"
    STRIDED = "a tensor of a shape and strides that all calls by a program have"
    CONSTANT = "the same, of numbers that have no gradient"
    EPS = "a number"
    INTEGER = "an integer"
    BOOL = "a flag"
    DTYPE = "a float dtype"
    MASK = "a flag per output"
    FORM = "the field of the op's form that has its name"
    FLAG = "whether this package wants something; no argument of an op"

    @property
    def is_tensor(self) -> bool:
        return self in TENSORS

    @property
    def is_by_name(self) -> bool:
        """Whether such an argument of an op is given by name alone."""
        return self in (Role.DTYPE, Role.FORM, Role.COUNT)


TENSORS = (
    *(Role.PARAMETER, Role.ROWS, Role.STATISTIC, Role.PACKED_ROWS, Role.MODULATION, Role.COLUMNS),
    *(Role.STRIDED, Role.CONSTANT, Role.INDEX, Role.TABLE),
)


class Slot(NamedTuple):
    """An operand."""

    name: str
    role: Role
    optional: bool = False  # whether it may be None, which then is its default
    default: Any = None
    is_read: bool = True  # whether an output's values depend on its values. If not, only a tensor's dtype matters
    gradient: str | None = None  # of a forward: the backward's output or operand that is its gradient, in its dtype
    needs: str | None = None  # another operand, without which it means nothing
    operand: str | None = None  # of a forward: the backward's operand that it is, if that has another name
    argument: str | None = None  # what the op calls it, if not so; a list of tensors, if it calls several the same

    @property
    def has_default(self) -> bool:
        return self.optional or self.default is not None


class Output(NamedTuple):
    """An output, of the shape that its role says."""

    name: str
    role: Role
    like: str = "x"  # the operand that it has the dtype of, and without which it is None
    dtype: str | None = None  # the operand that may give another dtype
    gradient: str | None = None  # the backward's operand that takes its gradient
    promoted: tuple[str, ...] = ()  # the operands whose dtypes are promoted with that of `like`
    promoted_if_rounded: tuple[str, ...] = ()  # these, too, and outputs, if the form rounds between its steps
    operand: str | None = None  # the backward's operand that it is, if that has another name
    is_of_dx: bool = False  # of a backward: whether it is made of dx, with what is added to dx
    is_dx: bool = False  # whether it is dx, but for its dtype
    rows: str | None = None  # of a statistic: the output that it is of, if not the op's own rows


class Op(NamedTuple):
    """An op. inputs are in the order of the schema, those given by name alone last. aten names the op of ATen with the
    same arguments. A suffix tells ops of one norm and direction apart; `backward` is that of a forward's backward, its
    own by default. Kernels do not compute an op without a form. An op of lists returns a list of the wanted outputs."""

    norm: str
    direction: str
    inputs: tuple[Slot, ...]
    outputs: tuple[Output, ...]
    aten: str | None = None
    suffix: str = ""
    form: Any = PLAIN  # a FormSpec, or another value of which operands set fields
    backward: str | None = None
    of_lists: bool = False

    @property
    def name(self) -> str:
        return f"{self.norm}_norm_{WAYS[self.direction]}{self.suffix}"

    @property
    def arguments(self) -> list[Slot]:
        return [slot for slot in self.inputs if slot.role is not Role.FLAG]

    @property
    def lists(self) -> list[list[Slot]]:
        """The arguments, each with the slots that it gives."""
        by_name = itertools.groupby(self.arguments, lambda slot: slot.argument or slot.name)
        return [list(slots) for _, slots in by_name]

    def slot(self, name: str | None) -> Slot | None:
        return next((slot for slot in self.inputs if slot.name == name), None)

    def default(self, slot: Slot) -> Any:
        """As schemas have it: a flag for each output."""
        return [slot.default] * len(self.outputs) if slot.role is Role.MASK else slot.default


X, SHAPE = Slot("x", Role.ROWS), Slot("normalized_shape", Role.SHAPE)
WEIGHT, BIAS = Slot("weight", Role.PARAMETER, optional=True), Slot("bias", Role.PARAMETER, optional=True)
EPS, DEFAULT_EPS = Slot("eps", Role.EPS, default=1e-5), Slot("eps", Role.EPS, optional=True)
WANTS_STATISTICS = Slot("wants_statistics", Role.FLAG, default=True)  # for a backward
GRAD_OUT, MEAN, RSTD = Slot("grad_out", Role.ROWS), Slot("mean", Role.STATISTIC), Slot("rstd", Role.STATISTIC)
STATISTICS = {"layer": (MEAN, RSTD), "rms": (RSTD,)}  # that a backward reads
BIAS_DTYPE = BIAS._replace(is_read=False)
MASK = Slot("output_mask", Role.MASK, default=True)
RESIDUAL_GRAD = Slot("residual_grad", Role.PACKED_ROWS, optional=True)
DX_DTYPE, Y_DTYPE, RESIDUAL_DTYPE = (
    Slot(f"{name}_dtype", Role.DTYPE, optional=True) for name in ("dx", "y", "residual")
)
WEIGHT_OFFSET, ROUNDS_X_HAT, ROUNDS_SUM = (
    Slot(name, Role.FORM, default=getattr(PLAIN, name)) for name in ("weight_offset", "rounds_x_hat", "rounds_sum")
)
Y_ = Output("y", Role.ROWS, gradient="grad_out")
MEAN_, RSTD_ = Output("mean", Role.STATISTIC), Output("rstd", Role.STATISTIC)
DX_ = Output("dx", Role.ROWS, dtype="dx_dtype")
DWEIGHT_, DBIAS_ = (Output(f"d{name}", Role.PARAMETER, like=name) for name in ("weight", "bias"))

LAYER_BWD = GRAD_OUT, X, SHAPE, MEAN, RSTD, WEIGHT, BIAS_DTYPE
RMS_BWD = GRAD_OUT, X, SHAPE, RSTD, WEIGHT
RESIDUAL = RESIDUAL_GRAD, MASK, DX_DTYPE, WEIGHT_OFFSET
PLAIN_OPS = (
    Op("layer", FORWARD, (X, SHAPE, WEIGHT, BIAS, EPS, WANTS_STATISTICS), (Y_, MEAN_, RSTD_), "native_layer_norm"),
    Op("layer", BACKWARD, (*LAYER_BWD, MASK), (DX_, DWEIGHT_, DBIAS_), "native_layer_norm_backward"),
    Op("rms", FORWARD, (X, SHAPE, WEIGHT, DEFAULT_EPS, WANTS_STATISTICS), (Y_, RSTD_), "_fused_rms_norm"),
    Op("rms", BACKWARD, (*RMS_BWD, MASK), (DX_, DWEIGHT_), "_fused_rms_norm_backward"),
    Op("layer", BACKWARD, (*LAYER_BWD, *RESIDUAL), (DX_, DWEIGHT_, DBIAS_), suffix="_residual"),
    Op("rms", BACKWARD, (*RMS_BWD, BIAS_DTYPE, *RESIDUAL), (DX_, DWEIGHT_, DBIAS_), suffix="_residual"),
)

# The backward of a sum with a wider residual. Its x is the sum, dx is the residual's gradient, and dsummand is the same
# in the dtype of the other summand.
DSUMMAND_ = Output("dsummand", Role.ROWS, dtype="dsummand_dtype", is_dx=True)
DSUMMAND_DTYPE = DX_DTYPE._replace(name="dsummand_dtype")
SUMMANDS_OPS = tuple(
    op._replace(inputs=(*op.inputs, DSUMMAND_DTYPE), outputs=(*op.outputs, DSUMMAND_), suffix="_of_wide_sum",
                form=FormSpec(combine="summands"))
    for op in PLAIN_OPS if op.suffix
)  # fmt: skip

# Modulated norms. Their backward is of h, which a gated branch was added to, and computes u again.
SCALE, GATE = (Slot(name, Role.MODULATION, gradient=f"d{name}") for name in ("scale", "gate"))
SHIFT = Slot("shift", Role.MODULATION, optional=True, gradient="dshift")
BRANCH = X._replace(gradient="dbranch", operand="branch")
MODULATE, ROUNDS_STEPS = Slot("modulate", Role.FORM, default="one_plus"), Slot("rounds_steps", Role.FORM, default=False)
DBRANCH_ = Output("dbranch", Role.ROWS, like="branch", is_of_dx=True)
DSCALE_, DSHIFT_ = (Output(f"d{name}", Role.MODULATION, like=name) for name in ("scale", "shift"))
DGATE_ = Output("dgate", Role.MODULATION, like="gate", is_of_dx=True)
MODULATED = (
    SCALE, WEIGHT, BIAS, SHIFT._replace(is_read=False), X._replace(name="branch", optional=True, needs="gate"),
    GATE._replace(optional=True, needs="branch"), *RESIDUAL, MODULATE,
)  # fmt: skip
MODULATED_GRADIENTS = DX_, DWEIGHT_, DBIAS_, DSCALE_, DSHIFT_, DBRANCH_, DGATE_
ONE_PLUS = FormSpec(modulate="one_plus")
MODULATED_OPS = tuple(
    Op(norm, BACKWARD, (GRAD_OUT, X, SHAPE, *statistics, *MODULATED), MODULATED_GRADIENTS, suffix="_modulated",
       form=ONE_PLUS)
    for norm, statistics in STATISTICS.items()
)  # fmt: skip

# Norms with a gate of x's shape. Their backwards make the row again from x and the gate.
ROW_GATE, ROW_DGATE_ = Slot("gate", Role.ROWS, gradient="dgate"), Output("dgate", Role.ROWS, like="gate")
GATE_SETTINGS = tuple(Slot(name, Role.FORM, default=getattr(PLAIN, name)) for name in ("activation", "groups"))
OF_GATED, TIMES_GATE = FormSpec(combine="gate"), FormSpec(finish="gate")
GATED_OPS = tuple(
    Op(norm, BACKWARD, (GRAD_OUT, X, SHAPE, ROW_GATE, *statistics, WEIGHT, bias, MASK, WEIGHT_OFFSET, *GATE_SETTINGS),
       (DX_, DWEIGHT_, DBIAS_, ROW_DGATE_), suffix=suffix, form=form)
    for norm, statistics in STATISTICS.items()
    for form, suffix, bias in ((OF_GATED, "_of_gated", BIAS_DTYPE), (TIMES_GATE, "_times_gate", BIAS))
)  # fmt: skip

# The same where x and the gate are columns of one tensor of `width` columns, from x_at and gate_at on: dx is the
# gradient of that tensor. `rest` is that of its other columns side by side, or None for zeros.
REST = Slot("rest", Role.COLUMNS, optional=True)
PLACES = tuple(Slot(name, Role.COUNT) for name in ("width", "x_at", "gate_at"))
PACKED_OPS = tuple(
    op._replace(
        inputs=(*op.inputs[: op.inputs.index(MASK)], REST, *op.inputs[op.inputs.index(MASK) :], *PLACES),
        outputs=(DX_._replace(role=Role.COLUMNS, dtype=None), DWEIGHT_, DBIAS_), suffix=f"{op.suffix}_packed",
    )
    for op in GATED_OPS
)  # fmt: skip

# The forms. The backward of a sum's is of the sum.
FORM_SETTINGS = WANTS_STATISTICS, WEIGHT_OFFSET, ROUNDS_X_HAT, Y_DTYPE
SUM_SETTINGS = ROUNDS_SUM, RESIDUAL_DTYPE
SUMMAND = Slot("residual", Role.ROWS, optional=True, gradient="dx")
ADDED_LAST = Slot("residual", Role.ROWS, gradient="grad_out")
FORM_Y_ = Y_._replace(dtype="y_dtype", promoted_if_rounded=("weight", "bias"))
NEW_RESIDUAL_ = Output(
    "new_residual", Role.ROWS, dtype="residual_dtype", gradient="residual_grad", promoted=("residual",), operand="x"
)
LAST_Y_ = FORM_Y_._replace(promoted=("residual",))
MODULATED_Y_, OF_SUM_Y_, MODULATED_LAST_Y_ = (
    y._replace(promoted_if_rounded=("weight", "bias", "scale", *more))
    for y, more in ((FORM_Y_, ("shift",)), (FORM_Y_, ("shift", "new_residual")), (LAST_Y_, ()))
)
STREAM = SUMMAND._replace(optional=False)
FORMS = (  # (form, suffix, x and operands behind normalized_shape, settings, y, outputs, suffix of the backward)
    (PLAIN, "_affine", (X,), (), FORM_Y_, (), "_residual"),
    (FormSpec(combine="add"), "_of_sum", (X, SUMMAND), SUM_SETTINGS, FORM_Y_, (NEW_RESIDUAL_,), "_residual"),
    (FormSpec(combine="add"), "_of_wide_sum", (X._replace(gradient="dsummand"), STREAM), SUM_SETTINGS, FORM_Y_,
     (NEW_RESIDUAL_,), "_of_wide_sum"),
    (FormSpec(finish="add"), "_plus_residual", (X, ADDED_LAST), (), LAST_Y_, (), "_residual"),
    (ONE_PLUS, "_modulated", (X, SCALE, SHIFT), (ROUNDS_STEPS,), MODULATED_Y_, (), "_modulated"),
    (ONE_PLUS._replace(combine="add"), "_of_sum_modulated", (X, STREAM, SCALE, SHIFT), (*SUM_SETTINGS, ROUNDS_STEPS),
     OF_SUM_Y_, (NEW_RESIDUAL_,), "_modulated"),
    (ONE_PLUS._replace(combine="add_gated"), "_of_gated_sum_modulated", (BRANCH, STREAM, GATE, SCALE, SHIFT),
     (*SUM_SETTINGS, ROUNDS_STEPS), OF_SUM_Y_, (NEW_RESIDUAL_,), "_modulated"),
    (FormSpec(modulate="identity", finish="add"), "_modulated_plus_residual", (X, ADDED_LAST, SCALE),
     (MODULATE._replace(default="identity"), ROUNDS_STEPS), MODULATED_LAST_Y_, (), "_modulated"),
    (OF_GATED, "_of_gated", (X, ROW_GATE), GATE_SETTINGS, FORM_Y_, (), "_of_gated"),
    (TIMES_GATE, "_times_gate", (X, ROW_GATE), GATE_SETTINGS, Y_._replace(dtype="y_dtype"), (), "_times_gate"),
)  # fmt: skip
FORM_OPS = tuple(
    Op(
        norm, FORWARD, (x, SHAPE, *operands, WEIGHT, BIAS, eps, *FORM_SETTINGS, *settings), (y, *statistics, *outputs),
        suffix=suffix, form=form, backward=backward,
    )
    for norm, eps, statistics in (("layer", EPS, (MEAN_, RSTD_)), ("rms", DEFAULT_EPS, (RSTD_,)))
    for form, suffix, (x, *operands), settings, y, outputs, backward in FORMS
)  # fmt: skip

# A norm behind a layer and the next one: y is their sum, h, and next_y the norm of it. They are two ops' outputs, and
# autograd records the second as the norm of a sum of h and nothing, whose backward adds the gradient of h.
FIRST, FOLLOWING, RECORDED = "_plus_residual", "_affine", "_of_sum"
NEXT = {name: f"next_{name}" for name in ("weight", "bias", "y", "mean", "rstd")}
NEXT_WEIGHT, NEXT_BIAS = (each._replace(name=NEXT[each.name]) for each in (WEIGHT, BIAS))
NEXT_Y_ = LAST_Y_._replace(name=NEXT["y"], gradient=None)
NEXT_MEAN_, NEXT_RSTD_ = (each._replace(name=NEXT[each.name], rows="y") for each in (MEAN_, RSTD_))
NEXT_Y_ = NEXT_Y_._replace(promoted_if_rounded=("weight", "bias", "next_weight", "next_bias"))
AGAIN_OPS = tuple(
    Op(
        norm, FORWARD, (X, SHAPE, ADDED_LAST, NEXT_WEIGHT, NEXT_BIAS, WEIGHT, BIAS, eps, *FORM_SETTINGS),
        (LAST_Y_, *statistics, NEXT_Y_, *next_statistics), suffix="_plus_residual_norm",
        form=FormSpec(finish="add", again=True),
    )
    for norm, eps, statistics, next_statistics in (
        ("layer", EPS, (MEAN_, RSTD_), (NEXT_MEAN_, NEXT_RSTD_)), ("rms", DEFAULT_EPS, (RSTD_,), (NEXT_RSTD_,)),
    )
)  # fmt: skip

# Modulated norms whose modulations are tables.
INDEX, BY_INDEX = Slot("row_index", Role.INDEX), "_by_index"


def _by_index(op: Op) -> Op:
    at = op.inputs.index(SCALE)
    suffix, backward = op.suffix + BY_INDEX, op.backward and op.backward + BY_INDEX
    inputs, outputs = (
        tuple(each._replace(role=Role.TABLE) if each.role is Role.MODULATION else each for each in some)
        for some in (op.inputs, op.outputs)
    )
    inputs = *inputs[:at], INDEX, *inputs[at:]
    return op._replace(inputs=inputs, outputs=outputs, suffix=suffix, backward=backward)


INDEXED_OPS = tuple(_by_index(op) for op in (*MODULATED_OPS, *FORM_OPS) if op.suffix.endswith("_modulated"))
OPS_OF_FORMS = *FORM_OPS, *INDEXED_OPS, *AGAIN_OPS
FORM_NAMES = tuple(op.suffix[1:] for op in OPS_OF_FORMS if op.direction == FORWARD and op.norm == "rms")
BACKWARDS_OF_FORMS = *SUMMANDS_OPS, *MODULATED_OPS, *GATED_OPS, *PACKED_OPS
OPS: dict[str, Op] = {op.name: op for op in (*PLAIN_OPS, *BACKWARDS_OF_FORMS, *OPS_OF_FORMS)}


def _together(parts: Sequence[tuple], last: tuple) -> tuple:
    """The slots or outputs of several ops, by name, with those of the `last` op as it has them. One of the others is
    optional if an op lacks it."""
    found: dict[str, Any] = {}
    for each in (each for part in parts for each in part):
        found.setdefault(each.name, each)
    in_all = set.intersection(*({each.name for each in part} for part in parts))
    for name, each in found.items():
        if isinstance(each, Slot) and name not in in_all:
            found[name] = each._replace(optional=each.optional or not each.has_default)
    return tuple((found | {each.name: each for each in last}).values())


# What an operand is to ops that lack it.
ABSENT = {"normalized_shape": (), "groups": 1, "width": 0, "rounds_steps": False} | dict.fromkeys(
    ("row_index", "gate", "shift", "branch", "grouped")
)


def operands_type(name: str, ops: Sequence[Op], last: Op | None = None) -> Any:
    """The type of the operands of some ops of one direction, or of a `last` op that has more: a named tuple of the
    norm, their slots and the suffix.

    slots, outputs  those of the ops together
    tensor_names    of the operands that are tensors, in their order
    op              the op's name
    form            the op's form, with what the operands say of it
    tensors         the values of these
    has_statistics  whether the ops return or take statistics
    rows            the tensors of x's shape that are read in place
    differentiable  the tensors that an output's values depend on
    """
    direction, slots = ops[0].direction, _together([op.inputs for op in ops], last.inputs if last else ())
    defaults = [None, *(slot.default if slot.role in (Role.FLAG, Role.FORM) else None for slot in slots), ""]
    made: Any = namedtuple(name, ("norm", *(slot.name for slot in slots), "suffix"), defaults=defaults)  # noqa: PYI024
    middle = f"_norm_{WAYS[direction]}"
    tensors = tuple(at for at, slot in enumerate(slots, 1) if slot.role.is_tensor)
    read = tuple(at for at in tensors if slots[at - 1].is_read)
    rows = tuple(at for at in tensors if slots[at - 1].role is Role.ROWS)
    fields = tuple(at for at, slot in enumerate(slots, 1) if slot.role is Role.FORM)
    made.__module__, made.slots, made.direction = __name__, slots, direction
    for field, value in ABSENT.items():
        if field not in made._fields:
            setattr(made, field, value)
    made.has_statistics = any(slot.role in (Role.STATISTIC, Role.FLAG) for slot in slots)
    made.outputs = _together([op.outputs for op in ops], last.outputs if last else ())
    made.op = property(lambda self: self.norm + middle + self.suffix)
    made.form = property(lambda self: _form(self.op, names_of_form, tuple([self[at] for at in fields])))
    names_of_form = tuple(made._fields[at] for at in fields)
    made.tensor_names = tuple(made._fields[at] for at in tensors)
    made.tensors = property(itemgetter(*tensors))
    made.rows = property(lambda self: tuple([self[at] for at in rows if self[at] is not None]))
    made.differentiable = property(itemgetter(*read))
    return made


@functools.lru_cache(maxsize=4096)
def _form(op: str, names: tuple[str, ...], values: tuple) -> Any:
    form = TRANSLATIONS[op].op.form
    return form and form._replace(**dict(zip(names, values, strict=True)))


def _plain(direction: str) -> list[Op]:
    return [op for op in PLAIN_OPS if op.direction == direction]


ForwardOperands = operands_type("ForwardOperands", _plain(FORWARD))
BackwardOperands = operands_type("BackwardOperands", _plain(BACKWARD))
Operands = Any  # a value of one of these types, or of one that `add` made


class Translation(NamedTuple):
    """Between an op's arguments and outputs and those of its operands' type, in terms that Dynamo can trace."""

    op: Op
    type: Any
    template: dict[str, Any]  # the operands, in their order, with the defaults of the schema
    names: tuple[str, ...]  # of the arguments
    lists: tuple[tuple[str, ...], ...]  # the operands that each argument is
    by_position: int  # arguments; the others are given by name
    sources: tuple[int, ...]  # which of the template's values or, behind these, of the arguments is each operand
    mask: int | None  # which operand is the output_mask
    outputs: tuple[int | None, ...]  # which output of the op is each output of the type
    absent: tuple[int, ...]  # the outputs that the op lacks
    backward: str  # the op of the same norm and suffix


TRANSLATIONS: dict[str, Translation] = {}


def add(op: Op, table: dict[str, Op] = OPS) -> None:
    """Add an op to the table, or to that of other ops. Its operands have a type of their own if the others of its
    direction lack one of them, and if it is of lists."""
    made = ForwardOperands if op.direction == FORWARD else BackwardOperands
    if op.of_lists:
        made = operands_type(f"Operands_of_{op.name}", [op])
    elif not ({each.name for each in op.inputs} <= set(made._fields) and set(op.outputs) <= set(made.outputs)):
        made = operands_type(f"Operands_of_{op.name}", _plain(op.direction), op)
    table[op.name] = op
    names, fields = [slot.name for slot in op.arguments], made._fields
    outputs = [next((at for at, out in enumerate(op.outputs) if out.name == each.name), None) for each in made.outputs]
    TRANSLATIONS[op.name] = Translation(
        op,
        made,
        made(op.norm, suffix=op.suffix, **{slot.name: op.default(slot) for slot in op.inputs})._asdict(),
        tuple(slots[0].argument or slots[0].name for slots in op.lists),
        tuple(tuple(slot.name for slot in slots) for slots in op.lists),
        sum(not slots[0].role.is_by_name for slots in op.lists),
        tuple(len(fields) + names.index(name) if name in names else at for at, name in enumerate(fields)),
        fields.index("output_mask") if op.slot("output_mask") else None,
        tuple(outputs),
        tuple(at for at, source in enumerate(outputs) if source is None),
        op._replace(direction=BACKWARD, suffix=op.suffix if op.backward is None else op.backward).name,
    )


for _op in tuple(OPS.values()):
    add(_op)


def operands_of(name: str, arguments: Sequence, named: dict[str, Any]) -> Operands:
    """The operands that are an op's arguments, with the defaults of its schema. A mask of a wrong length stays one."""
    by = TRANSLATIONS[name]
    if named or len(arguments) < len(by.names):
        given = by.template | dict(zip(by.names, arguments)) | named  # noqa: B905  the rest are defaults or named
        arguments = [given[each] for each in by.names]
    return operands_by_position(name, _apart(by, arguments) if by.op.of_lists else arguments)


def operands_by_position(name: str, arguments: Sequence) -> Operands:
    """The operands that are all arguments of an op, those of lists one by one."""
    by = TRANSLATIONS[name]
    full = (*by.template.values(), *arguments)
    values = [full[at] for at in by.sources]
    if by.mask and by.absent:
        flags = list(values[by.mask])
        for at in by.absent:
            flags.insert(at, False)
        values[by.mask] = tuple(flags)
    return by.type(*values)


def _apart(by: Translation, arguments: Sequence) -> list:
    """The arguments with the tensors of a list one by one. Raises RuntimeError for a list of another length."""
    found: list[Any] = []
    for name, operands, given in zip(by.names, by.lists, arguments, strict=True):
        if len(operands) == 1:
            found.append(given)
        elif len(operands) == len(given):
            found += given
        else:
            raise RuntimeError(f"{by.op.name}: {name} must hold {len(operands)} tensors, got {len(given)}")
    return found


def ops_in_two(norm: str) -> list[str]:
    """The forwards that make up an op that normalizes again: of the first norm, of the next one, and what autograd
    records of that."""
    return [f"{norm}_norm_{WAYS[FORWARD]}{suffix}" for suffix in (FIRST, FOLLOWING, RECORDED)]


def in_two(operands: Operands, run: Callable[[Operands], Outputs]) -> Outputs:
    """The outputs of an op that normalizes again, by that of the first norm and that of the next one."""
    first, following, _ = ops_in_two(operands.norm)
    h, *statistics = run(_with_names_of(first, operands))
    next_parameters = {each: getattr(operands, NEXT[each]) for each in ("weight", "bias")}
    y, *of_h = run(_with_names_of(following, operands, x=h, **next_parameters))
    return h, *statistics, y, *of_h[OWN_OUTPUTS + 1 - len(operands.outputs) :]


def _with_names_of(name: str, operands: Operands, **changed: Any) -> Operands:
    """The operands of another op that have the same names."""
    given = {each: getattr(operands, each) for each in TRANSLATIONS[name].names if hasattr(operands, each)}
    return operands_of(name, (), given | changed)._replace(wants_statistics=operands.wants_statistics)


class Derivative(NamedTuple):
    """What a forward's backward takes from it, and what it gives to each of the forward's tensors, by names of the
    backward's operands and outputs."""

    saved: tuple[str, ...]  # what is kept of the forward
    sources: tuple[int, ...]  # which of the forward's tensors or, behind these, of its outputs after y each is
    gradients: tuple[str, ...]  # of the forward's tensors: the backward's outputs, or grad_out
    mask: tuple[tuple[int, ...], ...]  # for each output of the backward, the tensors that want it
    statistics: int  # the outputs between the first and others, whose gradients no operand takes
    grads: tuple[str | None, ...]  # the operands that take the gradients of the outputs behind the statistics
    passed: tuple[int, ...]  # which of these outputs are the backward's x, so that their gradients are added to dx
    of_dx: tuple[int, ...]  # the outputs of the backward that are made of dx
    copies: tuple[str, ...]  # and the names of those that are dx, in another dtype
    settings: tuple[str, ...]  # the form's operands that the backward has, too
    # The operands that give the dtype of a gradient, and the forward's tensors whose gradient it is. It has the widest
    # dtype of these, and autograd casts it to those of the others.
    dtypes: tuple[tuple[str, tuple[int, ...]], ...]


@functools.cache
def derivative_of(forward: str) -> Derivative:
    of, (op, backward, *_) = TRANSLATIONS[forward].type, TRANSLATIONS[TRANSLATIONS[forward].backward]
    slots = {slot.name: slot for slot in of.slots}
    names = [slots[name].operand or name for name in of.tensor_names]
    names += [output.operand or output.name for output in of.outputs[1:]]
    saved = {name: at for at, name in enumerate(names) if name in backward._fields}
    outputs = [output.name for output in backward.outputs]
    own = dict(zip(of.tensor_names, outputs))  # noqa: B905  tables have no gradient
    gradients = [slots[name].gradient or own.get(name, outputs[0]) for name in of.tensor_names]
    mask = [tuple(at for at, gradient in enumerate(gradients) if gradient == name) for name in outputs]
    statistics = [output for output in of.outputs if output.role is Role.STATISTIC]
    behind = of.outputs[1 + len(statistics) :]
    return Derivative(
        tuple(saved),
        tuple(saved.values()),
        tuple(gradients),
        tuple(mask),
        len(statistics),
        tuple(output.gradient for output in behind),
        tuple(at for at, output in enumerate(behind) if output.operand == "x"),
        tuple(at for at, output in enumerate(backward.outputs) if output.is_of_dx),
        tuple(output.name for output in backward.outputs if output.is_dx),
        tuple(slot.name for slot in of.slots if slot.role in (Role.FORM, Role.EPS) and slot.name in backward._fields),
        tuple((each.dtype, mask[outputs.index(each.name)]) for each in op.outputs if op.slot(each.dtype)),
    )


def backward_of(forward: str, **given: Any) -> Operands:
    """The operands of the backward of a forward op: those given that it has, and defaults of the schema."""
    by = TRANSLATIONS[TRANSLATIONS[forward].backward]
    return by.type(*[given.get(name, default) for name, default in by.template.items()])


def op_arguments(operands: Operands) -> tuple[tuple, dict[str, Any]]:
    """(arguments, named arguments) of the operands' op."""
    by = TRANSLATIONS[operands.op]
    if by.op.of_lists:
        lists = [[getattr(operands, name) for name in names] for names in by.lists]
        values = [given if len(given) > 1 else given[0] for given in lists]
    else:
        values = [op_mask(operands) if name == "output_mask" else getattr(operands, name) for name in by.names]
    return tuple(values[: by.by_position]), dict(zip(by.names[by.by_position :], values[by.by_position :], strict=True))


def op_mask(operands: Operands) -> tuple[bool, ...]:
    """The output_mask as the op has it."""
    flags = list(operands.output_mask)
    for at in reversed(TRANSLATIONS[operands.op].absent):
        del flags[min(at, len(flags) - 1)]
    return tuple(flags)


def wanted_outputs(operands: Operands) -> list[bool]:
    """Whether each output of the operands' type will not be None."""
    by = TRANSLATIONS[operands.op]
    mask = getattr(operands, "output_mask", [True] * len(by.outputs))
    return [
        source is not None and bool(wanted) and getattr(operands, output.like) is not None
        for output, source, wanted in zip(by.type.outputs, by.outputs, mask, strict=True)
    ]


def op_outputs(name: str, outputs: Outputs) -> Any:
    """The outputs that the op has."""
    if TRANSLATIONS[name].op.of_lists:
        return [each for each in outputs if each is not None]
    absent = TRANSLATIONS[name].absent
    return tuple([each for at, each in enumerate(outputs) if at not in absent] if absent else outputs)


def as_op(name: str, run: Callable[[Operands], Outputs | None]) -> Callable[..., tuple | None]:
    """A function with the op's arguments and outputs that runs `run` on its operands. None stays None."""

    def op(*arguments, **named):
        outputs = run(operands_of(name, arguments, named))
        return outputs if outputs is None else op_outputs(name, outputs)

    op.__name__ = name
    return op


def call_op(op: Callable[..., tuple], operands: Operands) -> Outputs:
    """All outputs by the operands' op, or by a function with the op's arguments and outputs."""
    arguments, named = op_arguments(operands)
    outputs = op(*arguments, **named)
    if TRANSLATIONS[operands.op].op.of_lists:
        left = iter(outputs)
        return tuple([next(left) if wanted else None for wanted in wanted_outputs(operands)])
    return tuple([at if at is None else outputs[at] for at in TRANSLATIONS[operands.op].outputs])
