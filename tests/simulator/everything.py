"""The whole product of schedules, norms, dtypes, widths and devices, and random problems, on every Triton release.

    make simulate        or: python -m tests.simulator.everything [--releases 3.9.0] [--random 10000] [--part 1/4]

Each is tried in one order of events, drawn by its number. A run that was stopped goes on where it was; other source
begins anew. Exit code 1 if any fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import versions
from cases import BF16, FP32, LAYOUTS, MIXED_DTYPES, SAME_DTYPES
from columns import Sums
from compiling import worker_processes
from devices import named
from planning import make_problem
from tqdm import tqdm

from fusednorm.explanation import DTYPES
from fusednorm.heuristics import outcome
from fusednorm.plan import VARIANTS

from .problems import ALL, Problem, SumProblem

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("kernels/*.py", "fusednorm/*.py", "tests/simulator/*.py")
WIDTHS = (64, 200, 512, 1000, 1032, 1987, 5120, 12288)
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {None: "none"}
DX_ONLY, NO_DX, NO_DB = (True, False, False), (False, True, True), (True, True, False)
MOST_ELEMENTS, MOST_COLUMNS_WITH_SUMS = 40_000, 2048


def is_run(problem: Problem) -> bool:
    """Whether its variant is what runs, and anything is wanted of it."""
    if problem.direction == "backward" and problem.mix[1] is None and not problem.mask[0]:
        return False
    x, parameter, grad = (NAMES[each] for each in problem.mix)
    wanted = make_problem(problem.norm, problem.cols, x, parameter, problem.direction, grad)
    return outcome(problem.variant, wanted, problem.rows, named(problem.device, problem.sms)).plan is not None


def sized(draw: random.Random, direction: str, variant: str, norm: str, cols: int, **more) -> Problem:
    """With one row, some, or enough for a ring to go round; and SMs for its clusters."""
    rows = max(1, min(draw.choice((1, draw.randint(2, 9), draw.randint(10, 130))), MOST_ELEMENTS // cols))
    wanted = DX_ONLY if cols > MOST_COLUMNS_WITH_SUMS else draw.choice((ALL, DX_ONLY, ALL, NO_DX))
    more.setdefault("mask", ALL if direction == "forward" else wanted)
    return Problem(direction, variant, norm, rows, cols, sms=max(draw.randint(1, 3), cols // 1536), **more)


def product() -> list:
    """All variants, directions, norms, mixes of dtypes, widths and devices; rows and gradients drawn."""
    axes = (("forward", "backward"), VARIANTS[:-1], ("layer", "rms"), WIDTHS, ("H200", "B200"))
    found = []
    for turn, (mix, each) in enumerate(itertools.product(SAME_DTYPES + MIXED_DTYPES, itertools.product(*axes))):
        *what, device = each
        problem = sized(random.Random(turn), *what, mix=mix, device=device)
        found += [problem] if is_run(problem) else []
    return found


def drawn(number: int) -> Problem | SumProblem:
    """A random problem, by its number."""
    draw = random.Random(number)
    device = draw.choice(("H200", "B200"))
    if draw.random() < 0.1:
        dtype, count = draw.choice((BF16, FP32)), draw.choice((1, 2, 5, 9))
        sums = Sums(draw.randint(1, 300), 8 * draw.randint(1, 60), count, dtype, draw.random() < 0.5)
        return SumProblem(sums, draw.choice(("ring", "portable", None)), device, draw.randint(1, 4))
    while True:
        direction, cols = draw.choice(("forward", "backward")), 4 * draw.choice((1, 2, 8)) * draw.randint(1, 300)
        more = {"mix": draw.choice(SAME_DTYPES + MIXED_DTYPES), "device": device}
        if cols <= MOST_COLUMNS_WITH_SUMS and draw.random() < 0.3:
            more["layout"] = draw.choice([name for name in LAYOUTS if "element" not in name])
        if direction == "backward" and draw.random() < 0.2:
            more |= {"residual": draw.choice((BF16, FP32)), "mask": draw.choice((DX_ONLY, NO_DB))}
        problem = sized(draw, direction, draw.choice(VARIANTS[:-1]), draw.choice(("layer", "rms")), cols, **more)
        if problem.layout and problem.rows % LAYOUTS[problem.layout][0]:
            continue
        if is_run(problem):
            return problem


def jobs(options: argparse.Namespace) -> list:
    first, step = options.part
    return [*product(), *(drawn(number) for number in range(options.random))][first - 1 :: step]


def answer(number: int, problem) -> str:
    """What is wrong, in one line; nothing if it is right."""
    try:
        outputs, _ = problem.simulate(seed=number, resident=(None, 1, 2, 5)[number % 4])
        problem.check(outputs)
    except Exception as error:
        return f"{type(error).__name__}: " + " | ".join(str(error).splitlines()[:3])
    return ""


def work() -> None:
    """Numbers of jobs from stdin, answers to stdout, in a Python that has the release."""
    from concurrent.futures import as_completed

    options = parse(json.loads(sys.stdin.readline()))
    problems = jobs(options)
    with worker_processes() as pool:
        asked = {pool.submit(answer, n, problems[n]): n for n in json.loads(sys.stdin.readline())}
        for each in as_completed(asked):
            print(json.dumps([asked[each], each.result()]), flush=True)


def run_release(release: str, options: argparse.Namespace, problems: list, done: dict, path: Path) -> None:
    wanted = [n for n, each in enumerate(problems) if f"{release} {n} {each}" not in done]
    python = versions.environment(release, options.folder)
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    command = [python, "-c", "from simulator import everything; everything.work()"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables, text=True) as worker,
        tqdm(total=len(problems), initial=len(problems) - len(wanted), desc=f"Triton {release}") as progress,
        path.open("a") as file,
    ):
        worker.stdin.write(f"{json.dumps(options.given)}\n{json.dumps(wanted)}\n")
        worker.stdin.close()
        for line in worker.stdout:
            number, said = json.loads(line)
            name = f"{release} {number} {problems[number]}"
            done[name] = said
            file.write(json.dumps([name, said]) + "\n")
            file.flush()
            if said:
                progress.write(f"Triton {name}: {said}")
            progress.update()
    if worker.returncode:
        raise SystemExit(f"the process of Triton {release} ended with code {worker.returncode}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", nargs="+", default=list(versions.RELEASES))
    parser.add_argument("--random", type=int, default=10_000, help="how many random problems")
    parser.add_argument("--part", type=versions.part_of, default=(1, 1), help="such as 3/20: every 20th, from the 3rd")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions")
    options = parser.parse_args(arguments)
    options.given = arguments
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"simulated-{versions.source(SOURCES)}-{options.part[0]}-of-{options.part[1]}.jsonl"
    done = dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}
    problems = jobs(options)
    for release in options.releases:
        run_release(release, options, problems, done, path)
    names = [f"{release} {n} {each}" for release in options.releases for n, each in enumerate(problems)]
    failed = sum(bool(done[name]) for name in names)
    print(f"{failed} of {len(names)} problems failed; {path}")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
