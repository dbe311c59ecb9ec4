"""torchtitan: its debug model of Llama 3 with our overrides, over gloo on two processes, on each of its SPMD backends.

torchtitan trains on accelerators only. The tests build, shard and run its model as its trainer does, but on CPUs: they
tell torchtitan that the CPU is the device. The model attends by scaled_dot_product_attention, because torchtitan's own
attention needs a GPU. The two processes are tensor parallel, with sequences sharded at the norms. FSDP is not tried,
because gloo lacks the reduction by which torchtitan's FSDP divides gradients.
"""

from __future__ import annotations

from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from worlds import Log, World, combinations_in, ops_run, run_all

if not find_spec("torchtitan"):
    pytest.skip("needs the package torchtitan: make test-integrations", allow_module_level=True)

OURS = ["fusednorm.integrations.torchtitan.rms_norm", "fusednorm.integrations.torchtitan.layer_norm"]
LAYERS, NORMS = 2, 5
VOCABULARY, LENGTH = 2048, 32
MESHES: dict[str, object] = {}  # one for each backend in a process: DTensors of equal meshes do not mix


def a_step(backend: str, imports: list[str], *, checkpoints=False, checks=False, compiles=False) -> dict:
    """The loss and the gradients of all norms, after one step of a model with these overrides."""
    with mock.patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"):
        import torchtitan.tools.utils  # noqa: F401  asks for the device while it is imported
    import spmd_types
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed import ParallelDims, full_dtensor, utils
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    spec, config.override.imports = config.model_spec, imports
    config.parallelism.spmd_backend, config.parallelism.tensor_parallel_degree = backend, 2
    config.training.mixed_precision_param = "float32"
    config.compile.enable, config.compile.backend = compiles, "aot_eager"
    config.activation_checkpoint = config.activation_checkpoint if checkpoints else None
    del spec.model.layers[LAYERS:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    dims = MESHES.setdefault(backend, ParallelDims.from_config(config.parallelism, 2))
    utils.set_spmd_backend(backend)
    spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
    labels = inputs.clone()
    shard = {"full_dtensor": full_dtensor.parallelize_inputs, "spmd_types": annotate_input_spmd_types}.get(backend)
    extra = {}
    if shard:
        inputs, labels, extra = shard(dims, inputs, labels, extra)
    with utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=checks)():
        loss = model(inputs, **extra).square().sum() / (2 * LENGTH * VOCABULARY)
        with spmd_types.no_typecheck():
            loss.backward()
    results = {"loss": loss} | {n: p.grad for n, p in model.named_parameters() if "norm" in n}
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in results.items()}


def norms_of_q_and_k(world: World) -> None:
    """Which Qwen3's attention has; its residuals are added in the layers' own code, where no override reaches."""
    with mock.patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"):
        import torchtitan.tools.utils  # noqa: F401
    from torchtitan.config.override import apply_overrides
    from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

    from fusednorm.integrations.torchtitan import RMSNorm

    config = qwen3_debugmodel()
    config.override.imports = OURS
    apply_overrides(config.override, config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    found = {name.rpartition(".")[2]: type(each) for name, each in model.named_modules() if "norm" in name}
    assert found == dict.fromkeys(("attention_norm", "ffn_norm", "q_norm", "k_norm", "norm"), RMSNorm)


def agrees(world: World, backend: str, **options) -> None:
    stock = a_step(backend, [], **options)
    with ops_run(world), Log() as log:
        ours = a_step(backend, OURS, **options)
    assert len(stock) == 1 + NORMS and sorted(log.norms()) == [
        *["fusednorm.rms_norm_bwd.default"] * NORMS,
        *["fusednorm.rms_norm_fwd.default"] * NORMS,
    ]
    torch.testing.assert_close(ours, stock)


def partial_dtensor(world: World) -> None:
    agrees(world, "partial_dtensor")


def full_dtensor(world: World) -> None:
    agrees(world, "full_dtensor")


def spmd_types(world: World) -> None:
    agrees(world, "spmd_types")


def spmd_types_checked(world: World) -> None:
    agrees(world, "spmd_types", checks=True)


def compiled_blocks(world: World) -> None:
    agrees(world, "spmd_types", compiles=True)


def selective_checkpointing(world: World) -> None:
    """With save_norms the norms of a block run once; without it they run again in the backward."""
    saves = ["fusednorm.integrations.torchtitan.save_norms"]
    for imports, forwards in ((OURS + saves, NORMS), (OURS, NORMS + 2 * LAYERS)):
        with ops_run(world), Log() as log:
            a_step("spmd_types", imports, checkpoints=True)
        assert log.norms().count("fusednorm.rms_norm_fwd.default") == forwards


def functions_are_known_to_the_checker(world: World) -> None:
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    import fusednorm
    import fusednorm.integrations.torchtitan  # noqa: F401  registers the functions

    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    mesh = world.mesh(names=("dp",))
    with spmd.set_current_mesh(mesh), typecheck():
        axis = spmd.normalize_axis(mesh.get_group("dp"))
        spmd.assert_type(x, {axis: spmd.V})
        spmd.assert_type(weight, {axis: spmd.R})
        for function, operands in (
            (fusednorm.RMSNormFunction, (x, (8,), weight)),
            (fusednorm.LayerNormFunction, (x, (8,), weight, None)),
        ):
            y = function.apply(*operands)[0]
            assert spmd.get_local_type(y) == {axis: spmd.V}


COMBINATIONS = {each.name: each for each in combinations_in(globals(), {})}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_override(name, tmp_path):
    failure = run_all(2, [COMBINATIONS[name]], tmp_path)[name]
    assert not failure, failure
