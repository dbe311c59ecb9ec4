"""Times the forms: norms with what surrounds them, forward, backward and both, over a stream kernel.

    python -m bench.forms --shapes 16384x4096 8192x8192 --forms of_sum --residual-dtype fp32
    python -m bench.forms --shapes 18432x3072 65536x1152 --forms modulated of_sum_modulated --samples 4 16
    python -m bench.forms --shapes 32768x1024 --forms times_gate --packed
    python -m bench.forms --shapes 16384x4096 --forms affine --rounding x_hat

Candidates: ours; "plain", our norm without the form, where the form moves no more tensors; the form written out, in
eager mode and by torch.compile; Liger, QuACK and FLA where they are installed and have the form. The floor is a stream
kernel for each direction with the same large reads and writes. A sandwich, the norm behind a layer and the next one, is
one op of ours forward and two backward, over the floor of one; in "plain" it is two, and the sum is in the second.
Every candidate is compared with float64 first. One JSON line per candidate goes to forms.jsonl. Processes compile the
next cases meanwhile. Exit code 1 if a result is wrong, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._functorch import config as functorch_config

import fusednorm
from fusednorm.forms import ROUNDINGS, FormSpec
from fusednorm.operands import FORMS, OPS, Op
from fusednorm.tools.console import print_table
from fusednorm.tools.oracle import STOCK_FACTOR

from . import ahead
from .cases import DTYPES, SHAPE_HELP, add_norms_argument, dtype_name, make_parser, parse_shape
from .peers import packages
from .records import add_out_argument, describe_machine, lacks_gpu, results_path, save, time_fields
from .timing import time_interleaved
from .written import FUNCTIONS, as_written, modulations_of, rows_of
from .written import SETTINGS as FUNCTION_SETTINGS

EPS = 1e-6
SHAPES = "16384x4096 8192x8192 16384x2048 65536x1024 4096x16384".split()
SETTINGS = FUNCTION_SETTINGS | {"modulated_plus_residual": {"gate_activation": "tanh"}}
SANDWICH = "sandwich"  # h = residual + norm(x), y = norm(h), as in Gemma's blocks
FORM_NAMES = [*(suffix[1:] for _, suffix, *_ in FORMS if suffix != "_of_wide_sum"), SANDWICH]
WAYS = "forward", "backward", "both"
FLOOR, BLOCK = "floor", 4096  # elements of a CTA of the floor
PIECE = 2**28  # most elements of x for which the form is written out at once
FACTOR = STOCK_FACTOR  # of the error of the form written out
NAMES = ("ours", "plain", "inductor", "eager", "liger", "quack", "fla")
Outputs = tuple[Tensor, ...]
Candidate = Callable[["FormCase", dict[str, Tensor]], Outputs]


@dataclass(frozen=True)
class FormCase:
    norm: str
    form: str
    rows: int
    cols: int
    dtype: torch.dtype
    residual_dtype: torch.dtype
    weight_offset: float
    samples: int = 1  # whose rows share a row of each modulation; as many as rows: each row has its own
    modulation_dtype: torch.dtype = torch.bfloat16
    group_size: int | None = None  # of norms with a gate
    packed: bool = False  # x, the gate and as many other columns are those of one projection
    rounding: str = "once"
    table: int = 0  # rows of the tables that modulations are, with an index; 0: they are no tables

    @property
    def fields(self) -> dict[str, Any]:
        has_residual = len(self.rows_in) > 1
        of_samples = {"samples": self.samples, "modulation_dtype": dtype_name(self.modulation_dtype)}
        of_groups = {"group_size": self.group_size} if self.group_size else {}
        of_groups |= {"packed": True} if self.packed else {}
        of_groups |= {"table": self.table} if self.table else {}
        of_groups |= {"rounding": self.rounding} if self.rounding != "once" else {}
        return (of_samples if self.modulations else {}) | of_groups | {
            "norm": self.norm,
            "form": self.form,
            "weight_offset": self.weight_offset,
            "rows": self.rows,
            "cols": self.cols,
            "x_dtype": dtype_name(self.dtype),
            "residual_dtype": dtype_name(self.residual_dtype) if has_residual else None,
        }

    @property
    def names(self) -> list[str]:
        """Of the tensors: x, a residual or a gate, the parameters. A norm that is modulated before a layer has none."""
        if self.op.form.modulate and not self.op.form.finish:
            return [*self.rows_in, *self.modulations]
        rows = ["projection"] if self.packed else self.rows_in
        more = self.modulations or ["next_weight"] * (self.form == SANDWICH)
        return [*rows, "weight", *(["bias"] if self.norm == "layer" else []), *more]

    @property
    def op(self) -> Op:
        """The first one."""
        return OPS[f"{self.norm}_norm_fwd_{'plus_residual' if self.form == SANDWICH else self.form}"]

    @property
    def spec(self) -> FormSpec:
        """The form with its settings."""
        modulate = SETTINGS.get(self.form, {}).get("gate_activation", self.op.form.modulate)
        groups, rounds_x_hat = self.cols // (self.group_size or self.cols), self.rounding == "x_hat"
        settings = {"weight_offset": self.weight_offset, "rounds_x_hat": rounds_x_hat, "groups": groups}
        return self.op.form._replace(modulate=modulate, **settings)

    @property
    def rows_in(self) -> list[str]:
        return rows_of(self.op)

    @property
    def modulations(self) -> list[str]:
        return modulations_of(self.op)

    @property
    def streamed(self) -> list[str]:
        """The modulations that are as large as x."""
        return self.modulations if self.samples == self.rows else []

    def inputs(self, device: str = "cuda") -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        dtypes = dict.fromkeys(self.rows_in[1:], self.residual_dtype)
        dtypes |= dict.fromkeys(self.modulations, self.modulation_dtype)
        rows = (self.samples, self.rows // self.samples, self.cols) if self.modulations else (self.rows, self.cols)
        of_modulation = (self.table, self.cols) if self.table else (self.samples, 1, self.cols)
        shapes = dict.fromkeys(self.rows_in, rows) | dict.fromkeys(self.modulations, of_modulation)
        shapes["projection"] = self.rows, 3 * self.cols
        made = {}
        for name in self.names:
            shape = shapes.get(name, (self.cols,))
            made[name] = torch.randn(shape, generator=generator, device=device, dtype=dtypes.get(name, self.dtype))
        given = {name: each.requires_grad_() for name, each in made.items()}
        if self.table:
            given["index"] = torch.randint(self.table, rows[:-1], generator=generator, device=device)
        return given


def in_two(call: Candidate, case: FormCase, given: dict[str, Tensor]) -> Outputs:
    """A sandwich by two calls."""
    *_, next_weight = given.values()
    (h,) = call(replace(case, form="plus_residual"), {name: given[name] for name in case.names[:-1]})
    return *call(replace(case, form="affine"), {"x": h, "weight": next_weight}), h


def ours(case: FormCase, given: dict[str, Tensor]) -> Outputs:
    if case.form == SANDWICH:
        function = getattr(fusednorm, f"{case.norm}_norm_add_{case.norm}_norm")
        return function(**given, eps=EPS, weight_offset=case.weight_offset, rounding=case.rounding)
    function = getattr(fusednorm, FUNCTIONS[case.form].format(f"{case.norm}_norm") + "_packed" * case.packed)
    settings = SETTINGS.get(case.form, {}) | ({"group_size": case.group_size} if case.group_size else {})
    settings |= {"eps": EPS, "weight_offset": case.weight_offset, "rounding": case.rounding}
    if case.packed:
        projection, *parameters = given.values()
        return function(projection, (0, case.cols), (case.cols, 2 * case.cols), *parameters, **settings)
    return as_tuple(function(**given, **settings))


def plain(case: FormCase, given: dict[str, Tensor]) -> Outputs:
    if case.form == SANDWICH:
        x, residual, *parameters, next_weight = given.values()
        (u,) = ours(replace(case, form="affine"), dict(zip(("x", "weight", "bias"), (x, *parameters), strict=False)))
        return ours(replace(case, form="of_sum"), {"x": u, "residual": residual, "weight": next_weight})
    function = getattr(fusednorm.functional, f"{case.norm}_norm")
    return (function(given["x"], (case.cols,), *(given[name] for name in case.names[1:]), eps=EPS),)


def written(case: FormCase, given: dict[str, Tensor]) -> Outputs:
    """As models write it."""
    if case.form == SANDWICH:
        return in_two(written, case, given)
    if case.table:
        rows = {name: given[name][given["index"]] for name in case.modulations}
        return written(replace(case, table=0), given | rows)
    if case.packed:
        x, gate, rest = given["projection"].chunk(3, -1)
        return *written(replace(case, packed=False), given | {"x": x, "gate": gate}), rest
    return as_written(case.norm, case.spec, given, EPS)


def liger(case: FormCase, given: dict[str, Tensor]) -> Outputs:
    if case.form == "modulated":
        from liger_kernel.ops.modulated_rms_norm import LigerModulatedRMSNormFunction

        x, scale, shift = (given[name] for name in case.names)
        return (LigerModulatedRMSNormFunction.apply(x, None, scale[:, 0], shift[:, 0], EPS, 0.0, "llama", False),)
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    x, weight, settings = given["x"], given["weight"], (EPS, case.weight_offset, "llama", False)
    if case.form == "affine":
        return (LigerRMSNormFunction.apply(x, weight, *settings),)
    return LigerFusedAddRMSNormFunction.apply(x, given["residual"], weight, *settings)


def quack(case: FormCase, given: dict[str, Tensor]) -> Outputs:
    from quack.rmsnorm import rmsnorm

    more = {"weight_offset": case.weight_offset} if case.weight_offset else {}
    return as_tuple(rmsnorm(**given, eps=EPS, prenorm=case.form == "of_sum", **more))


def fla(case: FormCase, given: dict[str, Tensor]) -> Outputs:
    from fla.modules.norm import fused_norm_gate, layernorm, layernorm_gated

    x, gate, weight, bias = (given.get(name) for name in ("x", "gate", "weight", "bias"))
    if case.form == "of_sum":
        function = getattr(layernorm, f"{case.norm}_norm")
        return function(x, weight, bias, residual=given["residual"], eps=EPS, prenorm=True)
    if case.form == "of_gated" or case.group_size:
        order, size = case.form == "times_gate", case.group_size
        return (layernorm_gated.layernorm_fn(x, weight, bias, gate, EPS, size, order, case.norm == "rms"),)
    return (getattr(fused_norm_gate, f"{case.norm}_norm_gated")(x, gate, weight, bias, eps=EPS),)


PEERS = {  # the package, the call, and the norms and forms that it has
    "liger": ("liger_kernel", liger, ("rms",), ("affine", "of_sum", "modulated")),
    "quack": ("quack", quack, ("rms",), ("affine", "of_sum")),
    "fla": ("fla", fla, ("layer", "rms"), ("of_sum", "of_gated", "times_gate")),
}


def as_tuple(outputs: Tensor | Outputs) -> Outputs:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def candidates(case: FormCase, names: Collection[str] = NAMES) -> dict[str, Candidate]:
    compiled = torch.compile(lambda given: written(case, given), fullgraph=True, dynamic=False)
    found = {"ours": ours, "inductor": lambda _, given: compiled(given), "eager": written}
    if case.form == "affine" or (case.form == SANDWICH and case.residual_dtype == case.dtype):
        found["plain"] = plain
    unable = {"fla"} if case.weight_offset or case.packed else set()
    unable |= {"liger", "quack"} if case.table else set()
    unable |= {"quack", "fla"} if case.rounding != "once" else set()
    for name, (package, call, norms, forms) in PEERS.items():
        if case.norm in norms and case.form in forms and not (name in unable or packages.missing(package, package)):
            found[name] = call
    return {name: call for name, call in found.items() if name in names}


@triton.jit
def stream(reads, writes, elements, block: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offset < elements
    total = tl.load(reads[0] + offset, mask=inside).to(tl.float32)
    for i in tl.static_range(1, len(reads)):
        total += tl.load(reads[i] + offset, mask=inside).to(tl.float32)
    for i in tl.static_range(len(writes)):
        tl.store(writes[i] + offset, total, mask=inside)


def floors(case: FormCase, given: dict[str, Tensor], outputs: Outputs) -> dict[str, Callable[[], object]]:
    """For each direction, stream kernels with its large reads and writes. A residual behind a norm is no operand of a
    backward: its gradient is dy. dx is written in each dtype of x and a residual before it, once if a modulation
    follows, and that of a gated branch apart. The gradient of a projection's other columns is copied. A modulation that
    each row has, and its gradient, are large; a backward does not read a shift."""
    if case.packed:
        x, *others, rest = (each.contiguous() for each in given["projection"].detach().chunk(3, -1))
        outputs = outputs[:1]
    else:
        (x, *others), rest = [given[name].detach() for name in case.rows_in], None
    streamed = {name: given[name].detach() for name in case.streamed}
    rows = [x, *others, *streamed.values()]
    gates = [each for name, each in zip(case.rows_in[1:], others, strict=True) if name == "gate"]
    made = [torch.empty_like(each) for each in outputs]
    form, is_sandwich = case.op.form, case.form == SANDWICH
    of_sum = form.rows_out or is_sandwich
    branch = [x] if form.combine == "add_gated" or is_sandwich else gates
    saved = outputs[1] if of_sum else x
    read = [torch.empty_like(outputs[0]), saved, *([torch.empty_like(saved)] if of_sum else []), *branch]
    dtypes = {x.dtype, saved.dtype} if form.rows_out and not form.modulate else {saved.dtype}
    written = [*(torch.empty_like(x, dtype=dtype) for dtype in dtypes), *map(torch.empty_like, branch)]
    read += [each for name, each in streamed.items() if name != "shift"]
    written += map(torch.empty_like, streamed.values())
    if rest is not None:
        read.append(rest)
        written.append(torch.empty_like(rest))

    def run(reads: list[Tensor], writes: list[Tensor]) -> None:
        stream[(triton.cdiv(x.numel(), BLOCK),)](tuple(reads), tuple(writes), x.numel(), block=BLOCK, num_warps=8)

    def forward() -> None:
        run(rows, made)

    def backward() -> None:
        run(read, written)

    return {"forward": forward, "backward": backward, "both": lambda: (forward(), backward())}


def leaves_of(given: dict[str, Tensor]) -> list[Tensor]:
    """All but an index."""
    return [each for each in given.values() if each.requires_grad]


def calls_of(run: Callable[[], Outputs], leaves: list[Tensor], grads: Outputs) -> dict[str, Callable[[], object]]:
    """The calls of a candidate for each direction. A backward alone keeps the graph of its first call, which `capture`
    makes on the stream that it captures."""
    kept: list[Outputs] = []

    def forward() -> Outputs:
        with torch.no_grad():
            return run()

    def backward() -> tuple[Tensor, ...]:
        if not kept:
            kept.append(run())
        return torch.autograd.grad(kept[0], leaves, grads, retain_graph=True)

    return {"forward": forward, "backward": backward, "both": lambda: torch.autograd.grad(run(), leaves, grads)}


def errors_of(outputs: Outputs, exact: Outputs) -> list[float]:
    def norm(parts: Iterator[Tensor]) -> Tensor:
        return torch.stack([each.norm() for each in parts]).norm()

    found = []
    for got, want in zip(outputs, exact, strict=True):
        parts = [each.flatten().split(PIECE) for each in (got, want)]
        found.append(float(norm(g.double() - w for g, w in zip(*parts, strict=True)) / norm(iter(parts[1]))))
    return found


def all_of(run: Callable[[dict[str, Tensor]], Outputs], given: dict[str, Tensor], grads: Outputs) -> Outputs:
    """Outputs and gradients."""
    outputs = run(given)
    found = torch.autograd.grad(outputs, leaves_of(given), [g.to(o.dtype) for g, o in zip(grads, outputs)])  # noqa: B905
    return (*(each.detach() for each in outputs), *found)


def written_in_pieces(case: FormCase, given: dict[str, Tensor], grads: Outputs, wide: bool) -> Outputs:
    """Outputs and gradients of the form written out, in float64 if `wide`, of the rows in pieces. The gradients of what
    pieces share are added in float64."""
    x = next(iter(given.values()))
    pieces, dim = -(-x.numel() // PIECE), 0 if case.streamed else x.dim() - 2
    like = [*grads, *(each.detach() for each in given.values())]
    has_rows = [each.dim() > 1 and each.shape[: dim + 1] == x.shape[: dim + 1] for each in like]
    found = []
    for at in range(pieces):
        of_it = [t.tensor_split(pieces, dim)[at] if rows else t for t, rows in zip(like, has_rows, strict=True)]
        piece = dict(zip(given, of_it[len(grads) :], strict=True))
        floats = {name: t.double() if wide else t.detach() for name, t in piece.items() if t.is_floating_point()}
        piece |= {name: t.requires_grad_() for name, t in floats.items()}
        found.append(all_of(lambda each: written(case, each), piece, tuple(of_it[: len(grads)])))
    joined = zip(zip(*found, strict=True), has_rows, strict=False)  # the last may be an index
    return tuple(torch.cat(parts, dim) if rows else sum(each.double() for each in parts) for parts, rows in joined)


def compile_jobs(case: FormCase, names: Collection[str]) -> Iterator[tuple]:
    """What `ahead.in_turn` runs for a case: of each candidate whose kernels lie in a cache."""
    for name in candidates(case, [name for name in names if name not in ("eager", "quack")]):
        autotuned = name == "fla" and case.form in ("times_gate", "of_sum") and not case.group_size
        parts = range(ahead.PARTS if autotuned else 1)
        yield from ((compile_candidate, case, name, *of) for of in itertools.product((False, True), parts))


def compile_candidate(case: FormCase, name: str, gradients: bool, part: int) -> None:
    given, call = case.inputs(), candidates(case, [name])[name]
    ahead.compile_call(lambda: call(case, given), leaves_of(given), gradients, part)


def measure(case: FormCase, rounds: int, ways: list[str], names: Collection[str] = NAMES) -> Iterator[dict]:
    """Records of the candidates; a candidate that fails has its reason and no time."""
    torch.compiler.reset()
    given = case.inputs()
    with torch.no_grad():
        outputs = written(case, given)
    generator = torch.Generator("cuda").manual_seed(1)
    grads = tuple(torch.randn(o.shape, generator=generator, device="cuda", dtype=o.dtype) for o in outputs)
    exact = written_in_pieces(case, given, grads, wide=True)
    least = errors_of(written_in_pieces(case, given, grads, wide=False), exact)
    of_inputs = [f"d{name}" for name, each in given.items() if each.requires_grad]
    whose = [*("y", "rest" if case.packed else "h")[: len(outputs)], *of_inputs]
    timed: dict[str, dict[str, Callable[[], object]]] = {way: {} for way in ways}
    failed, excess = {}, {}
    for name, call in candidates(case, names).items():
        try:
            errors = errors_of(all_of(lambda each, call=call: call(case, each), given, grads), exact)
            over = (e / max(w, torch.finfo(case.dtype).eps / 4) for e, w in zip(errors, least, strict=True))
            excess[name] = max(zip(over, whose, strict=True))
            calls = calls_of(lambda call=call: call(case, given), leaves_of(given), grads)
        except Exception as error:  # of a peer: the others go on
            if name == "ours":
                raise
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        for way in ways:
            timed[way][name] = calls[way]
    del exact
    floor = floors(case, given, outputs)
    for way in ways:
        times = time_interleaved({FLOOR: floor[way], **timed[way]}, rounds)
        for name, each in times.items():
            error, output = excess.get(name, (0.0, ""))
            of = {"direction": way, "candidate": name, "error_over_written": round(error, 3), "error_of": output}
            yield case.fields | of | time_fields(each) | {"times_floor": round(each.median / times[FLOOR].median, 4)}
        for name, reason in failed.items():
            yield case.fields | {"direction": way, "candidate": name, "median_us": None, "reason": reason}


def make_cases(options: argparse.Namespace) -> Iterator[FormCase]:
    """Every combination of the options that a form has."""
    dtype, residual = DTYPES[options.dtype], DTYPES[options.residual_dtype or options.dtype]
    dtypes = [DTYPES[name] for name in options.modulation_dtype or [options.dtype]]
    for form, norm, shape in itertools.product(options.forms, options.norms, options.shapes):
        offset = options.weight_offset if form in ("affine", SANDWICH) else 0.0
        case = FormCase(norm, form, *shape.sizes, dtype, residual, offset, rounding=options.rounding)
        of_groups = options.group_size if case.op.form.activates else [None]
        samples = [each or case.rows for each in options.samples]
        of_samples = itertools.product(samples, dtypes) if case.modulations else [(1, dtype)]
        packed = options.packed and case.op.form.activates
        for size, (samples, of_modulations) in itertools.product(of_groups, of_samples):
            made = replace(case, group_size=size, samples=samples, modulation_dtype=of_modulations, packed=packed)
            yield replace(made, table=options.table if case.op.form.modulate and not case.op.form.finish else 0)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("forms", __doc__)
    shapes = [parse_shape(text) for text in SHAPES]
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=shapes, metavar="MxN", help=SHAPE_HELP)
    parser.add_argument("--forms", nargs="+", choices=FORM_NAMES, default=FORM_NAMES, help="default: all")
    parser.add_argument("--directions", nargs="+", choices=WAYS, default=WAYS, help="default: all three")
    add_norms_argument(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of x, the parameters and gradients")
    parser.add_argument("--residual-dtype", choices=DTYPES, help="of residuals (default: that of x)")
    text = "of modulated forms: the rows are theirs; 0: as many as rows (default: 4)"
    parser.add_argument("--samples", type=int, nargs="+", default=[4], help=text)
    text = "of scale, shift and gate (default: that of x)"
    parser.add_argument("--modulation-dtype", nargs="+", choices=DTYPES, help=text)
    text = "modulated forms have tables of so many rows, and a random index (default: no tables)"
    parser.add_argument("--table", type=int, default=0, help=text)
    text = "columns of a group, of norms with a gate (default: a row)"
    parser.add_argument("--group-size", type=int, nargs="+", default=[None], help=text)
    text = "x and gate of norms with a gate are a third each of a projection, whose gradient is one"
    parser.add_argument("--packed", action="store_true", help=text)
    parser.add_argument("--weight-offset", type=float, default=1.0, help="of affine and of a sandwich (default: 1)")
    parser.add_argument("--rounding", choices=ROUNDINGS, default="once", help="default: once")
    parser.add_argument("--candidates", nargs="+", choices=NAMES, default=NAMES, help="default: all")
    parser.add_argument("--rounds", type=int, default=40, help="timed replays of each (default: 40)")
    add_out_argument(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("forms"):
        return 2
    machine, wrong, rows = describe_machine(), 0, []
    path = results_path(options.out, machine, "forms")
    for case in ahead.in_turn(list(make_cases(options)), lambda case: compile_jobs(case, options.candidates)):
        with functorch_config.patch(donated_buffer=False):  # a backward is timed many times
            records = [machine | each for each in measure(case, options.rounds, options.directions, options.candidates)]
        save(records, path)
        wrong += sum(each["candidate"] == "ours" and each["error_over_written"] > FACTOR for each in records)
        for way in options.directions:
            of = {each["candidate"]: each for each in records if each["direction"] == way}
            found = [f"{name} {each['times_floor']:.3f}" for name, each in of.items() if each["median_us"]]
            what = f"{case.norm} {case.form} {case.rows}x{case.cols}"
            rows.append([what, way, f"{of[FLOOR]['median_us']:.1f}", ", ".join(found[1:])])
            print(*rows[-1], flush=True)
    print_table("Forms, times over the floor", ["form", "direction", "floor us", "candidates"], rows)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
