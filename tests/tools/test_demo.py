"""The demo with few training steps, and its reports of wrong results."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import afresh
import pytest
import torch
from torch import nn

import fusednorm
from fusednorm import __main__
from fusednorm.tools import console, demo

TINY = demo.Size(32, 2, 2, 16, 2, 4, 1e-3, torch.float32)


@pytest.fixture
def text():
    return demo.standard_library_text()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return demo.GPT(TINY)


@pytest.fixture
def missing(monkeypatch):
    """Make modules look as if they were not installed."""

    def hide(*names):
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)
        console.optional.cache_clear()

    yield hide
    console.optional.cache_clear()


def test_demo_checks_trains_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "CPU_SIZE", TINY)
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
    pytest.importorskip("matplotlib")
    assert __main__.main(["demo", "--steps", "3", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for expected in ("first attention (layer)", "last MLP (rms)", "rms-24x160-bf16", "ms per step", "demo_loss.png"):
        assert expected in said
    assert said.count("Right: every output is within its bounds") == 2
    assert "Those with TMA run on a simulated GPU in a clone" in said and "Not shown" in said
    assert (tmp_path / "demo_loss.png").stat().st_size > 10_000


def test_demo_without_its_optional_packages_names_the_extra_once_each(tmp_path, model, text, missing, capsys):
    missing("tqdm", "matplotlib")
    demo.check_activations(model, next(demo.batches(text, TINY, torch.device("cpu"))))
    demo.report(demo.train(model, text, TINY, 2), tmp_path)
    said = capsys.readouterr().out
    for package in ("tqdm", "matplotlib"):
        assert said.count(f"{package} is not installed") == 1
    assert said.count("pip install 'fusednorm[demo]'") == 2
    assert "first attention (layer)" in said
    assert not list(tmp_path.iterdir())


def test_both_models_learn_and_on_the_cpu_alike(model, text):
    stock_run, our_run = demo.train(model, text, TINY, 30).values()
    assert our_run.losses == pytest.approx(stock_run.losses, rel=1e-4)
    assert our_run.losses[-1] < our_run.losses[0] - 0.5
    assert len(our_run.seconds) == 30
    assert type(stock_run.model.final_norm) is nn.LayerNorm
    assert type(our_run.model.final_norm) is fusednorm.LayerNorm


def test_training_ends_when_patience_does(model, text, monkeypatch, capsys):
    monkeypatch.setattr(demo, "PATIENCE_SECONDS", 0)
    runs = demo.train(model, text, TINY, 1000)
    assert [len(run.losses) for run in runs.values()] == [1, 1]
    assert "Training stopped after 1 of 1000 steps" in capsys.readouterr().out


def test_16_bit_parameters_train_from_float32_copies(text):
    size = replace(TINY, dtype=torch.bfloat16, learning_rate=5e-4)
    model = demo.GPT(size).to(torch.bfloat16)
    norm = model.final_norm.weight.detach().clone()
    demo.train(model, text, size, 16)
    assert model.final_norm.weight.dtype == torch.bfloat16
    assert not torch.equal(model.final_norm.weight, norm)  # in bfloat16 1 - 5e-4 is 1, 1 - 16 * 5e-4 is not


def test_losses_that_part_are_reported(tmp_path, capsys):
    def runs(*losses: float):
        return {str(loss): SimpleNamespace(losses=[loss] * 12, seconds=[0.1] * 12) for loss in losses}

    assert demo.report(runs(3.0, 3.01), tmp_path)
    assert not demo.report(runs(3.0, 4.0), tmp_path)
    assert "WRONG: both runs must end at the same loss, got 3.0000 and 4.0000" in capsys.readouterr().out
    assert not demo.report(runs(3.0, float("nan")), tmp_path)


def test_wrong_outputs_are_reported(model, text, monkeypatch, capsys):
    right = demo.fused
    monkeypatch.setattr(demo, "fused", lambda *a: replace(right(*a), dx=right(*a).dx * 1.01))
    assert not demo.check_activations(model, next(demo.batches(text, TINY, torch.device("cpu"))))
    assert "dx has an element beyond its bound" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["failures", "error"])
def test_kernels_that_fail_are_reported(what, monkeypatch, capsys):
    def fail():
        raise RuntimeError("it cannot run")

    failures = iter([[], ["it cannot run"]])
    monkeypatch.setattr(demo.fallback, "failures", lambda: next(failures))
    monkeypatch.setattr(demo, "enable_interpreter", fail if what == "error" else lambda: None)
    assert not demo.check_interpreted()
    said = "\nWRONG: The portable Triton kernels in Triton's interpreter: RuntimeError: it cannot run\n"
    assert capsys.readouterr().out == said


def test_the_conclusion_is_as_good_as_what_was_seen():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert demo.conclusion(cpu, right=False) == demo.conclusion(gpu, right=False) == "\nSomething above is WRONG."
    assert "Not shown: how fast" in demo.conclusion(cpu, right=True)
    assert "Not shown" not in demo.conclusion(gpu, right=True)


def test_command_without_arguments_says_what_there_is():
    asked = afresh.run_module("fusednorm")
    assert asked.returncode == 2
    assert "demo | doctor" in asked.stderr


@pytest.mark.parametrize("command", ["demo --steps 1 --out /dev/null", "hub /dev/null/hub", "build"])
def test_a_folder_that_cannot_be_written_is_one_sentence(command, monkeypatch, capsys):
    monkeypatch.setattr(demo, "CPU_SIZE", TINY)
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    name, *arguments = command.split()
    pytest.importorskip("matplotlib" if name == "demo" else "torch")
    assert __main__.main([name, *arguments]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"{name}: [Errno ")


def test_table_is_aligned(capsys):
    console.print_table("title", ["a", "bcd"], [["long", "1"], ["x", "22"]])
    assert capsys.readouterr().out.splitlines() == ["", "title", "a     bcd", "----  ---", "long    1", "x      22"]


def test_without_numpy_the_demo_says_that_nothing_was_interpreted(monkeypatch):
    monkeypatch.setattr(demo, "optional", lambda module, extra, otherwise: None)
    said = demo.conclusion(torch.device("cpu"), True)
    assert "Of the GPU's kernels the portable ones did not run" in said and "interpreter ran" not in said
