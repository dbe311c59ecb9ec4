"""The examples run on a CPU with few steps, and models on stock norms and on ours learn the same."""

from __future__ import annotations

import re
from pathlib import Path

import afresh
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._inductor import compile_fx as inductor_entry

import fusednorm
from examples import (
    compile_unmodified,
    patch_hugging_face,
    resume_from_stock,
    train_dit,
    train_forms,
    train_fsdp2,
    train_gpt,
    train_qk_norm,
    training,
)
from examples.language_models import OURS, STOCK, LanguageModel
from examples.training import CPU_SIZE, GPU_SIZE, make_optimizer
from fusednorm.integrations import inductor, routing

ROOT = Path(__file__).parents[2]
STEPS = training.WARM_UP_STEPS + 1
# In two processes, with the variables that `torchrun --nproc-per-node 2` sets.
AS_BY_TORCHRUN = """
import os, runpy, socket
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
other = os.fork()
os.environ |= {"RANK": str(int(not other)), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
runpy.run_module("examples.tensor_parallel", run_name="__main__", alter_sys=True)
if other:
    assert os.waitpid(other, 0)[1] == 0
"""
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text())


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Arguments for few steps, on a CPU, with pictures in tmp_path."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(training.torch.cuda, "is_available", lambda: False)
    precision = torch.get_float32_matmul_precision()
    yield ["--steps", str(STEPS), "--out", str(tmp_path)]
    torch.set_float32_matmul_precision(precision)


def assert_runs_learned_alike(said: str, count: int) -> None:
    """The report has so many runs, whose first and last losses agree. Runs may round apart, so that the last digit
    differs on some processors."""
    runs = re.findall(r"tokens/s +\d+\.\d+ GiB  loss (\d\.\d{3}) -> (\d\.\d{3})\n", said)
    firsts, lasts = ([round(1000 * float(each)) for each in losses] for losses in zip(*runs, strict=True))
    assert len(runs) == count and max(lasts) < min(firsts)
    assert all(max(each) - min(each) <= 1 for each in (firsts, lasts))


def assert_they_learned_alike(said: str, picture: Path) -> None:
    assert_runs_learned_alike(said, 2)
    assert "differences in tokens/s are noise" in said
    assert picture.stat().st_size > 10_000


