"""Times qk_norm and qk_norm_packed, forward, backward and both, over a stream kernel.

    python -m bench.heads --tokens 4096 16384 --heads 32+8 --dims 128 --rotary none halves --minutes 2
    python -m bench.heads --sweep --candidates ours

Candidates: ours; "norms" and "cudnn", a norm of ours or a graph of cuDNN's for each of q and k, where nothing is
rotated; "unsloth", the kernels of its Qwen3, for RMSNorms before a rotation of halves, not packed, with weights of
one head; the code of models, in eager mode and by torch.compile. The floor is a stream kernel for each direction with
the same large reads and writes: of q and k, and of v's part of a packed gradient. Times with a rotation have the same
floor: cos and sin are read beside it. Every candidate is compared with float64 first. One JSON line per candidate goes
to heads.jsonl. --sweep also times other plans than the planner's. Processes compile the next cases meanwhile. Exit code
1 if a result is wrong, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._functorch import config as functorch_config

import fusednorm
from fusednorm.heads import call as head_call
from fusednorm.heads import functional, launch
from fusednorm.heads import plan as head_plan
from fusednorm.heads.call import HeadCall
from fusednorm.heads.problem import Packing
from fusednorm.host import gpus, native, prepared
from fusednorm.planner.device import DeviceSpec
from fusednorm.planner.plan import ReferencePlan
from fusednorm.tools.console import print_table

from . import ahead
from .cases import DTYPES, BenchCase, BenchInputs, dtype_name, make_parser
from .forms import BLOCK, FACTOR, FLOOR, WAYS, Outputs, all_of, calls_of, errors_of, leaves_of, stream
from .peers import cudnn, unsloth
from .records import add_out_argument, describe_machine, lacks_gpu, results_path, save, time_fields
from .timing import time_interleaved

EPS = 1e-6
ROTARY = "none", "halves", "pairs", "quarter"  # the last: halves of the first quarter of the columns
NAMES = "ours", "norms", "cudnn", "unsloth", "inductor", "eager"


@dataclass(frozen=True)
class HeadCase:
    tokens: int
    heads: int
    kv_heads: int
    cols: int
    rotary: str
    packed: bool
    norm: str
    dtype: torch.dtype
    first: str = "norm"
    whole: bool = False  # a weight for all heads
    frozen: bool = False  # no gradients of weights and biases

    def __str__(self) -> str:
        kind = "packed " if self.packed else "whole " if self.whole else ""
        kind += ("frozen " if self.frozen else "") + self.norm
        rotary = self.rotary + (" first" if self.first == "rotary" else "")
        return f"{kind} {self.tokens} x {self.heads}+{self.kv_heads} x {self.cols}, rotary {rotary}"

    @property
    def fields(self) -> dict[str, Any]:
        return {of: each for of, each in vars(self).items() if of != "dtype"} | {"x_dtype": dtype_name(self.dtype)}

    @property
    def settings(self) -> dict[str, Any]:
        interleaved, norm_first = self.rotary == "pairs", self.first == "norm"
        return {"norm": self.norm, "eps": EPS, "rotary_interleaved": interleaved, "norm_first": norm_first}

    @property
    def turned(self) -> int:
        """The columns that are rotated."""
        return {"none": 0, "quarter": self.cols // 4}.get(self.rotary, self.cols)

    def inputs(self, device: str = "cuda") -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(0)

        def make(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=self.dtype).requires_grad_()

        both = {"q": make(1, self.tokens, self.heads, self.cols), "k": make(1, self.tokens, self.kv_heads, self.cols)}
        rows = {"qkv": make(1, self.tokens, (self.heads + 2 * self.kv_heads) * self.cols)} if self.packed else both
        return rows | {name: make(size).requires_grad_(not self.frozen) for name, size in self.parameters.items()}

    @property
    def parameters(self) -> dict[str, int]:
        """The sizes of weights and biases."""
        heads = {"q": self.heads, "k": self.kv_heads} if self.whole else {"q": 1, "k": 1}
        kinds = "weight", *(("bias",) if self.norm == "layer" else ())
        return {f"{of}_{kind}": heads[of] * self.cols for kind in kinds for of in "qk"}

    def tables(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """As transformers makes them: both columns of a pair have the same."""
        if self.rotary == "none":
            return None
        angles = torch.arange(self.tokens)[:, None] * 1e4 ** -(torch.arange(0, self.turned, 2) / self.turned)
        full = angles.repeat_interleave(2, -1) if self.rotary == "pairs" else torch.cat([angles, angles], -1)
        return tuple(table.to(like.device, like.dtype)[None] for table in (full.cos(), full.sin()))


def ours(case: HeadCase, given: dict[str, Tensor], tables) -> Outputs:
    settings = case.settings | {"rotary": tables}
    if case.packed:
        return fusednorm.qk_norm_packed(**given, heads=case.heads, kv_heads=case.kv_heads, **settings)
    return fusednorm.qk_norm(**given, **settings)


def separate(case: HeadCase, given: dict[str, Tensor]) -> tuple[Outputs, Outputs]:
    """(q, k) and what else is returned."""
    if not case.packed:
        return (given["q"], given["k"]), ()
    q, k, v = Packing(case.heads, case.kv_heads).split(given["qkv"])
    return (q, k), (v,)


def rows_of(case: HeadCase, x: Tensor) -> Tensor:
    return x.flatten(-2) if case.whole else x


def norms(case: HeadCase, given: dict[str, Tensor], _) -> Outputs:
    norm = fusednorm.affine_layer_norm if case.norm == "layer" else fusednorm.affine_rms_norm
    both, rest = separate(case, given)
    found = []
    for of, x in zip("qk", both, strict=True):
        found.append(norm(rows_of(case, x), given[f"{of}_weight"], given.get(f"{of}_bias"), EPS).view(x.shape))
    return *found, *rest


class NormOfCudnn(torch.autograd.Function):
    """Its graphs take tensors without gradient and copy rows that are not contiguous."""

    @staticmethod
    def forward(ctx, graphs, *tensors):
        ctx.save_for_backward(*tensors)
        forward, ctx.of_grad = graphs
        made = forward(_for_cudnn(tensors))
        ctx.ahead = replace(made, y=None)
        return made.y

    @staticmethod
    def backward(ctx, dy):
        made = ctx.of_grad(_for_cudnn(ctx.saved_tensors, dy), ctx.ahead)
        return None, made.dx, made.dweight, made.dbias


def _for_cudnn(tensors: Sequence[Tensor | None], dy: Tensor | None = None) -> BenchInputs:
    x, weight, bias = (each if each is None else each.detach() for each in tensors)
    return BenchInputs(x, x if dy is None else dy, weight, bias)


def by_cudnn() -> Callable[..., Outputs]:
    """Its graphs are built in the first call."""
    built = {}

    def run(case: HeadCase, given: dict[str, Tensor], _) -> Outputs:
        both, rest = separate(case, given)
        found = []
        for of, x in zip("qk", both, strict=True):
            tensors = rows_of(case, x), given[f"{of}_weight"], given.get(f"{of}_bias")
            if of not in built:
                built[of] = cudnn.graphs(BenchCase(case.norm, tuple(tensors[0].shape), eps=EPS), _for_cudnn(tensors))
            found.append(NormOfCudnn.apply(built[of], *tensors).view(x.shape))
        return *found, *rest

    return run


def by_unsloth(case: HeadCase, given: dict[str, Tensor], tables) -> Outputs:
    return unsloth.qk_norm_rope(**given, tables=tables, eps=EPS)


def written(case: HeadCase, given: dict[str, Tensor], tables) -> Outputs:
    """As models write it."""
    both, rest = separate(case, given)
    found = []
    for of, x in zip("qk", both, strict=True):
        h = turned(case, x, tables) if case.first == "rotary" else x
        wide = rows_of(case, h if h.dtype == torch.float64 else h.float())
        wide = wide - wide.mean(-1, keepdim=True) if case.norm == "layer" else wide
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * given[f"{of}_weight"].to(wide.dtype)
        y = y + given[f"{of}_bias"].to(wide.dtype) if case.norm == "layer" else y
        y = y.to(x.dtype).view(x.shape)
        found.append(turned(case, y, tables) if case.first == "norm" else y)
    return *found, *rest


def turned(case: HeadCase, x: Tensor, tables) -> Tensor:
    if tables is None:
        return x
    cos, sin = (table.unsqueeze(2) for table in tables)
    front, back = x[..., : case.turned], x[..., case.turned :]
    if case.rotary == "pairs":
        other = torch.stack([-front[..., 1::2], front[..., ::2]], -1).flatten(-2)
    else:
        a, b = front.chunk(2, -1)
        other = torch.cat([-b, a], -1)
    front = front * cos + other * sin
    return (torch.cat([front, back], -1) if case.rotary == "quarter" else front).to(x.dtype)


def candidates(case: HeadCase, names: list[str]) -> dict[str, Callable[..., Outputs]]:
    compiled = torch.compile(lambda given, tables: written(case, given, tables), fullgraph=True, dynamic=False)
    found = {"ours": ours, "inductor": lambda _, *given: compiled(*given), "eager": written}
    found |= {} if case.rotary != "none" else {"norms": norms, "cudnn": by_cudnn()}
    if (case.norm, case.first, case.rotary, case.packed, case.whole) == ("rms", "norm", "halves", False, False):
        found["unsloth"] = by_unsloth
    return {name: call for name, call in found.items() if name in names}


def floors(case: HeadCase, given: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """Stream kernels: q and k are read and written; backward they and their gradients are read, and written. A packed
    gradient has v's part, too, which is read and written."""
    like = next(iter(given.values())).detach()
    both = case.tokens * (case.heads + case.kv_heads) * case.cols
    rows = [torch.empty(both, dtype=case.dtype, device=like.device) for _ in range(3)]
    v = [torch.empty(case.tokens * case.kv_heads * case.cols, dtype=case.dtype, device=like.device) for _ in range(2)]

    def run(reads: list[Tensor], writes: list[Tensor]) -> None:
        count = reads[0].numel()
        stream[(triton.cdiv(count, BLOCK),)](tuple(reads), tuple(writes), count, block=BLOCK, num_warps=8)

    def forward() -> None:
        run(rows[:1], rows[1:2])

    def backward() -> None:
        run(rows[:2], rows[2:])
        if case.packed:
            run(v[:1], v[1:])

    return {"forward": forward, "backward": backward, "both": lambda: (forward(), backward())}


