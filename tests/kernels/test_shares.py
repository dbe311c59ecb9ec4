"""Which CTA has which places of an order, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from fusednorm.kernels.config import Tile
from fusednorm.kernels.loads import most_places, share_of_key
from fusednorm.kernels.multiwave import numbers


@triton.jit(do_not_specialize=["rows", "table_rows"])
def shares(key_ptr, out_ptr, rows, table_rows, tile: tl.constexpr):
    share = share_of_key(key_ptr, rows, table_rows, numbers, tile)
    most = most_places(rows, table_rows, tl.num_programs(0), tile.rows)
    out = out_ptr + tl.program_id(0) * 6
    tl.store(out, share.sample)
    tl.store(out + 1, share.cta)
    tl.store(out + 2, share.ctas)
    tl.store(out + 3, share.first)
    tl.store(out + 4, share.last)
    tl.store(out + 5, most)


@pytest.mark.parametrize("keys", ["few", "many", "one", "none of the table", "two, far apart"])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 5), (1024, 8), (2500, 13), (2500, 1)])
@pytest.mark.parametrize("tile_rows", [1, 4])
def test_each_place_is_of_one_cta_which_has_places_of_its_key_alone(rows, blocks, keys, tile_rows):
    table_rows = 40 if keys == "many" else 5
    generator = torch.Generator().manual_seed(rows)
    index = {
        "few": lambda: torch.randint(-1, table_rows + 1, (rows,), generator=generator),
        "many": lambda: torch.randint(-1, table_rows + 1, (rows,), generator=generator),
        "one": lambda: torch.full((rows,), 3),
        "none of the table": lambda: torch.full((rows,), table_rows),
        "two, far apart": lambda: torch.where(torch.arange(rows) < rows // 3, -1, table_rows),
    }[keys]()
    order = index.sort().values.to(torch.int32)
    blocks, found = min(blocks, -(-rows // tile_rows)), torch.zeros(rows, dtype=torch.int64)
    out = torch.zeros(blocks + table_rows + 2, 6, dtype=torch.int32)
    shares[(len(out),)](order, out, rows, table_rows, Tile(tile_rows, 16, 1, 4))
    for key, nth, ctas, first, last, most in out.tolist():
        step = ctas * tile_rows
        places = [p for at in range(first + nth * tile_rows, last, step) for p in range(at, min(at + tile_rows, last))]
        assert len(places) <= most and all(order[place] == key for place in places)
        found[places] += 1
    assert (found == 1).all()
