"""python -m fusednorm tune: times the planner's candidates on this machine's GPU and writes the table of the fastest.

Later processes plan by that table. A cell is a problem with a number of rows. Cells are kept in a file beside the table
as they are measured, so a run that ends early leaves a table, and the next one goes on.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import datetime
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..dtypes import DTYPES
from ..host import gpus
from ..host.fallback import BuildFailed
from ..operands import DIRECTIONS, NORMS
from ..planner import choice, limits, table
from ..planner.candidates import are_better_in_registers, candidates, of_frames
from ..planner.device import DeviceSpec
from ..planner.legality import broken_rule
from ..planner.model import Coefficients, Work, predict_us, time_us, work_of
from ..planner.norm_problem import NormProblem
from ..planner.plan import MultiWavePlan, PipelinedPlan, Plan, from_text, text_of
from . import console
from .plan import positive
from .warm import FEW_TABLE_ROWS, Wanted, program, start_process

ROWS_PER_SM = tuple(2**exponent for exponent in range(14))
MOST_ROWS, MOST_ELEMENTS = 65536, 2**28
MOST_NARROW_ELEMENTS = 2**26  # of x with as many rows or more: 2^20 of 64 columns, as heads and groups of columns have

MOST_CANDIDATES = 16  # that are timed of a problem: the first, in the order of variants in use and of their frames
ALLOCATIONS = 3  # of a cell's tensors: by where they lie, the ratio of two plans deviates by up to 1.7%
ROUNDS = 3  # of an allocation
SHORT_US, ROUNDS_IF_SHORT = 20, 7  # 21 rounds find differences of 3% between plans of 6 us
FLUSH_BYTES = 256 << 20  # above any L2 so far (B200: 126 MB)
MOST_TRIES = 9  # at a call that the host enqueues before L2 is flushed: other processes may take its core
STEPS = 4  # row counts that are looked at from one that was measured to the next


class Task(NamedTuple):
    norm: str
    direction: str
    cols: int
    dtype: str  # of DTYPES, of all tensors
    form: str = ""  # the suffix of the form's forward op
    weights: str = ""  # the dtype of weight and bias, if it is another
    modulations: str = ""  # that of modulations
    residuals: str = ""  # and that of the form's residual

    @property
    def wanted(self) -> Wanted:
        dtype = DTYPES[self.dtype]
        weighted = not self.form.endswith(("modulated", "by_index"))  # these seldom have a weight
        bias, weight = weighted and self.norm == "layer", DTYPES[self.weights or self.dtype] if weighted else None
        of_form = {"form": self.form, "modulation_dtype": DTYPES[self.modulations or self.dtype]}
        of_form |= {"residual_dtype": DTYPES[self.residuals]} if self.residuals else {}
        return Wanted(self.norm, self.direction, self.cols, dtype, weight, bias, (True, weighted, bias), **of_form)


class Cell(NamedTuple):
    """Microseconds of each plan, by its text. own is the plan that the planner chose."""

    task: Task
    rows: int
    times: dict[str, float]
    own: str
    refused: tuple[str, ...] = ()  # plans that do not run
    day: str = ""  # on which it was measured

    @property
    def tried(self) -> set[str]:
        return {*self.times, *self.refused}

    def record(self) -> dict:
        plans = sorted(self.times.items(), key=lambda item: item[1])
        return self.task._asdict() | {"rows": self.rows, "own": self.own, "plans": plans, "refused": self.refused}

    @classmethod
    def of(cls, record: dict) -> Cell:
        """From a line of this tool or of bench.survey. Plans of other releases are left out."""
        task = Task(*[record.get(name, "") for name in Task._fields])
        times = {text: us for text, us in dict(record["plans"]).items() if is_plan(text)}
        refused, day = tuple(record.get("refused", ())), record.get("date", "")[:10]
        return cls(task, record["rows"], times, record["own"], refused, day)


def is_plan(text: str) -> bool:
    """Whether it is a text by text_of, and not one by another release."""
    with contextlib.suppress(ValueError):
        return from_text(text) is not None
    return False


def dense() -> Iterator[Task]:
    """The tasks of a whole table, those of data/survey.json in its order."""
    for part in limits.read("survey"):
        unlike_plain = {name: part[name] for name in Task._fields if name in part and name != "cols"}
        yield from (task._replace(**unlike_plain) for task in of_widths(part["cols"]))


def of_widths(widths: Iterable[int], dtype: str = "bf16") -> Iterator[Task]:
    for cols in widths:
        yield from (Task(norm, direction, cols, dtype) for direction in DIRECTIONS for norm in NORMS)


def row_counts(task: Task, device: DeviceSpec, rows_per_sm: Iterable[int] = ROWS_PER_SM) -> Iterator[int]:
    """About so many rows per SM: powers of two, as most models have."""
    for rows in (1 << round(math.log2(per_sm * device.sm_count)) for per_sm in rows_per_sm):
        if rows * task.cols <= (MOST_ELEMENTS if rows < MOST_ROWS else MOST_NARROW_ELEMENTS):
            yield rows


def plans_of(problem: NormProblem, device: DeviceSpec) -> tuple[Plan, ...]:
    return all_plans_of(problem, device)[:MOST_CANDIDATES]


def all_plans_of(problem: NormProblem, device: DeviceSpec) -> tuple[Plan, ...]:
    plans = [plan for variant in choice.variants_in_use(device) for plan in candidates(variant, problem, device)]
    return tuple(dict.fromkeys([*plans, *to_survey(problem, device)]))


def to_survey(problem: NormProblem, device: DeviceSpec) -> Iterator[Plan]:
    """Plans that are no candidates: a table may have them, but the model must not choose one. It does not know what an
    activation takes in a ring, and little of rows in an order."""
    no_ring = broken_rule("pipelined", problem, 1, device) or are_better_in_registers(problem, device)
    for kind in ("surveyed registers", *["surveyed ring"] * (not no_ring)):
        yield from of_frames(kind, problem, device)


# --- Measuring ---


def measure(
    tasks: Iterable[Task], known: dict[tuple[Task, int], Cell], device: DeviceSpec, ends: Callable[[], bool]
) -> Iterator[Cell]:
    """Cells that are not known, or not with all plans, until `ends` says so. The planner's own plan comes first."""
    wanted = {task: plans_of(task.wanted.problem, device) for task in dict.fromkeys(tasks)}
    cells = {
        (task, rows): choice.choose(task.wanted.problem, rows, device)
        for task, plans in wanted.items()
        for rows in row_counts(task, device)
        if (task, rows) not in known or not {*map(text_of, plans)} <= known[task, rows].tried
    }
    to_build: dict[Task, dict[Plan, None]] = {}
    for (task, _), own in cells.items():
        to_build.setdefault(task, dict.fromkeys(wanted[task]))[own] = None
    ahead, built = _built({task: tuple(plans) for task, plans in to_build.items()}, device), None
    for (task, rows), own in console.progress(cells.items(), "timed", "bench"):
        if ends():
            return
        if task != built:
            built = next(ahead)
        plans = dict.fromkeys((own, *wanted[task]))
        times = time_plans(task, rows, plans, device)
        yield Cell(task, rows, times, text_of(own), tuple(text for text in map(text_of, plans) if text not in times))


