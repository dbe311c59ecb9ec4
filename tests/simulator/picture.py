"""Draws a run: time from left to right, a lane for every warp and for every mbarrier of a ring's stages."""

from __future__ import annotations

import re
from collections import Counter

from .copies import LATENCY
from .recording import OTHERS, WAITS, Recording, Span, Transfer

MAX_WARPS = 24
LANE_INCHES, WIDTH_INCHES = 0.26, 12.0
COLORS = ("#2f6db3", "#e8853a", "#4b9b58", "#c44e52", "#8566ab", "#7c5d4c", "#d483b9", "#b5a53a", "#45a8b5")
WAITING, OTHER, COPY, TILE = "#e6e6e6", "#a9a9a9", "#31475e", "#c3d3e4"


def draw(recording: Recording, title: str, path: str) -> None:
    """Writes the picture of a recorded run to `path`, in the format of its ending (.png, .svg ...)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    lanes = _warps(recording.finished())
    spans = [span for span in recording.finished() if span.who in lanes]
    stages = _stages(recording.transfers)
    busiest = Counter()
    for span in spans:
        busiest[span.what] += (span.what not in (WAITS, OTHERS)) * (span.end - span.start)
    parts = [part for part, time in busiest.most_common(len(COLORS)) if time]
    colors = dict(zip(parts, COLORS, strict=False)) | {WAITS: WAITING, OTHERS: OTHER}
    height = LANE_INCHES * (len(lanes) + len(stages) + 5)
    figure, axes = pyplot.subplots(figsize=(WIDTH_INCHES, height), layout="constrained")
    for span in spans:
        inset = 0.3 if span.what == WAITS else 0.08
        _bar(axes, lanes.index(span.who), inset, span.start, span.end, colors.get(span.what, OTHER))
    for row, transfers in enumerate(stages.values(), len(lanes)):
        for now, after in zip(transfers, [*transfers[1:], None], strict=True):
            until = after.issued if after else max(span.end for span in spans)
            _bar(axes, row, 0.3, now.landed, until, TILE)
            _bar(axes, row, 0.08, now.issued, now.landed, COPY)
    axes.set_yticks([n + 0.5 for n in range(len(lanes) + len(stages))], [*lanes, *stages], fontsize=8)
    axes.set_ylim(len(lanes) + len(stages), 0)
    lasts = " and ".join(f"a {kind} copy lasts as long as {count}" for kind, count in LATENCY.items())
    axes.set_xlabel(f"instructions of a warp, if {lasts}", fontsize=9)
    axes.set_title(title, fontsize=11, loc="left")
    axes.margins(x=0.005)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    copies = {"copy under way": COPY, "tile in its stage": TILE} if stages else {}
    legend = [Patch(color=color, label=part) for part, color in (colors | copies).items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bar(axes, row: int, inset: float, start: int, end: int, color) -> None:
    axes.broken_barh([(start, end - start)], (row + inset, 1 - 2 * inset), color=color, linewidth=0)


def _cta(who: str) -> str:
    return who.split(" of ", 1)[1]


def _warps(spans: list[Span]) -> list[str]:
    """The warps that get a lane, in order: those of the first CTA, then warp 0 of some other CTAs, last warp 0 of up to
    two CTAs of later launches."""

    def key(who: str) -> tuple:
        warp, cta, *_ = map(int, re.findall(r"\d+", who))
        return who.count(" of "), cta, warp

    names = sorted({span.who for span in spans}, key=key)
    first = [who for who in names if _cta(who) == _cta(names[0])][:MAX_WARPS]
    leaders = [who for who in names if who.startswith("warp 0 ") and who not in first]
    later = [who for who in leaders if who.count(" of ") > 1][:2]
    same = [who for who in leaders if who.count(" of ") == 1][: max(1, MAX_WARPS // 2 - len(first) - len(later))]
    return first + same + later


def _stages(transfers: list[Transfer]) -> dict[str, list[Transfer]]:
    """The TMA copies to the first CTA, by the mbarrier on which they complete, in the order of its first use. In one
    stage, the copies of x and dy may complete on different mbarriers."""
    found: dict[int, list[Transfer]] = {}
    for each in sorted(transfers, key=lambda each: each.issued):
        if each.cta == min(transfers, key=lambda each: each.issued).cta:
            found.setdefault(each.barrier, []).append(each)
    return {f"copies on mbarrier {n}": each for n, each in enumerate(found.values())}
