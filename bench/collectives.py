"""Tables and numbers of docs/many-gpus.md, made from the records of bench.beside and bench.bench_sharded_step on two
H100s."""

from __future__ import annotations

from functools import cache

from .candidates import OURS
from .tables import NAMES, microseconds, newest_day, records_of, table

GPU, MARGIN = "H100", 16
COLLECTIVES = ("all_gather", "reduce_scatter")
LINKS = {True: "NVLink", False: "shared memory"}


@cache
def times(mode: str = "eager") -> dict[tuple, float]:
    """(through NVLink, norm, rows, cols, candidate, company, margin) -> us of a backward."""
    return {
        (r["nccl_p2p"], r["norm"], r["rows"], r["cols"], r["candidate"], r["company"], r["sm_margin"]): r["median_us"]
        for r in newest_day("beside-collectives", GPU)
        if r["mode"] == mode
    }


def cells() -> list[tuple]:
    """(through NVLink, norm, rows, cols)"""
    return list(dict.fromkeys(key[:4] for key in times()))


def slowdowns(cell: tuple, margin: int = 0) -> list[float]:
    """Our time beside each collective, as a multiple of the time alone without a margin."""
    found = times()
    return [found[(*cell, OURS, company, margin)] / found[(*cell, OURS, "alone", 0)] for company in COLLECTIVES]


def ratios(cell: tuple, peer: str) -> list[float]:
    """The peer's time beside each collective, divided by ours; nothing if it was not timed."""
    found = times()
    return [
        found[(*cell, peer, company, 0)] / found[(*cell, OURS, company, 0)]
        for company in COLLECTIVES
        if (*cell, peer, company, 0) in found
    ]


def beside() -> str:
    header = ["backward", "ours alone", "beside", f"with margin {MARGIN}", "ATen / ours, beside", "cuDNN / ours"]
    lines = []
    for cell in cells():
        through, norm, rows, cols = cell
        line = [f"{LINKS[through]}, {NAMES[norm]} {rows}x{cols}", microseconds(times()[(*cell, OURS, "alone", 0)])]
        found = [slowdowns(cell), slowdowns(cell, MARGIN), ratios(cell, "aten"), ratios(cell, "cudnn")]
        lines.append([*line, *(", ".join(f"{ratio:.2f}" for ratio in each) for each in found)])
    return table(header, lines)


def steps() -> dict[tuple, dict]:
    """(model, width, tokens, way, norms) -> the newest record of a training step under FSDP2."""
    return {
        (r["model"], r["width"], r["tokens"], r["way"], r["norms"]): r for r in records_of("sharded-step", GPU)
    }  # fmt: skip


def sharded_steps() -> str:
    found = steps()
    lines = []
    for model, width, tokens in sorted({key[:3] for key in found}):
        line = [f"{NAMES[model]} {tokens} x {width}"]
        for way, norms in (("eager", ("enable_eager", "patch_model")), ("compiled", ("enable_inductor",))):
            line.append(f"{found[model, width, tokens, way, 'stock']['median_ms']:.1f}")
            line += [_speed(found[model, width, tokens, way, each]) for each in norms]
        lines.append(line)
    header = ["tokens of a rank x width", "eager, stock", "`enable_eager`", "`patch_model`", "compiled, stock"]
    return table([*header, "`enable_inductor`"], lines)


def _speed(record: dict) -> str:
    digits = 3 if record["speedup_error"] < 0.0095 else 2
    return f"{record['speedup']:.{digits}f} ± {record['speedup_error']:.{digits}f}"


def step_changes() -> list[float]:
    """By how much our medians are longer than stock's of the same day and way."""
    found = steps()
    return [
        each["median_ms"] / found[(*key[:4], "stock")]["median_ms"] - 1
        for key, each in found.items()
        if key[4] != "stock"
    ]
