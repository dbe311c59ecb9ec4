"""Random calls of lookup_backward: sums of rows by a number that each has."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusednorm.dtypes import accumulation_dtype
from fusednorm.namespace import TORCH_OPS

LOOKUP = "lookup_backward"
SIZES = 1, 2, 5, 40, 300  # rows of the table; the sort's keys have one byte or two
MOST_NUMBERS = 5  # that the rows have: each takes steps of the formula


@dataclass(frozen=True)
class LookupCall:
    """A call of it. shape is that of each tensor of rows, and of these there are as many as dtypes but "out"."""

    op: str
    shape: tuple[int, int]
    dtypes: dict[str, torch.dtype | None]
    values: str
    layout: str
    given: dict[str, Any]  # size of the table, dtype of the index
    mode: str
    seed: int
    setting: int | None = None
    margin: int = 0
    variant: str | None = None
    is_backward: bool = True

    @property
    def inputs(self) -> list[str]:
        return [name for name in self.dtypes if name != "out"]

    @property
    def names(self) -> list[str]:
        """Of the outputs."""
        return ["sum"] * len(self.inputs)

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def cols(self) -> int:
        return self.shape[1]

    def says_nothing(self, name: str) -> bool:
        return False

    def arguments(self, device: str) -> dict[str, Any]:
        """Some numbers may be no row of the table."""
        from .draw import ANY_RANK, fill

        generator, size = torch.Generator(device).manual_seed(self.seed), self.given["size"]
        known = random.Random(self.seed).sample(range(-1, size + 1), min(MOST_NUMBERS, size + 2))
        drawn = torch.randint(len(known), (self.rows,), generator=generator, device=device)
        index = torch.tensor(known, dtype=self.given["index"], device=device)[drawn]
        rows = [fill(self.shape, self.values, self.dtypes[name], generator) for name in self.inputs]
        return {
            "grads": [ANY_RANK[self.layout](each) for each in rows], "index": index, "rows": size,
            "dtype": self.dtypes["out"],
        }  # fmt: skip

    def run(self, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
        return tuple(getattr(TORCH_OPS, LOOKUP)(**arguments))

    def formula(self, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
        grads, index, size, dtype = arguments.values()
        known = [number for number in index.unique().tolist() if 0 <= number < size]
        place = torch.full((size,), len(known), device=index.device)
        place[known] = torch.arange(len(known), device=index.device)

        def sums(rows: Tensor) -> Tensor:
            wide = rows.to(torch.promote_types(accumulation_dtype(rows.dtype), dtype))
            of_known = [wide.index_select(0, (index == number).nonzero()[:, 0]).sum(0) for number in known]
            return torch.stack([*of_known, wide[:0].sum(0)]).index_select(0, place).to(dtype)

        return tuple(map(sums, grads))


def draw(of_family: random.Random, each: random.Random, most_elements: int) -> LookupCall:
    from .draw import ANY_RANK, DTYPES, MODES, VALUES, WEIGHTS, elements_of

    def dtype() -> torch.dtype:
        return of_family.choices(DTYPES, WEIGHTS)[0]

    cols = min(of_family.choice((1, 7, 24, 64, 77, 520, 1152, 3072, 8200)), most_elements)
    dtypes = {name: dtype() for name in ("x", "second", "third")[: of_family.randint(1, 3)]} | {"out": dtype()}
    size = max(1, min(of_family.choice(SIZES), most_elements // cols))
    most_rows = max(1, elements_of(each, most_elements) // (cols * (len(dtypes) - 1)))
    return LookupCall(
        LOOKUP, (round(math.exp(each.uniform(0, math.log(most_rows)))), cols), dtypes,
        values=each.choice(VALUES[: None if each.random() < 0.5 else 3]), layout=of_family.choice(list(ANY_RANK)),
        given={"size": size, "index": of_family.choice((torch.int32, torch.int64))}, mode=each.choice(MODES),
        seed=each.getrandbits(32),
    )  # fmt: skip
