"""What works with the stock norms works with ours, on CPU tensors and on GPU tensors. CPU tensors under `kernels_on`
stand for GPU tensors."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import fusednorm
from fusednorm import force, functional
from fusednorm.host import torch_compat
from fusednorm.host.kernel_devices import kernels_on, runs_kernels

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPS = torch.ops.fusednorm
MODULES = {"layer": fusednorm.LayerNorm, "rms": fusednorm.RMSNorm}
norms = pytest.mark.parametrize("norm", ["layer", "rms"])


@contextlib.contextmanager
def as_on_a_gpu():
    """CPU tensors take the code path of CUDA tensors, and ATen does the kernels' work."""
    with kernels_on("cpu"), force("reference"):
        yield


places = pytest.mark.parametrize("place", [contextlib.nullcontext, as_on_a_gpu], ids=["elsewhere", "as on a GPU"])


def module_of(norm, **options):
    built = MODULES[norm](8, **options)
    for parameter in built.parameters():
        nn.init.normal_(parameter)
    return built


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.rms = nn.LayerNorm(8), nn.RMSNorm(8)

    def forward(self, x):
        return self.rms(torch.relu(self.layer(x)))


class WrittenRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(8)), 1e-6

    def forward(self, hidden):
        variance = hidden.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden.float() * torch.rsqrt(variance + self.variance_epsilon)).to(hidden.dtype)


def patched(model):
    patch = fusednorm.patch_model(model)
    assert patch.replaced and not patch.left
    return model


MODELS = {
    "layer": lambda: module_of("layer"),
    "rms": lambda: module_of("rms"),
    "ours inside": lambda: nn.Sequential(nn.Linear(8, 8), module_of("layer"), module_of("rms")),
    "patched": lambda: patched(Model()),
    "patched, written by hand": lambda: patched(nn.Sequential(WrittenRMSNorm())),
}
models = pytest.mark.parametrize("model", MODELS)


def test_cpu_tensors_are_for_kernels_inside_the_block_alone():
    x = torch.ones(2, 8)
    assert not runs_kernels(x)
    with kernels_on("cpu"), kernels_on("cpu"):
        assert runs_kernels(x)
        assert "on A100" in str(fusednorm.explain(x, (8,)))
    with pytest.raises(ZeroDivisionError), kernels_on("cpu"):
        raise ZeroDivisionError
    assert not runs_kernels(x)
    assert "where ATen's kernels run" in str(fusednorm.explain(x, (8,)))
    with pytest.raises(ValueError, match="kernels_on: device_type must be 'cpu', got 'mps'"), kernels_on("mps"):
        pass


@norms
def test_cpu_tensors_reach_the_kernels_of_the_interpreter(norm):
    pytest.importorskip("triton")
    from fusednorm.host import launch

    built, x = module_of(norm), torch.randn(3, 8, requires_grad=True)
    want = torch.autograd.grad(built(x).square().sum(), (x, *built.parameters()))
    with kernels_on("cpu"), pytest.MonkeyPatch.context() as patch:
        prepared = []
        for name in ("prepare_forward", "prepare_backward"):
            original = getattr(launch, name)
            patch.setattr(launch, name, lambda *a, of=original: prepared.append(of.__name__) or of(*a))
        got = torch.autograd.grad(built(x).square().sum(), (x, *built.parameters()))
    assert prepared == ["prepare_forward", "prepare_backward"]
    assert_close(got, want)


@norms
@places
def test_every_mixture_of_dtypes_gives_what_the_op_gives(norm, place):
    options = itertools.product(FLOATS, (None, *FLOATS), (None, *FLOATS) if norm == "layer" else (None,))
    for x_dtype, weight_dtype, bias_dtype in options:
        x = torch.randn(3, 8, dtype=x_dtype)
        weight, bias = (None if dtype is None else torch.randn(8, dtype=dtype) for dtype in (weight_dtype, bias_dtype))
        with place():
            if norm == "layer":
                y = functional.layer_norm(x, (8,), weight, bias)
                want = OPS.layer_norm_fwd(x, (8,), weight, bias)[0]
            else:
                y, want = functional.rms_norm(x, (8,), weight), OPS.rms_norm_fwd(x, (8,), weight)[0]
        assert y.dtype == x_dtype
        assert_close(y, want, rtol=2 * torch.finfo(x_dtype).eps, atol=2 * torch.finfo(x_dtype).eps)


