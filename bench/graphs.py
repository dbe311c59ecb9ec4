"""Times what torch.compile makes of norms and their neighbours, without us and under enable_inductor().

    python -m bench.graphs --only residual_rms modulated_layer llama --seconds 300

The cases are norms with what models write around them, and the models of bench.zoo, which are transformers' and
diffusers' own classes at true width in few layers. A case is timed as an eager call of one function of ours, too, in
the way "forms". A time is that of forward and backward with all gradients, as one CUDA graph with a cold L2, or by a
plain call if it cannot be captured (`graph` is false). The gradients of all ways are compared with float64; those of a
model are of a loss over few tokens.

A model has a process of its own. One JSON line per case and way goes to graphs.jsonl, with the report of which norms
became ours. A case whose records by the same code and versions exist, in the file or in bench/results, is skipped,
without --again: a run that was stopped goes on where it was. Exit code 1 if a case failed or a gradient of ours is
worse, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config

import fusednorm
from fusednorm.tools.console import print_table

from .cases import make_parser
from .forms import as_tuple
from .records import add_out_argument, describe_machine, lacks_gpu, results_path, save, time_fields
from .timing import Times, time_calls, time_interleaved
from .turns import ROOT, digest, let_installed_packages_precede, recorded, run_group
from .zoo.measure import Runner, Task, Zoo, compiling, identity, reason
from .zoo.models import MODELS
from .zoo.ways import stock_backend

EPS = 1e-6
WAYS = {"compiled stock": "stock", "compiled enable_inductor": "ours"}  # in bench.zoo, here
FACTOR = 1.2  # of the error of stock Inductor
BF16 = torch.bfloat16
LEAST = 30  # seconds more than --seconds, for a model that is measured
SHOWN = (("median_us", 1), ("times_stock", 3))
Sizes = tuple[int, ...]


class Case(NamedTuple):
    """A norm with its neighbours, called with tensors of these shapes. Each gets a gradient. Tables of a rotation get
    none."""

    run: Callable[..., Tensor | tuple[Tensor, ...]]
    form: Callable[..., Tensor | tuple[Tensor, ...]]  # the same by one function of ours, for an eager call
    shapes: Callable[[Sizes], list[Sizes]]  # of the sizes of x
    sizes: Sizes
    tiny: Sizes
    joined: str = ""  # what the report says if more than a backward becomes an op; then the way "apart" is timed, too
    tables: int = 0  # of a rotation, the last tensors


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


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def rotated_heads(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
    return turned(rms(q, of_q).transpose(1, 2), *tables), turned(rms(k, of_k).transpose(1, 2), *tables)


def heads_rotated_first(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
    return rms(turned(q.transpose(1, 2), *tables), of_q), rms(turned(k.transpose(1, 2), *tables), of_k)


def turned_in_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return (x.float() * cos + torch.stack((-b, a), dim=-1).flatten(3).float() * sin).to(x.dtype)


def heads_in_pairs(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
    return turned_in_pairs(rms(q, of_q), *tables), turned_in_pairs(rms(k, of_k), *tables)


def pairs_form(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    rotary = tuple(each.squeeze(2) for each in tables)
    return fusednorm.qk_norm(q, k, of_q, of_k, EPS, rotary=rotary, rotary_interleaved=True)


def rotated_packed_heads(qkv: Tensor, of_q: Tensor, of_k: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values = qkv.shape[2] // 6
    q, k, v = qkv.split([4 * values, values, values], dim=2)
    return *rotated_heads(q, k, of_q, of_k, *tables), v


def rotated_packed_form(qkv: Tensor, of_q: Tensor, of_k: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    values, tables = qkv.shape[2] // 6, [each.squeeze(1) for each in tables]
    q, k, v = fusednorm.qk_norm_packed(qkv.flatten(2), 4 * values, values, of_q, of_k, EPS, rotary=tuple(tables))
    return q.transpose(1, 2), k.transpose(1, 2), v


def packed_form(qkv: Tensor, of_q: Tensor, of_k: Tensor) -> tuple[Tensor, ...]:
    values = qkv.shape[1] // 6
    return fusednorm.qk_norm_packed(qkv.flatten(1), 4 * values, values, of_q, of_k, EPS)


def heads_form(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, *tables: Tensor, **order: bool) -> tuple[Tensor, ...]:
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return fusednorm.qk_norm(q, k, of_q, of_k, EPS, rotary=tables, heads_dim=-3, **order)


def shapes_of_heads(s: Sizes) -> list[Sizes]:
    """q, k with a quarter of the heads, their weights and the tables."""
    return [s, (*s[:2], s[2] // 4, s[3]), s[-1:], s[-1:], *[(s[0], 1, s[1], s[3])] * 2]


def modulated(y: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return y * (1 + scale) + shift


def modulated_layer_of_sum(
    x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, gate: Tensor
) -> tuple[Tensor, Tensor]:
    h = residual + gate * x
    return modulated(layer(h), scale, shift), h


def modulated_form(x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    return fusednorm.ada_layer_norm(x, scale, shift, residual=residual, gate=gate, eps=EPS)


def gated_residual(x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    return residual + gate.tanh() * rms(x, weight)


def shapes_of_samples(s: Sizes) -> list[Sizes]:
    """x, and a scale and a shift that the rows of a sample share."""
    return [s, *[(s[0], 1, s[2])] * 2]


CASES: dict[str, Case] = {
    "one_plus_weight": Case(
        lambda x, weight: rms(x, 1 + weight), partial(fusednorm.affine_rms_norm, eps=EPS, weight_offset=1.0),
        lambda s: [s, s[-1:]], (16384, 4096), (4, 2048), "is read once",
    ),
    "residual_rms": Case(
        residual_rms, partial(fusednorm.add_rms_norm, eps=EPS), lambda s: [s, s, s[-1:]], (16384, 4096), (4, 2048),
        "is read once",
    ),
    "residual_layer": Case(
        residual_layer, partial(fusednorm.add_layer_norm, eps=EPS), lambda s: [s, s, s[-1:], s[-1:]], (16384, 2048),
        (4, 2048), "is read once",
    ),
    "rms_then_gate": Case(
        lambda x, gate, weight: rms(x, weight) * F.silu(gate), partial(fusednorm.rms_norm_gated, eps=EPS),
        lambda s: [s, s, s[-1:]], (524288, 128), (16, 32), "times gate",
    ),
    "gate_then_rms": Case(
        lambda x, gate, weight: rms(x * F.silu(gate), weight),
        partial(fusednorm.rms_norm_gated, eps=EPS, norm_before_gate=False), lambda s: [s, s, s[-1:]], (8192, 8192),
        (16, 32), "of gated",
    ),
    "packed_heads": Case(
        packed_heads, packed_form, lambda s: [s, s[-1:], s[-1:]], (16384, 48, 128), (4, 6, 32), "of heads"
    ),
    "rotated_packed_heads": Case(
        rotated_packed_heads, rotated_packed_form, lambda s: [s, s[-1:], s[-1:], *[(s[0], 1, s[1], s[3])] * 2],
        (4, 4096, 48, 128), (2, 6, 6, 32), "rotated", 2,
    ),
    "rotated_heads": Case(
        rotated_heads, heads_form, shapes_of_heads, (4, 4096, 32, 128), (2, 6, 4, 32), "rotated", 2
    ),
    "heads_rotated_first": Case(
        heads_rotated_first, partial(heads_form, norm_first=False), shapes_of_heads, (4, 4096, 32, 128), (2, 6, 4, 32),
        "rotated", 2,
    ),
    "heads_in_pairs": Case(
        heads_in_pairs, pairs_form, lambda s: [s, s, s[-1:], s[-1:], *[(1, s[1], 1, s[3])] * 2], (4, 4608, 24, 128),
        (2, 6, 4, 32), "rotated", 2,
    ),
    "modulated_layer": Case(
        lambda x, *modulations: modulated(layer(x), *modulations), partial(fusednorm.ada_layer_norm, eps=EPS),
        shapes_of_samples, (4, 4608, 3072), (2, 8, 32), "modulated",
    ),
    "modulated_rms": Case(
        lambda x, scale, shift, weight: modulated(rms(x, weight), scale, shift),
        lambda x, scale, shift, weight: fusednorm.ada_rms_norm(x, scale, shift, weight=weight, eps=EPS),
        lambda s: [*shapes_of_samples(s), s[-1:]], (4, 4608, 3072), (2, 8, 32), "modulated",
    ),
    "modulated_layer_of_sum": Case(
        modulated_layer_of_sum,
        modulated_form,
        lambda s: [s, *shapes_of_samples(s), (s[0], 1, s[2])], (4, 4608, 3072), (2, 8, 32), "modulated",
    ),
    "gated_residual": Case(
        gated_residual,
        lambda x, residual, weight, gate: fusednorm.rms_norm_add(
            x, residual, weight, gate=gate, gate_activation="tanh", eps=EPS
        ),
        lambda s: [s, s, s[-1:], (s[0], 1, s[2])], (4, 4096, 3840), (2, 8, 32), "modulated plus residual",
    ),
}  # fmt: skip


class Made(NamedTuple):
    run: Callable[..., tuple[Tensor, ...]]
    inputs: list[Tensor]
    leaves: list[Tensor]  # whose gradients are computed


def make(name: str, device: str, tiny: bool = False) -> Made:
    torch.manual_seed(0)
    case = CASES[name]
    shapes = case.shapes(case.tiny if tiny else case.sizes)
    inputs = [torch.randn(shape, device=device, dtype=BF16) for shape in shapes]
    leaves = [each.requires_grad_() for each in inputs[: len(inputs) - case.tables]]
    return Made(lambda *given: as_tuple(case.run(*given)), inputs, leaves)


def _gradient_of(output: Tensor) -> Tensor:
    """With the strides of the output, which may be a view. A graph copies gradients of other strides."""
    like = {"dtype": output.dtype, "device": output.device}
    return torch.empty_strided(output.shape, output.stride(), **like).normal_()


def gradients(run: Callable, made: Made, grads: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(*made.inputs), made.leaves, grads)


def errors(got: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> list[float]:
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs]


# Else torch 2.11 copies gradients of results that are not contiguous. In a model, attention's backward is in the graph.
@functorch_config.patch(guess_tangent_strides_as_outputs=True)
def measure(name: str, device: str, rounds: int, tiny: bool = False) -> list[dict]:
    """A record of a case for each way. Without rounds nothing is timed."""
    from fusednorm.integrations import inductor

    torch.compiler.reset()
    made = make(name, device, tiny)
    grads = [_gradient_of(each) for each in made.run(*made.inputs)]
    backends = {"stock": stock_backend(), "ours": inductor.compile_graph}
    if CASES[name].joined:
        backends["apart"] = partial(inductor.compile_graph, options={"join": ()})
    ways = {way: torch.compile(made.run, backend=backend, dynamic=False) for way, backend in backends.items()}
    ways["forms"] = lambda *given: as_tuple(CASES[name].form(*given))
    found, norms = {}, {}
    for way, run in ways.items():
        inductor.report(clear=True)
        found[way] = gradients(run, made, grads)
        lines = str(inductor.report()).splitlines() if way in backends else []
        norms[way] = [line.replace(f"{ROOT}/", "") for line in lines]
    wide = [each.detach().double().requires_grad_(each.requires_grad) for each in made.inputs]
    exact = gradients(made.run, Made(made.run, wide, wide[: len(made.leaves)]), [each.double() for each in grads])
    far = {way: errors(each, exact) for way, each in found.items()}
    calls = {way: lambda run=run: gradients(run, made, grads) for way, run in ways.items()}
    times, graph = time(calls, rounds) if rounds else ({}, False)
    return [
        {"case": name, "way": way, "error": max(far[way]), "is_worse": is_worse(far[way], far["stock"]), "graph": graph,
         "norms": norms[way]} | compared(times, way)
        for way in ways
    ]  # fmt: skip


def measure_model(task: Task, ready: Event | None = None, turn: Event | None = None) -> list[dict]:
    """Saves and returns a record of a model of bench.zoo for each way. Sets `ready` and waits for `turn`, as
    turns.run_group wants it."""
    common = identity(task) | {"bench": "graphs", "case": task.model}
    with compiling():
        try:
            zoo = Zoo(task)
            zoo.prepare()
        except Exception as error:  # no such class, or no such package
            zoo, found = None, [{"error": reason(error), "failed": not isinstance(error, ModuleNotFoundError)}]
        if ready and turn:
            ready.set()
            turn.wait()
        records = [common | each for each in (of_model(zoo) if zoo else found)]
    save(records, task.out)
    return records


def of_model(zoo: Zoo) -> Iterator[dict]:
    zoo.check()
    parameters = [each for each in zoo.parameters.values() if each.requires_grad]

    def call(runner: Runner) -> Callable[[], object]:
        return lambda: torch.autograd.grad(zoo.batches[0].loss(runner.way.call), parameters, allow_unused=True)

    runners = {WAYS[runner.name]: runner for runner in zoo.runners}
    calls = {way: call(runner) for way, runner in runners.items() if runner.way}
    times, graph = time(calls, zoo.task.rounds) if zoo.task.rounds and calls else ({}, False)
    stock = runners["stock"].measured.get("errors", {})
    for way, runner in runners.items():
        far = runner.measured.get("errors", {})
        worse = bool(stock and far) and is_worse(far.values(), stock.values())
        yield {
            "way": way, "error": runner.error or far.get("all"), "errors": far,
            "failed": runner.failed, "unchecked": zoo.unchecked, "is_worse": worse, "graph": graph,
            "norms": runner.measured.get("norms_run", []),
        } | compared(times, way)  # fmt: skip


def time(calls: dict[str, Callable], rounds: int) -> tuple[dict[str, Times], bool]:
    """The times, and whether they are those of CUDA graphs."""
    try:
        return time_interleaved(calls, rounds), True
    except RuntimeError:  # a call that copies from the host, or reads from the GPU
        torch.cuda.synchronize()
        return time_calls(calls, rounds), False


def is_worse(far: Iterable[float], least: Iterable[float]) -> bool:
    return any(each > FACTOR * max(most, 2**-10) for each, most in zip(far, least, strict=True))


def compared(times: dict[str, Times], way: str) -> dict:
    """A record's fields of times."""
    if way not in times:
        return {}
    base = times.get("stock")
    ratio = {"times_stock": round(times[way].median / base.median, 4)} if base else {}
    return time_fields(times[way]) | ratio


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("graphs", __doc__)
    names = [*CASES, *MODELS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=40, help="timed replays of each (default: 40)")
    parser.add_argument("--seconds", type=float, default=480, help="of everything (default: 480)")
    parser.add_argument("--jobs", type=int, default=1, help="models that compile at once (default: 1)")
    text = "of compiling a model, at most (default: 240)"
    parser.add_argument("--compile-seconds", type=float, default=240, help=text)
    parser.add_argument("--again", action="store_true", help="measure what was measured, too")
    add_out_argument(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("graphs"):
        return 2
    let_installed_packages_precede()
    end = monotonic() + options.seconds
    machine = describe_machine() | {"source": digest("bench/graphs.py", "bench/zoo/*.py")}
    path, rows, bad = results_path(options.out, machine, "graphs"), [], 0
    done = set() if options.again else {each["case"] for each in recorded(path, machine) if "median_us" in each}
    for name in done.intersection(options.only):
        print(f"{name}: its records exist")
    for names in groups_of([name for name in options.only if name not in done], options.jobs):
        if monotonic() > end:
            print(f"{', '.join(names)}: left for another run, the time is over")
            continue
        for each in records_of(names, machine, path, options, end):
            bad += each.get("is_worse", False) or each.get("failed", False)
            times = [f"{each[field]:.{digits}f}" for field, digits in SHOWN if field in each]
            rows.append([each["case"], each.get("way", ""), *(times or ["", ""])])
            print(*rows[-1], each.get("error"), *each.get("norms", ()), sep="\n  ", flush=True)
        torch.cuda.empty_cache()
    print_table("Forward and backward", ["case", "way", "us", "over stock"], rows)
    return int(bad > 0)


def groups_of(names: list[str], jobs: int) -> list[list[str]]:
    """The models that compile at once; then the cases, one by one."""
    models = [name for name in names if name in MODELS]
    groups = [models[first : first + jobs] for first in range(0, len(models), jobs)]
    return groups + [[name] for name in names if name not in MODELS]


def records_of(names: list[str], machine: dict, path: Path, options: argparse.Namespace, end: float) -> list[dict]:
    """What was saved of a group."""
    if names[0] in MODELS:
        seconds = max(1.0, end - monotonic())
        limits = min(options.compile_seconds, seconds), seconds
        tasks = [Task(name, tuple(WAYS), path, machine["source"], *limits, options.rounds, steps=1) for name in names]
        before = len(path.read_text().splitlines()) if path.exists() else 0
        failures = run_group([(measure_model, task) for task in tasks], end + LEAST)
        lines = path.read_text().splitlines()[before:] if path.exists() else []
        kept = [json.loads(line) for line in lines]
        lost = zip(names, failures, strict=True)
        records = [machine | {"case": name, "error": failure, "failed": True} for name, failure in lost if failure]
    else:
        (name,), kept = names, []
        try:
            records = [machine | each for each in measure(name, "cuda", options.rounds)]
        except Exception as error:  # of one case: the others go on
            records = [machine | {"case": name, "error": reason(error), "failed": True}]
    save(records, path)
    return kept + records


if __name__ == "__main__":
    sys.exit(main())
