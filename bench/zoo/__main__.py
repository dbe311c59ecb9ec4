"""Times training steps of models that people train, at true width in few layers: stock, with our norms, with others.

    python -m bench.zoo                                            # every model and way
    python -m bench.zoo --models llama qwen3 --jobs 2              # compiles two at once
    python -m bench.zoo --profile --models olmo2                   # what a step launches, in place of times
    python -m bench.zoo --tiny --models llama --ways "eager stock" "eager patch_model"   # a dry run on a CPU

A step is forward, loss, backward and fused AdamW on bfloat16 parameters. Its models are transformers' and diffusers'
own classes (bench/zoo/models.py says what is smaller than in the whole model). All ways of a model share parameters and
run in one process, in turns of a few steps, in a new order each round. Gradients of the same shapes, but of a loss over
256 tokens alone, are compared with the stock model's in float64.

A model has a process of its own. With --jobs, so many are built and compiled at once, and then timed one after the
other; models that compile for minutes or need most of the memory are last, alone. A way that did not fit into memory
beside the others gets a process of its own, without ratios. A model whose records by the same code and versions exist,
in the file or in bench/results, is skipped, without --again. One JSON line per way goes
to zoo.jsonl, with --profile to zoo-profile.jsonl. Exit code 1 if a way failed, 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fusednorm.tools.console import print_table

from ..cases import make_parser
from ..records import add_out_argument, describe_machine, lacks_gpu, results_path, rows_of, save
from ..turns import digest, let_installed_packages_precede, recorded, run_group
from .measure import Task, run
from .models import MODELS
from .ways import WAYS

ON_REQUEST = 3  # ways, the last ones
DEFAULT_WAYS = tuple(WAYS)[:-ON_REQUEST]
PROFILED = ("eager stock", "eager patch_model", "eager enable_eager", "compiled stock")
LEAST = 60  # seconds: with less, no model is begun
OUT_OF_MEMORY = "OutOfMemoryError"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not options.tiny and lacks_gpu("zoo"):
        return 2
    if not options.tiny:
        let_installed_packages_precede()
    end = time.monotonic() + 60 * options.minutes
    machine = describe_machine("CPU, tiny" if options.tiny else None)
    path = results_path(options.out, machine, "zoo-profile" if options.profile else "zoo")
    source = digest("bench/zoo/*.py")
    done = set() if options.again else models_done(path, machine | {"source": source}, options.ways)
    names = [name for name in options.models if name not in done]
    for name in done & set(options.models):
        print(f"{name}: its records exist, --again measures it again")

    common = options.rounds, options.steps, options.tiny, options.profile
    tasks = [
        Task(name, tuple(options.ways), path, source, options.compile_seconds, options.seconds, *common)
        for name in names
    ]
    if options.tiny:  # in this process
        return 1 if report([record for task in tasks for record in run(task)]) else 0
    groups = groups_of(tasks, options.jobs)
    while groups:
        group = groups.pop(0)
        if end - time.monotonic() < LEAST:
            print(f"left for another run, the time is over: {', '.join(task.model for task in group)}")
            continue
        for task, failure in zip(group, run_group([(run, task) for task in group], end), strict=True):
            if failure:
                print(f"{task.model}: {failure}", file=sys.stderr)
                lost = {"bench": "zoo", "source": source, "model": task.model, "error": failure, "failed": True}
                save([machine | lost], path)
        groups = [[each] for task in group for each in apart(task, newest(path, machine))] + groups
    return 1 if report([each for each in newest(path, machine) if each["model"] in names]) else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser("zoo", __doc__)
    models = list(MODELS)
    parser.add_argument("--models", nargs="+", choices=models, default=models, metavar="NAME", help=", ".join(models))
    ways = f"{'; '.join(WAYS)} (default: all but the last {ON_REQUEST})"
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY", help=ways)
    parser.add_argument("--minutes", type=float, default=30, help="of everything (default: 30)")
    parser.add_argument("--seconds", type=float, default=15, help="of timing a model, at most (default: 15)")
    text = "of compiling a model, at most (default: 200)"
    parser.add_argument("--compile-seconds", type=float, default=200, help=text)
    parser.add_argument("--rounds", type=int, default=30, help="turns of each way, at most (default: 30)")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn (default: 3)")
    parser.add_argument("--jobs", type=int, default=1, help="models that are compiled at once (default: 1)")
    parser.add_argument("--profile", action="store_true", help="what a step launches, in place of times")
    parser.add_argument("--tiny", action="store_true", help="a dry run at small widths, on the CPU, in this process")
    parser.add_argument("--again", action="store_true", help="measure what was measured, too")
    add_out_argument(parser)
    options = parser.parse_args(arguments)
    options.ways = options.ways or (PROFILED if options.profile else DEFAULT_WAYS)
    return options


def models_done(path: Path, machine: dict, ways: Iterable[str]) -> set[str]:
    """Models that have a record of every way by the same code, versions and GPU."""
    ways_of: dict[str, set[str]] = {}
    for each in recorded(path, machine):
        if "way" in each:
            ways_of.setdefault(each["model"], set()).add(f"{each['way']} {each['norms']}")
    return {model for model, found in ways_of.items() if set(ways) <= found}


def groups_of(tasks: Sequence[Task], jobs: int) -> list[list[Task]]:
    """The tasks that are prepared at once."""
    together = [task for task in tasks if not task.spec.alone]
    groups = [together[first : first + jobs] for first in range(0, len(together), jobs)]
    return groups + [[task] for task in tasks if task.spec.alone]


def newest(path: Path, machine: dict) -> list[dict]:
    """The last record of each model and way of this run."""
    found = [each for each in rows_of([path] if path.exists() else []) if each["date"] >= machine["date"]]
    return list({(each["model"], each.get("way"), each.get("norms")): each for each in found}.values())


def apart(task: Task, records: list[dict]) -> list[Task]:
    """A task for each way that did not fit into memory beside others."""
    names = [
        f"{each['way']} {each['norms']}"
        for each in records
        if each["model"] == task.model and "way" in each and (each["error"] or "").startswith(OUT_OF_MEMORY)
    ]
    return [replace(task, ways=(name,)) for name in task.ways if name in names and task.ways[1:]]


def report(records: list[dict]) -> int:
    """Prints a table; returns the number of failures."""
    timed = [r for r in records if r.get("median_ms")]
    header = ["model", "way", "norms", "ms", "spread", "over eager", "over compiled", "GB", "error of norms, all"]
    print_table("Training steps", header, [row_of(record) for record in timed])
    for each in records:
        for row in each.get("launches", ())[:15]:
            print(f"{each['model']}, {each['way']} {each['norms']}: {row}")
        if each.get("error"):
            print(f"{each['model']}, {each.get('way', '')} {each.get('norms', '')}: {each['error']}")
    return sum(each.get("failed", False) for each in records)


def row_of(record: dict) -> list[str]:
    ratios = [record.get(f"over_{base}") for base in ("eager", "compiled")]
    gradients = record.get("errors") or {}
    return [
        record["title"],
        record["way"],
        record["norms"],
        f"{record['median_ms']:.2f}",
        f"{(record['p90_ms'] - record['p10_ms']) / record['median_ms']:.1%}",
        *("" if ratio is None else f"{ratio[0]:.3f} ± {ratio[1] or 0:.3f}" for ratio in ratios),
        f"{record.get('peak_bytes', 0) / 1e9:.1f}",
        ", ".join(f"{value:.1e}" for value in gradients.values()),
    ]


if __name__ == "__main__":
    sys.exit(main())
