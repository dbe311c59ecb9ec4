"""Norms combined with ways to use many GPUs: each function with the parameter `world` is a combination of worlds.py.

Most combinations train a small language model of examples/ for three steps in float64. The parameters must end equal to
those of one process that trained the stock model on the whole batch. Each step must call one of our ops for each norm.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from eager import Calls, aten_looks_like_cuda, override
from sharded_ops import registered
from torch import Tensor, nn
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from worlds import Log, World, combinations_in, ops_run

import fusednorm
from examples.language_models import (
    OURS,
    STOCK,
    Attention,
    LanguageModel,
    Size,
    batches,
    help_text,
    next_byte_loss,
)
from examples.tensor_parallel import parallelize

BATCH, STEPS = 4, 3
SIZE = Size(width=16, blocks=2, heads=4, length=8, batch=BATCH)
KINDS = {"gpt2": "layer", "llama": "rms"}
NORM_COUNT = 2 * SIZE.blocks + 1
FP64, BF16 = torch.float64, torch.bfloat16
CLIPPED_TO = 0.1
WHOLE = slice(None)  # all rows of the batch


# The model, its training in one process, and training steps in many processes


def build(world: World, name: str, norms=OURS) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(name, SIZE, norms).to(world.device, FP64)


def batch(world: World, step: int) -> tuple[Tensor, Tensor]:
    tokens, targets = next(batches(help_text(), SIZE, seed=step))
    return tokens.to(world.device), targets.to(world.device)


def own_rows(mesh) -> slice:
    """The rows of the batch that belong to this rank of a mesh with one dim."""
    rows = BATCH // mesh.size()
    return slice(mesh.get_local_rank() * rows, (mesh.get_local_rank() + 1) * rows)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Not Adam: its steps hide a wrong factor in a gradient. Not foreach, the default on CUDA: where the gradients of
    # replicated DTensors are partial sums, its second step is wrong, with stock norms as well (torch 2.11).
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, foreach=False)


def norm_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, (nn.LayerNorm, nn.RMSNorm))]


@functools.cache
def one_process(world: World, name: str) -> dict[str, Tensor]:
    """The parameters of the stock model after all steps on the whole batch."""
    model = build(world, name, STOCK)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        backward(world, model, step)
        optimizer.step()
        optimizer.zero_grad()
    return {key: each.detach() for key, each in model.state_dict().items()}


def backward(world: World, model: nn.Module, step: int = 0, rows: slice = WHOLE) -> None:
    tokens, targets = batch(world, step)
    next_byte_loss(model(tokens[rows]), targets[rows]).backward()


def take_step(world: World, model: nn.Module, optimizer, step: int, rows: slice) -> Log:
    with ops_run(world), Log() as log:
        backward(world, model, step, rows)
    optimizer.step()
    optimizer.zero_grad()
    return log


def assert_trains_as_one_process(world: World, name: str, model: nn.Module, rows: slice, forwards=NORM_COUNT) -> None:
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        assert_ours_ran(take_step(world, model, optimizer, step, rows), name, forwards)
    assert_is_of_one_process(world, name, model)


def assert_ours_ran(log: Log, name: str, forwards: int = NORM_COUNT, backwards: int = NORM_COUNT) -> None:
    ran, norm = log.norms(), f"fusednorm.{KINDS[name]}_norm"
    counts = ran.count(f"{norm}_fwd.default"), ran.count(f"{norm}_bwd.default")
    assert counts == (forwards, backwards), f"of our ops ran {counts}, wanted {forwards, backwards}"


def assert_is_of_one_process(world: World, name: str, model: nn.Module) -> None:
    want = one_process(world, name)
    for key, each in model.state_dict().items():
        wanted = want[key.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")]
        assert_equal(each, wanted, key)


def assert_equal(got: Tensor, want: Tensor, what: str) -> None:
    got = got.full_tensor() if isinstance(got, DTensor) else got
    how = {"rtol": 1e-9, "atol": 1e-9, "check_device": False}  # offloaded parameters are in the CPU's memory
    torch.testing.assert_close(got, want, **how, msg=lambda text: f"{what}: {text}")


def shard(model: LanguageModel, mesh, **options) -> LanguageModel:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def data_parallel(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True)


# Data parallelism


def fsdp(world: World) -> None:
    mesh = world.mesh()
    for name, reshard in (("gpt2", True), ("llama", False)):
        model = shard(build(world, name), mesh, reshard_after_forward=reshard)
        assert_trains_as_one_process(world, name, model, own_rows(mesh))


def fsdp_of_replicas(world: World) -> None:
    model = shard(build(world, "llama"), world.mesh(2, 2, names=("replicate", "shard")))
    assert_trains_as_one_process(world, "llama", model, own_rows(world.mesh()))


def fsdp_with_parameters_offloaded(world: World) -> None:
    mesh = world.mesh()
    model = shard(build(world, "gpt2"), mesh, offload_policy=CPUOffloadPolicy(pin_memory=world.device.type == "cuda"))
    assert_trains_as_one_process(world, "gpt2", model, own_rows(mesh))


def fsdp_with_mixed_precision(world: World) -> None:
    """The gradients of norms are as near to those of one process in float64 as the stock model's."""
    mesh, policy = world.mesh(), MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for name in KINDS:
        exact = build(world, name, STOCK)
        backward(world, exact)
        errors = []
        for norms in (OURS, STOCK):
            model = shard(build(world, name, norms).float(), mesh, mp_policy=policy)
            with ops_run(world), Log() as log:
                backward(world, model, rows=own_rows(mesh))
            if norms is OURS:
                assert_ours_ran(log, name)
            pairs = zip(norm_modules(model), norm_modules(exact), strict=True)
            errors.append(torch.stack([relative_error(a.weight.grad, b.weight.grad) for a, b in pairs]))
        ours, stock = errors
        assert (ours <= 1.5 * stock + torch.finfo(BF16).eps / 2).all(), errors