@norms
@places
def test_modules_take_mixtures_of_dtypes_in_both_directions(norm, place):
    built, x = module_of(norm, dtype=torch.float32), torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    stock = {"layer": F.layer_norm, "rms": F.rms_norm}[norm]
    with place():
        grads = torch.autograd.grad(built(x).square().sum(), (x, *built.parameters()))
    parameters = [p.detach().double().requires_grad_() for p in built.parameters()]
    y = stock(x, (8,), *parameters, eps=built.eps or torch.finfo(torch.float64).eps)
    want = torch.autograd.grad(y.square().sum(), (x, *parameters))
    assert [grad.dtype for grad in grads] == [torch.float64] + [torch.float32] * len(parameters)
    assert_close(grads, want, rtol=1e-6, atol=1e-6, check_dtype=False)


@norms
@places
@pytest.mark.filterwarnings("error")
def test_batched_gradients_are_those_one_by_one(norm, place):
    built, x = module_of(norm), torch.randn(2, 3, 8, requires_grad=True)
    function = fusednorm.LayerNormFunction if norm == "layer" else fusednorm.RMSNormFunction
    op = OPS.layer_norm_fwd if norm == "layer" else OPS.rms_norm_fwd
    parameters = tuple(built.parameters())
    with place():
        for run in (built, lambda x: function.apply(x, (8,), *parameters)[0], lambda x: op(x, (8,), *parameters)[0]):
            y = run(x)
            many = torch.randn(4, *y.shape)
            inputs = (x, *parameters)
            if place is contextlib.nullcontext and run is built:
                continue  # torch's own node: batching it warns of a slow loop
            got = torch.autograd.grad(y, inputs, many, is_grads_batched=True, retain_graph=True)
            want = [torch.autograd.grad(y, inputs, one, retain_graph=True) for one in many]
            assert_close(got, tuple(torch.stack(each) for each in zip(*want, strict=True)))


@norms
def test_channels_last_input_comes_back_contiguous_from_our_kernels(norm):
    x = torch.randn(2, 3, 4, 8).to(memory_format=torch.channels_last)
    built, stock = module_of(norm), {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[norm](8)
    stock.load_state_dict(built.state_dict())
    with as_on_a_gpu():
        y = built(x)
    assert y.is_contiguous()
    assert_close(y, stock(x))
    assert built(x).stride() == stock(x).stride()  # outside the block the module calls torch's norm


@norms
def test_statistics_have_gradients_which_those_of_atens_op_have_not(norm):
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    if norm == "layer":
        ours, theirs = OPS.layer_norm_fwd(x, (8,)), torch.native_layer_norm(x, (8,), None, None, 1e-5)
        mean = x.mean(-1, keepdim=True)
        exact = mean, torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-5)
    else:
        ours = OPS.rms_norm_fwd(x, (8,), None, 1e-5)
        exact = (torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5),)
    for got, want in zip(ours[1:], exact, strict=True):
        assert_close(*(torch.autograd.grad(each.square().sum(), x, retain_graph=True) for each in (got, want)))
    if norm == "layer":
        assert [each.requires_grad for each in theirs] == [True, False, False]


@norms
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("torch_has", [True, False])
def test_the_profiler_shows_each_op_of_a_module_once(norm, gradients, torch_has, monkeypatch):
    if not torch_has:
        monkeypatch.setattr(torch_compat, "_enter_record", None)
    built, x = module_of(norm).requires_grad_(gradients), torch.randn(3, 8)

    def step():
        y = built(x)
        if gradients:
            y.sum().backward()

    with as_on_a_gpu():
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
            step()
    shown = {event.key: event.count for event in profile.key_averages() if event.key.startswith("fusednorm::")}
    wanted = ["fwd", "bwd"] if gradients else ["fwd"]
    assert shown == {f"fusednorm::{norm}_norm_{direction}": 2 for direction in wanted}


