"""The backward of narrow.py for elements of 16 bits, with asynchronous copies.

A thread copies what it will read of the next tile to slots of its own in shared memory, so that no registers wait for
memory, and no thread for another. The copies of a tile start before the tile in front of it is computed. x has slots
for two tiles: `ptx.await_copies` between the copies and the reads of x keeps the compiler from moving the copies behind
what is computed from it. So have cos and sin if h is turned, which takes them twice. All else has slots for one: a
thread has read it before it starts the next copies.

LayerNorm of what is turned has a power of two of columns, so that `sums_in_pairs` gives the exact mean of equal ones.
Its loop reads cos and sin again where it turns dx, because registers are short.

The sums over a row are those of du in place of du times rstd, so that one phase of shuffles adds up what the variance
and the gradient need.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import ptx
from .loads import load_parameter, number
from .narrow import part_of_grid, pick, place, wide
from .rowmath import inverse_std, quotient, sums_in_pairs, widen

VECTOR = gl.constexpr(8)  # elements of a thread in a row of a chunk


@gluon.constexpr_function
def layout_of(tile, adjacent):
    """The layout of a chunk, [rows, chunk], if a thread has so many adjacent columns of it: VECTOR, or 1 for what it
    has once for these."""
    lanes = min(32, tile.chunk // VECTOR.value)
    return gl.BlockedLayout([1, adjacent], [32 // lanes, lanes], [tile.num_warps, 1], [1, 0])


@gluon.constexpr_function
def rows_layout(tile, adjacent):
    return gl.SliceLayout(1, layout_of(tile, adjacent))


@gluon.constexpr_function
def num_folds(tile):
    """How often `fold` halves what a thread has of a chunk: until its warp has the rows of a column in one thread, or
    the thread one column."""
    return min(3, 5 - (tile.chunk // VECTOR.value).bit_length() + 1)


@gluon.constexpr_function
def folded_layout(tile, folds, apart=False):
    """The layout of a chunk that was folded so often, [rows, chunk]; if apart, of its pairs of rows before they
    are added up, [rows, 2, chunk]."""
    columns = [[0] * (1 + apart) + [1 << bit] for bit in range(tile.chunk.bit_length() - 1)]
    rows = [[1 << bit] + [0] * (1 + apart) for bit in range((tile.rows >> folds).bit_length() - 1)]
    lanes = columns[3:] + columns[3 - folds : 3][::-1] + rows
    pair = [[0, 1, 0]] * apart
    shape = [tile.rows >> folds, *[2] * apart, tile.chunk]
    return gl.DistributedLinearLayout(pair + columns[: 3 - folds], lanes[:5], lanes[5:], [], shape)


@gluon.jit
def fold(x, tile: gl.constexpr):
    """The rows of a chunk that a warp has, added up: each thread gives half of its columns away, and adds to the others
    what it gets for these."""
    x = gl.convert_layout(x, folded_layout(tile, 0), assert_trivial=True)
    for n in gl.static_range(1, num_folds(tile) + 1):
        pairs = gl.convert_layout(x.reshape([tile.rows >> n, 2, tile.chunk]), folded_layout(tile, n, True))
        x = gl.convert_layout(gl.sum(pairs, axis=1), folded_layout(tile, n), assert_trivial=True)
    return x


@gluon.constexpr_function
def by_columns(tile):
    """The layout of a folded chunk if a thread has whole columns."""
    return gl.BlockedLayout([tile.rows >> num_folds(tile), 1], [1, 32], [1, tile.num_warps], [1, 0])


@gluon.jit
def sum_of_rows(x, tile: gl.constexpr):
    """The sums of a chunk's columns. Triton's own reduction over warps would have up to 32 lanes wait for one bank of
    shared memory."""
    return gl.sum(gl.convert_layout(fold(x, tile), by_columns(tile)), axis=0)


@gluon.constexpr_function
def turned_of_chunk(c, tile):
    """How many columns of a chunk are turned, the first ones: of halves, equally many of both chunks."""
    if tile.pairs:
        return min(tile.chunk, max(0, tile.turned - c * tile.chunk))
    return tile.turned // 2


@gluon.jit
def nth_columns(c: gl.constexpr, nth, tile: gl.constexpr):
    """Columns of a row, by their numbers in chunk c. Where halves of the first columns are turned, a chunk has one of
    these, and one half of all other columns."""
    half: gl.constexpr = turned_of_chunk(c, tile)
    if tile.pairs or half == 0 or half == tile.chunk:
        found = c * tile.width + nth
    else:
        found = gl.where(nth < half, c * half + nth, c * (tile.chunk - half) + half + nth)
    return found


@gluon.jit
def columns(c: gl.constexpr, tile: gl.constexpr):
    """The columns [1, tile.chunk] of chunk c."""
    nth = gl.arange(0, tile.chunk, gl.SliceLayout(0, layout_of(tile, VECTOR.value)))
    return gl.expand_dims(nth_columns(c, nth, tile), 0)


@gluon.jit
def starts(indices, strides, part, tile: gl.constexpr):
    """Element offsets [tile.rows, 1] of the starts of rows."""
    start = wide(indices[0]) * wide(pick(strides, part, 0, tile))
    for level in gl.static_range(1, tile.levels):
        start += wide(indices[level]) * wide(pick(strides, part, level, tile))
    return gl.expand_dims(start, 1)


@gluon.constexpr_function
def slots_of(ptr):
    """Slots of a vector of these elements; 0 without any."""
    return 0 if ptr is None else ptr.dtype.element_ty.primitive_bitwidth // 16


@gluon.jit
def fill(
    slots, nth: gl.constexpr, ptr, start, size, chunks: gl.constexpr, is_table: gl.constexpr, tile: gl.constexpr
):
    """Start the copies of the first chunks of rows, of `size` bytes a thread, to the slots from the nth on. Of cos and
    sin, those of columns that are not turned become 0."""
    once: gl.constexpr = layout_of(tile, 1)
    segment = gl.expand_dims(gl.arange(0, tile.chunk // VECTOR, gl.SliceLayout(0, once)) * VECTOR, 0)
    slots_of_vector: gl.constexpr = slots_of(ptr)
    for c in gl.static_range(chunks):
        source = ptr + start + nth_columns(c, segment, tile)
        size_of_chunk = size
        if is_table and turned_of_chunk(c, tile) < tile.chunk:
            size_of_chunk = gl.where(segment < turned_of_chunk(c, tile), size, 0)
        for part in gl.static_range(slots_of_vector):
            slot = slots + (nth + c * slots_of_vector + part) * ptx.slot_step(tile.num_warps)
            slot = gl.full(source.shape, 0, gl.int32, once) + slot
            of_part = source + part * (VECTOR // slots_of_vector)
            ptx.fill_slot(slot, of_part, gl.full(source.shape, 0, gl.int32, once) + size_of_chunk, is_table)


@gluon.jit
def read(slots, nth: gl.constexpr, ptr, chunks: gl.constexpr, tile: gl.constexpr, again: gl.constexpr = False):
    """The chunks in the slots from the nth on, which were copied from `ptr`, in float32."""
    found = ()
    layout: gl.constexpr = layout_of(tile, VECTOR.value)
    for c in gl.static_range(chunks):
        slot = slots + (nth + c * slots_of(ptr)) * ptx.slot_step(tile.num_warps)
        slot = gl.full([tile.rows, tile.chunk], 0, gl.int32, layout) + slot
        found = found + (ptx.read_slot(slot, ptr.dtype.element_ty, tile.num_warps, again),)
    return found


@gluon.jit
def start_copies(
    of_dy, of_x, of_tables, first, count, x_ptr, dy_ptr, cos_ptr, sin_ptr, sizes, x_strides, dy_strides, table_strides,
    part, tile: gl.constexpr,
):  # fmt: skip
    """Those of the tile from row `first` on, if it is there. What is no row of it is the first one, with a dy of 0."""
    row = first + gl.arange(0, tile.rows, rows_layout(tile, 1))
    at = place(gl.where(row < count, row, gl.minimum(first, count - 1)), sizes, part, tile)
    of_rows = gl.where(first < count, 16, 0)
    fill(of_x, 0, x_ptr, starts(at, x_strides, part, tile), of_rows, tile.chunks, False, tile)
    of_dy_rows = gl.expand_dims(gl.where(row < count, 16, 0), 1)
    fill(of_dy, 0, dy_ptr, starts(at, dy_strides, part, tile), of_dy_rows, tile.chunks, False, tile)
    if cos_ptr is not None:
        start = starts(at, table_strides, part, tile)
        fill(of_tables, 0, cos_ptr, start, of_rows, tile.table_chunks, True, tile)
        fill(of_tables, tile.table_chunks * slots_of(cos_ptr), sin_ptr, start, of_rows, tile.table_chunks, True, tile)


@gluon.jit
def beside_turned(cos, tile: gl.constexpr):
    """cos with 1 for columns that are not turned."""
    found = ()
    for c in gl.static_range(len(cos)):
        chunk = cos[c]
        if turned_of_chunk(c, tile) < tile.chunk:
            nth = gl.arange(0, tile.chunk, gl.SliceLayout(0, layout_of(tile, VECTOR.value)))
            chunk = gl.where(gl.expand_dims(nth < turned_of_chunk(c, tile), 0), chunk, 1.0)
        found = found + (chunk,)
    return found


@gluon.jit
def turned(
    chunks, turn: gl.constexpr, of_tables, cos_ptr, sin_ptr, back: gl.constexpr, tile: gl.constexpr,
    again: gl.constexpr = False,
):  # fmt: skip
    """The chunks, turned by the tables in these slots."""
    cos = read(of_tables, 0, cos_ptr, tile.table_chunks, tile, again)
    sin = read(of_tables, tile.table_chunks * slots_of(cos_ptr), sin_ptr, tile.table_chunks, tile, again)
    if tile.per_pair:
        cos = cos + cos
        sin = sin + sin
    cos = beside_turned(cos, tile)
    made = turn(chunks, cos, sin, back, tile)
    found = ()
    for c in gl.static_range(tile.chunks):
        found = found + (gl.convert_layout(made[c], layout_of(tile, VECTOR.value), assert_trivial=True),)
    return found


@gluon.jit
def copy_rows(ptrs, rows, sizes, from_strides, to_strides, part, cols: gl.constexpr, tile: gl.constexpr):
    """As narrow.copy_rows."""
    count = number(rows[0])
    for first in range(gl.program_id(0) * tile.rows, count, gl.num_programs(0) * tile.rows):
        row = first + gl.arange(0, tile.rows, rows_layout(tile, VECTOR.value))
        at = place(row, sizes, part, tile)
        for c in gl.static_range(tile.chunks):
            in_range = gl.expand_dims(row < count, 1) & (columns(c, tile) < cols)
            copied = gl.load(ptrs[0] + starts(at, from_strides, part, tile) + columns(c, tile), mask=in_range)
            to = ptrs[1] + starts(at, to_strides, part, tile) + columns(c, tile)
            gl.store(to, copied.to(ptrs[1].dtype.element_ty), mask=in_range)


@gluon.constexpr_function
def is_power_of_two(number):
    return number & (number - 1) == 0


@gluon.jit
def mean_of(total, cols: gl.constexpr):
    if is_power_of_two(cols):
        mean = total / cols
    else:
        mean = quotient(total, cols)
    return mean


@gluon.jit
def of_vectors(x, tile: gl.constexpr):
    """The sum of each vector of a thread. Sums of products are multiply-adds then."""
    return gl.sum(x.reshape([tile.rows, tile.chunk // VECTOR, VECTOR]), axis=2)


@gluon.jit
def of_rows(sums, tile: gl.constexpr):
    return gl.convert_layout(sums, rows_layout(tile, VECTOR.value), assert_trivial=True)


@gluon.jit
def gradient(g, x, rstd, mean_gx, mean_g, norm: gl.constexpr):
    """`rowmath.gradient_beside_scaled`, but LayerNorm subtracts first: g is a product that nothing else reads, so that
    both are one multiply-add."""
    if norm.layer:
        g -= mean_g
    return gl.fma(x, -(rstd * mean_gx) * rstd, g)


@gluon.jit
def plus_two(a, b, c, d):
    return a + c, b + d


@gluon.jit
def plus_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@gluon.jit
def backward(
    x_ptrs, dy_ptrs, weight_ptrs, cos_ptr, sin_ptr, dx_ptrs, dw_ptrs, db_ptrs, rows, ctas, sizes, x_strides, dy_strides,
    dx_strides, table_strides, copy_ptrs, copied_rows, copy_sizes, from_strides, to_strides, eps: "fp64",
    cols: gl.constexpr, norm: gl.constexpr, tile: gl.constexpr, num_warps: gl.constexpr,
    copy_tile: gl.constexpr = None,
):  # fmt: skip
    """As narrow.backward."""
    layout: gl.constexpr = layout_of(tile, VECTOR.value)
    part = part_of_grid(ctas, None, tile)
    x_ptr = pick(x_ptrs, part, 0, tile)
    dy_ptr = pick(dy_ptrs, part, 0, tile)
    dx_ptr = pick(dx_ptrs, part, 0, tile)
    count = number(pick(rows, part, 0, tile))
    turns_h: gl.constexpr = norm.form.turn_h is not None
    of_chunk: gl.constexpr = ptx.slot_step(num_warps)
    of_tile: gl.constexpr = tile.num_chunks * of_chunk
    of_both: gl.constexpr = tile.table_chunks * (slots_of(cos_ptr) + slots_of(sin_ptr)) * of_chunk
    of_table: gl.constexpr = of_both if turns_h else 0  # from a tile's to the next one's
    of_dy = ptx.open_slots((3 * of_tile + of_both + of_table) // of_chunk, num_warps)
    of_x = of_dy + of_tile
    both_of_x = of_x + of_x + of_tile
    of_tables = of_dy + 3 * of_tile
    both_of_tables = of_tables + of_tables + of_table
    first = part.cta * tile.step
    step = part.ctas * tile.step
    start_copies(
        of_dy, of_x, of_tables, first, count, x_ptr, dy_ptr, cos_ptr, sin_ptr, sizes, x_strides, dy_strides,
        table_strides, part, tile,
    )  # fmt: skip
    weight_ptr = None
    if norm.has_weight:
        weight_ptr = pick(weight_ptrs, part, 0, tile)
    weight = load_parameter(weight_ptr, cols, norm.has_weight, columns, tile)
    if copy_tile is not None:
        copy_rows(copy_ptrs, copied_rows, copy_sizes, from_strides, to_strides, part, cols, copy_tile)
    dw = ()
    db = ()
    for _ in gl.static_range(tile.chunks):
        dw = dw + (gl.full([tile.rows, tile.chunk], 0.0, gl.float32, layout),)
        db = db + (gl.full([tile.rows, tile.chunk], 0.0, gl.float32, layout),)
    for this_row in range(first, count, step):
        ptx.await_copies(0)
        du = read(of_dy, 0, dy_ptr, tile.chunks, tile)
        if norm.form.turn_u is not None:
            du = turned(du, norm.form.turn_u, of_tables, cos_ptr, sin_ptr, True, tile)
        start_copies(
            of_dy, both_of_x - of_x, both_of_tables - of_tables, this_row + step, count, x_ptr, dy_ptr, cos_ptr,
            sin_ptr, sizes, x_strides, dy_strides, table_strides, part, tile,
        )  # fmt: skip
        ptx.await_copies(1)
        h = read(of_x, 0, x_ptr, tile.chunks, tile)
        of_x = both_of_x - of_x
        if turns_h:
            h = turned(h, norm.form.turn_h, of_tables, cos_ptr, sin_ptr, False, tile)
        if norm.layer:
            total = h[0]
            for c in gl.static_range(1, tile.chunks):
                total += h[c]
            if turns_h:  # no numbers of 16 bits, whose sums are exact if they are equal
                total = sums_in_pairs(total, 3)
            mean = gl.expand_dims(mean_of(of_rows(gl.sum(total, axis=1), tile), cols), 1)
            centered = ()
            for c in gl.static_range(tile.chunks):
                centered = centered + (h[c] - mean,)
            h = centered
        g = norm.form.upstream(du[0], widen(weight[0]), norm)
        squares = of_vectors(h[0] * h[0], tile)
        of_gh = of_vectors(g * h[0], tile)
        of_g = of_vectors(g, tile)
        for c in gl.static_range(1, tile.chunks):
            g = norm.form.upstream(du[c], widen(weight[c]), norm)
            squares += of_vectors(h[c] * h[c], tile)
            of_gh += of_vectors(g * h[c], tile)
            of_g += of_vectors(g, tile)
        if norm.layer:
            squares, of_gh, of_g = gl.reduce((squares, of_gh, of_g), 1, plus_three)
            mean_g = mean_of(of_rows(of_g, tile), cols)
        else:
            squares, of_gh = gl.reduce((squares, of_gh), 1, plus_two)
            mean_g = of_gh
        squares = of_rows(squares, tile)
        of_gh = of_rows(of_gh, tile)
        rstd = inverse_std(squares / cols, gl.cast(eps, gl.float32), norm, True)
        mean_gx = gl.expand_dims(of_gh / cols * rstd, 1)
        if norm.layer:
            mean_g = gl.expand_dims(mean_g * rstd, 1)
        rstd = gl.expand_dims(rstd, 1)
        row = this_row + gl.arange(0, tile.rows, rows_layout(tile, VECTOR.value))
        start = starts(place(row, sizes, part, tile), dx_strides, part, tile)
        new_dw = ()
        new_db = ()
        dx = ()
        for c in gl.static_range(tile.chunks):
            scaled = du[c] * rstd
            new_dw = new_dw + (dw[c] + norm.form.to_dw(scaled, h[c], norm),)
            new_db = new_db + (db[c] + norm.form.to_db(du[c], norm),)
            g = norm.form.upstream(scaled, widen(weight[c]), norm)
            dx = dx + (gradient(g, h[c], rstd, mean_gx, mean_g, norm),)
        if turns_h:
            dx = turned(dx, norm.form.turn_h, of_tables, cos_ptr, sin_ptr, True, tile, norm.layer)
            of_tables = both_of_tables - of_tables
        for c in gl.static_range(tile.chunks):
            to = dx_ptr + start + columns(c, tile)
            gl.store(to, dx[c].to(dx_ptr.dtype.element_ty), mask=gl.expand_dims(row < count, 1))
        dw = new_dw
        db = new_db
    ptx.await_copies(0)
    if tile.announces_end:  # saves time only: the dependent launch waits for this one's end
        ptx.launch_dependents()
    for c in gl.static_range(tile.chunks):
        column = nth_columns(c, gl.arange(0, tile.chunk, gl.SliceLayout(0, by_columns(tile))), tile)
        here = part.cta.to(gl.int64) * cols + column
        if norm.wants_dw:
            gl.store(pick(dw_ptrs, part, 0, tile) + here, sum_of_rows(dw[c], tile))
        if norm.wants_db:
            gl.store(pick(db_ptrs, part, 0, tile) + here, sum_of_rows(db[c], tile))
