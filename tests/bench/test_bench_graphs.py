"""bench.graphs without a GPU: every case compiles in its ways, and their gradients are the exact ones."""

from __future__ import annotations

import json

import pytest
import torch
import tracing
from bench_records import MACHINE
from tracing import Traced, backend_of

from bench import graphs, neighbours, turns
from bench.records import save
from bench.zoo import ways
from fusednorm.integrations import inductor

cpu_as_cuda = tracing.cpu_as_cuda


@pytest.fixture
def without_code_generation(monkeypatch, cpu_as_cuda):
    """Inductor would take minutes."""
    stock = torch._dynamo.lookup_backend("aot_eager")

    def compile_graph(graph, inputs, options=None):
        return backend_of(Traced(), **(options or {}))(graph, inputs)

    for module in (graphs, ways):
        monkeypatch.setattr(module, "stock_backend", lambda: lambda graph, inputs: stock(graph, inputs))
    monkeypatch.setattr(inductor, "compile_graph", compile_graph)


def test_a_case_is_compiled_in_both_ways(without_code_generation):
    records = graphs.measure("packed_heads", "cpu", rounds=0, tiny=True)
    assert [each["way"] for each in records] == ["stock", "ours", "apart", "forms"]
    assert not any(each["is_worse"] for each in records)
    assert 'File "bench/graphs.py", line' in records[1]["norms"][-1], "a place within the clone"


@pytest.mark.parametrize("case", [name for name, case in graphs.CASES.items() if case.joined])
def test_what_may_be_joined_is_compiled_with_its_norms_and_apart_from_them(case, without_code_generation):
    records, form = graphs.measure(case, "cpu", rounds=0, tiny=True), graphs.CASES[case].joined
    ways = {each["way"]: " ".join(each["norms"]) for each in records}
    assert [*ways] == ["stock", "ours", "apart", "forms"] and not any(each["is_worse"] for each in records)
    assert form in ways["ours"] and form not in ways["apart"]


def test_a_model_of_the_zoo_is_compiled_in_both_ways(without_code_generation, tmp_path):
    pytest.importorskip("transformers", reason="needs the package transformers")
    task = graphs.Task("mamba2", tuple(graphs.WAYS), tmp_path / "graphs.jsonl", "source", 500, 500, 0, 1, tiny=True)
    graphs.measure_model(task)
    stock, ours = map(json.loads, task.out.read_text().splitlines())
    assert (stock["way"], ours["way"]) == ("stock", "ours") and not stock["unchecked"]
    assert not ours["is_worse"] and 0 < ours["errors"]["norms"] < 0.1
    backwards = [line for line in ours["norms"] if " backward " in line]
    assert sum(int(line.split(" x ")[0]) for line in backwards) == 4


def test_a_run_goes_on_with_what_has_no_times(tmp_path, monkeypatch, capsys):
    path = tmp_path / "nvidia-h200-nvl" / "graphs.jsonl"
    path.parent.mkdir()
    done = MACHINE | {"source": "now", "transformers": turns.packages.version("transformers")}
    records = [done | {"case": "llama", "median_us": 1.0}, done | {"case": "vit", "error": "out of memory"}]
    save([*records, done | {"case": "wan", "median_us": 1.0, "source": "before"}], path)
    asked = []

    def measured(names, *_):
        asked.append(names)
        return [{"case": name, "error": "none", "failed": True} for name in names if name == "wan"]

    monkeypatch.setattr(graphs, "records_of", measured)
    monkeypatch.setattr(graphs, "lacks_gpu", lambda tool: False)
    monkeypatch.setattr(graphs, "describe_machine", lambda: MACHINE)
    monkeypatch.setattr(graphs, "digest", lambda *patterns: "now")
    monkeypatch.setattr(graphs, "let_installed_packages_precede", lambda: None)
    command = ["--only", "llama", "vit", "wan", "--out", str(tmp_path)]
    assert graphs.main(command) == 1 and asked == [["vit"], ["wan"]]
    assert "llama: its records exist" in capsys.readouterr().out
    assert graphs.main([*command, "--seconds", "-1"]) == 0 and len(asked) == 2
    assert "vit: left for another run" in capsys.readouterr().out
    assert graphs.main([*command, "--jobs", "3"]) == 1 and asked[2:] == [["vit", "wan"]]


def test_the_table_has_the_newest_times_of_each_case(monkeypatch):
    def record(way, us, date, **more):
        norms = ["2 x rms_norm backward 8x8: fusednorm (x)", "1 x rms_norm backward 8x8: Inductor (x)"]
        return {"case": "vit", "way": way, "median_us": us, "date": date, "norms": norms, "times_stock": us / 60} | more

    lost = {"case": "wan", "date": "2031", "error": "too slow"}
    found = [record("stock", 90, "2030"), record("ours", 80, "2030"), lost]
    found += [record("stock", 60, "2031", graph=False), record("ours", 57, "2031", graph=False)]
    monkeypatch.setattr(neighbours, "records_of", lambda tool, gpu: found)
    (line,) = neighbours.compiled("H100").splitlines()[2:]
    assert line == "| ViT-L/16, not captured | 60 | 57 | 0.950 | 2 of 3 |  |"
