"""Random calls. A call's number determines it; calls of one family, `FAMILY` numbers in a row, need the same kernels
but have other values and addresses, and most of them other rows, so that most find programs that are kept."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cases import BF16, FP16, FP32, FP64, LAYOUTS, TROUBLED_WIDTHS, row_strided, statistic_layouts, unaligned
from torch import Tensor

from fusednorm import reference
from fusednorm.forms import CHOICES
from fusednorm.operands import OPS, Op, Role, op_outputs, operands_of
from fusednorm.planner.plan import VARIANTS

from . import others
from .others import OtherCall

FAMILY = 50
MOST_COLS = 300_000
FEW_ELEMENTS = 2**20  # of most calls: most time goes into the others
MOST_BLOCKS = 300  # of ordered sums: each block is some launches
TABLE_ROWS = 5  # that an index may name
SMS = 132  # of the GPUs that were measured: row counts near multiples of it
DTYPES, WEIGHTS = (BF16, FP32, FP16, FP64), (4, 3, 2, 1)
ANY_RANK: dict[str, Callable[[Tensor], Tensor]] = {  # layouts of tensors of any rank
    "contiguous": lambda tensor: tensor, "row_strided": row_strided, "unaligned": unaligned,
}  # fmt: skip
FOUR_DIMS = ANY_RANK | {name: of_x for name, (_, of_x, _) in LAYOUTS.items()} | {
    name: of_grad for name, (_, _, of_grad) in LAYOUTS.items() if name.startswith("repeated")
}  # fmt: skip
VALUES = (
    "normal", "normal", "normal", "mean 1e4", "equal rows", "one-signed", "zero", "tiny", "denormal", "large", "inf",
    "nan", "constant",
)  # fmt: skip
PARAMETER_VALUES = ("parameter", "parameter", "zero", "constant", "one-signed", "tiny")
MODES = ("plain", "plain", "stream", "threads")
SETTINGS = (None, None, None, -1, 8, 1024)  # batch_invariant: not at all, of rows (-1), with sums in such blocks


@dataclass(frozen=True)
class Call:
    """A call of an op, as what its tensors are made from."""

    op: str
    shape: tuple[int, ...]
    normalized_ndim: int
    dtypes: dict[str, torch.dtype | None]  # by operand; None for an absent tensor
    values: dict[str, str]
    layouts: dict[str, str]
    given: dict[str, Any]  # eps, masks and dtypes
    variant: str | None
    margin: int
    mode: str
    seed: int
    setting: int | None = None  # of SETTINGS

    @property
    def names(self) -> list[str]:
        """Of the outputs."""
        return [each.name for each in OPS[self.op].outputs]

    @property
    def cols(self) -> int:
        return math.prod(self.normalized_shape)

    def says_nothing(self, name: str) -> bool:
        """Whether any output of this name is right."""
        is_statistic = OPS[self.op].outputs[self.names.index(name)].role is Role.STATISTIC
        return is_statistic and 0 in self.normalized_shape

    def run(self, arguments: dict[str, Any]) -> tuple[Tensor | None, ...]:
        outputs = getattr(torch.ops.fusednorm, self.op)(**arguments)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def formula(self, arguments: dict[str, Any]) -> tuple[Tensor | None, ...]:
        return op_outputs(self.op, reference.formula(operands_of(self.op, (), arguments)))

    @property
    def is_backward(self) -> bool:
        return OPS[self.op].direction == "backward"

    @property
    def rows(self) -> int:
        return math.prod(self.shape[: len(self.shape) - self.normalized_ndim])

    @property
    def normalized_shape(self) -> tuple[int, ...]:
        return self.shape[len(self.shape) - self.normalized_ndim :]

    def modulation_shape(self, name: str) -> tuple[int, ...]:
        """Some of the first batch dims, whole or 1."""
        rng, batch = random.Random(f"{self.seed} {name}"), self.shape[: len(self.shape) - self.normalized_ndim]
        lead = batch[: rng.randint(0, len(batch))]
        return (*(rng.choice((size, size, 1)) for size in lead), *self.normalized_shape)

    def arguments(self, device: str) -> dict[str, Any]:
        """The op's arguments by name."""
        generator = torch.Generator(device).manual_seed(self.seed)
        made: dict[str, Any] = {}
        statistics = []
        for slot in OPS[self.op].arguments:
            if slot.role is Role.SHAPE:
                made[slot.name] = list(self.normalized_shape)
            elif not slot.role.is_tensor:
                made[slot.name] = self.given[slot.name]
            elif slot.role is Role.STATISTIC:
                made[slot.name] = None  # keeps the order of the arguments
                statistics.append(slot.name)
            elif self.dtypes[slot.name] is None:
                made[slot.name] = None
            elif slot.role is Role.INDEX:
                made[slot.name] = torch.randint(
                    TABLE_ROWS, self.shape[: len(self.shape) - self.normalized_ndim], generator=generator,
                    device=device, dtype=self.dtypes[slot.name],
                )  # fmt: skip
            else:
                shape = self.normalized_shape if slot.role is Role.PARAMETER else self.shape
                if slot.role is Role.MODULATION:
                    shape = self.modulation_shape(slot.name)
                elif slot.role is Role.TABLE:
                    shape = (TABLE_ROWS + self.seed % TABLE_ROWS, *self.normalized_shape)
                elif slot.role is Role.COLUMNS:
                    shape = (*self.shape[:-1], self.given["width"] - 2 * self.shape[-1])
                tensor = fill(shape, self.values[slot.name], self.dtypes[slot.name], generator)
                made[slot.name] = FOUR_DIMS[self.layouts[slot.name]](tensor)
        exact = statistics_of(made["x"], self.normalized_ndim, OPS[self.op].norm, self.given.get("groups", 1))
        for name in statistics:
            kind = FP64 if self.dtypes["x"] == FP64 else FP32
            made[name] = statistic_layouts(exact[name].to(kind))[self.layouts[name]]
        return made


