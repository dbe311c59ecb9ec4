"""Checks a call, flattens it to rows x cols and describes it as a value that the planner can hash.

The operands of a norm are checked here and nowhere else; all code behind this module trusts them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .forms import CHOICES, PLAIN
from .operands import (
    FORWARD,
    OPS,
    OWN_OUTPUTS,
    BackwardOperands,
    ForwardOperands,
    Operands,
    Output,
    Role,
    Slot,
    op_mask,
    wanted_outputs,
)
from .planner.norm_problem import ALIGNMENT, FLOAT_DTYPES, NormProblem, accumulation_dtype
from .settings import invariance


class RowView(NamedTuple):
    """A tensor as rows x cols, read in place. Row r starts at element

        (r // inner_rows) * outer_stride + (r % inner_rows) * inner_stride

    and its cols elements are adjacent. Strides are in elements. inner_rows is 1 if one stride is enough.
    """

    tensor: Tensor
    inner_rows: int
    outer_stride: int
    inner_stride: int


def row_view(tensor: Tensor, batch_ndim: int) -> RowView | None:
    """View `tensor` as rows (its first `batch_ndim` dims) x cols (the others). None if only a copy would do."""
    shape, strides = tensor.shape, tensor.stride()
    cols = math.prod(shape[batch_ndim:])
    if tensor.is_contiguous():
        return RowView(tensor, 1, cols, 0)
    expected = 1
    for size, stride in zip(reversed(shape[batch_ndim:]), reversed(strides[batch_ndim:]), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    levels: list[tuple[int, int]] = []  # (size, stride), innermost first; dims that one stride covers are merged
    for size, stride in zip(reversed(shape[:batch_ndim]), reversed(strides[:batch_ndim]), strict=True):
        if size == 1:
            continue
        if levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        else:
            levels.append((size, stride))
    if len(levels) > 2:
        return None
    if len(levels) == 2:
        return RowView(tensor, levels[0][0], levels[1][1], levels[0][1])
    return RowView(tensor, 1, levels[0][1] if levels else cols, 0)


def is_tma_aligned(view: RowView, cols: int) -> bool:
    """Whether each row starts and ends at a multiple of 16 bytes, as a TMA descriptor demands."""
    row_units = cols | view.outer_stride | view.inner_stride
    return (view.tensor.data_ptr() | row_units * view.tensor.element_size()) % ALIGNMENT == 0


def spread(modulation: Tensor, ndim: int, normalized_ndim: int) -> Tensor:
    """A view with `ndim` dims: 1 for each batch dim that a modulation does not name. If it has more dims, the last ones
    of its batch dims are 1 and left out."""
    shape, lead, batch_ndim = modulation.shape, modulation.dim() - normalized_ndim, ndim - normalized_ndim
    kept = shape[: min(lead, batch_ndim)]
    return modulation.reshape(*kept, *(1,) * (batch_ndim - len(kept)), *shape[lead:])


class Sharing(NamedTuple):
    """Which rows of x share a row of a modulation."""

    rows: int = 1  # as many that are next to each other; 0 for all rows, -1 if they are not next to each other
    whole: tuple[bool, ...] = ()  # of the modulation's batch dims: whether it is x's, and not 1
    dims: int = 0  # the first batch dims of x, of which each place has a row, if there are `rows`

    @property
    def is_by_sample(self) -> bool:
        return self.rows > 1 or self.rows == 0


def sharing(modulation: Tensor, batch_shape: Sequence[int], normalized_ndim: int) -> Sharing:
    sizes = modulation.shape[: modulation.dim() - normalized_ndim]
    whole, dims = tuple([size != 1 for size in sizes]), len(sizes)
    while dims and sizes[dims - 1] == 1:
        dims -= 1
    if not dims:
        return Sharing(0, whole)
    rows = math.prod(batch_shape[dims:]) if sizes[:dims] == batch_shape[:dims] else -1
    return Sharing(rows, whole, dims)


class Added(NamedTuple):
    """An operand or an output that an op has beside those of the package's ops."""

    name: str
    role: Role
    value: Any  # a RowView, a tensor or a number; of an output the dtype. None for an absent one
    sharing: Sharing = Sharing()  # of a modulation that is read for each row, or one gradient of which each row has

    @property
    def tensor(self) -> Tensor | None:
        return self.value.tensor if isinstance(self.value, RowView) else self.value

    @property
    def is_of_samples(self) -> bool:
        """Whether it has a row for each sample of rows of x."""
        return self.sharing.is_by_sample

    @property
    def is_of_rows(self) -> bool:
        """Whether it has a row for each of x."""
        return self.role in (Role.ROWS, Role.MODULATION) and not self.is_of_samples

    def with_tensor(self, tensor: Any) -> Added:
        return self._replace(value=self.value._replace(tensor=tensor) if isinstance(self.value, RowView) else tensor)


# Calls are NamedTuples because one is built per op call, and a frozen dataclass takes over three times as long.
class ForwardCall(NamedTuple):
    """A checked forward call. weight and bias are contiguous. x is read in place if its strides allow it."""

    problem: NormProblem
    rows: int
    x: RowView
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    shape: torch.Size  # of y
    stats_shape: tuple[int, ...]  # of mean and rstd
    normalized_shape: tuple[int, ...]  # of weight and bias
    wants_statistics: bool = True  # whether to write mean and rstd, for a backward
    added: tuple[Added, ...] = ()
    added_outputs: tuple[Added, ...] = ()
    block_rows: int = 0  # a forward has no sums over rows

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the operands' tensors."""
        own = self.x.tensor, self.weight, self.bias
        return (*own, *[each.tensor for each in self.added if each.role.is_tensor]) if self.added else own

    @property
    def rows_read(self) -> tuple[RowView, ...]:
        return _views((self.x,), self.added)


class BackwardCall(NamedTuple):
    """A checked backward call. mean (None for RMSNorm) and rstd are 1-D of length rows (times groups), any stride, any
    float dtype."""

    problem: NormProblem
    rows: int
    grad_out: RowView
    x: RowView
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None  # contiguous; None where its values are not read
    residual_grad: Tensor | None  # contiguous
    dx_dtype: torch.dtype
    shape: torch.Size  # of dx
    normalized_shape: tuple[int, ...]  # of dw and db
    added: tuple[Added, ...] = ()
    added_outputs: tuple[Added, ...] = ()
    sample_rows: int = 0  # rows that share a row of the modulations that are by sample; 0: all rows are one sample
    width: int = 0  # columns of dx, if it is the gradient of a tensor of which x and the gate are columns
    block_rows: int = 0  # rows of a block, if the call runs block after block and then adds up their sums in order

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the operands' tensors."""
        own = self.grad_out.tensor, self.x.tensor, self.mean, self.rstd, self.weight, self.bias, self.residual_grad
        return (*own, *[each.tensor for each in self.added if each.role.is_tensor]) if self.added else own

    @property
    def rows_read(self) -> tuple[RowView, ...]:
        """Those that have a row for each sample of rows are among them."""
        return _views((self.x, self.grad_out), self.added)

    @property
    def added_rows(self) -> tuple[Tensor, ...]:
        """The gradients that are added to that of the normalized row."""
        return () if self.residual_grad is None else (self.residual_grad,)


def _views(views: tuple[RowView, ...], added: Sequence[Added]) -> tuple[RowView, ...]:
    return (*views, *[each.value for each in added if isinstance(each.value, RowView)]) if added else views


def _added(operands: Operands, batch_ndim: int, cols: int) -> tuple[tuple[Added, ...], tuple[Added, ...], int]:
    """The operands, as they are read, and the outputs that the package's ops lack; and sample_rows. A forward reads all
    modulations by row."""
    is_forward = operands.direction == FORWARD
    own = ForwardOperands if is_forward else BackwardOperands
    if type(operands) is own:
        return (), (), 0
    x, slots = operands.x, list(enumerate(operands.slots, 1))[len(own.slots) :]
    batch_shape, shared = x.shape[:batch_ndim], {}
    if not is_forward:
        modulations = [(slot.name, operands[at]) for at, slot in slots if slot.role is Role.MODULATION]
        shared = {
            name: sharing(each, batch_shape, x.dim() - batch_ndim) for name, each in modulations if each is not None
        }
    dims = max([each.dims for each in shared.values() if each.is_by_sample], default=0)

    def read(slot: Slot, value: Any) -> Any:
        role = slot.role
        if value is None or not role.is_tensor:
            return value
        if not slot.is_read:
            return None
        if role is Role.ROWS:
            return _row_view_or_copy(value, batch_ndim, cols)
        if role is Role.MODULATION:
            first = dims if slot.name in shared and shared[slot.name].is_by_sample else batch_ndim
            normalized_shape = x.shape[batch_ndim:]
            if is_forward and invariance.switch.invariance():
                value = _packed(value)  # read in place by all rows that share it
            rows = spread(value, first + len(normalized_shape), len(normalized_shape))
            rows = rows.expand(*batch_shape[:first], *normalized_shape)
            return (is_forward and row_view(rows, first)) or _row_view_or_copy(rows, first, cols)
        return _statistic(value) if role is Role.STATISTIC else _packed(value)

    outputs = list(zip(operands.outputs, wanted_outputs(operands), strict=True))[len(own.outputs) :]
    return (
        tuple(
            Added(slot.name, slot.role, read(slot, operands[at]), shared.get(slot.name, Sharing()))
            for at, slot in slots
            if slot.role is Role.COUNT or not slot.role.is_by_name
        ),
        tuple(
            Added(name, role, output_dtype(operands, each) if want else None, shared.get(like, Sharing()))
            for each, want in outputs
            for name, role, like in [each[:3]]
        ),
        math.prod(batch_shape[dims:]) if dims else 0,
    )


def _beside(added: tuple[Added, ...], outputs: tuple[Added, ...]) -> dict[str, Any]:
    """Fields of a problem: the row tensors that a form reads beside x and grad_out, and that it writes beside y or dx.
    """
    if not (added or outputs):
        return {}
    read = [each for each in added if isinstance(each.value, RowView) and not each.is_of_samples]
    return {
        "rows_in": tuple([each.value.tensor.dtype for each in read]),
        "names_in": tuple([each.name for each in read]),
        "rows_out": tuple([each.value for each in outputs if each.value and each.is_of_rows]),
    }


def _gradients(added: tuple[Added, ...], outputs: tuple[Added, ...], wants_dx: bool) -> dict[str, Any]:
    """Fields of a backward's problem: which of the form's gradients, those of x and of `outputs`, it stores or sums
    over the rows of a sample, and what it reads for each sample."""
    stored = (0,) * bool(wants_dx)
    if not (added or outputs):
        return {"stored": stored or (0,), "wants_dx": bool(stored)}
    shared = [each for each in added if isinstance(each.value, RowView) and each.is_of_samples]
    stored += tuple([at for at, each in enumerate(outputs, 1) if each.value and each.is_of_rows])
    summed = tuple([at for at, each in enumerate(outputs, 1) if each.value and each.is_of_samples])
    return {
        "stored": stored if stored or summed else (0,),
        "wants_dx": bool(stored or summed),
        "shared": tuple([each.value.tensor.dtype for each in shared]),
        "names_shared": tuple([each.name for each in shared]),
        "summed": summed,
        "sums_out": tuple([outputs[at - 1].value for at in summed]),
        "by_sample": sum([each.is_of_samples for each in outputs]),
        "scattered": any([each.value and each.sharing.rows < 0 for each in outputs]),
    }


def output_dtype(operands: Operands, output: Output) -> torch.dtype:
    if output.role is Role.STATISTIC:
        return accumulation_dtype(*[each.dtype for each in operands.rows])
    asked = output.dtype and getattr(operands, output.dtype)
    if asked:
        return asked
    dtype, promoted = getattr(operands, output.like).dtype, output.promoted
    if output.promoted_if_rounded and (operands.rounds_x_hat or getattr(operands, "rounds_steps", False)):
        promoted += output.promoted_if_rounded
    for name in promoted:
        of_output = next((each for each in operands.outputs[OWN_OUTPUTS:] if each.name == name), None)
        other = output_dtype(operands, of_output) if of_output else getattr(getattr(operands, name), "dtype", dtype)
        dtype = torch.promote_types(dtype, other)
    return dtype


class Steps(NamedTuple):
    """The dtypes that the results of a modulated norm's steps have in code of its operands' dtypes."""

    branch: torch.dtype  # gate * x
    u: torch.dtype  # that of the row that is normalized
    factor: torch.dtype  # of u, such as 1 + scale
    product: torch.dtype  # of u and the factor


def steps_of(operands: Operands) -> Steps | None:
    """None if the form does not round its steps."""
    if not operands.form.rounds_steps:
        return None
    gate, scale = getattr(operands, "gate", None), operands.scale.dtype
    of_sum = [output_dtype(operands, each) for each in operands.outputs[OWN_OUTPUTS:]]
    row = of_sum[0] if of_sum else operands.x.dtype
    branch = operands.x.dtype if gate is None else torch.promote_types(operands.x.dtype, gate.dtype)
    return Steps(branch, row, scale, torch.promote_types(row, scale))


def resolve_eps(eps: float | None, *dtypes: torch.dtype) -> float:
    """eps as ATen reads it: None means the machine epsilon of the accumulation dtype of row tensors of these dtypes."""
    return torch.finfo(accumulation_dtype(*dtypes)).eps if eps is None else eps


def check_forward(operands: ForwardOperands) -> ForwardCall:
    """Check the operands of a forward and flatten them to rows x cols.

    Raises as `validate` does; RuntimeError if a LayerNorm's eps is None, TypeError if eps is no number. Copies x only
    if two strides do not describe its rows.
    """
    batch_shape = validate(operands)
    norm, x, _, weight, bias, eps, wants_statistics = operands[:7]
    if eps is None and not OPS[operands.op].slot("eps").optional:
        raise RuntimeError(f"{operands.op}: eps must be a number, got None")
    if eps is not None and not isinstance(eps, (Real, Tensor)):
        raise TypeError(f"{operands.op}: eps must be a number, got {eps!r}")
    normalized_shape = x.shape[len(batch_shape) :]  # the same sizes as torch's own integers
    width, groups = math.prod(normalized_shape), groups_of(operands)
    view, (added, outputs, _) = _row_view_or_copy(x, len(batch_shape), width), _added(operands, len(batch_shape), width)
    views, y_dtype, cols = _views((view,), added), output_dtype(operands, operands.outputs[0]), width // groups
    problem = _problem(
        norm,
        "forward",
        cols,
        x.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        nested_rows=any([each.inner_rows != 1 for each in views]),
        tma_aligned=all([is_tma_aligned(each, cols) for each in views]),
        form=operands.form,
        y_dtype=None if y_dtype == x.dtype else y_dtype,
        steps=(steps_of(operands) or ()) if added else (),
        **_beside(added, outputs),
    )
    return ForwardCall(
        problem,
        math.prod(batch_shape),
        view,
        None if weight is None else _packed(weight),
        None if bias is None else _packed(bias),
        float(resolve_eps(eps, problem.acc_dtype)),
        x.shape,
        stats_shape(batch_shape, normalized_shape, groups),
        tuple(normalized_shape),
        wants_statistics,
        added,
        outputs,
    )


def check_backward(operands: BackwardOperands) -> BackwardCall:
    """Check the operands of a backward and flatten them to rows x cols.

    The gradient of a parameter that is None is not wanted, whatever the mask says. Raises RuntimeError as `validate`
    does. Copies grad_out and x only if two strides do not describe their rows, residual_grad only if it is not
    contiguous.
    """
    batch_shape = validate(operands)
    norm, grad_out, x, _, mean, rstd, weight, bias, output_mask, residual_grad, dx_dtype = operands[:11]
    normalized_shape = x.shape[len(batch_shape) :]  # the same sizes as torch's own integers
    batch_ndim, width = len(batch_shape), math.prod(normalized_shape)
    grad_view, view = _row_view_or_copy(grad_out, batch_ndim, width), _row_view_or_copy(x, batch_ndim, width)
    added, outputs, sample_rows = _added(operands, batch_ndim, width)
    views = _views((view, grad_view), [each for each in added if not each.is_of_samples])
    cols = width // groups_of(operands)
    wants_dx, wants_dw, wants_db = output_mask[:3]
    more = _beside(added, outputs) | _gradients(added, outputs, wants_dx)
    places = [getattr(operands, name) for name in ("width", "x_at", "gate_at")] if hasattr(operands, "width") else []
    if places and wants_dx:
        more |= {"rows_out": (x.dtype,), "stored": (0, 1)}
    if places and not (wants_dx and places[0] > 2 * width):  # nothing reads `rest`
        added = tuple(each._replace(value=None) if each.role is Role.COLUMNS else each for each in added)
    wants_dx = more.pop("wants_dx")
    residual = _packed(residual_grad) if wants_dx and residual_grad is not None else None
    problem = _problem(
        norm,
        "backward",
        cols,
        x.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        grad_out.dtype,
        None if residual is None else residual.dtype,
        wants_dx,
        wants_dw and weight is not None,
        wants_db and bias is not None,
        nested_rows=any([each.inner_rows != 1 for each in views]),
        tma_aligned=all([is_tma_aligned(each, cols) for each in _views((view, grad_view), added)])
        and all(each * x.element_size() % ALIGNMENT == 0 for each in places),
        form=operands.form,
        packed=bool(places),
        **more,
    )
    in_force, block_rows = invariance.switch.invariance(), 0
    if in_force > 0 and problem.num_sums:
        block_rows = _block_rows(operands.op, in_force, math.prod(batch_shape), outputs)
    return BackwardCall(
        problem,
        math.prod(batch_shape),
        grad_view,
        view,
        None if mean is None else _statistic(mean),
        _statistic(rstd),
        None if weight is None else _packed(weight),
        _packed(bias) if problem.reads_bias else None,
        residual,
        dx_dtype or x.dtype,
        x.shape,
        tuple(normalized_shape),
        added,
        outputs,
        sample_rows,
        places[0] if places else 0,
        block_rows,
    )


def _block_rows(op: str, ordered: int, rows: int, outputs: tuple[Added, ...]) -> int:
    """BackwardCall.block_rows, if sums are in the order of blocks of `ordered` rows. Raises RuntimeError if rows that
    share a modulation, and so a sum, would be in two blocks; all rows together may be."""
    if rows <= ordered:
        return 0
    for each in outputs:
        if each.is_of_samples and each.sharing.rows and ordered % each.sharing.rows:
            rule = "the rows that share a modulation must divide ordered_sums of batch_invariant"
            raise RuntimeError(f"{op}: {rule}, got {each.sharing.rows} rows and {ordered}")
    return ordered


def validate(operands: Operands, op: str | None = None) -> torch.Size:
    """Check operands and return x's shape without the normalized dims.

    Raises RuntimeError unless x's shape ends in normalized_shape, weight and bias have that shape, and all tensors are
    strided, float and on one device. In a backward, grad_out and residual_grad must have x's shape, and each statistic
    one element per row and group, in any shape. A modulation has x's shape, but batch dims may be 1, and the last of
    them absent. groups must divide the columns. Raises TypeError if an operand is no tensor or normalized_shape no
    tuple of integers. Messages name `op`, by default the operands' op. Only shapes, dtypes, layouts and devices are
    read, so meta and traced tensors are accepted.
    """
    op, x = op or operands.op, operands.x
    require_strided(op, "x", x)
    normalized_shape = _sizes(op, operands.normalized_shape)
    shape, device = x.shape, x.device
    batch_ndim = len(shape) - len(normalized_shape)
    if not normalized_shape:
        raise RuntimeError(f"{op}: normalized_shape must have at least one dimension, got ()")
    if batch_ndim < 0 or shape[batch_ndim:] != normalized_shape:
        raise RuntimeError(f"{op}: x must end in normalized_shape {normalized_shape}, got shape {tuple(shape)}")
    if x.dtype not in FLOAT_DTYPES:
        _require_float(op, "x", x, device)
    batch_shape = shape[:batch_ndim]
    for at, name, role, optional, is_tensor, needs in _checks(type(operands)):
        value = operands[at]
        if value is None and optional:
            continue
        if needs and getattr(operands, needs) is None:
            raise RuntimeError(f"{op}: {name} must come with {needs}, which is None")
        if role is Role.STATISTIC:
            _require_statistic(op, name, value, math.prod(batch_shape) * groups_of(operands), device)
        elif role is Role.COUNT:
            _require_place(op, operands, math.prod(normalized_shape))
        elif role is Role.COLUMNS:
            wanted = (*batch_shape, operands.width - 2 * math.prod(normalized_shape))
            if not _is_as_wanted(value, wanted, device):
                _require(op, name, value, wanted, device)
        elif role is Role.MODULATION:
            _require_modulation(op, name, value, batch_shape, normalized_shape, device)
        elif is_tensor:
            wanted = normalized_shape if role is Role.PARAMETER else shape
            if not _is_as_wanted(value, wanted, device):
                _require(op, name, value, wanted, device)
        elif role is Role.DTYPE and value not in FLOAT_DTYPES:
            raise RuntimeError(f"{op}: {name} must be float16, bfloat16, float32 or float64, got {value}")
        elif role is Role.FORM and type(value) is not type(getattr(PLAIN, name)):
            raise TypeError(f"{op}: {name} must be a {type(getattr(PLAIN, name)).__name__}, got {value!r}")
        elif role is Role.FORM and name in CHOICES and value not in filter(None, CHOICES[name]):
            raise RuntimeError(f"{op}: {name} must be one of {', '.join(filter(None, CHOICES[name]))}, got {value!r}")
        elif name == "groups" and (value < 1 or math.prod(normalized_shape) % value):
            raise RuntimeError(f"{op}: groups must divide the {math.prod(normalized_shape)} columns, got {value}")
        elif role is Role.MASK and len(value) != len(type(operands).outputs):
            raise RuntimeError(f"{op}: {name} must have one flag per output, got {list(op_mask(operands))}")
    return batch_shape


@cache
def _checks(operands_type: Any) -> list[tuple[int, str, Role, bool, bool, str | None]]:
    """(index, name, role, optional, is_tensor, needs) of the operands that are checked after x and normalized_shape, in
    this order."""
    order = list(Role)
    slots = [(at, slot) for at, slot in enumerate(operands_type.slots, 1) if slot.name not in ("x", "normalized_shape")]
    checks = [(at, slot.name, slot.role, slot.optional, slot.role.is_tensor, slot.needs) for at, slot in slots]
    return sorted(checks, key=lambda check: order.index(check[2]))


def stats_shape(batch_shape: Sequence[int], normalized_shape: Sequence[int], groups: int = 1) -> tuple[int, ...]:
    """The shape of mean and rstd, [*batch, 1, ..., groups], for one group as ATen shapes them."""
    return (*batch_shape, *(1 for _ in normalized_shape[1:]), groups)


def groups_of(operands: Operands) -> int:
    return getattr(operands, "groups", 1)


def _sizes(op: str, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    try:
        if not any(isinstance(size, bool) for size in normalized_shape):
            return tuple(size if isinstance(size, torch.SymInt) else operator.index(size) for size in normalized_shape)
    except TypeError:
        pass
    raise TypeError(f"{op}: normalized_shape must be a tuple of integers, got {normalized_shape!r}")


def require_strided(op: str, name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = f"{'nested, ' * tensor.is_nested}{tensor.layout}"
        raise RuntimeError(f"{op}: {name} must be a strided tensor, got one that is {layout}")


def require_memory(op: str, tensors: Iterable[Tensor | None]) -> None:
    """Raises RuntimeError if the storage of a tensor was freed."""
    for each in tensors:
        if each is not None and each.numel() and not (each.is_meta or each.untyped_storage().data_ptr()):
            raise RuntimeError(f"{op}: all tensors must have memory, got one of shape {tuple(each.shape)} without it")


def _is_as_wanted(tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether `_require` would pass, in one step: these checks are much of this package's own host time."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return tensor.shape == shape and tensor.dtype in FLOAT_DTYPES and tensor.device == device


def _require(op: str, name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    require_strided(op, name, tensor)
    if tensor.shape != shape:
        raise RuntimeError(f"{op}: {name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    _require_float(op, name, tensor, device)


def _require_statistic(op: str, name: str, tensor: Tensor, rows: int, device: torch.device) -> None:
    require_strided(op, name, tensor)
    if tensor.numel() == rows and tensor.dtype in FLOAT_DTYPES and tensor.device == device:
        return
    if tensor.numel() != rows:
        raise RuntimeError(f"{op}: {name} must hold one element per row ({rows}), got shape {tuple(tensor.shape)}")
    _require_float(op, name, tensor, device)


def _require_place(op: str, operands: Operands, cols: int) -> None:
    """Raises unless x and the gate, rows of one normalized dim, are apart from each other within the width."""
    width, *places = given = operands.width, operands.x_at, operands.gate_at
    if any(isinstance(each, bool) or not isinstance(each, (int, torch.SymInt)) for each in given):
        raise TypeError(f"{op}: width, x_at and gate_at must be integers, got {', '.join(map(repr, given))}")
    if len(operands.normalized_shape) != 1:
        raise RuntimeError(f"{op}: normalized_shape must be one dim, got {tuple(operands.normalized_shape)}")
    first, last = sorted(places)
    if not (0 <= first and first + cols <= last and last + cols <= width):
        rule = f"columns of x and gate, {cols} of each, must be apart and within {width}"
        raise RuntimeError(f"{op}: {rule}, got {places[0]} and {places[1]} as their first ones")


def _require_modulation(
    op: str, name: str, tensor: Tensor, batch_shape: torch.Size, normalized_shape: tuple[int, ...], device: torch.device
) -> None:
    require_strided(op, name, tensor)
    lead = tensor.dim() - len(normalized_shape)
    fits = 0 <= lead <= len(batch_shape) and tensor.shape[lead:] == normalized_shape
    if not fits or any(
        size != 1 and size != of_x for size, of_x in zip(tensor.shape[:lead], batch_shape, strict=False)
    ):
        wanted = ", ".join([*(f"{size} or 1" for size in batch_shape), *map(str, normalized_shape)])
        got = tuple(tensor.shape)
        raise RuntimeError(f"{op}: {name} must have shape ({wanted}), or the first of its batch dims, got {got}")
    _require_float(op, name, tensor, device)


def _require_float(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.dtype not in FLOAT_DTYPES:
        raise RuntimeError(f"{op}: {name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
    if tensor.device != device:
        raise RuntimeError(f"{op}: {name} must be on {device} as x is, got {tensor.device}")


def _row_view_or_copy(tensor: Tensor, batch_ndim: int, cols: int) -> RowView:
    if tensor.is_contiguous() or invariance.switch.invariance():
        return RowView(_packed(tensor), 1, cols, 0)
    return row_view(tensor, batch_ndim) or RowView(tensor.contiguous(), 1, cols, 0)


def _statistic(tensor: Tensor) -> Tensor:
    return (_packed(tensor) if invariance.switch.invariance() else tensor).reshape(-1)


def _packed(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that is contiguous; if rows are batch-invariant also aligned, because builds for
    other addresses may add up a row in another order."""
    packed = tensor.contiguous()
    misaligned = invariance.switch.invariance() and packed.data_ptr() % ALIGNMENT
    return packed.clone() if misaligned else packed


# NormProblem(...) from a cache: a lookup is cheaper than building the value again.
_problem = lru_cache(maxsize=4096)(NormProblem)
