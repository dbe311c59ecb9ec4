"""The compile-time arguments of the kernels: `norm` says which function is computed, `tile` how the work is cut.
Kernels pass them on whole."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import triton.language as tl

# Triton 3.10 will not contract a product and a sum into one instruction unless asked; 3.9 warns that it still does.
COMPILE_OPTIONS = {"enable_fp_fusion": True}
FOLDED = "scale", "shift"  # rows that become part of weight and bias; the 1st and 2nd of `gradients` are theirs


class CompileTime(dict):
    """A compile-time argument: a dataclass whose attributes a kernel is compiled for. It is a dict too, because
    Triton's compile hooks write every constant as JSON. Its repr is its part of the keys of Triton's builds."""

    def __post_init__(self):
        self.update({each.name: getattr(self, each.name) for each in fields(self)})


@dataclass(frozen=True, repr=False)
class Form(CompileTime):
    """What a norm does beside normalizing rows, element by element, as jit functions. rowmath.py has the values.

    `tiles` is a tuple of the same elements of x and of the other row tensors that the form reads, each in its own
    dtype, an absent one left out: norm.has_row and norm.row find them by name. All other arguments are tensors of the
    accumulation dtype that broadcast, but an absent weight or bias is a placeholder: a function that does not ask
    norm.has_weight or norm.has_bias needs the operand. A dy of 0, which padding has, must give g = 0 and sums of 0; so
    must tiles of 0 give h = 0.
    """

    combine: Any  # (tiles, dtype that h is stored in, norm) -> h, the row that is normalized, in any dtype
    round_x_hat: Any  # (x_hat, tiles, norm) -> the first argument of `scale`
    scale: Any  # (x_hat, weight, norm) -> the first argument of `shift`
    shift: Any  # (scaled, bias, norm) -> u
    finish: Any  # (u, tiles, norm) -> y
    to_du: Any  # (dy, tiles, norm) -> du, the gradient of u
    upstream: Any  # (du, weight, norm) -> g, the gradient of x_hat
    to_dw: Any  # (du, x_hat, norm) -> what an element adds to its column's sum for dw
    to_db: Any  # (du, norm) -> the same for db
    # (dh, dy, x_hat, weight, bias, tiles, norm) -> the gradients of x and of the other row tensors, as a tuple. The sum
    # of one over rows is the gradient of what these rows share
    gradients: Any
    activation: Any = None  # (z, dtype of the gate) -> what a gate's element becomes, and its derivative
    factor: Any = None  # (scale) -> what u is multiplied by, and its derivative
    early: tuple[int, ...] = ()  # which of `gradients` need no dh, and so no row sums
    late: tuple[str, ...] = ()  # names of row tensors that only `gradients` reads
    # For narrow.py: linear maps of whole rows, (chunks, cos, sin, whether the map is transposed, tile) -> chunks
    turn_h: Any = None  # of x, before it is normalized
    turn_u: Any = None  # of u
    finish_dw: Any = None  # (sum, weight, norm) -> dw of a column; None: the sum is dw
    weight_offset: float = 0.0  # that `scale` and `upstream` add to the weight
    inside: Any = None  # the Form that is left of a modulated one: see Norm.inside
    again: Any = None  # the Form by which y is normalized again

    def __post_init__(self):
        self.update({each.name: str(getattr(self, each.name)) for each in fields(self)})

    def __repr__(self) -> str:
        """Names the functions by hashes of their sources and of all that they call. Without these, Triton would run an
        old build after a function was edited: it hashes what a kernel calls by name, not what a value holds."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return f"Form({ {name: getattr(value, 'cache_key', value) for name, value in values.items()} })"


