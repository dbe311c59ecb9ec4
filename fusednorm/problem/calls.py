"""A checked call, flattened to rows x cols, and described as a value that the planner can hash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..operands import FORWARD, OPS, BackwardOperands, ForwardOperands, Operands, Output, Role, Slot, wanted_outputs
from ..planner import limits
from ..planner.norm_problem import ALIGNMENT, MOST_ROWS_OF_TILE, NormProblem
from ..planner.plan import MOST_CTAS
from ..settings import invariance
from .outputs import output_dtype, resolve_eps, steps_of
from .rows import RowView, Sharing, is_tma_aligned, packed, row_view, row_view_or_copy, sharing, spread, statistic
from .validation import validate


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
    normalized_shape: tuple[int, ...]  # of weight and bias
    wants_statistics: bool = True  # whether to write mean and rstd, for a backward
    added: tuple[Added, ...] = ()
    added_outputs: tuple[Added, ...] = ()
    sample_rows: int = 0  # as of a backward; 0 also where modulations are read for each row
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
    many_rows: int = 0  # from which on there are many samples; 0 if the second launch has one order for any number
    many_samples: bool = False  # whether there are; then each has few CTAs of it

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the operands' tensors."""
        own = self.grad_out.tensor, self.x.tensor, self.mean, self.rstd, self.weight, self.bias, self.residual_grad
        return (*own, *[each.tensor for each in self.added if each.role.is_tensor]) if self.added else own

    @property
    def rows_of_sum(self) -> int:
        """Rows of a sum over all rows of x: those of the tables that an index reads, or one."""
        tables = [each.value.table_rows for each in self.added if each.is_of_samples and each.value]
        return next((rows for rows in tables if rows is not None), 1)

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


def check(operands: Operands) -> ForwardCall | BackwardCall:
    return check_forward(operands) if operands.direction == FORWARD else check_backward(operands)


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
    width, groups = math.prod(normalized_shape), operands.groups
    view = row_view_or_copy(x, len(batch_shape), width)
    added, outputs, sample_rows = _added(operands, len(batch_shape), width)
    views = _views((view,), [each for each in added if not each.is_of_samples])
    y_dtype, cols = output_dtype(operands, operands.outputs[0]), width // groups
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
        sample_divisor=sample_rows and math.gcd(sample_rows, MOST_ROWS_OF_TILE),
        y_dtype=None if y_dtype == x.dtype else y_dtype,
        steps=(steps_of(operands) or ()) if added else (),
        **_beside(added, outputs),
    )
    return ForwardCall(
        problem,
        math.prod(batch_shape),
        view,
        None if weight is None else packed(weight),
        None if bias is None else packed(bias),
        float(resolve_eps(eps, problem.acc_dtype)),
        x.shape,
        tuple(normalized_shape),
        wants_statistics,
        added,
        outputs,
        sample_rows,
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
    grad_view, view = row_view_or_copy(grad_out, batch_ndim, width), row_view_or_copy(x, batch_ndim, width)
    added, outputs, sample_rows = _added(operands, batch_ndim, width)
    views = _views((view, grad_view), [each for each in added if not each.is_of_samples])
    cols = width // operands.groups
    wants_dx, wants_dw, wants_db = output_mask[:3]
    more = _beside(added, outputs) | _gradients(added, outputs, wants_dx)
    places = [getattr(operands, name) for name in ("width", "x_at", "gate_at")] if operands.width else []
    if places and wants_dx:
        more |= {"rows_out": (x.dtype,), "stored": (0, 1)}
    if places and not (wants_dx and places[0] > 2 * width):  # nothing reads `rest`
        added = tuple(each._replace(value=None) if each.role is Role.COLUMNS else each for each in added)
    wants_dx = more.pop("wants_dx")
    residual = packed(residual_grad) if wants_dx and residual_grad is not None else None
    copied = view, grad_view, *([] if residual is None else [RowView(residual, 1, width, 0)])  # to rings
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
        tma_aligned=all([is_tma_aligned(each, cols) for each in _views(copied, added)])
        and all(each * x.element_size() % ALIGNMENT == 0 for each in places),
        form=operands.form,
        packed=bool(places),
        sample_divisor=sample_rows and math.gcd(sample_rows, MOST_ROWS_OF_TILE),
        **more,
    )
    of_each = [each for each in outputs if each.value and each.is_of_samples and each.sharing.rows]
    in_force, block_rows, many = invariance.switch.invariance(), 0, 0
    if in_force > 0 and problem.num_sums:
        block_rows = _block_rows(operands.op, in_force, math.prod(batch_shape), outputs)
    elif len(of_each) == problem.num_sums:
        many = many_rows(sample_rows, problem)
    return BackwardCall(
        problem,
        math.prod(batch_shape),
        grad_view,
        view,
        None if mean is None else statistic(mean),
        statistic(rstd),
        None if weight is None else packed(weight),
        packed(bias) if problem.reads_bias else None,
        residual,
        dx_dtype or x.dtype,
        x.shape,
        tuple(normalized_shape),
        added,
        outputs,
        sample_rows,
        places[0] if places else 0,
        block_rows,
        many,
        0 < many <= math.prod(batch_shape),
    )


