"""What `make demo` shows of the TMA kernels."""

from __future__ import annotations

import contextlib

import pytest

from fusednorm.tools.demo import print_errors
from simulator import demo


def test_tma_kernels_are_right_in_the_simulator(capsys):
    assert print_errors(demo.TITLE, demo.simulate())
    said = capsys.readouterr().out
    for variant in ("pipelined", "warp_specialized"):
        assert f"{variant}: layer-24x160-bf16" in said and f"{variant}: rms-24x160-bf16" in said
    assert "Right: every output is within its bounds" in said


def test_a_schedule_that_was_not_tried_is_no_success(monkeypatch):
    monkeypatch.setattr(demo, "VARIANTS", ("multi_wave", "pipelined"))
    monkeypatch.setattr(demo, "force", lambda _: contextlib.nullcontext())  # without force the planner chooses
    with pytest.raises(RuntimeError, match="must be planned as multi_wave, got pipelined"):
        demo.simulate()