@dataclass(frozen=True)
class Norm(CompileTime):
    """Which function is computed."""

    form: Form
    layer: bool  # LayerNorm; else RMSNorm
    fp64: bool  # statistics, sums and partials in float64; else in float32
    has_weight: bool
    has_bias: bool = False  # in a backward: one whose values are read
    rounds_u: bool = False  # forward: to x's dtype, before a gate
    steps: tuple[str, ...] = ()  # forward: the dtypes to which steps of a modulated norm are rounded, by Triton's names
    wants_dx: bool = False  # backward, like the next two: the gradient of a row tensor
    wants_dw: bool = False
    wants_db: bool = False
    nested_rows: bool = False  # a tensor's rows lie at two nested strides: see multiwave.py
    rows_in: tuple[str, ...] = ()  # names of the row tensors that are read for the form, in their order
    tables: tuple[str, ...] = ()  # of these, those whose rows an index names
    shared: tuple[str, ...] = ()  # names of those that have one row for all rows of a CTA
    parameters: tuple[str, ...] = ()  # names of the parameters beside weight and bias
    stored: tuple[int, ...] = (0,)  # which of the form's `gradients` a backward stores
    summed: tuple[int, ...] = ()  # and which it sums over the rows of a CTA
    mixes_halves: bool = False  # operands are bfloat16, and something is rounded to float16: see rowmath.kept
    folds: bool = False  # whether `inside` is computed for each element; the rows of a CTA share a scale

    @property
    def inside(self) -> Norm:
        """This norm; where it folds, what is left for each element: a norm whose weight is the factor times the weight,
        and whose bias, in a forward, is the factor times the bias, and the shift. Both are in the accumulation dtype.
        dw, db and the gradients of scale and shift follow from its dw and db (rowmath.sums_of_modulated)."""
        if not self.folds:
            return self
        backward = self.wants_dx or self.wants_sums
        return replace(
            self,
            form=self.form.inside,
            has_weight=True,
            has_bias=not backward and (self.has_bias or "shift" in self.shared),
            folds=False,
            shared=tuple([name for name in self.shared if name not in FOLDED]),
            summed=tuple([gradient for gradient in self.summed if gradient > len(FOLDED)]),
        )

    @property
    def again(self) -> Norm | None:
        """The norm of y, if the form has one."""
        if not self.form.again:
            return None
        weight, bias = ("next_weight" in self.parameters, "next_bias" in self.parameters)
        return replace(self, form=self.form.again, has_weight=weight, has_bias=bias, rows_in=(), parameters=())

    def is_left(self, nth: int) -> bool:
        """Whether `inside` has the nth of `shared`."""
        return self.shared[nth] in self.inside.shared

    def has_shared(self, name: str) -> bool:
        return name in self.shared

    def nth_shared(self, name: str) -> int:
        return self.shared.index(name)

    def nth_inside(self, nth: int) -> int:
        """Which sum of `inside` is the nth of this norm's; negative for those that follow from its dw and db."""
        return nth - (len(self.summed) - len(self.inside.summed))

    def has_row(self, name: str) -> bool:
        """Whether there is a row tensor of this name beside x."""
        return name in self.rows_in + self.shared

    @property
    def has_tables(self) -> bool:
        return bool(self.tables)

    def is_table(self, nth: int) -> bool:
        """Whether an index names the rows of the nth of rows_in."""
        return self.rows_in[nth] in self.tables

    def is_late(self, nth: int) -> bool:
        """Whether the tile of the nth of rows_in is read only when the sums of a row are known: by `gradients`, or in a
        forward by `finish`, for which tables alone are loaded so late."""
        name, backward = self.rows_in[nth], self.wants_dx or self.wants_sums
        return name in self.form.late if backward else name in self.tables and name in FOLDED

    def is_late_shared(self, nth: int) -> bool:
        """The same of the nth of shared."""
        return self.shared[nth] in self.form.late

    def row(self, name: str) -> int:
        """Its place among a Form's `tiles`."""
        return 1 + (self.rows_in + self.shared).index(name)

    @property
    def stores_dx(self) -> bool:
        return self.wants_dx and 0 in self.stored

    def is_early(self, nth: int) -> bool:
        """Whether the nth gradient that is stored needs no row sums."""
        return self.stored[nth] in self.form.early

    def gradient(self, nth: int) -> int:
        """Which of the form's `gradients` is the nth that is stored."""
        return self.stored[nth]

    @property
    def sums(self) -> tl.constexpr:
        """The number of those that are summed, in the form that static_range takes."""
        return tl.constexpr(len(self.summed))

    @property
    def wants_sums(self) -> bool:
        """Whether a backward leaves partials."""
        return self.wants_dw or self.wants_db or len(self.summed) > 0

    def gradient_of_sum(self, nth: int) -> int:
        """Which of the form's `gradients` is the nth that is summed."""
        return self.summed[nth]

    @property
    def rounds_steps(self) -> bool:
        return bool(self.steps)

    def step(self, nth: int) -> tl.dtype:
        """To which the nth step is rounded: gate * x, u, its factor, their product."""
        return tl.dtype(self.steps[nth])

    @property
    def acc(self) -> tl.dtype:
        """Dtype of statistics, sums and partials."""
        return tl.float64 if self.fp64 else tl.float32


