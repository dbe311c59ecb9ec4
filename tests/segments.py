"""Calls of lookup_backward, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from cases import BF16, FP16, FP32, FP64
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Some numbers are no row of the table, below and above it."""

    rows: int
    cols: int
    size: int
    dtypes: tuple[torch.dtype, ...] = (BF16,)
    dtype: torch.dtype = FP32
    index_dtype: torch.dtype = torch.int64
    is_sorted: bool = False
    device: str = field(default="cpu", compare=False)

    def __str__(self) -> str:
        dtypes = (*self.dtypes, self.dtype, self.index_dtype)
        text = f"{self.rows}x{self.cols}-{self.size}" + "-sorted" * self.is_sorted
        return text + "".join(f"-{each}".replace("torch.", "") for each in dtypes)

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.rows)

    @property
    def index(self) -> Tensor:
        index = torch.randint(-1, self.size + 1, (self.rows,), generator=self.generator(), device=self.device)
        return (index.sort().values if self.is_sorted else index).to(self.index_dtype)

    @property
    def grads(self) -> list[Tensor]:
        """Around 1/4, so that a missing row shows in each sum."""
        shape, generator = (self.rows, self.cols), self.generator()
        normal = [torch.randn(shape, generator=generator, device=self.device) + 0.25 for _ in self.dtypes]
        return [each.to(dtype) for each, dtype in zip(normal, self.dtypes, strict=True)]

    def sums(self) -> list[Tensor]:
        return torch.ops.fusednorm.lookup_backward(self.grads, self.index, self.size, dtype=self.dtype)

    def complaints(self, arch: int) -> list[str]:
        """About the compiler's builds, in a process that does not interpret."""
        from bench.resources import resources
        from fusednorm.host import segments

        problem = segments.SegmentSums(self.size, self.cols, self.dtypes, self.dtype, (True,) * (2 + len(self.dtypes)))
        used = [(each, resources(each, arch)) for each in segments.program_of(problem).launches]
        return [f"{each.kernel.__name__} spills {of.stack_bytes} bytes a thread" for each, of in used if of.stack_bytes]

    def check(self, sums: list[Tensor]) -> None:
        """Fails unless each sum is near that in float64 of the rows that have a number of the table."""
        numbers = torch.arange(self.size, device=self.device)[:, None]
        members = (numbers == self.index.long()).double()
        for got, rows in zip(sums, self.grads, strict=True):
            wide = rows.double()
            want, size = members @ wide, members @ wide.abs_()
            near = size * torch.finfo(FP64 if FP64 in (self.dtype, rows.dtype) else FP32).eps * 8
            assert got.dtype == self.dtype and got.shape == want.shape and got.is_contiguous()
            assert ((got.double() - want).abs() <= near + torch.finfo(got.dtype).eps * want.abs()).all()


# Blocks of one number and of many, rows and columns that end within a tile, numbers that no row has.
CASES = (
    Segments(130, 40, 3, dtypes=(BF16, FP32), dtype=BF16),
    Segments(200, 24, 500, dtypes=(FP16,), dtype=FP16, index_dtype=torch.int32),
    Segments(70, 520, 1, dtypes=(FP32, BF16, BF16)),
    Segments(64, 77, 8, is_sorted=True),
    Segments(5, 7, 2, dtypes=(BF16, FP64), dtype=FP64),
)
