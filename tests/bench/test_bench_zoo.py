"""The zoo of models: a dry run on the CPU, and the parts that need no model."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import zoo_process
from bench_records import MACHINE

from bench import turns
from bench.records import save
from bench.zoo import __main__ as zoo
from bench.zoo import measure, page, ways
from bench.zoo.models import MODELS, norm_parameters
from bench.zoo.profile import summary

EAGER = ["eager stock", "eager patch_model", "eager enable_eager"]


def broken(model, batch):
    raise RuntimeError("of no use")


def test_a_dry_run_records_every_way_and_a_way_that_fails_does_not_end_it(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="needs the package transformers")
    monkeypatch.setitem(ways.WAYS, "eager liger", broken)
    command = ["--tiny", "--models", "llama", "vit", "--ways", *EAGER, "eager liger", "--out", str(tmp_path)]
    assert zoo.main([*command, "--rounds", "2", "--steps", "1"]) == 1
    assert "llama, eager liger: RuntimeError: of no use" in capsys.readouterr().out
    (path,) = tmp_path.glob("*/zoo.jsonl")
    found = {(r["model"], r["norms"]): r for r in map(json.loads, path.read_text().splitlines())}
    assert len(found) == 8 and not any(r["unchecked"] for r in found.values())
    assert found["llama", "patch_model"]["norms_run"] == ["4 x replaced: LlamaRMSNorm, RMSNorm, written by hand"]
    assert "written by hand" in found["llama", "enable_eager"]["error"]
    assert found["vit", "enable_eager"]["norms_run"] == ["8 x replaced: LayerNorm, torch's own"]
    for (model, _), each in found.items():
        if not each["error"]:
            want = found[model, "stock"]
            assert each["rounds"] == 2 and each["median_ms"] > 0
            assert each["loss"] == pytest.approx(want["loss"], rel=0.02)
            for group, error in each["errors"].items():
                assert 0 < error < 2 * want["errors"][group] < 0.1
    assert zoo.main([*command[:4], "--ways", *EAGER[:2], *command[-2:]]) == 0
    assert "vit: its records exist" in capsys.readouterr().out, "measured again"


def test_a_model_of_a_package_that_is_not_installed_is_recorded_as_such(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert zoo.main(["--tiny", "--models", "flux", "--ways", "eager stock", "--out", str(tmp_path)]) == 0
    (record,) = map(json.loads, next(tmp_path.glob("*/zoo.jsonl")).read_text().splitlines())
    assert "diffusers" in record["error"] and record["model"] == "flux" and not record["failed"]


@pytest.mark.parametrize("name", ["qwen3", "vit"])
def test_gradients_are_those_of_the_first_tokens_or_the_first_sample(name):
    pytest.importorskip("transformers", reason="needs the package transformers")
    spec = MODELS[name].smaller()
    model = spec.build("cpu", torch.float64)
    batch = spec.inputs(spec, "cpu").double()

    def gradients(of) -> dict[str, torch.Tensor]:
        model.zero_grad()
        of.loss(model).backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    few, masked, whole = (gradients(each) for each in (batch.first(7), batch.counting_first(7), batch))
    norms = {key: few[key] for key in norm_parameters(model)}
    torch.testing.assert_close({key: masked[key] for key in norms}, norms, rtol=1e-6, atol=1e-9)
    assert not all(torch.allclose(whole[key], norms[key], rtol=0.1) for key in norms)


@pytest.mark.parametrize("name", ["qwen3", "vit", "whisper"])
def test_a_model_is_compiled_once_for_its_gradients_and_for_its_steps(name):
    """A graph is for its inputs' shapes and strides, and for which of them are one tensor."""
    spec = MODELS[name].smaller()
    batch = spec.inputs(spec, "cpu")

    def seen(of) -> list[tuple]:
        tensors = list(of.arguments.values())
        return [(each.shape, each.stride(), [each is other for other in tensors]) for each in tensors]

    assert seen(batch.counting_first(7)) == seen(batch)


def test_processes_that_take_too_long_or_break_do_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "RESERVE", 0.5)
    limits = {"runs forever": (60, 0.5), "compiles forever": (0.5, 60), "breaks": (60, 60), "works": (60, 60)}
    tasks = [
        SimpleNamespace(model=name, out=str(tmp_path), compile_seconds=compiling, seconds=running)
        for name, (compiling, running) in limits.items()
    ]
    failures = turns.run_group([(zoo_process.run, task) for task in tasks], time.monotonic() + 60)
    assert [failure and failure.split()[0] for failure in failures] == ["stopped", "not", "its", None]
    assert {path.name for path in tmp_path.iterdir()} == {"runs forever", "breaks", "works"}


def test_a_way_that_takes_too_long_is_stopped():
    with pytest.raises(TimeoutError, match="took more than the 0 s"), measure.limited(0.05):
        time.sleep(10)
    time.sleep(0.1)


def test_the_last_way_has_all_the_time_that_is_left(monkeypatch):
    given = []
    monkeypatch.setattr(measure, "limited", lambda seconds: given.append(round(seconds)) or nullcontext())
    monkeypatch.setattr(measure, "make_way", lambda *_: SimpleNamespace(report=None, norms=[]))
    parts = {"kept_errors": lambda runner: nullcontext(), "gradients": lambda way: None, "forget": lambda: None}
    runners = [measure.Runner(name) for name in EAGER[:2]]
    task = SimpleNamespace(model="llama", compile_seconds=100)
    measure.Zoo.prepare(SimpleNamespace(task=task, runners=runners, spec=None, stock=None, batches=[None], **parts))
    assert given == [60, 100]


