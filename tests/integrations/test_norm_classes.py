"""The list of transformers' norm classes that patch_model leaves."""

from __future__ import annotations

import norm_classes
import pytest

pytest.importorskip("transformers", reason="needs the package transformers")


def test_classes_that_are_left_are_listed_with_the_reason():
    found = {each.name: each.reason for each in norm_classes.list_of(["llama", "olmo"])}
    assert found["LlamaRMSNorm"] == "" and "has no eps" in found["OlmoLayerNorm"]
