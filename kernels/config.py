"""What a kernel is compiled for: two compile-time arguments, `norm` and `tile`, that every kernel takes and passes on
whole."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import triton.language as tl

# Triton 3.10 will not contract a product and a sum into one instruction unless asked; 3.9 warns that it still does.
COMPILE_OPTIONS = {"enable_fp_fusion": True}


class CompileTime(dict):
    """Attributes a kernel is compiled for. A dict as well, because Triton's compile hooks write every constant as
    JSON."""

    def __post_init__(self):
        self.update(asdict(self))


@dataclass(frozen=True)
class Norm(CompileTime):
    """Which function is computed."""

    layer: bool  # LayerNorm; else RMSNorm
    fp64: bool  # statistics, sums and partials in float64; else in float32
    fold: bool  # x is a 16-bit type: see rowmath.normalize
    has_weight: bool
    has_bias: bool = False  # forward
    wants_dx: bool = False  # backward, as the next two
    wants_dw: bool = False
    wants_db: bool = False
    has_residual: bool = False  # a gradient is added to dx
    nested_rows: bool = False  # rows at two nested strides

    @property
    def acc(self) -> tl.dtype:
        """Dtype of statistics, sums and partials."""
        return tl.float64 if self.fp64 else tl.float32


@dataclass(frozen=True)
class Tile(CompileTime):
    """How much a CTA holds at a time: `rows` rows of num_chunks chunks of `chunk` columns. rows and chunk are powers
    of two."""

    rows: int
    chunk: int
    num_chunks: int
    num_warps: int  # that work on a tile together
    even_bits: int = 0  # a row's columns and rows' strides are multiples of 2^even_bits; of 16 the compiler sees itself
    one_tile: bool = False  # of a forward: no CTA has a second, so that nothing is asked for ahead
    announces_end: bool = False  # of a backward: the launch that sums its partials is dependent on it

    @property
    def chunks(self) -> tl.constexpr:
        """num_chunks in the form that static_range takes."""
        return tl.constexpr(self.num_chunks)


@dataclass(frozen=True)
class PartialsTile(CompileTime):
    """How a CTA sums partials of dw or db: a piece of `cols` columns, num_loads loads of `rows` rows at once."""

    cols: int
    num_loads: int
    num_warps: int
    dependent: bool = False  # may be placed while the launch that writes the partials ends

    @property
    def rows(self) -> int:
        """Of one load, four elements a thread."""
        return 128 * self.num_warps // self.cols

    @property
    def loads(self) -> tl.constexpr:
        """num_loads in the form that static_range takes."""
        return tl.constexpr(self.num_loads)


@dataclass(frozen=True)
class RingTile(Tile):
    """A tile in shared memory, in a ring of num_stages: chunk columns of num_chunks chunks in each CTA of a cluster.
    It comes in copies of copy_chunks chunks each; what the last has beyond the row's end is zeros. With a tail
    there are two: the last chunk, within which the row may end, and all others."""

    num_stages: int = 2
    copy_chunks: int = 1  # a power of two; more than 1 only of chunks that are whole
    tail: bool = False
    box: int = 256  # columns on the innermost side of a TMA box: a row is [cols / box, box]
    vector: int = 8  # adjacent columns in a thread
    threads_of_a_row: int = 32  # that share its columns in a CTA
    whole: bool = False  # the chunks are exactly a row, so that every thread has as many columns
    weight_in_smem: bool = False  # and bias
    # A tile's statistics are asked for a whole tile ahead, not half of one (10% faster), and the partials leave before
    # the dx of the last tile is made.
    works_ahead: bool = True
    in_pairs: bool = False  # 16-bit values become float32 two at a time: see rowmath.widen
    cluster: int = 1  # CTAs that share a row: chunk columns each
    num_groups: int = 1  # compute groups that take tiles in turn
    cached: bool = False  # a tile stays in registers between its two passes
    group_registers: int = 0  # a thread of a compute group is given

    @property
    def columns_of_thread(self) -> int:
        return self.num_chunks * self.chunk // self.threads_of_a_row

    @property
    def stages(self) -> tl.constexpr:
        """num_stages in the form that static_range takes."""
        return tl.constexpr(self.num_stages)

    @property
    def copies(self) -> tl.constexpr:
        """How many copies make a tile, in the form that static_range takes."""
        return tl.constexpr(2 if self.tail else -(-self.num_chunks // self.copy_chunks))

    def copy_of(self, chunk: int) -> int:
        """Which copy brings a chunk."""
        return 1 if self.tail and chunk == self.num_chunks - 1 else 0 if self.tail else chunk // self.copy_chunks

    def first_chunk(self, copy: int) -> int:
        """The first chunk of a copy."""
        return copy * (self.num_chunks - 1 if self.tail else self.copy_chunks)

    def chunks_of(self, copy: int) -> int:
        """How many chunks a copy has room for."""
        return 1 if self.tail and copy else self.copy_chunks
