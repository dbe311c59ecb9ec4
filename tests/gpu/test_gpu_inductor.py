"""torch.compile with Inductor on CUDA: our kernels in its graphs, its caches, CUDA graphs and fusions."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from aot_package import check_package
from cases import BF16, FP32
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint
from tracing import assert_as_exact

import fusednorm
from bench.models import make_stack
from fusednorm.host import native
from fusednorm.integrations import inductor, routing
from fusednorm.tools.oracle import relative_error

pytestmark = pytest.mark.gpu

ROOT, OPS = Path(__file__).parents[2], torch.ops.fusednorm
NORM_OF = {"gpt2": "layer", "llama": "rms"}
IN_TWO_BLOCKS = {"gpt2": 4, "llama": 2}  # backwards of ours: Llama's second norms stay with Inductor (paying.py)
WIDTH, HEADS = 1024, 8


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """Empties the caches of compiled graphs, in this process and on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()
    inductor.report(clear=True)
    yield
    fusednorm.disable_inductor()
    torch._dynamo.reset()


class Skip(nn.Module):
    """x + linear(norm(x))"""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.linear = norm(WIDTH, eps=1e-5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def gradients(model: nn.Module, call, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = call(leaf)
    y.backward(dy.to(y.dtype))
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    return [t.detach().clone() for t in (y, leaf.grad, *grads)]


def random_like_activations(*shape, dtype=BF16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return tuple(torch.randn(*shape, device="cuda", dtype=dtype) for _ in range(2))


def assert_as_exact_as_eager(model: nn.Module, got: list[torch.Tensor], x: torch.Tensor, dy: torch.Tensor) -> None:
    """Errors against the model in float64 are not larger than those of the same model run eagerly in its own dtype."""
    exact_model = copy.deepcopy(model).double()
    exact = gradients(exact_model, exact_model, x.double(), dy.double())
    eager = gradients(model, model, x, dy)
    assert len(got) == len(exact)
    for index, (a, b, want) in enumerate(zip(got, eager, exact, strict=True)):
        limit = 1.5 * relative_error(b, want) + 1e-3
        assert relative_error(a, want) <= limit, f"tensor {index}: {relative_error(a, want)}, eager {limit}"


def ops_in(codes: list[str]) -> dict[str, int]:
    names = re.findall(r"= torch\.ops\.fusednorm\.(\w+)\.default\(", "\n".join(codes))
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize("name", NORM_OF)
def test_unmodified_models_run_our_backwards_with_everything_around_folded_in(name):
    model, op = make_stack(name, 2, WIDTH, HEADS, device="cuda", dtype=BF16), f"{NORM_OF[name]}_norm_bwd"
    x, dy = random_like_activations(4, 256, WIDTH)
    with fusednorm.enable_inductor():
        got, codes = run_and_get_code(lambda: gradients(model, torch.compile(model, fullgraph=True), x, dy))
    ours = IN_TWO_BLOCKS[name]
    assert ops_in(codes) == {f"{op}_residual": ours, op: 1}
    backward = next(code for code in codes if op in code)
    reductions = "".join(re.findall(r"def (triton_(?:red|per)\w*)\(", backward))
    assert ours < 4 or "norm_backward" not in reductions, "no norm's backward is left"
    assert_as_exact_as_eager(model, got, x, dy)
    taken = Counter()
    for entry, count in inductor.report().items():
        taken[entry.direction, entry.taken] += count
    left = {("backward", False): 4 - ours} if ours < 4 else {}
    assert taken == {("forward", False): 5, ("backward", True): ours + 1} | left


@pytest.mark.skipif(native.extension is None, reason="the host side in C++ is not built")
@pytest.mark.parametrize("name", NORM_OF)
def test_known_backwards_of_graphs_run_in_cpp(name):
    model = make_stack(name, 2, WIDTH, HEADS, device="cuda", dtype=BF16)
    compiled = torch.compile(model, fullgraph=True, backend=inductor.compile_graph)
    gradients(model, compiled, *random_like_activations(4, 256, WIDTH))
    x, dy = (each.flip(0) for each in random_like_activations(4, 256, WIDTH))
    before = native.repeats()
    got = gradients(model, compiled, x, dy)
    assert native.repeats() - before == IN_TWO_BLOCKS[name] + 1
    assert_as_exact_as_eager(model, got, x, dy)


def test_backend_takes_the_modes_and_options_of_inductor():
    model = make_stack("gpt2", 1, WIDTH, HEADS, device="cuda", dtype=BF16)
    x, dy = random_like_activations(2, 256, WIDTH)
    compiled = torch.compile(model, fullgraph=True, backend=inductor.compile_graph, options={"max_fusion_size": 32})
    got, codes = run_and_get_code(lambda: gradients(model, compiled, x, dy))
    assert ops_in(codes) == {"layer_norm_bwd_residual": 2, "layer_norm_bwd": 1}
    assert_as_exact_as_eager(model, got, x, dy)


def test_autocast_hands_us_the_tensors_before_its_casts():
    model = make_stack("gpt2", 1, WIDTH, HEADS, device="cuda")
    x, dy = random_like_activations(4, 256, WIDTH, dtype=FP32)

    def under_autocast(call):
        def wrapped(x):
            with torch.autocast("cuda", BF16):
                return call(x)

        return wrapped

    compiled = under_autocast(torch.compile(model, fullgraph=True))
    with fusednorm.enable_inductor():
        got, codes = run_and_get_code(lambda: gradients(model, compiled, x, dy))
    assert ops_in(codes)["layer_norm_bwd_residual"] >= 2
    exact_model = copy.deepcopy(model).double()
    exact = gradients(exact_model, exact_model, x.double(), dy.double())
    eager = gradients(model, under_autocast(model), x, dy)
    for a, b, want in zip(got, eager, exact, strict=True):
        assert relative_error(a, want) <= 1.5 * relative_error(b, want) + 1e-3


def test_changing_row_counts_compile_once_and_build_no_kernel_anew(builds_of_kernels):
    model, built = Skip(nn.LayerNorm).to("cuda", BF16), []
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with fusednorm.enable_inductor():
        for rows in (20000, 20008, 20003, 20011):  # all have the same plan
            x, dy = random_like_activations(rows, WIDTH)
            assert_as_exact_as_eager(model, gradients(model, compiled, x, dy), x, dy)
            built.append(len(builds_of_kernels))
    assert counters["stats"]["unique_graphs"] == 1
    assert built[0] == built[-1]


# Runs in a process of its own: nothing may be launched or allocated before the CUDA graphs.
CUDA_GRAPHS = """
import torch, fusednorm
from torch._dynamo.utils import counters
from bench.models import make_stack
fusednorm.enable_inductor()
model = make_stack("gpt2", 2, 1024, 8, device="cuda", dtype=torch.bfloat16)
plain, graphed = torch.compile(model), torch.compile(model, mode="reduce-overhead")
def gradients(call, x):
    call(x).square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()  # before the next replay, which writes to the same memory
    return grads
inputs = [torch.randn(2, 256, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
got = []
for x in inputs:
    torch.compiler.cudagraph_mark_step_begin()
    got.append(gradients(graphed, x))
assert counters["inductor"]["cudagraph_skips"] == 0, counters["inductor"]
torch._dynamo.reset()
for x, grads in zip(inputs, got):
    for a, b in zip(grads, gradients(plain, x)):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())
print("same")
"""


def run_alone(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout.splitlines()[-1]


def test_cuda_graphs_replay_our_kernels():
    assert run_alone(CUDA_GRAPHS) == "same"


TWO_PROCESSES = """
import json, sys, torch, fusednorm
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
if sys.argv[1] == "ours":
    fusednorm.enable_inductor()
norm = torch.nn.LayerNorm(1024, device="cuda", dtype=torch.bfloat16)
compiled = torch.compile(lambda x: x + norm(x), fullgraph=True)
x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
_, codes = run_and_get_code(lambda: compiled(x).sum().backward())
graphs_with_ours = sum("fusednorm.layer_norm_bwd" in code for code in codes)
print(json.dumps([graphs_with_ours, counters["inductor"]["fxgraph_cache_hit"]]))
"""


def test_second_process_loads_what_the_first_compiled_and_a_stock_one_does_not():
    runs = [json.loads(run_alone(TWO_PROCESSES, kind)) for kind in ("ours", "stock", "ours", "stock")]
    assert runs == [[1, 0], [0, 0], [1, 2], [0, 2]]


def test_checkpointed_blocks_train_alike():
    model = make_stack("llama", 1, WIDTH, HEADS, device="cuda", dtype=BF16)
    x, dy = random_like_activations(4, 256, WIDTH)
    compiled = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), fullgraph=True)
    with fusednorm.enable_inductor():
        got, codes = run_and_get_code(lambda: gradients(model, compiled, x, dy))
    assert ops_in(codes)["rms_norm_bwd_residual"] == 1
    assert_as_exact_as_eager(model, got, x, dy)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_frozen_norms_give_no_gradient_and_the_right_dx(norm):
    module = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[norm](WIDTH, eps=1e-5)
    model = nn.Sequential(module, nn.Linear(WIDTH, WIDTH)).to("cuda", BF16)
    model[0].requires_grad_(False)
    x, dy = random_like_activations(2048, WIDTH)
    with fusednorm.enable_inductor():
        got, codes = run_and_get_code(lambda: gradients(model, torch.compile(model, fullgraph=True), x, dy))
    assert ops_in(codes) == {f"{norm}_norm_bwd": 1}
    assert_as_exact_as_eager(model, got, x, dy)


@pytest.mark.parametrize("function", [F.layer_norm, F.rms_norm], ids=lambda function: function.__name__)
def test_forwards_of_very_wide_rows_are_ours_too(function):
    cols = routing.WIDE_ROW
    x, dy = random_like_activations(64, cols)
    weight = torch.randn(cols, device="cuda", dtype=BF16)
    compiled = torch.compile(lambda x: function(x, (cols,), weight), fullgraph=True)
    with fusednorm.enable_inductor():
        y, codes = run_and_get_code(lambda: compiled(x))
    assert ops_in(codes) == {f"{function.__name__}_fwd": 1}
    assert relative_error(y, function(x.double(), (cols,), weight.double(), eps=torch.finfo(FP32).eps)) < 4e-3


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_our_modules_compile_without_a_graph_break(name, enabled):
    model = Skip(getattr(fusednorm, name)).to("cuda", BF16)
    x, dy = random_like_activations(512, WIDTH)
    compiled = torch.compile(model, fullgraph=True)
    with fusednorm.enable_inductor() if enabled else torch.enable_grad():
        got, codes = run_and_get_code(lambda: gradients(model, compiled, x, dy))
    norm = {"LayerNorm": "layer", "RMSNorm": "rms"}[name]
    # If enabled, Inductor fuses the forward with the residual, and our backward adds the residual's gradient.
    written = {f"{norm}_norm_fwd": 1, f"{norm}_norm_bwd": 1}
    assert ops_in(codes) == ({f"{norm}_norm_bwd_residual": 1} if enabled else written)
    assert_as_exact_as_eager(model, got, x, dy)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_our_modules_compile_under_autocast_to_the_dtypes_of_eager(name):
    norm = getattr(fusednorm, name)(WIDTH, device="cuda")
    compiled = torch.compile(norm, fullgraph=True)
    for dtype in (BF16, FP32):
        x = torch.randn(64, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
        with torch.autocast("cuda", BF16):
            got, want = compiled(x), norm(x)
        assert got.dtype == want.dtype
        assert relative_error(got, want.double()) < 4e-3
        got.float().sum().backward()
        assert x.grad.dtype == dtype


class Written(nn.Module):
    """Calls of the functional form and of the ops, among them a backward with a mask."""

    def forward(self, dy, x, weight):
        y, rstd = OPS.rms_norm_fwd(x, [WIDTH], weight)
        y = y + fusednorm.functional.layer_norm(x, (WIDTH,), weight, weight)
        return y, OPS.rms_norm_bwd(dy, x, [WIDTH], rstd, weight, [True, False])[0]


def test_written_calls_export():
    x, dy = random_like_activations(16, WIDTH)
    arguments = (dy, x, x[0].clone())
    rows = torch.export.Dim("rows", min=2, max=4096)
    exported = torch.export.export(Written(), arguments, dynamic_shapes=({0: rows}, {0: rows}, None))
    torch.testing.assert_close(exported.module()(*arguments), Written()(*arguments))
    targets = {str(node.target) for node in exported.graph.nodes}
    assert {f"fusednorm.{op}.default" for op in ("rms_norm_fwd", "rms_norm_bwd", "layer_norm_fwd")} <= targets


def test_written_calls_become_an_aot_package(tmp_path):
    check_package("cuda", tmp_path)


class ByHand(nn.Module):
    """Norms that take scale and shift from slices of one table, and a norm written by hand with 1 + weight."""

    def __init__(self):
        super().__init__()
        self.table, self.weight = nn.Parameter(torch.randn(1, 4, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        scale, shift, more_scale, more_shift = self.table.chunk(4, dim=1)
        x = F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
        x = F.layer_norm(x, (WIDTH,)) * (1 + more_scale) + more_shift
        h = self.linear(x).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.linear((h * (1.0 + self.weight.float())).type_as(x))


@pytest.mark.parametrize("join", ["all", ()])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_a_table_of_scales_has_its_gradient_and_a_norm_by_hand_our_op_in_every_mode(mode, join):
    """torch 2.10 to 2.14 leave parts of the table's gradient unwritten without us, from 5 * 2^20 elements on."""
    torch.manual_seed(0)
    model = ByHand().to("cuda", BF16)
    x, dy = random_like_activations(1, 8192, WIDTH)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with fusednorm.enable_inductor(join=join), config.patch(max_autotune_gemm_backends="ATEN"):  # no products to tune
        for _ in range(2):  # an earlier step's gradient may stand where nothing was written
            assert_as_exact_as_eager(model, gradients(model, compiled, x, dy), x, dy)
    forms = Counter()
    for entry, count in inductor.report().items():
        if entry.form and entry.direction == "backward":
            forms[entry.norm, entry.form, entry.taken] += count
    joined = {("layer", "modulated", True): 2} if join else {}
    assert forms == {("rms", "weight_offset=1.0", True): 1} | joined


def rotated_heads(q, k, of_q, of_k, cos, sin):
    """As transformers' Qwen3 has them."""

    def of(x, weight):
        h = x.to(FP32) * torch.rsqrt(x.to(FP32).pow(2).mean(-1, keepdim=True) + 1e-6)
        y = (weight * h.to(x.dtype)).transpose(1, 2)
        a, b = y[..., : y.shape[-1] // 2], y[..., y.shape[-1] // 2 :]
        return y * cos.unsqueeze(1) + torch.cat((-b, a), dim=-1) * sin.unsqueeze(1)

    return of(q, of_q), of(k, of_k)


def rotated_together(q, k, of_q, of_k, cos, sin):
    """Of all heads, as diffusers' Wan has them."""

    def of(x, weight):
        y = F.rms_norm(x, x.shape[-1:], weight, 1e-6).unflatten(-1, (-1, 128))
        a, b = y.unflatten(-1, (-1, 2)).unbind(-1)
        of_pairs = cos.unsqueeze(2)[..., 0::2], sin.unsqueeze(2)[..., 1::2]
        turned = torch.empty_like(y)
        turned[..., 0::2] = a * of_pairs[0] - b * of_pairs[1]
        turned[..., 1::2] = a * of_pairs[1] + b * of_pairs[0]
        return turned.type_as(y)

    return of(q, of_q), of(k, of_k)


OF_HEADS = (2, 300, 8, 128), (2, 300, 2, 128), (128,), (128,)
TOGETHER = (2, 300, 8 * 128), (2, 300, 8 * 128), (8 * 128,), (8 * 128,)


@pytest.mark.parametrize(("rotated_heads", "shapes"), [(rotated_heads, OF_HEADS), (rotated_together, TOGETHER)])
def test_norms_of_q_and_k_and_their_rotation_are_one_op(rotated_heads, shapes):
    torch.manual_seed(0)
    leaves = [torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True) for shape in shapes]
    angles = torch.randn(2, 300, 64, device="cuda").repeat(1, 1, 2)
    given = [*leaves, angles.cos().to(BF16), angles.sin().to(BF16)]
    with fusednorm.enable_inductor():
        compiled = torch.compile(rotated_heads, fullgraph=True)
        _, codes = run_and_get_code(lambda: assert_as_exact(compiled, rotated_heads, given))
    assert ops_in(codes) == {"head_norm_fwd": 1, "head_norm_bwd": 1}


def block(x, residual, scale, shift, gate):
    """As diffusers' FLUX has it."""
    h = residual + gate[:, None] * x
    return F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None], h


def gated(x, gate, weight):
    """As transformers' Qwen3-Next has it."""
    h = x.to(FP32)
    h = weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return [(h * F.silu(gate.to(FP32))).to(x.dtype)]


def gated_before(x, gate, weight):
    """As transformers' Mamba2 has it, with two groups."""
    h = x.to(FP32) * F.silu(gate.to(FP32))
    groups = h.view(*h.shape[:-1], 2, h.shape[-1] // 2)
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-6)
    return [weight * groups.view(h.shape).to(x.dtype)]


def norm_of_sum(x, residual, weight, of_linear):
    h = residual + x @ of_linear
    return F.rms_norm(h, h.shape[-1:], 1 + weight, 1e-6) @ of_linear, h


def packed_heads(x, of_linear, of_q, of_k):
    """As timm's attention has it."""
    q, k, v = (x @ of_linear).view(*x.shape[:2], 3, 8, 64).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = (F.rms_norm(each, (64,), weight, 1e-6) for each, weight in ((q, of_q), (k, of_k)))
    return [F.scaled_dot_product_attention(q, k, v)]


def gated_behind(x, residual, gate, weight):
    """As diffusers' Z-Image has it."""
    return [residual + gate[:, None].tanh() * F.rms_norm(x, x.shape[-1:], weight, 1e-6)]


JOINED = [
    (norm_of_sum, [*[(2, 300, 2048)] * 2, (2048,), (2048, 2048)], "forwards",
     ("rms_norm_fwd_of_sum", "rms_norm_bwd_residual")),
    (packed_heads, [(2, 300, 256), (256, 3 * 512), (64,), (64,)], "packed",
     ("head_norm_fwd", "head_norm_bwd_packed")),
    (gated_behind, [*[(2, 300, 1536)] * 2, (2, 1536), (1536,)], "modulated",
     ("rms_norm_fwd_modulated_plus_residual", "rms_norm_bwd_modulated")),
    (block, [*[(2, 300, 1536)] * 2, *[(2, 1536)] * 3], "modulated",
     ("layer_norm_fwd_of_gated_sum_modulated", "layer_norm_bwd_modulated")),
    (gated, [*[(2, 300, 128)] * 2, (128,)], "gated", ("rms_norm_fwd_times_gate", "rms_norm_bwd_times_gate")),
    (gated_before, [*[(2, 300, 2048)] * 2, (2048,)], "gated", ("rms_norm_fwd_of_gated", "rms_norm_bwd_of_gated")),
]  # fmt: skip


@pytest.mark.parametrize("model, shapes, join, ops", JOINED)
def test_a_norm_and_what_surrounds_it_are_one_op(model, shapes, join, ops):
    torch.manual_seed(0)
    leaves = [torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True) for shape in shapes]
    with fusednorm.enable_inductor(join=join):
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        codes = run_and_get_code(lambda: assert_as_exact(compiled, model, leaves))[1]  # a replay takes their memory
        for _ in range(3):  # the last one is a replay
            assert_as_exact(compiled, model, leaves)
    assert ops_in(codes) == dict.fromkeys(ops, 1)