def many_rows(sample_rows: int, problem: NormProblem) -> int:
    """BackwardCall.many_rows, if modulations that samples share have a row for each: sums over all samples are long."""
    return limits.piece_of_samples["least"] * sample_rows * (0 < problem.num_sums == len(problem.summed))


def _added(operands: Operands, batch_ndim: int, cols: int) -> tuple[tuple[Added, ...], tuple[Added, ...], int]:
    """The operands, as they are read, and the outputs that the package's ops lack; and sample_rows. A forward reads all
    modulations by row if a sample has few rows, or too many that no parts of equal size have enough; if it is of
    a sum, whose CTAs have no registers to hold them, unless they are wider than x, and slow to read for each row; or if
    a row's bits must not depend on how many rows there are. So it reads tables; a backward of their gradients has
    those of a number as a sample, and all rows share the table."""
    is_forward = operands.direction == FORWARD
    own = ForwardOperands if is_forward else BackwardOperands
    if type(operands) is own:
        return (), (), 0
    x, slots = operands.x, list(enumerate(operands.slots, 1))[len(own.slots) :]
    batch_shape = x.shape[:batch_ndim]
    modulations = [(slot.name, operands[at]) for at, slot in slots if slot.role is Role.MODULATION]
    tables = [slot.name for at, slot in slots if slot.role is Role.TABLE and operands[at] is not None]
    present = [each for each in modulations if each[1] is not None]
    shared = {name: sharing(each, batch_shape, x.dim() - batch_ndim) for name, each in present}
    outputs = list(zip(operands.outputs, wanted_outputs(operands), strict=True))[len(own.outputs) :]
    if any([wanted and each.role is Role.TABLE for each, wanted in outputs]):
        shared |= dict.fromkeys(tables, Sharing(0))
    dims = max([each.dims for each in shared.values() if each.is_by_sample], default=0)
    sample_rows = math.prod(batch_shape[dims:]) if dims else 0
    parts = _parts_of(sample_rows) if is_forward else 1
    sample_rows //= parts
    unfit = sample_rows and sample_rows < limits.least_rows_of_sample
    wide = any(each.element_size() > x.element_size() for _, each in present)
    if is_forward and (unfit or (operands.form.combine and not wide) or invariance.switch.invariance()):
        shared, dims, sample_rows, parts = {}, 0, 0, 1

    def read(slot: Slot, value: Any) -> Any:
        role = slot.role
        if value is None or not role.is_tensor:
            return value
        if not slot.is_read:
            return None
        if role is Role.ROWS:
            return row_view_or_copy(value, batch_ndim, cols)
        if role is Role.TABLE:
            return row_view_or_copy(value, 1, cols)._replace(table_rows=len(value))
        if role is Role.MODULATION:
            is_shared = slot.name in shared and shared[slot.name].is_by_sample
            normalized_shape = x.shape[batch_ndim:]
            read_by = (*batch_shape[:dims], *((parts,) if parts > 1 else ())) if is_shared else batch_shape
            if is_forward and invariance.switch.invariance():
                value = packed(value)  # read in place by all rows that share it
            rows = spread(value, len(read_by) + len(normalized_shape), len(normalized_shape))
            rows = rows.expand(*read_by, *normalized_shape)
            return (is_forward and row_view(rows, len(read_by))) or row_view_or_copy(rows, len(read_by), cols)
        return statistic(value) if role is Role.STATISTIC else packed(value)

    def dtype_of(of: Output, wanted: bool) -> torch.dtype | None:
        unread = of.role is Role.STATISTIC and not operands.wants_statistics
        return output_dtype(operands, of) if wanted and not unread else None

    return (
        tuple(
            Added(slot.name, slot.role, read(slot, operands[at]), shared.get(slot.name, Sharing()))
            for at, slot in slots
            if slot.role is Role.COUNT or not slot.role.is_by_name
        ),
        tuple(
            Added(of.name, of.role, dtype_of(of, want), shared.get(of.like, Sharing()))
            for of, want in outputs
        ),
        sample_rows,
    )


