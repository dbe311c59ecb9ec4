"""For tools that measure models for a long time: processes with limits, and records that stand for a new run."""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from .peers import packages
from .records import RESULTS, rows_of, slug

ROOT = Path(__file__).parents[1]
OURS = ("fusednorm/**/*.py", "fusednorm/**/*.cpp", "kernels/*.py")  # what a digest covers beside the tool
RESERVE = 60  # seconds more than its own limit, after which a process is stopped: imports, checks, warming up
SAME = ("gpu", "torch", "triton", "transformers", "source", "native")  # of records that stand for a new run


def digest(*patterns: str) -> str:
    """Of the code that is timed."""
    found = hashlib.sha256()
    for path in sorted(path for pattern in (*OURS, *patterns) for path in ROOT.glob(pattern)):
        found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]


def let_installed_packages_precede() -> None:
    """A clone has a folder named kernels, like Hugging Face's package."""
    sys.path.sort(key=lambda folder: Path(folder or ".").resolve() == ROOT)


def recorded(path: Path, machine: dict) -> list[dict]:
    """Records by the same code, versions and GPU, in the file or in bench/results."""
    same = machine | {"transformers": packages.version("transformers")}
    paths = {path, RESULTS / slug(machine["gpu"]) / path.name}
    return [
        each
        for each in rows_of(path for path in paths if path.exists())
        if all(each.get(name) == same.get(name) for name in SAME if name in same)
    ]


def run_group(calls: Iterable[tuple[Callable, object]], end: float) -> list[str | None]:
    """Each target in a process of its own, with its task and the events `ready` and `turn`. All prepare at once; then
    they get their turns. A task has compile_seconds and seconds, the limits of both parts. Returns what went wrong in
    each. None lives past `end`, by time.monotonic()."""
    context = multiprocessing.get_context("spawn")
    started = []
    for target, task in calls:
        ready, turn = context.Event(), context.Event()
        process = context.Process(target=target, args=(task, ready, turn), daemon=True)
        process.start()
        started.append((process, task, ready, turn, time.monotonic() + task.compile_seconds + RESERVE))
    for process, _, ready, _, limit in started:
        while process.is_alive() and time.monotonic() < min(limit, end) and not ready.wait(0.2):
            pass
        if not ready.is_set():
            process.kill()
    failures = []
    for process, task, ready, turn, _ in started:
        turn.set()
        process.join(max(0, min(task.seconds + RESERVE, end - time.monotonic())))
        stopped = process.is_alive()
        process.kill()
        process.join()
        if not ready.is_set():
            failures.append(f"not prepared in {task.compile_seconds:.0f} s, or its process ended")
        elif stopped:
            failures.append(f"stopped {RESERVE} s after the {task.seconds:.0f} s that it had, or with the whole run")
        else:
            failures.append(f"its process ended with code {process.exitcode}" if process.exitcode else None)
    return failures
