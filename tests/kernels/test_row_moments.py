"""The formulas in kernels/passes.py that merge the means and variances of a row's parts, tested on numpy numbers."""

from __future__ import annotations

import numpy as np
import pytest
from fusednorm.kernels.passes import merge_exact_moments, merge_moments
from hypothesis import given, settings
from hypothesis import strategies as st


def merged(row: np.ndarray, parts: int) -> tuple[np.floating, np.floating]:
    """(mean, variance) of a row, merged from its parts by repeated halving, as a reduction in a kernel does."""
    moments = [(part.mean(), part.var()) for part in np.split(row, parts)]
    while len(moments) > 1:
        half = len(moments) // 2
        moments = [merge_moments.fn(*a, *b) for a, b in zip(moments[:half], moments[half:], strict=True)]
    return moments[0]


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
def test_means_with_what_they_lack_keep_all_digits_of_a_row_far_from_zero(mean):
    row = (mean + np.random.default_rng(0).standard_normal(4096)).astype(np.float32)
    moments = []
    for part in np.split(row.astype(np.float64), 64):
        rounded = np.float32(part.mean())
        moments.append((rounded, np.float32(part.mean() - rounded), np.float32(part.var())))
    while len(moments) > 1:
        half = len(moments) // 2
        moments = [merge_exact_moments.fn(*a, *b) for a, b in zip(moments[:half], moments[half:], strict=True)]
    (rounded, error, variance), exact = moments[0], row.astype(np.float64)
    assert {each.dtype for each in moments[0]} == {np.dtype(np.float32)}
    assert float(rounded) + float(error) == pytest.approx(exact.mean(), abs=1e-6)
    assert variance == pytest.approx(exact.var(), rel=1e-6)


def test_what_is_infinite_or_not_a_number_does_not_disappear():
    row = np.zeros(64, dtype=np.float32)
    for spoilt in (np.inf, np.nan):
        row[5] = spoilt
        with np.errstate(invalid="ignore"):
            assert not np.isfinite(merged(row, 8)).any()
