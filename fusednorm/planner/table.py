"""Tables: which family of plans was the fastest, measured on one GPU, by problem, columns and rows per SM.

A table is a file of JSON lines. The first says what it was measured on, by which releases and when, and has the
coefficients that were fitted (model.py). Each other line is a width: the plans in order of rows, each up to a number of
rows per SM, the last without end. `python -m fusednorm tune` writes a table, and data/ has those that are shipped.

A problem without a line of its own takes that of the nearest width that TMA copies by pieces as long; without such a
width, that of a problem with other traffic.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .candidates import Family
from .device import DeviceSpec
from .model import Coefficients
from .norm_problem import NormProblem

SHIPPED = Path(__file__).parent / "data"
FORMAT = 1
MOST_DISTANCE = 1.0  # octaves to a width that answers for another
MOST_NEIGHBOURS = 3
LONG_PIECE = 64  # bytes; rows that TMA copies by longer pieces are alike

Ranges = tuple[tuple[float, Family], ...]  # (most rows per SM, family), ascending


class Key(NamedTuple):
    """What problems have in common whose widths answer for one another."""

    norm: str
    direction: str
    itemsizes: tuple[int, ...]  # of x, in a backward also of its gradient
    piece: int  # bytes that TMA copies at once, up to LONG_PIECE; 0 if it cannot
    traffic: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, problem: NormProblem) -> Key:
        itemsizes = tuple(dtype.itemsize for dtype in (problem.x_dtype, problem.grad_dtype) if dtype is not None)
        piece = math.gcd(problem.cols * itemsizes[0], LONG_PIECE) if problem.tma_aligned else 0
        return cls(problem.norm, problem.direction, itemsizes, piece, problem.traffic)


@dataclass(frozen=True, eq=False)
class Table:
    gpu: str
    arch: int
    triton: str
    date: str
    coefficients: Coefficients
    widths: dict[Key, dict[int, Ranges]]

    def lookup(self, problem: NormProblem) -> list[tuple[int, Ranges]]:
        """(columns, ranges) of the problem's width alone, or of the nearest ones, the nearest first; empty if there are
        none."""
        key = Key.of(problem)
        widths = self.widths.get(key) or self.widths.get(key._replace(traffic=None), {})
        if problem.cols in widths:
            return [(problem.cols, widths[problem.cols])]
        far = {cols: abs(math.log2(cols / problem.cols)) for cols in widths}
        near = sorted((distance, cols) for cols, distance in far.items() if distance <= MOST_DISTANCE)
        return [(cols, widths[cols]) for _, cols in near[:MOST_NEIGHBOURS]]


class Unreadable(Exception):  # noqa: N818  a reason, not a fault of the caller
    """str() says in one sentence why a file is no table."""


def write(path: Path, head: dict, lines: Iterable[dict]) -> None:
    """Replaces the file at once, so that nobody reads half of one."""
    text = "\n".join(json.dumps(line) for line in [{"format": FORMAT} | head, *lines]) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def line_of(key: Key, cols: int, ranges: Ranges) -> dict:
    plans = [[None if most == math.inf else most, " ".join(str(int(v)) if i else v for i, v in enumerate(family))]
             for most, family in ranges]  # fmt: skip
    return key._asdict() | {"cols": cols, "plans": plans}


def read(path: Path) -> Table:
    """Raises Unreadable."""
    try:
        head, *lines = map(json.loads, path.read_text().splitlines())
        if head["format"] != FORMAT:
            raise Unreadable(f"{path} has format {head['format']}, and this release reads format {FORMAT}")
        widths: dict[Key, dict[int, Ranges]] = {}
        for line in lines:
            traffic = tuple(line["traffic"])
            key = Key(line["norm"], line["direction"], tuple(line["itemsizes"]), line["piece"], traffic)
            ranges = tuple((math.inf if most is None else most, _family(text)) for most, text in line["plans"])
            widths.setdefault(key, {})[line["cols"]] = ranges
            widths.setdefault(key._replace(traffic=None), {}).setdefault(line["cols"], ranges)
        names = ("gpu", "arch", "triton", "date")
        return Table(*(head[name] for name in names), Coefficients(**head["coefficients"]), widths)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{path} is no table of plans: {type(error).__name__}: {error}") from error


@functools.lru_cache(maxsize=1024)
def _family(text: str) -> Family:
    kernel, *numbers = text.split()
    *sizes, short_lived, in_smem = map(int, numbers)
    return Family(kernel, *sizes, bool(short_lived), bool(in_smem))


@functools.cache
def shipped() -> tuple[Table, ...]:
    return tuple(read(path) for path in sorted(SHIPPED.glob("*.jsonl")))


def user_file(gpu: str) -> Path:
    """Where `tune` writes the table of a GPU."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "fusednorm", "plans", f"{re.sub('[^a-z0-9]+', '-', gpu.lower())}.jsonl")


@functools.cache
def of_user(gpu: str) -> Table | str | None:
    """The user's table of a GPU, or why its file cannot be used; None if there is none."""
    path = user_file(gpu)
    if not path.exists():
        return None
    try:
        table = read(path)
    except Unreadable as why:
        return str(why)
    return table if table.gpu == gpu else f"{path} was measured on {table.gpu}"


def of_device(device: DeviceSpec) -> Iterator[Table]:
    """The tables of a GPU, the first the one that decides: the user's, that of its name, others of its capability."""
    own = of_user(device.name)
    if isinstance(own, Table):
        yield own
    yield from sorted(
        (each for each in shipped() if each.arch == device.arch), key=lambda each: not _is_of(each, device)
    )


def _is_of(table: Table, device: DeviceSpec) -> bool:
    return device.name in table.gpu or table.gpu in device.name
