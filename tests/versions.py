"""Compiles the kernels with every supported Triton release, for every architecture, without a GPU.

    python tests/versions.py                               # the list of problems below, all releases: within an hour
    python tests/versions.py --releases 3.9.0 --arch 90 120
    python tests/versions.py --thorough --part 3/20        # the thousands of tests/budgets.py, in parts
    python tests/versions.py --table                       # earlier results of the same source

The kernels that the planner chooses for a problem, for few rows and for many, must compile without a spill, within the
registers of their plan, and within the predicted shared memory. Rings must take at most 1 KiB less than that; those
in clusters may take still less from Triton 3.8 on.
Each release has a virtual environment of its own in --folder. It holds Triton alone, and takes everything else from
this Python. A run that was stopped continues where it stopped; a change of the source starts again from nothing.
Exit code 1 if the compiler and a plan differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from budgets import MIXES, ODD_MIXES, WIDTHS, complaints, problems
from column_sums import Sums
from column_sums import complaints as column_complaints
from compiling import worker_processes
from environments import python_with
from head_norms import OF_MODELS, WHOLE_OF_MODELS, HeadCase
from head_norms import complaints as head_complaints
from planning import EVERY_ARCHITECTURE, make_again, make_gated, make_gated_sum, make_modulated, make_problem, make_sum
from tables import Table

from fusednorm.planner import choice
from fusednorm.planner.norm_problem import NormProblem
from fusednorm.planner.plan import ReferencePlan

ROOT = Path(__file__).parent.parent
RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
SOURCES = (
    "fusednorm/planner/data/*.json*",
    *("kernels/*.py", "fusednorm/dtypes.py", "fusednorm/forms.py"),
    *(f"fusednorm/{room}/*.py" for room in ("planner", "host", "columns", "heads", "problem")),
    *("tests/budgets.py", "tests/column_sums.py", "tests/head_norms.py", "tests/compiling.py", "tests/planning.py"),
    "tests/tables.py",
)


WORK = "import versions; raise SystemExit(versions.work(lambda given: versions.jobs_of(versions.parse(given))))"


class Job(NamedTuple):
    """A problem of a norm, a column sum, or a norm of heads, on one architecture."""

    arch: int
    problem: NormProblem | Sums | HeadCase

    def __str__(self) -> str:
        return f"sm_{self.arch} {self.problem}"

    def complaints(self) -> list[str]:
        """Where the builds of the installed Triton differ from their plans; in a process that does not interpret."""
        if isinstance(self.problem, Sums):
            return column_complaints(self.problem, self.arch)
        if isinstance(self.problem, HeadCase):
            return head_complaints(self.problem, self.arch)
        device = EVERY_ARCHITECTURE[self.arch]
        plans = dict.fromkeys(plan for _, plan in choice.choices(self.problem, device))
        return [
            f"{text}; {plan}"
            for plan in plans
            if not isinstance(plan, ReferencePlan)
            for text in complaints(self.problem, plan, device)
        ]


# --- The problems ---

SOME_WIDTHS = (
    *(1, 31, 77, 128, 256, 392, 576, 768, 1000, 1024, 1280, 1600, 1987, 2048, 2560, 3072, 4096, 4104, 5120, 6656),
    *(8192, 11008, 12288, 16384, 20480, 36864, 65536, 98304, 131104, 262144),
)  # fmt: skip
BF16_AND_OTHERS = [mix for other in (*MIXES[1:], *ODD_MIXES) for mix in (MIXES[0], other)]
SMALL = 12  # the number of problems that --small leaves, for CI


def some_problems() -> Iterator[NormProblem | Sums | HeadCase]:
    """Every width in both norms and directions: half of the problems in bfloat16, half in the other mixes of dtypes in
    turn. Then forwards with a residual, norms with a gate, modulated norms, backwards with only some gradients
    wanted or with a residual gradient, column sums, norms of heads, and norms with tables."""
    for turn, cols in enumerate(SOME_WIDTHS):
        for at, (norm, direction) in enumerate((n, d) for n in ("layer", "rms") for d in ("backward", "forward")):
            dtype, weight, grad = BF16_AND_OTHERS[(turn + at * 3) % len(BF16_AND_OTHERS)]
            yield make_problem(norm, cols, dtype, weight, direction, grad)
    for turn, cols in enumerate((200, 1032, 1987, 4096, 8192, 16384, 65536)):
        norm, other = ("layer", "rms")[:: 1 - turn % 2 * 2]
        yield make_sum(norm, cols)
        yield make_sum(other, cols, residual="fp32", weight_offset=1.0, rounds_sum=False)
        yield make_sum(norm, cols, finish="add")
        yield make_again(norm, cols, weight=("", "fp32")[turn % 3 == 1], residual=("", "fp32")[turn % 3 == 2])
    for turn, cols in enumerate((128, 1000, 1024, 8192)):
        norm, direction = ("rms", "layer")[turn == 1], ("backward", "forward")[turn == 2]
        yield make_gated(norm, cols, gate=("bf16", "fp32")[turn == 3], direction=direction)
        yield make_gated(norm, cols, after=False)
    for turn, cols in enumerate((1152, 3072, 5120)):
        norm, modulation = (("layer", "fp32"), ("rms", "bf16"))[turn == 1]
        yield make_modulated(norm, cols, modulation=modulation)
        weight = ("none", "bf16", "fp32")[turn]
        yield make_gated_sum(norm, cols, modulation=modulation, by_sample=turn != 2, weight=weight)
    for turn, cols in enumerate((256, 1000, 2048, 4096, 8192, 16384)):
        problem = make_problem(("layer", "rms")[turn % 2], cols)
        yield replace(problem, residual_dtype=(torch.bfloat16, torch.float32)[turn % 2])
        yield replace(problem, wants_dx=False)
        yield replace(problem, wants_dw=False, wants_db=False)
    dtypes = torch.bfloat16, torch.float32, torch.float16, torch.float64
    for turn, cols in enumerate((3, 72, 1000, 1001, 4096, 8192)):
        yield Sums(4096, cols, 1, dtypes[turn % 4])
        yield Sums(4096, cols, (2, 8, 29, 64)[turn % 4], dtypes[turn % 4], total=turn % 2 == 0)
    yield from OF_MODELS + WHOLE_OF_MODELS
    for turn, cols in enumerate((1152, 3072, 16384)):
        for backward in (False, True):
            table = Table(("layer", "rms")[turn % 2], "_of_gated_sum", 1, cols, modulation=dtypes[turn % 2])
            yield replace(table, backward=backward).call.problem
    for turn, cols in enumerate((392, 1536, 5120)):
        yield Table("layer", "", 1, cols, modulation=dtypes[turn % 2], parameters=dtypes[0], backward=True).call.problem


def jobs_of(options: argparse.Namespace) -> list[Job]:
    if options.thorough:
        chosen = list(problems(WIDTHS, MIXES + ODD_MIXES))
    else:
        chosen = list(some_problems())
    if options.small:
        chosen = chosen[:: len(chosen) // SMALL]
    part, parts = options.part
    return [Job(arch, problem) for arch in options.arch for problem in chosen][part - 1 :: parts]


# --- One release, in a Python that has it installed ---


def work(jobs_of: Callable[[list[str]], list], workers: int | None = None) -> int:
    """Reads the arguments and the numbers of the wanted jobs from stdin, a line of JSON each.

    Writes a line [number, complaints] to stdout for each job, in the order in which they end.
    """
    from concurrent.futures import as_completed

    jobs, wanted = jobs_of(json.loads(sys.stdin.readline())), json.loads(sys.stdin.readline())
    with worker_processes(workers) as pool:
        asked = {pool.submit(answer, jobs[number]): number for number in wanted}
        for each in as_completed(asked):
            print(json.dumps([asked[each], each.result()]), flush=True)
    return 0


def answer(job) -> list[str]:
    try:
        return job.complaints()
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return [f"does not compile: {type(error).__name__}: {text[-1]}"]


# --- All releases ---


def environment(release: str, folder: Path) -> Path:
    return python_with({"triton": release}, folder, "--no-deps")


def source(patterns: tuple[str, ...] = SOURCES) -> str:
    """A hash of the files on which the results depend."""
    text = b"".join(path.read_bytes() for pattern in patterns for path in sorted(ROOT.glob(pattern)))
    return hashlib.sha256(text).hexdigest()[:12]


class Results:
    """{(release, job): complaints} for one source, kept in a file with a line for each."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.found = {(release, job): said for release, job, said in map(json.loads, lines)}

    def add(self, release: str, job, said: list[str]) -> None:
        self.found[release, str(job)] = said
        with self.path.open("a") as file:
            file.write(json.dumps([release, str(job), said]) + "\n")


