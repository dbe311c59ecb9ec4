"""Some hundreds of random calls of the public functions, checked by public_face.py; `make fuzz` tries 20,000."""

from __future__ import annotations

import pytest
import torch
from public_face import STOCK, check, outcome, reproduction

from fusednorm import functional

pytest.importorskip("hypothesis", reason="the extra `test` brings hypothesis")
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from public_face import calls  # noqa: E402

RIGHT_CALL = "layer_norm(rand((3, 8), fp32), (8,))"


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False,
          report_multiple_bugs=False, phases=[Phase.reuse, Phase.generate, Phase.shrink])  # fmt: skip
@given(calls())
def test_every_call_gives_stocks_answer_or_its_type_of_error_or_one_sentence_of_ours(call):
    try:
        check(call)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{reproduction(call)}") from None


@pytest.mark.parametrize(
    ("wrong", "call", "complaint"),
    [
        (lambda *args: 1.01 * torch.nn.functional.layer_norm(*args), RIGHT_CALL, "not close"),
        (lambda *args: torch.zeros(3), RIGHT_CALL, "has shape"),
        (lambda *args: None.shape, RIGHT_CALL, "AttributeError"),
        (lambda *args: [][0], "layer_norm(None, (8,))", "IndexError"),
        (lambda *args: torch.zeros(3, 8), "layer_norm(None, (8,))", "an answer where there is none"),
    ],
)
def test_what_breaks_the_promise_is_noticed(wrong, call, complaint, monkeypatch):
    import public_face

    check(call)
    monkeypatch.setitem(public_face.OURS, "layer_norm", wrong)
    with pytest.raises(AssertionError, match=complaint):
        check(call)


def test_a_norm_that_was_patched_without_cause_is_noticed(monkeypatch):
    import public_face

    call = "written(leaf(rand((3, 8), fp32)), 'detached', as_is, rand((8,), fp32))"
    check(call)
    monkeypatch.setitem(public_face.OURS, "written", lambda x, formula, *more: public_face.written(x, "rms", *more))
    with pytest.raises(AssertionError, match="value 1.*not close"):
        check(call)


def test_calls_on_a_gpu_reach_our_functions():
    seen, original = [], functional.autograd.y_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional.autograd, "y_of", lambda *args: seen.append(args) or original(*args))
        check(f"gpu: {RIGHT_CALL}")
        assert len(seen) == 2
        check(RIGHT_CALL)
        assert len(seen) == 2
    assert outcome("layer_norm(leaf(rand((3, 8), fp32)), (8,))", STOCK).values[1].shape == (3, 8)
