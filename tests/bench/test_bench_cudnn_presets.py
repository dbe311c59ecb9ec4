"""The parts of the bench of cuDNN frontend's presets that need no GPU."""

from __future__ import annotations

import csv

import pytest

from bench import cudnn_presets
from bench.cudnn_presets import Preset

MACHINE = {"gpu": "NVIDIA H100", "peers": {"nvidia-cudnn-frontend": "1.19.0"}}


@pytest.fixture(autouse=True)
def backends_of_a_cpu(monkeypatch):
    monkeypatch.setattr(cudnn_presets, "BACKENDS", {"fusednorm": "fusednorm", "aten": "pytorch"})
    monkeypatch.setattr(cudnn_presets, "device_ms", lambda call: (call(), 0.5)[1])


def test_a_line_has_both_times_and_the_bandwidth_of_every_tensors_bytes():
    ours, stock = cudnn_presets.lines(Preset("small", 6, 96, "layer"), MACHINE, "cpu")
    assert (ours["backend"], stock["backend"]) == ("fusednorm", "pytorch") and ours["success"] and stock["success"]
    assert ours["fwd_time_ms"] == ours["bwd_time_ms"] == 0.5 and ours["cudnn_version"] == "1.19.0"
    x, statistics, parameter = 6 * 96 * 2, 6 * 2 * 4, 96 * 2
    assert ours["fwd_gbps"] * 1e9 * 0.5e-3 == pytest.approx(2 * x + 2 * parameter + statistics)
    assert ours["bwd_gbps"] * 1e9 * 0.5e-3 == pytest.approx(3 * x + 3 * parameter + statistics)


def test_a_backend_that_cannot_run_a_preset_has_a_line_with_the_reason():
    ours, stock = cudnn_presets.lines(Preset("small", 6, 96), MACHINE, "cpu")
    assert ours["success"] and not stock["success"] and "_fused_rms_norm" in stock["error_message"]
    assert stock["fwd_time_ms"] == float("inf") and stock["fwd_gbps"] == 0


def test_the_file_is_the_frontends_csv(monkeypatch, tmp_path):
    monkeypatch.setattr(cudnn_presets, "lacks_gpu", lambda tool: False)
    monkeypatch.setattr(cudnn_presets, "describe_machine", lambda: MACHINE)
    monkeypatch.setattr(cudnn_presets, "PRESETS", (Preset("small", 6, 96), Preset("smaller", 3, 64, "layer")))
    monkeypatch.setattr(cudnn_presets.lines, "__defaults__", ("cpu",))
    assert cudnn_presets.main(["--presets", "smaller", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("cudnn-presets.csv")
    rows = list(csv.DictReader(path.open()))
    assert tuple(rows[0]) == cudnn_presets.COLUMNS and len(rows) == 2
    assert {"norm_name": "smaller", "norm_type": "layer_norm", "N": "3", "C": "64"}.items() <= rows[0].items()
    assert rows[0]["data_type"] == "bfloat16" and rows[0]["has_bias"] == "True"


def test_a_time_is_the_median_of_the_kernels_between_two_flushes():
    """A former failure: a profile of each call by itself saw no kernels, and the bandwidth was divided by 0."""
    durations = [(900.0, 3.0 + number, 2.0) for number in range(cudnn_presets.TIMED_CALLS)]
    events = [{"dur": us} for call in durations for us in call]
    assert cudnn_presets.median_ms(events) == pytest.approx(1e-3 * (5.0 + (cudnn_presets.TIMED_CALLS - 1) / 2))
    for seen in (events[1:], events[:: len(durations[0])]):
        with pytest.raises(RuntimeError, match="as many kernels each, got"):
            cudnn_presets.median_ms(seen)