def relative_error(got: DTensor, want: Tensor) -> Tensor:
    return (got.full_tensor().to(want.device) - want).norm() / want.norm()


def ddp_with_a_static_graph(world: World) -> None:
    for name in KINDS:
        model = data_parallel(build(world, name))
        assert_trains_as_one_process(world, name, model, own_rows(world.mesh()))


# Tensor, sequence, context and pipeline parallelism


def tensor_parallel_plans(world: World) -> None:
    for name in KINDS:
        assert_trains_as_one_process(world, name, parallelize(build(world, name), world.mesh()), WHOLE)


def fsdp_over_tensor_parallel_plans(world: World) -> None:
    mesh = world.mesh(2, 2, names=("data", "tensor"))
    for name in KINDS:
        model = shard(parallelize(build(world, name), mesh["tensor"]), mesh["data"])
        assert_trains_as_one_process(world, name, model, own_rows(mesh["data"]))


def context_parallel_shards(world: World) -> None:
    """context_parallel spreads the rows of a text over the ranks.

    On CUDA there is attention in float32 between two norms. On CPUs a linear layer takes its place, because torch has
    the attention of context_parallel only for CUDA.
    """
    on_cuda, width, mesh = world.device.type == "cuda", SIZE.width, world.mesh()
    dtype, tolerance = (torch.float32, 1e-4) if on_cuda else (FP64, 1e-9)
    of_rank = 64 if on_cuda else 4  # this attention takes blocks of 32 rows, and each rank has two parts of the text
    shape = 2, of_rank * world.size, width
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=FP64).to(world.device)
    for name in KINDS:
        models = []
        for norms, of in ((STOCK, FP64), (OURS, dtype)):
            torch.manual_seed(0)
            norm = getattr(norms, KINDS[name])
            middle = Attention(SIZE, bias=True, rotary=False) if on_cuda else nn.Linear(width, width)
            models.append(nn.Sequential(norm(width), middle, norm(width)).to(world.device, of))
        whole, ours = models
        whole(x).square().mean().backward()
        fully_shard(ours, mesh=mesh)
        rows = x.to(dtype, copy=True)
        with ops_run(world), Log() as log, sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            with context_parallel(mesh, buffers=[rows], buffer_seq_dims=[1]):
                assert rows.shape[1] == of_rank
                ours(rows).square().mean().backward()
        assert_ours_ran(log, name, 2, 2)
        for mine, theirs in zip(ours.parameters(), whole.parameters(), strict=True):
            got = mine.grad.full_tensor().to(FP64)
            torch.testing.assert_close(got, theirs.grad, rtol=tolerance, atol=tolerance)