@dataclass(frozen=True)
class Tile(CompileTime):
    """What a CTA holds at a time: `rows` rows of num_chunks chunks of `chunk` columns. rows and chunk are powers of
    two. log2_divisor and one_tile are for portable kernels."""

    rows: int
    chunk: int
    num_chunks: int
    num_warps: int  # warps that work on a tile together
    # cols and all row strides are multiples of 2^log2_divisor. 0 if 16 divides them: Triton detects that itself.
    log2_divisor: int = 0
    one_tile: bool = False  # forward: no CTA has a second tile (a short-lived plan), so nothing is loaded ahead
    announces_end: bool = False  # backward: the launch that sums its partials is a dependent launch
    groups: int = 1  # of columns, each with CTAs of its own, whose program_id(2) says which it is
    makes_again: bool = False  # backward: the second pass makes values of the first again, and none is held for it
    columns_of_chunk: int = 0  # if fewer than `chunk`: each chunk of a row is padded, not the last one alone
    together: ClassVar[int] = 1  # see PartsTile

    @property
    def width(self) -> int:
        """Columns from one chunk of a row to the next."""
        return self.columns_of_chunk or self.chunk

    @property
    def padded_columns(self) -> int:
        """Columns in all chunks of a row, over all CTAs of a cluster."""
        return self.num_chunks * self.chunk

    @property
    def chunks(self) -> tl.constexpr:
        """num_chunks in the form that static_range takes."""
        return tl.constexpr(self.num_chunks)


