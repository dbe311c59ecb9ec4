"""What Triton and Gluon kernels share: which rows a CTA has, and loads of statistics, parameters and modulations."""

from typing import NamedTuple

import triton
import triton.language as tl

from .rowmath import folded_bias, folded_weight, sums_of_modulated, widen


@triton.constexpr_function
def no_key():
    """Of a CTA without rows: zeros are in place of rows of tables, for its sums must not be NaN. A function, because
    Triton 3.6 puts a constant into the key of one kernel alone of those that share what reads it."""
    return -2


class Statistics(NamedTuple):
    """mean and rstd of rows. For RMSNorm, mean is a placeholder that no formula uses."""

    mean: tl.tensor
    rstd: tl.tensor


class StatisticsInMemory(NamedTuple):
    """Pointers to mean and rstd, and the strides of their rows."""

    mean_ptr: tl.tensor
    rstd_ptr: tl.tensor
    mean_stride: tl.tensor
    rstd_stride: tl.tensor


class Share(NamedTuple):
    """The CTA is the cta-th of `ctas` that have the rows of a sample: those from `first` to `last`, without `last`. Of
    rows in an order, they are places of it."""

    sample: tl.tensor
    cta: tl.tensor
    ctas: tl.tensor
    first: tl.tensor
    last: tl.tensor


@triton.jit
def share_of_cta(rows, sample_rows):
    """As many bits as `rows` has count the rows."""
    if sample_rows is None:
        share = Share(0, tl.program_id(0), tl.num_programs(0), 0, rows)
    else:
        first = tl.program_id(0).to(rows.dtype) * sample_rows
        share = Share(tl.program_id(0), tl.program_id(1), tl.num_programs(1), first, first + sample_rows)
    return share


@triton.jit
def most_places(rows, table_rows, ctas, tile_rows: tl.constexpr):
    """How many of the sorted rows a CTA has at most, of so many CTAs. A division of 64 bits would need a stack."""
    tiles = tl.cdiv(rows.to(tl.int32), tile_rows)
    return tl.cdiv(tiles, ctas - table_rows.to(tl.int32) - 2) * tile_rows


@triton.jit
def first_of_key(begin, key, most):
    """The number of the first CTA of a key that begins at this place."""
    return begin.to(tl.int32) // most + 1 + key


@triton.jit
def share_of_key(key_ptr, rows, table_rows, numbers: tl.constexpr, tile: tl.constexpr):
    """The CTA's share where `key_ptr` has the keys of rows in ascending order: places of this order, of one key. Keys
    go from -1 to table_rows. The CTAs of a key are those before the first one of the next key, which are enough for
    most_places each, because one more counts for each key. At each place the first CTA of its key, if it began there,
    is one of the key's CTAs, and these ascend: the CTA's key is that of the last place where it is not behind the CTA.
    The function `numbers` gives those below a count, and with them the layout."""
    lanes: tl.constexpr = 1024  # places of one step: at most as many as 16 bits count
    cta = tl.program_id(0)
    most = most_places(rows, table_rows, tl.num_programs(0), tile.rows)
    rows = rows.to(tl.int32)
    step = tl.cdiv(rows, lanes)
    coarse = (numbers(lanes, tile) + 1) * step - 1  # the last place of each step
    none = (table_rows + 1).to(tl.int32)
    keys = tl.load(key_ptr + coarse, mask=coarse < rows, other=none)
    at = tl.sum(((coarse < rows) & (first_of_key(coarse, keys, most) <= cta)).to(tl.int32)) * step - 1
    key = no_key()
    for start in range(0, step + 1, lanes):
        place = at + start + numbers(lanes, tile)
        inside = (place >= 0) & (place <= at + step) & (place < rows)
        found = tl.load(key_ptr + place, mask=inside, other=none)
        key = tl.maximum(key, tl.max(tl.where(inside & (first_of_key(place, found, most) <= cta), found, no_key())))
    # Where the key begins, and the next one: steps with smaller keys and, in the upper 16 bits, with no larger ones.
    steps = tl.sum((keys < key).to(tl.int32) + ((keys <= key).to(tl.int32) << 16))
    first = (steps & 0xFFFF) * step
    last = (steps >> 16) * step
    first_step, last_step = first, last
    for start in range(0, step, lanes):
        nth = start + numbers(lanes, tile)
        places = first_step + nth
        before = tl.load(key_ptr + places, mask=(nth < step) & (places < rows), other=none)
        places = last_step + nth
        until = tl.load(key_ptr + places, mask=(nth < step) & (places < rows), other=none)
        both = tl.sum((before < key).to(tl.int32) + ((until <= key).to(tl.int32) << 16))
        first += both & 0xFFFF
        last += both >> 16
    nth = cta - first_of_key(first, key, most)
    ctas = first_of_key(last, key, most) - first_of_key(first, key, most) + 1
    is_any = (key > no_key()) & (nth < ctas)
    key = tl.where(is_any, key, no_key())
    return Share(key, tl.where(is_any, nth, 0), ctas, first, tl.where(is_any, last, first))


