"""Tables: which plan was the fastest, measured on one GPU, by problem, columns and rows per SM.

A table is a file of JSON lines. The first says what it was measured on, by which release of Triton and when, and has
the coefficients that were fitted (model.py). Each other object is a Key. Its widths follow it, a line each: columns,
plans in order of rows, each up to a number of rows per SM, the last without end, and a date, if it is another than the
first line's. `python -m fusednorm tune` writes a table, and data/ has those that are shipped.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from . import limits
from .device import DeviceSpec
from .model import Coefficients
from .norm_problem import NormProblem
from .plan import from_text

FORMAT = 3
Ranges = tuple[tuple[float, str], ...]  # (most rows per SM, a plan's text), ascending


class Key(NamedTuple):
    """What problems have in common whose widths answer for one another."""

    norm: str
    direction: str
    itemsizes: tuple[int, ...]  # of x, in a backward also of its gradient
    piece: int  # bytes that TMA copies at once, up to limits.long_piece; 0 if it cannot
    traffic: tuple[int, int, int, int]
    # Itemsize of weight and bias, if it is not x's; of a modulated norm, which may lack them, any. Without them that of
    # modulations, if it is not x's. A forward's are those that it holds (NormProblem.inside).
    parameters: int = 0
    rows: int = 0  # itemsize of the widest large tensor, if it is wider than those of itemsizes
    tables: int = 0  # of which each row of x names a row
    again: int = 0  # whether rows are normalized twice

    @classmethod
    def of(cls, problem: NormProblem) -> Key:
        itemsizes = tuple(dtype.itemsize for dtype in (problem.x_dtype, problem.grad_dtype) if dtype is not None)
        piece = math.gcd(problem.cols * itemsizes[0], limits.long_piece) if problem.tma_aligned else 0
        held = problem.inside if problem.is_forward else problem
        of_parameters = {each.itemsize for each in (held.weight_dtype, held.bias_dtype) if each}
        tables = [of for name, of in zip(problem.names_in, problem.rows_in, strict=False) if name in problem.tables]
        if not (of_parameters and problem.form.modulates):
            of_parameters = (of_parameters | {each.itemsize for each in (*problem.shared, *tables)}) - {itemsizes[0]}
        widest_row = max(each.itemsize for dtypes in problem.large for each in dtypes)
        of_tables = problem.shared if problem.by_key else tables
        unlike_x = max(of_parameters, default=0), widest_row if widest_row > max(itemsizes) else 0, len(of_tables)
        return cls(problem.norm, problem.direction, itemsizes, piece, problem.traffic, *unlike_x, +problem.form.again)


@dataclass(frozen=True, eq=False)
class Table:
    gpu: str
    arch: int
    triton: str
    date: str
    coefficients: Coefficients
    lines: dict[Key, dict[int, str]]  # of the widths, as they are in the file
    skipped: int = 0  # lines of the file that this release cannot read

    def lookup(self, problem: NormProblem) -> list[tuple[int, Ranges, str]]:
        """The line of the problem's width, or else those of the nearest widths that are not far. If the table does
        not know what is unlike x of the problem, lines of what is like x answer. They do not for a forward that holds
        wide rows, or a backward by key: their plans are unlike all others (bench/NOTES.md, Forms)."""
        key = self.unlike_x(problem)
        if not key and not (problem.by_key or problem.quantities["holds_wide"]):
            key = self._like(Key.of(problem))
        return [self.parsed(line) for line in self._lines(key, problem.cols)] if key else []

    def parsed(self, line: str) -> tuple[int, Ranges, str]:
        """The width of a line, its ranges, and its date."""
        cols, plans, *day = json.loads(line)
        return cols, tuple((most or math.inf, text) for most, text in plans), (day or [self.date])[0]

    def unlike_x(self, problem: NormProblem) -> Key | None:
        """The first key with a near width: of all that is unlike x of the problem, without its parameters, without its
        rows, or without parameters and tables, if it has tables. None if none has one, or nothing is unlike x."""
        key, holds_wide = Key.of(problem), problem.quantities["holds_wide"]
        ways = key, key if holds_wide else key._replace(parameters=0), key._replace(rows=0)
        ways = (*ways, key._replace(parameters=0, tables=0)) if problem.tables else ways
        unlike_x = (each for each in ways if any(each[-4:]))  # parameters, rows, tables or again
        return next((each for each in unlike_x if self._lines(each, problem.cols)), None)

    def _like(self, key: Key) -> Key:
        """The key of parameters and rows like x with the nearest traffic, which is the problem's own if the table has
        it: by its large tensors, of which those that are written count more, then by sums and rows that samples share.
        A backward without dx, which writes no large tensor, is unlike all others."""
        key = key._replace(parameters=0, rows=0, tables=0, again=0)

        def distance(each: Key) -> tuple[int, int, int]:
            read, written, sums, shared = (abs(a - b) for a, b in zip(each.traffic, key.traffic, strict=True))
            return read + written, written, sums + shared

        alike = [each for each in self.lines if key.traffic[1] and each._replace(traffic=key.traffic) == key]
        return min(alike, key=distance, default=key)

    def _lines(self, key: Key, cols: int) -> list[str]:
        """The line of the width, or else those of near ones, the nearest first. Near is what is not far."""
        far = {width: abs(math.log2(width / cols)) for width in self.lines.get(key, ())}
        nearest = sorted(far, key=far.__getitem__)[: 1 if cols in far else limits.most_near_widths]
        return [self.lines[key][width] for width in nearest if far[width] <= limits.most_distance]


def read(path: Path, is_known: Callable[[str], bool] = bool) -> Table | str | None:
    """The table of a file, without widths that are not known; or why it is none, in one sentence; None: no file."""
    try:
        first, *rest = path.expanduser().read_text().splitlines()
        head, widths, skipped = json.loads(first), None, 0
        if (form := head.pop("format")) != FORMAT:
            return f"{path} has format {form}, and this release reads format {FORMAT}"
        lines: dict[Key, dict[int, str]] = {}
        for line in rest:
            if line.startswith("{"):
                known = json.loads(line).items()
                key = Key(**{name: tuple(value) if isinstance(value, list) else value for name, value in known})
                widths = lines.setdefault(key, {})
            elif is_known(line):
                widths[int(line[1 : line.index(",")])] = line
            else:
                skipped += 1
        return Table(**head | {"coefficients": Coefficients(**head["coefficients"])}, lines=lines, skipped=skipped)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None if isinstance(error, FileNotFoundError) else f"{path} is no table of plans: {error!r}"


@functools.cache
def shipped() -> tuple[Table, ...]:
    return tuple(read(path) for path in sorted(limits.DATA.glob("*.jsonl")))


def user_file(gpu: str) -> Path:
    """Where `tune` writes the table of a GPU. The home is not looked for: there may be none."""
    return Path("~", ".cache", "fusednorm", "plans", re.sub("[^a-z0-9]+", "-", gpu.lower()) + ".jsonl")


@functools.cache
def of_user(gpu: str) -> Table | str | None:
    """The user's table of a GPU, without lines of another release, or why its file cannot be used; None: no file."""
    path = user_file(gpu)
    table = read(path, _is_known)
    return f"{path} was measured on {table.gpu}" if isinstance(table, Table) and table.gpu != gpu else table


def _is_known(line: str) -> bool:
    """Whether the line of a width has plans of this release alone."""
    try:
        _, plans, *_ = json.loads(line)
        return plans[-1][0] is None and all(from_text(text) for _, text in plans)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError):
        return False


def of_device(device: DeviceSpec, problem: NormProblem | None = None) -> Iterator[Table]:
    """The tables of a GPU, the first the one that decides: the user's, and that of its name, or else another of its
    capability. One that knows what is unlike x of the problem comes before one that does not."""
    if isinstance(own := of_user(device.name), Table):
        yield own
    alike = [each for each in shipped() if each.arch == device.arch]
    alike.sort(key=lambda each: device.name not in each.gpu and each.gpu not in device.name)
    yield from sorted(alike, key=lambda each: problem is not None and not each.unlike_x(problem))[:1]


def coefficients(device: DeviceSpec) -> Coefficients:
    """Those that were fitted on this GPU, or else on the one that is shipped first."""
    return next(of_device(device), shipped()[0]).coefficients
