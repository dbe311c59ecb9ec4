"""The formulas in kernels/passes.py that merge the means and variances of a row's parts, tested on numpy numbers."""

from __future__ import annotations

import numpy as np
import pytest
from fusednorm.kernels.passes import merge_exact_shares, merge_shares
from hypothesis import given, settings
from hypothesis import strategies as st


def merged(row: np.ndarray, parts: int) -> tuple[np.floating, np.floating]:
    """(mean, variance) of a row, merged from its parts by repeated halving, as a reduction in a kernel does."""
    share = row.dtype.type(1 / parts)
    return by_halves([(part.mean() * share, part.var() * share**2) for part in np.split(row, parts)], merge_shares)


def by_halves(shares: list[tuple[np.floating, ...]], merge) -> tuple[np.floating, ...]:
    while len(shares) > 1:
        half = len(shares) // 2
        shares = [merge.fn(*a, *b) for a, b in zip(shares[:half], shares[half:], strict=True)]
    return shares[0]


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=64, max_size=64),
    st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
)
def test_moments_of_parts_merge_to_those_of_the_row(row, parts):
    row = np.array(row)
    mean, variance = merged(row, parts)
    assert mean == pytest.approx(row.mean(), rel=1e-12, abs=1e-9)
    assert variance == pytest.approx(row.var(), rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("mean", [0, 100, -1e4])
def test_float32_keeps_the_variance_of_a_row_far_from_zero(mean):
    row = (mean + np.random.default_rng(0).standard_normal(4096)).astype(np.float32)
    _, variance = merged(row, 64)
    assert variance.dtype == np.float32
    assert variance == pytest.approx(row.astype(np.float64).var(), rel=1e-6 + abs(mean) * 2**-26)


@pytest.mark.parametrize("mean", [0, 100, -1e4])
def test_means_in_two_parts_keep_all_digits_of_a_row_far_from_zero(mean):
    row = (mean + np.random.default_rng(0).standard_normal(4096)).astype(np.float32)
    shares = []
    for part in np.split(row.astype(np.float64), 64):
        coarse = np.float32(np.float16(part.mean()))
        fine = np.float32(part.mean() - coarse)
        shares.append((coarse / np.float32(64), fine / np.float32(64), np.float32(part.var()) / np.float32(64**2)))
    (coarse, fine, variance), exact = by_halves(shares, merge_exact_shares), row.astype(np.float64)
    assert {each.dtype for each in (coarse, fine, variance)} == {np.dtype(np.float32)}
    assert float(coarse) + float(fine) == pytest.approx(exact.mean(), abs=1e-6)
    assert variance == pytest.approx(exact.var(), rel=1e-6)


def test_what_is_infinite_or_not_a_number_does_not_disappear():
    row = np.zeros(64, dtype=np.float32)
    for spoilt in (np.inf, np.nan):
        row[5] = spoilt
        with np.errstate(invalid="ignore"):
            assert not np.isfinite(merged(row, 8)).any()