@triton.jit
def divisible(value, tile: tl.constexpr):
    """`value`, which is a multiple of 2^log2_divisor, in a form that shows this to the compiler. It loads several
    elements at once only if it knows this."""
    if tile.log2_divisor > 0:
        value = (value >> tile.log2_divisor) << tile.log2_divisor
    return value


@triton.jit
def number(odd):
    """n from 2n + 1, as which numbers come in tuples: for 1 and for multiples of 16 among these, Triton would compile a
    kernel again."""
    return odd >> 1


@triton.jit
def chosen(choices, nth):
    """The nth of a tuple."""
    found = choices[0]
    for i in tl.static_range(1, len(choices)):
        found = tl.where(nth == i, choices[i], found)
    return found


@triton.jit
def of_group(ptr, step, tile: tl.constexpr):
    """The pointer to what the CTA's group of columns has, `step` elements behind that of the group before. None as it
    is."""
    found = ptr
    if tile.groups > 1 and ptr is not None:
        found = ptr + tl.program_id(2) * step
    return found


@triton.jit
def each_of_group(ptrs, step, tile: tl.constexpr):
    """`of_group` of a tuple of pointers."""
    found = ptrs
    if tile.groups > 1 and ptrs is not None:
        found = ()
        for t in tl.static_range(len(ptrs)):
            found = found + (of_group(ptrs[t], step, tile),)
    return found


@triton.jit
def of_groups(count, tile: tl.constexpr):
    """`count` of each group of columns, together: elements of a row, statistics of rows."""
    if tile.groups > 1:
        count = count * tile.groups
    return count


@triton.jit
def stride_of_gradients(cols, width, tile: tl.constexpr):
    """Elements from a row to the next of what `pointers` finds: `width`, unless it is None."""
    if width is None:
        stride = of_groups(cols, tile)
    else:
        stride = width
    return stride


@triton.jit
def statistics_in_memory(mean_ptr, rstd_ptr, mean_stride, rstd_stride, norm: tl.constexpr, tile: tl.constexpr):
    """Those of the CTA's group of columns."""
    rstd = of_group(rstd_ptr, rstd_stride, tile)
    mean = rstd
    if norm.layer:
        mean = of_group(mean_ptr, mean_stride, tile)
    return StatisticsInMemory(mean, rstd, of_groups(mean_stride, tile), of_groups(rstd_stride, tile))


@triton.jit
def load_statistics(source, row, inside, norm: tl.constexpr):
    """Statistics of the rows `row`, in the shape of `row` and in the accumulation dtype. They are 0 where not `inside`,
    so that a row outside the tensor adds nothing to dw."""
    rstd = tl.load(source.rstd_ptr + row * source.rstd_stride, mask=inside, other=0.0).to(norm.acc)
    mean = rstd
    if norm.layer:
        mean = tl.load(source.mean_ptr + row * source.mean_stride, mask=inside, other=0.0).to(norm.acc)
    return Statistics(mean, rstd)


@triton.jit
def load_if(present: tl.constexpr, ptr, offset, mask):
    """The elements at ptr + offset, zeros where `mask` is false. A placeholder if the operand is not `present`."""
    if present:
        loaded = tl.load(ptr + offset, mask=mask, other=0.0)
    else:
        loaded = 0.0
    return loaded


@triton.jit
def chunk_of(tiles, c: tl.constexpr):
    """Chunk c of each tile of a tuple."""
    chunks = ()
    for t in tl.static_range(len(tiles)):
        chunks = chunks + (tiles[t][c],)
    return chunks


@triton.jit
def plus(dh, chunks, in_pairs: tl.constexpr, norm: tl.constexpr):
    """dh of a chunk with the gradients of h that come by other ways, such as a residual connection: `chunks`."""
    for t in tl.static_range(len(chunks)):
        dh += widen(chunks[t], in_pairs, norm.acc)
    return dh


@triton.jit
def pointers(dx_ptr, rows_out, norm: tl.constexpr, x_at=None, gate_at=None):
    """Where a backward stores the gradients of rows, as norm.stored names them. With x_at and gate_at, columns of dx
    from there on are both that of x and that of a gate."""
    found = ()
    if norm.wants_dx and x_at is not None:
        found = (dx_ptr + x_at, dx_ptr + gate_at)
    else:
        if norm.stores_dx:
            found = found + (dx_ptr,)
        if norm.wants_dx and rows_out is not None:
            for t in tl.static_range(len(rows_out)):
                found = found + (rows_out[t],)
    return found


@triton.jit
def combine(chunks, rows_out, norm: tl.constexpr):
    """The row that the norm normalizes, from the same chunk of x and of the form's other row tensors. `rows_out` has a
    pointer for each tensor that this row is stored to, or is None."""
    stored: tl.constexpr = chunks[0].dtype if rows_out is None else rows_out[0].dtype.element_ty
    return norm.form.combine(chunks, stored, norm)


@triton.jit
def combine_tiles(tiles, rows_out, norm: tl.constexpr, tile: tl.constexpr):
    """`combine` of each chunk."""
    chunks = ()
    for c in tl.static_range(tile.chunks):
        chunks = chunks + (combine(chunk_of(tiles, c), rows_out, norm),)
    return chunks