def test_records_of_other_code_or_of_some_ways_do_not_stand_for_a_run(tmp_path):
    machine = MACHINE | {"source": "a", "transformers": turns.packages.version("transformers")}
    path = tmp_path / "zoo.jsonl"
    records = [machine | {"model": "llama", "way": "eager", "norms": norms} for norms in ("stock", "hub")]
    save([*records, records[0] | {"model": "vit"}, records[1] | {"model": "vit", "source": "b"}], path)
    assert zoo.models_done(path, MACHINE | {"source": "a"}, ["eager stock", "eager hub"]) == {"llama"}
    assert zoo.models_done(path, MACHINE | {"source": "a"}, ["eager stock"]) == {"llama", "vit"}
    assert not zoo.models_done(tmp_path / "none.jsonl", MACHINE, ["eager stock"])


def test_large_models_are_prepared_alone_and_what_does_not_fit_beside_others_once_more():
    tasks = [measure.Task(name, ("eager stock", "eager hub"), None, "", 1, 1, 1, 1) for name in ("wan", "llama", "vit")]
    groups = zoo.groups_of(tasks, jobs=2)
    assert [[task.model for task in group] for group in groups] == [["llama", "vit"], ["wan"]]
    found = [
        zoo_record("stock", 40),
        zoo_record("hub", None, error="OutOfMemoryError: CUDA"),
        zoo_record("liger", None),
    ]
    lost = {"model": "wan", "error": "OutOfMemoryError: of the model itself"}
    found = [{"error": None} | each | {"model": "wan"} for each in found] + [lost]
    (again,) = zoo.apart(tasks[0], found)
    assert again.model == "wan" and again.ways == ("eager hub",)
    assert not zoo.apart(tasks[1], found) and not zoo.apart(again, found)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "nemotron_h", "wan"])
def test_models_with_scans_and_tables_are_trained_as_exactly_as_stock(name, tmp_path):
    pytest.importorskip(MODELS[name].library, reason="needs the package of the model")
    task = measure.Task(name, tuple(EAGER[:2]), tmp_path / "zoo.jsonl", "", 500, 0, 1, 1, tiny=True)
    stock, ours = measure.run(task)
    assert not stock["error"] and not ours["error"] and not ours["unchecked"]
    assert any(line.split(" x ")[1].startswith("replaced") for line in ours["norms_run"])
    for group, error in ours["errors"].items():
        assert 0 < error < 1.5 * stock["errors"][group] < 0.1


def test_a_profile_counts_launches_and_bytes_by_what_they_are_for():
    def op(number: int, name: str, *shapes: list[int]) -> dict:
        kinds = ["c10::BFloat16"] * len(shapes)
        arguments = {"External id": number, "Input Dims": shapes, "Input type": kinds}
        return {"cat": "cpu_op", "name": name, "args": arguments}

    def kernel(number: int, name: str, us: float) -> dict:
        return {"cat": "kernel", "name": name, "ts": 0, "dur": us, "args": {"External id": number}}

    events = [op(1, "aten::mul", [10, 8], [8]), kernel(1, "void at::native::k<at::native::BinaryFunctor<x>>(int)", 2.0)]
    events += [kernel(1, "void at::native::k<at::native::BinaryFunctor<x>>(int)", 3.0)]
    events += [op(2, "aten::mm", [10, 8], [8, 4]), kernel(2, "nvjet_tst", 9.0), kernel(3, "triton_red_fused_mm_0", 1.0)]
    found = summary(events)
    assert found["kinds"]["products"] == {"count": 1, "us": 9.0, "mb": pytest.approx(0.000384, abs=1e-3)}
    assert [(row["kind"], row["count"], row["us"]) for row in found["launches"]] == [
        ("element-wise", 2, 5.0), ("compiled", 1, 1.0),
    ]  # fmt: skip
    assert found["launches"][0]["kernel"] == "k BinaryFunctor"
    assert found["launches"][0]["shapes"] == "BFloat16[10x8], BFloat16[8]"


def zoo_record(norms: str, ms: float | None, way: str = "eager", **more) -> dict:
    times = {"median_ms": ms, "over_eager": [40 / ms, 0.01]} if ms else {}
    of_run = {"bench": "zoo", "model": "llama", "title": "Llama 3 8B", "way": way, "norms": norms}
    return MACHINE | of_run | times | more


def test_the_page_shows_the_newest_steps_of_each_model(tmp_path):
    records = [zoo_record("stock", 44), zoo_record("hub", 41), zoo_record("stock", 40), zoo_record("patch_model", 32)]
    records += [zoo_record("stock", 33, "compiled"), zoo_record("liger", None, error="not there")]
    records += [zoo_record(f"enable_inductor{join}", ms, "compiled") for join, ms in {"": 34, " modulated": 32}.items()]
    cells = ["Llama 3 8B", "40.0", "32.0 (1.25x)", "", "", "", "33.0 (1.21x)", "32.0 (1.25x)", ""]
    assert page.rows(records) == [cells], "joins that had to be asked for are those of enable_inductor today"
    pytest.importorskip("matplotlib")
    page.draw(records, tmp_path / "zoo.png")
    assert (tmp_path / "zoo.png").stat().st_size > 5000
