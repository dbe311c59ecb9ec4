"""Which rows and which tensor a CTA of narrow.py has: numbers that the launch prepares, so that no kernel divides."""

from __future__ import annotations

import itertools

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from fusednorm.kernels import narrow  # noqa: E402
from fusednorm.kernels.config import PartsTile  # noqa: E402

from fusednorm.heads import launch  # noqa: E402
from fusednorm.heads.call import MOST_ROWS, Rows  # noqa: E402

SIZES = [1, 2, 3, 5, 7, 8, 31, 32, 33, 40, 641, 2**15 - 1, 65_537, 10**6 + 3, 2**29 - 1, 2**29, 2**29 + 1, MOST_ROWS]


@triton.jit
def place_rows(rows_ptr, found_ptr, sizes, count: tl.constexpr, tile: tl.constexpr):
    part = narrow.Part(tl.program_id(0), 0, 1)
    at = tl.arange(0, count)
    indices = narrow.place(tl.load(rows_ptr + at), sizes, part, tile)
    for level in tl.static_range(tile.levels):
        tl.store(found_ptr + (tl.program_id(0) * tile.num_levels + level) * count + at, indices[level])


@triton.jit
def find_part(found_ptr, ctas, share, tile: tl.constexpr):
    part = narrow.part_of_grid(ctas, share, tile)
    tl.store(found_ptr + 2 * tl.program_id(0), part.tensor)
    tl.store(found_ptr + 2 * tl.program_id(0) + 1, part.cta)


def placed(rows: list[int], sizes: list[tuple[int, ...]]) -> torch.Tensor:
    """The indices [tensor, level, row] for tensors whose inner levels have these sizes."""
    count, levels = triton.next_power_of_2(len(rows)), len(sizes[0]) + 1
    given = torch.zeros(count, dtype=torch.int32)
    given[: len(rows)] = torch.tensor(rows)
    found = torch.full((len(sizes), levels, count), -1, dtype=torch.int32)
    numbers = launch.sizes_of([Rows(each, ()) for each in sizes])
    tile = PartsTile(1, 1, 1, 1, num_parts=len(sizes), num_levels=levels)
    place_rows[(len(sizes),)](given, found, numbers, count, tile)
    return found[..., : len(rows)]


def edges(size: int) -> set[int]:
    """The numbers whose quotients are the nearest to a wrong one."""
    last = MOST_ROWS // size
    near = {many * size + more for many in (0, 1, 2, last // 2, last - 1, last) for more in (-1, 0, 1)}
    return {each for each in near | {MOST_ROWS - 1, MOST_ROWS} if 0 <= each <= MOST_ROWS}


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_divided_exactly_up_to_the_most_rows(size):
    rows = sorted(edges(size))
    outer, inner = placed(rows, [(size,)])[0].tolist()
    assert list(zip(outer, inner, strict=True)) == [divmod(row, size) for row in rows]


def test_each_tensor_has_levels_of_its_own():
    sizes, rows = [(7, 5, 3), (2, 9, 1)], [0, 1, 104, 105, 106, 3333, MOST_ROWS]
    found = placed(rows, sizes)
    for (a, b, c), of_it in zip(sizes, found, strict=True):
        want = [[row // (a * b * c), row // (b * c) % a, row // c % b, row % c] for row in rows]
        assert of_it.T.tolist() == want


@pytest.mark.parametrize("size", SIZES)
def test_numbers_in_tuples_are_odd_and_no_1_so_that_no_kernel_is_compiled_for_them_alone(size):
    numbers = launch.sizes_of([Rows((size,), ())])
    share = launch.share_of_others((size, 1)), launch.share_of_others((1, size))
    assert all(number % 2 and -(2**31) <= number < 2**31 for number in (*numbers, *share))
    assert 1 not in share


@pytest.mark.parametrize("ctas", [(1,), (1, 1), (5, 1), (1, 5), (64, 16), (17, 3), (3, 17), (6, 3, 2)], ids=str)
def test_ctas_of_other_tensors_lie_evenly_between_those_of_the_first(ctas):
    grid, others = sum(ctas), sum(ctas[1:])
    found = torch.full((grid, 2), -1, dtype=torch.int32)
    share = launch.share_of_others(ctas)
    numbers = tuple(2 * each + 1 for each in ctas)
    find_part[(grid,)](found, numbers, share, PartsTile(1, 1, 1, 1, num_parts=len(ctas)))
    assert sorted(map(tuple, found.tolist())) == [(t, cta) for t, many in enumerate(ctas) for cta in range(many)]
    before = list(itertools.accumulate(int(tensor > 0) for tensor, _ in found.tolist()))
    assert all(abs(many - (at + 1) * others / grid) <= 1 for at, many in enumerate(before))


@pytest.mark.parametrize("others", [0, 1, 2, 77, 2**20 + 1, 2**29, MOST_ROWS - 1])
def test_the_last_cta_of_a_grid_is_found_however_many_there_are(others):
    """By the kernel's own formula, for grids that no test can run."""
    ctas = (MOST_ROWS - others, others)
    share = launch.share_of_others(ctas)
    assert share * MOST_ROWS >> 31 == others