def statistics_of(x: Tensor, normalized_ndim: int, norm: str, groups: int = 1) -> dict[str, Tensor]:
    batch, columns = x.shape[: x.dim() - normalized_ndim], x.shape[x.dim() - normalized_ndim :]
    wide = x.double().reshape(*batch, groups, columns.numel() // groups)
    mean = wide.mean(-1)
    centered = wide - mean[..., None] if norm == "layer" else wide
    found = {"mean": mean, "rstd": torch.rsqrt(centered.square().mean(-1) + 1e-5)}
    return {name: each.reshape(*batch, *(1,) * (normalized_ndim - 1), groups) for name, each in found.items()}


def fill(shape: tuple[int, ...], kind: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random numbers of a kind of VALUES or PARAMETER_VALUES."""
    x = torch.randn(shape, generator=generator, device=generator.device, dtype=FP64)
    info = torch.finfo(dtype)
    if kind == "denormal" and dtype == BF16 and x.is_cpu:
        kind = "tiny"  # Triton's interpreter misreads bfloat16's denormal numbers
    if kind == "normal":
        x = x * 1.5 + 0.5
    elif kind == "parameter":
        x = x * 0.5 + 1
    elif kind == "mean 1e4":
        x = x + 1e4
    elif kind == "equal rows":
        x = x[..., :1].expand(shape) * 100
    elif kind == "constant":
        x = torch.full_like(x, 0.1)
    elif kind == "one-signed":
        x = x.abs()
    elif kind == "zero":
        x = torch.zeros_like(x)
    elif kind == "tiny":
        x = x * 1e-4
    elif kind == "denormal":
        x = x * info.smallest_normal / 4
    elif kind == "large":
        x = x * (1e3 if dtype == FP16 else 1e15)
    else:  # a few elements that are not finite
        few = torch.rand(shape, generator=generator, device=generator.device) * x.numel() < 2
        x = torch.where(few, float(kind), x)
    return x.clamp(-info.max, info.max).to(dtype) if kind != "inf" else x.to(dtype)


def draw(number: int, seed: int, most_elements: int) -> Call | OtherCall:
    """The call of this number."""
    of_family = random.Random(f"{seed} {number // FAMILY}")
    each = random.Random(f"{seed} {number}")
    name = of_family.choice((*OPS, *others.OTHERS))
    if name in others.OTHERS:
        return others.draw(name, of_family, each, most_elements)
    op = OPS[name]
    normalized = _normalized_shape(of_family, min(MOST_COLS, most_elements))
    normalized = (math.prod(normalized),) if op.slot("rest") else normalized  # columns of one tensor are of one dim
    strided = of_family.random() < 0.3
    dtypes, layouts, given = _of_family(of_family, op, math.prod(normalized), strided)
    tensors = [slot for slot in op.arguments if slot.role.is_tensor and slot.role is not Role.STATISTIC]
    setting = of_family.choice(SETTINGS)
    if any(slot.role is Role.MODULATION for slot in op.arguments):
        setting = setting and -1  # blocks of ordered sums must hold whole samples
    most_rows = elements_of(each, most_elements) // max(1, math.prod(normalized))
    if setting and setting > 0:
        most_rows = min(most_rows, MOST_BLOCKS * setting)
    batch = _batch_shape(rows_of(each, number, seed), most_rows, 4 - len(normalized), strided)
    calm = each.random() < 0.4
    values = {
        slot.name: each.choice(PARAMETER_VALUES if slot.role is Role.PARAMETER else VALUES[: 3 if calm else None])
        for slot in tensors
    }
    for name, other in (("x", "gate"), ("gate", "x")):
        if values.get(name) == "large" and other in values:
            values[other] = "normal"  # or the squares of their product may overflow, of which docs/numerics.md tells
    return Call(
        op.name, (*batch, *normalized), len(normalized), dtypes, values, layouts, given,
        variant=of_family.choice((None, None, *VARIANTS[:-1])),  # not ATen's kernels
        margin=of_family.choice((0, 0, 0, 16, 100)),
        mode=each.choice(MODES),
        seed=each.getrandbits(32),
        setting=setting,
    )  # fmt: skip


def elements_of(rng: random.Random, most: int) -> int:
    """How many elements a call may have."""
    return most if rng.random() < 0.25 else min(most, FEW_ELEMENTS)


def rows_of(rng: random.Random, number: int, seed: int) -> random.Random:
    """What draws a call's rows: now and then one of three for the whole family, so that they have been seen before."""
    return random.Random(f"{seed} {number // FAMILY} {rng.randrange(3)}") if rng.random() < 0.3 else rng


def _of_family(rng: random.Random, op: Op, cols: int, strided: bool) -> tuple[dict, dict, dict]:
    """(dtypes, layouts, other arguments)."""
    dtypes: dict[str, torch.dtype | None] = {}
    layouts, given = {}, {}
    of_x, same = rng.choices(DTYPES, WEIGHTS)[0], rng.random() < 0.5
    names = list(FOUR_DIMS if strided else ANY_RANK)
    for slot in op.arguments:
        if slot.role is Role.STATISTIC:
            layouts[slot.name] = rng.choice(("[M]", "[M, 1]", "strided"))
        elif slot.role is Role.INDEX:
            dtypes[slot.name] = rng.choice((torch.int32, torch.int64))
        elif slot.role.is_tensor:
            absent = slot.optional and rng.random() < 0.2
            dtypes[slot.name] = None if absent else of_x if same or slot.name == "x" else rng.choice(DTYPES)
            is_rows = slot.role is not Role.PARAMETER
            of_slot = list(ANY_RANK) if slot.role in (Role.MODULATION, Role.TABLE) else names
            layouts[slot.name] = rng.choice(of_slot) if is_rows and rng.random() < 0.6 else "contiguous"
        elif slot.role is Role.EPS:
            given[slot.name] = rng.choice((1e-5, 1e-6, 1e-12, 1e-3, 0.0, *[None] * slot.optional))
        elif slot.role is Role.FORM:
            groups = [1, *(each for each in (2, 3, 4, 8) if cols % each == 0)]
            values = {float: (0.0, 1.0), bool: (False, True), int: groups}
            values[str] = tuple(filter(None, CHOICES.get(slot.name, ())))
            given[slot.name] = rng.choice(values[type(slot.default)])
        elif slot.role is Role.COUNT and slot.name not in given:
            gaps = [rng.choice((0, 0, 3, 16, 64)) for _ in range(3)]
            at = [gaps[0], sum(gaps[:2]) + cols]
            rng.shuffle(at)
            given |= {"width": sum(gaps) + 2 * cols, "x_at": at[0], "gate_at": at[1]}
        elif slot.role is Role.DTYPE:
            given[slot.name] = rng.choice((None, *DTYPES))
        elif slot.role is Role.MASK:
            given[slot.name] = [rng.random() < 0.75 for _ in op.outputs]
        elif isinstance(slot.default, bool):
            given[slot.name] = rng.random() < 0.5
        elif isinstance(slot.default, float):
            given[slot.name] = rng.choice((slot.default, 1.0))
    if op.slot("rest"):  # x, gate and rest are columns of one tensor
        dtypes |= {name: of_x for name in ("gate", "rest") if dtypes[name]}
    if "branch" in dtypes and None in (dtypes["branch"], dtypes["gate"]):
        dtypes |= {"branch": None, "gate": None}  # a branch is what the gate multiplies
    return dtypes, layouts, given


def _log_uniform(rng: random.Random, most: int) -> int:
    return max(1, min(most, round(math.exp(rng.uniform(0, math.log(max(most, 1)))))))


def _normalized_shape(rng: random.Random, most: int) -> tuple[int, ...]:
    size = _log_uniform(rng, most)
    power = 2 ** (size.bit_length() - 1)
    widths = size, size | 1, _prime_near(size), power, size // 8 * 8, size // 256 * 256, power + rng.choice((-1, 1))
    cols = rng.choice((*widths, rng.choice(TROUBLED_WIDTHS), rng.randint(0, 3)))
    cols = min(cols, most)
    if rng.random() < 0.2 and cols:
        inner = rng.choice([each for each in (1, 2, 3, 4, 8, 16, 64) if cols % each == 0])
        return cols // inner, inner
    return (cols,)


def _batch_shape(rng: random.Random, most_rows: int, most_dims: int, all_dims: bool) -> tuple[int, ...]:
    rows = _log_uniform(rng, most_rows)
    rows = rng.choice((rows, rows, rows | 1, SMS * max(1, rows // SMS) + rng.randint(-1, 1), rng.randint(0, 4)))
    rows = min(rows, most_rows)
    dims = most_dims if all_dims else rng.randint(0 if rows == 1 else 1, most_dims)
    shape: list[int] = []
    for _ in range(dims - 1):
        shape.append(rng.choice([each for each in (1, 2, 3, 5, 8, 31) if rows % each == 0]))
        rows //= shape[-1]
    return tuple(rng.sample([*shape, rows], dims)) if dims else ()


def _prime_near(size: int) -> int:
    while size > 2 and any(size % each == 0 for each in range(2, math.isqrt(size) + 1)):
        size += 1
    return size
