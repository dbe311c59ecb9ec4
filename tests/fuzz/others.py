"""Random calls of the ops that have no table of operands: norms of q and k, and column sums."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from cases import row_strided, unaligned
from torch import Tensor

from fusednorm.columns import reference as columns
from fusednorm.columns.ops import column_sum
from fusednorm.heads import operands as heads
from fusednorm.heads.problem import Packing
from fusednorm.heads.reference import formula
from fusednorm.operands import as_op

COLUMN_SUM = "column_sum"
OTHERS = (heads.FORWARD, heads.BACKWARD, heads.PACKED, COLUMN_SUM)
Outputs = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class OtherCall:
    """A call of one of these ops. shape is that of q, `[B, S, heads, D]` or with heads_first `[B, heads, S, D]`, or of
    the tensors of a column sum. If heads are normalized as a whole, theirs is the last dim but one, and heads_first
    says how they lie in memory."""

    op: str
    shape: tuple[int, ...]
    dtypes: dict[str, torch.dtype | None]  # of "x", "weight", "bias", "grad", "table", and of the result of a sum
    values: str
    layout: str
    given: dict[str, Any]
    kv_heads: int
    rotary: int
    half_table: bool
    heads_first: bool
    whole: bool  # parameters are for all heads of a token
    count: int  # tensors of a column sum
    mask: tuple[bool, ...]
    margin: int
    setting: int | None
    mode: str
    seed: int
    variant: None = None

    @property
    def names(self) -> list[str]:
        """Of the outputs."""
        if self.op == COLUMN_SUM:
            return ["sum"] * (1 if self.given["total"] else self.count)
        if self.op == heads.FORWARD:
            return ["q", "k"]
        first = ["dqkv"] if self.op == heads.PACKED else ["dq", "dk"]
        names = [*first, "dq_weight", "dk_weight", "dq_bias", "dk_bias"]
        there = [True] * len(first)
        for name in ("weight", "bias"):
            there += [self.dtypes[name] is not None] * 2
        return [name for name, *kept in zip(names, self.mask, there, strict=False) if all(kept)]

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def is_backward(self) -> bool:
        return self.op in (heads.BACKWARD, heads.PACKED)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    def says_nothing(self, name: str) -> bool:
        return False

    def arguments(self, device: str) -> dict[str, Any]:
        from .draw import fill

        generator = torch.Generator(device).manual_seed(self.seed)

        def made(shape, kind, name, values=None) -> Tensor | None:
            return None if self.dtypes[name] is None else LAYOUTS[kind](
                fill(shape, values or self.values, self.dtypes[name], generator)
            )  # fmt: skip

        if self.op == COLUMN_SUM:
            inputs = [made(self.shape, self.layout, "x") for _ in range(self.count)]
            return {"inputs": inputs, **self.given, "dtype": self.dtypes["out"]}
        batch, at, cols = self.shape[0], 1 if self.heads_first else 2, self.shape[-1]
        of_k = (*self.shape[:at], self.kv_heads, *self.shape[at + 1 :])
        shapes = [self.shape, of_k]
        of_parameters = [(each[at], cols) if self.whole else (cols,) for each in shapes]
        parameters = {
            names: [made(each, "contiguous", name, "parameter") for each in of_parameters]
            for names, name in (("weights", "weight"), ("biases", "bias"))
        }

        def turned(tensor: Tensor) -> Tensor:
            return tensor.transpose(1, 2) if self.whole and self.heads_first else tensor

        tables: dict[str, Tensor | None] = {"cos": None, "sin": None}
        if self.rotary:
            width, dims = self.rotary // 2 if self.half_table else self.rotary, [batch, *self.shape[1:-1]]
            dims[at] = 1
            angles = torch.randn(*dims, width, generator=generator, device=device)
            of_both = {"cos": angles.cos(), "sin": angles.sin()}
            tables = {name: turned(each.to(self.dtypes["table"])) for name, each in of_both.items()}
        named = parameters | tables | {"eps": self.given["eps"]}
        settings = {name: value for name, value in self.given.items() if name not in ("eps", "grouped")}
        if self.rotary:
            settings["rotary_dim"] = self.rotary
        if self.op == heads.FORWARD:
            return {"inputs": [turned(made(each, self.layout, "x")) for each in shapes]} | named | settings
        grads = [turned(made(each, self.layout, "grad")) for each in shapes]
        if self.op == heads.BACKWARD:
            x = {"inputs": [turned(made(each, self.layout, "x")) for each in shapes]}
            return {"grads": grads} | x | named | {"output_mask": [*self.mask]} | settings
        many, kv_heads, grouped = self.shape[2], self.kv_heads, self.given["grouped"]
        qkv = made((batch, self.shape[1], (many + 2 * kv_heads) * cols), self.layout, "x")
        packing = Packing(many, kv_heads, grouped)
        grads = [made(each.shape, "contiguous", "grad") for each in packing.split(qkv)]
        if grouped and tables["cos"] is not None:
            named |= {name: each.unsqueeze(-2) for name, each in tables.items()}
        more = {"output_mask": [*self.mask], "heads": many, "kv_heads": kv_heads, "grouped": grouped}
        return {"grads": grads, "qkv": qkv} | named | more | settings

    def run(self, arguments: dict[str, Any]) -> Outputs:
        if self.op == COLUMN_SUM:
            return tuple(column_sum(**arguments))
        return tuple(getattr(torch.ops.fusednorm, self.op)(**arguments))

    def formula(self, arguments: dict[str, Any]) -> Outputs:
        if self.op == COLUMN_SUM:
            dtype = self.dtypes["out"] or self.dtypes["x"]
            return tuple(columns.formula(arguments["inputs"], self.given["total"], dtype))
        return tuple(as_op(self.op, formula)(**arguments))


LAYOUTS = {"contiguous": lambda tensor: tensor, "row_strided": row_strided, "unaligned": unaligned}


def draw(op: str, of_family: random.Random, each: random.Random, most_elements: int) -> OtherCall:
    from .draw import DTYPES, MODES, MOST_BLOCKS, SETTINGS, VALUES, WEIGHTS, elements_of

    of_x, same = of_family.choices(DTYPES, WEIGHTS)[0], of_family.random() < 0.5

    def dtype(absent: float = 0.0) -> torch.dtype | None:
        chosen = of_x if same else of_family.choice(DTYPES)
        return None if of_family.random() < absent else chosen

    dtypes = {"x": of_x, "weight": dtype(0.2), "bias": dtype(0.5), "grad": dtype(), "table": dtype(), "out": dtype(0.5)}
    is_sum, packed = op == COLUMN_SUM, op == heads.PACKED
    cols = of_family.choice((16, 32, 40, 64, 72, 80, 96, 128, 192, 256, 512, 1024, 7, 1))
    cols = min(of_family.choice((cols, cols, 4096, 12_345, 100_003)), most_elements) if is_sum else cols
    given: dict[str, Any] = {"total": of_family.random() < 0.5}
    if not is_sum:
        given = {
            "eps": of_family.choice((1e-5, 1e-6, 0.0, None)),
            "layer": of_family.random() < 0.5,
            "interleaved": of_family.random() < 0.5,
            "norm_first": of_family.random() < 0.7,
            "weight_offset": of_family.choice((0.0, 1.0)),
            "rounds_x_hat": of_family.random() < 0.3,
        } | ({"grouped": of_family.random() < 0.5} if packed else {})
        dtypes["grad"] = of_x if packed or given["rounds_x_hat"] else dtypes["grad"]
    kv_heads = of_family.choice((1, 2, 3, 8))
    many = kv_heads * of_family.choice((1, 1, 2, 4))
    heads_first = not packed and of_family.random() < 0.3
    rows = max(1, elements_of(each, most_elements) // (cols * (many + 2 * kv_heads)))
    setting = of_family.choice(SETTINGS)
    ordered = setting is not None and setting > 0
    batch = each.randint(1, 20 if ordered else 5)
    tokens = max(1, round(rows ** each.random()) // batch)
    if ordered and (is_sum or batch == 1):
        tokens = min(tokens, max(1, MOST_BLOCKS * setting // (batch * many)))
    elif ordered:
        setting *= tokens * many  # whole samples
    shape = (batch, many, tokens, cols) if heads_first else (batch, tokens, many, cols)
    rotary = 2 * of_family.randint(0, cols // 2) if of_family.random() < 0.6 and not is_sum else 0
    mask = [of_family.random() < 0.8 for _ in range(6 - packed)]
    values = each.choice(VALUES[: None if each.random() < 0.5 else 3])
    if 0 < rotary < cols and values in ("inf", "nan"):
        values = "large"  # they reach the other column of a pair: docs/numerics.md
    return OtherCall(
        op, shape, dtypes, values,
        layout=of_family.choice(("contiguous", *LAYOUTS)),
        given=given, kv_heads=kv_heads, rotary=rotary,
        half_table=of_family.random() < 0.4, heads_first=heads_first,
        count=of_family.choice((1, 2, 3, 9)), mask=tuple(mask),
        margin=of_family.choice((0, 0, 0, 16, 100)), setting=setting,
        mode=each.choice(MODES), seed=each.getrandbits(32),
        whole=op in (heads.FORWARD, heads.BACKWARD) and of_family.random() < 0.3,
    )  # fmt: skip