@dataclass(frozen=True)
class PartsTile(Tile):
    """What a CTA of narrow.py holds at a time, and what it must know of the grid."""

    num_parts: int = 1  # tensors in the grid
    num_levels: int = 1  # nested strides at which the rows of each lie
    turned: int = 0  # columns that the form turns, the first ones of a row
    pairs: bool = False  # of these, adjacent ones are turned together; else one of the first half and one of the second
    per_pair: bool = False  # cos and sin have an entry for each two such columns, not for each
    in_pairs: bool = False  # bfloat16 values become float32 two at a time: see rowmath.widen
    together: int = 1  # the tile's rows that are normalized as one, if more than one: the first ones
    adjacent: int = 1  # rows for each of `rows`, one after the other at the innermost stride, with the same cos and sin
    vectors: bool = False  # a thread has eight adjacent elements of a chunk, of 16 bits

    @property
    def step(self) -> int:
        """Rows from one tile to the next."""
        return self.together if self.together > 1 else self.rows * self.adjacent

    @property
    def nth_rows(self) -> tl.constexpr:
        """`adjacent` in the form that static_range takes."""
        return tl.constexpr(self.adjacent)

    @property
    def parts(self) -> tl.constexpr:
        """num_parts in the form that static_range takes."""
        return tl.constexpr(self.num_parts)

    @property
    def levels(self) -> tl.constexpr:
        """num_levels in the form that static_range takes."""
        return tl.constexpr(self.num_levels)

    @property
    def turned_chunks(self) -> tl.constexpr:
        """The chunks with such columns, in the form that static_range takes."""
        return tl.constexpr(-(-self.turned // self.width))

    @property
    def table_chunks(self) -> tl.constexpr:
        """Chunks of cos, and of sin, in narrow_async.py, in the form that static_range takes."""
        return tl.constexpr(0 if not self.turned else 1 if self.per_pair else self.num_chunks)

    def is_beside(self, chunk: int) -> bool:
        """Whether not all columns of a chunk are turned."""
        return self.turned < chunk * self.width + self.chunk


@dataclass(frozen=True)
class PartialsTile(CompileTime):
    """How a CTA sums partials of dw or db: a piece of `cols` columns, by num_loads loads of `rows` rows at once."""

    cols: int
    num_loads: int
    num_warps: int
    dependent: bool = False  # may be placed before the launch that writes the partials has ended
    log2_divisor: int = 0  # of all columns, as in Tile

    @property
    def rows(self) -> int:
        """Rows of one load, with four elements for each thread."""
        return 128 * self.num_warps // self.cols

    @property
    def loads(self) -> tl.constexpr:
        """num_loads in the form that static_range takes."""
        return tl.constexpr(self.num_loads)


@dataclass(frozen=True)
class RingTile(Tile):
    """A tile in shared memory, in a ring of num_stages stages. Each CTA of a cluster has num_chunks chunks of `chunk`
    columns. A tile arrives in copies of copy_chunks chunks each, and columns of the last copy beyond the row's end are
    zeros. With a tail there are two copies: one of all chunks but the last, and one of the last, within which the row
    may end."""

    num_stages: int = 2
    copy_chunks: int = 1  # a power of two; more than 1 only for chunks that lie within the row
    tail: bool = False
    box: int = 256  # columns of a TMA box's innermost dimension: a row is [cols / box, box]
    vector: int = 8  # adjacent columns of a thread
    threads_per_row: int = 32  # threads of a CTA that share a row's columns
    whole: bool = False  # the chunks are exactly a row, without padding, so that all threads have equally many columns
    weight_in_smem: bool = False  # weight and bias are kept in shared memory, else in registers
    # pipelined.backward loads statistics one tile ahead, else half a tile, and may store the partials before the last
    # tile's dx (partial_sums.stores_early). False if registers are short. Its worth: bench/NOTES.md, "Row loops of the
    # backward".
    prefetches_statistics: bool = True
    reads_once: bool = False  # pipelined.backward holds what dx takes of a tile; else it reads the tile again
    in_pairs: bool = False  # bfloat16 values become float32 two at a time: see rowmath.widen
    cluster: int = 1  # CTAs that share a row: `chunk` columns of each chunk in each CTA
    by_threads: bool = False  # each thread copies its own elements, a chunk to a copy; else TMA copies tiles
    added_in_ring: bool = False  # the ring's last tensor is a gradient that pipelined.backward adds to dx
    # The rest is for warp_specialized.py.
    num_groups: int = 1  # compute groups that take tiles in turn
    cached: bool = False  # a tile stays in registers between its two passes
    group_registers: int = 0  # registers for each thread of a compute group

    @property
    def padded_columns(self) -> int:
        return self.cluster * self.num_chunks * self.chunk

    @property
    def columns_per_thread(self) -> int:
        return self.num_chunks * self.chunk // self.threads_per_row

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
        """How many chunks a copy has room for; the last copy may have room beyond the last chunk."""
        return 1 if self.tail and copy else self.copy_chunks


@dataclass(frozen=True)
class ColumnTile(CompileTime):
    """rows x chunk elements that num_warps warps hold: in registers or, with TMA, in a ring of num_stages stages in
    shared memory for each tensor. The fields with defaults are for TMA only."""

    rows: int
    chunk: int
    num_warps: int
    num_stages: int = 0
    group: int = 0  # tensors whose tiles are read together, and then refilled together
    vector: int = 0  # adjacent columns of a thread
    cluster: ClassVar[int] = 1  # CTAs that share a tile
    by_threads: ClassVar[bool] = False  # TMA fills its ring

    @property
    def stages(self) -> tl.constexpr:
        """num_stages in the form that static_range takes."""
        return tl.constexpr(self.num_stages)

    @property
    def groups(self) -> tl.constexpr:
        """group in the form that static_range takes."""
        return tl.constexpr(self.group)


@dataclass(frozen=True)
class SortTile(CompileTime):
    """rows x digits that num_warps warps hold at a time: which digit each row's key has, from bit `shift` on."""

    rows: int
    digits: int  # both are powers of two
    shift: int
    num_warps: int