def run_release(
    release: str, options: argparse.Namespace, jobs: list, results: Results, progress, code: str = WORK
) -> None:
    """Runs the jobs without results: `code`, in a Python with this release, does the work."""
    wanted = [number for number, job in enumerate(jobs) if (release, str(job)) not in results.found]
    progress.update(len(jobs) - len(wanted))
    if not wanted:
        return
    python = environment(release, options.folder)
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    command = [python, "-c", code]
    pipe, log = subprocess.PIPE, options.folder / f"triton-{release}.log"
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=file, env=variables, text=True) as worker,
    ):
        worker.stdin.write(f"{json.dumps(options.given)}\n{json.dumps(wanted)}\n")
        worker.stdin.close()
        for line in worker.stdout:
            number, said = json.loads(line)
            results.add(release, jobs[number], said)
            for text in said:
                progress.write(f"Triton {release}, {jobs[number]}: {text}")
            progress.update()
    if worker.returncode:
        raise SystemExit(f"versions: the process of Triton {release} ended with code {worker.returncode}: see {log}")


def table(results: Results, options: argparse.Namespace) -> tuple[str, int]:
    """A table of releases by architectures, "problems as planned of problems tried"; and the number not as planned."""
    tried, good = defaultdict(int), defaultdict(int)
    wanted = {str(job) for job in jobs_of(options)}
    for (release, job), said in results.found.items():
        if job in wanted:
            cell = release, int(job.split()[0].removeprefix("sm_"))
            tried[cell] += 1
            good[cell] += not said
    lines = ["| Triton | " + " | ".join(f"sm_{arch}" for arch in options.arch) + " |"]
    lines.append("|---|" + "---|" * len(options.arch))
    for release in options.releases:
        cells = [(release, arch) for arch in options.arch]
        said = (f"{good[cell]} of {tried[cell]}" if tried[cell] else "not run" for cell in cells)
        lines.append(f"| {release} | " + " | ".join(said) + " |")
    return "\n".join(lines), sum(tried.values()) - sum(good.values())


