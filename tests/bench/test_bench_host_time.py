"""The parts of the bench of host times that need no GPU."""

from __future__ import annotations

import pytest
import torch

from bench import host_time


def test_both_candidates_of_every_call_compute_the_same():
    calls = host_time.calls_of("layer", 3, 8, torch.float32, "cpu")
    whats = {what for what, _ in calls}
    assert len(calls) == 2 * len(whats) == 8
    for what in ("forward op", "backward op"):
        ours, atens = calls[what, "fusednorm"](), calls[what, "aten"]()
        torch.testing.assert_close(ours, atens)
    for what in ("module, forward and backward", "module, no gradient"):
        assert calls[what, "fusednorm"]() is calls[what, "aten"]() is None


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_modules_of_forms_are_timed_with_their_backwards_and_without(norm):
    calls = host_time.calls_of_forms(norm, 3, 8, torch.float32, "cpu")
    assert {name.split(", ")[-1] for name, _ in calls} == {"forward and backward", "no gradient"}
    assert len(calls) == 2 * len(host_time.modules_of_forms(norm, 8, {}))
    for call in calls.values():
        call()


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_torchs_operations_beside_a_form_compute_the_same(norm):
    modules = host_time.modules_of_forms(norm, 8, {"dtype": torch.float64})
    stocks = {form: module for (form, candidate), module in modules.items() if candidate == "aten"}
    assert len(stocks) == 6
    for form, stock in stocks.items():
        width, more = (16, 0) if "packed" in form else (8, 2 if form == "modulated" else 1)
        given = torch.randn(1 + more, 3, width, dtype=torch.float64)
        got, want = modules[form, "fusednorm"](*given), stock(*given)
        got = got[0] if "packed" in form else got  # a tuple with the other columns
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_of_q_and_k_are_timed_beside_those_of_torch(norm):
    calls = host_time.calls_of_heads(norm, 3, 32, torch.float32, "cpu")
    assert len(calls) == 2 * 4 and len([None for _, candidate in calls if candidate == "aten"]) == 2
    for call in calls.values():
        call()


def test_calls_take_turns_and_each_gets_its_time():
    seen = []
    calls = {("layer", "op", name): lambda name=name: seen.append(name) for name in "ab"}
    times = host_time.host_times(calls, rounds=4, synchronize=lambda: seen.append("|"))
    assert set(times) == set(calls) and all(each.median > 0 and each.rounds == 4 for each in times.values())
    order = [part for part in "".join(seen).split("|") if part][1:]
    assert [part[0] for part in order] == ["a", "b", "b", "a", "a", "b", "b", "a"][: len(order)]


def test_each_call_has_a_number_of_rows_of_its_own_or_the_same():
    for norm in ("layer", "rms"):
        for same, wanted in ((False, [1, 2, 3, 4, 5, 6]), (True, [3] * 6)):
            forwards, backwards = host_time.row_count_calls(norm, 6, 8, torch.float32, "cpu", same=same)
            assert [len(call()[0]) for call in forwards] == [len(call()[0]) for call in backwards] == wanted
        assert host_time.seconds_of_row_counts(norm, 6, 8, torch.float32, "cpu") > 0
        calls = host_time.calls_of_row_counts(norm, 6, 8, torch.float32, "cpu")
        assert [len(calls["forward op, new rows", "fusednorm"]()[0]) for _ in range(7)] == [1, 2, 3, 4, 5, 6, 1]