def pipeline_stages(world: World) -> None:
    for name, schedule in (("gpt2", ScheduleGPipe), ("llama", Schedule1F1B)):
        model = build(world, name)
        parts = [model.embed, *model.blocks, nn.Sequential(model.norm, model.head)]
        of_a_stage = len(parts) // world.size
        own = nn.Sequential(*parts[world.rank * of_a_stage :][:of_a_stage])
        stage, optimizer = PipelineStage(own, world.rank, world.size, world.device), optimizer_of(own)
        runner, calls = schedule(stage, n_microbatches=BATCH, loss_fn=next_byte_loss), BATCH * len(norm_modules(own))
        for step in range(STEPS):
            tokens, targets = batch(world, step)
            with ops_run(world), Log() as log:
                runner.step(*[tokens] * (world.rank == 0), target=targets if world.rank == world.size - 1 else None)
            if step:  # the first step also runs the modules to infer shapes
                assert_ours_ran(log, name, calls, calls)
            optimizer.step()
            optimizer.zero_grad()
        mine = set(own.parameters())
        for key, each in model.named_parameters():
            if each in mine:
                assert_equal(each.detach(), one_process(world, name)[key], key)


# Combined with other features


def patching_before_and_after(world: World) -> None:
    mesh = world.mesh()
    for name, spread, rows in (
        ("gpt2", shard, own_rows(mesh)),
        ("llama", shard_norms_too, own_rows(mesh)),
        ("llama", parallelize, WHOLE),
    ):
        before, after = build(world, name, STOCK), spread(build(world, name, STOCK), mesh)
        for model in (before, after):
            assert len(fusednorm.patch_model(model).replaced) == NORM_COUNT
        for model in (spread(before, mesh), after):
            assert_trains_as_one_process(world, name, model, rows)
    by_hand = fully_shard(ByHand().to(world.device), mesh=mesh)  # a trial reads its weight
    assert len(fusednorm.patch_model(by_hand).replaced) == 1


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(SIZE.width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def shard_norms_too(model: LanguageModel, mesh) -> LanguageModel:
    for module in norm_modules(model):
        fully_shard(module, mesh=mesh)
    return shard(model, mesh)


def selective_checkpointing_by_op(world: World) -> None:
    """If the policy saves the outputs of our forwards, each runs once. Otherwise those in the blocks run again in the
    backward, but the last norm, which is outside the blocks, does not."""
    mesh, name = world.mesh(), "llama"
    for kept, forwards in (
        (torch.ops.fusednorm.rms_norm_fwd.default, NORM_COUNT),
        (torch.ops.aten.mm.default, 2 * NORM_COUNT - 1),
    ):
        contexts = functools.partial(create_selective_checkpoint_contexts, [kept])
        model = shard(checkpointed(build(world, name), contexts), mesh)
        assert_trains_as_one_process(world, name, model, own_rows(mesh), forwards)
        model = checkpointed(parallelize(build(world, name), mesh), contexts)
        assert_trains_as_one_process(world, name, model, WHOLE, forwards)


def checkpointed(model: LanguageModel, contexts: Callable) -> LanguageModel:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, context_fn=contexts)
    return model


