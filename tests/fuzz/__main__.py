"""Compares random calls of every op with float64.

    make fuzz-gpu        or: python -m tests.fuzz [--minutes 8] [--calls 100000] [--workers 16] [--out FILE]

Worker processes share the GPU, each with a limit of time for a call, so that a call that hangs or kills its process is
found too. Failures become lines of FILE, each with the command that repeats the call. FILE.progress.json says how far a
seed got, and how many calls were of what; the next run with this FILE goes on from there, on any machine. The last line
is one sentence on all calls of the seed. Exit code 1 if there is a failure. With --device cpu Triton's interpreter runs
the kernels, also of a call that failed on a GPU, but with other random numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .draw import FAMILY, draw
from .workers import Worker, described, examine, prepare

SMALL = 3000  # elements that the interpreter gets


class Progress:
    """What is finished, in a file."""

    def __init__(self, path: Path, options: argparse.Namespace):
        """Raises ValueError if the file is of other calls."""
        self.path = path
        drawn = {"seed": options.seed, "elements": options.elements, "family": FAMILY}
        counts = {"calls": 0, "failed": {}, "seconds": 0.0, "spent": {}, "worst": {}, "atens": {}, "of": {}}
        self.state: dict[str, Any] = {**drawn, "next": 0, "unfinished": [], **counts}
        if path.exists():
            self.state = json.loads(path.read_text())
            if (kept := {key: self.state.get(key) for key in drawn}) != drawn:
                raise ValueError(f"{path} must be of the calls that are asked for, {drawn}, got {kept}")
        self.begun, self.before = time.monotonic(), self.state["seconds"]
        unfinished = self.state["unfinished"]
        self.waiting = [[*some] for _, some in itertools.groupby(unfinished, lambda number: number // FAMILY)]

    def following(self, most: int) -> list[int]:
        """Numbers of a family that no worker has; none if there are no more."""
        if self.waiting:
            return self.waiting.pop(0)
        first = self.state["next"]
        self.state["next"] = max(first, min(first + FAMILY, most))
        return [*range(first, self.state["next"])]

    def add(self, said: dict[str, Any]) -> None:
        self.state["calls"] += 1
        if "faults" in said:
            op = said["call"]["op"]
            self.state["failed"][op] = self.state["failed"].get(op, 0) + 1
        for kind in ("worst", "atens"):
            for key, excess in said.get(kind, {}).items():
                self.state[kind][key] = max(excess, self.state[kind].get(key, 0.0))
        for phase, seconds in said.get("seconds", {}).items():
            self.state["spent"][phase] = self.state["spent"].get(phase, 0.0) + seconds
        for kind, values in said.get("of", {}).items():
            counts = self.state["of"].setdefault(kind, {})
            for value in values:
                counts[value] = counts.get(value, 0) + 1

    def verdict(self) -> str:
        """One sentence on all calls of the seed."""

        def listed(counts: dict[str, int]) -> str:
            return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"

        state = self.state
        of, failed = state["of"], state["failed"]
        said = f"seed {state['seed']}: of {state['calls']:,} calls of {len(of.get('op', ()))} ops"
        said += f" (hosts: {listed(of.get('host', {}))}) {sum(failed.values()) or 'none'} failed"
        said += f" ({listed(failed)})" if failed else ""
        if state["worst"]:
            key = max(state["worst"], key=state["worst"].__getitem__)
            aten = f", ATen's is {state['atens'][key]:.2f}" if key in state["atens"] else ""
            said += f"; the worst error is {state['worst'][key]:.2f} of its bound, in {key}{aten}"
        return said

    def save(self, workers: list[Worker]) -> None:
        unfinished = [number for numbers in (*[each.numbers for each in workers], *self.waiting) for number in numbers]
        self.state |= {"unfinished": sorted(unfinished), "seconds": self.before + time.monotonic() - self.begun}
        self.path.write_text(json.dumps(self.state, indent=1))


def fuzz(options: argparse.Namespace, progress: Progress) -> int:
    """The number of failures of this run."""
    end = time.monotonic() + 60 * options.minutes
    workers = [Worker(options) for _ in range(options.workers)]
    failures, saved = 0, time.monotonic()
    done = progress.state["calls"]
    with open(options.out, "a") as file, tqdm(total=options.calls, initial=done, unit="call", mininterval=5) as bar:
        while True:
            for each in workers:
                if not each.numbers and time.monotonic() < end and (numbers := progress.following(options.calls)):
                    each.give(numbers)
            busy = [each for each in workers if each.numbers]
            if not busy or time.monotonic() > end:
                break
            wait([each.pipe for each in busy], timeout=1)
            for each in busy:
                while said := each.take():
                    progress.add(said)
                    bar.update()
                    if "faults" in said:
                        failures += 1
                        bar.set_postfix(failures=failures)
                        file.write(json.dumps(said, default=str) + "\n")
                        file.flush()
            if time.monotonic() - saved > 5:
                progress.save(workers)
                saved = time.monotonic()
    progress.save(workers)
    for each in workers:
        each.process.kill()
    state = progress.state
    print("Seconds of the workers:", ", ".join(f"{phase} {seconds:.0f}" for phase, seconds in state["spent"].items()))
    for key, excess in sorted(state["worst"].items()):
        print(f"  {key}: at most {excess:.2f} of its bound; ATen {state['atens'].get(key, float('nan')):.2f}")
    for kind, counts in state["of"].items():
        print(f"  {kind}: {', '.join(f'{value} {count}' for value, count in sorted(counts.items()))}")
    print(f"{progress.verdict()}: {options.out}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which the run stops")
    parser.add_argument("--calls", type=int, default=100_000, help="how many, over all runs of the seed")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="how many processes")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one call, its compilation included")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz.jsonl"), help="the file of failures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elements", type=int, help="of the largest tensor")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run one call, in this process")
    parser.add_argument("--behind", type=int, metavar="NUMBER", help="with --only: the first call to run before it")
    options = parser.parse_args()
    options.elements = options.elements or (2**23 if options.device == "cuda" else SMALL)
    if options.only is None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        try:
            progress = Progress(Path(f"{options.out}.progress.json"), options)
        except ValueError as error:
            parser.error(str(error))
        return bool(fuzz(options, progress))
    with prepare(options):
        for number in range(options.only if options.behind is None else options.behind, options.only + 1):
            said = examine(number, options)
    call = described(draw(options.only, options.seed, options.elements))
    print(json.dumps({"call": call} | said, default=str, indent=1))
    return "faults" in said


if __name__ == "__main__":
    sys.exit(main())
