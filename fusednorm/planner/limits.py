"""Numbers that were measured, published or estimated: limits.NAME. data/limits.json has each, with its unit and its
reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def read(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


def __getattr__(name: str) -> Any:
    """The first use of a limit makes all of them attributes of this module."""
    known = {each: value for each, (value, _) in read("limits").items()}
    if name not in known:
        raise AttributeError(f"limits.json has no {name}")
    globals().update(known)
    return known[name]
