"""Simulates the whole product of schedules, norms, dtypes, widths and devices, and random problems.

    make simulate        or: python -m tests.simulator.everything [--releases 3.9.0] [--random 10000] [--part 1/4]

The oldest and the newest Triton release compile the whole product. The releases share the random problems in turn. A
fifth of these have forms, or are of heads. Each problem runs in one order of events, with its number as the seed. A run
that was stopped continues where it stopped; a change of the source starts again from nothing. Exit code 1 if any
problem fails.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import versions
from cases import BF16, FP16, FP32, LAYOUTS, MIXED_DTYPES, SAME_DTYPES
from column_sums import Sums
from devices import named
from gated import FORMS as GATED
from head_norms import HeadCase, calls_of
from modulations import ALL as OF_ALL
from modulations import FORWARDS, SAMPLE, TOKEN, Modulated, forward_of
from planning import make_problem
from steps import FORMS, Steps
from tables import Table
from tqdm import tqdm
from wide_sums import WideSum

from fusednorm.dtypes import DTYPE_NAMES
from fusednorm.heads import plan as head_plan
from fusednorm.heads.plan import HeadPlan
from fusednorm.planner.candidates import candidates, cluster_sizes, cut
from fusednorm.planner.device import DeviceSpec
from fusednorm.planner.legality import broken_rule
from fusednorm.planner.norm_problem import NormProblem
from fusednorm.planner.plan import VARIANTS, PipelinedPlan, ReferencePlan

from .problems import ALL, DX_ONLY, NO_DX, FormProblem, HeadProblem, Problem, SumProblem

SOURCES = ("kernels/*.py", "fusednorm/*.py", "tests/simulator/*.py")
WORK = "from simulator import everything; raise SystemExit(everything.work({!r}, {!r}))"
WIDTHS = (64, 200, 512, 1000, 1032, 1987, 5120, 12288)
NAMES = DTYPE_NAMES | {None: "none"}
WAYS = "forward", "backward"
DEVICES = "A100", "H200", "B200", "RTX 5090"
HEAD_VECTORS = 2, 4, 6, 8, 10, 12, 16, 16, 32  # of 8 elements
OF_TABLES = "", "_of_sum", "_of_gated_sum"
MOST_ELEMENTS, MOST_COLUMNS_WITH_SUMS = 40_000, 2048


AnyProblem = Problem | FormProblem | SumProblem | HeadProblem


class Job(NamedTuple):
    number: int
    problem: AnyProblem

    def __str__(self) -> str:
        return f"{self.number} {self.problem}"

    def complaints(self) -> list[str]:
        try:
            outputs, _ = self.problem.simulate(seed=self.number, resident=(None, 1, 2, 5)[self.number % 4])
            self.problem.check(outputs)
        except Exception as error:
            return [f"{type(error).__name__}: " + " | ".join(str(error).splitlines()[:3])]
        return []


def is_run(problem: Problem) -> bool:
    """Whether the problem's variant can run it, and at least one output is wanted."""
    if problem.direction == "backward" and problem.mix[1] is None and not problem.mask[0]:
        return False
    x, parameter, grad = (NAMES[each] for each in problem.mix)
    wanted = make_problem(problem.norm, problem.cols, x, parameter, problem.direction, grad)
    device = named(problem.device, problem.sms)
    return bool(candidates(problem.variant, wanted, device)) or problem.variant == "reference"


