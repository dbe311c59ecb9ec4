"""Compares random models, traced as torch.compile traces them under enable_inductor, with eager mode: a fuzzer.

    python tests/integrations/random_graphs.py --cases 1000      # 1000 models, and how often each op was taken
    python tests/integrations/random_graphs.py --only 1.17       # one model, as a failure prints it

Results and gradients must be as near to float64 as those of eager mode. A failure is printed with as few pieces as show
it. Models that eager mode or stock's graphs do not compute are left out.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from typing import NamedTuple

import torch
from random_models import DTYPES, Case, drawn
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from tracing import as_cuda, trace

CASTS = {"float", "bfloat16", "to", "type", "type_as"}
FACTOR, FLOOR = 1.5, {"FP64": 2**-15, "FP32": 2**-15, "BF16": 2**-5}  # of eager mode's error, and beside it
UNFIT, WRONG, RIGHT = "unfit", "wrong", "right"
NORMS_ALONE = {f"fusednorm.{norm}_norm_{way}" for norm in ("rms", "layer")
               for way in ("fwd", "bwd", "fwd_affine", "bwd_residual")}  # fmt: skip


class Wide(TorchFunctionMode):
    """Casts to float dtypes give float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in CASTS:
            return args[0].double()
        return function(*args, **(kwargs or {}))


def results(model, leaves: list[Tensor], seed: int) -> list[Tensor]:
    """The outputs, and all gradients; zeros where there is none. Some outputs are not trained."""
    outputs = model(*leaves)
    torch.manual_seed(seed)
    dys = [(torch.randint(-8, 9, each.shape) / 8).to(each.dtype) for each in outputs]  # exact in each dtype
    trained = [(y, dy) for at, (y, dy) in enumerate(zip(outputs, dys, strict=True))
               if y.requires_grad and (seed >> at) % 4]  # fmt: skip
    ys, dys = zip(*trained, strict=True) if trained else ((), ())
    wanted = [each for each in leaves if each.requires_grad]
    grads = torch.autograd.grad(ys, wanted, dys, allow_unused=True)
    grads = [torch.zeros_like(of) if each is None else each for each, of in zip(grads, wanted, strict=True)]
    return [*(each.detach() for each in outputs), *grads]


def error(got: Tensor, exact: Tensor) -> float:
    """Relative to what is exact, and not to a gradient that is zero but for rounding."""
    exact = exact.double()
    return float((got.double() - exact).norm() / exact.norm().clamp_min(0.1 * exact.numel() ** 0.5 + 1e-30))


class Outcome(NamedTuple):
    kind: str
    why: str = ""
    taken: Counter = Counter()  # the ops of ours in the graphs


def outcome(case: Case, stock: bool = False) -> Outcome:
    """stock: of Inductor's own graphs."""
    torch._dynamo.reset()
    namespace = {"torch": torch, "F": torch.nn.functional} | DTYPES | case.sizes[0]
    exec(compile(case.text, "<a random model>", "exec"), namespace)
    plain = model = namespace["model"]
    if case.is_checkpointed:
        model = lambda *given: checkpoint(plain, *given, use_reentrant=False)  # noqa: E731
    is_whole, is_dynamic = "graph_break" not in case.text, len(case.sizes) > 1 or None
    traced = trace(model, stock, case.joins, fullgraph=is_whole, dynamic=is_dynamic)
    for sizes in case.sizes:
        torch.manual_seed(case.seed)
        made = {name: each.made(sizes) for name, each in case.leaves.items()}

        def given(dtype=None, made=made):
            return [each.detach().to(dtype or each.dtype).requires_grad_(case.leaves[name].has_gradient)
                    for name, each in made.items()]  # fmt: skip

        try:
            want = results(model, given(), case.seed)
            with Wide():
                exact = results(plain, given(torch.float64), case.seed)
        except Exception as raised:  # noqa: BLE001
            return Outcome(UNFIT, f"in eager mode: {raised}")
        try:
            got = results(traced, given(), case.seed)
        except Exception as raised:  # noqa: BLE001
            if "view size is not compatible" in str(raised):  # to a fake tensor, dims of one element have other strides
                return Outcome(UNFIT, f"in a graph that is interpreted: {raised}")
            return wrong(case, stock, f"{type(raised).__name__}: {str(raised)[:600]}")
        gradients = [f"gradient of {name}" for name, each in case.leaves.items() if each.has_gradient]
        names = [f"output {at}" for at in range(len(got) - len(gradients))] + gradients
        floor = max(FLOOR[dtype] for dtype in DTYPES if dtype in str(case))
        for name, a, b, c in zip(names, got, want, exact, strict=True):
            ours, theirs = error(a, c), error(b, c)
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                return wrong(case, stock, f"{name} is {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}")
            least = 2**-10 if c.norm() < 1e-9 else floor  # zero but for rounding: of one key to attend to
            if not ours <= FACTOR * theirs + least and b.isfinite().all():
                return wrong(case, stock, f"{name} has an error of {ours:.1e}, and {theirs:.1e} in eager mode")
    graphs = [*traced.forwards, *traced.backwards]
    targets = (str(node.target) for graph in graphs for node in graph.graph.nodes)
    return Outcome(RIGHT, "", Counter(each.removesuffix(".default") for each in targets if "fusednorm." in each))


def wrong(case: Case, stock: bool, why: str) -> Outcome:
    of_stock = Outcome(RIGHT) if stock else outcome(case, stock=True)
    return Outcome(WRONG, why) if of_stock.kind == RIGHT else Outcome(UNFIT, f"in stock's graphs: {of_stock.why}")


def shrunk(case: Case) -> Case:
    """With as few pieces as show what is wrong."""
    for at in range(len(case.pieces)):
        smaller = case.without(at)
        case = smaller if outcome(smaller).kind == WRONG else case
    return case


def is_joined(found: Outcome) -> bool:
    return not NORMS_ALONE.issuperset(found.taken)


def fuzz(seed: int, numbers: range, shows: bool = False) -> tuple[Counter, Counter]:
    """(how many cases there are of each kind, how often each op was taken). Prints what is wrong."""
    kinds, taken = Counter(), Counter()
    with as_cuda():
        for number in numbers:
            found = outcome(case := drawn(seed, number))
            kinds += Counter([found.kind, *["joined"] * is_joined(found)])
            taken += found.taken
            if found.kind == WRONG or shows:
                print(f"--- {seed}.{number}: {found.kind} {found.why}")
                print(shrunk(case) if found.kind == WRONG else case, flush=True)
    return kinds, taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="how many to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one case, as SEED.NUMBER")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    seed, first = map(int, options.only.split(".")) if options.only else (options.seed, 0)
    kinds, taken = fuzz(seed, range(first, first + (1 if options.only else options.cases)), bool(options.only))
    for what, count in [*kinds.items(), *sorted(taken.items())]:
        print(f"{count:6} {what}")
    return int(kinds[WRONG] > 0)


if __name__ == "__main__":
    sys.exit(main())
