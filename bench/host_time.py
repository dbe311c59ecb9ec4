"""Times the host side of eager calls, ours beside ATen's: the raw ops, and modules with autograd. Modules of forms are
timed beside torch.nn's norm with torch's own operations, and norms of q and k beside two of torch.nn.

    python -m bench.host_time --rows 128 --cols 1024

Nothing is waited for: a call is over when its kernels are enqueued. Our ops are also timed with a number of rows that
they have not had before, in each call, beside calls with other tensors of one size; and with --row-counts different
numbers of rows in all. The records say whether the host side in C++ was built (fusednorm/host/native.py). One JSON line
per call goes to host-time.jsonl. Exit code 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

import fusednorm
from fusednorm.host import native
from fusednorm.tools.console import print_table

from .candidates import OURS
from .cases import DTYPES, NORMS, add_dtype_argument, dtype_name, make_parser
from .records import add_out_argument, describe_machine, lacks_gpu, results_path, save
from .timing import HOST_CALLS, Times, host_times

ATEN = "aten"


class Timed(NamedTuple):
    """What is called, and in whose implementation: OURS or ATEN."""

    norm: str
    call: str
    candidate: str


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("host_time"):
        return 2
    calls: dict[Timed, Callable[[], object]] = {}
    for norm in NORMS:
        found = calls_of_forms(norm, options.rows, options.cols, DTYPES[options.dtype])
        calls |= {Timed(norm, *key): call for key, call in found.items()}
        found = calls_of_heads(norm, options.rows, options.cols, DTYPES[options.dtype])
        calls |= {Timed(norm, *key): call for key, call in found.items()}
        found = calls_of(norm, options.rows, options.cols, DTYPES[options.dtype])
        calls |= {Timed(norm, *key): call for key, call in found.items()}
        found = calls_of_row_counts(norm, options.row_counts, options.cols, DTYPES[options.dtype])
        calls |= {Timed(norm, *key): call for key, call in found.items()}
    times = host_times(calls, options.rounds)
    report(times)
    size = options.row_counts, options.cols, DTYPES[options.dtype]
    totals = {norm: seconds_of_row_counts(norm, *size) for norm in NORMS}
    for norm, seconds in totals.items():
        print(f"{norm}: {options.row_counts} row counts, forward and backward op, {seconds:.2f} s")
    machine = describe_machine()
    common = {
        "native": native.extension is not None,
        "rows": options.rows,
        "cols": options.cols,
        "x_dtype": dtype_name(DTYPES[options.dtype]),
    }
    records = [
        machine | common | key._asdict() | {"host_us": round(each.median, 3), "spread": round(each.spread, 4)}
        for key, each in times.items()
    ]
    records += [
        machine | common | {"norm": norm, "call": "row counts", "row_counts": options.row_counts, "seconds": seconds}
        for norm, seconds in totals.items()
    ]
    save(records, results_path(options.out, machine, "host-time"))
    return 0


def report(times: dict[Timed, Times]) -> None:
    rows = []
    for key, each in times.items():
        if key.candidate == OURS:
            atens, plain = times.get(key._replace(candidate=ATEN)), times.get(key._replace(call=plain_call(key.call)))
            numbers = (
                each.median,
                atens and atens.median,
                atens and each.median / atens.median,
                plain and each.median / plain.median,
            )
            rows.append([key.norm, key.call, *("" if number is None else f"{number:.2f}" for number in numbers)])
    title = f"Host us of a call, our host side in {'C++' if native.extension else 'Python'}"
    print_table(title, ["norm", "call", "fusednorm", "ATen", "ratio", "of plain"], rows)


# With the tensors and the gradients of another module, whose time beyond this one's is ours to save.
CONTROLS = {
    "module of a sum": "module beside a residual",
    "module of both norms": "module of both norms by two functions",
}


def plain_call(call: str) -> str:
    """The call that is to be compared with a module's: that of its control, or of the plain module."""
    module, _, way = call.rpartition(", ")
    return f"{CONTROLS.get(module, 'module')}, {way}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("host_time", __doc__)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--cols", type=int, default=1024)
    add_dtype_argument(parser)
    parser.add_argument("--rounds", type=int, default=15, help=f"of {HOST_CALLS} calls each (default: 15)")
    parser.add_argument("--row-counts", type=int, default=20_000, help="different numbers of rows (default: 20000)")
    add_out_argument(parser)
    return parser.parse_args(arguments)