def test_tensor_parallel_trains_on_both_kinds_of_norms_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    ran = afresh.run(AS_BY_TORCHRUN, "--steps", STEPS, "--out", tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert_they_learned_alike(ran.stdout, tmp_path / "tensor_parallel_llama.png")


def test_train_fsdp2_trains_on_both_kinds_of_norms_and_draws(asked, tmp_path, capsys):
    train_fsdp2.main(["--model", "gpt2", *asked])
    assert_they_learned_alike(capsys.readouterr().out, tmp_path / "train_fsdp2_gpt2.png")


@pytest.mark.parametrize("model, ours", [("gpt2", OURS.layer), ("llama", OURS.rms)])
def test_train_gpt_trains_on_both_kinds_of_norms_and_draws(model, ours, asked, tmp_path, capsys, monkeypatch):
    trained = []
    run = training.train
    monkeypatch.setattr(training, "train", lambda each, *rest: trained.append(each) or run(each, *rest))
    train_gpt.main(["--model", model, *asked])
    assert_they_learned_alike(capsys.readouterr().out, tmp_path / f"train_gpt_{model}.png")
    assert [type(each.norm) is ours for each in trained] == [False, True]


@pytest.mark.parametrize("switches", [[], ["--layer-norm", "--bf16"]], ids=["rms", "layer"])
@pytest.mark.parametrize("model", train_forms.BLOCKS)
def test_train_forms_trains_on_both_ways_of_writing_norms_and_draws(model, switches, asked, tmp_path, capsys):
    train_forms.main(["--model", model, *switches, *asked])
    assert_they_learned_alike(capsys.readouterr().out, tmp_path / f"train_forms_{model}.png")


def test_train_dit_trains_on_both_ways_of_writing_norms_eager_and_compiled_and_draws(
    asked, tmp_path, capsys, monkeypatch
):
    """Without Inductor, which would take half a minute."""
    compile_model = torch.compile
    monkeypatch.setattr(train_dit.torch, "compile", lambda model: compile_model(model, backend="aot_eager"))
    train_dit.main(["--compile", *asked])
    said = capsys.readouterr().out
    assert_runs_learned_alike(said, 4)
    assert (tmp_path / "train_dit.png").stat().st_size > 10_000


def test_train_qk_norm_trains_on_norms_written_out_as_one_call_and_packed_and_draws(asked, tmp_path, capsys):
    train_qk_norm.main(asked)
    said = capsys.readouterr().out
    assert_runs_learned_alike(said, 3)
    assert (tmp_path / "train_qk_norm.png").stat().st_size > 10_000


def test_patch_hugging_face_patches_every_norm(asked, tmp_path, capsys):
    pytest.importorskip("transformers")
    patch_hugging_face.main(asked)
    said = capsys.readouterr().out
    assert f"{2 * CPU_SIZE.blocks + 1} x LlamaRMSNorm, RMSNorm, written by hand" in said and "left 0" in said
    assert_they_learned_alike(said, tmp_path / "patch_hugging_face.png")


def test_resume_from_stock_goes_on_as_if_nothing_had_happened(asked, tmp_path, capsys):
    resume_from_stock.main(asked)
    said = capsys.readouterr().out
    assert "The losses are never more than 0 apart." in said and said.count("loss ") == 3
    assert (tmp_path / "resume_from_stock_llama.png").stat().st_size > 10_000


def test_resume_from_stock_notices_a_state_that_was_lost(asked, capsys, monkeypatch):
    load = resume_from_stock.load
    monkeypatch.setattr(resume_from_stock, "load", lambda model, _, path: load(model, make_optimizer(model), path))
    resume_from_stock.main(asked)
    assert "never more than 0 apart" not in capsys.readouterr().out


def test_compile_unmodified_says_which_norms_became_ours(asked, tmp_path, capsys, monkeypatch):
    """Routes CPU tensors as CUDA tensors are, and runs graphs uncompiled, because Inductor would take half a minute."""
    compile_fx = inductor_entry.compile_fx

    def run_as_it_is(graph, inputs, inner_compile=None, **settings):
        return compile_fx(graph, inputs, lambda graph, *_, **__: make_boxed_func(graph.forward), **settings)

    monkeypatch.setattr(inductor_entry, "compile_fx", run_as_it_is)
    monkeypatch.setattr(routing, "DEVICE_TYPES", ("cpu",))
    inductor.report(clear=True)
    with torch.compiler.config.patch(force_disable_caches=True):
        compile_unmodified.main(["--model", "gpt2", *asked])
    fusednorm.disable_inductor()
    said = capsys.readouterr().out
    rows = f"{CPU_SIZE.batch}x{CPU_SIZE.length}x{CPU_SIZE.width} float32 on cpu"
    # Inductor adds the gradients of the products for queries, keys and values in the backward of the first norm.
    for place, runs in (("blocks.*.norm1", "Inductor (fused"), ("blocks.*.norm2", "fusednorm")):
        assert f"{CPU_SIZE.blocks} x layer_norm backward {rows} in {place}: {runs}" in said
        assert f"{CPU_SIZE.blocks} x layer_norm forward {rows} in {place}: Inductor (fused with its neighb" in said
    assert_they_learned_alike(said, tmp_path / "compile_unmodified_gpt2.png")


def test_steps_that_warm_up_have_no_speed(tmp_path, capsys):
    short, long = training.Run([5.0] * 3, [9.0] * 3), training.Run([5.0] * 9, [9.0] * 5 + [0.5] * 4)
    training.report({"stock norms": short, "fusednorm": long}, 100, tmp_path / "picture.png")
    stock, ours, rule, *_ = capsys.readouterr().out.splitlines()
    assert "not timed" in stock and " 200 tokens/s" in ours and "--steps 50" in rule


@pytest.mark.parametrize(
    ("wrong", "said"), [("--steps 0", "--steps: must be a positive"), ("--norms ours", "unrecognized arguments")]
)
def test_an_example_refuses_what_it_cannot_do(wrong, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        patch_hugging_face.main(wrong.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_says_first_what_it_shows_and_what_a_cpu_makes_of_it(example):
    text = (ROOT / "examples" / f"{example}.py").read_text()
    assert text.startswith('"""What this shows: ')
    shown = " ".join(text.split('"""')[1].split())
    assert "our functionals call ATen" in shown or "On a CPU every norm stays with Inductor" in shown


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_for_gpus_have_about_a_billion_parameters(name):
    with torch.device("meta"):
        model = LanguageModel(name, GPU_SIZE, STOCK)
    assert 0.7e9 < sum(each.numel() for each in model.parameters()) < 1.1e9
