"""torch.compile of models that do not use this package: the graphs, with CPU tensors routed as CUDA tensors are."""

from __future__ import annotations

import re
import threading
import uuid
from dataclasses import replace

import afresh
import pytest
import torch
import torch.nn.functional as F
import tracing
from cases import BF16
from norm_forms import FACES, arguments_of
from torch import nn
from torch._inductor import compile_fx as inductor_entry
from torch._inductor import config
from torch._inductor.decomposition import decompositions, select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from tracing import calls, trace

import fusednorm
from bench.models import make_stack
from fusednorm.integrations import inductor, routing
from fusednorm.operands import FORM_OPS, OPS_OF_FORMS
from fusednorm.planner import device as device_specs

OPS = torch.ops.fusednorm
cpu_as_cuda = tracing.cpu_as_cuda
STOCK_COMPILE_FX = inductor_entry.compile_fx


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    before = dict(decompositions)
    inductor.report(clear=True)
    torch._dynamo.reset()
    yield
    fusednorm.disable_inductor()
    assert inductor_entry.compile_fx is STOCK_COMPILE_FX
    assert list(decompositions.items()) == list(before.items())
    assert config.joint_custom_post_pass is None
    assert "fusednorm" not in torch.compiler.config.cache_key_tag


def gradients(model: nn.Module, call, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = call(leaf)
    y.backward(dy.to(y.dtype))
    return [y.detach(), leaf.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def assert_trains_alike(model: nn.Module, traced, x: torch.Tensor, **tolerance) -> None:
    torch.manual_seed(1)
    dy = torch.randn(x.shape)
    for got, want in zip(gradients(model, traced, x, dy), gradients(model, model, x, dy), strict=True):
        torch.testing.assert_close(got, want, **tolerance)


NORM_OF = {"gpt2": "layer", "llama": "rms"}


@pytest.mark.parametrize("name", NORM_OF)
def test_backwards_of_an_unmodified_model_are_ours_with_their_residual_gradients(name, cpu_as_cuda):
    model, op = make_stack(name, depth=2, width=64, heads=4), f"fusednorm.{NORM_OF[name]}_norm_bwd"
    traced = trace(model)
    assert_trains_alike(model, traced, torch.randn(2, 8, 64))
    # The backward of each of a block's two norms adds the gradient of a skip connection. The last norm has none to add.
    # That of Llama's second norm stays with Inductor, which adds the gradients of two products in it.
    in_blocks = {"gpt2": 4, "llama": 2}[name]
    assert len(calls(traced.backward, f"{op}_residual")) == in_blocks and len(calls(traced.backward, op)) == 1
    assert all(node.args[-2] is not None for node in calls(traced.backward, f"{op}_residual"))
    assert not [node for node in traced.forward.graph.nodes if "fusednorm" in str(node.target)]


@pytest.mark.parametrize("op", FORM_OPS, ids=lambda op: op.name)
def test_forwards_of_forms_are_inductors_and_their_backwards_ours(op, cpu_as_cuda):
    module = FACES[op.name][1](64, weight_offset=1.0)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = module, nn.Linear(64, 64)

        def forward(self, x):
            outputs = self.norm(**dict.fromkeys(arguments_of(op), x) | {"x": self.linear(x)})
            return sum(outputs) if isinstance(outputs, tuple) else outputs

    model = Layer()
    traced = trace(model)
    assert_trains_alike(model, traced, torch.randn(2, 8, 64))
    assert not [node for node in traced.forward.graph.nodes if "fusednorm" in str(node.target)]
    (backward,) = calls(traced.backward, f"fusednorm.{op.norm}_norm_bwd{op.backward}")
    given = routing.named_arguments(backward.target, backward.args, backward.kwargs)
    assert (given.get("residual_grad") is not None) == bool(op.form.rows_out) and given["weight_offset"] == 1.0


@pytest.mark.parametrize("name", NORM_OF)
def test_report_says_what_became_of_each_norm(name, cpu_as_cuda):
    model = make_stack(name, depth=1, width=64, heads=4)
    trace(model)(torch.randn(2, 8, 64, requires_grad=True)).sum().backward()
    report, norm = inductor.report(), NORM_OF[name]
    places = {"blocks.*.norm1": True, "blocks.*.norm2": name == "gpt2", "norm": True}
    found = {(e.norm, e.direction, e.place, e.taken): count for e, count in report.items()}
    assert found == {
        (norm, way, place, taken and way == "backward"): 1
        for way in ("forward", "backward")
        for place, taken in places.items()
    }
    assert f"1 x {norm}_norm backward 2x8x64 float32 on cpu in blocks.*.norm1: fusednorm (" in str(report)
    assert "on cpu in norm: Inductor (fused with its neighbours" in str(report)
    assert inductor.report(clear=True) == report and str(inductor.report()) == "no norm was traced"


def test_a_place_is_named_alike_in_a_class_that_has_its_own_look_up(cpu_as_cuda):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.LayerNorm(32)])

        def __getattr__(self, name):
            return super().__getattr__(name)

        def forward(self, x):
            return self.blocks[0](x)

    trace(Model())(torch.randn(2, 32, requires_grad=True)).sum().backward()
    assert {entry.place for entry in inductor.report()} == {"blocks.*"}