# Other plans: warps, bytes of a row tile in a thread, CTAs that an SM has registers for (None: as the planner thinks).
Shape = tuple[int, int, int | None]
SWEEP: dict[str, list[Shape]] = {
    "forward": [
        *((4, 32, ctas) for ctas in (6, 7, 8, 9, 10)),
        *((4, 16, None), (4, 64, None), (8, 32, None), (2, 32, None)),
    ],
    "backward": [
        *((8, 32, ctas) for ctas in (1, 2, 3)),
        *((4, 32, ctas) for ctas in (3, 4, 5)),
        *((8, 16, None), (8, 64, None), (16, 32, 1)),
    ],
}


@contextlib.contextmanager
def planned(direction: str, shape: Shape) -> Iterator[None]:
    """Plans of another shape inside, in one direction."""
    original = head_plan.choose

    def choose(problem, device):
        plan = original(problem, device)
        if problem.direction != direction or isinstance(plan, ReferencePlan):
            return plan
        return head_plan.shaped(problem, device, *shape)

    _forget()
    with mock.patch.object(head_plan, "choose", choose):
        yield
    _forget()


def _forget() -> None:
    prepared.forget()
    native.forget()


def swept(case: HeadCase, device: DeviceSpec) -> dict[str, tuple[str, Shape]]:
    """The other plans for a case, each once: direction and shape of each, by its name."""
    found = {}
    for call in calls_of_kernels(case):
        direction = call.problem.direction
        seen = {head_plan.choose(call.problem, device)}
        for shape in SWEEP[direction]:
            plan = head_plan.shaped(call.problem, device, *shape)
            if plan not in seen:
                named = zip(("warps", "bytes", "CTAs"), shape, strict=True)
                found[", ".join([direction, *(f"{of or 'any'} {name}" for name, of in named)])] = direction, shape
            seen.add(plan)
    return found