def _parts_of(sample_rows: int) -> int:
    """How many samples a forward makes of one, so that none has more rows than a grid's second dimension has CTAs. As
    many as it has rows if all smaller numbers would leave too few."""
    least, most = max(1, -(-sample_rows // MOST_CTAS)), sample_rows // limits.least_rows_of_sample
    return next((parts for parts in range(least, most + 1) if sample_rows % parts == 0), max(1, sample_rows))


def _beside(added: tuple[Added, ...], outputs: tuple[Added, ...]) -> dict[str, Any]:
    """Fields of a problem: the row tensors that a form reads beside x and grad_out, those of which it reads a row for
    each sample, those that it writes beside y or dx, and parameters beside weight and bias."""
    if not (added or outputs):
        return {}
    views = [each for each in added if isinstance(each.value, RowView)]
    parameters = [each for each in added if each.role is Role.PARAMETER and each.value is not None]
    read, shared = ([each for each in views if each.is_of_samples == of_samples] for of_samples in (False, True))
    return {
        "shared": tuple([each.value.tensor.dtype for each in shared]),
        "names_shared": tuple([each.name for each in shared]),
        "rows_in": tuple([each.value.tensor.dtype for each in read]),
        "names_in": tuple([each.name for each in read]),
        "tables": tuple([each.name for each in read if each.value.table_rows is not None]),
        "by_key": any([each.value.table_rows is not None for each in shared]),
        "rows_out": tuple([each.value for each in outputs if each.value and each.is_of_rows]),
        "beside": tuple([(each.name, each.value.dtype) for each in parameters]),
    }


def _gradients(added: tuple[Added, ...], outputs: tuple[Added, ...], wants_dx: bool) -> dict[str, Any]:
    """Fields of a backward's problem: which of the form's gradients, those of x and of `outputs`, it stores or sums
    over the rows of a sample."""
    stored = (0,) * bool(wants_dx)
    if not (added or outputs):
        return {"stored": stored or (0,), "wants_dx": bool(stored)}
    stored += tuple([at for at, each in enumerate(outputs, 1) if each.value and each.is_of_rows])
    summed = tuple([at for at, each in enumerate(outputs, 1) if each.value and each.is_of_samples])
    return {
        "stored": stored if stored or summed else (0,),
        "wants_dx": bool(stored or summed),
        "summed": summed,
        "sums_out": tuple([outputs[at - 1].value for at in summed]),
        "by_sample": sum([each.is_of_samples for each in outputs]),
        "scattered": any([each.value and each.sharing.rows < 0 for each in outputs]),
    }


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


# NormProblem(...) from a cache: a lookup is cheaper than building the value again.
_problem = lru_cache(maxsize=4096)(NormProblem)
