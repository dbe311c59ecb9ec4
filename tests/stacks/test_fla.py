"""flash-linear-attention's gated norms, whose state dicts our modules load. Their forwards need a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusednorm

norms = pytest.importorskip("fla.modules.norm", reason="needs the package fla-core: make test-integrations")
COLS = 64
PAIRS = [  # FLA's module, ours
    (lambda: norms.FusedRMSNormGated(COLS), lambda: fusednorm.RMSNormGated(COLS)),
    (lambda: norms.FusedRMSNormGated(COLS, False), lambda: fusednorm.RMSNormGated(COLS, elementwise_affine=False)),
    (lambda: norms.FusedLayerNormGated(COLS), lambda: fusednorm.LayerNormGated(COLS, bias=False)),
    (lambda: norms.FusedLayerNormGated(COLS, bias=True), lambda: fusednorm.LayerNormGated(COLS)),
    (lambda: norms.RMSNormGated(COLS), lambda: fusednorm.RMSNormGated(COLS)),
    (lambda: norms.LayerNormGated(COLS), lambda: fusednorm.LayerNormGated(COLS)),
]


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_state_dicts_go_both_ways(theirs, ours):
    theirs, ours = theirs(), ours()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    assert all(torch.equal(each, ours.state_dict()[name]) for name, each in theirs.state_dict().items())
    theirs.load_state_dict(ours.state_dict())


def test_patch_model_leaves_a_forward_that_does_more():
    model = nn.Sequential(norms.FusedRMSNormGated(COLS), norms.FusedLayerNormGated(COLS))
    patch = fusednorm.patch_model(model)
    assert not patch.replaced
    assert [each.note for each in patch.left] == ["its forward takes more than the tensor and a gate"] * 2
