"""The problems that are timed: lists of shapes, the command line's arguments for them, and their tensors.

16384x4096            rows x cols, contiguous
4096x32x128           tokens x heads x cols, contiguous: a norm of queries or keys
4096x32x128@6144      the same as a slice of packed rows, 6144 elements from one token to the next
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fusednorm.dtypes import DTYPES
from fusednorm.operands import DIRECTIONS, NORMS
from fusednorm.tools.oracle import Case, Inputs, Outputs, exact, make_inputs, stock

MODEL_WIDTHS = (768, 1024, 1152, 1536, 2048, 2304, 2560, 2880, 3072, 3584, 3840, 4096, 4608, 5120, 5376, 6144, 7168,
                8192, 10240, 12288, 14336, 16384, 18432, 20480)  # fmt: skip
WIDE_WIDTHS = (24576, 32768, 36864, 65536, 131072, 262144)
ROW_COUNTS = (1, 128, 1024, 2048, 4096, 4095, 8192, 8193, 12345, 16384, 32768, 65536)
HEAD_WIDTHS = (64, 96, 128, 192, 256, 512)

SHAPE_SETS = {
    "quick": "16384x4096 8192x8192 32768x1024 1024x4096".split(),
    "proof": (
        "16384x4096 8192x8192 16384x2048 32768x1024 2048x8192 4096x12288 2048x32768 8192x16384 4096x5120 1024x4096"
        " 65536x128 2048x65536"
    ).split(),
    "widths": [f"8192x{cols}" for cols in MODEL_WIDTHS],
    "wide": [f"2048x{cols}" for cols in WIDE_WIDTHS],
    "rows": [f"{rows}x4096" for rows in ROW_COUNTS],
    "beside": "16384x4096 4096x4096 1024x4096 65536x128 2048x32768".split(),
    "heads": [
        *(f"4096x32x{cols}" for cols in HEAD_WIDTHS),
        *(f"4096x{min(32, 4096 // cols)}x{cols}@6144" for cols in HEAD_WIDTHS),
        "65536x1x512@576",
    ],
}
# Column sums: rows x cols, or rows x cols x number of tensors; + if the tensors' sums are added up, too.
COLUMN_SUMS = (
    *(f"{side}x{side}" for side in (256, 1024, 4096, 8192, 16384, 65536)),
    *"8192x8192x2 8192x8192x3 8192x8192x5 4096x1024x2 4096x1024x3 4096x1024x5 4096x1024x5+".split(),
    *"4096x1024x57 4096x1024x57+ 65536x256 147456x128x3".split(),
)


class Shape(NamedTuple):
    """The sizes of x, and its stride in the first dim where x is not contiguous."""

    sizes: tuple[int, ...]
    token_stride: int | None = None


@dataclass(frozen=True)
class BenchCase(Case):
    """A case of the tests with three more choices: x as a slice of packed rows, parameters without gradients, and a
    residual's gradient that is added to dx."""

    token_stride: int | None = None
    frozen: bool = False
    residual_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        packed = f"@{self.token_stride}" if self.token_stride else ""
        residual = f"-residual_{dtype_name(self.residual_dtype)}" if self.residual_dtype else ""
        return super().__str__() + packed + ("-frozen" if self.frozen else "") + residual

    @property
    def output_mask(self) -> list[bool]:
        """(dx, dweight, dbias), as the ops take it."""
        trained = (dtype is not None and not self.frozen for dtype in (self.weight_dtype, self.bias_dtype))
        return [True, *trained]


@dataclass(frozen=True, eq=False)
class BenchInputs(Inputs):
    """residual_grad has the shape of x and is added to the norm's gradient: dx is their sum."""

    residual_grad: torch.Tensor | None = None

    def with_residual(self, outputs: Outputs) -> Outputs:
        """The outputs with residual_grad added to dx by a kernel of torch."""
        if self.residual_grad is None:
            return outputs
        dx = outputs.dx + self.residual_grad.to(torch.promote_types(outputs.dx.dtype, self.residual_grad.dtype))
        return dataclasses.replace(outputs, dx=dx.to(outputs.dx.dtype))


def dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def parse_shape(text: str) -> Shape:
    match = re.fullmatch(r"([1-9]\d*(?:x[1-9]\d*){1,2})(?:@([1-9]\d*))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"a shape is rows x cols like 16384x4096, or tokens x heads x cols like 4096x32x128@6144, got {text}"
        )
    sizes = tuple(int(size) for size in match[1].split("x"))
    stride = int(match[2]) if match[2] else None
    if stride is not None and stride < math.prod(sizes[1:]):
        needed = math.prod(sizes[1:])
        raise argparse.ArgumentTypeError(f"the stride after @ must hold a token's {needed} elements, got {text}")
    return Shape(sizes, stride)


SHAPE_HELP = "rows x cols, or tokens x heads x cols; @6144: x is a slice of rows of 6144 elements"


def make_parser(tool: str, description: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m bench.{tool}", description=description, formatter_class=raw)


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """What `make_cases` reads, without the choices that concern the backward alone."""
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=[], metavar="MxN", help=SHAPE_HELP)
    parser.add_argument("--set", nargs="+", choices=SHAPE_SETS, default=[], help="shapes by name (default: quick)")
    add_norms_argument(parser)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"], help="of x and grad_out")
    parser.add_argument("--weight-dtype", nargs="+", choices=DTYPES, help="of the parameters (default: as x)")
    parser.set_defaults(residual=None, frozen=False)


def add_backward_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--residual", choices=DTYPES, help="dtype of a gradient to be added to dx (default: none)")
    parser.add_argument("--frozen", action="store_true", help="no gradients of the parameters")


def add_plain_arguments(parser: argparse.ArgumentParser) -> None:
    """What `plain_cases` reads, but for the shapes."""
    add_norms_argument(parser)
    add_dtype_argument(parser)


def add_norms_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--norms", nargs="+", choices=NORMS, default=NORMS, help="default: both")


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of all tensors (default: bf16)")


def add_direction_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--direction", choices=DIRECTIONS, default="backward", help="default: backward")


def plain_case(norm: str, sizes: tuple[int, ...], dtype: str, weights: str = "") -> BenchCase:
    """Contiguous rows, all tensors of one dtype but perhaps the parameters (`weights`), all gradients."""
    of_weights = DTYPES[weights or dtype]
    return BenchCase(norm, sizes, 1, DTYPES[dtype], of_weights, of_weights if norm == "layer" else None)


def plain_cases(options: argparse.Namespace) -> list[BenchCase]:
    return [plain_case(norm, shape.sizes, options.dtype) for norm in options.norms for shape in options.shapes]


def make_cases(options: argparse.Namespace) -> Iterator[BenchCase]:
    named = options.set or ([] if options.shapes else ["quick"])
    shapes = [*options.shapes, *(parse_shape(text) for name in named for text in SHAPE_SETS[name])]
    for dtype, norm, shape in itertools.product(options.dtype, options.norms, dict.fromkeys(shapes)):
        for weight in options.weight_dtype or [dtype]:
            bias_dtype = DTYPES[weight] if norm == "layer" else None
            dtypes = (DTYPES[dtype], DTYPES[weight], bias_dtype)
            residual = DTYPES.get(options.residual)
            yield BenchCase(norm, shape.sizes, 1, *dtypes, None, 1e-5, shape.token_stride, options.frozen, residual)


def make_bench_inputs(case: BenchCase, device: torch.device | str) -> BenchInputs:
    """The tensors of `make_inputs`, with x in packed rows and a residual's gradient where the case says so."""
    inputs = make_inputs(case, device)
    x, residual_grad = inputs.x, None
    if case.token_stride is not None:
        packed = torch.zeros(case.shape[0], case.token_stride, dtype=case.x_dtype, device=device)
        inner = torch.empty(case.shape[1:], device="meta").stride()
        x = packed.as_strided(case.shape, (case.token_stride, *inner)).copy_(x)
    if case.residual_dtype is not None:
        residual_grad = inputs.grad_out.flip(0).to(case.residual_dtype)
    made = BenchInputs(x, inputs.grad_out, inputs.weight, inputs.bias, residual_grad)
    if residual_grad is not None:
        for kind, answer in (("exact", exact(case, made)), ("stock", stock(case, made))):
            made.remember(kind, case, made.with_residual(answer))
    return made