def test_casts_of_autocast_are_folded(cpu_as_cuda):
    model = make_stack("gpt2", depth=1, width=64, heads=4)
    traced = trace(model)

    def under_autocast(call):
        def wrapped(x):
            with torch.autocast("cpu", BF16):
                return call(x)

        return wrapped

    x, dy = torch.randn(2, 8, 64), torch.randn(2, 8, 64)
    got = gradients(model, under_autocast(traced), x, dy)
    want = gradients(model, under_autocast(model), x, dy)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * b.abs().max().item())
    backwards = calls(traced.backward, "fusednorm.layer_norm_bwd_residual")
    assert len(backwards) >= 2
    for node in backwards:
        assert node.args[0].meta["val"].dtype == BF16, "the gradient came from a bfloat16 matmul"
        assert node.args[0].target != torch.ops.prims.convert_element_type.default


class NormInFloat32(nn.LayerNorm):
    """LayerNorm with casts to float32 and back, as in many models."""

    def forward(self, x):
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float()).to(x.dtype)


def test_a_norm_written_with_casts_to_float32_reads_and_writes_16_bits(cpu_as_cuda):
    model = nn.Sequential(nn.Linear(32, 32), NormInFloat32(32)).to(BF16)
    traced = trace(lambda x: x + model(x))
    traced(torch.randn(6, 32, dtype=BF16, requires_grad=True)).sum().backward()
    (node,) = calls(traced.backward, "fusednorm.layer_norm_bwd_residual")
    grad_out, x, _, _, _, weight, bias = node.args[:7]
    assert [operand.meta["val"].dtype for operand in (grad_out, x, weight, bias)] == [BF16] * 4
    assert [output.dtype for output in node.meta["val"]] == [BF16] * 3
    assert not calls(traced.backward, "prims.convert_element_type")


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen_parameters_are_masked(frozen, cpu_as_cuda):
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    norm = model[1]
    norm.weight.requires_grad_(frozen == "bias")
    norm.bias.requires_grad_(frozen == "weight")
    traced = trace(model)
    assert_trains_alike(model, traced, torch.randn(6, 32))
    (node,) = calls(traced.backward, "fusednorm.layer_norm_bwd")
    assert node.args[7] == [True, frozen == "bias", frozen == "weight"]


def test_an_input_without_gradient_is_masked(cpu_as_cuda):
    norm = nn.LayerNorm(32)
    traced = trace(norm)
    x, dy = torch.randn(6, 32), torch.randn(6, 32)
    got = torch.autograd.grad(traced(x), norm.parameters(), dy)
    torch.testing.assert_close(got, torch.autograd.grad(norm(x), norm.parameters(), dy))
    (node,) = calls(traced.backward, "fusednorm.layer_norm_bwd")
    assert node.args[7] == [False, True, True]


def test_one_graph_serves_every_width(cpu_as_cuda):
    def skip(x, weight):
        return x + F.layer_norm(x, (x.shape[-1],), weight)

    traced = trace(skip, dynamic=True)
    for cols in (32, 48, 80):
        operands = torch.randn(6, cols, requires_grad=True), torch.randn(cols, requires_grad=True)
        grads = [torch.autograd.grad(f(*operands).square().sum(), operands) for f in (traced, skip)]
        torch.testing.assert_close(*grads)
    (node,) = calls(traced.backward, "fusednorm.layer_norm_bwd_residual")
    assert isinstance(node.args[2][0], torch.fx.Node)


