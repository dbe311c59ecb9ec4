"""The parts of the bench of fused forwards that need no GPU."""

from __future__ import annotations

import pytest
import torch
from tracing import calls, trace

from bench import fused_forward as bench
from bench.cases import BenchCase
from fusednorm.integrations import routing


def make_case(norm: str) -> BenchCase:
    bias = torch.float32 if norm == "layer" else None
    return BenchCase(norm, (6, 96), 1, torch.float32, torch.float32, bias)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_block_is_an_addition_and_the_norm_of_its_sum(norm):
    x, residual, weight, bias = torch.randn(6, 96), torch.randn(6, 96), torch.randn(96), torch.randn(96)
    stream, y = bench.make_block(make_case(norm), weight, bias)(x, residual)
    assert torch.equal(stream, x + residual)
    centered = stream - stream.mean(1, keepdim=True) if norm == "layer" else stream
    want = centered * (centered.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight
    torch.testing.assert_close(y, want + bias if norm == "layer" else want)


@pytest.mark.parametrize("limit, ours", [(0, 1), (97, 0)])
def test_without_a_limit_the_norm_of_a_narrow_row_is_ours(monkeypatch, limit, ours):
    monkeypatch.setattr(routing, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(routing, "WIDE_ROW", limit)
    traced = trace(bench.make_block(make_case("layer"), torch.ones(96), torch.ones(96)))
    with torch.no_grad():
        traced(torch.randn(6, 96), torch.randn(6, 96))
    assert len(calls(traced.forward, "fusednorm.layer_norm_fwd")) == ours


def test_without_a_gpu_it_says_so_and_ends_with_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--shapes", "64x128"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