def sized(draw: random.Random, direction: str, variant: str, norm: str, cols: int, **more) -> Problem:
    """A problem with a drawn number of rows (one, a few, or enough to refill a ring), and SMs for its clusters."""
    rows = max(1, min(draw.choice((1, draw.randint(2, 9), draw.randint(10, 130))), MOST_ELEMENTS // cols))
    wanted = DX_ONLY if cols > MOST_COLUMNS_WITH_SUMS else draw.choice((ALL, DX_ONLY, ALL, NO_DX))
    more.setdefault("mask", ALL if direction == "forward" else wanted)
    return Problem(direction, variant, norm, rows, cols, sms=max(draw.randint(1, 3), cols // 1536), **more)


@functools.cache
def product(first: int, step: int) -> list[Job]:
    """All variants, directions, norms, mixes of dtypes, widths and devices, but only one mix for sm_120. The number of
    rows and the wanted gradients are drawn at random. Only every step-th problem from the first on is kept."""
    axes = (WAYS, VARIANTS[:-1], ("layer", "rms"), WIDTHS)
    most = itertools.product(SAME_DTYPES + MIXED_DTYPES, *axes, ("H200", "B200"))
    whole = enumerate(itertools.chain(most, itertools.product(((BF16, BF16, BF16),), *axes, ("RTX 5090",))))
    found = []
    for number, (mix, *what, device) in itertools.islice(whole, first - 1, None, step):
        job = Job(number, sized(random.Random(number), *what, mix=mix, device=device))
        found += [job] if is_run(job.problem) else []
    return found


def formed(draw: random.Random) -> FormProblem:
    """A norm with a form, of rows that are enough to tell roundings by, for a variant that has its kernels."""
    while True:
        norm, rows, cols = draw.choice(("layer", "rms")), draw.randint(8, 60), 8 * draw.randint(8, 160)
        dtype, other, direction = draw.choice((BF16, FP16)), draw.choice((BF16, FP32)), draw.choice(WAYS)
        shift, gate, added = draw.choice((None, SAMPLE, OF_ALL)), draw.choice((None, SAMPLE, TOKEN)), (None, other)
        case = draw.choice((
            Steps(norm, draw.choice(FORMS), rows, cols, dtype, draw.choice((None, FP32)), other, other),
            WideSum(norm, rows, cols, dtype, has_residual_grad=draw.random() < 0.5),
            Steps(norm, draw.choice(GATED), rows, cols, dtype, FP32, other),
            Modulated(norm, 2, rows // 2, cols, SAMPLE, shift, gate, dtype, other, draw.choice(added)),
            forward_of(norm, draw.choice(FORWARDS), 2, rows // 2, cols, shift=shift, gate=draw.choice((SAMPLE, OF_ALL)),
                       added=other, dtype=dtype, modulation=other, parameters=draw.choice(added)),
            Table(norm, draw.choice(OF_TABLES), rows // 3, cols, draw.choice((1, 3, 9)), dtype, other,
                  draw.choice((torch.int32, torch.int64)), draw.choice(added), shift is not None,
                  direction == "backward", draw.random() < 0.8),
        ))  # fmt: skip
        if isinstance(case, WideSum) or (isinstance(case, Modulated) and not case.forward):
            direction = "backward"
        elif isinstance(case, Modulated):
            direction = "forward"
        elif isinstance(case, Steps) and not case.form.activates:
            direction = "forward"
        device, sms = draw.choice(DEVICES), draw.randint(2, 5)
        call = FormProblem(case, direction, ReferencePlan(""), device, sms).call
        variant, asked = draw.choice(VARIANTS[:-1]), (call.problem, named(device, sms))
        plans = [plan for plan in candidates(variant, *asked) if 2 * plan.cluster <= sms or plan.cluster == 1]
        plans += [each for each in [ring(draw, *asked)] if variant == "pipelined" and each]
        if plans:
            return FormProblem(case, direction, draw.choice(plans), device, sms)


def ring(draw: random.Random, problem: NormProblem, device: DeviceSpec) -> PipelinedPlan | None:
    """One that the planner may not have for such a problem."""
    if broken_rule("pipelined", problem, 1, device) or not (problem.writes_rows or problem.by_sample):
        return None
    shape = {"num_stages": draw.randint(2, 4), "num_warps": draw.choice((2, 4, 8)), "ctas_per_sm": 1}
    uncut = PipelinedPlan(
        draw.choice((1, 2, 4)), 0, 0, **shape, max_registers=0, weight_in_smem=draw.random() < 0.5,
        cluster=draw.choice((1, 2)), added_in_ring=draw.random() < 0.5,
    )  # fmt: skip
    return cut(uncut, problem, device, good=False) if uncut.cluster in cluster_sizes(problem, device) else None



def of_heads(draw: random.Random) -> HeadProblem:
    """Norms of heads that kernels take."""
    while True:
        norm, cols, kv_heads = draw.choice(("layer", "rms")), 8 * draw.choice(HEAD_VECTORS), draw.randint(1, 3)
        dtype, rotary = draw.choice((BF16, BF16, FP16, FP32)), draw.choice((0, cols, cols, cols // 2, 8, cols - 8))
        tokens, heads = draw.randint(1, max(2, MOST_ELEMENTS // 8 // cols)), kv_heads * draw.randint(1, 3)
        flags = {name: draw.random() < 0.4 for name in ("interleaved", "norm_first", "half_table", "heads_first")}
        has_weights, whole = draw.random() < 0.8, draw.random() < 0.1
        case = HeadCase(
            cols, heads, kv_heads, draw.randint(1, 2), tokens, dtype, draw.choice((None, FP32)), norm,
            weights=has_weights, rotary=rotary, **flags, whole=whole and has_weights and rotary > 0,
            weight_offset=draw.choice((0.0, 1.0)), table_dims=draw.choice(("S", "BS", "BSH1")),
            table_dtype=draw.choice((dtype, FP32)),
        )  # fmt: skip
        device = draw.choice(DEVICES)
        plans = [each and head_plan.choose(each.problem, named(device)) for each in calls_of(case)]
        if all(isinstance(each, HeadPlan) for each in plans):
            return HeadProblem(case, device)


def drawn(number: int) -> AnyProblem:
    """A random problem, which its number determines."""
    draw = random.Random(number)
    if draw.random() < 0.2:
        return draw.choice((formed, formed, of_heads))(draw)
    device = draw.choice(("H200", "B200"))
    if draw.random() < 0.1:
        dtype, count = draw.choice((BF16, FP32)), draw.choice((1, 2, 5, 9))
        sums = Sums(draw.randint(1, 300), 8 * draw.randint(1, 60), count, dtype, draw.random() < 0.5)
        return SumProblem(sums, draw.choice(("ring", "portable", None)), device, draw.randint(1, 4))
    while True:
        direction, cols = draw.choice(WAYS), 4 * draw.choice((1, 2, 8)) * draw.randint(1, 300)
        more = {"mix": draw.choice(SAME_DTYPES + MIXED_DTYPES), "device": device}
        if cols <= MOST_COLUMNS_WITH_SUMS and draw.random() < 0.3:
            more["layout"] = draw.choice([name for name in LAYOUTS if "element" not in name])
        if direction == "backward" and draw.random() < 0.2:
            more |= {"residual": draw.choice((BF16, FP32)), "mask": draw.choice((DX_ONLY, (True, True, False)))}
        problem = sized(draw, direction, draw.choice(VARIANTS[:-1]), draw.choice(("layer", "rms")), cols, **more)
        if (not problem.layout or problem.rows % LAYOUTS[problem.layout][0] == 0) and is_run(problem):
            return problem


def jobs_of(options: argparse.Namespace, release: str) -> list[Job]:
    releases, (first, step) = versions.RELEASES, options.part
    turns = range(releases.index(release), options.random, len(releases))[first - 1 :: step]
    whole = product(first, step) if release in (releases[0], releases[-1]) else []
    return [*whole, *(Job(number, drawn(number)) for number in turns)]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", nargs="+", default=versions.RELEASES, choices=versions.RELEASES)
    parser.add_argument("--random", type=int, default=10_000, help="how many random problems")
    parser.add_argument("--part", type=versions.part_of, default=(1, 1), help="such as 3/20: every 20th, from the 3rd")
    parser.add_argument("--workers", type=int, help="how many processes, one for each processor by default")
    parser.add_argument("--folder", type=Path, default=versions.ROOT / ".versions")
    options = parser.parse_args(arguments)
    options.given = arguments
    return options


def work(release: str, workers: int | None) -> int:
    """The work of the process that versions.run_release starts with this Triton release."""
    return versions.work(lambda given: jobs_of(parse(given), release), workers)


def main() -> int:
    options = parse(sys.argv[1:])
    options.folder = options.folder.resolve()
    results = versions.Results(options.folder / f"simulated-{versions.source(SOURCES)}.jsonl")
    jobs = {release: jobs_of(options, release) for release in options.releases}
    with tqdm(total=sum(map(len, jobs.values())), unit="problem", smoothing=0.02) as progress:
        for release in options.releases:
            progress.set_description(f"Triton {release}")
            code = WORK.format(release, options.workers)
            versions.run_release(release, options, jobs[release], results, progress, code)
    said = [results.found[release, str(job)] for release, each in jobs.items() for job in each]
    print(f"{sum(map(bool, said))} of {len(said)} problems failed; {results.path}")
    return any(said)


if __name__ == "__main__":
    sys.exit(main())