@norms
def test_the_profiler_shows_an_op_that_is_called_itself_once(norm):
    x = torch.randn(3, 8, requires_grad=True)
    op = OPS.layer_norm_fwd if norm == "layer" else OPS.rms_norm_fwd
    with as_on_a_gpu(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        op(x, (8,))[0].sum().backward()
    shown = {event.key: event.count for event in profile.key_averages() if event.key.startswith("fusednorm::")}
    assert shown == {f"fusednorm::{norm}_norm_fwd": 1, f"fusednorm::{norm}_norm_bwd": 1}


@models
@places
def test_models_are_traced_by_fx(model, place):
    model, x = MODELS[model](), torch.randn(3, 8)
    with place():
        assert_close(torch.fx.symbolic_trace(model)(x), model(x))


def test_fx_keeps_our_function_in_its_graph():
    traced = torch.fx.symbolic_trace(MODELS["patched"]())
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called == [functional.layer_norm, torch.relu, functional.rms_norm]


@models
def test_models_are_scripted_and_stay_what_they_are(model, tmp_path):
    model, x = MODELS[model](), torch.randn(3, 8)
    classes = [type(module) for module in model.modules()]
    scripted = torch.jit.script(model)
    assert_close(scripted(x), model(x))
    assert [type(module) for module in model.modules()] == classes
    scripted.save(tmp_path / "model.pt")
    assert "fusednorm::" not in str(scripted.inlined_graph)
    assert_close(torch.jit.load(tmp_path / "model.pt")(x), model(x))


@models
@pytest.mark.parametrize("traced_by", ["export", "trace"])
def test_onnx_exporters_get_atens_op(model, traced_by, monkeypatch):
    model, x = MODELS[model]().eval(), torch.randn(3, 8)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with as_on_a_gpu(), torch.no_grad():
        if traced_by == "trace":
            traced = torch.jit.trace(model, x, check_trace=False)
            graph, run = str(traced.inlined_graph), traced
        else:
            program = torch.export.export(model, (x,), strict=False)
            graph, run = str(program.graph), program.module()
    assert "fusednorm." not in graph.replace("__torch__.fusednorm.", "") and "fusednorm::" not in graph
    assert "layer_norm" in graph or "rms_norm" in graph or "rsqrt" in graph  # rsqrt: the norm written by hand
    assert_close(run(x), model(x))


@norms
def test_onnx_exporters_get_mixtures_of_dtypes_that_atens_op_takes(norm, monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    built, x = module_of(norm, dtype=torch.bfloat16), torch.randn(3, 8)
    with as_on_a_gpu(), torch.no_grad():
        program = torch.export.export(built, (x,))
        assert "fusednorm" not in str(program.graph)
        assert_close(program.module()(x), built(x))


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_model_is_exported_to_onnx(dynamo, tmp_path):
    pytest.importorskip("onnxscript")
    norms = ["layer", "rms"] if dynamo else ["layer"]  # the older exporter does not know torch's RMSNorm
    model = nn.Sequential(nn.Linear(8, 8), *map(module_of, norms)).eval()
    with as_on_a_gpu():
        torch.onnx.export(model, (torch.randn(3, 8),), tmp_path / "model.onnx", dynamo=dynamo, opset_version=18)
    assert (tmp_path / "model.onnx").stat().st_size > 100


@places
@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_are_stocks(place):
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    older = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    parameters = torch.randn(8), torch.randn(8)
    with place():
        for x in (nested, older):
            got, want = (function(x, (8,), *parameters) for function in (functional.layer_norm, F.layer_norm))
            for a, b in zip(got.unbind(), want.unbind(), strict=True):
                assert_close(a, b)


X, WEIGHT = torch.randn(3, 8), torch.randn(8)
WRONG_TYPES = [
    *(("input", {"input": wrong}) for wrong in (None, [1.0] * 8, np.ones((3, 8)), "x", 3)),
    *(("normalized_shape", {"normalized_shape": wrong}) for wrong in (8, None, (8.0,), "8", ("8",), (True,), [None])),
    *(("weight", {"weight": wrong}) for wrong in ([1.0] * 8, np.ones(8), "w", 3)),
    *(("eps", {"eps": wrong}) for wrong in ("1", [1.0], 1j, torch.ones(1), torch.tensor(1.0, requires_grad=True))),
]


@norms
@places
@pytest.mark.parametrize(("argument", "wrong"), WRONG_TYPES)
@pytest.mark.parametrize("known", [False, True])
def test_arguments_of_wrong_types_give_torchs_error_which_names_them(norm, place, argument, wrong, known):
    name = f"{norm}_norm"
    ours, stock = getattr(functional, name), getattr(F, name)
    arguments = {"input": X, "normalized_shape": (8,), "weight": WEIGHT, "eps": 1e-5}
    with place():
        if known:
            ours(**arguments)
        with pytest.raises(TypeError) as got:
            ours(**arguments | wrong)
        with pytest.raises(TypeError) as want:
            stock(**arguments | wrong)
    assert str(got.value) == str(want.value)
    assert f"'{argument}'" in str(got.value)
    assert got.value.__context__ is None


@places
def test_what_stands_for_numbers_is_taken_as_stock_takes_it(place):
    stock = F.layer_norm(X, (8,), WEIGHT, None, 1e-2)
    for eps in (np.float64(1e-2), np.float32(1e-2), torch.tensor(1e-2)):
        for shape in ([8], torch.Size([8]), (np.int64(8),), (torch.tensor(8),)):
            with place():
                assert_close(functional.layer_norm(X, shape, WEIGHT, None, eps), stock)
    assert_close(functional.layer_norm(X, (8,), WEIGHT, None, 1), F.layer_norm(X, (8,), WEIGHT, None, 1))


@places
def test_layer_norm_without_eps_gives_torchs_error(place):
    with place(), pytest.raises(TypeError, match="'eps'.*must be float, not NoneType"):
        fusednorm.LayerNorm(8, eps=None)(X)


@places
@norms
def test_inference_mode_records_nothing_where_gradients_are_enabled_inside(norm, place):
    built, function = module_of(norm), {"layer": fusednorm.LayerNormFunction, "rms": fusednorm.RMSNormFunction}[norm]
    with place():
        want = built(X)
        with torch.inference_mode(), torch.enable_grad():
            outputs = built(X), function.apply(X, (8,), *built.parameters(), built.eps or torch.finfo(X.dtype).eps)[0]
    for y in outputs:
        assert not y.requires_grad
        assert_close(y, want)


def test_an_eps_that_changes_in_place_is_read_anew():
    eps = torch.tensor(1e-5)
    with as_on_a_gpu():
        functional.layer_norm(X, (8,), None, None, eps)
        eps.fill_(1.0)
        assert_close(functional.layer_norm(X, (8,), None, None, eps), F.layer_norm(X, (8,), None, None, 1.0))


def test_compiled_modules_run_one_op_under_a_default_device():
    built, graphs = module_of("layer"), []

    def look(module, inputs):
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module

    with torch.device("cpu"), kernels_on("cpu"), force("reference"):
        torch.compile(built, fullgraph=True, backend=look)(X)
    assert [name for graph in graphs for name in graph if "fusednorm" in name] == ["fusednorm.layer_norm_fwd.default"]


@norms
def test_eps_reaches_our_ops(norm):
    ours, stock = (getattr(module, f"{norm}_norm") for module in (functional, F))
    with as_on_a_gpu():
        assert_close(ours(X, (8,), WEIGHT, eps=0.5), stock(X, (8,), WEIGHT, eps=0.5))


@norms
def test_a_backward_without_rows_has_zeros_for_the_parameters(norm):
    x, statistic, weight = torch.empty(0, 8), torch.empty(0, 1), torch.randn(8)
    with kernels_on("cpu"):
        if norm == "layer":
            grads = OPS.layer_norm_bwd(x, x, [8], statistic, statistic, weight, weight)
        else:
            grads = OPS.rms_norm_bwd(x, x, [8], statistic, weight)
    assert grads[0].shape == (0, 8) and all(torch.equal(grad, torch.zeros(8)) for grad in grads[1:])


@norms
def test_onnx_exporters_get_eps_and_the_dtype_of_x(norm, monkeypatch):
    built, x = module_of(norm, eps=0.5), torch.randn(3, 8, dtype=torch.bfloat16)
    with as_on_a_gpu(), torch.no_grad():
        want = built(x)
        monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
        assert_close(torch.export.export(built, (x,)).module()(x), want)
