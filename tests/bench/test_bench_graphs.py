"""bench.graphs without a GPU: every case compiles in its ways, and their gradients are the exact ones."""

from __future__ import annotations

import pytest
import torch

from bench import graphs


@pytest.mark.parametrize("name", ["packed_heads", "llama"])
def test_ways_compute_the_same(name, monkeypatch):
    """Without Inductor's code generation, which takes a minute."""
    from fusednorm.integrations import inductor

    if name in graphs.LAYERS:
        pytest.importorskip("transformers")
    run_as_it_is = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setattr(graphs, "stock_backend", lambda: run_as_it_is)
    monkeypatch.setattr(inductor, "compile_graph", run_as_it_is)
    records = graphs.measure(name, "cpu", rounds=0, tiny=True)
    assert [each["way"] for each in records] == ["stock", "ours"]
    assert not any(each["is_worse"] for each in records) and all("norms" in each for each in records)
