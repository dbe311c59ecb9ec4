"""The rule by which norms of heads run on DTensors (fusednorm/sharding.py).

Where all tensors are sharded along one dim that is not normalized, such as that of heads of a norm each, cos and sin
are sharded with them if they have the dim, and replicated if it is broadcast.
"""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_leaves

from ..operands import TRANSLATIONS, Role, operands_of, wanted_outputs
from .problem import dim_of, spans_heads


def placements(name: str, schema: Any) -> tuple:
    """As sharding.RULES has them."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    pairs = zip(schema.args_schema, TRANSLATIONS[name].lists, strict=False)
    given = operands_of(name, [tree_leaves(each) if len(names) > 1 else each for each, names in pairs], {})
    x, k, grouped = given.x, getattr(given, "k", given.x), given.grouped
    ndim = len(x.shape) + (0 if grouped is None else 1 + grouped)  # of q
    operands = [(slot.role, getattr(given, slot.name)) for slot in given.slots if slot.role.is_tensor]
    operands = [(role, each) for role, each in operands if each is not None]
    outputs = [each.role for each, wanted in zip(given.outputs, wanted_outputs(given), strict=True) if wanted]

    def placed(role: Role, each: Any, dim: int) -> Any:
        at = dim_of(role, each.shape, dim, ndim)
        return Replicate() if at is None else Shard(at)

    found = [[Replicate()] * (len(outputs) + len(operands))]
    parameters = [each for role, each in operands if role is Role.PARAMETER]
    whole = grouped is None and spans_heads(x.shape[-1:], parameters)
    for dim in range(len(x.shape) - 1 - whole if len(x.shape) == len(k.shape) else 0):
        of_outputs = [Partial("sum") if role is Role.PARAMETER else Shard(dim) for role in outputs]
        found.append([*of_outputs, *(placed(*each, dim) for each in operands)])
    return x, len(outputs), found
