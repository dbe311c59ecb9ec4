"""Hugging Face's `kernels`: the repository that `python -m fusednorm hub` writes, loaded and put into models."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch
from graphs import RecordingBackend
from tiny import build, norms, ops_logged, tokens

import fusednorm
from fusednorm.__main__ import main
from fusednorm.tools import hub

kernels = pytest.importorskip("kernels.layer", reason="needs the package kernels: make test-integrations")
load = pytest.importorskip("kernels.load")
transformers = pytest.importorskip("transformers", reason="needs the package transformers: make test-integrations")

Mode = kernels.Mode
TRAINING = Mode.TRAINING | Mode.TORCH_COMPILE
MODES = Mode.TRAINING, Mode.INFERENCE, TRAINING, Mode.INFERENCE | Mode.TORCH_COMPILE
QWEN = {"layer_types": ["full_attention"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
QWEN |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 128}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
LINEAR |= {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
SLOTS = {  # real classes of each slot
    "RMSNorm": [("llama", "LlamaRMSNorm"), ("gpt_oss", "GptOssRMSNorm"), ("qwen3", "Qwen3RMSNorm")],
    "RMSNormZeroCentered": [("qwen3_5", "Qwen3_5RMSNorm"), ("qwen3_5_moe", "Qwen3_5MoeRMSNorm")],
    "RMSNormGated": [
        ("qwen3_next", "Qwen3NextRMSNormGated"),
        ("qwen3_5", "Qwen3_5RMSNormGated"),
        ("qwen3_5_moe", "Qwen3_5MoeRMSNormGated"),
        ("qwen4_exp", "Qwen4ExpTextRMSNormGated"),
        ("olmo_hybrid", "OlmoHybridRMSNormGated"),
        ("kimi_linear", "KimiLinearRMSNormGated"),
        ("bailing_hybrid", "BailingHybridRMSNormGated"),
        ("glm5_next", "Glm5NextTextRMSNormGated"),
    ],
}
CLASSES = [(slot, *each) for slot, found in SLOTS.items() for each in found]


@pytest.fixture(scope="module", autouse=True)
def models_run_without_fla():
    """Models of transformers take its kernels where it is installed, and these run on no CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fla", None)
        yield


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "fusednorm"
    assert main(["hub", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def loaded(repository):
    """The package as `kernels` imports it, beside the one that is installed."""
    return load.get_local_kernel(repository)


@pytest.fixture
def stock_layer_norms_take_layers():
    kernels.replace_kernel_forward_from_hub(torch.nn.LayerNorm, "LayerNorm")
    yield
    del torch.nn.LayerNorm.kernel_layer_name, torch.nn.LayerNorm.kernel_condition


def qwen3_5(**more) -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**QWEN | more))


def on_ours(model: torch.nn.Module, repository, slot: str, mode=TRAINING) -> torch.nn.Module:
    """A copy of the model, in which our layer does the forward of every norm that has `slot` as its kernel's name."""
    layer = kernels.LocalLayerRepository(repository, layer_name=slot)
    with kernels.use_kernel_mapping({slot: {"cpu": {mode: layer}}}, inherit_mapping=False):
        return kernels.kernelize(copy.deepcopy(model), mode=mode, device="cpu")


def grads_of(model: torch.nn.Module, called=None) -> dict[str, torch.Tensor]:
    ids = tokens()
    loss = (model if called is None else called)(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: each.grad for name, each in model.named_parameters()}


def test_repository_is_what_kernel_builder_and_kernels_read(repository, capfd):
    rust = pytest.importorskip("kernels._rust")
    rust.Build.open(repository)
    assert not capfd.readouterr().err, "a word about an old format of build.toml"
    build = repository / "build" / "torch-cuda"
    digest = rust.Metadata.read_from_file(build / "metadata.json").digest
    digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, build))


def test_build_works_beside_the_installed_package(loaded):
    assert loaded.__name__.startswith("_fusednorm_cuda_") and loaded is not fusednorm
    x, weight = torch.randn(4, 8), torch.randn(8)
    theirs, ours = getattr(torch.ops, loaded.__name__), torch.ops.fusednorm
    assert theirs.rms_norm_fwd.default is not ours.rms_norm_fwd.default
    assert torch.equal(theirs.rms_norm_fwd(x, [8], weight)[0], ours.rms_norm_fwd(x, [8], weight)[0])
    own = [name for name in sys.modules if name.startswith(f"{loaded.__name__}.")]
    assert own and all(sys.modules[name].__spec__.origin.startswith(loaded.__path__[0]) for name in own)


@pytest.mark.parametrize(
    "slot, make, op, count",
    [
        ("RMSNorm", lambda: build("Llama"), "rms_norm", 5),
        ("RMSNormZeroCentered", qwen3_5, "rms_norm", 5),
        ("RMSNormGated", lambda: qwen3_5(**LINEAR), "rms_norm", 1),
        ("LayerNorm", lambda: build("GPT2"), "layer_norm", 5),
    ],
    ids=["Llama", "Qwen3.5", "Qwen3.5 with linear attention", "GPT-2"],
)
def test_layer_trains_a_model_of_transformers(slot, make, op, count, repository, loaded, stock_layer_norms_take_layers):
    stock = make()
    ours = on_ours(stock, repository, slot)
    expected = grads_of(stock)
    with ops_logged(loaded) as log:
        got = grads_of(ours)
    assert norms(log, loaded.__name__) == {f"{op}_fwd": count, f"{op}_bwd": count}
    torch.testing.assert_close(got, expected)
    assert ours.state_dict().keys() == stock.state_dict().keys()


