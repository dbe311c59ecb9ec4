"""The operands that launches get by name: what an op has beside the operands and outputs of the package's plain ops."""

from __future__ import annotations

from dataclasses import replace

from ..kernels import copies
from ..kernels.config import ColumnTile
from ..operands import OWN_OUTPUTS, Role
from ..planner import limits
from ..problem.calls import BackwardCall, ForwardCall
from ..problem.rows import RowView
from .fallback import BuildFailed
from .launcher import Launch
from .program import Address, Number, Operand
from .schedules import row_strides, stride_of


def with_named(launches: list[Launch], call: ForwardCall | BackwardCall, first_output: int) -> list[Launch]:
    """The launches, each with those of these operands that its kernel has parameters for, absent ones left out.

    `added` are gradients that are added to dx, and `bias_ptr` is the bias of a backward that reads it. Row tensors of a
    form go to kernels as tuples, in their order: `rows_in` of pointers, `strides_in` of the three numbers of each,
    `rows_out` of pointers; those with a row for each sample as `shared` and `strides_shared`. Of the rest a kernel gets
    `{name}_ptr` of a tensor, `{name}_stride` of a statistic, `{name}` of a number. Sums over samples are among
    `Written`. Raises BuildFailed if no kernel takes an operand or an output of a form."""
    named: dict[str, Operand] = {}
    problem = call.problem
    if isinstance(call, BackwardCall):
        named |= {"added": call.added_rows} if call.added_rows else {}
        named |= {} if call.bias is None else {"bias_ptr": call.bias}
    parameters: dict[str, str] = {}  # by what needs them
    for each in call.added:
        name, value = each.name, each.value
        if isinstance(value, RowView):
            parameters[name] = "shared" if each.is_of_samples else "rows_in"
            strides = "strides_shared" if each.is_of_samples else "strides_in"
            named[parameters[name]] = (*named.get(parameters[name], ()), value.tensor)
            named[strides] = (*named.get(strides, ()), *row_strides(value))
            named |= {} if value.table_rows is None else {"table_rows": value.table_rows}
        elif value is not None and each.role is not Role.DTYPE and not (each.role is Role.INDEX and problem.by_key):
            parameters[name] = f"{name}_ptr" if each.role.is_tensor else name
            named[parameters[name]] = value
            named |= {f"{name}_stride": stride_of(value)} if each.role is Role.STATISTIC else {}
    for at, each in enumerate(call.added_outputs, first_output + OWN_OUTPUTS):
        if each.value is not None and not each.is_of_samples:
            parameters[each.name] = "rows_out" if each.is_of_rows else f"{each.name}_ptr"
            given = Address(at, each.value)
            named[parameters[each.name]] = (*named.get("rows_out", ()), given) if each.is_of_rows else given
    if not named:
        return launches
    taken = [{name: named[name] for name in each.kernel.arg_names if name in named} for each in launches]
    missing = [name for name, needed in parameters.items() if not any(needed in each for each in taken)]
    if missing:
        raise BuildFailed(f"{launches[0].kernel.__name__} must have parameters for {', '.join(missing)}, but has none")
    pairs = zip(launches, taken, strict=True)
    return [replace(each, named=more | each.named) if more else each for each, more in pairs]


def copies_of_rest(call: BackwardCall, dx: Address, times: int) -> list[Launch]:
    """A launch for each run of columns of dx that x and the gate leave, with `times` CTAs for each of the norm's."""
    cols, given = call.problem.width, {each.name: each.value for each in call.added}
    first, last = sorted((given["x_at"], given["gate_at"]))
    runs = (0, 0, first), (first, first + cols, last), (last - cols, last + cols, call.width)
    launches = []
    for source, start, end in runs:  # in rest; in dx, from start to end
        if end > start:
            args = dx, call.rows, start, end - start, call.width - 2 * cols, source
            chunk = min(limits.copied_columns, 1 << (end - start - 1).bit_length())
            tile = ColumnTile(limits.copied_elements // chunk, chunk, num_warps=8)
            launches.append(Launch(copies.copy_columns, (Number.CTAS, times), args, None, tile))
    return launches
