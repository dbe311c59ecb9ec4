"""Some random models, checked by random_graphs.py; `make fuzz` tries 1000."""

from __future__ import annotations

import pytest
from random_graphs import RIGHT, WRONG, fuzz, is_joined, outcome
from random_models import Case, Leaf, Piece
from test_inductor import nothing_is_left  # noqa: F401
from tracing import as_cuda

from fusednorm.integrations import joining
from fusednorm.integrations.rewriting import JOINS

pytestmark = [pytest.mark.usefixtures("nothing_is_left"), pytest.mark.filterwarnings("ignore")]
CASES = 10


def test_joined_norms_give_what_eager_mode_gives():
    kinds, _ = fuzz(0, range(CASES))
    assert not kinds[WRONG] and kinds[RIGHT] > 3 * CASES // 4
    assert kinds["joined"] >= CASES // 3


def test_a_wrong_join_is_noticed(monkeypatch):
    """An op with another eps."""
    leaves = {name: Leaf(shape, "FP32", "", True) for name, shape in (("in0", "B, S, C"), ("in1", "B, 1, C"))}
    piece = Piece("in0", "y", ("y = F.rms_norm(in0, (C,), None, 1e-6) * (1 + in1)",))
    case = Case(leaves, (piece,), ({"B": 2, "S": 4, "C": 8},), JOINS, is_checkpointed=False, seed=1)
    arguments = joining.Joined.arguments
    with as_cuda():
        assert outcome(case).kind == RIGHT and is_joined(outcome(case))
        monkeypatch.setattr(joining.Joined, "arguments", lambda *given: arguments(*given) | {"eps": 1.0})
        assert outcome(case).kind == WRONG
