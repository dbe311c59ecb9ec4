"""What a kernel is compiled for: two compile-time arguments, `norm` and `tile`, that every kernel takes and passes on whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.language import constexpr


@dataclass(frozen=True)
class Norm:
    """Which function is computed."""

    layer: bool  # LayerNorm; else RMSNorm
    acc: Any  # triton dtype of statistics, sums and partials
    fold: bool  # x is a 16-bit type: see rowmath.normalize
    has_weight: bool
    has_bias: bool = False  # forward
    wants_dx: bool = False  # backward, as the next two
    wants_dw: bool = False
    wants_db: bool = False
    nested_rows: bool = False  # rows at two nested strides


@dataclass(frozen=True)
class Tile:
    """How much a CTA holds at a time: `rows` rows of num_chunks chunks of `chunk` columns. rows and chunk are powers of two."""

    rows: int
    chunk: int
    num_chunks: int

    @property
    def chunks(self) -> constexpr:
        """num_chunks in the form that static_range takes."""
        return constexpr(self.num_chunks)


@dataclass(frozen=True)
class RingTile(Tile):
    """A tile in shared memory, in a ring of num_stages."""

    num_stages: int
    box: int  # columns on the innermost side of a TMA box: a row is [cols / box, box]
    vector: int  # adjacent columns in a thread
    num_warps: int  # that compute on a tile together
    weight_in_smem: bool
    num_groups: int = 1  # compute groups that take tiles in turn
    cached: bool = False  # a tile stays in registers between its two passes
    group_registers: int = 0  # a thread of a compute group is given

    @property
    def stages(self) -> constexpr:
        """num_stages in the form that static_range takes."""
        return constexpr(self.num_stages)
