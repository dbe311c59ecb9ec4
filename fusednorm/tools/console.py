"""Tables and progress bars for the commands. Without tqdm there is no bar, and one sentence about it."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType


@functools.cache
def optional(module: str, extra: str, otherwise: str) -> ModuleType | None:
    """The module; None if it is not installed, after printing once what is missing without it and how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        name = module.partition(".")[0]
        print(f"{name} is not installed, so {otherwise}: pip install 'fusednorm[{extra}]' brings it.")
        return None


def progress(items: Iterable, description: str, extra: str) -> Iterable:
    """`items` behind a progress bar, or `items` itself without tqdm. `show_beside` takes either."""
    tqdm = optional("tqdm", extra, "there is no progress bar")
    if tqdm is None:
        return items
    interval = 0.1 if sys.stderr.isatty() else 10.0  # seconds; a log file gets few lines
    return tqdm.tqdm(items, desc=description, ncols=100, leave=False, mininterval=interval)


def show_beside(bar: Iterable, text: str) -> None:
    """Show `text` beside a bar that `progress` returned."""
    if hasattr(bar, "set_postfix_str"):
        bar.set_postfix_str(text, refresh=False)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of text cells, with the first column flush left and the others flush right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    aligns = [str.ljust] + [str.rjust] * (len(header) - 1)
    cells = ([align(*pair) for align, *pair in zip(aligns, line, widths, strict=True)] for line in lines)
    print("\n".join(["", title, *("  ".join(line).rstrip() for line in cells)]))