def calls_of_kernels(case: HeadCase) -> list[HeadCall]:
    """What the kernels of a forward and of a backward compute, without memory; nothing if norms of ours do it."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(1, case.tokens, *shape, dtype=case.dtype, device="meta")

    if case.whole and case.rotary == "none":
        return []
    packing = Packing(case.heads, case.kv_heads)
    packed = empty((case.heads + 2 * case.kv_heads) * case.cols) if case.packed else None
    q, k = empty(case.heads, case.cols), empty(case.kv_heads, case.cols)
    parameters = {name: empty(size)[0, 0] for name, size in case.parameters.items()}
    tables = None if case.rotary == "none" else (empty(case.turned), empty(case.turned))
    forward = functional.operands(q, k, **parameters, rotary=tables, **case.settings)
    forward, backward = head_call.both_ways(forward, packed, packing)
    if case.frozen:
        backward = backward._replace(output_mask=[*backward.output_mask[:-4], *[False] * 4])
    return [each for way in (forward, backward) for each in head_call.calls_of(way)]


def compile_jobs(case: HeadCase, device: DeviceSpec, options: argparse.Namespace) -> Iterator[tuple]:
    """What `ahead.in_turn` runs for a case. No build of ours depends on the number of tokens."""
    kind = replace(case, tokens=4096)
    hows = [None, *(swept(kind, device).values() if options.sweep else ())]
    yield from ((compile_plans, kind, device, how) for how in hows)
    for name in candidates(case, [name for name in options.candidates if name in ("inductor", "unsloth")]):
        yield from ((compile_candidate, case, name, gradients) for gradients in (False, True))


def compile_plans(case: HeadCase, device: DeviceSpec, how: tuple[str, Shape] | None) -> None:
    from fusednorm.tools import compilation

    for call in calls_of_kernels(case):
        plan = head_plan.choose(call.problem, device)
        if how and how[0] == call.problem.direction:
            plan = head_plan.shaped(call.problem, device, *how[1])
        for each in launch.launches_of(call, plan, device, 0)[0]:
            with contextlib.suppress(Exception):  # is told when the kernel should run
                compilation.compile_for(each, device.arch)


def compile_candidate(case: HeadCase, name: str, gradients: bool) -> None:
    given, call = case.inputs(), candidates(case, [name])[name]
    tables = case.tables(next(iter(given.values())))
    ahead.compile_call(lambda: call(case, given, tables), leaves_of(given), gradients)


def measure(case: HeadCase, options: argparse.Namespace) -> Iterator[dict]:
    """Records of the candidates; one that fails has its reason and no time."""
    torch.compiler.reset()
    given = case.inputs()
    tables = case.tables(next(iter(given.values())))
    wide = {name: each.detach().double().requires_grad_(each.requires_grad) for name, each in given.items()}
    outputs = tuple(each.detach() for each in written(case, given, tables))
    generator = torch.Generator("cuda").manual_seed(1)
    grads = tuple(torch.randn(o.shape, generator=generator, device="cuda", dtype=o.dtype) for o in outputs)
    exact = all_of(lambda each: written(case, each, tables and [t.double() for t in tables]), wide, grads)
    least = errors_of(all_of(lambda each: written(case, each, tables), given, grads), exact)
    del wide
    timed: dict[str, dict[str, Callable[[], object]]] = {way: {} for way in options.directions}
    failed, excess = {}, {}
    tried = {name: (call, contextlib.nullcontext) for name, call in candidates(case, options.candidates).items()}
    others = swept(case, gpus.spec_of(outputs[0].device)) if options.sweep else {}
    tried |= {name: (ours, lambda how=how: planned(*how)) for name, how in others.items()}
    for name, (call, plans) in tried.items():
        try:
            with plans():
                errors = errors_of(all_of(lambda each, call=call: call(case, each, tables), given, grads), exact)
        except Exception as error:  # of a peer or a plan: the others go on
            if name == "ours":
                raise
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        excess[name] = max(e / max(w, torch.finfo(case.dtype).eps / 4) for e, w in zip(errors, least, strict=True))
        for way, run in calls_of(lambda call=call: call(case, given, tables), leaves_of(given), grads).items():
            if way in timed and (name not in others or way == others[name][0]):
                timed[way][name] = _inside(plans, run)
    del exact
    floor = floors(case, given)
    for way, calls in timed.items():
        times = time_interleaved({FLOOR: floor[way], **calls}, options.rounds)
        for name, each in times.items():
            of = {"direction": way, "candidate": name, "error_over_written": round(excess.get(name, 0.0), 3)}
            yield case.fields | of | time_fields(each) | {"times_floor": round(each.median / times[FLOOR].median, 4)}
        for name, reason in failed.items():
            yield case.fields | {"direction": way, "candidate": name, "median_us": None, "reason": reason}


def _inside(context: Callable[[], Any], run: Callable[[], object]) -> Callable[[], object]:
    def call() -> object:
        with context():
            return run()

    return call


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("heads", __doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384], help="default: 4096 16384")
    parser.add_argument("--heads", nargs="+", default=["32+8"], metavar="Q+K", help="of q and of k (default: 32+8)")
    parser.add_argument("--dims", nargs="+", type=int, default=[128], help="columns of a head (default: 128)")
    parser.add_argument("--rotary", nargs="+", choices=ROTARY, default=["none", "halves"], help="default: none halves")
    parser.add_argument("--first", nargs="+", choices=("norm", "rotary"), default=["norm"], help="default: norm")
    parser.add_argument("--whole", action="store_true", help="a weight for all heads; not packed")
    parser.add_argument("--packed", nargs="+", choices=("no", "yes"), default=["no"], help="default: no")
    parser.add_argument("--frozen", nargs="+", choices=("no", "yes"), default=["no"], help="parameters (default: no)")
    parser.add_argument("--norms", nargs="+", choices=("rms", "layer"), default=["rms"], help="default: rms")
    parser.add_argument("--candidates", nargs="+", choices=NAMES, default=NAMES, help="default: all")
    parser.add_argument("--directions", nargs="+", choices=WAYS, default=WAYS, help="default: all three")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of all tensors")
    parser.add_argument("--sweep", action="store_true", help="also times other plans")
    parser.add_argument("--minutes", type=float, default=60, help="no case is begun after this time (default: 60)")
    parser.add_argument("--rounds", type=int, default=40, help="timed replays of each (default: 40)")
    add_out_argument(parser)
    options = parser.parse_args(arguments)
    if options.whole and "yes" in options.packed:
        parser.error("--whole must come without --packed yes, because qk_norm_packed takes weights of one head")
    return options


def make_cases(options: argparse.Namespace) -> Iterator[HeadCase]:
    of = options.norms, options.dims, options.heads, options.packed, options.frozen, options.rotary, options.first
    for norm, cols, heads, packed, frozen, rotary, first, tokens in itertools.product(*of, options.tokens):
        kind = packed == "yes", norm, DTYPES[options.dtype], first, options.whole, frozen == "yes"
        if rotary != "none" or first == "norm":
            yield HeadCase(tokens, *map(int, heads.split("+")), cols, rotary, *kind)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if lacks_gpu("heads"):
        return 2
    machine, wrong, rows, end = describe_machine(), 0, [], time.monotonic() + 60 * options.minutes
    path = results_path(options.out, machine, "heads")
    cases, device = list(make_cases(options)), gpus.spec_of(torch.device("cuda", torch.cuda.current_device()))
    for at, case in enumerate(ahead.in_turn(cases, lambda case: compile_jobs(case, device, options))):
        if time.monotonic() > end:
            print(f"{len(cases) - at} of {len(cases)} cases are left, because the time is over", flush=True)
            break
        with functorch_config.patch(donated_buffer=False):  # a backward is timed many times
            records = [machine | each for each in measure(case, options)]
        save(records, path)
        wrong += sum(each["candidate"] == "ours" and each["error_over_written"] > FACTOR for each in records)
        for way in options.directions:
            of = {each["candidate"]: each for each in records if each["direction"] == way and each["median_us"]}
            found = sorted((each["times_floor"], name) for name, each in of.items() if name not in (FLOOR, "ours"))
            best = ", ".join(f"{name} {ratio:.3f}" for ratio, name in found[:4])
            rows.append([str(case), way, f"{of[FLOOR]['median_us']:.1f}", f"{of['ours']['times_floor']:.3f}", best])
            print(*rows[-1], flush=True)
    print_table("Heads, times over the floor", ["case", "direction", "floor us", "ours", "others"], rows)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
