"""Times what torch.compile makes of norms and their neighbours, without us and under enable_inductor().

    python -m bench.graphs --only residual_rms modulated_layer llama --seconds 300

The cases are norms with what models write around them, and decoder layers of transformers' classes at their true
widths (those of bench.zoo). A time is that of forward and backward with all gradients, as one CUDA graph with a cold
L2. The gradients of both are compared with float64 (cases) or with each other (layers).
One JSON line per case and way goes to graphs.jsonl, with the report of which norms became ours. Exit code 1 if a
gradient of ours is worse, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusednorm.tools.console import print_table

from .cases import make_parser
from .records import add_out_argument, describe_machine, lacks_gpu, results_path, save, time_fields
from .timing import time_interleaved
from .zoo import models
from .zoo.ways import stock_backend

EPS = 1e-6
LAYERS = "llama qwen3 gemma3 olmo2 glm4 gpt_oss".split()
LAYER_TOKENS = (2, 4096)  # batch x length
FACTOR = 1.2  # of the error of stock Inductor
BF16 = torch.bfloat16
Sizes = tuple[int, ...]


class Case(NamedTuple):
    """A norm with its neighbours, called with tensors of these shapes, each of which gets a gradient."""

    run: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: Callable[[Sizes], list[Sizes]]  # of the sizes of x
    sizes: Sizes
    tiny: Sizes


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def layer(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def residual_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return rms(h, weight), h


def residual_layer(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return layer(h, weight, bias), h


def packed_heads(qkv: Tensor, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two thirds of the heads are queries, the rest keys and values."""
    values = qkv.shape[1] // 6
    q, k, v = qkv.split([4 * values, values, values], dim=1)
    return rms(q, of_q), rms(k, of_k), v


CASES: dict[str, Case] = {
    "one_plus_weight": Case(
        lambda x, weight: rms(x, 1 + weight), lambda s: [s, s[-1:]], (16384, 4096), (16, 32)
    ),
    "residual_rms": Case(residual_rms, lambda s: [s, s, s[-1:]], (16384, 4096), (16, 32)),
    "residual_layer": Case(residual_layer, lambda s: [s, s, s[-1:], s[-1:]], (16384, 2048), (16, 32)),
    "rms_then_gate": Case(
        lambda x, gate, weight: rms(x, weight) * F.silu(gate), lambda s: [s, s, s[-1:]], (524288, 128), (16, 32)
    ),
    "gate_then_rms": Case(
        lambda x, gate, weight: rms(x * F.silu(gate), weight), lambda s: [s, s, s[-1:]], (8192, 8192), (16, 32)
    ),
    "packed_heads": Case(packed_heads, lambda s: [s, s[-1:], s[-1:]], (16384, 48, 128), (4, 6, 32)),
    "modulated_layer": Case(
        lambda x, scale, shift: layer(x) * (1 + scale) + shift,
        lambda s: [s, (s[0], 1, s[2]), (s[0], 1, s[2])], (4, 4608, 3072), (2, 8, 32),
    ),
    "modulated_rms": Case(
        lambda x, scale, shift, weight: rms(x, weight) * (1 + scale) + shift,
        lambda s: [s, (s[0], 1, s[2]), (s[0], 1, s[2]), s[-1:]], (4, 4608, 3072), (2, 8, 32),
    ),
}  # fmt: skip


class Made(NamedTuple):
    run: Callable[..., tuple[Tensor, ...]]
    inputs: list[Tensor]
    leaves: list[Tensor]  # whose gradients are computed


def make(name: str, device: str, tiny: bool = False) -> Made:
    torch.manual_seed(0)
    if name in CASES:
        case = CASES[name]
        shapes = case.shapes(case.tiny if tiny else case.sizes)
        inputs = [torch.randn(shape, device=device, dtype=BF16).requires_grad_() for shape in shapes]
        return Made(lambda *given: _tuple(case.run(*given)), inputs, inputs)
    spec = models.MODELS[name].smaller() if tiny else models.MODELS[name]
    model = spec.build(device, BF16).base_model
    hidden = model.config.hidden_size
    x = torch.randn(*((2, 32) if tiny else LAYER_TOKENS), hidden, device=device, dtype=BF16).requires_grad_()
    leaves = [x, *(p for n, p in model.named_parameters() if "embed_tokens" not in n)]
    return Made(lambda x: (model(inputs_embeds=x, use_cache=False).last_hidden_state,), [x], leaves)


def _tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def gradients(run: Callable, made: Made, grads: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(*made.inputs), made.leaves, grads)


def errors(got: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs]


def measure(name: str, device: str, rounds: int, tiny: bool = False) -> list[dict]:
    """A record for each way: stock Inductor and enable_inductor(). Without rounds nothing is timed."""
    from fusednorm.integrations import inductor

    torch.compiler.reset()
    made = make(name, device, tiny)
    grads = [torch.randn_like(each) for each in made.run(*made.inputs)]
    backends = {"stock": stock_backend(), "ours": inductor.compile_graph}
    ways = {way: torch.compile(made.run, backend=backend, dynamic=False) for way, backend in backends.items()}
    found, norms = {}, {}
    for way, run in ways.items():
        inductor.report(clear=True)
        found[way] = gradients(run, made, grads)
        norms[way] = str(inductor.report()).splitlines()
    if name in CASES:
        wide = [each.detach().double().requires_grad_() for each in made.inputs]
        exact = gradients(made.run, Made(made.run, wide, wide), [each.double() for each in grads])
    else:
        exact = found["stock"]
    far = {way: errors(each, exact) for way, each in found.items()}
    del found, exact
    calls = {way: lambda run=run: gradients(run, made, grads) for way, run in ways.items()}
    times = time_interleaved(calls, rounds) if rounds else {}
    least = far["stock"] if name in CASES else [0.1] * len(far["stock"])  # other roundings, through whole layers
    records = []
    for way, error in far.items():
        worse = any(each > FACTOR * max(most, 2**-10) for each, most in zip(error, least, strict=True))
        record = {"case": name, "way": way, "error": max(error), "is_worse": worse, "norms": norms[way]}
        if rounds:
            record |= time_fields(times[way]) | {"times_stock": round(times[way].median / times["stock"].median, 4)}
        records.append(record)
    return records


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("graphs", __doc__)
    names = [*CASES, *LAYERS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--rounds", type=int, default=40, help="timed replays of each (default: 40)")
    parser.add_argument("--seconds", type=float, default=480, help="no case starts after these (default: 480)")
    add_out_argument(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("graphs"):
        return 2
    machine, rows, worse, end = describe_machine(), [], 0, time.monotonic() + options.seconds
    path = results_path(options.out, machine, "graphs")
    for name in options.only:
        if time.monotonic() > end:
            print(f"left out, the time is over: {name}")
            continue
        try:
            records = [machine | each for each in measure(name, "cuda", options.rounds)]
        except Exception as error:  # of one case: the others go on
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            worse += 1
            continue
        save(records, path)
        worse += sum(each["is_worse"] for each in records)
        for each in records:
            rows.append([name, each["way"], f"{each['median_us']:.1f}", f"{each['times_stock']:.3f}"])
            print(*rows[-1], *each["norms"], sep="\n  ", flush=True)
        torch.cuda.empty_cache()
    print_table("Forward and backward", ["case", "way", "us", "over stock"], rows, "bench")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
