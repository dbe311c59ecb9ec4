"""fusednorm.force: in which thread it holds, for how long, and how it reaches the backward.

test_choice.py tests which plans it leads to.
"""

from __future__ import annotations

import threading

import pytest
import torch
from planning import make_problem, meta_call

import fusednorm
from fusednorm.host.kernel_devices import kernels_on
from fusednorm.operands import BackwardOperands
from fusednorm.settings import forcing


def test_force_nests_and_none_gives_the_choice_back():
    assert forcing.forced_variant() is None
    with fusednorm.force("pipelined"):
        with fusednorm.force(None):
            assert forcing.forced_variant() is None
        with fusednorm.force("multi_wave"):
            assert forcing.forced_variant() == "multi_wave"
        assert forcing.forced_variant() == "pipelined"
    assert forcing.forced_variant() is None


def test_force_refuses_what_is_no_variant():
    with pytest.raises(
        ValueError, match="^force: variant must be one of multi_wave, async_copy, pipelined, .* or None, got 'fast'$"
    ):
        fusednorm.force("fast")


def test_force_is_undone_by_an_error():
    with pytest.raises(KeyError), fusednorm.force("pipelined"):
        raise KeyError
    assert forcing.forced_variant() is None


def test_force_holds_in_its_own_thread_only():
    one = fusednorm.force("pipelined")
    inside, entered, seen = threading.Event(), threading.Event(), {}

    def other():
        entered.wait()
        seen["before"] = forcing.forced_variant()
        with one:
            seen["inside"] = forcing.forced_variant()
        seen["after"] = forcing.forced_variant()
        inside.set()

    thread = threading.Thread(target=other)
    thread.start()
    with one:
        entered.set()
        inside.wait()
        assert forcing.forced_variant() == "pipelined"
    thread.join()
    assert seen == {"before": None, "inside": "pipelined", "after": None}


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_forced_choice_reaches_the_backward_on_another_thread(norm, monkeypatch):
    seen = []
    original = fusednorm.ops.reference.backward

    def backward(call):
        seen.append(forcing.forced_variant())
        return original(call)

    monkeypatch.setattr(fusednorm.ops.reference, "backward", backward)
    x = torch.randn(4, 8, requires_grad=True)
    op = getattr(torch.ops.fusednorm, f"{norm}_norm_fwd")
    for variant in ("pipelined", None, "multi_wave"):
        with fusednorm.force(variant):
            y = op(x, [8])[0].sum()
        with fusednorm.force("reference"):  # the backward keeps the variant of its forward
            thread = threading.Thread(target=y.backward)
            thread.start()
            thread.join()
            op(x, [8])[0].sum().backward()
        assert seen[-2:] == [variant, "reference"]
    assert len(seen) == 6


def test_forced_reference_runs_atens_kernels(monkeypatch):
    from fusednorm.host import launch

    x = torch.ones(2, 64)
    operands = BackwardOperands("rms", x, x, (64,), None, torch.ones(2), None, None, (True, True, True))
    monkeypatch.setattr(fusednorm.ops.reference, "backward", lambda call: ("aten",))
    with fusednorm.force("reference"), kernels_on("cpu"):
        assert launch.run(meta_call(make_problem("layer", 64))) == (None, None)
        assert fusednorm.ops.run(operands) == ("aten",)
