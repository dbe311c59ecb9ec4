"""Megatron-Core: a tiny GPT from Megatron's specs with our norms, in one process and tensor parallel in two."""

from __future__ import annotations

import contextlib
import copy
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiny import norms, ops_logged
from worlds import Log, World, combinations_in, ops_run, run_all

import fusednorm

core = pytest.importorskip("megatron.core", reason="needs the package megatron-core: make test-integrations")
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402

from fusednorm.integrations import megatron  # noqa: E402

LENGTH, VOCABULARY = 16, 64


@contextlib.contextmanager
def cpu_as_the_current_gpu():
    """Makes the CPU the current device, where Megatron puts some tensors. Removes Megatron's forks of CUDA's random
    state for dropout."""
    tracker = SimpleNamespace(fork=contextlib.nullcontext)
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(core.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker),
    ):
        yield


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('gloo')}/store", rank=0, world_size=1)
    core.parallel_state.initialize_model_parallel()
    with cpu_as_the_current_gpu():
        yield
    core.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def config_of(**options) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    return TransformerConfig(
        **sizes, use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0, qk_layernorm=True, **options
    )


def gpt(config: TransformerConfig, with_norms=lambda spec: spec) -> GPTModel:
    torch.manual_seed(0)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, qk_l2_norm=False
    )
    return GPTModel(config, with_norms(spec), vocab_size=VOCABULARY, max_sequence_length=LENGTH)


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand_as(tokens)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(tokens, positions, mask, labels=tokens).mean()


def losses(model: GPTModel, steps: int = 4) -> list[float]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("normalization, op", [("LayerNorm", "layer_norm"), ("RMSNorm", "rms_norm")])
def test_gpt_trains_as_with_megatrons_norms(normalization, op):
    config = config_of(normalization=normalization)
    stock, ours = gpt(config), gpt(config, megatron.with_norms)
    start = copy.deepcopy(ours.state_dict())
    stock.load_state_dict(start)
    expected = losses(stock)
    with ops_logged() as log:
        got = losses(ours)
    count = 4 * (2 * 4 + 1)  # 4 steps x (2 layers x 4 norms + the last norm); q and k have norms too
    assert norms(log) == {f"{op}_fwd": count, f"{op}_bwd": count}
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert got[-1] < got[0]
    ours.load_state_dict(stock.state_dict())


def gradients_of_norms(size: int) -> dict[str, torch.Tensor]:
    """Gradients from Megatron's own data parallelism, on `size` tensor-parallel ranks. Several ranks shard
    the sequences at the norms."""
    core.parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    config = config_of(tensor_model_parallel_size=size, sequence_parallel=size > 1)
    model = gpt(config, megatron.with_norms)
    parallel = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    parallel.zero_grad_buffer()
    loss_of(parallel).backward()
    finalize_model_grads([parallel])
    core.parallel_state.destroy_model_parallel()
    return {name: each.main_grad.clone() for name, each in model.named_parameters() if "norm" in name}


def sequence_parallel(world: World) -> None:
    with cpu_as_the_current_gpu(), ops_run(world):
        with Log() as log:
            got = gradients_of_norms(2)
        assert log.norms().count("fusednorm.layer_norm_bwd.default") == len(got) // 2 == 9
        torch.testing.assert_close(got, gradients_of_norms(1))


def test_gradients_are_summed_over_the_sequence(tmp_path):
    (combination,) = combinations_in(globals(), {})
    failure = run_all(2, [combination], tmp_path)[combination.name]
    assert not failure, failure


def test_spec_itself_stays_as_it_is():
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    ours = megatron.with_norms(spec)
    assert ours.submodules.input_layernorm is ours.submodules.pre_mlp_layernorm is megatron.Norm
    assert spec.submodules.input_layernorm is spec.submodules.pre_mlp_layernorm is WrappedTorchNorm
    assert spec.submodules.self_attention is not ours.submodules.self_attention


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("parallel", [False, True])
def test_norm_takes_eps_and_marks_its_parameters(normalization, parallel):
    config = config_of(normalization=normalization, tensor_model_parallel_size=2, sequence_parallel=parallel)
    norm = megatron.SpecProvider().layer_norm()(config=config, hidden_size=8, eps=1e-3)
    assert type(norm) is getattr(fusednorm, normalization) and norm.eps == 1e-3 and not norm.returns_residual
    assert [each.sequence_parallel for each in norm.parameters()] == [parallel] * len(list(norm.parameters()))


@pytest.mark.parametrize("normalization, op", [("LayerNorm", "layer_norm"), ("RMSNorm", "rms_norm")])
def test_weights_centered_at_zero_train_as_those_centered_at_one(normalization, op):
    """WrappedTorchNorm, Megatron's norm without Apex and TransformerEngine, has no such weights to compare with."""
    at_zero, at_one = (
        gpt(config_of(normalization=normalization, layernorm_zero_centered_gamma=centered), megatron.with_norms)
        for centered in (True, False)
    )
    with ops_logged() as log:
        loss = loss_of(at_zero)
    assert norms(log) == {f"{op}_fwd": 2 * 4 + 1}
    expected = loss_of(at_one)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    ones = dict(at_one.named_parameters())
    for name, each in at_zero.named_parameters():
        torch.testing.assert_close(each.grad, ones[name].grad, rtol=1e-4, atol=1e-6)
        if "norm" in name and "weight" in name:
            assert not each.any() and (ones[name] == 1).all() and each.grad.any()


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_norm_with_residual_adds_the_gradients_of_its_two_outputs(normalization, centered):
    """As layers of later releases call it: residual, y = x, norm(x)."""
    config = config_of(normalization=normalization, layernorm_zero_centered_gamma=centered)
    both = megatron.SpecProvider().layer_norm(has_residual=True)(config=config, hidden_size=8)
    plain = megatron.SpecProvider().layer_norm()(config=config, hidden_size=8)
    plain.load_state_dict(both.state_dict())
    x, twin = (torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    with ops_logged() as log:
        y, residual = both(x)
        (3 * y.square() + residual).sum().backward()
    (3 * plain(twin).square() + twin).sum().backward()
    assert both.returns_residual and torch.equal(residual, x) and len(norms(log)) == 2
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(both.weight.grad, plain.weight.grad)


def test_what_our_norms_lack_is_refused():
    with pytest.raises(ValueError, match="fusednorm: memory_efficient_layer_norm must be False, got True"):
        megatron.Norm(config_of(memory_efficient_layer_norm=True), 8)


def test_other_normalizations_are_refused():
    config = config_of()
    config.normalization = "L2Norm"
    with pytest.raises(ValueError, match="normalization must be one of .*, got 'L2Norm'"):
        megatron.Norm(config, 8)