def _built(wanted: dict[Task, tuple[Plan, ...]], device: DeviceSpec) -> Iterator[Task]:
    """The tasks, each once its kernels are built. Processes take turns at them, go on while cells are timed, and leave
    cores to this process. If one dies, kernels are built where they are timed."""
    count = min(max(1, len(os.sched_getaffinity(0)) - 2), len(wanted))
    jobs = [(task.wanted, plans) for task, plans in wanted.items()]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    processes = [start_process("compile_in_order", jobs[at::count], device, **streams) for at in range(count)]
    try:
        for task, process in zip(wanted, itertools.cycle(processes)):
            process.stdout.readline()
            yield task
    finally:
        for process in processes:
            process.kill()


def time_plans(task: Task, rows: int, plans: Iterable[Plan], device: DeviceSpec) -> dict[str, float]:
    """The median time of each plan that runs, in us."""
    shape = torch.Size((rows, task.cols))

    def drawn(like: torch.Tensor) -> torch.Tensor:
        if not like.is_floating_point():  # an index of tables
            return torch.randint(FEW_TABLE_ROWS, (rows,), device="cuda", dtype=like.dtype)
        if len(like) == FEW_TABLE_ROWS:  # a table
            return torch.rand(like.shape, device="cuda").to(like.dtype)
        if like.dim() == 1:
            return torch.rand(max(shape), device="cuda").to(like.dtype)
        of_all_rows = like.stride(0) == 0  # a modulation, of which all rows are one sample
        return torch.rand(shape[of_all_rows:], device="cuda").to(like.dtype).expand(shape)

    flushed, total = torch.zeros(FLUSH_BYTES // 4, device="cuda"), torch.empty((), device="cuda")
    found, held = [], []
    with contextlib.suppress(torch.OutOfMemoryError):  # a small GPU has fewer allocations
        for _ in range(ALLOCATIONS):
            tensors = [each if each is None else drawn(each) for each in task.wanted.call().tensors]
            calls = _loaded(task, rows, plans, device, tensors)
            # Leaves L2 with clean lines; dirty ones would cost time to write back.
            found.append(_in_turn(calls, lambda: torch.sum(flushed, dim=0, out=total)))
            held += [tensors, torch.empty(shape, dtype=tensors[0].dtype, device="cuda")]  # the next ones lie elsewhere
    texts = found[0] if found else ()
    return {text: round(statistics.median(each[text] for each in found if text in each), 2) for text in texts}


def _loaded(
    task: Task, rows: int, plans: Iterable[Plan], device: DeviceSpec, tensors: Sequence[torch.Tensor | None]
) -> dict[str, Callable[[], Any]]:
    """A call of each plan that runs. It keeps no outputs, so that those of all plans lie in the same memory: where they
    lie is worth up to 5%."""
    from ..host import launcher

    calls, addresses = {}, [0 if each is None else each.data_ptr() for each in tensors]
    for plan in plans:
        with contextlib.suppress(BuildFailed, RuntimeError):
            _, bound = launcher.run(program(task.wanted, plan, device), tensors, (rows, task.cols), rows)
            if bound and bound.launch(addresses):  # else Triton itself must launch it, which takes longer than a flush
                calls[text_of(plan)] = functools.partial(bound.launch, addresses)
    return calls


def _in_turn(calls: dict[str, Callable[[], Any]], flush: Callable[[], Any]) -> dict[str, float]:
    """Median times of calls in turn, L2 flushed before each."""
    times: dict[str, list[float]] = {text: [] for text in calls}

    def turn(first: int) -> None:
        order = (*itertools.islice(calls, first, None), *itertools.islice(calls, first))
        events = {text: _around(calls[text], flush) for text in order}
        torch.cuda.synchronize()
        for text, (start, end) in events.items():
            times[text].append(1e3 * start.elapsed_time(end))

    turn(0)
    is_short = any(first < SHORT_US for first, in times.values())
    for each in range(ROUNDS_IF_SHORT if is_short else ROUNDS):
        turn((each + 1) % max(1, len(calls)))
    return {text: round(statistics.median(each[1:]), 2) for text, each in times.items()}


def _around(call: Callable[[], Any], flush: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """The events around a call that the host enqueues while L2 is flushed: behind a flush that has ended, the GPU would
    wait for the host, and the time be the host's."""
    for _ in range(MOST_TRIES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush()
        start.record()
        call()
        end.record()
        if not start.query():
            break
    return start, end


# --- From times to a table ---


def widths_of(
    cells: Iterable[Cell], device: DeviceSpec, coefficients: Coefficients
) -> dict[table.Key, dict[int, table.Ranges]]:
    """For each width the plan of the fastest family, at the row counts that were measured and between them. A single
    row count says nothing of others. Of a cell that was measured several times, and of cells that share a line, the
    mean times count, and the earlier ones of other families, in proportion to the families that have both: two runs
    differ more than two allocations."""
    found: dict[table.Key, Widths] = defaultdict(lambda: defaultdict(dict))
    runs: dict[tuple[table.Key, int, int], int] = Counter()
    problems: dict[tuple[table.Key, int], NormProblem] = {}
    for cell in cells:
        problem = cell.task.wanted.problem
        key, at = table.Key.of(problem), {}
        for text, us in sorted(cell.times.items(), key=lambda item: -item[1]):
            at[family_of(from_text(text))] = us, from_text(text)
        before = found[key][cell.task.cols].setdefault(cell.rows, {})
        both = at.keys() & before.keys()
        ratio = statistics.geometric_mean(at[each][0] / before[each][0] for each in both) if both else 1
        runs[key, cell.task.cols, cell.rows] += 1
        share = 1 / runs[key, cell.task.cols, cell.rows]
        means = {each: (at[each][0] ** share * (before[each][0] * ratio) ** (1 - share), at[each][1]) for each in both}
        before |= {family: (us * ratio, plan) for family, (us, plan) in before.items()} | at | means
        problems[key, cell.task.cols] = problem

    def ranges(key: table.Key, cols: int) -> table.Ranges:
        @functools.cache
        def predict(plan: Plan, rows: float) -> float:
            return predict_us(plan, problems[key, cols], round(rows), device, coefficients)

        return _ranges(cols, found[key], predict, device.sm_count)

    measured = {key: [cols for cols, counts in widths.items() if len(counts) > 1] for key, widths in found.items()}
    # A key without widths would be the nearest of some problem, and answer nothing.
    return {key: {cols: ranges(key, cols) for cols in widths} for key, widths in measured.items() if widths}


def days_of(cells: Iterable[Cell]) -> dict[tuple[table.Key, int], str]:
    """The day of the newest cell of each width."""
    ordered = sorted(cells, key=lambda cell: cell.day)
    return {(table.Key.of(cell.task.wanted.problem), cell.task.cols): cell.day for cell in ordered}


Family = Hashable  # what a plan does, apart from how it cuts a row
Widths = dict[int, dict[int, dict[Family, tuple[float, Plan]]]]  # by columns, rows and family: us, and the plan


def family_of(plan: Plan) -> Family:
    if not isinstance(plan, (MultiWavePlan, PipelinedPlan)):
        return plan.kernel
    uncut = {"chunk": 0, "num_chunks": 0, "max_registers": 0, "copy_chunks": 1, "tail": False, "rows_in_ring": False}
    return replace(plan, **{name: value for name, value in uncut.items() if name in vars(plan)})


class Point(NamedTuple):
    """A plan at a number of rows, and by how much it took longer than the model says."""

    rows: int
    plan: Plan
    lack_us: float


class Route(NamedTuple):
    """Plans, and the rows from which on each is taken; what they lose in sum."""

    loss: float
    starts: tuple[tuple[float, Plan], ...]


def _ranges(cols: int, widths: Widths, predict: Callable[[Plan, float], float], sms: int) -> table.Ranges:
    """Between two row counts at which a family was measured, it takes as long as the model says, and what the model
    lacks at both, in proportion to the rows. Of two that have no family in common nothing is known between them."""
    counts, points = sorted(widths[cols]), defaultdict(list)
    for rows in counts:
        for family, us in _smoothed(cols, rows, widths).items():
            plan = widths[cols][rows][family][1]
            points[family].append(Point(rows, plan, us - predict(plan, rows)))

    def times(rows: float) -> dict[Plan, float]:
        found = {}
        for each in points.values():
            if each[0].rows <= rows <= each[-1].rows:
                at = bisect.bisect_left(each, rows, key=lambda point: point.rows)
                few, many = each[max(0, at - 1)], each[at]
                share = (rows - few.rows) / max(1, many.rows - few.rows)
                found[many.plan] = predict(many.plan, rows) + few.lack_us + share * (many.lack_us - few.lack_us)
        return found

    gaps = itertools.product(itertools.pairwise(counts), range(STEPS))
    between = (low * (high / low) ** (step / STEPS) for (low, high), step in gaps)
    return _few_plans([(rows, of) for rows in (*between, counts[-1]) if (of := times(rows))], sms)


def _few_plans(costs: list[tuple[float, dict[Plan, float]]], sms: int) -> table.Ranges:
    """From the times of plans, by rows: the plans that lose least against the fastest in sum, where each change of plan
    costs limits.cost_of_change. Found as the best route to each plan at each number of rows."""
    best: dict[Plan, Route] = {}
    for rows, times in costs:
        fastest, before = min(times.values()), best
        least = min(before.values(), default=Route(0.0, ()), key=lambda route: route.loss)
        best = {}
        for plan, us in times.items():
            changed = Route(least.loss + limits.cost_of_change, (*least.starts, (rows, plan)))
            route = min(before.get(plan, changed), changed, key=lambda route: route.loss)
            best[plan] = route._replace(loss=route.loss + us / fastest - 1)
    starts = min(best.values(), key=lambda route: route.loss).starts
    last = {rows: before for (before, _), (rows, _) in itertools.pairwise(costs)}
    ends = [round(math.sqrt(last[rows] * rows) / sms, 1) for rows, _ in starts[1:]]
    return tuple((most, text_of(plan)) for most, (_, plan) in zip((*ends, math.inf), starts, strict=True))


def _smoothed(cols: int, rows: int, widths: Widths) -> dict[Family, float]:
    """The time of each family, from its loss against the fastest, averaged with that at neighbouring widths. These have
    at most half of the weight: a power of two is unlike its neighbours."""
    losses = {
        other: {family: us / min(us for us, _ in counts[rows].values()) - 1 for family, (us, _) in counts[rows].items()}
        for other, counts in widths.items()
        if rows in counts
    }
    octaves = {other: math.log2(other / cols) for other in losses if other != cols}
    near = {other: math.exp(-((octave / limits.neighbourhood) ** 2)) for other, octave in octaves.items()}
    weight = 1 / max(1, sum(near.values()))
    shares = {cols: 1.0} | {other: weight * share for other, share in near.items() if share > limits.least_share}
    total, best = sum(shares.values()), min(us for us, _ in widths[cols][rows].values())
    unknown = limits.unknown_loss
    return {
        family: best * (1 + sum(s * losses[other].get(family, unknown) for other, s in shares.items()) / total)
        for family in losses[cols]
    }


def fit(cells: Iterable[Cell], device: DeviceSpec, start: Coefficients) -> Coefficients:
    """Coefficients by which the ratios of a cell's times are predicted best, in the mean of squared logarithms. Choices
    ask for no more, so that the times themselves count little. A plan counts half that is a tenth slower than the
    fastest, and not at all by column tiles, which nothing else can replace. What no cell tells stays as it was."""
    works, times, weights, places = [], [], [], []
    for place, cell in enumerate(cells):
        for plan, us in ((from_text(text), us) for text, us in cell.times.items()):
            if plan.kernel != "column_tiles":
                works.append(work_of(plan, cell.task.wanted.problem, cell.rows, device))
                times.append(us)
                weights.append((min(cell.times.values()) / us) ** 8)
                places.append(place)
    columns = (torch.tensor(column, dtype=torch.float64) for column in zip(*works, strict=True))
    work, us, at = Work(*columns), torch.tensor(times), torch.tensor(places)
    weight = torch.tensor(weights, dtype=torch.float64)
    of_cell = weight.new_zeros(1 + max(places)).index_add(0, at, weight)
    origin = torch.tensor(start, dtype=torch.float64).log()
    logs = origin.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([logs], max_iter=250, line_search_fn="strong_wolfe")

    def found() -> Coefficients:
        coefficients = Coefficients(*logs.exp())
        return coefficients._replace(bandwidth_share=coefficients.bandwidth_share.clamp(max=1))

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        error = (time_us(work, found()) / us).log()
        level = torch.zeros_like(of_cell).index_add(0, at, weight * error) / of_cell
        squares = (error - level[at]) ** 2 + limits.share_of_level * error**2
        mean = (weight * squares).sum() / weight.sum() + 1e-5 * ((logs - origin) ** 2).sum()
        mean.backward()
        return mean

    optimizer.step(loss)
    return Coefficients(*(float(f"{value.item():.3g}") for value in found()))


def write_table(cells: list[Cell], device: DeviceSpec, path: Path, measured: dict) -> None:
    """`measured` says by which Triton and when. The coefficients are those of plain norms: B200's plans, which nobody
    has measured, are for these. Says what the plans were worth that the planner chose before."""
    plain = [cell for cell in cells if not cell.task.form]
    coefficients = fit(plain, device, table.coefficients(device))
    head = {"gpu": device.name, "arch": device.arch, "triton": measured["triton"], "date": measured["date"][:10]}
    head |= {"coefficients": coefficients._asdict()}
    write(path, head, widths_of(cells, device, coefficients), days_of(cells))
    losses = [cell.times[cell.own] / min(cell.times.values()) - 1 for cell in cells if cell.own in cell.times]
    print(f"{len(cells)} cells; the plans before were {statistics.mean(losses):.1%} behind the fastest. Wrote {path}")


Days = Mapping[tuple[table.Key, int], str]


def write(path: Path, head: dict, widths: dict[table.Key, dict[int, table.Ranges]], days: Days) -> None:
    """Replaces the file at once, so that nobody reads half of one. A line has its day where it is not the head's."""
    lines: list = [{"format": table.FORMAT} | head]
    for key, ranges in sorted(widths.items()):
        usual = table.Key._field_defaults
        lines.append({name: value for name, value in key._asdict().items() if value != usual.get(name)})
        for cols, plans in sorted(ranges.items()):
            day = {days.get((key, cols), "")} - {"", head["date"]}
            lines.append([cols, [[None if most == math.inf else most, text] for most, text in plans], *day])
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    new.replace(path)


# --- The command ---


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--cols", type=positive, nargs="+", help="row lengths (default: all of a table)")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), nargs="+", default=["bf16"], help="with --cols")
    parser.add_argument("--minutes", type=float, default=20, help="end after this time (default: 20)")
    parser.add_argument("--out", type=Path, help="the table's file (default: where the planner looks for it)")


def run(options: argparse.Namespace, clock: Callable[[], float] = time.monotonic) -> int:
    if not torch.cuda.is_available():
        print("tune: needs a CUDA GPU, got none", file=sys.stderr)
        return 2
    end = clock() + 60 * options.minutes
    import triton

    device = gpus.spec_of(torch.device("cuda", torch.cuda.current_device()))
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    measured = {"date": now, "gpu": device.name, "torch": torch.__version__, "triton": triton.__version__}
    cells = _measured(options, device, measured, lambda: clock() >= end)
    if not cells:
        print("tune: no cell was measured in this time", file=sys.stderr)
        return 1
    write_table(cells, device, options.out or table.user_file(device.name).expanduser(), measured)
    return 0


def _measured(
    options: argparse.Namespace, device: DeviceSpec, machine: dict[str, str], ends: Callable[[], bool]
) -> list[Cell]:
    """The cells of earlier runs and of this one, which an interrupt ends, too."""
    path = table.user_file(device.name).expanduser().with_suffix(".cells")
    text = path.read_text() if path.exists() else ""
    known = {(cell.task, cell.rows): cell for cell in _whole(text) if cell.times}
    asked = (task for dtype in options.dtype for task in of_widths(options.cols or (), dtype))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file, contextlib.suppress(KeyboardInterrupt):
        file.write("\n" if text and not text.endswith("\n") else "")
        for cell in measure(asked if options.cols else dense(), known, device, ends):
            known[cell.task, cell.rows] = cell._replace(day=machine["date"][:10])
            file.write(json.dumps(machine | cell.record()) + "\n")
            file.flush()
    return list(known.values())


def _whole(text: str) -> Iterator[Cell]:
    """The cells of a file. A line whose run was killed, or of another release, may be none."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            yield Cell.of(json.loads(line))