def clipping_counts_norm_weights_once(world: World) -> None:
    mesh = world.mesh(world.size // 2, 2, names=("data", "tensor"))
    exact = build(world, "gpt2", STOCK)
    backward(world, exact)
    total = nn.utils.clip_grad_norm_(exact.parameters(), CLIPPED_TO)
    for spread, clip in ((parallelize, nn.utils.clip_grad_norm_), (parallelize_mlps, clip_on_every_mesh)):
        model = shard(spread(build(world, "gpt2"), mesh["tensor"]), mesh["data"])
        with ops_run(world), Log() as log:
            backward(world, model, rows=own_rows(mesh["data"]))
        assert_ours_ran(log, "gpt2")
        assert_equal(clip(list(model.parameters()), CLIPPED_TO), total, "the norm of all gradients")
        for (key, mine), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
            assert_equal(mine.grad, theirs.grad, key)


def parallelize_mlps(model: LanguageModel, mesh) -> LanguageModel:
    """Only the MLPs are tensor-parallel, so the norms are on FSDP's mesh alone."""
    for block in model.blocks:
        parallelize_module(block.mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def clip_on_every_mesh(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """clip_grad_norm_ for parameters on two meshes: torch's own takes DTensors of only one mesh."""
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for each in parameters:
        by_mesh.setdefault(each.grad.device_mesh, []).append(each)
    assert len(by_mesh) == 2
    norms = [nn.utils.get_total_norm([each.grad for each in group]).full_tensor() for group in by_mesh.values()]
    total = torch.stack(norms).norm()
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def checkpoints_interchange_with_stock_modules(world: World) -> None:
    """Each step builds another model, shards it in another way, and loads the checkpoint of the step before."""
    mesh, name, saved = world.mesh(), "llama", []
    for step, (norms, spread, rows) in enumerate(
        ((OURS, shard, own_rows(mesh)), (STOCK, parallelize, WHOLE), (OURS, parallelize, WHOLE))
    ):
        model = spread(build(world, name, norms), mesh)
        optimizer = optimizer_of(model)
        if saved:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(state, checkpoint_id=saved[-1])
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        log = take_step(world, model, optimizer, step, rows)
        if norms is OURS:
            assert_ours_ran(log, name)
        saved.append(world.folder / f"after step {step}")
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=saved[-1])
    assert_is_of_one_process(world, name, model)


def compiled_blocks(world: World) -> None:
    """Compiles the blocks of GPT-2.

    Llama is left out: torch 2.13 fails in the backward of a compiled block behind a RowwiseParallel embedding, with
    stock norms as well ('Tensor' has no attribute '_local_tensor').
    """
    mesh = world.mesh()
    for prepare, spread, rows in (
        (as_it_is, lambda model: shard(model, mesh), own_rows(mesh)),
        (as_it_is, data_parallel, own_rows(mesh)),
        (lambda model: parallelize(model, mesh), as_it_is, WHOLE),
    ):
        model = prepare(build(world, "gpt2"))
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        model = spread(model)
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            log = take_step(world, model, optimizer, step, rows)
            if step:  # the first step also traces
                assert_ours_ran(log, "gpt2")
        assert_is_of_one_process(world, "gpt2", model)


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def enable_eager_under_fsdp_and_dtensor(world: World) -> None:
    """DTensor applies its rules for ATen's ops; the local tensors run our kernels, on CPUs in Triton's interpreter."""
    mesh = world.mesh()
    for name, spread, rows in (
        ("gpt2", shard, own_rows(mesh)),
        ("gpt2", parallelize, WHOLE),
        ("llama", parallelize, WHOLE),
    ):
        model = spread(build(world, name, STOCK), mesh)
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            with enabled_eager(world.device) as calls:
                backward(world, model, step, rows)
            assert len(calls.taken) == 2 * NORM_COUNT, f"of our ops ran {calls.taken}"
            optimizer.step()
            optimizer.zero_grad()
        assert_is_of_one_process(world, name, model)


@contextlib.contextmanager
def enabled_eager(device: torch.device) -> Iterator[Calls]:
    with contextlib.ExitStack() as stack:
        if device.type == "cpu":
            stack.enter_context(aten_looks_like_cuda())
        yield stack.enter_context(override(device.type.upper()))


class LayerNormByHand(nn.LayerNorm):
    """Written out, as in transformers' Cohere, and with a bias."""

    def forward(self, x):
        h = x - x.mean(-1, keepdim=True)
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)) + self.bias


