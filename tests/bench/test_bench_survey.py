"""bench.survey: which cells are timed."""

from __future__ import annotations

from bench import survey


def test_random_cells_are_the_same_for_the_same_seed():
    assert survey.drawn(60, 1) == survey.drawn(60, 1) != survey.drawn(60, 2)