def part_of(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"a part must be as 3/20, got {text}")
    return part, parts


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--releases", nargs="+", default=list(RELEASES))
    every = list(EVERY_ARCHITECTURE)
    parser.add_argument("--arch", type=int, nargs="+", choices=every, default=every)
    parser.add_argument("--thorough", action="store_true", help="the problems of tests/budgets.py --mixed")
    parser.add_argument("--small", action="store_true", help=f"about {SMALL} of the problems")
    parser.add_argument("--part", type=part_of, default=(1, 1), help="such as 3/20: every 20th problem, from the 3rd")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions")
    parser.add_argument("--environment", metavar="RELEASE", help="print the Python that has this Triton")
    parser.add_argument("--table", action="store_true", help="print what was found before, and try nothing")
    options = parser.parse_args(arguments)
    options.given = arguments
    return options


def main() -> int:
    from tqdm import tqdm

    options = parse(sys.argv[1:])
    options.folder = options.folder.resolve()
    if options.environment:
        print(environment(options.environment, options.folder))
        return 0
    results, jobs = Results(options.folder / f"results-{source()}.jsonl"), jobs_of(options)
    if not options.table:
        with tqdm(total=len(options.releases) * len(jobs), unit="problem", smoothing=0.02) as progress:
            for release in options.releases:
                progress.set_description(f"Triton {release}")
                run_release(release, options, jobs, results, progress)
    text, failures = table(results, options)
    print(f"{text}\n\n{failures} problems differ from their plans; {results.path}")
    return failures > 0


if __name__ == "__main__":
    raise SystemExit(main())