def test_row_counts_known_only_at_run_time_are_taken(cpu_as_cuda):
    def of_some_rows(x, chosen):
        rows = x[chosen]
        return rows + F.layer_norm(rows, (32,))

    x, chosen = torch.randn(6, 32, requires_grad=True), torch.arange(6) % 2 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        traced = trace(of_some_rows)
        grads = [torch.autograd.grad(f(x, chosen).square().sum(), x) for f in (traced, of_some_rows)]
    torch.testing.assert_close(*grads)
    assert len(calls(traced.backward, "fusednorm.layer_norm_bwd_residual")) == 1


def test_one_graph_serves_every_row_count(cpu_as_cuda):
    model = make_stack("gpt2", depth=1, width=32, heads=2)
    traced = trace(model, dynamic=True)
    for batch, length in ((2, 8), (3, 9), (5, 2), (7, 64)):
        assert_trains_alike(model, traced, torch.randn(batch, length, 32))
    assert len(traced.forwards) == len(traced.backwards) == 1
    assert len(calls(traced.backward, "fusednorm.layer_norm_bwd_residual")) == 2


def test_activation_checkpoints_recompute_and_still_fold(cpu_as_cuda):
    blocks = make_stack("llama", depth=1, width=32, heads=2)
    traced = trace(lambda x: checkpoint(blocks, x, use_reentrant=False))
    assert_trains_alike(blocks, traced, torch.randn(2, 8, 32))
    assert len(calls(traced.backward, "fusednorm.rms_norm_bwd_residual")) == 1
    assert calls(traced.backward, "aten.rsqrt"), "the forward is not recomputed"


@pytest.mark.parametrize("function", [F.layer_norm, F.rms_norm], ids=lambda function: function.__name__)
@pytest.mark.parametrize("taken", [False, True])
def test_forwards_of_very_wide_rows_are_ours(function, taken, cpu_as_cuda):
    cols = routing.WIDE_ROW - (not taken)
    traced = trace(lambda x: function(x, (cols,)), join=())
    x = torch.randn(2, cols, requires_grad=True)
    torch.testing.assert_close(traced(x), function(x, (cols,)))
    assert len(calls(traced.forward, f"fusednorm.{function.__name__}_fwd")) == taken
    (entry,) = (entry for entry in inductor.report() if entry.direction == "forward")
    assert entry.taken == taken


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_written_call_keeps_its_backward_and_leaves_its_forward_to_inductor(norm, cpu_as_cuda):
    op, parameters = getattr(OPS, f"{norm}_norm_fwd"), [torch.randn(32, requires_grad=True) for _ in range(2)]
    parameters = parameters[: 2 if norm == "layer" else 1]
    traced = trace(lambda x, *parameters: x + op(x, [32], *parameters)[0])
    x = torch.randn(4, 32, requires_grad=True)
    y = traced(x, *parameters)
    got = torch.autograd.grad(y.square().sum(), (x, *parameters))
    want = torch.autograd.grad((x + op(x, [32], *parameters)[0]).square().sum(), (x, *parameters))
    torch.testing.assert_close(got, want)
    assert not calls(traced.forward, f"fusednorm.{norm}_norm_fwd")
    assert len(calls(traced.backward, f"fusednorm.{norm}_norm_bwd_residual")) == 1


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_written_call_of_cpu_tensors_stays_as_it_is(norm):
    op = getattr(OPS, f"{norm}_norm_fwd")
    traced = trace(lambda x: op(x, [32])[0])
    traced(torch.randn(4, 32, requires_grad=True)).sum().backward()
    assert len(calls(traced.forward, f"fusednorm.{norm}_norm_fwd")) == 1
    assert calls(traced.backward, f"fusednorm.{norm}_norm_bwd")


# Norms that are left to Inductor


def only_reason(direction: str) -> str:
    (entry,) = (entry for entry in inductor.report() if entry.direction == direction)
    assert not entry.taken
    return entry.reason


