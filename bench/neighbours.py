"""Tables of norms and what stands around them: the forms, and what torch.compile makes of both."""

from __future__ import annotations

from .records import by_day
from .tables import NAMES, microseconds, records_of, source, table
from .zoo.models import MODELS

TITLES = {name: model.title for name, model in MODELS.items()}
FORM_WAYS = ("forward", "backward", "both")
PEERS = ("inductor", "liger", "fla")
FORM_CANDIDATES = {"ours": "ours", "plain": "the norm alone", **{name: NAMES[name] for name in PEERS}}


def forms(gpu: str) -> str:
    """Times over the floor of each form and shape: forward, backward, both."""
    found = {
        (r["norm"], r["form"], r["rows"], r["cols"], r["direction"], r["candidate"]): r
        for r in records_of("forms", gpu)
        if r.get("median_us")
    }
    header = ["norm and form", "rows x cols", *FORM_CANDIDATES.values()]
    lines = []
    for norm, form, rows, cols in dict.fromkeys(key[:4] for key in found):
        line = [f"{NAMES[norm]} {form}", f"{rows}x{cols}"]
        for name in FORM_CANDIDATES:
            times = [found.get((norm, form, rows, cols, way, name)) for way in FORM_WAYS]
            line.append(", ".join(f"{each['times_floor']:.2f}" for each in times if each))
        lines.append(line)
    return table(header, lines)


def sources(tool: str, gpu: str) -> list[str]:
    """A line for each day of the tool's records."""
    return [source(tool, records, gpu) for records in by_day(records_of(tool, gpu)).values()]


def compiled_cases(gpu: str) -> dict[str, tuple[dict, dict]]:
    """The newest times of each case of bench.graphs: its title -> stock, ours."""
    found: dict[tuple, dict[str, dict]] = {}
    for each in records_of("graphs", gpu):
        if "median_us" in each:
            found.setdefault((each["case"], each["date"]), {})[each["way"]] = each
    # Until 2026-11-27 the norms written by hand were found in a third way only.
    pairs = {case: (ways.get("stock"), ways.get("written", ways.get("ours"))) for (case, _), ways in found.items()}
    return {TITLES.get(case, case): pair for case, pair in pairs.items() if all(pair)}


def compiled(gpu: str) -> str:
    """Forward and backward by stock Inductor and under enable_inductor(), and who runs the backwards of the norms."""
    lines = []
    for case, (stock, ours) in compiled_cases(gpu).items():
        backwards = [(int(line.split(" x ")[0]), line) for line in ours["norms"] if " backward " in line]
        taken = sum(count for count, line in backwards if ": fusednorm (" in line)
        times = (microseconds(each["median_us"]) for each in (stock, ours))
        total = sum(count for count, _ in backwards)
        plain = "" if ours.get("graph", True) else ", not captured"
        lines.append([case + plain, *times, f"{ours['times_stock']:.3f}", f"{taken} of {total}"])
    return table(["case", "stock, us", "enable_inductor, us", "ratio", "backwards by our ops"], lines)
