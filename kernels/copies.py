"""Copies of columns, beside those that a norm's backward writes into the same tensor."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def copy_columns(
    dx_ptr, rows: "i64", start, count, rest_cols, source, tile: tl.constexpr, rest_ptr=None, width=None
):
    """Columns start, ..., start + count - 1 of dx, [rows, width], from column `source` of rest, [rows, rest_cols], on;
    zeros without rest. The nth CTA of P has the row tiles n, n + P, ..."""
    nth = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    step = tl.num_programs(0) * tl.num_programs(1) * tile.rows
    row = (nth.to(tl.int64) * tile.rows + tl.arange(0, tile.rows))[:, None]
    for _ in range(tl.cdiv(rows - nth * tile.rows, step)):
        for left in range(0, count, tile.chunk):
            col = left + tl.arange(0, tile.chunk)[None, :]
            inside = (row < rows) & (col < count)
            copied = tl.full([tile.rows, tile.chunk], 0.0, dx_ptr.dtype.element_ty)
            if rest_ptr is not None:
                copied = tl.load(rest_ptr + row * rest_cols + source + col, mask=inside).to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + row * width + start + col, copied, mask=inside)
        row += step