@triton.jit
def load_parameter(ptr, cols, present: tl.constexpr, columns: tl.constexpr, tile: tl.constexpr, absent=0.0):
    """weight or bias in registers, in its own dtype: a chunk for each chunk c of a tile. The function `columns` gives
    the columns of chunk c, and with them the shape and the layout. `absent` is in place of columns that are none.
    Placeholders if it is not `present`."""
    chunks = ()
    for c in tl.static_range(tile.chunks):
        if present:
            col = columns(c, tile)
            chunks = chunks + (tl.load(ptr + col, mask=col < cols, other=absent),)
        else:
            chunks = chunks + (0.0,)
    return chunks


@triton.jit
def row_of_sample(shared, strides_shared, t: tl.constexpr, sample, tile: tl.constexpr):
    """Where the row of the t-th tensor of `shared` begins that belongs to the sample. Pointers and strides come as in
    multiwave.py. Samples are counted in 32 bits, which a tensor's elements may exceed."""
    inner = strides_shared[3 * t]
    outer_stride = divisible(strides_shared[3 * t + 1], tile)
    inner_stride = divisible(strides_shared[3 * t + 2], tile)
    return shared[t] + (sample // inner).to(tl.int64) * outer_stride + (sample % inner).to(tl.int64) * inner_stride


@triton.jit
def load_shared(shared, strides_shared, sample, cols, columns: tl.constexpr, tile: tl.constexpr, table_rows=None):
    """The row of each tensor that belongs to the sample, loaded as a parameter is, as a tuple. Of tables of so many
    rows, the sample is the number of their row; NaN for that of none, zeros for no_key."""
    absent = 0.0
    if table_rows is not None:
        is_there = sample.to(tl.uint64) < table_rows  # a negative number is a large one
        absent = tl.where(is_there | (sample == no_key()), 0.0, float("nan"))
        cols = tl.where(is_there, cols, 0)
    loaded = ()
    if shared is not None:
        for t in tl.static_range(len(shared)):
            ptr = row_of_sample(shared, strides_shared, t, sample, tile)
            loaded = loaded + (load_parameter(ptr, cols, True, columns, tile, absent),)
    return loaded


@triton.jit
def load_late_shared(
    of_sample, shared, strides_shared, sample, cols, columns: tl.constexpr, norm: tl.constexpr, tile: tl.constexpr,
    table_rows,
):  # fmt: skip
    """What `folded` leaves of `load_shared`, with what is late loaded again: no register holds it meanwhile."""
    again = load_shared(shared, strides_shared, sample, cols, columns, tile, table_rows)
    found = ()
    for t in tl.static_range(len(of_sample)):
        if norm.inside.is_late_shared(t):
            found = found + (again[norm.nth_shared(norm.inside.shared[t])],)
        else:
            found = found + (of_sample[t],)
    return found


@triton.jit
def folded(weight, bias, of_sample, norm: tl.constexpr, tile: tl.constexpr):
    """weight, bias and rows of a sample as norm.inside has them, from those of `norm`, all as `load_parameter` loads
    them."""
    weights = weight
    biases = bias
    rest = of_sample
    if norm.folds:
        weights = ()
        biases = ()
        rest = ()
        scale = of_sample[norm.nth_shared("scale")]
        for c in tl.static_range(tile.chunks):
            weights = weights + (folded_weight(widen(weight[c], dtype=norm.acc), scale[c], norm),)
            b = 0.0
            if norm.inside.has_bias:
                if norm.has_bias:
                    b = folded_bias(widen(bias[c], dtype=norm.acc), scale[c], norm)
                if norm.has_shared("shift"):
                    b += of_sample[norm.nth_shared("shift")][c].to(norm.acc)
            biases = biases + (b,)
        for t in tl.static_range(len(of_sample)):
            if norm.is_left(t):
                rest = rest + (of_sample[t],)
    return weights, biases, rest


@triton.jit
def unfolded(dw, db, more, weight, bias, of_sample, norm: tl.constexpr, tile: tl.constexpr):
    """The column sums of `norm`, from those of norm.inside and from what `norm` has, in chunks that broadcast with
    these. Of `more`, those of chunk 0 come first, then those of chunk 1, ..."""
    inside: tl.constexpr = norm.inside
    new_dw = dw
    new_db = db
    found = more
    if norm.folds:
        new_dw = ()
        new_db = ()
        found = ()
        for c in tl.static_range(tile.chunks):
            w = widen(weight[c], dtype=norm.acc)
            b = widen(bias[c], dtype=norm.acc)
            sums = sums_of_modulated(dw[c], db[c], w, b, of_sample[norm.nth_shared("scale")][c], norm)
            new_dw = new_dw + (sums[0],)
            new_db = new_db + (sums[1],)
            for s in tl.static_range(norm.sums):
                if norm.nth_inside(s) < 0:
                    found = found + (sums[1 + norm.gradient_of_sum(s)],)
                else:
                    found = found + (more[c * inside.sums + norm.nth_inside(s)],)
    return new_dw, new_db, found
