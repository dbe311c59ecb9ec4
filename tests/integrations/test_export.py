"""Direct calls of our forward ops, in exported programs and in AOTInductor packages."""

from __future__ import annotations

import pytest
import torch
from aot_package import check_package
from torch import nn
from tracing import calls

from fusednorm import autograd


class WrittenNorms(nn.Module):
    """Calls our forwards as fusednorm.functional does for CUDA tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rms = nn.LayerNorm(32), nn.RMSNorm(32)

    def forward(self, x):
        y = autograd.IMPLEMENTATIONS["layer_norm_fwd"](x, (32,), self.layer.weight, self.layer.bias, self.layer.eps)[0]
        return autograd.IMPLEMENTATIONS["rms_norm_fwd"](y, (32,), self.rms.weight, self.rms.eps)[0]


@pytest.mark.parametrize("strict", [False, True])
def test_written_calls_export_as_ops_with_dynamic_rows(strict):
    model, x = WrittenNorms(), torch.randn(4, 32)
    rows = torch.export.Dim("rows")
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: rows},), strict=strict)
    for program in (exported, exported.run_decompositions()):
        torch.testing.assert_close(program.module()(torch.cat([x, x])), model(torch.cat([x, x])))
        assert [len(calls(program.graph, f"fusednorm.{norm}_norm_fwd")) for norm in ("layer", "rms")] == [1, 1]


def test_written_calls_become_an_aot_package(tmp_path):
    check_package("cpu", tmp_path)
