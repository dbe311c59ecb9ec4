"""Sharding rules of the ops for DTensors. PyTorch's own engine expands the rules over a device mesh.

Rows are independent. If x is sharded along a dim that is not normalized, each rank runs the op on its own rows, and
dweight and dbias come out as partial sums (Partial), which their reader reduces. weight, bias and tables must be
replicated. A modulation is sharded as x along the batch dims that it has whole, and is like a parameter along all
others. If x is sharded along a normalized dim, it is redistributed first, as for ATen's norms.

This module imports torch.distributed only after the program itself has imported torch.distributed.tensor. The names it
uses are private or experimental. `register` lists names that the installed torch lacks in `missing`; the ops then raise
torch's error that they have no sharding strategy.

The same error comes up if a program's first call of this package is an op of torch.ops.fusednorm in inference mode:
such a call bypasses the autograd key, where the rules are registered. Calling `register` first avoids it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable

import torch

from .namespace import NAMESPACE, TORCH_OPS
from .operands import OPS, Role

ROWS, WHOLE, SUM = "sharded as the rows", "replicated", "a partial sum"
# By the name of an op that takes and returns lists, from a schema: one of the tensors, the number of outputs, and the
# placements of these and of all tensors, a list for each way. The rooms of these ops add them.
RULES: dict[str, Callable] = {}

_registered: set[str] = set()  # ops that have rules, or whose rules are missing
missing: list[str] = []  # rules that could not be registered, with torch's error


def register_where_needed() -> None:
    """Register the rules if DTensors may exist. Must be called before an op runs on tensors that may be DTensors."""
    if "torch.distributed.tensor" in sys.modules:  # otherwise no DTensor exists
        register()


def register() -> None:
    """Register the rules with torch.distributed.tensor, once per process and op."""
    if len(_registered) == len(OPS) + len(RULES):
        return
    for add, ops in (_add_norm, OPS), (_add_of_lists, RULES):
        new = [name for name in ops if name not in _registered]
        _registered.update(new)
        try:
            for name in new:
                add(getattr(TORCH_OPS, name).default)
        except (ImportError, AttributeError, TypeError) as error:
            missing.append(f"{new[0]}, ...: {error}")


def placed(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple[dict, dict, int]:
    """(outputs, operands, dims): the placement of each output and operand by name if x is sharded along one of its
    first `dims` dims; that of a modulation is a tuple with one for each of these. The placement of an output that is
    not computed is None. An operand that is None has no entry."""
    name = _name(op)
    row, operands = OPS[name], {}
    given = dict(zip((slot.name for slot in row.arguments), args)) | kwargs  # noqa: B905  defaults are left out
    x = given["x"]
    dims = len(x.shape) - len(given["normalized_shape"])

    def of_modulation(value, of_others: str) -> tuple[str, ...]:
        whole = [size != 1 for size in value.shape[: len(value.shape) - len(given["normalized_shape"])]]
        return tuple(ROWS if is_whole else of_others for is_whole in (*whole, *[False] * (dims - len(whole))))

    for slot in row.arguments:
        value = given.get(slot.name)
        if value is None or not slot.role.is_tensor:
            continue
        if slot.role is Role.STATISTIC and len(value.shape) != len(x.shape):
            raise RuntimeError(
                f"{name}: {slot.name} of DTensors must have the shape that the forward returns, of {len(x.shape)} dims,"
                f" got {tuple(value.shape)}"
            )
        operands[slot.name] = WHOLE if slot.role in (Role.PARAMETER, Role.TABLE) else ROWS
        if slot.role is Role.MODULATION:
            operands[slot.name] = of_modulation(value, WHOLE)
    mask = given.get("output_mask") or itertools.repeat(True)
    outputs: dict[str, str | tuple[str, ...] | None] = {}
    for output, wanted in zip(row.outputs, mask, strict=False):
        like = given.get(output.like)
        if not wanted or like is None:
            outputs[output.name] = None
        elif output.role is Role.MODULATION:
            outputs[output.name] = of_modulation(like, SUM)
        else:
            outputs[output.name] = SUM if output.role in (Role.PARAMETER, Role.TABLE) else ROWS
    return outputs, operands, dims


def _name(op: torch._ops.OpOverload) -> str:
    return op._schema.name.removeprefix(f"{NAMESPACE}::")


def _add_norm(op: torch._ops.OpOverload) -> None:
    static = [argument.name for argument in op._schema.arguments].index("normalized_shape")
    kwargs = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    try:
        _add_single_dim(op, static, kwargs)
    except (ImportError, TypeError):  # torch 2.11 raises TypeError: its engine allows no output that is None
        _add_by_public_name(op, static, kwargs)


def _add_single_dim(op: torch._ops.OpOverload, static: int, kwargs: list[str]) -> None:
    """Register by the engine of ATen's own rules. It handles any kind of sharding, and its cache key includes all
    arguments that are no tensors."""
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor._ops import single_dim_strategy as engine

    def strategy(op, args, kwargs):
        outputs, operands, dims = placed(op, args, kwargs)
        both = *outputs.values(), *operands.values()
        return [_placements(both, engine._ShardingPlaceholder(dim), dim) for dim in range(dims)]

    info = RuntimeSchemaInfo(static, kwargs or None)
    engine.register_single_dim_strategy(op, info, allow_uneven_sharding=True)(strategy)


def _add_by_public_name(op: torch._ops.OpOverload, static: int, kwargs: list[str]) -> None:
    """Register by torch.distributed.tensor.experimental. Its cache key holds only the tensors unless static arguments
    are declared, which is done at the end. A dim with fewer rows than ranks is replicated."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    names = [argument.name for argument in op._schema.arguments]

    @register_sharding(op)
    def strategy(*args, **kwargs):
        outputs, operands, dims = placed(op, args, kwargs)
        given = [operands.get(name) for name in names[: len(args)]]  # one entry per positional argument
        whole = [[each and Replicate() for each in side] for side in (outputs.values(), given)]
        sharded = [[_placements(side, Shard(dim), dim) for side in (outputs.values(), given)] for dim in range(dims)]
        return [whole, *sharded]

    info = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op]
    info.static_argnum, info.static_kwargkey = static, kwargs or None


def _placements(placed: Iterable[str | tuple[str, ...] | None], rows, dim: int) -> list:
    """The placements if x is sharded along `dim`."""
    from torch.distributed.tensor import Partial, Replicate

    placements = {ROWS: rows, WHOLE: Replicate(), SUM: Partial("sum"), None: None}
    return [placements[each[dim] if isinstance(each, tuple) else each] for each in placed]


def _add_of_lists(op: torch._ops.OpOverload) -> None:
    """Register by the way that has lists."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    def strategy(schema):
        tensor, outputs, found = RULES[_name(op)](schema)
        expanded = expand_to_full_mesh_op_strategy(tensor.mesh, schema, found, input_index=outputs)
        if outputs == 1:  # the op returns a list even for one tensor
            for each in expanded.strategies:
                each.output_specs = (each.output_specs,)
        return expanded

    arguments = op._schema.arguments
    static = next(at for at, each in enumerate(arguments) if "Tensor" not in str(each.type))
    kwargs = [each.name for each in arguments if each.kwarg_only]
    register: Callable = DTensor._op_dispatcher.sharding_propagator.register_op_strategy
    register(op, strategy, RuntimeSchemaInfo(static, kwargs, needs_pytree=True))