@pytest.mark.parametrize("trains", [False, True])
def test_rms_norms_of_other_devices_are_in_the_report_although_torch_decomposes_them_before(trains):
    backend = inductor._routed(lambda graph, *_: graph.forward, set)
    torch.compile(nn.RMSNorm(32), backend=backend)(torch.randn(4, 32)) if trains else None
    torch.compile(nn.RMSNorm(32).requires_grad_(False), backend=backend)(torch.randn(4, 32))
    found = [(e.norm, e.direction, e.shape, e.taken, e.reason) for e in inductor.report()]
    ways = ["forward", "backward"] if trains else ["forward"]
    assert found == [("rms", way, (4, 32), False, "x is on cpu") for way in ways]


def test_other_devices_stay_with_inductor_and_the_report_says_why():
    traced = trace(lambda x: F.layer_norm(x, (32,)))
    traced(torch.randn(4, 32, requires_grad=True)).sum().backward()
    assert not [node for node in traced.backward.graph.nodes if "fusednorm" in str(node.target)]
    assert only_reason("forward") == only_reason("backward") == "x is on cpu"


def test_tensors_without_elements_stay_with_inductor(cpu_as_cuda):
    traced = trace(lambda x: F.layer_norm(x, (32,)))
    traced(torch.randn(0, 32, requires_grad=True)).sum().backward()
    assert only_reason("backward") == "x has no elements"


def trace_backward_on_fake_cuda(norm: str) -> torch.fx.GraphModule:
    """The graph of ATen's backward op on fake CUDA tensors, after decomposition."""
    aten, dims = torch.ops.aten, {"device": "cuda", "dtype": BF16}

    def backward(x, weight, statistic):
        if norm == "layer":
            return aten.native_layer_norm_backward(x, x, [32], statistic, statistic, weight, weight, [True] * 3)
        return aten._fused_rms_norm_backward(x, x, [32], statistic, weight, [True, True])

    with FakeTensorMode(), routing.decompositions_replaced():
        operands = torch.empty(4, 32, **dims), torch.empty(32, **dims), torch.empty(4, 1, device="cuda")
        return make_fx(backward, decomposition_table=select_decomp_table())(*operands)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_gpus_with_kernels_take_the_norms(norm, monkeypatch):
    monkeypatch.setattr(routing.gpus, "spec_of", lambda device: device_specs.H200)
    assert len(calls(trace_backward_on_fake_cuda(norm), f"fusednorm.{norm}_norm_bwd")) == 1


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_gpus_without_kernels_are_refused_in_the_planners_words(norm, monkeypatch):
    monkeypatch.setattr(routing.gpus, "spec_of", lambda device: replace(device_specs.A100, name="V100", arch=70))
    assert not calls(trace_backward_on_fake_cuda(norm), f"fusednorm.{norm}_norm_bwd")
    assert only_reason("backward") == "our kernel needs compute capability 8.0, V100 has 7.0"


def test_aot_packages_stay_free_of_python(cpu_as_cuda):
    with V.set_aot_compilation(True):
        traced = trace(lambda x: F.layer_norm(x, (32,)))
        traced(torch.randn(4, 32, requires_grad=True)).sum().backward()
    assert only_reason("forward") == only_reason("backward") == "an AOTInductor package is to run without Python"


def test_aot_packages_get_written_backwards_that_may_return_none():
    def masked(dy, x, rstd, weight):
        return OPS.rms_norm_bwd(dy, x, [32], rstd, weight, [True, False])[0]

    x, rstd = torch.randn(4, 32), torch.rand(4, 1)
    for aot, name in ((True, "fusednorm.rms_norm_bwd_optional"), (False, "fusednorm.rms_norm_bwd")):
        torch._dynamo.reset()
        with V.set_aot_compilation(aot):
            traced = trace(masked)
            torch.testing.assert_close(traced(x, x, rstd, x[0]), masked(x, x, rstd, x[0]))
        assert len(calls(traced.forward, name)) == 1


def test_a_thread_that_does_not_compile_for_us_is_served_as_ever(cpu_as_cuda):
    seen = []

    def decompose():
        x = torch.randn(4, 32)
        decomposition = decompositions[torch.ops.aten.native_layer_norm_backward.default]
        seen.append(decomposition(x, x, [32], x[:, :1], x[:, :1], None, None, [True, False, False])[0].shape)

    with routing.decompositions_replaced():
        thread = threading.Thread(target=decompose)
        thread.start()
        thread.join()
    assert seen == [(4, 32)] and not inductor.report()


# Enabling


