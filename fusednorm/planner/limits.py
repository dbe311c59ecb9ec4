"""Numbers that were measured, published or estimated: limits.NAME. data/limits.json has each, with its unit and its
reason. One that depends on a problem, a device or a plan is an expression; `value_of` asks for it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import CodeType
from typing import Any

DATA = Path(__file__).parent / "data"
BUILTINS = {"max": max, "min": min}


@functools.cache
def read(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


@functools.cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "data", "eval")


def value_of(expression: str, known: dict[str, Any], more: dict[str, Any] | None = None) -> Any:
    """Of a Python expression of this package's data, in which names stand for quantities: those of `more`, or else of
    `known`, which gets max and min, too."""
    known.setdefault("__builtins__", BUILTINS)
    return eval(_compiled(expression), known, more)


def __getattr__(name: str) -> Any:
    """The first use of a limit makes all of them attributes of this module."""
    known = {each: value for each, (value, _) in read("limits").items()}
    if name not in known:
        raise AttributeError(f"limits.json has no {name}")
    globals().update(known)
    return known[name]
