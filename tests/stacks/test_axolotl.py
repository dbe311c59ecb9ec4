"""axolotl's own manager of plugins loads ours by the name in the YAML and hands it a model."""

from __future__ import annotations

import logging

import pytest
import torch
from tiny import build, norms, ops_logged, tokens

base = pytest.importorskip("axolotl.integrations.base", reason="needs the package axolotl: make test-integrations")

NAME = "fusednorm.integrations.axolotl.Plugin"  # as a user's YAML and docs/stacks.md have it


@pytest.fixture
def manager():
    manager = base.PluginManager.get_instance()
    manager.register(NAME)
    yield manager
    manager.plugins.pop(NAME, None)


def test_the_built_model_runs_ours_with_stocks_numbers(manager, caplog):
    model, given = build("Qwen3"), tokens(rows=2)
    stock = model(given, labels=given).loss
    with caplog.at_level(logging.INFO):
        manager.post_model_build({}, model)
    assert "replaced 9" in caplog.text and caplog.records[-1].name.startswith("axolotl")
    with ops_logged() as log:
        loss = model(given, labels=given).loss
        loss.backward()
    assert norms(log) == {"rms_norm_fwd": 9, "rms_norm_bwd": 9}
    torch.testing.assert_close(loss, stock)


def test_the_other_hooks_leave_a_model_alone(manager):
    model = build("Qwen3")
    before = [type(each) for each in model.modules()]
    manager.pre_model_load({})
    manager.pre_lora_load({}, model)
    manager.post_lora_load({}, model)
    manager.post_model_load({}, model)
    assert [type(each) for each in model.modules()] == before