@pytest.mark.parametrize("slot, name", [("RMSNorm", "Llama"), ("LayerNorm", "GPT2")])
def test_layer_compiles_without_a_graph_break(slot, name, repository, loaded, stock_layer_norms_take_layers):
    ours, backend = on_ours(build(name), repository, slot), RecordingBackend()
    ours.loss_type = "ForCausalLM"  # else transformers guesses the type, and its warning breaks the graph
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    expected = grads_of(copy.deepcopy(ours))
    with loaded.host.kernel_devices.kernels_on("cpu"), loaded.force("reference"):
        got = grads_of(ours, compiled)
    torch.testing.assert_close(got, expected)
    calls = [op for op in backend.ops if op.startswith(loaded.__name__)]
    assert len(backend.graphs) == 2 and len(calls) == 10, backend.graphs


MODELS = {"Llama": (lambda: build("Llama"), 5), "Qwen3.5": (lambda: qwen3_5(**LINEAR), 8)}


@pytest.mark.parametrize("make, count", MODELS.values(), ids=MODELS)
def test_kernel_config_takes_the_repository_by_its_path(make, count, repository, loaded, monkeypatch):
    """By the lines that `python -m fusednorm hub` prints. transformers accepts no mapping of kernels for CPUs, so the
    test pretends that the model is on a GPU of sm_90."""
    for module in (transformers.utils.kernel_config, transformers.integrations.hub_kernels):
        monkeypatch.setattr(module, "get_device_type", lambda device=None: "cuda")
    monkeypatch.setattr("kernels.layer.repos._find_capability", lambda: 90)
    stock = make().train()
    ours = copy.deepcopy(stock)
    exec(hub._use(repository), {"transformers": transformers, "model": ours})
    expected = grads_of(stock)
    with ops_logged(loaded) as log:
        got = grads_of(ours)
    assert norms(log, loaded.__name__) == {"rms_norm_fwd": count, "rms_norm_bwd": count}
    torch.testing.assert_close(got, expected)


def inputs_of(slot: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5, 32)] * (2 if slot == "RMSNormGated" else 1)
    return [torch.randn(each, generator=generator).to(dtype).requires_grad_() for each in shapes]


def results(norm: torch.nn.Module, given: list[torch.Tensor], trained: bool) -> list[torch.Tensor]:
    """y, and in training the gradients of the inputs and the weight."""
    with torch.set_grad_enabled(trained):
        y = norm(*given)
    if not trained:
        return [y]
    grad = torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)
    (weight,) = norm.parameters()
    return [y.detach(), *torch.autograd.grad(y, [*given, weight], grad)]


@pytest.mark.parametrize("slot, module, name", CLASSES, ids=[name for *_, name in CLASSES])
def test_layer_stands_for_every_class_of_its_slot_in_every_mode(slot, module, name, repository, loaded):
    made = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)(32)
    torch.nn.init.normal_(made.weight, mean=0.5)
    stock, given = made.to(torch.bfloat16), inputs_of(slot, torch.bfloat16)
    wide = [each.detach().double().requires_grad_() for each in given]
    for mode in MODES:
        trained = Mode.TRAINING in mode
        ours = on_ours(stock, repository, slot, mode)
        if Mode.TORCH_COMPILE in mode:
            torch._dynamo.reset()
            backend = RecordingBackend()
            with loaded.host.kernel_devices.kernels_on("cpu"), loaded.force("reference"):
                got = results(torch.compile(ours, backend=backend, fullgraph=True), given, trained)
            ops = backend.ops
        else:
            with ops_logged(loaded) as log:
                got = results(ours, given, trained)
            ops = log.names
        assert any(each.startswith(loaded.__name__) for each in ops)
        exact, theirs = results(copy.deepcopy(stock).double(), wide, trained), results(stock, given, trained)
        for mine, stocks, right in zip(got, theirs, exact, strict=True):
            slack = torch.finfo(mine.dtype).eps / 4 * right.norm()
            assert (mine.double() - right).norm() <= 1.1 * (stocks.double() - right).norm() + slack
            assert mine.dtype == stocks.dtype


def test_no_gated_class_is_missing_here():
    """`SLOTS` names every class of transformers that names the layer."""
    folder = Path(transformers.__file__).parent / "models"
    named = [path for path in folder.glob("*/modeling_*.py") if '_from_hub("RMSNormGated")' in path.read_text()]
    assert {path.parent.name for path in named} - {"lara_mini"} == {module for module, _ in SLOTS["RMSNormGated"]}


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "gpt_oss", "llama", "nemotron_h", "olmo2", "qwen3", "qwen3_5", "qwen3_5_moe"]
)
def test_layer_computes_what_the_norms_of_its_slot_do(name):
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    slots = {getattr(each, "kernel_layer_name", None): each for each in vars(module).values()}
    for layer in (fusednorm.layers.RMSNorm, fusednorm.layers.RMSNormZeroCentered):
        norm = slots.get(layer.__name__)
        if norm:
            break
    made, x = norm(16), torch.randn(3, 16)
    torch.nn.init.normal_(made.weight)
    torch.testing.assert_close(layer.forward(made, x), made(x))