def calls_of(
    norm: str, rows: int, cols: int, dtype: torch.dtype, device: str = "cuda"
) -> dict[tuple[str, str], Callable[[], object]]:
    """By (call, candidate): forward and backward op, a module with its backward, and a module without gradients."""
    x, dy = (torch.randn(rows, cols, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(cols, device=device, dtype=dtype) for _ in range(2))
    ours, aten = torch.ops.fusednorm, torch.ops.aten
    if norm == "layer":
        parameters, module = (weight, bias), "LayerNorm"
        ops = {
            OURS: (ours.layer_norm_fwd, ours.layer_norm_bwd),
            ATEN: (aten.native_layer_norm, aten.native_layer_norm_backward),
        }
    else:
        parameters, module = (weight,), "RMSNorm"
        ops = {
            OURS: (ours.rms_norm_fwd, ours.rms_norm_bwd),
            ATEN: (aten._fused_rms_norm, aten._fused_rms_norm_backward),
        }
    operands, mask = (x, [cols], *parameters, 1e-5), [True] * (1 + len(parameters))
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for name, package in ((OURS, fusednorm), (ATEN, torch.nn)):
        forward, backward = ops[name]
        grads = (dy, x, [cols], *forward(*operands)[1:], *parameters, mask)
        make_module = functools.partial(getattr(package, module), cols, device=device, dtype=dtype)
        calls["forward op", name] = functools.partial(forward, *operands)
        calls["backward op", name] = functools.partial(backward, *grads)
        calls["module, forward and backward", name] = training_call(make_module(), (x,), dy)
        calls["module, no gradient", name] = inference_call(make_module(), (x,))
    return calls


def calls_of_forms(
    norm: str, rows: int, cols: int, dtype: torch.dtype, device: str = "cuda"
) -> dict[tuple[str, str], Callable[[], object]]:
    """By (call, candidate): modules of forms, with their backwards and without gradients, beside torch.nn's norm with
    torch's own operations; and a module of a model that patch_model has patched."""
    options = {"device": device, "dtype": dtype}
    x, residual, dy = (torch.randn(rows, cols, **options) for _ in range(3))
    scale, shift = (torch.randn(cols, **options) for _ in range(2))
    given = {
        **dict.fromkeys(("of a sum", "beside a residual", "plus a residual", "with a gate"), (x, residual)),
        **dict.fromkeys(("of both norms", "of both norms by two functions"), (x, residual)),
        "modulated": (x, scale, shift),
        "with a packed gate": (torch.cat([x, residual], -1),),
    }
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for (form, candidate), module in modules_of_forms(norm, cols, options).items():
        rows_of_it = given.get(form, (x,))
        calls[f"module {form}, forward and backward", candidate] = training_call(module, rows_of_it, dy)
        calls[f"module {form}, no gradient", candidate] = inference_call(module, rows_of_it)
    return calls


def modules_of_forms(norm: str, cols: int, options: dict) -> dict[tuple[str, str], torch.nn.Module]:
    """By (form, candidate)."""
    name = {"layer": "LayerNorm", "rms": "RMSNorm"}[norm]
    stock = functools.partial(getattr(torch.nn, name), cols, **options)
    modules: dict[tuple[str, str], torch.nn.Module] = {
        ("with weight_offset", OURS): getattr(fusednorm, f"Affine{name}")(cols, weight_offset=1.0, **options),
        ("rounding x_hat", OURS): getattr(fusednorm, f"Affine{name}")(cols, rounding="x_hat", **options),
        ("of a sum", OURS): getattr(fusednorm, f"Add{name}")(cols, **options),
        ("of a sum", ATEN): Composed(stock(), norm_of_sum),
        ("beside a residual", OURS): beside_residual(getattr(fusednorm, name))(cols, **options),
        ("plus a residual", OURS): getattr(fusednorm, f"{name}Add")(cols, **options),
        ("plus a residual", ATEN): Composed(stock(), lambda norm, x, residual: residual + norm(x)),
        ("of both norms", OURS): BothNorms(norm, getattr(fusednorm, f"{norm}_norm_add_{norm}_norm"), cols, **options),
        ("of both norms", ATEN): BothNorms(norm, functools.partial(stock_norms, norm), cols, **options),
        ("of both norms by two functions", OURS): BothNorms(
            norm, functools.partial(by_two_functions, norm), cols, **options
        ),
        ("with a gate", OURS): getattr(fusednorm, f"{name}Gated")(cols, **options),
        ("with a gate", ATEN): Composed(stock(), lambda norm, x, gate: norm(x) * F.silu(gate)),
        ("modulated", OURS): getattr(fusednorm, f"Ada{name}")(cols, **options),
        ("modulated", ATEN): Composed(
            stock(elementwise_affine=False), lambda norm, x, scale, shift: norm(x) * (1 + scale) + shift
        ),
        ("with a packed gate", OURS): PackedGate(norm, cols, **options),
        ("with a packed gate", ATEN): Composed(stock(), gated_halves),
    }
    if norm == "rms":
        by_hand = ByHand(cols, **options)
        fusednorm.patch_model(by_hand)
        modules["written by hand, patched", OURS] = by_hand
    return modules


def beside_residual(norm: type[torch.nn.Module]) -> type[torch.nn.Module]:
    class BesideResidual(norm):
        def forward(self, x, residual):
            return super().forward(x), residual

    return BesideResidual


class Composed(torch.nn.Module):
    """A norm and operations around it."""

    def __init__(self, norm: torch.nn.Module, run: Callable):
        super().__init__()
        self.norm, self.run = norm, run

    def forward(self, *rows):
        return self.run(self.norm, *rows)


def norm_of_sum(norm: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return norm(total), total


class BothNorms(torch.nn.Module):
    """residual + norm(x) and the norm of that, by run(x, residual, weight, next_weight, bias, next_bias)."""

    def __init__(self, norm: str, run: Callable, cols: int, **options):
        super().__init__()
        weights = [torch.nn.Parameter(torch.ones(cols, **options)) for _ in range(2)]
        biases = [torch.nn.Parameter(torch.zeros(cols, **options)) if norm == "layer" else None for _ in range(2)]
        (self.weight, self.next_weight), (self.bias, self.next_bias) = weights, biases
        self.run = run

    def forward(self, x, residual):
        return self.run(x, residual, self.weight, self.next_weight, self.bias, self.next_bias)


def by_two_functions(norm, x, residual, weight, next_weight, bias, next_bias) -> tuple[torch.Tensor, torch.Tensor]:
    h = getattr(fusednorm, f"{norm}_norm_add")(x, residual, weight, bias)
    return getattr(fusednorm, f"affine_{norm}_norm")(h, next_weight, next_bias), h


def stock_norms(norm, x, residual, weight, next_weight, bias, next_bias) -> tuple[torch.Tensor, torch.Tensor]:
    def stock(x, weight, bias):
        return F.layer_norm(x, weight.shape, weight, bias) if norm == "layer" else F.rms_norm(x, weight.shape, weight)

    h = residual + stock(x, weight, bias)
    return stock(h, next_weight, next_bias), h


def gated_halves(norm: torch.nn.Module, packed: torch.Tensor) -> torch.Tensor:
    x, gate = packed.chunk(2, -1)
    return norm(x) * F.silu(gate)


HEADS, KV_HEADS = 8, 2


def calls_of_heads(
    norm: str, rows: int, cols: int, dtype: torch.dtype, device: str = "cuda"
) -> dict[tuple[str, str], Callable[[], object]]:
    """By (call, candidate): modules of norms of HEADS heads of q and KV_HEADS of k, of cols // HEADS columns each, with
    their backwards and without gradients. torch.nn's do not rotate."""
    dim, options = cols // HEADS, {"device": device, "dtype": dtype}
    q, k, v = (torch.randn(1, rows, heads, dim, **options) for heads in (HEADS, KV_HEADS, KV_HEADS))
    tables = tuple(torch.randn(rows, dim, **options) for _ in range(2))
    modules = {
        ("norms of q and k", OURS): fusednorm.QKNorm(dim, norm=norm, **options),
        ("norms of q and k", ATEN): TwoNorms(norm, dim, **options),
        ("norms of q and k, rotated", OURS): Rotated(tables, dim, norm=norm, **options),
        ("norms of packed q and k, rotated", OURS): Packed(tables, dim, norm=norm, **options),
    }
    calls = {}
    for (name, candidate), module in modules.items():
        rows_of_it = (torch.cat([q, k, v], -2).flatten(-2),) if isinstance(module, Packed) else (q, k)
        calls[f"{name}, forward and backward", candidate] = training_call(module, rows_of_it, (q, k, v))
        calls[f"{name}, no gradient", candidate] = inference_call(module, rows_of_it)
    return calls


class TwoNorms(torch.nn.Module):
    def __init__(self, norm: str, dim: int, **options):
        super().__init__()
        make = {"layer": torch.nn.LayerNorm, "rms": torch.nn.RMSNorm}[norm]
        self.q_norm, self.k_norm = make(dim, **options), make(dim, **options)

    def forward(self, q, k):
        return self.q_norm(q), self.k_norm(k)


class Rotated(fusednorm.QKNorm):
    def __init__(self, tables: tuple[torch.Tensor, torch.Tensor], dim: int, **options):
        super().__init__(dim, **options)
        self.tables = tables

    def forward(self, q, k):
        return super().forward(q, k, self.tables)


class Packed(Rotated):
    def forward(self, qkv):
        weights = self.q_weight, self.k_weight
        return fusednorm.qk_norm_packed(qkv, HEADS, KV_HEADS, *weights, norm=self.norm, rotary=self.tables)


class PackedGate(torch.nn.Module):
    """x and the gate are halves of one tensor."""

    def __init__(self, norm: str, cols: int, **options):
        super().__init__()
        self.run = getattr(fusednorm, f"{norm}_norm_gated_packed")
        self.weight = torch.nn.Parameter(torch.ones(cols, **options))

    def forward(self, packed):
        half = packed.shape[-1] // 2
        return self.run(packed, (0, half), (half, 2 * half), self.weight)


class ByHand(torch.nn.Module):
    """As Hugging Face's LlamaRMSNorm."""

    def __init__(self, cols: int, **options):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(cols, **options)), 1e-5

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


def calls_of_row_counts(
    norm: str, row_counts: int, cols: int, dtype: torch.dtype, device: str = "cuda"
) -> dict[tuple[str, str], Callable[[], object]]:
    """By (call, candidate): ours on other tensors in each call, with one number of rows or another each time."""
    fixed, new = (row_count_calls(norm, row_counts, cols, dtype, device, same=same) for same in (True, False))
    found = {}
    for name, calls in (("other tensors", fixed), ("new rows", new)):
        for op, each in zip(("forward op", "backward op"), calls, strict=True):
            turns = itertools.cycle(each)
            found[f"{op}, {name}", OURS] = lambda turns=turns: next(turns)()
    return found


def row_count_calls(norm: str, row_counts: int, cols: int, dtype: torch.dtype, device: str, *, same: bool):
    """(calls of the forward op, calls of the backward op), one for each number of rows from 1 to row_counts; or, for
    `same`, as many with row_counts // 2 rows on other tensors."""
    x, dy = (torch.randn(row_counts, cols, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(cols, device=device, dtype=dtype) for _ in range(2))
    mean, rstd = (torch.rand(row_counts, 1, device=device) for _ in range(2))
    ours, parameters = torch.ops.fusednorm, (weight, bias) if norm == "layer" else (weight,)
    forward, backward = getattr(ours, f"{norm}_norm_fwd"), getattr(ours, f"{norm}_norm_bwd")
    half = row_counts // 2
    parts = [slice(at % half, at % half + half) if same else slice(at + 1) for at in range(row_counts)]
    statistics = (mean, rstd) if norm == "layer" else (rstd,)
    forwards = [functools.partial(forward, x[part], [cols], *parameters, 1e-5) for part in parts]
    backwards = [
        functools.partial(backward, dy[part], x[part], [cols], *(each[part] for each in statistics), *parameters)
        for part in parts
    ]
    return forwards, backwards


def seconds_of_row_counts(norm: str, row_counts: int, cols: int, dtype: torch.dtype, device: str = "cuda") -> float:
    """Seconds for a forward op and a backward op with each number of rows, until the GPU has done them."""
    forwards, backwards = row_count_calls(norm, row_counts, cols, dtype, device, same=False)
    start = time.perf_counter()
    for forward, backward in zip(forwards, backwards, strict=True):
        forward()
        backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def training_call(
    module: torch.nn.Module, rows: Sequence[torch.Tensor], dy: torch.Tensor | tuple[torch.Tensor, ...]
) -> Callable[[], None]:
    """dy is the gradient of each output, or has one for each."""
    leaves = [each.clone().requires_grad_() for each in rows]

    def call() -> None:
        outputs = module(*leaves)
        if isinstance(outputs, tuple):
            grads = dy[: len(outputs)] if isinstance(dy, tuple) else (dy,) * len(outputs)
            torch.autograd.backward(outputs, grads)
        else:
            outputs.backward(dy)
        for leaf in leaves:
            leaf.grad = None
        module.zero_grad()

    return call


def inference_call(module: torch.nn.Module, rows: Sequence[torch.Tensor]) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            module(*rows)

    return call


if __name__ == "__main__":
    sys.exit(main())