class LayerNormModulated(nn.LayerNorm):
    """Its weight as 1 + scale."""

    def forward(self, x):
        scale, shift = (self.weight - 1)[None, None], self.bias[None, None]
        return nn.functional.layer_norm(x, self.normalized_shape, eps=self.eps) * (1 + scale) + shift


class LayerNormGated(nn.LayerNorm):
    """Before it is a gate of 1."""

    def forward(self, x):
        return super().forward(x * nn.functional.silu(torch.full_like(x, 1.2784645427610737)))


# Norms, and our backward of each in a graph
IN_GRAPHS = {
    STOCK: "layer_norm_bwd_residual",
    STOCK._replace(layer=LayerNormByHand): "layer_norm_bwd_residual",
    STOCK._replace(layer=LayerNormModulated): "layer_norm_bwd_modulated",
    STOCK._replace(layer=LayerNormGated): "layer_norm_bwd_of_gated",
}


def enable_inductor_by_blocks(world: World) -> None:
    """Runs Inductor's graphs without code generation, which other tests cover."""
    from torch._inductor import compile_fx

    def run_the_graph(graph, inputs, **_):
        return make_boxed_func(graph.forward)

    def backend(graph, inputs):
        return compile_fx.compile_fx(graph, inputs, inner_compile=run_the_graph)

    device, mesh = world.device.type, world.mesh()
    for norms, op in IN_GRAPHS.items():
        spread, rows = (parallelize, WHOLE) if norms is STOCK else (shard, own_rows(mesh))
        torch.compiler.reset()  # else blocks of the earlier case make row counts dynamic
        model = build(world, "gpt2", norms)
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        model = spread(model, mesh)
        optimizer = optimizer_of(model)
        on_device = mock.patch("fusednorm.integrations.routing.DEVICE_TYPES", (device,))
        with on_device, fusednorm.enable_inductor(join="all"):
            for step in range(STEPS):
                log = take_step(world, model, optimizer, step, rows)
                ran = log.ops.count(f"fusednorm.{op}.default")
                assert ran == 2 * SIZE.blocks, f"{op} ran {ran} times"
        assert_is_of_one_process(world, "gpt2", model)


# The combinations above can fail


def without_our_ops_they_fail(world: World) -> None:
    for run in (
        fsdp,
        fsdp_with_parameters_offloaded,
        fsdp_with_mixed_precision,
        ddp_with_a_static_graph,
        context_parallel_shards,
        pipeline_stages,
        clipping_counts_norm_weights_once,
        checkpoints_interchange_with_stock_modules,
    ):
        with pytest.raises(AssertionError, match="of our ops ran"):
            run(replace(world, calls_ops=False))


def without_our_rules_they_fail(world: World) -> None:
    mesh, said = world.mesh(), "does not have a sharding strategy registered"
    patched, saving = build(world, "llama", STOCK), parallelize(build(world, "llama"), mesh)
    fusednorm.patch_model(patched)
    parallelize(patched, mesh)
    checkpointed(saving, functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]))
    with registered(lambda *_: None):
        for run in (tensor_parallel_plans, clipping_counts_norm_weights_once):
            with pytest.raises(NotImplementedError, match=said):
                run(world)
        for model in (patched, saving):
            with ops_run(world), pytest.raises(NotImplementedError, match=said):
                backward(world, model)


COMBINATIONS = combinations_in(
    vars(),
    {
        fsdp_of_replicas: (4,),
        fsdp_over_tensor_parallel_plans: (4,),
        pipeline_stages: (2, 4),  # one of 4 stages has no norm
        clipping_counts_norm_weights_once: (2, 4),
    },
)
