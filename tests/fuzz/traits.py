"""What a call is of: the progress file counts calls by it, so that a note can say what was tried."""

from __future__ import annotations

import math
from typing import Any

from .draw import Call
from .others import COLUMN_SUM, OtherCall

WIDTHS = ((8193, "more than 8,192"), (65537, "more than 65,536"))


def traits(call: Call | OtherCall) -> dict[str, list[str]]:
    """By kind of trait."""
    setting, dtypes = call.setting, {name: each for name, each in call.dtypes.items() if each}
    of = {
        "op": [call.op],
        "variant": [call.variant or "by the planner"],
        "dtype of x": [str(call.dtypes["x"]).removeprefix("torch.")],
        "dtypes": ["one" if len({*dtypes.values()}) == 1 else "several"],
        "values": sorted({*call.values.values()}) if isinstance(call, Call) else [call.values],
        "layout": sorted({*call.layouts.values()}) if isinstance(call, Call) else [call.layout],
        "columns": columns(call.cols),
        "rows": ["none" if not call.rows else "one" if call.rows == 1 else "several"],
        "mode": [call.mode],
        "sm_margin": [str(call.margin)],
        "rounding": [rounding(call.given)],
        "batch_invariant": ["no" if setting is None else "of rows" if setting < 0 else "with ordered sums"],
    }
    if isinstance(call, OtherCall) and call.op != COLUMN_SUM:
        of["heads"] = ["normalized as a whole" if call.whole else "normalized each"]
    return of


def rounding(given: dict[str, Any]) -> str:
    return next((name for name in ("x_hat", "steps") if given.get(f"rounds_{name}")), "once")


def columns(cols: int) -> list[str]:
    kinds = {
        "none": cols == 0,
        "a power of two": cols and cols & (cols - 1) == 0,
        "odd": cols % 2,
        "prime": cols > 1 and all(cols % each for each in range(2, math.isqrt(cols) + 1)),
        "even, no multiple of 8": cols % 2 == 0 and cols % 8,
    }
    kinds |= {text: cols >= least for least, text in WIDTHS}
    return [kind for kind, holds in kinds.items() if holds]
