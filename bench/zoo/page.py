"""What the page of results shows of the zoo: a table and a picture of each model's newest steps."""

from __future__ import annotations

from pathlib import Path

from ..records import RESULTS, rows_of
from ..tables import GPUS, source, table
from .models import MODELS

PICTURE = RESULTS / "zoo.png"
# The ways that are shown, with a colour; the first is what the others are compared with.
WAYS = {("eager", "stock"): "#6c757d", ("eager", "patch_model"): "#c1121f", ("eager", "enable_eager"): "#f08a8f",
        ("eager", "hub"): "#e5989b", ("eager", "liger"): "#9d4edd", ("compiled", "stock"): "#e09f3e",
        ("compiled", "enable_inductor"): "#2a9d8f", ("compiled", "patch_model"): "#3a6ea5"}  # fmt: skip
ASKED_FOR = {f"enable_inductor {join}" for join in ("modulated", "gated", "all")}
TITLE = """## Steps of models

Milliseconds of a training step (forward, loss, backward, fused AdamW; bf16) of transformers' and diffusers' own classes
at true width, in few layers with an equal share of the vocabulary, without the last norm. In parentheses the speed over
stock norms in eager mode, a mean over the rounds. `bench/zoo/models.py` says what else is smaller than in the whole
model."""


def records_of_gpus() -> dict[str, list[dict]]:
    """GPU -> records; of the GPUs that have some."""
    paths = {gpu: RESULTS / folder / "zoo.jsonl" for gpu, folder in GPUS.items()}
    return {gpu: rows_of([path]) for gpu, path in paths.items() if path.exists()}


def steps_of(records: list[dict]) -> dict[str, dict[tuple[str, str], dict]]:
    """The newest step of each model and way that has a time: title -> (way, norms) -> record. Machines differ, so ways
    that were timed before the newest stock norms in eager mode are left out."""
    models: dict[str, dict[tuple[str, str], dict]] = {}
    for each in sorted(records, key=lambda each: list(MODELS).index(each["model"])):
        if each.get("median_ms"):
            # Until 2026-11-29 what enable_inductor joins now had to be asked for.
            norms = "enable_inductor" if each["norms"] in ASKED_FOR else each["norms"]
            way, ways = (each["way"], norms), models.setdefault(each["title"], {})
            if way == next(iter(WAYS)):
                ways.clear()
            ways[way] = each
    return models


def rows(records: list[dict]) -> list[list[str]]:
    return [[title, *(_text(ways.get(way)) for way in WAYS)] for title, ways in steps_of(records).items()]


def _text(record: dict | None) -> str:
    if record is None:
        return ""
    ratio = f" ({record['over_eager'][0]:.2f}x)" if record.get("over_eager") else ""
    return f"{record['median_ms']:.1f}" + ("" if (record["way"], record["norms"]) == next(iter(WAYS)) else ratio)


def compared(records: list[dict]) -> dict[str, dict[tuple[str, str], dict]]:
    """`steps_of` the models that also ran with stock norms in eager mode."""
    return {title: ways for title, ways in steps_of(records).items() if next(iter(WAYS)) in ways}


def on_front() -> list[dict]:
    """The records that README and the picture show: those of the GPU with the most models."""
    return max(records_of_gpus().values(), key=lambda records: len(compared(records)), default=[])


def front() -> str:
    """For README: ours beside what one has without us."""
    shown = [("eager", "stock"), ("eager", "patch_model"), ("compiled", "stock"), ("compiled", "enable_inductor")]
    lines = [[title, *(_text(ways.get(way)) for way in shown)] for title, ways in compared(on_front()).items()]
    return table(["ms per step", *(" ".join(way) for way in shown)], lines)


def gains() -> list[float]:
    """Speed with patch_model over stock norms, both in eager mode, of transformers' models: the least and the most."""
    records = [each for each in on_front() if MODELS[each["model"]].library == "transformers"]
    found = [ways["eager", "patch_model"]["over_eager"][0] for ways in compared(records).values()]
    return [min(found), max(found)]


def section() -> list[str]:
    """The parts of the page; none without records."""
    found = records_of_gpus()
    parts = [TITLE, f"![Speed over stock norms]({PICTURE.relative_to(RESULTS.parent)})"] if found else []
    for gpu, records in found.items():
        timed = [record for record in records if record.get("median_ms")]
        versions = f"{source('zoo', timed, gpu)[:-1]}, transformers {timed[-1]['transformers']}."
        parts += [table(["model", *(" ".join(way) for way in WAYS)], rows(records)), versions]
    return parts


def draw(records: list[dict], path: Path) -> None:
    """Bars for each model: the speed of its ways over stock norms in eager mode."""
    from matplotlib.figure import Figure

    models = {
        title: {way: each["over_eager"] for way, each in ways.items() if each.get("over_eager")}
        for title, ways in compared(records).items()
    }
    shown = [way for way in list(WAYS)[1:] if any(way in ways for ways in models.values())]
    figure = Figure(figsize=(max(7, 0.9 * len(models) + 1), 4.2), layout="constrained")
    axis, width = figure.subplots(), 0.84 / max(1, len(shown))
    for at, way in enumerate(shown):
        found = [(place, *ways[way]) for place, ways in enumerate(models.values()) if way in ways]
        places = [place + width * (at - (len(shown) - 1) / 2) for place, *_ in found]
        deviations = [error or 0 for *_, error in found]
        heights = [ratio - 1 for _, ratio, _ in found]
        axis.bar(places, heights, width, bottom=1, yerr=deviations, color=WAYS[way], label=" ".join(way))
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(models)), [title.replace(" ", "\n", 1) for title in models], fontsize=8)
    axis.set_ylabel("speed over eager stock norms\n(higher is better)")
    axis.set_title(f"Training steps, bf16, {records[-1]['gpu']}")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