def is_enabled() -> bool:
    return inductor_entry.compile_fx is not STOCK_COMPILE_FX


def test_enabling_twice_is_enabling_once():
    fusednorm.enable_inductor()
    ours = inductor_entry.compile_fx
    fusednorm.enable_inductor()
    assert inductor_entry.compile_fx is ours and ours is not STOCK_COMPILE_FX
    fusednorm.disable_inductor()
    assert not is_enabled()
    fusednorm.disable_inductor()
    assert not is_enabled()


def test_importing_the_package_does_not_import_inductor():
    code = "import sys, torch; before = {*sys.modules}; import fusednorm; print({*sys.modules} - before)"
    imported = afresh.run(code).stdout
    assert "fusednorm.modules" in imported and "_inductor" not in imported and "integrations" not in imported


def test_contexts_nest_and_restore_what_was_before():
    with fusednorm.enable_inductor():
        with fusednorm.enable_inductor():
            assert is_enabled()
        assert is_enabled()
        fusednorm.disable_inductor()
        with fusednorm.enable_inductor():
            assert is_enabled()
        assert not is_enabled()
    assert not is_enabled()
    fusednorm.enable_inductor()
    with pytest.raises(KeyError), fusednorm.enable_inductor():
        raise KeyError
    assert is_enabled()


@pytest.mark.parametrize("where", ["here", "in another thread"])
def test_key_tag_and_pass_are_there_while_inductor_compiles_and_not_otherwise(where, monkeypatch):
    seen = []

    def compile_fx(model, inputs, inner_compile, **settings):
        seen.append((torch.compiler.config.cache_key_tag, len(decompositions)))
        assert config.joint_custom_post_pass.before is None
        inner_compile(model, inputs)
        return model

    def compile_fx_inner(model, inputs):
        seen.append((torch.compiler.config.cache_key_tag, len(decompositions)))

    monkeypatch.setattr(inductor_entry, "compile_fx_inner", compile_fx_inner)
    count = len(decompositions)
    torch._dynamo.reset()

    def compile_something():
        with torch.compiler.config.patch(cache_key_tag="theirs"):
            inductor._routed(compile_fx, set)(lambda: None, [])

    if where == "here":
        compile_something()
    else:  # from torch 2.13 on every thread has its own settings
        thread = threading.Thread(target=compile_something)
        thread.start()
        thread.join()
    (tag, while_tracing), (inner_tag, while_compiling) = seen
    assert tag == inner_tag and tag.startswith(f"theirs|fusednorm-{fusednorm.__version__}-")
    more = 4 + len([op for op in OPS_OF_FORMS if op.direction == "forward"])
    assert (while_tracing, while_compiling) == (count + more, count), "Inductor takes no op that has a decomposition"


# Tests that compile with all of Inductor, which takes a few seconds each


def test_inductor_compiles_and_caches_with_and_without_us_apart(cpu_as_cuda):
    """No graph of an earlier run is found, because of the tag, but what a compiler made of the same C++ is."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import run_and_get_code

    tagged = torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex)
    model, x = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)), torch.randn(6, 32)
    skip = lambda x: x + model(x)  # noqa: E731
    op = "torch.ops.fusednorm.layer_norm_bwd_residual.default("

    def compile_and_run(**options) -> tuple[int, int]:
        """The number of our backward ops in the code, and the number of graphs that came from the cache."""
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(skip, fullgraph=True, **options)
        with tagged:
            got, codes = run_and_get_code(lambda: gradients(model, compiled, x, torch.ones(6, 32)))
        torch.testing.assert_close(got, gradients(model, skip, x, torch.ones(6, 32)))
        kernels = re.findall(r"(cpp_fused_\w+) =", codes[-1])
        ours = codes[-1].count(op)
        assert kernels and any("add" in kernel for kernel in kernels) != bool(ours), "who adds the residual's gradient"
        return ours, counters["inductor"]["fxgraph_cache_hit"]

    with fusednorm.enable_inductor():
        assert compile_and_run() == (1, 0)
    assert compile_and_run() == (0, 0), "with the compile caches of the run before"
    with fusednorm.enable_inductor():
        assert compile_and_run() == (1, 2)
    assert compile_and_run(backend=inductor.compile_graph) == (1, 2)
    assert compile_and_run() == (0, 2)
